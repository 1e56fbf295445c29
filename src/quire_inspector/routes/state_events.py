"""``StateEvents``: events that tell viewers of changes, at most twice a second.

One task serves all listeners, and runs only while there are any. It compares counters, which takes
no lock; the state is read only if they changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from quire.base.documents import FORMAT
from quire.llm import LLM
from quire.server.http.context import Context
from quire.server.http.events import Chunk

PERIOD = 0.5
"""Seconds between two events, at least."""
QUIET = 10.0
"""Seconds without an event after which a comment says that the server is there."""
NOTHING: Final[Chunk] = {}
"""A chunk that ``EventStream`` sends as a comment."""


class StateEvents:
    """The events of one server, on its event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last: Mapping[str, Any] | None = None
        self._mark: object = None
        self._news = asyncio.Event()
        """Set, and replaced, at each event and at the end."""
        self._failure: Exception | None = None
        """The error that ended the task."""
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    async def follow(self) -> AsyncGenerator[Chunk, None]:
        """Yield the present state, then every change, until the server stops. A slow listener
        misses events and gets the last one. Errors of reading the state are raised."""
        self._listeners += 1
        if self._task is None or self._task.done():
            self._last = self._failure = None
            self._task = asyncio.get_running_loop().create_task(self._watch())
        seen: object = None
        try:
            while not self._over:
                if self._failure is not None:
                    raise self._failure
                news = self._news
                if self._last is not None and self._last is not seen:
                    seen = self._last
                    yield self._last
                    continue
                try:
                    async with asyncio.timeout(QUIET):
                        await news.wait()
                except TimeoutError:
                    yield NOTHING
        finally:
            self._listeners -= 1
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    @property
    def _over(self) -> bool:
        return self._context.gate.closing

    async def _watch(self) -> None:
        """Poll for changes while there are listeners."""
        try:
            while not self._over:
                views = self._context.llm.views
                if self._last is None or ((views.mark != self._mark or views.is_behind) and views.budget.is_free):
                    self._mark, views.is_behind = views.mark, False
                    self._last = await self._context.llm.read(_event)
                    self._tell()
                await asyncio.sleep(PERIOD)
        except Exception as error:
            self._failure = error
        finally:
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _event(llm: LLM) -> dict[str, Any]:
    views = llm.views
    found = views.overview(views.state(anew=False))
    return {
        "type": "changed",
        "format": FORMAT,
        "reading": found.reading,
        "time": time.time(),
        "documents": ["overview", "history", "pages", "timeline"],
        "use": dict(found.use),
        "requests": dict(found.requests),
        "branches": dict(found.branches),
    }


_events: WeakKeyDictionary[Any, StateEvents] = WeakKeyDictionary()


def events_of(context: Context) -> StateEvents:
    """Return the events of a server."""
    found = _events.get(context.gate)
    if found is None:
        found = _events[context.gate] = StateEvents(context)
    return found
