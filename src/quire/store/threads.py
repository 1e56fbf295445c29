"""Daemon threads for blocking calls, awaited by an event loop. The exit of the process does not
wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from quire.base.forks import ParentsLock, in_children

R = TypeVar("R")


class DaemonThreads:
    """At most ``count`` daemon threads. The interpreter joins the threads of ``ThreadPoolExecutor``
    at its end, and a file system that does not answer would keep it alive. Futures chained to each
    other, as by ``run_in_executor``, would keep results until garbage is collected."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: Any = SimpleQueue[Callable[[], None] | None]()
        self._threads: list[threading.Thread] = []
        in_children(self._forked)

    async def run(self, function: Callable[[], R]) -> R:
        """Call a function on a thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()

        def call() -> None:
            error, results = None, list[R]()
            try:
                results.append(function())
            except BaseException as caught:
                error = caught

            def tell() -> None:
                if answer.done():  # cancelled
                    pass
                elif error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(results.pop())

            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(tell)

        self._calls.put(call)
        if len(self._threads) < self._count:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # Python 3.12 starts none while the process ends.
                if not self._threads:
                    raise
        return await answer

    def end(self) -> None:
        """End the threads after the running calls."""
        for _ in self._threads:
            self._calls.put(None)

    def _forked(self) -> None:
        self._calls = ParentsLock()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # a result must not live until the next call
