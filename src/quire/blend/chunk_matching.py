"""Matching known chunks with the tokens of a prompt. No torch.

Letters: T tokens of a prompt; C candidates: chunks at positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.blend.token_sums import WINDOW, Ids, TokenSums
from quire.contracts.store import ObjectKey, ObjectKind

LEAST = 16
"""Least number of tokens of a chunk, and least number of rows that a placement must give."""
MOST = 8192
"""Most tokens of a chunk; longer segments are cut."""
PAIRS = 1 << 20
"""Most pairs of a position and a chunk with the same beginning whose ends are compared for one
prompt. Later pairs are left out."""
CANDIDATES = 1 << 16
"""Most candidates between two marked segments; the longest are kept."""
ATTEMPTS = 8
"""Most choices, if candidates turn out to be other tokens with the same hashes."""


def cuts(n: int) -> list[tuple[int, int]]:
    """Return the ranges of the chunks of a segment of ``n`` tokens, each computed separately: as
    few as ``MOST`` allows, as equal as possible. None below ``LEAST``."""
    if n < LEAST:
        return []
    count = -(-n // MOST)
    ends = [n * index // count for index in range(count + 1)]
    return list(itertools.pairwise(ends))


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows of a prompt that come from a chunk."""

    key: ObjectKey
    start: int
    """The first one."""
    stop: int
    """One past the last row."""
    skip: int
    """Number of rows of the chunk before these."""

    @property
    def origin(self) -> int:
        """The position in the prompt of the chunk's first token."""
        return self.start - self.skip


