"""The tool calls of messages, as chat templates get them, and messages with fields that OpenAI has
replaced, or that only other servers have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from quire.base.errors import InvalidArgument
from quire.base.signatures import require_nesting

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
    """Return arguments as an object; text that is none, or that nests too deeply, as it is."""
    if given is None or (isinstance(given, str) and (not given or given.isspace())):
        return _Arguments({})
    if isinstance(given, dict):
        return _Arguments(given)
    # It was cut short, or the model made a mistake. The conversation continues.
    with suppress(ValueError, RecursionError):
        if isinstance(given, str) and isinstance(found := json.loads(given), dict):
            require_nesting("arguments", found)
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


# -- older fields ----------------------------------------------------------------------------------


def renewed(messages: Sequence[Any]) -> list[Any]:
    """Return messages whose ``function_call`` is a list of ``tool_calls``, and whose role
    "function" is a "tool". ``InvalidArgument``: a malformed call, or a true ``prefix``."""
    found, calls = list[Any](), 0
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        if not isinstance(message, Mapping):
            found.append(message)
            continue
        if message.get("prefix"):
            raise InvalidArgument(
                f"{where}.prefix is not supported: an answer cannot continue a message; leave it out, or complete a plain "
                "prompt that ends with the beginning of the answer",
                field=f"{where}.prefix",
            )
        if (call := message.get("function_call")) is not None:
            calls += 1
            message = {name: value for name, value in message.items() if name != "function_call"}
            message["tool_calls"] = [_tool_call(call, message, f"{where}.function_call", _id(calls))]
        elif message.get("role") == "function":
            message = {"tool_call_id": _id(calls), **message, "role": "tool"}
        found.append(message)
    return found


def _tool_call(call: Any, message: Mapping[str, Any], where: str, id_: str) -> dict[str, Any]:
    if message.get("tool_calls"):
        raise InvalidArgument(f"{where} and tool_calls are both given; give tool_calls only", field=where)
    name = call.get("name") if isinstance(call, Mapping) else None
    if not isinstance(name, str) or not isinstance(call.get("arguments", ""), str | Mapping):
        raise InvalidArgument(
            field=where, given=call, allowed="{'name': string, 'arguments': JSON text}, or tool_calls in its place"
        )
    return {"id": id_, "type": "function", "function": {"arguments": "", **call}}


def _id(number: int) -> str:
    return f"call{number:05}"  # of nine letters, as Mistral's templates want it
