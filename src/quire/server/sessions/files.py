"""Upload and download of sessions' state files, as streams over temporary files."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.async_llm import AsyncSession
from quire.base.errors import Cancelled
from quire.server.http.context import Context
from quire.server.http.errors import ApiError, hiding
from quire.server.http.events import unless_gone
from quire.server.sessions.held import StoredBytes
from quire.statefile.atomic_file import os_errors

CHUNK = 1 << 20
"""Bytes per read or write."""


class TemporaryFile:
    """A place for one file: ``async with TemporaryFile(stored, owner) as path``. Worker threads
    make and remove its directory. The bytes passed to ``claim`` count for ``owner``."""

    def __init__(self, stored: StoredBytes, owner: str) -> None:
        self._folder: Path | None = None
        self._stored, self._owner, self._size = stored, owner, 0

    def claim(self, size: int) -> None:
        """Count the file's present or coming size. Raise ``ApiError`` if it is too much."""
        self._stored.change(self._owner, self._size, size)
        self._size = size

    async def __aenter__(self) -> Path:
        # If the task is cancelled meanwhile, the thread runs to its end and cleans up.
        making = asyncio.ensure_future(asyncio.to_thread(tempfile.mkdtemp, prefix="quire-state-"))
        try:
            self._folder = Path(await asyncio.shield(making))
        except asyncio.CancelledError:
            making.add_done_callback(lambda done: shutil.rmtree(done.result(), ignore_errors=True))
            raise
        return self._folder / "state.quire"

    async def __aexit__(self, *_: object) -> None:
        if self._folder is None:
            return
        try:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, self._folder, True))
        finally:
            self.claim(0)


def require_file(request: Request) -> None:
    """Raise ``ApiError`` 415 for a body that is not declared as a file. Web pages of other sites
    can send the types of forms, and none, without the server's leave."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != StateFileResponse.media_type:
        raise ApiError(
            415,
            f"a state file is sent as Content-Type: {StateFileResponse.media_type}, got {given[:80] or 'none'!r}",
            code="unsupported_media_type",
            headers={"Connection": "close"},
        )


async def receive_session(request: Request, context: Context, *, convert_dtype: bool) -> AsyncSession:
    """Return the session of the state file in a request's body. Errors are as for
    ``LLM.load_session``, and ``Cancelled`` if the client goes away."""
    llm, place = context.llm, TemporaryFile(context.stored, request.state.owner)
    async with place as path:
        try:
            with os_errors("the uploaded state file"):
                await _write(path, place, request.stream())
        except ClientDisconnect:
            raise Cancelled("the client closed the connection before the file was there") from None
        with hiding(path, "the uploaded state file"):
            return await unless_gone(request, llm.load_session(path, convert_dtype=convert_dtype, use_tqdm=False))


async def _write(path: Path, place: TemporaryFile, parts: AsyncIterator[bytes]) -> None:
    file = await asyncio.to_thread(path.open, "wb")
    waiting, size, arrived = [], 0, 0
    try:
        async for part in parts:
            arrived += len(part)
            place.claim(arrived)
            waiting.append(part)
            size += len(part)
            if size >= CHUNK:
                await asyncio.to_thread(file.writelines, waiting)
                waiting, size = [], 0
        await asyncio.to_thread(file.writelines, waiting)
    finally:
        await asyncio.shield(asyncio.to_thread(file.close))


class StateFileResponse(Response):
    """An answer that sends a file in pieces and removes it, also if the client goes away."""

    media_type = "application/octet-stream"

    def __init__(self, place: TemporaryFile, path: Path, *, name: str) -> None:
        """Take ``path`` in the entered ``place``, to be left here. ``name`` is for browsers."""
        self.status_code = 200
        self.background = None
        self._place = place
        self._path = path
        self.init_headers({"content-disposition": f'attachment; filename="{name}"'})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(Request(scope, receive), self._send(send))
        except Cancelled:
            pass  # the client has gone
        finally:
            await self._place.__aexit__()

    async def _send(self, send: Send) -> None:
        with await asyncio.to_thread(self._path.open, "rb") as file:
            headers = [*self.raw_headers, (b"content-length", str(self._path.stat().st_size).encode())]
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def saved_session(session: AsyncSession, request: Request, context: Context, *, name: str) -> Response:
    """Return an answer with a session's state file. The session is free when this returns."""
    place = TemporaryFile(context.stored, request.state.owner)
    path = await place.__aenter__()
    try:
        held = len(session) if session.window is None else min(len(session), session.window[0])
        place.claim(held * context.llm.bytes_per_token)  # an estimate
        with hiding(path, f"state file {name!r}"):
            await unless_gone(request, session.save(path, use_tqdm=False))
        place.claim(path.stat().st_size)
    except BaseException:
        await place.__aexit__()
        raise
    return StateFileResponse(place, path, name=name)
