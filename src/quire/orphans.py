"""What is left behind by objects that nobody holds any more: sessions that were not closed, streams that were not ended."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable


class Orphans:
    """Remembers what is to be done once an object is gone.

    The garbage collector only appends to a list, in C: it may come in the middle of anything, and no signal can come between
    the object's end and the note of it, as it could in ``__del__``.
    """

    def __init__(self) -> None:
        self._ends: dict[weakref.ref[object], Callable[[], object]] = {}
        self._gone: deque[weakref.ref[object]] = deque()

    def watch(self, owner: object, end: Callable[[], object]) -> None:
        """``take`` returns ``end`` once nobody holds ``owner``. ``end`` must not hold it, and may be called twice."""
        self._ends[weakref.ref(owner, self._gone.append)] = end

    def take(self) -> list[Callable[[], object]]:
        """Return what is to be called for the objects that are gone since the last time."""
        found = []
        while self._gone:
            found.append(self._ends.pop(self._gone.popleft()))
        return found
