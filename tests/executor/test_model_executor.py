"""``ModelExecutor``: equalities against transformers, handles, batches, refusals."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executor.conftest import (
    CONTEXT,
    PAGE,
    VOCAB,
    Tiny,
    assert_close,
    make_executor,
    prompt,
    refused,
    some_ids,
    token,
)

from quire.base.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.contracts.executor import DecodeInput, ExecutorState, ModelAssets, PrefillInput
from quire.executor.executor import Executor
from quire.executor.forward_packing import pack
from quire.runner.reclaim import ReclaimKind

# -- equalities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 17, CONTEXT])
def test_prefill_equals_transformers(tiny: Tiny, executor: Executor, length: int) -> None:
    ids = some_ids(length)
    output = executor.prefill(prompt(ids))
    assert_close(output.logits[0], tiny.logits(ids))
    assert_close(output.last_token_logits()[0], tiny.logits(ids)[-1])
    assert output.kv_cache.sequence_length == length
    assert_close(executor.forward(torch.tensor([ids]))[0], tiny.logits(ids))


@pytest.mark.turns(2)
@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 0])
def test_any_chunking_gives_the_same_logits(tiny: Tiny, chunk: int) -> None:
    executor = make_executor(tiny, prefill_chunk_size=chunk)
    ids = some_ids(19)
    assert_close(executor.prefill(prompt(ids)).logits[0], tiny.logits(ids))
    last = executor.prefill(prompt(ids, logits="last"))
    assert last.logits.shape == (1, 1, VOCAB)
    assert_close(last.last_token_logits()[0], tiny.logits(ids)[-1])
    nothing = executor.prefill(prompt(ids, logits="none"))
    assert nothing.logits is None
    assert nothing.kv_cache.sequence_length == 19


@settings(deadline=None, max_examples=25)
@given(counts=st.lists(st.integers(0, 9), max_size=6), budget=st.integers(-1, 7))
def test_packing_covers_every_token_once_in_order(counts: list[int], budget: int) -> None:
    forwards = pack(counts, budget)
    done = [0] * len(counts)
    for forward in forwards:
        assert forward
        assert len({row for row, _, _ in forward}) == len(forward)
        assert budget <= 0 or sum(end - begin for _, begin, end in forward) <= budget
        for row, begin, end in forward:
            assert begin == done[row] < end
            done[row] = end
    assert done == counts


def test_decode_verify_and_continuation_equal_one_pass(tiny: Tiny, executor: Executor) -> None:
    ids = some_ids(30)
    expected = tiny.logits(ids)
    handle = executor.prefill(prompt(ids[:7])).kv_cache
    handle = executor.prefill(prompt(ids[7:12], kv_cache=handle)).kv_cache
    chained = []
    for position in range(12, 20):
        output = executor.decode(token(handle, ids[position]))
        assert output.kv_cache.sequence_length == position + 1
        assert_close(output.logits, expected[position : position + 1])
        chained.append(output.logits)
        handle = output.kv_cache
    start = executor.truncate_kv(handle, 12)
    verified = executor.forward_verify([token(start, i) for i in ids[12:20]])
    assert [output.kv_cache.sequence_length for output in verified] == list(range(13, 21))
    for found, earlier in zip(verified, chained, strict=True):
        assert_close(found.logits, earlier)
    assert executor.forward_verify([]) == []
    # Any output's handle continues, the shorter ones by rewinding.
    assert_close(executor.decode(token(verified[3].kv_cache, ids[16])).logits, expected[16:17])


def test_masks_left_and_right(tiny: Tiny, executor: Executor) -> None:
    a, b = some_ids(6, 1), some_ids(3, 2)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 0]])
    positions = torch.tensor([list(range(6)), [77, 99, 0, 1, 2, 5]])
    output = executor.prefill(prompt(a, [0, 0, *b, 0], attention_mask=mask, position_ids=positions))
    assert output.logits.shape == (2, 6, VOCAB)
    assert output.kv_cache.sequence_length == (6, 3)
    assert_close(output.logits[0], tiny.logits(a))
    assert_close(output.logits[1, 2:5], tiny.logits(b))
    assert_close(output.last_token_logits(), torch.stack((tiny.logits(a)[-1], tiny.logits(b)[-1])))
    decoded = executor.decode(token(output.kv_cache, 5, 6, position_ids=torch.tensor([[6], [3]])))
    assert_close(decoded.logits, torch.stack((tiny.logits([*a, 5])[-1], tiny.logits([*b, 6])[-1])))


def test_batches_equal_their_members(tiny: Tiny) -> None:
    executor = make_executor(tiny, prefill_chunk_size=8)
    rows = [some_ids(n, n) for n in (5, 1, 11, 4)]
    outputs = executor.batch_prefill([prompt(row, logits="last" if i == 2 else "all") for i, row in enumerate(rows)])
    for row, output in zip(rows, outputs, strict=True):
        assert_close(output.last_token_logits()[0], tiny.logits(row)[-1])
    decoded = executor.batch_decode([token(outputs[i].kv_cache, i) for i in (2, 0, 3, 1)])
    for i, output in zip((2, 0, 3, 1), decoded, strict=True):
        assert_close(output.logits[0], tiny.logits([*rows[i], i])[-1])
    assert executor.batch_decode([]) == []
    assert executor.batch_prefill([]) == []


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_random_rewinds_and_forks(tinies: dict[str, Tiny], data: st.DataObject) -> None:
    """Branches of one conversation, extended, cut and forked in any order: each equals a fresh run
    of its tokens.
    """
    tiny = tinies["Llama"]
    executor = make_executor(tiny)
    branches = [(executor.prefill(prompt([1, 2, 3])).kv_cache, [1, 2, 3])]
    for _ in range(data.draw(st.integers(1, 8))):
        index = data.draw(st.integers(0, len(branches) - 1))
        handle, ids = branches[index]
        verb = data.draw(st.sampled_from(["prefill", "decode", "truncate", "fork", "verify"]))
        new = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        if verb == "prefill":
            handle, ids = executor.prefill(prompt(new, kv_cache=handle)).kv_cache, ids + new
        elif verb == "decode":
            handle, ids = executor.decode(token(handle, new[0])).kv_cache, ids + new[:1]
        elif verb == "verify":
            handle, ids = executor.forward_verify([token(handle, i) for i in new])[-1].kv_cache, ids + new
        elif verb == "truncate":
            length = data.draw(st.integers(0, len(ids)))
            handle, ids = executor.truncate_kv(handle, length), ids[:length]
        else:
            branches.append((handle.clone_handle(), ids))
        branches[index] = (handle, ids)
    for handle, ids in branches:
        assert handle.sequence_length == len(ids)
        assert handle.cache.token_ids(0).tolist() == ids
        assert_close(executor.decode(token(handle, 9)).logits[0], tiny.logits([*ids, 9])[-1])
    executor.pool.state.check()


def test_results_belong_to_the_caller(ex: Executor) -> None:
    handle = ex.prefill(prompt(some_ids(5))).kv_cache
    first = ex.decode(token(handle, 3))
    held = first.logits.clone()
    other = ex.batch_decode([token(first.kv_cache, 4), token(ex.prefill(prompt([1])).kv_cache, 5)])
    assert torch.equal(first.logits, held)
    first.logits.zero_()
    kept = other[1].logits.clone()
    other[0].logits.fill_(7.0)
    assert torch.equal(other[1].logits, kept)


# -- handles ---------------------------------------------------------------------------------------


def test_older_handle_rewinds_and_newer_one_is_stale(llama: Tiny, ex: Executor) -> None:
    ids = some_ids(6)
    start = ex.prefill(prompt(ids)).kv_cache
    left = ex.decode(token(start, 1)).kv_cache
    right = ex.decode(token(start, 2))
    assert_close(right.logits[0], llama.logits([*ids, 2])[-1])
    assert (start.is_valid, left.is_valid, right.kv_cache.is_valid) == (True, False, True)
    cache = right.kv_cache.cache
    with refused(InvalidArgument, ex, cache, match="stale"):
        ex.decode(token(left, 3))
    with pytest.raises(InvalidArgument, match="stale"):
        left.key_cache(0)
    # A shorter handle from before stays good, also after the cache has grown past the stale one's
    # length.
    grown = ex.prefill(prompt([5, 6, 7], kv_cache=right.kv_cache)).kv_cache
    assert not left.is_valid
    assert start.is_valid
    assert grown.revision >= left.revision
    cache.clear()
    assert not start.is_valid
    assert not grown.is_valid


def test_truncate(llama: Tiny, ex: Executor) -> None:
    ids = some_ids(10)
    handle = ex.prefill(prompt(ids)).kv_cache
    cache = handle.cache
    same = ex.truncate_kv(handle, 10)
    assert same.revision == handle.revision
    assert handle.is_valid
    used = ex.pool.state.num_used_pages
    short = ex.truncate_kv(handle, 4)
    assert ex.pool.state.num_used_pages == used - 2
    assert short.sequence_length == 4
    assert not handle.is_valid
    for bad in (5, -1, "4", 4.0):
        with refused(InvalidArgument, ex, cache):
            ex.truncate_kv(short, bad)
    with refused(InvalidArgument, ex, cache, match="handle must be a CacheHandle or a KVCacheInterface"):
        ex.truncate_kv(object(), 1)
    # Counted from the cache's length: any valid handle will do.
    longer = ex.prefill(prompt(ids[4:], kv_cache=short)).kv_cache
    assert ex.truncate_kv(short, 8).sequence_length == 8
    assert not longer.is_valid
    ex.release_cache(cache.cache_id)
    with pytest.raises(NotFound):
        ex.truncate_kv(short, 1)


def test_handle_members(llama: Tiny, ex: Executor) -> None:
    handle = ex.prefill(prompt(some_ids(6))).kv_cache
    assert (handle.num_layers, handle.num_heads, handle.head_dim, handle.device.type) == (3, 2, 8, "cpu")
    assert handle.key_cache(0).shape == handle.value_cache(2).shape == (1, 6, 2, 8)
    table = handle.block_table
    assert (table.block_size, table.num_blocks, table.sequence_length, table.free_tokens) == (PAGE, 2, 6, 2)
    stats = handle.stats
    assert (stats.blocks_allocated, stats.tokens_stored, stats.utilization) == (2, 6, 6 / 8)
    assert stats.memory_bytes == 2 * PAGE * 3 * 2 * (8 + 8) * 4
    assert stats.last_access is not None
    for layer in (-1, 3, True):
        with pytest.raises(InvalidArgument):
            handle.key_cache(layer)
    both = ex.prefill(prompt([1, 2], [3, 4], attention_mask=torch.tensor([[1, 1], [1, 0]]))).kv_cache
    assert both.sequence_length == both.num_tokens == (2, 1)
    assert len(both.block_table) == 2
    assert torch.count_nonzero(both.key_cache(0)[1, 1]) == 0, "zero beyond the length, whatever the pages hold"


def test_clone_is_a_fork(llama: Tiny, ex: Executor) -> None:
    ids = some_ids(6)
    base = ex.prefill(prompt(ids)).kv_cache
    used = ex.pool.state.num_used_pages
    clone = base.clone_handle()
    assert clone.cache_id != base.cache_id
    assert ex.pool.state.num_used_pages == used
    a = ex.decode(token(base, 1)).logits
    b = ex.decode(token(clone, 2)).logits
    assert_close(a[0], llama.logits([*ids, 1])[-1])
    assert_close(b[0], llama.logits([*ids, 2])[-1])
    older = base.clone_handle()
    assert (older.sequence_length, older.cache.length) == (6, 6), "as long as the handle, not as its cache"
    ex.release_cache(base.cache_id)
    assert clone.is_valid


# -- refusals --------------------------------------------------------------------------------------


def test_prefill_refusals(llama: Tiny, ex: Executor) -> None:
    handle = ex.prefill(prompt(some_ids(5))).kv_cache
    cache = handle.cache
    other = make_executor(llama)
    foreign = other.prefill(prompt([1])).kv_cache
    cases = [
        (InvalidArgument, PrefillInput(input_ids=torch.empty(1, 0, dtype=torch.int64)), "Input token tensor is empty"),
        (InvalidArgument, PrefillInput(input_ids=torch.tensor(3)), "rank 0"),
        (InvalidArgument, prompt([1, VOCAB]), f"{VOCAB}"),
        (InvalidArgument, prompt([1, -1]), "-1"),
        (InvalidArgument, prompt([1], kv_cache=foreign), "another executor"),
        (InvalidArgument, prompt([1], [2], kv_cache=handle), "2 rows"),
        (InvalidArgument, prompt(*[[1]] * 65), "max_batch_size"),
        (Unsupported, prompt([1], adapter=0), "adapter 0"),
        (ResourceExhausted, prompt([1], position_ids=torch.tensor([[CONTEXT]])), f"position {CONTEXT}"),
        (ResourceExhausted, prompt(some_ids(CONTEXT + 1)), "maximum of 128"),
        (ResourceExhausted, prompt(some_ids(CONTEXT - 4), kv_cache=handle), "maximum"),
    ]
    for kind, bad, match in cases:
        with refused(kind, ex, cache, match=match):
            ex.prefill(bad)
        with refused(kind, ex, cache, match="batch_prefill"):
            ex.batch_prefill([prompt([1]), bad])
    assert handle.is_valid


def test_decode_refusals(ex: Executor) -> None:
    handle = ex.prefill(prompt(some_ids(5))).kv_cache
    gone = ex.prefill(prompt([1])).kv_cache
    ex.release_cache(gone.cache_id)
    assert not gone.is_valid
    cache = handle.cache
    cases = [
        (InvalidArgument, DecodeInput(input_ids=torch.tensor([[1, 2]]), kv_cache=handle), "one token per row"),
        (InvalidArgument, DecodeInput(input_ids=torch.empty(1, 0, dtype=torch.int32), kv_cache=handle), "token empty"),
        (InvalidArgument, token(handle, VOCAB), "outside"),
        (InvalidArgument, token(handle, 1, 2), "2 rows"),
        (NotFound, token(gone, 1), "released"),
        (Unsupported, token(handle, 1, adapter=3), "adapter 3"),
        (ResourceExhausted, token(handle, 1, position_ids=torch.tensor([[CONTEXT]])), f"position {CONTEXT}"),
    ]
    fine = ex.prefill(prompt([4, 4])).kv_cache
    for kind, bad, match in cases:
        with refused(kind, ex, cache, fine.cache, match=match):
            ex.decode(bad)
        with refused(kind, ex, cache, fine.cache, match=f"item 1.*({match})"):
            ex.batch_decode([token(fine, 1), bad])
        with refused(kind, ex, cache, fine.cache, match=match):
            ex.forward_verify([bad])
    clone = handle.clone_handle()
    with refused(InvalidArgument, ex, cache, match="items 0 and 2"):
        ex.batch_decode([token(handle, 1), token(clone, 1), token(cache, 1)])
    with refused(InvalidArgument, ex, cache, match="items 0 and 1"):
        ex.batch_prefill([prompt([1], kv_cache=handle), prompt([2], kv_cache=cache)])
    with refused(InvalidArgument, ex, cache, match="same starting handle"):
        ex.forward_verify([token(handle, 1), token(clone, 1)])
    shorter = ex.truncate_kv(clone, 3)
    longer = ex.decode(token(shorter, 1)).kv_cache
    with refused(InvalidArgument, ex, shorter.cache, match="item 1.*same starting handle"):
        ex.forward_verify([token(longer, 1), token(shorter, 1)])


def test_verify_positions_run_on(llama: Tiny) -> None:
    ex = make_executor(llama, window=CONTEXT)
    handle = ex.prefill(prompt([1, 2])).kv_cache
    good = [token(handle, 3, position_ids=torch.tensor([[2 + i]])) for i in range(3)]
    assert len(ex.forward_verify(good)) == 3
    with refused(Unsupported, ex, handle.cache, match="item 2.*count from 4"):
        ex.forward_verify([*good[:2], token(handle, 3, position_ids=torch.tensor([[3]]))])


def test_model_maximum_and_capacity_are_exact(llama: Tiny, ex: Executor) -> None:
    full = ex.prefill(prompt(some_ids(CONTEXT - 2))).kv_cache
    with refused(ResourceExhausted, ex, full.cache):
        ex.forward_verify([token(full, 1)] * 3)
    end = ex.forward_verify([token(full, 1)] * 2)[-1].kv_cache
    assert end.sequence_length == CONTEXT
    with refused(ResourceExhausted, ex, end.cache):
        ex.decode(token(end, 1))


def test_full_pool_refuses_whole_batches(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=6 * PAGE)
    a = ex.prefill(prompt(some_ids(2 * PAGE))).kv_cache
    b = ex.prefill(prompt(some_ids(2 * PAGE - 1))).kv_cache
    with refused(ResourceExhausted, ex, a.cache, b.cache, match="pages"):
        ex.batch_prefill([prompt(some_ids(PAGE + 1), kv_cache=a), prompt([1, 2], kv_cache=b)])
    # Rewinding a whole page and one more beside the old version fits, with nothing to spare.
    with refused(ResourceExhausted, ex, a.cache, b.cache, match="pages"):
        ex.batch_prefill([prompt(some_ids(PAGE)), prompt(some_ids(2 * PAGE))])
    assert ex.batch_decode([token(a, 1), token(b, 1)])[0].kv_cache.sequence_length == 9


def test_rewind_in_a_full_pool_gives_up_the_old_version(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=2 * PAGE)
    ids = some_ids(2 * PAGE)
    first = ex.prefill(prompt(ids[:7])).kv_cache
    second = ex.decode(token(first, ids[7]))
    again = ex.decode(token(first, 3))
    assert_close(again.logits[0], llama.logits([*ids[:7], 3])[-1])
    assert not second.kv_cache.is_valid
    ex.pool.state.check()
    # A fork holds the pages too: then nothing would be gained, and the call is refused.
    clone = again.kv_cache.clone_handle()
    with refused(ResourceExhausted, ex, first.cache, clone.cache):
        ex.decode(token(first, 4))


def test_reclaim_is_asked_before_refusing(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=3 * PAGE)
    cached = [ex.prefill(prompt(some_ids(PAGE))).kv_cache for _ in range(2)]

    class Owner:
        def reclaim_one(self, rank: ReclaimKind) -> bool:
            if rank is not ReclaimKind.IDLE or not cached:
                return False
            ex.release_cache(cached.pop().cache_id)
            return True

    owner = Owner()
    ex.pool.runner.room.join(owner)  # type: ignore[arg-type]
    handle = ex.prefill(prompt(some_ids(2 * PAGE))).kv_cache
    assert len(cached) == 1, "no more than is needed"
    with pytest.raises(ResourceExhausted):
        ex.prefill(prompt(some_ids(2 * PAGE)))
    assert handle.is_valid


# -- errors while computing ------------------------------------------------------------------------


class Breaking:
    """A model whose head or n-th block call fails."""

    def __init__(self, ex: Executor, error: Exception, after: int = 0) -> None:
        self.model = ex.pool.runner.model
        self.error, self.left = error, after
        ex.pool.runner.model = self

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.model.head(x)


def test_failed_compute_leaves_lengths_and_content(llama: Tiny) -> None:
    ex = make_executor(llama, prefill_chunk_size=4)
    ids = some_ids(6)
    start = ex.prefill(prompt(ids)).kv_cache
    longer = ex.decode(token(start, 1)).kv_cache
    cache = longer.cache
    clone = longer.clone_handle()
    calls = [
        lambda: ex.decode(token(start, 2)),
        lambda: ex.decode(token(longer, 2)),
        lambda: ex.prefill(prompt(some_ids(11), kv_cache=start)),
        lambda: ex.prefill(prompt(some_ids(11), kv_cache=longer)),
        lambda: ex.prefill(prompt(some_ids(11))),
        lambda: ex.batch_prefill([prompt(some_ids(5)), prompt(some_ids(5), kv_cache=start)]),
        lambda: ex.batch_decode([token(clone, 2), token(start, 2)]),
        lambda: ex.forward_verify([token(start, 2)] * 2),
        lambda: ex.speculative_decode(token(start, 2), [1, 2], 0.5),
        lambda: ex.forward(torch.tensor([ids])),
    ]
    for call in calls:
        for after in (0, 1):
            broken = Breaking(ex, RuntimeError("boom"), after)
            try:
                if after and call not in (calls[2], calls[3], calls[4], calls[5], calls[9]):
                    continue
                with refused(QuireError, ex, cache, clone.cache, match="boom"):
                    call()
            finally:
                ex.pool.runner.model = broken.model
    assert longer.is_valid
    assert ex.status().state is ExecutorState.READY
    assert_close(ex.decode(token(longer, 3)).logits[0], llama.logits([*ids, 1, 3])[-1])


def test_lost_device_is_an_error_state(llama: Tiny) -> None:
    ex = make_executor(llama)
    Breaking(ex, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(QuireError, match="illegal memory"):
        ex.prefill(prompt([1]))
    assert ex.status().state is ExecutorState.ERROR
    assert not ex.status().is_ready
    with pytest.raises(QuireError, match="device failed"):
        ex.prefill(prompt([1]))
    ex.shutdown()
    assert ex.status().state is ExecutorState.SHUTDOWN


# -- life ------------------------------------------------------------------------------------------


def test_no_leak_over_100_cycles(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=16 * PAGE)
    for cycle in range(100):
        handle = ex.prefill(prompt(some_ids(9, cycle), logits="last")).kv_cache
        handle = ex.decode(token(handle, 1)).kv_cache
        copy = handle.clone_handle()
        ex.decode(token(copy, 2))
        if cycle % 2:
            ex.release_cache(handle.cache_id)
            ex.release_cache(handle.cache_id)
        del handle, copy
    gc.collect()
    assert ex.pool.state.num_used_pages == 0
    assert ex.pool.state.empty()
    assert len(ex.pool.caches) == 0


def test_release_never_raises(ex: Executor) -> None:
    for unknown in ("no such cache", "", 3, None):
        ex.release_cache(unknown)
    ex.shutdown()
    ex.release_cache("no such cache")


def test_shutdown_is_terminal(llama: Tiny) -> None:
    ex = make_executor(llama)
    handle = ex.prefill(prompt([1, 2])).kv_cache
    state = ex.pool.state
    info, peak = ex.info(), ex.status().memory_usage.peak_bytes
    ex.shutdown()
    ex.shutdown()
    assert state.empty()
    calls = [
        lambda: ex.prefill(prompt([1])),
        lambda: ex.decode(token(handle, 1)),
        lambda: ex.batch_prefill([]),
        lambda: ex.batch_decode([]),
        lambda: ex.forward(torch.tensor([[1]])),
        lambda: ex.forward_verify([]),
        lambda: ex.truncate_kv(handle, 0),
        lambda: ex.create_kv_cache(),
        lambda: ex.warmup(),
        lambda: ex.speculative_decode(token(handle, 1), [], 0.5),
    ]
    for call in calls:
        with pytest.raises(FailedPrecondition, match="shut down"):
            call()
    ex.cancel()
    assert not handle.is_valid
    with pytest.raises(NotFound):
        handle.key_cache(0)
    assert ex.info() == info
    assert ex.capabilities().max_batch_size == 64
    assert ex.status().state is ExecutorState.SHUTDOWN
    assert (ex.status().memory_usage.allocated_bytes, ex.status().memory_usage.peak_bytes) == (0, peak)
    assert ex.metrics().prefill_operations == 1
    assert not ex.supports_batch_size(1)


def test_what_waits_for_a_call_while_the_executor_is_shut_down(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capabilities are told in any state, and no batch is supported."""
    ex, found = make_executor(llama), list[int]()
    with ex.lock:
        asking = threading.Thread(target=lambda: found.append(ex.capabilities().max_batch_size))
        asking.start()
        while not ex._operations.busy:
            time.sleep(0.001)
        ex.shutdown()
    asking.join()
    assert found == [64]

    @contextmanager
    def waiting() -> Iterator[None]:
        other.pool.close()
        yield

    other = make_executor(llama)
    monkeypatch.setattr(other, "lock", waiting())
    assert not other.supports_batch_size(1)


def test_concurrent_calls_do_not_disturb_each_other(llama: Tiny, ex: Executor) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            ids = some_ids(8, seed)
            handle = ex.prefill(prompt(ids)).kv_cache
            for step in range(6):
                output = ex.decode(token(handle, step))
                handle = output.kv_cache
                ids.append(step)
            assert_close(output.logits[0], llama.logits(ids)[-1])
            ex.release_cache(handle.cache_id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert ex.pool.state.num_used_pages == 0
    metrics = ex.metrics()
    assert (metrics.prefill_operations, metrics.decode_operations) == (6, 36)


def test_adapters_are_unsupported(ex: Executor) -> None:
    with refused(Unsupported, ex):
        ex.load_lora(ModelAssets(path="x"))
    with refused(Unsupported, ex):
        ex.unload_lora(0)
