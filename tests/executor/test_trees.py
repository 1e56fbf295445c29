"""Token trees: each root-to-leaf path equals that path run alone, and a committed one equals having
been decoded.
"""

from __future__ import annotations

import gc
import random

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
from tests.executor.test_llm_executor import greedy

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted
from quire.base.sampling_params import SamplingParams
from quire.branches.extension import path_to
from quire.contracts.executor import DecodeInput, DecodeOutput
from quire.executor.acceptance import accept_by_threshold, rejection_sample
from quire.executor.executor import Executor
from quire.executor.request_sampling import ParamsSampling, draw_from

PARENTS = (-1, 0, 0, 1, 1, 2, -1, 6)


def verify(executor: Executor, handle: object, ids: list[int], parents: tuple[int, ...]) -> list[DecodeOutput]:
    return executor.forward_verify([token(handle, i) for i in ids], parents=parents)


def path_ids(ids: list[int], parents: tuple[int, ...], node: int) -> list[int]:
    return [ids[index] for index in path_to(parents, node)]


def test_each_path_equals_that_path_alone(tiny: Tiny, executor: Executor) -> None:
    past, ids = some_ids(6), some_ids(len(PARENTS), 1)
    start = executor.prefill(prompt(past)).kv_cache
    cache = start.cache
    outputs = verify(executor, start, ids, PARENTS)
    assert [output.kv_cache.sequence_length for output in outputs] == [7, 8, 8, 9, 9, 9, 7, 8]
    for node, output in enumerate(outputs):
        assert_close(output.logits[0], tiny.logits([*past, *path_ids(ids, PARENTS, node)])[-1])
    assert (cache.length, cache.token_ids(0).tolist()) == (6, past), "nothing is kept yet"
    assert start.is_valid
    kept = executor.commit_path(outputs[4].kv_cache)
    run = [*past, *path_ids(ids, PARENTS, 4)]
    assert (kept.sequence_length, kept.cache.token_ids(0).tolist()) == (9, run)
    for position in range(3):
        output = executor.decode(token(kept, position))
        run.append(position)
        assert_close(output.logits[0], tiny.logits(run)[-1])
        kept = output.kv_cache
    assert start.is_valid, "an older handle is a rewind, as ever"
    assert not any(output.kv_cache.is_valid for output in outputs)
    assert executor.forward_verify([], parents=()) == []


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_random_trees(tinies: dict[str, Tiny], data: st.DataObject) -> None:
    tiny = tinies["Llama"]
    executor = make_executor(tiny)
    run = some_ids(data.draw(st.integers(0, 9)))
    handle = executor.prefill(prompt(run)).kv_cache if run else executor.create_kv_cache()
    for _ in range(3):
        size = data.draw(st.integers(1, 9))
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(size))
        ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
        outputs = verify(executor, handle, ids, parents)
        node = data.draw(st.integers(0, size - 1))
        assert_close(outputs[node].logits[0], tiny.logits([*run, *path_ids(ids, parents, node)])[-1])
        if data.draw(st.booleans()):
            handle = executor.commit_path(outputs[node].kv_cache)
            run += path_ids(ids, parents, node)
            fork = handle.clone_handle()
            assert_close(executor.decode(token(fork, 3)).logits[0], tiny.logits([*run, 3])[-1])
        executor.pool.state.check()
    assert_close(executor.decode(token(handle, 9)).logits[0], tiny.logits([*run, 9])[-1])


