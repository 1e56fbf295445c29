"""``quire top`` and ``quire trace``: a running server, watched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import KeyOption

HERE = "http://127.0.0.1:8000"
ServerOption = Annotated[str, typer.Option("--url", help="The server's address.")]


def top(
    url: ServerOption = HERE,
    api_key: KeyOption = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end.")] = False,
) -> None:
    """Show a running server: tokens per second, requests, latencies, pages, tiers; q ends it.

    Without a terminal it is shown once. A server that goes away is waited for.
    """
    from quire_inspector.top import run_top

    run_top(url, api_key=api_key, interval=interval, once=once, as_json=as_json)


def trace(
    url: ServerOption = HERE,
    api_key: KeyOption = None,
    seconds: Annotated[float, typer.Option(help="How long to record. Ctrl-C ends it earlier.")] = 10.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file, which is replaced.")] = Path("trace.json"),
) -> None:
    """Record the steps and requests of a running server into a file for Perfetto.

    ui.perfetto.dev and chrome://tracing show such files. There are no texts in them.
    """
    from quire_inspector.trace import record_trace

    record_trace(url, output, seconds=seconds, api_key=api_key)
