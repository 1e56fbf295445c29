"""Generations in sessions that clients hold: what ``session_id`` in a request asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from quire.async_llm import AsyncSession, AsyncStream, SampleDelta
from quire.engine.chat_turns import ReadAnswer
from quire.engine.tokenizer import Tokenizer
from quire.errors import FailedPrecondition, NotFound
from quire.finalizers import unless_exiting
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.context import Context
from quire.server.errors import api_error, bad_field
from quire.server.generation import added
from quire.server.sessions import HeldSession


class ClientSessionStream(AsyncIterator[SampleDelta]):
    """The continuation of a client's session: ``async for delta in stream``, and ``output``.

    The session is in use from the first delta to the last one, or to ``aclose``. Tokens generated
    by then stay in it.
    """

    def __init__(
        self,
        context: Context,
        owner: str,
        session_id: str,
        params: SamplingParams,
        *,
        prompt: str | Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        answer: ReadAnswer | None = None,
        model: str | None = None,
    ) -> None:
        """Prepare a continuation after a prompt (text without BOS, or ids), or an answer to messages.

        ``messages`` are the new ones only. ``answer`` makes a message of the answer, as for
        ``Session.chat``. ``model`` must be the session's.

        Nothing happens before the first delta is asked for. That raises ``ApiError`` 404 for a
        session that the owner does not have, ``FailedPrecondition`` for one in use, ``ApiError``
        400 for another model, and the errors of ``Session.stream`` and ``Session.stream_chat``. The
        session is then as it was.
        """
        if prompt is not None and messages is not None:
            raise bad_field("messages", "prompt and messages are both given; give one of them")
        self.session_id = session_id
        self._context = context
        self._owner = owner
        self._params = params
        self._prompt = prompt
        self._messages = messages
        self._answer = answer
        self._model = model
        self._held: HeldSession | None = None
        self._session: AsyncSession | None = None
        self._stream: AsyncStream | None = None
        self._first: SampleDelta | None = None
        self._undo: int | None = None
        """Tokens of the session before the prompt was added, until the generation has begun."""
        self._ended: asyncio.Task[None] | None = None

    @property
    def output(self) -> RequestOutput:
        """The output so far. ``FailedPrecondition`` before the first delta."""
        if self._stream is None:
            raise FailedPrecondition("the stream has no output yet; ask for its first delta")
        return self._stream.output

    @property
    def session(self) -> AsyncSession:
        """The session. ``FailedPrecondition`` before the first delta."""
        if self._session is None:
            raise FailedPrecondition("the stream has not begun; ask for its first delta")
        return self._session

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._context.llm.tokenizer

    def __aiter__(self) -> Self:
        return self

    async def begin(self) -> None:
        """Wait for the first delta, by which the session has raised all its refusals."""
        self._first = await anext(self)

    async def __anext__(self) -> SampleDelta:
        if self._ended is not None:
            raise StopAsyncIteration
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            if self._stream is None:
                self._stream = await self._begin()
            delta = await anext(self._stream)
            self._undo = None
            return delta
        except asyncio.CancelledError:
            # The request is cancelled already and its tokens stay. Nothing can be awaited here.
            self._undo = None
            self._end()
            raise
        except BaseException:
            await asyncio.shield(self._end())
            raise

    def take(self) -> AsyncSession:
        """Take the session now. Raise the errors about it that the first delta would raise."""
        if self._session is None:
            try:
                self._held = self._context.sessions.take(self._owner, self.session_id, "generate")
            except NotFound as error:
                raise api_error(error, param="session_id") from None
            check_model(self._context, self._held.session, self._model)
            self._session = self._held.session
        return self._session

    async def _begin(self) -> AsyncStream:
        session = self.take()
        if self._messages is not None:
            return session.stream_chat(self._messages, self._params, answer=self._answer)
        if self._prompt is not None:
            before = len(session)
            await session.append(await added(self._context, session, self._prompt))
            self._undo = before
        return session.stream(self._params)

    def _end(self) -> asyncio.Task[None]:
        if self._ended is None:
            self._ended = self._context.sessions.spawn(self._finish())
        return self._ended

    async def _finish(self) -> None:
        """Free the session once nothing runs on it any more."""
        held = self._held
        if held is None:
            return
        try:
            if self._stream is not None:
                await self._stream.aclose()
            if self._undo is not None:
                await held.session.rewind(to=self._undo)
        except FailedPrecondition:
            pass  # the session was closed meanwhile
        finally:
            self._held = None
            self._context.sessions.release(held)

    async def aclose(self) -> None:
        """Cancel an unfinished request, and return when the session is free."""
        await asyncio.shield(self._end())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @unless_exiting
    def __del__(self) -> None:
        # No reader is left. The stream inside ends by itself too.
        held = getattr(self, "_held", None)
        if held is not None:
            self._context.sessions.release(held)


def check_model(context: Context, session: AsyncSession, model: str | None) -> None:
    """Raise ``ApiError`` 400 if a request names another model than the session's."""
    if model is not None and context.adapter_of(model) != session.adapter:
        raise bad_field(
            "model",
            f"the session goes on under {session.adapter or context.model_name!r}, not under {model[:60]!r}; leave model out or "
            "change the session with POST /v1/sessions/{id}/adapter",
        )
