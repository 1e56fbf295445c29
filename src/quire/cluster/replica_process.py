"""``ReplicaProcess``: a server of Quire as a child process, for a cluster's replica.

It listens on a free port of 127.0.0.1, out of reach of other machines. Its state directory is a
free one of the cluster's folder: the sessions of a process that was killed continue in the next one
that takes its directory, or in another replica that is asked for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from quire.base.errors import FailedPrecondition, Unsupported
from quire.cluster.calls import Answer, Call, ReplicaGone
from quire.store.adoption import free_directory

PR_SET_PDEATHSIG = 1
MOST = 1024
"""State directories of a cluster, at most."""
HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"host", b"content-length"}
"""Headers that belong to one connection."""
LAST_LINES = 20
CHILD = "from quire.cluster.replica_process import follow_parent as f; f(); from quire.__main__ import main; main()"


def follow_parent() -> None:
    """Let this process stop gently when its parent ends, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ReplicaProcess:
    """One server, from ``start`` to ``stop``."""

    def __init__(self, arguments: Sequence[str], state: Path, environment: Mapping[str, str] | None = None) -> None:
        """``arguments``: those of ``quire serve``. ``state``: the folder of the replicas' state
        directories."""
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise Unsupported("a cluster needs the package httpx, which is not installed; pip install httpx") from error
        self._httpx: Any = httpx
        self._arguments, self._state = list(arguments), state
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._client: Any = None
        self._place: IO[bytes] | None = None
        """Reserves the state directory."""
        self._lines: list[str] = []
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the server, and return when it takes requests. ``FailedPrecondition``: it has ended
        instead, with its last lines."""
        directory, self._place = await asyncio.to_thread(free_directory, self._state, MOST)
        own = ["--host", "127.0.0.1", "--port", "0", "--state-dir", str(directory), "--adopt-from", str(self._state)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", CHILD, "serve", *self._arguments, *own),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(address))
        url = await address
        if not url:
            said = "; ".join(self._lines[-3:]) or "nothing"
            raise FailedPrecondition(f"a replica ended before it took requests; it said: {said}")
        self._client = self._httpx.AsyncClient(base_url=url, timeout=None, limits=self._httpx.Limits())

    async def _read(self, address: asyncio.Future[str]) -> None:
        """Read the server's lines: the address, and the last ones for messages."""
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                if not (line := await self._process.stdout.readline()):
                    break
            except ValueError:  # a line that is longer than the stream's buffer, which drops it
                continue
            text = line.decode(errors="replace").rstrip()
            self._lines = [*self._lines[1 - LAST_LINES :], text]
            if not address.done() and (found := re.search(r"^Serving .* at (http://[^ ]+) ", text)):
                address.set_result(found[1])
            elif address.done():
                print(text, file=sys.stderr, flush=True)
        if not address.done():
            address.set_result("")

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.returncode is None

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[Answer]:
        """Open the answer to a call, as ``Replicas.send`` does."""
        headers = [(name, value) for name, value in call.headers if name.lower() not in HOP]
        request = self._client.build_request(call.method, call.path, headers=headers, content=call.body)
        try:
            answer = await self._client.send(request, stream=True)
        except self._httpx.TransportError as error:
            raise ReplicaGone(str(error), reached=not isinstance(error, self._httpx.ConnectError)) from error
        try:
            kept = tuple((name, value) for name, value in answer.headers.raw if name.lower() not in HOP)
            yield Answer(answer.status_code, kept, self._chunks(answer))
        finally:
            await answer.aclose()

    async def _chunks(self, answer: Any) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        except self._httpx.TransportError as error:
            raise ReplicaGone(str(error)) from error

    async def stop(self, seconds: float = 30.0) -> None:
        """Stop the server gently, after ``seconds`` at once."""
        if self._client is not None:
            await self._client.aclose()
        if self._process is not None and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        if self._reading is not None:
            await self._reading
        if self._place is not None:
            self._place.close()
