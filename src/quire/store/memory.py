"""``MemoryTier``: objects in this process's memory, the nearest tier.

It is no ``StoreTier``: it answers at once, on any thread, and its objects end with the process.

An object is never evicted before its children, and counts as used when they are: of the objects
without children the least recently used is evicted first. An evicted object passes its time of use
to its parent, so that a use need not walk up the chain.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.contracts.store import Blob, ObjectKey, ObjectKind, ObjectPart, TierStat


@dataclass(slots=True)
class _Kept:
    """An object of the tier."""

    key: ObjectKey
    blob: Blob
    size: int
    use: int
    """Number of this object's last use, counting the uses of all objects."""
    pinned: bool = False
    queued: bool = False
    """Whether the queue has an entry for it."""


class MemoryTier:
    """Objects in memory. Each verb holds a lock for microseconds."""

    kind = "memory"
    label = "memory"

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._kept: dict[ObjectKey, _Kept] = {}
        self._under: dict[bytes, dict[ObjectKey, None]] = {}
        """The keys under each parent, in order of arrival."""
        self._ends: dict[bytes, dict[ObjectKey, None]] = {}
        """The keys by their digests: the parents of the objects under a digest."""
        self._queue: list[tuple[int, ObjectKey]] = []
        """A heap of eviction candidates, by last use. Entries may be outdated, and are checked when
        popped."""
        self._bytes = self._pinned_bytes = self._uses = 0

    def get_now(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        """As ``StoreTier.get``."""
        found: list[Blob | None] = []
        with self._lock:
            for key in keys:
                if kept := self._kept.get(key):
                    kept.use = self._next_use()
                found.append(kept.blob if kept else None)
        return found

    def put_now(self, key: ObjectKey, blob: Blob) -> bool:
        """As ``StoreTier.put``."""
        size = memoryview(blob).nbytes
        with self._lock:
            old = self._kept.get(key)
            if old and key.kind is not ObjectKind.RECORD:
                old.use = self._next_use()
                return True
            if size > self.capacity:
                return False
            if old:
                self._drop(old)
            new = _Kept(key, blob, size, self._next_use(), pinned=old is not None and old.pinned)
            self._add(new)
            gone = [old] if old else []
            while self._bytes > self.capacity:
                oldest = self._oldest()
                if oldest is None or oldest is new:
                    new.use = 0  # a refused object does not count as a use of its ancestors
                    self._drop(new)
                    for one in gone:
                        self._add(one)
                    return False
                self._drop(oldest)
                gone.append(oldest)
        return True

    def contains_now(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """As ``StoreTier.contains``."""
        with self._lock:
            return [key in self._kept for key in keys]

    def children_now(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        """As ``StoreTier.children``."""
        with self._lock:
            return [list(self._under.get(parent, ())) for parent in parents]

    def remove_now(self, keys: Collection[ObjectKey]) -> int:
        """As ``StoreTier.remove``."""
        with self._lock:
            found = [kept for key in dict.fromkeys(keys) if (kept := self._kept.get(key))]
            for kept in found:
                self._drop(kept)
        return len(found)

    def pin_now(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        """As ``StoreTier.pin``."""
        with self._lock:
            for kept in (kept for key in keys if (kept := self._kept.get(key))):
                self._pinned_bytes += (pinned - kept.pinned) * kept.size
                kept.pinned = pinned
                self._offer(kept)

    def stat_now(self) -> TierStat:
        """As ``StoreTier.stat``."""
        with self._lock:
            return TierStat(
                objects=len(self._kept), bytes=self._bytes, capacity=self.capacity, pinned=self._pinned_bytes
            )

    def clear_now(self) -> None:
        """Remove all objects."""
        self.remove_now(list(self._kept))

    # -------------------------------------------------------- with the lock held

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _add(self, one: _Kept) -> None:
        self._kept[one.key] = one
        self._under.setdefault(one.key.parent, {})[one.key] = None
        self._ends.setdefault(one.key.digest, {})[one.key] = None
        self._bytes += one.size
        self._pinned_bytes += one.size * one.pinned
        one.queued = False
        self._offer(one)

    def _drop(self, one: _Kept) -> None:
        del self._kept[one.key]
        self._bytes -= one.size
        self._pinned_bytes -= one.size * one.pinned
        for index, digest in ((self._under, one.key.parent), (self._ends, one.key.digest)):
            del index[digest][one.key]
            if not index[digest]:
                del index[digest]
        for key in self._ends.get(one.key.parent, ()):
            above = self._kept[key]
            above.use = max(above.use, one.use)
            self._offer(above)

    def _offer(self, one: _Kept) -> None:
        """Queue an object for eviction if it may be evicted and is not queued."""
        if one.queued or one.pinned or one.key.digest in self._under:
            return
        if len(self._queue) > 2 * len(self._kept) + 64:  # mostly of removed objects
            self._queue = [(kept.use, key) for key, kept in self._kept.items() if kept.queued]
            heapq.heapify(self._queue)
        one.queued = True
        heapq.heappush(self._queue, (one.use, one.key))

    def _oldest(self) -> _Kept | None:
        """Pop the next object to evict from the queue; None: there is none."""
        while self._queue:
            use, key = heapq.heappop(self._queue)
            one = self._kept.get(key)
            if one is None:
                continue
            one.queued = False
            if one.use == use and not one.pinned and one.key.digest not in self._under:
                return one
            self._offer(one)
        return None


def cut(blob: Blob | None, start: int, stop: int) -> ObjectPart | None:
    """Return a part of an object that is in memory, or mapped, without a copy."""
    if blob is None:
        return None
    view = memoryview(blob).cast("B")
    return ObjectPart(view[start:stop], len(view))
