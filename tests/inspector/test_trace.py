"""Traces: files that Perfetto can read, of this process and of a running server."""

from __future__ import annotations

import gc
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.test_cli import run
from tests.server.conftest import Served, llm, served, serving, wait_for

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import InvalidArgument, NotFound, QuireError, ResourceExhausted
from quire.engine.timeline import Timeline
from quire_inspector.routes import state_routes
from quire_inspector.trace import record_trace
from quire_inspector.views.trace_events import TraceRecorder

__all__ = ["llm", "served"]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    with LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="16MiB", max_num_batched_tokens=16) as made:
        yield made


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a file whose form is checked: order, names, nesting, numbers."""
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[dict[str, Any]] = document["traceEvents"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    names = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    processes = {one["pid"] for one in events if one["name"] == "process_name"}
    open_slices: dict[tuple[int, int], list[float]] = {}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= set(event)
        assert event["pid"] in processes
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) and value >= 0 for value in event["args"].values())
        elif event["ph"] == "X":
            assert (event["pid"], event["tid"]) in names
            ends = open_slices.setdefault((event["pid"], event["tid"]), [])
            while ends and ends[-1] <= event["ts"] + 2e-3:  # times have three digits
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 2e-3, event
            ends.append(end)
        else:
            assert event["ph"] == "M"
            assert isinstance(event["args"]["name"], str)
    return events


def slices(events: list[dict[str, Any]], start: str) -> list[dict[str, Any]]:
    return [one for one in events if one["ph"] == "X" and one["name"].startswith(start)]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(300, 3000, length).tolist()


def test_a_block_is_recorded(small: LLM, tmp_path: Path) -> None:
    small.generate([prompt(5)], GREEDY)
    before = small.engine.timeline.count
    with small.trace(tmp_path / "trace.json"):
        small.generate([prompt(40, 1), prompt(8, 2)], GREEDY)
    small.generate([prompt(5)], GREEDY)
    events = events_of(tmp_path / "trace.json")
    steps = slices(events, "step ")
    assert [one["name"] for one in steps] == [f"step {before + 1 + place}" for place in range(len(steps))]
    assert sum(one["args"]["generated"] for one in steps) == 12
    for name in ("schedule", "model", "sample"):
        assert len(slices(events, name)) == len(steps)
    lanes = slices(events, "request ")
    assert [one["args"]["prompt_tokens"] for one in lanes] == [40, 8]
    assert [one["args"]["finish_reason"] for one in lanes] == ["length", "length"]
    chunks = slices(events, "tokens ")
    assert [one["name"] for one in chunks if one["tid"] == lanes[0]["tid"]] == [
        "tokens 0 to 15",
        "tokens 16 to 31",
        "tokens 32 to 39",
    ]
    of_lane = [one["name"] for one in events if one["ph"] == "X" and one["tid"] == lanes[1]["tid"]]
    assert [name for name in of_lane if name in ("waiting", "prefill", "decode")] == ["waiting", "prefill", "decode"]
    counters = {one["name"] for one in events if one["ph"] == "C"}
    assert counters == {"pages", "batch", "requests", "tokens per second"}


def test_a_request_that_goes_on_is_there_until_the_end(small: LLM, tmp_path: Path) -> None:
    (request,) = small.engine.submit(np.array(prompt(6)), GREEDY)
    small.engine.step()
    with small.trace(tmp_path / "trace.json"):
        small.engine.step()
    small.engine.end([request])
    (lane,) = slices(events_of(tmp_path / "trace.json"), "request ")
    assert (lane["args"]["phase"], lane["args"]["output_tokens"]) == ("decode", 2)


def test_what_an_exception_ends_is_kept(small: LLM, tmp_path: Path) -> None:
    def fail() -> None:
        with small.trace(str(tmp_path / "trace.json")):
            small.generate([prompt(5)], GREEDY)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert slices(events_of(tmp_path / "trace.json"), "step ")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_bad_paths_are_refused_before_anything_runs(small: LLM, tmp_path: Path) -> None:
    def enter(path: Any) -> None:
        with small.trace(path):
            pytest.fail("the block must not run")

    with pytest.raises(NotFound, match="there is no directory"):
        enter(tmp_path / "missing" / "trace.json")
    with pytest.raises(InvalidArgument, match="a directory"):
        enter(tmp_path)
    with pytest.raises(InvalidArgument) as refused:
        small.trace(7)  # type: ignore[arg-type]
    assert refused.value.field == "path"


@pytest.fixture
def fill_disk() -> Iterator[Callable[[], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_abandoned_trace_on_a_full_disk_is_logged(
    small: LLM, tmp_path: Path, fill_disk: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    block = small.trace(tmp_path / "trace.json")
    block.__enter__()
    small.generate([prompt(5)], GREEDY)
    fill_disk()
    del block
    gc.collect()
    (line,) = [one.getMessage() for one in caplog.records if one.name == "quire.inspector"]
    assert str(tmp_path / "trace.json") in line
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(
    small: LLM, tmp_path: Path, fill_disk: Callable[[], None]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("the earlier one")

    def fill() -> None:
        with small.trace(path):
            small.generate([prompt(5)], GREEDY)
            fill_disk()

    with pytest.raises(ResourceExhausted) as full:
        fill()
    assert str(path) in str(full.value)
    assert "\n" not in str(full.value)
    assert path.read_text() == "the earlier one"
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def document(epoch: float, *steps: int, total: int = 10) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {"number": list(steps), "start": [0.1 * number for number in steps]}
    rows |= {name: [0.01] * len(steps) for name in ("schedule_seconds", "model_seconds")}
    rows["seconds"] = [0.05] * len(steps)
    names = ("tokens", "decodes", "generated", "pages_free", "running", "waiting", "preemptions")
    rows |= {name: [1] * len(steps) for name in names}
    last = max(steps, default=0)
    return {
        "epoch": epoch,
        "now": last * 0.1 + 0.1,
        "step": last,
        "steps": rows,
        "prefills": [],
        "requests": [],
        "pages": {"total": total, "free": 1},
    }


def test_a_server_that_was_started_again_has_tracks_of_its_own(tmp_path: Path) -> None:
    recorder = TraceRecorder("m")
    recorder.begin(document(100.0, 7))
    assert recorder.since == 7
    assert recorder.take(document(100.0, 8, 9))
    assert not recorder.take(document(200.0))
    assert recorder.since == 0
    assert recorder.take(document(200.0, 1))
    recorder.write(tmp_path / "trace.json")
    steps = slices(events_of(tmp_path / "trace.json"), "step ")
    assert [(one["name"], one["pid"]) for one in steps] == [("step 8", 1), ("step 9", 1), ("step 1", 3)]
    assert steps[2]["ts"] == pytest.approx(100.1e6, abs=1e-2)  # microseconds, three digits


# -- of a server -----------------------------------------------------------------------------------


def load(served: Served, stop: threading.Event) -> threading.Thread:
    def run() -> None:
        while not stop.is_set():
            served.client.post("/v1/completions", json={"prompt": "def f():", "max_tokens": 8, "ignore_eos": True})

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_server_is_recorded(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    thread = load(served, stop)
    try:
        record_trace(served.url, tmp_path / "trace.json", seconds=1.5)
    finally:
        stop.set()
        thread.join()
    events = events_of(tmp_path / "trace.json")
    assert slices(events, "step ")
    assert slices(events, "request ")
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["tiny-python: steps", "tiny-python: requests"]
    assert f"{len(slices(events, 'step '))} steps and" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What servers of this process are asked for, as it comes."""
    found: list[int] = []
    document = state_routes.timeline_document

    def counted(line: Timeline, since: int, owner: str | None) -> dict[str, Any]:
        found.append(since)
        return document(line, since, owner)

    monkeypatch.setattr(state_routes, "timeline_document", counted)
    return found


