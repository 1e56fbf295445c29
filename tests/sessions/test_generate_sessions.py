"""Sessions among the prompts of ``generate``: one batch, each goes on as by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.async_llm.test_async import MakeAsync, make  # noqa: F401  (a fixture)
from tests.small_llms import CONTEXT, Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, record

from quire import LLM, AsyncLLM, FailedPrecondition, InvalidArgument, SamplingParams
from quire.base.errors import QuireError
from quire.base.sampling_params import BeamSearchParams

PROMPT = random_tokens(20)


def drawn(seed: int, count: int = 6) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=count, ignore_eos=True)


def ids_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def contents(sessions: Sequence[Any]) -> list[list[int]]:
    return [session.tokens for session in sessions]


def test_branches_of_attention(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    go_on_as_by_themselves(make_llm(checkpoint))


def test_branches_of_recurrent_states(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    go_on_as_by_themselves(make_llm(hybrid, kv_cache_memory="4MiB"))


def go_on_as_by_themselves(llm: LLM) -> None:
    parent = llm.session(PROMPT)
    alone, together = parent.fork(n=4), parent.fork(n=4)
    singles = [branch.generate(drawn(seed)).outputs[0] for seed, branch in enumerate(alone)]
    text = random_tokens(9, seed=5)
    plain = llm.generate(text, drawn(9))[0].outputs[0]
    params = [drawn(0), drawn(1), drawn(9), drawn(2), drawn(3)]
    recorder = record(llm)
    outputs = llm.generate([*together[:2], text, *together[2:]], params)
    expected = [*singles[:2], plain, *singles[2:]]
    assert [output.outputs[0] for output in outputs] == expected, "in order"
    assert [output.prompt_token_ids for output in outputs] == [PROMPT, PROMPT, text, PROMPT, PROMPT]
    assert contents(together) == contents(alone)
    assert max(len(step.chunks) for step in recorder.forwards) == 5, "one batch"
    assert len(recorder.forwards) <= 6 + 1
    # They go on, one parameter for all of them.
    again = llm.generate(together, greedy(3))
    assert [ids_of(output) for output in again] == [ids_of(branch.generate(greedy(3))) for branch in alone]
    assert contents(together) == contents(alone)
    assert llm.generate(parent, greedy(2))[0].prompt_token_ids == PROMPT, "a single one, not in a list"
    check(llm)


def test_a_window_of_its_own(small: LLM) -> None:
    """A windowed session is checked by its own limits: beyond the context too."""
    sessions = [small.session(random_tokens(30, seed=seed), window=16, sink=2) for seed in range(3)]
    single = sessions[2].fork()
    small.generate(sessions, greedy(CONTEXT - 30))
    outputs = small.generate(sessions, greedy(60))
    assert all(len(session) == CONTEXT + 60 for session in sessions)
    assert outputs[0].outputs[0].finish_reason == "length"
    single.generate(greedy(CONTEXT - 30))
    single.generate(greedy(60))
    assert single.tokens == sessions[2].tokens


def refused(llm: LLM, kind: type[QuireError], message: str, *arguments: Any, **options: Any) -> None:
    """Nothing runs and nothing is queued."""
    recorder, engine = record(llm), engine_of(llm)
    sequences = set(engine.runner.state.sequences.ids)
    with pytest.raises(kind, match=message):
        llm.generate(*arguments, **options)
    assert not recorder.steps
    assert not engine.requests.by_id
    assert set(engine.runner.state.sequences.ids) == sequences
    assert not any(state.busy for state in engine.branches.sessions.values())


def test_refusals_come_before_anything_runs(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm, other = make_llm(llama), make_llm(llama)
    one, two = llm.session(PROMPT), llm.session(PROMPT[:5])
    foreign, closed, empty = other.session(PROMPT), llm.session(PROMPT), llm.session()
    closed.close()
    kinds: list[tuple[type[QuireError], str, list[Any], Any]] = [
        (InvalidArgument, "prompt 2 is the same session as prompt 0", [one, two, one], greedy(2)),
        (InvalidArgument, "prompt 1 is a session of another LLM", [one, foreign], greedy(2)),
        (FailedPrecondition, "prompt 1: generate: the session is closed", [one, closed], greedy(2)),
        (InvalidArgument, "prompt 1: the prompt is empty", [one, empty], greedy(2)),
        (
            InvalidArgument,
            "prompt 1: This model's maximum context .* max_tokens up to",
            [two, one],
            greedy(CONTEXT - 15),
        ),
        (InvalidArgument, "prompt 0: n is 2; a session continues once", [one, two], drawn(1).replace(n=2)),
        (InvalidArgument, "1 sampling_params for 2 prompts", [one, two], [greedy(2)]),
        (InvalidArgument, "prompts.1 must be text or token ids, got None", [one, None], greedy(2)),
        (InvalidArgument, "prompt 1: token id 97 is outside", [one, [97]], greedy(2)),
    ]
    for kind, message, prompts, params in kinds:
        refused(llm, kind, message, prompts, params)
    refused(llm, InvalidArgument, "for sessions only: a session has its own", [one, two], greedy(2), cache_salt="a")
    assert llm.generate([one, PROMPT], greedy(2), cache_salt="a"), "the salt is for the text"
    stream = two.stream(greedy(5))
    next(stream)
    with pytest.raises(FailedPrecondition, match="prompt 1: generate: the session is generating"):
        llm.generate([one, two], greedy(2))
    stream.close()
    with pytest.raises(InvalidArgument, match=r"prompts\.0 must be text or token ids, got <Session of"):
        llm.beam_search([one], BeamSearchParams(beam_width=2, max_tokens=2))  # type: ignore[list-item]


def test_what_changed_since_the_check(small: LLM) -> None:
    """Another thread had a session meanwhile: none of them is lent."""
    one, two = small.session(PROMPT), small.session(PROMPT[:5])
    prepared = small.requests.prepare([one, two], greedy(4))
    stream = two.stream(greedy(5))
    next(stream)
    with pytest.raises(FailedPrecondition, match="prompt 1: generate: the session is generating"):
        small.requests.submit(prepared)
    stream.close()
    assert len(engine_of(small).requests.by_id) == 0
    one.append([1])
    requests = small.requests.submit(small.requests.prepare([one], greedy(4)))
    engine_of(small).run(requests[0])
    assert len(one) == len(PROMPT) + 1 + 4


def test_one_that_fails_leaves_the_others(small: LLM) -> None:
    def broken(ids: list[int], logits: Any) -> Any:
        if len(ids) == 2:
            raise ValueError("no more")
        return logits

    one, two = small.session(PROMPT), small.session(PROMPT)
    twin = two.fork()
    params = greedy(5).replace(logits_processors=[broken])
    with pytest.raises(QuireError, match="no more"):
        twin.generate(params)
    outputs = small.generate([one, two], [greedy(5), params])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert "no more" in str(outputs[1].outputs[0].error)
    assert len(one) == len(PROMPT) + 5
    assert two.tokens == twin.tokens == PROMPT
    assert ids_of(two.generate(greedy(3))) == ids_of(twin.generate(greedy(3)))
    check(small)


def test_an_interrupt_leaves_what_a_single_one_does(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [small.session(random_tokens(10 + seed, seed=seed)) for seed in range(3)]
    before = contents(sessions)
    expected = [fork.generate(greedy(8)).outputs[0].token_ids for fork in (one.fork() for one in sessions)]
    engine, steps = engine_of(small), 0
    execute = engine.runner.execute

    def interrupted(step: Any, *more: Any) -> Any:
        nonlocal steps
        steps += bool(step.chunks)
        if steps == 4:
            steps += 1
            raise KeyboardInterrupt
        return execute(step, *more)

    monkeypatch.setattr(engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small.generate(sessions, greedy(8))
    for session, tokens, rest in zip(sessions, before, expected, strict=True):
        assert session.tokens == tokens + rest[:3], "what was generated stays"
        assert ids_of(session.generate(greedy(5))) == rest[3:]
    check(small)


def test_async(make: MakeAsync) -> None:  # noqa: F811
    """Awaited: a list of sessions, and many ``session.generate`` at once, are one batch
    either way."""
    llm = make()

    async def use(llm: AsyncLLM) -> None:
        parent = await llm.session(PROMPT)
        alone, together, gathered = await parent.fork(n=3), await parent.fork(n=3), await parent.fork(n=3)
        params = [drawn(seed, 12) for seed in range(3)]
        singles = [await one.generate(each) for one, each in zip(alone, params, strict=True)]
        recorder = record(llm._llm)
        outputs = await llm.generate([*together, PROMPT], [*params, greedy(3)])
        assert max(len(step.chunks) for step in recorder.forwards) == 4
        assert [ids_of(one) for one in outputs[:3]] == [ids_of(one) for one in singles]
        recorder.steps.clear()
        found = await asyncio.gather(*(one.generate(each) for one, each in zip(gathered, params, strict=True)))
        assert max(len(step.chunks) for step in recorder.forwards) == 3
        assert [ids_of(one) for one in found] == [ids_of(one) for one in singles]
        assert contents(together) == contents(alone) == contents(gathered)
        assert (await llm.generate(parent, greedy(2)))[0].prompt_token_ids == PROMPT
        with pytest.raises(InvalidArgument, match="prompt 1 is the same session as prompt 0"):
            await llm.generate([parent, parent], greedy(2))
        task = asyncio.create_task(llm.generate(together, greedy(200)))
        while not any(one._session._branch.busy for one in together):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for one in together:
            await one.generate(greedy(1))  # free again
            await one.close()

    asyncio.run(use(llm))
