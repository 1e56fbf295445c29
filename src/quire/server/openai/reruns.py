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
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.async_llm import AsyncLLM
from quire.base.errors import QuireError
from quire.base.outputs import RequestOutput
from quire.base.token_history import common_prefix
from quire.server.http.settings import ServerSettings

logger = logging.getLogger("quire.server")

LOOK = 0.02
"""Seconds between two looks whether the engine is idle, while turns wait."""
MOST_WAITING = 16
"""Most turns that wait; the oldest is dropped."""
MOST_TRIES = 4
"""Times that one turn is begun."""
REMEMBERED = 32
"""Reruns of which it is noted whether a prompt used them."""

Run: TypeAlias = Callable[[int], Awaitable[RequestOutput | None]]
"""Runs a history of at most so many new tokens, by ``AsyncLLM.prefetch``; None: no need."""


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn whose history may have to run again."""

    owner: tuple[str, str | None]
    """The API key's digest, and the adapter."""
    run: Run
    tries: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class DoneRerun:
    """What was run for a turn, until a prompt uses it."""

    owner: tuple[str, str | None]
    ids: NDArray[np.int64]
    start: int
    """How many of them were there before."""


class Reruns:
    """All reruns of one server, on its event loop."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self._llm = llm
        self._most = settings.max_rerun_tokens
        self.enabled = settings.rerun_reasoning and llm.engine.cache is not None
        self._waiting: deque[EndedTurn] = deque(maxlen=MOST_WAITING)
        self._done: deque[DoneRerun] = deque(maxlen=REMEMBERED)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Return the number of turns that wait."""
        return len(self._waiting)

    def add(self, turn: EndedTurn) -> None:
        """Let a turn wait for idle time."""
        if not self.enabled or self._closed:
            return
        self._waiting.append(turn)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            if self._llm.engine.has_work:
                await asyncio.sleep(LOOK)
                continue
            turn = self._waiting.popleft()
            try:
                output = await turn.run(self._most)
            except QuireError as error:
                logger.debug("a turn was not run again: %s", error)
                continue
            except Exception:
                logger.exception("a turn could not be run again")
                continue
            if output is None:
                continue
            self._note(turn, output)
            if not output.finished and turn.tries + 1 < MOST_TRIES:
                self._waiting.appendleft(EndedTurn(turn.owner, turn.run, turn.tries + 1))

    def _note(self, turn: EndedTurn, output: RequestOutput) -> None:
        ids, start = np.array(output.prompt_token_ids, dtype=np.int64), output.num_cached_tokens
        metrics = self._llm.engine.metrics
        metrics.reruns.inc(output.finished)
        metrics.rerun_tokens.inc(ids.size - start)
        if ids.size > start:
            self._done.append(DoneRerun(turn.owner, ids, start))

    def used(self, owner: tuple[str, str | None], output: RequestOutput) -> None:
        """Count the tokens of a prompt that were found thanks to reruns."""
        found = np.array(output.prompt_token_ids[: output.num_cached_tokens], dtype=np.int64)
        for done in [one for one in self._done if one.owner == owner and found.size > one.start]:
            common = common_prefix(found, done.ids)
            if common > done.start:
                self._llm.engine.metrics.rerun_tokens_found.inc(common - done.start)
                self._done.remove(done)

    async def close(self) -> None:
        """End the running request."""
        self._closed = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
