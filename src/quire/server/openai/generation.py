"""From the body of a request to streams of the engine: parameters, prompts, results.

Everything is checked before the first byte of an answer is sent. Tokenising, templates and grammars
take time, so they run on worker threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from quire.async_llm import AsyncSession, SampleDelta
from quire.async_llm.session import inner_session
from quire.async_llm.stream import PromptProgress
from quire.base.errors import Cancelled, InvalidArgument
from quire.base.outputs import CompletionOutput, FinishReason, Miss, RequestOutput, Reuse
from quire.base.sampling_params import SamplingParams, StructuredOutputs
from quire.base.segments import BlendParams, Segment
from quire.engine.prompts import Text
from quire.server.http.context import Context
from quire.server.http.errors import bad_field, naming
from quire.server.http.events import unless_gone
from quire.server.http.foreign_fields import rename
from quire.server.openai.protocol import GenerationBody, ResponseFormat
from quire.text.token_ids import as_token_ids
from quire.text.tokenizer import Tokenizer

MAX_LOGPROBS = 20
"""Most log-probabilities beside each token's own, as in OpenAI's chats and in vLLM."""

MAX_STOPS = 1_000
"""Most stop strings of a request, and most bad words."""
MAX_STOP_CHARACTERS = 10_000
"""Most characters of all stop strings of a request, and of all bad words."""
PROGRESS = 0.3
"""Seconds between two reports of how far a prompt is."""
MAX_DIGITS = 20
"""Most digits of a key of ``logit_bias``; more than any token id has."""

T = TypeVar("T")
Part: TypeAlias = Segment | Text
"""A piece of a prompt: text or token ids, perhaps as a segment."""
BLEND_NAMES = {one.name: f"blend.{one.name}" for one in fields(BlendParams)}
"""The body's names of the parameters of blending."""
Named: TypeAlias = AbstractContextManager[None]
"""A context of ``errors.naming``."""


class Source(AsyncIterable[SampleDelta], Protocol):
    """A stream of one prompt: an ``AsyncStream``, or a ``ClientSessionStream``."""

    @property
    def output(self) -> RequestOutput: ...
    @property
    def prompt_progress(self) -> PromptProgress | None: ...
    async def aclose(self) -> None: ...


# -- parameters ------------------------------------------------------------------------------------


def check_lists(context: Context, given: Mapping[str, Any]) -> None:
    """Raise ``ApiError`` 400 for uselessly long parameters, before any other code reads them."""
    size = context.llm.engine.checks.vocab_size
    for name in ("stop", "bad_words"):
        texts = given.get(name)
        if isinstance(texts, str):
            texts = [texts]
        if isinstance(texts, list) and len(texts) > MAX_STOPS:
            raise bad_field(name, f"{name} has {len(texts)} strings; at most {MAX_STOPS} are looked for")
        characters = sum(len(text) for text in texts if isinstance(text, str)) if isinstance(texts, list) else 0
        if characters > MAX_STOP_CHARACTERS:
            raise bad_field(name, f"{name} has {characters} characters; at most {MAX_STOP_CHARACTERS} are looked for")
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if len(given.get(name, ())) > size:
            raise bad_field(name, f"{name} has {len(given[name])} entries; the model has {size} tokens")
    for key in given.get("logit_bias", ()):
        if len(key) > MAX_DIGITS:
            raise bad_field("logit_bias", f"each key of logit_bias must be a token id, got {key[:MAX_DIGITS]!r}...")


