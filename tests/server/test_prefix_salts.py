"""No API key learns from the prefix cache what another one has asked, on any road; unless the
server was told to share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire import AsyncLLM
from quire.adapters.keys import AdapterKey
from quire.contracts.store import ObjectKey
from quire.server.http.settings import ServerSettings
from quire.store.memory import MemoryTier
from quire.store.stack import Store

from .conftest import Served, pages_free, serving, wait_for

KEYS = ("first", "second")
SECRET = "def secret(a, b):\n    return the_thing_that_nobody_else_may_know(a, b) + 12345\n"
TURN = [{"role": "user", "content": SECRET}]
LIMITS: dict[str, Any] = {"max_tokens": 2, "temperature": 0}


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(autouse=True)
def nothing_is_left(chat_llm: AsyncLLM) -> Iterator[None]:
    yield
    wait_for(lambda: pages_free(chat_llm))


@pytest.fixture(scope="module")
def apart(chat_llm: AsyncLLM) -> Iterator[Served]:
    with serving(chat_llm, ServerSettings(api_key=KEYS)) as found:
        yield found


@pytest.fixture(scope="module")
def shared(chat_llm: AsyncLLM) -> Iterator[Served]:
    with serving(chat_llm, ServerSettings(api_key=KEYS, share_prefix_cache=True)) as found:
        yield found


def made(served: Served, key: str, **body: Any) -> str:
    answer = served.client.post("/v1/sessions", json=body, headers=headers(key))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def leave(served: Served, key: str, name: str) -> None:
    assert served.client.delete(f"/v1/sessions/{name}", headers=headers(key)).status_code == 200


def call(served: Served, key: str, path: str, **body: Any) -> Any:
    """The answer, or the last chunk of a stream."""
    answer = served.client.post(path, json=body, headers=headers(key))
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    return json.loads([line for line in answer.text.splitlines() if line][-2].removeprefix("data: "))


def in_session(served: Served, key: str, path: str, first: dict[str, Any], **body: Any) -> Any:
    """A call in a session of its own, which is deleted."""
    name = made(served, key, **first)
    try:
        given = {field: name if value == "ID" else value for field, value in body.items()}
        return call(served, key, path.replace("ID", name), **given)
    finally:
        leave(served, key, name)


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ROADS: dict[str, Any] = {
    "completion": lambda s, k, **o: call(s, k, "/v1/completions", prompt=SECRET, **LIMITS, **o),
    "streamed completion": lambda s, k, **o: call(s, k, "/v1/completions", prompt=SECRET, **USAGE, **LIMITS, **o),
    "chat": lambda s, k, **o: call(s, k, "/v1/chat/completions", messages=TURN, **LIMITS, **o),
    "streamed chat": lambda s, k, **o: call(s, k, "/v1/chat/completions", messages=TURN, **USAGE, **LIMITS, **o),
    "response": lambda s, k, **o: call(s, k, "/v1/responses", input=SECRET, max_output_tokens=2, **o),
    "message": lambda s, k, **o: call(s, k, "/v1/messages", messages=TURN, max_tokens=2, **o),
    "session": lambda s, k, **o: in_session(s, k, "/v1/sessions/ID/append", {"prompt": SECRET, **o}, text="a b"),
    "append": lambda s, k, **o: in_session(s, k, "/v1/sessions/ID/append", o, text=SECRET),
    "score": lambda s, k, **o: in_session(s, k, "/v1/sessions/ID/score", {"prompt": "a", **o}, text=SECRET),
    "generate": lambda s, k, **o: in_session(s, k, "/v1/sessions/ID/generate", o, prompt=SECRET, **LIMITS),
    "answer": lambda s, k, **o: in_session(s, k, "/v1/sessions/ID/generate", o, messages=TURN, **LIMITS),
    "completion in a session": lambda s, k, **o: in_session(
        s, k, "/v1/completions", o, prompt=SECRET, session_id="ID", **LIMITS
    ),
    "chat in a session": lambda s, k, **o: in_session(
        s, k, "/v1/chat/completions", o, messages=TURN, session_id="ID", **LIMITS
    ),
    "fork": lambda s, k, **o: in_session(s, k, "/v1/sessions/ID/fork", {"prompt": SECRET, "ttl": 0.5, **o}),
}
"""Every call that runs tokens, with the secret in them."""


@pytest.fixture
def looks(chat_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The salts under which the prefix cache is asked, told or searched, in the order of
    the calls."""
    cache, seen = chat_llm.engine.cache, []
    assert cache is not None

    def watched(name: str, place: int) -> Any:
        original = getattr(cache, name)

        def look(*args: Any, **options: Any) -> Any:
            key = args[place]
            seen.append(key.salt if isinstance(key, AdapterKey) else key)
            return original(*args, **options)

        return look

    for name, place in (("match", 1), ("held", 1), ("peek", 1), ("find", 1), ("insert", 2)):
        monkeypatch.setattr(cache, name, watched(name, place))
    return seen


