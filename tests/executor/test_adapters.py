"""Adapters through every verb: the executor against the definition, which is one token after the
other with merged weights.

Tolerances: of the plain model those of ``conftest``, of recurrent ones those of ``recurrent``.
Adding a term of low rank to a result rounds no more than the model's own sums do.

Letters: R rank; I input, O output features; V vocabulary.
"""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.executor.conftest import (
    PAGE,
    VOCAB,
    FakeIdentity,
    Tiny,
    assert_close,
    check_pages,
    inputs,
    prompt,
    refused,
    some_ids,
    token,
)
from tests.executor.recurrent import Hybrid
from tests.executor.test_serialize import rewritten
from torch import Tensor

from quire.adapters.pool import AdapterPool
from quire.adapters.targets import embedding_of, linears_of
from quire.base.errors import (
    CheckpointError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unsupported,
)
from quire.base.types import AdapterRuns
from quire.contracts.adapters import Adapter, LowRankUpdate
from quire.contracts.executor import ModelAssets
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.handle import Handle
from quire.executor.llm_executor import LlmExecutor
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.linear.low_rank import native_low_rank
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kv.state import State
from quire.models.families import LoadedModel
from quire.models.loading import load_model
from quire.runner.local import LocalRunner
from quire.statefile.container import read_state

RANK = 4


def random_adapter(model: LoadedModel, seed: int, name: str = "", rank: int = RANK) -> Adapter:
    """It changes every linear map of the model, the lower half of its outputs and the upper half
    apart.
    """
    generator = torch.Generator().manual_seed(seed)
    updates = []
    for linear, found in sorted(linears_of(model).items()):
        half = found.out_features // 2
        for row, outs in ((0, half), (half, found.out_features - half)) if half else ((0, found.out_features),):
            a_RI = torch.randn(rank, found.in_features, generator=generator) * found.in_features**-0.5
            b_RO = torch.randn(rank, outs, generator=generator) * 0.5 * rank**-0.5
            updates.append(LowRankUpdate(linear=linear, row=row, a_RI=a_RI, b_RO=b_RO))
    return Adapter(fingerprint=name or f"{seed:064x}", updates=tuple(updates))


def executor_of(model: LoadedModel, *, rank_capacity: int = 64, tokens: int = 1024, **given: Any) -> Executor:
    state: State
    kinds = {spec.kind for spec in model.layer_specs}
    if "recurrent" in kinds:
        state = State(
            model.layer_specs,
            num_states=given.pop("states", 64),
            recurrence=ChunkedRecurrence(),
            backend=SdpaAttention(),
            ring=given.pop("ring", 1),
            checkpoint_interval=given.pop("interval", 0),
            capacity=None if kinds == {"recurrent"} else tokens,
            page_size=PAGE,
        )
    else:
        state = State(model.layer_specs, capacity=tokens, page_size=PAGE, backend=SdpaAttention())
    device = torch.device("cpu")
    pool = AdapterPool(
        linears_of(model),
        embedding_of(model),
        dtype=model.dtype,
        device=device,
        rank_capacity=rank_capacity,
        kernel=native_low_rank(),
    )
    return Executor(LocalRunner(model, state, device, pool), identity=FakeIdentity("adapted"), **given)


def again_of(tiny: Tiny) -> LoadedModel:
    """The model once more: one has the adapters of one pool."""
    return load_model(tiny.path, dtype="float32")


def load(ex: Executor, adapter: Adapter) -> int:
    with ex.lock:
        return ex.pool.runner.adapters.load(adapter)


def step_by_step(model: LoadedModel, tokens: Sequence[int], adapters: Sequence[Adapter | None]) -> Tensor:
    """float32 ``[n, V]``: each token on its own, by a model whose weights are its adapter's."""
    ex = executor_of(model)
    linears = linears_of(model)
    plain = {name: linear.weight for name, linear in linears.items()}
    cache = ex.create_kv_cache(dynamic=True)
    found = []
    for one, adapter in zip(tokens, adapters, strict=True):
        for update in () if adapter is None else adapter.updates:
            linear = linears[update.linear]
            if linear.weight is plain[update.linear]:
                linear.weight = linear.weight.clone()
            outs = update.b_RO.shape[1]
            linear.weight[update.row : update.row + outs] += (update.a_RI.T @ update.b_RO).T
        try:
            found.append(ex.decode(token(cache, one)).logits[0])
        finally:
            for name, weight in plain.items():
                linears[name].weight = weight
    return torch.stack(found)


@pytest.fixture
def ex(llama: Tiny) -> Any:
    made = executor_of(llama.model)
    yield made
    check_pages(made)


@pytest.fixture
def two(llama: Tiny) -> tuple[Adapter, Adapter]:
    return random_adapter(llama.model, 1), random_adapter(llama.model, 2)


IDS = some_ids(11, 5)


# -- every verb ------------------------------------------------------------------------------------


