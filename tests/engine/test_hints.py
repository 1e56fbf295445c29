"""Hints of programs: what is pinned stays for its time and within its share, what is demoted goes,
what is prefetched is there, and the more urgent runs first. No hint changes a token.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tests.branches.test_stored_state import force, squeeze
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, token_ids

from quire import LLM, CacheHints, InvalidArgument, Pin, Session
from quire.base.errors import FailedPrecondition
from quire.base.hints import HintResult, PinAccount
from quire.base.outputs import RequestOutput
from quire.base.types import BASE
from quire.branches.prefix_cache import RadixCache
from quire.engine.request import BACKGROUND
from quire.engine.requests import Requests

from .test_scheduler import World


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, llm: LLM) -> None:
        self.now = 100.0
        engine_of(llm).prefix_pins.clock = lambda: self.now


def pinned(output: RequestOutput) -> list[HintResult]:
    return [result for result in output.hints if result.hint == "pin"]


def fill(llm: LLM, seed: int, count: int = 12, length: int = 60) -> None:
    """Run prompts that need all of a small pool."""
    rng = random.Random(seed)
    for _ in range(count):
        llm.generate(random_tokens(length, seed=rng.randrange(10**6)), greedy(2))


def evict_all(llm: LLM) -> None:
    """Evict whatever can be."""
    engine = engine_of(llm)
    with engine.lock:
        while engine.branches.evict():
            pass
    check(llm)


def cached(llm: LLM, prompt: list[int], **options: Any) -> int:
    return llm.generate(prompt, greedy(1), **options)[0].num_cached_tokens


# -- pins ------------------------------------------------------------------------------------------


def test_a_pin_stays_for_its_time(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    """For states of each kind: all tokens, and those that forget, at the marked place."""
    llm = make_llm(checkpoint, pool=512, host_memory=0)
    clock = Clock(llm)
    prompt = random_tokens(70)
    output = llm.generate(prompt, greedy(3), hints=CacheHints(pins=[Pin(tokens=40, ttl=60, name="system")]))[0]
    assert output.hints == (HintResult(hint="pin", name="system", tokens=40, ttl=60),)
    assert output.outputs[0].token_ids == checkpoint.greedy(prompt, 3)
    check(llm)
    fill(llm, 1)
    check(llm)
    other = [*prompt[:40], *random_tokens(20, seed=9)]
    again = llm.generate(other, greedy(3))[0]
    assert again.num_cached_tokens == 40
    assert again.outputs[0].token_ids == checkpoint.greedy(other, 3)
    clock.now += 59.9
    fill(llm, 2)
    assert cached(llm, other) >= 40
    clock.now += 0.1
    fill(llm, 3)
    assert len(engine_of(llm).prefix_pins) == 0
    assert cached(llm, other) == 0, "it was evicted like others once its time was over"
    check(llm)


def test_a_pin_of_a_hybrid(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """The state at the marked place is kept, where a prompt with another end goes on."""
    llm = make_llm(hybrid, kv_cache_memory="2MiB")
    prompt = random_tokens(70)
    output = llm.generate(prompt, greedy(3), hints=CacheHints(pins=[Pin(tokens=33), Pin()]))[0]
    assert [(result.tokens, result.done) for result in output.hints] == [(33, True), (70, True)]
    evict_all(llm)
    other = [*prompt[:33], *random_tokens(20, seed=9)]
    again = llm.generate(other, greedy(4))[0]
    assert again.num_cached_tokens == 33
    assert again.outputs[0].token_ids == hybrid.greedy(other, 4)
    check(llm)


def test_a_pin_of_tokens_that_are_cached_already(small: LLM) -> None:
    """Nothing has to run for it, and pinning again only moves the end of its time."""
    clock, prompt = Clock(small), random_tokens(50)
    small.generate(prompt, greedy(2))
    for ttl in (50, 20):
        output = small.generate([*prompt, 3], greedy(1), hints=CacheHints(pins=[Pin(tokens=30, ttl=ttl)]))[0]
        assert [(result.tokens, result.ttl) for result in output.hints] == [(30, ttl)]
        assert len(engine_of(small).prefix_pins) == 1
    clock.now += 49
    small.generate([1], greedy(1))
    evict_all(small)
    assert cached(small, [*prompt[:30], 1, 2]) == 30, "the longer time counts"
    clock.now += 1
    small.generate([1], greedy(1))
    evict_all(small)
    assert cached(small, [*prompt[:30], 1, 2]) <= 1


def test_a_pin_longer_than_the_prompt_is_cut(small: LLM) -> None:
    output = small.generate(random_tokens(20), greedy(1), hints=CacheHints(pins=[Pin(tokens=1000)]))[0]
    assert pinned(output)[0].tokens == 20


def test_pins_keep_to_their_share(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Beyond it they are refused with the numbers, and the request goes on; of another account they
    are not even counted.
    """
    llm = make_llm(llama, pool=512)
    mine, other = PinAccount(share=0.25, total=0.5), PinAccount(share=0.25, total=0.5)
    first = llm.generate(random_tokens(100), greedy(2), hints=CacheHints(pins=[Pin()], account=mine))[0]
    assert pinned(first)[0].done
    prompt = random_tokens(60, seed=2)
    second = llm.generate(prompt, greedy(2), hints=CacheHints(pins=[Pin(), Pin(tokens=10)], account=mine))[0]
    assert second.outputs[0].token_ids == llama.greedy(prompt, 2)
    small_, large = pinned(second)
    assert (small_.done, small_.tokens) == (True, 10)
    assert (large.done, large.tokens) == (False, None)
    assert "may hold 8" in large.reason
    check(llm)
    third = llm.generate(prompt, greedy(2), hints=CacheHints(pins=[Pin()], account=other))[0]
    assert pinned(third)[0].done
    fourth = llm.generate(random_tokens(100, seed=3), greedy(2), hints=CacheHints(pins=[Pin()], account=other))[0]
    assert "all pinned" in pinned(fourth)[0].reason or "your pinned" in pinned(fourth)[0].reason


