"""The gate that every request passes: its key, the server's room for it, and its body.

Plain ASGI around the application. In this order: a request id; the name of the server and the page
that the request comes from; the API key; whether the server is stopping or full; the body, read
with a limit and checked for nesting; then the application. The gate answers all errors on the way,
unexpected ones of the application too, and logs one line per request at its end.

Routes get ``request.state.request_id``, ``request.state.owner``, and ``request.state.reads_only``
(``Sites.check``). A route may set ``request.state.tokens`` to a dictionary of numbers for the log
line.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.base.caller_context import Caller, caller
from quire.server.http import logs
from quire.server.http.bodies import LARGE_BODY, check_json
from quire.server.http.errors import ApiError, api_error, busy, error_response
from quire.server.http.settings import ServerSettings
from quire.server.http.sites import Sites, header_values

PATIENCE = 30.0
"""Seconds by which the sender of a body may be late, and so for which it may send nothing."""
SLOWEST = 16_384
"""Least bytes per second of a body, so that no slow sender holds a place in the gate."""
READER_SECONDS = 60.0
"""Seconds for which a client may read nothing of an answer."""
MAX_TRACE_STATE = 4096
"""Most bytes of a header about traces; no tool needs more than 512."""
BODIES = 32
"""Most bodies of the largest size (``max_body_bytes``) in memory at a time."""
BODIES_PER_KEY = 8
"""Most such bodies of one key."""
STREAMS = 4
"""Part of the requests under way, as one in so many, that may beside them be idle streams."""

KEYLESS = frozenset({"/", "/health", "/v1/health", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"})
"""Paths without a key: their answers tell nothing about any client's work."""
KEYLESS_BELOW = "/inspector/"
"""What the files of the page at ``/`` are below. They are the same for everybody."""
UNCOUNTED = KEYLESS | {"/metrics", "/version"}
"""Paths that a full or stopping server answers too, for monitoring."""
IDLE = frozenset({"/v1/state/events"})
"""Paths of streams that wait for something to happen. They have places of their own."""
UPLOADS = frozenset({"/v1/sessions/state"})
"""Paths with files as bodies, which are read as they come and have their own limit."""

_ID = re.compile(r"[\x21-\x7e]{1,128}")


class KeyPortions:
    """Shares of a number by API key. One half is reserved, each key's part by its weight. The other
    half is for keys that ask first. So no keys together can take all from another one."""

    def __init__(self, limit: int, weights: Mapping[str, float]) -> None:
        """``weights`` of all keys, by their owners' digests."""
        self.limit = limit
        whole = 2 * sum(weights.values())
        least = 1 if 2 * len(weights) <= limit else 0
        self._kept = {owner: max(least, int(limit * weight / whole)) for owner, weight in weights.items()}
        self._shared = max(0, limit - sum(self._kept.values()))
        self.used: Counter[str] = Counter()

    def left(self, owner: str) -> int:
        """Return the number that a key may still take."""
        shared = self._shared - sum(max(0, count - self._kept.get(key, 0)) for key, count in self.used.items())
        return max(0, self._kept.get(owner, 0) - self.used[owner]) + max(0, shared)

    def most(self, owner: str) -> int:
        """Return the most that a key may have while no other key has any."""
        return self._kept.get(owner, 0) + self._shared

    def take(self, owner: str, count: int) -> None:
        """Count that a key has so many more, or fewer."""
        self.used[owner] += count
        if not self.used[owner]:
            del self.used[owner]


