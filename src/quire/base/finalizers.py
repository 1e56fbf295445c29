"""Clean-up after garbage-collected objects: open sessions, running streams, KV caches."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from quire.base.forks import Forked
from quire.base.interrupts import Lock

P = ParamSpec("P")
T = TypeVar("T")
End = Callable[[], object]


class FinalizerQueue:
    """Functions to call after an object is gone.

    The garbage collector may run at any time, also between two bytecodes of a finaliser. ``watch``
    only makes it append to a list, in C, so that no signal can come between the object's end and
    this record. ``leave`` is for finalisers: it runs the function at once if possible.
    """

    def __init__(self, lock: Lock, ready: Callable[[], bool] = lambda: True) -> None:
        """Set the ``lock`` that the functions need, and ``ready``, which returns True if they can
        be called now."""
        self._lock = lock
        self._ready = ready
        self._ends: dict[weakref.ref[object], End] = {}
        self._gone: deque[weakref.ref[object]] = deque()
        self._left: deque[End] = deque()

    def watch(self, owner: object, end: End) -> None:
        """Let ``run_finalizers`` call ``end`` after ``owner`` is gone.

        ``end`` must not reference the owner, and may be called twice.
        """
        self._ends[weakref.ref(owner, self._gone.append)] = end

    def unwatch(self, owner: object) -> None:
        """Forget the ``end`` of ``owner``, because it was called."""
        self._ends.pop(weakref.ref(owner), None)

    def leave(self, end: End) -> None:
        """Call ``end`` now if no thread holds the lock, this one included; else ``run_finalizers``
        calls it."""
        if self._lock.is_parents:  # the resources belong to the parent process
            return
        self._left.append(end)
        if self._lock.owned or not self._lock.acquire(blocking=False):
            return
        try:
            self.run_finalizers()
        finally:
            self._lock.release(deliver=False)

    def run_finalizers(self) -> bool:
        """Call the functions of objects that are gone; return False if there was nothing to free.

        Call it under the lock.
        """
        if not (self._gone or self._left) or not self._ready():
            return False
        found = False
        while self._gone:
            self._left.append(self._ends.pop(self._gone.popleft()))
        while self._left:
            # An ``End`` returns False if nothing was left to free.
            found |= self._left.popleft()() is not False
        return found


def unless_exiting(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Make a method do nothing after the interpreter shuts down, or in a child of the object's
    process.

    Modules are emptied at shutdown. If a program's objects outlive them, for example because
    ``dill`` holds ``__main__``, a finaliser finds None in place of functions and classes. The
    process frees all.
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
