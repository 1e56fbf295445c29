"""The calls of an executor: names, cancellation, and the times of those that were completed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from quire.base.errors import Cancelled
from quire.base.forks import ParentsLock, in_children
from quire.base.interrupts import check
from quire.contracts.executor_reports import ExecutorMetrics


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


class _Latencies:
    """Lifetime count and mean, and the last 1000 samples."""

    WINDOW = 1000

    def __init__(self) -> None:
        self.calls = self.count = 0
        self.total_seconds = 0.0
        self.recent: deque[float] = deque(maxlen=self.WINDOW)

    def add(self, operations: int, seconds: float) -> None:
        self.calls += 1
        self.count += operations
        self.total_seconds += operations * seconds
        self.recent.extend([seconds] * min(operations, self.WINDOW))

    def mean_ms(self) -> float:
        return 1e3 * self.total_seconds / self.count if self.count else 0.0

    def p95_ms(self) -> float:
        return 1e3 * float(np.quantile(self.recent, 0.95)) if self.recent else 0.0


class OperationMetrics:
    """Counts and times an executor's completed calls; thread-safe. Operations are those of
    ``ExecutorStatus``; each has its call's latency, in seconds of device-synchronised execution."""

    def __init__(self, max_batch_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_batch_size = max_batch_size
        self._clock = clock
        self._lock = threading.Lock()
        self._prefill, self._decode = _Latencies(), _Latencies()
        self._busy_seconds = 0.0
        self._tokens = 0
        self.last_operation: float | None = None
        """Monotonic time in seconds at the end of the last operation."""

    def record_prefill(self, num_sequences: int, seconds: float) -> None:
        """Record a completed call that ran prompts of ``num_sequences`` >= 1 in ``seconds``."""
        self._record(self._prefill, num_sequences, seconds, 0)

    def record_decode(self, num_sequences: int, seconds: float, tokens: int) -> None:
        """Record a completed call for ``num_sequences`` >= 1 that generated ``tokens`` in all."""
        self._record(self._decode, num_sequences, seconds, tokens)

    def _record(self, latencies: _Latencies, num_sequences: int, seconds: float, tokens: int) -> None:
        with self._lock:
            latencies.add(num_sequences, seconds)
            self._busy_seconds += seconds
            self._tokens += tokens
            self.last_operation = self._clock()

    def summary(self) -> ExecutorMetrics:
        """Return all figures at one moment."""
        with self._lock:
            mean_batch = self._decode.count / self._decode.calls if self._decode.calls else 0.0
            return ExecutorMetrics(
                prefill_operations=self._prefill.count,
                decode_operations=self._decode.count,
                avg_prefill_latency=self._prefill.mean_ms(),
                avg_decode_latency=self._decode.mean_ms(),
                p95_prefill_latency=self._prefill.p95_ms(),
                p95_decode_latency=self._decode.p95_ms(),
                throughput_tps=self._tokens / self._busy_seconds if self._busy_seconds else 0.0,
                batch_utilization=mean_batch / self._max_batch_size,
            )
