"""``MoveCosts``: what computing tokens and moving their state cost on this machine, as measured."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from quire.metrics import Counter, Gauge, LabelledGauge, MetricGroup
from quire.outputs import TIERS

TO_MEMORY = "out"
"""The road from the pool; other roads have the names of the tiers that they come from."""
ROADS = (TO_MEMORY, *TIERS[1:])
GUESS = 2**30
"""Bytes per second of a road that was not taken yet: enough to be worth a trial."""


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
    """Rates of prompts and of the roads between the pool and the tiers."""

    def __init__(self) -> None:
        self.prompts = Rate(most=64)
        """Tokens per second of steps with prompts."""
        self.roads: defaultdict[str, Rate] = defaultdict(lambda: Rate(most=8))
        """Bytes per second."""
        self.metrics = MoveMetrics()
        self._tokens, self._seconds = 0, 0.0

    def ran(self, num_tokens: int, num_chunks: int, seconds: float, *, waited: bool) -> None:
        """Count a step. ``waited``: its results were waited for. The device may still be busy with
        a step that was not waited for: its time is part of the next one's."""
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
        """Return how long a transfer takes, by a guess if there was none yet."""
        return nbytes / (self.roads[road].per_second or GUESS)

    def is_worth(self, tokens: float, bytes_by_road: dict[str, int]) -> bool:
        """Return whether these transfers beat computing ``tokens``. A refusal forgets the oldest
        measurement of each road, so that a slow spell ends."""
        computing = self.prompts.per_second
        if computing is None:
            return True
        if sum(self.seconds(road, nbytes) for road, nbytes in bytes_by_road.items()) < tokens / computing:
            return True
        for road in bytes_by_road:
            self.roads[road].forget_oldest()
        return False
