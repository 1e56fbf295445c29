"""Weights in integers with scales, as compressed-tensors writes them.

A value is ``(code - zero) * scale``, with a scale and perhaps a zero for all weights, for each row,
or for each group of columns. Letters: O rows, I columns, g groups, W words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import CheckpointError
from quire.contracts.weights import StoredTensor
from quire.weights.code_format import CodeFormat
from quire.weights.scaled_float8 import matrix
from quire.weights.scales import SCALES, Shape, check_finite, whole


@dataclass(frozen=True, slots=True)
class IntegerCodes(CodeFormat):
    """``NAME.weight`` int8 ``[O, I]``, or packed ``NAME.weight_packed`` int32 ``[O, W]`` and
    ``NAME.weight_shape``; with ``NAME.weight_scale`` and perhaps ``NAME.weight_zero_point`` and
    ``NAME.weight_g_idx``, the group of each column."""

    bits: int
    group: int
    """Columns that share a scale; 0: all of a row, or of all rows."""
    packed: bool
    """Whether codes lie one after the other in words of 32 bits, the lowest first, from 0 on."""
    has_zeros: bool = False
    has_order: bool = False

    @property
    def name(self) -> str:
        """See ``WeightFormat``."""
        return f"int{self.bits}" + (f" group {self.group}" if self.group else "")

    def stored(self, name: str, shape: Shape) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        rows, columns = matrix(self.name, name, shape)
        per_row = whole(columns, self.group or columns)
        grids: tuple[Shape, ...] = ((rows, per_row),) if self.group else ((), (1,), (1, 1), (rows,), (rows, 1))
        if self.packed:
            words = StoredTensor(shape=(rows, whole(columns * self.bits, 32)), dtypes=("I32",))
            found = {f"{name}_packed": words, f"{name}_shape": StoredTensor(shape=(2,), dtypes=("I64", "I32"))}
        else:
            found = {name: StoredTensor(shape=shape, dtypes=("I8",))}
        found[f"{name}_scale"] = StoredTensor(shape=grids[-1], dtypes=SCALES, others=grids[:-1])
        if self.has_zeros:
            packed = ((whole(rows * self.bits, 32), per_row),) if self.packed else ()
            place = StoredTensor(shape=grids[-1], dtypes=("I8", "I32"), others=(*grids[:-1], *packed))
            found[f"{name}_zero_point"] = place
        if self.has_order:
            found[f"{name}_g_idx"] = StoredTensor(shape=(columns,), dtypes=("I32", "I64"))
        return found

    def codes(self, name: str, stored: Mapping[str, Tensor], shape: Shape, groups_I: Tensor, some: slice) -> Tensor:
        """See ``CodeFormat``. ``CheckpointError`` for another shape."""
        codes, *others = stored.values()
        if self.packed and (found := others[0].tolist()) != [*shape]:
            raise CheckpointError(f"{name}: its weight_shape says {found}; expected {[*shape]}")
        codes = unpacked(codes[some], self.bits, shape[1]) if self.packed else codes[some]
        if not self.has_zeros:
            return codes
        zeros = others[2 if self.packed else 1]
        if zeros.dtype == torch.int32:
            zeros = unpacked(zeros.mT, self.bits, shape[0]).mT
        zeros = zeros.reshape(shape[0] if zeros.numel() > 1 else 1, -1).to(torch.int16)
        return codes - zeros[some if len(zeros) > 1 else slice(None)][:, groups_I]

    def scales(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> Tensor:
        scales = list(stored.values())[2 if self.packed else 1]
        check_finite(name, scales)
        return scales.reshape(shape[0] if scales.numel() > 1 else 1, -1)


def unpacked(words_OW: Tensor, bits: int, count: int) -> Tensor:
    """Return the first codes of words, int8 ``[O, count]``: unsigned ones less the middle."""
    words = words_OW.contiguous()
    if bits in (4, 8):
        found = words.view(torch.uint8)
        if bits == 4:
            found = torch.stack((found & 15, found >> 4), -1).flatten(1)
        return found[:, :count].view(torch.int8) - 8 if bits == 4 else (found[:, :count] ^ 128).view(torch.int8)
    starts = torch.arange(count) * bits
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    pairs = wide[:, starts // 32] | wide[:, starts // 32 + 1] << 32
    return ((pairs >> starts % 32 & (1 << bits) - 1) - (1 << bits - 1)).to(torch.int8)
