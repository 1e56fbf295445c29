"""Metrics of the engine, and of an executor's operations.

The engine's have vLLM's names with the prefix ``quire:``, so dashboards need only another prefix.
This module needs no metrics library: ``collect`` returns families (name, type, help, samples) in
the Prometheus data model, and a server writes them out.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from quire.errors import InvalidArgument

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]

# vLLM's buckets in seconds. Three finer ones between tokens: small models are faster than 10 ms.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

FINISH_REASONS = ("stop", "length", "cancelled", "error")
REFUSAL_ERRORS = (
    "InvalidArgument",
    "AlreadyExists",
    "NotFound",
    "FailedPrecondition",
    "ResourceExhausted",
    "PoolExhausted",
    "QuotaExceeded",
    "Unsupported",
    "DataLoss",
    "BlendLoadError",
    "CheckpointError",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A number with its full Prometheus name (``..._bucket``, ``..._sum``, ``..._count``)."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    value: float

    @property
    def key(self) -> str:
        """``name`` or ``name{label="value"}``."""
        inside = ",".join(f'{label}="{value}"' for label, value in self.labels)
        return f"{self.name}{{{inside}}}" if inside else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """All samples of one metric."""

    name: str
    type: MetricType
    help: str
    samples: tuple[Sample, ...]


class Counter:
    """A growing number. All metrics are thread-safe; one engine's share a lock for consistency."""

    type: MetricType = "counter"

    def __init__(self, name: str, help: str, lock: threading.Lock | None = None) -> None:
        self.name, self.help = name, help
        self._lock = lock or threading.Lock()
        self._value = 0.0

    @property
    def value(self) -> float:
        return self._value

    def inc(self, amount: float = 1.0) -> None:
        """Add a finite ``amount`` >= 0; raise ``InvalidArgument`` for others."""
        _check_number(self.name, "amount", amount, non_negative=True)
        with self._lock:
            self._value += amount

    def _samples(self) -> tuple[Sample, ...]:
        return (Sample(name=self.name, value=self._value),)


class LabelledCounter:
    """A counter for each value of one label. The values are known beforehand and start at 0."""

    type: MetricType = "counter"

    def __init__(
        self, name: str, help: str, label: str, values: Sequence[str], lock: threading.Lock | None = None
    ) -> None:
        self.name, self.help, self.label = name, help, label
        self._lock = lock or threading.Lock()
        self._values = dict.fromkeys(values, 0.0)

    def inc(self, label_value: str, amount: float = 1.0) -> None:
        """Add ``amount`` >= 0 to a known label value; raise ``InvalidArgument`` for others."""
        if label_value not in self._values:
            raise InvalidArgument(
                f"{self.name} has no {self.label} {label_value!r}; known: {', '.join(map(repr, self._values))}"
            )
        _check_number(self.name, "amount", amount, non_negative=True)
        with self._lock:
            self._values[label_value] += amount

    def _samples(self) -> tuple[Sample, ...]:
        return tuple(
            Sample(name=self.name, labels=((self.label, name),), value=value) for name, value in self._values.items()
        )


class Gauge:
    """A number that goes up and down."""

    type: MetricType = "gauge"

    def __init__(self, name: str, help: str, lock: threading.Lock | None = None) -> None:
        self.name, self.help = name, help
        self._lock = lock or threading.Lock()
        self._value = 0.0

    @property
    def value(self) -> float:
        return self._value

    def set(self, value: float) -> None:
        """Replace the value; raise ``InvalidArgument`` unless the new one is finite."""
        _check_number(self.name, "value", value)
        with self._lock:
            self._value = float(value)

    def _samples(self) -> tuple[Sample, ...]:
        return (Sample(name=self.name, value=self._value),)


class Histogram:
    """Counts of values up to each of ``buckets`` (ascending, finite, inclusive), and a sum."""

    type: MetricType = "histogram"

    def __init__(self, name: str, help: str, buckets: Sequence[float], lock: threading.Lock | None = None) -> None:
        if not buckets or list(buckets) != sorted(set(buckets)) or not all(map(math.isfinite, buckets)):
            raise InvalidArgument(f"{name}: buckets must be ascending finite bounds, got {tuple(buckets)}")
        self.name, self.help, self.buckets = name, help, tuple(buckets)
        self._lock = lock or threading.Lock()
        self._counts = [0] * (len(buckets) + 1)  # the last one: above all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``; raise ``InvalidArgument`` unless it is finite."""
        _check_number(self.name, "value", value)
        with self._lock:
            self._counts[bisect_left(self.buckets, value)] += 1
            self._sum += value

    def _samples(self) -> tuple[Sample, ...]:
        samples, cumulative = [], 0
        for bound, count in zip((*map(str, self.buckets), "+Inf"), self._counts, strict=True):
            cumulative += count
            samples.append(Sample(name=f"{self.name}_bucket", labels=(("le", bound),), value=float(cumulative)))
        samples.append(Sample(name=f"{self.name}_sum", value=self._sum))
        samples.append(Sample(name=f"{self.name}_count", value=float(cumulative)))
        return tuple(samples)


