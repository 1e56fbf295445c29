"""The message in a model's text: its reasoning, its content, its tool calls, as the text arrives.

The reasoning is taken out first, then the calls out of the rest. In the harmony format one reader
does both.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.server.harmony import Delta, HarmonyReader
from quire.server.reasoning import ReasoningDelta, ReasoningFormat
from quire.server.tool_formats import json_type
from quire.server.tools import ToolDelta, ToolFormat

_LETTERS = string.ascii_letters + string.digits
_MISTRAL_ID = 9
"""Letters of an id that Mistral's templates accept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageFormat:
    """How messages of one request are read."""

    harmony: bool = False
    """Whether they are in gpt-oss's format. ``reasoning`` and ``calls`` are then unused."""
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool | None = None
    """Whether the prompt ends, and so the text begins, within reasoning; None: see the template."""
    calls: ToolFormat | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    one_call: bool = False
    """Whether calls after the first one are left out."""
    short_ids: bool = False
    """Whether the model's template takes ids of nine letters only."""

    def call_id(self) -> str:
        """Return a new id that cannot be guessed."""
        if self.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(_MISTRAL_ID))
        return f"call_{secrets.token_hex(12)}"


class MessageReader:
    """A reader of one message. ``feed`` and ``finish`` return OpenAI's deltas, without the role."""

    def __init__(self, format: MessageFormat) -> None:
        self._format = format
        self._harmony = HarmonyReader(format.tools, in_reasoning=bool(format.in_reasoning)) if format.harmony else None
        self._thoughts = None if format.reasoning is None else format.reasoning.streaming(format.in_reasoning)
        self._parser = None if format.calls is None else format.calls.streaming(format.tools)
        self._arguments: dict[int, list[str]] = {}
        """The arguments so far, by call."""

    @property
    def calls_are_whole(self) -> bool:
        """Whether there are calls, and all of them are complete and well-formed."""
        calls = map("".join, self._arguments.values())
        return bool(self._arguments) and all(json_type(call) == "object" for call in calls)

    def feed(self, text: str) -> dict[str, Any]:
        """Return the delta of a piece of the text."""
        if self._harmony is not None:
            return self._parts(self._harmony.feed(text))
        if self._thoughts is None:
            return self._delta("", self._calls(text))
        found = self._thoughts.feed(text)
        return self._delta(_joined(d.reasoning for d in found), self._calls(_joined(d.content for d in found)))

    def finish(self) -> dict[str, Any]:
        """Return the delta of the text held back."""
        if self._harmony is not None:
            return self._parts(self._harmony.finish())
        found = [] if self._thoughts is None else self._thoughts.finish()
        left = self._calls(_joined(delta.content for delta in found))
        if self._parser is not None:
            left += self._parser.finish()
        return self._delta(_joined(delta.reasoning for delta in found), left)

    def _calls(self, text: str) -> list[ToolDelta]:
        if not text:
            return []
        return [ToolDelta(content=text)] if self._parser is None else self._parser.feed(text)

    def _parts(self, found: Sequence[Delta]) -> dict[str, Any]:
        reasoning = _joined(one.reasoning for one in found if isinstance(one, ReasoningDelta))
        return self._delta(reasoning, [one for one in found if isinstance(one, ToolDelta)])

    def _delta(self, reasoning: str, found: Sequence[ToolDelta]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content := _joined(one.content for one in found):
            delta["content"] = content
        calls: dict[int, dict[str, Any]] = {}
        for one in found:
            if one.index is None or (one.index and self._format.one_call):
                continue
            call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
            if one.index not in self._arguments:
                self._arguments[one.index] = []
                call |= {"id": self._format.call_id(), "type": "function"}
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
            known = calls.setdefault(part["index"], {"id": part.get("id"), "type": "function", "function": {}})
            function = known["function"]
            known["function"] = {
                "name": function.get("name", part["function"].get("name")),
                "arguments": function.get("arguments", "") + part["function"]["arguments"],
            }
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


def answer_of(text: str, format: MessageFormat) -> dict[str, Any]:
    """Return the message of an answer without calls, for later turns: without its reasoning."""
    reader = MessageReader(format)
    message = message_of([reader.feed(text), reader.finish()])
    return {"role": "assistant", "content": message["content"] or ""}


def _joined(texts: Iterable[str]) -> str:
    return "".join(texts)
