"""Executors from a configuration: types, levels, flags, what is refused; and executors by name."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.executor.conftest import (
    CONTEXT,
    LAYERS,
    Tiny,
    assert_close,
    check_pages,
    inputs,
    make_executor,
    make_tiny,
    prompt,
    refused,
    some_ids,
    token,
)

from quire.base.config import AttentionConfig, ExecutorConfig, MemoryConfig, OptimizationConfig
from quire.base.errors import (
    AlreadyExists,
    CheckpointError,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.build import EXECUTOR_FACTORY as FACTORY
from quire.build import fastest_attention
from quire.contracts.executor import AttentionMechanism, ExecutorType
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor
from quire.executor.named_executors import NamedExecutors
from quire.models.families import LoadedModel

BYTES_PER_TOKEN = LAYERS * 2 * (8 + 8) * 4


def config_of(tiny: Tiny, **fields: Any) -> ExecutorConfig:
    base: dict[str, Any] = {
        "model_info": tiny.path,
        "device": "cpu",
        "dtype": "float32",
        "max_batch_size": 4,
        "max_sequence_length": CONTEXT,
    }
    return ExecutorConfig(**base | fields)


# -- what a configuration becomes ------------------------------------------------------------------


def test_a_configuration_is_what_its_json_says() -> None:
    values = {
        "model-info": "tiny-python",
        "max_batch_size": 2,
        "attention_config": {"attention_type": "SlidingWindow", "sliding-window-size": 8, "block_size": 4},
        "memory-config": {"memory_pool_size": "16MiB"},
        "optimization_config": {"optimization_level": 0},
        "executor_options": {"prefill_chunk_size": 7, "modalities": ["vision"]},
    }
    config = ExecutorConfig.from_mapping(values)
    assert config == ExecutorConfig(
        model_info="tiny-python",
        max_batch_size=2,
        attention_config=AttentionConfig(attention_type="SlidingWindow", sliding_window_size=8, block_size=4),
        memory_config=MemoryConfig(memory_pool_size="16MiB"),
        optimization_config=OptimizationConfig(optimization_level=0),
        executor_options={"prefill_chunk_size": 7, "modalities": ["vision"]},
    )
    assert ExecutorConfig.from_mapping(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({}, "model_info", "configuration key 'model_info' is missing"),
        ([], None, "must be a mapping of names to values"),
        ({"model_info": "x", "batch": 2}, "batch", "unknown configuration key 'batch'; known: model_info, device"),
        ({"model_info": "x", "memory_config": {"size": 2}}, "memory_config.size", "unknown .* 'memory_config.size'"),
        ({"model_info": "x", "memory_config": 2}, "memory_config", "memory_config must be a mapping"),
        ({"model_info": "x", "attention_config": {"block-size": 2, "block_size": 2}}, "attention_config.block_size", "twice"),
    ],
)  # fmt: skip
def test_json_of_another_form_is_refused(values: Any, field: str | None, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        ExecutorConfig.from_mapping(values)
    assert caught.value.field == field


def test_an_executor_names_its_model_for_another_one(tiny: Tiny) -> None:
    first = FACTORY.create_executor(config_of(tiny, max_sequence_length=100))
    config = ExecutorConfig(model_info=first.info(), device="cpu", dtype="float32")
    assert (config.max_sequence_length, ExecutorConfig(model_info="tiny-python").max_sequence_length) == (100, 2048)
    ids = some_ids(20)
    second = FACTORY.create_executor(config)
    assert_close(second.prefill(prompt(ids)).logits[0], tiny.logits(ids))
    assert second.info() == first.info()


def test_an_executor_is_what_was_asked_for(tiny: Tiny) -> None:
    ids = some_ids(20)
    made = FACTORY.create_executor(
        config_of(
            tiny,
            max_sequence_length=100,
            attention_config=AttentionConfig(block_size=5),
            executor_options={"prefill_chunk_size": 7, "modalities": ["vision"]},
        )
    )
    assert_close(made.prefill(prompt(ids)).logits[0], tiny.logits(ids))
    capabilities, info = made.capabilities(), made.info()
    assert (capabilities.max_batch_size, info.max_sequence_length, made.prefill_chunk_size) == (4, 100, 7)
    assert (made.pool.facts.page_size, made.modalities) == (5, {"vision"})
    assert made.pool.state.capacity == 4 * 100
    # Packed weights, whose outputs come in panels.
    weights = cast(LoadedModel, made.pool.runner.model).parameter_bytes
    assert weights >= tiny.model.parameter_bytes
    assert made.status().memory_usage.allocated_bytes == weights + 400 * BYTES_PER_TOKEN
    with pytest.raises(ResourceExhausted, match="maximum of 100"):
        made.prefill(prompt(some_ids(101)))
    assert capabilities.why_not("audio")
    assert info.fingerprint == FACTORY.create_batch_executor(config_of(tiny)).info().fingerprint


def test_the_pool_is_as_large_as_said_and_never_grows(llama: Tiny) -> None:
    memory = MemoryConfig(memory_pool_size=8 * 16 * BYTES_PER_TOKEN)
    made = FACTORY.create_executor(config_of(llama, memory_config=memory))
    assert made.pool.state.num_pages == 8
    allocated = made.status().memory_usage.allocated_bytes
    held = made.prefill(prompt(some_ids(100))).kv_cache
    with refused(ResourceExhausted, made, held.cache):
        made.prefill(prompt(some_ids(40, 1)))
    assert made.status().memory_usage.allocated_bytes == allocated
    with pytest.raises(ResourceExhausted, match="no page of 16 tokens"):
        FACTORY.create_executor(config_of(llama, memory_config=MemoryConfig(memory_pool_size=100)))
    share = MemoryConfig(max_memory_usage=1e-12)
    with pytest.raises(ResourceExhausted, match="no page"):
        FACTORY.create_executor(config_of(llama, memory_config=share))


def test_without_paging_a_sequence_is_one_piece(llama: Tiny) -> None:
    made = FACTORY.create_executor(
        config_of(llama, attention_config=AttentionConfig(enable_paged_attention=False, block_size=0))
    )
    handle = made.prefill(prompt(some_ids(30))).kv_cache
    assert handle.block_table.num_blocks == 1
    assert made.pool.state.num_pages == 4


def test_attention_types(llama: Tiny) -> None:
    def made(kind: str, **fields: Any) -> Executor:
        return FACTORY.create_executor(
            config_of(llama, attention_config=AttentionConfig(attention_type=kind, **fields))
        )

    for kind in ("MultiHead", "GroupedQuery", "Flash", "Paged"):
        assert AttentionMechanism.GROUPED_QUERY in made(kind).capabilities().attention_mechanisms
    assert AttentionMechanism.FLASH in made("Flash").capabilities().attention_mechanisms
    with pytest.raises(InvalidArgument, match="attention_type must be 'GroupedQuery', the model's, got 'MultiQuery'"):
        made("MultiQuery")
    windowed = FACTORY.create_executor(
        config_of(
            llama,
            attention_config=AttentionConfig(attention_type="SlidingWindow", sliding_window_size=8),
            executor_options={"sliding_window_sink": 2},
        )
    )
    ids = some_ids(30)
    same = make_executor(llama, window=8, sink=2)
    found = windowed.prefill(prompt(ids))
    assert_close(found.logits[0], same.prefill(prompt(ids)).logits[0])
    assert AttentionMechanism.SLIDING_WINDOW in windowed.capabilities().attention_mechanisms
    assert windowed.pool.state.cached_length(found.kv_cache.cache.rows[0].seq) == 8


# -- levels ----------------------------------------------------------------------------------------


def test_levels_give_the_same_greedy_tokens(tiny: Tiny) -> None:
    drawn, logits = [], []
    for level in (0, 1):
        made = FACTORY.create_executor(
            config_of(tiny, optimization_config=OptimizationConfig(optimization_level=level))
        )
        assert (
            made.pool.state.parts.paged.backend.name == ("reference", fastest_attention(made.pool.facts.device))[level]
        )
        flash = AttentionMechanism.FLASH in made.capabilities().attention_mechanisms
        assert flash == (level > 0)
        llm = LlmExecutor(made)
        cache = llm.create_kv_cache()
        llm.prefill(inputs(some_ids(30)), cache)
        drawn.append(llm.sample_tokens(40, inputs([5]), cache))
        logits.append(made.prefill(prompt(some_ids(50))).logits[0])
        assert made.status().fallbacks == ()
    assert drawn[0] == drawn[1]
    assert_close(logits[1], logits[0])


def test_what_does_nothing_is_refused(llama: Tiny) -> None:
    """And the default asks for none of it."""
    for fields, match in (
        (
            {"optimization_level": 2},
            "optimization_level 2: executors neither compile nor capture decode.*; 0 and 1 are levels",
        ),
        ({"optimization_level": 3}, "optimization_level 3: nothing is tuned.*; 0 and 1 are levels"),
        ({"enable_cuda_graphs": True}, "enable_cuda_graphs True: executors neither"),
        ({"enable_mixed_precision": True}, "enable_mixed_precision True: all products"),
    ):
        config = config_of(llama, optimization_config=OptimizationConfig(**fields))
        for call in (FACTORY.validate_config, FACTORY.create_executor):
            with pytest.raises(Unsupported, match=match):
                call(config)
    FACTORY.validate_config(config_of(llama))


def test_flags_of_fusion(llama: Tiny) -> None:
    def made(**fields: Any) -> Executor:
        attention = AttentionConfig(enable_flash_attention=fields.pop("flash", True))
        return FACTORY.create_executor(
            config_of(llama, attention_config=attention, optimization_config=OptimizationConfig(**fields))
        )

    assert made().pool.state.parts.paged.backend.name == fastest_attention(torch.device("cpu"))
    assert made(enable_kernel_fusion=False).pool.state.parts.paged.backend.name == "reference"
    assert made(flash=False).pool.state.parts.paged.backend.name == "reference"


def test_no_fused_attention_is_claimed_where_none_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch forms scores with a soft cap; ``fuses`` is held against the kernels that ran."""
    monkeypatch.setattr("quire.build.fastest_attention", lambda device: "torch")
    capped = make_tiny("Gemma2", tmp_path / "capped", attn_logit_softcapping=20.0)
    plain = make_tiny("Gemma2", tmp_path / "plain", attn_logit_softcapping=None)
    for tiny, fused in ((capped, False), (plain, True)):
        made = FACTORY.create_executor(config_of(tiny))
        assert (AttentionMechanism.FLASH in made.capabilities().attention_mechanisms) == fused
        with torch.autograd.profiler.profile() as ran:
            made.prefill(prompt(some_ids(20)))
        names = {event.name for event in ran.function_events or ()}
        assert any("flash_attention" in name for name in names) == fused
        fallbacks = made.status().fallbacks
        assert [text.split(":")[0] for text in fallbacks] == ["enable_flash_attention"] * (not fused)
        assert made.status().to_dict()["fallbacks"] == list(fallbacks)
        assert (
            not FACTORY.create_executor(config_of(tiny, attention_config=AttentionConfig(enable_flash_attention=False)))
            .status()
            .fallbacks
        )
        demanding = config_of(tiny, attention_config=AttentionConfig(attention_type="Flash"))
        if fused:
            FACTORY.create_executor(demanding)
        else:
            with pytest.raises(Unsupported, match="attention_type 'Flash': 3 of 3 attention layers run without fused"):
                FACTORY.create_executor(demanding)


