"""The message in a model's text: its reasoning, its content, its tool calls, as the text arrives.

The reasoning is taken out first, then the calls out of the rest. In the harmony format one reader
does both.
"""

from __future__ import annotations

import itertools
import re
import secrets
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.server.tools.formats import json_type
from quire.server.tools.harmony import HarmonyReader
from quire.server.tools.reader import Delta, MessageParser
from quire.server.tools.reasoning import ReasoningFormat, StreamingReasoning
from quire.server.tools.tools import StreamingToolParser, ToolFormat

_LETTERS = string.ascii_letters + string.digits
_MISTRAL_ID = 9
"""Letters of an id that Mistral's templates accept."""
_SHORT_ID = re.compile(rf"[a-zA-Z0-9]{{{_MISTRAL_ID}}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageFormat:
    """How messages of one request are read."""

    harmony: bool = False
    """Whether they are in gpt-oss's format. There are then no ``reasoning`` and ``calls``."""
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool | None = None
    """Whether the prompt ends, and so the text begins, within reasoning; None: see the template."""
    calls: ToolFormat | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    one_call: bool = False
    """Whether calls after the first one are left out."""
    only_calls: bool = False
    """Whether nothing but calls is written in gpt-oss's format; ``calls`` says it of others."""
    ids: Literal["any", "short", "named"] = "any"
    """The ids of calls that the model's template takes: any, nine letters, or
    ``functions.NAME:NUMBER``."""

    def call_id(self, call: Delta, known: Collection[str]) -> str:
        """Return the id of a call: the model's own if it wrote one that fits, for then the next
        prompt has it too, or a new one that is not among ``known``."""
        own = call.call_id
        if own is not None and own not in known and (self.ids == "named" or _SHORT_ID.fullmatch(own)):
            return own
        if self.ids == "short":
            return "".join(secrets.choice(_LETTERS) for _ in range(_MISTRAL_ID))
        if self.ids == "named":
            return next(one for number in itertools.count() if (one := f"functions.{call.name}:{number}") not in known)
        return f"call_{secrets.token_hex(12)}"


class MessageReader:
    """A reader of one message. ``feed`` and ``finish`` return OpenAI's deltas, without the role."""

    def __init__(self, format: MessageFormat, ids: dict[int, str] | None = None) -> None:
        """``ids``: those of calls by their numbers, shared with another reader of the same
        message."""
        self._format = format
        self._shared = {} if ids is None else ids
        self._first: MessageParser | None = None
        """The parser that takes out the reasoning. That of the harmony format does all."""
        if format.harmony:
            self._first = HarmonyReader(
                format.tools, in_reasoning=bool(format.in_reasoning), only_calls=format.only_calls
            )
        elif format.reasoning is not None:
            self._first = StreamingReasoning(format.reasoning, format.in_reasoning)
        self._calls = None if format.calls is None else StreamingToolParser(format.calls, format.tools)
        self._ids: set[str] = set()
        """The ids of calls so far."""
        self._arguments: dict[int, list[str]] = {}
        """The arguments so far, by call."""

    @property
    def calls_are_whole(self) -> bool:
        """Return whether there are calls, and the arguments of each are one whole JSON object."""
        calls = map("".join, self._arguments.values())
        return bool(self._arguments) and all(json_type(call) == "object" for call in calls)

    def feed(self, text: str) -> dict[str, Any]:
        """Return the delta of a piece of the text."""
        return self._delta(self._with_calls([Delta(content=text)] if self._first is None else self._first.feed(text)))

    def finish(self) -> dict[str, Any]:
        """Return the delta of the text held back."""
        found = self._with_calls([] if self._first is None else self._first.finish())
        return self._delta(found + ([] if self._calls is None else self._calls.finish()))

    def _with_calls(self, found: list[Delta]) -> list[Delta]:
        """Take the calls out of the content."""
        content = "".join(one.content for one in found)
        if self._calls is None or not content:
            return found
        return [one for one in found if one.reasoning] + self._calls.feed(content)

    def _delta(self, found: Sequence[Delta]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if reasoning := "".join(one.reasoning for one in found):
            delta["reasoning_content"] = reasoning
        if content := "".join(one.content for one in found):
            delta["content"] = content
        calls: dict[int, dict[str, Any]] = {}
        for one in found:
            if one.index is None or (one.index and self._format.one_call):
                continue
            call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
            if one.index not in self._arguments:
                self._arguments[one.index] = []
                made = self._format.call_id(one, self._ids)
                call |= {"id": self._shared.setdefault(one.index, made), "type": "function"}
                self._ids.add(call["id"])
                call["function"] = {"name": one.name, "arguments": ""}
            call["function"]["arguments"] += one.arguments
            self._arguments[one.index].append(one.arguments)
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta


def message_of(deltas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole message of deltas. Its content is None only beside calls."""
    content, reasoning = "", ""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            function = {"name": part["function"].get("name"), "arguments": ""}
            call = calls.setdefault(part["index"], {"id": part.get("id"), "type": "function", "function": function})
            call["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def answer_of(
    text: str, format: MessageFormat, ids: dict[int, str] | None = None, *, whole: bool = False
) -> dict[str, Any]:
    """Return the message of an answer, for later turns: ``whole``, as a client gets it, or only its
    content. ``ids`` are as in ``MessageReader``."""
    reader = MessageReader(format, ids)
    message = message_of([reader.feed(text), reader.finish()])
    if whole:
        return {name: value for name, value in message.items() if name != "refusal"}
    return {"role": "assistant", "content": message["content"] or ""}
