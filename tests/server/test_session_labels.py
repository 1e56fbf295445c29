"""Names and labels of sessions: in Python, over HTTP, and sessions found by them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire import AsyncLLM, InvalidArgument
from quire.sessions.labels import checked_labels, checked_name

from .conftest import STATE_FILE, Served, pages_free, wait_for

PROMPT = "class Stack:\n"
LABELS = {"task": "42", "kind": "review"}


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    yield
    for listed in served.client.get("/v1/sessions").json()["data"]:
        assert served.client.delete(f"/v1/sessions/{listed['id']}").status_code == 200
    wait_for(lambda: pages_free(served.llm))


def made(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/v1/sessions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def info(client: httpx.Client, name: str) -> Any:
    return client.get(f"/v1/sessions/{name}").json()


def listed(client: httpx.Client, **params: Any) -> list[str]:
    answer = client.get("/v1/sessions", params=params)
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["data"]]


# -- in Python -------------------------------------------------------------------------------------


def test_a_session_has_a_name_and_labels(llm: AsyncLLM) -> None:
    given = dict(LABELS)
    with llm._llm.session(PROMPT, name="review", labels=given) as session:
        given["task"] = "43"
        assert (session.name, dict(session.labels)) == ("review", LABELS)
        with pytest.raises(TypeError):
            session.labels["task"] = "43"  # type: ignore[index]
        # A branch belongs to the same task, and is another session.
        child = session.fork()
        assert (child.name, child.labels) == (None, LABELS)
        child.name, child.labels = "second try", {"try": "2"}
        assert (child.name, child.labels) == ("second try", {"try": "2"})
        assert (session.name, session.labels) == ("review", LABELS)
        for name in ("", "a\nb", "x" * 257, 5):
            with pytest.raises(InvalidArgument, match="name must be 1 to 256 printable characters"):
                child.name = name  # type: ignore[assignment]
        with pytest.raises(InvalidArgument, match="labels must be a mapping"):
            child.labels = ["a"]  # type: ignore[assignment]
        assert (child.name, child.labels) == ("second try", {"try": "2"})
        child.close()
    with llm._llm.session(PROMPT) as session:
        assert (session.name, session.labels) == (None, {})
    with pytest.raises(InvalidArgument, match="name must be"):
        llm._llm.session(PROMPT, name="")
    with pytest.raises(InvalidArgument, match="labels"):
        llm._llm.session(PROMPT, labels={"a": 1})  # type: ignore[dict-item]


def test_an_async_session_too(llm: AsyncLLM) -> None:
    async def main() -> None:
        async with await llm.session(PROMPT, name="review", labels=LABELS) as session:
            assert (session.name, session.labels) == ("review", LABELS)
            session.name, session.labels = None, {}
            assert (session.name, session.labels) == (None, {})

    asyncio.run(main())


def test_limits() -> None:
    assert checked_name("x" * 256) == "x" * 256
    assert checked_labels({f"l{number}": "" for number in range(16)})
    assert checked_labels({"n" * 64: "v" * 512})
    for bad, reason in (
        ({f"l{number}": "" for number in range(17)}, "17 entries; at most 16"),
        ({"n" * 65: "v"}, "each name must be 1 to 64"),
        ({"": "v"}, "each name must be"),
        ({"a=b": "v"}, 'without "="'),
        ({5: "v"}, "each name must be"),
        ({"a": "v" * 513}, "labels.a must be at most 512"),
        ({"a": None}, "labels.a must be"),
        ({"a": "\x00"}, "labels.a must be"),
        (None, "mapping"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            checked_labels(bad)


# -- over HTTP -------------------------------------------------------------------------------------


def test_sessions_are_found_by_name_and_labels(client: httpx.Client) -> None:
    first = made(client, prompt=PROMPT, name="review", labels=LABELS)
    second = made(client, prompt=PROMPT, name="review", labels={"task": "43"})  # names need not be unique
    third = made(client, prompt=PROMPT, labels={"kind": "review", "empty": "", "odd": "a=b"})
    assert (info(client, first)["name"], info(client, first)["labels"]) == ("review", LABELS)
    assert (info(client, third)["name"], info(client, third)["labels"]["odd"]) == (None, "a=b")
    assert listed(client) == [first, second, third]
    assert listed(client, name="review") == [first, second]
    assert listed(client, name="Review") == []
    assert listed(client, label="task=42") == [first]
    assert listed(client, label="task") == [first, second]
    assert listed(client, label=["kind=review", "task"]) == [first]
    assert listed(client, label=["kind=review", "task=43"]) == []
    assert listed(client, label="empty=") == listed(client, label="odd=a=b") == [third]
    assert listed(client, label="task=") == listed(client, label="tas") == listed(client, label="=") == []
    assert listed(client, name="review", label="task=43") == [second]
    # Pages are of what is found, behind any session.
    page = client.get("/v1/sessions", params={"label": "kind", "limit": 1}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([first], True)
    page = client.get("/v1/sessions", params={"label": "kind", "limit": 1, "after": second}).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([third], False)


def test_forks_and_uploads(client: httpx.Client) -> None:
    name = made(client, prompt=PROMPT, name="review", labels=LABELS)
    path = f"/v1/sessions/{name}"
    for body, expected in (
        ({}, (None, LABELS)),
        ({"name": "try"}, ("try", LABELS)),
        ({"labels": {"try": "2"}}, (None, {"try": "2"})),
        ({"labels": {}}, (None, {})),
    ):
        (child,) = client.post(f"{path}/fork", json=body).json()["ids"]
        assert (info(client, child)["name"], info(client, child)["labels"]) == expected, body
    data = client.get(f"{path}/state").content
    loaded = client.post("/v1/sessions/state", content=data, headers=STATE_FILE).json()["id"]
    assert (info(client, loaded)["name"], info(client, loaded)["labels"]) == (None, {})
    params = {"name": "restored", "label": ["task=42", "odd=a=b"]}
    loaded = client.post("/v1/sessions/state", content=data, params=params, headers=STATE_FILE).json()["id"]
    assert (info(client, loaded)["name"], info(client, loaded)["labels"]) == (
        "restored",
        {"task": "42", "odd": "a=b"},
    )


@pytest.mark.parametrize(
    ("path", "body", "params", "param"),
    [
        ("/v1/sessions", {"name": ""}, {}, "name"),
        ("/v1/sessions", {"name": 5}, {}, "name"),
        ("/v1/sessions", {"name": "a\nb"}, {}, "name"),
        ("/v1/sessions", {"labels": {"a": 5}}, {}, "labels.a"),
        ("/v1/sessions", {"labels": {"a=b": "c"}}, {}, "labels"),
        ("/v1/sessions", {"labels": ["a"]}, {}, "labels"),
        ("/v1/sessions", {"labels": {str(number): "" for number in range(17)}}, {}, "labels"),
        ("/v1/sessions/ID/fork", {"name": "x" * 257}, {}, "name"),
        ("/v1/sessions/ID/fork", {"labels": {"": ""}}, {}, "labels"),
        ("/v1/sessions/state", None, {"name": ""}, "name"),
        ("/v1/sessions/state", None, {"label": "task"}, "label"),
        ("/v1/sessions/state", None, {"label": ["a=1", "a=2"]}, "label"),
        ("/v1/sessions/state", None, {"label": "=1"}, "labels"),
    ],
)
def test_bad_ones_are_refused_before_anything_is_made(
    client: httpx.Client, path: str, body: Any, params: Any, param: str
) -> None:
    name = made(client, prompt=PROMPT)
    answer = client.post(path.replace("ID", name), params=params, **({} if body is None else {"json": body}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert listed(client) == [name]
