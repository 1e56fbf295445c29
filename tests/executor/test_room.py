"""Who gives room to whom where a runner is short: caches of an executor, a serving engine beside
it, calls that can never fit.
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.executor.conftest import PAGE, FakeIdentity
from tests.executor.recurrent import LENGTH, Hybrid, check, fresh, make_executor, prompt, token
from tests.executor.test_recurrent_limits import Broken, at, error_of, facts, failing, untouched

from quire.base.errors import Cancelled, FailedPrecondition, NotFound, QuireError, ResourceExhausted
from quire.base.sampling_params import SamplingParams
from quire.base.types import SeqId
from quire.engine.assembly import make_engine
from quire.engine.engine import Engine
from quire.engine.step_builder import Limits
from quire.executor.executor import Executor
from quire.executor.row_extension import extensions
from quire.executor.running_calls import Operation
from quire.executor.transaction import Transaction
from quire.kv.recurrent_states import NULL
from quire.runner.reclaim import ReclaimKind

NEW = 3
"""Tokens of a request of the engine."""


def beside_an_engine(hybrid: Hybrid, **given: Any) -> tuple[Engine, Executor]:
    """Both over one runner, under one lock."""
    runner = make_executor(hybrid, **given).pool.runner
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64)
    engine = make_engine(runner, limits=limits, max_model_len=48)
    return engine, Executor(runner, identity=FakeIdentity(hybrid.kind), lock=engine.lock)


def generate(engine: Engine, ids: list[int]) -> str | None:
    """How a request ends."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    requests = engine.submit(np.array(ids, dtype=np.int64), params)
    engine.run(requests)
    return requests[0].output.finish_reason


def num_cached(engine: Engine) -> int:
    assert engine.cache is not None
    return len(engine.cache.ages())


# -- an engine beside ------------------------------------------------------------------------------


def test_an_engine_gets_the_states_that_caches_hold_to_save_work(hybrid: Hybrid) -> None:
    engine, executor = beside_an_engine(hybrid, states=24)
    ids = hybrid.tokens
    handles = []
    for k in range(5):
        handle = executor.prefill(prompt(ids[k : k + 6], logits="none")).kv_cache
        roomy = executor.pool.state.parts.recurrent.table.pool.num_free // 2  # type: ignore[union-attr]
        if roomy >= 2:
            executor.forward_verify([token(handle, one) for one in range(3, 3 + roomy)])
        handles.append(handle)
    assert executor.pool.available_states == 1
    assert generate(engine, ids[:8]) == "length"
    # Rows are as long as before, and cutting one back is as exact.
    known = handles[0].cache.token_ids(0).tolist()  # type: ignore[union-attr]
    assert known[:6] == ids[:6]
    assert len(known) > 6
    short = executor.truncate_kv(handles[0].cache, 6)
    hybrid.close(executor.decode(token(short, ids[6])).logits, 6)
    check(executor)


def test_states_stay_while_pages_are_what_is_short(hybrid: Hybrid) -> None:
    if not hybrid.has_attention:
        pytest.skip("no pages")
    executor = make_executor(hybrid, states=40, tokens=LENGTH + PAGE)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:20], logits="none")).kv_cache
    executor.forward_verify([token(handle, one) for one in ids[20:]])
    assert handle.cache.rows[0].chain is not None
    assert not executor.pool.runner.room.make()
    assert handle.cache.rows[0].chain is not None


def test_an_abandoned_cache_is_room_for_an_engine(hybrid: Hybrid) -> None:
    if not hybrid.has_attention:
        pytest.skip("no pages")
    engine, executor = beside_an_engine(hybrid, states=24, tokens=48)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:20], ids[:20], logits="none")).kv_cache
    locked, done = threading.Event(), threading.Event()

    def step() -> None:
        with engine.lock:
            locked.set()
            done.wait(30)

    thread = threading.Thread(target=step)
    thread.start()
    assert locked.wait(30)
    gone = weakref.ref(handle.cache)
    del handle
    gc.collect()
    done.set()
    thread.join(30)
    assert gone() is None
    assert executor.pool.state.num_available_pages() == 2
    assert generate(engine, ids[:16]) == "length"
    check(executor)


