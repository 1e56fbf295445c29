"""Steps that are queued before the tokens of those before are known: they give what steps give that
wait, whatever ends, fails, comes or is cancelled meanwhile.

The CPU computes at once, so here a step ahead saves nothing; everything else is as on a GPU.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.small_llms import (
    CONTEXT,
    EOS,
    Checkpoint,
    MakeLLM,
    assert_empty,
    check,
    engine_of,
    greedy,
    make_family,
    random_tokens,
    token_ids,
)
from torch import Tensor

from quire import LLM, SamplingParams
from quire.base.errors import InvalidArgument, QuireError
from quire.base.sampling_params import StructuredOutputs
from quire.base.types import Add, Chunk, Inputs, Step
from quire.engine.in_flight import PATIENCE, DecodesAhead
from quire.sampling import filters
from quire.sampling.draws import Draws
from quire.sampling.logit_edits import FAILED
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampler import sample, sample_later
from quire.sampling.seen_tokens import SeenTokens

PROMPT = random_tokens(20)


def ahead(llm: LLM) -> LLM:
    """Let an LLM on the CPU run ahead, which it does on GPUs only."""
    engine = engine_of(llm)
    engine.stepper.runs_ahead = engine.sampling.later = True
    engine.runner.state.sequences.slack = 1  # type: ignore[attr-defined]
    engine.sampling.seen = SeenTokens(llm.model.vocab_size, llm.model.device)
    return llm


def count(llm: LLM, name: str = "steps_ahead") -> float:
    return llm.metrics()[f"quire:{name}_total"]


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


# -- the same tokens -------------------------------------------------------------------------------

FAMILIES = ("llama", "gemma3", "qwen3-next", "mamba2", "deepseek-v3")
"""Full attention, windows beside it, a hybrid, recurrent layers alone, latent rows."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """Two LLMs of a family, of which the second one runs ahead."""
    name = request.param
    made = checkpoints.get(name) or make_family(name, tmp_path_factory.mktemp(name))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 4}
    both = LLM(made.path, **options), ahead(LLM(made.path, **options))
    yield both
    for one in both:
        one.close()
        assert_empty(one)


REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 40),
        "at": st.integers(0, 12),
        "cancel": st.sampled_from([None, None, None, 1, 3]),
        "params": st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.0, 0.8]),
                "max_tokens": st.integers(1, 12),
                "min_tokens": st.sampled_from([0, 0, 3]),
                "ignore_eos": st.booleans(),
                "n": st.sampled_from([1, 1, 2]),
                "top_p": st.sampled_from([1.0, 0.6]),
                "top_k": st.sampled_from([0, 5]),
                "logprobs": st.sampled_from([None, 2]),
                "repetition_penalty": st.sampled_from([1.0, 1.0, 1.0, 1.3]),
                "logit_bias": st.sampled_from([None, {7: 2.0}]),
                "stop_token_ids": st.lists(st.integers(0, 96), max_size=30),
            }
        ),
    }
)


def run(llm: LLM, requests: list[dict[str, Any]]) -> list[Any]:
    """Submit requests at their steps, cancel some, and return what became of each."""
    engine, submitted = engine_of(llm), {}
    for step in range(200):
        for number, one in enumerate(requests):
            if one["at"] == step:
                fields = {**one["params"], "seed": number}
                fields["n"] = fields["n"] if fields["temperature"] else 1
                fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
                tokens = array(random_tokens(one["prompt"], seed=number))
                submitted[number] = engine.submit(tokens, SamplingParams(**fields), request_id=str(number))
            if one["cancel"] is not None and one["at"] + one["cancel"] == step:
                engine.cancel(str(number))
        engine.step()
        check(llm)
        if len(submitted) == len(requests) and not engine.has_work:
            break
    assert not engine.has_work
    assert engine.stepper.in_flight.last is None or all(
        one.finished for one in engine.stepper.in_flight.last.drawing.ready
    )
    found = []
    for number, one in enumerate(requests):
        for sample_ in submitted[number]:
            if one["cancel"] is None:
                found.append(
                    (
                        sample_.output.token_ids,
                        sample_.output.finish_reason,
                        sample_.output.stop_reason,
                        sample_.output.kept,
                    )
                )
                assert len(sample_.output.logprobs) == (
                    len(sample_.output.token_ids) if one["params"]["logprobs"] else 0
                )
                assert [entry.chosen.token_id for entry in sample_.output.logprobs] in ([], sample_.output.token_ids)
            else:
                found.append(sample_.output.finish_reason in ("cancelled", "length", "stop"))
    return found


@pytest.mark.turns(6)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=1, max_size=7))
def test_random_requests(pair: tuple[LLM, LLM], requests: list[dict[str, Any]]) -> None:
    """They come and go at any step, more than there are seats, and end by all reasons."""
    waiting, running_ahead = (run(llm, requests) for llm in pair)
    assert running_ahead == waiting


def test_steps_are_ahead_of_their_tokens(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """All but the first one's decodes; the last step knows its tokens' end beforehand."""
    llm = ahead(make_llm(llama))
    (output,) = llm.generate(PROMPT, greedy(9))
    assert output.outputs[0].token_ids == llama.greedy(PROMPT, 9)
    assert (count(llm), count(llm, "tokens_withdrawn")) == (8, 0)
    assert llm.metrics()["quire:generation_tokens_total"] == 9
    other = make_llm(llama)
    other.generate(PROMPT, greedy(9))
    assert count(other) == 0


def test_each_call_gives_the_tokens_of_one_step(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = ahead(make_llm(llama))
    engine = engine_of(llm)
    (request,) = engine.submit(array(PROMPT), greedy(4))
    lengths = []
    while engine.has_work:
        assert engine.step() == [request]
        lengths.append(len(request.output.token_ids))
    assert lengths == [1, 2, 3, 4]


# -- what ends -------------------------------------------------------------------------------------


def test_a_stop_is_seen_a_step_late(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """The token behind it is taken back: it is no part of the session's state, which goes on."""
    tokens = llama.greedy(PROMPT, 9)
    stop = next(token for token in tokens[3:] if tokens.index(token) >= 3)
    cut = tokens.index(stop)
    found = []
    for llm in (make_llm(llama), ahead(make_llm(llama))):
        session = llm.session(PROMPT)
        output = session.generate(greedy(9, stop_token_ids=[stop])).outputs[0]
        assert (output.token_ids, output.stop_reason) == (tokens[: cut + 1], stop)
        state = engine_of(llm).runner.state
        found.append((session.tokens, [state.sequence_length(seq) for seq in state.sequences.ids]))
        assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(session.tokens[:-5], 5)
        check(llm)
        session.close()
    assert found[0] == found[1]
    assert count(llm, "tokens_withdrawn") == 1


