"""``ViewBudget``: how often views of a running engine may be read. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local

SHARE = 0.014
"""The part of the time that all views together may take. With what is not counted, as reading
requests, it stays below 0.02."""
MOST_FOR_ANSWERS = 5.0
"""Seconds by which answers put off the next reading, at most: a client that asks all the time sees
news, too."""


class ViewBudget:
    """One account for all documents and all viewers. Any thread may call.

    A reading of ``s`` seconds, with the document made of it, puts off the next reading by
    ``s / SHARE``. Until then all viewers are shown the last one.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, work: Callable[[], float] = time.thread_time
    ) -> None:
        """``clock``: monotonic seconds; ``work``: seconds that this thread has computed."""
        self._clock, self._work = clock, work
        self._free = self._latest = float("-inf")
        self._lock = Lock()
        self._inside = local()

    @property
    def is_free(self) -> bool:
        """Return whether the engine may be read anew."""
        return self._clock() >= self._free

    @property
    def wait(self) -> float:
        """Seconds until the engine may be read anew."""
        return max(0.0, self._free - self._clock())

    def spend(self, seconds: float) -> None:
        """Charge the time of a reading."""
        with self._lock:
            self._free = max(self._free, self._clock()) + seconds / SHARE
            self._latest = self._free + MOST_FOR_ANSWERS

    def answered(self, seconds: float) -> None:
        """Charge the time of showing the last reading again."""
        with self._lock:
            later = max(self._free, self._clock()) + seconds / SHARE
            self._free = max(self._free, min(later, self._latest))

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Note the work of this thread in the block, which keeps others from computing. Within
        another such block it is noted once."""
        if getattr(self._inside, "is_open", False):
            yield
            return
        self._inside.is_open = True
        before = self._work()
        try:
            yield
        finally:
            self._inside.is_open = False
            self.spend(self._work() - before)
