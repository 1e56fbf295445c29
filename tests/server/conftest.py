"""Servers to test against: real ones, on a free port of this machine, over the bundled model in
float32.

``llm``, ``chat_llm`` and ``plain_llm`` (its first layers with another chat template, and with none)
live as long as a module. ``served`` and ``chat_served`` are servers over them with the default
settings, ``client`` and ``chat_client`` what talks to them; ``serving(llm, settings)`` makes
others.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tests.slow_steps import slow_steps

from quire import AsyncLLM
from quire.models.catalogue import bundled_models
from quire.server.http.app import create_app
from quire.server.http.context import Context
from quire.server.http.listeners import bind, url_of
from quire.server.http.serving import Server
from quire.server.http.settings import ServerSettings

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "64MiB", "max_num_seqs": 32}
TEMPLATE = (
    "{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


STATE_FILE = {"content-type": "application/octet-stream"}
"""The headers of an upload."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that runs in a thread of its own."""

    url: str
    """Without /v1."""
    context: Context
    client: httpx.Client
    server: Server

    @property
    def llm(self) -> AsyncLLM:
        return self.context.llm


@contextmanager
def serving(
    llm: AsyncLLM, settings: ServerSettings | None = None, *, send_buffer: int = 0, **headers: str
) -> Iterator[Served]:
    """A real server over ``llm``; ``headers`` go with every request of its ``client``.

    ``send_buffer``: bytes that the system may hold of an answer (0: as many as it likes).
    """
    slow_steps(llm, 0.001)
    app = create_app(llm, settings)
    sockets = bind("127.0.0.1", 0)
    for one in sockets if send_buffer else ():
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(app)
    thread = threading.Thread(target=server.run, args=(sockets,), name="test-server")
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started
        url = url_of(sockets[0])
        with httpx.Client(base_url=url, timeout=60, trust_env=False, headers=headers) as client:
            yield Served(url=url, context=app.state.context, client=client, server=server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Fails if ``condition`` does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def pages_free(llm: AsyncLLM) -> bool:
    """Whether nothing but the prefix cache holds pages."""
    with llm.engine.lock:
        llm.engine.reset_prefix_cache()
        return llm.engine.runner.state.empty()


def shallow_copy(folder: Path, *left_out: str) -> None:
    """Copy the bundled model, of its layers the first two, without the files whose names match
    ``left_out``.

    A step is more than twice as quick, and what a server does with tokens does not depend on what
    they are.
    """
    bundled = bundled_models()["tiny-python"]
    shutil.copytree(bundled, folder, ignore=shutil.ignore_patterns("model.safetensors", *left_out))
    tensors = load_file(bundled / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not re.search(r"layers\.[2-7]\.", name)}
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the bundled model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    shallow_copy(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the bundled model without its chat template."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    shallow_copy(folder, "*.jinja")
    return folder


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM("tiny-python", **OPTIONS)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def chat_llm(chat_folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(chat_folder, **OPTIONS)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def plain_llm(plain_folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(plain_folder, **OPTIONS)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def plain_client(plain_llm: AsyncLLM) -> Iterator[httpx.Client]:
    """What talks to a server of a model without a chat template."""
    with serving(plain_llm) as found:
        yield found.client


@pytest.fixture(scope="module")
def served(llm: AsyncLLM) -> Iterator[Served]:
    with serving(llm) as found:
        yield found


@pytest.fixture(scope="module")
def chat_served(chat_llm: AsyncLLM) -> Iterator[Served]:
    """The model is called "tiny-chat"."""
    with serving(chat_llm, ServerSettings(served_model_name="tiny-chat")) as found:
        yield found


@pytest.fixture
def client(served: Served) -> httpx.Client:
    return served.client


@pytest.fixture
def chat_client(chat_served: Served) -> httpx.Client:
    return chat_served.client
