"""``MoveCosts``: measured costs of computing tokens and of moving their state on this machine."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from quire.base.metrics import Counter, Gauge, LabelledGauge, MetricGroup
from quire.base.outputs import TIERS

TO_MEMORY = "out"
"""Name of the transfer path from the pool; the other paths are named after their source tiers."""
ROADS = (TO_MEMORY, *TIERS[1:])
GUESS = 2**30
"""Assumed bytes per second of a path without measurements: enough to be worth a trial."""


@dataclass(slots=True)
class Rate:
    """Amount per second over the last measurements."""

    most: int
    measured: deque[tuple[float, float]] = field(default_factory=deque)
    """(amount, seconds), oldest first"""

    def add(self, amount: float, seconds: float) -> None:
        self.measured.append((amount, max(seconds, 1e-9)))
        if len(self.measured) > self.most:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        if self.measured:
            self.measured.popleft()

    @property
    def per_second(self) -> float | None:
        """Return the mean rate of the kept measurements; None if nothing was measured."""
        if not self.measured:
            return None
        return sum(done for done, _ in self.measured) / sum(seconds for _, seconds in self.measured)


class MoveMetrics(MetricGroup):
    """Metrics of moves between the pool and the tiers."""

    def __init__(self) -> None:
        self.saved = Counter("quire:store_tokens_saved_total", "Tokens whose state went from the pool to a tier.")
        self.loaded = Counter("quire:store_tokens_loaded_total", "Tokens whose state came back from a tier.")
        self.declined = Counter("quire:store_loads_declined_total", "Moves that were dearer than computing.")
        self.failed = Counter("quire:store_loads_failed_total", "Loads that did not come back whole.")
        self.seconds = Counter("quire:store_load_seconds_total", "Seconds of loads.")
        self.prompt_rate = Gauge("quire:store_prompt_tokens_per_second", "Measured rate of computing prompts.")
        self.rates = LabelledGauge(
            "quire:store_bytes_per_second", "Measured rate of moves, by where from; out: to memory.", "road", ROADS
        )
        self._share_lock()


class MoveCosts:
    """Rates of prompts and of the transfers between the pool and the tiers."""

    def __init__(self) -> None:
        self.prompts = Rate(most=64)
        """Tokens per second of steps with prompts."""
        self.roads: defaultdict[str, Rate] = defaultdict(lambda: Rate(most=8))
        """Bytes per second."""
        self.metrics = MoveMetrics()
        self._tokens, self._seconds = 0, 0.0

    def ran(self, num_tokens: int, num_chunks: int, seconds: float, *, waited: bool) -> None:
        """Count a step. ``waited``: its results were waited for. Otherwise the device may still be
        busy with it, and its time becomes part of the next step's."""
        self._tokens += num_tokens
        self._seconds += seconds
        if waited:
            # One token of each request is a decode, which says little about prompts.
            if self._tokens > num_chunks:
                self.prompts.add(self._tokens, self._seconds)
                self.metrics.prompt_rate.set(self.prompts.per_second or 0.0)
            self._tokens, self._seconds = 0, 0.0

    def moved(self, road: str, nbytes: int, seconds: float) -> None:
        """Count a transfer."""
        if nbytes:
            self.roads[road].add(nbytes, seconds)
            self.metrics.rates.set(road, self.roads[road].per_second or 0.0)

    def seconds(self, road: str, nbytes: int) -> float:
        """Return the estimated seconds of a transfer; a guess without measurements."""
        return nbytes / (self.roads[road].per_second or GUESS)

    def is_worth(self, tokens: float, bytes_by_road: dict[str, int]) -> bool:
        """Return True if these transfers beat computing ``tokens``. A refusal drops the oldest
        measurement of each path, so that a temporary slowdown is forgotten."""
        computing = self.prompts.per_second
        if computing is None:
            return True
        if sum(self.seconds(road, nbytes) for road, nbytes in bytes_by_road.items()) < tokens / computing:
            return True
        for road in bytes_by_road:
            self.roads[road].forget_oldest()
        return False