def sampling_params(given: Mapping[str, Any], defaults: SamplingParams, fields: Mapping[str, str]) -> SamplingParams:
    """Return ``defaults`` changed by ``given``. Raise ``ApiError`` 400 about one of ``fields``."""
    with naming(fields):
        for name in ("logprobs", "prompt_logprobs"):
            count = given.get(name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidArgument(field=name, given=count, allowed=f"an integer in [0, {MAX_LOGPROBS}]")
        return defaults.replace(**given)


def chat_defaults(context: Context) -> SamplingParams:
    """Return the parameters of a chat that gives none. Unless the model's generation_config.json
    says otherwise, an answer may fill the context."""
    defaults = context.llm.default_params
    return defaults.replace(max_tokens=None) if defaults.max_tokens == SamplingParams().max_tokens else defaults


def asked_by(context: Context, body: GenerationBody) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters of a completion or a chat, and the body's field of each argument.
    ``response_format``, and the names that other servers have, are ``structured_outputs`` by other
    names. Raise ``ApiError`` 400 for two of them, and for long lists."""
    given, fields = body.sampling()
    rename(body.model_extra or {}, given, fields)
    check_lists(context, given)
    fields |= {"prompt": "prompt", "messages": "messages"}
    form = given.get("structured_outputs")
    if form is not None:
        given["structured_outputs"] = {name: value for name, value in form.items() if value is not None}
    others: dict[str, Any] = {}
    if (named := body.form()) is not None:
        others[named[0]] = named[1]
    if (wanted := form_of(body.response_format)) is not None:
        others["response_format"] = wanted
    if len(others) + (form is not None) > 1:
        both = [*(["structured_outputs"] if form is not None else []), *others]
        raise bad_field(both[0], f"{' and '.join(both)} both give a form; give one of them")
    for name, value in others.items():
        return given | {"structured_outputs": value}, fields | {"structured_outputs": name}
    return given, fields


def form_of(format: ResponseFormat | None) -> StructuredOutputs | None:
    """Return the form that a ``response_format`` asks for. Raise ``ApiError`` 400 for a malformed
    one."""
    if format is None:
        return None
    if format.type == "text":
        if format.schema_ is not None:
            raise bad_field(
                "response_format.schema", 'response_format of type "text" has no schema; its type is "json_schema"'
            )
        return None
    schema = format.schema_
    if format.type == "json_schema" and format.json_schema is not None:
        if schema is not None:
            raise bad_field("response_format.schema", "response_format has two schemas; give json_schema.schema only")
        schema = format.json_schema.schema_
    if format.type == "json_schema" and schema is None:
        raise bad_field(
            "response_format.json_schema",
            'response_format of type "json_schema" needs json_schema: {"name": ..., "schema": {...}}',
        )
    with naming({}, "response_format"):
        return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)


def blend_of(context: Context, body: GenerationBody) -> BlendParams | None:
    """Return the blending of a body's prompts; None for none. Raise ``ApiError`` 400 as
    ``read_blend`` does, and in a session."""
    params = read_blend(context, body.blend)
    if params is not None and body.session_id is not None:
        raise bad_field("blend", "blend cannot be given with session_id; POST /v1/sessions/{id}/edit has a mode for it")
    return params


def read_blend(context: Context, given: Any) -> BlendParams | None:
    """Return the parameters of a field ``blend``. Raise ``ApiError`` 400 for a wrong value, and for
    a model that cannot be blended."""
    if given is None or given is False:
        return None
    given = {} if given is True else given
    if not isinstance(given, dict):
        raise bad_field(
            "blend", f"blend must be true, false or an object with {', '.join(BLEND_NAMES)}, got {given!r:.60}"
        )
    for name in given:
        if name not in BLEND_NAMES:
            raise bad_field(f"blend.{name[:60]}", f"blend may hold {', '.join(BLEND_NAMES)}, got {name!r:.60}")
    with naming({"blend": "blend", **BLEND_NAMES}):
        params = BlendParams(**{name: value for name, value in given.items() if value is not None})
        context.llm.engine.blending.check(params)
        return params


# -- prompts ---------------------------------------------------------------------------------------


async def in_texts(context: Context, request: Request, size: int, function: Callable[[], T]) -> T:
    """Render or tokenise ``size`` characters on a thread for texts, unless the client goes away."""
    return await unless_gone(request, context.texts.run(size, function))


async def encoded(context: Context, text: str, *, endless: bool = False) -> NDArray[np.int64]:
    """Return the token ids of a prompt. Refuse a prompt that cannot fit before it is tokenised,
    unless ``endless``."""
    if not endless:
        context.llm.engine.checks.text(text)
    return await context.texts.run(len(text), lambda: encode(context.llm.tokenizer, text))


async def added(context: Context, session: AsyncSession, given: str | Sequence[int]) -> Sequence[int]:
    """Return the token ids of an addition to a session."""
    if not isinstance(given, str):
        return given
    encoded = partial(encode, None) if context.llm.tokenizer is None else inner_session(session).encode
    return (await context.texts.run(len(given), lambda: encoded(given))).tolist()  # type: ignore[no-any-return]


def encode(tokenizer: Tokenizer | None, prompt: str | Sequence[int], *, inside: bool = False) -> NDArray[np.int64]:
    """Return the token ids of a prompt, or of a text ``inside`` of one."""
    if not isinstance(prompt, str):
        return as_token_ids(prompt)
    if tokenizer is None:
        raise InvalidArgument("the text cannot be tokenised, for this model has no tokenizer; give token ids")
    return np.array(tokenizer.encode_inside(prompt) if inside else tokenizer.encode(prompt), dtype=np.int64)


def contents(parts: Sequence[Part]) -> list[Text]:
    """Return parts without marks."""
    return [part.content if isinstance(part, Segment) else part for part in parts]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids."""

    ids: NDArray[np.int64]
    given: Any
    """What ``AsyncLLM.generate`` takes."""

    @classmethod
    def of(cls, parts: Sequence[Part], encoded: Callable[[Any, bool], NDArray[np.int64]]) -> EncodedPrompt:
        """Return a prompt whose parts ``encoded`` turns into ids, each by itself. It is told which
        part is the first one."""
        ids: list[Any] = [encoded(content, not number) for number, content in enumerate(contents(parts))]
        pieces = [Segment(one) if isinstance(part, Segment) else one for part, one in zip(parts, ids, strict=True)]
        whole = np.concatenate(ids)
        return cls(whole, pieces if any(isinstance(part, Segment) for part in parts) else whole)


async def check_prompts(
    context: Context, request: Request, prompts: Iterable[tuple[NDArray[np.int64], Named]], params: SamplingParams
) -> None:
    """Raise the errors that ``AsyncLLM.stream`` would raise, on a worker thread: grammars take
    time. Beside the tokens of each prompt stands a context that names it in errors."""

    def check() -> None:
        checks = context.llm.engine.checks
        for tokens, about in prompts:
            with about:
                checks.tokens(tokens)
                checks.params(params)
                checks.length(tokens.size, params)

    await unless_gone(request, asyncio.to_thread(check))


async def check_form(context: Context, request: Request, form: StructuredOutputs, field: str) -> None:
    """Refuse a form that cannot be had, as what ``field`` says, on a worker thread."""
    params = SamplingParams(structured_outputs=form)
    with naming({}, field):
        await unless_gone(request, asyncio.to_thread(context.llm.engine.checks.params, params))


def check_number(context: Context, prompts: int, n: int) -> None:
    """Refuse a body that asks for more generations than the server takes in separate requests."""
    limit = context.settings.max_waiting
    if prompts * n > limit:
        raise bad_field(
            "n" if n > 1 else "prompt",
            f"{prompts} prompts with n={n} are {prompts * n} generations; at most {limit} may be asked for at a time",
        )


# -- results ---------------------------------------------------------------------------------------


async def deltas(sources: Sequence[Source]) -> AsyncGenerator[tuple[int, SampleDelta], None]:
    """Yield deltas of all sources as they come, with the source's index. Closing cancels all."""
    if len(sources) == 1:
        try:
            async for delta in sources[0]:
                yield 0, delta
        finally:
            await sources[0].aclose()
        return
    # A short queue, so that a slow reader gets few long deltas rather than many short ones.
    queue: asyncio.Queue[tuple[int, SampleDelta | BaseException | None]] = asyncio.Queue(len(sources))

    async def pump(index: int, source: Source) -> None:
        end: BaseException | None = None
        try:
            async for delta in source:
                await queue.put((index, delta))
        except Exception as error:
            end = error
        finally:
            await source.aclose()
        await queue.put((index, end))

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, SampleDelta):
                yield index, item
            elif item is None:
                left -= 1
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_progress(sources: Sequence[Source]) -> AsyncGenerator[tuple[int, SampleDelta] | PromptProgress, None]:
    """Yield the same, and before the first delta of a source that is alone how far its prompt
    is."""
    async with aclosing(deltas(sources)) as stream:
        first = asyncio.ensure_future(anext(stream, None))
        told: PromptProgress | None = None
        try:
            while not (await asyncio.wait([first], timeout=PROGRESS))[0]:
                progress = sources[0].prompt_progress if len(sources) == 1 else None
                if progress is not None and progress != told:
                    told = progress
                    yield progress
        finally:
            first.cancel()  # without an effect on what is done
            await asyncio.gather(first, return_exceptions=True)
        if (delta := first.result()) is not None:
            yield delta
        async for delta in stream:
            yield delta


