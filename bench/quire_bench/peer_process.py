"""The parent's side of ``peer_worker.py``: processes that answer requests, and are stopped in
between."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 3600.0
"""Most seconds for an answer: the largest prompts on the slowest peer take many minutes."""


class PeerFailed(Exception):
    """A peer that refused a request, ended, or did not answer; ``peer`` is its name."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class PeerProcess:
    """One runtime that answers requests, and is stopped between them.

    Threads of OpenMP and of llama.cpp spin for a while after their work, and vLLM has an event
    loop. All of that would run beside the next peer, so the whole process group is stopped by a
    signal between the answer and the next request.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Unbuffered: the log is complete even if the process is killed.
                env={**environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a process group of its own, which receives the signals
            )
        self._received = b""

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._process.pid

    def ask(self, verb: str, *, seconds: float = SECONDS, **fields: Any) -> Any:
        """Return the peer's answer.

        Raises:
            PeerFailed: it refused, ended, or needed more than ``seconds``. It can be called
                again only after a refusal.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # the process has ended; the next line reports it
            self._process.stdin.write(json.dumps({"verb": verb, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        answer = json.loads(self._line(verb, time.monotonic() + seconds))
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerFailed(self.name, answer["error"])
        return answer["reply"]

    def _line(self, verb: str, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerFailed(self.name, f"no answer to '{verb}' in time")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise PeerFailed(self.name, f"ended during '{verb}'; it last said:\n{self._last_words()}")
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, number)

    def close(self) -> None:
        """End the process at once, without waiting for its work."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request that it never read
                pipe.close()