def test_a_window_keeps_what_the_last_token_needs(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    """Also of a written session, which nothing computes again."""
    llm = ahead(make_llm(checkpoints["mistral"], page_size=1))
    session = llm.session(random_tokens(60))
    session.set_kv(0, v=torch.zeros(5, 2, 16), start=50)
    session.generate(greedy(8))
    bias = {EOS: 100.0}
    assert session.generate(greedy(3, ignore_eos=False, logit_bias=bias)).outputs[0].stop_reason == EOS
    assert len(session.generate(greedy(3)).outputs[0].token_ids) == 3
    assert count(llm, "tokens_withdrawn") == 1


def test_others_go_on_behind_a_stop(make_llm: MakeLLM, llama: Checkpoint) -> None:
    tokens = llama.greedy(PROMPT, 12)
    llm = ahead(make_llm(llama))
    prompts = [PROMPT, random_tokens(9), random_tokens(11)]
    params = [greedy(12, stop_token_ids=[tokens[4]]), greedy(12), greedy(3)]
    first, second, third = llm.generate(prompts, params)
    assert first.outputs[0].token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert token_ids([second, third]) == [llama.greedy(prompts[1], 12), llama.greedy(prompts[2], 3)]
    check(llm)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_cancelled_while_a_step_is_under_way(make_llm: MakeLLM, llama: Checkpoint, steps: int) -> None:
    llm = ahead(make_llm(llama))
    engine = engine_of(llm)
    (other,) = engine.submit(array(random_tokens(9)), greedy(12))
    (victim,) = engine.submit(array(PROMPT), greedy(40), request_id="victim")
    for _ in range(steps):
        engine.step()
    engine.cancel("victim")
    assert victim in engine.step()
    assert victim.output.finish_reason == "cancelled"
    assert len(victim.output.token_ids) == steps
    check(llm)
    engine.run([other])
    assert other.output.token_ids == llama.greedy(random_tokens(9), 12)


def test_closed_while_a_step_is_under_way(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = ahead(make_llm(llama))
    engine = engine_of(llm)
    session = llm.session(PROMPT)
    (request,) = engine.submit(array(random_tokens(9)), greedy(40))
    for _ in range(3):
        engine.step()
    session.close()
    check(llm)
    assert engine.stepper.in_flight.last is not None
    llm.close()
    assert request.output.finish_reason == "cancelled"
    assert engine.stepper.in_flight.last is None


# -- what is drawn ---------------------------------------------------------------------------------


def test_a_wide_nucleus_draws_again(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran behind the other token is taken back, and its random number is used again."""
    monkeypatch.setattr(filters, "TOP_WIDTH", 3)
    params = [
        SamplingParams(temperature=1.5, top_p=0.9, seed=seed, max_tokens=10, ignore_eos=True, logprobs=1)
        for seed in range(3)
    ]
    prompts = [random_tokens(n) for n in (5, 9, 14)]
    plain, llm = make_llm(llama), ahead(make_llm(llama))
    expected, found = plain.generate(prompts, params), llm.generate(prompts, params)
    assert token_ids(found) == token_ids(expected)
    assert count(llm) > 0
    assert count(llm, "tokens_withdrawn") > 3
    check(llm)


def test_others_go_on_while_a_wide_nucleus_draws_again(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that drew again run the right token in the step after the next, and no other before."""
    monkeypatch.setattr(filters, "TOP_WIDTH", 12)
    params = [
        greedy(24),
        SamplingParams(temperature=0.5, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=4, seed=6, max_tokens=24, ignore_eos=True),
    ]
    prompts = [random_tokens(n) for n in (5, 9, 14)]
    plain, llm = make_llm(llama), ahead(make_llm(llama))
    assert token_ids(llm.generate(prompts, params)) == token_ids(plain.generate(prompts, params))
    assert 0 < count(llm, "tokens_withdrawn") < count(llm)
    check(llm)


def test_random_numbers_go_back_in_their_order() -> None:
    """Of two draws of a request that nobody reads, the later one goes back first."""
    z_RV = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    samplers = [RequestSampler(SamplingParams(temperature=1.0, seed=row), vocab_size=50) for row in range(2)]
    first = sample_later(z_RV, samplers)
    second = sample_later(z_RV.flip(1), samplers)
    for one in (second, first):
        one.drop([0, 1])
        one.drop([0])  # a second time does nothing
    again = [RequestSampler(SamplingParams(temperature=1.0, seed=row), vocab_size=50) for row in range(2)]
    for z in (z_RV, z_RV.flip(1), z_RV):
        assert sample(z, samplers).token_ids == sample(z, again).token_ids


def test_draws_that_fail_leave_the_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    z_RV = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    samplers = [RequestSampler(SamplingParams(temperature=1.0, seed=3), vocab_size=50) for _ in range(2)]

    def fails(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Draws, "_draw", fails)
        with pytest.raises(torch.OutOfMemoryError):
            sample_later(z_RV, samplers[:1])
    assert samplers[0].uniform() == samplers[1].uniform()


def test_a_failed_row_gives_its_random_number_back_once() -> None:
    samplers = [RequestSampler(SamplingParams(temperature=1.0, seed=3), vocab_size=50) for _ in range(2)]
    drawn = sample_later(torch.full((1, 50), torch.nan), samplers[:1])
    assert drawn.read().token_ids == [FAILED]
    drawn.drop([0])
    assert [samplers[0].uniform() for _ in range(3)] == [samplers[1].uniform() for _ in range(3)]


def test_rows_with_processors_are_not_drawn_later() -> None:
    params = SamplingParams(temperature=0, logits_processors=[lambda tokens, logits: logits])
    with pytest.raises(InvalidArgument, match="logits_processors or bad_words need values on the host"):
        sample_later(torch.zeros(1, 9), [RequestSampler(params, vocab_size=9)])


@pytest.mark.parametrize("at", [1, 2, 4])
def test_not_finite_logits_end_one_request(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Its next step has run with some token by then."""
    llm = ahead(make_llm(llama))
    engine = engine_of(llm)
    execute, steps = engine.runner.execute, []

    def poisoned(step: Step) -> Any:
        output = execute(step)
        if step.chunks:
            steps.append(step)
            if len(steps) == at:
                output.rows(1)[:, 7] = torch.nan
        return output

    monkeypatch.setattr(engine.runner, "execute", poisoned)
    prompts = [random_tokens(n) for n in (5, 40, 7)]
    outputs = llm.generate(prompts, greedy(6))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert len(outputs[1].outputs[0].token_ids) == at - 1
    assert token_ids(outputs)[::2] == [llama.greedy(prompts[0], 6), llama.greedy(prompts[2], 6)]
    (again,) = llm.generate(prompts[1], greedy(6))
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, llama.greedy(prompts[1], 6))
    check(llm)


# -- what waits for the tokens ---------------------------------------------------------------------


@pytest.mark.parametrize("other", ["grammar", "processor"])
def test_who_looks_at_the_tokens_holds_all_back(other: str, python_llm: LLM) -> None:
    engine = engine_of(python_llm)
    fields: dict[str, dict[str, Any]] = {
        "grammar": {"structured_outputs": StructuredOutputs(regex="[a-z ]{12}")},
        "processor": {"logits_processors": [lambda tokens, logits: logits]},
    }
    params = [greedy(6), SamplingParams(temperature=0, max_tokens=6, **fields[other])]
    expected = python_llm.generate(["def add(", "x ="], params)
    try:
        found = ahead(python_llm).generate(["def add(", "x ="], params)
        assert token_ids(found) == token_ids(expected)
        assert count(python_llm) == 0
    finally:
        engine.stepper.runs_ahead = engine.sampling.later = False
        engine.sampling.seen = None


def test_a_small_pool(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Steps that need room wait: the scheduler makes it, or preempts."""
    llm = ahead(make_llm(llama, pool=96, page_size=4, max_num_seqs=8))
    prompts = [random_tokens(n) for n in (20, 21, 22, 9, 12)]
    outputs = llm.generate(prompts, greedy(20))
    assert token_ids(outputs) == [llama.greedy(prompt, 20) for prompt in prompts]
    assert llm.metrics()["quire:num_preemptions_total"] > 0
    assert count(llm) > 0
    check(llm)


def test_seats_are_taken_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = ahead(make_llm(llama, max_num_seqs=2))
    prompts = [random_tokens(n) for n in (5, 6, 7, 8, 9)]
    outputs = llm.generate(prompts, [greedy(n) for n in (12, 4, 9, 2, 7)])
    assert token_ids(outputs) == [llama.greedy(p, n) for p, n in zip(prompts, (12, 4, 9, 2, 7), strict=True)]
    assert count(llm) > 0


def test_who_waits_for_pages_is_looked_at_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Pages may come free without the end of a request."""
    llm = make_llm(llama, pool=256, page_size=4, max_num_seqs=8)
    engine = engine_of(llm)
    (running,) = engine.submit(array(random_tokens(9)), greedy(100))
    for _ in range(2):
        engine.step()
    chooser = DecodesAhead(engine.scheduler, engine.runner.state, None)
    assert chooser.step([running], 1) is not None
    assert chooser.step([running], 2) is None
    assert chooser.step([], 1) is None
    (waiting,) = engine.submit(array(PROMPT), greedy(3))
    assert chooser.step([running], 1) is None
    engine.scheduler.lacks_room = True
    found = [chooser.step([running], 1) is not None for _ in range(2 * PATIENCE)]
    assert found == ([True] * (PATIENCE - 1) + [False]) * 2
    engine.run([running, waiting])


def test_a_queue_that_lacks_pages_is_known(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=64, page_size=4, max_num_seqs=8, enable_prefix_caching=False)
    engine = engine_of(llm)
    (first,) = engine.submit(array(random_tokens(40)), greedy(12))
    engine.step()
    assert not engine.scheduler.lacks_room
    (second,) = engine.submit(array(random_tokens(41)), greedy(2))
    engine.step()
    assert engine.scheduler.lacks_room
    engine.end([first])
    assert not engine.scheduler.lacks_room
    engine.run([second])


# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "draw"])
def test_a_step_ahead_that_fails_runs_again(
    make_llm: MakeLLM,
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """Behind the tokens, with the same random numbers."""
    llm = ahead(make_llm(llama))
    engine = engine_of(llm)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    expected = token_ids(llm.generate([PROMPT, random_tokens(7)], params))
    owner, name = (engine.runner, "execute") if where == "forward" else (engine.sampling, "draw")
    before, calls = getattr(owner, name), []

    def failing(*given: Any, **options: Any) -> Any:
        if (
            any(isinstance(one, Step) and one.inputs.drawn is not None for one in given)
            or options.get("unread_R") is not None
        ):
            calls.append(given)
            if len(calls) in (2, 3):
                raise RuntimeError("the device is busy")
        return before(*given, **options)

    monkeypatch.setattr(owner, name, failing)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert token_ids(llm.generate([PROMPT, random_tokens(7)], params)) == expected
    assert len([one for one in caplog.records if "a step ahead failed" in one.message]) == 2
    check(llm)


def test_tokens_that_do_not_come_end_their_requests(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = ahead(make_llm(llama, max_num_seqs=2))
    read, calls = Draws.read, []

    def failing(draws: Draws) -> Any:
        calls.append(draws)
        if len(calls) == 3:
            raise RuntimeError("the device fell over")
        return read(draws)

    monkeypatch.setattr(Draws, "read", failing)
    prompts = [PROMPT, random_tokens(5), random_tokens(6)]
    outputs = llm.generate(prompts, greedy(6))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error", "length"]
    assert "the device fell over" in (outputs[0].outputs[0].error or "")
    assert outputs[2].outputs[0].token_ids == llama.greedy(prompts[2], 6)
    check(llm)


def test_an_interrupt_between_steps(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = ahead(make_llm(llama))
    engine = engine_of(llm)
    (other,) = engine.submit(array(random_tokens(9)), greedy(12))
    (hit,) = engine.submit(array(PROMPT), greedy(12))
    steps = []

    def after() -> None:
        steps.append(len(hit.output.token_ids))
        if len(steps) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run([hit], after)
    assert (hit.output.finish_reason, steps) == ("cancelled", [1, 2, 3, 4])
    check(llm)
    engine.run([other])
    assert other.output.token_ids == llama.greedy(random_tokens(9), 12)


@pytest.mark.parametrize("at", ["forward", "take"])
def test_a_broken_step_draws_the_same_tokens_again(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """An interrupt inside of a step: what was drawn and not read is drawn again."""
    llm = ahead(make_llm(llama))
    engine = engine_of(llm)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    expected = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    owner, name = (engine.runner, "execute") if at == "forward" else (engine.sampling, "take")
    before, calls = getattr(owner, name), []

    def breaking(*given: Any, **options: Any) -> Any:
        if name == "take" or given[0].chunks:
            calls.append(given)
        if len(calls) == 1:
            calls.append(given)
            raise KeyboardInterrupt
        return before(*given, **options)

    (request,) = engine.submit(array(PROMPT), params)
    for _ in range(2):
        engine.step()
    monkeypatch.setattr(owner, name, breaking)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check(llm)
    engine.run([request])
    assert request.output.token_ids == expected


# -- beside the rest -------------------------------------------------------------------------------


def test_under_adapters(make_llm: MakeLLM) -> None:
    """Each token runs under its request's adapter, also if the host does not know it."""
    options: dict[str, Any] = {"adapters": {"bundled": "tiny-python-docstrings"}, "kv_cache_memory": "8MiB"}
    found = []
    for llm in (make_llm("tiny-python", **options), ahead(make_llm("tiny-python", **options))):
        session, other = llm.session("def add(a, b):\n", adapter="bundled"), llm.session("def add(a, b):\n")
        outputs = llm.generate([session, other], greedy(12))
        found.append(token_ids(outputs))
        for one in (session, other):
            one.close()
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert count(llm) > 0


def test_streams_and_sessions_of_other_threads(make_llm: MakeLLM) -> None:
    """Sessions are forked, rewound and saved while a stream runs ahead."""
    llm = ahead(make_llm("tiny-python", kv_cache_memory="8MiB"))
    expected = llm.generate("import os\n", greedy(24))[0].outputs[0].text
    engine, rng = engine_of(llm), random.Random(3)
    assert llm.tokenizer is not None
    (request,) = engine.submit(array(llm.tokenizer.encode("import os\n")), greedy(24))
    session = llm.session("class Stack:\n")
    while not request.finished:
        engine.step()
        fork = session.fork()
        fork.append("    def push(self):\n")
        fork.rewind(n=rng.randrange(1, 4))
        assert fork.to_bytes()
        fork.close()
        check(llm)
    assert request.output.text == expected


def test_the_context_ends(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """No step runs beyond it."""
    llm = ahead(make_llm(llama, max_model_len=48))
    output = llm.generate(PROMPT, greedy(1).replace(max_tokens=None))[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("length", "context")
    assert output.token_ids == llama.greedy(PROMPT, 28)
    assert count(llm, "tokens_withdrawn") == 0
    longest = random_tokens(CONTEXT - 3)
    llm = ahead(make_llm(llama))
    assert llm.generate(longest, greedy(3))[0].outputs[0].token_ids == llama.greedy(longest, 3)


def test_time_is_told_once(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A step starts where the one before it has ended."""
    llm = ahead(make_llm(llama))
    llm.generate([PROMPT, random_tokens(7)], greedy(6))
    steps = engine_of(llm).timeline.steps()
    assert [step.decodes for step in steps] == [0, 2, 2, 2, 2, 2]
    assert [step.generated for step in steps] == [2] * 6
    for before, after in itertools.pairwise(steps):
        assert after.start >= before.start + before.seconds - 1e-9
        assert min(after.schedule_seconds, after.model_seconds, after.seconds) >= 0


def test_drawn_tokens_are_checked(small: LLM) -> None:
    runner = engine_of(small).runner
    seq = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),), chunks=(Chunk(seq, [1, 2]),)))
    step = Step(chunks=(Chunk(seq, [0]),))
    for drawn in (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
        with pytest.raises(InvalidArgument, match=r"drawn tokens must be int64 \[1\], got"):
            runner.execute(replace(step, inputs=Inputs(drawn=drawn)))
    with pytest.raises(QuireError, match="placeholders"):
        runner.execute(Step(chunks=(Chunk(seq, [-1]),), inputs=Inputs(drawn=torch.zeros(1, dtype=torch.int64))))
    assert runner.state.sequence_length(seq) == 2
    found = runner.execute(replace(step, inputs=Inputs(drawn=torch.tensor([9])))).logits_RV
    other = runner.new_seq()
    runner.execute(Step(edits=(Add(other),), chunks=(Chunk(other, [1, 2]),)))
    assert torch.equal(found, runner.execute(Step(chunks=(Chunk(other, [9]),))).logits_RV)
    for one in (seq, other):
        runner.state.remove_sequence(one)
