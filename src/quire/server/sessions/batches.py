"""Answers to generations in sessions: in one, and in several together.

All sessions of a batch are taken and checked before the first one runs. Then each is a stream of
its own, and the engine runs them in one batch. A session that fails ends with ``finish_reason``
"error"; the others continue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.async_llm import SampleDelta
from quire.base.errors import QuireError
from quire.base.outputs import RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.server.http.context import Context
from quire.server.http.errors import ApiError, api_error, bad_field
from quire.server.http.events import Chunk, JsonAnswer, unless_gone
from quire.server.openai.generation import deltas, whole
from quire.server.openai.hint_fields import HintFields, read_hints
from quire.server.openai.logprobs import Offsets, completion_logprobs
from quire.server.openai.replies import NOTHING, Reply
from quire.server.sessions.bodies import ContinueBody, GenerateBody, GenerateManyBody, SamplingBody
from quire.server.sessions.streams import FAILED, ClientSessionStream

FIELDS: Mapping[str, str] = {name: name for name in SamplingBody.model_fields}
"""Fields that errors may be about. All other errors are about the session."""


class SessionReply(Reply):
    """Choices with ``text`` and ``token_ids``. That of stream s has the index s."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(
        self,
        request: Request,
        context: Context,
        body: ContinueBody,
        streams: Sequence[ClientSessionStream],
        params: Sequence[SamplingParams],
        **head: Any,
    ) -> None:
        super().__init__(request, context, body, **head)
        self.streams = streams
        self._params = params
        self._offsets: dict[int, Offsets] = {}

    def choice(self, number: int, delta: SampleDelta) -> dict[str, Any]:
        params, logprobs = self._params[number], None
        if params.logprobs is not None and delta.logprobs is not None:
            if number not in self._offsets:
                before, skips = self.outputs[number].prompt_token_ids, params.skip_special_tokens
                self._offsets[number] = Offsets(self.tokenizer, before, skip_special_tokens=skips)
            offsets = self._offsets[number]
            logprobs = completion_logprobs(delta.token_ids, delta.logprobs, params.logprobs, offsets, self.tokenizer)
        return {
            "index": number,
            "text": delta.text,
            "token_ids": delta.token_ids,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def chunk_choices(self, number: int, delta: SampleDelta) -> list[dict[str, Any]]:
        return [self.choice(number, delta)]

    def at_once(self, outputs: Sequence[RequestOutput]) -> Chunk:
        return {**super().at_once(outputs), "num_tokens": len(self.streams[0].session)}


class SessionBatch(SessionReply):
    """The streams of several sessions of one owner, and their common answer."""

    def __init__(
        self, request: Request, context: Context, body: GenerateManyBody, params: Sequence[SamplingParams]
    ) -> None:
        """Take the parameters of each session. Raise ``ApiError`` 400 for repeated ids."""
        if len(set(body.ids)) < len(body.ids):
            twice = Counter(body.ids).most_common(1)[0][0]
            raise bad_field("ids", f"ids: {twice[:60]!r} is given twice; a session goes on in one way at a time")
        hints = read_hints(context, request.state.owner, body)
        streams = [
            ClientSessionStream(
                context, request.state.owner, name, one, model=body.model, hints=hints.hints, raises=False
            )
            for name, one in zip(body.ids, params, strict=True)
        ]
        super().__init__(request, context, body, streams, params, model=context.model_name)
        self.hints = hints

    async def check(self) -> None:
        """Take all sessions and check everything before anything runs. Raise ``ApiError`` that
        names the session: 404 and 409 for sessions, 400 for parameters."""
        for number, stream in enumerate(self.streams):
            with self._errors_about(number):
                await stream.take()
        for number, (stream, params) in enumerate(zip(self.streams, self._params, strict=True)):
            with self._errors_about(number):
                await (await stream.take()).check_generate(params)

    @contextmanager
    def _errors_about(self, number: int) -> Iterator[None]:
        """Name in errors the session that they are about."""
        try:
            yield
        except (ApiError, QuireError) as error:
            found = api_error(error, FIELDS)
            param = f"ids.{number}" if found.param in (None, "session_id") else found.param
            message = f"ids.{number}: {found.message}"
            raise ApiError(found.status, message, param=param, code=found.code, headers=found.headers) from error

    async def whole(self) -> Chunk:
        """Run all to their ends, and return one choice for each, in the order of the ids."""
        async with aclosing(deltas(self.streams)) as found:
            begun = {number async for number, delta in found if delta is not FAILED}
        choices = []
        for number, stream in enumerate(self.streams):
            delta = FAILED
            if number in begun:
                self.begin(number, stream.output)
                delta = whole(stream.output.outputs[0])
                self.tokens["completion"] += self.count(delta)
            if stream.failure:
                delta = replace(delta, finish_reason="error")
            choices.append(self.choice(number, delta) | {"num_tokens": len(stream.session)})
        return self.body_of(choices)

    def choice(self, number: int, delta: SampleDelta) -> dict[str, Any]:
        """Return a choice with its session, and the error that ended it."""
        failure = self.streams[number].failure if delta.finish_reason == "error" else {}
        return {**super().choice(number, delta), "session_id": self.streams[number].session_id, **failure}

    async def aclose(self) -> None:
        """Cancel unfinished streams, and return when all sessions are free."""
        await asyncio.gather(*(stream.aclose() for stream in self.streams))


async def prefetched(
    request: Request,
    context: Context,
    body: GenerateBody,
    stream: ClientSessionStream,
    params: SamplingParams,
    hints: HintFields,
) -> Response:
    """Bring the state of a session into the pool, and answer without a token."""
    if body.prompt is not None or body.messages is not None:
        name = "prompt" if body.messages is None else "messages"
        raise bad_field(name, f"a prefetch (max_tokens=0) is of what the session holds; leave {name} out")
    hints.refuse_others("a prefetch without tokens keeps a session as it is; pin the session, or generate")
    try:
        session = await unless_gone(request, stream.take())
        reuse = await unless_gone(request, session.compute(priority=hints.priority))
        ids = session.tokens
        output = RequestOutput(
            request_id=request.state.request_id,
            prompt=None,
            prompt_token_ids=ids,
            outputs=[NOTHING],
            num_cached_tokens=reuse.cached,
            reuse=reuse,
        )
        model = session.adapter or context.model_name
        reply = SessionReply(request, context, body, [stream], [params], model=model, session_id=stream.session_id)
        reply.hints = hints
        return JsonAnswer(reply.at_once([output]))
    finally:
        await stream.aclose()
