"""``AsyncLLM``: one batch for all tasks, streams, sessions, cancelling, errors, closing."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from inspect import iscoroutinefunction, isfunction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.sessions.test_session_chat import TEMPLATE
from tests.slow_steps import slow_steps
from tests.small_llms import (
    BYTES_PER_TOKEN,
    Checkpoint,
    MakeLLM,
    assert_empty,
    check,
    greedy,
    make_checkpoint,
    random_tokens,
    record,
    token_ids,
)

from quire import LLM, AsyncLLM, FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted, SamplingParams
from quire.async_llm.executor import AsyncExecutor, AsyncLlmExecutor
from quire.async_llm.stepper import Call, Job, Stepper
from quire.async_llm.stream import AsyncStream, SampleDelta
from quire.base.errors import Cancelled
from quire.base.sampling_params import BeamSearchParams
from quire.base.segments import BlendParams, Segment
from quire.engine.beam import search
from quire.executor import Executor, ExecutorInputs, LlmExecutor, PrefillInput, TextData
from small_tokenizers import saved

PROMPT = random_tokens(20)
LONG = greedy(230)
"""Goes on until somebody ends it."""

MakeAsync = Callable[..., AsyncLLM]
Use = Callable[[AsyncLLM], Awaitable[Any]]


@pytest.fixture
def make(llama: Checkpoint) -> Iterator[MakeAsync]:
    """Makes AsyncLLMs, and looks at the end for what they left: pages, threads."""
    made: list[AsyncLLM] = []

    def make(*, pool: int = 4096, **options: Any) -> AsyncLLM:
        given = {"device": "cpu", "dtype": "float32", "kv_cache_memory": pool * BYTES_PER_TOKEN, **options}
        made.append(AsyncLLM(llama.path, **given))
        slow_steps(made[-1], 0.005)
        return made[-1]

    yield make
    for llm in made:
        asyncio.run(llm.close())
        assert not llm._background.stepper._thread.is_alive()
        assert_empty(llm._llm)


@pytest.fixture
def llm(make: MakeAsync) -> AsyncLLM:
    return make()


def pages_free(llm: AsyncLLM) -> bool:
    """Whether nothing but the prefix cache holds pages."""
    with llm.engine.lock:
        llm.engine.reset_prefix_cache()
        return llm.engine.runner.state.empty()


def ends(llm: AsyncLLM) -> dict[str, int]:
    """How many requests ended, by reason."""
    found = llm.engine.snapshot()
    names = {reason: f'quire:request_success_total{{finished_reason="{reason}"}}' for reason in ("length", "cancelled")}
    return {reason: int(found[name]) for reason, name in names.items()}


def ids_of(deltas: Sequence[Any]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def hold_until(llm: AsyncLLM, count: int) -> None:
    """Let the first forward wait until so many jobs, or calls that are about to be some,
    are there."""
    stepper, execute = llm._background.stepper, llm.engine.runner.execute

    def holding(step: Any) -> Any:
        if step.chunks:
            llm.engine.runner.execute = execute  # type: ignore[method-assign]
            deadline = time.monotonic() + 30
            while len(stepper._inbox) + len(stepper._jobs) + stepper._callers < count:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        return execute(step)

    llm.engine.runner.execute = holding  # type: ignore[method-assign]


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


# -- generating ------------------------------------------------------------------------------------


def test_generate_is_that_of_llm(llm: AsyncLLM, llama: Checkpoint) -> None:
    async def use() -> None:
        outputs = await llm.generate([PROMPT, [3, 4, 5]], [greedy(7), greedy(3)])
        assert token_ids(outputs) == [llama.greedy(PROMPT, 7), llama.greedy([3, 4, 5], 3)]
        assert [output.prompt_token_ids for output in outputs] == [PROMPT, [3, 4, 5]]
        (one,) = await llm.generate(PROMPT, greedy(2), request_id="mine")
        assert one.request_id == "mine"
        assert one.num_cached_tokens == 19
        named = await llm.generate([PROMPT, [1]], greedy(1), request_id="many")
        assert [output.request_id for output in named] == ["many-0", "many-1"]
        assert await llm.generate([], greedy(1)) == []

    asyncio.run(use())


def test_tasks_share_steps(llm: AsyncLLM, llama: Checkpoint) -> None:
    prompts = [random_tokens(n, seed=1) for n in range(5, 29)]

    async def use() -> list[Any]:
        return await asyncio.gather(*(llm.generate(prompt, greedy(20)) for prompt in prompts))

    recorder = record(llm._llm)
    hold_until(llm, len(prompts))
    outputs = asyncio.run(use())
    for prompt, (output,) in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == llama.greedy(prompt, 20)
    # Alone each would take 20 steps. The first one ran before the others had come.
    assert max(len(step.chunks) for step in recorder.forwards) == len(prompts)
    assert len(recorder.forwards) <= 22
    check(llm._llm)


def test_sessions_share_steps(llm: AsyncLLM, llama: Checkpoint) -> None:
    async def converse(seed: int) -> None:
        text = random_tokens(10, seed=seed)
        async with await llm.session(text) as session:
            for turn in range(3):
                found = (await session.generate(greedy(8))).outputs[0].token_ids
                assert llama.continues(text, found)
                new = random_tokens(3, seed=turn)
                await session.append(new)
                text = text + found + new
            assert session.tokens == text

    async def use() -> None:
        await asyncio.gather(*(converse(seed) for seed in range(12)))

    recorder = record(llm._llm)
    hold_until(llm, 12)
    asyncio.run(use())
    assert max(len(step.chunks) for step in recorder.forwards) > 1
    # Alone each would take a step for its prompt, and in each turn eight for the answer and one for
    # what is added.
    assert len(recorder.forwards) < 12 * (1 + 3 * (8 + 1)) / 2
    assert pages_free(llm)


def test_beam_search_and_generate_together(llm: AsyncLLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)

    async def use() -> None:
        alone = llm._llm.requests.prepare_beams(PROMPT, params)[0]
        llm.engine.wait = None
        search(llm.engine, alone)
        llm.engine.wait = llm._background.stepper.wait
        found, _ = await asyncio.gather(llm.beam_search(PROMPT, params), llm.generate([5, 6], greedy(9)))
        assert [s.token_ids for s in found[0].sequences] == [s.token_ids for s in alone[0].output().sequences]
        task = asyncio.create_task(llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=200)))
        await eventually(lambda: llm.engine.num_running == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Between two rounds the engine has no work.
        await eventually(lambda: not llm._background.stepper._jobs)

    asyncio.run(use())
    assert pages_free(llm)


def test_refusals_are_those_of_llm(llm: AsyncLLM) -> None:
    async def first(stream: Any) -> None:
        await anext(stream)

    async def use() -> None:
        for call in (
            llm.generate([97], greedy(1)),
            llm.generate(PROMPT, [greedy(1)] * 2),
            llm.generate(PROMPT, greedy(1), request_id=""),
            first(llm.stream([97], greedy(1))),
            first(llm.stream([], greedy(1))),
            llm.session([97]),
            llm.beam_search(PROMPT, greedy(1)),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgument):
                await call
        with pytest.raises(QuireError):
            await llm.load_adapter("a", "./b")
        with pytest.raises(TypeError, match="max_length"):
            await llm.session(PROMPT, max_length=3)
        running = asyncio.create_task(llm.generate(PROMPT, LONG, request_id="twice"))
        await eventually(lambda: llm.engine.has_work)
        with pytest.raises(InvalidArgument, match="in use"):
            await llm.generate([1, 2], greedy(1), request_id="twice")
        assert await llm.abort("twice")
        assert (await running)[0].outputs[0].finish_reason == "cancelled"

    asyncio.run(use())
    assert pages_free(llm)
    with pytest.raises(TypeError, match="max_length"):
        AsyncLLM("tiny-python", max_length=3)


def test_a_slow_reader_gets_what_came_before_a_failure(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.runner
    execute, left = runner.execute, [5]

    def breaking(*arguments: Any, **options: Any) -> Any:
        left[0] -= bool(arguments[0].chunks)
        if left[0] == 0 and arguments[0].chunks:
            raise RuntimeError("broken")
        return execute(*arguments, **options)

    async def use() -> list[int]:
        found: list[int] = []
        stream = llm.stream(PROMPT, LONG)
        try:
            async for delta in stream:
                assert delta.finish_reason is None
                found += delta.token_ids
                await eventually(lambda: not llm.engine.has_work)  # it has failed, and nobody has looked
        except QuireError:
            return found
        raise AssertionError("the stream ended without its error")

    alone = asyncio.run(llm.generate(PROMPT, greedy(4)))[0].outputs[0].token_ids
    asyncio.run(llm.reset_prefix_cache())
    monkeypatch.setattr(runner, "execute", breaking)
    found = asyncio.run(use())
    assert found == alone[: len(found)]
    assert len(found) == 4


def test_a_session_that_is_closed_while_it_streams(llm: AsyncLLM) -> None:
    """Its reader hears of it, though nothing else wakes the engine."""

    async def use() -> None:
        session = await llm.session(PROMPT)
        stream = session.stream(LONG)
        await anext(stream)
        reader = asyncio.create_task(rest(stream))
        await session.close()
        assert (await asyncio.wait_for(reader, 10))[-1].finish_reason == "cancelled"

    async def rest(stream: AsyncStream) -> list[SampleDelta]:
        return [delta async for delta in stream]

    asyncio.run(use())
    assert pages_free(llm)


def test_what_is_there_besides(llm: AsyncLLM) -> None:
    async def use() -> None:
        await llm.generate(PROMPT, greedy(2))
        assert (await llm.metrics())["quire:generation_tokens_total"] == 2
        assert (await llm.status())["num_requests_running"] == 0
        assert "verbs" in await llm.capabilities()
        await llm.reset_prefix_cache()
        assert llm.engine.runner.state.empty()
        assert llm.tokenizer is None
        assert llm.config.page_size == 16
        assert llm.executor is llm.executor
        assert llm.default_params == llm._llm.default_params
        assert (llm.bytes_per_token, llm.model.vocab_size) == (BYTES_PER_TOKEN, 97)

    asyncio.run(use())


def test_verbs_of_the_executor_are_awaited(llm: AsyncLLM) -> None:
    """All of both faces, beside a request that runs."""
    for face, awaits in ((Executor, AsyncExecutor), (LlmExecutor, AsyncLlmExecutor)):
        verbs = [name for name, found in vars(face).items() if isfunction(found) and not name.startswith("_")]
        assert {name for name in verbs if not hasattr(awaits, name)} <= {"operation"}
        assert [name for name in verbs if not iscoroutinefunction(getattr(awaits, name, None))] == [
            name for name in verbs if name in ("operation", "cancel")
        ]

    async def use() -> None:
        stream = llm.stream(PROMPT, greedy(40))
        await anext(stream)
        inner = llm.executor.blocking
        output = await llm.executor.prefill(PrefillInput(input_ids=torch.tensor([PROMPT])))
        wanted = inner.prefill(PrefillInput(input_ids=torch.tensor([PROMPT])))
        assert torch.equal(output.logits, wanted.logits)
        with pytest.raises(InvalidArgument):
            await llm.executor.forward(torch.tensor([[-5]]))
        face = AsyncLlmExecutor(llm.executor)
        cache = await face.create_kv_cache(dynamic=True)
        tokens = await face.sample_tokens(3, ExecutorInputs(text=TextData(token_ids=torch.tensor([[5]]))), cache)
        assert (len(tokens), cache.length) == (3, 3)
        await llm.executor.release_cache(cache.cache_id)
        llm.executor.cancel()
        await stream.aclose()
        await llm.executor.shutdown()
        assert llm.executor.blocking is not inner

    asyncio.run(use())


SALTED: dict[str, Callable[[AsyncLLM, str], Awaitable[Any]]] = {
    "generate": lambda llm, salt: llm.generate(PROMPT, greedy(2), cache_salt=salt),
    "stream": lambda llm, salt: drained(llm.stream(PROMPT, greedy(2), cache_salt=salt)),
    "beam_search": lambda llm, salt: llm.beam_search(
        PROMPT, BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True), cache_salt=salt
    ),
    "session": lambda llm, salt: llm.session(PROMPT, cache_salt=salt),
}


async def drained(stream: AsyncStream) -> list[SampleDelta]:
    return [delta async for delta in stream]


@pytest.mark.parametrize("verb", SALTED)
def test_salts_are_those_of_their_verbs(llm: AsyncLLM, verb: str) -> None:
    """What one verb computed under a salt, another finds under this salt, and under no other."""
    recorder = record(llm._llm)
    sessions = []

    async def ran(name: str, salt: str) -> int:
        before = recorder.num_tokens
        sessions.append(await SALTED[name](llm, salt))  # one that is let go of takes its state along
        return recorder.num_tokens - before

    async def use() -> None:
        assert await ran("generate", "a") == len(PROMPT) + 1
        assert 0 <= await ran(verb, "a") <= 2
        assert await ran(verb, "b") >= len(PROMPT) - 1
        assert await ran("generate", "b") == 2

    asyncio.run(use())


# -- streams ---------------------------------------------------------------------------------------


def test_stream(llm: AsyncLLM, llama: Checkpoint) -> None:
    async def use() -> None:
        stream = llm.stream(PROMPT, greedy(9, logprobs=1))
        with pytest.raises(FailedPrecondition, match="first delta"):
            _ = stream.output
        deltas = [delta async for delta in stream]
        assert ids_of(deltas) == llama.greedy(PROMPT, 9)
        assert [delta.finish_reason for delta in deltas][-1] == "length"
        assert all(delta.finish_reason is None for delta in deltas[:-1])
        for delta in deltas:
            assert delta.logprobs is not None
            assert [next(iter(entry)) for entry in delta.logprobs] == delta.token_ids
        assert stream.output.finished
        assert stream.output.prompt_token_ids == PROMPT
        assert stream.output.outputs[0].token_ids == llama.greedy(PROMPT, 9)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()

    asyncio.run(use())


def test_stream_of_several_samples(llm: AsyncLLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.2, max_tokens=6, ignore_eos=True)

    async def use() -> None:
        found: dict[int, list[int]] = {}
        ends: list[int] = []
        async for delta in llm.stream(PROMPT, params):
            found.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason:
                ends.append(delta.index)
        (whole,) = await llm.generate(PROMPT, params)
        assert found == {sample.index: sample.token_ids for sample in whole.outputs}
        assert sorted(ends) == [0, 1, 2]

    asyncio.run(use())


def test_deltas_come_while_it_runs(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is there before the next step ends."""
    gate = threading.Semaphore(1)
    execute = llm.engine.runner.execute

    def gated(step: Any) -> Any:
        if step.chunks:
            assert gate.acquire(timeout=30)
        return execute(step)

    monkeypatch.setattr(llm.engine.runner, "execute", gated)

    async def use() -> None:
        count = 0
        async for delta in llm.stream(PROMPT, greedy(5)):
            count += len(delta.token_ids)
            gate.release()
        assert count == 5

    asyncio.run(use())


