"""Turns that are run again in idle time, as the chat template writes them into the next prompt.

Models think before they answer, and templates leave that out of the history. So the state of an
answer would be computed while the client of the next turn waits. Here it is computed before: the
history without the reasoning is run, from where it parts from what was run, and the prefix cache
keeps it. It only warms the cache: no token depends on it. It runs only while nothing else does,
ends within a step when anything comes, and is bounded in tokens and in turns that wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from quire.async_llm import AsyncLLM
from quire.base.errors import QuireError
from quire.base.outputs import RequestOutput
from quire.server.http.settings import ServerSettings

logger = logging.getLogger("quire.server")

LOOK = 0.02
"""Seconds between two looks whether the engine is idle, while turns wait."""
MOST_WAITING = 16
"""Most turns that wait; the oldest is dropped."""
MOST_TRIES = 4
"""Times that one turn is begun."""

Run: TypeAlias = Callable[[int], Awaitable[RequestOutput | None]]
"""Runs a history of at most so many new tokens, by ``AsyncLLM.prefetch``; None: no need."""


class Reruns:
    """All reruns of one server, on its event loop."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self._llm = llm
        self._most = settings.max_rerun_tokens
        self.enabled = settings.rerun_reasoning and llm.engine.cache is not None
        self._waiting: deque[tuple[Run, int]] = deque(maxlen=MOST_WAITING)
        """With the times that each was begun."""
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Return the number of turns that wait."""
        return len(self._waiting)

    def add(self, run: Run) -> None:
        """Let the history of a turn wait for idle time."""
        if not self.enabled or self._closed:
            return
        self._waiting.append((run, 0))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            if self._llm.engine.has_work:
                await asyncio.sleep(LOOK)
                continue
            run, tries = self._waiting.popleft()
            try:
                output = await run(self._most)
            except QuireError as error:
                logger.debug("a turn was not run again: %s", error)
                continue
            except Exception:
                logger.exception("a turn could not be run again")
                continue
            if output is None:
                continue
            metrics = self._llm.engine.metrics
            metrics.reruns.inc(output.finished)
            metrics.rerun_tokens.inc(len(output.prompt_token_ids) - output.num_cached_tokens)
            if not output.finished and tries + 1 < MOST_TRIES:
                self._waiting.appendleft((run, tries + 1))

    async def close(self) -> None:
        """End the running request."""
        self._closed = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
