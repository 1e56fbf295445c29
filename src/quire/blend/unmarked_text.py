"""Chunks of text without marks: where to cut it, and which chunks to keep. No torch.

A text is cut after tokens with a low hash. So it is cut at the same places wherever it occurs, from
the first cut on. Only a chunk that spans two texts depends on their order; a new order gives no
such chunks, because both texts are in chunks already.

Letters: n tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quire.blend.token_sums import WINDOW, Ids, TokenSums
from quire.contracts.store import ObjectKey

SHORTEST, LONGEST = 64, 512
"""Least and most tokens of a chunk."""
LOW = (1 << 32) // 250
"""Hashes below it may end a chunk. The mean length is about 256."""
GRAIN = 8
"""Number of tokens of the runs by which a text is recognised."""
SLOTS = 1 << 23
"""Size of the table of such runs, one byte each. It is cleared when a quarter is used, so that few
runs collide."""


def gaps(begin: int, end: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges within ``begin..end - 1`` outside of ``taken``. Empty ranges in ``taken``
    split them."""
    for low, high in [*sorted(taken), (end, end)]:
        if begin < min(low, end):
            yield begin, min(low, end)
        begin = max(begin, high)


def content_cuts(ids_n: Ids, *, to_end: bool) -> list[tuple[int, int]]:
    """Return the ranges of a text's chunks, in order. ``to_end``: the text's end is a cut; else the
    tokens after the last cut are left out. So are fewer than ``SHORTEST`` tokens."""
    ends = TokenSums(ids_n).beginnings()  # [i] belongs to the tokens before i + WINDOW
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
    """The runs of tokens in chunks of unmarked text, including chunks that a store has evicted."""

    def __init__(self) -> None:
        self._taken = 0
        self._keys = set[ObjectKey]()

    @cached_property
    def _runs(self) -> NDArray[np.bool_]:
        return np.zeros(SLOTS, np.bool_)  # 8 MiB that only blending needs

    def admits(self, key: ObjectKey, ids_n: Ids) -> bool:
        """Return True if a chunk should be kept: it was kept before, or at least half of it is new.
        Then record its runs."""
        starts = np.arange(ids_n.size - GRAIN + 1)
        # Texts of different salts are counted separately.
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
