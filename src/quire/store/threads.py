"""Daemon threads for calls in the background, also for an event loop that awaits them. The exit of
the process does not wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from quire.base.forks import ParentsLock, in_children

R = TypeVar("R")
Calls: TypeAlias = SimpleQueue[Callable[[], None] | None]

logger = logging.getLogger("quire.store")
CLOSE_SECONDS = 2.0


class DaemonThreads:
    """At most ``count`` daemon threads, started on demand. The interpreter joins the threads of
    ``ThreadPoolExecutor`` at its end, and a file system that does not answer would keep it alive.
    Futures chained to each other, as by ``run_in_executor``, would keep results until garbage is
    collected."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: Calls = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._lock: Any = threading.Lock()
        in_children(self._forked)

    def add(self, call: Callable[[], None]) -> None:
        """Run a call on a thread, after earlier ones; after ``close``: do nothing."""
        with self._lock:
            if self._closed:
                return
            self._calls.put(call)
            if len(self._threads) < self._count:
                name = self._name if self._count == 1 else f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # Python 3.12 starts none while the process ends.
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)
                    weakref.finalize(self, self._calls.put, None).atexit = False

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

        self.add(call)
        return await answer

    def end(self) -> None:
        """End the threads after the pending calls."""
        for _ in self._threads:
            self._calls.put(None)

    def close(self) -> None:
        """Drop pending calls, and end after the running ones, waiting at most ``CLOSE_SECONDS`` for
        each."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()
        self.end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def _forked(self) -> None:
        self._lock = ParentsLock()


def _work(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except Exception:
            logger.exception("work in the background failed")
        del call  # the objects that it holds must be freed before the next call
