"""``Row``: the branch of a KV cache, with its cuts and a tree that waits for its commit.

A handle of length n is stale if its row was cut below n after the handle was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.branches.branch import COMPUTED, Branch
from quire.branches.history import Ids, TokenHistory
from quire.types import BASE, AdapterRuns, SeqId


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A verified token tree, no path of which is kept yet, on a fork of its row."""

    seq: SeqId
    start: int
    """Tokens before the tree."""
    ids: Ids
    """Ids of the nodes."""
    parents: tuple[int, ...]
    runs: AdapterRuns = BASE
    """The adapters of the tokens before the tree, and of the tree itself."""
    positions: Ids | None = None
    """Positions of the nodes, if some were given to them or before them; None: as the tree says."""

    def path(self, node: int) -> list[int]:
        """Return the nodes from a root to ``node``."""
        return path_to(self.parents, node)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes of a tree from a root to ``node``; -1: none."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


@dataclass(eq=False, slots=True, kw_only=True)
class Row(Branch):
    """One sequence of a cache."""

    seq: SeqId
    positions: TokenHistory | None = None
    """The position at which each token was rotated; None: each at its index."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(revision, length), both ascending: a later cut at or below an earlier one replaces it."""
    pending: Pending | None = None
    chain: Pending | None = None
    """A verified chain, only where layers are recurrent; None: there is none.

    Its tokens belong to the row and are uncommitted nodes of its own sequence, so that it can be
    cut behind any of them (``CacheRows.commit_chains`` ends that).
    """

    @property
    def seqs(self) -> list[SeqId]:
        """All sequences that the row holds."""
        return [self.seq] if self.pending is None else [self.seq, self.pending.seq]

    @property
    def named_adapters(self) -> frozenset[int]:
        """Return the ids of the adapters of its tokens, and of those of a tree beside it."""
        return self.runs.ids if self.pending is None else self.runs.ids | self.pending.runs.ids

    def next_position(self, start: int) -> int:
        """Return the default place of a token with index ``start``: one behind the token before."""
        return start if self.positions is None or not start else int(self.positions.ids[start - 1]) + 1

    def following(self, start: int, count: int) -> Ids | None:
        """Return the default places of ``count`` tokens from ``start`` on; None: their indices."""
        if self.positions is None:
            return None
        first = self.next_position(start)
        return np.arange(first, first + count)

    def stand(self, start: int, positions: Ids | None) -> None:
        """Let the tokens from index ``start`` on stand at ``positions``; None: at their indices.
        ``start`` is where the row ended before."""
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
        """Return whether anything below ``length`` is gone or different since ``revision``."""
        later = bisect_right(self.cuts, revision, key=lambda cut: cut[0])
        # The first later cut is the lowest of them.
        return later < len(self.cuts) and self.cuts[later][1] < length

    def become(self, other: Branch, length: int, seq: SeqId | None) -> None:
        """Do as ``Branch.become``, with the positions; cuts stay."""
        Branch.become(self, other, length, seq)
        positions = other.positions if isinstance(other, Row) else None
        self.positions = _first(None if positions is None else positions.fork(), length)

    def like(self, seq: SeqId, length: int | None = None) -> Row:
        """Return a row for a fork of this one's sequence, without its history of cuts. ``length``:
        of how many tokens; None: of all."""
        row = Row(seq=seq)
        row.become(self, self.computed if length is None else length, seq)
        return row


def _first(positions: TokenHistory | None, length: int) -> TokenHistory | None:
    """Return the positions of the first ``length`` tokens; None where each stands at its index."""
    if positions is None or are_indices(positions.ids[:length], 0):
        return None
    positions.size = length
    return positions


def are_indices(positions: Ids, start: int) -> bool:
    """Return whether tokens from index ``start`` on stand at their indices."""
    return bool((positions == np.arange(start, start + positions.size)).all())
