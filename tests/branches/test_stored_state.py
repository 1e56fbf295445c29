"""State that leaves the pool and is found again by its tokens: preempted requests, idle sessions
and evicted prefixes come back to the bit, or are computed again. Here the store is host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import (
    BYTES_PER_TOKEN,
    Checkpoint,
    MakeLLM,
    assert_near,
    check,
    engine_of,
    greedy,
    make_family,
    random_tokens,
    record,
    token_ids,
)

from quire import LLM, SamplingParams
from quire.base.errors import QuireError
from quire.base.token_history import TokenHistory
from quire.branches.move_costs import TO_MEMORY, MoveCosts, Rate
from quire.branches.object_writer import ObjectWriter, WriteJob
from quire.branches.state_loads import GET_SECONDS, StateLoad, StateLoader
from quire.branches.stored_state import StoredState
from quire.contracts.store import ObjectKind
from quire.engine.request import RequestBranch
from quire.engine.request_outputs import request_output
from quire.kv.recurrent import bytes_per_state
from quire.sessions.prompts import cache_key
from quire.store.memory import MemoryTier
from quire.store.stack import Store

LENGTHS = (20, 11, 17, 5)
PROMPTS = [random_tokens(length) for length in LENGTHS]
COUNT = 40
TIGHT: dict[str, Any] = {"pool": 96, "page_size": 4, "max_num_batched_tokens": 16}
ROOM: dict[str, Any] = {"kv_cache_memory": "4MiB", "page_size": 4}
HYBRIDS = ("qwen3-next", "mamba2", "lfm2", "falcon-h1")
CHUNK = 8


def stored_of(llm: LLM) -> StoredState:
    return engine_of(llm).stored


def memory_of(llm: LLM) -> MemoryTier:
    store = stored_of(llm).store
    assert store is not None
    assert store.memory is not None
    return store.memory


def force(
    llm: LLM, capacity: int = 1 << 30, decide: Callable[..., bool] = lambda *_: True, chunk: int = CHUNK
) -> StoredState:
    """Keep and bring back whatever can be, in small objects, whatever it costs."""
    stored = stored_of(llm)
    stored.store = Store([MemoryTier(capacity)])
    stored.least, stored.is_worth, stored.keys.layout.chunk = 1, decide, chunk
    return stored


def check_store(llm: LLM) -> None:
    """The state is whole, nothing is on its way, and the tier keeps to its budget."""
    store = stored_of(llm).store
    if store is not None and store.memory is not None:
        stat = store.memory.stat_now()
        assert stat.capacity is None or stat.bytes <= stat.capacity
    if not engine_of(llm).has_work:
        assert not stored_of(llm)._loads
    check(llm)


def moved(llm: LLM) -> tuple[int, int]:
    """Tokens that went to the store, and tokens that came back."""
    found = llm.metrics()
    return int(found["quire:store_tokens_saved_total"]), int(found["quire:store_tokens_loaded_total"])


def squeeze(llm: LLM) -> None:
    """Take every page that idle sessions and finished requests hold."""
    while engine_of(llm).runner.room.make():
        pass


def kept(llm: LLM, tokens: list[int], key: Any = None) -> int:
    """Tokens of a prompt that could come back."""
    branch = RequestBranch(tokens=TokenHistory(tokens), key=key or cache_key(None))
    return stored_of(llm).reach(branch, len(tokens))


@contextmanager
def parked(llm: LLM, request: Any) -> Iterator[None]:
    """A preempted request stays out of the queue meanwhile."""
    queues = engine_of(llm).scheduler.queues
    queues.remove(request)
    yield
    queues.wait(request)


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


def few_states(make_llm: MakeLLM, hybrid: Checkpoint, states: int, tokens: int, **more: Any) -> LLM:
    """An LLM with about so many slots for states, and room for about so many tokens."""
    one = make_llm(hybrid, **ROOM)
    part = engine_of(one).runner.state.parts.recurrent
    assert part is not None
    # Half of the budget is for states.
    memory = 2 * max(states * bytes_per_state(part.specs.values()), tokens * one.bytes_per_token)
    return make_llm(hybrid, **{"page_size": 4, "kv_cache_memory": memory, **more})


# -- preempted requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_come_back(make_llm: MakeLLM, checkpoint: Checkpoint, caching: bool) -> None:
    llm = make_llm(checkpoint, enable_prefix_caching=caching, **TIGHT)
    force(llm)
    recorder = record(llm)
    outputs = llm.generate(PROMPTS, greedy(COUNT))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, COUNT) for prompt in PROMPTS]
    out, back = moved(llm)
    assert llm.metrics()["quire:num_preemptions_total"] >= 1
    assert out > 0
    assert back > 0
    # No token was computed twice.
    assert recorder.num_tokens == sum(LENGTHS) + len(LENGTHS) * (COUNT - 1)
    check_store(llm)


def test_preempted_hybrids_come_back(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """Pages or states run out, whichever a model has less of."""
    llm = few_states(make_llm, hybrid, 4, 72, max_num_batched_tokens=16, enable_prefix_caching=False)
    force(llm)
    prompts = [random_tokens(length) for length in (20, 11, 17, 5, 9, 12)]
    recorder = record(llm)
    outputs = llm.generate(prompts, greedy(30))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert hybrid.continues(prompt, output.outputs[0].token_ids)
    assert llm.metrics()["quire:num_preemptions_total"] > 0
    assert moved(llm)[1] > 0
    assert recorder.num_tokens == sum(map(len, prompts)) + len(prompts) * 29
    check_store(llm)


def test_seeded_samples_are_those_of_a_roomy_pool(make_llm: MakeLLM, llama: Checkpoint) -> None:
    params = [SamplingParams(temperature=1.3, seed=i, max_tokens=COUNT, ignore_eos=True, logprobs=2) for i in range(4)]
    roomy, tight = make_llm(llama), make_llm(llama, **TIGHT)
    force(tight)
    for mine, other in zip(tight.generate(PROMPTS, params), roomy.generate(PROMPTS, params), strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
    assert moved(tight)[1] > 0
    assert moved(roomy) == (0, 0)


def test_preempted_in_the_middle_of_a_prompt(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=112, page_size=4, max_num_batched_tokens=8)
    force(llm)
    engine = engine_of(llm)
    recorder = record(llm)
    first = engine.submit(np.array(random_tokens(40)), greedy(30))
    second = engine.submit(np.array(random_tokens(60, seed=1)), greedy(4))
    for _ in range(8):
        engine.step()
    assert 0 < second[0].branch.computed < 60
    engine.scheduler.preempt(second[0])
    engine.run([*first, *second])
    assert first[0].output.token_ids == llama.greedy(random_tokens(40), 30)
    assert second[0].output.token_ids == llama.greedy(random_tokens(60, seed=1), 4)
    assert recorder.num_tokens == 40 + 29 + 60 + 3
    # What came back is no find of the prefix cache.
    assert second[0].seat.reuse.cached == 0


def test_the_decision_decides(make_llm: MakeLLM, llama: Checkpoint) -> None:
    asked: list[tuple[float, dict[str, int]]] = []

    def never(tokens: float, nbytes: dict[str, int]) -> bool:
        asked.append((tokens, nbytes))
        return False

    llm = make_llm(llama, enable_prefix_caching=False, **TIGHT)
    force(llm, decide=never)
    assert token_ids(llm.generate(PROMPTS, greedy(COUNT))) == [llama.greedy(prompt, COUNT) for prompt in PROMPTS]
    assert moved(llm) == (0, 0)
    assert len(asked) == llm.metrics()["quire:num_preemptions_total"] >= 2
    # Out and back.
    assert all(nbytes == {TO_MEMORY: 2 * tokens * BYTES_PER_TOKEN} for tokens, nbytes in asked)
    assert llm.metrics()["quire:store_loads_declined_total"] == len(asked)


def test_without_a_budget_nothing_is_kept(make_llm: MakeLLM, llama: Checkpoint) -> None:
    assert memory_of(make_llm(llama, host_memory="2MiB")).capacity == 2 << 20
    llm = make_llm(llama, host_memory=0, **TIGHT)
    assert stored_of(llm).store is None
    assert token_ids(llm.generate(PROMPTS, greedy(COUNT))) == [llama.greedy(prompt, COUNT) for prompt in PROMPTS]
    assert moved(llm) == (0, 0)


@pytest.mark.turns(6)
@pytest.mark.parametrize("tokens", [1, 30, 45, 70])
def test_the_budget_is_kept(make_llm: MakeLLM, llama: Checkpoint, tokens: int) -> None:
    """Room for so many tokens: some objects fit, and the other tokens are computed again."""
    llm = make_llm(llama, **{**TIGHT, "pool": 72})
    force(llm, capacity=tokens * BYTES_PER_TOKEN)
    engine = engine_of(llm)
    prompts = [random_tokens(n, seed=9) for n in (20, 11, 17, 5, 8, 30)]
    requests = [engine.submit(np.array(prompt), greedy(COUNT))[0] for prompt in prompts]
    while engine.has_work:
        engine.step()
        check_store(llm)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output.token_ids == llama.greedy(prompt, COUNT)


def test_what_the_pool_has_is_not_loaded(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(40)
    (request,) = engine.submit(np.array(prompt), greedy(10), key=cache_key(None))
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(request)
    assert kept(llm, request.branch.tokens.ids.tolist()) == 42
    # Another request has the same text and more.
    with parked(llm, request):
        llm.generate([*prompt, *llama.greedy(prompt, 3)], greedy(1))
    before = moved(llm)[1]
    engine.run([request])
    assert moved(llm)[1] == before
    assert request.output.token_ids == llama.greedy(prompt, 10)


def test_rows_are_loaded_behind_shared_pages(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """What the pool has of a beginning is shared, also if a tier has more of it."""
    llm = make_llm(llama, page_size=4)
    force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(60)
    llm.generate(prompt, greedy(1))
    squeeze(llm)
    llm.generate([*prompt[:22], *random_tokens(3, seed=4)], greedy(1))
    recorder, before = record(llm), moved(llm)[1]
    (request,) = engine.submit(np.array([*prompt, 7]), greedy(6), key=cache_key(None))
    while not request.output.token_ids:
        engine.step()
    assert recorder.num_tokens == 1
    state = engine.runner.state
    assert request.branch.seq is not None
    assert state.sequence_pages(request.branch.seq).shared == 20 // 4
    assert moved(llm)[1] - before == 60 - 20
    engine.run([request])
    assert request.output.token_ids == llama.greedy([*prompt, 7], 6)
    check_store(llm)


def test_what_is_kept_waits_for_no_equal_prompt(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4, max_num_batched_tokens=64)
    force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(100)
    (first,) = engine.submit(np.array(prompt), greedy(5))
    engine.step()
    engine.step()
    engine.scheduler.preempt(first)
    with parked(llm, first):
        memory = memory_of(llm)
        stored_of(llm).store = None  # the other one does not find it
        (second,) = engine.submit(np.array(prompt), greedy(5))
        engine.step()
        stored_of(llm).store = Store([memory])
    assert second.branch.computed == 64
    engine.step()
    assert first in engine.scheduler.running
    engine.run([first, second])
    assert first.output.token_ids == second.output.token_ids == llama.greedy(prompt, 5)


@pytest.mark.parametrize("steps", [2, 5])
def test_log_probabilities_of_a_prompt_that_was_moved(make_llm: MakeLLM, llama: Checkpoint, steps: int) -> None:
    """Rows whose logits are wanted must run, whatever is kept."""
    llm = make_llm(llama, page_size=4, max_num_batched_tokens=16)
    force(llm)
    engine = engine_of(llm)
    params = greedy(4, prompt_logprobs=0)
    (request,) = engine.submit(np.array(random_tokens(60)), params)
    for _ in range(steps):
        engine.step()
    engine.scheduler.preempt(request)
    engine.run([request])
    (expected,) = make_llm(llama).generate(random_tokens(60), params)
    (found,) = [request_output([request], None)]
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    for mine, other in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert mine is not None
        assert other is not None
        assert mine.keys() == other.keys()
        for token, entry in mine.items():
            assert_near(torch.tensor(entry.logprob), torch.tensor(other[token].logprob))


def test_a_waiting_request_of_a_session_is_moved(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=64, page_size=4, max_num_seqs=1, enable_prefix_caching=False)
    force(llm)
    engine = engine_of(llm)
    session = llm.session(random_tokens(30))
    (running,) = engine.submit(np.array(random_tokens(9, seed=1)), greedy(40))
    engine.step()
    stream = session.stream(greedy(5))
    next(stream)
    tokens = [token for delta in stream for token in delta.token_ids]
    assert moved(llm)[1] == 29
    assert session.tokens == random_tokens(30) + llama.greedy(random_tokens(30), 5)
    assert tokens == session.tokens[-len(tokens) :]
    assert running.output.token_ids == llama.greedy(random_tokens(9, seed=1), 40)


# -- finished prompts ------------------------------------------------------------------------------


def test_evicted_prompts_come_back(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint, page_size=4)
    force(llm)
    prompt = random_tokens(70)
    first = llm.generate(prompt, greedy(6))[0]
    squeeze(llm)
    recorder = record(llm)
    again = llm.generate(prompt, greedy(6))[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids == checkpoint.greedy(prompt, 6)
    # The last token of a prompt always runs, and what is behind the last whole run.
    behind = 1 if checkpoint.path.name != "llama" else 70 - 64
    assert again.num_cached_tokens == 70 - behind
    assert recorder.num_tokens == behind + 5
    check_store(llm)


def test_a_reset_forgets_what_memory_has(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    llm.generate(random_tokens(70), greedy(2))
    squeeze(llm)
    assert memory_of(llm).stat_now().objects > 0
    llm.reset_prefix_cache()
    assert memory_of(llm).stat_now().objects == 0
    assert llm.generate(random_tokens(70), greedy(2))[0].num_cached_tokens == 0


@pytest.mark.parametrize("salt", ["other", None])
def test_salts_find_only_their_own(make_llm: MakeLLM, llama: Checkpoint, salt: str | None) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    prompt = random_tokens(70)
    llm.generate(prompt, greedy(2), cache_salt="mine")
    squeeze(llm)
    assert kept(llm, prompt, cache_key("mine")) == 64, "whole runs, for another token followed"
    assert kept(llm, prompt, cache_key(salt)) == 0
    assert llm.generate(prompt, greedy(2), cache_salt=salt)[0].num_cached_tokens == 0
    squeeze(llm)
    assert llm.generate(prompt, greedy(2), cache_salt="mine")[0].num_cached_tokens == 64


# -- idle sessions ---------------------------------------------------------------------------------


def test_an_idle_session_comes_back_by_itself(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    prompt = random_tokens(50)
    session, other = llm.session(prompt), llm.session(random_tokens(20))
    before = [session.kv(layer) for layer in range(2)]
    squeeze(llm)
    assert session.num_computed == 0
    check_store(llm)
    recorder = record(llm)
    for layer in range(2):
        for name, rows in session.kv(layer).items():
            # Of a request at least one token must run.
            assert torch.equal(rows[:49], before[layer][name][:49]), "to the bit"
    assert recorder.num_tokens == 1
    assert session.generate(greedy(6)).outputs[0].token_ids == llama.greedy(prompt, 6)
    assert other.generate(greedy(1)).num_cached_tokens == 19
    check_store(llm)


@pytest.mark.turns(6)
def test_an_idle_hybrid_comes_back_to_the_bit(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm, other = make_llm(hybrid, **ROOM), make_llm(hybrid, **ROOM)
    force(llm)
    prompt = random_tokens(45)
    recorder = record(llm)
    goes, stays = (each.session(prompt) for each in (llm, other))
    for turn in range(3):
        assert goes.generate(greedy(5)).outputs[0].token_ids == stays.generate(greedy(5)).outputs[0].token_ids
        squeeze(llm)
        check_store(llm)
        goes.append(random_tokens(4, seed=turn))
        stays.append(random_tokens(4, seed=turn))
    assert torch.equal(goes.logits(), stays.logits())
    # Nothing was run twice.
    assert recorder.num_tokens == len(goes)


def test_only_what_is_new_runs(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    prompt, new = random_tokens(50), random_tokens(7, seed=1)
    session = llm.session(prompt)
    for call, tokens in (
        (lambda: session.append(new), 1 + 6),
        (lambda: session.score(new), 1 + 1 + 6),  # one brings the state back, the others give the scores
        (lambda: session.logits(), 1),
        (lambda: session.generate(greedy(4)), 1 + 3),
    ):
        squeeze(llm)
        assert session.num_computed == 0
        recorder = record(llm)
        call()
        assert recorder.num_tokens == tokens
        check_store(llm)
    text = prompt + new
    assert session.tokens == text + llama.greedy(text, 4)


@pytest.mark.parametrize("to", [49, 30, 1, 0])
def test_rewind_and_fork_of_a_session_that_was_moved(make_llm: MakeLLM, llama: Checkpoint, to: int) -> None:
    """As much comes back as there are whole runs, and no less is claimed to run again."""
    llm = make_llm(llama, page_size=4)
    force(llm)
    prompt = random_tokens(50)
    session = llm.session(prompt)
    squeeze(llm)
    cost = session.rewind_cost(to=to)
    assert cost == (0 if to == 49 else to % CHUNK)
    children = [session.fork(at=to), session.fork()]
    assert session.rewind(to=to) == cost
    session.append([3, 4, 5])
    recorder = record(llm)
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy([*prompt[:to], 3, 4, 5], 5)
    assert children[1].generate(greedy(5)).outputs[0].token_ids == llama.greedy(prompt, 5)
    assert recorder.num_tokens == 5 + 5
    check_store(llm)
    if to:
        assert children[0].generate(greedy(5)).outputs[0].token_ids == llama.greedy(prompt[:to], 5)
    check_store(llm)


@pytest.mark.product(8)
@pytest.mark.parametrize("to", [49, 48, 33, 32, 20, 9, 0])
def test_hybrids_are_cut_at_kept_states(make_llm: MakeLLM, hybrid: Checkpoint, to: int) -> None:
    """Rewind and fork of a session outside of the pool: as much comes back as a kept state allows,
    and no more is claimed.
    """
    llm = make_llm(hybrid, **ROOM, enable_prefix_caching=False)
    force(llm)
    tokens = random_tokens(50)
    session = llm.session(tokens)
    session.logits()
    state, seq = engine_of(llm).runner.state, session._branch.seq
    assert seq is not None
    for position in state.checkpoints(seq):
        state.drop_checkpoint(seq, position)
    for end in (20, 32, 50):
        session.rewind(to=min(len(session), end))
        session.append(tokens[len(session) : end])
        session.logits()
        assert session._branch.seq is not None
        if end < 50:
            state.checkpoint(session._branch.seq)
    positions = [*state.checkpoints(session._branch.seq), session._branch.computed]
    assert {20, 32} <= set(positions)
    squeeze(llm)
    rows = bool(stored_of(llm).keys.layout.row_layers)

    def comes(position: int) -> bool:
        return not rows or -(-position // CHUNK) * CHUNK <= to or position == positions[-1]

    if to:
        branch = session.fork(at=to)
        # A token of it is run for logits in any case, so what comes back ends before.
        back = max((one for one in positions if one < to and comes(one)), default=0)
        recorder = record(llm)
        found = branch.generate(greedy(3)).outputs[0].token_ids
        assert hybrid.continues(tokens[:to], found)
        assert recorder.num_tokens == to - back + 2
        branch.close()
    session.rewind(to=to)
    session.append(tokens[to:])
    exact_TV, bound = hybrid.exact_logits(tokens)
    assert float((session.logits().double() - exact_TV[-1]).abs().max()) <= bound
    check_store(llm)


@pytest.mark.turns(1)
def test_states_for_which_there_is_no_room_stay_behind(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """What comes back takes no slots that the next forward needs; checkpoints give way, the
    earliest first.
    """
    llm = few_states(make_llm, hybrid, 6, 64, enable_prefix_caching=False)
    force(llm)
    tokens = random_tokens(24)
    session = llm.session(tokens[:4])
    state = engine_of(llm).runner.state
    assert state.parts.recurrent is not None
    for end in (4, 8, 12, 16):
        session.append(tokens[len(session) : end])
        session.logits()
        assert session._branch.seq is not None
        state.checkpoint(session._branch.seq)
    session.append(tokens[16:])
    session.logits()
    squeeze(llm)
    table = state.parts.recurrent.table
    blockers = []
    # All but four slots are another owner's.
    while table.num_available > 4:
        blockers.append(engine_of(llm).runner.new_seq())
        state.add_sequence(blockers[-1])
        for layer, spec in list(state.parts.recurrent.specs.items())[:1]:
            one = spec.states[0]
            state.debug_set(layer, 0, blockers[-1], torch.zeros(one.shape, dtype=getattr(torch, one.dtype)))  # type: ignore[attr-defined]
    found = session.generate(greedy(1)).outputs[0].token_ids
    assert hybrid.continues(tokens, found)
    assert table.num_available >= 1
    for blocker in blockers:
        state.remove_sequence(blocker)
    assert hybrid.continues(tokens, found + session.generate(greedy(4)).outputs[0].token_ids)
    check_store(llm)


def test_pinned_and_modified_sessions_stay(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    pinned, modified = llm.session(random_tokens(30), pin=True), llm.session(random_tokens(30, seed=1))
    modified.set_kv(0, v=torch.zeros(3, 2, 16))
    squeeze(llm)
    assert (pinned.num_computed, modified.num_computed) == (29, 30)
    assert kept(llm, random_tokens(30, seed=1)) == 0


def test_a_session_that_is_not_exact_is_dropped(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Computed again it becomes exact."""
    half = make_llm(llama, kv_dtype="bfloat16")
    data = half.session(random_tokens(30)).to_bytes()
    llm = make_llm(llama)
    force(llm)
    session = llm.session_from_bytes(data, convert_dtype=True)
    assert not session._branch.origin.exact
    squeeze(llm)
    assert (session.num_computed, session._branch.origin.exact) == (0, True)
    assert memory_of(llm).stat_now().objects == 0
    assert_near(session.logits(), llama.logits(random_tokens(30))[-1])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_session_with_a_window_comes_back(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], name: str) -> None:
    llm, other = (make_llm(checkpoints[name], page_size=4) for _ in range(2))
    force(llm)
    prompt = random_tokens(60)
    goes, stays = (each.session(prompt, window=24, sink=4) for each in (llm, other))
    recorder = record(llm)
    for _ in range(3):
        assert goes.generate(greedy(5)).outputs[0].token_ids == stays.generate(greedy(5)).outputs[0].token_ids
        squeeze(llm)
        assert goes.num_computed == 0
        check_store(llm)
    assert torch.equal(goes.logits(), stays.logits())
    assert recorder.num_tokens == len(goes) - 59
    # It is no prefix for prompts, and other windows have other state.
    assert kept(llm, goes.tokens) == 0
    squeeze(llm)
    wide, wanted = (each.session(goes.tokens, window=40, sink=4) for each in (llm, other))
    assert_near(wide.logits(), wanted.logits())