def test_a_slow_consumer_holds_up_nobody(llm: AsyncLLM, llama: Checkpoint) -> None:
    async def use() -> None:
        stream = llm.stream(PROMPT, greedy(60))
        first = await anext(stream)
        # It finishes although nobody reads.
        (other,) = await llm.generate([3, 4], greedy(60))
        await eventually(lambda: not llm.engine.has_work)
        rest = [delta async for delta in stream]
        assert len(rest) < 10
        assert ids_of([first, *rest]) == llama.greedy(PROMPT, 60)
        assert other.outputs[0].token_ids == llama.greedy([3, 4], 60)

    asyncio.run(use())


@pytest.mark.parametrize("how", ["break", "aclose", "with", "cancel", "drop"])
def test_leaving_a_stream_frees_its_pages(llm: AsyncLLM, how: str) -> None:
    async def read(stream: Any, most: int) -> None:
        count = 0
        async for _ in stream:
            count += 1
            if count == most:
                break

    async def use() -> None:
        if how == "break":
            await read(llm.stream(PROMPT, LONG), 3)
        elif how == "aclose":
            stream = llm.stream(PROMPT, LONG)
            await anext(stream)
            await stream.aclose()
            assert not llm.engine.has_work
            assert stream.output.outputs[0].finish_reason == "cancelled"
            await stream.aclose()
        elif how == "with":
            async with llm.stream(PROMPT, LONG) as stream:
                await read(stream, 2)
            assert not llm.engine.has_work
        elif how == "cancel":
            task = asyncio.create_task(read(llm.stream(PROMPT, LONG), 1000))
            await eventually(lambda: llm.engine.num_running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = llm.stream(PROMPT, LONG)
            await anext(stream)
            del stream
            gc.collect()
        await eventually(lambda: not llm.engine.has_work)
        assert ends(llm) == {"length": 0, "cancelled": 1}
        assert (await llm.generate([1, 2], greedy(2)))[0].outputs[0].finish_reason == "length"

    asyncio.run(use())
    assert pages_free(llm)


def test_a_stream_that_is_never_started_does_nothing(llm: AsyncLLM) -> None:
    async def use() -> None:
        stream = llm.stream(PROMPT, LONG)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(use())
    assert not llm.engine.has_work


def test_a_stream_that_is_closed_while_it_is_prepared_does_not_start(llm: AsyncLLM) -> None:
    async def use() -> None:
        at, closed = asyncio.Event(), asyncio.Event()

        async def before(prepared: object) -> None:
            at.set()
            await closed.wait()

        llm.before_prompts = before
        stream = llm.stream(PROMPT, LONG)
        first = asyncio.ensure_future(anext(stream))
        await at.wait()
        await stream.aclose()
        closed.set()
        with pytest.raises(StopAsyncIteration):
            await first

    asyncio.run(use())
    assert not llm.engine.has_work


def test_a_stream_has_one_reader(llm: AsyncLLM) -> None:
    async def use() -> None:
        stream = llm.stream(PROMPT, LONG)
        await anext(stream)
        found = await asyncio.gather(*(anext(stream) for _ in range(2)), return_exceptions=True)
        assert sum(isinstance(one, FailedPrecondition) for one in found) in (0, 1)
        await stream.aclose()

    asyncio.run(use())


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [0.0, 0.001, 0.01, 0.05])
def test_cancelled_tasks_end_their_requests(llm: AsyncLLM, llama: Checkpoint, wait: float) -> None:
    async def use() -> None:
        other = asyncio.create_task(llm.generate([3, 4, 5], greedy(30)))
        tasks = [asyncio.create_task(llm.generate([PROMPT, PROMPT[:5]], LONG)) for _ in range(3)]
        session = await llm.session(PROMPT)
        tasks.append(asyncio.create_task(session.generate(LONG)))
        await asyncio.sleep(wait)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert (await other)[0].outputs[0].token_ids == llama.greedy([3, 4, 5], 30)
        await eventually(lambda: not llm.engine.has_work)
        assert ends(llm)["length"] == 1
        # The session is idle and has what was generated.
        text = session.tokens
        assert text[:20] == PROMPT
        assert llama.continues(PROMPT, text[20:])
        assert (await session.generate(greedy(3))).outputs[0].token_ids == llama.greedy(text, 3)
        await session.close()

    asyncio.run(use())
    assert pages_free(llm)
    check(llm._llm)


