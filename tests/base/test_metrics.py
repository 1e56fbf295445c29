"""Metrics: names, kinds and arithmetic, against numpy and hand-made tallies."""

from __future__ import annotations

import math
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base import errors
from quire.base.metrics import (
    FINISH_REASONS,
    FIRST_TOKEN_BUCKETS,
    INTER_TOKEN_BUCKETS,
    REFUSAL_ERRORS,
    REQUEST_BUCKETS,
    Counter,
    EngineMetrics,
    Gauge,
    Histogram,
    LabelledCounter,
)

# The names that are fixed for users, with their types.
FIXED_NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "prompt_tokens_cached_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "num_preemptions_total": "counter",
    "request_success_total": "counter",
    "steps_total": "counter",
    "steps_ahead_total": "counter",
    "tokens_withdrawn_total": "counter",
    "forks_total": "counter",
    "rewinds_total": "counter",
    "tokens_replayed_total": "counter",
    "copy_on_write_splits_total": "counter",
    "reruns_total": "counter",
    "rerun_tokens_total": "counter",
    "checkpoints_kept": "gauge",
    "checkpoints_used_total": "counter",
    "pages_shared": "gauge",
    "state_bytes_saved_total": "counter",
    "state_bytes_loaded_total": "counter",
    "blended_tokens_total": "counter",
    "recomputed_tokens_total": "counter",
    "blend_calibrated": "gauge",
    "blend_divergence_nats": "histogram",
    "drafted_tokens_total": "counter",
    "exact_windows_total": "counter",
    "accepted_tokens_total": "counter",
    "prompts_handed_over_total": "counter",
    "tokens_handed_over_total": "counter",
    "prompts_sent_total": "counter",
    "refusals_total": "counter",
    # Beyond those that are fixed.
    "adapters_loaded": "gauge",
    "adapters_resident": "gauge",
    "adapter_transfers_total": "counter",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "pages_free": "gauge",
    "pages_evictable": "gauge",
    "pages_held": "gauge",
    "pages_pinned": "gauge",
    "prompt_tokens_reused_total": "counter",
    "reuse_misses_total": "counter",
}


# ---------------------------------------------------------------------- primitives


def test_counter() -> None:
    counter = Counter("c", "help")
    counter.inc()
    counter.inc(2.5)
    assert counter.value == 3.5


def test_labelled_counter_knows_its_labels() -> None:
    counter = LabelledCounter("c", "help", "reason", ["a", "b"])
    counter.inc("a")
    counter.inc("b", 3)
    with pytest.raises(KeyError):
        counter.inc("z")
    assert [(s.key, s.value) for s in counter._samples()] == [('c{reason="a"}', 1), ('c{reason="b"}', 3)]


def test_gauge() -> None:
    gauge = Gauge("g", "help")
    gauge.set(5)
    gauge.set(-2)
    assert gauge.value == -2


@given(st.lists(st.floats(0, 10) | st.sampled_from([0.5, 1.0, 2.5])))
def test_histogram_counts_up_to_each_bound_inclusive(values: list[float]) -> None:
    histogram = Histogram("h", "help", [0.5, 1.0, 2.5])
    for value in values:
        histogram.observe(value)
    samples = {s.key: s.value for s in histogram._samples()}
    for bound in (0.5, 1.0, 2.5):
        assert samples[f'h_bucket{{le="{bound}"}}'] == sum(value <= bound for value in values)
    assert samples['h_bucket{le="+Inf"}'] == samples["h_count"] == len(values)
    assert samples["h_sum"] == pytest.approx(math.fsum(values))


# ---------------------------------------------------------------------- the engine


def test_engine_has_exactly_the_fixed_names() -> None:
    families = EngineMetrics().collect()
    assert {f.name.removeprefix("quire:"): f.type for f in families} == FIXED_NAMES
    assert len(families) == len(FIXED_NAMES)
    for family in families:
        assert family.name.startswith("quire:")
        assert family.help.endswith(".")
        assert family.samples
        assert all(sample.name.startswith(family.name) and sample.value == 0 for sample in family.samples)


def test_every_attribute_reaches_the_snapshot_under_its_own_name() -> None:
    metrics = EngineMetrics()
    expected = dict.fromkeys(metrics.snapshot(), 0.0)
    public = {name: m for name, m in vars(metrics).items() if not name.startswith("_")}
    assert len(public) == len(FIXED_NAMES)
    for number, (attribute, metric) in enumerate(public.items(), start=1):
        assert metric.name.removeprefix("quire:").startswith(attribute)
        match metric:
            case Counter():
                metric.inc(number)
                expected[metric.name] = number
            case Gauge():
                metric.set(number)
                expected[metric.name] = number
            case LabelledCounter():
                metric.inc(next(iter(metric._values)), number)
                expected[metric.name] = number
                expected[metric._samples()[0].key] = number
            case Histogram():
                metric.observe(number)
                expected[f"{metric.name}_sum"] = number
                expected[f"{metric.name}_count"] = 1
    assert metrics.snapshot() == expected


def test_finished_requests_are_counted_by_reason() -> None:
    metrics = EngineMetrics()
    for reason in ("stop", "stop", "length"):
        metrics.request_success.inc(reason)
    snapshot = metrics.snapshot()
    assert snapshot["quire:request_success_total"] == 3
    by_reason = [snapshot[f'quire:request_success_total{{finished_reason="{r}"}}'] for r in FINISH_REASONS]
    assert by_reason == [2, 1, 0, 0]


def test_every_refusing_error_can_be_counted() -> None:
    refusing = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.QuireError) and name not in ("QuireError", "Cancelled")
    }
    assert set(REFUSAL_ERRORS) == refusing


def test_buckets_resolve_the_latencies_of_small_and_large_models() -> None:
    for buckets, smallest, largest in (
        (FIRST_TOKEN_BUCKETS, 0.001, 2560),
        (INTER_TOKEN_BUCKETS, 0.001, 80),
        (REQUEST_BUCKETS, 0.3, 7680),
    ):
        assert (buckets[0], buckets[-1]) == (smallest, largest)
        assert max(b / a for a, b in pairwise(buckets)) <= 5


def test_counting_from_many_threads_loses_nothing() -> None:
    metrics = EngineMetrics()

    def work() -> None:
        for _ in range(500):
            metrics.forks.inc()
            metrics.refusals.inc("Unsupported")
            metrics.time_to_first_token.observe(0.25)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = metrics.snapshot()
    assert snapshot["quire:forks_total"] == snapshot["quire:refusals_total"] == 2000
    assert snapshot["quire:time_to_first_token_seconds_sum"] == 500
