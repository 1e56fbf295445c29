"""``cache_control`` marks in messages and tools, and the tokens of the prompt before each.

A mark pins what stands before it and what it stands at. Templates never see marks. Where one stands
in the prompt is found by rendering again with a sign at its place: what both texts have in common
ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import QuireError
from quire.base.token_history import common_prefix
from quire.server.http.errors import bad_field
from quire.server.openai.conversations import Conversation, Messages
from quire.server.openai.hint_fields import MOST_MARKS, HintFields, lifetime

SIGN = "\ue000"
"""A character for private use, which no text has at these places."""


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A mark at the end of a tool, of a message, or of one of its parts."""

    path: str
    """Its place in the body: "tools.0", "messages.2", "messages.0.content.1"."""
    seconds: float


def without_marks(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]
) -> tuple[Messages, list[dict[str, Any]], list[CacheMark]]:
    """Return copies without marks, and the marks. Raise ``ApiError`` 400 for malformed ones and for
    too many."""
    marks: list[CacheMark] = []

    def plain(value: Any, path: str) -> Any:
        if not isinstance(value, Mapping) or "cache_control" not in value:
            return value
        rest = {name: item for name, item in value.items() if name != "cache_control"}
        if (mark := value["cache_control"]) is not None:
            where = f"{path}.cache_control"
            if len(marks) == MOST_MARKS:
                raise bad_field(where, f"{where} is one mark too many; a request may have {MOST_MARKS}")
            marks.append(CacheMark(path, lifetime(mark, where)))
        return rest

    kept: Messages = []
    # A tool has its mark beside its function or inside of it.
    bare = [
        plain({**tool, "function": plain(tool["function"], f"tools.{i}")}, f"tools.{i}") for i, tool in enumerate(tools)
    ]
    for number, message in enumerate(messages):
        path = f"messages.{number}"
        if isinstance(message.get("content"), list):
            parts = [plain(part, f"{path}.content.{i}") for i, part in enumerate(message["content"])]
            message = {**message, "content": parts}
        kept.append(plain(message, path))
    return kept, bare, marks


def pin_all(hints: HintFields, marks: Sequence[CacheMark]) -> None:
    """Let marks pin all that a session holds when it answers: what stands before them is not
    rendered by itself there."""
    for mark in marks:
        hints.pin(mark.path, None, mark.seconds)


def pin_at(
    hints: HintFields,
    mark: CacheMark,
    chat: Conversation,
    prompt: tuple[str, NDArray[np.int64]],
    encode: Callable[[int], NDArray[np.int64]],
) -> None:
    """Turn a mark into a pin. ``prompt``: the rendered text and its tokens. ``encode`` returns the
    tokens of the text's first characters."""
    text, tokens = prompt
    place: int | None = None
    with suppress(QuireError):  # the template refuses the sign, or has no room for it
        place = _place(mark, chat, text)
    if place is None:
        hints.refuse("pin", mark.path, "the chat template does not show where this ends")
    elif count := common_prefix(encode(place), tokens):
        hints.pin(mark.path, count, mark.seconds)
    else:
        hints.refuse("pin", mark.path, "no token of the prompt stands before it")


def _place(mark: CacheMark, chat: Conversation, text: str) -> int | None:
    """Return the number of characters of the prompt before a mark; None if it cannot be found."""
    messages, tools = chat.messages, chat.tools
    kind, number, *part = mark.path.split(".")
    index = int(number)
    if kind == "tools":
        if tools is None:  # none may be called, so the prompt has none
            return None
        tool = tools[index]
        function = tool["function"]
        described = {**tool, "function": {**function, "description": (function.get("description") or "") + SIGN}}
        # A template that writes the whole tool shows a last entry; others show the description.
        for signed in ({**tool, SIGN: ""}, described):
            found = _common(chat.prompt(messages, [*tools[:index], signed, *tools[index + 1 :]]), text)
            if found is not None:
                return found
        return None
    message = messages[index]
    content = message.get("content")
    if isinstance(content, str):
        content += SIGN
    elif isinstance(content, list) and content:
        at = int(part[1]) if part else len(content) - 1
        if not isinstance(content[at], dict) or not isinstance(content[at].get("text"), str):
            return None
        content = [*content[:at], {**content[at], "text": content[at]["text"] + SIGN}, *content[at + 1 :]]
    else:
        return None
    return _common(
        chat.prompt([*messages[:index], {**message, "content": content}, *messages[index + 1 :]], tools), text
    )


def _common(signed: str, text: str) -> int | None:
    """Return the length of the common beginning of two texts; None if they are equal."""
    return next((at for at, (one, other) in enumerate(zip(signed, text, strict=False)) if one != other), None)