class LateInbox(deque[Job]):
    """Shows a job only at the third look, as if it came between two looks at it."""

    looks = 0

    def __bool__(self) -> bool:
        self.looks += bool(len(self))
        return len(self) > 0 and self.looks > 2


def test_a_cancel_that_overtakes_its_job(llama: Checkpoint) -> None:
    """The cancel is taken out while the job is on its way: it ends all the same."""
    llm = LLM(llama.path, device="cpu", dtype="float32", kv_cache_memory="4MiB")
    stepper, requests = Stepper(llm), []
    try:
        over = threading.Event()

        def submit() -> list[Any]:
            requests.extend(llm.engine.submit(np.array(PROMPT), LONG))
            return requests

        job = Job(llm.engine, submit)
        job.listeners.append(over.set)
        with stepper._changed:
            stepper._inbox = LateInbox()
            stepper.submit(job)
            stepper.cancel(job)
        with stepper._changed:
            stepper._changed.notify()
        assert over.wait(30)
        assert [request.output.finish_reason for request in requests] == ["cancelled"]
    finally:
        stepper.stop()
        stepper.join(10)


def test_timeout(llm: AsyncLLM) -> None:
    async def use() -> None:
        session = await llm.session(PROMPT)
        for call in (lambda: llm.generate(PROMPT, LONG), lambda: session.generate(LONG)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call(), 0.02)
        await eventually(lambda: not llm.engine.has_work)
        assert ends(llm) == {"length": 0, "cancelled": 2}
        await session.close()

    asyncio.run(use())
    assert pages_free(llm)


