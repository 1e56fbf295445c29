"""``POST /v1/chat/completions``: conversations are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.async_llm import SampleDelta
from quire.base.errors import InvalidArgument
from quire.base.outputs import RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.base.segments import BlendParams, Segment
from quire.server.http.bodies import BodyRoute, off_loop
from quire.server.http.context import Context, context_of
from quire.server.http.errors import ApiError, bad_field, naming
from quire.server.http.events import STREAMED
from quire.server.openai.cache_marks import CacheMark, pin_all, pin_at, without_marks
from quire.server.openai.conversations import Conversation, Messages, check_variables, request_variables
from quire.server.openai.generation import (
    EncodedPrompt,
    asked_by,
    blend_of,
    chat_defaults,
    check_form,
    check_number,
    check_prompts,
    ending,
    in_texts,
    sampling_params,
)
from quire.server.openai.hint_fields import HintFields, for_prefetch, read_hints
from quire.server.openai.logprobs import chat_logprobs, prompt_logprobs
from quire.server.openai.protocol import ChatRequest, refuse_unsupported
from quire.server.openai.replies import Reply, RunOptions, answer, answer_in_session, head_of, prefetch
from quire.server.openai.reruns import Run
from quire.server.sessions.streams import ClientSessionStream
from quire.server.tools.choice import ToolChoice, calls_or_answer_form, forced_form
from quire.server.tools.harmony import MARKERS, STOPS, in_reasoning, is_harmony
from quire.server.tools.messages import MessageFormat, MessageReader, answer_of, message_of
from quire.server.tools.reasoning import reasoning_for
from quire.server.tools.tools import parser_for
from quire.sessions.chat_turns import TemplateInputs, parts_from
from quire.text.chat_rendering import render_chat, select_template
from quire.text.chat_segments import cut_at_segments, first_of, without_segments
from quire.text.spelled_tokens import SpelledTokens
from quire.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute)

T = TypeVar("T")


@router.post("/v1/chat/completions", tags=["OpenAI"], responses=STREAMED)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    return await answer_chat(request, body)


async def answer_chat(
    request: Request, body: ChatRequest, made: Callable[..., ChatReply] | None = None, *, more: int = 0
) -> Response:
    """Answer a chat. ``made`` makes the reply, a ``ChatReply`` by default. ``more``: characters of
    messages that are not in the request's own body."""
    asked = await _read(request, body)
    if body.session_id is not None:
        return await _answer_in_session(request, asked, made or ChatReply)
    return await _answer_history(request, asked, made or ChatReply, more)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    context: Context
    body: ChatRequest
    """The body, whose messages have neither marks nor segments."""
    tokenizer: Tokenizer
    segmented: Messages
    """The messages with their segments."""
    tools: ToolChoice
    params: SamplingParams
    fields: Mapping[str, str]
    """The client's names of the parameters' fields."""
    hints: HintFields
    marks: Sequence[CacheMark]
    blend: BlendParams | None
    prefetching: bool


async def _read(request: Request, body: ChatRequest) -> _Asked:
    context = context_of(request)
    refuse_unsupported(body)
    check_variables(body.chat_template_kwargs)
    tokenizer = _tokenizer(context)
    hints, blend = read_hints(context, request.state.owner, body), blend_of(context, body)
    body, prefetching = for_prefetch(body, hints)
    given = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    asked = body.messages
    segmented, listed, marks = await off_loop(request, lambda: without_marks(asked, given))
    try:
        bare, _ = await off_loop(request, lambda: without_segments(segmented))
    except InvalidArgument as error:
        raise ApiError(400, str(error), param=error.field, code="invalid_argument") from None
    tools = ToolChoice.of(body, listed)
    params, fields = _params(context, body, tools)
    return _Asked(
        context=context,
        body=body.model_copy(update={"messages": bare}),
        tokenizer=tokenizer,
        segmented=segmented,
        tools=tools,
        params=params,
        fields=fields,
        hints=hints,
        marks=marks,
        blend=blend,
        prefetching=prefetching,
    )


