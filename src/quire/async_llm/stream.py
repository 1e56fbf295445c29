"""Streams: the results of a request since the last delta."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from quire.async_llm.background import Background, Listener
from quire.async_llm.stepper import Job
from quire.base.errors import FailedPrecondition
from quire.base.finalizers import unless_exiting
from quire.base.outputs import Logprob, RequestOutput, StreamDelta
from quire.base.uncopied import Uncopied
from quire.engine.request_outputs import by_token


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleDelta(StreamDelta):
    """The addition of one or several steps to one sample of a request."""

    index: int = 0
    """The sample's number, with ``SamplingParams(n=...)``."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log-probabilities of this delta's tokens, if they were asked for."""


class PromptProgress(NamedTuple):
    """The progress of a prompt's computation."""

    done: int
    """Tokens whose state exists."""
    total: int
    cached: int
    """Tokens whose state was found, and did not run."""


Prepared: TypeAlias = tuple[Job, Callable[[], RequestOutput]]
"""A job that is ready to start, and a function that returns its output so far."""


class AsyncStream(Uncopied, AsyncIterator[SampleDelta], AbstractAsyncContextManager["AsyncStream"]):
    """An iterator over deltas: ``async for delta in stream``.

    It starts when its first delta is asked for, and refuses then what ``generate`` refuses. Leaving
    the loop early, ``aclose``, and cancelling the task that awaits a delta cancel the request,
    which frees its pages within a step. A slow consumer gets several tokens in a delta.
    """

    _instead = "read it where it was made"

    def __init__(self, background: Background, prepare: Callable[[], Awaitable[Prepared]]) -> None:
        self._background = background
        self._prepare = prepare
        self._job: Job | None = None
        self._output: Callable[[], RequestOutput]
        """Returns the output so far; set once there is a job."""
        self._listener: Listener | None = None
        self._taken: list[tuple[bool, int, int]] = []
        """The part of ``Job.seen`` that has become deltas."""
        self._ready: deque[SampleDelta] = deque()
        self._failure: BaseException | None = None
        """Raised after all deltas before it."""
        self._done = False
        self._busy = False

    @property
    def output(self) -> RequestOutput:
        """Return the output so far. ``FailedPrecondition`` before the first delta."""
        if self._job is None or not self._job.requests:
            raise FailedPrecondition("the stream has no output yet; ask for its first delta")
        return self._output()

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """Return the prompt's progress; None before it has begun."""
        if self._job is None or not self._job.requests:
            return None
        first = self._job.requests[0]
        return PromptProgress(first.num_prompt_run, first.asked.num_prompt, first.seat.reuse.cached)

    async def __anext__(self) -> SampleDelta:
        if self._busy:
            raise FailedPrecondition("another task awaits the next delta of this stream; a stream has one reader")
        self._busy = True
        try:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                if self._done:
                    raise StopAsyncIteration
                if self._listener is None:
                    await self._start()
                else:
                    await self._listener.wait()
                self._collect()
        except asyncio.CancelledError:
            # The task's canceller may use the session next.
            await self.aclose()
            raise
        except BaseException:
            self._abandon()
            raise
        finally:
            self._busy = False
        return self._ready.popleft()

    async def _start(self) -> None:
        job, output = await self._prepare()
        if self._done:  # closed meanwhile
            return
        self._listener = Listener(self._background.stepper, job)
        self._background.stepper.submit(job)
        self._job, self._output = job, output

    def _collect(self) -> None:
        """Turn new tokens and texts into deltas."""
        job = self._job
        if job is None:
            return
        # In this order: a job that is over has been seen in full.
        self._done, seen = job.over, job.seen
        if self._done and job.error is not None:
            raise job.error
        for index, (ended, tokens, pieces) in enumerate(seen):
            if index == len(self._taken):
                self._taken.append((False, 0, 0))
            was_over, first_token, first_piece = self._taken[index]
            if was_over or not (ended or tokens > first_token):
                continue
            self._taken[index] = seen[index]
            request = job.requests[index]
            if ended and request.output.error is not None:
                self._failure = request.output.error
                if tokens == first_token:
                    continue
                ended = False  # the failure ends it, after these tokens
            wanted = request.params is not None and request.params.logprobs is not None
            tokenizer = self._background.llm.tokenizer
            entries = request.output.logprobs[first_token:tokens] if wanted else []
            self._ready.append(
                SampleDelta(
                    text="".join(request.output.pieces[first_piece:pieces]),
                    token_ids=request.output.token_ids[first_token:tokens],
                    finish_reason=request.output.finish_reason if ended else None,
                    stop_reason=request.output.stop_reason if ended else None,
                    index=request.asked.index,
                    logprobs=[by_token(entry, tokenizer) for entry in entries] if wanted else None,
                )
            )

    def _abandon(self) -> None:
        self._done = True
        self._ready.clear()
        if self._job is not None and not self._job.over:
            self._background.stepper.cancel(self._job)

    async def aclose(self) -> None:
        """Cancel an unfinished request, and return when its pages are free."""
        self._abandon()
        if self._job is not None:
            await self._background.abort(self._job)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @unless_exiting
    def __del__(self) -> None:
        # No reader is left.
        if getattr(self, "_job", None) is not None:
            self._abandon()
