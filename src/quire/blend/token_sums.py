"""Hashes of all runs of a prompt's tokens, from running sums. No torch.

The hash of a run is the polynomial of its mixed tokens at one odd base, modulo 2 ** 64. With sums
of ``x[j] * BASE ** j`` the hash of any run is one difference and one product, so that NumPy hashes
one run at each place, or a run of any length at some places, in one pass. Such a hash finds
candidates; BLAKE2b over the tokens confirms them.

Letters: T tokens.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from quire.contracts.store import KEY_BYTES, ObjectKey, ObjectKind

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint32]

WINDOW = 32
"""Number of tokens in the hash by which the beginning of a chunk is found."""
BASE = 0xD1342543DE82EF95
"""Odd, so that its powers have inverses; 5 modulo 8, so that they repeat after 2 ** 62."""


class TokenSums:
    """The hashes of the runs of ``ids [T]``."""

    def __init__(self, ids: Ids) -> None:
        self._ids = np.ascontiguousarray(ids, dtype="<i8")
        count = ids.size
        self._inverses = _powers(pow(BASE, -1, 2**64), count + 1)
        self._sums = np.zeros(count + 1, np.uint64)
        np.cumsum(_mixed(self._ids.view(np.uint64)) * _powers(BASE, count), out=self._sums[1:])

    def hashes(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Hashes:
        """Return the hashes of the runs of ``counts`` tokens from ``starts`` on, all within T."""
        found = (self._sums[starts + counts] - self._sums[starts]) * self._inverses[starts]
        return (_mixed(found) >> np.uint64(32)).astype(np.uint32)

    def beginnings(self) -> Hashes:
        """Return the hashes of ``WINDOW`` tokens from each place on, ``[T - WINDOW + 1]``."""
        count = max(0, self._ids.size - WINDOW + 1)
        found = (self._sums[WINDOW:] - self._sums[:count]) * self._inverses[:count] if count else self._sums[:0]
        return (_mixed(found) >> np.uint64(32)).astype(np.uint32)

    def digest(self, parent: bytes, start: int, stop: int) -> bytes:
        """Return the digest of the tokens of a run under a parent (``blend.chunks``)."""
        count = np.array([stop - start])
        whole = self.hashes(np.array([start]), count)
        first = self.hashes(np.array([start]), np.minimum(count, WINDOW)) if stop - start >= WINDOW else whole * 0
        tokens = hashlib.blake2b(parent, digest_size=KEY_BYTES - 8)
        tokens.update(self._ids[start:stop].tobytes())
        return first.astype("<u4").tobytes() + whole.astype("<u4").tobytes() + tokens.digest()

    def key(self, parent: bytes, start: int, stop: int) -> ObjectKey:
        """Return the key of a run as a chunk."""
        return ObjectKey(parent, ObjectKind.CHUNK, stop - start, self.digest(parent, start, stop))


_POWERS: dict[int, NDArray[np.uint64]] = {}
"""Powers by base, computed on demand."""


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return ``base ** 0``, ``base ** 1``, ... modulo 2 ** 64."""
    found = _POWERS.get(base)
    if found is None or found.size < count:
        factors = np.full(1 << max(12, count.bit_length()), base, np.uint64)
        factors[0] = 1
        _POWERS[base] = found = np.cumprod(factors)
    return found[:count]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return mixed values: each bit depends on all given bits (the finaliser of SplitMix64,
    https://prng.di.unimi.it/splitmix64.c)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
