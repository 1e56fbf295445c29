"""AWQ: codes of 4 bits in words along the outputs, with a zero and a scale for a group of inputs.

Letters: I inputs, O outputs, g groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.weights import StoredTensor
from quire.weights.code_format import EIGHT, CodeFormat
from quire.weights.scaled_float8 import matrix
from quire.weights.scales import Shape, whole

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from the lowest bits on, of each of eight outputs (the layout "gemm")."""


@dataclass(frozen=True, slots=True)
class Awq(CodeFormat):
    """``NAME.qweight`` int32 ``[I, O / 8]``, ``NAME.qzeros`` int32 ``[g, O / 8]`` and
    ``NAME.scales`` ``[g, O]``."""

    group: int
    """Inputs that share a scale; 0: all."""

    bits: int = 4

    @property
    def name(self) -> str:
        """See ``WeightFormat``."""
        return "awq int4" + (f" group {self.group}" if self.group else "")

    def stored(self, name: str, shape: Shape) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        rows, columns = matrix(self.name, name, shape)
        base, groups = name.removesuffix(".weight"), whole(columns, self.group or columns)
        return {
            f"{base}.qweight": StoredTensor(shape=(columns, whole(rows, EIGHT)), dtypes=("I32",)),
            f"{base}.qzeros": StoredTensor(shape=(groups, whole(rows, EIGHT)), dtypes=("I32",)),
            f"{base}.scales": StoredTensor(shape=(groups, rows), dtypes=("F16", "BF16", "F32")),
        }

    def codes(self, name: str, stored: Mapping[str, Tensor], shape: Shape, groups_I: Tensor, some: slice) -> Tensor:
        words, zeros, _ = stored.values()
        found = words[:, some.start // EIGHT : whole(some.stop, EIGHT)]
        return (_codes(found, some.stop - some.start) - _codes(zeros, shape[0])[:, some][groups_I]).mT


def _codes(words: Tensor, outputs: int) -> Tensor:
    """Return codes int8 ``[.., O]`` of words ``[.., O / 8]``."""
    found = words.contiguous().view(torch.uint8)
    places = torch.stack((found & 15, found >> 4), -1).view(*words.shape, 8)
    return places[..., ORDER].flatten(-2)[..., :outputs].view(torch.int8)
