"""Masks of slow grammars, made beside the engine, so that no other request waits for them.

A mask or a token of a usual grammar takes well under a millisecond. A grammar that can read one
text in many ways (``s: s s | s s s | "x"``) takes the longer the longer the text is: half a second
for each mask before it meets llguidance's limits. Those do not tell it from a wide grammar, whose
masks have as many items and take a millisecond; time does. So the time of each text's grammar is
measured, and while it is slow

- its masks are made beside the engine, which runs the others meanwhile. The request takes part in
  no step, and takes no seat, before its mask is there;
- all slow grammars together use ``SHARE`` of the time, while there are others in the steps: they
  rest for what a piece of work takes beyond ``SLOW_SECONDS``. llguidance takes a token in with the
  interpreter's lock held, for up to 0.13 seconds, and on a CPU a mask takes a core from the model.

This changes when a request's tokens come, never which.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

SLOW_SECONDS = 0.005
"""Seconds of a core for a token of a grammar that is not slow: its mask and taking it in."""

SHARE = 0.2
"""Part of the time that slow grammars have beside others."""

WAIT_SECONDS = 0.005
"""Seconds for which an engine with nothing else to do waits before it checks for a mask again."""

LOOK_SECONDS = 0.02
"""Seconds between two checks of a resting or idle thread for changes without notice."""

LINGER_SECONDS = 0.5
"""Seconds before an idle thread ends."""

T = TypeVar("T")


class Coming(Generic[T]):
    """What ``make`` makes beside the engine, once ``SlowMasks.start`` has it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.started = False
        self.dropped = False
        """Whether it was dropped. It is not begun then."""
        self.error: BaseException | None = None
        self._make: Callable[[], T] | None = make
        self._made: T | None = None
        self._over = threading.Event()

    @property
    def ready(self) -> bool:
        """Return whether ``result`` returns at once."""
        return not self.started or self.dropped or self._over.is_set()

    def result(self) -> T | None:
        """Wait for the result and return it, None if dropped or never started; raise the error of
        ``make``."""
        if not self.started or self.dropped:
            return None
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self._made

    def drop(self) -> None:
        """Drop it: it is not wanted any more."""
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
        """Plan ``workers`` threads; several are assumed to have idle cores."""
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
        """Return whether others than requests with slow grammars take part in the engine's
        steps."""
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
                # No daemon: a thread killed within llguidance, at the process's end, would abort
                # it.
                threading.Thread(target=self._work, name="quire-slow-grammars").start()
            self._changed.notify_all()

    def spent(self, seconds: float, *, beside: bool = False) -> None:
        """Count these seconds of a core for a slow grammar: the next one waits for others.
        ``beside``: in a thread of ours, which with several holds up no other."""
        excess = seconds - SLOW_SECONDS
        if excess > 0 and self._shared and not (beside and self._workers > 1):
            with self._changed:
                self._rests_until = max(self._rests_until, self._clock()) + excess * (1 / SHARE - 1)

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait, not for long, until something awaited is there."""
        with self._changed:
            self._changed.wait_for(until, WAIT_SECONDS)

    def close(self) -> None:
        """Rest no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def rest(self) -> float:
        """Return the seconds until the next piece of work may begin; 0 without others in the
        steps."""
        return max(0.0, self._rests_until - self._clock()) if self._shared and not self._closed else 0.0

    def _work(self) -> None:
        while (coming := self._next()) is not None:
            coming.run()
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> Coming[object] | None:
        """Return the next mask or grammar to make; None if the thread is to end."""
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
