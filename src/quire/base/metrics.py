"""Metrics of the engine.

They have vLLM's names with the prefix ``quire:``, so dashboards need only another prefix.
This module needs no metrics library: ``collect`` returns families (name, type, help, samples) in
the Prometheus data model, and a server writes them out.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from quire.base import errors
from quire.base.outputs import TIERS, Miss

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]

# vLLM's buckets in seconds. Three finer ones between tokens: small models are faster than 10 ms.
DIVERGENCE_BUCKETS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
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

TOKEN_BUCKETS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0),
    *(100_000.0, 200_000.0, 500_000.0, 1_000_000.0),
)

FINISH_REASONS = ("stop", "length", "cancelled", "error")
REFUSAL_ERRORS = tuple(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.QuireError) and name not in ("QuireError", "Cancelled")
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


class Metric:
    """A named number or several. All metrics are thread-safe."""

    type: MetricType

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self._lock = threading.Lock()
        self._value = 0.0

    @property
    def value(self) -> float:
        return self._value

    def _samples(self) -> tuple[Sample, ...]:
        return (Sample(name=self.name, value=self._value),)


M = TypeVar("M", bound=Metric)


class Counter(Metric):
    """A growing number."""

    type = "counter"

    def inc(self, amount: float = 1.0) -> None:
        """Add a finite ``amount`` >= 0."""
        with self._lock:
            self._value += amount


class _Labelled(Metric):
    """A number for each value of one label. The values are known beforehand and start at 0."""

    def __init__(self, name: str, help: str, label: str, values: Sequence[str]) -> None:
        super().__init__(name, help)
        self.label, self._values = label, dict.fromkeys(values, 0.0)

    def _samples(self) -> tuple[Sample, ...]:
        return tuple(
            Sample(name=self.name, labels=((self.label, name),), value=value) for name, value in self._values.items()
        )


class LabelledCounter(_Labelled):
    """A counter for each value of one label."""

    type = "counter"

    def inc(self, label_value: str, amount: float = 1.0) -> None:
        """Add ``amount`` >= 0 to a known label value."""
        with self._lock:
            self._values[label_value] += amount


class LabelledGauge(_Labelled):
    """A gauge for each value of one label."""

    type = "gauge"

    def set(self, label_value: str, value: float) -> None:
        """Replace the number of a known label value."""
        with self._lock:
            self._values[label_value] = float(value)


class Gauge(Metric):
    """A number that goes up and down."""

    type = "gauge"

    def set(self, value: float) -> None:
        """Replace the value by a finite one."""
        with self._lock:
            self._value = float(value)


class Histogram(Metric):
    """Counts of values up to each of ``buckets`` (ascending, finite, inclusive), and a sum."""

    type = "histogram"

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        super().__init__(name, help)
        self.buckets = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)  # the last one: above all bounds

    def observe(self, value: float) -> None:
        """Count a finite ``value``."""
        with self._lock:
            self._counts[bisect_left(self.buckets, value)] += 1
            self._value += value

    def _samples(self) -> tuple[Sample, ...]:
        samples, cumulative = [], 0
        for bound, count in zip((*map(str, self.buckets), "+Inf"), self._counts, strict=True):
            cumulative += count
            samples.append(Sample(name=f"{self.name}_bucket", labels=(("le", bound),), value=float(cumulative)))
        samples.append(Sample(name=f"{self.name}_sum", value=self._value))
        samples.append(Sample(name=f"{self.name}_count", value=float(cumulative)))
        return tuple(samples)


class MetricGroup:
    """Metrics by their names without prefix and unit: ``metrics.forks.inc()``."""

    def _share_lock(self) -> None:
        """Find the metrics and give them one lock, so that ``collect`` sees one moment."""
        self._metrics = [metric for metric in vars(self).values() if isinstance(metric, Metric)]
        self._lock = threading.Lock()
        for metric in self._metrics:
            metric._lock = self._lock

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


HAND_OVER_RESULTS = ("whole", "lost", "refused")
"""Of a prompt that one server computes for another: its state counts there, went missing on the
way, or was refused before."""


class EngineMetrics(MetricGroup):
    """All metrics of an engine, each with its name and help."""

    def __init__(self) -> None:
        def made(kind: type[M], name: str, help: str, *more: Any) -> M:
            return kind(f"quire:{name}", help, *more)

        # What vLLM has too.
        self.num_requests_running = made(Gauge, "num_requests_running", "Requests in the running batch.")
        self.num_requests_waiting = made(Gauge, "num_requests_waiting", "Requests waiting to be admitted.")
        self.kv_cache_usage = made(
            Gauge, "kv_cache_usage_perc", "Share of the KV state's pages that are held or pinned; 1 means all."
        )
        self.prompt_tokens = made(
            Counter,
            "prompt_tokens_total",
            "Prompt tokens, computed or cached, and what was computed to join or score in sessions.",
        )
        self.prompt_tokens_cached = made(
            Counter, "prompt_tokens_cached_total", "Prompt tokens whose state was found in the prefix cache."
        )
        self.prompt_tokens_reused = made(
            LabelledCounter,
            "prompt_tokens_reused_total",
            "Prompt tokens with reused state, by where it was.",
            "tier",
            TIERS,
        )
        self.reuse_misses = made(
            LabelledCounter,
            "reuse_misses_total",
            "Prompts of which a longer match was known, by why it was not reused.",
            "reason",
            [str(miss) for miss in Miss if miss is not Miss.NONE],
        )
        self.generation_tokens = made(Counter, "generation_tokens_total", "Tokens generated.")
        self.num_preemptions = made(
            Counter, "num_preemptions_total", "Requests put back into the queue because pages ran out."
        )
        self.request_success = made(
            LabelledCounter,
            "request_success_total",
            "Requests that ended, by reason.",
            "finished_reason",
            FINISH_REASONS,
        )
        self.time_to_first_token = made(
            Histogram,
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_latency = made(
            Histogram, "inter_token_latency_seconds", "Between successive tokens of a request.", INTER_TOKEN_BUCKETS
        )
        self.e2e_request_latency = made(
            Histogram, "e2e_request_latency_seconds", "From the arrival of a request to its end.", REQUEST_BUCKETS
        )
        self.request_queue_time = made(
            Histogram,
            "request_queue_time_seconds",
            "From the arrival of a request to its first admission.",
            FIRST_TOKEN_BUCKETS,
        )
        self.request_prefill_time = made(
            Histogram,
            "request_prefill_time_seconds",
            "From the first admission of a request to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.request_decode_time = made(
            Histogram,
            "request_decode_time_seconds",
            "From the first token of a request to its last.",
            FIRST_TOKEN_BUCKETS,
        )
        self.request_inference_time = made(
            Histogram,
            "request_inference_time_seconds",
            "From the first admission of a request to its last token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.request_prompt_tokens = made(
            Histogram, "request_prompt_tokens", "Prompt tokens of a request that has ended.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = made(
            Histogram, "request_generation_tokens", "Tokens generated for a request that has ended.", TOKEN_BUCKETS
        )
        self.steps = made(
            LabelledCounter,
            "steps_total",
            "Forwards, by whether their work was captured before and launched as a whole.",
            "path",
            ("captured", "plain"),
        )
        self.exact_windows = made(
            Counter, "exact_windows_total", "Forwards that verified tokens of exact requests, one request alone."
        )
        self.steps_ahead = made(
            Counter,
            "steps_ahead_total",
            "Those of them that were queued before the tokens of the one before were known.",
        )
        self.tokens_withdrawn = made(
            Counter, "tokens_withdrawn_total", "Tokens that such a forward ran of requests that had ended, taken back."
        )
        # The state's own verbs.
        self.forks = made(Counter, "forks_total", "Sequences made by forking.")
        self.rewinds = made(Counter, "rewinds_total", "Rewinds of sequences.")
        self.tokens_replayed = made(
            Counter,
            "tokens_replayed_total",
            "Tokens run again to reach a rewound position or the end of a known prefix.",
        )
        self.reruns = made(
            Counter,
            "reruns_total",
            "Turns run again in idle time, as the chat template writes them into later prompts.",
        )
        self.rerun_tokens = made(Counter, "rerun_tokens_total", "Tokens computed for these.")
        self.copy_on_write_splits = made(
            Counter, "copy_on_write_splits_total", "Shared pages copied because one of their owners wrote."
        )
        self.checkpoints_kept = made(Gauge, "checkpoints_kept", "Checkpoints of recurrent state held now.")
        self.checkpoints_used = made(
            Counter, "checkpoints_used_total", "Forks, rewinds and matches served from a checkpoint of recurrent state."
        )
        self.pages_free = made(Gauge, "pages_free", "Free pages of the KV state.")
        self.pages_evictable = made(
            Gauge, "pages_evictable", "Pages of finished requests and idle sessions, evicted when others need them."
        )
        self.pages_held = made(Gauge, "pages_held", "Pages of requests under way and of the executor's caches.")
        self.pages_pinned = made(Gauge, "pages_pinned", "Pages of sessions that are pinned or were written into.")
        self.pages_shared = made(Gauge, "pages_shared", "Pages that belong to more than one sequence now.")
        self.adapters_loaded = made(Gauge, "adapters_loaded", "LoRA adapters loaded now.")
        self.adapters_resident = made(Gauge, "adapters_resident", "Of these, on the device now.")
        self.adapter_transfers = made(
            Counter, "adapter_transfers_total", "Times that an adapter was brought to the device."
        )
        self.state_bytes_saved = made(Counter, "state_bytes_saved_total", "Bytes of state files written.")
        self.state_bytes_loaded = made(Counter, "state_bytes_loaded_total", "Bytes of state files read.")
        self.blended_tokens = made(Counter, "blended_tokens_total", "Tokens whose stored state was blended in.")
        self.recomputed_tokens = made(Counter, "recomputed_tokens_total", "Tokens recomputed while blending.")
        self.blend_calibrated = made(Gauge, "blend_calibrated", "1 if the model's blending was calibrated.")
        self.blend_divergence = made(
            Histogram,
            "blend_divergence_nats",
            "KL divergence of the first token's distribution from a full computation's, of blended prompts that were verified.",
            DIVERGENCE_BUCKETS,
        )
        self.drafted_tokens = made(Counter, "drafted_tokens_total", "Tokens proposed by speculation.")
        self.accepted_tokens = made(Counter, "accepted_tokens_total", "Proposed tokens that were accepted.")
        self.prompts_handed_over = made(
            LabelledCounter,
            "prompts_handed_over_total",
            "Prompts that another server was asked to compute, by what became of it; lost and refused ones were computed here.",
            "result",
            HAND_OVER_RESULTS,
        )
        self.tokens_handed_over = made(
            Counter, "tokens_handed_over_total", "Prompt tokens whose state came from another server."
        )
        self.prompts_sent = made(
            LabelledCounter,
            "prompts_sent_total",
            "Prompts that another server has asked for, by what became of it.",
            "result",
            HAND_OVER_RESULTS,
        )
        self.refusals = made(
            LabelledCounter,
            "refusals_total",
            "Requests to the server that were refused, by error.",
            "error",
            REFUSAL_ERRORS,
        )
        self._share_lock()

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count tokens that were proposed, and those of them that were accepted."""
        self.drafted_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)