async def _answer_in_session(request: Request, asked: _Asked, made: Callable[..., ChatReply]) -> Response:
    """Answer the new messages of a conversation that a session holds."""
    context, body, session_id = asked.context, asked.body, asked.body.session_id
    assert session_id is not None
    _check_session(body)
    with naming(asked.fields, "session_id"):
        inputs, template = _inputs(asked)
        begun = _begun(asked.tokenizer, template, inputs) if inputs.variables else None
        format, params = _reading(asked, template, begun)
        # The template writes the wrappers of an answer's text itself, or refuses them.
        wrapped = format.harmony or (format.calls is not None and bool(format.calls.wrappers))
        whole, ids = inputs != TemplateInputs(), dict[int, str]()
        pin_all(asked.hints, asked.marks)
        source = ClientSessionStream(
            context,
            request.state.owner,
            session_id,
            params,
            messages=body.messages,
            answer=(lambda text: answer_of(text, format, ids, whole=whole)) if wrapped or whole else None,
            inputs=inputs,
            model=body.model,
            hints=asked.hints.hints,
        )
        reply = made(request, context, body, asked.params, asked.tools, format)
        reply.ids = ids
        reply.rerun = lambda message, output: source.session.prefetch_next_turn
        reply.hints = asked.hints
        return await answer_in_session(reply, source)


def _inputs(asked: _Asked) -> tuple[TemplateInputs, str]:
    """Return the template's variables beside the messages of a session, and the template."""
    template = _template(asked)
    return TemplateInputs(tools=asked.tools.shown, variables=request_variables(asked.body, template)), template


def _template(asked: _Asked) -> str:
    return select_template(asked.tokenizer.chat_templates, with_tools=asked.tools.given is not None)


def _begun(tokenizer: Tokenizer, template: str, inputs: TemplateInputs) -> str:
    """Return a prompt that ends as those of the session do: with thoughts that are open, or
    closed."""
    given = {**tokenizer.special_tokens, **inputs.variables}
    return render_chat(template, [{"role": "user", "content": "a"}], tools=inputs.tools, **given)


async def _answer_history(request: Request, asked: _Asked, made: Callable[..., ChatReply], more: int) -> Response:
    """Answer a conversation that the request brings as a whole."""
    context, body, tools = asked.context, asked.body, asked.tools
    adapter = context.adapter_of(body.model)
    check_number(context, 1, asked.params.n)
    if tools.answer is not None:
        await check_form(context, request, tools.answer, "response_format")
    chat = _conversation(asked)
    # The text is about as long as the body that it is made of.
    size = len(await request.body()) + more
    prompt, unplaced, format, params = await in_texts(context, request, size, lambda: _rendered(asked, chat))
    await check_prompts(context, request, [(prompt.ids, naming(asked.fields, "messages"))], params)
    reply = made(request, context, body, params, tools, format)
    reply.hints, reply.unplaced = asked.hints, unplaced
    options = RunOptions(
        adapter=adapter, cache_salt=context.salt(request.state.owner, body.cache_salt), blend=asked.blend
    )
    if asked.blend is not None and chat.begun is not None:
        raise bad_field("continue_final_message", "continue_final_message and blend exclude each other; leave one out")
    if asked.blend is None and chat.begun is None:  # approximate state is of no use to a rerun
        reply.rerun = partial(_rerun, context, chat, prompt, size, options)
    if asked.prefetching:
        return await prefetch(reply, [prompt.ids], options)
    return await answer(reply, [prompt.given], params, options)


def _conversation(asked: _Asked) -> Conversation:
    with naming({}, "messages"):
        template = _template(asked)
    tools = asked.tools
    return Conversation.of(asked.context, asked.body, asked.tokenizer, template, tools.given, tools.allowed)


