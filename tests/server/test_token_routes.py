"""What clients see of the tokens of their sessions: what the session shows, and of no others."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from tests.server.conftest import Served, serving

from quire import AsyncLLM
from quire.server.http.settings import ServerSettings


def made(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/v1/sessions", json={"prompt": "def add(a, b):\n    return", **body})
    answer.raise_for_status()
    return f"session:{answer.json()['id']}"


def got(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/v1/state/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(client: httpx.Client, path: str, **query: Any) -> tuple[int, str | None, str]:
    answer = client.get(f"/v1/state/{path}", params=query)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_documents_are_those_of_the_session(served: Served) -> None:
    branch = made(served.client)
    held = served.context.sessions.get("", branch.removeprefix("session:")).session
    length = len(held)
    asyncio.run(held.compute())
    for position in (0, 1, length - 1, length):
        found = got(served.client, "token", branch=branch, position=position, top=3)
        assert found.pop("branch") == branch
        again = asyncio.run(held.token(position, top=3)).document()
        assert found == again
        assert len(found["alternatives"]) == (3 if position else 0)
    assert got(served.client, "token", branch=branch.removeprefix("session:"), position=1)["id"] == held.tokens[1]
    attention = got(served.client, "attention", branch=branch, position=4, layer=1)
    weights = np.frombuffer(base64.b64decode(attention["weights"]), "<f4").reshape(attention["shape"])
    assert np.array_equal(weights, asyncio.run(held.attention(4, 1)).weights)
    one = got(served.client, "attention", branch=branch, position=4, layer=1, head=1)
    assert one["heads"] == [1]
    assert np.array_equal(np.frombuffer(base64.b64decode(one["weights"]), "<f4"), weights[1])
    norms = got(served.client, "norms", branch=branch, layer=0)
    assert norms["norms"][0]["shape"][0] == length - 1
    other = made(served.client, prompt="def add(a, c):")
    compared = got(served.client, "compare", a=branch, b=other)
    assert compared.pop("branches") == [branch, other]
    assert compared["a"]["text"] != compared["b"]["text"]
    assert 0 < compared["shared"] < length


def test_looking_does_not_count_as_use(served: Served) -> None:
    branch = made(served.client)
    name = branch.removeprefix("session:")
    held = served.context.sessions.get("", name)
    used, tokens = held.used, held.session.tokens
    got(served.client, "token", branch=branch, position=2)
    got(served.client, "norms", branch=branch, layer=0)
    assert (held.used, held.busy, held.session.tokens) == (used, None, tokens)


def test_refusals_name_the_parameter(served: Served) -> None:
    branch = made(served.client)
    length = len(served.context.sessions.get("", branch.removeprefix("session:")).session)
    assert refused(served.client, "token", branch=branch, position=length + 1)[:2] == (400, "position")
    assert refused(served.client, "token", branch=branch, position=-1)[:2] == (400, "position")
    assert refused(served.client, "token", branch=branch)[:2] == (400, "position")
    assert refused(served.client, "token", branch=branch, position=1, top=101)[:2] == (400, "top")
    assert refused(served.client, "attention", branch=branch, position=1, layer=99)[:2] == (400, "layer")
    assert refused(served.client, "attention", branch=branch, position=1, layer=0, head=64)[:2] == (400, "head")
    assert refused(served.client, "norms", branch=branch, layer=99)[:2] == (400, "layer")
    assert refused(served.client, "token", branch="session:nobody", position=1)[:2] == (404, "branch")
    assert refused(served.client, "compare", a=branch, b="session:nobody")[:2] == (404, "b")
    status, param, message = refused(served.client, "token", branch="cached:12", position=1)
    assert (status, param) == (400, "branch")
    assert "POST /v1/sessions" in message


def test_a_busy_session_is_refused(served: Served) -> None:
    branch = made(served.client)
    name = branch.removeprefix("session:")
    held = served.context.sessions.take("", name, "generate")
    try:
        status, param, message = refused(served.client, "attention", branch=branch, position=1, layer=0)
        assert (status, param) == (409, "branch")
        assert "in use" in message
    finally:
        served.context.sessions.release(held)


def test_answers_have_a_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_inspector.routes import token_routes

    branch = made(served.client)
    heads = served.llm.engine.runner.model.layer_specs[0].num_heads
    monkeypatch.setattr(token_routes, "MOST_WEIGHTS", 4 * heads)
    got(served.client, "attention", branch=branch, position=3, layer=0)
    status, param, _ = refused(served.client, "attention", branch=branch, position=4, layer=0)
    assert (status, param) == (400, "head")
    got(served.client, "attention", branch=branch, position=4, layer=0, head=0)


def test_another_key_sees_nothing(llm: AsyncLLM) -> None:
    settings = ServerSettings(api_key=("k" * 16, "l" * 16))
    with serving(llm, settings) as served:
        mine, yours = ({"Authorization": f"Bearer {key * 16}"} for key in "kl")
        answer = served.client.post("/v1/sessions", json={"prompt": "x = 1"}, headers=mine)
        branch = f"session:{answer.json()['id']}"
        for path, query in (
            ("token", {"branch": branch, "position": 1}),
            ("attention", {"branch": branch, "position": 1, "layer": 0}),
            ("norms", {"branch": branch, "layer": 0}),
            ("compare", {"a": branch, "b": branch}),
        ):
            assert served.client.get(f"/v1/state/{path}", params=query).status_code == 401
            assert served.client.get(f"/v1/state/{path}", params=query, headers=yours).status_code == 404
            assert served.client.get(f"/v1/state/{path}", params=query, headers=mine).status_code == 200


def test_looks_while_others_generate(served: Served) -> None:
    branch = made(served.client)
    wanted = got(served.client, "token", branch=branch, position=3)["token"]["rank"]
    ranks: list[int] = []

    def look() -> None:
        ranks.extend(got(served.client, "token", branch=branch, position=3)["token"]["rank"] for _ in range(5))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    served.client.post("/v1/completions", json={"prompt": "a = ", "max_tokens": 40, "ignore_eos": True})
    for thread in threads:
        thread.join()
    assert ranks == [wanted] * 15
