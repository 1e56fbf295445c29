"""The link between event loops and threads: an engine's stepping thread and its workers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from quire.async_llm.stepper import Call, Job, Stepper
from quire.base.errors import FailedPrecondition
from quire.llm import LLM

SPARE_WORKERS = 32
"""Worker threads beyond those that wait for running requests."""

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Listener:
    """A callback of a job that wakes a coroutine. However often it is called, it schedules one
    wake-up until the coroutine has run, so calls do not pile up in a busy loop."""

    def __init__(self, stepper: Stepper, job: Job) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._called = False
        self._stepper = stepper
        self._job = job
        job.listeners.append(self)

    def __call__(self) -> None:
        if self._called and not self._loop.is_closed():
            return
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            # The loop is closed, so no coroutine will run.
            if not self._job.over:
                self._stepper.cancel(self._job)

    async def wait(self) -> None:
        """Return once it was called."""
        await self._event.wait()
        self._event.clear()
        # From here on it can be called again. The coroutine sees all that came before.
        self._called = False

    async def until_over(self) -> None:
        while not self._job.over:
            await self.wait()


class Background:
    """An ``LLM`` with a thread that steps its engine, and worker threads for blocking calls."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.stepper = Stepper(llm)
        self.closed = False
        self._workers = ThreadPoolExecutor(llm.config.max_num_seqs + SPARE_WORKERS, thread_name_prefix="quire-calls")
        self._stop = weakref.finalize(self, self.stepper.stop)

    def require_open(self, verb: str) -> None:
        self.llm.engine.lock.require_own()
        if self.closed:
            raise FailedPrecondition(f"{verb}: the LLM is closed; make a new one")

    async def call(self, verb: str, function: Callable[[], T]) -> T:
        """Run a blocking function on a worker thread. If the task is cancelled, end the job that
        the call waits for, and the call."""
        self.require_open(verb)
        call = Call()
        future = self._workers.submit(self.stepper.perform, call, function)
        work = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self.stepper.give_up(call)
            if not future.cancel():
                await asyncio.wait([work])
                if not work.cancelled():
                    work.exception()  # fetched, or asyncio would log it as never retrieved
            raise

    async def finish(self, job: Job) -> None:
        """Start a job and wait until it is over. If the task is cancelled, end the job first."""
        listener = Listener(self.stepper, job)
        try:
            self.stepper.submit(job)
            await listener.until_over()
        except asyncio.CancelledError:
            # The task's canceller may use the job's sessions next.
            await self.abort(job)
            raise
        except BaseException:
            self.stepper.cancel(job)
            raise
        if job.error is not None:
            raise job.error

    async def abort(self, job: Job) -> None:
        """Cancel a job and wait until it is over."""
        self.stepper.cancel(job)
        await Listener(self.stepper, job).until_over()

    async def close(self) -> None:
        """Close the LLM and stop all threads."""
        if self.llm.engine.lock.is_parents:
            return
        self.closed = True
        self._stop()
        try:
            joined = asyncio.wrap_future(self._workers.submit(self.stepper.join))
        except RuntimeError:
            return  # closed before
        await asyncio.shield(joined)
        self._workers.shutdown(wait=False)


class Awaiting(Protocol):
    """An object with verbs that are awaited."""

    _background: Background
    _inner: Any
    """The object that carries out the verbs."""


@overload
def awaited(verb: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Awaiting, P], Coroutine[Any, Any, T]]: ...
@overload
def awaited(
    verb: Callable[Concatenate[Any, P], T], made: Callable[[Background, T], R]
) -> Callable[Concatenate[Awaiting, P], Coroutine[Any, Any, R]]: ...
def awaited(verb: Callable[..., Any], made: Callable[[Background, Any], Any] | None = None) -> Callable[..., Any]:
    """Return a method that runs ``verb`` on a worker thread, with its signature and docstring.
    ``made``: makes the result out of the verb's, which has blocking verbs itself."""

    @wraps(verb, assigned=("__name__", "__doc__"))
    async def call(self: Awaiting, *args: Any, **kwargs: Any) -> Any:
        name = verb.__name__
        found = await self._background.call(name, lambda: getattr(self._inner, name)(*args, **kwargs))
        return found if made is None else made(self._background, found)

    return call


def shared(value: Callable[[Any], T]) -> T:
    """Return the property ``value`` of the inner object as one of the outer object, with its
    docstring. A setter sets the inner one."""
    inner = cast(property, value)

    def set_inner(self: Awaiting, new: T) -> None:
        inner.__set__(self._inner, new)

    return cast(T, property(lambda self: inner.__get__(self._inner), inner.fset and set_inner, doc=inner.__doc__))
