"""``Row``: the branch of a KV cache, with its cuts and a verified tree that is not committed yet.

A handle of length n is stale if its row was cut below n after the handle was made.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from quire.base.token_history import Ids, TokenHistory
from quire.base.types import SeqId
from quire.branches.branch import COMPUTED, Branch
from quire.branches.extension import Extension


@dataclass(eq=False, slots=True, kw_only=True)
class Row(Branch):
    """One sequence of a cache."""

    seq: SeqId
    positions: TokenHistory | None = None
    """The rotation position of each token; None: its index."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(revision, length), both ascending: a later cut at or below an earlier one replaces it."""
    pending: Extension | None = None
    """A verified token tree on a fork of the row, before the commit of a path."""
    chain: Extension | None = None
    """A verified chain, only if layers are recurrent; None: there is none.

    Its tokens belong to the row and are uncommitted nodes of its own sequence, so the row can be
    cut after any of them (until ``CacheRows.commit_chains``).
    """

    @property
    def seqs(self) -> list[SeqId]:
        """All sequences of the row."""
        return [self.seq] if self.pending is None else [self.seq, self.pending.seq]

    @property
    def named_adapters(self) -> frozenset[int]:
        """Ids of the adapters of its tokens, and of a tree beside it."""
        return self.runs.ids if self.pending is None else self.runs.ids | self.pending.runs.ids

    def next_position(self, start: int) -> int:
        """Return the default position of a token with index ``start``: one after the token
        before."""
        return start if self.positions is None or not start else int(self.positions.ids[start - 1]) + 1

    def following(self, start: int, count: int) -> Ids | None:
        """Return the default positions of ``count`` tokens from ``start`` on; None: their
        indices."""
        if self.positions is None:
            return None
        first = self.next_position(start)
        return np.arange(first, first + count)

    def stand(self, start: int, positions: Ids | None) -> None:
        """Put the tokens from index ``start`` on at ``positions``; None: at their indices.
        ``start`` is the former length of the row."""
        if positions is None or (self.positions is None and are_indices(positions, start)):
            return
        if self.positions is None:
            self.positions = TokenHistory(np.arange(start))
        self.positions.replace_from(start, positions)

    def cut(self, revision: int, length: int) -> None:
        """Cut the row to ``length`` in ``revision``, which is higher than any before."""
        if self.mark is not None and self.mark > length:
            self.mark = None
        while self.cuts and self.cuts[-1][1] >= length:
            self.cuts.pop()
        self.cuts.append((revision, length))
        self.runs = self.runs_before(length)
        self.positions = _first(self.positions, length)
        self.origin = self.origin.cut(length) if length else COMPUTED
        self.tokens.truncate(length)
        self.computed = length

    def was_cut(self, revision: int, length: int) -> bool:
        """Return True if any token below ``length`` was cut since ``revision``."""
        later = bisect_right(self.cuts, revision, key=lambda cut: cut[0])
        # The lengths ascend, so the first later cut has the lowest.
        return later < len(self.cuts) and self.cuts[later][1] < length

    def become(self, other: Branch, length: int, seq: SeqId | None) -> None:
        """As ``Branch.become``, with the positions; the history of cuts stays."""
        Branch.become(self, other, length, seq)
        positions = other.positions if isinstance(other, Row) else None
        self.positions = _first(None if positions is None else positions.fork(), length)

    def like(self, seq: SeqId, length: int | None = None) -> Row:
        """Return a row for a fork of this row's sequence, without its history of cuts. ``length``:
        number of tokens; None: all."""
        row = Row(seq=seq)
        row.become(self, self.computed if length is None else length, seq)
        return row


def _first(positions: TokenHistory | None, length: int) -> TokenHistory | None:
    """Return the positions of the first ``length`` tokens; None if each is its index."""
    if positions is None or are_indices(positions.ids[:length], 0):
        return None
    positions.size = length
    return positions


def are_indices(positions: Ids, start: int) -> bool:
    """Return True if these are the indices from ``start`` on."""
    return bool((positions == np.arange(start, start + positions.size)).all())
