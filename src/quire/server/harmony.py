"""gpt-oss's harmony format: reasoning, answer and tool calls of one turn, as its text arrives.

A turn is a row of messages, each with a channel and perhaps a recipient in its header::

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

The prompt ends with ``<|start|>assistant``, so a text begins within a header, or (of a model that was trained to) with its answer.

How messages are read:

- To a function (``to=functions.NAME`` anywhere in the header and on any channel, for models write calls on ``analysis`` too; or
  ``to=NAME`` of a tool that was offered): a call. It begins with its header and its arguments are given as they are written, so
  what is cut short or no JSON is given too, as OpenAI's API does. No tools, no calls.
- ``final``: content. ``analysis``, and what goes to anybody else (built-in tools that nobody offered): reasoning.
- ``commentary`` without recipient, or to the user (a preamble), other channels or none, text without header: content. A user can see a channel
  that is misspelt there; in the reasoning the turn would seem empty.
- Messages of one kind are parted by an empty line. White space in them is theirs.

What holds for every text:

- However it is cut, the deltas make up the same.
- Nothing is lost but headers, markers, the white space between messages, and what comes behind the ``<|call|>`` of a message to a
  tool: the turn is over there, a model that goes on invents the tool's answer.
- Markers are special tokens, but a text may spell them too. Where the format has no place for a marker, it is text: inside of a
  JSON string of arguments, ``<|end|>`` behind which there is neither a header nor the end (behind a call it ends the call), and
  what looks like the beginning of a header and does not become one. A text that spells a whole header cannot be told from one.
- The time is linear in the length of the text, and nothing raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from quire.errors import FailedPrecondition
from quire.server.reasoning import ReasoningDelta
from quire.server.tool_reader import overlap
from quire.server.tools import ToolDelta, Tools, architectures, names_of

Delta: TypeAlias = ReasoningDelta | ToolDelta
"""A ``ToolDelta`` for content and calls."""

NAMES = ("harmony", "openai", "gpt_oss")
"""What the format is called, here and elsewhere."""
STOPS = ("<|return|>", "<|call|>")
"""Tokens that end a turn."""
_CLOSERS = ("<|end|>", *STOPS)
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *_CLOSERS)

_MAX_HEADER = 400
"""Characters; names of tools have at most 256."""
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_HEADER_TEXT = re.compile(r"[\w \t\r\n.:=/–—-]*")
"""What stands between the markers of a header. Models put dashes before names of channels."""
_RECIPIENT = re.compile(r"to=(\S+)")
_CHANNEL = re.compile(r"(?:(?!to=)\w)+")
_NO_TOOLS = ("user", "assistant")
"""To whom models write besides; it is the same as to nobody."""
_CHANNELS = ("analysis", "commentary", "final")
_JSON_SIGNS = re.compile(r'\\[\s\S]?|["\x00-\x1f]')


def is_harmony(model_config: Mapping[str, Any], chat_template: str | None, name: str | None = None) -> bool:
    """Whether a model writes this format: its markers are in the chat template; without a template, models of the architecture
    (``architectures`` in config.json) do. ``name``: of the format that somebody knows it to write."""
    if name is not None:
        return name in NAMES
    if chat_template is None:
        return "GptOss" in architectures(model_config)
    return "<|channel|>" in chat_template and "<|message|>" in chat_template


def in_reasoning(prompt: str) -> bool:
    """Whether a turn that follows ``prompt`` (the text of it, special tokens included) begins inside of the reasoning."""
    return prompt.rstrip().endswith("<|channel|>analysis<|message|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What a header says."""

    kind: Literal["content", "reasoning", "call"]
    name: str = ""
    """Of the function that is called."""
    addressed: bool = False
    """Whether it goes to anybody but the user."""


_PLAIN = _Message(kind="content")


