"""``KVCacheInterface``: LiteRT-LM's tests on copy-on-write pages, and every refusal."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.executor.conftest import (
    CONTEXT,
    LAYERS,
    PAGE,
    Tiny,
    assert_close,
    inputs,
    make_executor,
    prompt,
    refused,
    some_ids,
    token,
)

from quire.base.errors import InvalidArgument, NotFound, ResourceExhausted
from quire.base.token_history import TokenHistory
from quire.branches.model_facts import ModelFacts
from quire.contracts.layers import FullAttention, LatentAttention
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor
from quire.executor.row import Row


def filled(ex: Executor, *rows: list[int], **kwargs: object) -> KVCache:
    cache = ex.create_kv_cache(batch_size=len(rows), **kwargs)  # type: ignore[arg-type]
    lengths = tuple(len(row) for row in rows)
    padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
    LlmExecutor(ex).prefill(inputs(*padded, lengths=lengths), cache)
    return cache


def content(cache: KVCache) -> list[torch.Tensor]:
    return [cache.read(layer, cache.lengths, values=values) for layer in range(LAYERS) for values in (False, True)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_create(ex: Executor) -> None:
    static, dynamic = ex.create_kv_cache(), ex.create_kv_cache(dynamic=True, batch_size=3)
    assert (static.num_entries, static.batch_size, static.length, static.lengths) == (CONTEXT, 1, 0, (0,))
    assert (dynamic.num_entries, dynamic.batch_size, dynamic.lengths) == (1, 3, (0, 0, 0))
    assert ex.create_kv_cache(capacity=7).num_entries == 7
    for bad in ({"batch_size": 0}, {"capacity": 0}, {"capacity": 1.5}, {"batch_size": 65}):
        with refused(InvalidArgument, ex, static):
            ex.create_kv_cache(**bad)
    with refused(ResourceExhausted, ex, static, match="maximum"):
        ex.create_kv_cache(capacity=CONTEXT + 1)


def test_resize(ex: Executor) -> None:
    static, dynamic = filled(ex, [1, 2]), filled(ex, [1, 2, 3], dynamic=True)
    with refused(InvalidArgument, ex, static, match="KV cache is not dynamic and cannot be resized."):
        static.resize(100)
    before = content(dynamic)
    dynamic.resize(100)
    assert dynamic.num_entries == 100
    dynamic.resize(5)
    assert dynamic.num_entries == 100, "never shrinks"
    assert same(content(dynamic), before)
    found = dynamic.read(0, [8], values=False)[0]
    assert found[:3].all()
    assert not found[3:].any()
    with refused(ResourceExhausted, ex, dynamic):
        dynamic.resize(CONTEXT + 1)
    with refused(InvalidArgument, ex, dynamic):
        dynamic.resize(4.5)  # type: ignore[arg-type]


def test_contains(ex: Executor) -> None:
    cache = ex.create_kv_cache()
    assert cache.contains("kv_cache_k_0")
    assert cache.contains(f"kv_cache_v_{LAYERS - 1}")
    for name in ("", "kv_cache_k_3", "kv_cache_k_00", "kv_cache_k_-1", "kv_cache_q_0", "kv_cache_k_0 ", "k_0"):
        assert not cache.contains(name)


def test_no_k_and_v_are_claimed_of_latent_layers() -> None:
    latent = LatentAttention(num_heads=2, row_dim=4, value_dim=2)
    attention = FullAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4)
    pool: Any = SimpleNamespace(facts=SimpleNamespace(specs=(latent, attention), layer_ids=(0, 2)))
    pool.facts.spec_of = partial(ModelFacts.spec_of, pool.facts)
    cache: Any = SimpleNamespace(pool=pool)
    found = [KVCache.contains(cache, f"kv_cache_{one}_{layer}") for layer in range(4) for one in "kv"]
    assert found == [False, False, False, False, True, True, False, False]


def test_clear(ex: Executor) -> None:
    cache = filled(ex, some_ids(5), some_ids(2))
    copy = cache.deep_copy()
    before = content(copy)
    cache.clear()
    assert (cache.lengths, cache.num_entries, cache.batch_size) == ((0, 0), CONTEXT, 2)
    assert cache.stats().blocks_allocated == 0
    assert same(content(copy), before)
    del copy
    assert ex.pool.state.num_used_pages == 0


def test_select_every_row(llama: Tiny, ex: Executor) -> None:
    rows = [some_ids(n, n) for n in (3, 6, 1)]
    three, one = filled(ex, *rows), filled(ex, [9, 9])
    whole = content(three)
    for b, ids in enumerate(rows):
        one.select_and_copy_from(three, b)
        assert one.length == len(ids)
        assert one.token_ids(0).tolist() == ids
        for mine, theirs in zip(content(one), whole, strict=True):
            assert torch.equal(mine[0], theirs[b, : len(ids)])
        LlmExecutor(ex).step(inputs([5]), one)
        assert same(content(three), whole), "writes to one side never show in the other"


def test_broadcast(llama: Tiny, ex: Executor) -> None:
    ids = some_ids(6)
    one, three = filled(ex, ids), filled(ex, [1], [2], [3])
    before = content(one)
    three.broadcast_and_copy_from(one)
    assert three.lengths == (6, 6, 6)
    for found, expected in zip(content(three), before, strict=True):
        assert all(torch.equal(row, expected[0]) for row in found)
    logits = LlmExecutor(ex).step(inputs([1], [2], [3]), three)
    for row in range(3):
        assert_close(logits[row, 0], llama.logits([*ids, row + 1])[-1])
    assert same(content(one), before)


def test_select_and_broadcast_refusals(llama: Tiny, ex: Executor) -> None:
    one, two, three = filled(ex, [1, 2]), filled(ex, [3], [4]), filled(ex, [5], [6], [7])
    small, dynamic = filled(ex, [1], [2], capacity=8), filled(ex, [1], [2], dynamic=True, capacity=CONTEXT)
    caches = (one, two, three, small, dynamic)
    foreign = filled(make_executor(llama), [1], [2])
    for other, b, match in (
        (object(), 0, "other must be a KVCacheInterface; got object"),
        (one, 0, "larger batch"),
        (two, -1, "rows 0..1"),
        (two, 2, "rows 0..1"),
        (two, True, "b must be an integer; got True"),
        (two, "0", "b must be an integer; got '0'"),
        (small, 0, "capacity 8"),
        (dynamic, 0, "dynamic"),
        (foreign, 0, "another executor"),
    ):
        with refused(InvalidArgument, ex, *caches, match=match):
            one.select_and_copy_from(other, b)  # type: ignore[arg-type]
    with refused(InvalidArgument, ex, *caches, match="one row"):
        two.select_and_copy_from(three, 0)
    single = {"small": filled(ex, [1], capacity=8), "dynamic": filled(ex, [1], dynamic=True, capacity=CONTEXT)}
    for target, other, match in (
        (two, object(), "other must be a KVCacheInterface"),
        (three, two, "one row"),
        (one, one, "several rows"),
        (two, single["small"], "capacity 8"),
        (two, single["dynamic"], "dynamic"),
        (two, filled(make_executor(llama), [1]), "another executor"),
    ):
        with refused(InvalidArgument, ex, *caches, match=match):
            target.broadcast_and_copy_from(other)  # type: ignore[arg-type]


def test_copies_of_a_long_cache_take_no_page(llama: Tiny) -> None:
    # Written through the state, so that no 32k tokens must be computed.
    ex = make_executor(llama, tokens=40_000)
    cache = ex.create_kv_cache(batch_size=1)
    state, length = ex.pool.state, 32_768
    state.begin_forward([cache.rows[0].seq], [length])
    state.end_forward(skipped=range(LAYERS))
    cache.rows[0].tokens, cache.rows[0].computed = TokenHistory(np.zeros(length)), length
    used = ex.pool.state.num_used_pages
    assert used == length // PAGE
    copies = [cache.deep_copy() for _ in range(20)]
    many = ex.create_kv_cache(batch_size=8)
    many.broadcast_and_copy_from(cache)
    cache.select_and_copy_from(many, 3)
    assert ex.pool.state.num_used_pages == used
    assert state.sequences.num_splits == 0
    assert many.lengths == (length,) * 8
    assert copies[0].length == length


def test_deep_copy_is_independent_both_ways(llama: Tiny, ex: Executor) -> None:
    llm = LlmExecutor(ex)
    ids = some_ids(6)
    a = filled(ex, ids, dynamic=True)
    b = a.deep_copy()
    assert (b.num_entries, b.dynamic, b.lengths, b.adapters) == (a.num_entries, True, a.lengths, a.adapters)
    assert b.cache_id != a.cache_id
    x, y = llm.step(inputs([1]), a), llm.step(inputs([2]), b)
    assert_close(x[0, 0], llama.logits([*ids, 1])[-1])
    assert_close(y[0, 0], llama.logits([*ids, 2])[-1])
    before = content(a)
    llm.prefill(inputs([4, 5], at=2), b)
    assert same(content(a), before)
    b.clear()
    assert same(content(a), before)


def test_pages_return_with_the_last_reference(ex: Executor) -> None:
    cache = filled(ex, some_ids(9))
    handle = ex.decode(token(cache, 1)).kv_cache
    del cache
    gc.collect()
    assert ex.pool.state.num_used_pages == 3, "the handle holds its cache"
    del handle
    gc.collect()
    assert ex.pool.state.num_used_pages == 0


def test_a_cache_that_dies_while_the_lock_is_held_is_freed_later(ex: Executor) -> None:
    cache = filled(ex, some_ids(9))
    with ex.lock:
        del cache
        gc.collect()
        assert ex.pool.state.num_used_pages == 3, "this thread may be in the middle of something"
    ex.prefill(prompt([1])).kv_cache.cache.release()
    assert ex.pool.state.num_used_pages == 0


def test_released(ex: Executor) -> None:
    cache, other = filled(ex, [1, 2]), filled(ex, [1], [2])
    fork = cache.deep_copy()
    data = cache.serialize()
    cache.release()
    cache.release()
    assert cache.batch_size == 1
    assert fork.length == 2
    for call in (
        lambda: cache.length,
        lambda: cache.adapters,
        lambda: cache.positions(0),
        lambda: cache.token_ids(0),
        lambda: cache.clear(),
        lambda: cache.deep_copy(),
        lambda: cache.resize(3),
        lambda: cache.serialize(),
        lambda: cache.load(data),
        lambda: cache.stats(),
        lambda: cache.select_and_copy_from(other, 0),
        lambda: other.broadcast_and_copy_from(cache),
    ):
        with refused(NotFound, ex, fork, other, match="released"):
            call()


def test_rows_that_do_not_exist(ex: Executor) -> None:
    cache = filled(ex, [1], [2])
    for row in (-1, 2):
        for call in (cache.token_ids, cache.positions):
            with refused(InvalidArgument, ex, cache, match="the cache has rows 0..1"):
                call(row)


def test_cuts_equal_a_list_of_all_of_them() -> None:
    """The monotone stack against every cut that was ever made."""
    generator = torch.Generator().manual_seed(1)
    row, history = Row(seq=0), []
    for revision in range(1, 200):
        length = int(torch.randint(20, (), generator=generator))
        row.cut(revision, length)
        history.append((revision, length))
        for made in range(0, revision + 1, 7):
            for covered in range(0, 21, 3):
                expected = any(rev > made and cut < covered for rev, cut in history)
                assert row.was_cut(made, covered) == expected
    assert len(row.cuts) <= 20


def test_memory_is_free_once_its_last_holder_is_gone(llama: Tiny) -> None:
    """Not at the next garbage collection: pools are large."""
    ex = make_executor(llama, tokens=64)
    handle = ex.prefill(prompt(some_ids(20))).kv_cache
    state = weakref.ref(ex.pool.state)
    gc.disable()
    try:
        del handle, ex
        assert state() is None
    finally:
        gc.enable()


def test_repr_says_what_it_is(ex: Executor) -> None:
    cache = ex.create_kv_cache(capacity=7)
    assert "capacity=7" in repr(cache)
    cache.release()
    assert "released" in repr(cache)
    with pytest.raises(NotFound):
        _ = cache.lengths
