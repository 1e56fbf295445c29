"""The thread that steps an engine in the background, and its jobs. No event loops here."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.base.caller_context import Caller, caller, on_behalf_of
from quire.base.errors import Cancelled, FailedPrecondition, QuireError
from quire.base.forks import ParentsLock, in_children
from quire.base.interrupts import uninterrupted, wait_for
from quire.base.process_exit import end_with_process, leave_running
from quire.engine.beam import BeamSearch
from quire.engine.engine import Engine
from quire.engine.request import Request
from quire.llm import LLM
from quire.text.long_texts import given_up_by

logger = logging.getLogger("quire.async")

HAND_OVER = 1e-4
"""Seconds between two steps while a worker may want the engine's lock. Without them the stepping
thread would take the lock again at once."""

LAST_STEP = 10.0
"""Most seconds that the end of the process waits for a running step."""

T = TypeVar("T")


class Job:
    """Requests that a caller waits for. ``start``, ``advance`` and ``abort`` run on the stepping
    thread, between steps."""

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[], list[Request]],
        *,
        name: str | None = None,
        streams: bool = False,
    ) -> None:
        self.name = name
        self.cancelled = False
        self.caller = caller.get()
        self.over = False
        self.error: BaseException | None = None
        """Why it could not be started, or why its end is unknown."""
        self.requests: list[Request] = []
        self.seen: list[tuple[bool, int, int]] = []
        """(finished, number of tokens, number of pieces of text) of each request after a step."""
        self.listeners: list[Callable[[], None]] = []
        """Called on the stepping thread when it is over, and with ``streams`` at everything new."""
        self.on_end: Callable[[], object] | None = None
        self._engine = engine
        self._submit = submit
        self._streams = streams

    def start(self) -> None:
        # Drop the closure, so that a job that has run keeps no stream, session or LLM alive.
        submit, self._submit = self._submit, list
        self.requests = submit()

    def advance(self) -> bool:
        """Read the results of a step, and return whether all requests are finished."""
        finished = all(request.finished for request in self.requests)
        if self._streams:
            seen = [
                (request.finished, len(request.output.token_ids), len(request.output.pieces))
                for request in self.requests
            ]
            if seen != self.seen:
                self.seen = seen
                self.notify()
        return finished

    @property
    def ended(self) -> bool:
        """Return whether all its requests are finished; False before it has any. Another thread may
        end them by closing a session."""
        return bool(self.requests) and all(request.finished for request in self.requests)

    def abort(self) -> None:
        self._engine.end(self.requests)

    def notify(self) -> None:
        for listener in tuple(self.listeners):
            listener()


class BeamJob(Job):
    """Beam searches. Each step ends a round of them."""

    def __init__(self, engine: Engine, searches: Sequence[BeamSearch]) -> None:
        super().__init__(engine, list)
        self._searches = searches

    def start(self) -> None:
        for search in self._searches:
            search.start()

    def advance(self) -> bool:
        for search in self._searches:
            search.advance()
        if not all(search.done for search in self._searches):
            return False
        self.abort()
        return True

    def abort(self) -> None:
        for search in self._searches:
            search.release()


class Call:
    """A call on a worker thread that other threads may cancel."""

    def __init__(self) -> None:
        self.cancelled = False
        self.caller: Caller = caller.get()
        self.job: Job | None = None
        """The job that it waits for."""


class Stepper:
    """A thread that steps an LLM's engine while there is work, and sleeps otherwise. Any thread may
    call its methods."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.engine
        # Reentrant: the garbage collector may cancel a stream while this thread holds it.
        self._changed: Any = threading.Condition(threading.RLock())
        in_children(self._forked)
        self._inbox: deque[Job] = deque()
        self._cancels: deque[Job] = deque()
        self._jobs: dict[Job, None] = {}
        self._callers = 0
        """Number of calls on worker threads that wait for no job, so may want the engine's lock."""
        self._stopping = False
        self._broken: str | None = None
        self._local = threading.local()
        self._engine.wait = self.wait
        self._thread = threading.Thread(target=self._loop, name="quire-steps", daemon=True)
        self._thread.start()
        # The thread closes the LLM.
        leave_running(llm.close)
        end_with_process(self._end_with_process)

    # -- jobs --------------------------------------------------------------------------------------

    @uninterrupted
    def submit(self, job: Job) -> None:
        """Start a job before the next step. Raise ``FailedPrecondition`` after ``stop``."""
        with self._changed:
            if self._stopping:
                raise self._refusal()
            self._inbox.append(job)
            self._changed.notify()

    @uninterrupted
    def cancel(self, job: Job) -> None:
        """End a job before the next step. Never waits."""
        job.cancelled = True
        with self._changed:
            self._cancels.append(job)
            self._changed.notify()

    @uninterrupted
    def find(self, name: str) -> Job | None:
        with self._changed:
            for job in (*self._inbox, *self._jobs):
                if name in (job.name, *(request.request_id for request in job.requests)):
                    return job
            return None

    @uninterrupted
    def stop(self) -> None:
        """Make the thread end running requests, close the LLM, and stop."""
        if self._llm.engine.lock.is_parents:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has stopped, for at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def _forked(self) -> None:
        self._changed = ParentsLock()

    def _end_with_process(self) -> None:
        self.stop()
        self.join(LAST_STEP)

    def _refusal(self) -> QuireError:
        if self._broken is not None:
            return QuireError(self._broken)
        return FailedPrecondition("the LLM is closed; make a new one")

    # -- calls on worker threads -------------------------------------------------------------------

    def perform(self, call: Call, function: Callable[[], T]) -> T:
        """Run ``function`` on this thread. ``give_up`` ends the job that it waits for."""
        if call.cancelled:
            raise Cancelled("the call was cancelled before it began")
        self._local.call = call
        self._count(1)
        try:
            with given_up_by(lambda: call.cancelled), on_behalf_of(call.caller):
                return function()
        finally:
            self._count(-1)
            self._local.call = None

    def give_up(self, call: Call) -> None:
        """Cancel the present or next job that a call waits for. Never waits."""
        call.cancelled = True
        if call.job is not None:
            self.cancel(call.job)

    def wait(self, requests: Sequence[Request]) -> None:
        """Wait until the requests are finished. ``Engine.run`` calls it instead of stepping."""
        if threading.current_thread() is self._thread:
            return
        call: Call | None = getattr(self._local, "call", None)
        over = threading.Event()
        job = Job(self._engine, lambda: list(requests))
        job.listeners.append(over.set)
        self.submit(job)
        if call is not None:
            # ``give_up`` writes and reads in the other order, so one of the two sees the other.
            call.job = job
            if call.cancelled:
                self.cancel(job)
            self._count(-1)
        try:
            wait_for(over)
        except BaseException:
            self.cancel(job)
            raise
        finally:
            if call is not None:
                self._count(1)
        if job.error is not None:
            raise job.error

    @uninterrupted
    def _count(self, change: int) -> None:
        with self._changed:
            self._callers += change
            self._changed.notify()  # the call may have ended requests of other jobs

    # -- the thread --------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._sleep():
                self._take_in()
                self._step()
                self._report()
                if self._callers:
                    time.sleep(HAND_OVER)
        except BaseException as error:
            logger.exception("the thread that steps the engine broke")
            self._broken = f"the engine broke ({type(error).__name__}: {error}); make a new LLM"
        finally:
            self._end()

    def _sleep(self) -> bool:
        """Sleep until there is work. Return False if the work is to stop."""
        with self._changed:
            while not (self._stopping or self._inbox or self._cancels or self._engine.has_work):
                if any(job.ended for job in self._jobs):
                    break
                self._changed.wait()
            return not self._stopping

    def _take_in(self) -> None:
        """Start new jobs and end cancelled ones."""
        while self._inbox:
            with self._changed:
                job = self._inbox.popleft()
                self._jobs[job] = None
            try:
                with on_behalf_of(job.caller):
                    job.start()
                if job.cancelled:
                    job.abort()  # Its cancel may have been taken out while it was in the inbox.
            except BaseException as error:
                self._finish(job, error)
        while self._cancels:
            job = self._cancels.popleft()
            if job in self._jobs:
                job.abort()

    def _step(self) -> None:
        if not self._engine.has_work:
            return
        try:
            self._engine.step()
        except BaseException as error:
            logger.exception("a step raised; everything under way ends")
            known = isinstance(error, QuireError)
            self._engine.fail_all(
                error if known else QuireError(f"a step failed: {type(error).__name__}: {error}")  # type: ignore[arg-type]
            )

    def _report(self) -> None:
        """Report the results of the step to the jobs."""
        for job in tuple(self._jobs):
            try:
                if job.advance():
                    self._finish(job)
            except BaseException as error:
                self._finish(job, error)

    def _finish(self, job: Job, error: BaseException | None = None) -> None:
        with self._changed:
            self._jobs.pop(job, None)
        on_end, job.on_end = job.on_end, None
        if error is None and on_end is not None:
            try:
                on_end()
            except BaseException as failure:
                error = failure
        job.error, job.over = error, True
        job.notify()
        job.listeners.clear()

    def _end(self) -> None:
        """Close the LLM and finish all jobs, so that no caller waits for ever."""
        with self._changed:
            self._stopping = True
        try:
            self._llm.close()
            self._report()
        except BaseException:
            logger.exception("the LLM could not be closed")
        self._engine.wait = None
        with self._changed:
            left = [*self._jobs, *self._inbox]
            self._inbox.clear()
        for job in left:
            self._finish(job, self._refusal())