def test_what_drops_a_tree(llama: Tiny, ex: Executor) -> None:
    ids = some_ids(5)

    def fresh() -> tuple[object, list[DecodeOutput]]:
        start = ex.prefill(prompt(ids)).kv_cache
        return start, verify(ex, start, [1, 2, 3], (-1, 0, 0))

    for change in (
        lambda start: ex.decode(token(start, 4)),
        lambda start: ex.prefill(prompt([4, 5], kv_cache=start)),
        lambda start: ex.truncate_kv(start, 2),
        lambda start: start.cache.clear(),
        lambda start: start.cache.load(start.cache.serialize()),
        lambda start: verify(ex, start, [7], (-1,)),
        lambda start: ex.speculative_decode(token(start, 4), [5], 0.0),
    ):
        start, outputs = fresh()
        leaf = outputs[2].kv_cache
        assert leaf.is_valid
        change(start)
        assert not leaf.is_valid
        with pytest.raises(InvalidArgument, match="committed or dropped"):
            ex.commit_path(leaf)
    # What changes nothing leaves it: reading, copies, a refused call, a truncate to the same
    # length.
    start, outputs = fresh()
    copy = start.clone_handle()
    start.key_cache(0)
    ex.truncate_kv(start, 5)
    with pytest.raises(InvalidArgument):
        ex.decode(token(start, VOCAB))
    assert_close(ex.decode(token(copy, 8)).logits[0], llama.logits([*ids, 8])[-1])
    kept = ex.commit_path(outputs[1].kv_cache)
    assert_close(ex.decode(token(kept, 8)).logits[0], llama.logits([*ids, 1, 2, 8])[-1])
    ex.release_cache(start.cache_id)
    with pytest.raises(NotFound):
        ex.commit_path(outputs[1].kv_cache)


def test_pages_of_trees_come_back(llama: Tiny) -> None:
    ex = make_executor(llama)
    start = ex.prefill(prompt(some_ids(6))).kv_cache
    used = ex.pool.state.num_used_pages
    verify(ex, start, some_ids(20), tuple(range(-1, 19)))
    assert ex.pool.state.num_used_pages > used
    ex.truncate_kv(start, 5)
    assert ex.pool.state.num_used_pages == used
    outputs = verify(ex, start.cache, some_ids(20), tuple(range(-1, 19)))
    ex.release_cache(start.cache_id)
    assert ex.pool.state.num_used_pages == 0
    assert not outputs[0].kv_cache.is_valid
    start = ex.prefill(prompt(some_ids(6))).kv_cache
    verify(ex, start, [1], (-1,))
    del start, outputs
    gc.collect()
    assert ex.pool.state.num_used_pages == 0
    assert ex.pool.state.empty()


def test_a_tree_behind_a_rewind(llama: Tiny, ex: Executor) -> None:
    """The tree may begin below the cache's end; the end is only given up when a path is kept."""
    ids = some_ids(9)
    short = ex.prefill(prompt(ids[:4])).kv_cache
    full = ex.prefill(prompt(ids[4:], kv_cache=short)).kv_cache
    outputs = verify(ex, short, [1, 2], (-1, 0))
    assert full.is_valid
    assert_close(ex.decode(token(full.clone_handle(), 3)).logits[0], llama.logits([*ids, 3])[-1])
    kept = ex.commit_path(outputs[1].kv_cache)
    assert not full.is_valid
    assert short.is_valid
    assert_close(ex.decode(token(kept, 3)).logits[0], llama.logits([*ids[:4], 1, 2, 3])[-1])


def test_positions_weights_and_states_of_nodes(llama: Tiny, ex: Executor) -> None:
    start = ex.prefill(prompt(some_ids(5))).kv_cache
    parents, depths = (-1, 0, 0, 2), (0, 1, 1, 2)
    inputs = [
        token(start, i, position_ids=torch.tensor([[5 + depth]]), output_attentions=True, output_hidden_states=True)
        for i, depth in zip((1, 2, 3, 4), depths, strict=True)
    ]
    outputs = ex.forward_verify(inputs, parents=parents)
    for node, output in enumerate(outputs):
        seen = [*range(5), *(5 + index for index in path_to(parents, node))]
        assert output.attention_weights[0].shape == (1, 4, 1, 9)
        assert (output.attention_weights[0][0, 0, 0] > 0).nonzero()[:, 0].tolist() == seen
    chain = start.clone_handle()
    alone = ex.forward_verify([token(chain, i, output_hidden_states=True) for i in (1, 3, 4)])
    assert_close(outputs[3].hidden_state, alone[2].hidden_state)


