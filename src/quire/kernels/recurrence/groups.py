"""Pieces of a ragged batch of chains and trees, for a chunk-parallel recurrence.

A piece is a run of consecutive rows. It ends at each row whose state is needed: a wanted row, or a
row with several children; and at the latest after ``longest`` rows. A piece's *depth* is the number
of pieces before it in its sequence or tree, so pieces of one depth are independent. Pieces of
similar length form a group and run together. A chain is a few long pieces, a bushy tree its levels.

Letters: T rows; N pieces of a group; L the length of its longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.uploads import uploaded
from quire.contracts.recurrence import RecurrencePlan


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Pieces that run together, shorter ones padded at their end."""

    pieces: NDArray[np.int64]
    """``[N]``: ids, in order of first rows over all pieces of the batch."""
    before: NDArray[np.int64]
    """``[N]``: the preceding piece, of the previous depth; -1: a given state precedes."""
    first: NDArray[np.int64]
    """``[N]``: first rows"""
    lengths: NDArray[np.int64]
    """``[N]``, at least 1"""
    longest: int
    """L"""

    @property
    def last(self) -> NDArray[np.int64]:
        """``[N]``: last rows, whose states end the pieces."""
        return self.first + self.lengths - 1


def beginnings(plan: RecurrencePlan, longest: int) -> NDArray[np.bool_]:
    """Return bool ``[T]``, True for rows that begin a piece; no piece has more than ``longest``
    rows."""
    total, parents = plan.num_rows, plan.parents
    rows = np.arange(total)
    ends = np.bincount(parents[parents >= 0], minlength=total) > 1
    ends[plan.wanted] = True
    follows = np.zeros(total, dtype=np.bool_)
    follows[1:] = (parents[1:] == rows[:-1]) & ~ends[:-1]
    run_first = np.maximum.accumulate(np.where(follows, 0, rows))
    begins: NDArray[np.bool_] = (rows - run_first) % longest == 0
    return begins


def cut(plan: RecurrencePlan, longest: int) -> list[list[Group]]:
    """Return the groups of each depth; no piece has more than ``longest`` rows."""
    total, parents = plan.num_rows, plan.parents
    if not total:
        return []
    begins = beginnings(plan, longest)
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=total)
    piece_of = np.cumsum(begins) - 1
    before = np.where(parents[first] >= 0, piece_of[parents[first]], -1)
    depths: list[int] = []
    for piece in before.tolist():
        depths.append(depths[piece] + 1 if piece >= 0 else 0)
    # Lengths up to 1, 2, 4, 8, ...: padding at most doubles a piece.
    sizes = np.ceil(np.log2(lengths)).astype(np.int64)
    keys = np.array(depths) * (longest.bit_length() + 1) + sizes
    order = np.argsort(keys, kind="stable")
    found: list[list[Group]] = [[] for _ in range(max(depths) + 1)]
    for pieces in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        group = Group(pieces, before[pieces], first[pieces], lengths[pieces], int(lengths[pieces].max()))
        found[depths[int(pieces[0])]].append(group)
    return found


class GroupRows:
    """Reads and writes the rows of a group as ``[N, L, ...]``, in place if they are consecutive."""

    def __init__(self, group: Group, device: torch.device) -> None:
        number, longest = len(group.first), group.longest
        self._shape = (number, longest)
        self._run: slice | None = None
        self._padding: Tensor | None = None
        self._kept: Tensor | None = None
        padded = bool((group.lengths != longest).any())
        start = int(group.first[0])
        if not padded and bool((group.first == start + longest * np.arange(number)).all()):
            self._run = slice(start, start + number * longest)
            return
        offsets = np.arange(longest)
        # Padding repeats a row of its own piece: no value of another sequence enters, not even a
        # NaN.
        rows = group.first[:, None] + np.minimum(offsets, group.lengths[:, None] - 1)
        self._rows = uploaded(rows.reshape(-1), device)
        self._targets = self._rows
        if padded:
            kept = offsets < group.lengths[:, None]
            self._padding = uploaded(~kept, device)
            self._kept = uploaded(np.flatnonzero(kept), device)
            self._targets = uploaded(rows[kept], device)

    def take(self, x: Tensor, /, *, dtype: torch.dtype, blank: bool) -> Tensor:
        """Return rows ``[N, L, ...]`` of x ``[T, ...]`` in ``dtype``; ``blank``: padding is 0, else
        undefined."""
        taken = x[self._run] if self._run is not None else x.index_select(0, self._rows)
        taken = taken.to(dtype).reshape(*self._shape, *x.shape[1:])
        if not blank or self._padding is None:
            return taken
        return taken.masked_fill(self._padding.reshape(*self._shape, *[1] * (x.dim() - 1)), 0)

    def room(self, out: Tensor) -> Tensor:
        """Return a contiguous ``[N, L, ...]`` to ``put`` into out ``[T, ...]``, if possible a
        view."""
        if self._run is not None:
            return out[self._run].view(*self._shape, *out.shape[1:])
        return out.new_empty(*self._shape, *out.shape[1:])

    def put(self, out: Tensor, rows: Tensor) -> None:
        """Write ``[N, L, ...]`` into out ``[T, ...]``, without the padding."""
        flat = rows.flatten(0, 1)
        if self._run is not None:
            if rows.data_ptr() != out[self._run].data_ptr():
                out[self._run] = flat
            return
        out.index_copy_(0, self._targets, (flat if self._kept is None else flat[self._kept]).to(out.dtype))
