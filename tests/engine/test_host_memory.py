"""State that waits in host memory: preempted requests and idle sessions come back to the bit,
within a budget, or are computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.branches.host_store import HostStore, MoveCosts, Rate
from quire.engine.request_outputs import request_output
from quire.engine.request_preparation import cache_key
from quire.errors import QuireError

from .conftest import (
    BYTES_PER_TOKEN,
    Checkpoint,
    MakeLLM,
    assert_near,
    check,
    engine_of,
    greedy,
    random_tokens,
    record,
    token_ids,
)

LENGTHS = (20, 11, 17, 5)
PROMPTS = [random_tokens(length) for length in LENGTHS]
COUNT = 40
TIGHT: dict[str, Any] = {"pool": 96, "page_size": 4, "max_num_batched_tokens": 16}
ROOMY = 1 << 30


def store_of(llm: LLM) -> HostStore:
    return engine_of(llm).host


def force(llm: LLM, capacity: int = ROOMY, decide: Callable[..., bool] = lambda *_, **__: True) -> HostStore:
    """Move whatever fits, whatever it costs."""
    store = store_of(llm)
    store.capacity, store.worth_moving = capacity, decide
    return store


def check_store(llm: LLM) -> None:
    """Bytes and owners are as the entries say, and within the budget."""
    store = store_of(llm)
    copies = {id(entry.copy): entry.copy for entry in store._entries.values()}
    assert store.used == sum(copy.nbytes for copy in copies.values()) <= store.capacity
    for key, copy in copies.items():
        assert copy.owners == sum(id(entry.copy) == key for entry in store._entries.values())
        assert copy.nbytes == sum(t.nbytes for tensors in copy.groups.values() for t in tensors.values())
    for owner, entry in store._entries.items():
        assert 0 < entry.length <= entry.copy.length
        assert (owner.seq, owner.computed) == (None, 0)
    check(llm)


def swaps(llm: LLM) -> tuple[int, int]:
    found = llm.metrics()
    return int(found["quire:swaps_out_total"]), int(found["quire:swaps_in_total"])


def squeeze(llm: LLM) -> None:
    """Take every page that idle sessions and finished requests hold."""
    while engine_of(llm).runner.room.make():
        pass


@contextmanager
def parked(llm: LLM, request: Any) -> Iterator[None]:
    """A preempted request stays out of the queue meanwhile."""
    waiting = engine_of(llm).scheduler.waiting
    waiting.remove(request.work)
    yield
    waiting.append(request.work)


# -- preempted requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_come_back(make_llm: MakeLLM, checkpoint: Checkpoint, caching: bool) -> None:
    llm = make_llm(checkpoint, enable_prefix_caching=caching, **TIGHT)
    force(llm)
    recorder = record(llm)
    outputs = llm.generate(PROMPTS, greedy(COUNT))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, COUNT) for prompt in PROMPTS]
    out, back = swaps(llm)
    assert out == back == llm.metrics()["quire:num_preemptions_total"] >= 1
    # No token was computed twice.
    assert recorder.num_tokens == sum(LENGTHS) + len(LENGTHS) * (COUNT - 1)
    found = llm.metrics()
    assert found["quire:swap_out_bytes_total"] == found["quire:swap_in_bytes_total"] > 0
    assert found["quire:host_memory_bytes"] == 0
    check_store(llm)


def test_seeded_samples_are_those_of_a_roomy_pool(make_llm: MakeLLM, llama: Checkpoint) -> None:
    params = [SamplingParams(temperature=1.3, seed=i, max_tokens=COUNT, ignore_eos=True, logprobs=2) for i in range(4)]
    roomy, tight = make_llm(llama), make_llm(llama, **TIGHT)
    force(tight)
    for mine, other in zip(tight.generate(PROMPTS, params), roomy.generate(PROMPTS, params), strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
    assert swaps(tight)[1] >= 2
    assert swaps(roomy) == (0, 0)


def test_preempted_in_the_middle_of_a_prompt(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=112, page_size=4, max_num_batched_tokens=8)
    force(llm)
    engine = engine_of(llm)
    recorder = record(llm)
    first = engine.submit(np.array(random_tokens(40)), greedy(30))
    second = engine.submit(np.array(random_tokens(60, seed=1)), greedy(4))
    for _ in range(8):
        engine.step()
    assert 0 < second[0].work.computed < 60
    engine.scheduler.preempt(second[0].work)
    assert store_of(llm).holds(second[0].work) > 0
    check_store(llm)
    engine.run([*first, *second])
    assert first[0].output_ids == llama.greedy(random_tokens(40), 30)
    assert second[0].output_ids == llama.greedy(random_tokens(60, seed=1), 4)
    assert recorder.num_tokens == 40 + 29 + 60 + 3
    # What came back is no find of the prefix cache.
    assert second[0].work.num_cached == 0


def test_the_decision_decides(make_llm: MakeLLM, llama: Checkpoint) -> None:
    asked: list[tuple[float, int, bool]] = []

    def never(tokens: float, nbytes: int, *, there: bool = True) -> bool:
        asked.append((tokens, nbytes, there))
        return False

    llm = make_llm(llama, enable_prefix_caching=False, **TIGHT)
    force(llm, decide=never)
    assert token_ids(llm.generate(PROMPTS, greedy(COUNT))) == [llama.greedy(prompt, COUNT) for prompt in PROMPTS]
    assert swaps(llm) == (0, 0)
    assert len(asked) == llm.metrics()["quire:num_preemptions_total"] >= 2
    assert all(there and nbytes == tokens * BYTES_PER_TOKEN for tokens, nbytes, there in asked)


def test_without_a_budget_nothing_is_kept(make_llm: MakeLLM, llama: Checkpoint) -> None:
    assert store_of(make_llm(llama, host_memory="2MiB")).capacity == 2 << 20
    llm = make_llm(llama, host_memory=0, **TIGHT)
    force(llm, capacity=store_of(llm).capacity)
    assert token_ids(llm.generate(PROMPTS, greedy(COUNT))) == [llama.greedy(prompt, COUNT) for prompt in PROMPTS]
    assert swaps(llm) == (0, 0)


@pytest.mark.parametrize("tokens", [1, 30, 45, 70])
def test_the_budget_is_kept(make_llm: MakeLLM, llama: Checkpoint, tokens: int) -> None:
    """Room for so many tokens: none, one or some of the preempted fit; the others are computed
    again.
    """
    llm = make_llm(llama, **{**TIGHT, "pool": 72})
    store = force(llm, capacity=tokens * BYTES_PER_TOKEN)
    engine = engine_of(llm)
    prompts = [random_tokens(n, seed=9) for n in (20, 11, 17, 5, 8, 30)]
    requests = [engine.submit(np.array(prompt), greedy(COUNT))[0] for prompt in prompts]
    most = 0
    while engine.has_work:
        engine.step()
        check_store(llm)
        most = max(most, store.used)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == llama.greedy(prompt, COUNT)
    assert (swaps(llm)[0] > 0) == (most > 0) == (tokens >= 30)


def test_what_is_found_in_the_prefix_cache_is_not_copied_back(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    store = force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(40)
    (request,) = engine.submit(np.array(prompt), greedy(10), key=cache_key(None))
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(request.work)
    assert store.holds(request.work) == 42
    # Somebody else has the same text and more.
    with parked(llm, request):
        llm.generate([*prompt, *llama.greedy(prompt, 3)], greedy(1))
    engine.run([request])
    assert swaps(llm) == (1, 0)
    assert store.used == 0
    assert request.output_ids == llama.greedy(prompt, 10)


def test_a_short_prefix_in_the_cache_does_not_win(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(40)
    (request,) = engine.submit(np.array(prompt), greedy(10), key=cache_key(None))
    engine.step()
    engine.scheduler.preempt(request.work)
    with parked(llm, request):
        llm.generate(prompt[:10], greedy(1))
    recorder = record(llm)
    engine.run([request])
    assert recorder.num_tokens == 9
    assert request.output_ids == llama.greedy(prompt, 10)


def test_what_is_kept_waits_for_no_equal_prompt(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4, max_num_batched_tokens=64)
    force(llm)
    engine = engine_of(llm)
    prompt = random_tokens(100)
    (first,) = engine.submit(np.array(prompt), greedy(5))
    engine.step()
    engine.step()
    engine.scheduler.preempt(first.work)
    with parked(llm, first):
        (second,) = engine.submit(np.array(prompt), greedy(5))
        engine.step()
    assert second.work.computed == 64
    engine.step()
    assert swaps(llm) == (1, 1)
    assert len(first.output_ids) == 2
    engine.run([first, second])
    assert first.output_ids == second.output_ids == llama.greedy(prompt, 5)


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
    engine.scheduler.preempt(request.work)
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
    store = force(llm)
    engine = engine_of(llm)
    session = llm.session(random_tokens(30))
    (running,) = engine.submit(np.array(random_tokens(9, seed=1)), greedy(40))
    engine.step()
    stream = session.stream(greedy(5))
    next(stream)
    work = session._state.request.work  # type: ignore[union-attr]
    assert work in engine.scheduler.waiting or running.finished
    tokens = [token for delta in stream for token in delta.token_ids]
    assert swaps(llm) == (1, 1)
    assert store.used == 0
    assert session.tokens == random_tokens(30) + llama.greedy(random_tokens(30), 5)
    assert tokens == session.tokens[-len(tokens) :]
    assert running.output_ids == llama.greedy(random_tokens(9, seed=1), 40)


def test_what_is_shared_is_not_moved(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """The samples of one prompt hold its pages together; copies would come back as pages of their
    own.
    """
    llm = make_llm(llama, page_size=4)
    force(llm)
    engine = engine_of(llm)
    samples = engine.submit(np.array(random_tokens(40)), SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    engine.scheduler.preempt(samples[2].work)
    assert swaps(llm) == (0, 0)
    engine.run(samples)
    alone = make_llm(llama).generate(random_tokens(40), SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True))
    assert [sample.output_ids for sample in samples] == [sample.token_ids for sample in alone[0].outputs]


# -- idle sessions ---------------------------------------------------------------------------------


def test_an_idle_session_comes_back_by_itself(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    store = force(llm)
    prompt = random_tokens(50)
    session, other = llm.session(prompt), llm.session(random_tokens(20))
    before = [session.kv(layer) for layer in range(2)]
    squeeze(llm)
    assert session.num_computed == 0
    assert store.used == (50 + 19) * BYTES_PER_TOKEN  # the other one has not run its last token
    check_store(llm)
    recorder = record(llm)
    for layer in range(2):
        for name, rows in session.kv(layer).items():
            # Of a request at least one token must run.
            assert torch.equal(rows[:49], before[layer][name][:49]), "to the bit"
    assert recorder.num_tokens == 1
    assert session.generate(greedy(6)).outputs[0].token_ids == llama.greedy(prompt, 6)
    assert swaps(llm) == (2, 1)
    assert other.generate(greedy(1)).num_cached_tokens == 19
    squeeze(llm)
    session.close()
    other.close()
    assert store.used == 0
    check_store(llm)


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
    llm = make_llm(llama, page_size=4)
    store = force(llm)
    prompt = random_tokens(50)
    session = llm.session(prompt)
    squeeze(llm)
    held = store.used
    assert session.rewind_cost(to=to) == 0, "what is kept need not be run again"
    children = [session.fork(at=to), session.fork()]
    assert store.used == held, "copies are shared"
    check_store(llm)
    session.rewind(to=to)
    session.append([3, 4, 5])
    recorder = record(llm)
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy([*prompt[:to], 3, 4, 5], 5)
    assert recorder.num_tokens == 5
    assert children[1].generate(greedy(5)).outputs[0].token_ids == llama.greedy(prompt, 5)
    assert recorder.num_tokens == 5 + 5
    check_store(llm)
    if to:
        assert children[0].generate(greedy(5)).outputs[0].token_ids == llama.greedy(prompt[:to], 5)
    children[0].close()
    assert store.used == 0
    check_store(llm)


def test_the_copies_of_sessions_make_room_oldest_first(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    store = force(llm, capacity=100 * BYTES_PER_TOKEN)
    sessions = [llm.session(random_tokens(41, seed=seed)) for seed in range(3)]
    squeeze(llm)
    assert [store.holds(session._state) for session in sessions] == [0, 40, 40]
    check_store(llm)
    # A request's copy takes the room of one, and is not given up for a session's.
    (request,) = engine_of(llm).submit(np.array(random_tokens(60, seed=7)), greedy(8))
    engine_of(llm).step()
    engine_of(llm).scheduler.preempt(request.work)
    assert [store.holds(session._state) for session in sessions] == [0, 0, 40]
    # So does that of a session for whose request it waits, as long as it does.
    with engine_of(llm).lock:
        waits = engine_of(llm).submit_run(sessions[2]._state, np.array([*sessions[2].tokens, 5], dtype=np.int32))
    assert not store._make_room(1 * BYTES_PER_TOKEN)
    engine_of(llm).end([waits])
    assert store.holds(sessions[2]._state) == 40
    with parked(llm, request):
        assert store.holds(request.work) == 60
        other = llm.session(random_tokens(62, seed=8))
        squeeze(llm)
        assert (other.num_computed, store.holds(other._state), store.holds(request.work)) == (0, 0, 60)
        assert store.holds(sessions[2]._state) == 40, "what cannot make room is not given up for nothing"
    engine_of(llm).run([request])
    assert request.output_ids == llama.greedy(random_tokens(60, seed=7), 8)
    for seed, session in enumerate(sessions):
        assert session.generate(greedy(4)).outputs[0].token_ids == llama.greedy(random_tokens(41, seed=seed), 4)
    check_store(llm)


def test_pinned_and_modified_sessions_stay(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    store = force(llm)
    pinned, modified = llm.session(random_tokens(30), pin=True), llm.session(random_tokens(30, seed=1))
    modified.set_kv(0, v=torch.zeros(3, 2, 16))
    squeeze(llm)
    assert (pinned.num_computed, modified.num_computed, store.used) == (29, 30, 0)


def test_a_session_that_is_not_exact_is_dropped(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Computed again it becomes exact."""
    half = make_llm(llama, kv_dtype="bfloat16")
    data = half.session(random_tokens(30)).to_bytes()
    llm = make_llm(llama)
    store = force(llm)
    session = llm.session_from_bytes(data, convert_dtype=True)
    assert not session._state.origin.exact
    squeeze(llm)
    assert (session.num_computed, store.used, session._state.origin.exact) == (0, 0, True)
    assert_near(session.logits(), llama.logits(random_tokens(30))[-1])


