"""``quire trace``: a recording of a running server's activity."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from quire.base.config import check_real
from quire.base.errors import QuireError
from quire.base.progress import Bar, on_terminal
from quire.cli.remote_chat import Link
from quire.statefile.atomic_file import check_regular
from quire_inspector.views.trace_events import ANOTHER, TraceRecorder

INTERVAL = 0.25
"""Seconds between two requests. A server keeps 2,048 steps."""
PATIENCE = 30.0
"""Seconds to wait for an answer."""
LONGEST = 86_400.0
"""Most seconds of a recording."""


def record_trace(url: str, path: Path, *, seconds: float, api_key: str | None = None) -> None:
    """Record a server for some seconds and write the file; print a summary to stderr.

    Ctrl-C ends it early, and the file is written. So does the loss of the server; then its
    ``QuireError`` is raised. ``InvalidArgument``, ``NotFound`` and ``ResourceExhausted`` about the
    file.
    """
    check_real("seconds", seconds, above=0, up_to=LONGEST)
    check_regular(path, f"trace {str(path)!r}", may_be_missing=True)
    link = Link(url, api_key=api_key, timeout=PATIENCE)
    recorder = TraceRecorder(model_of(link))
    recorder.begin(document_of(link, ANOTHER))
    failure = None
    try:
        _record(link, recorder, seconds)
    except KeyboardInterrupt:
        print("interrupted; what was recorded is kept", file=sys.stderr)
    except QuireError as error:
        failure = error
    recorder.write(path)
    print(
        f"{recorder.num_steps} steps and {recorder.num_requests} requests are in {path}; "
        "ui.perfetto.dev and chrome://tracing show it",
        file=sys.stderr,
    )
    if failure is not None:
        raise failure


def _record(link: Link, recorder: TraceRecorder, seconds: float) -> None:
    """Request until the time is over, with a bar of seconds on a terminal."""
    begun = time.monotonic()
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with Bar(total=seconds, desc="Recording", bar_format=form, disable=not on_terminal()) as bar:
        while True:
            left = begun + seconds - time.monotonic()
            time.sleep(max(0.0, min(INTERVAL, left)))
            while not recorder.take(document_of(link, recorder.since)):
                continue  # a new process, whose steps are counted from 1
            bar.set_postfix_str(f"{recorder.num_steps} steps, {recorder.num_requests} requests", refresh=False)
            bar.update(min(seconds, time.monotonic() - begun) - bar.n)
            if left <= INTERVAL:
                return


def document_of(link: Link, since: int) -> dict[str, Any]:
    """Return a server's timeline after a step."""
    return link.call("GET", f"/v1/state/timeline?since={since}")


def model_of(link: Link) -> str:
    """Return the name of a server's model."""
    cards = link.call("GET", "/v1/models").get("data")
    found = cards[0].get("id") if isinstance(cards, list) and cards and isinstance(cards[0], dict) else None
    return found if isinstance(found, str) else "model"
