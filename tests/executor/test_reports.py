"""Capabilities, status, metrics, warmup: measured or derived, and true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.executor.conftest import (
    CONTEXT,
    LAYERS,
    PAGE,
    VOCAB,
    WIDTH,
    Tiny,
    inputs,
    make_executor,
    prompt,
    some_ids,
    token,
)

from quire.contracts.executor import (
    AttentionMechanism,
    AudioData,
    ExecutorInputs,
    ExecutorState,
    ExecutorType,
    ModelAssets,
    PrefillOutput,
    VisionData,
)
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
    text_only = make_like(ex, modalities=(), executor_type=ExecutorType.BATCH)
    llm = LlmExecutor(text_only)
    cache = llm.create_kv_cache()
    text = inputs([1]).text
    nothing, layers = torch.ones(0, WIDTH), torch.ones(LAYERS, 0, 4)
    a, b = (text_only.prefill(prompt([n])).kv_cache for n in (1, 2))
    calls = {
        "load_lora": lambda: ex.load_lora(ModelAssets(path="x")),
        "unload_lora": lambda: ex.unload_lora(0),
        "adapter": lambda: ex.prefill(prompt([1], adapter=0)),
        "per_layer_embeddings": lambda: LlmExecutor(ex).prefill(
            ExecutorInputs(text=text, vision=VisionData(per_layer_embeddings=layers)), ex.create_kv_cache()
        ),
        "speculative_decode with hidden states or attention weights": lambda: ex.speculative_decode(
            token(ex.create_kv_cache(), 1, output_attentions=True), [], 0.5
        ),
        "vision": lambda: llm.prefill(ExecutorInputs(text=text, vision=VisionData(embeddings=nothing)), cache),
        "audio": lambda: llm.prefill(ExecutorInputs(text=text, audio=AudioData(embeddings=nothing)), cache),
        "continuous_batching": lambda: text_only.batch_decode([token(a, 1), token(b, 1)]),
    }
    capabilities = text_only.capabilities()
    for name, call in calls.items():
        reason = capabilities.why_not(name)
        assert reason
        with pytest.raises(Unsupported) as caught:
            call()
        assert reason in str(caught.value) or name in str(caught.value) or name == "continuous_batching"
    named = {name for name, _ in capabilities.refusals}
    assert named - set(calls) == {"tensor_parallelism", "pipeline_parallelism"}
    assert not capabilities.supports_continuous_batching
    assert "vision" not in dict(ex.capabilities().refusals)
    assert not capabilities.supports_tensor_parallelism
    assert not capabilities.supports_pipeline_parallelism


def make_like(ex: Executor, **kwargs: Any) -> Executor:
    """Another executor over the same runner."""
    # One lock for one runner: what is collected while somebody looks at the pool is let go of later.
    return Executor(ex.pool.runner, identity=ex.pool.identity, lock=ex.pool.lock, **kwargs)


def test_every_flag_that_is_true_is_exercised(ex: Executor) -> None:
    found = ex.capabilities()
    mechanisms = (AttentionMechanism.FLASH, AttentionMechanism.GROUPED_QUERY, AttentionMechanism.PAGED)
    assert found.attention_mechanisms == mechanisms
    assert "float32" in found.supported_dtypes
    assert "cpu" in found.supported_devices
    assert found.supports_dynamic_batching
    assert found.supports_continuous_batching
    assert found.supports_speculative_decoding
    a, b, c = (ex.prefill(prompt(some_ids(n))).kv_cache for n in (3, 5, 7))
    a, b = (out.kv_cache for out in ex.batch_decode([token(a, 1), token(b, 1)]))
    b, c = (out.kv_cache for out in ex.batch_decode([token(b, 1), token(c, 1)]))
    assert ex.speculative_decode(token(c, 1), [2], 0.0).acceptance_count == 1
    alone = make_like(ex, max_batch_size=1)
    assert not alone.capabilities().supports_dynamic_batching
    with pytest.raises(InvalidArgument, match="max_batch_size is 1"):
        alone.prefill(prompt([1], [2]))


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


def measured_peak(ex: Executor, run: Callable[[], object]) -> int:
    """Weights, pages of K and V, and the most that was allocated besides, from the allocator's own events."""
    activations = peak_bytes(run, ex.pool.device)
    return ex.status().memory_usage.used_bytes + activations


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 8), (1, 96), (2, 40), (8, 16), (4, 128), (32, 1), (16, 128)])
def test_the_memory_estimate_meets_the_measured_peak(tiny: Tiny, rows: int, tokens: int) -> None:
    """Within 10 % and the unused slots of the last pages, from a forward of 1 token to one of 2,048."""
    ex = make_executor(tiny, tokens=4096)
    ex.warmup()
    needs = ex.capabilities().memory_requirements
    held: list[object] = []
    ids = [some_ids(tokens, row) for row in range(rows)]
    peak = measured_peak(ex, lambda: held.append(ex.prefill(prompt(*ids))))
    estimate = needs.calculate_total_memory(rows, tokens, LAYERS)
    slack = rows * (-tokens % PAGE) * needs.kv_cache_memory_per_token * LAYERS
    assert abs(estimate + slack - peak) <= 0.1 * peak
    assert needs.calculate_total_memory(0, tokens, LAYERS) == needs.parameter_memory + needs.overhead_memory


def test_the_memory_estimate_is_not_exceeded_by_lighter_calls(tiny: Tiny) -> None:
    """Several forwards, fewer logits, and decodes of rows of that length."""
    ids = [some_ids(96, row) for row in range(4)]
    for chunk, wanted in ((16, "all"), (0, "last"), (50, "none")):
        ex = make_executor(tiny, tokens=4096)
        ex.warmup()
        ex.prefill_chunk_size = chunk
        limit = ex.capabilities().memory_requirements.calculate_total_memory(4, 96, LAYERS)
        held: list[PrefillOutput] = []
        assert measured_peak(ex, lambda: held.append(ex.prefill(prompt(*ids, logits=wanted)))) <= 1.1 * limit  # noqa: B023
        more = ex.capabilities().memory_requirements.calculate_total_memory(4, 100, LAYERS)
        assert measured_peak(ex, lambda: ex.decode(token(held[0].kv_cache, 1, 2, 3, 4))) <= 1.1 * more  # noqa: B023


def test_warmup_in_a_pool_of_one_page(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=PAGE)
    handle = ex.prefill(prompt([1])).kv_cache
    ex.warmup()
    assert ex.optimal_batch_size() == 1
    assert handle.is_valid
    ex.pool.state.check()