def test_a_session_with_a_window_comes_back(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm, other = make_llm(llama, page_size=4), make_llm(llama, page_size=4)
    store = force(llm)
    prompt = random_tokens(60)
    moved, stays = (each.session(prompt, window=24, sink=4) for each in (llm, other))
    for _ in range(3):
        assert moved.generate(greedy(5)).outputs[0].token_ids == stays.generate(greedy(5)).outputs[0].token_ids
        squeeze(llm)
        assert 0 < store.used <= (24 + 4) * BYTES_PER_TOKEN, "what the window has evicted is not copied"
        check_store(llm)
    assert torch.equal(moved.logits(), stays.logits())


def test_only_the_tokens_that_are_asked_for_come_back(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    store = force(llm)
    state = engine_of(llm).runner.state
    session = llm.session(random_tokens(50))
    squeeze(llm)
    owner = session._state
    assert store.beats(owner, 9, 10)
    assert not store.beats(owner, 10, 10)
    owner.seq = engine_of(llm).runner.new_seq()
    state.add_sequence(owner.seq)
    store.restore(owner, 10)
    assert owner.seq is not None
    assert state.sequence_length(owner.seq) == owner.computed == 10
    check_store(llm)
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(50), 5)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["prepare_import", "import_page_group", "finish_import", "export_page_group"])
def test_a_move_that_fails_is_computed_again(
    make_llm: MakeLLM,
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verb: str,
) -> None:
    llm = make_llm(llama, **TIGHT)
    store = force(llm)
    state = engine_of(llm).runner.state
    right, calls = getattr(state, verb), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise RuntimeError("out of pinned memory")
        return right(*arguments)

    monkeypatch.setattr(state, verb, failing)
    with caplog.at_level(logging.CRITICAL, logger="quire.engine"):
        outputs = llm.generate([*PROMPTS, random_tokens(9)], greedy(COUNT))
    expected = [llama.greedy(prompt, COUNT) for prompt in [*PROMPTS, random_tokens(9)]]
    assert token_ids(outputs) == expected
    assert calls >= 2
    assert store.used == 0
    check_store(llm)
    session = llm.session(random_tokens(30))
    squeeze(llm)
    with caplog.at_level(logging.CRITICAL, logger="quire.engine"):
        assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(30), 5)
    check_store(llm)


