"""``LookBudget``: how often a running engine may be looked at. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local

SHARE = 0.014
"""The part of the time that all looking together may take. With what is not counted, as reading
requests, it stays below 0.02."""
MOST_FOR_ANSWERS = 5.0
"""Seconds by which answers put off the next look, at most: who asks all the time sees news, too."""


class LookBudget:
    """One account for all documents and all viewers. Any thread may call.

    Whoever has looked for ``s`` seconds, or made a document of what was seen, keeps everybody from
    looking anew for ``s / SHARE``. Until then all are shown what was seen last.
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
        """Return whether one may look anew."""
        return self._clock() >= self._free

    @property
    def wait(self) -> float:
        """Seconds until one may look anew."""
        return max(0.0, self._free - self._clock())

    def spend(self, seconds: float) -> None:
        """Note that a look took so long."""
        with self._lock:
            self._free = max(self._free, self._clock()) + seconds / SHARE
            self._latest = self._free + MOST_FOR_ANSWERS

    def answered(self, seconds: float) -> None:
        """Note that showing again what was seen last took so long."""
        with self._lock:
            later = max(self._free, self._clock()) + seconds / SHARE
            self._free = max(self._free, min(later, self._latest))

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Note what this thread computes in the block, which keeps others from computing. Within
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
