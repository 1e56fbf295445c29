"""Weights in 8-bit floats (float8_e4m3fn) with scales: one of a tensor, of each row, or of each
block of rows and columns.

DeepSeek V3 and Qwen3-FP8 are published with blocks of 128 by 128, whose scales are named
``weight_scale_inv`` although they multiply. Letters: O rows, I columns; m, n sizes of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported
from quire.contracts.linear import CodeRows
from quire.contracts.weights import StoredTensor
from quire.weights.scales import SCALES, Shape, check_finite, parts, whole, write

FLOAT8 = ("F8_E4M3",)
POWERS = ("F8_E8M0", "U8")
"""Element types of scales that are a byte b for ``2 ** (b - 127)``."""


@dataclass(frozen=True, slots=True)
class ScaledFloat8:
    """``NAME`` ``[O, I]`` and its scales, ``NAME`` + ``suffix``."""

    suffix: str
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: a scale for all weights or for each row."""
    rounds: bool = False
    """Whether a value is rounded to the element type of the scales, as compressed-tensors does."""
    is_plain: bool = False

    @property
    def name(self) -> str:
        """See ``WeightFormat``."""
        return "float8" if self.block is None else f"float8 {self.block[0]}x{self.block[1]}"

    def stored(self, name: str, shape: Shape) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        rows, columns = matrix(self.name, name, shape)
        found: tuple[Shape, ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
        if self.block is not None:
            found = ((whole(rows, self.block[0]), whole(columns, self.block[1])),)
        return {
            name: StoredTensor(shape=shape, dtypes=FLOAT8),
            f"{name}{self.suffix}": StoredTensor(shape=found[-1], dtypes=(*SCALES, *POWERS), others=found[:-1]),
        }

    @property
    def bits(self) -> int:
        """See ``CodedFormat``."""
        return 8

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """See ``WeightFormat``."""
        codes_OI, scales = self._read(name, stored)
        kind = scales.dtype if self.rounds else torch.float32
        rows, columns = codes_OI.shape
        height, width = self._sizes(scales, rows, columns)
        scales = scales.to(kind).reshape(whole(rows, height), -1).repeat_interleave(width, 1)[:, :columns]
        for some in parts(rows, columns, height):
            shares = scales[some.start // height : whole(some.stop, height)]
            values = codes_OI[some].to(kind) * shares.repeat_interleave(height, 0)[: some.stop - some.start]
            write(name, values, out[some])

    def code_rows(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> CodeRows | None:
        """See ``CodedFormat``."""
        codes_OI, scales = self._read(name, stored)
        rows, columns = shape
        height, width = self._sizes(scales, rows, columns)
        group = math.gcd(width, columns)
        scales_mg = scales.reshape(whole(rows, height), -1).repeat_interleave(width // group, 1)[:, : columns // group]
        return CodeRows(self.bits, group, codes_OI, scales_mg.repeat_interleave(height, 0)[:rows], name=name)

    def _read(self, name: str, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        codes_OI, scales = stored.values()
        if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
            scales = torch.exp2(scales.view(torch.uint8).float() - 127)
        check_finite(name, scales)
        if bool((codes_OI.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(f"{name} has a weight that is no number; the file is damaged")
        return codes_OI, scales

    def _sizes(self, scales: Tensor, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        return self.block or (1 if scales.numel() > 1 else rows, columns)


def matrix(format: str, name: str, shape: Shape) -> tuple[int, int]:
    """Return the sizes of a matrix. ``Unsupported`` for a stack of them or a vector."""
    if len(shape) != 2:
        raise Unsupported(f"{name}: weights of shape {list(shape)} in the format {format} are not read, only matrices")
    return shape[0], shape[1]
