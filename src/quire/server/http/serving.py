"""``serve(llm, settings)``: the application on uvicorn, until a signal stops it.

The first SIGINT or SIGTERM closes the gate: new requests get 503, running ones are cancelled after
``drain_seconds``. A second signal cancels them at once.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.async_llm import AsyncLLM
from quire.base.errors import QuireError
from quire.base.temporary_folders import remove_leftovers
from quire.channels.greeting import Trust
from quire.server.handover.decode import DecodeSide
from quire.server.handover.prefill import PrefillSide
from quire.server.http import logs
from quire.server.http.app import create_app
from quire.server.http.context import Context
from quire.server.http.listeners import bind, url_of
from quire.server.http.settings import ServerSettings
from quire.server.sessions.files import PREFIX

LOAD_SECONDS = 10.0
"""Seconds between two log lines about the load."""
CANCEL_SECONDS = 5
"""Seconds for cancelled requests to end, and for connections to take the rest of their answers."""
FLUSH_SECONDS = 10.0
"""Most seconds after that for state to be written to where it outlives the process."""
HEAD_SECONDS = 30.0
"""Seconds that a connection may take to send the head of a request."""
KEEP_ALIVE_SECONDS = 30
"""Seconds that an unused connection stays open: longer than in the pools of common clients."""
MOST_CONNECTIONS = 16_384
"""Open connections at most, however many descriptors there are."""
OTHER_DESCRIPTORS = 256
"""Descriptors that connections leave to files, tiers and child processes; of few, half."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(llm: AsyncLLM, settings: ServerSettings | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then close ``llm``. Print the address once requests are taken.
    It blocks, and runs on the main thread, which alone gets signals. Raise ``InvalidArgument`` for
    an address that cannot be listened on."""
    settings = settings or ServerSettings()
    sockets: list[socket.socket] = []
    side: PrefillSide | DecodeSide | None = None
    raise_descriptor_limit()
    remove_leftovers(PREFIX)
    try:
        sockets += bind(settings.host, settings.port)
        with logs.to_stderr():
            app = create_app(llm, settings)
            longest, length = app.state.context.longest, llm.engine.max_model_len
            if longest < length:
                text = f"the pool holds {longest} tokens, so no request can have the {length} of the model; give kv_cache_memory"
                logs.event("warning", text=text)
            if not settings.api_key and (text := exposure(sockets)):
                logs.event("warning", level=logging.WARNING, text=text)
            side = side_of(llm, settings)
            # These objects stay; a collection during a large body need not visit them.
            gc.collect()
            gc.freeze()
            server = Server(app, announce=True)
            server.run(sockets)
    finally:
        for listener in sockets:
            listener.close()
        if side is not None:
            side.close()
        asyncio.run(llm.close())


def side_of(llm: AsyncLLM, settings: ServerSettings) -> PrefillSide | DecodeSide | None:
    """Begin to listen for decode servers, or to ask a prefill server; None for a server that does
    both itself."""
    if settings.peer is None:
        return None
    trust, model = Trust(settings.secret), llm.identity.fields()
    if settings.role == "prefill":
        return PrefillSide(llm, settings.peer, trust, model)
    found = DecodeSide(llm, settings.peer, trust, model)
    llm.before_prompts = found.bring
    return found


def raise_descriptor_limit() -> None:
    """Let this process open as many files as the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Return the most connections that leave descriptors and memory for other things."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, soft - min(OTHER_DESCRIPTORS, soft // 2))


_BARE_OR_FOLDED = re.compile(rb"(?<!\r)\n|\n[ \t]")
_HEAD_END = re.compile(rb"\n\r?\n")


