"""Decodes of pipeline stages take turns: they give what whole batches give, whatever comes, ends,
fails or is cancelled while some are in flight.

Here all stages are in one runner, which runs a step when it begins, and keeps its logits back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.test_steps_ahead import FAMILIES, REQUEST, array, run
from tests.small_llms import (
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

from quire import LLM, SamplingParams
from quire.base.errors import RanksBroken
from quire.base.types import Step
from quire.engine.decode_turns import DecodeTurns
from quire.runner.local import Runner, StepOutput

PROMPTS = [random_tokens(count, seed=count) for count in (20, 9, 11, 5, 30, 14, 8)]


class Stages:
    """A ``StagedRunner`` over one runner."""

    def __init__(self, runner: Runner, stages: int) -> None:
        self.runner, self.stages = runner, stages
        self.under_way: deque[StepOutput] = deque()
        self.most = 0
        """The most steps that were under way at a time."""
        self.sizes: list[int] = []
        """Decodes of each step."""
        self.failing: list[BaseException] = []
        """Errors of the next steps that end."""

    def begin(self, step: Step) -> Any:
        output = self.runner.execute(step)
        self.under_way.append(output)
        self.most = max(self.most, len(self.under_way))
        self.sizes.append(len(step.chunks))
        return output

    def finish(self, step: Any) -> StepOutput:
        # After a failed step the engine reads no others that were under way.
        while self.under_way.popleft() is not step:
            pass
        if self.failing:
            raise self.failing.pop()
        return step  # type: ignore[no-any-return]


def in_turn(llm: LLM, stages: int = 2, least: int = 1) -> Stages:
    """Let decodes of an LLM take turns."""
    stepper = engine_of(llm).stepper
    found = Stages(engine_of(llm).runner, stages)
    stepper.turns = DecodeTurns(found, stepper.decodes_ahead, stepper.in_flight, least)
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """Two LLMs of a family, of which the second one lets decodes take turns."""
    name = request.param
    made = checkpoints.get(name) or make_family(name, tmp_path_factory.mktemp(name))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 4}
    both = LLM(made.path, **options), LLM(made.path, **options)
    in_turn(both[1], 3)
    yield both
    for one in both:
        one.close()
        assert_empty(one)


@pytest.mark.turns(6)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=2, max_size=7))
def test_random_requests(pair: tuple[LLM, LLM], requests: list[dict[str, Any]]) -> None:
    """They come and go at any step, more than there are seats, and end by all reasons."""
    whole, turns = (run(llm, requests) for llm in pair)
    assert turns == whole


@pytest.mark.parametrize("stages", [2, 3, 9])
def test_each_stage_has_a_group(make_llm: MakeLLM, llama: Checkpoint, stages: int) -> None:
    llm = make_llm(llama)
    found = in_turn(llm, stages)
    outputs = llm.generate(PROMPTS, greedy(12))
    assert token_ids(outputs) == [llama.greedy(prompt, 12) for prompt in PROMPTS]
    assert found.most == min(stages, len(PROMPTS))
    # The first token of each is a prompt's.
    assert sum(found.sizes) == 11 * len(PROMPTS)
    assert max(found.sizes) - min(found.sizes) <= 1
    check(llm)


def test_few_requests_run_as_one_batch(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, enable_prefix_caching=False)
    found = in_turn(llm, 2, least=4)
    llm.generate(PROMPTS, greedy(5))
    assert found.sizes == []
    llm.generate([*PROMPTS, random_tokens(4)], greedy(5))
    assert found.sizes == [4] * 8
    found.sizes.clear()
    # One ends: those that are left are too few for two groups.
    llm.generate([*PROMPTS, random_tokens(4)], [greedy(9)] * 7 + [greedy(3)])
    assert found.sizes == [4] * 5


def test_uneven_groups_are_made_anew(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    found = in_turn(llm)
    counts = [12, 12, 12, 3, 3, 3, 12]
    outputs = llm.generate(PROMPTS, [greedy(count) for count in counts])
    assert token_ids(outputs) == [llama.greedy(prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    # Three of the second group's four end.
    assert found.sizes[-10:] == [2] * 10


def test_a_group_that_is_left_alone_is_divided(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    found = in_turn(llm)
    counts = [12, 12, 12, 3, 3, 3, 3]
    outputs = llm.generate(PROMPTS, [greedy(count) for count in counts])
    assert token_ids(outputs) == [llama.greedy(prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    assert found.sizes[-10:] == [1, 2] * 5


def test_whatever_the_drawing_needs(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Users' processors, penalties, samples of one prompt, and logits of prompts."""
    seen: list[int] = []

    def note(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens))
        return logits

    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True, presence_penalty=1.5, logprobs=2),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[note]),
        SamplingParams(temperature=0.9, seed=2, n=3, max_tokens=7, ignore_eos=True, top_p=0.7),
        greedy(4),
        greedy(9, stop_token_ids=llama.greedy(PROMPTS[4], 5)[4:]),
        greedy(9, prompt_logprobs=1),
        greedy(1),
    ]
    llm = make_llm(llama)
    found = in_turn(llm, 3)
    expected = make_llm(llama).generate(PROMPTS, params)
    del seen[:]
    assert token_ids(llm.generate(PROMPTS, params)) == token_ids(expected)
    assert found.most == 3
    assert seen == sorted(seen)
    check(llm)


