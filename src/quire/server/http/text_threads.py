"""The few threads that render and tokenise: most for short texts, none for who has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from quire.text.limited_process import SLOW
from quire.text.long_texts import LONG, given_up_by

SHORT_THREADS = 4
"""Number of threads for texts that are not long. Long ones have one thread."""
ASIDE = 2 * SLOW
"""Further threads of calls that wait for slow templates and tokenizers."""

T = TypeVar("T")


class Lane:
    """Calls on some threads, in the order of their arrival, from one event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads + ASIDE, thread_name_prefix=name)
        self._places = asyncio.Semaphore(threads)

    async def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` at its turn. If the task is cancelled before, do not call it. If the
        task is cancelled meanwhile, ``long_texts.check`` ends the call, which then frees its
        thread."""
        await self._places.acquire()
        given_up, loop = threading.Event(), asyncio.get_running_loop()
        has_place = True

        def leave() -> None:
            nonlocal has_place
            if has_place:
                has_place = False
                self._places.release()

        def step_aside() -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(leave)

        def call() -> T:
            with given_up_by(given_up.is_set, step_aside):
                return function()

        def ended(work: asyncio.Future[T]) -> None:
            if not work.cancelled():
                work.exception()  # fetched, or asyncio would log it as never retrieved
            leave()

        work = loop.run_in_executor(self._pool, call)
        work.add_done_callback(ended)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def close(self) -> None:
        """End the threads when they are idle."""
        self._pool.shutdown(wait=False)


class Texts:
    """The lanes of one server."""

    def __init__(self) -> None:
        self._short = Lane(SHORT_THREADS, "quire-texts")
        self._long = Lane(1, "quire-long-texts")

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Call ``function`` for a text of about ``size`` characters, as ``Lane.run`` does."""
        return await (self._long if size >= LONG else self._short).run(function)

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.close()