def test_pins_of_a_salt_are_found_under_it_only(small: LLM) -> None:
    prompt = random_tokens(40)
    small.generate(prompt, greedy(1), cache_salt="a", hints=CacheHints(pins=[Pin()]))
    evict_all(small)
    assert cached(small, [*prompt, 1], cache_salt="b") == 0
    assert cached(small, [*prompt, 1], cache_salt="a") == 40


def test_pins_of_one_account_do_not_prolong_those_of_another(small: LLM) -> None:
    clock, prompt = Clock(small), random_tokens(40)
    short, long = PinAccount(share=0.5, total=1), PinAccount(share=0.5, total=1)
    for account, ttl in ((short, 10), (long, 100)):
        small.generate([*prompt, 1], greedy(1), hints=CacheHints(pins=[Pin(tokens=40, ttl=ttl)], account=account))
    assert len(engine_of(small).prefix_pins) == 2
    clock.now += 50
    small.generate([1], greedy(1))
    assert len(engine_of(small).prefix_pins) == 1
    evict_all(small)
    assert cached(small, [*prompt, 2]) == 40


def test_what_cannot_be_pinned_says_why(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, enable_prefix_caching=False)
    output = llm.generate(random_tokens(20), greedy(1), hints=CacheHints(pins=[Pin()]))[0]
    assert not pinned(output)[0].done
    assert "enable_prefix_caching" in pinned(output)[0].reason
    with pytest.raises(FailedPrecondition, match="enable_prefix_caching"):
        llm.prefetch(random_tokens(20))