# -- loading while others run ----------------------------------------------------------------------


class Gate:
    """Holds up reading of layers until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from quire.branches import state_loads

        self.opened = threading.Event()
        self.layers: list[int] = []
        right = state_loads.StateLoad._put

        def put(one: Any, layer: int, files: Any) -> None:
            assert self.opened.wait(60)
            self.layers.append(layer)
            right(one, layer, files)

        monkeypatch.setattr(state_loads.StateLoad, "_put", put)


def test_others_run_while_state_comes(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(70)
    llm.generate(prompt, greedy(1))
    squeeze(llm)
    gate = Gate(monkeypatch)
    (other,) = engine.submit(np.array(random_tokens(9, seed=2)), greedy(20))
    engine.step()
    (coming,) = engine.submit(np.array([*prompt, 3]), greedy(5), key=cache_key(None))
    for _ in range(10):
        engine.step()
    assert len(other.output.token_ids) == 11
    assert coming.output.token_ids == []
    assert not gate.layers
    gate.opened.set()
    engine.run([other, coming])
    assert coming.output.token_ids == llama.greedy([*prompt, 3], 5)
    assert other.output.token_ids == llama.greedy(random_tokens(9, seed=2), 20)
    check_store(llm)


def test_a_forward_follows_its_layers(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a request runs behind its state, and waits for each layer."""
    llm = make_llm(llama, page_size=4)
    force(llm)
    prompt = random_tokens(70)
    llm.generate(prompt, greedy(1))
    squeeze(llm)
    gate = Gate(monkeypatch)
    timer = threading.Timer(0.2, gate.opened.set)
    timer.start()
    assert llm.generate([*prompt, 3], greedy(5))[0].outputs[0].token_ids == llama.greedy([*prompt, 3], 5)
    assert gate.layers == [0, 1]
    check_store(llm)


