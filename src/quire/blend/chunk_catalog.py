"""The chunks in the tiers: lists of keys, updated in the background.

A list is kept, and requested again if it is used and older than ``FRESH_SECONDS`` (later, if
listing takes long). Chunks that this process writes or misses are updated at once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from quire.base.process_exit import end_with_process
from quire.blend.chunk_matching import KnownChunks
from quire.contracts.store import Blob, ObjectKey, ObjectKind
from quire.store.memory import MemoryTier
from quire.store.stack import Store
from quire.store.threads import DaemonThreads

DEFAULT_BYTES = 1 << 30
"""Bytes of host memory for chunks without a configured store."""
FRESH_SECONDS = 1.0
RESTS = 9
"""Ratio of pause to listing time for a slow tier, because listing a bucket costs money."""
LOOK_SECONDS = 0.25
"""Most seconds that a prompt waits for the first list."""
LIST_SECONDS = 10.0
"""Most seconds that a tier may take for a list. Nothing waits meanwhile."""
PARENTS = 256
"""Most lists that are kept."""
WAITING_BYTES = 1 << 30
"""Bytes of chunks that may wait to be handed to the store, which has a queue of its own."""

Listing = list[dict[ObjectKey, str]]


def store_of_chunks(store: Store | None) -> Store:
    """Return the store for chunks: the configured one, or a new one in memory, which the caller
    closes."""
    return Store([MemoryTier(DEFAULT_BYTES)]) if store is None else store


@dataclass(slots=True)
class _List:
    """The known chunks under one parent."""

    tiers: dict[ObjectKey, str] = field(default_factory=dict)
    changes: dict[ObjectKey, str | None] = field(default_factory=dict)
    """Chunks that were written, or missed (None), since the list was last requested."""
    chunks: KnownChunks | None = None
    """Built from ``tiers``; None: not yet."""
    asked: float | None = None
    """Time of the last request."""
    due: float = 0.0
    """Time of the next possible request."""
    until: float = 0.0
    """Time at which the wait for the first answer ends."""
    pending: bool = False
    answered: bool = False


class ChunkCatalog:
    """The chunks of a store, for any number of key spaces. One per engine, for any thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lists: OrderedDict[bytes, _List] = OrderedDict()
        self._changed = threading.Condition()
        """Guards all fields; notified of answers."""
        self._asking, self._writing = DaemonThreads(1, "quire-chunks"), DaemonThreads(1, "quire-chunk-write")
        self.loading = DaemonThreads(1, "quire-chunk-load")
        """The thread on which tasks load layers ahead."""
        self._waiting = 0
        """Bytes that wait to be handed to the store."""
        end_with_process(self.close)

    def ask(self, parent: bytes) -> None:
        """Request the chunks under a parent, unless it was done within ``FRESH_SECONDS``."""
        with self._changed:
            found, now = self._list(parent), time.monotonic()
            if found.asked is None:
                found.until = now + LOOK_SECONDS
            elif found.pending or now < found.due:
                return
            found.pending, found.asked, found.due, found.changes = True, now, now + FRESH_SECONDS, {}
        self._asking.add(partial(self._ask, parent, found))

    def known(self, parent: bytes) -> KnownChunks:
        """Return the known chunks under a parent, and request them again in the background. Waits
        for the first answer, until ``LOOK_SECONDS`` after the first ``ask``."""
        self.ask(parent)
        with self._changed:
            found = self._list(parent)
            self._changed.wait_for(lambda: found.answered, max(0.0, found.until - time.monotonic()))
            if found.chunks is None:
                found.chunks = KnownChunks(parent, found.tiers.copy())
            return found.chunks

    def has(self, key: ObjectKey) -> bool:
        """Return True if a chunk is known to exist. The memory tier is queried directly."""
        memory = self.store.memory
        if memory is not None and memory.contains_now([key])[0]:
            return True
        tier = self.known(key.parent).tiers.get(key)
        return self.store.known(key) or (tier is not None and (memory is None or tier != memory.kind))

    def put(self, key: ObjectKey, blob: Blob, *, private: bool) -> bool:
        """Keep a chunk: in memory at once, and, unless it is private, in durable tiers, written by
        a thread. Return False if no tier takes it."""
        memory, size = self.store.memory, memoryview(blob).nbytes
        is_near = self.store.put(key, blob, durable=False)
        with self._changed:
            is_written = self.store.is_durable and not private and self._waiting + size <= WAITING_BYTES
            if is_written:
                self._waiting += size
            elif self.store.is_durable and not private:
                self.store.metrics.dropped.inc()
        if is_near and memory is not None:
            self._change(key, memory.kind)
        if is_written:
            self._writing.add(partial(self._write, key, blob))
        return is_near or is_written

    def drop(self, key: ObjectKey) -> None:
        """Forget a chunk that could not be read."""
        self._change(key, None)

    def flush(self, timeout: float) -> bool:
        """Wait until all chunks are handed to the store; return False on a timeout. ``Store.flush``
        then waits for the tiers."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """End the threads. The store stays open. Chunks that wait for it are lost."""
        for one in (self._asking, self._writing, self.loading):
            one.close()

    def _list(self, parent: bytes) -> _List:
        """Return the list of a parent. The caller holds the lock."""
        found = self._lists.setdefault(parent, _List())
        self._lists.move_to_end(parent)
        if len(self._lists) > PARENTS:
            self._lists.popitem(last=False)
        return found

    def _change(self, key: ObjectKey, tier: str | None) -> None:
        with self._changed:
            found = self._list(key.parent)
            found.changes[key], found.chunks = tier, None
            _apply(found.tiers, {key: tier})

    # ------------------------------------------------------------------ threads

    def _ask(self, parent: bytes, asked: _List) -> None:
        # This runs on the store's event loop, which must not be blocked by sorting.
        answer = self.store.children([parent], timeout=LIST_SECONDS)
        answer.add_done_callback(lambda ended: self._asking.add(partial(self._answered, asked, ended)))

    def _answered(self, asked: _List, answer: Future[Listing]) -> None:
        found = {key: tier for key, tier in answer.result()[0].items() if key.kind is ObjectKind.CHUNK}
        with self._changed:
            _apply(found, asked.changes)
            if found != asked.tiers:
                asked.tiers, asked.chunks = found, None
            asked.pending, asked.answered, now = False, True, time.monotonic()
            asked.due = max(asked.due, now + RESTS * (now - (asked.asked or now)))
            self._changed.notify_all()

    def _write(self, key: ObjectKey, blob: Blob) -> None:
        try:
            if not self.store.known(key):
                self.store.put(key, blob, durable=True, wait=True)
                with self._changed:
                    self._list(key.parent).due = 0.0  # due at once: the list now has this chunk
                self.ask(key.parent)
        finally:
            with self._changed:
                self._waiting -= memoryview(blob).nbytes
                self._changed.notify_all()


def _apply(tiers: dict[ObjectKey, str], changes: Mapping[ObjectKey, str | None]) -> None:
    for key, tier in changes.items():
        if tier is None:
            tiers.pop(key, None)
        else:
            tiers[key] = tier
