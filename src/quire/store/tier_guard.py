"""A guard around a tier for the store: its verbs end in time, raise nothing, and rest after a
failure."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from quire.base.errors import TierError
from quire.base.metrics import Counter, Gauge, LabelledCounter, LabelledGauge, MetricGroup
from quire.contracts.store import Blob, ObjectKey, ObjectPart, StoreTier, TierStat

R = TypeVar("R")

LOG = logging.getLogger("quire.store")
FIRST_REST, LONGEST_REST = 1.0, 30.0
"""Seconds of rest after the first failure, and at most; each rest is twice the one before."""
WELL_SECONDS = 60.0
"""Seconds without a failure before the log reports that a tier works again: on a full disk small
writes succeed in between."""
READS, WRITES = 16, 4
"""Most objects read from one tier, and written to it, at a time."""
PARENTS_KNOWN = 16384
DAMAGE = ("header", "checksum", "key", "layout", "version", "other")
"""Reasons for which objects from tiers are unusable."""


class StoreMetrics(MetricGroup):
    """All metrics of a store; ``tiers`` are the kinds of its tiers."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.hits = LabelledCounter("quire:store_hits_total", "Objects read, by tier.", "tier", tiers)
        self.misses = Counter("quire:store_misses_total", "Objects asked for that no tier had.")
        self.read = LabelledCounter("quire:store_read_bytes_total", "Bytes of objects read, by tier.", "tier", tiers)
        self.written = LabelledCounter(
            "quire:store_written_bytes_total", "Bytes of objects that a tier keeps, by tier.", "tier", tiers
        )
        self.refused = LabelledCounter(
            "quire:store_refused_total", "Objects for which a tier had no room, by tier.", "tier", tiers
        )
        self.dropped = Counter("quire:store_dropped_total", "Objects not written since the queue was full.")
        self.failures = LabelledCounter(
            "quire:store_failures_total", "Operations of a tier that failed or took too long, by tier.", "tier", tiers
        )
        self.skipped = LabelledCounter(
            "quire:store_skipped_total", "Operations left out since a tier had failed before, by tier.", "tier", tiers
        )
        self.resting = LabelledGauge(
            "quire:store_resting", "Whether a tier is left alone now since it failed, by tier.", "tier", tiers
        )
        self.damaged = LabelledCounter(
            "quire:store_damaged_total", "Objects that were damaged or did not fit, by reason.", "reason", DAMAGE
        )
        self.queued = Gauge("quire:store_queued_bytes", "Bytes that wait to be written.")
        self._share_lock()