def test_refusals(llama: Tiny, ex: Executor) -> None:
    start = ex.prefill(prompt(some_ids(5))).kv_cache
    cache = start.cache
    three = [token(start, i) for i in (1, 2, 3)]
    for parents in ((-1, 0), (-1, 1, 0), (-1, 0, 2), (-2, 0, 0), (-1, 0, 0.0), (-1, 0, True), "abc", 5, (0, -1, -1)):
        with refused(InvalidArgument, ex, cache, match="parent"):
            ex.forward_verify(three, parents=parents)
        with refused(InvalidArgument, ex, cache, match="parent"):
            ex.speculative_decode(token(start, 1), [1, 2, 3], 0.5, draft_parents=parents)
    clone = start.clone_handle()
    with refused(InvalidArgument, ex, cache, match="same starting handle"):
        ex.forward_verify([*three[:2], token(clone, 3)], parents=(-1, 0, 0))
    leaf = ex.forward_verify(three, parents=(-1, 0, 0))[2].kv_cache
    for call in (
        lambda: ex.decode(token(leaf, 1)),
        lambda: ex.prefill(prompt([1], kv_cache=leaf)),
        lambda: ex.truncate_kv(leaf, 1),
        lambda: ex.forward_verify([token(leaf, 1)]),
        lambda: leaf.key_cache(0),
        lambda: leaf.clone_handle(),
        lambda: leaf.block_table,
    ):
        with refused(FailedPrecondition, ex, cache, match="call commit_path"):
            call()
    other = make_executor(llama)
    with pytest.raises(InvalidArgument, match="another executor"):
        other.commit_path(leaf)
    for bad in (start, cache, None):
        with refused(InvalidArgument, ex, cache, match="commit_path"):
            ex.commit_path(bad)
    ex.shutdown()
    with pytest.raises(FailedPrecondition, match="shut down"):
        ex.commit_path(leaf)


def test_room_is_that_of_the_deepest_path(llama: Tiny) -> None:
    ex = make_executor(llama, tokens=8 * PAGE)
    cache = ex.create_kv_cache(capacity=7)
    ex.prefill(prompt(some_ids(5), kv_cache=cache))
    wide = verify(ex, cache, [1, 2, 3, 4], (-1, 0, 0, 0))
    with refused(ResourceExhausted, ex, cache, match="KV cache full"):
        verify(ex, cache, [1, 2, 3], (-1, 0, 1))
    assert wide[3].kv_cache.is_valid, "a refused tree does not drop another"
    with refused(ResourceExhausted, ex, cache, match="pages"):
        verify(ex, cache, [1] * 40, (-1,) * 40)
    long = ex.create_kv_cache()
    with refused(ResourceExhausted, ex, cache, match="maximum"):
        verify(ex, long, [1] * (CONTEXT + 1), tuple(range(-1, CONTEXT)))


def test_an_error_in_compute_leaves_everything(llama: Tiny, ex: Executor) -> None:
    start = ex.prefill(prompt(some_ids(5))).kv_cache
    earlier = verify(ex, start, [1, 2], (-1, 0))
    head = ex.pool.runner.model.head

    def boom(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")

    ex.pool.runner.model.head = boom
    try:
        with refused(QuireError, ex, start.cache, match="boom"):
            verify(ex, start, [1, 2, 3], (-1, 0, 0))
        with refused(QuireError, ex, start.cache, match="boom"):
            ex.speculative_decode(token(start, 1), [2, 3], 0.5, draft_parents=[-1, -1])
    finally:
        ex.pool.runner.model.head = head
    assert earlier[1].kv_cache.is_valid
    ex.pool.state.check()


def test_a_tree_counts_one_decode(ex: Executor) -> None:
    start = ex.prefill(prompt([1, 2])).kv_cache
    outputs = verify(ex, start, [1, 2, 3], (-1, 0, 0))
    ex.commit_path(outputs[1].kv_cache)
    metrics = ex.metrics()
    assert (metrics.prefill_operations, metrics.decode_operations) == (1, 1)


# -- speculation over a tree -----------------------------------------------------------------------


def test_the_greedy_path_of_a_draft_tree_is_kept(tiny: Tiny, executor: Executor) -> None:
    ids = some_ids(6)
    best = greedy(tiny, [*ids, 5], 3)
    wrong = (best[0] + 1) % VOCAB
    # The right drafts hang among wrong ones: 0 wrong, 1 right, 2 below 0, 3 wrong below 1, 4 right
    # below 1, 5 right below 4.
    drafts = [wrong, best[0], best[1], (best[1] + 1) % VOCAB, best[1], best[2]]
    parents = [-1, -1, 0, 1, 1, 4]
    handle = executor.prefill(prompt(ids)).kv_cache
    output = executor.speculative_decode(token(handle, 5), drafts, 1.0, draft_parents=parents)
    assert output.accepted_tokens == tuple(best)
    run = [*ids, 5, *best]
    assert output.kv_cache.sequence_length == len(run)
    assert_close(output.next_logits[0], tiny.logits(run)[-1])
    assert handle.cache.token_ids(0).tolist() == run
    assert_close(executor.decode(token(output.kv_cache, 9)).logits[0], tiny.logits([*run, 9])[-1])
    # A chain said as a tree is a chain, and rejecting all leaves the input token.
    chain = executor.speculative_decode(token(handle, 5), best, 1.0, draft_parents=[-1, 0, 1])
    assert chain.accepted_tokens == tuple(best)
    none = executor.speculative_decode(token(handle, 5), [wrong, wrong], 1.0, draft_parents=[-1, -1])
    assert (none.accepted_tokens, none.kv_cache.sequence_length) == ((), 7)
    assert_close(none.next_logits[0], tiny.logits([*ids, 5])[-1])


def test_threshold_takes_the_most_probable_child() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]).log()
    drafts, parents = [1, 0, 2], [-1, -1, 1]
    for threshold, path in ((0.0, (1, 2)), (0.12, (1, 2)), (0.13, (1,)), (1.0, (1,))):
        assert accept_by_threshold(logits, drafts, threshold, parents).path == path
    assert accept_by_threshold(torch.zeros(3, 3), [2, 1], 1.0, [-1, -1]).path == (0,), "the first of equals"


