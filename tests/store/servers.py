"""A Redis server of a test's own, on a port of the loopback that it keeps."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time

import pytest
from tests.ports import lasting_port

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """A running server, empty and without files."""

    def __init__(self) -> None:
        if PROGRAM is None:
            pytest.skip("neither redis-server nor valkey-server is installed")
        self.port = lasting_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(500):
            try:
                if self.command("PING") == "+PONG":
                    return
            except OSError:
                time.sleep(0.02)
        raise AssertionError("the server does not start")

    def command(self, *words: str) -> str:
        """The first line of the answer to a command."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as line:
            line.sendall((" ".join(words) + "\r\n").encode())
            return line.recv(4096).decode().splitlines()[0]

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)
