"""The common part of tasks that give rows of prompts, from any source.

Letters: N tokens of all prompts; m rows; Hkv heads; D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.blend.chunks import ChunkLayout
from quire.contracts.blend import BlendRetrieverResult

Order: TypeAlias = Literal["NHD", "HND"]
"""The order of the dimensions of a result."""


class RowsPiece(NamedTuple):
    """Rows of one layer that are adjacent in a prompt and in their original sequence."""

    start: int
    """The first one, among all N."""
    k: Tensor
    """``[m, Hkv, Dk]``, in a latent layer ``[m, 1, Dr]``. Read only."""
    v: Tensor
    """``[m, Hkv, Dv]``, in a latent layer ``[m, 1, R]``. Read only."""
    original: int
    """The position at which K of the first row was rotated."""


class RowsTask(ABC):
    """``BlendRetrieverTask`` whose rows come in pieces. Callers that use ``pieces`` save a copy."""

    def __init__(self, layout: ChunkLayout, length: int, spans: Sequence[tuple[int, int, int]], order: Order) -> None:
        """``spans``: first row of N, original position of that row, number of rows."""
        if order not in ("NHD", "HND"):
            raise InvalidArgument(field="order", given=order, allowed="'NHD' or 'HND'")
        self._layout, self._order = layout, order
        self._length = length
        self.valid_mask = torch.zeros(length, dtype=torch.int32)
        """int32 ``[N]`` on the CPU: 1 for rows that are given."""
        self.positions = torch.zeros(length, dtype=torch.int64)
        """int64 ``[N]`` on the CPU: ``original_positions`` of the results."""
        for start, original, count in spans:
            self.valid_mask[start : start + count] = 1
            self.positions[start : start + count] = torch.arange(original, original + count)

    @abstractmethod
    def pieces(self, layer_id: int) -> list[RowsPiece]:
        """Return the rows of a layer, in order of ``start``."""

    @abstractmethod
    def close(self) -> None:
        """Release all objects. Closing again does nothing."""

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Return a layer, as ``BlendRetrieverTask`` says: a copy of all its pieces."""
        pieces = self.pieces(layer_id)
        if not pieces:
            return BlendRetrieverResult(None, None, self.valid_mask, self.positions)
        k, v = (
            self._joined([(one.start, one.k) for one in pieces]),
            self._joined([(one.start, one.v) for one in pieces]),
        )
        return BlendRetrieverResult(k, v, self.valid_mask, self.positions.to(k.device))

    def _joined(self, rows: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return all N rows; invalid ones are undefined."""
        first = rows[0][1]
        _, heads, size = first.shape
        if self._order == "NHD":
            joined = by_row = first.new_empty(self._length, heads, size)
        else:
            joined = first.new_empty(heads, self._length, size)
            by_row = joined.transpose(0, 1)
        for start, one in rows:
            by_row[start : start + len(one)] = one
        return joined
