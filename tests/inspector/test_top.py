"""``quire top``: what it shows of a server, in a terminal and without one."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.server.conftest import Served, llm, served, serving, wait_for

from quire import AsyncLLM
from quire.base.errors import InvalidArgument
from quire.cli.remote_chat import Link
from quire.server.http.settings import ServerSettings
from quire_inspector import top
from quire_inspector.top import Watch, clean, facts, page_bar, run_top, screen, sparkline

__all__ = ["llm", "served"]

URL = "http://127.0.0.1:8000"


def text_of(found: dict[str, Any] | None, width: int = 100, height: int = 0, **state: Any) -> str:
    console = Console(width=width, height=60, color_system=None, force_terminal=False, file=io.StringIO())
    with console.capture() as shown:
        console.print(screen(found, URL, width=width, height=height, **state))
    return shown.get()


def complete(served: Served, count: int = 8) -> None:
    body = {"prompt": "def f():\n    return", "max_tokens": count, "ignore_eos": True}
    served.client.post("/v1/completions", json=body).raise_for_status()


@contextmanager
def under_way(served: Served) -> Iterator[None]:
    """A request that goes on until the block ends."""
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        body = {"prompt": "def f():\n    return", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            for _ in stream.iter_lines():
                begun.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        over.set()
        thread.join()


# -- facts -----------------------------------------------------------------------------------------


def test_facts_are_those_of_the_engine(served: Served) -> None:
    complete(served)
    complete(served)
    watch = Watch(Link(served.url))
    with under_way(served):
        found = watch.look()
    llm = served.llm.engine
    assert found["model"] == "tiny-python"
    assert (found["running"], found["waiting"]) == (1, 0)
    (request,) = found["requests"]
    assert (request["kind"], request["phase"]) == ("request", "decode")
    assert request["output_tokens"] > 0
    assert request["by_tier"] == {"pool": request["cached_tokens"]}
    assert sum(found["pages"].values()) == llm.runner.state.num_pages
    assert found["pages"]["held"] > 0
    assert found["tiers"]["pool"]["reused_tokens"] == llm.metrics.prompt_tokens_cached.value
    assert "memory" in found["tiers"]
    assert 0 < found["reused_share"] <= 1
    assert found["latencies"]["request"]["count"] >= 2


def test_rates_between_looks_make_the_line_of_bars(served: Served) -> None:
    watch = Watch(Link(served.url))
    assert watch.look()["history"] == []
    complete(served, 20)
    (rate,) = watch.look()["history"]
    assert rate > 0
    assert watch.look()["history"][1] == 0


def test_a_key_sees_what_is_its_own(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(api_key=("a", "b")), authorization="Bearer a") as two:
        name = two.client.post("/v1/sessions", json={"prompt": "x = "}).raise_for_status().json()["id"]
        over = threading.Event()

        def run() -> None:
            with two.client.stream(
                "POST", f"/v1/sessions/{name}/generate", json={"max_tokens": 900, "ignore_eos": True, "stream": True}
            ) as lines:
                for _ in lines.iter_lines():
                    if over.is_set():
                        return

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(lambda: llm.engine.num_running > 0)
            (mine,) = Watch(Link(two.url, api_key="a")).look()["requests"]
            seen = Watch(Link(two.url, api_key="b")).look()
        finally:
            over.set()
            thread.join()
        assert mine["kind"] == "turn"
        assert not seen["requests"]


# -- drawing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0, 0], "▁▁"), ([0, 1, 2], "▁▅█"), ([7], "█"), ([1e9, 1], "█▁")]
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


@pytest.mark.parametrize("width", [10, 37, 100])
@pytest.mark.parametrize(
    "pages",
    [
        {"free": 10, "evictable": 0, "held": 0, "pinned": 0},
        {"free": 9_999, "evictable": 1, "held": 1, "pinned": 1},
        {"free": 0, "evictable": 5, "held": 5, "pinned": 5},
    ],
)
def test_the_bar_of_pages_has_its_width_and_every_owner(pages: dict[str, int], width: int) -> None:
    bar = page_bar(pages, width)
    assert len(bar) == width
    assert len(bar.spans) == sum(count > 0 for count in pages.values())
    assert bar.plain.count("░") >= (pages["free"] > 0)


def test_no_pages_no_bar() -> None:
    assert page_bar({"free": 0, "held": 0, "evictable": 0, "pinned": 0}, 20).plain == ""


def look(served: Served) -> dict[str, Any]:
    return Watch(Link(served.url)).look()


def test_names_cannot_draw(served: Served) -> None:
    """Ids and model names are others' texts: no escapes of terminals, no markup."""
    with under_way(served):
        found = look(served)
    found["model"] = "\x1b[2J[red]model[/red]"
    found["requests"][0]["id"] = "\x1b]0;title\x07[blink]x\u202e"
    found["requests"][0]["by_tier"] = {"po\x1bol": 3}
    shown = text_of(found, 160)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", shown)
    assert "[red]model" in shown
    assert "[blink]x" in shown
    assert len(clean("x" * 1000)) == 40


def test_many_requests_fit_into_the_terminal(served: Served) -> None:
    with under_way(served):
        found = look(served)
    found["requests"] = [{**found["requests"][0], "id": f"r{number}"} for number in range(300)]
    found["history"] = [float(number) for number in range(60)]
    for width, height in ((80, 24), (60, 20), (200, 60)):
        lines = text_of(found, width, height).rstrip("\n").split("\n")
        assert len(lines) <= height, (width, height)
        assert all(len(line) <= width for line in lines)
        assert re.search(r"and \d+ more", lines[-1])
    assert "r299" in text_of(found, 100)


