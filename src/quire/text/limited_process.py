"""A child process that does what may take all time and memory: within limits of both.

Code of strangers, such as chat templates, regular expressions of tokenizers and grammars, runs
here. The child stays for the next request; a child that reached a limit is ended, and another one
takes its place. A request that takes longer than ``QUICK`` starts again where the slow ones take
turns, so quick ones never wait for it.

The child is a ``subprocess``. ``fork`` is wrong for a process with threads and a GPU, and
``multiprocessing`` would import the caller's main module again. It imports no torch, inherits no
files but its pipes, hears no Ctrl-C, and ends with its parent. A forked process starts its own.
Requests are pickled, for the arguments of calls are more than JSON (``chat_calls``). Answers, which
a stranger had a part in, are lines of JSON.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from quire.base.errors import FailedPrecondition, QuireError, ResourceExhausted
from quire.text import long_texts

MEMORY = 1 << 30
"""Bytes of address space that a child may have."""

CHILDREN = 2
"""Children of a kind that work on quick requests at a time; further requests wait. One more child
works on slow ones."""

QUICK = 1.0
"""Seconds that a quick request takes, at most."""

SLOW = 8
"""Slow requests of a kind that work or wait; further ones are refused."""

GRACE = 10.0
"""Seconds beyond a request's limit, to start a child, after which the child is ended from
outside."""


class LimitReached(Exception):
    """A request needs more time or memory than it may have; the text says which."""

    status = 0
    """The exit status of a child that ended of it."""


class TooSlow(LimitReached):
    """A request needs more time."""


class LimitedProcess:
    """Children that answer requests. Thread-safe."""

    def __init__(
        self,
        name: str,
        start: str,
        greeting: Mapping[str, Any] | None = None,
        *,
        children: int = CHILDREN,
        quick: float = QUICK,
        grace: float = GRACE,
    ) -> None:
        """``start``: Python code that calls ``serve``. ``greeting``: the first request to each
        child. ``name`` is for errors, as in "the process that renders chat templates"."""
        self._name, self._start = name, start
        self._greeting = None if greeting is None else _line(greeting)
        self._number, self._quick, self._grace = children, quick, grace
        self.free: list[subprocess.Popen[bytes]] = []
        """Children without a request."""
        self.children: list[subprocess.Popen[bytes]] = []
        """All children."""
        self.closed = False
        self._set_places()
        weakref.finalize(self, _end_all, self.children)
        _ALL.add(self)

    def _set_places(self) -> None:
        self._places, self._slow_place = threading.Semaphore(self._number), threading.Semaphore(1)
        self._slow = threading.Semaphore(SLOW)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request. ``LimitReached``; ``Cancelled`` if the call was given up;
        ``FailedPrecondition`` after ``close``; ``QuireError`` without a child."""
        if seconds > self._quick:
            try:
                return self._in_turn(self._places, request, self._quick)
            except TooSlow:
                pass
        else:
            return self._in_turn(self._places, request, seconds)
        if not self._slow.acquire(blocking=False):
            raise ResourceExhausted(f"{self._name} is busy with {SLOW} slow requests; try again later")
        try:
            long_texts.step_aside()
            return self._in_turn(self._slow_place, request, seconds)
        finally:
            self._slow.release()

    def _in_turn(self, places: threading.Semaphore, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        line = _line({**request, "seconds": seconds})
        until = time.monotonic() + seconds + GRACE
        while not places.acquire(timeout=long_texts.LOOK):
            long_texts.check()
            if time.monotonic() > until:
                raise ResourceExhausted(f"{self._name} is busy; try again later")
        try:
            return self._asked(line, seconds)
        finally:
            places.release()

    def _asked(self, line: bytes, seconds: float) -> dict[str, Any]:
        reason: object = None
        for _ in range(2):  # The first child may have ended before it was asked.
            if self.closed:
                raise FailedPrecondition(f"{self._name} is closed")
            try:
                child, lines = (self.free.pop(), [line]) if self.free else self._started(line)
            except OSError as error:
                reason = error
                continue
            answer: bytes | None = None
            try:
                for one in lines:
                    answer = _exchange(child, one, time.monotonic() + seconds + self._grace)
                    if answer is None:
                        break
            except BaseException:  # given up: what it is doing is of no use
                self._end(child)
                raise
            found: dict[str, Any] = {} if answer is None else json.loads(answer)
            if answer is not None and not found.get("last"):
                self.free.append(child)
            else:
                self._end(child)
            if "limit" in found:
                raise (TooSlow if found["slow"] else LimitReached)(found["limit"])
            if answer is not None:
                return found
            status = child.returncode
            if status == -signal.SIGALRM:
                raise TooSlow(f"takes longer than {seconds:g} seconds")
            if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
                limit = LimitReached(f"needs more than {MEMORY >> 20} MiB of memory")
                limit.status = status
                raise limit
            reason = f"it ended with status {status}"
        raise QuireError(f"{self._name} cannot be used: {reason}")

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if child in self.children:  # not after a fork
            self.children.remove(child)
        _end(child)

    def close(self) -> None:
        """End the children, and requests that wait for them. There will be no others."""
        self.closed = True
        for child in list(self.children):
            child.kill()  # the thread that waits for its answer ends it
        while self.free:
            self._end(self.free.pop())

    def _started(self, line: bytes) -> tuple[subprocess.Popen[bytes], list[bytes]]:
        """Return a new child, and the lines to send to it."""
        # With our sys.path, so that it imports what we did, whatever lies in the working directory.
        child = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = sys.argv[1:]; {self._start}", *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
            # Each thread would take address space, which is limited.
            env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"},
        )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        self.children.append(child)
        return child, [line] if self._greeting is None else [self._greeting, line]

    def forked(self) -> None:
        """Let go of the children in a forked process: they are the other process's, and in use."""
        self._set_places()
        self.free.clear()
        while self.children:
            child = self.children.pop()
            child.returncode = 0  # nothing that this process could wait for
            _close(child)