class Breaker:
    """Decides whether a tier is called. A failure makes it rest; then one call tries, and all
    others are skipped until that has ended."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._rest = self._until = 0.0
        self._well_since = 0.0
        self._logged_reason = ""
        """The logged failure; "" once the recovery is logged."""
        self._turns = 0
        """Number of state changes. A call that began before the last change is ignored."""

    @property
    def seconds(self) -> float:
        """Seconds left of the rest; 0 while all works."""
        return max(0.0, self._until - self._clock()) if self._rest else 0.0

    @property
    def is_broken(self) -> bool:
        """Return True if the last call failed."""
        return self._rest > 0

    def enter(self) -> int | None:
        """Return a ticket for one call; None while the tier rests."""
        if self._rest:
            if self.seconds:
                return None
            self._until = self._clock() + self._rest
        return self._turns

    def failed(self, ticket: int, reason: str) -> None:
        """Begin a rest after a failed call."""
        if ticket == self._turns:
            if not self._rest and reason != self._logged_reason:
                LOG.warning("%s: %s; the store goes on without it", self._what, reason)
                self._logged_reason = reason
            self._turns += 1
            self._rest = min(LONGEST_REST, max(FIRST_REST, 2 * self._rest))
            self._until = self._clock() + self._rest

    def worked(self, ticket: int) -> None:
        """End the rest after a successful call."""
        if ticket != self._turns:
            return
        if self._rest:
            self._turns += 1
            self._rest, self._well_since = 0.0, self._clock()
        elif self._logged_reason and self._clock() - self._well_since >= WELL_SECONDS:
            LOG.warning("%s: works again", self._what)
            self._logged_reason = ""


class TierGuard:
    """A tier behind two breakers: one for reads and one for writes, because a full disk can still
    be read. All methods but ``knows`` run on the store's loop."""

    def __init__(self, tier: StoreTier, metrics: StoreMetrics, seconds: float, clock: Callable[[], float]) -> None:
        self.tier, self.kind = tier, tier.kind
        self._metrics, self._seconds = metrics, seconds
        self.reads = Breaker(f"reading from {tier.label}", clock)
        self.writes = Breaker(f"writing to {tier.label}", clock)
        self._reading, self._writing = asyncio.Semaphore(READS), asyncio.Semaphore(WRITES)
        self._known: OrderedDict[bytes, set[ObjectKey]] = OrderedDict()
        """Objects that the tier is known to have, by parent."""

    def knows(self, key: ObjectKey) -> bool:
        """Return True if the tier had the object when last seen."""
        return key in self._known.get(key.parent, ())

    async def get(self, key: ObjectKey) -> Blob | None:
        """Return an object; None if it is missing or the tier fails."""
        async with self._reading:
            answer = await self._try(self.reads, lambda: self.tier.get([key]))
        if answer is None:
            return None
        if (blob := answer[0]) is None:
            self._forget(key)
            return None
        self._learn(key)
        self._metrics.hits.inc(self.kind)
        self._metrics.read.inc(self.kind, memoryview(blob).nbytes)
        return blob

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        """Return a range of bytes of an object; None if it is missing or the tier fails."""
        async with self._reading:
            # In a list, since ``None`` would mean a failure.
            answer = await self._try(self.reads, lambda: _listed(self.tier.part(key, start, stop)))
        if answer is None:
            return None
        if (part := answer[0]) is None:
            self._forget(key)
            return None
        if not start:
            self._learn(key)
            self._metrics.hits.inc(self.kind)
        self._metrics.read.inc(self.kind, memoryview(part.blob).nbytes)
        return part

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        """Write an object; return True if the tier has it."""
        async with self._writing:
            answer = await self._try(self.writes, lambda: self.tier.put(key, blob))
        if answer:
            self._learn(key)
            self._metrics.written.inc(self.kind, memoryview(blob).nbytes)
        elif answer is False:
            self._metrics.refused.inc(self.kind)
        return bool(answer)

    async def children(self, parents: Sequence[bytes], seconds: float) -> list[list[ObjectKey]]:
        """Return the keys under each parent; none if the tier fails."""
        answer = await self._try(self.reads, lambda: self.tier.children(parents), seconds)
        if answer is None:
            return [[] for _ in parents]
        for parent, keys in zip(parents, answer, strict=True):
            self._known[parent] = set(keys)
            self._bound(parent)
        return answer

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, for each key, True if its object exists; all False if the tier fails."""
        answer = await self._try(self.reads, lambda: self.tier.contains(keys))
        if answer is None:
            return [False for _ in keys]
        for key, there in zip(keys, answer, strict=True):
            (self._learn if there else self._forget)(key)
        return answer

    async def remove(self, keys: Collection[ObjectKey]) -> bool:
        """Remove objects; return True on success."""
        for key in keys:
            self._forget(key)
        return await self._try(self.writes, lambda: self.tier.remove(keys)) is not None

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> bool:
        """Pin or unpin objects; return True on success."""

        async def pin() -> bool:
            await self.tier.pin(keys, pinned)
            return True

        return bool(await self._try(self.writes, pin))

    async def stat(self) -> TierStat | None:
        """Return the tier's totals; None if unknown. A bucket lists all of its objects for them, so
        a timeout is no failure."""
        try:
            async with asyncio.timeout(self._seconds):
                return None if self.reads.seconds else await self.tier.stat()
        except Exception:
            return None

    async def close(self, seconds: float) -> None:
        """Close the tier."""
        try:
            async with asyncio.timeout(seconds):
                await self.tier.close()
        except Exception as error:
            LOG.warning("closing %s: %s", self.tier.label, _error_text(error))

    async def _try(self, breaker: Breaker, call: Callable[[], Awaitable[R]], seconds: float | None = None) -> R | None:
        """Return the result of a verb; None if the tier rests, or the verb fails or is late."""
        if (ticket := breaker.enter()) is None:
            self._metrics.skipped.inc(self.kind)
            return None
        seconds = self._seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                answer = await call()
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            if not late and not isinstance(error, TierError):
                LOG.error("a defect of the tier of %s", self.tier.label, exc_info=error)
            self._metrics.failures.inc(self.kind)
            told = _error_text(error).removeprefix(f"{self.tier.label}: ")
            breaker.failed(ticket, f"no answer within {seconds:g} s" if late else told)
            return None
        breaker.worked(ticket)
        return answer

    def _learn(self, key: ObjectKey) -> None:
        self._known.setdefault(key.parent, set()).add(key)
        self._bound(key.parent)

    def _forget(self, key: ObjectKey) -> None:
        if known := self._known.get(key.parent):
            known.discard(key)

    def _bound(self, used: bytes) -> None:
        self._known.move_to_end(used)
        if len(self._known) > PARENTS_KNOWN:
            self._known.popitem(last=False)


async def _listed(answer: Awaitable[R]) -> list[R]:
    return [await answer]


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