def test_a_session_takes_hints(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    """Their prompt is all that it holds; what is pinned outlives its state, and itself."""
    llm = make_llm(checkpoint, host_memory=0)
    prompt = random_tokens(60)
    session = llm.session(prompt)
    hints = CacheHints(pins=[Pin(name="a"), Pin(tokens=40, name="b")], priority=2)
    output = session.generate(greedy(4), hints=hints)
    assert {(one.hint, one.name, one.done) for one in output.hints} == {
        ("priority", "", True),
        ("pin", "a", True),
        ("pin", "b", True),
    }
    held = {one.name: one.tokens for one in pinned(output)}
    assert held["a"] == 60
    forgets = engine_of(llm).runner.state.forgets
    assert held["b"] == 40 or forgets
    squeeze(llm)
    assert session.num_computed == 0
    assert session.generate(greedy(4)).reuse.by_tier == {"pool": 60}
    session.close()
    squeeze(llm)
    assert cached(llm, [*prompt, 1]) == 60
    assert cached(llm, prompt[:50]) == (0 if forgets and not held["b"] else 49 if not forgets else held["b"])
    check(llm)


@pytest.mark.parametrize("start", [0, 20])
def test_a_session_whose_state_is_demoted_goes_on(make_llm: MakeLLM, checkpoint: Checkpoint, start: int) -> None:
    """It comes back from memory, or is computed, at its next use."""
    for host in (0, None):
        llm = make_llm(checkpoint, host_memory=host)
        if host is None:
            force(llm)
        session = llm.session(random_tokens(60))
        output = session.generate(greedy(4), hints=CacheHints(demote=start))
        assert [(one.hint, one.done) for one in output.hints] == [("demote", True)]
        assert output.hints[0].tokens == 63 - start
        kept = session.num_computed
        assert kept == start or (engine_of(llm).runner.state.forgets and kept < start)
        assert (llm.generate(session.tokens, greedy(1))[0].reuse.by_tier.get("memory", 0) > 0) == (host is None)
        text = session.tokens
        assert session.generate(greedy(4)).outputs[0].token_ids == checkpoint.greedy(text, 4)
        check(llm)


def test_what_a_session_does_not_take_says_why(small: LLM) -> None:
    hints = CacheHints(pins=[Pin()], demote=0)
    windowed = small.session(random_tokens(20), window=16, sink=2)
    output = windowed.generate(greedy(2), hints=hints)
    assert [(one.hint, one.done) for one in output.hints] == [("pin", False), ("demote", True)]
    assert "pin the session" in output.hints[0].reason
    held = small.session(random_tokens(30))
    held.pin()
    output = held.generate(greedy(2), hints=CacheHints(demote=0))
    assert (output.hints[0].tokens, held.num_computed) == (0, 31)
    assert "only this prompt" in output.hints[0].reason
    for call in (held.generate, held.stream):
        with pytest.raises(InvalidArgument, match="CacheHints"):
            call(hints=3)  # type: ignore[operator]
    for verb in (lambda: held.append([1], priority=2**31), lambda: held.compute(priority="1")):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument) as caught:
            verb()
        assert caught.value.field == "priority"
    windowed.close()
    held.close()


def test_computing_says_what_was_reused(small: LLM) -> None:
    """As a prefetch does."""
    prompt = random_tokens(40)
    session = small.session()
    assert session.compute().cached == 0
    session.append(prompt)
    assert session.compute().by_tier == {"pool": 39}
    squeeze(small)
    small.generate(prompt[:20], greedy(1))
    assert session.compute().cached == 20
    assert session.num_computed == 39
    session.close()