_ALL: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()


def _forked() -> None:
    for one in _ALL:
        one.forked()


os.register_at_fork(after_in_child=_forked)


def _line(request: Mapping[str, Any]) -> bytes:
    return base64.b64encode(pickle.dumps(dict(request))) + b"\n"


def _exchange(child: subprocess.Popen[bytes], line: bytes, until: float) -> bytes | None:
    """Return the answer to a line; None from a child that has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    answer, to, back = bytearray(), child.stdin.fileno(), child.stdout.fileno()
    sent, ready = memoryview(line), select.poll()  # not select(), which knows 1,024 files
    ready.register(to, select.POLLOUT)
    ready.register(back, select.POLLIN)
    while not answer.endswith(b"\n"):
        long_texts.check()
        found = [file for file, _ in ready.poll(long_texts.LOOK * 1000)]
        try:
            if to in found:
                sent = sent[os.write(to, sent) :]
                if not sent:
                    ready.unregister(to)
            if back in found:
                part = os.read(back, 1 << 20)
                if not part:
                    return None
                answer += part
        except BlockingIOError:
            pass
        except OSError:
            return None
        if time.monotonic() > until:  # its alarm has not ended it
            raise TooSlow("takes too long")
    return bytes(answer)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    _close(child)
    child.wait()


def _close(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _end_all(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        _end(children.pop())


# -- in the child ----------------------------------------------------------------------------------


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], memory: int = MEMORY) -> None:
    """Answer requests until stdin ends, so no longer than the parent lives. ``LimitReached`` and
    ``MemoryError`` of ``answer`` become answers. After an answer with ``last`` the child is
    ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # where there is no such limit
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        request: dict[str, Any] = pickle.loads(base64.b64decode(line))
        # One operation may take all the time, without checking the clock.
        signal.alarm(max(1, math.ceil(request.setdefault("seconds", GRACE))))
        try:
            said = json.dumps(answer(request)).encode()
        except MemoryError:
            said = json.dumps({"limit": f"needs more than {memory >> 20} MiB of memory", "slow": False}).encode()
        except LimitReached as error:
            said = json.dumps({"limit": str(error), "slow": isinstance(error, TooSlow)}).encode()
        signal.alarm(0)
        sys.stdout.buffer.write(said + b"\n")
        sys.stdout.buffer.flush()
