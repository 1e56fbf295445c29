"""Capabilities, status, metrics, warmup: measured or derived, and true."""

from __future__ import annotations

import time
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
    assert_close,
    inputs,
    make_executor,
    prompt,
    some_ids,
    token,
)
from tests.executor.recurrent import Hybrid
from tests.executor.recurrent import make_executor as make_recurrent

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.contracts.executor import (
    AttentionMechanism,
    AudioData,
    ExecutorInputs,
    ExecutorState,
    ExecutorType,
    ModelAssets,
    VisionData,
)
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor
from quire.llm import LLM


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
    # One lock for one runner: what is collected while somebody looks at the pool is let go of
    # later.
    return Executor(ex.pool.runner, identity=ex.pool.facts.identity, lock=ex.pool.lock, **kwargs)


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
        with pytest.raises(InvalidArgument, match="batch_size must be an integer"):
            ex.supports_batch_size(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"window": 8, "sink": 2, "prefill_chunk_size": 8}])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 9, 24, 25, CONTEXT, CONTEXT + 1])
def test_a_supported_batch_runs(llama: Tiny, given: dict[str, int], length: int) -> None:
    """So many rows of that length fit, and one row more does not, unless windows let go of more
    than they must.
    """
    ex = make_executor(llama, tokens=6 * PAGE, max_batch_size=5, **given)
    rows = [n for n in range(1, 6) if ex.supports_batch_size(n, length)]
    assert rows == list(range(1, len(rows) + 1))
    assert ex.optimal_batch_size(length) == max(1, len(rows))

    def run(count: int) -> None:
        ex.prefill(prompt(*[some_ids(length, row) for row in range(count)], logits="none"))

    if rows:
        run(rows[-1])
    if len(rows) < 5 and not given and length:
        with pytest.raises((ResourceExhausted, InvalidArgument)):
            run(len(rows) + 1)
    if given and 24 <= length <= CONTEXT:
        assert rows == [1], "a window of 8 with a chunk of 8 takes at most 6 pages, whatever the length"


def test_what_would_be_given_back_is_room(llama: Tiny) -> None:
    """Finished requests and idle sessions of the engine hold every page, and a batch is run beside
    them at their cost.
    """
    page_bytes = LAYERS * 2 * (8 + 8) * 4 * 16
    with LLM(llama.path, device="cpu", dtype="float32", kv_cache_memory=6 * page_bytes) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        llm.generate([some_ids(47)], params)
        session = llm.session()
        session.append(some_ids(30, 1))
        session.generate(params)
        ex = llm.executor
        held, free = ex.pool.state.num_used_pages, ex.pool.state.num_available_pages()
        assert free < 2
        assert ex.supports_batch_size(5)
        assert not ex.supports_batch_size(5, 17)
        assert (ex.pool.state.num_used_pages, ex.pool.state.num_available_pages()) == (held, free), (
            "asking gives nothing up"
        )
        pinned = llm.session(pin=True)
        pinned.append(some_ids(30, 2))
        pinned.generate(params)
        most = max(n for n in range(7) if ex.supports_batch_size(n))
        assert most == 4, "two pages are pinned and not given up"
        ex.prefill(prompt(*[[row] for row in range(most)]))
        ex.pool.state.check()


class LooseSequences(list[int]):
    """An owner that could give up these sequences."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def reclaimable(self) -> list[int]:
        return self


def test_states_that_would_be_given_back_are_room(hybrid: Hybrid) -> None:
    executor = make_recurrent(hybrid, states=6)
    caches = [executor.prefill(prompt([1, 2, 3])).kv_cache for _ in range(2)]
    before = executor.optimal_batch_size()
    owner = LooseSequences([caches[0].cache.rows[0].seq])
    executor.pool.runner.room.join(owner)  # type: ignore[arg-type]
    assert executor.optimal_batch_size() == before + 1
    table = executor.pool.state.parts.recurrent.table
    gone = [caches[0].cache.rows[0].seq]
    expected = table.num_available_without(gone)
    caches[0].cache.commit_chains()
    executor.release_cache(caches[0].cache_id)
    assert table.num_available == expected


def test_warmup_measures_once_and_leaves_nothing(llama: Tiny) -> None:
    ex = make_executor(llama, max_batch_size=4)
    before = ex.metrics().to_dict()
    ex.warmup()
    measured = ex._activations
    assert measured is not None
    ex.warmup()
    assert ex._activations is measured
    assert ex.pool.state.empty()
    assert ex.metrics().to_dict() == before
    assert 1 <= ex.optimal_batch_size() <= 4
    needs = ex.capabilities().memory_requirements
    # Logits alone are V floats per token.
    assert needs.activation_memory_per_token >= VOCAB * 4


def test_warmup_in_a_pool_of_one_page(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=PAGE)
    handle = ex.prefill(prompt([1])).kv_cache
    ex.warmup()
    assert ex.optimal_batch_size() == 1
    assert handle.is_valid
    ex.pool.state.check()


def test_activations_are_measured_when_they_are_asked_for(llama: Tiny) -> None:
    """By the first call that finds room; a number that nobody measured is none."""
    ex = make_executor(llama, tokens=4 * PAGE)
    full = ex.prefill(prompt(some_ids(4 * PAGE))).kv_cache
    needs = ex.capabilities().memory_requirements
    assert (needs.activation_memory_per_token, needs.overhead_memory) == (None, None)
    with pytest.raises(FailedPrecondition, match="not measured: the pool had no room for two tokens; release caches"):
        needs.calculate_total_memory(1, 1, LAYERS)
    before = ex.metrics().to_dict()
    ex.release_cache(full.cache_id)
    needs = ex.capabilities().memory_requirements
    assert needs.activation_memory_per_token is not None
    assert needs.activation_memory_per_token >= VOCAB * 4, "logits alone are V floats per token"
    assert needs.calculate_total_memory(1, 1, LAYERS) > needs.parameter_memory
    assert ex.capabilities().memory_requirements == needs
    assert ex.metrics().to_dict() == before | {"memory_efficiency": ex.metrics().memory_efficiency}
    assert ex.pool.state.empty()
    ex.shutdown()
    assert ex.capabilities().memory_requirements == needs
    late = make_executor(llama)
    late.shutdown()
    assert late.capabilities().memory_requirements.overhead_memory is None


def test_an_llm_makes_a_new_executor_for_one_that_ended(llama: Tiny) -> None:
    with LLM(llama.path, device="cpu", dtype="float32", kv_cache_memory="1MiB") as llm:
        first = llm.executor
        assert llm.executor is first
        first.prefill(prompt([1, 2, 3]))
        first.shutdown()
        second = llm.executor
        assert second is not first
        assert_close(second.prefill(prompt([1, 2, 3])).logits[0], llama.logits([1, 2, 3]))
        held = second.prefill(prompt([1, 2, 3])).kv_cache
        second.pool.broken = "the device failed"
        with pytest.raises(QuireError, match="the device failed"):
            second.prefill(prompt([1]))
        third = llm.executor
        assert third is not second
        assert not held.is_valid, "its pages went back"
        assert third.pool.state.sequences.ids == []
        assert second.status().state is ExecutorState.SHUTDOWN
        assert_close(third.prefill(prompt([4])).logits[0], llama.logits([4]))
        assert llm.status()["executor"].is_ready