class Fixed:
    """Sampling whose target behind any path is the same."""

    def __init__(self, target_V: list[float], seed: int) -> None:
        self.target, self.generator = torch.tensor([target_V]), random.Random(seed)

    def probabilities(self, logits_RV: torch.Tensor, drafted: object) -> torch.Tensor:
        return self.target.expand(logits_RV.shape[0], -1).clone()

    def uniform(self) -> float:
        return self.generator.random()


@pytest.mark.slow
def test_several_tries_keep_the_target_distribution() -> None:
    """Three drafts below one token, drawn independently: chi-square at the 1 in 10**6 level."""
    target, draft = [0.4, 0.0, 0.35, 0.25], torch.tensor([0.2, 0.5, 0.1, 0.2], dtype=torch.float64)
    sampling = Fixed(target, 3)
    rounds, counts, tries = 20_000, [0] * 4, [0] * 4
    for _ in range(rounds):
        drafted = [draw_from(draft, sampling.uniform()) for _ in range(3)]
        result = rejection_sample(torch.zeros(4, 4), drafted, draft.expand(3, 4), sampling, [-1, -1, -1])
        assert result.next_probs is not None
        tries[result.path[0] if result.path else 3] += 1
        first = drafted[result.path[0]] if result.path else draw_from(result.next_probs[0], sampling.uniform())
        counts[first] += 1
    assert counts[1] == 0
    chi = sum((n - rounds * p) ** 2 / (rounds * p) for n, p in zip(counts, target, strict=True) if p)
    assert chi < 27.7, "chi-square of 2 degrees of freedom exceeds 27.6 once in a million"
    assert all(tries), "each draft is accepted at times, and at times none"


def test_exact_mode_of_a_tree_through_the_executor(llama: Tiny, ex: Executor) -> None:
    ids = some_ids(6)
    best = greedy(llama, [*ids, 5], 2)
    other = (best[0] + 1) % VOCAB
    hot = torch.zeros(3, VOCAB)
    hot[[0, 1, 2], [other, best[0], best[1]]] = 1.0
    handle = ex.prefill(prompt(ids)).kv_cache
    sampling = ParamsSampling(SamplingParams(temperature=0), vocab_size=VOCAB)
    output = ex.speculative_decode(
        token(handle, 5),
        [other, *best],
        0.5,
        draft_probabilities=hot,
        sampling=sampling,
        draft_parents=[-1, -1, 1],
    )
    assert output.accepted_tokens == tuple(best)
    assert_close(output.next_logits[0], llama.logits([*ids, 5, *best])[-1])


def test_parents_of_one_input(ex: Executor) -> None:
    handle = ex.prefill(prompt([1, 2])).kv_cache
    ids = DecodeInput(input_ids=torch.tensor([[4]]), kv_cache=handle)
    one = ex.forward_verify([ids], parents=[-1])[0]
    assert_close(ex.decode(ids).logits, one.logits)