class StrictConnection(h11.Connection):
    """h11's connection, which refuses bare line feeds and headers that continue on the next line.

    A proxy may read these in another way, and pass on as one request what h11 reads as two."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            data = self.trailing_data[0]
            end = _HEAD_END.search(data)
            if _BARE_OR_FOLDED.search(data, 0, len(data) if end is None else end.end()):
                raise h11.RemoteProtocolError("bare line feed or folded line in the head", error_status_hint=400)
        return super().next_event()


class Connection(H11Protocol):
    """Uvicorn's connection, closed if no request comes. Silent ones would stay open for ever.

    When there are too many connections for the descriptors, the one that has been without a request
    for longest is closed."""

    _head: asyncio.TimerHandle | None = None
    _idle: ClassVar[WeakKeyDictionary[Any, dict[Connection, None]]] = WeakKeyDictionary()
    """Connections without a request of each server, the longest idle first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER)
        self._without_request = self._idle.setdefault(self.server_state, {})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > most_connections():
            oldest = next(iter(self._without_request))
            del self._without_request[oldest]
            oldest.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._without_request.pop(self, None)
        if self._head is not None:
            self._head.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_idle()

    def _note_idle(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._without_request.pop(self, None)
        elif not self.transport.is_closing():
            self._without_request.setdefault(self)

    def _expect_head(self) -> None:
        """Limit the time for a head. After an answer uvicorn itself limits idle connections."""
        self._note_idle()
        waits = self.conn.their_state is h11.IDLE
        if waits and self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not waits and self._head is not None:
            self._head.cancel()
            self._head = None


class Server(uvicorn.Server):
    """Uvicorn, with a stop that lets requests finish, and regular log lines about the load."""

    def __init__(self, app: FastAPI, *, announce: bool = False) -> None:
        """Take the ``app`` of ``create_app``. ``announce``: print the address."""
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CANCEL_SECONDS,
            )
        )
        self._context: Context = app.state.context
        self._announce = announce
        self._hurry = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False

    # -- stopping ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop after the running requests, at a second call at once. Runs on the event loop."""
        if self._draining:
            self._hurry.set()
            return
        self._draining = True
        # Here, so that no request is taken before the task runs.
        self._context.gate.close()
        self._tasks.append(asyncio.get_running_loop().create_task(self._drain()))

    async def _drain(self) -> None:
        gate, patience = self._context.gate, self._context.settings.drain_seconds
        logs.event("stopping", under_way=gate.under_way, drain_seconds=patience)
        idle = asyncio.ensure_future(gate.until_idle())
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({idle, hurry}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if gate.under_way:
            logs.event("cancelling", under_way=gate.under_way)
            gate.cancel_all()
            await asyncio.wait({idle}, timeout=CANCEL_SECONDS)
        if not self._hurry.is_set():
            flush = asyncio.ensure_future(self._flush())
            await asyncio.wait({flush, hurry}, timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            flush.cancel()
        for waiter in (idle, hurry):
            waiter.cancel()
        self.should_exit = True

    async def _flush(self) -> None:
        """Let the engine write what is dirty. The thread is left alone if it takes too long."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            try:
                if not self._context.llm.engine.flush(FLUSH_SECONDS):
                    logs.event("warning", text=f"not all state was written within {FLUSH_SECONDS:g} seconds")
            finally:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(done.set)

        threading.Thread(target=flush, name="quire-flush", daemon=True).start()
        await done.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install our signal handlers in place of uvicorn's. Restore the old ones afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.stop)

        before = {number: signal.signal(number, on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- beginning and end -------------------------------------------------------------------------

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        self._tasks.append(asyncio.get_running_loop().create_task(report_load(self._context.llm)))
        if self._announce:
            listeners = [listener for server in self.servers for listener in server.sockets]
            where = " and ".join(url_of(listener) for listener in listeners)
            print(f"Serving {self._context.model_name} at {where} (Ctrl+C stops)", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)


def exposure(listeners: Sequence[socket.socket]) -> str:
    """Return a warning about a server without keys that other machines reach; "" if none does."""
    hosts = {one: ipaddress.ip_address(one.getsockname()[0].partition("%")[0]) for one in listeners}
    reached = [url_of(one) for one, host in hosts.items() if not host.is_loopback]
    if not reached:
        return ""
    return (
        f"{' and '.join(reached)} without a key: any machine that reaches it may read and change all sessions; give --api-key "
        "(or QUIRE_API_KEY), or --host 127.0.0.1"
    )


# -- the load --------------------------------------------------------------------------------------


async def report_load(llm: AsyncLLM, seconds: float = LOAD_SECONDS) -> None:
    """Log the engine's work every ``seconds``, unless there was none. Ends with the engine."""
    try:
        before, then = await llm.metrics(), time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            found, now = await llm.metrics(), time.monotonic()
            if (line := load(before, found, now - then)) is not None:
                logs.event("load", **line)
            before, then = found, now
    except QuireError as error:
        logs.logger.error("the engine does not run: %s", error)


def load(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, Any] | None:
    """Return the changes between two snapshots of the metrics; None if there are none."""

    def grown(name: str) -> float:
        return after[f"quire:{name}"] - before[f"quire:{name}"]

    running, waiting = (int(after[f"quire:num_requests_{kind}"]) for kind in ("running", "waiting"))
    prompt, generated = grown("prompt_tokens_total"), grown("generation_tokens_total")
    if not (running or waiting or prompt or generated):
        return None
    return {
        "running": running,
        "waiting": waiting,
        "prompt_tokens_per_second": round(prompt / seconds, 1),
        "generated_tokens_per_second": round(generated / seconds, 1),
        "kv_cache_usage": round(after["quire:kv_cache_usage_perc"], 4),
        "cached_share": round(grown("prompt_tokens_cached_total") / prompt, 4) if prompt else 0.0,
    }
