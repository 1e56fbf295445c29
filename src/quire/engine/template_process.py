"""Chat templates of strangers, rendered in a child process with limits.

A template is a program. A sandbox keeps it from Python, but not from loops without end and texts
without bound: ``'a' * 10**9``, ``|center(10**9)``, constants that are folded when it is compiled.
So what Quire does not ship is compiled and rendered in a child, whose memory and time have limits.
The child stays for the next prompt; one that reached a limit is replaced.

As in ``grammar_trial`` the child is a ``subprocess`` that imports no torch, inherits no files but
its pipes, and ends with its parent. Requests are pickled, for the arguments of calls are more than
JSON (``chat_calls``). Answers, which a template had a part in, are lines of JSON.
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
from collections.abc import Callable, Mapping
from typing import IO, Any

from quire.engine import long_texts
from quire.errors import QuireError, ResourceExhausted

MEMORY = 1 << 30
"""Bytes of address space that a child may have."""

CHILDREN = 2
"""Children that render at a time; further prompts wait."""

GRACE = 10.0
"""Seconds beyond a template's time, to start a child, after which that is ended from outside."""

_START = (
    "import sys; sys.path[:] = sys.argv[1:]; from quire.engine.chat_rendering import render_here; "
    "from quire.engine.template_process import serve; serve(render_here)"
)


class TemplateFailed(Exception):
    """What a template raised in the child; the text says what and why."""


class TemplateLimit(Exception):
    """A template needs more time or memory than it may have; the text says which."""


class TextTooLong(Exception):
    """The text is longer than was asked for."""


_KINDS: dict[str, type[Exception]] = {one.__name__: one for one in (TemplateFailed, TemplateLimit, TextTooLong)}
_free: list[subprocess.Popen[bytes]] = []
_places = threading.Semaphore(CHILDREN)


def render(source: str, variables: Mapping[str, Any], most: int | None, seconds: float) -> str:
    """Return the text of a template with plain ``variables``. ``TextTooLong`` for more than
    ``most`` characters, ``TemplateLimit``, ``TemplateFailed``; ``Cancelled`` if the call was given
    up."""
    request = {"source": source, "variables": variables, "most": most, "seconds": seconds}
    line = base64.b64encode(pickle.dumps(request)) + b"\n"
    until = time.monotonic() + seconds + GRACE
    while not _places.acquire(timeout=long_texts.LOOK):
        long_texts.check()
        if time.monotonic() > until:
            raise ResourceExhausted("the processes that render chat templates are busy; try again later")
    try:
        return _asked(line, seconds)
    finally:
        _places.release()


def _asked(line: bytes, seconds: float) -> str:
    for last in (False, True):
        child = _free.pop() if _free else _started()
        try:
            answer = _exchange(child, line, time.monotonic() + seconds + GRACE)
        except BaseException:  # given up: what it is doing is of no use
            _end(child)
            raise
        if answer is not None:
            _free.append(child)
            found: dict[str, Any] = json.loads(answer)
            if "text" in found:
                return str(found["text"])
            raise _KINDS[found["kind"]](found["reason"])
        _end(child)
        if child.returncode == -signal.SIGALRM:
            raise TemplateLimit(f"takes longer than {seconds:g} seconds")
        if child.returncode in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            raise TemplateLimit(f"needs more than {MEMORY >> 20} MiB of memory")
        if last:
            break  # else it had ended before it was asked
    raise QuireError(f"the process that renders chat templates cannot be used: it ended with status {child.returncode}")


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
            raise TemplateLimit("takes too long")
    return bytes(answer)


def _started() -> subprocess.Popen[bytes]:
    # With our sys.path, so that it imports what we did, whatever lies in the working directory.
    child = subprocess.Popen(
        [sys.executable, "-c", _START, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    child.wait()


def _forked() -> None:
    """Let go of the children in a forked process: they are the other process's, and in use."""
    global _places
    _places = threading.Semaphore(CHILDREN)
    for child in _free:
        child.returncode = 0  # nothing that this process could wait for
    _free.clear()


os.register_at_fork(after_in_child=_forked)


# -- in the child ----------------------------------------------------------------------------------


def serve(
    render_here: Callable[[str, Mapping[str, Any], int | None, float], str], given: IO[bytes] | None = None
) -> None:
    """Answer requests until stdin ends, so no longer than the parent lives."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # where there is no such limit
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer if given is None else given:
        answer: dict[str, Any]
        request = pickle.loads(base64.b64decode(line))
        # One operation may take all the time, without a look at the clock.
        signal.alarm(max(1, math.ceil(request["seconds"])))
        try:
            answer = {"text": render_here(**request)}
        except MemoryError:
            answer = {"kind": "TemplateLimit", "reason": f"needs more than {MEMORY >> 20} MiB of memory"}
        except tuple(_KINDS.values()) as error:
            answer = {"kind": type(error).__name__, "reason": str(error)}
        try:
            said = json.dumps(answer).encode()
        except MemoryError:
            said = json.dumps({"kind": "TemplateLimit", "reason": "makes a text that is too long"}).encode()
        signal.alarm(0)
        sys.stdout.buffer.write(said + b"\n")
        sys.stdout.buffer.flush()
