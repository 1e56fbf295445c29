"""GPTQ: codes in words along the inputs, with a zero and a scale for a group of inputs.

The group of each input may be listed, because activations ordered the inputs (``desc_act``).
Letters: I inputs, O outputs, g groups, W words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.weights import StoredTensor
from quire.weights.code_format import CodeFormat
from quire.weights.scaled_float8 import matrix
from quire.weights.scales import Shape, whole


@dataclass(frozen=True, slots=True)
class Gptq(CodeFormat):
    """``NAME.qweight`` int32 ``[W, O]``, ``NAME.qzeros`` int32 ``[g, W]``, ``NAME.scales``
    ``[g, O]`` and perhaps ``NAME.g_idx`` ``[I]``."""

    bits: int
    """2, 4 or 8"""
    group: int
    """Inputs that share a scale; 0: all."""
    zeros_less_one: bool = True
    """Whether zeros are stored less 1 (the format "gptq"; "gptq_v2" has them as they are). The word
    was made by one subtraction, as by GPTQModel, so that a zero of 0 borrows from the next."""
    has_order: bool = False

    @property
    def name(self) -> str:
        """See ``WeightFormat``."""
        return f"gptq int{self.bits}" + (f" group {self.group}" if self.group else "")

    def stored(self, name: str, shape: Shape) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        rows, columns = matrix(self.name, name, shape)
        base, groups = name.removesuffix(".weight"), whole(columns, self.group or columns)
        words = whole(columns * self.bits, 32)
        found = {
            f"{base}.qweight": StoredTensor(shape=(words, rows), dtypes=("I32",)),
            f"{base}.qzeros": StoredTensor(shape=(groups, whole(rows * self.bits, 32)), dtypes=("I32",)),
            f"{base}.scales": StoredTensor(shape=(groups, rows), dtypes=("F16", "BF16", "F32")),
        }
        if self.has_order:
            found[f"{base}.g_idx"] = StoredTensor(shape=(columns,), dtypes=("I32", "I64"))
        return found

    def codes(self, name: str, stored: Mapping[str, Tensor], shape: Shape, groups_I: Tensor, some: slice) -> Tensor:
        words, zeros, *_ = stored.values()
        if self.zeros_less_one:  # of the whole word: what one zero borrowed of the next comes back
            zeros = zeros + sum(1 << at for at in range(0, 32, self.bits))
        zeros_gO = self._unpacked(zeros, shape[0])
        return self._unpacked(words[:, some].mT, shape[1]) - zeros_gO[:, some].mT[:, groups_I]

    def _unpacked(self, words: Tensor, count: int) -> Tensor:
        """Return codes int16 ``[.., count]`` of words, the lowest bits first."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        found = words.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts & (1 << self.bits) - 1
        return found.flatten(1)[:, :count].to(torch.int16)
