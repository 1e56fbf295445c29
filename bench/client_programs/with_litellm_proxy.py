"""LiteLLM's proxy between OpenAI's client and the server: chats and responses."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import with_openai
from abilities import KEY, Abilities, Task, run

ABILITIES = ("text", "stream", "tools", "structured", "cancel", "retry", "overflow")
START_SECONDS = 180.0


def started(task: Task, row: str) -> str:
    """Start the proxy, which ends with this process, and return its URL. Its models have the names
    of abilities, so that the server can tell them apart."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    models = [
        {
            "model_name": ability,
            "litellm_params": {
                "model": f"openai/{task.model}",
                "api_base": f"{task.url}/at/{row}/{ability}/v1",
                "api_key": KEY,
                "max_retries": 2 if ability == "retry" else 0,
            },
        }
        for ability in ABILITIES
    ]
    folder = Path(tempfile.mkdtemp(dir="."))
    # JSON is YAML.
    (folder / "config.yaml").write_text(
        json.dumps({"model_list": models, "general_settings": {"dangerously_permit_weak_or_unset_master_key": True}})
    )
    command = [str(Path(sys.executable).parent / "litellm"), "--config", str(folder / "config.yaml")]
    with open(folder / "log.txt", "wb") as log:
        proxy = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log)
    atexit.register(proxy.kill)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and proxy.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=2):
                return f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the proxy did not start: {(folder / 'log.txt').read_text(errors='replace')[-300:]}")


def over(kind: Callable[[Task], Abilities], row: str) -> Callable[[Task], Abilities]:
    def abilities(task: Task) -> Abilities:
        url = started(task, row)

        def one(ability: str) -> Callable[[str], Any]:
            name = "text" if ability == "retry" else ability
            return lambda _: kind(replace(task, model=ability))[name](url)

        def overflow(_: str) -> bool:
            """The proxy puts the name of the library's exception into its own."""
            try:
                with_openai.client(url).chat.completions.create(
                    model="overflow", messages=[{"role": "user", "content": task.overflow}]
                )
            except openai.BadRequestError as error:
                return "ContextWindowExceededError" in error.message
            return False

        return {**{ability: one(ability) for ability in ABILITIES}, "overflow": overflow}

    return abilities


if __name__ == "__main__":
    kinds = {"litellm-proxy-chat": with_openai.chat, "litellm-proxy-responses": with_openai.responses}
    run("litellm", {row: over(kind, row) for row, kind in kinds.items()})
