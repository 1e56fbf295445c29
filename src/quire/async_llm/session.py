"""A live sequence that a program holds and awaits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Self, overload

from quire.async_llm.background import Background, awaited, shared
from quire.async_llm.stepper import Job
from quire.async_llm.stream import AsyncStream, Prepared
from quire.base.hints import CacheHints
from quire.base.sampling_params import SamplingParams
from quire.base.uncopied import Uncopied
from quire.contracts.token_views import ComparisonView
from quire.engine.prompts import Prompt
from quire.engine.request import Request
from quire.engine.request_outputs import request_output
from quire.sessions.chat_turns import ReadAnswer
from quire.sessions.prompts import PromptsOrSessions
from quire.sessions.session import Session
from quire.sessions.stream import PreparedTurn

if TYPE_CHECKING:
    from rich.console import RenderableType


class AsyncSession(Uncopied, AbstractAsyncContextManager["AsyncSession"]):
    """A ``quire.Session`` whose verbs are awaited, made by ``AsyncLLM.session``. Values that take
    no lock are properties. Cancelling a task that awaits a verb cancels the verb: tokens generated
    by then stay, everything else is undone."""

    _instead = "fork() makes another, to_bytes() and save() keep it"

    def __init__(self, background: Background, session: Session) -> None:
        self._background = background
        self._session = self._inner = session

    # -- what it holds -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._session)

    def __repr__(self) -> str:
        return repr(self._session).replace("Session", "AsyncSession", 1)

    def _repr_html_(self) -> str:
        return self._session._repr_html_()

    def __rich__(self) -> RenderableType:
        return self._session.__rich__()

    name = shared(Session.name)
    """It can be set."""
    labels = shared(Session.labels)
    """They can be set."""
    tokens = shared(Session.tokens)
    text = shared(Session.text)
    pinned = shared(Session.pinned)
    modified = shared(Session.modified)
    window = shared(Session.window)
    adapter = shared(Session.adapter)
    num_computed = shared(Session.num_computed)
    exact = shared(Session.exact)
    exact_tokens = shared(Session.exact_tokens)
    has_chat = shared(Session.has_chat)
    chat_start = shared(Session.chat_start)
    messages = shared(Session.messages)
    last_commit = shared(Session.last_commit)
    number = shared(Session.number)

    async def pages(self) -> tuple[int, int]:
        """Return the numbers of its pages and of the shared ones among them."""
        return await self._background.call("pages", lambda: self._session.pages)

    # -- running -----------------------------------------------------------------------------------

    async def append(self, text: Prompt, *, priority: int = 0) -> Self:
        """Add text or tokens as ``Session.append`` does, and return the session."""
        await self._background.call("append", lambda: self._session.append(text, priority=priority))
        return self

    compute = awaited(Session.compute)
    generate = awaited(Session.generate)
    chat = awaited(Session.chat)
    check_generate = awaited(Session.check_generate)
    logits = awaited(Session.logits)
    prefetch_next_turn = awaited(Session.prefetch_next_turn)
    score = awaited(Session.score)

    def stream(self, params: SamplingParams | None = None, *, hints: CacheHints | None = None) -> AsyncStream:
        """Continue as a stream: ``async for delta in session.stream()``."""
        return self._stream("stream", lambda: self._session.prepare(params, hints=hints))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hints: CacheHints | None = None,
    ) -> AsyncStream:
        """Answer messages as a stream, as ``Session.stream_chat`` does."""
        given: dict[str, Any] = {"answer": answer, "tools": tools, "variables": variables, "hints": hints}
        return self._stream("chat", lambda: self._session.prepare_chat(messages, params, **given))

    def _stream(self, verb: str, prepare: Callable[[], PreparedTurn]) -> AsyncStream:
        engine = self._background.llm.engine

        async def prepared() -> Prepared:
            start, on_end = await self._background.call(verb, prepare)

            def submit() -> list[Request]:
                with engine.lock:
                    return [start()]

            job = Job(engine, submit, streams=True)
            if on_end is not None:
                job.on_end = lambda: on_end(job.requests[0])
            return job, lambda: request_output(job.requests, engine.tokenizer)

        return AsyncStream(self._background, prepared)

    async def cancel(self) -> bool:
        """End the request of another task on this session at the next step; False if none runs."""
        return self._session.cancel()

    # -- fork and rewind ---------------------------------------------------------------------------

    @overload
    async def fork(self, at: int | None = None) -> AsyncSession: ...
    @overload
    async def fork(self, at: int | None = None, *, n: int) -> list[AsyncSession]: ...
    async def fork(self, at: int | None = None, n: int | None = None) -> AsyncSession | list[AsyncSession]:
        """Fork as ``Session.fork`` does."""

        def fork() -> Session | list[Session]:
            return self._session.fork(at) if n is None else self._session.fork(at, n=n)

        found = await self._background.call("fork", fork)
        if isinstance(found, list):
            return [AsyncSession(self._background, child) for child in found]
        return AsyncSession(self._background, found)

    rewind = awaited(Session.rewind)
    rewind_cost = awaited(Session.rewind_cost)
    edit = awaited(Session.edit)
    edit_cost = awaited(Session.edit_cost)
    use_adapter = awaited(Session.use_adapter)
    pin = awaited(Session.pin)
    unpin = awaited(Session.unpin)

    # -- saving, state, views ----------------------------------------------------------------------

    save = awaited(Session.save)
    """A write of the file that has begun is finished even if the task is cancelled."""
    to_bytes = awaited(Session.to_bytes)
    commit = awaited(Session.commit)
    as_cache = awaited(Session.as_cache)
    """Verbs of the cache and of its executor block."""
    kv = awaited(Session.kv)
    set_kv = awaited(Session.set_kv)
    token = awaited(Session.token)
    attention = awaited(Session.attention)
    norms = awaited(Session.norms)
    tree = awaited(Session.tree)
    heat = awaited(Session.heat)

    async def compare(self, other: AsyncSession, *, top: int = 10) -> ComparisonView:
        """Return the comparison of two sessions, as ``Session.compare`` does."""
        inner: Any = other._session if isinstance(other, AsyncSession) else other
        return await self._background.call("compare", lambda: self._session.compare(inner, top=top))

    # -- closing -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give the pages back. Closing twice, or after the LLM, is harmless."""
        if self._background.closed:
            self._session.close()
        else:
            await self._background.call("close", self._session.close)

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def inner_session(session: AsyncSession) -> Session:
    """Return the session whose verbs are awaited."""
    return session._session


def unwrapped(prompts: PromptsOrSessions | AsyncSession | Sequence[Prompt | AsyncSession]) -> PromptsOrSessions:
    """Return prompts with each ``AsyncSession`` replaced by its ``Session``."""
    if isinstance(prompts, AsyncSession):
        return prompts._session
    if isinstance(prompts, (list, tuple)):
        return [one._session if isinstance(one, AsyncSession) else one for one in prompts]
    return prompts  # type: ignore[return-value]