# -- types -----------------------------------------------------------------------------------------


def test_all_types_can_be_made(llama: Tiny) -> None:
    supported = FACTORY.supported_types()
    assert set(supported) == set(ExecutorType)
    supported.clear()
    assert FACTORY.supported_types(), "a fresh list"
    for kind in ExecutorType:
        config = config_of(llama, executor_type=kind.value)
        FACTORY.validate_config(config)
        # Those of several processes are made in tests/ranks.
        if kind not in (ExecutorType.TENSOR_PARALLEL, ExecutorType.PIPELINE_PARALLEL):
            assert FACTORY.create_executor(config).executor_type is kind
    with pytest.raises(
        InvalidArgument,
        match="'Sequential' does not batch; 'Batch', 'ContinuousBatch', 'Speculative', 'PipelineParallel', 'TensorParallel' do",
    ):
        FACTORY.create_batch_executor(config_of(llama, executor_type="Sequential"))
    for kind in ("Batch", "ContinuousBatch", "Speculative"):
        assert FACTORY.create_batch_executor(config_of(llama, executor_type=kind)).executor_type == kind


def test_a_sequential_executor_runs_one_sequence(llama: Tiny) -> None:
    ex = make_executor(llama, executor_type=ExecutorType.SEQUENTIAL)
    found = ex.capabilities()
    assert (found.max_batch_size, found.supports_dynamic_batching, found.supports_continuous_batching) == (
        1,
        False,
        False,
    )
    a, b = (ex.prefill(prompt([n])).kv_cache for n in (1, 2))
    with refused(InvalidArgument, ex, a.cache, b.cache, match="max_batch_size is 1"):
        ex.batch_decode([token(a, 1), token(b, 1)])
    assert_close(ex.decode(token(b, 3)).logits[0], llama.logits([2, 3])[-1])
    assert ex.metrics().batch_utilization == 1.0


