"""Formats of integers with scales: a value is ``(code - zero) * scale``.

There is a scale, and perhaps a zero, for all weights, for each row, or for a group of columns. The
group of each column may be listed, because activations ordered the columns. Letters: O rows, I
columns; g groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.base.errors import CheckpointError
from quire.contracts.linear import CodeRows
from quire.contracts.weights import StoredTensor
from quire.weights.scales import Shape, check_finite, parts, write

EIGHT = 8
"""Rows of codes are read in multiples of this, as words may hold the codes of so many."""


class CodeFormat(ABC):
    """``WeightFormat`` of codes, of which heirs say how they lie in a file."""

    __slots__ = ()
    is_plain = False
    has_order = False
    """Whether the last tensor lists the group of each column; else groups are consecutive."""
    bits: int
    """Of a code."""
    group: int
    """Columns that share a scale; 0: all of a row, or of all rows."""

    @property
    @abstractmethod
    def name(self) -> str:
        """See ``WeightFormat``."""

    @abstractmethod
    def stored(self, name: str, shape: Shape) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""

    @abstractmethod
    def codes(self, name: str, stored: Mapping[str, Tensor], shape: Shape, groups_I: Tensor, some: slice) -> Tensor:
        """Return the codes of rows less their zeros, int8 or int16 ``[rows, I]``. The slice begins
        at a multiple of ``EIGHT``."""

    def scales(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """Return the scales ``[O or 1, g]``. ``CheckpointError`` if one is not finite."""
        scales_gO = list(stored.values())[2]
        check_finite(name, scales_gO)
        return scales_gO.mT

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """See ``WeightFormat``. Values are rounded to the element type of the scales."""
        shape = (len(out), out.shape[1])
        scales = self.scales(name, stored, shape)
        groups_I = self.groups(name, stored, shape[1], scales.shape[1])
        for some in parts(*shape, EIGHT):
            codes = self.codes(name, stored, shape, groups_I, some).to(scales.dtype)
            write(name, codes * scales[some if len(scales) > 1 else slice(None)][:, groups_I], out[some])

    def code_rows(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> CodeRows | None:
        """Return the codes of all rows, with their columns in the order of groups; None if groups
        differ in size."""
        rows, columns = shape
        group = self.group or columns
        scales = self.scales(name, stored, shape).expand(rows, -1)
        groups_I = self.groups(name, stored, columns, scales.shape[1])
        usual_I = torch.arange(columns) // group
        is_ordered = torch.equal(groups_I, usual_I)
        order_I = None if is_ordered else groups_I.argsort(stable=True)
        if columns % group or (order_I is not None and not torch.equal(groups_I[order_I], usual_I)):
            return None
        codes = self.codes(name, stored, shape, groups_I, slice(0, rows))
        return CodeRows(self.bits, group, codes if order_I is None else codes[:, order_I], scales, order_I, name)

    def groups(self, name: str, stored: Mapping[str, Tensor], columns: int, count: int) -> Tensor:
        """Return the group of each column, int64. ``CheckpointError`` for a group that is
        missing."""
        if not self.has_order:
            return torch.arange(columns) // (self.group or columns)
        groups = list(stored.values())[-1].long()
        if len(groups) and not (int(groups.min()) >= 0 and int(groups.max()) < count):
            found = int(groups.min()) if int(groups.min()) < 0 else int(groups.max())
            raise CheckpointError(f"{name}: its g_idx has the group {found}; expected groups from 0 to {count - 1}")
        return groups
