"""``LocalReplicas``: a cluster's replicas as processes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from quire.base.errors import QuireError
from quire.cluster.calls import Answer, Call, ReplicaGone
from quire.cluster.replica_process import ReplicaProcess
from quire.server.http import logs

LOOK_SECONDS = 0.5
"""Seconds between two looks for replicas that have ended."""


class LocalReplicas:
    """``count`` servers. One that ends is replaced, with attempts until one starts."""

    def __init__(
        self, arguments: Sequence[str], state: Path, count: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """``arguments``, ``state``: as for ``ReplicaProcess``."""
        self._arguments, self._state, self._environment = list(arguments), state, environment
        self._count, self._started = count, 0
        self.running: dict[str, ReplicaProcess] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the servers, one after the other. An error stops those that run."""
        try:
            for _ in range(self._count):
                await self._add()
        except BaseException:
            await self.stop()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def _add(self) -> None:
        process = ReplicaProcess(self._arguments, self._state, self._environment)
        try:
            await process.start()
        except BaseException:
            await process.stop(0.0)
            raise
        self.running[f"replica-{self._started}"] = process
        self._started += 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for name in [name for name, process in self.running.items() if not process.is_alive]:
                logs.event("replica_ended", replica=name)
                await self.running.pop(name).stop()
            if len(self.running) < self._count:
                try:
                    await self._add()
                except (QuireError, OSError) as error:
                    logs.event("replica_not_started", reason=str(error))

    def names(self) -> Sequence[str]:
        return [name for name, process in self.running.items() if process.is_alive]

    @asynccontextmanager
    async def send(self, name: str, call: Call) -> AsyncIterator[Answer]:
        process = self.running.get(name)
        if process is None or not process.is_alive:
            raise ReplicaGone(f"{name} has ended", reached=False)
        async with process.send(call) as answer:
            yield answer

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await asyncio.gather(*(process.stop() for process in self.running.values()))
        self.running.clear()
