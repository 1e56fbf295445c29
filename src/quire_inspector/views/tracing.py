"""Recordings of an engine's work in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.base.errors import QuireError
from quire.engine.timeline import Timeline
from quire.statefile.atomic_file import check_regular
from quire_inspector.views.timeline_reader import timeline_document
from quire_inspector.views.trace_events import ANOTHER, TraceRecorder

logger = logging.getLogger("quire.inspector")

INTERVAL = 0.2
"""Seconds between two readings of the timeline, which keeps far more."""


@contextmanager
def traced(timeline: Timeline, model: str, path: Path) -> Iterator[None]:
    """Record the engine's events while the block runs, and write them to ``path`` at its end, also
    if the block raises.

    Raises:
        NotFound: before the block, for a missing directory.
        InvalidArgument: before the block, for a path that is no regular file.
        QuireError: the file cannot be written. If a generator around the block was closed, the
            error is logged instead.
    """
    check_regular(path, f"trace {str(path)!r}", may_be_missing=True)
    recorder = TraceRecorder(model)
    recorder.begin(timeline_document(timeline, ANOTHER))
    over = threading.Event()

    def record() -> None:
        while not over.wait(INTERVAL):
            recorder.take(timeline_document(timeline, recorder.since))

    thread = threading.Thread(target=record, name="quire-trace", daemon=True)
    thread.start()
    abandoned = False
    try:
        yield
    except GeneratorExit:
        abandoned = True
        raise
    finally:
        over.set()
        thread.join()
        recorder.take(timeline_document(timeline, recorder.since))
        try:
            recorder.write(path)
        except QuireError as error:
            if not abandoned:
                raise
            logger.error("%s", error)
