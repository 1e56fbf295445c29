"""The body of ``POST /v1/messages``, and the chat request that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.server.anthropic.blocks import BlockTurns, Texts, Turns
from quire.server.http.bodies import validated
from quire.server.http.foreign_fields import Table
from quire.server.openai.protocol import Body, ChatRequest, ParamsBody, ShownAs, takes_sampling
from quire.server.responses.body import CHATS_ONLY, showing
from quire.server.responses.items import checked, checked_list

_CHATS = "/v1/chat/completions has it"
OTHER_NAMES = ("max_tokens", "max_completion_tokens", "stop", "top_logprobs", "prompt_logprobs", "n")
"""Sampling fields of chats that Anthropic calls differently, requires, or does not have."""

REFUSED: Table = {
    "container": ((), "this server runs no code"),
    "mcp_servers": (([],), "this server has no tools of its own; the client runs them"),
    "context_management": (({"edits": []},), "nothing is cleared or compacted; send fewer messages"),
    "diagnostics": ((), "quire.reuse says why tokens were not found"),
    "inference_geo": ((), "this server is where it is"),
    "speed": (("standard",), "there is one speed"),
    "output_format": ((), "give output_config.format"),
    **CHATS_ONLY,
    "session_id": ((), _CHATS),
    "max_completion_tokens": ((), "give max_tokens"),
    "max_tokens_to_sample": ((), "give max_tokens"),
    "stop": ((), "give stop_sequences"),
    "response_format": ((), "give output_config.format"),
    "reasoning_effort": ((), "give output_config.effort"),
    "parallel_tool_calls": ((True,), "give tool_choice.disable_parallel_tool_use"),
}
"""Fields that are refused: values without effect, and advice for others."""

RENAMED = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking.type",
}
"""Fields of chats that Anthropic calls differently."""


class CustomTool(Body):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    """A JSON schema of the input."""
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AnyChoice(Body):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None
    """At most one call."""


class OneChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Body):
    type: Literal["none"]


class ThinkingEnabled(Body):
    type: Literal["enabled"]
    budget_tokens: int | None = None
    """Of no effect: ``max_tokens`` limits what is thought and said together."""
    display: Literal["summarized"] | None = None
    """All of it is shown."""


class ThinkingAdaptive(Body):
    """As the template has it."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class ThinkingDisabled(Body):
    type: Literal["disabled"]


class JsonSchemaOutput(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    """A variable of the template."""
    format: Annotated[Any, ShownAs(JsonSchemaOutput | None)] = None


class RequestMetadata(Body):
    user_id: str | None = None


CHOICES: Mapping[str, type[Body]] = {"auto": AnyChoice, "any": AnyChoice, "tool": OneChoice, "none": NoChoice}
THINKING: Mapping[str, type[Body]] = {
    "enabled": ThinkingEnabled,
    "adaptive": ThinkingAdaptive,
    "disabled": ThinkingDisabled,
}
FORMATS: Mapping[str, type[Body]] = {"json_schema": JsonSchemaOutput}
PREFETCH = {
    "protocol_version": "0.1",
    "message_id": "",
    "actions": [{"action_id": "max_tokens", "action_type": "kv.prefetch", "action_version": "1.0"}],
}
"""The hints of a request for no tokens."""


@takes_sampling(Surface.CHATS, without=OTHER_NAMES)
class CountedMessages(ParamsBody):
    """``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(json_schema_extra=showing(REFUSED))

    messages: Turns
    """Each with a ``role`` and a ``content``: a text or blocks."""
    model: str | None = None
    """The model's name or an adapter's; the base model if it is missing."""
    system: Texts = None
    """A text, or blocks of texts."""
    tools: Annotated[Any, ShownAs(list[CustomTool] | None)] = None
    tool_choice: Annotated[Any, ShownAs(AnyChoice | OneChoice | NoChoice | None)] = None
    thinking: Annotated[Any, ShownAs(ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None)] = None
    """Whether the model thinks first, where the template has a variable ``enable_thinking``."""
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Keep the state of the whole prompt for ``ttl``, "5m" or "1h"."""
    cache_salt: str | None = None
    priority: int | None = None
    """Lower values run earlier; 0 if it is missing."""
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountedMessages):
    """``POST /v1/messages``."""

    max_tokens: int = Field(ge=0)
    """0: compute the prompt's state, and answer nothing."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    """Accepted and not used."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted and not used."""


PASSED = (
    *(name for name in declarations_on(SamplingParams, Surface.CHATS) if name not in OTHER_NAMES),
    *("model", "cache_control", "cache_salt", "priority"),
)
"""Fields that a chat request has under the same names."""


def chat_of(body: CountedMessages, turns: BlockTurns) -> ChatRequest:
    """Return the chat request that answers a body, whose turns are read. Raise ``ApiError`` 400 for
    fields that are not taken."""
    advice = "this server has no tools of its own; the client runs them"
    tools = checked_list(body.tools, "tools", {"custom": CustomTool}, advice, default="custom")
    more: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        more = {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None, "stream": body.stream}
        if not body.max_tokens:
            more["kv_hints"] = PREFETCH
    if body.output_config is not None and body.output_config.format is not None:
        form: Any = checked(body.output_config.format, "output_config.format", FORMATS, "a schema, or none")
        more["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    return validated(
        ChatRequest,
        {
            **{name: getattr(body, name) for name in PASSED},
            "chat_template_kwargs": body.chat_template_kwargs,
            "reasoning_effort": None if body.output_config is None else body.output_config.effort,
            "enable_thinking": _thinks(body),
            **_choice(body.tool_choice),
            **more,
            "messages": turns.messages,
            "tools": [_function(tool) for tool in tools] or None,
        },
    )


def _thinks(body: CountedMessages) -> bool | None:
    if body.thinking is None:
        return None
    kind = checked(body.thinking, "thinking", THINKING, "one of them").type  # type: ignore[attr-defined]
    return None if kind == "adaptive" else bool(kind == "enabled")


def _function(tool: CustomTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    mark = {} if tool.cache_control is None else {"cache_control": tool.cache_control}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}, **mark}


def _choice(given: Any) -> dict[str, Any]:
    """Return the fields of a chat that choose among tools."""
    if given is None:
        return {}
    found: Any = checked(given, "tool_choice", CHOICES, "one of them")
    words = {"auto": "auto", "any": "required", "none": "none"}
    named = {"type": "function", "function": {"name": getattr(found, "name", None)}}
    several = not getattr(found, "disable_parallel_tool_use", None)
    return {"tool_choice": words.get(found.type, named), "parallel_tool_calls": several}
