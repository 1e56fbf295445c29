"""One answer to a completion or a chat, at once or in chunks.

A ``Reply`` turns deltas of samples into choices. An answer that is not streamed is made by the same
code, of one delta for each sample, so both have the same content.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from quire.async_llm import SampleDelta
from quire.async_llm.stream import PromptProgress
from quire.base.errors import QuireError
from quire.base.outputs import CompletionOutput, RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.base.segments import BlendParams
from quire.server.http.context import Context
from quire.server.http.errors import ApiError, bad_field
from quire.server.http.events import Chunk, Chunks, EventStream, JsonAnswer, unless_gone
from quire.server.http.sites import page_reads_only
from quire.server.openai.generation import Source, deltas, finished, of_shared, summed, usage_body, whole, with_progress
from quire.server.openai.hint_fields import HintFields
from quire.server.openai.protocol import GenerationBody, StreamOptions
from quire.server.sessions.bodies import ContinueBody
from quire.server.sessions.streams import ClientSessionStream

LONG_ANSWER = 1024
"""Tokens of prompts and samples beyond which a worker thread writes the answer."""
NOTHING = CompletionOutput(index=0, text="", token_ids=[], finish_reason="length")
"""The sample of a request for no tokens."""


class Reply(ABC):
    """The answer to one request."""

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    stream_class: ClassVar[type[EventStream]] = EventStream
    """How chunks are sent."""

    def __init__(self, request: Request, context: Context, body: GenerationBody | ContinueBody, **head: Any) -> None:
        """Begin the answer. ``head``: what it says of itself besides its id, kind and time."""
        self.request = request
        self.context = context
        self.hints = HintFields()
        self.unplaced: tuple[str, ...] = ()
        """``Blend.unplaced``."""
        self.tokenizer = context.llm.tokenizer
        self.outputs: dict[int, RequestOutput] = {}
        self.tokens: Counter[str] = Counter()
        """Tokens of all prompts by their names in the log: prompt, cached, completion."""
        self.report: dict[str, Any] = {}
        """The reports of a stream's last chunk, noted by ``choices``."""
        self.model = body.model or context.model_name
        self._alone = not (context.settings.share_prefix_cache and request.state.owner)
        """Whether no other client has a part in the prefix cache that its prompts see."""
        request.state.tokens = self.tokens
        self.stream = bool(body.stream)
        asked = body if isinstance(body, GenerationBody) else None
        self.shows_ids = asked is not None and bool(asked.return_token_ids)
        """Whether the answer has the ids of tokens."""
        self.names_ids = asked is not None and bool(asked.return_tokens_as_token_ids)
        """Whether log-probabilities name tokens by their ids."""
        self.tells_progress = asked is not None and self.stream and bool(asked.return_progress)
        """Whether chunks tell how far the prompt is."""
        self._timed = asked is not None and (asked.return_progress or asked.timings_per_token is not None)
        self._timed_chunks = asked is not None and bool(asked.timings_per_token)
        self.began = time.monotonic()
        options = body.stream_options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        self._running_usage = bool(options.continuous_usage_stats)
        self._head = {
            "id": f"{self.prefix}-{request.state.request_id}",
            "object": self.object,
            "created": int(time.time()),
            **head,
        }

    @abstractmethod
    def choice(self, number: int, delta: SampleDelta) -> dict[str, Any]:
        """Return the choice of a sample's only delta, for an answer that is sent at once."""

    @abstractmethod
    def chunk_choices(self, number: int, delta: SampleDelta) -> list[dict[str, Any]]:
        """Return the additions of one delta to a choice, one entry for each chunk."""

    def of_prompt(self, number: int) -> dict[str, Any]:
        """Return the fields of a prompt that an answer has once, beside its choices."""
        return {}

    def count(self, delta: SampleDelta) -> int:
        """Return the number of a delta's tokens that were generated for the client."""
        return len(delta.token_ids)

    def begin(self, number: int, output: RequestOutput) -> None:
        """Count prompt ``number``, and take its output after the prompt was run."""
        self.tokens.update(prompt=len(output.prompt_token_ids), cached=output.num_cached_tokens, completion=0)
        self.outputs[number] = output

    def at_once(self, outputs: Sequence[RequestOutput]) -> Chunk:
        """Return the whole answer."""
        choices = []
        for number, output in enumerate(outputs):
            self.begin(number, output)
            for sample in output.outputs:
                if sample.finish_reason == "error":
                    raise sample.failure or QuireError(sample.error or "the request failed")
                delta = whole(sample)
                self.tokens["completion"] += self.count(delta)
                choices.append(self.choice(number, delta))
        return self.body_of(choices)

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Chunk:
        """Return the body of an answer that is sent at once."""
        return {
            **self._head,
            "choices": choices,
            **self.of_prompt(0),
            "usage": usage_body(self.tokens),
            **self.quire(list(self.outputs.values())),
        }

    def ended(self, outputs: Sequence[RequestOutput]) -> None:  # noqa: B027 - only chats act on it
        """Record the answer as complete. Runs on the event loop."""

    async def keep(self) -> None:  # noqa: B027 - only responses are kept
        """Store the finished answer, if it is one that later requests may name."""

    def failed(self, error: ApiError) -> Chunk:
        """Return the last chunk of a stream that an error ended."""
        return error.body

    def quire(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the reports beside the usage that OpenAI does not have: reuse and blending of the
        prompts that ran, speculation, and outcomes of hints; and ``timings``, if they are asked
        for."""
        found: dict[str, Any] = {}
        if ran := [self.outputs[number] for number in sorted(self.outputs)]:
            reuses = [output.reuse if self._alone else of_shared(output.reuse) for output in ran]
            found["reuse"] = summed([one.as_dict() for one in reuses], ("cached", "replayed"))
        if blends := [output.blend for output in outputs if output.blend is not None]:
            reports = [replace(one, unplaced=self.unplaced).as_dict() for one in blends]
            found["blend"] = summed(reports, ("blended", "recomputed", "exact"))
        if counts := [output.speculation for output in outputs if output.speculation is not None]:
            found["speculation"] = sum(counts[1:], counts[0]).as_dict()
        if hints := self.hints.answers(dict(zip(sorted(self.outputs), outputs, strict=True))):
            found["hints"] = hints
        return {**({"quire": found} if found else {}), **self._timings(self._timed)}

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        """Yield the answer as it comes."""
        head = {**self._head, "object": self.chunk_object}
        # What was reused, and done with hints, is known at the end, and goes with the last chunk.
        held: Chunk | None = None
        found: AsyncGenerator[tuple[int, SampleDelta] | PromptProgress, None]
        found = with_progress(sources) if self.tells_progress else deltas(sources)
        try:
            async with aclosing(found) as stream:
                async for item in stream:
                    if isinstance(item, PromptProgress):
                        yield {**head, "choices": [], "prompt_progress": progress_of(item, began=self.began)}
                        continue
                    number, delta = item
                    about: dict[str, Any] = {}
                    # A session of a batch may have failed before its prompt was run.
                    if number not in self.outputs and delta.finish_reason != "error":
                        self.begin(number, sources[number].output)
                        about = self.of_prompt(number)
                    self.tokens["completion"] += self.count(delta)
                    for choice in self.chunk_choices(number, delta):
                        if held is not None:
                            yield held
                        chunk: Chunk = {**head, "choices": [choice], **about, **self._usage_of_chunk()}
                        about = {}
                        held = None if self._with_usage or choice.get("finish_reason") is None else chunk
                        if held is None:
                            yield chunk
        except Exception:
            if held is not None:
                yield held
            raise
        outputs = [sources[number].output for number in sorted(self.outputs)]
        self.ended(outputs)
        if held is not None:
            yield {**held, **self.quire(outputs)}
        if self._with_usage:
            yield {**head, "choices": [], "usage": usage_body(self.tokens), **self.quire(outputs)}

    async def choices(self, sources: Sequence[Source]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the choices of all chunks, for answers that are said in another form."""
        async with aclosing(Reply.chunks(self, sources)) as stream:
            async for chunk in stream:
                if "quire" in chunk:
                    self.report = {"quire": chunk["quire"]}
                for choice in chunk["choices"]:
                    yield choice

    def stream_of(self, sources: Sequence[Source]) -> Response:
        """Return the answer that is sent as it comes."""
        return self.stream_class(self.chunks(sources), sources, self.failed)

    def _usage_of_chunk(self) -> dict[str, Any]:
        timings = self._timings(self._timed_chunks)
        if self._running_usage:
            return {"usage": usage_body(self.tokens), **timings}
        return {"usage": None, **timings} if self._with_usage else timings

    def _timings(self, asked: bool | None) -> dict[str, Any]:
        """Return ``timings`` of a prompt that is alone."""
        if not asked or [*self.outputs] != [0]:
            return {}
        tokens = self.tokens
        return {"timings": timings_of(self.outputs[0], tokens["completion"], cached=tokens["cached"], began=self.began)}


def head_of(context: Context, body: GenerationBody) -> dict[str, Any]:
    """Return the fields of an answer in OpenAI's shape that name its model."""
    session = {} if body.session_id is None else {"session_id": body.session_id}
    return {"model": body.model or context.model_name, **session, "system_fingerprint": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How the prompts of a request run."""

    adapter: str | None
    cache_salt: str | None
    """As ``Context.salt`` returns it."""
    blend: BlendParams | None


async def answer(reply: Reply, prompts: Sequence[Any], params: SamplingParams, options: RunOptions) -> Response:
    """Run checked prompts, each an array of token ids or parts of it, for a client that may go
    away."""
    llm = reply.context.llm
    keywords: dict[str, Any] = {
        "adapter": options.adapter,
        "cache_salt": options.cache_salt,
        "blend": options.blend,
        "hints": reply.hints.hints,
    }
    if reply.stream:
        return reply.stream_of([llm.stream(prompt, params, **keywords) for prompt in prompts])
    return await _whole(reply, await unless_gone(reply.request, llm.generate(list(prompts), params, **keywords)))


async def prefetch(reply: Reply, prompts: Sequence[NDArray[np.int64]], options: RunOptions) -> Response:
    """Bring checked prompts into the pool, and answer without a token."""
    if options.blend is not None:
        raise bad_field(
            "blend", "a prefetch computes the prompt in full; leave blend out, or send segments to /v1/warm"
        )
    outputs = []
    for prompt in prompts:
        run = reply.context.llm.prefetch(
            prompt.tolist(), adapter=options.adapter, cache_salt=options.cache_salt, hints=reply.hints.hints
        )
        output = await unless_gone(reply.request, run)
        outputs.append(replace(output, prompt_token_ids=prompt.tolist(), outputs=[NOTHING]))
    return JsonAnswer(reply.at_once(outputs))


async def answer_in_session(reply: Reply, source: ClientSessionStream) -> Response:
    """Continue a session for such a client. The session refuses with its first delta."""
    if reply.request.state.reads_only:
        raise page_reads_only()
    if reply.stream:
        try:
            # A first chunk about the prompt comes when the session has raised all its refusals.
            if not reply.tells_progress:
                await unless_gone(reply.request, source.begin())
        except BaseException:
            await source.aclose()
            raise
        return reply.stream_of([source])
    return await _whole(reply, [await unless_gone(reply.request, finished(source))])


async def _whole(reply: Reply, outputs: Sequence[RequestOutput]) -> Response:
    """Return an answer at once. A worker thread writes a long one, which may take seconds."""

    def write() -> Response:
        return JsonAnswer(reply.at_once(outputs))

    size = sum(
        len(output.prompt_token_ids) + sum(len(sample.token_ids) for sample in output.outputs) for output in outputs
    )
    written = write() if size <= LONG_ANSWER else await asyncio.to_thread(write)
    reply.ended(outputs)
    await reply.keep()
    return written


# -- llama-server's timings -----------------------------------------------------------------------


def timings_of(output: RequestOutput, tokens: int, *, cached: int, began: float) -> dict[str, Any]:
    """Return ``timings``: of a prompt, asked for at ``began``, and of the ``tokens`` behind it."""
    now, metrics = time.monotonic(), output.metrics
    first = metrics.first_token_time or metrics.finished_time or now
    end = metrics.finished_time or now
    computed = len(output.prompt_token_ids) - cached
    return {
        "cache_n": cached,
        **_rates("prompt", computed, max(0.0, first - began)),
        **_rates("predicted", tokens, max(0.0, end - first)),
    }


def progress_of(progress: PromptProgress, *, began: float) -> dict[str, Any]:
    elapsed = round(1000 * (time.monotonic() - began))
    return {"total": progress.total, "cache": progress.cached, "processed": progress.done, "time_ms": elapsed}


def _rates(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }
