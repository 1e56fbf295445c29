"""Weights in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit numbers that share a power of two.

gpt-oss is published in it. We run such weights in the model's dtype: bfloat16 and float32 hold every value exactly,
so nothing is lost but memory (4.25 bits become 16 or 32).

Letters: N rows in all leading dimensions, G blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import CheckpointError, Unsupported

BLOCK = 32
"""Numbers that share a scale."""
BLOCK_BYTES = 16
"""Bytes of a block's numbers: two in a byte, the low half first."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits; the fourth is the sign (E2M1)."""
SCALE_BIAS = 127
"""A scale byte s means ``2 ** (s - 127)`` (E8M0)."""
MAX_SCALE = 252
"""The largest scale byte with which 6, the largest number, is finite in float32; 255 means not a number."""


def unpack(name: str, blocks_NGB: Tensor, scales_NG: Tensor, out: Tensor) -> None:
    """uint8 ``[X, ..., G, 16]`` and ``[X, ..., G]`` into ``out [X, ..., G * 32]`` of any float type, exactly.

    One ``X`` at a time, as the copies on the way are several times as large as the blocks. ``CheckpointError`` for a
    scale that no model can mean, ``Unsupported`` where the type of ``out`` cannot hold a value; ``name`` is for them.
    """
    signed = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)], device=out.device)
    # Both numbers of each possible byte.
    pairs = torch.stack((signed.repeat(16), signed.repeat_interleave(16)), -1)
    for blocks, scales, target in zip(blocks_NGB, scales_NG, out, strict=True):
        scales = scales.to(out.device)
        if scales.numel() and int(scales.max()) > MAX_SCALE:
            raise CheckpointError(f"{name} has a scale byte of {int(scales.max())}; expected at most {MAX_SCALE}")
        numbers = pairs.index_select(0, blocks.to(out.device).flatten().int()).view(*scales.shape, BLOCK)
        values = torch.ldexp(numbers, (scales.int() - SCALE_BIAS).unsqueeze(-1)).view_as(target)
        target.copy_(values)
        if target.dtype == torch.float16 and not torch.equal(target.float(), values):
            raise Unsupported(f"{name} has values that float16 does not hold; expected dtype bfloat16 or float32")