def _rerun(
    context: Context,
    chat: Conversation,
    prompt: EncodedPrompt,
    size: int,
    options: RunOptions,
    message: Mapping[str, Any],
    output: RequestOutput,
) -> Run:
    """Return a function that runs a conversation of about ``size`` characters with its answer, as
    later prompts begin. It returns None where they begin with the tokens of the answer."""
    # The last token is sampled, and not computed.
    computed = np.array([*prompt.ids.tolist(), *output.outputs[0].token_ids[:-1]], dtype=np.int64)

    async def run(most: int) -> RequestOutput | None:
        history = await context.texts.run(size, lambda: chat.next_turn(message))
        if not parts_from(history, computed):
            return None
        return await context.llm.prefetch(
            history.tolist(), adapter=options.adapter, cache_salt=options.cache_salt, only_idle=True, most=most
        )

    return run


async def count_chat(request: Request, body: ChatRequest) -> int:
    """Return the number of tokens of a chat's prompt, without running it."""
    return await _of_prompt(request, body, lambda texts, text: len(texts.encode_rendered(text)))


async def rendered_chat(request: Request, body: ChatRequest) -> str:
    """Return the text of a chat's prompt."""
    return await _of_prompt(request, body, lambda texts, text: texts.shown(text))


async def _of_prompt(request: Request, body: ChatRequest, function: Callable[[SpelledTokens, str], T]) -> T:
    asked = await _read(request, body)
    asked.context.adapter_of(body.model)
    chat = _conversation(asked)

    def run() -> T:
        with naming({}, "messages"):
            return function(chat.writer.texts, chat.prompt(chat.messages, chat.tools))

    return await in_texts(asked.context, request, len(await request.body()), run)


def _tokenizer(context: Context) -> Tokenizer:
    tokenizer = context.llm.tokenizer
    if tokenizer is None:
        raise bad_field("messages", "a chat needs a tokenizer with a chat template, and this model has none")
    return tokenizer


# -- parameters ------------------------------------------------------------------------------------


def _check_session(body: ChatRequest) -> None:
    if body.cache_salt:
        raise bad_field("cache_salt", "cache_salt cannot be given with session_id; leave it out")
    if body.continue_final_message:
        raise bad_field("continue_final_message", "a session goes on by POST /v1/completions with session_id")
    if body.add_generation_prompt is False:
        raise bad_field("add_generation_prompt", "a session always answers; leave add_generation_prompt out")


def _params(context: Context, body: ChatRequest, tools: ToolChoice) -> tuple[SamplingParams, Mapping[str, str]]:
    """Return the parameters, and the client's names of their fields."""
    given, fields = asked_by(context, body)
    fields["prompt"] = "messages"
    if "logprobs" in given and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs=true")
    if body.logprobs:
        given.setdefault("logprobs", 0)
    source = fields["structured_outputs"]
    if "structured_outputs" in given and tools.offered is not None and source != "response_format":
        raise bad_field(
            source,
            f"{source} and tools both say what the text must be; give one of them, response_format in its place, "
            'or tool_choice="none"',
        )
    if tools.answer is not None:
        given["structured_outputs"] = calls_or_answer_form(context, tools, tools.answer)
    if tools.schema is not None:
        given["structured_outputs"], fields["structured_outputs"] = {"json": tools.schema}, "tools"
    return sampling_params(given, chat_defaults(context), fields), fields


# -- the prompt ------------------------------------------------------------------------------------


