"""``POST /v1/completions``: prompts are continued."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from quire.async_llm import SampleDelta
from quire.base.sampling_params import SamplingParams
from quire.base.segments import Segment
from quire.engine.prompts import Text
from quire.server.http.bodies import BodyRoute, check_count, off_loop
from quire.server.http.context import Context, context_of
from quire.server.http.errors import bad_field, naming, unsupported
from quire.server.http.events import STREAMED
from quire.server.openai.generation import (
    EncodedPrompt,
    Named,
    Part,
    asked_by,
    blend_of,
    check_number,
    check_prompts,
    contents,
    encode,
    ending,
    in_texts,
    sampling_params,
)
from quire.server.openai.hint_fields import for_prefetch, read_hints
from quire.server.openai.logprobs import Offsets, completion_logprobs, prompt_logprobs
from quire.server.openai.protocol import CompletionRequest, refuse_unsupported
from quire.server.openai.replies import Reply, RunOptions, answer, answer_in_session, head_of, prefetch
from quire.server.sessions.streams import ClientSessionStream
from quire.text.fill_middle import FillTokens

router = APIRouter(route_class=BodyRoute)

T = TypeVar("T")
C = TypeVar("C", bound=CompletionRequest)


@router.post("/v1/completions", tags=["OpenAI"], responses=STREAMED)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue prompts."""
    return await answer_completion(request, body)


async def answer_completion(
    request: Request,
    body: CompletionRequest,
    made: Callable[..., Reply] | None = None,
    *,
    prompts: list[Sequence[Part]] | None = None,
    run: Callable[[Reply, Sequence[Any], SamplingParams, RunOptions], Awaitable[Response]] = answer,
) -> Response:
    """Continue prompts: those of the body, or these ``prompts``. ``made`` makes the reply, a
    ``CompletionReply`` by default, and ``run`` runs the checked prompts."""
    context = context_of(request)
    refuse_unsupported(body)
    if body.echo and context.llm.tokenizer is None:
        raise bad_field("echo", "echo needs a tokenizer, and this model has none")
    if body.suffix and prompts is None:
        asked, after = body, body.suffix
        body, ids = await off_loop(request, lambda: filling(context, asked, asked.prompt, after, "suffix"))
        prompts = [[ids]]
    hints, blend = read_hints(context, request.state.owner, body), blend_of(context, body)
    body, prefetching = for_prefetch(body, hints)
    given, fields = asked_by(context, body)
    params = _params(context, body, given, fields)
    if body.session_id is not None:
        prompt = await off_loop(request, lambda: _session_prompt(body))
        with naming(fields, "session_id"):
            source = ClientSessionStream(
                context,
                request.state.owner,
                body.session_id,
                params,
                prompt=prompt,
                model=body.model,
                hints=hints.hints,
            )
            continued = CompletionReply(request, context, body, given, params, [])
            continued.hints = hints
            return await answer_in_session(continued, source)
    options = RunOptions(
        adapter=context.adapter_of(body.model),
        cache_salt=context.salt(request.state.owner, body.cache_salt),
        blend=blend,
    )
    if prompts is None:
        prompts = await off_loop(request, lambda: _prompts(body.prompt))
    check_number(context, len(prompts), params.n)
    found = await _encoded(context, request, prompts, fields)
    encoded = [one.ids for one in found]
    await check_prompts(context, request, _named(encoded, fields), params)
    reply = (made or CompletionReply)(request, context, body, given, params, prompts)
    reply.hints = hints
    if prefetching:
        return await prefetch(reply, encoded, options)
    return await run(reply, [one.given for one in found], params, options)


