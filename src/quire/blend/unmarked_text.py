"""Text without marks: where it is cut into chunks, and which of these are worth keeping. No torch.

A cut stands where the hash of the tokens before it is low. So a text is cut at the same places
wherever it stands, from the first cut on. Only a chunk that spans two texts belongs to one order of
them; a new order gives no such chunks, since both texts are in chunks already.

Letters: n tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from quire.blend.token_sums import WINDOW, Ids, TokenSums
from quire.contracts.store import ObjectKey

SHORTEST, LONGEST = 64, 512
"""Tokens of a chunk."""
LOW = (1 << 32) // 250
"""Hashes below it may end a chunk. Lengths average about 256."""
GRAIN = 8
"""Tokens of the runs by which a text is recognised."""
SLOTS = 1 << 23
"""Of the table of such runs, one byte each. When a quarter is taken it begins anew, so that few
runs are taken for others."""


def gaps(begin: int, end: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges within ``begin..end - 1`` that others leave. Empty others part them."""
    for low, high in [*sorted(taken), (end, end)]:
        if begin < min(low, end):
            yield begin, min(low, end)
        begin = max(begin, high)


def content_cuts(ids_n: Ids, *, to_end: bool) -> list[tuple[int, int]]:
    """Return the ranges of a text's chunks, one behind the other. ``to_end``: the text's end is a
    cut; else what stands behind the last one is left out. So are fewer than ``SHORTEST`` tokens."""
    ends = TokenSums(ids_n).beginnings()  # [i] is of the tokens before i + WINDOW
    found, start = list[tuple[int, int]](), 0
    while (left := ids_n.size - start) >= SHORTEST:
        hashes = ends[start + SHORTEST - WINDOW : start + LONGEST - WINDOW + 1]
        low = np.flatnonzero(hashes < LOW)
        if low.size:
            count = SHORTEST + int(low[0])
        elif left >= LONGEST:
            count = SHORTEST + int(hashes.argmin())
        elif to_end:
            count = left
        else:
            break
        found.append((start, start + count))
        start += count
    return found


class SeenText:
    """What chunks of unmarked text consist of, those that a store has given up too."""

    def __init__(self) -> None:
        self._runs = np.zeros(SLOTS, np.bool_)
        self._taken = 0
        self._keys = set[ObjectKey]()

    def admits(self, key: ObjectKey, ids_n: Ids) -> bool:
        """Return whether to keep a chunk: it was kept before, or at least half of it is new. Note
        what it consists of if so."""
        starts = np.arange(ids_n.size - GRAIN + 1)
        # Texts of one salt say nothing about those of another.
        salt = np.uint32(int.from_bytes(key.parent[:4], "little"))
        slots = np.unique((TokenSums(ids_n).hashes(starts, np.full_like(starts, GRAIN)) ^ salt) % SLOTS)
        new = int(np.count_nonzero(~self._runs[slots]))
        if key not in self._keys and 2 * new < slots.size:
            return False
        if 4 * (self._taken + new) > SLOTS:
            self._runs[:], self._taken, new = False, 0, slots.size
            self._keys.clear()
        self._runs[slots] = True
        self._taken += new
        self._keys.add(key)
        return True
