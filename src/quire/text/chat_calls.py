"""The tool calls of messages, as chat templates get them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from quire.base.errors import InvalidArgument

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair."""


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON text as the ``tojson`` of transformers' templates does."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Half a surrogate pair is no character; JSON has an escape for it.
    return SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", text)


class _Arguments(dict[str, Any]):
    """The arguments of a call: an object that becomes JSON text where a template joins it."""

    __slots__ = ("_text",)

    def __init__(self, arguments: Mapping[str, Any], text: str | None = None) -> None:
        """Keep the JSON ``text`` that was given, if it was."""
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return to_json(self) if self._text is None else self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, which templates write, join or walk
    over. The name comes first: some templates write the object of the function as it is."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidArgument(field=where, given=calls, allowed="a list of objects")
    for number, call in enumerate(calls):
        path, holder = f"{where}.{number}", call
        if "function" in call:
            path, holder = f"{path}.function", call["function"]
        if not isinstance(holder, dict):
            raise InvalidArgument(field=path, given=holder, allowed="an object with 'name' and 'arguments'")
        named = {"name": holder["name"]} if "name" in holder else {}
        rest = {key: holder[key] for key in holder if key not in ("name", "arguments")}
        arguments = _arguments_of(holder.get("arguments"))
        holder.clear()
        holder |= {**named, "arguments": arguments, **rest}
    return calls


def _arguments_of(given: Any) -> Any:
    """Return arguments as an object; text that is none as it is."""
    if given is None or (isinstance(given, str) and (not given or given.isspace())):
        return _Arguments({})
    if isinstance(given, dict):
        return _Arguments(given)
    # No JSON: it was cut short, or the model made a mistake. The conversation continues.
    with suppress(ValueError, RecursionError):
        if isinstance(given, str) and isinstance(found := json.loads(given), dict):
            return _Arguments(found, given)
    return given


def fill_contents_of_calls(messages: Sequence[dict[str, Any]]) -> bool:
    """Make an empty text of each content that is none or missing: some templates take its length.
    Return whether there were any."""
    found = [message for message in messages if message.get("content") is None]
    for message in found:
        message["content"] = ""
    return bool(found)


def take_text_from_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Make ``{}`` of arguments that are text. Return whether there were any."""
    found = False
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"], found = {}, True
    return found
