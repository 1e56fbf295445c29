"""Cleanup after unreferenced objects, such as unclosed sessions and unfinished streams."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable


class Orphans:
    """Remembers cleanups for objects that may be collected.

    The garbage collector may run at any point, so it only appends to a list, in C. Unlike in
    ``__del__``, no signal can come between an object's end and this note of it.
    """

    def __init__(self) -> None:
        self._ends: dict[weakref.ref[object], Callable[[], object]] = {}
        self._gone: deque[weakref.ref[object]] = deque()

    def watch(self, owner: object, end: Callable[[], object]) -> None:
        """Make ``take`` return ``end`` once ``owner`` is collected. ``end`` must not hold
        ``owner``, and may be called twice."""
        self._ends[weakref.ref(owner, self._gone.append)] = end

    def take(self) -> list[Callable[[], object]]:
        """Return the cleanups of the objects collected since the last call."""
        found = []
        while self._gone:
            found.append(self._ends.pop(self._gone.popleft()))
        return found
