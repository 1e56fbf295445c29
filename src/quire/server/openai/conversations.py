"""A conversation of a chat request, as the model's template writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.server.http.context import Context
from quire.server.http.errors import bad_field, naming, unsupported
from quire.server.openai.protocol import ChatRequest, Reasoning
from quire.server.tools.harmony import is_harmony
from quire.server.tools.reasoning import reasoning_for
from quire.sessions.chat_turns import next_turn_ids
from quire.text.chat_prompts import ChatPrompt
from quire.text.template_programs import variables_of
from quire.text.tokenizer import Tokenizer

Messages: TypeAlias = list[dict[str, Any]]
Tools: TypeAlias = list[dict[str, Any]] | None

SWITCHES = ("enable_thinking", "thinking")
"""Variables that templates switch reasoning by; the first one that a template reads counts."""

OWN_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "reasoning_effort",
    "tokenizer_template",
    "text_limit",
)
"""Names that ``chat_template_kwargs`` may not hold: those of variables with fields of their own, of
the template itself and of its limit."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages of a request, and what else its template gets."""

    writer: ChatPrompt
    """What writes its texts, and tokenises them."""
    messages: Messages
    tools: Tools
    allowed: Collection[str] | None = None
    """Names of the tools that the template sees; None: all."""
    begun: str | None = None
    """The beginning of the answer, in ``writer``'s form, which the model is to go on with."""
    asks: bool = True
    """Whether the prompt ends where the model is to answer."""

    @classmethod
    def of(
        cls,
        context: Context,
        body: ChatRequest,
        tokenizer: Tokenizer,
        template: str,
        tools: Tools,
        allowed: Collection[str] | None = None,
    ) -> Conversation:
        """Return the conversation of a body. Raise ``ApiError`` 400 for fields that a template does
        not read."""
        variables, limit = request_variables(body, template), context.llm.engine.checks.text_limit
        writer = ChatPrompt(tokenizer, body.messages, tools, variables, template=template, text_limit=limit)
        messages, begun = list(body.messages), None
        if body.continue_final_message:
            if is_harmony(template, context.settings.tool_call_parser):
                raise bad_field(
                    "continue_final_message", "this model writes answers in channels, which have no beginning"
                )
            begun = writer.texts.of_role("assistant", _begun(messages.pop()))
            if not messages:
                raise bad_field("messages", "continue_final_message needs a message before the one that goes on")
        asks = begun is not None or body.add_generation_prompt is not False
        return cls(writer=writer, messages=messages, tools=tools, allowed=allowed, begun=begun, asks=asks)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        """Return the text of a prompt, for ``writer`` to tokenise."""
        return self.render(messages, tools, asks=self.asks)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, asks: bool) -> str:
        """Return the text of messages. ``asks``: it ends where the model is to answer."""
        if tools is not None and self.allowed is not None:
            tools = [tool for tool in tools if tool["function"]["name"] in self.allowed]
        text = self.writer.render(messages, tools, asks=asks)
        if self.begun is None or not asks:
            return text
        reasoning = reasoning_for(self.writer.template)
        # What was said stands behind the thoughts that the template opens.
        closed = reasoning is not None and reasoning.opened_by(text)
        return f"{text}{reasoning.closer if closed and reasoning is not None else ''}{self.begun}"

    def next_turn(self, answer: Mapping[str, Any]) -> NDArray[np.int64]:
        """Return the tokens with which the prompt after this answer begins."""
        return next_turn_ids(
            lambda messages: self.render(messages, self.tools, asks=False), [*self.messages, answer], self.writer.texts
        )


def _begun(message: Mapping[str, Any]) -> str:
    """Return the text of a message to go on with. Raise ``ApiError`` 400 for one that has none."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    if message.get("role") != "assistant" or message.get("tool_calls") or not isinstance(content, str):
        raise bad_field(
            "continue_final_message",
            "continue_final_message goes on with the text of an assistant's message without calls, and the last one "
            f"has the role {message.get('role')!r:.40}",
        )
    return content


def check_variables(given: Mapping[str, Any] | None) -> None:
    """Raise ``ApiError`` 400 for ``chat_template_kwargs`` that have fields of their own."""
    for name in given or ():
        if name in OWN_VARIABLES:
            raise bad_field(
                f"chat_template_kwargs.{name}",
                f"chat_template_kwargs may not hold {name}; it is given by a field of the request, if at all",
            )


# -- reasoning -------------------------------------------------------------------------------------


def request_variables(body: ChatRequest, template: str) -> dict[str, Any]:
    """Return all variables that a body gives a template. Raise ``ApiError`` 400 for fields of its
    own that a template does not read."""
    found = {**(body.chat_template_kwargs or {}), **thinking_variables(body, template)}
    if body.documents is not None:
        with naming({}, "messages"):
            if body.documents and "documents" not in variables_of(template):
                raise unsupported("documents", "this model's chat template reads no documents; put them into a message")
        found["documents"] = body.documents
    return found


def thinking_variables(body: ChatRequest, template: str) -> dict[str, Any]:
    """Return the variables that ``reasoning_effort``, ``reasoning`` and ``enable_thinking`` give a
    template. Raise ``ApiError`` 400 for what it does not read."""
    reasoning = body.reasoning or Reasoning()
    effort = _one("reasoning.effort", reasoning.effort, "reasoning_effort", body.reasoning_effort)
    switch = _one("reasoning.enabled", reasoning.enabled, "enable_thinking", body.enable_thinking)
    if effort is None and switch is None:
        return {}
    with naming({}, "messages"):
        read = variables_of(template)
    found: dict[str, Any] = {}
    switches = [name for name in SWITCHES if name in read]
    if effort is not None:
        where = "reasoning_effort" if reasoning.effort is None else "reasoning.effort"
        if "reasoning_effort" in read:
            found["reasoning_effort"] = effort
        elif effort != "none":
            use = "give 'none', which switches it off, or leave it out" if switches else "leave it out"
            raise unsupported(where, f"this model's chat template knows no effort of reasoning; {use}")
        elif switch is None:
            switch = False
        elif switch:
            raise unsupported(where, f'{where} "none" and enable_thinking true exclude each other; give one of them')
    if switch is not None:
        if switches:
            found[switches[0]] = switch
        elif switch != (reasoning_for(template) is not None):
            where = "enable_thinking" if reasoning.enabled is None else "reasoning.enabled"
            raise unsupported(
                where, f"this model's chat template {'never' if switch else 'always'} lets it think; leave it out"
            )
    return found


def _one(name: str, value: T | None, other: str, same: T | None) -> T | None:
    """Return the value of two fields that mean the same."""
    if value is not None and same is not None and value != same:
        raise bad_field(name, f"{name} is {value!r} and {other} {same!r}, which are the same; give one of them")
    return same if value is None else value
