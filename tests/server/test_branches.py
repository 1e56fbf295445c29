"""Branches over HTTP: what one API key committed, no other key sees, and a later server has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.http.errors import STORE_UNAVAILABLE
from quire.server.http.settings import ServerSettings

from .conftest import OPTIONS, Served, serving

KEYS = ("one-key", "other-key")
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"


@pytest.fixture
def clients(plain_folder: Path, tmp_path: Path) -> Iterator[list[httpx.Client]]:
    """Of two keys, and of one that comes after a restart."""
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            llm = AsyncLLM(plain_folder, store=[f"file://{tmp_path / 'store'}"], **OPTIONS)
            stack.callback(llm._llm.close)
            served = stack.enter_context(serving(llm, ServerSettings(api_key=KEYS)))
            made += [
                stack.enter_context(
                    httpx.Client(base_url=served.url, timeout=60, headers={"Authorization": f"Bearer {key}"})
                )
                for key in KEYS
            ]
        yield made


def call(client: httpx.Client, method: str, path: str, expected: int = 200, **body: Any) -> dict[str, Any]:
    answer = client.request(method, f"/v1/{path}", json=body or None)
    assert answer.status_code == expected, answer.text
    found: dict[str, Any] = answer.json()
    return found if expected == 200 else found["error"]


def test_commits_and_their_owners(clients: list[httpx.Client]) -> None:
    mine, theirs, later, theirs_later = clients
    name = call(mine, "POST", "sessions", prompt=PROMPT, labels={"task": "42"})["id"]
    made = call(mine, "POST", f"sessions/{name}/commit", name="work/main", message="first")
    first = made["commit"]
    assert (made["id"], first["message"], first["parent"]) == (name, "first", None)
    assert first["bytes"] > 10_000
    wanted = call(mine, "POST", f"sessions/{name}/generate", **GREEDY)["choices"][0]["token_ids"]
    second = call(mine, "POST", f"sessions/{name}/commit", name="work/main")["commit"]
    assert call(mine, "GET", f"sessions/{name}")["last_commit"] == second["id"]
    # What stands in the store is the key's own, and a later server's.
    for client in (mine, later):
        (branch,) = call(client, "GET", "branches")["data"]
        assert (branch["name"], branch["commit"]["id"]) == ("work/main", second["id"])
        log = call(client, "GET", "branches/work/main")["data"]
        assert [one["id"] for one in log] == [second["id"], first["id"]]
        again = call(client, "POST", "sessions/checkout", branch=first["id"])
        assert again["num_tokens"] == first["num_tokens"]
        held = call(client, "GET", f"sessions/{again['id']}")
        assert (held["labels"], held["name"], held["last_commit"]) == ({"task": "42"}, None, first["id"])
        answer = call(client, "POST", f"sessions/{again['id']}/generate", **GREEDY)
        assert answer["choices"][0]["token_ids"] == wanted
        assert answer["quire"]["reuse"]["cached"] > 0
        found = call(client, "GET", f"branches/diff?a={first['id']}&b=work/main")
        assert (found["common"], found["a_adds"], found["b_adds"]) == (first["num_tokens"], [], wanted)
        assert found["base"] == first["id"]
    for client in (theirs, theirs_later):
        assert call(client, "GET", "branches")["data"] == []
        for path in ("branches/work/main", f"branches/{first['id']}", f"branches/diff?a={first['id']}&b=work/main"):
            assert "there are: none" in call(client, "GET", path, 404)["message"]
        call(client, "DELETE", "branches/work/main", 404)
        refused = call(client, "POST", "sessions/checkout", 404, branch=second["id"])
        assert refused["param"] == "branch"
    call(theirs, "POST", f"sessions/{name}/commit", 404, name="a")
    # The same tokens of another key share nothing.
    other = call(theirs, "POST", "sessions", prompt=PROMPT)["id"]
    call(theirs, "POST", f"sessions/{other}/commit", name="work/main")
    assert call(mine, "DELETE", "branches/work/main")["commit"] == second["id"]
    assert call(mine, "GET", "branches")["data"] == []
    assert len(call(theirs_later, "GET", "branches/work/main")["data"]) == 1


def test_refusals(clients: list[httpx.Client]) -> None:
    mine = clients[0]
    name, other = (call(mine, "POST", "sessions", prompt="x y z")["id"] for _ in range(2))
    commit = call(mine, "POST", f"sessions/{name}/commit", name="diff")["commit"]
    taken = call(mine, "POST", f"sessions/{other}/commit", 409, name="diff")
    assert (taken["code"], taken["param"]) == ("already_exists", "name")
    assert call(mine, "GET", "branches/diff")["data"][0]["id"] == commit["id"]
    call(mine, "POST", f"sessions/{other}/commit", name="diff", force=True)
    for body, param in (
        ({"name": "../x"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a", "message": "x" * 5000}, "message"),
        ({"name": "a", "owner": "somebody"}, "owner"),
        ({"message": "a"}, "name"),
    ):
        refused = call(mine, "POST", f"sessions/{name}/commit", 400, **body)
        assert refused["param"] == param
        assert "None" not in refused["message"]
    assert call(mine, "POST", "sessions/checkout", 400, branch="a b")["param"] == "branch"
    assert call(mine, "GET", "branches/diff?a=diff", 400)["param"] == "b"
    assert call(mine, "GET", "branches/-x", 400)["param"] == "name"
    assert call(mine, "DELETE", "branches/diff")["name"] == "diff"
    call(mine, "GET", "branches/diff", 404)


def test_a_store_that_is_gone_is_not_located(clients: list[httpx.Client], tmp_path: Path) -> None:
    mine = clients[0]
    name = call(mine, "POST", "sessions", prompt=PROMPT)["id"]
    for number in range(100):  # A write in the background may make the folder once more.
        (tmp_path / "store").rename(tmp_path / f"moved-{number}")
        (tmp_path / "store").touch()
        if (tmp_path / "store").is_file():
            break
    error = call(mine, "POST", f"sessions/{name}/commit", 503, name="main")
    assert (error["code"], error["message"]) == ("store_unavailable", STORE_UNAVAILABLE)


def test_without_a_store(served: Served) -> None:
    name = served.client.post("/v1/sessions", json={"prompt": "x"}).json()["id"]
    for answer in (
        served.client.post(f"/v1/sessions/{name}/commit", json={"name": "a"}),
        served.client.get("/v1/branches"),
        served.client.post("/v1/sessions/checkout", json={"branch": "a"}),
    ):
        assert answer.status_code == 409
        assert "store=" in answer.json()["error"]["message"]
    served.client.delete(f"/v1/sessions/{name}")
