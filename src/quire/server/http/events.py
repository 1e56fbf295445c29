"""Answers whose work ends when the client goes away.

``EventStream`` sends chunks as server-sent events while they are made; ``unless_gone`` awaits a
result to send at once. In both, a client that closes its connection cancels the work. ASGI servers
report that through ``receive``, which must be awaited.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.base.errors import Cancelled, QuireError
from quire.server.http import logs
from quire.server.http.errors import ApiError, api_error

T = TypeVar("T")

Chunk = Mapping[str, Any]
Chunks = AsyncGenerator[Chunk, None]

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What ``/openapi.json`` says of routes that also stream."""


def encode_json(value: Any) -> bytes:
    """Return JSON in ASCII. It has no line end of Unicode, at which some clients split events, and
    can hold half a surrogate pair."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


class Closable(Protocol):
    async def aclose(self) -> None: ...


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: Mapping[str, Any]) -> bytes:
        return encoded_in_pieces(content)


async def long_answer(content: Mapping[str, Any]) -> JsonAnswer:
    """Write an answer of any length on a worker thread."""
    return await asyncio.to_thread(JsonAnswer, content)


_DEPTH, _PIECE = 6, 1000
"""Levels of objects and arrays that are encoded in pieces, and plain values of an array in one
piece."""


def encoded_in_pieces(value: Any, depth: int = _DEPTH) -> bytes:
    """Return JSON, encoded in pieces. Encoding blocks all other threads, and log-probabilities can
    take hundreds of megabytes."""
    if depth and isinstance(value, Mapping):
        return (
            b"{"
            + b",".join([encode_json(name) + b":" + encoded_in_pieces(one, depth - 1) for name, one in value.items()])
            + b"}"
        )
    if depth and isinstance(value, list) and value:
        if isinstance(value[0], Mapping | list):
            return b"[" + b",".join([encoded_in_pieces(one, depth - 1) for one in value]) + b"]"
        parts = [encode_json(value[at : at + _PIECE])[1:-1] for at in range(0, len(value), _PIECE)]
        return b"[" + b",".join(parts) + b"]"
    return encode_json(value)


class EventStream(Response):
    """A stream of events ``data: {json}``, one for each chunk, then ``data: [DONE]``.

    The answer begins with the first chunk, or at once if only its head is asked for. An error
    before it is raised, so that it has its own status; a later one becomes the last chunk. The
    generator of the chunks and the streams that it reads are closed before the call returns,
    whatever ends the answer.
    """

    media_type = "text/event-stream"
    last = b"data: [DONE]\n\n"
    """What ends a stream."""

    def __init__(
        self,
        chunks: Chunks,
        sources: Sequence[Closable],
        failed: Callable[[ApiError], Chunk] = lambda error: error.body,
    ) -> None:
        """Take the chunks. ``sources`` are closed even if no chunk was asked for. ``failed``
        returns the last chunk after an error."""
        self._chunks = chunks
        self._sources = sources
        self._failed = failed
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: nginx would collect events otherwise.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        try:
            if state.get("only_head"):
                await self._chunks.aclose()  # so that there is no chunk to wait for
            sender = await done_unless_gone(receive, self._send(send, state.get("request_id")))
        finally:
            await self._chunks.aclose()
            for source in self._sources:
                await source.aclose()
        if sender is not None:
            sender.result()

    async def _send(self, send: Send, request_id: str | None) -> None:
        first = await anext(self._chunks, None)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            if first is not None:
                await self._send_event(send, first)
            async for chunk in self._chunks:
                await self._send_event(send, chunk)
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, QuireError):
                return  # the connection broke, so no error can be sent
            found = api_error(error)
            if found.status == 500:
                logs.failure(error, request_id=request_id)
            await self._send_event(send, self._failed(found))
        await send({"type": "http.response.body", "body": self.last, "more_body": False})

    async def _send_event(self, send: Send, chunk: Chunk) -> None:
        await send({"type": "http.response.body", "body": self.written(chunk), "more_body": True})

    def written(self, chunk: Chunk) -> bytes:
        return b"data: " + encode_json(chunk) + b"\n\n"


class NamedEventStream(EventStream):
    """A stream of events that have their chunks' ``type`` as names, or "error". An empty chunk
    becomes a comment, which shows that the server is there."""

    last = b""

    def written(self, chunk: Chunk) -> bytes:
        if not chunk:
            return b": nothing new\n\n"
        return f"event: {chunk.get('type', 'error')}\n".encode() + super().written(chunk)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``. If the client goes away, cancel it and raise ``Cancelled``."""
    task = await done_unless_gone(request.receive, work)
    if task is None:
        raise Cancelled("the client closed the connection")
    return task.result()


async def done_unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> asyncio.Task[T] | None:
    """Return the task of ``work`` once it is done; None if the client goes away before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
