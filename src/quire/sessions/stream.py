"""A session's generation as an iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Self

from quire.base.errors import took_effect
from quire.base.finalizers import unless_exiting
from quire.base.interrupts import SHIELD, check
from quire.base.outputs import Reuse, StreamDelta
from quire.base.uncopied import Uncopied
from quire.engine.engine import Engine
from quire.engine.progress_bars import PromptBar, prompt_bar
from quire.engine.request import Request
from quire.engine.request_outputs import reuse_of

Start = Callable[[], Request]
OnEnd = Callable[[Request], "Future[None] | None"]


class PreparedTurn(NamedTuple):
    """A continuation of a session that has passed every check."""

    start: Start
    """Submits the request; called with the engine's lock."""
    on_end: OnEnd | None = None
    """Called with the request once, when it is over. Returns a future that is done when the session
    is durable; None: it is not kept."""


class SessionStream(Uncopied, Iterator[StreamDelta]):
    """The iterator of ``for delta in session.stream()``. It starts with its first delta. Leaving
    the loop early, ``close`` and an interrupt cancel it; what was generated stays in the
    session. On a terminal a bar shows how far a prompt of several steps is."""

    _instead = "read it where it was made"

    # No generator: the ``finally`` of an unreferenced one runs in the garbage collector, at any
    # time, and loses the exceptions of signals.

    def __init__(self, engine: Engine, start: Start, on_end: OnEnd | None = None) -> None:
        """Keep ``start``, which submits, and ``on_end``, called once. Neither may hold the
        stream."""
        self._engine = engine
        self._start = start
        self._requests: list[Request] = []
        """The request under way."""
        self._pieces = self._tokens = 0
        """Numbers of its pieces of text, and of its tokens, that were returned in deltas."""
        self._bar: PromptBar | None = None
        self._end = partial(_end, engine, self._requests, on_end)
        engine.finalizers.watch(self, self._end)
        self._over = False
        self.reuse: Reuse | None = None
        """What was reused of the prompt; None before the last delta."""

    def __next__(self) -> StreamDelta:
        if self._over:
            raise StopIteration
        try:
            with SHIELD:
                return self._delta()
        except BaseException:
            self.close()
            raise

    def _delta(self) -> StreamDelta:
        if not self._requests:
            with self._engine.lock:
                self._requests.append(self._start())
            self._bar = prompt_bar(self._engine, self._requests[0])
        request = self._requests[0]
        while True:
            if not request.finished:
                self._engine.step()
                if self._bar is not None:
                    self._bar.advance()
                check()
            # Another thread may step: read first whether it ended, so that the last delta has all.
            ended = request.finished
            pieces, tokens = len(request.output.pieces), len(request.output.token_ids)
            if request.output.error is not None:
                raise request.output.error
            if ended or tokens > self._tokens:
                self._close_bar()
                delta = StreamDelta(
                    text="".join(request.output.pieces[self._pieces : pieces]),
                    token_ids=request.output.token_ids[self._tokens : tokens],
                    finish_reason=request.output.finish_reason if ended else None,
                    stop_reason=request.output.stop_reason if ended else None,
                )
                self._pieces, self._tokens = pieces, tokens
                if ended:
                    self.reuse = reuse_of(request, self._engine.tokenizer)
                    self.close()
                return delta

    def close(self) -> None:
        """End the unfinished generation. Closing twice is harmless. ``NotDurable`` if the session
        is kept, and could not be."""
        self._over = True
        self._close_bar()
        if (durable := self._end()) is not None:
            with took_effect():
                durable.result()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @unless_exiting
    def __del__(self) -> None:
        # No reference to it is left.
        if not getattr(self, "_over", True):
            self._engine.finalizers.leave(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(engine: Engine, requests: list[Request], on_end: OnEnd | None) -> Future[None] | None:
    durable = None
    if engine.lock.is_parents:
        return None
    with engine.lock:
        engine.end(requests)
        while requests:
            request = requests.pop()
            if on_end is not None:
                durable = on_end(request)
    return durable
