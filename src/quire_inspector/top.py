"""``quire top``: the activity of a running server, in the terminal."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.base.config import check_real
from quire.base.errors import QuireError
from quire.cli.client import HttpFailure
from quire.cli.remote_chat import Link
from quire.engine.page_use import OWNERS
from quire_inspector.trace import document_of, model_of

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.text import Text

PATIENCE = 10.0
"""Seconds to wait for an answer."""
HISTORY = 60
"""Most rates in the sparkline."""
BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"pinned": "magenta", "held": "green", "evictable": "yellow", "free": "bright_black"}
PHASE_COLOURS = {
    "waiting": "yellow",
    "loading": "cyan",
    "prefill": "blue",
    "decode": "green",
    "preempted": "red",
    "finished": "bright_black",
}
LATENCIES = {
    "first_token": "first token",
    "inter_token": "between tokens",
    "request": "whole request",
    "queue": "in the queue",
}
LABEL = re.compile(r'^(quire:\w+)\{(\w+)="(\w+)"\}$')
FATAL = (401, 403, 404, 405)
"""Statuses of answers that a retry will not change."""


class Watch:
    """The latest facts about a server. ``look`` requests them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.history: deque[float] = deque(maxlen=HISTORY)
        """Tokens generated per second, between successive requests."""
        self.problem: str | None = None
        """Reason why there was no answer, in a sentence; None: there was one."""
        self._model: str | None = None
        self._before: Mapping[str, Any] | None = None
        self._facts: dict[str, Any] | None = None
        self._answered = 0.0

    def look(self) -> dict[str, Any]:
        """Request and return the facts. Raise the errors of the server or the connection."""
        before = self._before
        since = 0 if before is None else before["step"]
        if self._model is None:
            self._model = model_of(self.link)
        document = document_of(self.link, since)
        if before is not None and before["epoch"] != document["epoch"]:
            self.history.clear()  # another process
            self._model, before = model_of(self.link), None
            document = document_of(self.link, 0)
        samples = self.link.samples("/metrics")
        if before is not None and document["now"] > before["now"]:
            self.history.append(sum(document["steps"]["generated"]) / (document["now"] - before["now"]))
        self._before, self._answered, self.problem = document, time.monotonic(), None
        self._facts = facts(self._model, document, samples) | {"history": [round(rate, 2) for rate in self.history]}
        return self._facts

    def try_to_look(self) -> dict[str, Any] | None:
        """Request the facts; return the last known ones of a server that does not answer."""
        try:
            return self.look()
        except HttpFailure as error:
            if error.status in FATAL:
                raise
            self.problem = str(error)
        except QuireError as error:
            self.problem = str(error)
        return self._facts

    @property
    def silence(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._answered


def facts(model: str, document: Mapping[str, Any], samples: Mapping[str, float]) -> dict[str, Any]:
    """Return the shown facts as one JSON object."""
    now = document["now"]
    live = [one for one in document["requests"] if one["finished"] is None]
    labelled: dict[str, dict[str, float]] = {}
    for name, value in samples.items():
        if found := LABEL.match(name):
            labelled.setdefault(found[1].removeprefix("quire:"), {})[found[3]] = value
    tiers = {
        tier: {
            "reused_tokens": int(count),
            "read_bytes": int(labelled.get("store_read_bytes_total", {}).get(tier, 0)),
            "written_bytes": int(labelled.get("store_written_bytes_total", {}).get(tier, 0)),
        }
        for tier, count in labelled.get("prompt_tokens_reused_total", {}).items()
        if count or tier == "pool" or tier in labelled.get("store_read_bytes_total", {})
    }
    prompt, cached = samples.get("quire:prompt_tokens_total", 0.0), samples.get("quire:prompt_tokens_cached_total", 0.0)
    return {
        "model": model,
        "running": document["running"],
        "waiting": document["waiting"],
        "sessions": int(samples.get("quire:sessions_open", 0)),
        "preemptions": document["preemptions"],
        "rates": document["rates"],
        "latencies": document["latencies"],
        "pages": {owner: int(samples.get(f"quire:pages_{owner}", 0)) for owner in OWNERS},
        "reused_share": round(cached / prompt, 4) if prompt else None,
        "tiers": tiers,
        "drafts": document["drafts"],
        "requests": [_request(one, now) for one in live],
    }


def _request(lane: Mapping[str, Any], now: float) -> dict[str, Any]:
    shown = {
        "number": lane["number"],
        "kind": lane["kind"],
        "phase": lane["phase"],
        "age": round(now - lane["arrival"], 3),
    }
    if not lane["own"]:
        return shown | {"id": None}
    first, count = lane["first_token"], lane["output_tokens"]
    rate = (count - 1) / (now - first) if first is not None and count > 1 and now > first else None
    kept = ("id", "adapter", "prompt_tokens", "cached_tokens", "by_tier", "computed", "output_tokens", "preemptions")
    return shown | {name: lane[name] for name in kept} | {"tokens_per_second": rate and round(rate, 2)}


# -- drawing ---------------------------------------------------------------------------------------


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each value, scaled to the largest; empty for no values."""
    most = max(values, default=0.0)
    return "".join(BARS[round(value / most * (len(BARS) - 1))] if most else BARS[0] for value in values)


def clean(text: object, most: int = 40) -> str:
    """Return a text without control characters, at most ``most`` characters long."""
    found = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))
    return found if len(found) <= most else found[: most - 1] + "…"


def page_bar(pages: Mapping[str, int], width: int) -> Text:
    """Return a bar of ``width`` characters, divided among the owners of pages. An owner of any page
    has at least one character."""
    from rich.text import Text

    total = sum(pages.values())
    bar = Text()
    if not total:
        return bar
    order = [owner for owner in COLOURS if pages.get(owner)]
    sizes = {owner: max(1, int(pages[owner] * width / total)) for owner in order}
    widest = max(sizes, key=lambda owner: sizes[owner])
    sizes[widest] = max(1, sizes[widest] + width - sum(sizes.values()))
    for owner in order:
        bar.append(("░" if owner == "free" else "█") * sizes[owner], style=COLOURS[owner])
    return bar


def screen(
    found: Mapping[str, Any] | None,
    url: str,
    *,
    width: int,
    height: int,
    problem: str | None = None,
    silence: float = 0.0,
) -> Group:
    """Return the screen of a server in ``width`` columns and ``height`` lines. With ``height`` 0
    all requests are listed."""
    from rich.console import Group
    from rich.text import Text

    title = Text(clean(found["model"]) if found else "quire top", style="bold")
    title.append(f"  {clean(url, 60)}", style="bright_black")
    parts: list[RenderableType] = [title]
    if problem is not None:
        ago = f" (the numbers are {silence:.0f} s old)" if found else ""
        parts.append(Text(f"no answer{ago}: {clean(problem, 300)}", style="red"))
    if found is None:
        return Group(*parts)
    rates, history = found["rates"], found["history"][-max(8, width - 60) :]
    line = Text(f"{rates['generated_tokens_per_second']:,.1f} tokens/s ", style="bold green")
    line.append(sparkline(history), style="green")
    line.append(f"  prompt {rates['prompt_tokens_per_second']:,.1f} tokens/s, busy {rates['busy']:.0%}")
    parts.append(line)
    reused = "" if found["reused_share"] is None else f", {found['reused_share']:.0%} of prompt tokens reused"
    parts.append(
        Text(
            f"{found['running']} running, {found['waiting']} waiting, {found['sessions']} sessions, "
            f"{found['preemptions']} preemptions{reused}"
        )
    )
    parts.append(page_bar(found["pages"], max(10, min(width, 100))))
    legend = Text("pages: ")
    for owner in COLOURS:
        legend.append(f"{found['pages'][owner]:,} {owner}  ", style=COLOURS[owner])
    parts += [legend, *_numbers(found)]
    # The rest of the screen: a header, the number of hidden requests, and two lines that may wrap.
    used = len(parts) + len(LATENCIES) + 4
    requests = found["requests"]
    shown = requests[: max(1, height - used)] if height else requests
    parts.append(_requests(shown))
    if len(shown) < len(requests):
        parts.append(Text(f"and {len(requests) - len(shown)} more", style="bright_black"))
    return Group(*parts)


def _numbers(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("latency", "p50", "p95", "p99", "of"):
        table.add_column(name, justify="left" if name == "latency" else "right", header_style="bright_black")
    for name, title in LATENCIES.items():
        one = found["latencies"][name]
        table.add_row(title, *(_seconds(one[point]) for point in ("p50", "p95", "p99")), f"{one['count']:,}")
    yield table
    tiers = [
        f"{tier} {one['reused_tokens']:,} tokens"
        + (f" ({_bytes(one['read_bytes'])} read, {_bytes(one['written_bytes'])} written)" if tier != "pool" else "")
        for tier, one in found["tiers"].items()
    ]
    line = Text("reused from: " + (", ".join(tiers) or "nothing yet"))
    if found["drafts"]["rate"] is not None:
        line.append(f"; {found['drafts']['rate']:.0%} of {found['drafts']['drafted']:,} drafted tokens accepted")
    yield line


def _requests(requests: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    if not requests:
        return Text("no requests", style="bright_black")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("request", "kind", "phase", "age", "prompt", "reused", "answer", "tokens/s"):
        left = name in ("request", "kind", "phase", "reused")
        table.add_column(name, justify="left" if left else "right", header_style="bright_black", no_wrap=True)
    for one in requests:
        phase = Text(one["phase"], style=PHASE_COLOURS.get(one["phase"], ""))
        if one["id"] is None:
            table.add_row(
                Text("of another key", style="bright_black"), one["kind"], phase, _seconds(one["age"]), "", "", "", ""
            )
            continue
        prompt = f"{one['prompt_tokens']:,}"
        if one["phase"] == "prefill":
            prompt = f"{min(one['computed'], one['prompt_tokens']):,}/{prompt}"
        tiers = ", ".join(f"{clean(tier)} {count:,}" for tier, count in one["by_tier"].items())
        rate = one["tokens_per_second"]
        table.add_row(
            Text(clean(one["id"])),
            one["kind"],
            phase,
            _seconds(one["age"]),
            prompt,
            Text(tiers or "-"),
            f"{one['output_tokens']:,}",
            "-" if rate is None else f"{rate:,.1f}",
        )
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1e3:,.1f} ms"
    return f"{value:,.1f} s" if value < 600 else f"{value / 60:,.0f} min"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


# -- running ---------------------------------------------------------------------------------------


def run_top(
    url: str, *, api_key: str | None = None, interval: float = 1.0, once: bool = False, as_json: bool = False
) -> None:
    """Show a server until q or Ctrl-C. ``once``, ``as_json`` (one JSON object), or an output that
    is no terminal: show it once. Raise ``QuireError`` for a server that refuses, and when showing
    once also for a server that cannot be reached."""
    from rich.console import Console

    check_real("interval", interval, above=0, up_to=3600)
    watch = Watch(Link(url, api_key=api_key, timeout=PATIENCE))
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = console.width or 80  # COLUMNS=0: the width is not known
    if as_json:
        print(json.dumps(watch.look()))
        return
    if once or not console.is_terminal:
        console.print(screen(watch.look(), url, width=console.width, height=0))
        return
    try:
        with keys() as pressed:
            _show(watch, console, url, interval, pressed)
    except KeyboardInterrupt:
        return  # the usual way to end it


def _show(watch: Watch, console: Console, url: str, interval: float, pressed: Callable[[float], str]) -> None:
    from rich.live import Live

    def drawn() -> Group:
        found = watch.try_to_look()
        size = console.size
        return screen(
            found, url, width=size.width, height=size.height - 1, problem=watch.problem, silence=watch.silence
        )

    with Live(drawn(), console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while "q" not in pressed(interval).lower():
            live.update(drawn(), refresh=True)


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for some seconds, or for a key, and returns the pressed keys.
    Without a terminal for input it only waits."""
    import termios
    import tty

    def waited(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    if not sys.stdin.isatty():
        yield waited
        return

    def typed(seconds: float) -> str:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([number], [], [], left)[0]:
                if not (found := os.read(number, 64)):
                    return "q"  # the terminal is gone
                if b"q" in found.lower():
                    return "q"
        return ""

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield typed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
