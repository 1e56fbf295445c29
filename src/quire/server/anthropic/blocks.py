"""Blocks of Anthropic's Messages API: those that a request may hold, checked, and their chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.http.bodies import check_count
from quire.server.http.errors import bad_field
from quire.server.openai.protocol import Body, ShownAs
from quire.server.responses.items import TEXT_ONLY, checked


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Any, ShownAs(str | list[TextBlock] | None)] = None
    is_error: bool | None = None
    """A key of the tool's message, for templates that read it."""
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """What another server encrypted. It is not read."""

    type: Literal["redacted_thinking"]


class UserTurn(Body):
    role: Literal["user"]
    content: str | Annotated[list[TextBlock | ToolResultBlock], Field(min_length=1)]


class AssistantTurn(Body):
    role: Literal["assistant"]
    content: str | list[TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock]


class SystemTurn(Body):
    role: Literal["system"]
    content: str | list[TextBlock]


Turns = Annotated[Any, ShownAs(Annotated[list[UserTurn | AssistantTurn | SystemTurn], Field(min_length=1)])]
Texts = Annotated[Any, ShownAs(str | list[TextBlock] | None)]

_TEXTS: Mapping[str, type[Body]] = {"text": TextBlock}
_KINDS: Mapping[str, Mapping[str, type[Body]]] = {
    "user": {**_TEXTS, "tool_result": ToolResultBlock},
    "assistant": {
        **_TEXTS,
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
    },
    "system": _TEXTS,
}
"""The blocks that each role may have."""


class BlockTurns:
    """The messages of a chat that a request's blocks make.

    Turns of one role in a row are one message, as at Anthropic.
    """

    def __init__(self, system: Any, given: Any) -> None:
        """Read ``system`` and ``messages``. Raise ``ApiError`` 400 for what is not taken."""
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        """Paths in the chat, and what they are in the request."""
        self._calls: set[str] = set()
        if system is not None:
            for place, block in _blocks(system, "system", "system"):
                self._add("system", block, place)
        if not isinstance(given, list) or not given:
            said = f"messages must be a list of at least one message, got {given!r:.60}"
            raise bad_field("messages", said, code="invalid_argument")
        check_count("messages", given)
        for number, turn in enumerate(given):
            path = f"messages.{number}"
            role = turn.get("role") if isinstance(turn, dict) else None
            if not isinstance(role, str) or role not in _KINDS:
                allowed = "an object with the role 'user' or 'assistant'"
                said = f"{path} must be {allowed}, got {turn!r:.60}"
                raise bad_field(f"{path}.role", said, code="invalid_argument")
            for place, block in _blocks(turn.get("content"), f"{path}.content", role):
                self._add(role, block, place)
        if given[-1]["role"] == "assistant":
            said = f"{path} is the assistant's, and answers do not go on from text of the client (prefill)"
            raise bad_field(path, f"{said}; end with a message of the user", code="unsupported")
        for message in self.messages:
            content = message.get("content")
            if "tool_calls" in message and not content:
                message["content"] = None
            elif isinstance(content, list) and len(content) == 1 and content[0].keys() == {"type", "text"}:
                message["content"] = content[0]["text"]

    def _add(self, role: str, block: Body, place: str) -> None:
        if isinstance(block, ToolResultBlock):
            self._result(block, place)
            return
        if not self.messages or self.messages[-1]["role"] != role:
            self._begin({"role": role, "content": "" if role == "assistant" else []}, place)
        message = self.messages[-1]
        if role != "assistant":
            self.places[f"{self._path}.content.{len(message['content'])}"] = place
            message["content"].append(block.model_dump(include={"type", "text", "cache_control"}, exclude_none=True))
            return
        match block:
            case TextBlock():
                message["content"] += block.text
            case ThinkingBlock():
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                self._calls.add(block.id)
                call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
                message.setdefault("tool_calls", []).append(call)
        if (mark := getattr(block, "cache_control", None)) is not None:
            message["cache_control"], self.places[self._path] = mark, place

    def _result(self, block: ToolResultBlock, place: str) -> None:
        if block.tool_use_id not in self._calls:
            said = f"{place}.tool_use_id is {block.tool_use_id!r:.80}, of no tool_use before it; give its tool_use too"
            raise bad_field(f"{place}.tool_use_id", said, code="invalid_argument")
        message: dict[str, Any] = {"role": "tool", "tool_call_id": block.tool_use_id, "content": ""}
        if isinstance(block.content, str):
            message["content"] = block.content
        elif block.content is not None:
            found = list(_blocks(block.content, f"{place}.content", "system"))
            given = {"type", "text", "cache_control"}
            message["content"] = [part.model_dump(include=given, exclude_none=True) for _, part in found] or ""
        if block.is_error is not None:
            message["is_error"] = block.is_error
        if block.cache_control is not None:
            message["cache_control"] = block.cache_control
        self._begin(message, place)

    def _begin(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places[self._path] = place

    @property
    def _path(self) -> str:
        return f"messages.{len(self.messages) - 1}"

    def place(self, path: str) -> str:
        """Return the path in the request of a path in the chat."""
        head, rest = path, ""
        while head not in self.places and "." in head:
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return self.places[head] + rest if head in self.places else path


def _blocks(content: Any, path: str, role: str) -> Sequence[tuple[str, Body]]:
    """Return the blocks of a content, which may be a text, with their places."""
    if isinstance(content, str):
        return [(path, TextBlock(type="text", text=content))]
    # An answer without blocks comes back in the history.
    if not isinstance(content, list) or (role == "user" and not content):
        said = f"{path} must be a text or a list of blocks, got {content!r:.60}"
        raise bad_field(path, said, code="invalid_argument")
    found = [(f"{path}.{number}", block) for number, block in enumerate(content)]
    return [(place, checked(block, place, _KINDS[role], TEXT_ONLY)) for place, block in found]
