"""Serving: addresses, stopping with and without patience, signals, log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from quire import AsyncLLM, SamplingParams
from quire.base.errors import InvalidArgument
from quire.server.http import logs
from quire.server.http.listeners import bind, url_of
from quire.server.http.serving import exposure, load, report_load
from quire.server.http.settings import ServerSettings

from .conftest import Served, pages_free, serving, wait_for

BODY = b'{"prompt": "def"}'


@contextmanager
def half_a_request(url: str) -> Iterator[socket.socket]:
    """A request that is under way until the rest of ``BODY`` is sent."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        wire.sendall(head.encode() + BODY[:5])
        yield wire


def everything(wire: socket.socket) -> bytes:
    parts = []
    while part := wire.recv(4096):
        parts.append(part)
    return b"".join(parts)


def stop(served: Served) -> None:
    """As a signal does it: on the loop of the server."""
    loop = served.server.servers[0].get_loop()
    loop.call_soon_threadsafe(served.server.stop)


# -- stopping --------------------------------------------------------------------------------------


def test_what_is_under_way_finishes(llm: AsyncLLM) -> None:
    with serving(llm) as served, half_a_request(served.url) as wire:
        wait_for(lambda: served.context.gate.under_way == 1)
        stop(served)
        wait_for(lambda: served.context.gate.closing)
        found = served.client.post("/tokenize", json={"prompt": "x"})
        assert (found.status_code, found.json()["error"]["code"]) == (503, "shutting_down")
        assert served.client.get("/health").status_code == 503
        assert not served.server.should_exit
        wire.sendall(BODY[5:])
        answer = everything(wire)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"tokens":[' in answer
        wait_for(lambda: served.server.should_exit)


def test_an_idle_server_stops_at_once(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(drain_seconds=60)) as served:
        began = time.monotonic()
        stop(served)
        wait_for(lambda: served.server.should_exit)
        assert time.monotonic() - began < 10


def test_after_the_deadline_requests_are_cancelled(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(drain_seconds=0.2)) as served, half_a_request(served.url) as wire:
        wait_for(lambda: served.context.gate.under_way == 1)
        stop(served)
        answer = everything(wire)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in answer
        wait_for(lambda: served.server.should_exit)
        assert served.context.gate.under_way == 0


def test_told_twice_it_does_not_wait(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(drain_seconds=600)) as served, half_a_request(served.url) as wire:
        wait_for(lambda: served.context.gate.under_way == 1)
        stop(served)
        wait_for(lambda: served.context.gate.closing)
        time.sleep(0.2)
        assert served.context.gate.under_way == 1
        stop(served)
        assert everything(wire).startswith(b"HTTP/1.1 503 ")
        wait_for(lambda: served.server.should_exit)


def test_streams_are_cut_at_the_deadline(llm: AsyncLLM) -> None:
    body = {"model": "tiny-python", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with serving(llm, ServerSettings(drain_seconds=0.3)) as served:
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            stop(served)
            seen = []
            with pytest.raises(httpx.RemoteProtocolError):
                seen += lines
            assert "data: [DONE]" not in seen  # not an end that could be taken for one
        wait_for(lambda: served.server.should_exit)
    assert pages_free(llm)


SCRIPT = """
import sys
from quire import AsyncLLM
from quire.server.http.serving import serve
from quire.server.http.settings import ServerSettings
llm = AsyncLLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="16MiB")
serve(llm, ServerSettings(port=0, drain_seconds=600))
assert not llm._background.stepper._thread.is_alive()
assert not {"opentelemetry.sdk", "opentelemetry.exporter", "google.protobuf"} & set(sys.modules)
print("closed", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals(number: signal.Signals) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving tiny-python at http://127.0.0.1:")
        url = line.split(" at ")[1].split()[0]
        with half_a_request(url) as wire:
            host = {"X-Request-Id": "seen"}
            assert httpx.post(f"{url}/tokenize", json={"prompt": "x"}, headers=host, trust_env=False).status_code == 200
            process.send_signal(number)
            wait_for(lambda: httpx.get(f"{url}/health", trust_env=False).status_code == 503)
            if number == signal.SIGTERM:
                wire.sendall(BODY[5:])
                assert everything(wire).startswith(b"HTTP/1.1 200 ")
            else:
                process.send_signal(number)
                assert everything(wire).startswith(b"HTTP/1.1 503 ")
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output) == (0, "closed\n"), errors
    assert "Traceback" not in errors
    lines = [json.loads(line[line.index("{") :]) for line in errors.splitlines() if "{" in line]
    assert {"event": "stopping", "under_way": 1, "drain_seconds": 600} in lines
    assert any(found.get("request_id") == "seen" and found["status"] == 200 for found in lines)


# -- addresses -------------------------------------------------------------------------------------


def test_addresses_that_cannot_be_had() -> None:
    (taken,) = bind("127.0.0.1", 0)
    try:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(InvalidArgument, match=f"port {port}"):
            bind("127.0.0.1", port)
    finally:
        taken.close()
    for host in ("192.0.2.1", "no such host", "x" * 300):
        with pytest.raises(InvalidArgument, match="cannot listen"):
            bind(host, 0)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_a_server_for_other_machines_without_a_key_is_warned_about(host: str, warned: bool) -> None:
    listeners = bind(host, 0)
    try:
        assert ("--api-key" in exposure(listeners)) is warned
    finally:
        for one in listeners:
            one.close()


def test_all_addresses_of_a_name_have_one_port() -> None:
    sockets = bind("localhost", 0)
    try:
        assert len({listener.getsockname()[1] for listener in sockets}) == 1
    finally:
        for listener in sockets:
            listener.close()


def test_answers_do_not_wait_for_acknowledgements(served: Served) -> None:
    assert served.client.get("/health").status_code == 200
    connections = list(served.server.server_state.connections)
    assert connections
    for connection in connections:
        wire = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# -- log lines -------------------------------------------------------------------------------------


def test_the_load_between_two_looks() -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    counters = ("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total")
    before = {f"quire:{name}": 0.0 for name in names} | {f"quire:{name}": 100.0 for name in counters}
    assert load(before, before, 10.0) is None
    after = before | {
        "quire:prompt_tokens_total": 300.0,
        "quire:prompt_tokens_cached_total": 150.0,
        "quire:generation_tokens_total": 600.0,
        "quire:num_requests_running": 3.0,
        "quire:num_requests_waiting": 2.0,
        "quire:kv_cache_usage_perc": 0.5,
    }
    assert load(before, after, 10.0) == {
        "running": 3,
        "waiting": 2,
        "prompt_tokens_per_second": 20.0,
        "generated_tokens_per_second": 50.0,
        "kv_cache_usage": 0.5,
        "cached_share": 0.25,
    }
    waiting = before | {"quire:num_requests_waiting": 1.0}
    assert load(before, waiting, 10.0) is not None


def test_load_lines(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.server")

    def lines() -> list[dict[str, Any]]:
        """What was logged, apart from requests: a server of another test may still be asked how it
        is.
        """
        found = [json.loads(record.getMessage()) for record in caplog.records]
        return [one for one in found if one["event"] != "request"]

    async def run() -> None:
        task = asyncio.create_task(report_load(llm, seconds=0.05))
        await asyncio.sleep(0.2)
        assert not lines()  # nothing happens, nothing is logged
        await llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        async with asyncio.timeout(60):
            while not any(one["generated_tokens_per_second"] for one in lines()):
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    assert {one["event"] for one in lines()} == {"load"}


def test_loggers_are_left_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    before = (logs.logger.level, logs.logger.propagate, list(logs.logger.handlers))
    with logs.to_stderr():
        logs.event("seen", text="a\nb")
    assert (logs.logger.level, logs.logger.propagate, list(logs.logger.handlers)) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line[line.index("{") :]) == {"event": "seen", "text": "a\nb"}