def test_a_batch_executor_runs_a_batch_to_its_end(llama: Tiny) -> None:
    ex = make_executor(llama, executor_type=ExecutorType.BATCH)
    llm = LlmExecutor(ex)
    found = ex.capabilities()
    assert (found.supports_dynamic_batching, found.supports_continuous_batching) == (True, False)
    a, b, c = (out.kv_cache for out in ex.batch_prefill([prompt([n]) for n in (1, 2, 3)]))
    d = ex.prefill(prompt([4])).kv_cache
    caches = [handle.cache for handle in (a, b, c, d)]
    for call in (
        lambda: ex.batch_decode([token(a, 1), token(b, 1)]),
        lambda: ex.batch_decode([token(handle, 1) for handle in (a, b, c, d)]),
        lambda: ex.decode(token(a, 1)),
        lambda: ex.forward_verify([token(a, 1)]),
        lambda: ex.speculative_decode(token(a, 1), [2], 0.0),
        lambda: llm.step(inputs([1]), a),
        lambda: llm.sample_tokens(2, inputs([1]), b.cache),
    ):
        with refused(Unsupported, ex, *caches, match="'Batch'"):
            call()
    a, b, c = (out.kv_cache for out in ex.batch_decode([token(handle, 5) for handle in (a, b, c)]))
    ex.release_cache(b.cache_id)  # A finished sequence leaves; the others go on.
    outputs = ex.batch_decode([token(c, 6), token(a, 6)])
    assert_close(outputs[0].logits[0], llama.logits([3, 5, 6])[-1])
    assert_close(ex.decode(token(d, 6)).logits[0], llama.logits([4, 6])[-1])
    ex.release_cache(a.cache_id)
    assert_close(ex.decode(token(outputs[0].kv_cache, 7)).logits[0], llama.logits([3, 5, 6, 7])[-1])
    # A batch may be formed anew by a call that prefills.
    e, f = ex.batch_prefill([prompt([1], kv_cache=d), prompt([2])])
    ex.batch_decode([token(e.kv_cache, 1), token(f.kv_cache, 1)])
    two = ex.prefill(prompt([1], [2])).kv_cache
    ex.decode(token(two, 1, 2))
    clone = two.clone_handle()
    ex.decode(token(clone, 1, 2))
    own = ex.create_kv_cache()
    ex.decode(token(own, 1))


