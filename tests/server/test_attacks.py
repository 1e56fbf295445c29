"""Clients that mean no good: slow, silent, greedy.

What they cost, and that they cost it nobody else.
"""

from __future__ import annotations

import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.anthropic import routes as anthropic_messages
from quire.server.http import bodies, gate, status
from quire.server.http import serving as serving_module
from quire.server.http.events import JsonAnswer, encode_json
from quire.server.http.serving import most_connections, raise_descriptor_limit
from quire.server.http.settings import ServerSettings
from quire.server.openai import adapter_routes, chat, completions, tokens, warm_routes
from quire.server.openai.generation import MAX_STOP_CHARACTERS, MAX_STOPS
from quire.server.responses import routes as responses
from quire.server.sessions import branch_routes
from quire.server.sessions import routes as session_routes

from .conftest import Served, pages_free, serving, wait_for

PROMPT = "def fib(n):"
BODIES = (
    *(adapter_routes, anthropic_messages, branch_routes, chat, completions, responses, session_routes),
    *(status, tokens, warm_routes),
)
"""Modules of routes with bodies."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PATIENCE", 0.3)
    monkeypatch.setattr(gate, "READER_SECONDS", 0.3)
    monkeypatch.setattr(serving_module, "HEAD_SECONDS", 0.3)


@pytest.fixture
def small(llm: AsyncLLM, impatient: None) -> Iterator[Served]:
    """A server that takes two requests at a time, and waits for nobody."""
    with serving(llm, ServerSettings(max_waiting=2), send_buffer=8192) as found:
        yield found


def connected(served: Served, sent: bytes = b"") -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(sent)
    return connection


def head(path: str, length: int) -> bytes:
    kind = "octet-stream" if path.endswith("/state") else "json"
    lines = f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: application/{kind}", f"Content-Length: {length}"
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def received(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/sessions/state"])
def test_bodies_that_do_not_come_give_their_places_back(small: Served, path: str) -> None:
    slow = [connected(small, head(path, 1000) + b"{") for _ in range(2)]
    wait_for(lambda: small.context.gate.under_way == 2)
    assert small.client.get("/v1/models").status_code == 429
    for connection in slow:
        with connection:
            answer = received(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    wait_for(lambda: small.context.gate.under_way == 0)
    assert small.client.get("/v1/models").status_code == 200


def test_a_byte_at_a_time_is_too_slow(small: Served) -> None:
    with connected(small, head("/v1/completions", 1000)) as connection:
        began = time.monotonic()
        connection.setblocking(True)
        answer = b""
        connection.settimeout(0.05)
        while not answer:
            connection.sendall(b" ")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                assert time.monotonic() - began < 10
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_time_is_counted_for_the_body_alone(small: Served) -> None:
    """What takes longer than a body may is answered all the same."""
    answer = small.client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    )
    assert answer.json()["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"])
def test_connections_without_a_request_are_closed(small: Served, sent: bytes) -> None:
    with connected(small, sent) as connection:
        began = time.monotonic()
        assert received(connection) == b""
        assert time.monotonic() - began < 10


def test_the_longest_idle_connection_goes_when_descriptors_are_short(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has sent a request keeps its connection."""
    monkeypatch.setattr("quire.server.http.serving.HEAD_SECONDS", 60.0)
    monkeypatch.setattr("quire.server.http.serving.most_connections", lambda: 4)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}).encode()
    with ExitStack() as opened:
        busy = opened.enter_context(connected(small, head("/v1/completions", len(body)) + body))
        wait_for(lambda: small.context.gate.under_way == 1)
        silent = [opened.enter_context(connected(small)) for _ in range(3)]
        wait_for(lambda: len(small.server.server_state.connections) == 4)
        more = [opened.enter_context(connected(small, b"GET /hea")) for _ in range(2)]
        assert [received(one) for one in silent[:2]] == [b"", b""]
        for late in (silent[2], more[0]):
            late.sendall(
                b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" if late is silent[2] else b"lth HTTP/1.1\r\nHost: x\r\n\r\n"
            )
            assert late.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert busy.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (600, 600))
    assert most_connections() == 344


def test_an_open_connection_is_used_again(small: Served) -> None:
    with connected(small) as connection:
        for _ in range(3):
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
            time.sleep(0.15)