class KnownChunks:
    """A snapshot of the chunks under one parent. Any thread may use it."""

    def __init__(self, parent: bytes, tiers: Mapping[ObjectKey, str]) -> None:
        """``tiers``: keys under ``parent``, each with the kind of its nearest tier."""
        self.parent, self.tiers = parent, tiers
        keys = [key for key in tiers if key.kind is ObjectKind.CHUNK]
        heads_K2 = np.frombuffer(b"".join(key.digest[:8] for key in keys), "<u4").reshape(-1, 2)
        counts_K = np.array([key.count for key in keys], np.int64)
        order_K = np.lexsort((counts_K, heads_K2[:, 1], heads_K2[:, 0]))
        self._wholes = np.unique(heads_K2[:, 1])
        order_K = order_K[counts_K[order_K] >= WINDOW]  # the others are found as segments only
        self._firsts, self._whole = heads_K2[order_K, 0].copy(), heads_K2[order_K, 1].copy()
        self._counts = counts_K[order_K]
        self._keys = [keys[index] for index in order_K]
        self._begins = np.zeros(1 << 16, bool)
        self._begins[self._firsts >> 16] = True

    def without(self, gone: Collection[ObjectKey]) -> KnownChunks:
        """Return a copy without some keys."""
        return KnownChunks(self.parent, {key: tier for key, tier in self.tiers.items() if key not in gone})

    def match(self, ids: Ids, indices: Sequence[int], begin: int, end: int) -> list[Placement]:
        """Return, in order, the placements for rows ``begin..end - 1`` of a prompt ``ids [T]``.

        Segments, which begin at ``indices``, are matched first, cut by ``cuts``. In the gaps,
        chunks at any position are chosen to cover the most rows. Of equal sets it is the one with
        the earlier chunk at the first difference, or the longer one if both begin there. A chunk
        counts with its wanted and free rows, ``LEAST`` or more.
        """
        if not self.tiers or end - begin < LEAST:
            return []
        sums = TokenSums(ids)
        found = self._marked(sums, [0, *indices, ids.size], begin, end)
        if self._keys and ids.size >= WINDOW:
            index_C, start_C = self._candidates(sums, ids.size)
            edges = [begin, *(edge for one in found for edge in (one.start, one.stop)), end]
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                found += self._best(sums, index_C, start_C, low, high)
        return sorted(found, key=lambda one: one.start)

    def _marked(self, sums: TokenSums, bounds: Sequence[int], begin: int, end: int) -> list[Placement]:
        """Return the placements of known segments."""
        pieces = [
            (first + start, first + stop)
            for first, last in itertools.pairwise(bounds)
            for start, stop in cuts(last - first)
            if min(first + stop, end) - max(first + start, begin) >= LEAST
        ]
        if not pieces:
            return []
        starts, stops = np.array(pieces, np.int64).T
        there = np.isin(sums.hashes(starts, stops - starts), self._wholes)
        keys = ((sums.key(self.parent, *pieces[index]), *pieces[index]) for index in np.flatnonzero(there))
        return [_clipped(key, start, stop, begin, end) for key, start, stop in keys if key in self.tiers]

    def _candidates(self, sums: TokenSums, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return chunks, as indices of ``_keys``, and their positions, found by hashes."""
        hashes_T = sums.beginnings()
        places = np.flatnonzero(self._begins[hashes_T >> 16])
        low = np.searchsorted(self._firsts, hashes_T[places], "left")
        each = np.searchsorted(self._firsts, hashes_T[places], "right") - low
        each[np.cumsum(each) > PAIRS] = 0
        start_C = np.repeat(places, each)
        index_C = np.arange(start_C.size) + np.repeat(low - (np.cumsum(each) - each), each)
        fits_C = start_C + self._counts[index_C] <= count
        start_C, index_C = start_C[fits_C], index_C[fits_C]
        equal_C = sums.hashes(start_C, self._counts[index_C]) == self._whole[index_C]
        return index_C[equal_C], start_C[equal_C]

    def _best(
        self, sums: TokenSums, index_C: NDArray[np.int64], start_C: NDArray[np.int64], low: int, high: int
    ) -> Iterator[Placement]:
        """Yield the best set of candidates within rows ``low..high - 1``, confirmed by their
        tokens."""
        stop_C = start_C + self._counts[index_C]
        from_C, to_C = np.maximum(start_C, low), np.minimum(stop_C, high)
        (use_C,) = np.nonzero(to_C - from_C >= LEAST)
        if use_C.size > CANDIDATES:
            longest = np.argsort(from_C[use_C] - to_C[use_C], kind="stable")[:CANDIDATES]
            use_C = np.sort(use_C[longest])
        # If two objects give the same rows, the shorter one is read.
        order = np.lexsort((index_C[use_C], stop_C[use_C] - start_C[use_C], -to_C[use_C], from_C[use_C]))
        use_C = use_C[order]
        for last in range(ATTEMPTS - 1, -1, -1):
            chosen = use_C[_schedule(from_C[use_C], to_C[use_C])]
            found = [(one, self._keys[index_C[one]], int(start_C[one]), int(stop_C[one])) for one in chosen]
            wrong = [one for one, key, start, stop in found if sums.digest(self.parent, start, stop) != key.digest]
            if not wrong or not last:
                break
            use_C = use_C[~np.isin(use_C, wrong)]
        yield from (_clipped(key, start, stop, low, high) for one, key, start, stop in found if one not in wrong)


def _clipped(key: ObjectKey, start: int, stop: int, begin: int, end: int) -> Placement:
    first = max(start, begin)
    return Placement(key, first, min(stop, end), first - start)


def _schedule(from_C: NDArray[np.int64], to_C: NDArray[np.int64]) -> list[int]:
    """Return the indices of ranges, out of C sorted by start, that are disjoint and cover the most;
    of equal sets the one whose first different range comes first."""
    weights, follow = (to_C - from_C).tolist(), np.searchsorted(from_C, to_C).tolist()
    best = [0] * (len(weights) + 1)
    for index in range(len(weights) - 1, -1, -1):
        best[index] = max(best[index + 1], weights[index] + best[follow[index]])
    found, index = list[int](), 0
    while index < len(weights):
        if weights[index] + best[follow[index]] == best[index]:
            found.append(index)
            index = follow[index]
        else:
            index += 1
    return found
