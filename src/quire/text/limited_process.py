"""A child process that does what may take all time and memory: within limits of both.

Code of strangers, such as chat templates and regular expressions of tokenizers, runs here. The
child stays for the next request; a child that reached a limit is ended, and another one takes its
place. A request that takes longer than ``QUICK`` starts again where the slow ones take turns, so
quick ones never wait for it.

As in ``grammar_trial`` it is a ``subprocess`` that imports no torch, inherits no files but its
pipes, and ends with its parent. Requests are pickled, for the arguments of calls are more than JSON
(``chat_calls``). Answers, which a stranger had a part in, are lines of JSON.
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

from quire.base.errors import QuireError, ResourceExhausted
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


class TooSlow(LimitReached):
    """A request needs more time."""


class LimitedProcess:
    """Children that answer requests. Thread-safe."""

    def __init__(self, name: str, start: str, greeting: Mapping[str, Any] | None = None) -> None:
        """``start``: Python code that calls ``serve``. ``greeting``: the first request to each
        child. ``name`` is for errors, as in "the process that renders chat templates"."""
        self._name, self._start = name, f"import sys; sys.path[:] = sys.argv[1:]; {start}"
        self._greeting = None if greeting is None else _line(greeting)
        self.free: list[subprocess.Popen[bytes]] = []
        """Children without a request."""
        self._places, self._slow_place = threading.Semaphore(CHILDREN), threading.Semaphore(1)
        self._slow = threading.Semaphore(SLOW)
        weakref.finalize(self, _end_all, self.free)
        _ALL.add(self)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request. ``LimitReached``; ``Cancelled`` if the call was given up;
        ``QuireError`` without a child."""
        if seconds > QUICK:
            try:
                return self._in_turn(self._places, request, QUICK)
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
        status: int | None = None
        for _ in range(2):  # The first child may have ended before it was asked.
            child, lines = (self.free.pop(), [line]) if self.free else self._started(line)
            answer: bytes | None = None
            try:
                for one in lines:
                    answer = _exchange(child, one, time.monotonic() + seconds + GRACE)
            except BaseException:  # given up: what it is doing is of no use
                _end(child)
                raise
            if answer is not None:
                self.free.append(child)
                found: dict[str, Any] = json.loads(answer)
                if "limit" in found:
                    raise (TooSlow if found["slow"] else LimitReached)(found["limit"])
                return found
            _end(child)
            status = child.returncode
            if status == -signal.SIGALRM:
                raise TooSlow(f"takes longer than {seconds:g} seconds")
            if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
                raise LimitReached(f"needs more than {MEMORY >> 20} MiB of memory")
        raise QuireError(f"{self._name} cannot be used: it ended with status {status}")

    def _started(self, line: bytes) -> tuple[subprocess.Popen[bytes], list[bytes]]:
        """Return a new child, and the lines to send to it."""
        # With our sys.path, so that it imports what we did, whatever lies in the working directory.
        child = subprocess.Popen(
            [sys.executable, "-c", self._start, *sys.path],
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
        return child, [line] if self._greeting is None else [self._greeting, line]

    def forked(self) -> None:
        """Let go of the children in a forked process: they are the other process's, and in use."""
        self._places, self._slow_place = threading.Semaphore(CHILDREN), threading.Semaphore(1)
        self._slow = threading.Semaphore(SLOW)
        for child in self.free:
            child.returncode = 0  # nothing that this process could wait for
        self.free.clear()


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
    sent = memoryview(line)
    while not answer.endswith(b"\n"):
        long_texts.check()
        readable, writable, _ = select.select([back], [to] if sent else [], [], long_texts.LOOK)
        try:
            if writable:
                sent = sent[os.write(to, sent) :]
            if readable:
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
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    child.wait()


def _end_all(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        _end(children.pop())


# -- in the child ----------------------------------------------------------------------------------


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until stdin ends, so no longer than the parent lives. ``LimitReached`` and
    ``MemoryError`` of ``answer`` become answers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # where there is no such limit
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        request: dict[str, Any] = pickle.loads(base64.b64decode(line))
        # One operation may take all the time, without checking the clock.
        signal.alarm(max(1, math.ceil(request.setdefault("seconds", GRACE))))
        try:
            said = json.dumps(answer(request)).encode()
        except MemoryError:
            said = json.dumps({"limit": f"needs more than {MEMORY >> 20} MiB of memory", "slow": False}).encode()
        except LimitReached as error:
            said = json.dumps({"limit": str(error), "slow": isinstance(error, TooSlow)}).encode()
        signal.alarm(0)
        sys.stdout.buffer.write(said + b"\n")
        sys.stdout.buffer.flush()
