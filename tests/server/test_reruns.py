"""Answers are run again without the reasoning that the template leaves out of the history: in idle
time, so that the next turn finds them; bounded, and never in anybody's way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import AsyncLLM, SamplingParams
from quire.base.errors import FailedPrecondition
from quire.base.outputs import RequestOutput
from quire.server.http.settings import ServerSettings
from quire.server.openai import reruns
from quire.server.openai.reruns import Reruns, Run
from quire.server.tools import reasoning

from .conftest import OPTIONS, Served, pages_free, serving, shallow_copy, wait_for

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""Opens the reasoning in the prompt, and writes none into the history."""
QUESTION = {"role": "user", "content": "def total(values):\n    result = 0\n    for value in values:\n"}
SECOND = {"role": "user", "content": "And the mean? Write def mean(values):"}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp("models") / "thinking"
    shallow_copy(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    made = AsyncLLM(folder, **OPTIONS)
    yield made
    asyncio.run(made.close())


@pytest.fixture(autouse=True)
def a_line_is_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model, which writes Python, thinks up to the end of its first line."""
    monkeypatch.setattr(reasoning, "_MARKERS", (("<think>", "\n"),))


@pytest.fixture
def served(thinking: AsyncLLM) -> Iterator[Served]:
    with serving(thinking) as found:
        yield found
    wait_for(lambda: pages_free(thinking))


def metric(served: Served, name: str) -> float:
    return served.llm.engine.metrics.snapshot()[f"quire:{name}_total"]


def ask(served: Served, messages: list[dict[str, Any]], **changes: Any) -> Any:
    body = {"messages": messages, "temperature": 0, "max_tokens": 48, "ignore_eos": True, **changes}
    answer = served.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(served: Served, messages: list[dict[str, Any]], **changes: Any) -> Any:
    """The answer of a stream, as ``ask`` returns it."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 48, "ignore_eos": True, "stream": True, **changes}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def stop_of(served: Served) -> str:
    """A text in the answer to the question, behind the reasoning."""
    message = ask(served, [QUESTION])["choices"][0]["message"]
    assert message["reasoning_content"]
    content = str(message["content"]).rstrip()
    assert len(content) > 20
    served.llm.engine.reset_prefix_cache()
    return content[-8:]


def rested(served: Served) -> bool:
    found = served.context.reruns
    return not len(found) and (found._task is None or found._task.done()) and not served.llm.engine.has_work


def history(served: Served, answer: Any) -> list[int]:
    """The tokens before the next question."""
    content = answer["choices"][0]["message"]["content"]
    text = f"<|user|>{QUESTION['content']}<|end|><|assistant|>{content}<|end|><|user|>"
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text, add_special_tokens=False)


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.turns(2)
@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_finds_the_answer(served: Served, stream: bool) -> None:
    """Without its reasoning; its tokens are those of a server that runs nothing again."""
    stop = stop_of(served)
    before = metric(served, "reruns")
    answer = (streamed if stream else ask)(served, [QUESTION], stop=stop)
    wait_for(lambda: rested(served))
    assert metric(served, "reruns") == before + 1
    used = history(served, answer)
    messages = [QUESTION, answer["choices"][0]["message"], SECOND]
    second = ask(served, messages)
    assert cached(second) >= len(used) - 2
    served.llm.engine.reset_prefix_cache()
    assert ask(served, messages)["choices"] == second["choices"]


def test_sessions_too(served: Served) -> None:
    stop = stop_of(served)
    name = served.client.post("/v1/sessions", json={}).json()["id"]
    before = metric(served, "reruns")
    answer = ask(served, [QUESTION], stop=stop, session_id=name)
    wait_for(lambda: rested(served))
    assert metric(served, "reruns") == before + 1
    second = ask(served, [SECOND], session_id=name)
    assert cached(second) >= len(history(served, answer)) - 2
    assert served.client.delete(f"/v1/sessions/{name}").status_code == 200


def test_without_the_option(thinking: AsyncLLM) -> None:
    with serving(thinking, ServerSettings(rerun_reasoning=False)) as served:
        stop = stop_of(served)
        answer = ask(served, [QUESTION], stop=stop)
        assert rested(served)
        found = cached(ask(served, [QUESTION, answer["choices"][0]["message"], SECOND]))
        assert found < len(history(served, answer)) - 10
    wait_for(lambda: pages_free(thinking))


