"""Servers in processes of their own that may be killed, and start quickly: the process that forks
them has imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import torch

from quire.async_llm import AsyncLLM
from quire.server.http.serving import serve
from quire.server.http.settings import ServerSettings

START_SECONDS = 120.0


def run(said: Path, model: str, options: dict[str, Any], given: dict[str, Any]) -> None:
    """Serve; what the server prints goes to a file. No file may grow beyond ``largest_file``."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    if (largest := given.pop("largest_file", None)) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    serve(AsyncLLM(model, **options), ServerSettings(**{"port": 0, **given}))


@dataclass
class Killable:
    """A server that runs, or did."""

    process: BaseProcess
    client: httpx.Client
    url: str

    def kill(self) -> None:
        """As ``kill -9``."""
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(20)

    def terminate(self) -> int | None:
        """SIGTERM; the exit code."""
        os.kill(self.process.pid or 0, signal.SIGTERM)
        self.process.join(30)
        return self.process.exitcode


@contextmanager
def killable(
    model: Path, state_dir: Path, *, headers: dict[str, str] | None = None, options: dict[str, Any], **settings: Any
) -> Iterator[Killable]:
    """A server over a model. At the end it is killed, if it still runs."""
    context = multiprocessing.get_context("forkserver")
    # Not this module: the server that forks has no path to the tests.
    context.set_forkserver_preload(["quire.server.http.serving", "quire.build"])
    state_dir.parent.mkdir(parents=True, exist_ok=True)
    said = state_dir.parent / f"said-{time.monotonic_ns()}"
    process = context.Process(
        target=run, args=(said, str(model), {**options, "state_dir": str(state_dir)}, settings), daemon=True
    )
    process.start()
    try:
        deadline, url = time.monotonic() + START_SECONDS, ""
        while not url:
            assert time.monotonic() < deadline, "the server does not start"
            assert process.is_alive(), said.read_text()
            text = said.read_text() if said.exists() else ""
            url = next((word for line in text.splitlines() for word in line.split() if word.startswith("http:")), "")
            time.sleep(0.002)
        with httpx.Client(base_url=url, timeout=120, trust_env=False, headers=headers) as client:
            yield Killable(process, client, url)
    finally:
        if process.is_alive():
            process.kill()
        process.join(20)
