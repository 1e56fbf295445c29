"""The bodies of ``/api/chat`` and ``/api/generate``, and the requests that they become."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.server.http.bodies import validated
from quire.server.http.context import Context
from quire.server.http.errors import bad_field, unsupported
from quire.server.http.foreign_fields import RENAMED, UNSUPPORTED, Table
from quire.server.ollama.models import template_of
from quire.server.openai.protocol import Body, ChatRequest, CompletionRequest, GenerationBody, refuse_fields
from quire.server.tools.harmony import is_harmony

LATEST = ":latest"
"""The tag that ollama's clients add to names."""
MISPLACED: Table = {
    "n": ((1,), "an answer is one text; ask again, or POST /v1/chat/completions"),
    "logprobs": ((False,), "give it beside options"),
    "top_logprobs": ((0,), "give it beside options"),
    "prompt_logprobs": ((), "POST /v1/completions has them"),
}
"""Fields of sampling that ``options`` may not hold."""
SAMPLING = {*declarations_on(SamplingParams, Surface.CHATS), *RENAMED, *UNSUPPORTED} - {"options", *MISPLACED}
"""Fields that ``options`` may hold. Others, such as ``num_ctx``, are about the machine, and have no
effect."""
G = TypeVar("G", bound=GenerationBody)


class OllamaBody(Body):
    """The fields that both calls have. Unknown ones are accepted, as ollama accepts them."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema of the answer."""
    options: dict[str, Any] | None = None
    """Fields of sampling under ollama's names."""
    think: bool | str | None = None
    """Whether the model thinks first, or with which effort."""
    logprobs: bool | None = None
    """Return the log-probabilities of the tokens, and of ``top_logprobs`` others."""
    top_logprobs: int | None = None
    keep_alive: Any = None
    """Accepted without effect: the model stays loaded."""


class ChatBody(OllamaBody):
    """``POST /api/chat``."""

    messages: list[dict[str, Any]] | None = None
    """Without any, the call only asks whether the model is loaded."""
    tools: list[dict[str, Any]] | None = None


class GenerateBody(OllamaBody):
    """``POST /api/generate``."""

    prompt: str = ""
    """Without any, the call only asks whether the model is loaded."""
    system: str | None = None
    raw: bool = False
    """Continue the prompt as it is, without a chat template."""
    suffix: str | None = None
    """The text behind the answer, for models that were trained to fill in the middle."""
    template: str | None = None
    context: list[int] | None = None
    images: Annotated[list[str] | None, Field(max_length=0)] = None


class ModelBody(Body):
    """``POST /api/show``."""

    model: str | None = None
    name: str | None = None
    """An earlier name of ``model``."""
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: Any = None


def model_of(context: Context, name: str) -> str:
    """Return the served name of a model that a client may call NAME:latest. Raise ``ApiError`` 404
    for another one."""
    if name.endswith(LATEST) and name not in {*context.base_names, *context.adapter_names}:
        name = name.removesuffix(LATEST)
    context.adapter_of(name)
    return name


def chat_of(context: Context, body: ChatBody) -> ChatRequest:
    """Return the chat request that a body becomes. Raise ``ApiError`` 400 for a message that is not
    taken."""
    messages = _messages(body.messages or [])
    last = messages[-1] if len(messages) > 1 else {}
    # ollama goes on with an answer that has begun.
    begun = last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    goes_on = begun and not is_harmony(template_of(context) or "", context.settings.tool_call_parser)
    fields = {"tools": body.tools or None, "continue_final_message": goes_on or None, **_of_chats(body)}
    return _request(ChatRequest, context, body, messages=messages, **fields)


def chat_of_prompt(context: Context, body: GenerateBody) -> ChatRequest:
    _refuse(body)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return _request(ChatRequest, context, body, messages=messages, **_of_chats(body))


def completion_of(context: Context, body: GenerateBody) -> CompletionRequest:
    """Return the completion of a raw prompt, or of one before a suffix."""
    _refuse(body)
    for name in ("system", "think"):
        if getattr(body, name):
            plain = "raw" if body.raw else "suffix"
            raise bad_field(
                name, f"{name} belongs to the chat template, which {plain} leaves out; leave one of them out"
            )
    # Without a limit ollama goes on to the end of the context; completions would stop at 16 tokens.
    limit = {"num_predict": -1} if _options(body).get("num_predict") is None else {}
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs=true")
    scores = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    return _request(CompletionRequest, context, body, prompt=body.prompt, suffix=body.suffix, **limit, **scores)


def _refuse(body: GenerateBody) -> None:
    for name, advice in (
        ("template", "only the model's own template is used"),
        ("context", "send the conversation to /api/chat"),
    ):
        if getattr(body, name):
            raise unsupported(name, advice)


def _options(body: OllamaBody) -> dict[str, Any]:
    refuse_fields(Body.model_validate(body.options or {}), MISPLACED)
    return {name: value for name, value in (body.options or {}).items() if name in SAMPLING}


def _request(kind: type[G], context: Context, body: OllamaBody, **fields: Any) -> G:
    form = body.format
    if isinstance(form, str) and form not in ("", "json"):
        raise bad_field("format", f'format must be "json" or a JSON schema, got {form!r:.60}')
    if form == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    options = _options(body)
    if isinstance(options.get("stop"), list) and not options["stop"]:
        del options["stop"]
    return validated(kind, {**options, **fields, "model": model_of(context, body.model), "stream": body.stream})


def _of_chats(body: OllamaBody) -> dict[str, Any]:
    """Return the fields of a chat that both calls have beside ``options``."""
    fields: dict[str, Any] = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if isinstance(body.think, str):
        return {**fields, "reasoning_effort": body.think}
    return {**fields, "enable_thinking": body.think}


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI has them. ollama's calls have no ids, and results come in their
    order."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    made = 0
    for number, message in enumerate(given):
        if message.get("images"):
            raise bad_field(
                f"messages.{number}.images", f"messages.{number}.images: only text is taken", code="unsupported"
            )
        one = {name: message[name] for name in ("role", "content") if name in message}
        if message.get("thinking"):
            one["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            one["tool_calls"], waiting = [], []
            for call in calls:
                name, arguments = _function(call, f"messages.{number}.tool_calls")
                made += 1
                waiting.append((f"call_{made}", name))
                function = {"name": name, "arguments": arguments}
                one["tool_calls"].append({"id": f"call_{made}", "type": "function", "function": function})
        if message.get("role") == "tool":
            named = message.get("tool_name") or message.get("name")
            at = next((at for at, (_, name) in enumerate(waiting) if named in (None, name)), None)
            if at is not None:
                one["tool_call_id"], one["name"] = waiting.pop(at)
            elif named is not None:
                one["name"] = named
        found.append(one)
    return found


def _function(call: Any, where: str) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field(where, f'{where}: each must be {{"function": {{"name", "arguments"}}}}, got {call!r:.60}')
    arguments = function.get("arguments", {})
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
