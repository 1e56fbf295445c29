"""The other ranks of an engine as threads of this process, which start at once.

They run the code of processes over the same sockets and groups, one forward at a time: kernels have
memory of their own for each process. Ends by a signal need processes.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from quire.rank_process import main
from quire.runner.local import LocalRunner
from quire.runner.torch_group import TorchGroup, TorchLine


class ThreadProcess:
    """The part of ``subprocess.Popen`` that ``Ranks`` uses."""

    def __init__(self, _: Sequence[str], *, pass_fds: Sequence[int], **__: Any) -> None:
        # The caller closes its own.
        self._thread = threading.Thread(target=main, args=(os.dup(pass_fds[0]),), daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """It ends with its pipe."""


class Turns:
    """Only one thread computes; one that waits for another lets it."""

    def __init__(self) -> None:
        self._lock, self._own = threading.Lock(), threading.local()

    def computing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with self._lock:
                self._own.holds = True
                try:
                    return function(*given)
                finally:
                    self._own.holds = False

        return call

    def waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if not getattr(self._own, "holds", False):
                return function(*given)
            self._lock.release()
            try:
                return function(*given)
            finally:
                self._lock.acquire()

        return call


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Ranks are threads."""
    with pytest.MonkeyPatch.context() as patch:
        started = subprocess.Popen

        def start(command: Sequence[str], **options: Any) -> Any:
            is_rank = any("rank_process" in part for part in command)
            return ThreadProcess(command, **options) if is_rank else started(command, **options)

        patch.setattr(subprocess, "Popen", start)
        turns = Turns()
        patch.setattr(LocalRunner, "execute", turns.computing(LocalRunner.execute))
        for kind, name in ((TorchGroup, "sum"), (TorchGroup, "gather"), (TorchLine, "_wait")):
            patch.setattr(kind, name, turns.waiting(getattr(kind, name)))
        yield


@pytest.fixture(scope="module")
def thread_ranks() -> Iterator[None]:
    """All ranks of a module are threads."""
    with ranks_as_threads():
        yield