class Gate:
    """A count of running requests that can be closed. ``weights``: of all API keys, which divide
    the places, by their owners' digests."""

    def __init__(self, limit: int, weights: Mapping[str, float] = MappingProxyType({"": 1.0})) -> None:
        self.closing = False
        self._requests = KeyPortions(limit, weights)
        self._streams = KeyPortions(max(1, limit // STREAMS), weights)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.cancelling = False
        """Whether ``cancel_all`` cancelled the running requests."""

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    @contextmanager
    def running(self, owner: str = "", *, idle: bool = False) -> Iterator[None]:
        """Count the task of a key until the block ends, as an ``idle`` stream or a request. Raise
        ``ApiError`` 503 when closing, 429 if there is no place for the key."""
        if self.closing:
            raise _stopping()
        places, what = (self._streams, "idle streams") if idle else (self._requests, "requests")
        if not places.left(owner):
            own = f", {places.used[owner]} of this key" if owner else ""
            most = f", of one key {places.most(owner)} at most" if owner else ""
            message = (
                f"{places.used.total()} {what} are under way{own}, and this server takes {places.limit} at a time{most}"
            )
            raise busy(429, f"{message}; try again later", "rate_limit_exceeded")
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        self._idle.clear()
        places.take(owner, 1)
        try:
            yield
        finally:
            places.take(owner, -1)
            del self._tasks[task]
            if not self._tasks:
                self._idle.set()

    def close(self) -> None:
        """Refuse further requests."""
        self.closing = True

    async def until_idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    def cancel_all(self) -> None:
        """Cancel the running requests."""
        self.cancelling = True
        for task in tuple(self._tasks):
            task.cancel()


class Arrival:
    """A body that is being received, of one request. Its bytes count until ``close``."""

    def __init__(self, portions: KeyPortions, limit_per_key: int, owner: str) -> None:
        """``portions``: of the bytes of all bodies. ``limit_per_key``: what one key may have."""
        self._portions, self._limit_per_key, self._owner = portions, limit_per_key, owner
        self.bytes = 0

    def expect(self, count: int) -> None:
        """Raise ``ApiError`` if there is no room for so many more bytes: 413 if there never is."""
        portions, owner = self._portions, self._owner
        most, own = portions.most(owner), portions.used[owner]
        if owner:
            most = min(most, self._limit_per_key)
        for limit, used, left, whose in (
            (portions.limit, portions.used.total(), portions.left(owner), "this server"),
            *([(most, own, most - own, "this key")] if owner else []),
        ):
            if self.bytes + count > limit:
                raise _too_large(f"{whose} may have {limit} bytes of bodies at a time")
            if count > left:
                message = f"{whose} has {used} bytes of bodies under way, and may have {limit}; try again later"
                raise busy(429, message, "rate_limit_exceeded", Connection="close")

    def add(self, count: int) -> None:
        """Count received bytes. Raise ``ApiError`` as ``expect`` does."""
        self.expect(count)
        self.bytes += count
        self._portions.take(self._owner, count)

    def close(self) -> None:
        self._portions.take(self._owner, -self.bytes)


class ReaderGone(OSError):
    """The client keeps its connection and reads nothing."""


class GateMiddleware:
    """The gate as ASGI middleware, for ``app.add_middleware(GateMiddleware, gate=..., ...)``."""

    def __init__(self, app: ASGIApp, *, gate: Gate, settings: ServerSettings) -> None:
        self._app = app
        self._gate = gate
        self._settings = settings
        largest = int(settings.max_body_bytes)
        self._bodies, self._bodies_per_key = (
            KeyPortions(BODIES * largest, settings.key_weights),
            BODIES_PER_KEY * largest,
        )
        self._sites = Sites(settings)
        # Digests have one length, so the time of a comparison does not tell a key's length.
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = logs.Passage(_request_id(scope), scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        state["request_id"], state["owner"], state["reads_only"] = passage.request_id, "", False

        async def watched_receive() -> Message:
            message = await receive()
            passage.gone |= message["type"] == "http.disconnect" and not passage.complete
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                passage.status = message["status"]
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-request-id"]
                if header_values(scope, b"transfer-encoding") and not header_values({"headers": kept}, b"connection"):
                    # Parsers of chunks differ about the end of a body, so nothing is read after it.
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
            if not scope["path"].startswith(KEYLESS_BELOW) or passage.status is None or passage.status >= 400:
                logs.request(passage, state.get("tokens"))

    async def _pass(self, passage: logs.Passage, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as counted:
            try:
                check_framing(scope)
                scope["state"]["reads_only"] = self._sites.check(scope, public=_is_public(scope["path"]))
                owner = scope["state"]["owner"] = self._owner(scope)
                # Each request has a task of its own, and so a context.
                trace = _trace(scope, b"traceparent"), _trace(scope, b"tracestate")
                path, weight = scope["path"], self._settings.key_weights.get(owner, 1.0)
                caller.set(Caller(owner, *trace, path=path, weight=weight))
                if path not in UNCOUNTED:
                    counted.enter_context(self._gate.running(owner, idle=path in IDLE))
                # The body is in memory until the answer is sent.
                with closing(Arrival(self._bodies, self._bodies_per_key, owner)) as arrival:
                    admitted = await self._body(scope, receive, arrival)
                    if admitted is not None and scope["method"] == "HEAD":
                        await _only_head(self._app, scope, admitted, send)
                    elif admitted is not None:
                        await self._app(scope, admitted, send)
            except asyncio.CancelledError:
                if not self._gate.cancelling:
                    raise
                if passage.status is None:
                    await error_response(_stopping(), scope["path"])(scope, receive, send)
            except ReaderGone:
                pass  # the server closes the connection after an incomplete answer
            except Exception as error:
                found = api_error(error)
                if found.status == 500:
                    logs.failure(error, request_id=passage.request_id, method=passage.method, path=passage.path)
                # Once an answer has begun, the server closes the connection: the client sees that.
                if passage.status is None and not passage.gone:
                    await error_response(found, scope["path"])(scope, receive, send)

    def _owner(self, scope: Scope) -> str:
        """Return a digest of the request's key, "" for a server without keys, or raise a 401."""
        if not self._keys:
            return ""
        given = header_values(scope, b"authorization")
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        named = header_values(scope, b"x-api-key")
        for offered in (key.strip() if kind.lower() == b"bearer" else b"", named[0] if len(named) == 1 else b""):
            digest = hashlib.sha256(offered).digest()
            # Compare all keys, so that the time does not tell which one matched.
            known = [hmac.compare_digest(digest, one) for one in self._keys]
            if offered and any(known):
                return digest.hex()
        if _is_public(scope["path"]):
            return ""
        raise ApiError(
            401,
            "no valid API key; send one as the header Authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _body(self, scope: Scope, receive: Receive, arrival: Arrival) -> Receive | None:
        """Return the body's ``receive``; None if the client has gone. Uploads are not buffered."""
        upload = scope["path"] in UPLOADS
        limit = int(self._settings.max_upload_bytes) if upload else int(self._settings.max_body_bytes)
        name = "max_upload_bytes" if upload else "max_body_bytes"
        too_large = _too_large(f"the body is larger than {limit} bytes ({name})")
        for length in header_values(scope, b"content-length"):
            if not length.isdigit() or int(length[:20]) > limit:
                raise too_large
            if not upload:
                arrival.expect(int(length))
        receive = _in_time(receive, self._settings.upload_seconds if upload else math.inf, limit, too_large)
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


async def _only_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD with the head of the answer to GET. The application hears that the client has
    gone once a body begins, so that an endless one ends."""
    begun = asyncio.Event()

    async def sent(message: Message) -> None:
        if begun.is_set():
            return
        if message["type"] == "http.response.body":
            begun.set()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    async def received() -> Message:
        found, ended = asyncio.ensure_future(receive()), asyncio.ensure_future(begun.wait())
        try:
            await asyncio.wait((found, ended), return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if ended.done() else found.result()
        finally:
            found.cancel()
            ended.cancel()

    scope["state"]["only_head"] = True
    await app({**scope, "method": "GET"}, received, sent)


def _is_public(path: str) -> bool:
    return path in KEYLESS or path.startswith(KEYLESS_BELOW)


def check_framing(scope: Scope) -> None:
    """Raise ``ApiError`` 400 for a request whose end a proxy may see elsewhere. Its rest would be
    read as a request that no client sent."""
    coded = bool(header_values(scope, b"transfer-encoding"))
    if coded and (header_values(scope, b"content-length") or scope.get("http_version", "1.1") == "1.0"):
        raise ApiError(
            400,
            "Transfer-Encoding together with Content-Length, or in HTTP/1.0, is not taken; send one of them in HTTP/1.1",
            code="invalid_framing",
            headers={"Connection": "close"},
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body once, then the client's disconnect."""
    left: list[bytes] = [body]

    async def replay() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replay


def _in_time(receive: Receive, most: float, limit: int, too_large: ApiError) -> Receive:
    """Return a ``receive`` that gives the parts of a body as they come. It raises ``too_large`` for
    more than ``limit`` bytes, and ``ApiError`` 408 for a body that is too slow or takes longer than
    ``most`` seconds. Messages after its end are never late."""
    size = 0
    loop = asyncio.get_running_loop()
    end = loop.time() + most
    deadline: float | None = min(end, loop.time() + PATIENCE)

    async def timely() -> Message:
        nonlocal deadline, size
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
        new = len(message.get("body", b""))
        size += new
        if size > limit:
            raise too_large
        if deadline is not None:
            more = message["type"] == "http.request" and message.get("more_body", False)
            # A quick start does not allow for a long silence later.
            later = min(deadline + new / SLOWEST, loop.time() + PATIENCE, end)
            deadline = later if more else None
        return message

    return timely


def _trace(scope: Scope, name: bytes) -> str:
    """Return a header of the W3C's trace context; of several lists one, of a bad one nothing."""
    given = b",".join(header_values(scope, name))
    return given.decode("ascii", "replace") if len(given) <= MAX_TRACE_STATE else ""


def _request_id(scope: Scope) -> str:
    """Return the client's id if it is short and printable (it is logged), or a new one."""
    given = [value.decode("latin-1") for value in header_values(scope, b"x-request-id")]
    if len(given) == 1 and _ID.fullmatch(given[0]):
        return given[0]
    return f"req-{secrets.token_hex(16)}"


def _too_large(message: str) -> ApiError:
    # The unread rest of the body would be read as the next request.
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _stopping() -> ApiError:
    return ApiError(503, "this server is shutting down", code="shutting_down")
