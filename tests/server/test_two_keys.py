"""What one API key reads of another: nothing that it has given or got, under any address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.http.settings import ServerSettings

from .conftest import OPTIONS, TEMPLATE, Served, serving

MARK = "qzxmark"
STREAMS = {"/v1/state/events"}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, httpx.Client, dict[str, list[str]]]]:
    """A server on which the first key has left marks, the client of the second, and what the first
    has made by kinds of its ids."""
    folder = tmp_path_factory.mktemp("marked")
    options = {**OPTIONS, "chat_template": TEMPLATE, "store": [f"file:{folder}/store"], "state_dir": folder / "state"}
    llm = AsyncLLM("tiny-python", **options)
    try:
        with (
            serving(llm, ServerSettings(api_key=("one", "two")), authorization="Bearer one") as served,
            httpx.Client(
                base_url=served.url, timeout=60, trust_env=False, headers={"authorization": "Bearer two"}
            ) as two,
        ):
            yield served, two, leave_marks(served.client)
    finally:
        asyncio.run(llm.close())


def leave_marks(client: httpx.Client) -> dict[str, list[str]]:
    def post(path: str, **body: Any) -> dict[str, Any]:
        answer = client.post(path, json=body)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    text = f"def {MARK}(a, b): return {MARK}"
    messages = [{"role": "user", "content": text}]
    tool = {"type": "function", "function": {"name": f"{MARK}_tool", "parameters": {"type": "object"}}}
    post("/v1/load_lora_adapter", lora_name=f"{MARK}-adapter", lora_path="tiny-python-docstrings")
    client.headers["x-request-id"] = f"{MARK}-request"
    post("/v1/completions", prompt=text, max_tokens=4, model=f"{MARK}-adapter", user=MARK, cache_salt=MARK)
    post("/v1/chat/completions", messages=messages, tools=[tool], tool_choice="none", max_tokens=4)
    answer = post("/v1/responses", input=text, max_output_tokens=4, metadata={MARK: MARK})
    post("/v1/messages", messages=messages, max_tokens=4, system=MARK)
    session = post("/v1/sessions", prompt=text, name=f"{MARK}-session", labels={MARK: MARK}, model=f"{MARK}-adapter")
    post(f"/v1/sessions/{session['id']}/generate", max_tokens=4)
    post(f"/v1/sessions/{session['id']}/commit", name=f"{MARK}-branch", message=f"{MARK} message")
    del client.headers["x-request-id"]
    items = client.get(f"/v1/responses/{answer['id']}/input_items").json()["data"]
    return {
        "session_id": [session["id"]],
        "response_id": [answer["id"]],
        "name": [f"{MARK}-branch"],
        "model": [f"{MARK}-adapter"],
        "branch": [f"session:{session['id']}", session["id"]],
        "items": [item["id"] for item in items if "id" in item],
    }


def test_the_marks_are_there(marked: tuple[Served, httpx.Client, dict[str, list[str]]]) -> None:
    """The first key finds them under most addresses, so that the next test can fail."""
    served, _, made = marked
    found = {path for path, text in documents(served.client, served, made) if MARK in text}
    wanted = {"/v1/models", "/v1/sessions", "/v1/branches", "/v1/state/history", "/v1/state/timeline"}
    assert wanted <= found
    assert {f"/v1/responses/{made['response_id'][0]}", f"/v1/sessions/{made['session_id'][0]}"} <= found


def test_another_key_reads_none_of_them(marked: tuple[Served, httpx.Client, dict[str, list[str]]]) -> None:
    served, two, made = marked
    ids = [*made["session_id"], *made["response_id"], *made["items"]]
    for path, text in documents(two, served, made):
        # A refusal may repeat what was asked for.
        text = text.replace(path.rpartition("/")[2], "") if path.rpartition("/")[2].startswith(MARK) else text
        assert MARK not in text, (path, text)
        assert not any(one in text for one in ids if one not in path), (path, text)


def documents(client: httpx.Client, served: Served, made: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Every GET route with its answer, of which paths name what the first key has made."""
    schema = served.client.get("/openapi.json").json()
    routes = [path for path, item in schema["paths"].items() if "get" in item and path not in STREAMS]
    assert len(routes) > 20
    for route in routes:
        given = [one["name"] for one in schema["paths"][route]["get"].get("parameters", ()) if one["in"] == "path"]
        for value in [value for name in given for value in made.get(name, ["0"])] or [""]:
            path = route
            for name in given:
                path = path.replace("{" + name + "}", value)
            for branch in made["branch"]:
                query = {"branch": branch, "a": branch, "b": branch, "position": 3, "layer": 0, "start": 0, "pool": 0}
                asked = {
                    one["name"] for one in schema["paths"][route]["get"].get("parameters", ()) if one["in"] == "query"
                }
                answer = client.get(path, params={name: one for name, one in query.items() if name in asked})
                assert answer.status_code < 500, answer.text
                said = (
                    answer.text
                    if client is served.client
                    else answer.text.replace(branch.partition(":")[2] or branch, "")
                )
                yield path, said
    with client.stream("GET", "/v1/state/events") as stream:
        yield "/v1/state/events", json.dumps(next(line for line in stream.iter_lines() if line.startswith("data")))