def test_a_call_that_is_cancelled_just_before_it_waits(llm: AsyncLLM) -> None:
    stepper = llm._background.stepper
    call = Call()

    def late() -> str | None:
        (request,) = llm.engine.submit(np.array(PROMPT), LONG)
        # Cancelled when there is nothing yet that it waits for.
        stepper.give_up(call)
        llm.engine.run([request])
        return request.output.finish_reason

    assert stepper.perform(call, late) == "cancelled"
    with pytest.raises(Cancelled):
        stepper.perform(call, late)


def test_cancelled_calls_of_a_session_are_undone(make: MakeAsync) -> None:
    llm = make(max_num_batched_tokens=4)

    async def use() -> None:
        session = await llm.session(PROMPT)
        for call in (
            lambda: session.append(random_tokens(150)),
            lambda: session.score(random_tokens(150)),
            lambda: llm.session(random_tokens(150)),
        ):
            task = asyncio.create_task(call())  # type: ignore[arg-type]
            await eventually(lambda: llm.engine.has_work)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.tokens == PROMPT
            assert not llm.engine.has_work
        assert len(await session.append([1])) == 21
        await session.close()

    asyncio.run(use())
    assert pages_free(llm)


def test_abort(llm: AsyncLLM, llama: Checkpoint) -> None:
    async def use() -> None:
        task = asyncio.create_task(llm.generate([PROMPT, [7, 8]], LONG, request_id="job"))
        stream = llm.stream(PROMPT, LONG, request_id="stream")
        await anext(stream)
        await eventually(lambda: llm.engine.num_running == 3)
        assert await llm.abort("job")
        assert llm.engine.num_running == 1
        for output, prompt in zip(await task, [PROMPT, [7, 8]], strict=True):
            assert output.outputs[0].finish_reason == "cancelled"
            assert llama.continues(prompt, output.outputs[0].token_ids)
        assert await llm.abort(stream.output.request_id)
        rest = [delta async for delta in stream]
        assert rest[-1].finish_reason == "cancelled"
        for gone in ("job", "stream", "nobody"):
            assert not await llm.abort(gone)

    asyncio.run(use())
    assert pages_free(llm)


