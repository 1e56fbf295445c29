"""Masks of slow grammars, made beside the engine, so that nobody waits for the grammar of another.

A mask or a token of a usual grammar takes well under a millisecond. A grammar that can read one text in many ways
(``s: s s | s s s | "x"``) takes the longer the longer the text is: half a second for each mask before it meets llguidance's
limits. No limit of llguidance's tells such a grammar from a wide one, whose masks have as many items and take a millisecond; time
does. So the time of each text's grammar is measured, and while it is slow

- its masks are made beside the engine, which runs the others meanwhile. The request takes part in no step before its mask is
  there, and takes no seat from anybody;
- all slow grammars together use ``SHARE`` of the time, as long as there are others in the steps: what a piece of work takes
  beyond ``SLOW_SECONDS`` they rest for afterwards. llguidance takes a token in with the interpreter's lock held, which is in
  everybody's way for up to 0.13 seconds, and where the model runs on the CPU a mask takes a core from it.

Only when a request's tokens come depends on any of this, never which.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

SLOW_SECONDS = 0.005
"""Seconds of a core that the grammar of a text that is not slow takes for a token: its mask and taking it in."""

SHARE = 0.2
"""Part of the time that slow grammars have beside others."""

WAIT_SECONDS = 0.005
"""For how long an engine with nothing else to do waits for a mask before it looks again whether there is."""

LOOK_SECONDS = 0.02
"""Between two looks of a thread that rests, or has nothing to do, at what changes without a word."""

LINGER_SECONDS = 0.5
"""For how long a thread with nothing to do stays."""

T = TypeVar("T")


class Coming(Generic[T]):
    """What is made beside the engine, by ``make``. Before it is given to ``SlowMasks.start`` there is nothing to wait for."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.started = False
        self.dropped = False
        """Whether nobody wants it any more. It is not begun then."""
        self.error: BaseException | None = None
        self._make: Callable[[], T] | None = make
        self._made: T | None = None
        self._over = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether ``result`` returns at once."""
        return not self.started or self.dropped or self._over.is_set()

    def result(self) -> T | None:
        """What was made, waiting for it if need be; None if it was dropped or never started. What ``make`` has raised."""
        if not self.started or self.dropped:
            return None
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self._made

    def drop(self) -> None:
        """Nobody wants it any more."""
        self.dropped = True

    def run(self) -> None:
        """Make it."""
        make, self._make = self._make, None
        try:
            if make is not None and not self.dropped:
                self._made = make()
        except BaseException as error:
            self.error = error
        finally:
            self._over.set()


class SlowMasks:
    """Threads for the slow grammars of an engine, which are there while there are any."""

    def __init__(self, workers: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """``workers``: threads; of several it is assumed that they have cores that nobody else wants."""
        self._workers = workers
        self._clock = clock
        self._shared = False
        self._rests_until = 0.0
        self._closed = False
        self._threads = 0
        self._queue: deque[Coming[object]] = deque()
        self._changed = threading.Condition()

    @property
    def shared(self) -> bool:
        """Whether others take part in the engine's steps."""
        return self._shared

    @shared.setter
    def shared(self, shared: bool) -> None:
        if shared != self._shared:
            with self._changed:
                # They rest for those who are there, not for what was done before they came.
                self._shared, self._rests_until = shared, 0.0
                self._changed.notify_all()

    def start(self, coming: Coming[T]) -> None:
        """Have it made, after those that came before."""
        with self._changed:
            self._queue.append(coming)  # type: ignore[arg-type]
            coming.started = True
            if self._threads < self._workers:
                self._threads += 1
                # No daemon: a thread that is killed at the end of the process within llguidance would abort it.
                threading.Thread(target=self._work, name="quire-slow-grammars").start()
            self._changed.notify_all()

    def spent(self, seconds: float, *, beside: bool = False) -> None:
        """A slow grammar has used these seconds of a core: the next one is to wait for others. ``beside``: in a thread of ours,
        which with several is in nobody's way."""
        excess = seconds - SLOW_SECONDS
        if excess > 0 and self._shared and not (beside and self._workers > 1):
            with self._changed:
                self._rests_until = max(self._rests_until, self._clock()) + excess * (1 / SHARE - 1)

    def wait(self, until: Callable[[], bool]) -> None:
        """Until something is there that was waited for, but not for long."""
        with self._changed:
            self._changed.wait_for(until, WAIT_SECONDS)

    def close(self) -> None:
        """Rest no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def rest(self) -> float:
        """Seconds until the next piece of work may begin; 0 if there is nobody to wait for."""
        return max(0.0, self._rests_until - self._clock()) if self._shared and not self._closed else 0.0

    def _work(self) -> None:
        while (coming := self._next()) is not None:
            coming.run()
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> Coming[object] | None:
        """What is to be made now; None if the thread is to end."""
        idle = 0.0
        with self._changed:
            while True:
                while self._queue and self._queue[0].dropped:
                    self._queue.popleft()
                # The end of the process waits for this thread: no time to rest.
                ending = not threading.main_thread().is_alive()
                left = self.rest()
                if self._queue and (ending or not left):
                    return self._queue.popleft()
                if not self._queue:
                    if ending or idle > LINGER_SECONDS:
                        self._threads -= 1
                        return None
                    left, idle = LOOK_SECONDS, idle + LOOK_SECONDS
                self._changed.wait(min(left, LOOK_SECONDS))
