"""The gate: keys, ids, limits, nesting, closing; with an application of a few lines behind it, and
with the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from quire import AsyncLLM
from quire.base.signatures import MAX_NESTING
from quire.server.http.bodies import check_json
from quire.server.http.errors import ApiError
from quire.server.http.gate import Gate, GateMiddleware, KeyPortions
from quire.server.http.settings import ServerSettings

from .conftest import Served, serving, wait_for

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


async def read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


async def answer(send: Send, body: bytes = b"{}", status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-request-id", b"from the app")]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, await read(receive))


class Call:
    """One request straight into the gate, without a server; what comes back."""

    def __init__(self, *parts: bytes, path: str = "/v1/x", headers: dict[str, str] | None = None) -> None:
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
        }
        self._parts = list(parts) or [b""]
        self.read = 0
        """Bytes that the gate has asked for."""
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self._parts:
            return {"type": "http.disconnect"}
        part = self._parts.pop(0)
        self.read += len(part)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def through(self, app: Handler, gate: Gate | None = None, **settings: Any) -> Call:
        async def run() -> None:
            made = ServerSettings(**settings)
            await GateMiddleware(app, gate=gate or Gate(made.max_waiting), settings=made)(
                self.scope, self.receive, self.send
            )

        asyncio.run(run())
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> httpx.Headers:
        return httpx.Headers(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        return found["error"]


# -- bodies ----------------------------------------------------------------------------------------


def test_a_body_arrives_in_one_piece() -> None:
    assert Call(b'{"a"', b": ", b"1}").through(echo).body == b'{"a": 1}'


@pytest.mark.parametrize("split", [1, 7, 100])
def test_bodies_beyond_the_limit(split: int) -> None:
    def parts(size: int) -> list[bytes]:
        return [b"x" * min(split, size - start) for start in range(0, size, split)]

    assert Call(*parts(100)).through(echo, max_body_bytes=100).status == 200
    call = Call(*parts(1000)).through(echo, max_body_bytes=100)
    assert (call.status, call.error["code"]) == (413, "request_too_large")
    assert call.read <= 100 + split  # the rest was never asked for


def test_a_declared_length_is_enough_to_refuse() -> None:
    for length in ("101", "9" * 5000, "-1", "1e2"):
        call = Call(b"x" * 101, headers={"content-length": length}).through(echo, max_body_bytes=100)
        assert (call.status, call.read) == (413, 0)
    assert Call(b"x" * 100, headers={"content-length": "100"}).through(echo, max_body_bytes=100).status == 200


def test_uploads_have_a_limit_of_their_own_and_come_in_pieces() -> None:
    seen: list[int] = []

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            seen.append(len(message["body"]))
            if not message["more_body"]:
                break
        await answer(send)

    limits = {"max_body_bytes": 10, "max_upload_bytes": 100}
    assert Call(b"\0[" * 25, b"[" * 50, path="/v1/sessions/state").through(count, **limits).status == 200
    assert seen == [50, 50]
    call = Call(b"[" * 50, b"[" * 51, b"[" * 50, path="/v1/sessions/state").through(count, **limits)
    assert (call.status, call.error["code"]) == (413, "request_too_large")
    assert seen == [50, 50, 50]


def nested(depth: int) -> bytes:
    return b'{"a":[' * (depth // 2) + b"[" * (depth % 2) + b"]" * (depth % 2) + b"]}" * (depth // 2)


def test_nesting() -> None:
    for depth in (0, 1, MAX_NESTING - 1, MAX_NESTING):
        check_json(nested(depth))
    for depth in (MAX_NESTING + 1, 1000, 100_000):
        with pytest.raises(ApiError) as caught:
            check_json(nested(depth))
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert Call(nested(100)).through(echo).status == 400


def test_brackets_in_strings_are_no_nesting() -> None:
    deep = "[{" * 200
    for text in (deep, '\\"' + deep, '"' + deep, '\\\\"' + deep, deep + "\n\\"):
        check_json(json.dumps({"text": text, "more": [text, {"x": text}]}).encode())
    check_json(json.dumps([{"a": [i]} for i in range(500)]).encode())
    # A string that ends is over.
    with pytest.raises(ApiError):
        check_json(json.dumps({"text": '"\\'}).encode()[:-1] + b"," + b'"x":' + b"[" * 100)


def test_json_in_other_encodings_cannot_hide_brackets() -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(ApiError, match="zero byte"):
            check_json('{"a": 1}'.encode(encoding))


def test_what_is_not_utf8_is_told() -> None:
    with pytest.raises(ApiError, match="not UTF-8: byte 0xff at index 2"):
        check_json(b'{"\xff": 1}')


@pytest.mark.parametrize(
    "body",
    [b"[]" * 1_000_000, b'"' * 2_000_001, b'"\\' * 1_000_000, b'{"' * 1_000_000, b"[" * 65 + b'"' + b"\\" * 2_000_000],
)
def test_looking_takes_time_in_proportion(body: bytes) -> None:
    began = time.perf_counter()
    with contextlib.suppress(ApiError):
        check_json(body)
    assert time.perf_counter() - began < 10


# -- who -------------------------------------------------------------------------------------------

KEYS = ("first-key", "second-key")


def owner_of(**headers: str) -> tuple[int, str]:
    call = Call(headers=headers).through(echo, api_key=KEYS)
    return call.status, call.scope["state"]["owner"]


def test_keys() -> None:
    for key in KEYS:
        digest = hashlib.sha256(key.encode()).hexdigest()
        assert owner_of(authorization=f"Bearer {key}") == (200, digest)
        assert owner_of(authorization=f"bearer  {key} ") == (200, digest)
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer first-ke",
        "Bearer first-keyy",
        "Basic first-key",
        "first-key",
        "Bearer é",
    ):
        assert owner_of(authorization=wrong) == (401, "")
    assert owner_of() == (401, "")
    call = Call().through(echo, api_key=KEYS)
    assert call.error["code"] == "invalid_api_key"
    assert call.headers["www-authenticate"] == "Bearer"


def test_two_keys_in_one_request_are_none() -> None:
    call = Call(headers={"authorization": f"Bearer {KEYS[0]}"})
    call.scope["headers"].append((b"authorization", f"Bearer {KEYS[1]}".encode()))
    assert call.through(echo, api_key=KEYS).status == 401


def test_a_refused_body_is_not_read() -> None:
    call = Call(b"x" * 50).through(echo, api_key=KEYS)
    assert (call.status, call.read) == (401, 0)


def test_without_keys_everybody_is_the_same() -> None:
    call = Call(headers={"authorization": "Bearer whatever"}).through(echo)
    assert (call.status, call.scope["state"]["owner"]) == (200, "")


# -- ids -------------------------------------------------------------------------------------------


def test_request_ids() -> None:
    call = Call(headers={"x-request-id": "mine-1"}).through(echo)
    assert call.headers.get_list("x-request-id") == ["mine-1"]
    assert call.scope["state"]["request_id"] == "mine-1"
    made = set()
    for given in ("", "a b", "a\tb", "é", "x" * 129, "a\r\nSet-Cookie: b=c", None):
        call = Call(headers={} if given is None else {"x-request-id": given}).through(echo)
        (name,) = call.headers.get_list("x-request-id")
        assert name.startswith("req-")
        made.add(name)
    assert len(made) == 7
    call = Call(headers={"x-request-id": "mine-2"}).through(echo, api_key=KEYS)
    assert (call.status, call.headers["x-request-id"]) == (401, "mine-2")


# -- how many --------------------------------------------------------------------------------------


def test_the_limit_of_requests() -> None:
    async def run() -> None:
        settings = ServerSettings(max_waiting=2)
        gate, release = Gate(2), asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            await release.wait()
            await answer(send)

        middleware = GateMiddleware(wait, gate=gate, settings=settings)
        calls = [Call() for _ in range(2)]
        tasks = [asyncio.create_task(middleware(call.scope, call.receive, call.send)) for call in calls]
        await asyncio.sleep(0)
        assert gate.under_way == 2
        refused = Call()
        await middleware(refused.scope, refused.receive, refused.send)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert gate.under_way == 2
        release.set()
        health = Call(path="/health")
        await middleware(health.scope, health.receive, health.send)
        assert health.status == 200  # whoever watches the server is let in
        await asyncio.gather(*tasks)
        assert gate.under_way == 0
        assert [call.status for call in calls] == [200, 200]
        await asyncio.wait_for(gate.until_idle(), 1)

    asyncio.run(run())


def test_a_key_leaves_others_their_places() -> None:
    """Requests and idle streams are counted apart; each key has an eighth of them to itself."""

    async def run() -> None:
        settings = ServerSettings(max_waiting=32, api_key=("one", "two", "three", "four"))
        gate, release = Gate(32, settings.key_weights), asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            await release.wait()
            await answer(send)

        middleware, tasks = GateMiddleware(wait, gate=gate, settings=settings), []

        async def taken(key: str, path: str) -> int:
            """Call until there is a refusal. Return the number of calls before."""
            for number in range(100):
                call = Call(path=path, headers={"authorization": f"Bearer {key}"})
                task = asyncio.create_task(middleware(call.scope, call.receive, call.send))
                await asyncio.sleep(0)
                if call.sent:
                    assert (call.status, call.error["code"]) == (429, "rate_limit_exceeded")
                    assert f"under way, {number} of this key" in call.error["message"]
                    return number
                tasks.append(task)
            raise AssertionError("there is no limit")

        assert [await taken(key, "/v1/models") for key in ("one", "two", "three", "four")] == [20, 4, 4, 4]
        assert [await taken(key, "/v1/state/events") for key in ("two", "one")] == [5, 1]
        release.set()
        await asyncio.gather(*tasks)
        assert await asyncio.wait_for(gate.until_idle(), 1) is None
        assert not gate.under_way

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limit", "weights", "most"),
    [
        (16, {"": 1.0}, {"": 16}),
        (16, {"a": 1.0, "b": 3.0}, {"a": 10, "b": 14}),
        (2, {"a": 1.0, "b": 1.0}, {"a": 2, "b": 2}),
        (1, {"a": 1.0, "b": 1.0}, {"a": 1, "b": 1}),
        (1024, {"a": 1.0, "b": 1e6}, {"a": 513, "b": 1023}),
    ],
)
def test_portions_of_keys(limit: int, weights: dict[str, float], most: dict[str, int]) -> None:
    """What is kept for a key is there when all others have taken all that they can."""
    portions = KeyPortions(limit, weights)
    assert {key: portions.most(key) for key in weights} == most
    for key in reversed(weights):
        portions.take(key, portions.left(key))
        assert portions.left(key) == 0
    assert portions.used.total() == limit
    for key in weights:
        portions.take(key, -portions.used[key])
    assert not portions.used


def test_closing() -> None:
    async def run() -> None:
        gate, began = Gate(8), asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/started":
                await send({"type": "http.response.start", "status": 200, "headers": []})
            began.set()
            await asyncio.sleep(60)

        middleware = GateMiddleware(wait, gate=gate, settings=ServerSettings())
        calls = [Call(), Call(path="/started")]
        tasks = [asyncio.create_task(middleware(call.scope, call.receive, call.send)) for call in calls]
        await began.wait()
        gate.close()
        late = Call()
        await middleware(late.scope, late.receive, late.send)
        assert (late.status, late.error["code"], late.error["type"]) == (503, "shutting_down", "server_error")
        assert gate.under_way == 2
        gate.cancel_all()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)  # without an error that a server would log
        assert calls[0].status == 503
        # An answer that had begun is left unfinished, so that nobody takes it for whole.
        assert [message["type"] for message in calls[1].sent] == ["http.response.start"]
        assert gate.under_way == 0

    asyncio.run(run())


def test_other_cancels_go_on() -> None:
    async def run() -> None:
        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(60)

        gate, call = Gate(8), Call()
        middleware = GateMiddleware(wait, gate=gate, settings=ServerSettings())
        task = asyncio.create_task(middleware(call.scope, call.receive, call.send))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (gate.under_way, call.sent) == (0, [])

    asyncio.run(run())


# -- what goes wrong inside ------------------------------------------------------------------------


def test_what_nobody_expected(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("a secret of the inside")

    call = Call(headers={"x-request-id": "broken-1"}).through(broken)
    assert call.status == 500
    assert call.error == {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert json.loads(record.getMessage())["request_id"] == "broken-1"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_break_in_the_middle_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    call = Call().through(broken)
    assert [message["type"] for message in call.sent] == ["http.response.start"]
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_a_client_that_goes_while_it_sends() -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the application must not see half a body")

    call = Call(b'{"a":')
    call.receive = lambda: gone()  # type: ignore[method-assign]

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    assert call.through(never).sent == []


def test_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.server")

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["tokens"] = {"prompt": 3, "completion": 4}
        await answer(send, status=201)

    Call(path='/v1/\n{"event": "forged"}', headers={"x-request-id": "line-1"}).through(counted)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    line = json.loads(record.getMessage())
    assert line.pop("seconds") >= 0
    assert line == {
        "event": "request",
        "request_id": "line-1",
        "method": "POST",
        "path": '/v1/\n{"event": "forged"}',
        "status": 201,
        "complete": True,
        "tokens": {"prompt": 3, "completion": 4},
    }


@pytest.mark.parametrize(("status", "lines"), [(200, 0), (304, 0), (404, 1)])
def test_files_of_the_page_have_no_lines(status: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.server")

    async def file(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, status=status)

    Call(path="/inspector/main.js").through(file)
    assert len(caplog.records) == lines
    Call(path="/").through(file)
    assert len(caplog.records) == lines + 1


# -- over the wire ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(llm: AsyncLLM) -> Iterator[Served]:
    settings = ServerSettings(api_key=KEYS, max_body_bytes="64KiB", allowed_origin=("https://a.example",))
    with serving(llm, settings) as found:
        yield found


def test_chunked_bodies(guarded: Served) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}

    def body(size: int) -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(size // 1024):
            yield b"x" * 1024
        yield b'"}'

    assert guarded.client.post("/tokenize", content=body(20_000), headers=headers).status_code == 200
    found = guarded.client.post("/tokenize", content=body(400_000), headers=headers)
    assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")
    assert guarded.client.post("/tokenize", content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_which_paths_need_a_key(guarded: Served) -> None:
    for path in ("/health", "/v1/health", "/docs", "/openapi.json"):
        assert guarded.client.get(path).status_code == 200
    for path in ("/version", "/metrics", "/v1/models", "/nothing", "/health/", "/v1/healthy"):
        assert guarded.client.get(path).status_code == 401
    headers = {"Authorization": f"Bearer {KEYS[1]}"}
    for path in ("/version", "/metrics", "/v1/models"):
        assert guarded.client.get(path, headers=headers).status_code == 200


def test_browsers(guarded: Served) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    found = guarded.client.options("/v1/completions", headers=asked)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == "https://a.example"
    refused = guarded.client.options("/v1/completions", headers={**asked, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers
    found = guarded.client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert found.status_code == 401
    assert found.headers["access-control-allow-origin"] == "https://a.example"  # so that the page can read the refusal


def test_without_origins_no_browser_is_let_in(served: Served) -> None:
    found = served.client.get("/health", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in found.headers


def test_garbage_on_the_wire(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    for data in (
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as wire:
            wire.sendall(data)
            assert b" 400 " in wire.recv(4096).split(b"\r\n")[0]
    assert served.client.get("/health").status_code == 200


def test_half_a_body_and_gone(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        wire.sendall(head + b'{"prom')
        wait_for(lambda: served.context.gate.under_way == 1)
    wait_for(lambda: served.context.gate.under_way == 0)


def test_many_at_a_time(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(max_waiting=1)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as wire:
            wire.sendall(head)
            wait_for(lambda: served.context.gate.under_way == 1)
            assert served.client.post("/tokenize", json={"prompt": "x"}).status_code == 429
            assert served.client.get("/metrics").status_code == 200
            wire.sendall(b'{"prompt": "x"}')
            assert b" 200 " in wire.recv(4096).split(b"\r\n")[0]
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.append(served.client.post("/tokenize", json={"prompt": "x"}).status_code)
        )
        thread.start()
        thread.join(10)
        assert found == [200]
