"""``show``: the inspector's page for a state file or a store, on this machine, without a model.

The documents are as from ``quire serve`` (``docs/inspector.md``). The server listens on 127.0.0.1
only and changes nothing. Every document needs the key that is in the printed address behind ``#``;
a request that names another host is refused, so that a page of another site whose name resolves to
127.0.0.1 (DNS rebinding) reaches nothing, not even with the key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.base.config import check_int
from quire.base.errors import InvalidArgument, QuireError, TierError
from quire.contracts.store import StoreTier
from quire.server.http.errors import ApiError, api_error, error_response
from quire.server.http.listeners import bind, url_of
from quire.server.http.serving import Connection
from quire_inspector.files.file_snapshot import file_snapshot
from quire_inspector.files.snapshot import Snapshot
from quire_inspector.files.store_snapshot import store_snapshot
from quire_inspector.routes import page_routes
from quire_inspector.routes.state_answers import json_answer

LOOK_SECONDS = 2.0
"""Least seconds between two readings of a store."""
SHARE = 20
"""A reading of a store that took s seconds is kept for this many times s."""
PERIOD = 0.25
"""Seconds between two checks of a stream of events."""
QUIET_SECONDS = 10.0
"""Seconds after which a stream of events says that it is still there."""
NEEDS_MODEL = {
    "timeline": "requests and steps are those of a running server; a state file and a store have none",
    "token": "probabilities need the model, and inspect loads none; load the state into quire serve to see them",
    "attention": "attention weights need the model, and inspect loads none; load the state into quire serve to see them",
}
"""Documents of running servers, and why they are refused."""


class SnapshotSource(Protocol):
    """What is shown."""

    async def snapshot(self) -> Snapshot:
        """Return it as it is now, or was some seconds ago."""
        ...

    async def close(self) -> None:
        """Give back connections and files."""
        ...


class FileSource:
    """A state file, as it was when it was opened: who replaces it does not change what is shown."""

    def __init__(self, path: Path) -> None:
        self._snapshot = file_snapshot(path)

    async def snapshot(self) -> Snapshot:
        return self._snapshot

    async def close(self) -> None:
        """See ``SnapshotSource``; the mapping ends with the process."""


class StoreSource:
    """A store, read anew every ``LOOK_SECONDS`` while it has viewers."""

    def __init__(self, tier: StoreTier) -> None:
        self._tier = tier
        self._snapshot: Snapshot | None = None
        self._fresh_until = 0.0
        self._lock = asyncio.Lock()

    async def snapshot(self) -> Snapshot:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._snapshot is None or loop.time() > self._fresh_until:
                started = loop.time()
                before = self._snapshot
                found = await store_snapshot(self._tier, 1 if before is None else before.reading + 1)
                if before is None or not found.shows(before):
                    self._snapshot = found
                self._fresh_until = loop.time() + max(LOOK_SECONDS, SHARE * (loop.time() - started))
            assert self._snapshot is not None
            return self._snapshot

    async def close(self) -> None:
        await self._tier.close()


class Guard:
    """Plain ASGI around the application: the host, the method, the key of documents."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], key: str) -> None:
        self._app, self._hosts, self._key = app, hosts, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        def given(name: bytes) -> list[bytes]:
            return [value for found, value in scope["headers"] if found.lower() == name]

        named = [value.decode("latin-1").lower() for value in given(b"host")]
        if len(named) != 1 or named[0] not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            raise ApiError(421, f"this server answers requests for {known} only", code="wrong_host")
        if scope["method"] not in ("GET", "HEAD"):
            raise ApiError(
                405, "nothing can be changed here", code="method_not_allowed", headers={"Allow": "GET, HEAD"}
            )
        if not scope["path"].startswith("/v1/"):
            return
        offered = given(b"authorization")
        kind, _, key = offered[0].partition(b" ") if len(offered) == 1 else (b"", b"", b"")
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise ApiError(
                401,
                "the key is missing or wrong; open the address that quire inspect printed",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def create_snapshot_app(
    source: SnapshotSource, *, hosts: frozenset[str], key: str, is_over: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Return the application. ``hosts``: accepted values of the header Host. ``is_over``: whether
    streams must end. The end of its lifespan closes the source."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await source.close()

    def document(path: str, make: Callable[[Snapshot, Request], Any]) -> Route:
        async def answer(request: Request) -> Response:
            found = make(await source.snapshot(), request)
            if isinstance(found, Awaitable):
                found = await found
            return json_answer(found.document())

        return Route(f"/v1/state{path}", answer)

    def refused(name: str) -> Route:
        async def answer(request: Request) -> Response:
            raise ApiError(400, f"{name}: {NEEDS_MODEL[name]}", code="unsupported")

        return Route(f"/v1/state/{name}", answer)

    async def events(request: Request) -> Response:
        return StreamingResponse(
            _events(source, is_over), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    routes = [
        document("", lambda found, _: found.overview()),
        document("/history", lambda found, _: found.history()),
        document("/text", lambda found, asked: found.text(_text(asked, "branch"), *_span(asked))),
        document("/pages", lambda found, asked: found.pool(_number(asked, "pool", 0))),
        document(
            "/branch-pages", lambda found, asked: found.branch_pages(_text(asked, "branch"), _number(asked, "pool", 0))
        ),
        document("/pages/{pool:int}/{page:int}", lambda found, asked: found.page(**asked.path_params)),
        document("/tiers", lambda found, _: found.tiers),
        document(
            "/norms",
            lambda found, asked: found.norms(found.branch(_text(asked, "branch")), _number(asked, "layer")),
        ),
        document("/compare", lambda found, asked: found.compare(_text(asked, "a"), _text(asked, "b"))),
        *map(refused, NEEDS_MODEL),
        Route("/v1/state/events", events),
    ]
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.router.routes += routes
    app.include_router(page_routes.router)
    for kind in (ApiError, QuireError):
        app.add_exception_handler(kind, _error_answer)
    app.add_exception_handler(404, _nothing)
    return Guard(app, hosts=hosts, key=key)


async def _error_answer(request: Request, error: Exception) -> Response:
    # A viewer of a file or a store of this machine may know its path.
    answer = api_error(error)
    if isinstance(error, TierError):
        answer.message = str(error)
    return error_response(answer)


async def _nothing(request: Request, error: Exception) -> Response:
    return error_response(ApiError(404, f"there is no {request.url.path} here", code="not_found"))


def _text(request: Request, name: str) -> str:
    found = request.query_params.getlist(name)
    if len(found) != 1:
        raise InvalidArgument(f"{name} must be given once", field=name)
    return found[0]


def _number(request: Request, name: str, default: int | None = None) -> int:
    if default is not None and name not in request.query_params:
        return default
    found = _text(request, name)
    if not (found.isascii() and found.isdecimal() and len(found) <= 16):
        raise InvalidArgument(field=name, given=found, allowed="a number from 0 on")
    return int(found)


def _span(request: Request) -> tuple[int, int | None]:
    return _number(request, "start", 0), _number(request, "stop") if "stop" in request.query_params else None


async def _events(source: SnapshotSource, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield events: one at first, then one for each reading that differs."""
    loop = asyncio.get_running_loop()
    seen, said = -1, loop.time()
    while not is_over():
        try:
            found = await source.snapshot()
        except QuireError as error:
            yield f"event: error\ndata: {json.dumps(api_error(error).body)}\n\n".encode()
            return
        if found.reading != seen:
            seen, said = found.reading, loop.time()
            yield f"event: changed\ndata: {json.dumps(found.change())}\n\n".encode()
        elif loop.time() - said > QUIET_SECONDS:
            said = loop.time()
            yield b": nothing new\n\n"
        await asyncio.sleep(PERIOD)


class SnapshotServer(uvicorn.Server):
    """A Uvicorn server that calls ``started`` when it listens, and ends at the first signal."""

    def __init__(self, source: SnapshotSource, key: str, number: int, started: Callable[[], None]) -> None:
        hosts = frozenset({f"127.0.0.1:{number}", f"localhost:{number}"})
        app = create_snapshot_app(source, hosts=hosts, key=key, is_over=lambda: self.should_exit)
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()


def show(source: Callable[[], SnapshotSource], *, port: int = 0, browse: bool = True) -> None:
    """Serve until SIGINT or SIGTERM. Print the address, and open it in a browser (``browse``).
    Raise ``InvalidArgument`` for a port that cannot be listened on."""
    check_int("port", port, 0, 65535)
    sockets = bind("127.0.0.1", port)
    try:
        url = url_of(sockets[0])
        key = secrets.token_urlsafe(24)
        address = f"{url}/#key={key}"

        def started() -> None:
            print(f"Showing it at {address} (Ctrl+C stops)", flush=True)
            if browse:
                with suppress(webbrowser.Error):
                    webbrowser.open(address)

        server = SnapshotServer(source(), key, sockets[0].getsockname()[1], started)
        # Uvicorn raises the signal again once it has ended.
        with suppress(KeyboardInterrupt):
            server.run(sockets)
    finally:
        for listener in sockets:
            listener.close()
