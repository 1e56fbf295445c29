"""``ArrivingBlob``: an object of a far tier whose bytes come in pieces, the first ones first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.contracts.store import Blob


class ArrivingBlob:
    """Room for a whole object, and how much of it is there. One thread takes pieces; any reads."""

    def __init__(self, first: Blob, size: int) -> None:
        """Begin with the first bytes of an object of ``size`` bytes."""
        self.blob = bytearray(size)
        """Bytes behind ``there`` are zeros; those before it do not change any more."""
        self.there = 0
        self.ended = False
        """Whether no more bytes come: all are there, or the tier failed."""
        self._lock = threading.Lock()
        self._told: list[Callable[[], None]] = []
        self.take(first)

    @property
    def is_whole(self) -> bool:
        """Return whether all bytes are there."""
        return self.there == len(self.blob)

    def tell(self, call: Callable[[], None]) -> None:
        """Call from now on, on the thread that takes pieces, after each of them and at the end."""
        with self._lock:
            self._told.append(call)

    def take(self, piece: Blob) -> None:
        """Take the next bytes."""
        view = memoryview(piece).cast("B")
        self.blob[self.there : self.there + len(view)] = view
        self.there += len(view)
        self._tell()

    def end(self) -> None:
        """Note that no more come."""
        self.ended = True
        self._tell()
        with self._lock:
            self._told.clear()

    def _tell(self) -> None:
        with self._lock:
            calls = list(self._told)
        for call in calls:
            call()
