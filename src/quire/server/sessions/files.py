"""Upload and download of sessions' state files, as streams over temporary files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.async_llm import AsyncSession
from quire.base.errors import Cancelled
from quire.base.temporary_folders import TemporaryFolder
from quire.server.http.context import Context
from quire.server.http.errors import ApiError, hiding
from quire.server.http.events import unless_gone
from quire.server.sessions.held import StoredBytes
from quire.statefile.atomic_file import os_errors

CHUNK = 1 << 20
"""Bytes per read or write."""
PREFIX = "quire-state-"
"""How the names of folders with one temporary file begin."""


class TemporaryFile:
    """A place for one file, until ``aclose``. The bytes passed to ``claim`` count for ``owner``."""

    def __init__(self, stored: StoredBytes, owner: str) -> None:
        self._folder = TemporaryFolder(PREFIX)
        self.path = self._folder.path / "state.quire"
        self._stored, self._owner, self._size = stored, owner, 0

    def claim(self, size: int) -> None:
        """Count the file's present or coming size. Raise ``ApiError`` if it is too much."""
        self._stored.change(self._owner, self._size, size)
        self._size = size

    async def aclose(self) -> None:
        try:
            await asyncio.shield(asyncio.to_thread(self._folder.remove))
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
    async with aclosing(TemporaryFile(context.stored, request.state.owner)) as place:
        try:
            with os_errors("the uploaded state file"):
                await _write(place, request.stream())
        except ClientDisconnect:
            raise Cancelled("the client closed the connection before the file was there") from None
        with hiding(place.path, "the uploaded state file"):
            loading = context.llm.load_session(place.path, convert_dtype=convert_dtype, use_tqdm=False)
            return await unless_gone(request, loading)


async def _write(place: TemporaryFile, parts: AsyncIterator[bytes]) -> None:
    file = await asyncio.to_thread(place.path.open, "wb")
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

    def __init__(self, place: TemporaryFile, *, name: str) -> None:
        """Take the place, to be closed here. ``name`` is for browsers."""
        self.status_code = 200
        self.background = None
        self._place = place
        self.init_headers({"content-disposition": f'attachment; filename="{name}"'})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(Request(scope, receive), self._send(send))
        except Cancelled:
            pass  # the client has gone
        finally:
            await self._place.aclose()

    async def _send(self, send: Send) -> None:
        with await asyncio.to_thread(self._place.path.open, "rb") as file:
            headers = [*self.raw_headers, (b"content-length", str(self._place.path.stat().st_size).encode())]
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def saved_session(session: AsyncSession, request: Request, context: Context, *, name: str) -> Response:
    """Return an answer with a session's state file. The session is free when this returns."""
    place = TemporaryFile(context.stored, request.state.owner)
    try:
        held = len(session) if session.window is None else min(len(session), session.window[0])
        place.claim(held * context.llm.bytes_per_token)  # an estimate
        with hiding(place.path, f"state file {name!r}"):
            await unless_gone(request, session.save(place.path, use_tqdm=False))
        place.claim(place.path.stat().st_size)
    except BaseException:
        await place.aclose()
        raise
    return StateFileResponse(place, name=name)
