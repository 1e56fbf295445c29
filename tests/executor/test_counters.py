"""What the executor of an ``LLM`` counts, beside the engine's numbers."""

from __future__ import annotations

import pytest
from tests.executor.conftest import prompt, token

from quire import LLM
from quire import executor as package
from quire.executor import counters

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
