"""Work left by garbage-collected objects: open sessions, running streams, KV caches."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from quire.forks import Forked
from quire.interrupts import Lock

P = ParamSpec("P")
T = TypeVar("T")
End = Callable[[], object]


class Orphans:
    """Remembers what to call once an object is gone.

    The garbage collector may run in the middle of anything, also between two bytecodes of a
    finaliser. ``watch`` makes it append to a list only, in C, so that no signal comes between the
    object's end and the note of it. ``leave`` is for finalisers: it ends at once what it can.
    """

    def __init__(self, lock: Lock, ready: Callable[[], bool] = lambda: True) -> None:
        """Set the ``lock`` that ends need, and ``ready``: whether its holder can call them now."""
        self._lock = lock
        self._ready = ready
        self._ends: dict[weakref.ref[object], End] = {}
        self._gone: deque[weakref.ref[object]] = deque()
        self._left: deque[End] = deque()

    def watch(self, owner: object, end: End) -> None:
        """Let ``bury`` call ``end`` once ``owner`` is gone.

        ``end`` must not hold the owner, and may be called twice.
        """
        self._ends[weakref.ref(owner, self._gone.append)] = end

    def unwatch(self, owner: object) -> None:
        """Forget what ``watch`` remembers for ``owner``, whose end has been called."""
        self._ends.pop(weakref.ref(owner), None)

    def leave(self, end: End) -> None:
        """Call ``end`` now if no thread is at work, this one included; else ``bury`` calls it."""
        if self._lock.is_parents:  # What it gives back is the parent's.
            return
        self._left.append(end)
        if self._lock.owned or not self._lock.acquire(blocking=False):
            return
        try:
            self.bury()
        finally:
            self._lock.release(deliver=False)

    def bury(self) -> bool:
        """End what objects that are gone have left; return whether there was anything.

        Call it under the lock.
        """
        if not (self._gone or self._left) or not self._ready():
            return False
        found = False
        while self._gone:
            self._left.append(self._ends.pop(self._gone.popleft()))
        while self._left:
            # An end returns False where nothing was left to give back.
            found |= self._left.popleft()() is not False
        return found


def unless_exiting(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Make a method do nothing once the interpreter shuts down, or if its object is that of a
    parent process.

    Modules are emptied then. If a program's objects go last, because for example ``dill`` holds
    ``__main__``, a finaliser finds None in place of functions and classes. The process frees all.
    """
    exiting, forked = sys.is_finalizing, Forked  # in a closure, which outlives this module's names

    @wraps(method)
    def guarded(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not exiting():
            try:
                method(self, *args, **kwargs)
            except forked:
                return

    return guarded