def _rendered(
    asked: _Asked, chat: Conversation
) -> tuple[EncodedPrompt, tuple[str, ...], MessageFormat, SamplingParams]:
    """Return the conversation as a prompt, the marked texts that are no segments of it
    (``Blend.unplaced``), how its answer is read, and the parameters for that. Without blending it
    is tokenised as a whole."""
    with naming({}, "messages"):
        text = chat.prompt(chat.messages, chat.tools)
        parts: Sequence[Segment | str] = [text]
        unplaced: tuple[str, ...] = ()
        if asked.blend is not None:
            _, texts = without_segments(chat.writer.texts.messages(asked.segmented))
            parts, unplaced = cut_at_segments(text, chat.messages, texts, partial(chat.prompt, tools=chat.tools))

        def encode(count: int) -> EncodedPrompt:
            return EncodedPrompt.of(first_of(parts, count), chat.writer.texts.encode_part)

        prompt = encode(len(text))
        for mark in asked.marks:
            pin_at(asked.hints, mark, chat, (text, prompt.ids), lambda count: encode(count).ids)
        return prompt, unplaced, *_reading(asked, chat.writer.template, text)


def _reading(asked: _Asked, template: str, prompt: str | None) -> tuple[MessageFormat, SamplingParams]:
    """Return the format of the answer, and the parameters for it. They keep special tokens in the
    text if the format has such tokens. A form holds behind the reasoning."""
    format, params, tokenizer = _message_format(asked, template, prompt), asked.params, asked.tokenizer
    if asked.tools.forced is not None:
        params = params.replace(structured_outputs=forced_form(asked.context, template, asked.tools)[0])
    marks = [] if format.calls is None else [*format.calls.markers, *format.calls.wrappers]
    if format.reasoning is not None:
        marks += [format.reasoning.opener, format.reasoning.closer]
    if format.harmony:
        marks += MARKERS
        params = _stopping(params, tokenizer, asked.context)
    special = tokenizer.token_bytes.special_ids
    if any(tokenizer.token_id(mark) in special for mark in marks):
        params = params.replace(skip_special_tokens=False)
    if format.reasoning is not None and params.grammar is not None and params.grammar.reasoning_end is None:
        begin, end = (
            token if (token := tokenizer.token_id(mark)) in special else mark
            for mark in (format.reasoning.opener, format.reasoning.closer)
        )
        opened = format.reasoning.opened if format.in_reasoning is None else format.in_reasoning
        form = replace(params.grammar, reasoning_end=end, reasoning_begin=None if opened else begin)
        params = params.replace(structured_outputs=form)
    return format, params


def _message_format(asked: _Asked, template: str, prompt: str | None) -> MessageFormat:
    """Return the format of the answer. ``prompt``: the rendered prompt, None if it is unknown."""
    context, params, tools = asked.context, asked.params, asked.tools
    config, named = context.llm.model.config, context.settings.tool_call_parser
    harmony = is_harmony(template, named)
    # A grammar leaves no place for channels, but that of forced calls.
    if harmony and (params.grammar is None or tools.forced is not None):
        return MessageFormat(
            harmony=True,
            in_reasoning=tools.forced is None and prompt is not None and in_reasoning(prompt),
            tools=tools.offered,
            one_call=tools.one_call,
            only_calls=tools.forced is not None,
        )
    own = None if harmony else parser_for(config, template, named)
    calls = own
    if tools.forced is not None:
        calls = forced_form(context, template, tools)[1]
    elif tools.offered is None:
        calls = None if own is None or params.grammar is not None else own.without_calls
    elif tools.answer is not None and own is not None:
        calls = replace(own, whole=True)
    elif own is None:
        raise bad_field(
            "tools",
            "it is not known how this model writes tool calls, so it cannot choose to make them; "
            'tool_choice "required", a named function and "none" work, and the server can be told with --tool-call-parser',
        )
    reasoning = reasoning_for(template)
    if reasoning is not None and params.grammar is not None and prompt is not None and reasoning.closed_by(prompt):
        reasoning = None
    return MessageFormat(
        reasoning=reasoning,
        in_reasoning=None if reasoning is None or prompt is None else reasoning.opened_by(prompt),
        calls=calls,
        tools=tools.offered,
        one_call=tools.one_call,
        ids=_IDS.get(own.name, "any") if own is not None else "any",
    )


_IDS: Mapping[str, Literal["any", "short", "named"]] = {"mistral": "short", "kimi_k2": "named"}
"""``MessageFormat.ids`` of formats."""