# -- sharing ---------------------------------------------------------------------------------------


def test_equal_beginnings_share_pages(tiny: Tiny) -> None:
    ex = make_executor(tiny, share_prefixes=True, prefill_chunk_size=5)
    ids = some_ids(30)
    first = ex.prefill(prompt(ids, logits="last"))
    used, ran = ex.pool.state.num_used_pages, []
    execute = ex.pool.runner.execute
    ex.pool.runner.execute = lambda step, *rest: ran.append(step.num_tokens) or execute(step, *rest)  # type: ignore[func-returns-value, method-assign]
    again = ex.prefill(prompt(ids, logits="last"))
    assert_close(again.last_token_logits(), first.last_token_logits())
    assert (sum(ran), ex.pool.state.num_used_pages) == (1, used + 1), (
        "only the last token ran, on a copy of the last page"
    )
    ran.clear()
    partial = ex.prefill(prompt([*ids[:13], 7, 8], logits="last"))
    assert sum(ran) == 2, "a partial match is a partial hit"
    assert_close(partial.last_token_logits()[0], tiny.logits([*ids[:13], 7, 8])[-1])
    ran.clear()
    nothing = ex.prefill(prompt(ids, logits="none"))
    assert sum(ran) == 0, "nothing is left to run"
    assert nothing.kv_cache.sequence_length == 30
    for output, past in ((again, ids), (partial, [*ids[:13], 7, 8]), (nothing, ids)):
        assert output.kv_cache.cache.token_ids(0).tolist() == past
        assert_close(ex.decode(token(output.kv_cache, 9)).logits[0], tiny.logits([*past, 9])[-1])
    ran.clear()
    everything = ex.prefill(prompt(ids))
    assert sum(ran) == 30, "all logits are wanted, so all tokens run"
    assert_close(everything.logits[0], tiny.logits(ids))
    ex.prefill(prompt(ids, logits="last", output_hidden_states=True))
    assert sum(ran) == 60
    ran.clear()
    batch = ex.prefill(prompt(ids, some_ids(30, 5), logits="last"))
    assert sum(ran) == 31, "row by row"
    assert_close(batch.last_token_logits()[1], tiny.logits(some_ids(30, 5))[-1])
    assert ex.metrics().prefill_operations == 8
    check_pages(ex)