def test_a_pool_gives_back_between_forwards_until_it_is_closed(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, states=4)
    pool, runner = executor.pool, executor.pool.runner
    assert list(runner.room._owners) == [pool]
    handle = executor.prefill(prompt(hybrid.tokens[:6], logits="none")).kv_cache
    executor.decode(token(handle, hybrid.tokens[6]))
    # A mark at 6, which is no more than two of four slots.
    assert executor.prefill(prompt([1, 2], logits="none")).kv_cache.is_valid
    found = []
    block = runner.model.blocks[-1]

    def asking(*given: Any) -> Any:
        found.append(runner.room.make())
        return block(*given)

    runner.model.blocks[-1] = asking  # type: ignore[index]
    executor.decode(token(handle.cache, hybrid.tokens[7]))
    runner.model.blocks[-1] = block  # type: ignore[index]
    assert found == [False]
    assert runner.room.make()
    assert executor.pool.state.checkpoints(handle.cache.rows[0].seq) == []
    assert not runner.room.make()
    executor.shutdown()
    assert list(runner.room._owners) == []
    assert not runner.room.make()


def test_a_call_that_asks_for_room_keeps_the_states_that_it_goes_back_to(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, states=4)
    pool = executor.pool
    handle = executor.prefill(prompt(hybrid.tokens[:6], logits="none")).kv_cache
    asked = []

    class Owner:
        """Another one, which has nothing to give up."""

        def reclaim_one(self, rank: ReclaimKind) -> bool:
            asked.append(rank)
            return False

        def reclaimable(self) -> list[SeqId]:
            return []

    owner = Owner()
    pool.runner.room.join(owner)
    assert pool.state.checkpoints(handle.cache.rows[0].seq) == [6]
    with pool.lock:
        assert not pool.make_room()
    assert asked == list(ReclaimKind)
    assert pool.state.checkpoints(handle.cache.rows[0].seq) == [6]


# -- calls that can never fit ----------------------------------------------------------------------


def test_what_can_never_fit_in_pages_costs_nobody_anything(hybrid: Hybrid) -> None:
    if not hybrid.has_attention:
        pytest.skip("no pages")
    engine, executor = beside_an_engine(hybrid, states=24, tokens=120)
    ids = hybrid.tokens
    for k in range(3):
        generate(engine, ids[k : k + 12])
    cached = num_cached(engine)
    assert cached
    with untouched(executor), pytest.raises(ResourceExhausted, match="pages"):
        executor.batch_prefill([prompt(ids + ids[:20], logits="none") for _ in range(3)])
    assert num_cached(engine) == cached
    with executor.lock:
        seqs = executor.pool.add(1)
        assert executor.pool.missing_full_pages(seqs, [121]) == 31 - executor.pool.state.num_available_pages()
        executor.pool.remove(*seqs)
    assert num_cached(engine) == cached


def test_what_can_never_fit_in_states_costs_nobody_anything(hybrid: Hybrid) -> None:
    engine, executor = beside_an_engine(hybrid, states=6, tokens=400)
    ids = hybrid.tokens
    for k in range(3):
        generate(engine, ids[k : k + 12])
    handle = executor.prefill(prompt(ids[:1], logits="none")).kv_cache
    cached, kept = num_cached(engine), executor.pool.state.checkpoints(handle.cache.rows[0].seq)
    assert cached
    with untouched(executor, handle.cache), pytest.raises(ResourceExhausted, match="slots for recurrent states"):
        executor.forward_verify([token(handle, one) for one in range(3, 13)], parents=list(range(-1, 9)))
    assert num_cached(engine) == cached
    assert executor.pool.state.checkpoints(handle.cache.rows[0].seq) == kept


