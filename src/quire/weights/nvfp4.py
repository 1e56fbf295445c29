"""NVFP4: floats of 4 bits (E2M1) with a scale in 8 bits (E4M3) for 16 of them, and one float32
number of the tensor, by which all scales are divided or multiplied.

Letters: O rows, I columns; g groups of 16 columns.
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
from quire.weights.gguf_blocks import FP4_VALUES
from quire.weights.scaled_float8 import FLOAT8, matrix
from quire.weights.scales import Shape, parts, write

GROUP = 16
"""Columns that share a scale."""
MOST = 448.0 * 6
"""The largest scale times the largest number."""


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """``NAME`` + ``packed`` uint8 ``[O, I / 2]``, the first of two columns in the low bits,
    ``NAME_scale`` ``[O, g]``, and ``NAME`` + ``unit`` of one float32 number."""

    packed: str
    unit: str
    divides: bool
    """Whether the scales are divided by the number of the tensor, and values are rounded to
    bfloat16, as compressed-tensors does."""
    name: str = "nvfp4"
    is_plain: bool = False

    @property
    def bits(self) -> int:
        """See ``CodedFormat``."""
        return 4

    def stored(self, name: str, shape: Shape) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        rows, columns = matrix(self.name, name, shape)
        if columns % GROUP:
            raise Unsupported(f"{name} has {columns} columns; nvfp4 has a scale for {GROUP}")
        return {
            f"{name}{self.packed}": StoredTensor(shape=(rows, columns // 2), dtypes=("U8",)),
            f"{name}_scale": StoredTensor(shape=(rows, columns // GROUP), dtypes=FLOAT8),
            f"{name}{self.unit}": StoredTensor(shape=(1,), dtypes=("F32",), others=((),)),
        }

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """See ``WeightFormat``."""
        rows, columns = out.shape
        codes_OI, scales_Og, unit = self._read(name, stored)
        numbers = torch.tensor(FP4_VALUES, dtype=torch.float32) / 2
        for some in parts(rows, columns):
            scales = (scales_Og[some].double() * unit).float().unsqueeze(-1)
            values = numbers[_codes(codes_OI[some]).int()].view(-1, columns // GROUP, GROUP) * scales
            write(name, values.bfloat16().flatten(1) if self.divides else values.flatten(1), out[some])

    def code_rows(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> CodeRows | None:
        """See ``CodedFormat``."""
        del shape
        codes_OI, scales_Og, unit = self._read(name, stored)
        return CodeRows(self.bits, GROUP, _codes(codes_OI), scales_Og, name=name, unit=unit)

    def _read(self, name: str, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, float]:
        """Return the packed codes, the scales and what these are multiplied by.

        A quotient of a scale and a float32 number is never closer to the middle of two float32
        numbers than 2^-49 of its size. So the product with the inverse in float64 rounds to the
        same float32 number.
        """
        codes_OI, scales_Og, one = stored.values()
        found = one.item()
        unit = 1 / found if self.divides and found else found
        if not unit or not math.isfinite(float(torch.tensor(unit * MOST, dtype=torch.float32))):
            raise CheckpointError(f"{name} has {found} for all its scales; expected a finite number that is not 0")
        if bool((scales_Og.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(f"{name} has a scale of nan; expected finite scales")
        return codes_OI, scales_Og, unit


def _codes(packed_OB: Tensor) -> Tensor:
    """Return uint8 ``[O, I]``."""
    return torch.stack((packed_OB & 15, packed_OB >> 4), -1).flatten(1)


COMPRESSED_TENSORS = Nvfp4("_packed", "_global_scale", divides=True)
MODELOPT = Nvfp4("", "_scale_2", divides=False)