def test_sharing_ends_with_the_caches_and_does_not_refuse(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=24, share_prefixes=True)
    ids = some_ids(18)
    handle = ex.prefill(prompt(ids, logits="last")).kv_cache
    more = ex.prefill(prompt([*ids, 3], logits="last"))
    assert_close(more.last_token_logits()[0], llama.logits([*ids, 3])[-1])
    with refused(ResourceExhausted, ex, handle.cache, more.kv_cache.cache):
        ex.prefill(prompt(some_ids(18, 1), logits="last"))
    for one in (handle, more.kv_cache):
        ex.release_cache(one.cache_id)
    assert ex.pool.state.num_used_pages == 0
    assert ex.prefill(prompt(ids, logits="last")).kv_cache.sequence_length == 18


def test_the_configuration_turns_sharing_off(llama: Tiny) -> None:
    for wanted in (True, False):
        memory = MemoryConfig(enable_kv_cache_sharing=wanted)
        made = FACTORY.create_executor(config_of(llama, memory_config=memory))
        held = [made.prefill(prompt(some_ids(64), logits="last")).kv_cache for _ in range(2)]
        assert made.pool.state.num_used_pages == (5 if wanted else 8)
        assert len(held) == 2


# -- refusals --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Metadata:
    max_sequence_length: int
    path: Any = None


def test_refusals(llama: Tiny, tmp_path: Path) -> None:
    good = config_of(llama)
    FACTORY.validate_config(good)
    FACTORY.validate_config(config_of(llama, model_info=Metadata(CONTEXT, llama.path)))
    FACTORY.validate_config(config_of(llama, model_info="org/model-on-a-hub"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    strange = tmp_path / "strange"
    strange.mkdir()
    values = json.loads((llama.path / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(values | {"hidden_act": "nothing"}))
    cases: list[tuple[type[QuireError], Any, str]] = [
        (InvalidArgument, None, "ExecutorConfig"),
        (
            InvalidArgument,
            config_of(llama, max_sequence_length=CONTEXT + 1),
            rf"\[1, {CONTEXT}\], the model's, got 129",
        ),
        (InvalidArgument, config_of(llama, model_info=Metadata(CONTEXT)), "names no model"),
        (InvalidArgument, config_of(llama, model_info=Metadata(CONTEXT, "")), "names no model"),
        (NotFound, config_of(llama, model_info=tmp_path / "absent"), "no such directory"),
        (CheckpointError, config_of(llama, model_info=broken), "config.json"),
        (CheckpointError, config_of(llama, model_info=tmp_path), "config.json"),
        (Unsupported, config_of(llama, model_info=strange), "nothing"),
        (
            Unsupported,
            config_of(llama, memory_config=MemoryConfig(enable_memory_pooling=False)),
            "enable_memory_pooling",
        ),
    ]
    if not torch.cuda.is_available():
        cases.append((Unsupported, config_of(llama, device="cuda"), "CUDA devices"))
    for kind, config, match in cases:
        for call in (FACTORY.validate_config, FACTORY.create_executor, FACTORY.create_batch_executor):
            with pytest.raises(kind, match=match):
                call(config)


def test_an_executor_refuses_a_type_that_it_is_not(llama: Tiny) -> None:
    with pytest.raises(InvalidArgument, match="executor_type must be one of 'Sequential'"):
        make_executor(llama, executor_type="Sequentially")


# -- names -----------------------------------------------------------------------------------------


def test_executors_by_name(llama: Tiny, ex: Executor) -> None:
    names, other = NamedExecutors(), make_executor(llama)
    assert names.list_names() == []
    assert names.register("b", ex) is ex
    assert names.register("a", other) is other
    for bad in ("", None, 3):
        with pytest.raises(InvalidArgument):
            names.register(bad, ex)  # type: ignore[arg-type]
    with pytest.raises(AlreadyExists, match="'b'"):
        names.register("b", other)
    listed = names.list_names()
    assert listed == ["a", "b"]
    listed.clear()
    assert names.list_names() == ["a", "b"]
    assert names.get("b") is names.require("b") is ex
    assert names.get("c") is names.get_metrics("c") is names.remove("c") is None
    with pytest.raises(NotFound, match=r"executor 'c' not found. Available: \['a', 'b'\]"):
        names.require("c")
    ex.prefill(prompt([1]))
    metrics = names.get_metrics("b")
    assert metrics is not None
    assert metrics.prefill_operations == 1
    assert names.remove("b") is ex
    assert ex.status().is_ready, "not shut down"
    assert names.list_names() == ["a"]
