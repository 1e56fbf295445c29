"""``quire serve`` in a process of its own, for what measures or strains a server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.errors import QuireError

COMMAND = (sys.executable, "-c", "from quire.cli import main; main()", "serve")
ADDRESS = re.compile(r"\bat (https?://\S+)")
STOP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProcess:
    """A server that takes requests."""

    url: str
    pid: int
    log: Path
    """What it says on stderr; gone with the server."""

    def memory(self) -> int | None:
        """Bytes of its resident memory; None where /proc does not tell."""
        return resident_bytes(self.pid)


@contextmanager
def server_process(
    model: str, options: Sequence[str] = (), *, command: Sequence[str] = COMMAND, seconds: float = 120.0
) -> Iterator[ServerProcess]:
    """Start ``quire serve MODEL`` on a free port of this machine, and stop it at the end of the block.

    ``options``: further flags, like ``("--dtype", "float32")``. ``QuireError`` with what it said if it does not take requests within
    ``seconds``, or does not stop when it is told to.
    """
    with tempfile.TemporaryDirectory(prefix="quire-serve-") as directory:
        log = Path(directory, "stderr.txt")
        with open(log, "wb") as stderr:
            process = subprocess.Popen(
                [*command, model, "--host", "127.0.0.1", "--port", "0", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert process.stdout is not None
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            # It says its address once it takes requests, and nothing else on stdout; the end of the pipe is its own end.
            said = ""
            found = None
            while found is None and (line := process.stdout.readline()):
                said += line
                found = ADDRESS.search(line)
            late.cancel()
            if found is None:
                process.kill()
                process.wait()
                told = (said + log.read_text(errors="replace")).strip()[-2000:]
                raise QuireError(f"the server did not begin within {seconds:g} s; it said: {told or 'nothing'}")
            yield ServerProcess(url=found[1], pid=process.pid, log=log)
            if process.poll() is not None:
                told = log.read_text(errors="replace").strip()[-2000:]
                raise QuireError(f"the server ended by itself with code {process.returncode}; it said: {told}")
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                raise QuireError(f"the server did not stop within {STOP_SECONDS:g} s") from None
        finally:
            late.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()


def resident_bytes(pid: int) -> int | None:
    """Bytes of resident memory of a process; None where /proc does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
