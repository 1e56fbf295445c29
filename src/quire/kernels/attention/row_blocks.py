"""Blocks of rows of one entry with different visible keys, each over its own range of keys.

A window of W keys over a chunk of any length thus costs W + block keys for each row, and rows that
are not neighbours read few keys after their own positions. The blocks of an entry share its keys,
which are gathered once. Keys that all rows of a block see need no mask. Many of them form a
segment, attended alone and merged.

Letters: n rows of an entry or block; m keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.attention import ForwardPlan
from quire.kernels.attention.groups import Keys, keys_of, pages_of, range_mask
from quire.kernels.attention.visibility import Columns, VisibleKeys, trim

UNMASKED_KEYS = 2048
"""Least number of keys that all rows of a block see, beyond which they form a segment without a
mask."""
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 512
"""Rows of a block, unless all rows of the entry see the same keys."""


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Neighbouring keys of a block."""

    start: int
    """Index of the first, among the entry's keys."""
    stop: int
    mask: Tensor | None
    """``[1, 1, n, stop - start]``: 0 or -inf in q's dtype, or bool, true: visible. None: all
    visible."""
    blind: Tensor | None
    """int64: rows of the block without keys here; None: there are none."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Neighbouring rows of one entry."""

    start: int
    stop: int
    keys: Keys
    """The entry's keys: the same object in all of its blocks."""
    segments: list[KeySpan]


class Span(NamedTuple):
    """A segment by addresses. ``columns``: True if a rule decides too."""

    first: int
    stop: int
    masked: bool
    columns: Columns | None


class BlockPlanner:
    """Makes the blocks of one part of one batch. Equal masks by position are made once."""

    def __init__(self, plan: ForwardPlan, part: VisibleKeys, dtype: torch.dtype) -> None:
        self.plan = plan
        self.part = part
        self.dtype = dtype
        self._masks: dict[tuple[bytes, bytes, int], tuple[Tensor, Tensor | None]] = {}

    def splits(self, entry: int) -> bool:
        """Return True if the rule of an entry leaves many keys at the front visible to all its
        rows."""
        if entry not in self.part.columns:
            return False
        rows = slice(int(self.plan.starts[entry]), int(self.plan.starts[entry + 1]))
        return int(self.part.high[rows].min() - self.part.low[rows].max()) > UNMASKED_KEYS

    def blocks(self, entry: int) -> list[RowBlock]:
        """Return the blocks of an entry with visible keys; rows without keys may be in none."""
        start, stop = int(self.plan.starts[entry]), int(self.plan.starts[entry + 1])
        first, last = int(self.part.first[entry]), int(self.part.stop[entry])
        keys, offset = keys_of([pages_of(self.plan, entry, first, last)], self.plan, first, last)
        base = first // self.plan.page_size * self.plan.page_size + offset
        found, size = [], self._size(entry, start, stop)
        for begin in range(start, stop, size):
            end = min(stop, begin + size)
            if segments := self._segments(entry, begin, end, base):
                found.append(RowBlock(begin, end, keys, segments))
        return found

    def _size(self, entry: int, start: int, stop: int) -> int:
        """Return the number of rows of a block, so that its visible range moves by at most a
        quarter of it."""
        low, high = self.part.low[start:stop], self.part.high[start:stop]
        columns = self.part.columns.get(entry)
        if columns is None and not np.ptp(low) and not np.ptp(high):
            return stop - start
        shown = low < high
        moved = max(int(np.ptp(edge[shown])) for edge in (low, high)) if shown.any() else 0
        if not moved:
            # All rows see nearly the same keys, such as a sink or a small tree.
            return LARGEST_BLOCK
        width = int((high - low).max())
        if columns is not None:
            width = max(width, 0) + int(columns.visible.sum(1).max())
        rows = width * (stop - start - 1) // (4 * moved)
        return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (max(1, rows).bit_length() - 1)))

    def _segments(self, entry: int, start: int, stop: int, base: int) -> list[KeySpan]:
        """Return the segments of a block; ``base``: the address of the entry's first key."""
        rows = slice(start, stop)
        return [
            KeySpan(span.first - base, span.stop - base, *self._mask(span, self.part.low[rows], self.part.high[rows]))
            for span in self._spans(entry, start, stop)
        ]

    def _spans(self, entry: int, start: int, stop: int) -> list[Span]:
        """Return the segments in order of addresses."""
        low, high = self.part.low[start:stop], self.part.high[start:stop]
        shown = low < high
        columns = self.part.columns.get(entry)
        if columns is not None:
            first_row = start - int(self.plan.starts[entry])
            columns = trim(columns.visible[first_row : first_row + stop - start], columns.first)
        if not shown.any():
            return [] if columns is None else [Span(columns.first, columns.stop, True, columns)]
        first, last = int(low[shown].min()), int(high[shown].max())
        # The keys that all rows see; none if some row sees no keys.
        inner, outer = int(low.max()), int(high.min())
        if inner == first and outer == last and columns is None:
            return [Span(first, last, False, None)]
        if outer - inner <= UNMASKED_KEYS:
            return [Span(first, last if columns is None else columns.stop, True, columns)]
        spans = [Span(inner, outer, False, None)]
        if first < inner:
            spans.insert(0, Span(first, inner, True, None))
        if outer < last:
            spans.append(Span(outer, last, True, None))
        if columns is not None:
            spans.append(Span(columns.first, columns.stop, True, columns))
        return spans

    def _mask(self, span: Span, low: NDArray[np.int64], high: NDArray[np.int64]) -> tuple[Tensor | None, Tensor | None]:
        """Return ``mask`` and ``blind`` of a segment."""
        if not span.masked:
            return None, None
        m = span.stop - span.first
        low, high = np.clip(low - span.first, 0, m), np.clip(high - span.first, 0, m)
        if span.columns is not None:
            key = np.arange(m)
            visible = (key >= low[:, None]) & (key < high[:, None])
            visible[:, span.columns.first - span.first : span.columns.stop - span.first] |= span.columns.visible
            return torch.from_numpy(visible).to(self.plan.device)[None, None], self._rows(~visible.any(1))
        name = (low.tobytes(), high.tobytes(), m)
        found = self._masks.get(name)
        if found is None:
            mask = range_mask(low, high, m, self.dtype, self.plan.device)[None, None]
            found = self._masks[name] = mask, self._rows(low >= high)
        return found

    def _rows(self, which: Any) -> Tensor | None:
        rows = np.flatnonzero(which)
        return torch.from_numpy(rows).to(self.plan.device) if rows.size else None
