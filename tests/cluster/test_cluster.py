"""Two servers of the bundled model behind a front, one of which is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.base.errors import FailedPrecondition
from quire.cli.main import app
from quire.cluster.front import Front
from quire.cluster.local import LocalReplicas
from quire.cluster.replica_process import ReplicaProcess
from quire.store.adoption import free_directory

PROMPT = "class Stack:\n"
GREEDY = {"temperature": 0, "max_tokens": 8}


def test_sessions_survive_their_server(tmp_path: Path) -> None:
    """Prompts go where their beginnings are, sessions of two servers run in one batch, and a killed
    server's sessions continue, those without a commit too."""
    with LLM("tiny-python", device="cpu", kv_cache_memory="16MiB") as llm:
        session = llm.session(PROMPT)
        expected = [session.generate(SamplingParams(temperature=0, max_tokens=8)).outputs[0].text for _ in range(2)]

    async def story() -> None:
        replicas = LocalReplicas(["tiny-python", "--kv-cache-memory", "16MiB", "--device", "cpu"], tmp_path, 2)
        await replicas.start()
        try:
            front = Front(replicas)
            transport = httpx.ASGITransport(app=front)
            async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=60) as client:
                long = "def area(a, b):\n    return a * b\n" * 30
                for more in ("", "#", "# 2"):
                    body = {"prompt": long + more, **GREEDY}
                    reused = (await client.post("/v1/completions", json=body)).json()["quire"]["reuse"]["cached"]
                assert reused > 400
                made = [(await client.post("/v1/sessions", json={"prompt": PROMPT})).json()["id"] for _ in range(2)]
                assert len({front.router.sessions[name] for name in made}) == 2
                done = (await client.post("/v1/sessions/generate", json={"ids": made, **GREEDY})).json()
                assert [one["text"] for one in done["choices"]] == [expected[0]] * 2
                assert front.counts.moved == 1
                os.killpg(replicas.running[front.router.sessions[made[0]]].pid, signal.SIGKILL)
                for name in made:
                    answer = await client.post(f"/v1/sessions/{name}/generate", json=GREEDY)
                    for _ in range(3):  # the call itself may have met the end
                        if answer.status_code == 503:
                            answer = await client.post(f"/v1/sessions/{name}/generate", json=GREEDY)
                    assert answer.json()["choices"][0]["text"] == expected[1], answer.text
        finally:
            await replicas.stop()

    asyncio.run(story())


def test_a_replica_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts: list[bool] = []

    class Process:
        def __init__(self, *given: object) -> None:
            self.is_alive = False

        async def start(self) -> None:
            starts.append(len(starts) not in (1, 2))
            if not starts[-1]:
                raise FailedPrecondition("it ended")
            self.is_alive = True

        async def stop(self, seconds: float = 0.0) -> None:
            self.is_alive = False

    monkeypatch.setattr("quire.cluster.local.ReplicaProcess", Process)
    monkeypatch.setattr("quire.cluster.local.LOOK_SECONDS", 0.001)

    async def story() -> None:
        replicas = LocalReplicas([], tmp_path, 1)
        await replicas.start()
        await next(iter(replicas.running.values())).stop()
        async with asyncio.timeout(5):
            while not replicas.names():
                await asyncio.sleep(0.001)
        assert (starts, list(replicas.running)) == ([True, False, False, True], ["replica-1"])
        await replicas.stop()

    asyncio.run(story())


def test_a_line_of_any_length_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the server would wait for ever to write the next one."""
    child = "import time; print('x' * 200000); print('Serving a at http://127.0.0.1:1 ('); time.sleep(60)"
    monkeypatch.setattr("quire.cluster.replica_process.CHILD", child.replace("200000); ", "200000, flush=True); "))

    async def story() -> None:
        process = ReplicaProcess([], tmp_path, {"PYTHONUNBUFFERED": "1"})
        async with asyncio.timeout(30):
            await process.start()
            await process.stop()

    asyncio.run(story())


def test_a_directory_is_free_again_after_a_start_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere")

    async def story() -> None:
        process = ReplicaProcess([], tmp_path)
        with pytest.raises(OSError, match="nowhere"):
            await process.start()
        await process.stop()
        free_directory(tmp_path, 1)[1].close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--local"], "needs --state-dir"),
        (["--local", "--state-dir", "x", "--max-replicas", "3"], "--local has neither"),
        (["--local", "--state-dir", "x", "--replicas", "0"], "replicas must be"),
        (["--local", "--state-dir", "x", "--adopt-from", "y"], "--adopt-from is the cluster's own"),
        (["--state-dir", "x", "--replicas", "3", "--max-replicas", "2"], "max_replicas must be"),
    ],
)
def test_refusals(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["cluster", "tiny-python", *arguments])
    assert done.exit_code != 0
    assert says in str(done.exception) + done.output


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["cluster", "tiny-python", "--state-dir", str(tmp_path)])
    assert "needs Ray Serve" in str(done.exception) + done.output
