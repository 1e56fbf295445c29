"""Grammars that would stop or hold up the server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from quire import StructuredOutputs
from quire.grammars.formats import grammar_text
from quire.grammars.trial import SEATS, GrammarTrial

from .conftest import Served, wait_for


def chain(count: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(count)) + f'r{count}: "y"'


def ask(client: httpx.Client, count: int, path: str = "/v1/completions") -> httpx.Response:
    what = {"prompt": "x"} if path.endswith("/completions") else {}
    return client.post(path, json={"max_tokens": 2, "structured_outputs": {"grammar": chain(count)}, **what})


def test_a_grammar_that_is_too_deep(served: Served) -> None:
    session = served.client.post("/v1/sessions", json={"prompt": "x"}).json()["id"]
    for path in ("/v1/completions", f"/v1/sessions/{session}/generate"):
        answer = ask(served.client, 3000, path)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_argument", "structured_outputs")
        assert "nested too deeply" in error["message"]
    served.client.delete(f"/v1/sessions/{session}")
    answer = ask(served.client, 300)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].startswith("x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_whose_only_token_is_banned(served: Served, stream: bool) -> None:
    """Stop tokens are no part of a grammar's text. It is the request that leaves nothing."""
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    body = {"prompt": "x", "structured_outputs": {"choice": ["("]}, "stop_token_ids": tokenizer.encode("(")}
    answer = served.client.post("/v1/completions", json={**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_argument"
    assert "there is no token to draw" in answer.json()["error"]["message"]


def test_many_large_grammars(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some wait, the others are sent away, and nobody else is held up."""
    opened = threading.Event()

    def text(trial: GrammarTrial, wanted: StructuredOutputs) -> str:
        assert opened.wait(30)
        return grammar_text(wanted)

    monkeypatch.setattr(GrammarTrial, "text", text)
    grammars = served.llm.engine.grammars
    assert grammars is not None
    with ThreadPoolExecutor(SEATS) as pool:
        waiting = [pool.submit(ask, served.client, 400 + i) for i in range(SEATS)]
        try:
            wait_for(lambda: len(grammars._seats._since) == SEATS)
            answer = ask(served.client, 399)
            assert answer.status_code == 429
            assert answer.headers["Retry-After"]
            assert answer.json()["error"]["type"] == "rate_limit_error"
            body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "abc"}}
            assert served.client.post("/v1/completions", json=body).status_code == 200
        finally:
            opened.set()
        assert [one.result().status_code for one in waiting] == [200] * SEATS