async def finished(source: Source) -> RequestOutput:
    """Read one stream to its end, and return its output."""
    async with aclosing(deltas([source])) as stream:
        async for _ in stream:
            pass
    return source.output


def whole(output: CompletionOutput) -> SampleDelta:
    """Return a finished sample as the only delta of a stream."""
    return SampleDelta(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=output.logprobs,
    )


def ending(reason: FinishReason | None, stop_reason: str | int | None) -> dict[str, Any]:
    """Return ``finish_reason``, and vLLM's ``stop_reason``: the stop string or token id."""
    if reason == "cancelled":
        raise Cancelled("the request was cancelled")
    return {"finish_reason": reason, "stop_reason": stop_reason if reason == "stop" else None}


def summed(reports: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the report of one prompt. For several prompts it has the sums of what ``names`` name,
    and each prompt under ``prompts``."""
    if len(reports) == 1:
        return reports[0]
    by_tier: Counter[str] = Counter()
    for report in reports:
        by_tier.update(report["by_tier"])
    sums = {name: sum(report[name] for report in reports) for name in names}
    return {**sums, "by_tier": dict(by_tier), "prompts": reports}


def of_shared(reuse: Reuse) -> Reuse:
    """Return a report without the texts and the salts of other clients of the cache."""
    if reuse.miss is Miss.OTHER_SALT:
        return replace(reuse, miss=Miss.NONE, missed_at=None)
    return replace(reuse, quote="")


def usage_body(tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return OpenAI's ``usage`` object."""
    prompt, completion = tokens["prompt"], tokens["completion"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": tokens["cached"]},
    }
