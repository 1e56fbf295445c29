"""Requests of which two readers may see different ends, and bodies that come: how many bytes, how
fast, and whose.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import closing

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire import AsyncLLM
from quire.server.http import gate
from quire.server.http.errors import ApiError
from quire.server.http.gate import Arrival, KeyPortions
from quire.server.http.settings import ServerSettings

from .conftest import STATE_FILE, Served, serving, wait_for
from .test_attacks import connected, received
from .test_gate import Call, answer

GOOD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def answers(served: Served, sent: bytes) -> list[bytes]:
    """The first lines of the answers that come until the server closes the connection."""
    with connected(served, sent) as connection:
        return re.findall(rb"HTTP/1\.1 \d+ [\w ]+", received(connection))


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 0\r\nTRANSFER-ENCODING: chunked\r\n",
    ],
)
def test_two_lengths_are_none(served: Served, headers: bytes) -> None:
    """A body that is whole as chunks, and that another reader would take for longer or shorter."""
    body = b'{"prompt": "x"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers + b"\r\n"
    sent = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with connected(served, sent + GOOD) as connection:
        found = received(connection)
    assert found.count(b"HTTP/1.1 ") == 1
    assert b'"code": "invalid_framing"' in found


def test_chunks_are_of_http_1_1(served: Served) -> None:
    head = b"POST /tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert answers(served, head + GOOD) == [b"HTTP/1.1 400 Bad Request"]


def test_nothing_is_read_behind_chunks(served: Served) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert answers(served, head + chunks + GOOD) == [b"HTTP/1.1 200 OK"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\r\n z\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding:\r\n\tchunked\r\n\r\n",
        # The second request on a connection, and one whose head is not complete.
        GOOD + b"GET /health HTTP/1.1\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\nHost:",
    ],
)
def test_lines_end_with_both_characters(served: Served, sent: bytes) -> None:
    found = answers(served, sent + GOOD)
    assert found[-1] == b"HTTP/1.1 400 Bad Request"
    assert found[:-1] == [b"HTTP/1.1 200 OK"] * sent.startswith(GOOD)


def test_heads_in_pieces(served: Served) -> None:
    with connected(served) as connection:
        for byte in GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"):
            connection.sendall(bytes([byte]))
        assert received(connection).startswith(b"HTTP/1.1 200 OK")


def test_bodies_may_have_any_lines(served: Served) -> None:
    body = b'{"prompt":\n\n "x"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    assert answers(served, head + b"Content-Length: %d\r\n\r\n" % len(body) + body) == [b"HTTP/1.1 200 OK"]


# -- bytes under way -------------------------------------------------------------------------------


def test_bytes_are_counted_until_they_are_done_with() -> None:
    portions = KeyPortions(100, {"a": 1.0, "b": 1.0})

    def of(owner: str, portions: KeyPortions = portions) -> closing[Arrival]:
        return closing(Arrival(portions, 60, owner))

    with of("a") as first, of("b") as second:
        first.add(50)
        with of("a") as more:
            more.add(10)
            with pytest.raises(ApiError, match="this key has 60 bytes of bodies under way, and may have 60") as caught:
                more.add(1)
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
        second.add(50)
        with of("c") as third, pytest.raises(ApiError, match="this server has 100 bytes") as caught:
            third.add(1)
        assert caught.value.status == 429
    assert not portions.used
    with of("a") as again:
        again.add(60)
        with pytest.raises(ApiError, match="this key may have 60 bytes of bodies at a time") as caught:
            again.add(1)
        assert caught.value.status == 413
    with of("a") as first, of("b") as second:
        first.add(60)
        second.add(25)  # is kept for it
        second.add(15)
        with pytest.raises(ApiError, match="this server has 100 bytes"):
            second.add(1)
    with of("", KeyPortions(100, {"": 1.0})) as nobody:
        nobody.add(100)  # without keys there is one limit
        with pytest.raises(ApiError, match="this server may have 100"):
            nobody.expect(1)


def test_uploads_count_while_they_come(llm: AsyncLLM) -> None:
    """Of one key and in all; what is too much is refused before the rest of it has come."""

    def head(key: str, length: int) -> bytes:
        return (
            f"POST /v1/sessions/state HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    settings = ServerSettings(api_key=("one", "two"), max_stored_bytes=300, max_stored_bytes_per_key=200)
    with serving(llm, settings, Authorization="Bearer two") as served:
        stored = served.context.stored
        with connected(served, head("one", 10_000) + bytes(150)) as connection:
            wait_for(lambda: stored.total == 150)
            assert served.client.post("/v1/sessions/state", content=bytes(151), headers=STATE_FILE).status_code == 503
            with connected(served, head("one", 10_000) + bytes(51)) as another:
                assert another.recv(65536).startswith(b"HTTP/1.1 429 ")
            assert served.client.post("/v1/sessions/state", content=bytes(150), headers=STATE_FILE).status_code == 400
            connection.sendall(bytes(51))
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
        wait_for(lambda: stored.total == 0)
        answer = served.client.post("/v1/sessions/state", content=bytes(200), headers=STATE_FILE)
        assert answer.json()["error"]["code"] == "data_loss"


def test_bodies_in_memory_have_a_limit_too() -> None:
    inside = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        inside.set()
        await asyncio.sleep(3600)

    async def run() -> None:
        settings = ServerSettings(api_key=("one", "two"), max_body_bytes=100)
        middleware = gate.GateMiddleware(waits, gate=gate.Gate(100), settings=settings)

        def call(key: str) -> Call:
            return Call(b" " * 100, headers={"Authorization": f"Bearer {key}"})

        tasks = []
        for _ in range(gate.BODIES_PER_KEY):
            one = call("one")
            tasks.append(asyncio.create_task(middleware(one.scope, one.receive, one.send)))
            await inside.wait()
            inside.clear()
        refused, other = call("one"), call("two")
        await middleware(refused.scope, refused.receive, refused.send)
        assert refused.status == 429
        tasks.append(asyncio.create_task(middleware(other.scope, other.receive, other.send)))
        await inside.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not middleware._bodies.used

    asyncio.run(run())


# -- time ------------------------------------------------------------------------------------------


def slowly(parts: list[bytes], monkeypatch: pytest.MonkeyPatch, most: float, patience: float = 0.05) -> list[Message]:
    """What a reader gets of these parts and then of nothing."""
    monkeypatch.setattr(gate, "PATIENCE", patience)
    left, got = list(parts), list[Message]()

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    async def run() -> None:
        timely = gate._in_time(receive, most, 1 << 30, ApiError(413, "too large"))
        while True:
            got.append(await timely())

    with pytest.raises(ApiError) as caught:
        asyncio.run(run())
    assert caught.value.status == 408
    return got


def test_who_was_quick_may_not_be_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte at once would else hold a place for 18 hours."""
    assert len(slowly([bytes(1 << 24)] * 3, monkeypatch, 3600.0)) == 3


def test_an_upload_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(slowly([bytes(1 << 24)] * 3, monkeypatch, 0.05, patience=3600.0)) == 3


def test_only_uploads_have_a_time_of_the_settings() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()
        await answer(send)

    async def parts(call: Call) -> Message:
        await asyncio.sleep(0.02)
        return await Call.receive(call)

    for path, status in (("/v1/sessions/state", 408), ("/v1/x", 200)):
        call = Call(b"a", b"b", b"c", path=path)
        call.receive = lambda call=call: parts(call)  # type: ignore[method-assign, misc]
        assert call.through(slow, upload_seconds=0.01).status == status
