"""A small HTTP/1.1 client on asyncio streams, for JSON and server-sent events. Standard library only.

A load generator shares its machine with the server that it measures, so its own cost is part of what it reports. httpx takes 2.5
times the CPU time of this for a stream of 64 events, and 10 times for a whole answer; and nothing here has to be installed.

Source of the format of events: the HTML standard, "Server-sent events", section "Interpreting an event stream".
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from quire.errors import InvalidArgument, NotFound, QuireError

LARGEST_HEAD = 64 * 1024
"""Bytes of a status line with its headers."""
IDLE_SECONDS = 2.0
"""A connection that has been idle for longer is not used again: the server may be closing it (uvicorn does after 5 s)."""
DONE = "[DONE]"
"""The payload of the last event of an OpenAI stream."""


class HttpFailure(QuireError):
    """An answer with a status of 400 or above. ``status`` holds it, ``param`` and ``code`` what OpenAI's error object says."""

    def __init__(self, message: str, status: int = 0, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class BrokenAnswer(QuireError, ConnectionError):
    """An answer that ended early or is not HTTP/1.1, JSON or a stream of events, or an error inside of a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """Where a server is: ``http://host[:port][/prefix]``."""

    tls: bool
    host: str
    port: int
    prefix: str
    """Path before ``/v1``, without a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """``http://localhost:8000``, with or without ``/v1`` at its end. ``InvalidArgument`` for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        plain = not any(ord(char) <= 32 or ord(char) >= 127 for char in url)
        extra = parts.query or parts.fragment or parts.username is not None
        if parts.scheme not in ("http", "https") or not parts.hostname or extra or not plain:
            raise InvalidArgument(f"url {url!r}; something like http://localhost:8000 is accepted")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        tls = parts.scheme == "https"
        return cls(tls=tls, host=parts.hostname, port=port or (443 if tls else 80), prefix=prefix)

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def check_key(api_key: str | None) -> str | None:
    """The key, if a header can hold it; else ``InvalidArgument``."""
    if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument(
            "api_key holds nothing, or characters that a header cannot hold; printable ASCII is accepted"
        )
    return api_key


def failure(status: int, body: bytes) -> HttpFailure:
    """What an answer with an error status says, in OpenAI's shape or any other."""
    try:
        found = json.loads(body)["error"]
        message, param, code = str(found["message"]), found.get("param"), found.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, param, code = body[:200].decode("utf-8", "replace").strip(), None, None
    return HttpFailure(f"the server answered {status}: {message or 'without a reason'}", status, param=param, code=code)


class EventParser:
    """Bytes of a ``text/event-stream``, in any pieces, into the data of its events. Names, ids and comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The events that this piece completes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events: list[str] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events


def event_object(event: str) -> dict[str, Any]:
    """One event's JSON object. ``BrokenAnswer`` if it is none, or an error that the server sent inside of the stream."""
    try:
        found = json.loads(event)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BrokenAnswer(f"the server sent an event that is no JSON object: {event[:200]!r}")
    if found.get("error") is not None:
        error = found["error"]
        raise BrokenAnswer(f"the stream broke: {error.get('message') if isinstance(error, dict) else error}")
    return found


class _Connection:
    """One connection: a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.idle_since = time.monotonic()
        self._left: int | None = 0
        """Bytes of the body that are left; None for a chunked body; -1 until the connection ends."""
        self.reusable = False

    @property
    def fresh(self) -> bool:
        """Whether an idle connection may be used again."""
        closed = self.reader.at_eof() or self.writer.is_closing()
        return not closed and time.monotonic() - self.idle_since < IDLE_SECONDS

    async def start(self, request: bytes) -> tuple[int, dict[str, str]]:
        """Send, and read up to the body: status and headers, their names in small letters."""
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
        """The next bytes of the body, as they come; empty at its end."""
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
    """Requests to one server. Connections are kept for the next request; a task that is cancelled, or a stream that is closed
    early, closes its connection at once.

    Errors: ``HttpFailure``, ``BrokenAnswer``, ``OSError`` for a server that cannot be reached, ``TimeoutError``.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        """``timeout``: seconds for one answer, or for one stream from its request to its end."""
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
        """The bytes of an answer's body as they come. Close it (``aclosing``) to hang up."""
        connection: _Connection | None = None
        ended = False
        # Around every wait and not around all of them: between two pieces the caller's code runs, which is not to be interrupted.
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
        """The whole body of an answer. ``body``: what is sent as JSON, or bytes that are sent as they are."""
        raw = isinstance(body, bytes)
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        found = bytearray()
        kind = "application/octet-stream" if raw else "application/json"
        async with aclosing(self.pieces(method, path, data, content_type=kind)) as pieces:
            async for piece in pieces:
                found += piece
        return bytes(found)

    async def json(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None) -> dict[str, Any]:
        """The object in an answer's body."""
        found = await self.fetch(method, path, body)
        try:
            value = json.loads(found)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise BrokenAnswer(f"{method} {path} answered with no JSON object: {found[:200]!r}")
        return value

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream, up to ``[DONE]``. ``BrokenAnswer`` if it ends without. Close it to hang up."""
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
        """The first model that the server lists. ``NotFound`` if it lists none."""
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
