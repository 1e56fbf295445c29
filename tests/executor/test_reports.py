"""Capabilities, status, metrics, warmup: measured or derived, and true."""

from __future__ import annotations

import time

import pytest
import torch
from tests.executor.conftest import CONTEXT, LAYERS, PAGE, VOCAB, Tiny, inputs, make_executor, prompt, some_ids, token

from quire.contracts.executor import AttentionMechanism, ExecutorState, ModelAssets
from quire.errors import InvalidArgument, QuireError, Unsupported
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor
from quire.executor.warmup import peak_bytes


def test_info(tiny: Tiny, executor: Executor) -> None:
    info = executor.info()
    assert info.architecture == f"{tiny.family}ForCausalLM"
    assert (info.vocab_size, info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (97, 3, 4, 2, 8)
    assert info.num_parameters == sum(p.numel() for p in tiny.reference.parameters())
    assert (info.dtype, info.device, info.max_sequence_length) == ("float32", "cpu", CONTEXT)
    assert info == executor.info()
    assert info.fingerprint != make_executor(tiny, name="Other").info().fingerprint


def test_configuration_is_checked(llama: Tiny) -> None:
    for bad in ({"max_model_len": 0}, {"max_model_len": CONTEXT + 1}, {"max_batch_size": 0}):
        with pytest.raises(InvalidArgument):
            make_executor(llama, **bad)
    assert make_executor(llama, max_model_len=7).info().max_sequence_length == 7


def test_every_refusal_of_the_table_is_true(ex: Executor) -> None:
    llm = LlmExecutor(ex)
    cache = llm.create_kv_cache()
    media = inputs([1])
    calls = {
        "load_lora": lambda: ex.load_lora(ModelAssets(path="x")),
        "unload_lora": lambda: ex.unload_lora(0),
        "position_ids": lambda: ex.prefill(prompt([1], position_ids=torch.tensor([[4]]))),
        "output_hidden_states": lambda: ex.prefill(prompt([1], output_hidden_states=True)),
        "output_attentions": lambda: ex.prefill(prompt([1], output_attentions=True)),
        "vision": lambda: llm.prefill(type(media)(text=media.text, vision=_media("VisionData")), cache),
        "audio": lambda: llm.prefill(type(media)(text=media.text, audio=_media("AudioData")), cache),
    }
    capabilities = ex.capabilities()
    for name, call in calls.items():
        reason = capabilities.why_not(name)
        assert reason
        with pytest.raises(Unsupported) as caught:
            call()
        assert reason in str(caught.value) or name in str(caught.value)
    named = {name for name, _ in capabilities.refusals}
    assert named - set(calls) == {"tensor_parallelism", "pipeline_parallelism"}
    assert not capabilities.supports_tensor_parallelism
    assert not capabilities.supports_pipeline_parallelism


def _media(name: str) -> object:
    import quire.contracts.executor as contract

    return getattr(contract, name)(embeddings=torch.ones(0, 8))


def test_every_flag_that_is_true_is_exercised(ex: Executor) -> None:
    found = ex.capabilities()
    assert found.attention_mechanisms == (AttentionMechanism.GROUPED_QUERY, AttentionMechanism.PAGED)
    assert "float32" in found.supported_dtypes
    assert "cpu" in found.supported_devices
    assert found.supports_dynamic_batching
    assert found.supports_continuous_batching
    assert found.supports_speculative_decoding
    a, b, c = (ex.prefill(prompt(some_ids(n))).kv_cache for n in (3, 5, 7))
    a, b = (out.kv_cache for out in ex.batch_decode([token(a, 1), token(b, 1)]))
    b, c = (out.kv_cache for out in ex.batch_decode([token(b, 1), token(c, 1)]))
    assert ex.speculative_decode(token(c, 1), [2], 0.0).acceptance_count == 1
    alone = make_executor_of_one(ex)
    assert not alone.capabilities().supports_dynamic_batching
    with pytest.raises(InvalidArgument, match="max_batch_size is 1"):
        alone.prefill(prompt([1], [2]))


def make_executor_of_one(ex: Executor) -> Executor:
    return Executor(ex.pool.runner, identity=ex.pool.identity, max_batch_size=1)


def test_metrics_count_operations(ex: Executor) -> None:
    assert set(ex.metrics().to_dict().values()) - {ex.metrics().memory_efficiency} == {0}
    assert ex.status().last_operation is None
    begin = time.monotonic()
    a = ex.prefill(prompt([1, 2], [3, 4])).kv_cache  # 2 prefills
    a = ex.decode(token(a, 1, 2)).kv_cache  # 2 decodes
    b = ex.batch_prefill([prompt([1]), prompt([2], [3])])[0].kv_cache  # 3 prefills
    b = ex.forward_verify([token(b, 1)] * 3)[-1].kv_cache  # 1 decode
    ex.speculative_decode(token(b, 1), [1, 2], 0.0)  # 1 decode
    ex.forward(torch.tensor([[1, 2]]))  # 1 prefill
    llm = LlmExecutor(ex)
    cache = llm.create_kv_cache(batch_size=2)
    llm.prefill(inputs([1], [2]), cache)  # 2 prefills
    llm.sample_tokens_batch(3, inputs([1], [2]), cache)  # 6 decodes
    with pytest.raises(QuireError):
        ex.decode(token(b, VOCAB))
    metrics, status = ex.metrics(), ex.status()
    assert (metrics.prefill_operations, metrics.decode_operations, metrics.total_operations) == (8, 10, 18)
    assert (status.prefill_operations, status.decode_operations) == (8, 10)
    assert metrics.avg_decode_latency > 0
    assert metrics.throughput_tps > 0
    assert metrics.batch_utilization == pytest.approx((2 + 1 + 1 + 2 * 3) / 6 / 64)
    assert status.last_operation is not None
    assert begin <= status.last_operation <= time.monotonic()
    assert (status.state, status.current_batch_size) == (ExecutorState.READY, 0)


def test_memory_usage(tiny: Tiny, executor: Executor) -> None:
    empty = executor.status().memory_usage
    weights = sum(p.numel() * 4 for p in tiny.reference.parameters())
    per_page = PAGE * LAYERS * 2 * (8 + 8) * 4
    assert empty.used_bytes == weights
    assert empty.allocated_bytes == weights + 1024 // PAGE * per_page
    handle = executor.prefill(prompt(some_ids(9))).kv_cache
    assert executor.status().memory_usage.used_bytes == weights + 3 * per_page
    executor.release_cache(handle.cache_id)
    after = executor.status().memory_usage
    assert (after.used_bytes, after.peak_bytes) == (weights, weights + 3 * per_page)
    needs = executor.capabilities().memory_requirements
    assert needs.parameter_memory == weights
    assert needs.kv_cache_memory_per_token * LAYERS * PAGE == per_page


def test_batch_sizes(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=6 * PAGE, max_batch_size=5)
    assert [n for n in range(-1, 9) if ex.supports_batch_size(n)] == [1, 2, 3, 4, 5]
    assert ex.optimal_batch_size() == 5
    handle = ex.prefill(prompt(some_ids(3 * PAGE + 1))).kv_cache
    assert [n for n in range(9) if ex.supports_batch_size(n)] == [1, 2]
    assert ex.optimal_batch_size() == 2
    ex.release_cache(handle.cache_id)
    for bad in (1.0, True, "1"):
        assert not ex.supports_batch_size(bad)  # type: ignore[arg-type]


def test_warmup_measures_once_and_leaves_nothing(llama: Tiny) -> None:
    ex = make_executor(llama, max_batch_size=4)
    before = ex.metrics().to_dict()
    ex.warmup()
    measured = ex._measured
    ex.warmup()
    assert ex._measured is measured
    assert ex.pool.state.empty()
    assert ex.metrics().to_dict() == before
    assert 1 <= ex.optimal_batch_size() <= 4
    needs = ex.capabilities().memory_requirements
    # Logits alone are V floats per token.
    assert needs.activation_memory_per_token >= VOCAB * 4
    held = ex.create_kv_cache()
    tokens = 96
    peak = peak_bytes(lambda: ex.prefill(prompt(some_ids(tokens), kv_cache=held)), ex.pool.device)
    estimate = needs.calculate_total_memory(1, tokens, 0) - needs.parameter_memory
    # The bound that is stated: a factor of two between the sizes that were measured.
    assert estimate / 2 <= peak <= estimate * 2


def test_warmup_in_a_pool_of_one_page(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=PAGE)
    handle = ex.prefill(prompt([1])).kv_cache
    ex.warmup()
    assert ex.optimal_batch_size() == 1
    assert handle.is_valid
    ex.pool.state.check()
