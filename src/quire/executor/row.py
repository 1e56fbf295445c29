"""One row of a KV cache: its sequence, the token ids that made it and the adapters that they ran under, where it was cut, and a tree
that waits for its commit.

A handle of length n is stale if its row was cut below n after the handle was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.types import BASE, AdapterRuns, SeqId

Ids: TypeAlias = NDArray[np.int64]

NO_IDS: Final[Ids] = np.empty(0, dtype=np.int64)

LAST_PLACEHOLDER = -4
"""Recorded ids below this one are made from the data at placeholders."""


class TokenRecord:
    """The token ids of a row, or the positions of its tokens: an array that grows by doubling. A fork shares it until one of both
    writes."""

    def __init__(self, ids: Ids | None = None) -> None:
        self._buffer: Ids = np.empty(0, dtype=np.int64) if ids is None else ids.copy()
        self._shared = False
        self.size = self._buffer.size

    @property
    def ids(self) -> Ids:
        """A view, valid until the record changes."""
        return self._buffer[: self.size]

    def replace_from(self, start: int, ids: Ids) -> None:
        """Ids from ``start`` on become ``ids``."""
        size, capacity = start + ids.size, self._buffer.size
        if size > capacity:
            capacity = max(size, 2 * capacity, 16)
        if self._shared or capacity > self._buffer.size:
            own = np.empty(capacity, dtype=np.int64)
            own[:start] = self._buffer[:start]
            self._buffer, self._shared = own, False
        self._buffer[start:size] = ids
        self.size = size

    def fork(self) -> TokenRecord:
        """A record of the same ids that copies nothing now."""
        twin = TokenRecord()
        twin._buffer, twin.size = self._buffer, self.size
        twin._shared = self._shared = True
        return twin


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A verified token tree of which no path is kept yet. It lives on a fork of its row, so the row is as it was."""

    seq: SeqId
    start: int
    """Tokens before the tree."""
    ids: Ids
    """Of the nodes."""
    parents: tuple[int, ...]
    runs: AdapterRuns = BASE
    """Under which adapters the tokens before the tree ran, and the tree itself."""
    positions: Ids | None = None
    """Of the nodes, where the caller gave some, to them or to tokens before them; None: as the tree says."""

    def path(self, node: int) -> list[int]:
        """Nodes from a root to ``node``."""
        return path_to(self.parents, node)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes of a tree from a root to ``node``; -1: none."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def history(runs: AdapterRuns, length: int) -> AdapterRuns:
    """That of the first ``length`` tokens; of none the base model's, so that it names no adapter."""
    return runs.cut(length) if length else BASE


def adapters_between(runs: AdapterRuns, begin: int, end: int) -> frozenset[int]:
    """Of the tokens ``begin..end - 1``; the base model is not among them."""
    return frozenset(
        adapter
        for start, adapter in runs.runs
        if adapter is not None and start < end and ((stop := runs.end(start)) is None or stop > begin)
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """How a row's state came to be what it is, where its tokens alone do not say it."""

    exact: bool = True
    """False if it went through another dtype."""
    modified: bool = False
    """Whether somebody wrote into it, so that its tokens, run again, would give another one."""
    private: bool = False
    """Whether it is a session's whose tokens have a salt of their own."""

    @property
    def is_shareable(self) -> bool:
        """Whether the prompts of others may begin with it."""
        return self.exact and not (self.modified or self.private)


COMPUTED = Origin()
"""The state is what the tokens give."""


@dataclass(slots=True)
class Row:
    """One sequence of a cache."""

    seq: SeqId
    tokens: TokenRecord | None = field(default_factory=TokenRecord)
    """The ids, those of placeholders made from their data. None: they are not known, as after loading a file that does not
    tell."""
    runs: AdapterRuns = BASE
    """Under which adapter each token ran."""
    positions: TokenRecord | None = None
    """The position at which each token was rotated, where the caller gave one that is not its index; None: each at its index."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(revision, length), both strictly increasing: a later cut at or below an earlier one replaces it."""
    pending: Pending | None = None
    chain: Pending | None = None
    """A verified chain whose tokens belong to the row and are uncommitted nodes of its own sequence still, so that it can be cut
    behind any of them (``KVCache.settle`` ends that). Only where layers are recurrent."""
    mark: int | None = None
    """Where the executor has kept a recurrent state of this row to come back to; None: nowhere."""
    origin: Origin = COMPUTED

    @property
    def seqs(self) -> list[SeqId]:
        """All sequences that it holds."""
        return [self.seq] if self.pending is None else [self.seq, self.pending.seq]

    @property
    def named_adapters(self) -> frozenset[int]:
        """Of its tokens, and of those of a tree beside it."""
        return self.runs.ids if self.pending is None else self.runs.ids | self.pending.runs.ids

    def next_position(self, start: int) -> int:
        """Where a token with index ``start`` stands unless the caller says otherwise: one behind the token before it."""
        return start if self.positions is None or not start else int(self.positions.ids[start - 1]) + 1

    def following(self, start: int, count: int) -> Ids | None:
        """Where ``count`` tokens from index ``start`` on stand unless the caller says otherwise; None: each at its index."""
        if self.positions is None:
            return None
        first = self.next_position(start)
        return np.arange(first, first + count)

    def stand(self, start: int, positions: Ids | None) -> None:
        """The tokens from index ``start`` on, where the row ended, stand at ``positions``; None: each at its index."""
        if positions is None or (self.positions is None and are_indices(positions, start)):
            return
        if self.positions is None:
            self.positions = TokenRecord(np.arange(start))
        self.positions.replace_from(start, positions)

    def cut(self, revision: int, length: int) -> None:
        """The row was cut to ``length`` in ``revision``, which is higher than any before."""
        if self.mark is not None and self.mark > length:
            self.mark = None
        while self.cuts and self.cuts[-1][1] >= length:
            self.cuts.pop()
        self.cuts.append((revision, length))
        self.runs = history(self.runs, length)
        self.positions = _first(self.positions, length)
        self.origin = self.origin if length else COMPUTED

    def was_cut(self, revision: int, length: int) -> bool:
        """Whether anything below ``length`` is gone or different since ``revision``."""
        later = bisect_right(self.cuts, revision, key=lambda cut: cut[0])
        # The first later cut is the lowest of them.
        return later < len(self.cuts) and self.cuts[later][1] < length

    def like(self, seq: SeqId, length: int | None = None) -> Row:
        """A row for a fork of this one's sequence: the same tokens, or the first ``length`` of them, and no history of cuts."""
        tokens = None if self.tokens is None else self.tokens.fork()
        positions = None if self.positions is None else self.positions.fork()
        if length is None:
            return Row(seq, tokens, self.runs, positions, mark=self.mark, origin=self.origin)
        if tokens is not None:
            tokens.size = length
        mark = self.mark if self.mark is not None and self.mark <= length else None
        origin = self.origin if length else COMPUTED
        return Row(seq, tokens, history(self.runs, length), _first(positions, length), mark=mark, origin=origin)


def _first(positions: TokenRecord | None, length: int) -> TokenRecord | None:
    """Those of the first ``length`` tokens; None where each stands at its index, so that equal rows are equal values."""
    if positions is None or are_indices(positions.ids[:length], 0):
        return None
    positions.size = length
    return positions


def are_indices(positions: Ids, start: int) -> bool:
    """Whether tokens from index ``start`` on stand at their indices."""
    return bool((positions == np.arange(start, start + positions.size)).all())