@pytest.mark.parametrize("end", ["served", "cancel", "close"])
def test_objects_that_do_not_come(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A tier that has an object and does not give it holds up neither others nor an end."""
    llm = make_llm(llama, page_size=4)
    stored = force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(70)
    llm.generate(prompt, greedy(1))
    squeeze(llm)
    assert stored.store is not None
    right = stored.store.get
    monkeypatch.setattr(stored.store, "get", lambda keys: [Future() for _ in keys])
    (coming,) = engine.submit(np.array([*prompt, 3]), greedy(5), key=cache_key(None), request_id="coming")
    begun = time.monotonic()
    for _ in range(3):
        engine.step()
    assert coming.output.token_ids == []
    monkeypatch.setattr(stored.store, "get", right)
    match end:
        case "served":
            assert llm.generate(random_tokens(9), greedy(4))[0].outputs[0].token_ids == llama.greedy(
                random_tokens(9), 4
            )
            assert not coming.finished
            engine.end([coming])
        case "cancel":
            engine.cancel("coming")
            engine.step()
        case _:
            llm.close()
    assert coming.output.finish_reason == "cancelled"
    assert time.monotonic() - begun < GET_SECONDS / 2
    if end != "close":
        check_store(llm)


@pytest.mark.parametrize("end", ["cancel", "preempt", "close"])
def test_an_end_while_state_comes(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Nothing is written into pages that were given back."""
    llm = make_llm(llama, page_size=4)
    force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(70)
    llm.generate(prompt, greedy(1))
    squeeze(llm)
    gate = Gate(monkeypatch)
    (other,) = engine.submit(np.array(random_tokens(9, seed=2)), greedy(20))
    engine.step()
    (coming,) = engine.submit(np.array([*prompt, 3]), greedy(5), key=cache_key(None), request_id="coming")
    engine.step()
    threading.Timer(0.1, gate.opened.set).start()
    match end:
        case "cancel":
            engine.cancel("coming")
            engine.step()
            assert coming.output.finish_reason == "cancelled"
        case "preempt":
            engine.scheduler.preempt(coming)
        case _:
            llm.close()
            assert other.finished
            return
    check_store(llm)
    engine.run([other, coming])
    assert other.output.token_ids == llama.greedy(random_tokens(9, seed=2), 20)
    if end == "preempt":
        assert coming.output.token_ids == llama.greedy([*prompt, 3], 5)
    check_store(llm)


def test_tiers_that_do_not_answer_are_not_waited_for(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others run meanwhile; the prompt runs when the answer is there, also if it is empty."""
    llm = make_llm(llama, page_size=4)
    stored = force(llm)
    engine = engine_of(llm)
    answer: Future[Any] = Future()
    assert stored.store is not None
    monkeypatch.setattr(stored.store, "children", lambda parents, timeout: answer)
    (asking,) = engine.submit(np.array(random_tokens(40)), greedy(4))
    monkeypatch.undo()
    (other,) = engine.submit(np.array(random_tokens(9, seed=2)), greedy(4))
    for _ in range(3):
        engine.step()
    assert (len(other.output.token_ids), asking.output.token_ids) == (3, [])
    threading.Timer(0.1, lambda: answer.set_result([{} for _ in range(6)])).start()
    engine.run([asking, other])
    assert asking.output.token_ids == llama.greedy(random_tokens(40), 4)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["open_export", "prepare_import", "import_rows", "publish_import", "finish_import"])
def test_a_move_that_fails_is_computed_again(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    llm = make_llm(llama, **TIGHT)
    force(llm)
    state = engine_of(llm).runner.state
    right, calls = getattr(state, verb), 0

    def failing(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise RuntimeError("out of pinned memory")
        return right(*arguments, **named)

    monkeypatch.setattr(state, verb, failing)
    with caplog.at_level(logging.CRITICAL):
        outputs = llm.generate([*PROMPTS, random_tokens(9)], greedy(COUNT))
    expected = [llama.greedy(prompt, COUNT) for prompt in [*PROMPTS, random_tokens(9)]]
    assert token_ids(outputs) == expected
    assert calls >= 2
    check_store(llm)
    session = llm.session(random_tokens(30))
    squeeze(llm)
    with caplog.at_level(logging.CRITICAL):
        assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(30), 5)
    check_store(llm)


@pytest.mark.turns(1)
@pytest.mark.parametrize("fault", ["flipped", "cut", "swapped", "gone"])
def test_damaged_objects_are_misses(make_llm: MakeLLM, checkpoint: Checkpoint, fault: str) -> None:
    """No object that is not what its key says gives a token; it is dropped."""
    llm = make_llm(checkpoint, page_size=4)
    force(llm)
    prompt = random_tokens(70)
    llm.generate(prompt, greedy(3))
    squeeze(llm)
    memory = memory_of(llm)
    keys = [key for key in memory._kept if key.kind in (ObjectKind.ROWS, ObjectKind.STOP)]
    blobs = {key: bytes(memory._kept[key].blob) for key in keys}
    for index, key in enumerate(keys):
        blob = blobs[key]
        match fault:
            case "flipped":
                at = len(blob) - 1 - 7 * index % (len(blob) // 2)
                blob = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
            case "cut":
                blob = blob[: -1 - index]
            case "swapped":
                blob = blobs[keys[(index + 1) % len(keys)]]
            case _:
                memory.get_now = lambda keys: [None] * len(keys)  # type: ignore[method-assign]
        memory._kept[key].blob = blob
    for _ in range(3):
        assert llm.generate(prompt, greedy(6))[0].outputs[0].token_ids == checkpoint.greedy(prompt, 6)
        llm.reset_prefix_cache()
    assert moved(llm)[1] == 0
    assert llm.metrics()["quire:store_loads_failed_total"] >= 1
    check_store(llm)


def test_an_interrupt_while_it_comes_back(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    session = llm.session(random_tokens(30))
    squeeze(llm)
    state = engine_of(llm).runner.state

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state, "finish_import", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(greedy(5))
    check_store(llm)
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(30), 5)


def moved_request(llm: LLM, name: str = "victim") -> Any:
    """A request that has sampled some tokens and whose state is in host memory."""
    engine = engine_of(llm)
    (request,) = engine.submit(np.array(random_tokens(30)), greedy(20), request_id=name)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(request)
    return request


def test_cancel_and_failure_while_moved(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    force(llm)
    request = moved_request(llm)
    engine_of(llm).cancel("victim")
    engine_of(llm).step()
    assert request.output.finish_reason == "cancelled"
    request = moved_request(llm)
    engine_of(llm).fail_all(QuireError("the engine broke"))
    assert request.output.finish_reason == "error"
    check_store(llm)


def test_cancelled_sessions_keep_what_fits_them(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    force(llm)
    engine = engine_of(llm)
    session = llm.session(random_tokens(30))
    stream = session.stream(greedy(20))
    tokens = [next(stream).token_ids[0] for _ in range(4)]
    work = session._branch.request  # type: ignore[union-attr]
    engine.scheduler.preempt(work)
    stream.close()
    assert session.tokens == random_tokens(30) + tokens
    recorder = record(llm)
    assert session.generate(greedy(3)).outputs[0].token_ids == llama.greedy(session.tokens[:34], 3)
    assert recorder.num_tokens == 3
    # A run that is cancelled is undone.
    with engine.lock:
        request = engine.submit_run(session._branch, np.array(session.tokens + [7] * 40, dtype=np.int32))
    engine.scheduler.queues.limits = type(engine.scheduler.limits)(max_num_seqs=8, max_num_batched_tokens=16)
    engine.step()
    engine.scheduler.preempt(request)
    engine.end([request])
    check_store(llm)
    text = session.tokens
    assert session.generate(greedy(3)).outputs[0].token_ids == llama.greedy(text, 3)


def conversations(llm: LLM, model: Checkpoint, rng: np.random.Generator, turns: int) -> tuple[int, int]:
    """Every verb on several sessions while requests take their pages; objects are kept, refused,
    damaged and lost at random.
    """
    state, finish = engine_of(llm).runner.state, engine_of(llm).runner.state.finish_import

    def sometimes(seq: int) -> None:
        if rng.random() < 0.05:
            raise RuntimeError("lost")
        finish(seq)

    state.finish_import = sometimes  # type: ignore[method-assign]
    sessions = [llm.session(random_tokens(12, seed=seed)) for seed in range(4)]
    texts = [session.tokens for session in sessions]
    for turn in range(turns):
        which = int(rng.integers(len(sessions)))
        session, text = sessions[which], texts[which]
        match int(rng.integers(8)):
            case 0 if len(text) < 60:
                text += random_tokens(int(rng.integers(1, 9)), seed=turn)
                session.append(text[len(session) :])
            case 1 if len(text) < 60:
                found = session.generate(greedy(4)).outputs[0].token_ids
                assert model.continues(text, found)
                text += found
            case 2 if len(text) > 8:
                to = int(rng.integers(1, len(text)))
                session.rewind(to=to)
                del text[to:]
            case 3:
                child = session.fork(at=int(rng.integers(1, len(text) + 1)))
                sessions[which].close()
                sessions[which], texts[which] = child, text[: len(child)]
                text = texts[which]
            case 4:
                assert session.logits().argmax() == model.logits(text)[-1].argmax()
            case 5:
                squeeze(llm)
            case 6:
                memory = memory_of(llm)
                for key in list(memory._kept):
                    if rng.random() < 0.05:
                        blob = bytearray(memory._kept[key].blob)
                        blob[int(rng.integers(len(blob)))] ^= 4
                        memory._kept[key].blob = bytes(blob)
                    elif rng.random() < 0.05:
                        memory.remove_now([key])
            case _:
                prompts = [random_tokens(int(n), seed=turn) for n in rng.integers(10, 50, 3)]
                for prompt, output in zip(prompts, llm.generate(prompts, greedy(6)), strict=True):
                    assert model.continues(prompt, output.outputs[0].token_ids)
        assert sessions[which].tokens == text
        check_store(llm)
    for session in sessions:
        session.close()
    return moved(llm)


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire.engine"), "disabled", True)


def in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for each copy ahead and each load where it is ordered. What has been copied when a
    sequence has to go would else depend on how the threads ran, and all that follows on that.
    """
    write, load = ObjectWriter.add, StateLoader.add

    def written(self: ObjectWriter, job: WriteJob) -> None:
        write(self, job)
        assert self.wait(60)

    def loaded(self: StateLoader, loading: StateLoad) -> None:
        load(self, loading)
        with loading._changed:
            assert loading._changed.wait_for(lambda: loading.ended, 60)

    monkeypatch.setattr(ObjectWriter, "add", written)
    monkeypatch.setattr(StateLoader, "add", loaded)


def test_random_conversations_in_a_tight_pool(
    make_llm: MakeLLM, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch)
    in_step(monkeypatch)
    rng = np.random.default_rng(0)
    llm = make_llm(checkpoint, pool=160, page_size=4, max_num_batched_tokens=24)
    # An object has a header of some 2 KiB beside its state.
    force(llm, capacity=600 * BYTES_PER_TOKEN, decide=lambda *_: rng.random() < 0.8)
    out, back = conversations(llm, checkpoint, rng, 100)
    assert out > 100
    assert back > 20


def hybrid_conversations(make_llm: MakeLLM, hybrid: Checkpoint, seed: int, turns: int) -> tuple[int, int]:
    rng = np.random.default_rng(seed)
    llm = few_states(
        make_llm,
        hybrid,
        int(rng.integers(5, 9)),
        int(rng.integers(90, 150)),
        max_num_batched_tokens=int(rng.choice([7, 24])),
        enable_prefix_caching=bool(rng.random() < 0.7),
        checkpoint_interval=int(rng.choice([0, 4, 16])),
    )
    force(llm, int(rng.integers(3, 12)) * 60_000, lambda *_: rng.random() < 0.8)
    return conversations(llm, hybrid, rng, turns)


@pytest.mark.turns(12)
@pytest.mark.parametrize("seed", [0, 3])
def test_random_conversations_with_few_states(
    make_llm: MakeLLM, hybrid: Checkpoint, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With a prefix cache, of which copies are made ahead, and without. Some turns are out of step:
    there only the tokens are the same each time.
    """
    quiet(monkeypatch)
    hybrid_conversations(make_llm, hybrid, seed, 15)
    in_step(monkeypatch)
    out, back = hybrid_conversations(make_llm, hybrid, seed, 50)
    assert out > 60
    assert back > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_long_conversations(make_llm: MakeLLM, hybrid: Checkpoint, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    quiet(monkeypatch)
    out, back = hybrid_conversations(make_llm, hybrid, seed, 500)
    assert out > 100
    assert back > 50


# -- what it costs ---------------------------------------------------------------------------------


def test_rates_are_of_the_last_measurements() -> None:
    rate = Rate(most=2)
    assert rate.per_second is None
    rate.add(10, 1)
    assert rate.per_second == 10
    rate.add(30, 1)
    rate.add(10, 3)
    assert rate.per_second == 10
    for _ in range(3):
        rate.forget_oldest()
    assert rate.per_second is None


def test_the_cheaper_way_is_taken() -> None:
    costs = MoveCosts()
    assert costs.is_worth(1, {"disk": 10**12}), "nothing is known of computing"
    # 100 tokens in a second; a step whose results were not waited for belongs to the next.
    costs.ran(60, 1, 0.1, waited=False)
    costs.ran(40, 1, 0.9, waited=True)
    costs.ran(3, 3, 50.0, waited=True)  # decodes do not count
    costs.moved("disk", 1000, 1)
    costs.moved("redis", 1000, 10)
    assert costs.is_worth(100, {"disk": 999})
    assert costs.is_worth(100, {"disk": 499, "redis": 49})
    assert not costs.is_worth(100, {"disk": 501, "redis": 50})
    # A refusal forgets, and what is not known is tried.
    assert costs.is_worth(100, {"disk": 10**6})


def test_costs_are_measured_as_it_runs(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, **TIGHT)
    stored = force(llm)
    llm.generate(PROMPTS, greedy(COUNT))
    costs = stored.costs
    assert sum(amount for amount, _ in costs.prompts.measured) >= sum(LENGTHS)
    assert costs.roads[TO_MEMORY].measured
    assert costs.roads["memory"].measured
    stored.is_worth = costs.is_worth
    assert token_ids(llm.generate(PROMPTS, greedy(COUNT))) == [llama.greedy(prompt, COUNT) for prompt in PROMPTS]
