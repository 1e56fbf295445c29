"""Every verb of the executors over models with recurrent layers, at every position, against
transformers on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.executor.conftest import forget_tokens, inputs
from tests.executor.recurrent import (
    LENGTH,
    Hybrid,
    check,
    cut_at,
    fresh,
    make_executor,
    prompt,
    token,
)
from tests.test_parity import VOCAB

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.sampling_params import SamplingParams
from quire.executor.executor import Executor
from quire.executor.handle import Handle
from quire.executor.llm_executor import LlmExecutor
from quire.executor.request_sampling import ParamsSampling


def replayed(executor: Executor, make: Callable[[], Any]) -> tuple[Any, int]:
    before = executor.metrics().replayed_tokens
    return make(), executor.metrics().replayed_tokens - before


def at(handle: Handle, length: int) -> Handle:
    """The handle that the cache had at this length; nothing was cut since."""
    return Handle(handle.cache, (length,), handle.revision)


@pytest.mark.turns(6)
@pytest.mark.parametrize("chunk", [0, 1, 7])
@pytest.mark.parametrize("interval", [0, 8])
def test_prompts_in_chunks_decodes_and_verifies(hybrid: Hybrid, chunk: int, interval: int) -> None:
    executor = make_executor(hybrid, prefill_chunk_size=chunk, interval=interval)
    ids = hybrid.tokens
    output = executor.prefill(prompt(ids[:13]))
    hybrid.close(output.logits[0], 0)
    assert torch.equal(executor.forward(torch.tensor([ids[:13]]))[0], output.logits[0])
    handle = output.kv_cache
    for position in range(13, 17):
        found = executor.decode(token(handle, ids[position]))
        hybrid.close(found.logits, position)
        handle = found.kv_cache
    found_all = executor.forward_verify([token(handle, one) for one in ids[17:]])
    hybrid.close(torch.cat([found.logits for found in found_all]), 17)
    assert [found.kv_cache.sequence_length for found in found_all] == list(range(18, LENGTH + 1))
    assert executor.metrics().replayed_tokens == 0
    check(executor)


@pytest.mark.sweep
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_verb_goes_back_to_every_position(hybrid: Hybrid, stride: int) -> None:
    executor = make_executor(hybrid)
    ids = hybrid.tokens
    for n in range(0, LENGTH, stride):
        handle = cut_at(executor, hybrid, n)
        assert handle.sequence_length == n
        hybrid.close(executor.decode(token(handle, ids[n])).logits, n)

        full = executor.prefill(prompt(ids, logits="none")).kv_cache
        copy = at(full, n).clone_handle()
        assert copy.sequence_length == n
        assert copy.cache.token_ids(0).tolist() == ids[:n]
        hybrid.close(executor.decode(token(copy, ids[n])).logits, n)
        hybrid.close(executor.prefill(prompt(ids[n:], kv_cache=at(full, n))).logits[0], n)

        full = executor.prefill(prompt(ids, logits="none")).kv_cache
        found = executor.forward_verify([token(at(full, n), one) for one in ids[n:]])
        hybrid.close(torch.cat([one.logits for one in found]), n)

        full = executor.prefill(prompt(ids, logits="none")).kv_cache
        tail = ids[n : n + 3]
        nodes = [tail[0], (tail[0] + 1) % VOCAB, *tail[1:]]
        tree = executor.forward_verify([token(at(full, n), one) for one in nodes], parents=[-1, 0, 0, 2][: len(nodes)])
        assert full.cache.lengths == (LENGTH,)
        hybrid.close(torch.cat([tree[0].logits, *(one.logits for one in tree[2:])]), n)
        kept = executor.commit_path(tree[-1].kv_cache)
        if len(tail) > 1:
            end = n + len(tail)
            assert kept.sequence_length == end
            if end < LENGTH:
                hybrid.close(executor.decode(token(kept, ids[end])).logits, end)

        full = executor.prefill(prompt(ids, logits="none")).kv_cache
        drafts = [*ids[n + 1 : n + 3]]
        spoken = executor.speculative_decode(token(at(full, n), ids[n]), drafts, 0.0)
        assert spoken.accepted_tokens == tuple(drafts)
        hybrid.close(spoken.next_logits, n + len(drafts))
        assert spoken.kv_cache.sequence_length == n + 1 + len(drafts)
    check(executor)


@pytest.mark.slow
@pytest.mark.sweep
def test_the_other_face_goes_back_to_every_position(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    face, ids = LlmExecutor(executor), hybrid.tokens
    cache = face.create_kv_cache(batch_size=2, capacity=2 * LENGTH)
    other = list(reversed(ids))
    expected = {n: int(fresh(hybrid, other[:n]).argmax()) for n in range(1, LENGTH + 1)}
    for n in range(LENGTH):
        m = LENGTH - 1 - n
        face.prefill(inputs(ids, other, at=0), cache)
        found_B1V = face.step(inputs([ids[n]], [other[m]], at=(n, m)), cache)
        hybrid.close(found_B1V[0], n)
        assert int(found_B1V[1, 0].argmax()) == expected[m + 1]
        assert cache.lengths == (n + 1, m + 1)
    row = face.create_kv_cache(capacity=2 * LENGTH)
    face.prefill(inputs(ids), row)
    steps = face.sample_tokens(4, inputs([ids[9]], at=9), row)
    greedy = list(ids[:10])
    for _ in range(4):
        greedy.append(int(fresh(hybrid, greedy).argmax()))
    assert steps == greedy[10:]
    assert row.lengths == (13,)
    check(executor)


def test_a_verified_chain_is_cut_anywhere_without_running_anything(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    ids = hybrid.tokens
    for kept in range(7):
        handle = executor.prefill(prompt(ids[:11], logits="none")).kv_cache
        verified = executor.forward_verify([token(handle, one) for one in ids[11:17]])
        assert handle.cache.lengths == (17,)
        short, again = replayed(executor, lambda: executor.truncate_kv(verified[-1].kv_cache, 11 + kept))  # noqa: B023
        assert again == 0
        assert short.sequence_length == 11 + kept
        for index, one in enumerate(verified):
            assert one.kv_cache.is_valid == (index < kept)
        assert handle.cache.token_ids(0).tolist() == ids[: 11 + kept]
        hybrid.close(executor.decode(token(short, ids[11 + kept])).logits, 11 + kept)
        check(executor)


@pytest.mark.turns(6)
def test_a_verified_chain_is_an_ordinary_one_for_every_other_verb(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    ids = hybrid.tokens

    def chain() -> Handle:
        handle = executor.prefill(prompt(ids[:11], logits="none")).kv_cache
        return executor.forward_verify([token(handle, one) for one in ids[11:17]])[-1].kv_cache

    def goes_on(handle: Any) -> None:
        assert handle.sequence_length == 17
        hybrid.close(executor.decode(token(handle, ids[17])).logits, 17)

    goes_on(chain())
    goes_on(chain().clone_handle())
    hybrid.close(executor.decode(token(at(chain(), 14), ids[14])).logits, 14)
    hybrid.close(executor.decode(token(at(chain(), 14).clone_handle(), ids[14])).logits, 14)
    hybrid.close(executor.decode(token(executor.truncate_kv(chain(), 5), ids[5])).logits, 5)
    both = chain()
    again = executor.forward_verify([token(both, one) for one in ids[17:20]])
    hybrid.close(torch.cat([one.logits for one in again]), 17)
    target = executor.create_kv_cache(batch_size=2)
    target.broadcast_and_copy_from(chain().cache)
    assert target.lengths == (17, 17)
    hybrid.close(executor.decode(token(target, ids[17], ids[17])).logits[1:], 17)
    loaded = executor.create_kv_cache()
    loaded.load(chain().cache.serialize())
    assert loaded.lengths == (17,)
    hybrid.close(executor.decode(token(loaded, ids[17])).logits, 17)
    cleared = chain().cache
    cleared.clear()
    assert cleared.lengths == (0,)
    released = chain()
    assert released.stats.memory_bytes > 0
    executor.release_cache(released.cache_id)
    if hybrid.has_attention:
        held = chain()
        assert held.block_table.sequence_length == 17
    check(executor)


def test_going_back_to_the_end_of_a_prompt_runs_nothing(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    ids = hybrid.tokens
    start = executor.prefill(prompt(ids[:12], logits="none")).kv_cache
    for _ in range(3):
        handle = start
        for position in range(12, 18):
            handle = executor.decode(token(handle, ids[position])).kv_cache
        found, again = replayed(executor, lambda: executor.decode(token(start, ids[12])))
        assert again == 0
        hybrid.close(found.logits, 12)
    # A later piece of the prompt takes the mark with it.
    handle = executor.prefill(prompt(ids[13:18], kv_cache=found.kv_cache)).kv_cache
    for position in range(18, 22):
        handle = executor.decode(token(handle, ids[position])).kv_cache
    assert replayed(executor, lambda: executor.truncate_kv(handle, 18))[1] == 0
    assert replayed(executor, lambda: executor.truncate_kv(handle.cache, 13))[1] == 13
    check(executor)


def test_copies_selections_and_batches_share_states(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    face, ids = LlmExecutor(executor), hybrid.tokens
    one = face.create_kv_cache(capacity=64)
    face.prefill(inputs(ids[:15]), one)
    used = executor.pool.state.parts.recurrent.table.pool.num_used
    three = face.create_kv_cache(batch_size=3, capacity=64)
    three.broadcast_and_copy_from(one)
    deep = three.deep_copy()
    assert executor.pool.state.parts.recurrent.table.pool.num_used == used
    found = face.step(inputs([ids[15]], [ids[4]], [ids[15]], at=(15, 4, 15)), three)
    hybrid.close(found[0], 15)
    hybrid.close(found[1], 4)
    hybrid.close(found[2], 15)
    assert (one.lengths, deep.lengths, three.lengths) == ((15,), (15,) * 3, (16, 5, 16))
    one.select_and_copy_from(three, 1)
    hybrid.close(face.step(inputs([ids[5]]), one)[0], 5)
    found = face.step(inputs(*[[ids[15]]] * 3), deep)
    hybrid.close(found[1], 15)
    left = executor.prefill(prompt(ids[:6], logits="none")).kv_cache
    right = executor.prefill(prompt(ids[:10], logits="none")).kv_cache
    outputs = executor.batch_decode([token(left, ids[6]), token(at(right, 3), ids[3])])
    hybrid.close(outputs[0].logits, 6)
    hybrid.close(outputs[1].logits, 3)
    outputs = executor.batch_prefill([prompt(ids), prompt(ids[7:], kv_cache=outputs[0].kv_cache), prompt(ids[:1])])
    for output, start in zip(outputs, (0, 7, 0), strict=True):
        hybrid.close(output.logits[0], start)
    check(executor)


@pytest.mark.sweep
def test_a_loaded_cache_goes_back_to_every_position(hybrid: Hybrid) -> None:
    executor, other = make_executor(hybrid, interval=8), make_executor(hybrid)
    ids = hybrid.tokens
    data = executor.prefill(prompt(ids[:20], logits="none")).kv_cache.cache.serialize()
    for n in range(20):
        for place in (executor, other):
            cache = place.create_kv_cache()
            cache.load(data)
            if n == 0:
                assert cache.serialize() == data
                hybrid.close(place.decode(token(cache, ids[20])).logits, 20)
                cache.load(data)
            short, again = replayed(place, lambda: place.truncate_kv(cache, n))  # noqa: B023
            assert again == n % 8
            hybrid.close(place.decode(token(short, ids[n])).logits, n)
    check(executor)
    check(other)


def test_where_tokens_are_not_known_only_kept_positions_are_reachable(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, interval=8)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:20], logits="none")).kv_cache
    cache, copy = handle.cache, handle.clone_handle()
    forget_tokens(cache.rows[0])
    for n in (1, 7, 9, 19):
        for call in (
            lambda: executor.truncate_kv(handle, n),  # noqa: B023
            lambda: executor.decode(token(at(handle, n), 1)),  # noqa: B023
            lambda: executor.forward_verify([token(at(handle, n), 1)] * 3),  # noqa: B023
            lambda: executor.forward_verify([token(at(handle, n), 1)] * 2, parents=[-1, -1]),  # noqa: B023
            lambda: executor.speculative_decode(token(at(handle, n), 1), [2], 0.0),  # noqa: B023
            lambda: executor.prefill(prompt([1, 2], kv_cache=at(handle, n))),  # noqa: B023
            lambda: executor.batch_decode([token(copy, 1), token(at(handle, n), 1)]),  # noqa: B023
            lambda: at(handle, n).clone_handle(),  # noqa: B023
            lambda: LlmExecutor(executor).step(inputs([1], at=n), cache),  # noqa: B023
        ):
            lengths = cache.lengths, copy.cache.lengths, executor.metrics().to_dict()
            with pytest.raises(FailedPrecondition, match=rf"position {n} is reachable only.*kept at 0, 8, 16, 20"):
                call()
            assert (cache.lengths, copy.cache.lengths, executor.metrics().to_dict()) == lengths
            check(executor)
    short = executor.truncate_kv(handle, 16)
    hybrid.close(executor.decode(token(short, ids[16])).logits, 16)


def test_bad_positions_are_refused_before_anything(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    handle = cut_at(executor, hybrid, 9)
    copy = handle.clone_handle()
    for length in (-1, 10, 99):
        with pytest.raises(InvalidArgument):
            executor.truncate_kv(handle, length)
    with pytest.raises(InvalidArgument, match="token id"):
        executor.decode(token(at(handle, 4), VOCAB))
    assert handle.cache.lengths == (9,)
    assert copy.is_valid
    later = executor.decode(token(handle, 5)).kv_cache
    executor.truncate_kv(later, 3)
    assert not handle.is_valid
    with pytest.raises(InvalidArgument, match="stale"):
        executor.decode(token(handle, 1))
    check(executor)


@pytest.mark.turns(6)
@pytest.mark.parametrize("states", [64, 4])
def test_exact_speculation_draws_what_a_sampler_would(hybrid: Hybrid, states: int) -> None:
    """Equal with room for a state behind each draft and without."""
    ids = hybrid.tokens
    found = []
    for slots in (64, states):
        executor = make_executor(hybrid, states=slots)
        handle = executor.prefill(prompt(ids[:10], logits="none")).kv_cache
        draft_kV = torch.full((3, VOCAB), 1.0 / VOCAB)
        for seed in range(4):
            sampling = ParamsSampling(SamplingParams(temperature=1.0, seed=seed), ids[:11], vocab_size=VOCAB)
            spoken = executor.speculative_decode(
                token(at(handle, 10), ids[10]), ids[11:14], 0.5, draft_probabilities=draft_kV, sampling=sampling
            )
            length = 11 + spoken.acceptance_count
            assert spoken.kv_cache.sequence_length == length
            assert handle.cache.token_ids(0).tolist() == ids[:length]
            hybrid.close(spoken.next_logits, length - 1)
            hybrid.close(executor.decode(token(spoken.kv_cache, ids[length])).logits, length)
            found.append((spoken.accepted_tokens, spoken.next_probs))
            check(executor)
        if slots == 64:
            assert executor.metrics().replayed_tokens == 0
    for (left, probs), (right, others) in zip(found[:4], found[4:], strict=True):
        assert left == right
        # Two runs, in each of which a logit and the log-sum-exp may be off by the bound.
        torch.testing.assert_close(
            probs, others, rtol=math.expm1(4 * float(hybrid.bound)), atol=torch.finfo(torch.float32).eps
        )


def test_trees_of_drafts(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid)
    ids = hybrid.tokens
    handle = executor.prefill(prompt(ids[:10], logits="none")).kv_cache
    best = int(fresh(hybrid, ids[:11]).argmax())
    after = int(fresh(hybrid, [*ids[:11], best]).argmax())
    drafts = [(best + 1) % VOCAB, best, after, (after + 1) % VOCAB]
    spoken = executor.speculative_decode(token(handle, ids[10]), drafts, 1.0, draft_parents=[-1, -1, 1, 1])
    assert spoken.accepted_tokens == (best, after)
    expected = fresh(hybrid, [*ids[:11], best, after])
    assert int(spoken.next_logits.argmax()) == int(expected.argmax())
    assert spoken.kv_cache.sequence_length == 13
    following = executor.decode(token(spoken.kv_cache, 5)).logits[0]
    expected = fresh(hybrid, [*ids[:11], best, after, 5])
    assert float((following - expected).abs().max()) / 2 <= hybrid.bound
    check(executor)


def test_equal_beginnings_share_states_where_one_is_kept(hybrid: Hybrid) -> None:
    executor = make_executor(hybrid, share_prefixes=True)
    ids = hybrid.tokens
    first = executor.prefill(prompt(ids[:12], logits="none")).kv_cache
    run = executor.pool.runner.execute
    counted = [0]

    def count(step: Any, *more: Any) -> Any:
        counted[0] += sum(len(chunk.tokens) for chunk in step.chunks)
        return run(step, *more)

    executor.pool.runner.execute = count  # type: ignore[method-assign]
    hybrid.close(executor.prefill(prompt(ids[:20], logits="last")).logits[0], 19)
    assert counted == [8]
    # Token 11 leads to no state that is kept.
    hybrid.close(executor.prefill(prompt([*ids[:12]], logits="last")).logits[0], 11)
    assert counted == [8 + 12]
    assert first.is_valid
    check(executor)
