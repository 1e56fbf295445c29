"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit numbers with one scale.

The scale is a power of two. gpt-oss is published in MXFP4. Its weights run in the model's dtype.
bfloat16 and float32 hold every value exactly, at 16 or 32 bits instead of 4.25.

Letters: X matrices, G blocks of a row, B bytes of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported
from quire.contracts.weights import StoredTensor

BLOCK = 32
"""Numbers that share a scale."""
BLOCK_BYTES = 16
"""Bytes of a block's numbers: two in a byte, the low half first."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by the lower three bits; the fourth bit is the sign (E2M1)."""
SCALE_BIAS = 127
"""A scale byte s means ``2 ** (s - 127)`` (E8M0)."""
MAX_SCALE = 252
"""The largest scale byte that keeps 6, the largest number, finite in float32; 255 is NaN."""
BYTES = ("U8",)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Two tensors: ``NAME_blocks`` ``[X, ..., G, 16]`` and ``NAME_scales`` ``[X, ..., G]``."""

    name: str = "mxfp4"
    is_plain: bool = False

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        *rows, columns = shape
        blocks = (*rows, columns // BLOCK)
        return {
            name: StoredTensor(shape=(*blocks, BLOCK_BYTES), dtypes=BYTES),
            f"{name.removesuffix('_blocks')}_scales": StoredTensor(shape=blocks, dtypes=BYTES),
        }

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """See ``WeightFormat``. One matrix at a time, as the copies are several times as large."""
        blocks_XGB, scales_XG = stored.values()
        signed = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)], device=out.device)
        # Both numbers of each possible byte.
        pairs = torch.stack((signed.repeat(16), signed.repeat_interleave(16)), -1)
        for blocks, scales, target in zip(blocks_XGB, scales_XG, out, strict=True):
            scales = scales.to(out.device)
            if scales.numel() and int(scales.max()) > MAX_SCALE:
                raise CheckpointError(f"{name} has a scale byte of {int(scales.max())}; expected at most {MAX_SCALE}")
            numbers = pairs.index_select(0, blocks.to(out.device).flatten().int()).view(*scales.shape, BLOCK)
            values = torch.ldexp(numbers, (scales.int() - SCALE_BIAS).unsqueeze(-1)).view_as(target)
            target.copy_(values)
            if target.dtype == torch.float16 and not torch.equal(target.float(), values):
                raise Unsupported(f"{name} has values that float16 does not hold; expected dtype bfloat16 or float32")


MXFP4 = Mxfp4()
