"""The gate that every request passes: who it is, whether it may come in, and what it may bring.

Plain ASGI around the application. In this order: a request id; the API key; whether the server stops or is full; the body, read
with a limit and looked at for nesting; then the application. What goes wrong on the way is answered here, also what the
application did not expect, and one line per request is logged at its end.

``request.state.request_id`` and ``request.state.owner`` are what routes get to know. A route may set ``request.state.tokens``
to a dictionary of numbers, which the log line then has.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import logs
from quire.server.errors import RETRY_AFTER, ApiError, api_error, error_response
from quire.server.settings import ServerSettings

MAX_DEPTH = 64
"""Levels of arrays and objects in a JSON body, at most."""
MAX_CONTAINERS = 100_000
"""Arrays and objects in a JSON body, at most: a reader makes an object of each, while nobody else is answered."""
MAX_VALUES = 1_000_000
"""Values in a JSON body, at most: enough for the tokens of the longest contexts."""
PATIENCE = 30.0
"""Seconds that a client has to send a body, beside those that its bytes may take."""
SLOWEST = 16_384
"""Bytes per second that a body must have beyond that. A place in the gate is not for those who only hold it."""
READER_SECONDS = 60.0
"""Seconds for which a client may read nothing of an answer that is being sent."""
LARGE_BODY = 65_536
"""Bytes from which a body is looked at on a worker thread: below, it takes less than a millisecond."""

KEYLESS = frozenset({"/health", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"})
"""Paths that say nothing about anybody's work: a key is not asked for."""
UNCOUNTED = KEYLESS | {"/metrics", "/version"}
"""Paths that are answered also by a server that is full or stops: whoever watches it needs them then."""
UPLOADS = frozenset({"/v1/sessions/state"})
"""Paths whose bodies are files: read as they come, with a limit of their own."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_STRINGS = re.compile(_STRING, re.DOTALL)
_NESTING = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)


class Gate:
    """Counts requests under way, and closes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.closing = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.cancelling = False
        """Whether those under way were cancelled by ``cancel_all``."""

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    def enter(self) -> None:
        """Count the task that calls. ``ApiError`` 503 once it closes, 429 when it is full."""
        if self.closing:
            raise _stopping()
        if len(self._tasks) >= self.limit:
            raise ApiError(
                429,
                f"{len(self._tasks)} requests are under way, and this server takes {self.limit} at a time; try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(RETRY_AFTER)},
            )
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        self._idle.clear()

    def leave(self) -> None:
        """No longer count the task that calls."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.pop(task, None)
        if not self._tasks:
            self._idle.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self.closing = True

    async def until_idle(self) -> None:
        """Until nothing is under way."""
        await self._idle.wait()

    def cancel_all(self) -> None:
        """End what is under way."""
        self.cancelling = True
        for task in tuple(self._tasks):
            task.cancel()


class ReaderGone(OSError):
    """The client keeps its connection, and reads nothing."""


@dataclass(slots=True)
class Passage:
    """What becomes known of one request on its way."""

    request_id: str
    method: str
    path: str
    status: int | None = None
    """Of the answer, once it has begun."""
    complete: bool = False
    """Whether all of the answer was handed over."""
    gone: bool = False
    """Whether the client closed the connection before that."""
    error: BaseException | None = None
    """What the application did not expect."""
    began: float = field(default_factory=time.monotonic)


class GateMiddleware:
    """The gate as ASGI middleware: ``app.add_middleware(GateMiddleware, gate=gate, settings=settings)``."""

    def __init__(self, app: ASGIApp, *, gate: Gate, settings: ServerSettings) -> None:
        self._app = app
        self._gate = gate
        self._settings = settings
        # Digests are of one length, so that comparing tells nothing about that of a key either.
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = Passage(_request_id(scope), scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        state["request_id"], state["owner"] = passage.request_id, ""

        async def watched_receive() -> Message:
            message = await receive()
            passage.gone |= message["type"] == "http.disconnect" and not passage.complete
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                passage.status = message["status"]
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-request-id"]
                message = {**message, "headers": [*kept, (b"x-request-id", passage.request_id.encode())]}
            try:
                async with asyncio.timeout(READER_SECONDS):
                    await send(message)
            except TimeoutError:
                passage.gone = True
                raise ReaderGone(f"the client has read nothing for {READER_SECONDS:g} seconds") from None
            passage.complete |= message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._pass(passage, scope, watched_receive, watched_send)
        finally:
            logs.request(passage, state.get("tokens"))

    async def _pass(self, passage: Passage, scope: Scope, receive: Receive, send: Send) -> None:
        counted = False
        try:
            scope["state"]["owner"] = self._owner(scope)
            if scope["path"] not in UNCOUNTED:
                self._gate.enter()
                counted = True
            admitted = await self._body(scope, receive)
            if admitted is not None:
                await self._app(scope, admitted, send)
        except asyncio.CancelledError:
            if not self._gate.cancelling:
                raise
            if passage.status is None:
                await error_response(_stopping())(scope, receive, send)
        except ReaderGone:
            pass  # the server closes the connection of an answer that is not complete
        except Exception as error:
            found = api_error(error)
            if found.status == 500:
                passage.error = error
                logs.failure(passage, error)
            # Of an answer that has begun the rest is missing, and the server closes its connection: that says it.
            if passage.status is None and not passage.gone:
                await error_response(found)(scope, receive, send)
        finally:
            if counted:
                self._gate.leave()

    def _owner(self, scope: Scope) -> str:
        """Whose sessions the request sees: a digest of its key, "" if the server has none. ``ApiError`` 401."""
        if not self._keys:
            return ""
        given = _headers(scope, b"authorization")
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, so that the time taken does not tell which one matched.
        known = [hmac.compare_digest(digest, one) for one in self._keys]
        if kind.lower() == b"bearer" and any(known):
            return digest.hex()
        if scope["path"] in KEYLESS:
            return ""
        raise ApiError(
            401,
            "no valid API key; send one as the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _body(self, scope: Scope, receive: Receive) -> Receive | None:
        """What gives the application its body: in one piece, or for an upload as it comes. None if the client has gone."""
        upload = scope["path"] in UPLOADS
        limit = self._settings.upload_limit if upload else self._settings.body_limit
        name = "max_upload_bytes" if upload else "max_body_bytes"
        too_large = ApiError(413, f"the body is larger than {limit} bytes ({name})", code="request_too_large")
        for length in _headers(scope, b"content-length"):
            if not length.isdigit() or int(length[:20]) > limit:
                raise too_large
        receive = _in_time(receive)
        if upload:
            return _limited(receive, limit, too_large)
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
            if not message.get("more_body", False):
                break
        body = b"".join(parts)
        del parts
        if len(body) < LARGE_BODY:
            check_json(body)
        else:
            await asyncio.to_thread(check_json, body)
        return _replayed(body, receive)


def check_json(body: bytes) -> None:
    """``ApiError`` 400 for a body in which a reader of JSON would descend too deep, or would stay too long. Whether it is JSON at
    all is not asked."""
    if b"\0" in body:
        # No JSON in UTF-8 has this byte; in UTF-16 and UTF-32 every bracket has it.
        raise ApiError(400, "the body must be JSON in UTF-8, and holds a zero byte", code="invalid_json")
    containers = body.count(b"[") + body.count(b"{")
    if containers <= MAX_DEPTH and body.count(b",") < MAX_VALUES:
        return
    if containers > MAX_CONTAINERS or containers + body.count(b",") >= MAX_VALUES:
        bare = _STRINGS.sub(b"", body)
        containers = bare.count(b"[") + bare.count(b"{")
        if containers > MAX_CONTAINERS or containers + bare.count(b",") >= MAX_VALUES:
            raise ApiError(
                400,
                f"the body holds more than {MAX_VALUES} values, or {MAX_CONTAINERS} arrays and objects",
                code="invalid_json",
            )
    depth = 0
    for match in _NESTING.finditer(body):
        mark = match[0]
        if mark in (b"[", b"{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise ApiError(
                    400, f"the body nests more than {MAX_DEPTH} arrays and objects in each other", code="invalid_json"
                )
        elif mark in (b"]", b"}"):
            depth -= 1


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then whatever follows: that the client has gone."""
    left: list[bytes] = [body]

    async def replay() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replay


