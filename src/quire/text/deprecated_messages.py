"""Messages with fields that OpenAI has replaced, or that only other servers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import InvalidArgument


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