Metric: TypeAlias = Counter | LabelledCounter | Gauge | Histogram


class EngineMetrics:
    """All metrics of an engine by their names without prefix and unit: ``metrics.forks.inc()``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: list[Metric] = []
        self._define_requests()
        self._define_state()

    def _define_requests(self) -> None:
        """Define the metrics that vLLM has too."""
        self.num_requests_running = self._gauge("num_requests_running", "Requests in the running batch.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests waiting to be admitted.")
        self.kv_cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV state's pages that are held or pinned; 1 means all."
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens, computed or cached.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached_total", "Prompt tokens whose state was found in the prefix cache."
        )
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        self.num_preemptions = self._counter(
            "num_preemptions_total", "Requests put back into the queue because pages ran out."
        )
        self.request_success = self._labelled(
            "request_success_total", "Requests that ended, by reason.", "finished_reason", FINISH_REASONS
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between successive tokens of a request.", INTER_TOKEN_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its end.", REQUEST_BUCKETS
        )

    def _define_state(self) -> None:
        """Define the metrics of the state's own verbs."""
        self.forks = self._counter("forks_total", "Sequences made by forking.")
        self.rewinds = self._counter("rewinds_total", "Rewinds of sequences.")
        self.tokens_replayed = self._counter(
            "tokens_replayed_total", "Tokens run again to reach a rewound position or the end of a known prefix."
        )
        self.copy_on_write_splits = self._counter(
            "copy_on_write_splits_total", "Shared pages copied because one of their owners wrote."
        )
        self.checkpoints_kept = self._gauge("checkpoints_kept", "Checkpoints of recurrent state held now.")
        self.checkpoints_used = self._counter(
            "checkpoints_used_total", "Forks, rewinds and matches served from a checkpoint of recurrent state."
        )
        self.pages_free = self._gauge("pages_free", "Pages of the KV state that are nobody's now.")
        self.pages_evictable = self._gauge(
            "pages_evictable", "Pages of finished requests and idle sessions, given up for whoever needs them."
        )
        self.pages_held = self._gauge("pages_held", "Pages of requests under way and of the executor's caches.")
        self.pages_pinned = self._gauge("pages_pinned", "Pages of sessions that are pinned or were written into.")
        self.pages_shared = self._gauge("pages_shared", "Pages that belong to more than one sequence now.")
        self.adapters_loaded = self._gauge("adapters_loaded", "LoRA adapters loaded now.")
        self.adapters_resident = self._gauge("adapters_resident", "Of these, on the device now.")
        self.adapter_transfers = self._counter(
            "adapter_transfers_total", "Times that an adapter was brought to the device."
        )
        self.state_bytes_saved = self._counter("state_bytes_saved_total", "Bytes of state files written.")
        self.state_bytes_loaded = self._counter("state_bytes_loaded_total", "Bytes of state files read.")
        self.blended_tokens = self._counter("blended_tokens_total", "Tokens whose stored state was blended in.")
        self.recomputed_tokens = self._counter("recomputed_tokens_total", "Tokens recomputed while blending.")
        self.drafted_tokens = self._counter("drafted_tokens_total", "Tokens proposed by speculation.")
        self.accepted_tokens = self._counter("accepted_tokens_total", "Proposed tokens that were accepted.")
        self.refusals = self._labelled(
            "refusals_total", "Requests to the server that were refused, by error.", "error", REFUSAL_ERRORS
        )

    def _counter(self, name: str, help: str) -> Counter:
        metric = Counter(f"quire:{name}", help, self._lock)
        self._metrics.append(metric)
        return metric

    def _labelled(self, name: str, help: str, label: str, values: Sequence[str]) -> LabelledCounter:
        metric = LabelledCounter(f"quire:{name}", help, label, values, self._lock)
        self._metrics.append(metric)
        return metric

    def _gauge(self, name: str, help: str) -> Gauge:
        metric = Gauge(f"quire:{name}", help, self._lock)
        self._metrics.append(metric)
        return metric

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"quire:{name}", help, buckets, self._lock)
        self._metrics.append(metric)
        return metric

    def collect(self) -> list[MetricFamily]:
        """Return all metrics at one moment, histograms with Prometheus' cumulative buckets."""
        with self._lock:
            return [
                MetricFamily(name=metric.name, type=metric.type, help=metric.help, samples=metric._samples())
                for metric in self._metrics
            ]

    def snapshot(self) -> dict[str, float]:
        """Return all numbers at one moment by full name.

        A labelled counter has its sum under the plain name beside ``name{label="value"}``; a
        histogram has ``name_sum`` and ``name_count``. Buckets are only in ``collect``.
        """
        values: dict[str, float] = {}
        for family in self.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    continue
                if sample.labels:
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
                values[sample.key] = sample.value
        return values