def _in_time(receive: Receive) -> Receive:
    """Gives the parts of a body as they come. ``ApiError`` 408 for one that comes too slowly; behind its end nothing is late."""
    loop = asyncio.get_running_loop()
    deadline: float | None = loop.time() + PATIENCE

    async def timely() -> Message:
        nonlocal deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body came too slowly: {PATIENCE:g} seconds are given, and one more for each {SLOWEST} bytes",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        if deadline is not None:
            more = message["type"] == "http.request" and message.get("more_body", False)
            deadline = deadline + len(message.get("body", b"")) / SLOWEST if more else None
        return message

    return timely


def _limited(receive: Receive, limit: int, error: ApiError) -> Receive:
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise error
        return message

    return limited


def _headers(scope: Scope, name: bytes) -> Sequence[bytes]:
    return [value for found, value in scope["headers"] if found.lower() == name]


def _request_id(scope: Scope) -> str:
    """The client's, if it is short and printable: it goes into headers and logs."""
    given = [value.decode("latin-1") for value in _headers(scope, b"x-request-id")]
    if len(given) == 1 and _ID.fullmatch(given[0]):
        return given[0]
    return f"req-{secrets.token_hex(16)}"


def _stopping() -> ApiError:
    return ApiError(503, "this server is shutting down", code="shutting_down")