def _params(
    context: Context, body: CompletionRequest, given: Mapping[str, Any], fields: Mapping[str, str]
) -> SamplingParams:
    # An echo of no new tokens runs one, which is not sent: a request has at least one.
    least = {"max_tokens": 1} if body.echo and given.get("max_tokens") == 0 else {}
    params = sampling_params({**given, **least}, context.llm.default_params, fields)
    if body.echo and params.logprobs is not None:
        params = params.replace(prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
    return params


def _prompts(prompt: Any) -> list[Sequence[Part]]:
    """Return the parts of one prompt or many. Raise ``ApiError`` 400 with the place of a bad
    one."""
    if prompt is None:
        raise bad_field("prompt", "prompt is missing: text, token ids, or a list of either is needed")
    if isinstance(prompt, list) and prompt and type(prompt[0]) is not int:
        check_count("prompt", prompt)
    if isinstance(prompt, list) and any(isinstance(part, dict) for part in prompt):
        return [[_part(part, f"prompt.{number}") for number, part in enumerate(prompt)]]
    listed = [prompt] if _is_one(prompt) else prompt
    if not isinstance(listed, list) or not listed:
        raise bad_field("prompt", f"prompt must be text, token ids, or a list of either, got {prompt!r:.60}")
    for number, item in enumerate(listed):
        if not _is_one(item):
            raise bad_field(f"prompt.{number}", f"prompt.{number} must be text or token ids, got {item!r:.60}")
    return [[item] for item in listed]


def _part(part: Any, where: str) -> Part:
    given: dict[str, Any] = part if isinstance(part, dict) else {}
    content: Any = given.get("text", given.get("tokens"))
    name, marked = "text" if isinstance(content, str) else "tokens", given.get("segment", False)
    right = _is_one(content) and given.keys() <= {"type", name, "segment"} and given.get("type", "text") == "text"
    if not right or not isinstance(marked, bool):
        raise bad_field(
            where,
            f'{where} must be {{"text": "..."}} or {{"tokens": [...]}}, perhaps with "segment": true, got {part!r:.60}',
        )
    return Segment(content) if marked else content


def _is_one(prompt: Any) -> bool:
    """Return whether a prompt, or a part of it, is text or token ids."""
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)
    )


def _session_prompt(body: CompletionRequest) -> Any:
    why = "a session keeps the state of its own prompt; leave it out"
    for name in ("echo", "cache_salt"):
        if getattr(body, name):
            raise bad_field(name, f"{name} cannot be given with session_id: {why}")
    if body.prompt is None or body.prompt in ("", []):
        return None
    prompts = _prompts(body.prompt)
    if len(prompts) != 1:
        raise bad_field("prompt", f"a session goes on with one prompt, got {len(prompts)}")
    if len(prompts[0]) != 1 or isinstance(prompts[0][0], Segment):
        raise bad_field("prompt", "a session goes on with text or token ids, and takes no parts")
    return prompts[0][0]


def _named(prompts: Sequence[T], fields: Mapping[str, str]) -> Iterator[tuple[T, Named]]:
    """Yield each prompt with a context that turns errors into answers about this prompt."""
    for number, prompt in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt.{number}"
        yield prompt, naming({**fields, "prompt": name}, name)


async def _encoded(
    context: Context, request: Request, prompts: Sequence[Sequence[Part]], fields: Mapping[str, str]
) -> list[EncodedPrompt]:
    """Return the tokens of all prompts. Refuse texts that are too long before that."""
    for prompt, about in _named(prompts, fields):
        with about:
            context.llm.engine.checks.text("".join(one for one in contents(prompt) if isinstance(one, str)))

    def encoded(part: Text, first: bool) -> NDArray[np.int64]:
        return encode(context.llm.tokenizer, part, inside=not first)

    def encode_all() -> list[EncodedPrompt]:
        found = []
        for prompt, about in _named(prompts, fields):
            with about:
                found.append(EncodedPrompt.of(prompt, encoded))
        return found

    size = sum(len(one) for prompt in prompts for one in contents(prompt))
    return await in_texts(context, request, size, encode_all)


