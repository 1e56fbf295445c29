"""The packed form of 8-bit floats: rows in float8_e4m3fn, with one float32 scale each.

Letters: T rows; O output, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.contracts.linear import PackedMatrix

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """``rounded_rows`` of the weights. Products round the rows of x in the same way."""

    name: Literal["fp8"] = "fp8"
    bits: float = 8.0
    dtype: torch.dtype = FLOAT8

    def group(self, inputs: int) -> int:
        """See ``PackedForm``."""
        return inputs

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """See ``PackedForm``."""
        return outputs, inputs

    def pack(self, weight_OI: Tensor) -> PackedMatrix:
        """See ``PackedForm``."""
        outputs, inputs = weight_OI.shape
        return PackedMatrix(self.name, outputs, inputs, inputs, *rounded_rows(weight_OI))

    def unpack(self, packed: PackedMatrix) -> Tensor:
        """See ``PackedForm``. The values are rounded once."""
        assert packed.scales is not None
        return packed.values.float() * packed.scales


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows ``[T, I]`` in float8_e4m3fn, and float32 ``[T, 1]``: their scales.

    The largest value of a row becomes the largest value of that type.
    """
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / torch.finfo(FLOAT8).max
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    return (wide / scales).to(FLOAT8), scales
