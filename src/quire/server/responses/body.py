"""The body of ``POST /v1/responses``, and the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.server.http.bodies import validated
from quire.server.http.errors import bad_field
from quire.server.http.foreign_fields import Table
from quire.server.openai.protocol import Body, ChatRequest, ParamsBody, ShownAs, takes_sampling
from quire.server.responses.items import (
    FunctionCallItem,
    FunctionOutputItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
    checked,
    checked_list,
)

_CHATS = "/v1/chat/completions has it"
_MADE = "it is answered while the client waits"
OTHER_NAMES = ("max_tokens", "max_completion_tokens", "top_logprobs", "prompt_logprobs", "n")
"""Sampling fields of chats that responses call differently, or do not have."""

CHATS_ONLY: Table = {
    "top_logprobs": ((0,), _CHATS),
    "logprobs": ((False,), _CHATS),
    "prompt_logprobs": ((), _CHATS),
    "n": ((1,), _CHATS),
    "kv_hints": ((), _CHATS),
    "blend": ((False,), _CHATS),
    "documents": (([],), _CHATS),
}
"""Fields that only chats have, as ``REFUSED``."""

REFUSED: Table = {
    "background": ((False,), f"leave it out; {_MADE}"),
    "background_options": ((), f"leave it out; {_MADE}"),
    "conversation": ((), "give previous_response_id, or the items themselves"),
    "prompt": ((), "templates of prompts are not stored; give instructions and input"),
    "context_management": (([],), "nothing is compacted; send fewer items"),
    "truncation": (("disabled",), "prompts are never cut; send fewer items"),
    "moderation": ((), "texts are not moderated"),
    "access_programs": ((), "leave it out"),
    "image": ((), "this server takes text only"),
    "prompt_cache_options": ((), "prompts are cached anyway; cache_salt keeps them apart"),
    **CHATS_ONLY,
    "session_id": ((), "give previous_response_id"),
    "messages": ((), "give input"),
    "max_tokens": ((), "give max_output_tokens"),
    "max_completion_tokens": ((), "give max_output_tokens"),
    "response_format": ((), "give text.format"),
    "reasoning_effort": ((), "give reasoning.effort"),
    "functions": ((), "give tools"),
    "function_call": ((), "give tool_choice"),
}
"""Fields that are refused: values without effect, and advice for others."""


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class PlainText(Body):
    type: Literal["text", "json_object"]


class JsonSchemaText(Body):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """The schema is enforced in either case."""


FORMATS: Mapping[str, type[Body]] = {"text": PlainText, "json_object": PlainText, "json_schema": JsonSchemaText}
CHOICES: Mapping[str, type[Body]] = {"function": FunctionChoice, "allowed_tools": AllowedTools}


class TextOptions(Body):
    format: Annotated[Any, ShownAs(PlainText | JsonSchemaText | None)] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted and not used."""


class ReasoningOptions(Body):
    model_config = ConfigDict(extra="forbid")

    effort: str | None = None
    """A variable of the template."""
    summary: Literal["auto"] | None = None
    """None are made; the reasoning itself is in ``content``."""
    generate_summary: Literal["auto"] | None = None
    """The same under its older name."""


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


def showing(refused: Table) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds the accepted values of refused fields to a body's schema."""

    def show(schema: dict[str, Any]) -> None:
        schema["properties"] |= {name: {"enum": [*values, None]} for name, (values, _) in refused.items()}

    return show


@takes_sampling(Surface.CHATS, without=OTHER_NAMES)
class ResponseRequest(ParamsBody):
    """``POST /v1/responses``."""

    model_config = ConfigDict(json_schema_extra=showing(REFUSED))

    input: Annotated[
        Any,
        ShownAs(str | list[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference]),
    ]
    """A text, or items of a conversation."""
    model: str | None = None
    """The model's name or an adapter's; the base model if it is missing."""
    instructions: str | None = None
    """A system message. Later responses do not inherit it."""
    previous_response_id: str | None = None
    """The stored response that this one continues."""
    store: bool | None = None
    """Whether later responses may continue this one; true if it is missing."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: Annotated[Any, ShownAs(list[FunctionTool] | None)] = None
    tool_choice: Annotated[Any, ShownAs(Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Of no effect: nothing is encrypted, the reasoning is in ``content``."""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    max_tool_calls: int | None = None
    """Of built-in tools, of which there are none."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    """Accepted and not used, as the four before it."""
    cache_salt: str | None = None
    """That of the response before, if it is missing."""
    cache_control: dict[str, Any] | None = None
    """Anthropic's mark: keep the state of the whole prompt for ``ttl``, "5m" or "1h"."""
    priority: int | None = None
    """Lower values run earlier; 0 if it is missing."""
    chat_template_kwargs: dict[str, Any] | None = None


PASSED = (
    *(name for name in declarations_on(SamplingParams, Surface.CHATS) if name not in OTHER_NAMES),
    *("model", "stream", "parallel_tool_calls", "user", "cache_control", "priority"),
)
"""Fields that a chat request has under the same names."""


def tools_of(body: ResponseRequest) -> list[FunctionTool]:
    """Return the tools of a body. Raise ``ApiError`` 400 for those that are no functions."""
    advice = "this server has no tools of its own; the client runs functions"
    return checked_list(body.tools, "tools", {"function": FunctionTool}, advice)


def _chosen(body: ResponseRequest, tools: list[FunctionTool]) -> tuple[list[FunctionTool], Any]:
    """Return the tools that may be called, and how one is chosen: a word, or a chat's choice."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            allowed = '"none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
            raise bad_field(
                "tool_choice", f"tool_choice must be {allowed}, got {choice!r:.60}", code="invalid_argument"
            )
        # A forced choice without tools is refused by the chat.
        return tools, choice
    found = checked(choice, "tool_choice", CHOICES, "the tools are functions")
    if isinstance(found, AllowedTools):
        names = {one.name for one in found.tools}
        if unknown := sorted(names - {tool.name for tool in tools}):
            raise bad_field("tool_choice.tools", f"tool_choice.tools names {unknown[0]!r:.80}, which is not in tools")
        return [tool for tool in tools if tool.name in names], found.mode
    return tools, {"type": "function", "function": {"name": found.name}}  # type: ignore[attr-defined]


def chat_request(body: ResponseRequest, messages: Sequence[dict[str, Any]], salt: str | None) -> ChatRequest:
    """Return the chat request that answers a response's ``messages``. Raise ``ApiError`` 400 for
    fields that are not taken."""
    tools, choice = _chosen(body, tools_of(body))
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    form: Any = body.text.format if body.text is not None else None
    if form is not None:
        form = checked(form, "text.format", FORMATS, "a text, or JSON").model_dump(by_alias=True, exclude_none=True)
        if form["type"] == "json_schema":
            form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    effort = None if body.reasoning is None else body.reasoning.effort
    functions = [
        {
            "type": "function",
            "function": tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_unset=True),
        }
        for tool in tools
    ]
    return validated(
        ChatRequest,
        {
            **{name: getattr(body, name) for name in PASSED},
            "chat_template_kwargs": body.chat_template_kwargs,
            "reasoning": None if effort is None else {"effort": effort},
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "tools": functions or None,
            "tool_choice": choice,
            "response_format": form,
            "cache_salt": salt,
        },
    )
