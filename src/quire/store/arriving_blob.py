"""``ArrivingBlob``: an object of a remote tier whose bytes arrive in order, piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.contracts.store import Blob


class ArrivingBlob:
    """Memory for a whole object, and the number of its bytes so far. One thread adds pieces; any
    reads."""

    def __init__(self, first: Blob, size: int) -> None:
        """Begin with the first bytes of an object of ``size`` bytes."""
        self.blob = bytearray(size)
        """The bytes up to ``there`` are final; those after it are zeros."""
        self.there = 0
        self.ended = False
        """Whether no more bytes will arrive: all did, or the tier failed."""
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self.take(first)

    @property
    def is_whole(self) -> bool:
        """Return True if all bytes have arrived."""
        return self.there == len(self.blob)

    def tell(self, call: Callable[[], None]) -> None:
        """Call ``call`` from now on after each piece and at the end, on the thread that adds
        pieces."""
        with self._lock:
            self._listeners.append(call)

    def take(self, piece: Blob) -> None:
        """Append the next bytes."""
        view = memoryview(piece).cast("B")
        self.blob[self.there : self.there + len(view)] = view
        self.there += len(view)
        self._tell()

    def end(self) -> None:
        """Record that no more bytes will arrive."""
        self.ended = True
        self._tell()
        with self._lock:
            self._listeners.clear()

    def _tell(self) -> None:
        with self._lock:
            calls = list(self._listeners)
        for call in calls:
            call()
