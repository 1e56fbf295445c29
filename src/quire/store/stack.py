"""``Store``: tiers, nearest first, behind one interface for any thread of the engine.

Memory answers at once, in the caller's thread. All other tiers run on one event loop, on a thread
that starts on demand. A failure of a tier is never an error here: it is a miss, or an object that
was not written, and it is counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.forks import ParentsLock, in_children
from quire.base.metrics import MetricFamily
from quire.base.process_exit import end_with_process
from quire.contracts.store import Blob, ObjectKey, ObjectKind, StoreTier, TierStat
from quire.store.arriving_blob import ArrivingBlob
from quire.store.memory import MemoryTier
from quire.store.tier_guard import DAMAGE, StoreMetrics, TierGuard

R = TypeVar("R")

LOG = logging.getLogger("quire.store")
QUEUE_BYTES = 256 << 20
CLOSE_SECONDS = 2.0
PIECE_BYTES = 1 << 20
AT_ONCE = 2
"""Pieces of one chunk that are requested concurrently."""
REMOTE = {"redis", "object"}
"""Kinds of tiers whose objects are copied to memory when they are read."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object and the kind of its tier."""

    blob: Blob
    tier: str
    arriving: ArrivingBlob | None = None
    """The arrival of ``blob``'s bytes; None: all are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """A report about one tier."""

    kind: str
    label: str
    is_durable: bool
    stat: TierStat | None
    """None: it is unknown, or the tier rests."""
    rest_of_reads: float = 0.0
    """Seconds for which it is not read, because a read failed."""
    rest_of_writes: float = 0.0


class Store:
    """Tiers, nearest first. A memory tier is the first one."""

    def __init__(
        self,
        tiers: Sequence[StoreTier | MemoryTier],
        *,
        queue_bytes: int = QUEUE_BYTES,
        seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``queue_bytes``: most bytes that wait to be written; ``seconds``: most time of one
        operation of a tier."""
        if any(isinstance(tier, MemoryTier) for tier in tiers[1:]):
            raise InvalidArgument("a store has at most one memory tier, and it stands first", field="store")
        self.metrics = StoreMetrics(list(dict.fromkeys(tier.kind for tier in tiers)))
        self.memory = tiers[0] if tiers and isinstance(tiers[0], MemoryTier) else None
        """The memory tier; None: there is none."""
        far = [tier for tier in tiers if not isinstance(tier, MemoryTier)]
        self._far = [TierGuard(tier, self.metrics, seconds, clock) for tier in far]
        self._queue_bytes = queue_bytes
        self._room: Any = threading.Condition()
        """Guards all fields below; notified when bytes leave the queue."""
        self._queued = 0
        self._flights: dict[ObjectKey, Future[Found | None]] = {}
        """Running reads."""
        self._arriving: dict[ObjectKey, Found] = {}
        """Chunks that are arriving."""
        self._changes: dict[ObjectKey, Future[bool]] = {}
        """The last queued change of each object; the next one waits for it."""
        self._writing: dict[ObjectKey, Blob] = {}
        """Objects that are being written; reads return them from here."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[object]] = set()
        """Tasks of the loop, which itself keeps only weak references."""
        self._reported: set[tuple[str, str]] = set()
        """Tiers and reasons of damage that were logged."""
        end_with_process(self.close)
        in_children(self._forked)

    @property
    def is_durable(self) -> bool:
        """Return True if there is a tier that outlives the process."""
        return bool(self._far)

    def children(self, parents: Sequence[bytes], timeout: float = 1.0) -> Future[list[dict[ObjectKey, str]]]:
        """Return, for each parent, the keys under it, each with the kind of its nearest tier. A
        tier that takes longer than ``timeout`` seconds counts as empty."""
        near: list[dict[ObjectKey, str]] = [{} for _ in parents]
        if self.memory:
            for found, keys in zip(near, self.memory.children_now(parents), strict=True):
                found.update(dict.fromkeys(keys, self.memory.kind))
        if not self._far:
            return _done(near)
        with self._room:
            writing = list(self._writing)
        for found, parent in zip(near, parents, strict=True):
            for key in (key for key in writing if key.parent == parent):
                found.setdefault(key, self._far[0].kind)
        return self._ask(lambda: self._children(list(parents), near, timeout), near)

    def get(self, keys: Sequence[ObjectKey]) -> list[Future[Found | None]]:
        """Read objects, each from its nearest tier. Concurrent reads of an object are joined.
        Objects that wait to be written are found. A chunk of a remote tier is found when its first
        bytes have arrived (``Found.arriving``), so that its first layers are used while the others
        arrive."""
        answers: list[Future[Found | None]] = []
        near = self.memory.get_now(keys) if self.memory else [None] * len(keys)
        for key, blob in zip(keys, near, strict=True):
            if blob is not None:
                self.metrics.hits.inc("memory")
                self.metrics.read.inc("memory", memoryview(blob).nbytes)
                answers.append(_done(Found(blob, "memory")))
            elif not self._far:
                self.metrics.misses.inc()
                answers.append(_done(None))
            else:
                answers.append(self._flight(key))
        return answers

    def put(self, key: ObjectKey, blob: Blob, *, durable: bool, wait: bool = False) -> bool:
        """Keep an object: in memory at once, or ``durable``, written in the background to all
        durable tiers. Return False if there is no room: in memory, or in the queue (``wait``: wait
        for room in the queue). ``known`` reports later that a durable tier has it."""
        size = memoryview(blob).nbytes
        if not durable:
            if self.memory is None or self._closed or not self.memory.put_now(key, blob):
                return False
            self.metrics.written.inc("memory", size)
            return True
        if not self._far:
            return False
        with self._room:
            while self._queued and self._queued + size > self._queue_bytes and not self._closed:
                if not wait:
                    self.metrics.dropped.inc()
                    return False
                self._room.wait()
            if self._closed:
                return False
            if self.memory and key.kind is ObjectKind.RECORD:
                self.memory.remove_now([key])  # the one before
            self._queued += size
            self._change([key], lambda: self._write(key, blob), freed=size)
            if key in self._changes:
                self._writing[key] = blob
        return True

    def known(self, key: ObjectKey) -> bool:
        """Return True if a durable tier has the object, as far as this process has seen recently,
        and all other durable tiers that do not rest have it too."""
        have = [one.knows(key) for one in self._far]
        return any(have) and all(has or one.writes.is_broken for has, one in zip(have, self._far, strict=True))

    def damaged(self, key: ObjectKey, tier_kind: str, reason: str) -> None:
        """Count a damaged or unfit object that a tier returned, and remove it there. Reasons are
        those of ``tier_guard.DAMAGE``; any other counts as ``other``."""
        self.metrics.damaged.inc(reason if reason in DAMAGE else "other")
        if (tier_kind, reason) not in self._reported:  # later ones are only counted in the metrics
            self._reported.add((tier_kind, reason))
            LOG.warning("%s in the %s tier is damaged or does not fit (%s): it is removed", key.name, tier_kind, reason)
        if self.memory and tier_kind == self.memory.kind:
            self.memory.remove_now([key])
        if tiers := [one for one in self._far if one.kind == tier_kind]:
            self._forget([key], tiers)

    def contains(self, keys: Sequence[ObjectKey]) -> Future[list[bool]]:
        """Return, for each key, True if a tier has its object."""
        near = self.memory.contains_now(keys) if self.memory else [False for _ in keys]
        with self._room:
            near = [there or key in self._writing for key, there in zip(keys, near, strict=True)]
        return self._ask(lambda: self._contains(list(keys), near), near) if self._far else _done(near)

    def remove(self, keys: Collection[ObjectKey]) -> Future[bool]:
        """Remove objects, pinned ones too; the result is True if all tiers did."""
        if self.memory:
            self.memory.remove_now(keys)
        return self._forget(keys, self._far) if self._far else _done(True)

    def pin(self, keys: Collection[ObjectKey], pinned: bool) -> Future[bool]:
        """Pin or unpin objects in all tiers that have them; the result is True if all tiers did."""
        if self.memory:
            self.memory.pin_now(keys, pinned)
        return (
            self._change(keys, lambda: _all(one.pin(keys, pinned) for one in self._far)) if self._far else _done(True)
        )

    def direct(self, function: Callable[[StoreTier], Coroutine[object, object, R]]) -> Future[R]:
        """Run a coroutine over the first durable tier, on the store's loop. Errors of the tier
        become errors of the result, without retries or rests. ``FailedPrecondition``: there is no
        durable tier, or the store is closed."""
        if not self._far:
            raise FailedPrecondition("the store has no durable tier")
        tier = self._far[0].tier

        async def run() -> R:
            task = asyncio.current_task()
            assert task is not None
            self._keep(task)
            return await function(tier)

        with self._room:
            if self._closed:
                raise FailedPrecondition("the store is closed")
            return asyncio.run_coroutine_threadsafe(run(), self._started())

    def flush(self, timeout: float) -> bool:
        """Wait until all changes so far are made, or have failed, and the queue is free of them;
        return False on a timeout."""
        with self._room:
            changes = set(self._changes.values())

            def are_over() -> bool:
                return all(one.done() for one in changes) and changes.isdisjoint(self._changes.values())

            return bool(self._room.wait_for(are_over, timeout))

    def stat(self, timeout: float = 2.0) -> list[TierReport]:
        """Return a report about each tier."""
        silent: list[TierStat | None] = [None for _ in self._far]
        answer = self._ask(self._stat, silent) if self._far else _done(silent)
        stats = silent if wait([answer], timeout).not_done else answer.result()
        reports = [
            TierReport(
                kind=one.kind,
                label=one.tier.label,
                is_durable=True,
                stat=stat,
                rest_of_reads=one.reads.seconds,
                rest_of_writes=one.writes.seconds,
            )
            for one, stat in zip(self._far, stats, strict=True)
        ]
        if near := self.memory:
            reports.insert(0, TierReport(kind=near.kind, label=near.label, is_durable=False, stat=near.stat_now()))
        return reports

    def snapshot(self) -> dict[str, float]:
        """Return all metrics by their full names."""
        self._set_gauges()
        return self.metrics.snapshot()

    def collect(self) -> list[MetricFamily]:
        """Return all metrics for Prometheus."""
        self._set_gauges()
        return self.metrics.collect()

    def close(self, timeout: float = 10.0) -> None:
        """Write pending objects for at most ``timeout`` seconds, and close the tiers, which may
        take ``CLOSE_SECONDS``. Afterwards every read is a miss."""
        with self._room:
            if self._closed:
                return
        self.flush(timeout)
        with self._room:
            if self._closed:
                return
            self._closed = True
            self._room.notify_all()
            if self.memory:
                self.memory.clear_now()
            loop, thread = self._loop, self._thread
            if loop is not None:
                loop.call_soon_threadsafe(lambda: self._keep(loop.create_task(self._end(loop))))
        if thread is not None:
            thread.join()

    # ------------------------------------------------------------------ any thread

    def _forked(self) -> None:
        self._room = ParentsLock()

    def _set_gauges(self) -> None:
        for kind in {one.kind for one in self._far}:
            broken = [one.reads.is_broken or one.writes.is_broken for one in self._far if one.kind == kind]
            self.metrics.resting.set(kind, any(broken))
        self.metrics.queued.set(self._queued)

    def _flight(self, key: ObjectKey) -> Future[Found | None]:
        with self._room:
            if (blob := self._writing.get(key)) is not None:
                return _done(Found(blob, self._far[0].kind))
            if (found := self._arriving.get(key)) is not None:
                return _done(found)
            if flight := self._flights.get(key):
                return flight
            before = self._changes.get(key)
            flight = self._ask(lambda: self._fetch(key, before), None)
            if not flight.done():
                self._flights[key] = flight
        # The callback does not refer to the future: a reference cycle would keep the object alive
        # for a while.
        flight.add_done_callback(lambda ended: self._landed(key, ended))
        return flight

    def _landed(self, key: ObjectKey, flight: Future[Found | None]) -> None:
        with self._room:
            if self._flights.get(key) is flight:
                del self._flights[key]

    def _forget(self, keys: Collection[ObjectKey], tiers: Sequence[TierGuard]) -> Future[bool]:
        with self._room:
            for key in keys:
                self._writing.pop(key, None)
            return self._change(keys, lambda: _all(one.remove(keys) for one in tiers))

    def _change(
        self, keys: Collection[ObjectKey], function: Callable[[], Awaitable[bool]], freed: int = 0
    ) -> Future[bool]:
        """Run a change after earlier ones of the same objects."""
        with self._room:
            before = {change for key in keys if (change := self._changes.get(key))}
            for key in keys:
                self._flights.pop(key, None)  # began before the removal: later callers must not share it
                self._arriving.pop(key, None)

            async def run() -> bool:
                for change in before:
                    await asyncio.wrap_future(change)
                return await function()

            future = self._ask(run, False)
            if not future.done():
                self._changes.update(dict.fromkeys(keys, future))
        future.add_done_callback(lambda _: self._changed(keys, future, freed))
        return future

    def _changed(self, keys: Collection[ObjectKey], future: Future[bool], freed: int) -> None:
        with self._room:
            for key in keys:
                if self._changes.get(key) is future:
                    del self._changes[key]
                    self._writing.pop(key, None)
            self._queued -= freed
            self._room.notify_all()

    def _ask(self, function: Callable[[], Awaitable[R]], otherwise: R) -> Future[R]:
        """Run a coroutine on the loop. The result is ``otherwise`` if it does not finish. The
        future cannot be cancelled, because several callers may share it."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()

        async def answer() -> None:
            future.set_result(await function())

        def ended(task: asyncio.Task[object]) -> None:
            if not task.cancelled() and (error := task.exception()):
                LOG.error("a defect of the store", exc_info=error)
            if not future.done():
                future.set_result(otherwise)

        def start(loop: asyncio.AbstractEventLoop) -> None:
            task = loop.create_task(answer())
            self._keep(task)
            task.add_done_callback(ended)

        with self._room:
            if self._closed:
                future.set_result(otherwise)
                return future
            loop = self._started()
            loop.call_soon_threadsafe(start, loop)
        return future

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the loop, started on demand. The caller holds the lock."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="quire-store", daemon=True)
            self._thread.start()
        return self._loop

    # ------------------------------------------------------------------ the loop's thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _keep(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel running tasks, close the tiers and stop the loop."""
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(one.close(CLOSE_SECONDS) for one in self._far))
        loop.stop()

    async def _children(
        self, parents: list[bytes], near: list[dict[ObjectKey, str]], seconds: float
    ) -> list[dict[ObjectKey, str]]:
        answers = await asyncio.gather(*(one.children(parents, seconds) for one in self._far))
        merged = [dict(found) for found in near]
        for tier, answer in zip(self._far, answers, strict=True):
            for found, keys in zip(merged, answer, strict=True):
                for key in keys:
                    found.setdefault(key, tier.kind)
        return merged

    async def _fetch(self, key: ObjectKey, before: Future[bool] | None) -> Found | None:
        if before is not None:
            await asyncio.wrap_future(before)
        for tier in self._far:
            if key.kind is ObjectKind.CHUNK and tier.kind in REMOTE:
                if (found := await self._first_part(key, tier)) is not None:
                    return found
            elif (blob := await tier.get(key)) is not None:
                # A record may be replaced, also by another process; state under a key never
                # changes.
                if self.memory and tier.kind in REMOTE and key.kind is not ObjectKind.RECORD:
                    with self._room:
                        if key in self._flights:  # otherwise it was removed meanwhile
                            self.memory.put_now(key, blob)
                return Found(blob, tier.kind)
        self.metrics.misses.inc()
        return None

    async def _first_part(self, key: ObjectKey, tier: TierGuard) -> Found | None:
        """Return a chunk whose first bytes have arrived, and fetch the others in the background."""
        if (first := await tier.part(key, 0, PIECE_BYTES)) is None:
            return None
        arriving = ArrivingBlob(first.blob, first.size)
        found = Found(arriving.blob, tier.kind, arriving)
        with self._room:
            if key in self._flights:  # otherwise it was removed meanwhile
                self._arriving[key] = found
        self._keep(asyncio.get_running_loop().create_task(self._fetch_rest(key, tier, found, arriving)))
        return found

    async def _fetch_rest(self, key: ObjectKey, tier: TierGuard, found: Found, arriving: ArrivingBlob) -> None:
        size = len(arriving.blob)
        try:
            starts = range(arriving.there, size, PIECE_BYTES)
            for some in (starts[at : at + AT_ONCE] for at in range(0, len(starts), AT_ONCE)):
                parts = await asyncio.gather(*(tier.part(key, start, start + PIECE_BYTES) for start in some))
                for start, part in zip(some, parts, strict=True):
                    if part is None or part.size != size or len(part.blob) != min(PIECE_BYTES, size - start):
                        return
                    arriving.take(part.blob)
        finally:
            with self._room:
                if self._arriving.get(key) is found:
                    del self._arriving[key]
                    if arriving.is_whole and self.memory is not None:
                        self.memory.put_now(key, arriving.blob)
            arriving.end()

    async def _write(self, key: ObjectKey, blob: Blob) -> bool:
        return any(await asyncio.gather(*(one.put(key, blob) for one in self._far)))

    async def _contains(self, keys: list[ObjectKey], near: list[bool]) -> list[bool]:
        answers = await asyncio.gather(*(one.contains(keys) for one in self._far))
        return [any(there) for there in zip(near, *answers, strict=True)]

    async def _stat(self) -> list[TierStat | None]:
        return list(await asyncio.gather(*(one.stat() for one in self._far)))


async def _all(calls: Iterable[Awaitable[bool]]) -> bool:
    return all(await asyncio.gather(*calls))


def _done(result: R) -> Future[R]:
    future: Future[R] = Future()
    future.set_result(result)
    return future