def test_a_server_that_is_away_is_told(served: Served) -> None:
    found = look(served)
    assert "no answer (the numbers are 12 s old): it is gone" in text_of(found, problem="it is gone", silence=12.3)
    assert "no answer: it is gone" in text_of(None, problem="it is gone", silence=0.0)


def test_numbers_of_a_server_that_has_done_nothing() -> None:
    none = {"count": 0, "p50": None, "p90": None, "p95": None, "p99": None}
    document = {
        "now": 1.0,
        "requests": [],
        "running": 0,
        "waiting": 0,
        "preemptions": 0,
        "rates": {"generated_tokens_per_second": 0.0, "prompt_tokens_per_second": 0.0, "busy": 0.0},
        "latencies": dict.fromkeys(("first_token", "inter_token", "request", "queue"), none),
        "drafts": {"drafted": 0, "accepted": 0, "rate": None},
    }
    shown = text_of({**facts("m", document, {}), "history": []})
    assert "nothing yet" in shown
    assert "no requests" in shown


# -- running ---------------------------------------------------------------------------------------


def test_without_a_terminal_it_is_shown_once(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run_top(served.url)
    shown = capsys.readouterr().out
    assert "tiny-python" in shown
    assert "\x1b" not in shown
    run_top(served.url, as_json=True)
    assert json.loads(capsys.readouterr().out)["model"] == "tiny-python"


def test_it_waits_for_a_server_that_comes_back(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as first:
        watch = Watch(Link(first.url))
        known = watch.try_to_look()
        assert watch.problem is None
    assert watch.try_to_look() == known
    assert watch.problem is not None
    assert "no server can be reached" in watch.problem
    assert watch.silence > 0
    with serving(llm) as second:
        watch.link = Link(second.url)
        assert watch.try_to_look() is not None
        assert watch.problem is None
        watch.history.append(3.0)
        monkeypatch.setattr(llm.engine.timeline, "epoch", llm.engine.timeline.epoch + 100)  # another process
        found = watch.try_to_look()
        assert found is not None
        assert found["history"] == []
        assert watch.problem is None


def test_a_wrong_key_is_no_reason_to_wait(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(api_key=("a",))) as found, pytest.raises(top.HttpFailure, match="401"):
        Watch(Link(found.url, api_key="b")).try_to_look()


@pytest.mark.parametrize("interval", [0, -1, float("nan"), 1e9])
def test_bad_intervals(interval: float) -> None:
    with pytest.raises(InvalidArgument) as refused:
        run_top(URL, interval=interval)
    assert refused.value.field == "interval"


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process_id, self.terminal = pty.fork()
        if not self.process_id:  # pragma: no cover - the child
            os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="30")
            os.execv(sys.executable, [sys.executable, "-m", "quire", "top", *arguments])
        self.shown = b""
        self.modes = 0
        """The terminal's local modes after the end."""

    def read(self, until: Callable[[bytes], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not until(self.shown):
            assert time.monotonic() < deadline, self.shown[-2000:]
            if select.select([self.terminal], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.terminal, 65536)
                except OSError:
                    assert until(self.shown), self.shown[-2000:]

    def end(self) -> int:
        """Read to the end and return the exit code."""
        with_end = time.monotonic() + 60
        while time.monotonic() < with_end:
            try:
                if select.select([self.terminal], [], [], 0.2)[0]:
                    self.shown += os.read(self.terminal, 65536)
            except OSError:
                break
        _, status = os.waitpid(self.process_id, 0)
        self.modes = termios.tcgetattr(self.terminal)[3]
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.turns(2)
@pytest.mark.parametrize("way", ["q", "ctrl-c"])
def test_in_a_terminal_it_goes_on_until_it_is_ended(served: Served, way: str) -> None:
    terminal = Terminal("--url", served.url, "--interval", "0.2")
    terminal.read(lambda shown: b"tiny-python" in shown and b"between tokens" in shown)
    complete(served)
    seen = len(terminal.shown)
    terminal.read(lambda shown: len(shown) > seen + 200)
    if way == "q":
        os.write(terminal.terminal, b"q")
    else:
        os.kill(terminal.process_id, signal.SIGINT)
    assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.shown  # the former screen is back
    assert b"\x1b[?25h" in terminal.shown  # and the cursor
    assert b"Traceback" not in terminal.shown
    assert terminal.modes & termios.ICANON  # it takes lines again
    assert terminal.modes & termios.ECHO


def test_in_a_terminal_it_survives_a_server_that_goes_away(llm: AsyncLLM) -> None:
    with serving(llm) as found:
        terminal = Terminal("--url", found.url, "--interval", "0.2")
        terminal.read(lambda shown: b"between tokens" in shown)
    terminal.read(lambda shown: b"no answer" in shown)
    os.write(terminal.terminal, b"q")
    assert terminal.end() == 0


def test_help_and_mistakes_are_told() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "quire", "top", *arguments], capture_output=True, text=True, timeout=120
        )

    assert "--once" in run("--help").stdout
    away = run("--url", "http://127.0.0.1:1", "--once")
    assert (away.returncode, away.stderr.count("\n")) == (2, 1)
    assert "no server can be reached" in away.stderr
