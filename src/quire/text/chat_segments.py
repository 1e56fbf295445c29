"""Texts in chat messages that are marked as segments, and where they stand in the prompt.

``"segment": true`` marks a text part, or a message whose content is a text. Templates never see
marks. A text's place is found by rendering once more, with signs instead of marked texts: what
stands between signs is the template's, and the prompt must be just that, with the texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from quire.base.errors import InvalidArgument
from quire.base.segments import Segment
from quire.text.chat_rendering import Message

Parts: TypeAlias = Sequence[Segment | str]
"""A rendered prompt in pieces."""

SIGN = "\ue000"
"""A character for private use, on both sides of a number. A prompt with one has no segments."""
TRIES = 4
"""How often a prompt is rendered with signs. Each time one text may turn out to be changed by the
template, and goes without a sign from then on."""

_SIGNS = re.compile(f"{SIGN}([0-9]+){SIGN}")


def without_segments(messages: Sequence[Message]) -> tuple[Sequence[Message], dict[str, str]]:
    """Return messages without marks, and the marked texts by their paths ("messages.2",
    "messages.0.content.1"). ``InvalidArgument`` for a malformed mark; other faults of messages are
    left to who renders them."""
    marked: dict[str, str] = {}

    def bare(one: Any, path: str, key: str) -> Any:
        if not isinstance(one, Mapping) or "segment" not in one:
            return one
        mark, where = one["segment"], f"{path}.segment"
        if mark is not None and not isinstance(mark, bool):
            raise InvalidArgument(field=where, given=mark, allowed="true or false")
        if mark:
            if not isinstance(one.get(key), str):
                raise InvalidArgument(f"{where} marks a text, and {path} has none in {key!r}", field=where)
            marked[path] = one[key]
        return {name: value for name, value in one.items() if name != "segment"}

    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        return messages, marked
    kept = []
    for number, message in enumerate(messages):
        path = f"messages.{number}"
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple)):
            parts = [bare(part, f"{path}.content.{i}", "text") for i, part in enumerate(message["content"])]
            message = {**message, "content": parts}
        kept.append(bare(message, path, "content"))
    return kept, marked


def cut_at_segments(
    text: str, messages: Sequence[Message], marked: Mapping[str, str], render: Callable[[Sequence[Message]], str]
) -> tuple[Parts, tuple[str, ...]]:
    """Return a prompt's text with segments in the places of marked texts, and the paths of those
    that have no place: the template leaves them out, or writes them in another way than as they
    are, or without white space at an end or both. ``messages`` have no marks; ``render`` made the
    text of them."""
    signed = [path for path, content in marked.items() if content.strip()]
    for _ in range(TRIES if signed and SIGN not in text else 0):
        try:
            pieces = _SIGNS.split(render(_signed(messages, signed)))
        except InvalidArgument:  # the template does not take a sign
            break
        found = _filled(text, pieces, [marked[path] for path in signed])
        if found is None:
            break
        if not isinstance(found, int):
            placed = {signed[int(number)] for number in pieces[1::2]}
            return found, tuple(path for path in marked if path not in placed)
        del signed[found]
    return [text], tuple(marked)


def first_of(parts: Parts, count: int) -> Parts:
    """Return the parts that a prompt's first characters have."""
    found: list[Segment | str] = []
    for part in parts:
        content = part if isinstance(part, str) else str(part.content)
        kept = content[: max(0, count)]
        found.append(kept if isinstance(part, str) else Segment(kept))
        count -= len(content)
    return found


def _signed(messages: Sequence[Message], paths: Sequence[str]) -> list[Message]:
    """Return messages with the sign of its number in the place of each text."""
    signs = {path: f"{SIGN}{number}{SIGN}" for number, path in enumerate(paths)}
    found: list[Message] = []
    for number, message in enumerate(messages):
        path = f"messages.{number}"
        content = signs.get(path, message.get("content"))
        if isinstance(content, (list, tuple)):
            content = [
                {**part, "text": signs[at]} if (at := f"{path}.content.{i}") in signs else part
                for i, part in enumerate(content)
            ]
        found.append({**message, "content": content})
    return found


def _filled(text: str, pieces: Sequence[str], contents: Sequence[str]) -> Parts | int | None:
    """Return the parts of ``text``: the ``pieces`` that no sign divides, and between them contents,
    whose numbers ``pieces`` has there. If the text is another, return the number of the content
    where that shows, or None."""
    at = len(pieces[0])
    if not text.startswith(pieces[0]):
        return None
    parts: list[Segment | str] = [pieces[0]]
    number: int | None = None
    for number, own in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
        given = contents[number]
        for content in (given, given.lstrip(), given.rstrip(), given.strip()):
            if text.startswith(content, at) and text.startswith(own, at + len(content)):
                break
        else:
            return number
        parts += [Segment(content), own]
        at += len(content) + len(own)
    return [part for part in parts if part != ""] or [text] if at == len(text) else number
