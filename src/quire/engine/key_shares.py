"""How API keys share steps and places: virtual time by tokens, and places by need. No torch.

Each key has a virtual time, which grows by the tokens that are computed for it over its weight
(a virtual token counter, arXiv:2401.00588). Among the keys that contend, whose prompts want tokens
of a step, the one with the least time comes first. So each of them gets tokens in proportion to its
weight, and a key that asks for less gets what it asks for. A key that begins to contend starts at
the time of those that do, so idle time is no credit. What it had beyond that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

TURN = 64
"""Weighted tokens after which a key gives its place to another, if there are more keys than
places."""


class KeyShares:
    """The virtual times of keys. ``lag``: weighted tokens by which the time of a contending key may
    be behind that of another, so that a key that could not use its share waits for no long time
    of others later."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._weights: dict[str, float] = {}
        self._times: dict[str, float] = {}
        self._contending: frozenset[str] = frozenset()

    def weight(self, key: str) -> float:
        """Return a key's weight, 1 by default."""
        return self._weights.get(key, 1.0)

    def set_weight(self, key: str, weight: float) -> None:
        """Give a key this share, relative to others, from now on."""
        self._weights[key] = weight

    def time(self, key: str, tokens: int = 0) -> float:
        """Return a key's virtual time once so many tokens more are computed."""
        return self._times.get(key, 0.0) + tokens / self.weight(key)

    def charge(self, used: Mapping[str, int]) -> None:
        """Count the tokens of a step by key."""
        for key, tokens in used.items():
            self._times[key] = self.time(key, tokens)

    def contend(self, keys: Set[str]) -> None:
        """Begin a step for whose tokens these keys contend."""
        if len(keys) < 2 and self._contending == keys:
            return  # One key, or none, continues: its time is behind that of no other.
        stayed = self._contending.intersection(keys)
        # With no contention there is nothing to be remembered: all start at the latest time.
        now = min(map(self.time, stayed)) if stayed else max(self._times.values(), default=0.0)
        for key in keys:
            if key not in stayed:
                self._times[key] = max(self.time(key), now)
        floor = max(map(self.time, keys), default=0.0) - self._lag
        for key in keys:
            self._times[key] = max(self.time(key), floor)
        self._contending = frozenset(keys)

    def places(self, total: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """Divide places among keys in proportion to their weights. What a key does not want goes to
        the others. With more keys than places, those with the least time get one each, in turns."""
        keys = sorted(wanted, key=lambda key: (self.time(key) // TURN, key))
        left = dict.fromkeys(keys[:total])
        places = dict.fromkeys(keys, 0)
        # The key that wants least for its weight comes first: it is the first to have enough.
        for key in sorted(left, key=lambda key: wanted[key] / self.weight(key)):
            weights = sum(map(self.weight, left))
            share = max(1, round(total * self.weight(key) / weights))
            # One place stays for each of the others.
            places[key] = min(wanted[key], share, total - len(left) + 1)
            total -= places[key]
            del left[key]
        return places
