"""Long texts of one client do not hold up others, and end with their requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quire.base.errors import Cancelled
from quire.server.http.text_threads import SHORT_THREADS, Lane, Texts
from quire.text import long_texts, tokenizer
from quire.text.long_texts import LONG

from .conftest import Served, wait_for
from .test_attacks import connected, head

PROMPT = "def fib(n):"


def test_one_after_the_other() -> None:
    async def run() -> None:
        lane, gate, order = Lane(1, "test"), threading.Event(), list[int]()

        def note(size: int) -> None:
            gate.wait(60)
            order.append(size)

        tasks = []
        for size in (9, 8, 5, 7, 6):
            tasks.append(asyncio.create_task(lane.run(lambda size=size: note(size))))  # type: ignore[misc]
            await asyncio.sleep(0)
        tasks[3].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [9, 8, 5, 6]
        assert await lane.run(lambda: "free") == "free"
        lane.close()

    asyncio.run(run())


def test_a_call_that_waits_for_a_slow_template_steps_aside() -> None:
    async def run() -> None:
        lane, gate = Lane(1, "test"), threading.Event()

        def wait() -> bool:
            long_texts.step_aside()
            return gate.wait(60)

        first = asyncio.create_task(lane.run(wait))
        await asyncio.sleep(0)
        assert await lane.run(lambda: "beside") == "beside"
        assert not first.done()
        gate.set()
        assert await first
        # It had one place to give, and one call at a time has it again.
        gate.clear()
        second = asyncio.create_task(lane.run(gate.wait))
        third = asyncio.create_task(lane.run(lambda: "after"))
        await asyncio.sleep(0.05)
        assert not third.done()
        gate.set()
        assert await second
        assert await third == "after"
        lane.close()

    asyncio.run(run())


def test_who_has_gone_is_not_worked_for() -> None:
    async def run() -> None:
        lane, began, ends = Lane(1, "test"), threading.Event(), list[str]()

        def work() -> None:
            began.set()
            try:
                while True:
                    long_texts.check()
                    time.sleep(0.001)
            except Cancelled:
                ends.append("ended")
                raise

        task = asyncio.create_task(lane.run(work))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await lane.run(lambda: list(ends)) == ["ended"]
        # Told to go in the moment in which it is its turn, it passes that on.
        first = asyncio.create_task(lane.run(lambda: None))
        await asyncio.sleep(0)
        second = asyncio.create_task(lane.run(lambda: None))
        await asyncio.sleep(0)
        release = lane._places.release

        def releasing() -> None:
            release()
            second.cancel()

        lane._places.release = releasing  # type: ignore[method-assign]
        await asyncio.gather(first, second, return_exceptions=True)
        assert second.cancelled()
        lane._places.release = release  # type: ignore[method-assign]
        assert await lane.run(lambda: "free") == "free"
        lane.close()

    asyncio.run(run())


def test_short_texts_have_threads_of_their_own() -> None:
    async def run() -> None:
        texts, gate = Texts(), threading.Event()
        long = asyncio.create_task(texts.run(LONG, lambda: gate.wait(60)))
        short = [asyncio.create_task(texts.run(LONG - 1, lambda: gate.wait(60))) for _ in range(SHORT_THREADS - 1)]
        await asyncio.sleep(0)
        assert await texts.run(1, lambda: "answered") == "answered"
        gate.set()
        await asyncio.gather(long, *short)
        texts.close()

    asyncio.run(run())


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
def stuck(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Long texts take for ever, until their requests end: the sizes of those that were begun.

    None is refused by its size.
    """
    assert served.llm.tokenizer is not None
    monkeypatch.setitem(served.llm.tokenizer.__dict__, "longest_token", None)
    begun: list[int] = []
    encode = tokenizer.encode_with

    def slow(backend: Any, *texts: str, **options: Any) -> list[int]:
        if (size := sum(map(len, texts))) >= LONG:
            begun.append(size)
            while True:
                long_texts.check()
                time.sleep(0.001)  # or all other threads wait for this one
        return encode(backend, *texts, **options)

    monkeypatch.setattr(tokenizer, "encode_with", slow)
    return begun