@pytest.mark.turns(6)
def test_each_cache_is_asked_once_for_its_states(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 20
    executor = make_executor(hybrid, states=3 * count + 2, ring=0)
    handles = [executor.prefill(prompt([one], logits="none")).kv_cache for one in range(count)]
    handles = [executor.decode(token(handle, 3)).kv_cache for handle in handles]
    pool = executor.pool
    marks = sum(len(pool.state.checkpoints(handle.cache.rows[0].seq)) for handle in handles)
    assert marks == count
    kind, asked = type(handles[0].cache), []
    give_up = kind.drop_spare_states

    def counting(cache: Any) -> int:
        asked.append(cache.cache_id)
        return give_up(cache)

    monkeypatch.setattr(kind, "drop_spare_states", counting)
    with pool.lock:
        assert pool.missing_states(pool.available_states + count // 2) == 0
        # No more than it takes, of those first that were not used for longest.
        assert asked == [handle.cache_id for handle in handles[: count // 2]]
        asked.clear()
        assert pool.missing_states(pool.available_states + count) == count - count // 2
    assert asked == [handle.cache_id for handle in handles]


# -- going back ------------------------------------------------------------------------------------


def test_a_cut_of_several_rows_is_refused_as_a_whole(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    left, right = hybrid.tokens[:10], hybrid.tokens[5:15]
    cache = executor.prefill(prompt(left, right, logits="none")).kv_cache.cache
    handle = executor.decode(token(cache, 1, 2)).kv_cache
    with untouched(executor, cache):
        for verb in (cache.truncate, cache.copy_of):
            with pytest.raises(FailedPrecondition, match="running 3 tokens again"):
                verb([10, 3])
    assert cache.lengths == (11, 11)
    assert handle.is_valid
    logits_BV = executor.decode(token(handle, 3, 4)).logits
    for found_V, tokens in zip(logits_BV, ([*left, 1, 3], [*right, 2, 4]), strict=True):
        assert float((found_V - fresh(hybrid, tokens)).abs().max()) <= hybrid.bound
    # Where both are kept, both are cut.
    cache.truncate([11, 10])
    assert cache.lengths == (11, 10)
    assert [len(cache.token_ids(row)) for row in (0, 1)] == [11, 10]  # type: ignore[arg-type]


@pytest.mark.product(4)
@pytest.mark.sweep
@pytest.mark.parametrize("ring", [0, 1])
def test_speculation_from_an_earlier_start_is_exact_or_refused_in_little_room(hybrid: Hybrid, ring: int) -> None:
    ids = hybrid.tokens
    outcomes = set()
    for states in (2, 3, 4, 5):
        for tokens in (20, 24, 36):
            for others in (0, 1, 2):
                executor = make_executor(hybrid, states=states, ring=ring, tokens=tokens, prefill_chunk_size=100)
                handle = executor.prefill(prompt(ids[:9], logits="none")).kv_cache
                clones = [handle.clone_handle() for _ in range(others)]
                if error_of(lambda: [executor.decode(token(one, 5)) for one in clones]):  # noqa: B023
                    continue
                cache = handle.cache
                before = facts(executor, cache)
                found: Any = None
                with suppress(ResourceExhausted):
                    found = executor.speculative_decode(token(at(handle, 3), 7), [9, 9], 1.0)
                if found is None:
                    outcomes.add("refused")
                    assert facts(executor, cache) == before
                else:
                    made = [*ids[:3], 7, *found.accepted_tokens]
                    outcomes.add("done" if len(made) == 6 else "cut")
                    assert cache.token_ids(0).tolist() == made  # type: ignore[union-attr]
                    assert cache.lengths == (len(made),)
                    assert float((found.next_logits[0] - fresh(hybrid, made)).abs().max()) <= hybrid.bound
                    logits_BV = executor.decode(token(cache, 3)).logits
                    assert float((logits_BV[0] - fresh(hybrid, [*made, 3])).abs().max()) <= hybrid.bound
                check(executor)
    assert {"refused", "cut"} <= outcomes


def test_a_row_never_begins_behind_its_end(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    cache = executor.prefill(prompt(hybrid.tokens[:5], logits="none")).kv_cache.cache
    work = Transaction(executor.pool, extensions(cache, [6], [1]), Operation("prefill"))
    with untouched(executor, cache), executor.lock, pytest.raises(QuireError, match="begins at 6 and has 5 tokens"):
        work.__enter__()
    assert cache.length == 5


def test_a_cut_takes_the_slot_of_the_version_that_it_replaces(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, states=4, prefill_chunk_size=2)
    ids = hybrid.tokens
    handles = [executor.prefill(prompt(ids[:9], logits="none")).kv_cache for _ in range(3)]
    # One slot is free, and running five tokens two at a time takes two.
    short = executor.truncate_kv(handles[0], 5)
    assert short.cache.lengths == (5,)
    hybrid.close(executor.decode(token(short, ids[5])).logits, 5)
    check(executor)
    # A slot that somebody else holds, too, is none.
    copy = handles[1].clone_handle()
    refusal = r"no room for 5 tokens that must be run again: 1 slots"
    with untouched(executor, handles[1].cache, copy.cache), pytest.raises(ResourceExhausted, match=refusal):
        executor.truncate_kv(handles[1], 5)


def test_slots_that_go_with_a_sequence_are_counted_exactly(hybrid: Hybrid) -> None:
    for ring in (0, 1, 3):
        for interval in (0, 4):
            for shared in (False, True):
                executor = make_executor(hybrid, ring=ring, interval=interval)
                handle = executor.prefill(prompt(hybrid.tokens[:9], logits="none")).kv_cache
                handle = executor.decode(token(handle, hybrid.tokens[9])).kv_cache
                others = [handle.clone_handle()] if shared else []
                pool, seq = executor.pool, handle.cache.rows[0].seq
                expected, before = pool.state.states_freed(seq), pool.available_states
                slots = pool.state.parts.recurrent.table.held_slots(seq)[0]  # type: ignore[union-attr]
                assert NULL < expected <= slots
                executor.release_cache(handle.cache_id)
                assert pool.available_states - before == expected
                assert (expected == 0) == shared
                del others


def test_clearing_an_empty_cache_drops_the_tree_beside_it(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    cache = executor.create_kv_cache()
    nodes = executor.forward_verify([token(cache, 1), token(cache, 2)], parents=[-1, 0])
    assert nodes[0].kv_cache.is_valid
    cache.clear()
    assert not nodes[0].kv_cache.is_valid
    assert list(executor.pool.state.sequences.ids) == [cache.rows[0].seq]
    check(executor)


# -- clones and warmup -----------------------------------------------------------------------------


def test_a_clone_that_runs_tokens_again_is_a_running_call(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, prefill_chunk_size=2)
    handle = executor.prefill(prompt(hybrid.tokens[:20], logits="none")).kv_cache
    execute, seen = executor.pool.runner.execute, []

    def cancelling(step: Any, *more: Any) -> Any:
        if step.chunks:
            executor.cancel()
            seen.append(executor.status().state.value)
        return execute(step, *more)

    executor.pool.runner.execute = cancelling  # type: ignore[method-assign]
    with untouched(executor, handle.cache), pytest.raises(Cancelled, match="clone_handle"):
        at(handle, 15).clone_handle()
    assert seen == ["Busy"]
    executor.pool.runner.execute = execute  # type: ignore[method-assign]
    # A cancel concerns what is inside when it comes.
    assert at(handle, 15).clone_handle().sequence_length == 15
    executor.pool.broken = "the device failed"
    with pytest.raises(QuireError, match="clone_handle: the device failed"):
        handle.clone_handle()
    executor.shutdown()
    with pytest.raises(NotFound):
        handle.clone_handle()


@pytest.mark.product(8)
@pytest.mark.sweep
@pytest.mark.parametrize(
    "interval", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3, 4, pytest.param(16, marks=pytest.mark.slow)]
)
def test_warmup_needs_no_more_states_than_there_are(hybrid: Hybrid, interval: int) -> None:
    for states in (1, 2, 3, 5, 8):
        executor = make_executor(
            hybrid, states=states, interval=interval, page_size=PAGE if interval % PAGE == 0 else 1
        )
        executor.warmup()
        assert executor.pool.state.empty()
        assert executor.optimal_batch_size() >= 1


def test_a_fault_after_states_were_short_leaves_a_usable_row(hybrid: Hybrid) -> None:
    ids = hybrid.tokens
    for after in range(3):
        executor = make_executor(hybrid, states=4, prefill_chunk_size=2)
        handles = [executor.prefill(prompt(ids[:9], logits="none")).kv_cache for _ in range(3)]
        mend = failing(executor, after)
        failure = error_of(lambda: executor.truncate_kv(handles[0], 5))  # noqa: B023
        mend()
        assert isinstance(failure.__cause__, Broken)  # type: ignore[union-attr]
        check(executor)
        length = handles[0].cache.lengths[0]
        assert handles[0].cache.token_ids(0).tolist() == ids[:length]  # type: ignore[union-attr]
        assert length == 2 * after
        hybrid.close(executor.decode(token(handles[0].cache, ids[length])).logits, length)