def test_only_so_many_tokens(thinking: AsyncLLM) -> None:
    with serving(thinking, ServerSettings(max_rerun_tokens=3)) as served:
        stop = stop_of(served)
        tokens = metric(served, "rerun_tokens")
        ask(served, [QUESTION], stop=stop)
        wait_for(lambda: rested(served))
        assert metric(served, "rerun_tokens") == tokens
    wait_for(lambda: pages_free(thinking))


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 8}, {"n": 2}, {"response_format": {"type": "json_object"}, "max_tokens": 8, "ignore_eos": False}],
    ids=["cut short", "two answers", "no reasoning"],
)
def test_others_are_not_run_again(served: Served, changes: dict[str, Any]) -> None:
    stop = stop_of(served) if "n" in changes else None
    ask(served, [QUESTION], **({"stop": stop} if stop else {}), **changes)
    assert len(served.context.reruns) == 0
    assert served.context.reruns._task is None


# -- the queue -------------------------------------------------------------------------------------


class Engine:
    """An engine that is busy when the test says so."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.has_work, self.cache, self.metrics = True, llm.engine.cache, llm.engine.metrics


class Idle:
    """What the queue sees of an LLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.engine = Engine(llm)


def output(count: int, cached: int = 0, *, finished: bool = True) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=list(range(count)),
        outputs=[],
        num_cached_tokens=cached,
        finished=finished,
    )


def test_turns_wait_for_idle_time(thinking: AsyncLLM) -> None:
    """The oldest give way; what was broken off goes on, and not for ever; errors harm nobody."""
    ran: list[str] = []

    def turn(name: str, finished: bool = True, error: Exception | None = None) -> Run:
        async def run(most: int) -> RequestOutput | None:
            assert most == 77
            ran.append(name)
            if error is not None:
                raise error
            return output(5, finished=finished)

        return run

    async def scene() -> None:
        llm = Idle(thinking)
        queue = Reruns(llm, ServerSettings(max_rerun_tokens=77))  # type: ignore[arg-type]
        for number in range(reruns.MOST_WAITING + 2):
            queue.add(turn(str(number)))
        assert len(queue) == reruns.MOST_WAITING
        await asyncio.sleep(3 * reruns.LOOK)
        assert ran == []
        llm.engine.has_work = False
        while len(queue):
            await asyncio.sleep(reruns.LOOK)
        assert ran == [str(number) for number in range(2, reruns.MOST_WAITING + 2)]
        ran.clear()
        queue.add(turn("a", error=FailedPrecondition("closed")))
        queue.add(turn("b", error=RuntimeError("broken")))
        queue.add(turn("c", finished=False))
        queue.add(turn("d"))
        while "d" not in ran:
            await asyncio.sleep(reruns.LOOK)
        assert ran == ["a", "b", *["c"] * reruns.MOST_TRIES, "d"]
        llm.engine.has_work = True
        queue.add(turn("e"))
        await queue.close()
        queue.add(turn("f"))
        assert len(queue) == 0

    asyncio.run(scene())
    assert "e" not in ran


# -- giving way ------------------------------------------------------------------------------------


def test_a_request_that_arrives_is_served_at_once(thinking: AsyncLLM) -> None:
    """Its first step is the next one, and it is alone; what was run again so far is kept."""
    engine = thinking.engine
    ids = np.random.default_rng(1).integers(5, 200, 900)
    with engine.lock:
        run = engine.submit_prefix(ids, key=("", None), only_idle=True)
        engine.step()
        assert 0 < run.branch.computed <= 256
        done = run.branch.computed
        params = SamplingParams(max_tokens=1, temperature=0)
        urgent = engine.submit(np.arange(7, 40), params, key=("", None))[0]
        assert run.output.finish_reason == "cancelled"
        engine.step()
        assert urgent.finished
        assert engine.cache is not None
        assert engine.cache.peek(ids, engine.branches.prefix_key(("", None), run.branch.runs)) == done
        busy = engine.submit(np.arange(7, 40), params, key=("", None))[0]
        assert engine.submit_prefix(ids, key=("", None), only_idle=True).output.finish_reason == "cancelled"
        assert not busy.finished
        engine.step()
    wait_for(lambda: pages_free(thinking))
