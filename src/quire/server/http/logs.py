"""The server's log: one JSON object a line, so that nothing in a request can forge a line."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from quire.server.http.errors import CLIENT_GONE

logger = logging.getLogger("quire.server")


@dataclass(slots=True)
class Passage:
    """The facts about one request for the log."""

    request_id: str
    method: str
    path: str
    status: int | None = None
    """The answer's status, once it has begun."""
    complete: bool = False
    """Whether the whole answer was sent."""
    gone: bool = False
    """Whether the client closed the connection before that."""
    began: float = field(default_factory=time.monotonic)


def request(passage: Passage, tokens: Mapping[str, Any] | None) -> None:
    """Log the end of a request, at INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return
    event(
        "request",
        request_id=passage.request_id,
        method=passage.method,
        path=passage.path,
        status=CLIENT_GONE if passage.gone and not passage.complete else passage.status,
        complete=passage.complete,
        tokens=None if tokens is None else dict(tokens),
        seconds=round(time.monotonic() - passage.began, 6),
    )


def failure(error: BaseException, **fields: Any) -> None:
    """Log a traceback, with facts about the request. Clients do not see it."""
    logger.error("%s", json.dumps({"event": "failure", **fields}), exc_info=error)


def event(kind: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log any other event."""
    logger.log(level, "%s", json.dumps({"event": kind, **fields}))


class _Lines(logging.Formatter):
    """Makes events of what other parts of Quire log."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name != logger.name:
            record = copy(record)
            record.msg = json.dumps({"event": "log", "logger": record.name, "message": record.getMessage()})
            record.args = None
        return super().format(record)


@contextmanager
def to_stderr() -> Iterator[None]:
    """Write this log to stderr from INFO on, and Quire's other logs as they are set, whatever the
    program's own logging does."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
    whole = logging.getLogger("quire")
    before = logger.level, whole.propagate
    whole.addHandler(handler)
    logger.setLevel(logging.INFO)
    whole.propagate = False
    try:
        yield
    finally:
        whole.removeHandler(handler)
        logger.setLevel(before[0])
        whole.propagate = before[1]
