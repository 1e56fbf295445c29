"""What the executor of an ``LLM`` counts, beside the engine's numbers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.executor.conftest import prompt, token

from quire import LLM
from quire import executor as package
from quire.contracts.executor_reports import ExecutorMetrics
from quire.executor import counters
from quire.executor.running_calls import OperationMetrics

IDS = list(range(10, 18))


def test_the_executors_numbers_are_among_the_metrics() -> None:
    with LLM("tiny-python", kv_cache_memory="16MiB", max_model_len=256, max_num_seqs=8) as llm:
        before = llm.metrics()
        assert {name: before[name] for name in counters.HELP} == dict.fromkeys(counters.HELP, 0.0)
        executor = llm.executor
        output = executor.prefill(prompt(IDS, IDS[::-1]))
        executor.decode(token(output.kv_cache, 1, 2))
        executor.decode(token(output.kv_cache, 1, 2))
        found = llm.metrics()
        assert found["quire:executor_prefill_operations_total"] == 2
        assert found["quire:executor_decode_operations_total"] == 4
        assert found["quire:executor_batch_utilization"] == 2 / 8
        assert found["quire:executor_kv_caches"] == 1
        assert found["quire:executor_replayed_tokens_total"] == 0
        told = executor.metrics()
        assert found["quire:executor_prefill_seconds_total"] == pytest.approx(told.avg_prefill_latency * 2 / 1e3)
        assert found["quire:executor_decode_seconds_total"] == pytest.approx(told.avg_decode_latency * 4 / 1e3)
        assert found["quire:generation_tokens_total"] == before["quire:generation_tokens_total"], (
            "the engine ran nothing"
        )
        executor.release_cache(output.kv_cache.cache_id)
        assert llm.metrics()["quire:executor_kv_caches"] == 0
        executor.shutdown()
        assert llm.metrics()["quire:executor_decode_operations_total"] == 4


def test_every_name_of_the_package_is_there() -> None:
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        package.Nothing  # noqa: B018


OPERATIONS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 8), st.floats(1e-6, 10), st.integers(0, 20)), min_size=1, max_size=40
)


@given(OPERATIONS)
def test_operations_against_a_tally(calls: list[tuple[bool, int, float, int]]) -> None:
    metrics = OperationMetrics(8, clock=lambda: 12.5)
    assert metrics.summary() == ExecutorMetrics()
    prefill: list[float] = []
    decode: list[float] = []
    for is_prefill, sequences, seconds, tokens in calls:
        if is_prefill:
            metrics.record_prefill(sequences, seconds)
            prefill += [seconds] * sequences
        else:
            metrics.record_decode(sequences, seconds, tokens)
            decode += [seconds] * sequences
    decode_calls = [call for call in calls if not call[0]]
    got = metrics.summary()
    assert (got.prefill_operations, got.decode_operations) == (len(prefill), len(decode))
    assert got.avg_prefill_latency == pytest.approx(1e3 * np.mean(prefill) if prefill else 0.0)
    assert got.avg_decode_latency == pytest.approx(1e3 * np.mean(decode) if decode else 0.0)
    assert got.p95_prefill_latency == pytest.approx(1e3 * np.quantile(prefill, 0.95) if prefill else 0.0)
    assert got.p95_decode_latency == pytest.approx(1e3 * np.quantile(decode, 0.95) if decode else 0.0)
    assert got.throughput_tps == pytest.approx(sum(c[3] for c in decode_calls) / sum(c[2] for c in calls))
    assert got.batch_utilization == pytest.approx(np.mean([c[1] for c in decode_calls]) / 8 if decode_calls else 0.0)
    assert metrics.last_operation == 12.5


def test_p95_forgets_what_is_older_than_1000_samples_and_the_mean_does_not() -> None:
    metrics = OperationMetrics(4096)
    metrics.record_decode(1000, 9.0, 1000)
    metrics.record_decode(3000, 1.0, 3000)
    got = metrics.summary()
    assert got.p95_decode_latency == 1000.0
    assert got.avg_decode_latency == pytest.approx((9 + 3) / 4 * 1000)


def test_a_call_too_short_to_measure_divides_nothing_by_zero() -> None:
    metrics = OperationMetrics(1)
    metrics.record_decode(1, 0.0, 1)
    assert metrics.summary().throughput_tps == 0.0


def test_operations_of_many_threads_are_all_counted() -> None:
    metrics = OperationMetrics(4)

    def work() -> None:
        for _ in range(500):
            metrics.record_decode(2, 0.5, 2)
            metrics.summary()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.summary().decode_operations == 4000