# -- sessions --------------------------------------------------------------------------------------


def test_every_verb_of_a_session(llm: AsyncLLM, llama: Checkpoint, tmp_path: Any) -> None:
    async def use() -> None:
        async with await llm.session(PROMPT[:10]) as session:
            assert await session.append(PROMPT[10:]) is session
            assert len(session) == 20
            found = (await session.generate(greedy(4))).outputs[0].token_ids
            assert found == llama.greedy(PROMPT, 4)
            deltas = [delta async for delta in session.stream(greedy(5))]
            assert ids_of(deltas) == llama.greedy(PROMPT + found, 5)
            assert await session.rewind_cost(to=20) == await session.rewind(to=20) == 0
            assert (session.tokens, session.pinned, session.modified) == (PROMPT, False, False)
            child = await session.fork(at=7)
            twins = await session.fork(n=2)
            assert [len(one) for one in (child, *twins)] == [7, 20, 20]
            scores = await session.score([1, 2])
            assert len(scores) == 2
            assert int((await session.logits()).argmax()) == found[0]
            rows = (await session.kv(0))["k"]
            await twins[0].set_kv(0, k=rows)
            assert twins[0].modified
            assert (await session.pages())[0] == 2
            await session.save(tmp_path / "s.quire")
            loaded = await llm.load_session(tmp_path / "s.quire")
            again = await llm.session_from_bytes(await session.to_bytes())
            assert loaded.tokens == again.tokens == PROMPT
            assert torch.equal(await loaded.logits(), await again.logits())
            await loaded.compute()
            assert not await loaded.cancel()
            assert "20 tokens" in repr(loaded)
            for one in (child, *twins, loaded, again):
                await one.close()
                await one.close()
        with pytest.raises(FailedPrecondition, match="closed"):
            await session.append([1])

    asyncio.run(use())
    assert pages_free(llm)


