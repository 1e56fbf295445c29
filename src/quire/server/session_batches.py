"""Several sessions that go on together: ``POST /v1/sessions/generate``.

All of them are taken and checked before the first one runs. Then each is a stream of its own, and
the engine runs them in one batch. A session that fails ends with ``finish_reason`` "error"; the
others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Self

from quire.async_llm import SampleDelta
from quire.errors import QuireError
from quire.outputs import RequestOutput
from quire.server.context import Context
from quire.server.errors import ApiError, api_error, bad_field
from quire.server.generation import Usage, deltas
from quire.server.session_bodies import Answer, GenerateManyBody, SamplingBody
from quire.server.session_streams import ClientSessionStream

FIELDS: Mapping[str, str] = {name: name for name in SamplingBody.model_fields}
"""Fields that errors may be about. All other errors are about the session."""

FAILED: Mapping[str, Any] = {
    "text": "",
    "token_ids": [],
    "logprobs": None,
    "finish_reason": "error",
    "stop_reason": None,
}
"""The last choice of a session that failed, apart from its error."""


class SessionBatch:
    """The streams of several sessions of one owner, and their common answer."""

    def __init__(self, context: Context, owner: str, body: GenerateManyBody, *, request_id: str) -> None:
        """Raise ``ApiError`` 400 for bad parameters, repeated ids, and too many ids."""
        self._context = context
        self._body = body
        self._request_id = request_id
        limit = context.settings.max_sessions
        if len(body.ids) > limit:
            raise bad_field("ids", f"ids: {len(body.ids)} sessions; this server holds {limit} at most")
        self._params = body.all_params(context.llm.default_params)
        if len(set(body.ids)) < len(body.ids):
            twice = Counter(body.ids).most_common(1)[0][0]
            raise bad_field("ids", f"ids: {twice[:60]!r} is given twice; a session goes on in one way at a time")
        self.streams = [
            MemberStream(ClientSessionStream(context, owner, name, params, model=body.model))
            for name, params in zip(body.ids, self._params, strict=True)
        ]
        self._answers: list[Answer | None] = [None] * len(self.streams)
        self.usage = Usage()
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.model_name,
        }

    async def check(self) -> None:
        """Take all sessions and check everything before anything runs. Raise ``ApiError`` that
        names the session: 404 and 409 for sessions, 400 for parameters."""
        for number, part in enumerate(self.streams):
            with self._about(number):
                part.stream.take()
        for number, (part, params) in enumerate(zip(self.streams, self._params, strict=True)):
            with self._about(number):
                await part.stream.take().check_generate(params)

    @contextmanager
    def _about(self, number: int) -> Iterator[None]:
        """Name in errors the session that they are about."""
        try:
            yield
        except (ApiError, QuireError) as error:
            found = api_error(error, FIELDS)
            param = f"ids.{number}" if found.param in (None, "session_id") else found.param
            message = f"ids.{number}: {found.message}"
            raise ApiError(found.status, message, param=param, code=found.code, headers=found.headers) from error

    async def whole(self) -> dict[str, Any]:
        """Run all to their ends, and return one choice for each, in the order of the ids."""
        async with aclosing(deltas(self.streams)) as found:
            async for index, delta in found:
                if delta.finish_reason != "error":
                    self._answer(index)
        choices = []
        for index, part in enumerate(self.streams):
            choice, answer = FAILED, self._answers[index]
            if answer is not None:
                (choice,) = answer.whole()["choices"]
                self.usage.add(answer.usage.completion)
            if part.failure:
                choice = {**choice, "finish_reason": "error"}
            choices.append(self._choice(index, choice) | {"num_tokens": len(part.stream.session)})
        return {**self._head, "choices": choices, "usage": self.usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a chunk for each delta with the session's id, and one with the usage if wanted."""
        options = self._body.stream_options
        rest = {"usage": None} if options is not None and options.include_usage else {}
        async with aclosing(deltas(self.streams)) as found:
            async for index, delta in found:
                choice = FAILED if delta.finish_reason == "error" else self._answer(index).choice_of(delta)
                self.usage.add(len(delta.token_ids))
                yield {**self._head, "choices": [self._choice(index, choice)], **rest}
        if rest:
            yield {**self._head, "choices": [], "usage": self.usage.body()}

    def _answer(self, index: int) -> Answer:
        """Return the answer of one session, from its first delta on."""
        answer = self._answers[index]
        if answer is None:
            stream = self.streams[index].stream
            answer = self._answers[index] = Answer(
                stream, self._body, self._params[index], model=self._context.model_name, request_id=self._request_id
            )
            self.usage.begin(stream.output)
        return answer

    def _choice(self, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return a choice with its index and its session, and the error that ended it."""
        failure = self.streams[index].failure if choice["finish_reason"] == "error" else {}
        return {**choice, "index": index, "session_id": self._body.ids[index], **failure}

    async def aclose(self) -> None:
        """Cancel unfinished streams, and return when all sessions are free."""
        await asyncio.gather(*(part.aclose() for part in self.streams))


class MemberStream:
    """A session's stream that ends with a delta of ``finish_reason`` "error" instead of raising."""

    def __init__(self, stream: ClientSessionStream) -> None:
        self.stream = stream
        self.failure: dict[str, Any] = {}
        """The error's answer, if there is an error."""

    @property
    def output(self) -> RequestOutput:
        return self.stream.output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampleDelta:
        if self.failure:
            raise StopAsyncIteration
        try:
            return await anext(self.stream)
        except QuireError as error:
            self.failure = api_error(error).body
            return SampleDelta(text="", token_ids=[], finish_reason="error")

    async def aclose(self) -> None:
        await self.stream.aclose()
