"""A small HTTP/1.1 client on asyncio streams, for JSON and server-sent events; stdlib only.

A load generator shares its machine with the measured server, so its cost is part of the result.
httpx takes 2.5 times the CPU time for a stream of 64 events, and 10 times for a whole answer.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from quire.base.errors import InvalidArgument, NotFound
from quire.cli.client import DONE, BrokenAnswer, EventParser, ServerAddress, check_key, event_object, failure

LARGEST_HEAD = 64 * 1024
"""Bytes of a status line with its headers."""
IDLE_SECONDS = 2.0
"""Longest idle time of a reused connection in seconds: uvicorn closes them after 5 s."""


class _Connection:
    """A connection, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.idle_since = time.monotonic()
        self._left: int | None = 0
        """Bytes left of the body; None for a chunked body; -1 until the connection ends."""
        self.reusable = False

    @property
    def fresh(self) -> bool:
        """True if an idle connection may be used again."""
        closed = self.reader.at_eof() or self.writer.is_closing()
        return not closed and time.monotonic() - self.idle_since < IDLE_SECONDS

    async def start(self, request: bytes) -> tuple[int, dict[str, str]]:
        """Send, and read up to the body; return status and headers with lower-case names."""
        self.reusable = False
        self.writer.write(request)
        await self.writer.drain()
        while True:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            version, _, rest = head[0].partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
                raise BrokenAnswer(f"the answer does not begin like HTTP/1.1: {head[0][:80]!r}")
            status = int(rest[:3])
            if status >= 200:
                break
        headers: dict[str, str] = {}
        for line in head[1:]:
            name, colon, value = line.partition(":")
            if colon:
                headers[name.strip().lower()] = value.strip()
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._left = None
        elif status in (204, 304):
            self._left = 0
        else:
            length = headers.get("content-length", "-1")
            if not length.removeprefix("-").isdigit():
                raise BrokenAnswer(f"the answer has Content-Length {length!r}")
            self._left = int(length)
        self.reusable = self._left != -1 and headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
        return status, headers

    async def piece(self) -> bytes:
        """Return the next bytes of the body as they arrive; empty at its end."""
        if self._left is None:
            line = await self.reader.readuntil(b"\r\n")
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError:
                raise BrokenAnswer(f"the answer has a chunk of size {line[:40]!r}") from None
            if size:
                return (await self.reader.readexactly(size + 2))[:-2]
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
            self._left = 0
            return b""
        if self._left == 0:
            return b""
        found = await self.reader.read(LARGEST_HEAD if self._left < 0 else min(self._left, LARGEST_HEAD))
        if self._left > 0:
            if not found:
                raise asyncio.IncompleteReadError(b"", self._left)
            self._left -= len(found)
        return found


class ServeClient:
    """Requests to one server, on connections that are kept for later requests.

    A cancelled task or a stream closed early closes its connection at once. Errors:
    ``HttpFailure``, ``BrokenAnswer``, ``OSError`` for an unreachable server, ``TimeoutError``.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        """Set the server; ``timeout`` is in seconds for one answer, or one stream to its end."""
        if not timeout > 0:
            raise InvalidArgument(f"timeout {timeout}; seconds above 0 are accepted")
        self.address = ServerAddress.parse(url)
        self._timeout = timeout
        self._tls = ssl.create_default_context() if self.address.tls else None
        self._idle: deque[_Connection] = deque()
        key = check_key(api_key)
        self._headers = f"Host: {self.address.authority}\r\nAccept: */*\r\nUser-Agent: quire\r\n"
        if key is not None:
            self._headers += f"Authorization: Bearer {key}\r\n"

    def _request(self, method: str, path: str, body: bytes, content_type: str) -> bytes:
        kind = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n".encode("ascii") + body

    async def _connection(self) -> _Connection:
        while self._idle:
            kept = self._idle.pop()
            if kept.fresh:
                return kept
            kept.writer.close()
        opened = await asyncio.open_connection(self.address.host, self.address.port, ssl=self._tls, limit=LARGEST_HEAD)
        return _Connection(*opened)

    async def pieces(
        self, method: str, path: str, body: bytes = b"", *, content_type: str = "application/json"
    ) -> AsyncGenerator[bytes, None]:
        """Yield an answer's body in pieces as they arrive. Close it (``aclosing``) to
        disconnect."""
        connection: _Connection | None = None
        ended = False
        # The deadline limits only the waits: it must not interrupt the caller between pieces.
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._connection()
                status, _ = await connection.start(self._request(method, path, body, content_type))
            found = b""
            while True:
                async with asyncio.timeout_at(deadline):
                    piece = await connection.piece()
                if not piece:
                    break
                if status < 400:
                    yield piece
                else:
                    found += piece
            ended = True
            if status >= 400:
                raise failure(status, found)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise BrokenAnswer("the server closed the connection before the answer was complete") from error
        finally:
            if connection is not None:
                if ended and connection.reusable:
                    connection.idle_since = time.monotonic()
                    self._idle.append(connection)
                else:
                    connection.writer.transport.abort()

    async def fetch(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None) -> bytes:
        """Return the whole body of an answer; ``body`` is sent as JSON, or unchanged if bytes."""
        raw = isinstance(body, bytes)
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        found = bytearray()
        kind = "application/octet-stream" if raw else "application/json"
        async with aclosing(self.pieces(method, path, data, content_type=kind)) as pieces:
            async for piece in pieces:
                found += piece
        return bytes(found)

    async def json(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None) -> dict[str, Any]:
        """Return the object in an answer's body."""
        found = await self.fetch(method, path, body)
        try:
            value = json.loads(found)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise BrokenAnswer(f"{method} {path} answered with no JSON object: {found[:200]!r}")
        return value

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a stream's objects up to ``[DONE]``; without it raise ``BrokenAnswer``."""
        parser = EventParser()
        done = False
        async with aclosing(self.pieces("POST", path, json.dumps(body).encode())) as pieces:
            async for piece in pieces:
                for event in parser.feed(piece):
                    if event == DONE:
                        done = True
                    elif not done:
                        yield event_object(event)
        if not done:
            raise BrokenAnswer("the stream ended without [DONE]")

    async def model(self) -> str:
        """Return the server's first model; raise ``NotFound`` if it lists none."""
        listed = (await self.json("GET", "/v1/models")).get("data") or []
        if not listed:
            raise NotFound(f"the server at {self.address.authority} lists no models; name one")
        return str(listed[0]["id"])

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().writer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
