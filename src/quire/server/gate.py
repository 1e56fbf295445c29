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
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
"""Seconds for which the sender of a body may be behind, and so for which it may send nothing."""
SLOWEST = 16_384
"""Bytes per second that a body must have. A place in the gate is not for those who only hold it."""
READER_SECONDS = 60.0
"""Seconds for which a client may read nothing of an answer that is being sent."""
LARGE_BODY = 65_536
"""Bytes from which a body is looked at on a worker thread: below, it takes less than a millisecond."""
BODIES = 32
"""Bodies of the largest size (``max_body_bytes``) that may be in memory at a time."""
BODIES_PER_KEY = 8
"""Those of one key."""

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


class Arrivals:
    """Counts the bytes of bodies that have come and are not done with, in sum and by owner; state files count as ``StoredBytes``."""

    def __init__(self, limit: int, limit_per_key: int) -> None:
        """Requests without a key have the limit of the sum alone."""
        self.limit, self.limit_per_key = limit, limit_per_key
        self.bytes: Counter[str] = Counter()

    @contextmanager
    def of(self, owner: str) -> Iterator[Arrival]:
        """The body of one request, which is counted until this is left."""
        arrival = Arrival(self, owner)
        try:
            yield arrival
        finally:
            self.bytes[owner] -= arrival.bytes
            self.bytes += Counter()  # forgets owners that have none


class Arrival:
    """A body on its way in."""

    def __init__(self, arrivals: Arrivals, owner: str) -> None:
        self._arrivals = arrivals
        self._owner = owner
        self.bytes = 0

    def expect(self, count: int) -> None:
        """``ApiError`` if a body of so many bytes more cannot come now: 413 if it never can."""
        arrivals, owner = self._arrivals, self._owner
        for limit, used, whose in (
            (arrivals.limit, arrivals.bytes.total(), "this server"),
            *([(arrivals.limit_per_key, arrivals.bytes[owner], "this key")] if owner else []),
        ):
            if self.bytes + count > limit:
                raise _too_large(f"{whose} may have {limit} bytes of bodies at a time")
            if used + count > limit:
                raise ApiError(
                    429,
                    f"{whose} has {used} bytes of bodies under way, and may have {limit}; try again later",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(RETRY_AFTER), "Connection": "close"},
                )

    def add(self, count: int) -> None:
        """Count what has come; ``ApiError`` as of ``expect``."""
        self.expect(count)
        self.bytes += count
        self._arrivals.bytes[self._owner] += count


class ReaderGone(OSError):
    """The client keeps its connection, and reads nothing."""


class GateMiddleware:
    """The gate as ASGI middleware: ``app.add_middleware(GateMiddleware, gate=gate, settings=settings)``."""

    def __init__(self, app: ASGIApp, *, gate: Gate, settings: ServerSettings) -> None:
        self._app = app
        self._gate = gate
        self._settings = settings
        self._bodies = Arrivals(BODIES * settings.body_limit, BODIES_PER_KEY * settings.body_limit)
        # Digests are of one length, so that comparing tells nothing about that of a key either.
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = logs.Passage(_request_id(scope), scope["method"], scope["path"])
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
                if _headers(scope, b"transfer-encoding") and not _headers({"headers": kept}, b"connection"):
                    # Readers of chunks differ in what they take for the end, so nothing is read behind it.
                    kept.append((b"connection", b"close"))
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

    async def _pass(self, passage: logs.Passage, scope: Scope, receive: Receive, send: Send) -> None:
        counted = False
        try:
            check_framing(scope)
            owner = scope["state"]["owner"] = self._owner(scope)
            if scope["path"] not in UNCOUNTED:
                self._gate.enter()
                counted = True
            # What has come is in memory until the answer has gone.
            with self._bodies.of(owner) as arrival:
                admitted = await self._body(scope, receive, arrival)
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

    async def _body(self, scope: Scope, receive: Receive, arrival: Arrival) -> Receive | None:
        """What gives the application its body: in one piece, or for an upload as it comes. None if the client has gone."""
        upload = scope["path"] in UPLOADS
        limit = self._settings.upload_limit if upload else self._settings.body_limit
        name = "max_upload_bytes" if upload else "max_body_bytes"
        too_large = _too_large(f"the body is larger than {limit} bytes ({name})")
        for length in _headers(scope, b"content-length"):
            if not length.isdigit() or int(length[:20]) > limit:
                raise too_large
            if not upload:
                arrival.expect(int(length))
        receive = _in_time(receive, self._settings.upload_seconds if upload else math.inf)
        receive = _limited(receive, limit, too_large)
        if upload:
            return receive
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            arrival.add(len(message.get("body", b"")))
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        body = b"".join(parts)
        del parts
        if len(body) < LARGE_BODY:
            check_json(body)
        else:
            await asyncio.to_thread(check_json, body)
        return _replayed(body, receive)


def check_framing(scope: Scope) -> None:
    """``ApiError`` 400 for a request of which a proxy before this server may have seen another end than this server does: what
    follows that end would be a request that nobody sent."""
    coded = bool(_headers(scope, b"transfer-encoding"))
    if coded and (_headers(scope, b"content-length") or scope.get("http_version", "1.1") == "1.0"):
        raise ApiError(
            400,
            "Transfer-Encoding together with Content-Length, or in HTTP/1.0, is not taken; send one of them in HTTP/1.1",
            code="invalid_framing",
            headers={"Connection": "close"},
        )


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


def _in_time(receive: Receive, most: float) -> Receive:
    """Gives the parts of a body as they come. ``ApiError`` 408 for one that comes too slowly, or for longer than ``most`` seconds;
    behind its end nothing is late."""
    loop = asyncio.get_running_loop()
    end = loop.time() + most
    deadline: float | None = min(end, loop.time() + PATIENCE)

    async def timely() -> Message:
        nonlocal deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body came too slowly: it may be {PATIENCE:g} seconds behind {SLOWEST} bytes a second"
                + (f", and take {most:g} seconds (upload_seconds)" if most < math.inf else ""),
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        if deadline is not None:
            more = message["type"] == "http.request" and message.get("more_body", False)
            # Who was quick may not be silent for long after that.
            later = min(deadline + len(message.get("body", b"")) / SLOWEST, loop.time() + PATIENCE, end)
            deadline = later if more else None
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


def _headers(scope: Mapping[str, Any], name: bytes) -> Sequence[bytes]:
    return [value for found, value in scope["headers"] if found.lower() == name]


def _request_id(scope: Scope) -> str:
    """The client's, if it is short and printable: it goes into headers and logs."""
    given = [value.decode("latin-1") for value in _headers(scope, b"x-request-id")]
    if len(given) == 1 and _ID.fullmatch(given[0]):
        return given[0]
    return f"req-{secrets.token_hex(16)}"


def _too_large(message: str) -> ApiError:
    # What is not read of the body would stand before the next request.
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _stopping() -> ApiError:
    return ApiError(503, "this server is shutting down", code="shutting_down")
