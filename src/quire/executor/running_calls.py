"""The running calls of an executor: names, cancellation and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire.base.errors import Cancelled
from quire.base.forks import ParentsLock, in_children
from quire.base.interrupts import check


class Operation:
    """One running call. Its flag belongs to it alone, so a cancel never reaches the next call."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.num_sequences = 0
        """Number of sequences of its present forward; 0 before the first."""
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def check(self) -> None:
        """Raise ``Cancelled`` if it was cancelled. Signals take effect here. Called before each
        forward and before each sampled token."""
        check()
        if self._cancelled:
            raise Cancelled(f"{self.verb} was cancelled")


class Operations:
    """The calls inside an executor, including those that wait for its lock. Its own lock is held
    only briefly, so ``cancel`` never waits for a running call."""

    def __init__(self) -> None:
        self._lock: Any = threading.Lock()
        in_children(self._forked)
        self._running: set[Operation] = set()

    def _forked(self) -> None:
        self._lock = ParentsLock()

    @contextmanager
    def running(self, verb: str) -> Iterator[Operation]:
        operation = Operation(verb)
        with self._lock:
            self._running.add(operation)
        try:
            yield operation
        finally:
            with self._lock:
                self._running.discard(operation)

    def cancel(self) -> None:
        """Cancel every call that is inside at this moment."""
        with self._lock:
            for operation in self._running:
                operation.cancel()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are running now."""
        with self._lock:
            return sum(operation.num_sequences for operation in self._running)


class Stopwatch:
    """Seconds of device-synchronised execution since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._synchronize()
        self._begin = time.perf_counter()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self) -> float:
        self._synchronize()
        return time.perf_counter() - self._begin
