"""Slow grammars: their masks are made beside the engine, others go on meanwhile, and every text is
what it is without.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.small_llms import MakeLLM, check, engine_of, greedy, random_tokens, record

from quire import AsyncLLM, SamplingParams, StructuredOutputs
from quire.engine.engine import Engine
from quire.engine.request import Request
from quire.grammars import slow_masks
from quire.grammars.grammars import Grammars
from quire.grammars.matcher import GRAMMAR_ENDED, GrammarMatcher
from quire.grammars.slow_masks import SHARE, Coming, SlowMasks
from quire.sampling.filters import Words
from quire.text.tokenizer import Tokenizer

from .test_structured import LANGUAGES, Spelled, mixed, samples, spell

AMBIGUOUS = {"grammar": 'start: s\ns: s s | s s s | "a" | ""'}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Spelled:
    return spell(tmp_path_factory.mktemp("slow"), "byte_level")


@pytest.fixture
def all_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token takes more than a slow one."""
    monkeypatch.setattr(slow_masks, "SLOW_SECONDS", -1.0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What masks that are made beside the engine wait for."""
    opened = threading.Event()
    fill = GrammarMatcher.fill

    def behind_it(self: GrammarMatcher, masks_MB: Words, row: int) -> float:
        if threading.current_thread().name.startswith("quire-slow-grammars"):
            assert opened.wait(60)
        return fill(self, masks_MB, row)

    monkeypatch.setattr(GrammarMatcher, "fill", behind_it)
    yield opened
    opened.set()


def submit(engine: Engine, params: SamplingParams, seed: int = 0) -> Request:
    (request,) = engine.submit(np.array(random_tokens(20, seed=seed)), params)
    return request


def begun(engine: Engine, *requests: Request) -> None:
    """Step until each has a token."""
    for _ in range(4):
        if all(request.output.token_ids for request in requests):
            return
        engine.step()
    raise AssertionError("a prompt of 20 tokens takes no 4 steps")


# -- what is generated -----------------------------------------------------------------------------


def test_the_same_whether_slow_or_not(make_llm: MakeLLM, model: Spelled, monkeypatch: pytest.MonkeyPatch) -> None:
    """All languages, greedy and drawn, alone and together, preempted, in sessions."""
    params = [*mixed(5), *(greedy(9, structured_outputs=one.wanted) for one in LANGUAGES.values())]
    prompts = [random_tokens(20, seed=i) for i in range(len(params))]
    expected = samples(make_llm(model.checkpoint).generate(prompts, params))
    monkeypatch.setattr(slow_masks, "SLOW_SECONDS", -1.0)
    started: list[object] = []
    start = SlowMasks.start
    monkeypatch.setattr(SlowMasks, "start", lambda self, one: started.append(one) or start(self, one))

    llm = make_llm(model.checkpoint)
    assert samples(llm.generate(prompts, params)) == expected
    # Every token with a grammar but the last of a text had its mask made ahead.
    texts = [sample for one, row in zip(params, expected, strict=True) if one.structured_outputs for sample in row]
    assert len(started) == sum(len(tokens) - 1 for tokens, _ in texts)
    check(llm)
    alone = make_llm(model.checkpoint, enable_prefix_caching=False)
    assert [samples(alone.generate(p, q))[0] for p, q in zip(prompts, params, strict=True)] == expected
    tight = make_llm(model.checkpoint, pool=96, page_size=4, max_num_batched_tokens=16)
    assert samples(tight.generate(prompts, params)) == expected
    assert engine_of(tight).scheduler.num_preemptions > 0
    check(tight)
    one = next(i for i, each in enumerate(params) if each.structured_outputs is not None and each.n == 1)
    with llm.session(prompts[one]) as session:
        output = session.generate(params[one]).outputs[0]
        assert (output.token_ids, output.finish_reason) == expected[one][0]


def test_the_same_in_the_background(model: Spelled, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = mixed(3)
    prompts = [random_tokens(20, seed=i) for i in range(len(params))]
    expected = samples(make_llm(model.checkpoint).generate(prompts, params))
    monkeypatch.setattr(slow_masks, "SLOW_SECONDS", -1.0)

    async def run() -> Any:
        async with AsyncLLM(model.checkpoint.path, device="cpu", dtype="float32", kv_cache_memory="8MiB") as llm:
            return await llm.generate(prompts, params)

    assert samples(asyncio.run(run())) == expected


def test_a_grammar_that_ends_beside_the_engine_ends_its_request(
    make_llm: MakeLLM, model: Spelled, monkeypatch: pytest.MonkeyPatch, all_slow: None
) -> None:
    """With the reason, while others go on."""
    monkeypatch.setattr("quire.grammars.formats.MASK_ITEMS", 300)
    only_a = {model.id(b"a"): 100.0}
    llm = make_llm(model.checkpoint)
    plain = greedy(50)
    prompt = random_tokens(20, seed=1)
    expected = samples(llm.generate(prompt, plain))
    outputs = llm.generate([prompt, prompt], [greedy(200, structured_outputs=AMBIGUOUS, logit_bias=only_a), plain])
    assert samples(outputs[1:]) == expected
    (ended,) = outputs[0].outputs
    assert ended.finish_reason == "error"
    assert (ended.error or "").startswith(GRAMMAR_ENDED)
    assert "items" in (ended.error or "")
    assert 3 < len(ended.token_ids) < 200
    check(llm)


def test_slow_is_what_takes_long(make_llm: MakeLLM, model: Spelled, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of its thread, mask and token together; and no longer than that."""
    clock = iter(range(1000))
    step = [0.0]
    monkeypatch.setattr("quire.grammars.matcher.time.thread_time", lambda: next(clock) * step[0])
    tokenizer = Tokenizer.from_directory(model.checkpoint.path)
    assert tokenizer is not None
    grammars = Grammars(tokenizer, model.vocab_size, threads=False)
    matcher = grammars.matcher(StructuredOutputs(regex="a+"))
    for seconds, slow in ((0.6, True), (0.4, False), (0.6, True)):
        # Between two looks at the clock: once around the mask, once around the token.
        step[0] = seconds * slow_masks.SLOW_SECONDS
        grammars.allowed({0: matcher}, {0: ()})
        matcher.accept(model.id(b"a"))
        assert matcher.slow == slow
    step[0] = 0.4 * slow_masks.SLOW_SECONDS
    assert matcher.accepts(model.id(b"a"))
    grammars.allowed({0: matcher}, {0: ()})
    matcher.accept(model.id(b"a"))
    assert matcher.slow, "a look at a token counts as well"


# -- others ----------------------------------------------------------------------------------------


def test_others_go_on_while_a_mask_is_made(
    make_llm: MakeLLM, model: Spelled, all_slow: None, gate: threading.Event
) -> None:
    llm = make_llm(model.checkpoint)
    engine = engine_of(llm)
    slow = submit(engine, greedy(9, structured_outputs={"regex": "[ab]+"}))
    begun(engine, slow)
    quick = submit(engine, greedy(30), seed=1)
    for _ in range(31):
        engine.step()
    assert quick.output.finish_reason == "length"
    assert len(slow.output.token_ids) == 1
    assert not slow.finished
    late = submit(engine, greedy(3), seed=2)
    engine.run([late])
    assert len(slow.output.token_ids) == 1
    gate.set()
    engine.run([slow])
    assert len(slow.output.token_ids) == 9
    check(llm)


def test_one_that_was_preempted_meanwhile(
    make_llm: MakeLLM, model: Spelled, all_slow: None, gate: threading.Event
) -> None:
    """It comes back when its mask is there, with the tokens that it would have had."""
    params = greedy(9, structured_outputs={"regex": "[ab]+"})
    gate.set()
    expected = samples(make_llm(model.checkpoint).generate(random_tokens(20, seed=0), params))
    gate.clear()
    llm = make_llm(model.checkpoint)
    engine = engine_of(llm)
    slow = submit(engine, params)
    begun(engine, slow)
    engine.scheduler.preempt(slow)
    quick = submit(engine, greedy(5), seed=1)
    engine.run([quick])
    assert slow in engine.scheduler.waiting
    gate.set()
    engine.run([slow])
    assert [(slow.output.token_ids, slow.output.finish_reason)] == expected[0]
    check(llm)


@pytest.mark.parametrize("way", ["cancel", "close", "fail"])
def test_it_may_end_while_its_mask_is_made(
    make_llm: MakeLLM, model: Spelled, all_slow: None, gate: threading.Event, way: str
) -> None:
    """Its pages are free at once, and a mask whose turn had not come is not made."""
    llm = make_llm(model.checkpoint)
    engine = engine_of(llm)
    requests = [submit(engine, greedy(9, structured_outputs={"regex": "[ab]+"}), seed=i) for i in range(2)]
    begun(engine, *requests)
    queued = requests[1].output.matcher._coming  # type: ignore[union-attr]
    assert not queued.ready  # type: ignore[union-attr]
    if way == "cancel":
        for request in requests:
            assert engine.cancel(request.request_id)
        engine.step()
    elif way == "close":
        llm.close()
    else:
        engine.end(requests)
    assert [request.output.finish_reason for request in requests] == ["cancelled"] * 2
    assert queued.dropped  # type: ignore[union-attr]
    check(llm)


def test_with_nothing_else_to_do_it_waits(
    make_llm: MakeLLM, model: Spelled, all_slow: None, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not turn in circles: each step that ran nothing has waited, without the
    engine's lock.
    """
    llm = make_llm(model.checkpoint)
    engine = engine_of(llm)
    slow = submit(engine, greedy(4, structured_outputs={"regex": "[ab]+"}))
    begun(engine, slow)
    waits: list[bool] = []
    wait = SlowMasks.wait

    def waiting(self: SlowMasks, until: Callable[[], bool]) -> None:
        waits.append(engine.lock.owned)
        wait(self, until)

    monkeypatch.setattr(SlowMasks, "wait", waiting)
    for _ in range(3):
        assert engine.step() == []
    assert waits == [False] * 3
    gate.set()
    engine.run([slow])
    assert len(slow.output.token_ids) == 4


def test_whether_others_take_part(make_llm: MakeLLM, model: Spelled, all_slow: None, gate: threading.Event) -> None:
    llm = make_llm(model.checkpoint)
    engine = engine_of(llm)
    assert engine.grammars is not None
    slow = submit(engine, greedy(9, structured_outputs={"regex": "[ab]+"}))
    begun(engine, slow)
    quick = submit(engine, greedy(3), seed=1)
    engine.step()
    assert engine.grammars.slow.shared
    engine.run([quick])
    engine.step()
    assert not engine.grammars.slow.shared


def test_who_waits_for_a_mask_takes_no_seat(
    make_llm: MakeLLM, model: Spelled, all_slow: None, gate: threading.Event
) -> None:
    llm = make_llm(model.checkpoint, max_num_seqs=2)
    engine = engine_of(llm)
    slow = [submit(engine, greedy(9, structured_outputs={"regex": "[ab]+"}), seed=i) for i in range(2)]
    begun(engine, *slow)
    quick = [submit(engine, greedy(5), seed=2 + i) for i in range(3)]
    recorder = record(llm)
    engine.run(quick)
    assert [len(request.output.token_ids) for request in slow] == [1, 1]
    gate.set()
    engine.run(slow)
    assert [len(request.output.token_ids) for request in slow] == [9, 9]
    assert max(len(step.chunks) for step in recorder.steps) == 2
    check(llm)


# -- the share -------------------------------------------------------------------------------------


def test_slow_grammars_rest_for_others() -> None:
    now = [100.0]
    masks = SlowMasks(clock=lambda: now[0])
    slow = slow_masks.SLOW_SECONDS
    masks.spent(50.0)
    assert masks.rest() == 0, "there are no others"
    masks.shared = True
    assert masks.rest() == 0, "they pay nothing for what was before them"
    masks.spent(slow)
    assert masks.rest() == 0, "so much anybody may take"
    # Of half a second of work and the rest after it, the work is a fifth.
    masks.spent(0.5 + slow)
    assert 0.5 / (0.5 + masks.rest()) == pytest.approx(SHARE)
    now[0] += 1.5
    masks.spent(0.25 + slow)
    assert masks.rest() == pytest.approx(4 * 0.5 - 1.5 + 4 * 0.25)
    now[0] += 10
    assert masks.rest() == 0
    masks.spent(0.1 + slow)
    assert masks.rest() == pytest.approx(0.4), "time that was not used is not saved up"
    masks.shared = False
    masks.shared = True
    assert masks.rest() == 0
    masks.spent(0.1 + slow)
    masks.close()
    assert masks.rest() == 0


def test_beside_a_gpu_only_the_engines_thread_counts() -> None:
    masks = SlowMasks(workers=3, clock=lambda: 100.0)
    masks.shared = True
    masks.spent(1.0, beside=True)
    assert masks.rest() == 0
    masks.spent(1.0)
    assert masks.rest() > 3
    alone = SlowMasks(workers=1, clock=lambda: 100.0)
    alone.shared = True
    alone.spent(1.0, beside=True)
    assert alone.rest() > 3


def test_masks_come_in_turn_and_after_the_rest() -> None:
    now = [0.0]
    masks = SlowMasks(clock=lambda: now[0])
    masks.shared = True
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        masks.spent(1.0 + slow_masks.SLOW_SECONDS, beside=True)
        return number

    coming = [Coming(lambda number=number: make(number)) for number in range(4)]  # type: ignore[misc]
    assert all(one.ready and one.result() is None for one in coming), "nothing is made by itself"
    for one in coming:
        masks.start(one)
    assert coming[0].result() == 0
    assert not coming[1].ready
    now[0] = 3.9
    assert made == [0]
    coming[2].drop()
    assert coming[2].ready
    now[0] = 4.1
    assert coming[1].result() == 1
    masks.shared = False
    assert coming[3].result() == 3
    assert coming[2].result() is None
    assert made == [0, 1, 3], "what was dropped is not made, and costs nobody a rest"


def test_the_thread_goes_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_masks, "LINGER_SECONDS", 0.0)
    masks = SlowMasks()
    for number in range(3):
        one = Coming(lambda number=number: number)  # type: ignore[misc]
        masks.start(one)
        assert one.result() == number
        deadline = time.monotonic() + 60
        while masks._threads:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_raises_is_raised_where_it_is_wanted() -> None:
    masks, one = SlowMasks(), Coming[int](lambda: 1 // 0)
    masks.start(one)
    with pytest.raises(ZeroDivisionError):
        one.result()
    after = Coming(lambda: 1)
    masks.start(after)
    assert after.result() == 1


def test_the_end_of_a_process_does_not_wait_for_a_rest() -> None:
    """A rest of an hour, and somebody who wants the mask after it."""
    script = (
        "from quire.grammars.slow_masks import Coming, SlowMasks\n"
        "masks = SlowMasks()\n"
        "masks.shared = True\n"
        "masks.spent(900.0)\n"
        "masks.start(Coming(lambda: print('made')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "made\n"


def test_beside_a_gpu_the_slow_one_is_found(model: Spelled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of many at a time tell no times; when they took long, those of the next step do."""
    tokenizer = Tokenizer.from_directory(model.checkpoint.path)
    assert tokenizer is not None
    grammars = Grammars(tokenizer, model.vocab_size, threads=True)
    grammars._threads = 3
    wanted = [StructuredOutputs(**language.wanted) for language in LANGUAGES.values()]
    matchers = dict(enumerate(map(grammars.matcher, wanted)))
    ends = dict.fromkeys(matchers, (3,))
    one_by_one = {i: grammars.allowed({i: matcher}, ends)[i] for i, matcher in matchers.items()}
    timed: list[GrammarMatcher] = []
    fill = GrammarMatcher.fill

    def filling(self: GrammarMatcher, masks_MB: Words, row: int) -> float:
        timed.append(self)
        return fill(self, masks_MB, row)

    monkeypatch.setattr(GrammarMatcher, "fill", filling)
    for seconds, expected in ((60.0, []), (-1.0, []), (60.0, list(matchers.values())), (60.0, [])):
        monkeypatch.setattr(slow_masks, "SLOW_SECONDS", seconds)
        found = grammars.allowed(matchers, ends)
        assert all(np.array_equal(found[i], one_by_one[i]) for i in matchers)
        assert sorted(map(id, timed)) == sorted(map(id, expected))
        timed.clear()