def test_sessions_continue_behind_a_cancelled_turn(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A session holds the token that was in flight when its request ended."""
    llm = make_llm(llama)
    found = in_turn(llm)
    engine = engine_of(llm)
    session = llm.session(PROMPTS[0])
    stream = iter(session.stream(greedy(20)))
    others = [engine.submit(array(prompt), greedy(12))[0] for prompt in PROMPTS[1:4]]
    for _ in range(5):
        next(stream)
    assert found.under_way
    stream.close()
    check(llm)
    kept = session.tokens
    assert kept == [*PROMPTS[0], *llama.greedy(PROMPTS[0], len(kept) - len(PROMPTS[0]))]
    with session.fork(at=len(kept) - 1) as child:
        assert token_ids([child.generate(greedy(3))]) == [llama.greedy(kept[:-1], 3)]
    assert token_ids([session.generate(greedy(5))]) == [llama.greedy(kept, 5)]
    engine.run(others)
    assert [one.output.token_ids for one in others] == [llama.greedy(prompt, 12) for prompt in PROMPTS[1:4]]


def test_a_finished_request_draws_nothing(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    found = in_turn(llm)
    engine = engine_of(llm)
    seen: list[int] = []

    def note(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens))
        return logits

    stream = iter(llm.session(PROMPTS[0]).stream(greedy(20, logits_processors=[note])))
    others = [engine.submit(array(prompt), greedy(12))[0] for prompt in PROMPTS[1:4]]
    for _ in range(5):
        next(stream)
    assert found.under_way
    stream.close()
    count = len(seen)
    engine.run(others)
    assert len(seen) == count


def test_a_small_pool(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Requests are preempted by the scheduler alone, once no step is in flight."""
    llm = make_llm(llama, kv_cache_memory="40KiB", page_size=4, enable_prefix_caching=False)
    found = in_turn(llm)
    prompts = [random_tokens(20, seed=seed) for seed in range(5)]
    outputs = llm.generate(prompts, greedy(40))
    assert token_ids(outputs) == [llama.greedy(prompt, 40) for prompt in prompts]
    assert llm.metrics()["quire:num_preemptions_total"] > 0
    assert found.most == 2
    check(llm)


@pytest.mark.parametrize("error", [RuntimeError("a cable"), RanksBroken("a process has ended")])
def test_a_failed_turn_ends_its_own_requests(make_llm: MakeLLM, llama: Checkpoint, error: Exception) -> None:
    llm = make_llm(llama)
    found = in_turn(llm)
    engine = engine_of(llm)
    requests = [engine.submit(array(prompt), greedy(9))[0] for prompt in PROMPTS]
    while not found.under_way:
        engine.step()
    found.failing.append(error)
    engine.run(requests)
    ended = [one for one in requests if one.output.error is not None]
    assert len(ended) == 4
    assert all(str(error) in str(one.output.error) for one in ended)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        if request not in ended:
            assert request.output.token_ids == llama.greedy(prompt, 9)
    check(llm)


def test_interrupted_turns_run_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    found = in_turn(llm, 3)
    engine = engine_of(llm)
    requests = [engine.submit(array(prompt), greedy(12))[0] for prompt in PROMPTS]
    chance = random.Random(0)
    interrupts = 0
    while engine.has_work:
        if found.under_way and chance.random() < 0.3:
            found.failing.append(KeyboardInterrupt())
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            assert not engine.stepper.in_flight.turns
        check(llm)
    assert interrupts > 2
    assert [one.output.token_ids for one in requests] == [llama.greedy(prompt, 12) for prompt in PROMPTS]


def test_closed_while_others_have_their_turn(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    found = in_turn(llm)
    engine = engine_of(llm)
    requests = [engine.submit(array(prompt), greedy(40))[0] for prompt in PROMPTS]
    while not found.under_way:
        engine.step()
    llm.close()
    assert {one.output.finish_reason for one in requests} == {"cancelled"}
    assert not engine.stepper.in_flight.turns
