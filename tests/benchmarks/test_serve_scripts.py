"""The scripts that strain and measure a server: they find what they are to find, and a server that
is right passes them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench import fuzz, next_turn, soak
from tests.server.conftest import serving

from quire import AsyncLLM
from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire_bench.serve_process import ServerProcess, resident_bytes, server_process

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def oracle() -> Iterator[soak.Oracle]:
    patch = pytest.MonkeyPatch()
    patch.setattr(soak, "LONGEST_TEXT", 30)
    patch.setattr(soak, "SETTLE_SECONDS", 2.0)
    made = soak.Oracle("tiny-python")
    yield made
    made.llm.close()
    patch.undo()


@contextmanager
def narrow(oracle: soak.Oracle, tokens: int, **options: Any) -> Iterator[str]:
    """The address of a server whose pool holds so many tokens."""
    memory = tokens * oracle.llm.bytes_per_token
    llm = AsyncLLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory=memory, **options)
    try:
        with serving(llm) as served:
            yield served.url
    finally:
        asyncio.run(llm.close())


# -- the soak --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("caching", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_narrow_pool_loses_nothing(oracle: soak.Oracle, caching: bool) -> None:
    with narrow(oracle, 320, enable_prefix_caching=caching) as url:
        found = soak.run_soak(
            url, oracle, requests=50, clients=24, distinct=10, cancelled=0.3, prefix_caching=caching, seed=1
        )
    assert found["complaints"] == []
    assert (found["wrong"], found["failed"]) == (0, 0)
    assert found["finished"] + found["cancelled"] == 50
    assert found["cancelled"] >= 10
    assert found["checked"] >= 25
    assert found["rewinds"] > 0


class Lying(soak.Oracle):
    """Expects another text and other tokens."""

    def alone(self, prompt: Any, count: int) -> tuple[soak.Tokens, str]:
        tokens, text = super().alone(prompt, count)
        return (*tokens[:-1], tokens[-1] + 1), text + "!"


@pytest.mark.slow
def test_wrong_texts_and_tokens_are_found(oracle: soak.Oracle) -> None:
    lying = Lying.__new__(Lying)
    lying.llm = oracle.llm
    with narrow(oracle, 640) as url:
        found = soak.run_soak(
            url, lying, requests=20, clients=8, distinct=4, cancelled=0.0, prefix_caching=True, seed=2
        )
    # 20 requests, of which each session has three texts.
    assert found["wrong"] == found["checked"] > 20
    assert all("instead of" in text for text in found["complaints"])


@pytest.mark.slow
def test_what_stays_behind_is_found(oracle: soak.Oracle) -> None:
    with narrow(oracle, 640) as url:
        # Said to have no prefix cache, it is found to keep pages.
        found = soak.run_soak(url, oracle, requests=8, clients=4, distinct=4, cancelled=0.0, seed=3)
    assert [text.split(" is ")[0] for text in found["complaints"]] == ["quire:pages_evictable"]


def test_failures_are_told(oracle: soak.Oracle) -> None:
    with narrow(oracle, 32, enable_prefix_caching=False) as url:
        found = soak.run_soak(url, oracle, requests=30, clients=8, distinct=10, cancelled=0.0, seed=4)
    assert found["failed"] > 0
    assert found["failed"] + found["finished"] == 30
    assert found["wrong"] == 0
    assert any(text.startswith("failed ") and "400" in text for text in found["complaints"])


@pytest.mark.slow
def test_growing_memory_is_found(oracle: soak.Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(100, 1000, 20))
    monkeypatch.setattr(ServerProcess, "memory", lambda self: next(sizes) * 2**20)
    with narrow(oracle, 640, enable_prefix_caching=False) as url:
        found = soak.run_soak(
            url,
            oracle,
            requests=16,
            clients=4,
            distinct=4,
            process=ServerProcess(url=url, pid=0, log=Path()),
        )
    assert list(found["memory_mib"].values()) == [100.0 + 20 * index for index in range(8)]
    assert found["complaints"] == ["memory grew from 160 MiB at half of the requests to 240 MiB at the end"]


# -- the server's process --------------------------------------------------------------------------


def fake(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_process_is_started_told_its_flags_and_stopped() -> None:
    code = (
        "import signal, sys, time\n"
        "print('loading', flush=True)\n"
        "print('Serving', '|'.join(sys.argv[1:]), 'at http://127.0.0.1:123 (Ctrl+C stops)', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(0)\n"
    )
    with server_process("some-model", ("--dtype", "float32"), command=fake(code)) as found:
        assert found.url == "http://127.0.0.1:123"
        command = Path(f"/proc/{found.pid}/cmdline").read_bytes().split(b"\0")
        assert command[-8:-1] == [b"some-model", b"--host", b"127.0.0.1", b"--port", b"0", b"--dtype", b"float32"]
        assert found.memory() > 2**20
    assert resident_bytes(found.pid) is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('no such model', file=sys.stderr); sys.exit(2)", "did not begin .* no such model"),
        ("import time; print('loading', flush=True); time.sleep(60)", r"did not begin within 0\.5 s; it said: loading"),
    ],
)
def test_a_process_that_does_not_begin_is_told(code: str, message: str) -> None:
    seconds = 0.5 if "time" in code else 20.0
    with (
        pytest.raises(QuireError, match=message),
        server_process("m", command=fake(code), seconds=seconds),
    ):
        pytest.fail("it began")


def test_a_process_that_ends_by_itself_is_told() -> None:
    code = "import sys; print('at http://127.0.0.1:1', flush=True); print('out of luck', file=sys.stderr); sys.exit(3)"
    with (
        pytest.raises(QuireError, match="ended by itself with code 3; it said: out of luck"),
        server_process("m", command=fake(code)) as found,
    ):
        os.waitid(os.P_PID, found.pid, os.WEXITED | os.WNOWAIT)


# -- the path's cost -------------------------------------------------------------------------------


def test_the_path_is_measured_against_the_engine(
    oracle: soak.Oracle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    serve = importlib.import_module("serve")
    started: list[tuple[str, list[str]]] = []

    with narrow(oracle, 4096, enable_prefix_caching=False) as url:

        @contextmanager
        def process(model: str, flags: list[str]) -> Iterator[ServerProcess]:
            started.append((model, flags))
            yield ServerProcess(url=url, pid=0, log=Path())

        monkeypatch.setattr(serve, "server_process", process)
        options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "32MiB", "enable_prefix_caching": False}
        found = serve.run_path(
            "tiny-python",
            options,
            requests=4,
            clients=2,
            prompt_tokens=(4, 8),
            output_tokens=(2, 4),
            singles=3,
            rounds=2,
        )
        with pytest.raises(InvalidArgument, match="rounds 0"):
            serve.run_path("tiny-python", options, rounds=0)
    assert started == [
        (
            "tiny-python",
            ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "32MiB", "--no-enable-prefix-caching"],
        )
    ]
    assert [len(rates) for rates in found["output_tokens_per_second"].values()] == [2, 2]
    assert found["share"].median > 0
    out = capsys.readouterr().out
    assert "server / engine" in out
    assert json.loads(out.splitlines()[-1])["benchmark"] == "serve_path"


# -- the fuzzer ------------------------------------------------------------------------------------


def test_operations_are_counted() -> None:
    paths = {"/a": {"get": {}, "post": {}, "parameters": []}, "/b": {"delete": {}}}
    assert fuzz.operations({"paths": paths}) == 3


def test_without_schemathesis_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="`make test-clients` installs it"):
        fuzz.run_fuzz("http://127.0.0.1:9", cases=1, seconds=1.0, python="/no/such/python")
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--python", "/no/such/python"])
    with pytest.raises(Unsupported, match="`make test-clients` installs it"):
        fuzz.main()


@pytest.mark.parametrize(
    ("statuses", "code", "complaints"),
    [
        ([200, 400], 0, []),
        ([200, 500], 1, ["as described: schemathesis ended with code 1", "plausible: ", "2 answers of status 500"]),
        ([0, 200], 0, ["2 answers of status 0"]),
        ([200], 0, ["2 requests were made, fewer than 4"]),
    ],
)
def test_what_schemathesis_saw_is_judged(
    oracle: soak.Oracle,
    statuses: list[int],
    code: int,
    complaints: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = (
        "import json, sys\n"
        "path = sys.argv[sys.argv.index('--report-har-path') + 1]\n"
        f"entries = [{{'response': {{'status': status}}}} for status in {statuses}]\n"
        "json.dump({'log': {'entries': entries}}, open(path, 'w'))\n"
        "assert sys.argv[1] == 'run' and sys.argv[2].endswith('/openapi.json')\n"
        "assert 'include-path' in open('schemathesis.toml').read() or 'positive' in sys.argv\n"
        f"sys.exit({code})\n"
    )
    monkeypatch.setattr(fuzz, "PROGRAM", fake(stand_in)[1:])
    monkeypatch.setattr(fuzz, "require", lambda python: None)
    with narrow(oracle, 640) as url:
        found = fuzz.run_fuzz(url, cases=4, seconds=5.0)
    assert found["requests"] == 2 * len(statuses)
    assert found["operations"] > 10
    assert len(found["complaints"]) == len(complaints)
    for told, wanted in zip(found["complaints"], complaints, strict=True):
        assert wanted in told


# -- next turns ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_token_of_a_next_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt", "300", "--thought", "40", "--answer", "300", "--question", "5", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["next_turn.py", *sizes])
    next_turn.main()
    *table, line = capsys.readouterr().out.strip().splitlines()
    seconds = json.loads(line)["seconds"]
    assert list(seconds) == [next_turn.COLD, next_turn.HOT, next_turn.BROKEN_OFF, next_turn.PLAIN]
    assert min(seconds.values()) > 0
    assert all(any(row.startswith(way) for row in table) for way in seconds)
