"""A number of things that API keys divide: half of it by weight, half to who comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class KeyPortions:
    """What keys have of a number. Half of it is kept for them, each its part by weight; so no key,
    and no number of other keys, can take all."""

    def __init__(self, limit: int, weights: Mapping[str, float]) -> None:
        """``weights`` of all keys, by their owners' digests."""
        self.limit = limit
        whole = 2 * sum(weights.values())
        least = 1 if 2 * len(weights) <= limit else 0
        self._kept = {owner: max(least, int(limit * weight / whole)) for owner, weight in weights.items()}
        self._shared = max(0, limit - sum(self._kept.values()))
        self.used: Counter[str] = Counter()

    def left(self, owner: str) -> int:
        """Return how many a key may still take."""
        shared = self._shared - sum(max(0, count - self._kept.get(key, 0)) for key, count in self.used.items())
        return max(0, self._kept.get(owner, 0) - self.used[owner]) + max(0, shared)

    def most(self, owner: str) -> int:
        """Return how many a key may have while no other has any."""
        return self._kept.get(owner, 0) + self._shared

    def take(self, owner: str, count: int) -> None:
        """Count that a key has so many more, or fewer."""
        self.used[owner] += count
        if not self.used[owner]:
            del self.used[owner]

    @contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """Count one until the block ends."""
        self.take(owner, 1)
        try:
            yield
        finally:
            self.take(owner, -1)