def _stopping(params: SamplingParams, tokenizer: Tokenizer, context: Context) -> SamplingParams:
    """Return parameters that stop at tokens that end a turn and are no EOS of the model's. A
    request that ignores EOS ignores these too."""
    if params.ignore_eos:
        return params
    engine = context.llm.engine
    found = {tokenizer.token_id(stop) for stop in STOPS} & tokenizer.token_bytes.special_ids
    missing = {token for token in found if token is not None and token < engine.checks.vocab_size} - engine.eos_ids
    if missing <= params.stop_ids:
        return params
    return params.replace(stop_token_ids=sorted(params.stop_ids | missing))


# -- the answer ------------------------------------------------------------------------------------


class ChatReply(Reply):
    """Choices with a ``message``, or with a ``delta`` of one."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request: Request,
        context: Context,
        body: ChatRequest,
        params: SamplingParams,
        tools: ToolChoice,
        format: MessageFormat,
    ) -> None:
        super().__init__(request, context, body, **head_of(context, body))
        self._format = format
        self._named = isinstance(tools.forced, dict)
        self._params = params
        self._readers: dict[int, MessageReader] = {}
        self._said: list[dict[str, Any]] = []
        """The deltas of the message, if there is one only."""
        self.rerun: Callable[[Mapping[str, Any], RequestOutput], Run] | None = None
        """What runs the conversation with this answer as later prompts begin."""
        self.ids: dict[int, str] | None = None
        """The ids of the only answer's calls, which the session's turn has too."""

    def ended(self, outputs: Sequence[RequestOutput]) -> None:
        samples = [sample for output in outputs for sample in output.outputs]
        message = message_of(self._said) if len(samples) == 1 and samples[0].finish_reason == "stop" else {}
        if self.rerun is not None and ("reasoning_content" in message or "tool_calls" in message):
            self.context.reruns.add(self.rerun(message, outputs[0]))

    def choice(self, number: int, delta: SampleDelta) -> dict[str, Any]:
        reader = MessageReader(self._format, self.ids)
        self._said = [reader.feed(delta.text), reader.finish()]
        message = message_of(self._said)
        return {"index": delta.index, "message": message, **self._rest(reader, delta), **self._of_prompt()}

    def chunk_choices(self, number: int, delta: SampleDelta) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = MessageReader(self._format, self.ids)
            choices.append(
                {
                    "index": delta.index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                    **self._of_prompt(),
                }
            )
        new = [reader.feed(delta.text)]
        if delta.finish_reason is not None:
            new.append(reader.finish())
        rest = self._rest(reader, delta)
        # All of the text may be held back so far.
        new = [one for one in new if one]
        self._said += new
        if not new and (rest["logprobs"] is not None or rest["finish_reason"] is not None or self.shows_ids):
            new = [{}]
        unfinished = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        for number, one in enumerate(new):
            last = number == len(new) - 1
            choices.append({"index": delta.index, "delta": one, **(rest if last else unfinished)})
        return choices

    def _rest(self, reader: MessageReader, delta: SampleDelta) -> dict[str, Any]:
        end = ending(delta.finish_reason, delta.stop_reason)
        if end["finish_reason"] == "stop" and reader.calls_are_whole and not self._named:
            # As at OpenAI, not for a call that the client named. Partial calls must not be made.
            end["finish_reason"] = "tool_calls"
        logprobs = None
        if (count := self._params.logprobs) is not None:
            entries = delta.logprobs or []
            logprobs = chat_logprobs(delta.token_ids, entries, count, self.tokenizer, by_id=self.names_ids)
        return {"logprobs": logprobs, **end, **({"token_ids": delta.token_ids} if self.shows_ids else {})}

    def of_prompt(self, number: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.outputs[number].prompt_token_ids} if self.shows_ids else {}

    def _of_prompt(self) -> dict[str, Any]:
        if (count := self._params.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.outputs[0].prompt_logprobs, count)}