def test_an_urgent_session_comes_first(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with what is appended before."""
    llm = make_llm(llama, max_num_batched_tokens=8)
    seen: list[int] = []
    queue = Requests.queue
    monkeypatch.setattr(
        Requests,
        "queue",
        lambda self, samples, *given: (seen.append(samples[0].seat.priority), queue(self, samples, *given)),
    )
    session = llm.session([1, 2, 3])
    session.append(random_tokens(20), priority=-4)
    session.generate(greedy(1), hints=CacheHints(priority=-3))
    squeeze(llm)
    session.compute(priority=5)
    assert seen == [0, -4, -3, 5]


def test_a_request_that_ends_early_refuses_its_pins(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, max_num_batched_tokens=16)
    engine = engine_of(llm)
    hints = CacheHints(pins=[Pin(tokens=10), Pin(tokens=90)])
    request = engine.submit(np.array(random_tokens(100)), greedy(2), hints=hints, key=("", None))[0]
    engine.step()
    engine.end([request])
    assert request.asked.hints is not None
    assert [(result.done, result.tokens) for result in request.asked.hints.results] == [(True, 10), (False, None)]
    assert "did not run" in request.asked.hints.results[1].reason
    check(llm)


def test_what_a_failed_request_pinned_is_not_handed_out(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A state that is not finite must not become a prefix of others."""

    def broken(token_ids: list[int], logits: Any) -> Any:
        raise ValueError("broken")

    llm = make_llm(llama)
    prompt = random_tokens(30)
    params = greedy(2, logits_processors=[broken])
    output = llm.generate(prompt, params, hints=CacheHints(pins=[Pin()]))[0]
    assert output.outputs[0].finish_reason == "error"
    assert [(result.done, result.reason) for result in pinned(output)] == [(False, "the request failed")]
    assert len(engine_of(llm).prefix_pins) == 0
    check(llm)


def test_unloading_an_adapter_is_not_held_up(small: LLM) -> None:
    """Pins are no users of an adapter, and end with the prefix cache's other states."""
    small.generate(random_tokens(20), greedy(1), hints=CacheHints(pins=[Pin()]))
    small.reset_prefix_cache()
    assert len(engine_of(small).prefix_pins) == 0
    check(small)


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: Pin(tokens=0), "tokens"),
        (lambda: Pin(tokens=True), "tokens"),
        (lambda: Pin(ttl=0), "ttl"),
        (lambda: Pin(ttl=float("inf")), "ttl"),
        (lambda: Pin(name=3), "name"),  # type: ignore[arg-type]
        (lambda: CacheHints(pins=[3]), "pins"),  # type: ignore[list-item]
        (lambda: CacheHints(pins=Pin()), "pins"),  # type: ignore[arg-type]
        (lambda: CacheHints(demote=-1), "demote"),
        (lambda: CacheHints(priority=2**31), "priority"),
        (lambda: CacheHints(account=None), "account"),  # type: ignore[arg-type]
    ],
)
def test_bad_hints_are_refused(made: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        made()
    assert caught.value.field == field


def test_what_is_no_hints_is_refused(small: LLM) -> None:
    for call in (small.generate, small.prefetch):
        with pytest.raises(InvalidArgument, match="CacheHints"):
            call([1, 2], hints={"pins": []})  # type: ignore[operator]


# -- demotion --------------------------------------------------------------------------------------


@pytest.mark.turns(1)
def test_what_is_demoted_goes(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint, host_memory=0)
    prompt = random_tokens(60)
    output = llm.generate(prompt, greedy(4), hints=CacheHints(demote=20))[0]
    assert output.hints == (HintResult(hint="demote", tokens=43),)
    check(llm)
    again = llm.generate(prompt, greedy(4))[0]
    assert again.num_cached_tokens <= 20
    if not engine_of(llm).runner.state.forgets:
        assert again.num_cached_tokens == 20
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_demotion_takes_nothing_from_others(small: LLM) -> None:
    """Neither from a pin, nor from a prompt that goes on from there, nor from a session."""
    prompt = random_tokens(60)
    small.generate(prompt, greedy(2), hints=CacheHints(pins=[Pin(tokens=30)]))
    with small.session(prompt[:50]) as session:
        small.generate(prompt, greedy(2), hints=CacheHints(demote=0))
        check(small)
        assert session.num_computed == 49
        assert cached(small, [*prompt[:50], 1]) == 49
    longer = [*prompt, *small.generate(prompt, greedy(2))[0].outputs[0].token_ids, 1, 2]
    small.generate(longer, greedy(2))
    output = small.generate(prompt, greedy(2), hints=CacheHints(demote=0))[0]
    assert output.hints[0].tokens == 0
    assert "only this prompt" in output.hints[0].reason
    assert cached(small, [*longer, 1]) >= len(longer)


def test_all_samples_are_demoted(small: LLM) -> None:
    prompt = random_tokens(40)
    output = small.generate(prompt, greedy(6, n=3, temperature=1, seed=1), hints=CacheHints(demote=0))[0]
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    assert engine_of(small).runner.state.empty(), "nothing else was there"


# -- prefetching -----------------------------------------------------------------------------------


def test_a_prefetched_prompt_is_there(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint)
    prompt = random_tokens(60)
    output = llm.prefetch(prompt, hints=CacheHints(pins=[Pin(ttl=9)]))
    assert (output.outputs, output.prompt_token_ids, output.num_cached_tokens) == ([], prompt[:-1], 0)
    assert output.hints == (HintResult(hint="pin", tokens=59, ttl=9),)
    assert cached(llm, prompt) == 59
    assert llm.prefetch(prompt).num_cached_tokens == 58, "the last token of a run runs"
    assert token_ids(llm.generate([prompt], greedy(3))) == [checkpoint.greedy(prompt, 3)]
    assert len(llm.prefetch([7]).prompt_token_ids) == 1
    check(llm)


def test_a_prefetched_prompt_of_a_hybrid(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="2MiB")
    prompt = random_tokens(60)
    llm.prefetch(prompt)
    assert cached(llm, prompt) == 59


def test_a_prefetch_waits_for_others(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """It runs in small steps, beside which a new request begins at once."""
    llm = make_llm(llama, max_num_batched_tokens=32)
    engine = engine_of(llm)
    request = engine.submit_prefix(np.array(random_tokens(200)), key=("", None))
    assert request.seat.priority == BACKGROUND
    engine.step()
    assert request.branch.computed == 32
    prompt = random_tokens(40, seed=5)
    urgent = engine.submit(np.array(prompt), greedy(3), key=("", None))[0]
    engine.step()
    assert (urgent.branch.computed, request.branch.computed) == (32, 32)
    engine.step()
    assert (len(urgent.output.token_ids), request.branch.computed) == (1, 56), "it gets what others leave"
    engine.run([urgent, request])
    assert urgent.output.token_ids == llama.greedy(prompt, 3)


# -- priority --------------------------------------------------------------------------------------


def test_the_more_urgent_is_admitted_first() -> None:
    """Lower values first, and equal ones in order of arrival."""
    world = World(seqs=1)
    order = [world.submit(8, priority=priority) for priority in (5, 0, -1, 0, 5)]
    seen = []
    while not world.scheduler.idle:
        request = world.step().requests[0]
        seen.append(order.index(request))
        world.finish(request)
    assert seen == [2, 1, 3, 0, 4]


def test_the_less_urgent_is_preempted_first() -> None:
    """The youngest of them, however old they are beside the urgent ones."""
    world = World(num_pages=6, budget=64, caching=False)
    low_old, low_young = (world.submit(7, priority=3) for _ in range(2))
    world.step()
    high = world.submit(7)
    world.step()
    assert {high, low_old, low_young} == set(world.scheduler.running)
    for _ in range(2):
        world.step()
    assert world.scheduler.waiting == [low_young]
    world.step()
    assert low_young in world.scheduler.waiting
    assert high in world.scheduler.running


def test_an_urgent_prompt_passes_a_long_one() -> None:
    """It need not wait until a running prompt of a lower priority has been read to its end."""
    world = World(num_pages=100, budget=16)
    long = world.submit(200, priority=1)
    world.step()
    urgent = world.submit(12)
    assert world.step().requests == (urgent, long)
    assert (urgent.branch.computed, long.branch.computed) == (12, 20)
    same = world.submit(12, priority=1)
    world.step()
    assert same.branch.computed == 0, "equals wait for their turn"


def test_what_an_urgent_prompt_waits_for_is_urgent() -> None:
    """A prompt whose beginning is being computed waits for that, which therefore must not wait."""
    world = World(num_pages=200, budget=16)
    tokens = list(range(100))
    slow = world.submit(tokens, priority=BACKGROUND)
    world.step()
    other = world.submit(200, priority=1)
    urgent = world.submit([*tokens, 7])
    world.step()
    assert slow.seat.priority == 0
    while slow.branch.remaining > 1:
        done = min(16, slow.branch.remaining)
        scheduled = world.step()
        assert scheduled.requests[0] is slow
        assert len(scheduled.step.chunks[0].tokens) == done
    assert other.branch.computed > 0
    world.finish(slow)
    world.step()
    assert urgent.branch.computed == 101


# -- the cache -------------------------------------------------------------------------------------


def test_cached_sequences_on_the_way_of_tokens() -> None:
    """Against a list of all: with a state that forgets, so that several stand on one way."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        cache = RadixCache(lambda seq, length: length)
        held: dict[int, tuple[list[int], bool]] = {}
        for seq in range(12):
            tokens, live = rng.integers(0, 2, int(rng.integers(1, 7))).tolist(), bool(rng.integers(0, 3) == 0)
            gone = cache.insert(seq, tokens, "k", live=live)
            held[seq] = (tokens, live)
            for one in gone:
                del held[one]
        wanted, beyond = rng.integers(0, 2, 6).tolist(), int(rng.integers(0, 6))
        found = cache.cached_on(wanted, "k", beyond)
        assert sorted(found) == sorted(
            (seq, len(tokens))
            for seq, (tokens, live) in held.items()
            if not live and len(tokens) > beyond and wanted[: len(tokens)] == tokens
        )
        assert cache.cached_on(wanted, "other", 0) == []


# -- random lives ----------------------------------------------------------------------------------


class PinLife:
    """Random prompts, pins, demotions, evictions and times, beside a list of what must be there."""

    SHARE = 0.35

    def __init__(self, llm: LLM, model: Checkpoint, seed: int) -> None:
        self.llm, self.model, self.rng, self.clock = llm, model, random.Random(seed), Clock(llm)
        self.accounts = [PinAccount(share=self.SHARE, total=0.6) for _ in range(2)]
        self.stems = [random_tokens(50, seed=one) for one in range(3)]
        self.pinned: dict[tuple[int, str, tuple[int, ...]], float] = {}
        self.refused = 0
        self.sessions: dict[str, Session] = {}

    def prompt(self) -> list[int]:
        stem = self.rng.choice(self.stems)
        return [*stem[: self.rng.randint(4, 50)], *random_tokens(self.rng.randint(1, 20), seed=self.rng.randrange(99))]

    def step(self) -> None:
        rng, engine = self.rng, engine_of(self.llm)
        match rng.randrange(6):
            case 0:
                self.clock.now += rng.choice((1, 5, 30))
                engine.step()
            case 1:
                with engine.lock:
                    for _ in range(rng.randint(1, 4)):
                        engine.branches.evict()
            case _:
                self.request(self.prompt())
        self.look()

    def request(self, prompt: list[int]) -> None:
        rng = self.rng
        whose, salt = rng.randrange(2), rng.choice("ab")
        wanted = [rng.randint(1, 80) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
        pins = [Pin(tokens=count, ttl=rng.choice((2, 20, 60)), name=str(i)) for i, count in enumerate(wanted)]
        hints = CacheHints(
            pins=pins,
            demote=rng.choice((None, None, 0, 10, 40)),
            priority=rng.choice((-1, 0, 3)),
            account=self.accounts[whose],
        )
        if rng.random() < 0.3:
            output = self.turn(prompt, salt, hints)
            prompt = output.prompt_token_ids
            assert self.model.continues(prompt, output.outputs[0].token_ids)
        elif rng.random() < 0.25:
            output = self.llm.prefetch(prompt, cache_salt=salt, hints=hints)
        else:
            output = self.llm.generate(prompt, greedy(2), cache_salt=salt, hints=hints)[0]
            assert self.model.continues(prompt, output.outputs[0].token_ids)
        results = pinned(output)
        assert {result.name for result in results} == {pin.name for pin in pins}
        for result in results:
            pin = pins[int(result.name)]
            assert pin.tokens is not None
            self.refused += not result.done
            if result.done:
                assert result.tokens is not None
                assert result.tokens <= min(pin.tokens, len(prompt))
                name = (whose, salt, tuple(prompt[: result.tokens]))
                self.pinned[name] = max(self.pinned.get(name, 0.0), self.clock.now + pin.ttl)

    def turn(self, prompt: list[int], salt: str, hints: CacheHints) -> RequestOutput:
        """One of a session that has been there for some time, or of a new one."""
        if salt not in self.sessions:
            self.sessions[salt] = self.llm.session(prompt, cache_salt=salt)
        else:
            self.sessions[salt].append(prompt[-3:], priority=hints.priority)
        output = self.sessions[salt].generate(greedy(2), hints=hints)
        if len(self.sessions[salt]) > 70:
            self.sessions.pop(salt).close()
        return output

    def look(self) -> None:
        engine = engine_of(self.llm)
        with engine.lock:
            engine.prefix_pins.expire()
            self.pinned = {name: until for name, until in self.pinned.items() if until > self.clock.now}
            assert len(engine.prefix_pins) == len(self.pinned)
            cache, state = engine.cache, engine.runner.state
            assert cache is not None
            for _, salt, tokens in self.pinned:
                key = engine.branches.prefix_key(("", salt), BASE)
                assert cache.peek(list(tokens), key) == len(tokens)
            for account in self.accounts:
                held = [one.seq for one in engine.branches.sessions.values() if one.account is account]
                used = state.pages_held([seq for seq in held if seq is not None], [])
                sizes = state.pool_sizes()
                assert all(have <= size * self.SHARE for have, size in zip(used, sizes, strict=True))
        check(self.llm)


def live(llm: LLM, model: Checkpoint, seed: int, steps: int) -> None:
    life = PinLife(llm, model, seed)
    for _ in range(steps):
        life.step()
    assert life.refused


def test_random_lives(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    live(make_llm(checkpoint, pool=480), checkpoint, 5, 60)


def test_random_lives_of_hybrids(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    live(make_llm(hybrid, kv_cache_memory="400KiB"), hybrid, 6, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_random_lives(make_llm: MakeLLM, checkpoint: Checkpoint, hybrid: Checkpoint, seed: int) -> None:
    live(make_llm(checkpoint, pool=480), checkpoint, seed, 300)
    live(make_llm(hybrid, kv_cache_memory="400KiB"), hybrid, seed, 200)
