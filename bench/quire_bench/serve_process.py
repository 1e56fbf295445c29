"""``quire serve`` in its own process, for measurements and stress tests."""

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

from quire.base.errors import QuireError

COMMAND = (sys.executable, "-c", "from quire.cli.main import main; main()", "serve")
ADDRESS = re.compile(r"\bat (https?://\S+)")
STOP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProcess:
    """A server that accepts requests."""

    url: str
    pid: int
    log: Path
    """Its output on stderr; deleted with the server."""

    def memory(self) -> int | None:
        """Return its resident bytes; None if /proc has none."""
        return resident_bytes(self.pid)


@contextmanager
def server_process(
    model: str, options: Sequence[str] = (), *, command: Sequence[str] = COMMAND, seconds: float = 120.0
) -> Iterator[ServerProcess]:
    """Start ``quire serve MODEL`` on a free local port; stop it at the end of the block.

    ``options`` are further flags, like ``("--dtype", "float32")``. Raise ``QuireError`` with the
    output if it accepts no requests within ``seconds``, or does not stop when asked.
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
            # Only the address goes to stdout, once the server accepts requests; then the pipe ends.
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
    """Return the resident bytes of a process; None if /proc has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
