"""Masks of slow grammars, made beside the engine, so that nobody waits for the grammar of another.

A mask or a token of a usual grammar takes well under a millisecond. A grammar that can read one text in many ways
(``s: s s | s s s | "x"``) takes the longer the longer the text is: half a second for each mask before it meets llguidance's
limits. No limit of llguidance's tells such a grammar from a wide one, whose masks have as many items and take a millisecond; time
does. So the time of each text's grammar is measured, and while it is slow

- its masks are made by one thread beside the engine, which runs the others meanwhile. The request takes part in no step
  before its mask is there;
- all slow grammars together use ``SHARE`` of the time, as long as there are others in the steps: after each piece of
  work they rest. llguidance takes a token in with the interpreter's lock held, which is in everybody's way for up to 0.13 seconds.

Only when a request's tokens come depends on any of this, never which.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

SLOW_SECONDS = 0.005
"""Seconds of a core that the grammar of a text that is not slow takes for a token: its mask and taking it in."""

SHARE = 0.2
"""Part of the time that slow grammars have beside others."""

WAIT_SECONDS = 0.005
"""For how long an engine with nothing else to do waits for a mask before it looks again whether there is."""

T = TypeVar("T")


class SlowMasks:
    """One thread for the slow grammars of an engine, started when there is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.shared = False
        """Whether others take part in the engine's steps."""
        self._clock = clock
        self._rests_until = 0.0
        self._closed = False
        self._thread: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()

    def start(self, make: Callable[[], T]) -> Future[T]:
        """Have ``make`` called, after those who came before."""
        with self._changed:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-slow-grammars")
            future = self._thread.submit(self._in_turn, make)
        future.add_done_callback(self._tell)
        return future

    def spent(self, seconds: float) -> None:
        """A slow grammar has used these seconds of a core: the next one is to wait for others."""
        with self._changed:
            self._rests_until = max(self._rests_until, self._clock()) + seconds * (1 / SHARE - 1)

    def wait(self, until: Callable[[], bool]) -> None:
        """Until something is there that was waited for, but not for long."""
        with self._changed:
            self._changed.wait_for(until, WAIT_SECONDS)

    def close(self) -> None:
        """Rest no more; the thread ends when nobody has a use for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def rest(self) -> float:
        """Seconds until the next piece of work may begin; 0 if there is nobody to wait for."""
        return max(0.0, self._rests_until - self._clock()) if self.shared and not self._closed else 0.0

    def _in_turn(self, make: Callable[[], T]) -> T:
        with self._changed:
            while left := self.rest():
                self._changed.wait(min(left, WAIT_SECONDS))  # whether others are there changes without a word
        return make()

    def _tell(self, future: Future[T]) -> None:
        with self._changed:
            self._changed.notify_all()