def test_a_busy_session_refuses(llm: AsyncLLM) -> None:
    async def use() -> None:
        session = await llm.session(PROMPT)
        stream = session.stream(LONG)
        await anext(stream)
        with pytest.raises(FailedPrecondition, match="generating"):
            await session.append([1])
        with pytest.raises(FailedPrecondition, match="generating"):
            await anext(session.stream(greedy(1)))
        await stream.aclose()
        await session.append([1])
        await session.rewind(to=20)
        task = asyncio.create_task(session.generate(LONG))
        await eventually(lambda: llm.engine.num_running == 1)
        assert await session.cancel()
        assert (await task).outputs[0].finish_reason == "cancelled"
        await session.close()

    asyncio.run(use())
    assert pages_free(llm)


def test_chats(tmp_path: Path) -> None:
    """As those of an ``LLM``, turn by turn."""
    make_checkpoint("llama", tmp_path, vocab_size=600, max_position_embeddings=1024)
    (tmp_path / "tokenizer.json").write_text(saved("byte_level"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB"}
    turns = [[{"role": "user", "content": text}] for text in ("hello", "what else?", "bye")]

    with LLM(tmp_path, **options) as other, other.session() as session:
        answers = [session.chat(turn, greedy(5)).outputs[0].text for turn in turns]
        tokens = session.tokens
        alone = other.chat(turns[0], greedy(5))[0].outputs[0].text

    async def use() -> None:
        async with AsyncLLM(tmp_path, **options) as llm:
            session = await llm.session()
            found = []
            for turn in turns[:2]:
                found.append("".join([delta.text async for delta in session.stream_chat(turn, greedy(5))]))
            found.append((await session.chat(turns[2], greedy(5))).outputs[0].text)
            assert found == answers
            assert session.tokens == tokens
            assert "hello" in session.text
            assert (await llm.chat(turns[0], greedy(5)))[0].outputs[0].text == alone
            assert "".join([delta.text async for delta in llm.stream_chat(turns[0], greedy(5))]) == alone
            cached = []
            for salt in ("a", "a", "b"):
                salted = llm.stream_chat(turns[0], greedy(5), cache_salt=salt)
                assert "".join([delta.text async for delta in salted]) == alone
                (again,) = await llm.chat(turns[0], greedy(5), cache_salt=salt + " again")
                cached.append((salted.output.num_cached_tokens > 0, again.num_cached_tokens > 0))
            assert cached == [(False, False), (True, True), (False, False)]
            stream = llm.stream_chat([turns[0], turns[1]], greedy(1))  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="one prompt"):
                await anext(stream)

    asyncio.run(use())


# -- what goes wrong -------------------------------------------------------------------------------


def test_errors_reach_only_their_awaiter(llm: AsyncLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = llm.engine.runner.execute

    def poisoned(step: Any) -> Any:
        output = execute(step)
        for index, chunk in enumerate(step.chunks):
            if len(chunk.tokens) == 33:
                output.rows(index)[:, 7] = torch.nan
        return output

    monkeypatch.setattr(llm.engine.runner, "execute", poisoned)
    broken = random_tokens(33)

    async def use() -> None:
        async def read() -> None:
            async for _ in llm.stream(broken, greedy(5)):
                pass

        good, bad, stream = await asyncio.gather(
            llm.generate(PROMPT, greedy(9)), llm.generate(broken, greedy(5)), read(), return_exceptions=True
        )
        assert good[0].outputs[0].token_ids == llama.greedy(PROMPT, 9)
        assert bad[0].outputs[0].finish_reason == "error"
        assert isinstance(stream, QuireError)

    asyncio.run(use())


def test_a_step_that_raises_fails_everybody_and_goes_on(
    llm: AsyncLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = llm.engine.scheduler.schedule
    bugs = [RuntimeError("a bug")]

    def breaking() -> Any:
        if llm.engine.num_running == 4 and bugs:
            raise bugs.pop()
        return schedule()

    async def use() -> None:
        session = await llm.session(PROMPT)
        monkeypatch.setattr(llm.engine.scheduler, "schedule", breaking)
        stream = llm.stream(PROMPT, LONG)

        async def read() -> None:
            async for _ in stream:
                pass

        found = await asyncio.gather(
            llm.generate([PROMPT, [1, 2]], LONG), session.generate(LONG), read(), return_exceptions=True
        )
        assert [output.outputs[0].finish_reason for output in found[0]] == ["error", "error"]
        assert "a bug" in found[0][0].outputs[0].error
        assert all(isinstance(error, QuireError) and "a bug" in str(error) for error in found[1:])
        assert session.tokens == PROMPT
        assert (await session.generate(greedy(3))).outputs[0].token_ids == llama.greedy(PROMPT, 3)
        await session.close()

    asyncio.run(use())
    assert pages_free(llm)


def test_an_engine_that_is_broken_for_good_hangs_nobody(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("beyond repair")

    async def use() -> None:
        session = await llm.session(PROMPT)
        tasks = [asyncio.create_task(llm.generate(PROMPT, LONG)), asyncio.create_task(session.generate(LONG))]
        await eventually(lambda: llm.engine.num_running == 2)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", broken)
            patch.setattr(llm.engine, "fail_all", broken)
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for found in results:
            output = found[0] if isinstance(found, list) else found
            assert isinstance(output, QuireError) or output.outputs[0].finish_reason == "cancelled"
        for call in (llm.generate(PROMPT, greedy(1)), session.generate(greedy(1)), anext(llm.stream(PROMPT))):
            with pytest.raises(QuireError):
                await call

    asyncio.run(use())


def test_requests_that_can_never_fit(make: MakeAsync) -> None:
    llm = make(pool=64)

    async def use() -> None:
        with pytest.raises(ResourceExhausted):
            await llm.generate(random_tokens(60), greedy(30))
        pinned = await llm.session(random_tokens(40), pin=True)
        (output,) = await llm.generate(random_tokens(40, seed=1), greedy(2))
        assert output.outputs[0].finish_reason == "error"
        await pinned.close()

    asyncio.run(use())


# -- threads, loops, closing -----------------------------------------------------------------------


def test_several_event_loops(llm: AsyncLLM, llama: Checkpoint) -> None:
    errors: list[BaseException] = []

    async def use(seed: int) -> None:
        prompt = random_tokens(8, seed=seed)
        for _ in range(3):
            outputs = await asyncio.gather(*(llm.generate(prompt, greedy(6)) for _ in range(4)))
            assert all(output.outputs[0].token_ids == llama.greedy(prompt, 6) for (output,) in outputs)
            async for _ in llm.stream(prompt, greedy(4)):
                pass

    def run(seed: int) -> None:
        try:
            asyncio.run(use(seed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    check(llm._llm)


def test_a_loop_that_is_closed_early(llm: AsyncLLM) -> None:
    """Its requests end, since nobody can look at them any more."""
    loop = asyncio.new_event_loop()
    stream = llm.stream(PROMPT, LONG)
    loop.run_until_complete(anext(stream))
    assert stream._listener is not None
    while not stream._listener._called:  # what it was told last, nobody has heard
        time.sleep(0)
    loop.close()
    asyncio.run(eventually(lambda: not llm.engine.has_work))
    assert ends(llm) == {"length": 0, "cancelled": 1}
    del stream
    assert pages_free(llm)


def test_no_steps_and_no_time_while_idle(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(llm.generate(PROMPT, greedy(3)))
    turns: list[int] = []
    step = llm._background.stepper._step
    monkeypatch.setattr(llm._background.stepper, "_step", lambda: (turns.append(1), step()))
    time.sleep(0.1)
    # At most the round that was under way.
    assert len(turns) <= 1
    asyncio.run(llm.generate(PROMPT, greedy(3)))
    assert 3 <= len(turns) <= 6


def test_the_event_loop_is_not_blocked(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It turns while a step runs, whatever is asked for at that time."""
    execute, turns, during = llm.engine.runner.execute, [0], []

    def slow(step: Any) -> Any:
        if step.chunks:
            before, deadline = turns[0], time.monotonic() + 10
            time.sleep(0.05)
            while turns[0] < before + 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            during.append(turns[0] - before)
        return execute(step)

    monkeypatch.setattr(llm.engine.runner, "execute", slow)

    async def watch() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0.001)

    async def use() -> None:
        watcher = asyncio.create_task(watch())
        running = asyncio.create_task(llm.generate(PROMPT, greedy(8)))
        async with await llm.session([1, 2, 3]) as session:
            await session.fork()
            await llm.status()
            async for _ in session.stream(greedy(2)):
                pass
        await running
        watcher.cancel()

    asyncio.run(use())
    assert len(during) >= 8
    assert min(during) >= 3


def test_close_ends_everything(make: MakeAsync) -> None:
    llm = make()

    async def use() -> None:
        session = await llm.session(PROMPT)
        idle = await llm.session([1, 2, 3])
        stream = llm.stream(PROMPT, LONG)
        await anext(stream)

        async def read() -> str | None:
            last = None
            async for delta in stream:
                last = delta.finish_reason
            return last

        tasks = [
            asyncio.create_task(llm.generate([PROMPT, [4, 5]], LONG)),
            asyncio.create_task(session.generate(LONG)),
            asyncio.create_task(read()),
        ]
        await eventually(lambda: llm.engine.num_running == 4)
        await asyncio.gather(llm.close(), llm.close())
        outputs, answer, last = await asyncio.gather(*tasks, return_exceptions=True)
        assert [output.outputs[0].finish_reason for output in outputs] == ["cancelled"] * 2
        assert isinstance(answer, QuireError) or answer.outputs[0].finish_reason == "cancelled"
        assert last == "cancelled"
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: llm.generate(PROMPT, greedy(1)),
            lambda: llm.chat([{"role": "user", "content": "x"}]),
            lambda: anext(llm.stream(PROMPT, greedy(1))),
            lambda: llm.session(PROMPT),
            lambda: llm.status(),
            lambda: llm.abort("x"),
            lambda: idle.append([1]),
            lambda: idle.generate(),
            lambda: anext(idle.stream()),
        ]
        for call in calls:
            with pytest.raises(FailedPrecondition, match="closed"):
                await call()
        await idle.close()
        await llm.close()

    asyncio.run(use())


def test_what_comes_while_it_closes_is_refused(make: MakeAsync) -> None:
    llm = make()
    stepper, execute, closing = llm._background.stepper, llm.engine.runner.execute, threading.Event()

    def waiting(step: Any) -> Any:
        assert not step.chunks or closing.wait(30)
        return execute(step)

    llm.engine.runner.execute = waiting  # type: ignore[method-assign]

    async def use() -> None:
        first = asyncio.create_task(llm.generate(PROMPT, LONG))
        await eventually(lambda: llm.engine.has_work)
        late = [asyncio.create_task(llm.generate([1, 2], LONG)), asyncio.create_task(anext(llm.stream([3], LONG)))]
        await eventually(lambda: len(stepper._inbox) == 2)
        end = asyncio.create_task(llm.close())
        await eventually(lambda: stepper._stopping)
        closing.set()
        await end
        assert (await first)[0].outputs[0].finish_reason == "cancelled"
        for task in late:
            with pytest.raises(FailedPrecondition, match="closed"):
                await task

    asyncio.run(use())


# -- blending --------------------------------------------------------------------------------------

SEGMENTS = [Segment(random_tokens(length, seed=length)) for length in (40, 52)]


def test_prompts_are_blended(make: MakeAsync, make_llm: MakeLLM, llama: Checkpoint) -> None:
    """As without the background.

    The second request reads the exact beginning that the first one left in the pages: fewer of its
    tokens are blended, so it is compared with the second one of the engine without a background.
    """
    prompt = [SEGMENTS[1], SEGMENTS[0], PROMPT]
    params = BlendParams(ratio=0.2, least=1, keep=False)
    plain, llm = make_llm(llama), make()
    expected = plain.warm(SEGMENTS), *(plain.generate([prompt], greedy(4), blend=params) for _ in range(2))

    async def use() -> None:
        assert await llm.warm(SEGMENTS) == expected[0]
        assert [one.computed for one in await llm.warm([one.content for one in SEGMENTS])] == [0, 0]
        assert [one.kept for one in await llm.warm(SEGMENTS, cache_salt="x")] == [40, 52]
        (output,) = await llm.generate([prompt], greedy(4), blend=params)
        assert output.blend is not None
        assert output.blend.blended
        assert output.blend == expected[1][0].blend
        assert token_ids([output]) == token_ids(expected[1])
        stream = llm.stream(prompt, greedy(4), blend=params)
        assert ids_of([delta async for delta in stream]) == token_ids(expected[2])[0]
        assert stream.output.blend is not None
        assert stream.output.blend == expected[2][0].blend
        assert 0 < stream.output.blend.blended <= output.blend.blended
        for wrong in (llm.generate([prompt], blend=True), llm.warm("text"), anext(llm.stream(prompt, blend=1))):  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                await wrong

    asyncio.run(use())
    assert pages_free(llm)
    check(llm._llm)


def test_a_cancelled_warm_ends(make: MakeAsync) -> None:
    """Nothing of it runs on, and what it has not kept can be asked for again."""
    llm = make(max_num_batched_tokens=8, max_num_seqs=1)

    async def use() -> None:
        task = asyncio.create_task(llm.warm(SEGMENTS))
        await eventually(lambda: len(llm.engine.blending.under_way) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not llm.engine.has_work
        assert not llm.engine.blending.under_way
        assert [one.computed for one in await llm.warm(SEGMENTS)] == [40, 52]

    asyncio.run(use())
    assert pages_free(llm)


def test_a_warm_that_fails_says_so(make: MakeAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(max_num_seqs=1)

    def broken(step: Any) -> Any:
        raise ResourceExhausted("no room")

    async def use() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.runner, "execute", broken)
            with pytest.raises(ResourceExhausted, match="no room"):
                await llm.warm(SEGMENTS)
        assert not llm.engine.has_work
        assert [one.kept for one in await llm.warm(SEGMENTS)] == [40, 52]

    asyncio.run(use())


def test_it_is_a_context_manager(llama: Checkpoint) -> None:
    async def use() -> AsyncLLM:
        async with AsyncLLM(llama.path, device="cpu", dtype="float32", kv_cache_memory="1MiB") as llm:
            await llm.generate(PROMPT, greedy(2))
        return llm

    llm = asyncio.run(use())
    assert llm.engine.closed
    assert not llm._background.stepper._thread.is_alive()


def test_one_that_is_forgotten_stops(llama: Checkpoint) -> None:
    llm = AsyncLLM(llama.path, device="cpu", dtype="float32", kv_cache_memory="1MiB")
    thread = llm._background.stepper._thread
    asyncio.run(llm.generate(PROMPT, greedy(2)))
    del llm
    thread.join(30)
    assert not thread.is_alive()


def test_the_signature_is_that_of_llm() -> None:
    assert list(inspect.signature(AsyncLLM).parameters) == list(inspect.signature(LLM).parameters)
    public = {name for name in vars(LLM) if not name.startswith("_")}
    # What ``AsyncLLM`` itself uses of an ``LLM``, and a block of blocking calls.
    inside = {"requests", "trace"}
    assert public - inside <= set(dir(AsyncLLM))
