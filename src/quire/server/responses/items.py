"""Items of the Responses API: those that a request may hold, checked, and the chat that they make.

A kind of item is a model here, from which its check and its part of ``/openapi.json`` both follow.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import ValidationError

from quire.server.http.bodies import check_count
from quire.server.http.errors import bad_field, validation_error
from quire.server.openai.protocol import Body

Item: TypeAlias = dict[str, Any]
B = TypeVar("B", bound=Body)

TEXT_ONLY = "this server takes text only"


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    type: Literal["output_text"]
    text: str


class Refusal(Body):
    type: Literal["refusal"]
    refusal: str


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What a model thought. An ``encrypted_content`` is not read."""

    type: Literal["reasoning"]
    summary: list[dict[str, Any]] | None = None
    content: list[ReasoningText] | None = None


class ItemReference(Body):
    """An item of the output of a stored response."""

    type: Literal["item_reference"] | None = None
    id: str


KINDS: Mapping[str, type[Body]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}
_PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "message": ("content", ("input_text", "output_text", "refusal")),
    "function_call_output": ("output", ("input_text",)),
    "reasoning": ("content", ("reasoning_text",)),
}
"""Where the parts of an item are, and what they may be."""
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def checked(given: Any, path: str, kinds: Mapping[str, type[B]], advice: str, *, default: str | None = None) -> B:
    """Return an object of a request as the kind that its ``type`` names. Raise ``ApiError`` 400,
    which names the field, for another type and for wrong fields."""
    if not isinstance(given, dict):
        raise bad_field(path, f"{path} must be an object with a type, got {given!r:.60}", code="invalid_argument")
    kind = given.get("type") or default
    if not isinstance(kind, str) or kind not in kinds:
        allowed = ", ".join(map(repr, kinds))
        message = f"{path}.type must be one of {allowed} ({advice}), got {kind!r:.60}"
        raise bad_field(f"{path}.type", message, code="unsupported_parameter")
    try:
        return kinds[kind].model_validate(given)
    except ValidationError as error:
        # Of a union the deepest problem is that of the branch which was meant, whose type is right.
        problems = sorted(error.errors(), key=lambda one: (one["loc"][-1] == "type", -len(one["loc"])))
        names = {model.__name__ for model in (InputText, OutputText, Refusal)}
        places = [[part for part in one["loc"] if part not in names] for one in problems]
        whole = [{**one, "loc": ("body", *path.split("."), *at)} for one, at in zip(problems, places, strict=True)]
        raise validation_error(whole) from None


def checked_list(
    given: Any, path: str, kinds: Mapping[str, type[B]], advice: str, *, default: str | None = None
) -> list[B]:
    """Return the objects of a list, which may be missing, each as ``checked`` returns it."""
    if given is not None and not isinstance(given, list):
        raise bad_field(path, f"{path} must be a list, got {given!r:.60}", code="invalid_argument")
    return [checked(one, f"{path}.{number}", kinds, advice, default=default) for number, one in enumerate(given or ())]


def new_id(kind: str) -> str:
    """Return a new id of an item, which cannot be guessed."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"


# -- reading ---------------------------------------------------------------------------------------


def read_items(given: Any) -> Iterator[Item]:
    """Yield the items of an ``input``, each with an id and with its content in parts. Raise
    ``ApiError`` 400 for what is none, or not taken."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_field("input", f"input must be a text or a list of items, got {given!r:.60}", code="invalid_argument")
    check_count("input", given)
    for number, one in enumerate(given):
        path = f"input.{number}"
        default = "item_reference" if isinstance(one, dict) and "id" in one and "role" not in one else "message"
        if isinstance(one, dict):
            _check_parts(one, one.get("type") or default, path)
        yield _normal(checked(one, path, KINDS, TEXT_ONLY, default=default))


def _check_parts(item: Mapping[str, Any], kind: Any, path: str) -> None:
    """Refuse parts that are not taken by their names, such as images."""
    field, allowed = _PARTS.get(kind, ("", ())) if isinstance(kind, str) else ("", ())
    parts = item.get(field)
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        where = f"{path}.{field}.{number}"
        if not isinstance(part, dict) or part.get("type") not in allowed:
            said = part.get("type") if isinstance(part, dict) else part
            message = f"{where}.type must be one of {', '.join(map(repr, allowed))} ({TEXT_ONLY}), got {said!r:.60}"
            raise bad_field(f"{where}.type", message, code="unsupported_parameter")


def _normal(item: Body) -> Item:
    """Return an item as responses list it."""
    given = (item.model_extra or {}).get("id")
    found: Item = {"type": getattr(item, "type", None), "id": getattr(item, "id", given)}
    if isinstance(item, ItemReference):
        return {**found, "type": "item_reference"}
    found["id"] = given if isinstance(given, str) and given else new_id(found["type"])
    match item:
        case MessageItem(role="assistant"):
            texts = [{"type": "output_text", "text": text, "annotations": []} for text in _texts(item.content)]
            return {**found, "role": "assistant", "status": "completed", "content": texts}
        case MessageItem():
            inputs = [{"type": "input_text", "text": text} for text in _texts(item.content)]
            return {**found, "role": item.role, "status": "completed", "content": inputs}
        case FunctionCallItem():
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {**found, **call, "status": "completed"}
        case FunctionOutputItem():
            output = item.output if isinstance(item.output, str) else [part.model_dump() for part in item.output]
            return {**found, "call_id": item.call_id, "output": output, "status": "completed"}
        case ReasoningItem():
            thoughts = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            return {**found, "summary": item.summary or [], "content": thoughts}
    raise AssertionError(f"{found['type']} is no kind of item")


def _texts(content: str | Sequence[InputText | OutputText | Refusal]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.refusal if isinstance(part, Refusal) else part.text for part in content]


# -- the chat --------------------------------------------------------------------------------------


def messages_of(items: Sequence[Item], where: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return items as messages of a chat. What a model said in one turn is one message. Raise
    ``ApiError`` 400 for the output of no call; ``where`` names an item by its number."""
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    for number, item in enumerate(items):
        kind = item["type"]
        if kind == "function_call_output":
            if item["call_id"] not in calls:
                path = where(number)
                said = f"{path}.call_id is {item['call_id']!r:.80}, of no function_call before it; give its call too"
                raise bad_field(f"{path}.call_id", said, code="invalid_argument")
            output = item["output"]
            content = output if isinstance(output, str) else _joined(output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        else:
            if not messages or not _goes_on(messages[-1], item):
                messages.append({"role": "assistant", "content": ""})
            message = messages[-1]
            if kind == "function_call":
                calls.add(item["call_id"])
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            else:
                name = "reasoning_content" if kind == "reasoning" else "content"
                text = "".join(part["text"] for part in item["content"])
                message[name] = message.get(name, "") + text
    return [{**one, "content": None} if "tool_calls" in one and not one["content"] else one for one in messages]


def _goes_on(message: Mapping[str, Any], item: Item) -> bool:
    """Return whether an item of the model belongs to the turn of the last message."""
    if message["role"] != "assistant":
        return False
    if item["type"] == "reasoning":
        return not message["content"] and "tool_calls" not in message
    return item["type"] == "function_call" or not message["content"] or "tool_calls" in message


def _joined(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a single text as it is, and several as parts, which the template joins."""
    texts = [part["text"] for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
