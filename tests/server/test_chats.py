"""``/v1/chats``: conversations of the page, which its windows share and restarts keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.base.errors import NotDurable
from quire.server.http.settings import ServerSettings

from .conftest import OPTIONS, Served, serving

NAMES = [f"chat-{number:032x}" for number in range(4)]
TREE = {"format": 1, "nodes": {"a": {"role": "user", "content": "x = 1 ↵ <b>😀"}}}


def put(client: httpx.Client, name: str, version: int = 0, document: Any = TREE, **more: Any) -> httpx.Response:
    return client.put(f"/v1/chats/{name}", json={"document": document, "version": version, **more})


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_conversation_is_stored_by_versions(served: Served) -> None:
    client = served.client
    assert put(client, NAMES[0], title="one").json()["version"] == 1
    assert put(client, NAMES[1], title="two").json()["version"] == 1
    assert code(put(client, NAMES[0])) == (409, "chat_changed")
    changed = {"format": 1, "nodes": {}}
    assert put(client, NAMES[0], 1, changed, title="new").json()["version"] == 2
    assert code(put(client, NAMES[0], 1)) == (409, "chat_changed")
    found = client.get(f"/v1/chats/{NAMES[0]}").json()
    assert (found["document"], found["version"], found["title"]) == (changed, 2, "new")
    assert client.get(f"/v1/chats/{NAMES[1]}").json()["document"] == TREE
    assert put(client, NAMES[1], 1, title="two", pinned=True).json()["pinned"] is True
    assert put(client, NAMES[0], 2, changed, title="new").json()["pinned"] is False
    listed = client.get("/v1/chats").json()["data"]
    assert [(one["id"], one["pinned"]) for one in listed] == [(NAMES[0], False), (NAMES[1], True)], "the latest first"
    for name in NAMES[:2]:
        assert client.delete(f"/v1/chats/{name}").json()["deleted"] is True
        assert code(client.get(f"/v1/chats/{name}")) == (404, "not_found")
        assert code(put(client, name, 3)) == (404, "not_found"), "a window that knows an old version hears of the end"
    assert client.get("/v1/chats").json()["data"] == []


def test_conversations_are_found_by_their_words(served: Served) -> None:
    client = served.client
    long = "the QUEUE is Full, " + "and so on " * 40
    tree = {"nodes": {"a": {"content": "first"}, "b": {"content": long}, "c": {"removed": True}, "d": None}}
    assert put(client, NAMES[0], document=tree, title="Größe").status_code == 200
    assert put(client, NAMES[1], document={"nodes": []}, title="a queue").status_code == 200

    def found(words: str) -> list[tuple[str, str | None]]:
        listed = client.get("/v1/chats", params={"search": words}).json()["data"]
        return [(one["id"], one["found"]) for one in listed]

    assert [name for name, _ in found("queue")] == [NAMES[1], NAMES[0]]
    ((name, piece),) = found("full GRÖSSE")
    assert (name, piece) == (NAMES[0], "the QUEUE is Full, " + ("and so on " * 40)[:101].strip() + "…")
    assert found("content") == [], "names of fields are no words"
    assert client.get("/v1/chats", params={"search": "x" * 201}).status_code == 400
    for name in NAMES[:2]:
        client.delete(f"/v1/chats/{name}")


@pytest.mark.parametrize("name", ["chat-x", f"chat-{'A' * 32}", f"session-{0:032x}", f"chat-{0:032x}0"])
def test_ids_have_one_form(name: str, served: Served) -> None:
    answer = put(served.client, name)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "id"


@pytest.mark.parametrize("body", [{}, {"document": []}, {"document": {}, "version": -1}, {"document": {}, "x": 1}])
def test_bodies_are_checked(body: dict[str, Any], served: Served) -> None:
    assert served.client.put(f"/v1/chats/{NAMES[0]}", json=body).status_code == 400
    assert served.client.get("/v1/chats").json()["data"] == []


def test_keys_and_limits(chat_llm: AsyncLLM) -> None:
    settings = ServerSettings(api_key=("one", "two"), max_chats=4, max_chat_bytes=4000)
    with serving(chat_llm, settings, Authorization="Bearer one") as served:
        first = served.client
        theirs = {"authorization": "Bearer two"}
        assert put(first, NAMES[0]).status_code == 200
        assert first.get(f"/v1/chats/{NAMES[0]}", headers=theirs).status_code == 404
        assert first.delete(f"/v1/chats/{NAMES[0]}", headers=theirs).status_code == 404
        assert first.get("/v1/chats", headers=theirs).json()["data"] == []
        assert put(first, NAMES[1]).status_code == 200
        assert code(put(first, NAMES[2])) == (429, "storage_limit")
        large = {"text": "x" * 2000}
        assert code(put(first, NAMES[1], 1, large)) == (429, "storage_limit")
        assert first.get(f"/v1/chats/{NAMES[1]}").json()["document"] == TREE
        taken = first.put(f"/v1/chats/{NAMES[0]}", json={"document": {}}, headers=theirs)
        assert taken.json()["error"]["param"] == "id"


def test_pages_may_keep_conversations_and_change_no_session(served: Served) -> None:
    page = {"origin": served.url, "sec-fetch-site": "same-origin"}
    url = f"/v1/chats/{NAMES[3]}"
    assert served.client.put(url, json={"document": TREE}, headers=page).status_code == 200
    assert served.client.delete(url, headers=page).status_code == 200
    assert code(served.client.post("/v1/sessions", json={}, headers=page)) == (403, "edits_not_allowed")
    foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    assert code(served.client.put(url, json={"document": TREE}, headers=foreign)) == (403, "origin_not_allowed")


def test_conversations_outlive_the_server(chat_folder: Path, tmp_path: Path) -> None:
    def run(keys: tuple[str, ...], work: Callable[[Served], None]) -> None:
        llm = AsyncLLM(chat_folder, state_dir=tmp_path / "state", **{**OPTIONS, "kv_cache_memory": "16MiB"})
        with serving(llm, ServerSettings(api_key=keys), Authorization=f"Bearer {keys[0]}") as served:
            work(served)
        asyncio.run(llm.close())

    def make(served: Served) -> None:
        for name in NAMES[:2]:
            put(served.client, name, title=f"title\nof {name}")
        put(served.client, NAMES[0], 1, title="again")
        served.client.delete(f"/v1/chats/{NAMES[1]}")

    def look(served: Served) -> None:
        (found,) = served.client.get("/v1/chats").json()["data"]
        assert (found["id"], found["title"], found["version"]) == (NAMES[0], "again", 2)
        assert served.client.get(f"/v1/chats/{NAMES[0]}").json()["document"] == TREE
        assert served.llm.kept is not None
        with pytest.MonkeyPatch.context() as patch:

            def write(changes: Any) -> None:
                raise NotDurable("the disk is full")

            patch.setattr(served.llm.kept.journal, "write", write)
            assert code(put(served.client, NAMES[0], 2, {})) == (507, "not_durable")
            assert code(put(served.client, NAMES[2])) == (507, "not_durable")
            assert code(served.client.delete(f"/v1/chats/{NAMES[0]}")) == (507, "not_durable")
        (found,) = served.client.get("/v1/chats").json()["data"]
        assert (found["id"], found["version"]) == (NAMES[0], 2)

    run(("one",), make)
    run(("two",), lambda served: None)
    run(("one",), look)