def test_prefill_and_decode_are_the_merged_model(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    base_V = ex.prefill(prompt(IDS)).logits[0]  # type: ignore[index]
    for adapter in two:
        name = load(ex, adapter)
        expected_TV = step_by_step(llama.model, IDS, [adapter] * len(IDS))
        assert float((expected_TV - base_V).abs().max()) > 0.1, "the adapter does something"
        output = ex.prefill(prompt(IDS[:6], adapter=name))
        assert_close(output.logits[0], expected_TV[:6])  # type: ignore[index]
        handle = output.kv_cache
        for place in range(6, len(IDS)):
            following = ex.decode(token(handle, IDS[place], adapter=name))
            assert_close(following.logits[0], expected_TV[place])
            handle = following.kv_cache
        assert handle.cache.adapters == {name}  # type: ignore[attr-defined]


def test_the_other_face(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a = load(ex, two[0])
    llm = LlmExecutor(ex, prefill_chunk_size=4)
    cache = llm.create_kv_cache(dynamic=True)
    llm.prefill(inputs(IDS[:-1]), cache, a)
    expected_TV = step_by_step(llama.model, IDS, [two[0]] * len(IDS))
    assert_close(llm.step(inputs(IDS[-1:]), cache, a)[0, 0], expected_TV[-1])
    drawn = llm.sample_tokens(4, inputs(IDS[-1:], at=len(IDS) - 1), cache, a)
    run = list(IDS)
    for one in drawn:
        logits_V = step_by_step(llama.model, run, [two[0]] * len(run))[-1]
        assert int(logits_V.argmax()) == one
        run.append(one)
    rows = llm.create_kv_cache(batch_size=2, dynamic=True)
    llm.prefill(inputs(IDS[:4], IDS[4:8]), rows, a)
    for found, first in zip(llm.sample_tokens_batch(1, inputs([1], [2]), rows, a), (0, 4), strict=True):
        tokens = [*IDS[first : first + 4], 1 if first == 0 else 2]
        assert found == [int(step_by_step(llama.model, tokens, [two[0]] * 5)[-1].argmax())]


@pytest.mark.parametrize("chunk", [2048, 4])
def test_padded_prompts_under_an_adapter_that_changes_the_head(
    llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter], chunk: int
) -> None:
    """Their logits are written to their places, and the head's terms belong to the rows of the
    whole forward.
    """
    ex.prefill_chunk_size = chunk
    a = load(ex, two[0])
    mask = torch.tensor([[1] * 6, [0] * 4 + [1] * 2])
    for wanted in ("all", "last"):
        found = ex.prefill(prompt(IDS[:6], [0] * 4 + IDS[6:8], attention_mask=mask, adapter=a, logits=wanted))
        for row, ids in enumerate((IDS[:6], IDS[6:8])):
            expected_TV = step_by_step(llama.model, ids, [two[0]] * len(ids))
            assert_close(found.last_token_logits()[row], expected_TV[-1])
            if wanted == "all":
                assert_close(found.logits[row, 6 - len(ids) :], expected_TV)  # type: ignore[index]


def test_mixed_batches_equal_single_runs(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    names: list[int | None] = [a, None, b, a, None]
    prompts = [some_ids(count, count) for count in (7, 5, 9, 1, 3)]
    adapters = {a: two[0], b: two[1], None: None}
    outputs = ex.batch_prefill([prompt(ids, adapter=name) for ids, name in zip(prompts, names, strict=True)])
    handles = [output.kv_cache for output in outputs]
    following = ex.batch_decode([token(handle, 3, adapter=n) for handle, n in zip(handles, names, strict=True)])
    for ids, name, output, after in zip(prompts, names, outputs, following, strict=True):
        expected_TV = step_by_step(llama.model, [*ids, 3], [adapters[name]] * (len(ids) + 1))
        assert_close(output.logits[0], expected_TV[:-1])  # type: ignore[index]
        assert_close(after.logits[0], expected_TV[-1])


def test_base_rows_of_a_mixed_batch_are_those_of_a_base_batch(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    prompts = [some_ids(count, count) for count in (7, 5, 9)]
    before = [output.logits for output in ex.batch_prefill([prompt(ids) for ids in prompts])]
    a = load(ex, two[0])
    mixed = ex.batch_prefill([prompt(ids, adapter=a if index == 1 else None) for index, ids in enumerate(prompts)])
    for index in (0, 2):
        assert torch.equal(mixed[index].logits, before[index])  # type: ignore[arg-type]
    assert not torch.equal(mixed[1].logits, before[1])  # type: ignore[arg-type]


def test_base_results_after_load_use_and_unload(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    before = ex.prefill(prompt(IDS)).logits
    for adapter in two:
        name = load(ex, adapter)
        assert torch.equal(ex.prefill(prompt(IDS)).logits, before)  # type: ignore[arg-type]
        ex.prefill(prompt(IDS, adapter=name))
        assert torch.equal(ex.prefill(prompt(IDS)).logits, before)  # type: ignore[arg-type]
        ex.unload_lora(name)
        assert torch.equal(ex.prefill(prompt(IDS)).logits, before)  # type: ignore[arg-type]
        assert torch.equal(ex.forward(torch.tensor([IDS])), before)  # type: ignore[arg-type]


def test_verify_and_trees(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    start = ex.prefill(prompt(IDS[:5], adapter=a)).kv_cache
    found = ex.forward_verify([token(start, one, adapter=b) for one in IDS[5:9]])
    expected_TV = step_by_step(llama.model, IDS[:9], [two[0]] * 5 + [two[1]] * 4)
    assert_close(torch.cat([one.logits for one in found]), expected_TV[5:])
    cache: KVCache = start.cache  # type: ignore[attr-defined]
    assert cache.rows[0].runs == AdapterRuns(((0, a), (5, b)))
    with refused(InvalidArgument, ex, cache, match="same adapter"):
        ex.forward_verify([token(start, 1, adapter=a), token(start, 2, adapter=b)])
    with refused(InvalidArgument, ex, cache, match="same adapter"):
        ex.forward_verify([token(start, 1, adapter=a), token(start, 2)])
    nodes = ex.forward_verify([token(start, one, adapter=b) for one in (7, 8, 9)], parents=[-1, 0, 0])
    assert cache.rows[0].runs == AdapterRuns(((0, a), (5, b))), "a tree leaves the row alone"
    ex.truncate_kv(ex.commit_path(nodes[2].kv_cache), 6)
    tokens = [*IDS[:5], 7, 3]
    assert_close(
        ex.decode(token(cache, 3)).logits[0], step_by_step(llama.model, tokens, [two[0]] * 5 + [two[1], None])[-1]
    )
    assert cache.rows[0].runs == AdapterRuns(((0, a), (5, b), (6, None)))


def test_speculation(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a = load(ex, two[0])
    run = list(IDS)
    for _ in range(3):
        run.append(int(step_by_step(llama.model, run, [two[0]] * len(run))[-1].argmax()))
    handle = ex.prefill(prompt(IDS[:-1], adapter=a)).kv_cache
    wrong = (run[-1] + 1) % VOCAB
    found = ex.speculative_decode(token(handle, IDS[-1], adapter=a), [*run[-3:-1], wrong], 1.0)
    assert found.accepted_tokens == tuple(run[-3:-1])
    expected_TV = step_by_step(llama.model, run[:-1], [two[0]] * (len(run) - 1))
    assert_close(found.next_logits[0], expected_TV[-1])
    assert found.kv_cache.cache.rows[0].runs == AdapterRuns(((0, a),))  # type: ignore[attr-defined]


def test_a_cache_goes_on_under_another_adapter(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    cases: list[tuple[list[tuple[int, int | None]], int]] = [
        ([(4, a), (3, b), (2, None)], 9),
        ([(4, None), (3, b)], 7),
        ([(4, a), (3, None), (2, a)], 9),
    ]
    adapters = {a: two[0], b: two[1], None: None}
    for pieces, total in cases:
        cache, place, used = ex.create_kv_cache(), 0, []
        for count, name in pieces:
            output = ex.prefill(prompt(IDS[place : place + count], kv_cache=cache, adapter=name))
            used += [adapters[name]] * count
            place += count
            assert_close(output.logits[0], step_by_step(llama.model, IDS[:place], used)[-count:])  # type: ignore[index]
        assert cache.length == total
        assert cache.adapters == {name for _, name in pieces if name is not None}


# -- refusals --------------------------------------------------------------------------------------


def every_verb(ex: Executor, cache: KVCache, name: Any) -> list[Callable[[], object]]:
    llm = LlmExecutor(ex)
    return [
        lambda: ex.prefill(prompt([1], adapter=name)),
        lambda: ex.prefill(prompt([1], kv_cache=cache, adapter=name)),
        lambda: ex.decode(token(cache, 1, adapter=name)),
        lambda: ex.batch_prefill([prompt([1]), prompt([1], adapter=name)]),
        lambda: ex.batch_decode([token(cache, 1, adapter=name)]),
        lambda: ex.forward_verify([token(cache, 1, adapter=name)]),
        lambda: ex.forward_verify([token(cache, 1, adapter=name)], parents=[-1]),
        lambda: ex.speculative_decode(token(cache, 1, adapter=name), [2], 0.5),
        lambda: llm.prefill(inputs([1]), cache, name),
        lambda: llm.step(inputs([1]), cache, name),
        lambda: llm.sample_tokens(2, inputs([1]), cache, name),
        lambda: llm.sample_tokens_batch(2, inputs([1]), cache, name),
    ]


def test_ids_are_never_reused(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    given = []
    for _ in range(3):
        given += [load(ex, two[0]), load(ex, two[0])]
        ex.unload_lora(given[-1])
        with refused(NotFound, ex, match=str(given[-1])):
            ex.unload_lora(given[-1])
    assert len(set(given)) == len(given)
    assert all(isinstance(one, int) and one >= 0 for one in given)
    cache: KVCache = ex.prefill(prompt(IDS)).kv_cache.cache  # type: ignore[attr-defined]
    for name in (given[-1], 999):
        for call in every_verb(ex, cache, name):
            with refused(NotFound, ex, cache, match=f"adapter {name}"):
                call()
    for bad in (True, "french", 1.5):
        with refused(InvalidArgument, ex, cache):
            LlmExecutor(ex).step(inputs([1]), cache, bad)  # type: ignore[arg-type]
        with refused(InvalidArgument, ex, cache):
            ex.unload_lora(bad)  # type: ignore[arg-type]
    with refused(InvalidArgument, ex, cache):
        ex.unload_lora(None)  # type: ignore[arg-type]


def test_a_model_without_sites_refuses_every_verb(llama: Tiny) -> None:
    state = State(llama.model.layer_specs, capacity=64, page_size=PAGE, backend=SdpaAttention())
    pool = AdapterPool.without_sites("of this test")
    ex = Executor(LocalRunner(llama.model, state, torch.device("cpu"), pool), identity=FakeIdentity("x"))
    cache: KVCache = ex.prefill(prompt(IDS)).kv_cache.cache  # type: ignore[attr-defined]
    for call in [*every_verb(ex, cache, 0), lambda: ex.load_lora(ModelAssets(path="x")), lambda: ex.unload_lora(0)]:
        with refused(Unsupported, ex, cache, match="of this test"):
            call()
    assert dict(ex.capabilities().refusals)["load_lora"] == "of this test"
    with ex.lock:
        state.check()


def test_a_forward_takes_what_fits_together(llama: Tiny, two: tuple[Adapter, Adapter]) -> None:
    ex = executor_of(llama.model, rank_capacity=RANK)
    a, b = (load(ex, one) for one in two)
    caches = [ex.prefill(prompt(IDS[:4], adapter=name)).kv_cache for name in (a, b, None)]
    held = [handle.cache for handle in caches]  # type: ignore[attr-defined]
    with refused(ResourceExhausted, ex, *held):
        ex.batch_decode([token(handle, 1, adapter=name) for handle, name in zip(caches, (a, b, None), strict=True)])
    ex.batch_decode([token(handle, 1, adapter=name) for handle, name in zip(caches, (a, a, None), strict=True)])
    forwards = []
    execute = ex.pool.runner.execute
    ex.pool.runner.execute = lambda step, *more: forwards.append(step) or execute(step, *more)  # type: ignore[func-returns-value, method-assign]
    names: list[int | None] = [a, None, b, None, a]
    outputs = ex.batch_prefill([prompt(IDS[:5], adapter=name) for name in names])
    ran = [[chunk.adapter for chunk in step.chunks] for step in forwards if step.chunks]
    assert ran == [[a, None], [b, None], [a]]
    adapters = {a: two[0], b: two[1], None: None}
    for name, output in zip(names, outputs, strict=True):
        assert_close(output.logits[0], step_by_step(llama.model, IDS[:5], [adapters[name]] * 5))  # type: ignore[index]
    check_pages(ex)


def test_unload_waits_for_the_running_call(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a = load(ex, two[0])
    inside, go_on, order = threading.Event(), threading.Event(), []
    execute = ex.pool.runner.execute

    def slow(step: Any, *more: Any) -> Any:
        if step.chunks:
            inside.set()
            assert go_on.wait(20)
        return execute(step, *more)

    ex.pool.runner.execute = slow  # type: ignore[method-assign]
    found: list[Tensor] = []

    def use() -> None:
        found.append(ex.prefill(prompt(IDS, adapter=a)).logits)  # type: ignore[arg-type]
        order.append("used")

    def forget() -> None:
        ex.unload_lora(a)
        order.append("unloaded")

    threads = [threading.Thread(target=use), threading.Thread(target=forget)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert sorted(order) == ["unloaded", "used"]
    assert len(found) == 1
    ex.pool.runner.execute = execute  # type: ignore[method-assign]
    with refused(NotFound, ex):
        ex.prefill(prompt(IDS, adapter=a))


def test_who_needs_an_adapter_keeps_it(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    ex.pool.runner.adapters.guards.append(lambda name: "request 7 runs under it" if name == a else "")
    with refused(FailedPrecondition, ex, match="request 7"):
        ex.unload_lora(a)
    ex.prefill(prompt(IDS, adapter=a))
    ex.unload_lora(b)


def test_after_shutdown(llama: Tiny, two: tuple[Adapter, Adapter]) -> None:
    ex = executor_of(llama.model)
    a = load(ex, two[0])
    ex.shutdown()
    for call in (lambda: ex.load_lora(ModelAssets(path="x")), lambda: ex.unload_lora(a)):
        with pytest.raises(FailedPrecondition, match="shut down"):
            call()
    assert "load_lora" not in dict(ex.capabilities().refusals)


# -- the record ------------------------------------------------------------------------------------


def mixed(ex: Executor, a: int, b: int) -> KVCache:
    """Four tokens under ``a``, three under ``b``, two of the base."""
    cache = ex.create_kv_cache()
    for first, last, name in ((0, 4, a), (4, 7, b), (7, 9, None)):
        ex.prefill(prompt(IDS[first:last], kv_cache=cache, adapter=name, logits="none"))
    return cache


def test_copies_keep_the_record(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    cache = mixed(ex, a, b)
    whole = AdapterRuns(((0, a), (4, b), (7, None)))
    assert cache.rows[0].runs == whole
    copy = cache.deep_copy()
    rows = ex.create_kv_cache(batch_size=3)
    rows.broadcast_and_copy_from(cache)
    one = ex.create_kv_cache()
    one.select_and_copy_from(rows, 1)
    for other in (copy, rows, one):
        assert [row.runs for row in other.rows] == [whole] * other.batch_size
        assert other.adapters == {a, b}
    cases: list[tuple[int, AdapterRuns, set[int]]] = [
        (8, whole, {a, b}),
        (7, AdapterRuns(((0, a), (4, b))), {a, b}),
        (4, AdapterRuns(((0, a),)), {a}),
        (0, AdapterRuns(), set()),
    ]
    for length, runs, names in cases:
        fork = Handle(cache, (length,), cache.revision).clone_handle().cache
        assert (fork.rows[0].runs, fork.adapters) == (runs, names)
        ex.truncate_kv(copy, length)
        assert (copy.rows[0].runs, copy.adapters) == (runs, names)
    assert cache.rows[0].runs == whole
    cache.clear()
    assert (cache.adapters, cache.rows[0].runs) == (frozenset(), AdapterRuns())


def test_a_rewind_rewrites_the_record(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    cache = mixed(ex, a, b)
    early = Handle(cache, (5,), cache.revision)
    found = ex.decode(token(early, 8, adapter=a)).logits[0]
    assert cache.rows[0].runs == AdapterRuns(((0, a), (4, b), (5, a)))
    assert_close(found, step_by_step(llama.model, [*IDS[:5], 8], [two[0]] * 4 + [two[1], two[0]])[-1])
    llm = LlmExecutor(ex)
    llm.step(inputs([3], at=0), cache)
    assert cache.adapters == frozenset()


def test_shared_prefixes_are_of_one_adapter(llama: Tiny, two: tuple[Adapter, Adapter]) -> None:
    ex = executor_of(llama.model, share_prefixes=True)
    a, b = (load(ex, one) for one in two)
    held = [mixed(ex, a, b)]
    alone = executor_of(again_of(llama))
    names = {a: load(alone, two[0]), b: load(alone, two[1]), None: None}
    for name in (b, None, a):
        output = ex.prefill(prompt(IDS, adapter=name, logits="last"))
        expected = alone.prefill(prompt(IDS, adapter=names[name], logits="last"))
        assert_close(output.logits, expected.logits)  # type: ignore[arg-type]
        held.append(output.kv_cache.cache)  # type: ignore[attr-defined]
    pages = [cache.pages()[0][0] for cache in held]
    assert pages[3] == pages[0], "the first four tokens ran under a"
    assert len({int(page) for page in pages}) == 3
    ex.unload_lora(a)
    again = load(ex, two[1])
    output = ex.prefill(prompt(IDS, adapter=again, logits="last"))
    expected = alone.prefill(prompt(IDS, adapter=names[b], logits="last"))
    assert_close(output.logits, expected.logits)  # type: ignore[arg-type]


def test_a_failed_call_leaves_the_record(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    cache = mixed(ex, a, b)
    before = cache.rows[0].runs
    head = ex.pool.runner.model.head
    ex.pool.runner.model.head = None  # type: ignore[method-assign, assignment]
    try:
        for place in (9, 5, 0):
            with pytest.raises(Exception, match="failed while computing"):
                ex.decode(token(Handle(cache, (place,), cache.revision), 1, adapter=b))
            assert cache.rows[0].runs == before
    finally:
        ex.pool.runner.model.head = head  # type: ignore[method-assign]
    # The forward that failed left nothing of its adapter behind.
    assert torch.equal(ex.prefill(prompt(IDS)).logits, executor_of_plain(ex, IDS))  # type: ignore[arg-type]


def executor_of_plain(ex: Executor, ids: Sequence[int]) -> Tensor:
    made = executor_of(ex.pool.runner.model)  # type: ignore[arg-type]
    output = made.prefill(prompt(list(ids)))
    assert output.logits is not None
    return output.logits


# -- bytes -----------------------------------------------------------------------------------------


def test_round_trip(llama: Tiny, ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    rows = ex.create_kv_cache(batch_size=2)
    ex.prefill(prompt(IDS[:3], IDS[3:6], kv_cache=rows))
    assert ex.decode(token(rows, 1, 2)).kv_cache.num_tokens == (4, 4)
    with read_state(rows.serialize()) as file:
        assert file.metadata["adapters"] == []
    ex.decode(token(rows, 3, 4, adapter=b))
    single = mixed(ex, a, b)
    data = single.serialize()
    with read_state(data) as file:
        assert file.metadata["adapters"] == [[[0, two[0].fingerprint], [4, two[1].fingerprint], [7, None]]]
    other = executor_of(again_of(llama))
    for _ in range(3):
        other.unload_lora(load(other, random_adapter(llama.model, 9)))
    target = other.create_kv_cache()
    for loaded in ([], [two[1]]):
        for one in loaded:
            load(other, one)
        with refused(
            InvalidArgument, other, target, match=f"fingerprint {two[0].fingerprint} from .* expected to be loaded"
        ):
            target.load(data)
    # Other weights under the name that somebody gave to the first one.
    load(other, random_adapter(llama.model, 7, "another"))
    with refused(InvalidArgument, other, target, match="another"):
        target.load(data)
    c = load(other, two[0])
    target.load(data)
    d = other.pool.runner.adapters.find(two[1].fingerprint)
    assert target.rows[0].runs == AdapterRuns(((0, c), (4, d), (7, None)))
    assert target.serialize() == data
    assert torch.equal(other.decode(token(target, 5, adapter=c)).logits, ex.decode(token(single, 5, adapter=a)).logits)
    pair = other.create_kv_cache(batch_size=2)
    pair.load(rows.serialize())
    assert [row.runs for row in pair.rows] == [AdapterRuns(((0, None), (4, d)))] * 2
    other.unload_lora(c)
    assert target.serialize() != data
    with read_state(target.serialize()) as file:
        assert file.metadata["adapters"][0][0] == [0, two[0].fingerprint], "it is known after the adapter is gone"  # type: ignore[index]
    with refused(InvalidArgument, other, target, match="expected to be loaded"):
        target.load(data)


def test_two_loads_of_one_adapter_are_one_in_files(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, again = load(ex, two[0]), load(ex, two[0])
    cache = mixed(ex, a, again)
    with read_state(cache.serialize()) as file:
        assert file.metadata["adapters"] == [[[0, two[0].fingerprint], [7, None]]]
    cache.load(cache.serialize())
    assert cache.rows[0].runs == AdapterRuns(((0, a), (7, None)))


def test_damaged_histories(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    cache = mixed(ex, a, b)
    data, name = cache.serialize(), two[0].fingerprint
    for bad in (
        None,
        {},
        [[]] * 2,
        [None],
        [[[0]]],
        [[[0, name, 1]]],
        [[[1, name]]],
        [[[0, name], [0, None]]],
        [[[0, name], [9, None]]],
        [[[0, 7]]],
        [[[0.0, name]]],
        [[[False, name]]],
        [[[-1, name]]],
        [["ab"]],
    ):
        with refused(DataLoss, ex, cache, match="adapters"):
            cache.load(rewritten(data, {"adapters": bad}))
    empty = ex.create_kv_cache()
    with refused(DataLoss, ex, cache, match="adapters"):
        cache.load(rewritten(empty.serialize(), {"adapters": [[[0, name]]]}))
    old = ex.prefill(prompt(IDS)).kv_cache.cache.serialize()  # type: ignore[attr-defined]
    cache.load(rewritten(old, {"adapters": []}))
    assert cache.adapters == frozenset()


def test_fingerprints_are_kept_for_live_caches_only(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    for seed in range(20):
        name = load(ex, random_adapter(ex.pool.runner.model, seed, rank=1))  # type: ignore[arg-type]
        cache = ex.prefill(prompt(IDS, adapter=name)).kv_cache
        ex.unload_lora(name)
        assert cache.cache.serialize()  # type: ignore[attr-defined]
        ex.release_cache(cache.cache_id)
    assert len(ex.pool._fingerprints) <= 2


def test_a_tree_outlives_its_adapter(ex: Executor, two: tuple[Adapter, Adapter]) -> None:
    a, b = (load(ex, one) for one in two)
    handle = ex.prefill(prompt(IDS)).kv_cache
    nodes = ex.forward_verify([token(handle, one, adapter=a) for one in (1, 2)], parents=[-1, 0])
    ex.unload_lora(a)
    ex.prefill(prompt(IDS, adapter=b))
    cache = ex.commit_path(nodes[1].kv_cache).cache  # type: ignore[attr-defined]
    with read_state(cache.serialize()) as file:
        assert file.metadata["adapters"] == [[[0, None], [len(IDS), two[0].fingerprint]]]


# -- recurrent rows --------------------------------------------------------------------------------


@pytest.fixture
def pair(hybrid: Hybrid) -> tuple[Adapter, Adapter]:
    return random_adapter(hybrid.model, 1), random_adapter(hybrid.model, 2)


@pytest.mark.product(4)
@pytest.mark.parametrize("given", [{}, {"ring": 0, "prefill_chunk_size": 2}, {"interval": 4}], ids=str)
def test_replay_runs_each_token_under_its_own(
    hybrid: Hybrid, pair: tuple[Adapter, Adapter], given: dict[str, Any]
) -> None:
    ids = hybrid.tokens[:12]
    ex = executor_of(hybrid.model, rank_capacity=RANK, **given)
    a, b = (load(ex, one) for one in pair)
    names = [a] * 3 + [None] * 2 + [b] * 4 + [a] * 3
    adapters = {a: pair[0], b: pair[1], None: None}
    for cut in (1, 4, 5, 8, 10):
        cache = ex.create_kv_cache(dynamic=True)
        for first, last in ((0, 3), (3, 5), (5, 9), (9, 12)):
            ex.prefill(prompt(ids[first:last], kv_cache=cache, adapter=names[first], logits="none"))
        whole = cache.rows[0].runs
        early = Handle(cache, (cut,), cache.revision)
        clone = early.clone_handle()
        expected_V = step_by_step(hybrid.model, [*ids[:cut], 7], [*(adapters[name] for name in names[:cut]), pair[1]])[
            -1
        ]
        if cut % 2:
            ex.truncate_kv(cache, cut)
            early = Handle(cache, (cut,), cache.revision)
        for handle in (clone, early):
            agree(hybrid, ex.decode(token(handle, 7, adapter=b)).logits[0], expected_V)
            assert handle.cache.rows[0].runs == whole.then(cut, b)
        for handle in (clone, early):
            ex.release_cache(handle.cache_id)
    assert ex.metrics().replayed_tokens > 0
    check_pages(ex)


def agree(hybrid: Hybrid, found_V: Tensor, expected_V: Tensor) -> None:
    """The bound is of other logits, and grows with them."""
    scale = max(1.0, float(expected_V.abs().max() / hybrid.expected_TV.abs().max()))
    assert float((found_V - expected_V).abs().max()) / (2 * scale) <= hybrid.bound


@pytest.mark.turns(6)
def test_replay_of_several_rows_at_once(hybrid: Hybrid, pair: tuple[Adapter, Adapter]) -> None:
    """Rows of one call whose tokens ran under adapters that no forward can use together."""
    ex = executor_of(hybrid.model, rank_capacity=RANK)
    a, b = (load(ex, one) for one in pair)
    adapters = {a: pair[0], b: pair[1], None: None}
    ids = hybrid.tokens[:8]
    names = (a, b, None, b)
    handles = [ex.prefill(prompt(ids, adapter=name, logits="none")).kv_cache for name in names]
    short = [Handle(handle.cache, (6,), handle.revision) for handle in handles]  # type: ignore[attr-defined]
    outputs = ex.batch_decode([token(handle, 5) for handle in short])
    for name, output in zip(names, outputs, strict=True):
        expected_V = step_by_step(hybrid.model, [*ids[:6], 5], [adapters[name]] * 6 + [None])[-1]
        agree(hybrid, output.logits[0], expected_V)
    check_pages(ex)


def test_replay_without_its_adapter_is_refused(hybrid: Hybrid, pair: tuple[Adapter, Adapter]) -> None:
    ex = executor_of(hybrid.model)
    a, b = (load(ex, one) for one in pair)
    handle = ex.prefill(prompt(hybrid.tokens[:6], adapter=a, logits="none")).kv_cache
    handle = ex.prefill(prompt(hybrid.tokens[6:9], kv_cache=handle, adapter=b, logits="none")).kv_cache
    handle = ex.prefill(prompt(hybrid.tokens[9:12], kv_cache=handle, logits="none")).kv_cache
    cache: KVCache = handle.cache  # type: ignore[attr-defined]
    ex.unload_lora(a)
    lengths, available = cache.lengths, ex.pool.available_states
    calls: list[Callable[[], object]] = [
        lambda: ex.truncate_kv(cache, 4),
        lambda: ex.decode(token(Handle(cache, (4,), cache.revision), 1)),
        lambda: Handle(cache, (4,), cache.revision).clone_handle(),
    ]
    for call in calls:
        with pytest.raises(FailedPrecondition, match=f"adapter {a}, which was unloaded"):
            call()
        assert (cache.lengths, ex.pool.available_states) == (lengths, available)
        assert cache.rows[0].runs == AdapterRuns(((0, a), (6, b), (9, None)))
    # Going on needs nothing of what is past, and the beginning is always there.
    ex.decode(token(cache, 1, adapter=b))
    ex.truncate_kv(cache, 0)
    check_pages(ex)


def test_replay_needs_only_the_adapters_that_it_runs(hybrid: Hybrid, pair: tuple[Adapter, Adapter]) -> None:
    ex = executor_of(hybrid.model, interval=4)
    a, b = (load(ex, one) for one in pair)
    ids = hybrid.tokens
    handle = ex.prefill(prompt(ids[:4], adapter=a, logits="none")).kv_cache
    handle = ex.prefill(prompt(ids[4:11], kv_cache=handle, adapter=b, logits="none")).kv_cache
    ex.unload_lora(a)
    found = ex.decode(token(ex.truncate_kv(handle, 6), 7, adapter=b)).logits[0]
    assert ex.metrics().replayed_tokens == 2
    agree(hybrid, found, step_by_step(hybrid.model, [*ids[:6], 7], [pair[0]] * 4 + [pair[1]] * 3)[-1])


def test_states_that_nobody_could_make_again_are_kept(hybrid: Hybrid, pair: tuple[Adapter, Adapter]) -> None:
    ex = executor_of(hybrid.model, interval=4)
    a, b = (load(ex, one) for one in pair)
    handle = ex.prefill(prompt(hybrid.tokens[:8], logits="none")).kv_cache
    handle = ex.prefill(prompt(hybrid.tokens[8:16], kv_cache=handle, adapter=a, logits="none")).kv_cache
    cache: KVCache = handle.cache  # type: ignore[attr-defined]
    with ex.lock:
        cache.rows[0].mark = None
        ex.unload_lora(a)
        cache.drop_spare_states()
        held = set(ex.pool.state.checkpoints(cache.rows[0].seq))
    assert held >= {12}
    assert not held & {4, 8}
    ex.truncate_kv(cache, 12)
    assert b not in cache.adapters
    check_pages(ex)


def test_speculation_that_runs_again(hybrid: Hybrid, pair: tuple[Adapter, Adapter]) -> None:
    """With no slot for the state behind each draft, the accepted tokens run once more by
    themselves.
    """
    ex = executor_of(hybrid.model, states=5)
    a = load(ex, pair[0])
    ids = hybrid.tokens[:6]
    best = int(step_by_step(hybrid.model, [*ids, 7], [pair[0]] * 7)[-1].argmax())
    handle = ex.prefill(prompt(ids, adapter=a, logits="none")).kv_cache
    found = ex.speculative_decode(token(handle, 7, adapter=a), [(best + 1) % VOCAB, *range(5)], 1.0)
    assert found.acceptance_count == 0
    assert ex.metrics().replayed_tokens == 1
    after = ex.decode(token(found.kv_cache, 9)).logits[0]
    agree(hybrid, after, step_by_step(hybrid.model, [*ids, 7, 9], [pair[0]] * 7 + [None])[-1])
    assert found.kv_cache.cache.rows[0].runs == AdapterRuns(((0, a), (7, None)))  # type: ignore[attr-defined]


# -- random calls ----------------------------------------------------------------------------------


class Machine:
    """One row, and of each of its tokens the adapter that it must have run under."""

    def __init__(self, model: LoadedModel, seed: int, judge: Callable[[Tensor, Tensor], None], **given: Any) -> None:
        self.model, self.judge, self.random = model, judge, random.Random(seed)
        self.ex = executor_of(model, rank_capacity=2 * RANK, **given)
        self.loaded: dict[int | None, Adapter | None] = {None: None}
        self.known: dict[int | None, Adapter | None] = {None: None}
        for number in range(3):
            self.load(random_adapter(model, number))
        self.cache = self.ex.create_kv_cache(dynamic=True)
        self.tokens: list[tuple[int, int | None]] = []
        self.refused = 0

    def load(self, adapter: Adapter) -> None:
        name = load(self.ex, adapter)
        self.loaded[name] = self.known[name] = adapter

    def agree(self, found_V: Tensor, made: list[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
        ids, names = zip(*made, strict=True)
        self.judge(found_V, step_by_step(self.model, ids, [self.known[name] for name in names])[-1])
        return made

    def step(self) -> None:
        start = self.random.choice([len(self.tokens), self.random.randrange(len(self.tokens) + 1)])
        start = min(start, 14)
        handle = Handle(self.cache, (start,), self.cache.revision)
        verb = self.random.choice([self.run, self.verify, self.tree, self.speculate, self.cut, self.swap, self.reload])
        name = self.random.choice(list(self.loaded))
        before = list(self.tokens)
        gone = {name for _, name in self.tokens} - self.loaded.keys()
        try:
            self.tokens = verb(handle, start, name)
        except (FailedPrecondition, InvalidArgument):
            # Only what is past can need an adapter that is gone.
            self.tokens, self.refused = before, self.refused + 1
            if not gone:
                raise
        assert self.cache.lengths == (len(self.tokens),)
        runs = self.cache.rows[0].runs
        assert [runs.at(place) for place in range(len(self.tokens))] == [name for _, name in self.tokens]
        assert self.cache.adapters == {name for _, name in self.tokens} - {None}
        check_pages(self.ex)

    def some(self, most: int, name: int | None) -> list[tuple[int, int | None]]:
        return [(self.random.randrange(VOCAB), name) for _ in range(self.random.randrange(1, most))]

    def run(self, handle: Handle, start: int, name: int | None) -> list[tuple[int, int | None]]:
        more = self.some(5, name)
        output = self.ex.prefill(prompt([one for one, _ in more], kv_cache=handle, adapter=name))
        return self.agree(output.logits[0, -1], [*self.tokens[:start], *more])  # type: ignore[index]

    def verify(self, handle: Handle, start: int, name: int | None) -> list[tuple[int, int | None]]:
        more = self.some(5, name)
        found = self.ex.forward_verify([token(handle, one, adapter=name) for one, _ in more])
        made = self.agree(found[-1].logits[0], [*self.tokens[:start], *more])
        if self.random.random() < 0.5:
            return made
        keep = self.random.randrange(start, len(made) + 1)
        self.ex.truncate_kv(self.cache, keep)
        return made[:keep]

    def tree(self, handle: Handle, start: int, name: int | None) -> list[tuple[int, int | None]]:
        ids = [self.random.randrange(VOCAB) for _ in range(4)]
        found = self.ex.forward_verify([token(handle, one, adapter=name) for one in ids], parents=[-1, 0, 0, 2])
        if self.random.random() < 0.3:
            return self.tokens
        self.ex.commit_path(found[3].kv_cache)
        return self.agree(found[3].logits[0], [*self.tokens[:start], *((ids[node], name) for node in (0, 2, 3))])

    def speculate(self, handle: Handle, start: int, name: int | None) -> list[tuple[int, int | None]]:
        ids = [self.random.randrange(VOCAB) for _ in range(4)]
        threshold = self.random.choice([0.0, 0.05, 1.0])
        found = self.ex.speculative_decode(token(handle, ids[0], adapter=name), ids[1:], threshold)
        kept = ids[: 1 + found.acceptance_count]
        return self.agree(found.next_logits[0], [*self.tokens[:start], *((one, name) for one in kept)])

    def cut(self, handle: Handle, start: int, name: int | None) -> list[tuple[int, int | None]]:
        if self.random.random() < 0.5:
            self.ex.truncate_kv(self.cache, start)
            return self.tokens[:start]
        old, self.cache = self.cache, handle.clone_handle().cache
        old.release()
        return self.tokens[:start]

    def swap(self, handle: Handle, start: int, name: int | None) -> list[tuple[int, int | None]]:
        """Another id for the same adapter; what ran under the old one keeps its name."""
        adapter = self.loaded[name]
        if name is not None and adapter is not None:
            self.ex.unload_lora(name)
            del self.loaded[name]
            self.load(adapter)
        return self.tokens

    def reload(self, handle: Handle, start: int, name: int | None) -> list[tuple[int, int | None]]:
        self.cache.load(self.cache.serialize())
        now = {id(adapter): name for name, adapter in self.loaded.items()}
        return [(one, now[id(self.known[name])]) for one, name in self.tokens]


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(llama: Tiny, seed: int) -> None:
    machine = Machine(llama.model, seed, assert_close)
    for _ in range(40):
        machine.step()
    assert machine.refused == 0


@pytest.mark.product(8)
@pytest.mark.parametrize("given", [{}, {"ring": 0, "states": 24, "prefill_chunk_size": 3}], ids=["plenty", "few"])
def test_random_calls_on_recurrent_rows(hybrid: Hybrid, given: dict[str, Any]) -> None:
    machine = Machine(hybrid.model, 1, lambda found_V, expected_V: agree(hybrid, found_V, expected_V), **given)
    for _ in range(30):
        machine.step()
    assert machine.ex.metrics().replayed_tokens > 0


# -- files -----------------------------------------------------------------------------------------


def test_load_lora_refuses_what_is_no_adapter(ex: Executor, tmp_path: Path) -> None:
    with refused(InvalidArgument, ex, match="ModelAssets"):
        ex.load_lora("path")  # type: ignore[arg-type]
    with refused(NotFound, ex, match="nothing-here"):
        ex.load_lora(ModelAssets(path=tmp_path / "nothing-here"))
    assert ex.pool.runner.adapters.ids == ()


def test_load_lora_from_a_directory(llama: Tiny, ex: Executor, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    changed = copy.deepcopy(llama.reference)
    tensors = {}
    for layer in range(len(changed.model.layers)):
        for name in ("self_attn.k_proj", "mlp.up_proj"):
            module = changed.model.layers[layer].get_submodule(name)
            a_RI = torch.randn(RANK, module.in_features, generator=generator) * module.in_features**-0.5
            b_OR = torch.randn(module.out_features, RANK, generator=generator) * 0.5
            key = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors |= {f"{key}A.weight": a_RI, f"{key}B.weight": b_OR}
            with torch.no_grad():
                module.weight += 0.5 * b_OR @ a_RI
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK / 2, "target_modules": ["k_proj", "up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    names = [
        ex.load_lora(ModelAssets(path=tmp_path)),
        ex.load_lora(ModelAssets(path=tmp_path / "adapter_model.safetensors")),
    ]
    assert len(set(names)) == 2
    with torch.no_grad():
        expected_TV = changed(torch.tensor([IDS])).logits[0]
    for name in names:
        assert_close(ex.prefill(prompt(IDS, adapter=name)).logits[0], expected_TV)  # type: ignore[index]
    assert_close(ex.prefill(prompt(IDS)).logits[0], llama.logits(IDS))  # type: ignore[index]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"{}")
    with refused(CheckpointError, ex):
        ex.load_lora(ModelAssets(path=tmp_path))
    assert ex.pool.runner.adapters.ids == tuple(names)
