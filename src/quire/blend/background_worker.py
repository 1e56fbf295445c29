"""``BackgroundWorker``: a daemon thread for background work. The exit of the process does not
wait for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

from quire.base.process_exit import end_with_process

logger = logging.getLogger("quire.blend")

Calls = SimpleQueue[Callable[[], None] | None]
CLOSE_SECONDS = 2.0


class BackgroundWorker:
    """Calls, one after the other, on a thread that starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Calls = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, call: Callable[[], None]) -> None:
        """Run a call after earlier ones; after ``close``: do nothing."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=_run, args=(self._calls,), name=self._name, daemon=True)
                self._thread.start()
                end_with_process(self.close)
                weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put(call)

    def close(self) -> None:
        """Drop pending calls, and end after the running one, waiting at most ``CLOSE_SECONDS`` for
        it."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)


def _run(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except Exception:
            logger.exception("work in the background failed")
        del call  # the objects that it holds must be freed before the next call