def test_an_interrupt_while_it_comes_back(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(llama, page_size=4)
    store = force(llm)
    session = llm.session(random_tokens(30))
    squeeze(llm)
    state = engine_of(llm).runner.state

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state, "finish_import", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(greedy(5))
    assert store.used == 0
    check_store(llm)
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(30), 5)


def moved_request(llm: LLM, name: str = "victim") -> Any:
    """A request that has sampled some tokens and whose state is in host memory."""
    engine = engine_of(llm)
    (request,) = engine.submit(np.array(random_tokens(30)), greedy(20), request_id=name)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(request.work)
    assert store_of(llm).holds(request.work) == 33
    return request


def test_cancel_while_moved(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    store = force(llm)
    request = moved_request(llm)
    engine_of(llm).cancel("victim")
    engine_of(llm).step()
    assert (request.finish_reason, store.used) == ("cancelled", 0)
    check_store(llm)


def test_cancelled_sessions_keep_what_fits_them(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    store = force(llm)
    engine = engine_of(llm)
    session = llm.session(random_tokens(30))
    stream = session.stream(greedy(20))
    tokens = [next(stream).token_ids[0] for _ in range(4)]
    work = session._state.request.work  # type: ignore[union-attr]
    engine.scheduler.preempt(work)
    stream.close()
    assert session.tokens == random_tokens(30) + tokens
    assert store.holds(session._state) == 33
    check_store(llm)
    recorder = record(llm)
    assert session.generate(greedy(3)).outputs[0].token_ids == llama.greedy(session.tokens[:34], 3)
    assert recorder.num_tokens == 3
    # A run that is cancelled is undone, also what was moved of it.
    with engine.lock:
        request = engine.submit_run(session._state, np.array(session.tokens + [7] * 40, dtype=np.int32))
    engine.scheduler.limits = type(engine.scheduler.limits)(max_num_seqs=8, max_num_batched_tokens=16)
    engine.step()
    engine.scheduler.preempt(request.work)
    assert store.holds(request.work) > len(session)
    engine.end([request])
    assert store.holds(session._state) <= len(session)
    check_store(llm)
    text = session.tokens
    assert session.generate(greedy(3)).outputs[0].token_ids == llama.greedy(text, 3)


def test_failed_requests_leave_no_copy(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    store = force(llm)
    request = moved_request(llm)
    engine_of(llm).fail_all(QuireError("the engine broke"))
    assert (request.finish_reason, store.used) == ("error", 0)
    check_store(llm)


def test_close_while_moved(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    store = force(llm)
    request = moved_request(llm)
    with parked(llm, request):
        sessions = [llm.session(random_tokens(20, seed=seed)) for seed in range(2)]
        squeeze(llm)
        assert len(store._entries) == 3
        sessions[0].close()
        assert len(store._entries) == 2
        check_store(llm)
    llm.close()
    assert request.finished
    assert (store.used, store._entries) == (0, {})


def test_random_conversations_in_a_tight_pool(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Every verb on several sessions while requests take their pages; moves are made, refused and
    broken at random.
    """
    rng = np.random.default_rng(0)
    llm = make_llm(llama, pool=160, page_size=4, max_num_batched_tokens=24)
    store = force(llm, capacity=150 * BYTES_PER_TOKEN, decide=lambda *_, **__: rng.random() < 0.8)
    state = engine_of(llm).runner.state
    finish = state.finish_import

    def sometimes(seq: int) -> None:
        if rng.random() < 0.1:
            raise RuntimeError("lost")
        finish(seq)

    state.finish_import = sometimes  # type: ignore[method-assign]
    logging.getLogger("quire.engine").setLevel(logging.CRITICAL)
    sessions = [llm.session(random_tokens(12, seed=seed)) for seed in range(4)]
    texts = [session.tokens for session in sessions]
    for turn in range(120):
        which = int(rng.integers(len(sessions)))
        session, text = sessions[which], texts[which]
        match int(rng.integers(6)):
            case 0 if len(text) < 60:
                text += random_tokens(int(rng.integers(1, 9)), seed=turn)
                session.append(text[len(session) :])
            case 1 if len(text) < 60:
                found = session.generate(greedy(4)).outputs[0].token_ids
                assert llama.continues(text, found)
                text += found
            case 2 if len(text) > 8:
                to = int(rng.integers(1, len(text)))
                session.rewind(to=to)
                del text[to:]
            case 3:
                child = session.fork()
                sessions[which].close()
                sessions[which] = child
            case 4:
                assert_near(session.logits(), llama.logits(text)[-1])
            case _:
                prompts = [random_tokens(int(n), seed=turn) for n in rng.integers(10, 50, 3)]
                for prompt, output in zip(prompts, llm.generate(prompts, greedy(6)), strict=True):
                    assert llama.continues(prompt, output.outputs[0].token_ids)
        assert sessions[which].tokens == text
        check_store(llm)
    out, back = swaps(llm)
    assert out > 10
    assert back > 5
    for session in sessions:
        session.close()
    assert store.used == 0
    logging.getLogger("quire.engine").setLevel(logging.NOTSET)


# -- what it costs ---------------------------------------------------------------------------------


def test_rates_are_of_the_last_measurements() -> None:
    rate = Rate(most=2)
    assert rate.seconds(5) is None
    rate.add(10, 1)
    assert rate.seconds(5) == 0.5
    rate.add(30, 1)
    rate.add(10, 3)
    assert rate.seconds(10) == 1.0
    rate.forget_oldest()
    rate.forget_oldest()
    rate.forget_oldest()
    assert rate.seconds(1) is None


def test_the_cheaper_way_is_taken() -> None:
    costs = MoveCosts(torch.device("cpu"))
    costs.out.add(1000, 1)
    assert costs.moving_is_cheaper(1, 10**6), "nothing is known of computing"
    # 100 tokens in a second; a step whose results nobody waited for belongs to the next.
    costs.ran(60, 1, 0.1, waited=False)
    costs.ran(40, 1, 0.9, waited=True)
    costs.ran(3, 3, 50.0, waited=True)  # decodes do not count
    assert costs.prompts.seconds(100) == 1.0
    # There and back take 2 ms a byte, as nothing has come back yet.
    assert costs.moving_is_cheaper(100, 499)
    assert costs.moving_is_cheaper(100, 999, there=False)
    assert not costs.moving_is_cheaper(100, 1001, there=False)
    costs.back.add(1000, 3)
    assert costs.moving_is_cheaper(100, 249)
    assert not costs.moving_is_cheaper(100, 251)
    # A refusal forgets, and what is not known is measured.
    assert not costs.out.measured
    assert not costs.back.measured
    assert costs.moving_is_cheaper(10**9, 1)
    assert costs.out.measured


def test_costs_are_measured_as_it_runs(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, **TIGHT)
    store = store_of(llm)
    assert store.capacity > 0, "on unless it is turned off"
    force(llm)
    llm.generate(PROMPTS, greedy(COUNT))
    costs = store.costs
    assert sum(amount for amount, _ in costs.prompts.measured) >= sum(LENGTHS)
    assert len(costs.out.measured) == len(costs.back.measured) == min(8, swaps(llm)[0])
    store.worth_moving = costs.moving_is_cheaper
    assert token_ids(llm.generate(PROMPTS, greedy(COUNT))) == [llama.greedy(prompt, COUNT) for prompt in PROMPTS]