def test_prompts_whose_clients_have_gone(served: Served, client: httpx.Client, stuck: list[int]) -> None:
    session = client.post("/v1/sessions", json={"prompt": PROMPT, "window": 16}).json()["id"]
    for path, name in (
        ("/v1/completions", "prompt"),
        ("/tokenize", "prompt"),
        ("/v1/sessions", "prompt"),
        (f"/v1/sessions/{session}/append", "text"),
        (f"/v1/sessions/{session}/score", "text"),
        (f"/v1/sessions/{session}/generate", "prompt"),
    ):
        stuck.clear()
        number = 4 if path in ("/v1/completions", "/tokenize", "/v1/sessions") else 1
        body = json.dumps({name: "a" * LONG}).encode()
        connections = [connected(served, head(path, len(body)) + body) for _ in range(number)]
        wait_for(lambda number=number: served.context.gate.under_way == number and bool(stuck))  # type: ignore[misc]
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4, path
        for connection in connections:
            connection.close()
        wait_for(lambda: served.context.gate.under_way == 0)
        # Whoever had begun has ended, and the thread is free.
        wait_for(lambda: not served.context.texts._long._places.locked())
    client.delete(f"/v1/sessions/{session}")


def test_texts_that_cannot_fit(chat_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = chat_served.llm.engine.checks.text_limit
    assert limit is not None
    most = limit.bytes
    long, client = "a" * (most + 1), chat_served.client
    session = client.post("/v1/sessions", json={"prompt": PROMPT}).json()["id"]
    messages = [{"role": "user", "content": long}]
    encode = tokenizer.encode_with

    def short(backend: Any, *texts: str, **options: Any) -> list[int]:
        assert sum(map(len, texts)) <= most
        return encode(backend, *texts, **options)

    monkeypatch.setattr(tokenizer, "encode_with", short)
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": [PROMPT, long]}, "prompt.1"),
        ("/v1/completions", {"prompt": long, "session_id": session}, None),
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/chat/completions", {"messages": messages, "session_id": session}, None),
        ("/tokenize", {"prompt": long}, None),
        ("/tokenize", {"messages": messages}, None),
        ("/v1/sessions", {"prompt": long}, "prompt"),
        ("/v1/sessions", {"messages": messages}, "messages"),
        (f"/v1/sessions/{session}/append", {"text": long}, "text"),
        (f"/v1/sessions/{session}/score", {"text": long}, "text"),
        (f"/v1/sessions/{session}/generate", {"prompt": long}, "prompt"),
        (f"/v1/sessions/{session}/generate", {"messages": messages}, "messages"),
    ):
        answer = client.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, (path, error)
        assert f"{most} bytes" in error["message"]
        assert error["code"] == "context_length_exceeded"
        assert f"This model's maximum context length is {limit.tokens} tokens" in error["message"]
        if param is not None:
            assert error["param"] == param
    assert client.delete(f"/v1/sessions/{session}").status_code == 200


def test_limits_are_no_variables_of_templates(chat_client: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"text_limit": 10**9}}
        assert chat_client.post(path, json=body).json()["error"]["param"] == "chat_template_kwargs.text_limit"


def test_many_at_a_time_are_all_answered(client: httpx.Client) -> None:
    texts = ["x = 1\n" * count for count in (1, 5000, 20, 3000, 1, 200)] * 3
    with ThreadPoolExecutor(18) as pool:
        answers = pool.map(lambda text: client.post("/tokenize", json={"prompt": text}).json()["count"], texts)
    alone = [client.post("/tokenize", json={"prompt": text}).json()["count"] for text in texts[:6]]
    assert list(answers) == alone * 3