def test_ctrl_c_keeps_what_was_recorded(served: Served, tmp_path: Path, asked: list[int]) -> None:
    stop = threading.Event()
    thread = load(served, stop)
    command = [sys.executable, "-m", "quire", "trace", "--url", served.url, "--seconds", "60", "-o", "trace.json"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        wait_for(lambda: len(asked) > 4)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        stop.set()
        thread.join()
        process.kill()
    assert process.returncode == 0, told
    assert "interrupted; what was recorded is kept" in told
    assert slices(events_of(tmp_path / "trace.json"), "step ")


def test_a_server_that_goes_away_ends_the_recording(llm: AsyncLLM, tmp_path: Path, asked: list[int]) -> None:
    path = tmp_path / "trace.json"
    found: list[BaseException] = []

    def record(url: str) -> None:
        try:
            record_trace(url, path, seconds=600)
        except QuireError as error:
            found.append(error)

    with serving(llm) as gone:
        thread = threading.Thread(target=record, args=(gone.url,))
        thread.start()
        wait_for(lambda: len(asked) > 0)
        gone.client.post("/v1/completions", json={"prompt": "def f():", "max_tokens": 8, "ignore_eos": True})
        seen = len(asked)
        wait_for(lambda: len(asked) > seen + 2)
    thread.join(60)
    assert "127.0.0.1" in str(found[0])
    assert slices(events_of(path), "step ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--url", "ftp://x"], "something like http://localhost:8000 is accepted"),
        (["--seconds", "0"], "seconds"),
        (["--seconds", "nan"], "seconds"),
        (["-o", "missing/trace.json"], "there is no directory"),
        (["--url", "http://127.0.0.1:1"], "no server can be reached"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("trace", *arguments, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert told in said
    assert not list(tmp_path.iterdir())