# ---------------------------------------------------------------------- an executor's operations


def percentile(values: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile (0 <= q <= 1) of ``values`` by linear interpolation; 0.0 of none.

    This is numpy's default, rank ``q * (n - 1)``: ``percentile(range(1, 11), 0.99)`` is 9.91.
    """
    if not 0.0 <= q <= 1.0:
        raise InvalidArgument(f"q must be in [0, 1], got {q}")
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (rank - below) * (ordered[above] - ordered[below]))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSummary:
    """Figures of the operations so far; latencies in milliseconds, 0.0 without samples."""

    prefill_operations: int = 0
    decode_operations: int = 0
    avg_prefill_latency: float = 0.0
    avg_decode_latency: float = 0.0
    p95_prefill_latency: float = 0.0
    p95_decode_latency: float = 0.0
    throughput_tps: float = 0.0
    """Tokens generated per busy second; the busy time includes prefill."""
    batch_utilization: float = 0.0
    """Mean number of sequences in a decode call, divided by the largest batch."""
    last_operation: float | None = None
    """Monotonic time in seconds at the end of the last operation."""


class _Latencies:
    """Lifetime count and mean, and the last 1000 samples."""

    WINDOW = 1000

    def __init__(self) -> None:
        self.count = 0
        self.total_seconds = 0.0
        self.recent: deque[float] = deque(maxlen=self.WINDOW)

    def add(self, operations: int, seconds: float) -> None:
        self.count += operations
        self.total_seconds += operations * seconds
        self.recent.extend([seconds] * min(operations, self.WINDOW))

    def mean_ms(self) -> float:
        return 1e3 * self.total_seconds / self.count if self.count else 0.0


class OperationMetrics:
    """Counts and times an executor's operations; thread-safe.

    An operation is one sequence's prefill or decode step: a batch of 8 counts 8, each with the
    call's latency. A verify or speculative call counts one decode. The executor records only
    completed calls, with seconds of device-synchronised execution.
    """

    def __init__(self, max_batch_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        if max_batch_size < 1:
            raise InvalidArgument(f"max_batch_size must be >= 1, got {max_batch_size}")
        self._max_batch_size = max_batch_size
        self._clock = clock
        self._lock = threading.Lock()
        self._prefill, self._decode = _Latencies(), _Latencies()
        self._busy_seconds = 0.0
        self._tokens = 0
        self._decode_calls = 0
        self._last_operation: float | None = None

    def record_prefill(self, num_sequences: int, seconds: float) -> None:
        """Record a completed call that ran prompts of ``num_sequences`` >= 1 in ``seconds``."""
        _check_operation(num_sequences, seconds, 0)
        with self._lock:
            self._prefill.add(num_sequences, seconds)
            self._busy_seconds += seconds
            self._last_operation = self._clock()

    def record_decode(self, num_sequences: int, seconds: float, tokens: int) -> None:
        """Record a completed call for ``num_sequences`` >= 1: ``seconds``, and ``tokens`` in all.

        A decode step generates 1 token per sequence, a speculative call 1 + accepted, a verify 1.
        """
        _check_operation(num_sequences, seconds, tokens)
        with self._lock:
            self._decode.add(num_sequences, seconds)
            self._busy_seconds += seconds
            self._tokens += tokens
            self._decode_calls += 1
            self._last_operation = self._clock()

    def summary(self) -> OperationSummary:
        """Return all figures at one moment."""
        with self._lock:
            mean_batch = self._decode.count / self._decode_calls if self._decode_calls else 0.0
            return OperationSummary(
                prefill_operations=self._prefill.count,
                decode_operations=self._decode.count,
                avg_prefill_latency=self._prefill.mean_ms(),
                avg_decode_latency=self._decode.mean_ms(),
                p95_prefill_latency=1e3 * percentile(self._prefill.recent, 0.95),
                p95_decode_latency=1e3 * percentile(self._decode.recent, 0.95),
                throughput_tps=self._tokens / self._busy_seconds if self._busy_seconds else 0.0,
                batch_utilization=mean_batch / self._max_batch_size,
                last_operation=self._last_operation,
            )


def _check_operation(num_sequences: int, seconds: float, tokens: int) -> None:
    if num_sequences < 1:
        raise InvalidArgument(
            f"num_sequences must be >= 1, got {num_sequences}; a call that ran nothing is no operation"
        )
    _check_number("operation", "seconds", seconds, non_negative=True)
    if tokens < 0:
        raise InvalidArgument(f"tokens must be >= 0, got {tokens}")


def _check_number(name: str, what: str, value: float, *, non_negative: bool = False) -> None:
    if not math.isfinite(value) or (non_negative and value < 0):
        accepted = "a finite number >= 0" if non_negative else "a finite number"
        raise InvalidArgument(f"{name}: {what} must be {accepted}, got {value}")