class HarmonyReader:
    """One turn, as its text arrives."""

    def __init__(self, tools: Tools | None = None, *, in_reasoning: bool = False) -> None:
        """``tools``: what may be called; None: nothing. ``in_reasoning``: whether the turn begins inside of the reasoning."""
        self._offered = None if tools is None else names_of(tools)
        self._message = _Message(kind="reasoning") if in_reasoning else _PLAIN
        self._place: Literal["first", "header", "body", "closed", "over"] = "body" if in_reasoning else "first"
        """``first``: nothing but what may begin a header that the prompt has opened; ``closed``: behind a marker that ends a
        message, if a header or the end comes next; ``over``: what comes is not read."""
        self._finished = False
        self._pending = ""
        """What may become a marker; shorter than one."""
        self._held: list[str] = []
        """What is part of the format or else text, outside of bodies."""
        self._size = 0
        """Characters of the header by now."""
        self._lead = ""
        """The first characters that are no white space, as long as they may begin a header."""
        self._num_calls = 0
        self._written: set[str] = set()
        """Kinds of which there is text."""
        self._begins = True
        """Whether the message has no text yet."""
        self._json: bool | None = None
        """Whether arguments are JSON; None: not known yet."""
        self._quoted = self._escaped = False
        """Whether the arguments end within a JSON string, and there behind a backslash."""
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """What ``text`` adds. ``FailedPrecondition`` after ``finish``."""
        self._check()
        self._read(text, last=False)
        return self._drain()

    def finish(self) -> list[Delta]:
        """What was held back. ``FailedPrecondition`` if called twice."""
        self._check()
        self._read("", last=True)
        if self._place == "first" or (self._place == "header" and not _may_go_on("".join(self._held))):
            self._give_back()
        self._finished = True
        return self._drain()

    def _check(self) -> None:
        if self._finished:
            raise FailedPrecondition("this reader is finished; a message needs one of its own")

    def _read(self, text: str, *, last: bool) -> None:
        text, self._pending, at = self._pending + text, "", 0
        for found in _MARKER.finditer(text):
            self._text(text[at : found.start()])
            self._marker(found.group())
            at = found.end()
        held = 0 if last else overlap(text[at:], MARKERS)
        self._text(text[at : len(text) - held])
        self._pending = text[len(text) - held :]

    # -- between messages --------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        """Text without markers."""
        if not text:
            return
        if self._place == "body":
            self._write(text)
        elif self._place == "header":
            self._of_header(text)
        elif self._place == "closed":
            self._held.append(text)
            if not text.isspace():
                self._give_back()
        elif self._place == "first":
            self._held.append(text)
            self._lead = self._lead + text if self._lead else text.lstrip()
            if self._lead.startswith("to="):
                self._place, self._size = "header", len(self._lead)
                if not _HEADER_TEXT.fullmatch(self._lead) or self._size > _MAX_HEADER:
                    self._give_back()
            elif not "to=".startswith(self._lead):
                self._give_back()

    def _marker(self, marker: str) -> None:
        if self._place == "over":
            return
        if self._place == "body" and self._quoted:
            self._write(marker)
        elif marker in _CLOSERS:
            self._close(marker)
        elif marker == "<|message|>" and self._place != "body":
            self._begin(self._meant("".join(self._held)))
        elif self._place == "header":
            self._of_header(marker)
        elif marker in ("<|start|>", "<|channel|>") or (marker == "<|constrain|>" and self._place != "body"):
            if self._lead and self._place == "first":
                self._give_back()
            self._place, self._size = "header", 0
            self._of_header(marker)
        else:
            self._write(marker)

    def _of_header(self, piece: str) -> None:
        self._held.append(piece)
        self._size += len(piece)
        if self._size > _MAX_HEADER or not (piece in MARKERS or _HEADER_TEXT.fullmatch(piece)):
            self._give_back()

    def _close(self, marker: str) -> None:
        if self._place in ("header", "first"):
            self._give_back()
        if marker == "<|call|>" and self._message.addressed:
            self._place, self._held = "over", []
            return
        if self._message.kind == "call":
            self._begin(_PLAIN)
        else:
            self._held.append(marker)
        self._place = "closed"

    def _give_back(self) -> None:
        """What was held is text."""
        text, self._held, self._lead, self._place = "".join(self._held), [], "", "body"
        self._write(text)

    def _meant(self, header: str) -> _Message:
        """What is said by a header, and markers before it. The role does not matter."""
        words = _MARKER.sub(" ", header)
        found = _CHANNEL.search(header.rpartition("<|channel|>")[2]) if "<|channel|>" in header else None
        channel = "" if found is None else found.group()
        recipient = _RECIPIENT.search(words)
        if recipient is None:
            return _Message(kind="reasoning") if channel == "analysis" else _PLAIN
        if self._offered is not None:
            full = recipient.group(1)
            name = full.removeprefix("functions.")
            if name not in self._offered and full in self._offered:
                name = full
            if name and (name != full or name in self._offered):
                return _Message(kind="call", name=name, addressed=True)
        if recipient.group(1) in _NO_TOOLS:
            return _Message(kind="reasoning") if channel == "analysis" else _PLAIN
        return _Message(kind="content" if channel == "final" else "reasoning", addressed=True)

    # -- messages ----------------------------------------------------------------------------------

    def _begin(self, message: _Message) -> None:
        self._message, self._place, self._begins = message, "body", True
        self._held, self._lead = [], ""
        self._json, self._quoted, self._escaped = None, False, False
        if message.kind == "call":
            self._deltas.append(ToolDelta(index=self._num_calls, name=message.name))
            self._num_calls += 1

    def _write(self, text: str) -> None:
        """More of the message."""
        if not text:
            return
        kind = self._message.kind
        if kind == "call":
            self._follow(text)
            self._deltas.append(ToolDelta(index=self._num_calls - 1, arguments=text))
            return
        if self._begins and kind in self._written:
            text = "\n\n" + text
        self._begins = False
        self._written.add(kind)
        self._deltas.append(ReasoningDelta(reasoning=text) if kind == "reasoning" else ToolDelta(content=text))

    def _follow(self, text: str) -> None:
        """See whether the arguments end within a JSON string."""
        if self._json is None and (begin := text.lstrip()):
            self._json = begin.startswith("{")
        if not self._json:
            return
        start, self._escaped = int(self._escaped), False
        for found in _JSON_SIGNS.finditer(text, start):
            sign = found.group()
            if sign == '"':
                self._quoted = not self._quoted
            elif sign.startswith("\\"):
                self._escaped = len(sign) == 1
            elif self._quoted:
                # No JSON after all; a string that nobody closes would take all that follows.
                self._json = self._quoted = False
                return

    def _drain(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _may_go_on(header: str) -> bool:
    """Whether a header that the end of the text cut short is spelt as one should be; otherwise it may be text."""
    role, _, rest = header.partition("<|channel|>")
    before, after = (
        [word for word in _MARKER.sub(" ", part).split() if not word.startswith("to=")] for part in (role, rest)
    )
    if len(before) > 1 or len(after) > 2:
        return False
    return "assistant".startswith("".join(before)) and any(name.startswith("".join(after[:1])) for name in _CHANNELS)