def test_a_reader_that_stands_still_loses_its_place(small: Served) -> None:
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20}
    ).encode()
    host, port = small.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with connection:
        connection.connect((host, int(port)))
        connection.sendall(head("/v1/completions", len(body)) + body)
        wait_for(lambda: small.context.gate.under_way == 1)
        wait_for(lambda: small.context.gate.under_way == 0)
        wait_for(lambda: not small.llm.engine.has_work)
        wait_for(lambda: pages_free(small.llm))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stop": "x" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
    ({"stop": ["x" * (MAX_STOP_CHARACTERS // 2), "y" * (MAX_STOP_CHARACTERS // 2 + 1)]}, "stop"),
    ({"stop": [""] * (MAX_STOPS + 1)}, "stop"),
    ({"stop_token_ids": [1] * 4097}, "stop_token_ids"),
    ({"logit_bias": {str(token): 0 for token in range(4097)}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 0}}, "logit_bias"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_lists_without_use_are_refused(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    session = client.post("/v1/sessions", json={"prompt": PROMPT}).json()["id"]
    for path in ("/v1/completions", f"/v1/sessions/{session}/generate"):
        answer = client.post(path, json={"prompt": PROMPT, "max_tokens": 1, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "found", "most"),
    [
        (b'{"prompt":[' + b"1," * bodies.MAX_VALUES + b"1]}", "500003 values", bodies.MAX_VALUES),
        (b'{"zz":[' + b"{}," * bodies.MAX_CONTAINERS + b"{}]}", "50003 arrays and objects", bodies.MAX_CONTAINERS),
        (b"[" + b"[]," * bodies.MAX_CONTAINERS, "50001 arrays and objects", bodies.MAX_CONTAINERS),
        (
            b"{" + b",".join(b'"%d":1' % number for number in range(bodies.MAX_MEMBERS + 1)) + b"}",
            "50001 members of objects",
            bodies.MAX_MEMBERS,
        ),
    ],
)
def test_bodies_of_too_many_values_are_not_read(client: httpx.Client, body: bytes, found: str, most: int) -> None:
    answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert error["message"] == f"the body holds {found}; at most {most} are taken"


def test_texts_may_have_commas_and_brackets() -> None:
    for text in ('"[{,:' * bodies.MAX_VALUES, "\\" * 1_000_001 + '"[{,:' * bodies.MAX_VALUES):
        bodies.check_json(json.dumps({"prompt": text}).encode())


MANY = 9_000
"""Entries of a list within all limits."""
WRONG: list[tuple[str, Any, str]] = [
    ("/v1/completions", {"prompt": "a", "stop_token_ids": ["1"] * MANY}, "stop_token_ids.0"),
    ("/v1/completions", {"prompt": "a", "guided_choice": [1] * MANY}, "guided_choice.0"),
    ("/v1/completions", {"prompt": "a", "guided_choice": ["x"] * (bodies.MAX_ITEMS + 1)}, "guided_choice"),
    ("/v1/completions", {"prompt": ["a"] * (bodies.MAX_ITEMS + 1)}, "prompt"),
    ("/v1/completions", {"prompt": [{"text": "a"}] * (bodies.MAX_ITEMS + 1)}, "prompt"),
    ("/v1/chat/completions", {"messages": [1] * MANY}, "messages.0"),
    ("/v1/chat/completions", {"messages": [{}] * (bodies.MAX_ITEMS + 1)}, "messages"),
    ("/v1/chat/completions", {"messages": [], "tools": [{}] * MANY}, "tools.0.type"),
    ("/v1/chat/completions", {"messages": [], "reasoning": dict.fromkeys(map(str, range(MANY)), 1)}, "reasoning"),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * (bodies.MAX_ITEMS + 1)}, "input"),
    ("/v1/responses", {"input": "a", "metadata": dict.fromkeys(map(str, range(MANY)), 1)}, "metadata.0"),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user"}] * (bodies.MAX_ITEMS + 1)}, "messages"),
    ("/v1/sessions", dict.fromkeys(map(str, range(MANY)), 1), None),
    ("/v1/sessions", {"labels": dict.fromkeys(map(str, range(MANY)), 1)}, "labels.0"),
    ("/v1/sessions/generate", {"ids": ["x"], "each": [{}] * MANY}, "each"),
    ("/v1/sessions/generate", {"ids": ["x"] * MANY}, "ids"),
    ("/v1/sessions/generate", {"ids": ["x"], "each": [{"seed": "1"}] * MANY}, "each.0.seed"),
    ("/tokenize", {"messages": ["a"] * MANY}, "messages.0"),
    ("/detokenize", {"tokens": ["1"] * MANY}, "tokens.0"),
    ("/detokenize", {"tokens": [1] * MANY}, "tokens"),
    ("/v1/warm", {"segments": [1] * MANY}, "segments.0"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
def test_the_first_error_of_a_list_is_told(served: Served, path: str, body: Any, param: str | None) -> None:
    answer = served.client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    counted = re.search(r"and (\d+) more", error["message"])
    assert counted is None or int(counted[1]) < 10, error["message"]


def test_every_list_and_mapping_of_a_body_stops_at_its_first_error(served: Served) -> None:
    def check(schema: Any, path: str) -> None:
        if isinstance(schema, list | tuple):
            for one in schema:
                check(one, path)
        elif isinstance(schema, dict):
            if schema.get("type") in ("list", "dict", "set", "tuple"):
                assert schema.get("fail_fast"), path
            if schema.get("type") == "model":
                assert issubclass(schema["cls"], bodies.BoundedModel), path
            for name, one in schema.items():
                if name not in ("metadata", "serialization") or not isinstance(schema.get("type"), str):
                    check(one, f"{path}.{name}")

    routes = [route for module in BODIES for route in module.router.routes if getattr(route, "body_field", None)]
    assert len(routes) > 15
    for route in routes:
        assert isinstance(route, bodies.BodyRoute), route.path
        kind = route.body_field.field_info.annotation
        check(kind.__pydantic_core_schema__, f"{route.path}: {kind.__name__}")


@pytest.mark.parametrize("size", [bodies.LARGE_BODY - 1, bodies.LARGE_BODY])
def test_large_bodies_are_read_on_a_worker_thread(served: Served, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    for name in ("check_json", "parsed"):
        real = getattr(bodies, name)

        def noted(*given: Any, real: Any = real) -> Any:
            threads.append(threading.current_thread().name)
            return real(*given)

        monkeypatch.setattr(gate if name == "check_json" else bodies, name, noted)
    start = b'{"prompt": "a", "max_tokens": 1, "unread": "'
    body = start + b"x" * (size - len(start) - 2) + b'"}'
    answer = served.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert [name == "test-server" for name in threads] == [size < bodies.LARGE_BODY] * 2


@pytest.mark.parametrize("size", [0, bodies.LENIENT])
def test_half_a_surrogate_pair_is_taken_in_all_but_the_largest_bodies(client: httpx.Client, size: int) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "unread": "\\ud800", "more": "' + b"x" * size + b'"}'
    answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == (400 if size else 200)


def test_unknown_names_are_not_sent_back_in_full(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "model": "x" * 1_000_000})
    assert answer.status_code == 404
    assert len(answer.content) < 1000


def test_session_that_begins_with_messages_remembers_what_is_generated(chat_client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "one"}]
    session = chat_client.post("/v1/sessions", json={"messages": messages}).json()["id"]
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    made = chat_client.post(f"/v1/sessions/{session}/generate", json=options).json()
    messages += [{"role": "assistant", "content": made["choices"][0]["text"]}, {"role": "user", "content": "two"}]
    chat_client.post(f"/v1/sessions/{session}/generate", json={**options, "messages": messages[-1:]})
    held = chat_client.get(f"/v1/sessions/{session}").json()["tokens"]
    expected = chat_client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert held[: len(expected)] == expected
    assert len(held) == len(expected) + 4


def test_answers_in_pieces_are_whole() -> None:
    content = {
        "id": 'x"[]',
        "choices": [{"text": "\u2028\ud800", "logprobs": None}, [1.5, []]],
        "usage": {"a": [1]},
        "n": [],
    }
    body = bytes(JsonAnswer(content).body)
    assert json.loads(body) == content
    assert body == encode_json(content)
