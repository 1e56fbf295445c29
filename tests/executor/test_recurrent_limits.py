"""Models with recurrent layers where room is short, where calls fail in the middle, and what an
executor says about them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.executor.conftest import PAGE, RECURRENT_KINDS, forget_tokens, inputs, some_ids
from tests.executor.recurrent import LENGTH, Hybrid, check, make_executor, prompt, token
from tests.executor.test_memory import few_rows, peak_of

from quire import LLM
from quire.base.config import ExecutorConfig
from quire.base.errors import Cancelled, FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.build import EXECUTOR_FACTORY
from quire.contracts.executor import AttentionMechanism, ExecutorInputs, TextData, VisionData
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.forward_packing import Piece, states_needed
from quire.executor.handle import Handle
from quire.executor.llm_executor import LlmExecutor
from quire.kv.recurrent import bytes_per_state


def at(handle: Handle, length: int) -> Handle:
    return Handle(handle.cache, (length,), handle.revision)


def facts(executor: Executor, *caches: KVCache) -> object:
    """What a call that fails must leave as it was. Recent states may have been given up."""
    executor.pool.sweep()
    found = [
        (cache.lengths, cache.revision, [row.seq for row in cache.rows], cache.token_ids(0).tolist())  # type: ignore[union-attr]
        for cache in caches
    ]
    metrics = executor.metrics().to_dict()
    del metrics["memory_efficiency"]
    return found, sorted(executor.pool.state.sequences.ids), metrics, len(executor.pool.caches)


def error_of(call: Callable[[], Any]) -> QuireError | None:
    try:
        call()
    except QuireError as error:
        return error
    return None


@contextmanager
def untouched(executor: Executor, *caches: KVCache) -> Iterator[None]:
    before = facts(executor, *caches)
    yield
    assert facts(executor, *caches) == before
    check(executor)


# -- room for states -------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Executor, Handle, list[int]], Any]] = {
    "decode": lambda ex, h, ids: ex.decode(token(h, ids[0])),
    "prefill": lambda ex, h, ids: ex.prefill(prompt(ids, kv_cache=h)),
    "batch": lambda ex, h, ids: ex.batch_prefill([prompt(ids, kv_cache=h), prompt(ids[:2]), prompt(ids[:3], ids[1:4])]),
    "truncate": lambda ex, h, ids: ex.truncate_kv(h, h.num_tokens),  # type: ignore[arg-type]
    "clone": lambda ex, h, ids: h.clone_handle(),
    "tree": lambda ex, h, ids: ex.forward_verify([token(h, one) for one in ids[:3]], parents=[-1, 0, 0]),
    "verify": lambda ex, h, ids: ex.forward_verify([token(h, one) for one in ids[:3]]),
    "speculate": lambda ex, h, ids: ex.speculative_decode(token(h, ids[0]), ids[1:4], 0.0),
    "sample": lambda ex, h, ids: LlmExecutor(ex).sample_tokens(3, inputs([ids[0]], at=h.num_tokens), h.cache),
}


@pytest.mark.product(4)
@pytest.mark.sweep
@pytest.mark.parametrize("interval", [0, 4])
@pytest.mark.parametrize("name", CALLS)
def test_with_any_number_of_slots_a_call_is_exact_or_refused_before_it_runs(
    hybrid: Hybrid, name: str, interval: int
) -> None:
    ids = hybrid.tokens
    outcomes = []
    for states in range(2, 12) if interval else range(3, 12, 2):
        executor = make_executor(hybrid, states=states, interval=interval, prefill_chunk_size=4)
        try:
            handle = executor.prefill(prompt(ids[:9], logits="none")).kv_cache
        except ResourceExhausted:
            outcomes.append("too small")
            continue
        other = handle.clone_handle()
        execute = executor.pool.runner.execute
        forwards = []

        def counting(step: Any, *more: Any, execute: Any = execute, forwards: Any = forwards) -> Any:
            forwards.extend(step.chunks)
            return execute(step, *more)

        executor.pool.runner.execute = counting  # type: ignore[method-assign]
        before = facts(executor, handle.cache, other.cache)
        refusal = error_of(lambda: CALLS[name](executor, at(handle, 6), ids[6:]))  # noqa: B023
        outcomes.append("done" if refusal is None else "refused")
        if refusal is not None:
            assert isinstance(refusal, ResourceExhausted)
            assert "slots for recurrent states" in str(refusal)
            assert not forwards
            assert facts(executor, handle.cache, other.cache) == before
        check(executor)
        if outcomes[-1] == "done" and name not in ("clone", "tree", "batch"):
            length = handle.cache.lengths[0]
            known = handle.cache.token_ids(0).tolist()  # type: ignore[union-attr]
            if known == ids[:length] and length < LENGTH:
                executor.release_cache(other.cache_id)
                hybrid.close(executor.decode(token(handle.cache, ids[length])).logits, length)
    # More room never hurts, and there is a number of slots that is enough.
    assert outcomes == sorted(outcomes, key=["too small", "refused", "done"].index), outcomes
    assert outcomes[-1] == "done"


@pytest.mark.sweep
def test_the_count_of_states_is_exactly_what_calls_take(hybrid: Hybrid) -> None:
    ids = hybrid.tokens
    for interval in (0, 4, 8):
        for chunk in (0, 1, 3, 7):
            executor = make_executor(hybrid, interval=interval, prefill_chunk_size=chunk)
            table = executor.pool.state.parts.recurrent.table  # type: ignore[union-attr]
            left = executor.prefill(prompt(ids[:6], logits="none")).kv_cache
            right = executor.prefill(prompt(ids[:3], logits="none")).kv_cache
            available = least = table.num_available
            take = table.open

            def opened(need: Any, take: Any = take, table: Any = table) -> Any:
                nonlocal least
                found = take(need)
                least = min(least, table.num_available)
                return found

            table.open = opened  # type: ignore[method-assign]
            executor.batch_prefill([prompt(ids[6:], kv_cache=left), prompt(ids[:9], kv_cache=right), prompt(ids[:2])])
            counts = [LENGTH - 6, 9, 2]
            budget = chunk or sum(counts)
            forwards: list[list[Piece]] = [[]]
            room = budget
            for row, count in enumerate(counts):
                begin = 0
                while begin < count:
                    if room == 0:
                        forwards.append([])
                        room = budget
                    size = min(room, count - begin)
                    forwards[-1].append(Piece(row, begin, begin + size))
                    begin, room = begin + size, room - size
            assert available - least == states_needed([6, 3, 0], forwards, interval=interval)


def test_chains_and_marks_give_way_when_slots_are_short(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, states=16)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:8], logits="none")).kv_cache
    verified = executor.forward_verify([token(handle, one) for one in ids[8:13]])
    pool = executor.pool.state.parts.recurrent.table.pool  # type: ignore[union-attr]
    assert handle.cache.rows[0].chain is not None
    held = pool.num_used
    others = [executor.prefill(prompt(ids[:4], logits="none")).kv_cache for _ in range(13)]
    assert handle.cache.rows[0].chain is None
    assert held == 6
    with untouched(executor, handle.cache, *(one.cache for one in others)), pytest.raises(ResourceExhausted):
        executor.batch_prefill([prompt([1]), prompt([2]), prompt([3]), prompt([4])])
    # Now a cut of the chain costs tokens, and is as exact.
    for one in others[2:]:
        executor.release_cache(one.cache_id)
    short = executor.truncate_kv(verified[-1].kv_cache, 10)
    hybrid.close(executor.decode(token(short, ids[10])).logits, 10)
    assert executor.metrics().replayed_tokens == 10
    check(executor)


def test_a_rewind_gives_up_the_states_that_it_has_passed(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, states=5, interval=4)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:16], logits="none")).kv_cache
    seq = handle.cache.rows[0].seq
    assert executor.pool.state.checkpoints(seq) == [4, 8, 12, 16]
    # One slot is free. Tokens 12 and 13 are run again, and then the new one.
    hybrid.close(executor.decode(token(at(handle, 14), ids[14])).logits, 14)
    assert executor.metrics().replayed_tokens == 2
    check(executor)


def test_states_that_cannot_be_had_again_are_not_given_up(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, states=9, interval=8)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:20], logits="none")).kv_cache
    # As after loading a file that does not tell them.
    forget_tokens(handle.cache.rows[0])
    known = executor.prefill(prompt(ids[:10], logits="none")).kv_cache
    others: list[Handle] = []
    for _ in range(9 - 3 - 1):
        others.append(executor.prefill(prompt([1], logits="none")).kv_cache)
    with pytest.raises(ResourceExhausted, match="slots for recurrent states"):
        executor.prefill(prompt([1], logits="none"))
    assert executor.pool.state.checkpoints(handle.cache.rows[0].seq) == [8, 16]
    assert executor.pool.state.checkpoints(known.cache.rows[0].seq) == []
    hybrid.close(executor.decode(token(executor.truncate_kv(handle, 16), ids[16])).logits, 16)
    check(executor)


def test_without_a_ring_calls_can_be_undone_as_well(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, ring=0)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:8], logits="none")).kv_cache
    for position in range(8, 14):
        handle = executor.decode(token(handle, ids[position])).kv_cache
    hybrid.close(executor.decode(token(at(handle, 11), ids[11])).logits, 11)
    spoken = executor.speculative_decode(token(handle.cache, ids[12]), ids[13:15], 0.0)
    hybrid.close(spoken.next_logits, 14)
    check(executor)


# -- room for pages --------------------------------------------------------------------------------


@pytest.mark.turns(6)
def test_a_cut_in_a_full_pool_gives_up_the_old_version(hybrid: Hybrid) -> None:
    if not hybrid.has_attention:
        pytest.skip("no pages")
    ids = hybrid.tokens
    pages = LENGTH // PAGE
    for n in range(1, LENGTH):
        executor = make_executor(hybrid, tokens=pages * PAGE)
        handle = executor.prefill(prompt(ids, logits="none")).kv_cache
        assert executor.pool.state.num_available_pages() == 0
        early = at(handle, n - 1)
        short = executor.truncate_kv(handle, n)
        assert early.is_valid
        assert not handle.is_valid
        hybrid.close(executor.decode(token(short, ids[n])).logits, n)
        check(executor)


def test_pages_that_others_hold_are_no_room(hybrid: Hybrid) -> None:
    if not hybrid.has_attention:
        pytest.skip("no pages")
    ids = hybrid.tokens
    executor = make_executor(hybrid, tokens=LENGTH)
    handle = executor.prefill(prompt(ids, logits="none")).kv_cache
    copy = handle.clone_handle()
    with untouched(executor, handle.cache, copy.cache), pytest.raises(ResourceExhausted, match="pages"):
        executor.truncate_kv(handle, 9)
    assert handle.is_valid
    executor.release_cache(copy.cache_id)
    hybrid.close(executor.decode(token(executor.truncate_kv(handle, 9), ids[9])).logits, 9)


# -- failures --------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def failing(executor: Executor, after: int) -> Callable[[], None]:
    """The forward number ``after`` from now on, and all behind it, break in the last block.

    Returns what mends it.
    """
    blocks = executor.pool.runner.model.blocks
    last, count = blocks[-1], [0]

    def block(x_TE: torch.Tensor, pass_: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] > after:
            raise Broken
        return last(x_TE, pass_)

    blocks[-1] = block  # type: ignore[index]

    def mend() -> None:
        blocks[-1] = last  # type: ignore[index]

    return mend


@pytest.mark.sweep
@pytest.mark.product(16)
@pytest.mark.parametrize("ring", [0, 1])
@pytest.mark.parametrize("start", [6, 9])
@pytest.mark.parametrize("name", CALLS)
def test_a_failure_in_any_forward_leaves_everything_as_it_was(hybrid: Hybrid, name: str, start: int, ring: int) -> None:
    for after in range(4):
        if not fail_in(hybrid, name, start, after, ring):
            break  # so many forwards there are not


def fail_in(hybrid: Hybrid, name: str, start: int, after: int, ring: int) -> bool:
    """Whether the call failed."""
    ids = hybrid.tokens
    executor = make_executor(hybrid, prefill_chunk_size=4, ring=ring)
    handle = executor.prefill(prompt(ids[:9], logits="none")).kv_cache
    other = executor.prefill(prompt(ids[:4], logits="none")).kv_cache
    mend = failing(executor, after)
    before = facts(executor, handle.cache, other.cache)
    failure = error_of(lambda: CALLS[name](executor, at(handle, start), ids[start:]))
    mend()
    if failure is None:
        # To run tokens 0..5 again takes two forwards.
        assert start == 9 or after >= 2
    else:
        assert "failed while computing" in str(failure)
        assert facts(executor, handle.cache, other.cache) == before
        assert handle.is_valid
    check(executor)
    if failure is not None:
        hybrid.close(executor.decode(token(handle, ids[9])).logits, 9)
    return failure is not None


@pytest.mark.parametrize(("ring", "count", "after"), [(0, 1, 0), (0, 3, 0), (0, 5, 1), (1, 5, 0), (1, 5, 1), (1, 5, 2)])
def test_a_failing_call_keeps_no_state_of_where_it_began(hybrid: Hybrid, ring: int, count: int, after: int) -> None:
    """The state that it would come back to was kept for it, behind a token that nobody else keeps
    one for.
    """
    ids = hybrid.tokens
    executor = make_executor(hybrid, ring=ring, prefill_chunk_size=2)
    handle = executor.prefill(prompt(ids[:8], logits="none")).kv_cache
    for position in (8, 9):
        handle = executor.decode(token(handle, ids[position])).kv_cache
    state, seq = executor.pool.state, handle.cache.rows[0].seq
    kept = state.checkpoints(seq)
    assert 10 not in kept
    # A forward runs each layer once, and the fault is in the last one.
    mend = failing(executor, after)
    failure = error_of(lambda: executor.prefill(prompt(ids[10 : 10 + count], kv_cache=handle)))
    mend()
    assert "failed while computing" in str(failure)
    assert handle.cache.rows[0].seq == seq
    assert state.checkpoints(seq) == kept
    check(executor)
    hybrid.close(executor.decode(token(handle, ids[10])).logits, 10)


def test_a_failure_after_the_old_version_was_given_up_leaves_a_usable_row(hybrid: Hybrid) -> None:
    if not hybrid.has_attention:
        pytest.skip("no pages")
    ids = hybrid.tokens
    for after, length, states in ((0, 0, 9), (1, 5, 9), (2, 10, 9), (3, 12, 9), (5, 12, 9), (3, 12, 2)):
        executor = make_executor(hybrid, tokens=LENGTH, prefill_chunk_size=5, states=states)
        handle = executor.prefill(prompt(ids, logits="none")).kv_cache
        mend = failing(executor, after)
        again = prompt(ids[12:], kv_cache=at(handle, 12))
        failure = error_of(lambda: executor.prefill(again))  # noqa: B023
        mend()
        assert "failed while computing" in str(failure)
        check(executor)
        assert handle.cache.lengths == (length,)
        assert handle.cache.token_ids(0).tolist() == ids[:length]  # type: ignore[union-attr]
        assert at(handle, length).is_valid
        assert not at(handle, length + 1).is_valid
        if states == 2:
            # One is the row's, and several forwards that can be undone need two more.
            hybrid.close(executor.decode(token(handle.cache, ids[length])).logits, length)
            continue
        hybrid.close(executor.prefill(prompt(ids[length:], kv_cache=handle.cache)).logits[0], length)


def test_cancelling_while_tokens_run_again_changes_nothing(hybrid: Hybrid) -> None:
    ids = hybrid.tokens
    for before_forward, length in ((1, 9), (2, 9), (3, 10), (4, 14)):
        executor = make_executor(hybrid, prefill_chunk_size=4)
        handle = executor.prefill(prompt(ids[:9], logits="none")).kv_cache
        execute, count = executor.pool.runner.execute, [0]

        def cancelling(
            step: Any,
            *more: Any,
            execute: Any = execute,
            count: Any = count,
            executor: Any = executor,
            limit: int = before_forward,
        ) -> Any:
            if step.chunks:
                count[0] += 1
                if count[0] == limit:
                    executor.cancel()
            return execute(step, *more)

        executor.pool.runner.execute = cancelling  # type: ignore[method-assign]
        with pytest.raises(Cancelled):
            executor.prefill(prompt(ids[6:], kv_cache=at(handle, 6)))
        executor.pool.runner.execute = execute  # type: ignore[method-assign]
        check(executor)
        # Two forwards run tokens again; whole chunks that came after them stay.
        assert handle.cache.lengths == (length,)
        assert executor.metrics().replayed_tokens == 0
        hybrid.close(executor.decode(token(handle.cache, ids[length])).logits, length)


def test_shutdown_and_threads(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    ids = hybrid.tokens
    start = executor.prefill(prompt(ids[:10], logits="none")).kv_cache
    copies = [start.clone_handle() for _ in range(3)]
    errors: list[BaseException] = []

    def work(handle: Handle) -> None:
        try:
            for n in (4, 7, 2):
                short = executor.truncate_kv(handle.cache, n)
                hybrid.close(executor.prefill(prompt(ids[n:10], kv_cache=short)).logits[0], n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check(executor)
    executor.shutdown()
    with pytest.raises(FailedPrecondition):
        executor.truncate_kv(start, 3)
    assert executor.metrics().replayed_tokens > 0


# -- what is refused by name -----------------------------------------------------------------------


def test_what_recurrent_layers_cannot_do_is_refused_before_compute(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    face, table = LlmExecutor(executor), executor.capabilities()
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:6], logits="none")).kv_cache
    every_block_attends = hybrid.kind == "falcon-h1"
    assert (table.why_not("attention weights") is None) == every_block_attends
    if every_block_attends:
        weights = executor.prefill(prompt(ids, output_attentions=True)).attention_weights
        assert weights is not None
        assert len(weights) == executor.info().num_layers
        for layer in weights:
            torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
        verified = executor.forward_verify([token(handle, one, output_attentions=True) for one in ids[6:9]])
        for index, one in enumerate(verified):
            assert one.attention_weights is not None
            torch.testing.assert_close(one.attention_weights[0][0, :, 0], weights[0][0, :, 6 + index, : 7 + index])
    else:
        for call in (
            lambda: executor.prefill(prompt(ids, output_attentions=True)),
            lambda: executor.decode(token(handle, 1, output_attentions=True)),
            lambda: executor.forward_verify([token(handle, 1, output_attentions=True)] * 2),
        ):
            with (
                untouched(executor, handle.cache),
                pytest.raises(Unsupported, match=r"attention weights: .* no K and V of their own"),
            ):
                call()
    image = torch.randn(2, executor.info().hidden_size)
    for bidirectional in (True, False):
        given = ExecutorInputs(
            text=TextData(token_ids=torch.tensor([[5, -1, -1, 7]])),
            vision=VisionData(embeddings=image, bidirectional=bidirectional),
        )
        cache = face.create_kv_cache()
        if bidirectional:
            with (
                untouched(executor, handle.cache),
                pytest.raises(Unsupported, match=r"bidirectional: recurrent layers"),
            ):
                face.prefill(given, cache)
            assert cache.lengths == (0,)
            continue
        face.prefill(given, cache)
        found = face.step(inputs([9]), cache)
        # What stood at the placeholders is gone.
        for _ in range(3):
            found = face.step(inputs([9]), cache)
        for position in (2, 3):
            with untouched(executor, cache), pytest.raises(FailedPrecondition, match="placeholders"):
                face.step(inputs([9], at=position), cache)
        assert cache.lengths == (8,)
        assert found.shape == (1, 1, executor.info().vocab_size)
        # Behind them, from the mark at the end of the prompt, it can be gone back.
        face.step(inputs([9], at=6), cache)
    assert "recurrent" in (table.why_not("vision bidirectional") or "")
    assert "recurrent" in table.layer_kinds
    assert ("full" in table.layer_kinds) == hybrid.has_attention
    assert (AttentionMechanism.PAGED in table.attention_mechanisms) == hybrid.has_attention
    known = [layer for layer, spec in enumerate(hybrid.model.layer_specs) if spec.kind == "recurrent"]
    with pytest.raises(Unsupported, match=f"layer {known[0]} keeps no K and V"):
        handle.key_cache(known[0])
    with pytest.raises(InvalidArgument, match="does not exist"):
        handle.key_cache(len(hybrid.model.layer_specs))
    assert not handle.cache.contains(f"kv_cache_k_{known[0]}")
    assert handle.num_layers == len(hybrid.model.layer_specs)
    if hybrid.has_attention:
        layer = next(layer for layer, spec in enumerate(hybrid.model.layer_specs) if spec.kind == "full")
        assert handle.key_cache(layer).shape == (1, 6, handle.num_heads, handle.head_dim)
        assert handle.cache.contains(f"kv_cache_k_{layer}")
    else:
        assert (handle.num_heads, handle.head_dim, executor.info().num_heads) == (0, 0, 0)
        with pytest.raises(Unsupported, match="block_table"):
            _ = handle.block_table
        assert table.why_not("block_table") is not None
        with pytest.raises(Unsupported, match="window 8"):
            make_executor(hybrid, window=8)


def test_hidden_states(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, prefill_chunk_size=5)
    ids = hybrid.tokens
    whole = executor.prefill(prompt(ids, output_hidden_states=True))
    assert whole.hidden_states is not None
    assert len(whole.hidden_states) == executor.info().num_layers
    verified = executor.forward_verify(
        [token(at(whole.kv_cache, 9), one, output_hidden_states=True) for one in ids[9:12]]  # type: ignore[arg-type]
    )
    last = whole.hidden_states[-1][0]
    # As far as two runs' logits may be apart, relative to the largest value.
    apart = 2 * float(hybrid.bound) / float(hybrid.expected_TV.abs().max()) * float(last.abs().max())
    for index, one in enumerate(verified):
        assert one.hidden_state is not None
        assert float((one.hidden_state[0] - last[9 + index]).abs().max()) <= apart


# -- reports ---------------------------------------------------------------------------------------


def test_states_are_counted_as_memory(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, tokens=64, states=10)
    one = bytes_per_state([spec for spec in hybrid.model.layer_specs if spec.kind == "recurrent"])  # type: ignore[misc]
    weights = hybrid.model.parameter_bytes
    pages = executor.pool.facts.page_bytes
    usage = executor.status().memory_usage
    assert usage.used_bytes == weights
    assert usage.allocated_bytes == weights + 10 * one + 16 * sum(pages)
    handle = executor.prefill(prompt(hybrid.tokens[:5], logits="none")).kv_cache
    # The mark is the present state.
    assert executor.status().memory_usage.used_bytes == weights + one + 2 * sum(pages)
    assert handle.stats.memory_bytes == one + 2 * sum(pages)
    assert handle.stats.tokens_stored == 5
    executor.decode(token(handle, 1))
    assert executor.status().memory_usage.used_bytes == weights + 2 * one + 2 * sum(pages)
    assert executor.capabilities().memory_requirements.recurrent_memory_per_row == one
    executor.release_cache(handle.cache_id)
    assert executor.status().memory_usage.used_bytes == weights
    assert [n for n in range(12) if executor.supports_batch_size(n)] == list(range(1, 11))
    assert executor.optimal_batch_size() == 10


@pytest.mark.product(12)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 7), (4, 96), (2, 100), (8, 16), (8, 1)])
def test_the_memory_estimate_is_within_its_bound(hybrid: Hybrid, rows: int, tokens: int) -> None:
    executor = make_executor(hybrid, tokens=4096)
    executor.warmup()
    assert executor.pool.state.empty()
    needs, layers = executor.capabilities().memory_requirements, executor.info().num_layers
    held: list[Any] = []
    ids = [some_ids(tokens, row) for row in range(rows)]
    peak = peak_of(executor, lambda: held.append(executor.prefill(prompt(*ids))))
    slack = rows * (-tokens % PAGE) * needs.kv_cache_memory_per_token * layers
    limit = needs.calculate_total_memory(rows, tokens, layers) + slack
    assert 0.75 * peak <= limit <= 1.25 * peak + few_rows(hybrid.model.vocab_size)
    assert needs.calculate_total_memory(rows, 0, layers) == needs.parameter_memory + needs.overhead_memory


def test_warmup_with_few_slots(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, states=3)
    handle = executor.prefill(prompt([1, 2])).kv_cache
    executor.warmup()
    assert executor.optimal_batch_size() == 1
    assert handle.is_valid
    full = make_executor(hybrid, states=1)
    held = full.prefill(prompt([1])).kv_cache
    full.warmup()
    assert held.is_valid
    check(full)


# -- beside an engine ------------------------------------------------------------------------------


@pytest.mark.turns(6)
@pytest.mark.parametrize("kind", RECURRENT_KINDS)
def test_an_executor_beside_an_engine(kind: str, tmp_path: Any) -> None:
    from tests.executor.recurrent import make_hybrid

    hybrid = make_hybrid(kind, tmp_path / kind)
    llm = LLM(tmp_path / kind, dtype="float32", kv_cache_memory="4MiB")
    assert llm.capabilities()["executor"].layer_kinds == llm.executor.capabilities().layer_kinds
    assert llm.status()["executor"].is_ready
    executor, ids = llm.executor, hybrid.tokens
    handle = executor.prefill(prompt(ids[:15], logits="none")).kv_cache
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    text = list(llm.generate(ids[:10], greedy)[0].outputs[0].token_ids)
    hybrid.close(executor.decode(token(at(handle, 8), ids[8])).logits, 8)
    face = LlmExecutor(executor)
    cache = face.create_kv_cache()
    face.prefill(inputs(ids[:9]), cache)
    assert face.sample_tokens(4, inputs([ids[9]]), cache) == text
    assert list(llm.generate(ids[:10], greedy)[0].outputs[0].token_ids) == text
    check(executor)
    llm.close()


def test_a_factory_makes_executors_with_states(hybrid: Hybrid, tmp_path: Any) -> None:
    hybrid.peer.save_pretrained(tmp_path)
    config = ExecutorConfig(
        model_info=str(tmp_path), device="cpu", dtype="float32", max_batch_size=4, max_sequence_length=64
    )
    executor = EXECUTOR_FACTORY.create_executor(config)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids, logits="none")).kv_cache
    hybrid.close(executor.decode(token(executor.truncate_kv(handle, 7), ids[7])).logits, 7)
    assert executor.supports_batch_size(4)
    assert executor.info().num_layers == len(hybrid.model.blocks)
    executor.shutdown()