@pytest.mark.parametrize("road", ROADS)
def test_no_road_leads_to_what_another_key_left(apart: Served, looks: list[Any], road: str) -> None:
    salts: dict[str, set[Any]] = {}
    for key in KEYS:
        looks.clear()
        ROADS[road](apart, key)
        salts[key] = set(looks)
        assert salts[key], "the cache was not asked"
    assert not salts["first"] & salts["second"]
    # Whoever comes without a key, in the same process, has another salt too.
    assert ("", None) not in salts["first"] | salts["second"]


@pytest.mark.parametrize("road", ROADS)
def test_no_road_asks_a_store_for_what_another_key_left(
    apart: Served, chat_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, road: str
) -> None:
    """So no answer, and not the time that one takes, says what another key has there."""
    seen: set[bytes] = set()

    def watch(kind: type, name: str) -> None:
        right = getattr(kind, name)

        def watched(self: Any, what: Any, *given: Any, **named: Any) -> Any:
            asked = [what] if isinstance(what, ObjectKey) else what
            seen.update(one.parent if isinstance(one, ObjectKey) else one for one in asked)
            return right(self, what, *given, **named)

        monkeypatch.setattr(kind, name, watched)

    for verb in ("children", "get", "contains", "put", "remove", "pin"):
        watch(Store, verb)
        watch(MemoryTier, f"{verb}_now")
    monkeypatch.setattr(chat_llm.engine.stored, "least", 1)
    found: dict[str, set[bytes]] = {}
    for key in KEYS:
        seen.clear()
        ROADS[road](apart, key)
        with chat_llm.engine.lock:
            while chat_llm.engine.runner.room.make():
                pass
        found[key] = set(seen)
        assert found[key], "the store was not asked"
    assert not found["first"] & found["second"]


@pytest.mark.parametrize("road", ["completion", "streamed completion", "chat", "streamed chat"])
def test_cached_tokens_tell_a_key_what_it_asked_itself(
    apart: Served, shared: Served, chat_llm: AsyncLLM, road: str
) -> None:
    def cached(served: Served, key: str, **options: Any) -> int:
        return int(ROADS[road](served, key, **options)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(apart, "first") == 0
    known = cached(apart, "first")
    assert known > 10
    assert cached(apart, "second") == 0
    assert cached(apart, "second") == known
    # The salt of a request divides what a key has, and cannot be chosen so that it becomes another
    # key's.
    assert cached(apart, "first", cache_salt="x") == 0
    assert cached(apart, "first", cache_salt="x") == known
    assert cached(apart, "second", cache_salt="x") == 0
    assert cached(apart, "first", cache_salt="") == 0

    chat_llm.engine.reset_prefix_cache()
    assert cached(shared, "first") == 0
    assert cached(shared, "second") == known
    assert cached(shared, "first", cache_salt="x") == 0
    assert cached(shared, "second", cache_salt="x") == known


def test_a_session_and_a_completion_of_one_key_share(apart: Served) -> None:
    """As they always have: salts part keys, not calls."""
    name = made(apart, "first", prompt=SECRET)
    found = {key: ROADS["completion"](apart, key)["usage"]["prompt_tokens_details"]["cached_tokens"] for key in KEYS}
    assert found["first"] > 10
    assert found["second"] == 0
    leave(apart, "first", name)


def test_salts_are_told_apart(apart: Served, shared: Served) -> None:
    owners = ["a" * 64, "b" * 64]
    given = [None, "", "x", "a" * 64, f"{'a' * 64} x"]
    salts = [apart.context.salt(owner, salt) for owner in owners for salt in given]
    assert len(set(salts)) == len(salts)
    assert apart.context.salt(owners[0], "x") == apart.context.salt(owners[0], "x")
    # Without keys there is nobody to be told from; a server that shares takes what is given.
    assert [apart.context.salt("", salt) for salt in given] == given
    assert [shared.context.salt(owners[0], salt) for salt in given] == given
