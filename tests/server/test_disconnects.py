"""Clients that go away, that read slowly, and what breaks on the way: pages come back at once, and
nobody else notices.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from quire import AsyncLLM

from .conftest import Served, pages_free, wait_for
from .test_completions import complete, events

PROMPT = "def fib(n):"


def generated(llm: AsyncLLM) -> float:
    return llm.engine.metrics.generation_tokens.value


def broken_at(step: int, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a step of the runner fail; the number that is left until then may be set anew."""
    runner = llm.engine.runner
    execute, left = runner.execute, [step]

    def breaking(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("a secret of the machine")
        return execute(*arguments, **options)

    monkeypatch.setattr(runner, "execute", breaking)
    return left


def until_free(llm: AsyncLLM) -> None:
    wait_for(lambda: not llm.engine.has_work)
    wait_for(lambda: pages_free(llm))


LONG = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": [PROMPT, "import "]}])
def test_closing_a_stream_cancels(client: httpx.Client, served: Served, more: dict[str, Any]) -> None:
    with client.stream("POST", "/v1/completions", json={**LONG, **more, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert served.llm.engine.has_work
    before = generated(served.llm)
    until_free(served.llm)
    assert generated(served.llm) - before < 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_connection_cancels(served: Served, stream: bool) -> None:
    """Also while nothing has been sent yet."""
    body = json.dumps({**LONG, "stream": stream}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_for(lambda: served.llm.engine.has_work)
    before = generated(served.llm)
    until_free(served.llm)
    assert generated(served.llm) - before < 500


def test_a_reader_that_stands_still_holds_up_nobody(served: Served, client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True, "logprobs": 20}) as answer:
        # The iterator is kept: httpx closes the connection when it is gone.
        lines = answer.iter_lines()
        next(lines)
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as other:
            for _ in range(3):
                assert complete(other, prompt=PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3
    until_free(served.llm)


def test_an_error_in_mid_stream_ends_it(client: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    left = broken_at(4, served.llm, monkeypatch)
    chunks = events(client, prompt=PROMPT, max_tokens=50, cache_salt="broken")
    assert chunks[0]["choices"][0]["text"]
    assert chunks[-1] == {
        "error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
    }
    left[0] = 3
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50, "cache_salt": "again"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    monkeypatch.undo()
    assert complete(client, prompt=PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3
    until_free(served.llm)