def filling(
    context: Context, body: C, before: Any, after: str, field: str, others: Sequence[tuple[str, str]] = ()
) -> tuple[C, list[int]]:
    """Return a body that ends where the text between ``before`` and ``after`` ends, and the prompt
    for that text. Raise ``ApiError`` 400, about a ``field``, for a model without the tokens."""
    tokenizer = context.llm.tokenizer
    tokens = FillTokens.of(tokenizer)
    if tokens is None or tokenizer is None:
        reason = (
            "this model has no tokens for filling in the middle, such as <|fim_prefix|>; load a code model that has"
        )
        raise unsupported(field, reason)
    if not isinstance(before, str):
        raise bad_field("prompt", f"prompt must be one text beside {field}, got {before!r:.60}")
    for name in ("session_id", "echo", "blend"):
        if getattr(body, name):
            raise bad_field(name, f"{name} cannot be given with {field}; leave one of them out")
    with naming({}, "prompt"):
        context.llm.engine.checks.text("".join([*(text for pair in others for text in pair), before, after]))
    stops = [*body.sampling()[0].get("stop_token_ids", ()), *tokens.ends]
    return body.model_copy(update={"stop_token_ids": stops or None}), tokens.prompt(tokenizer, before, after, others)


class CompletionReply(Reply):
    """Choices with ``text``. Sample s of prompt p has the index p * n + s."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(
        self,
        request: Request,
        context: Context,
        body: CompletionRequest,
        given: Mapping[str, Any],
        params: SamplingParams,
        prompts: Sequence[Sequence[Part]],
    ) -> None:
        """Begin the answer. ``given``: parameters of the body, before an echo changed them."""
        super().__init__(request, context, body, **head_of(context, body))
        self._params = params
        self._prompts = prompts
        self._echo = bool(body.echo)
        self._silent = self._echo and given.get("max_tokens") == 0
        """Whether only the prompt is wanted."""
        self._prompt_logprobs = given.get("prompt_logprobs")
        self._choices: dict[int, Offsets] = {}

    def count(self, delta: SampleDelta) -> int:
        return 0 if self._silent else len(delta.token_ids)

    def choice(self, number: int, delta: SampleDelta) -> dict[str, Any]:
        index = number * self._params.n + delta.index
        first = index not in self._choices
        ids = [] if self._silent else delta.token_ids
        entries: list[Any] = [] if self._silent else delta.logprobs or []
        text = "" if self._silent else delta.text
        if first:
            output = self.outputs[number]
            tokenizer = self.tokenizer
            skips = self._params.skip_special_tokens
            self._choices[index] = Offsets(
                tokenizer, [] if self._echo else output.prompt_token_ids, skip_special_tokens=skips
            )
            if self._echo:
                assert tokenizer is not None  # checked before
                given = [
                    part if isinstance(part, str) else tokenizer.decode(part, skip_special_tokens=skips)
                    for part in contents(self._prompts[number])
                ]
                text = "".join([*given, text])
                ids = [*output.prompt_token_ids, *ids]
                # The first token has no entry, so a prompt of one token has no others.
                entries = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *entries]
        end = ending(delta.finish_reason, delta.stop_reason)
        if self._silent and delta.finish_reason is not None:
            end = {"finish_reason": "length", "stop_reason": None}
        logprobs = None
        if (count := self._params.logprobs) is not None:
            named = None if self.names_ids else self.tokenizer
            logprobs = completion_logprobs(ids, entries, count, self._choices[index], named)
        choice = {"index": index, "text": text, "logprobs": logprobs, **end}
        if self.shows_ids:
            choice["token_ids"] = [] if self._silent else delta.token_ids
            if first:
                choice["prompt_token_ids"] = self.outputs[number].prompt_token_ids
        if first and self._prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.outputs[number].prompt_logprobs, self._prompt_logprobs)
        return choice

    def chunk_choices(self, number: int, delta: SampleDelta) -> list[dict[str, Any]]:
        choice = self.choice(number, delta)
        # Text that could become a stop string or a character is held back.
        told = choice["text"] or choice["logprobs"] is not None or self.shows_ids
        return [choice] if told or delta.finish_reason is not None else []
