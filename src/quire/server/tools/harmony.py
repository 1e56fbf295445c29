"""gpt-oss's harmony format: reasoning, answer and tool calls of one turn, as its text arrives.

A turn is a list of messages. The header of each has a channel and perhaps a recipient::

  <|channel|>analysis<|message|>thoughts<|end|>
  <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
  <|start|>assistant<|channel|>final<|message|>answer<|return|>

The prompt ends with ``<|start|>assistant``, so a text begins within a header, or with the answer
for a model that was trained so.

How messages are read:

- A message to a function is a call. Its recipient is ``to=functions.NAME``, anywhere in the header
  and on any channel (models write calls on ``analysis`` too), or ``to=NAME`` of an offered tool.
  The call begins with its header. Its arguments are given as they are written, even if they are cut
  short or no JSON, as in OpenAI's API. Without tools there are no calls.
- ``final`` is content. ``analysis`` and messages to other recipients (built-in tools that were not
  offered) are reasoning.
- Other messages are content: ``commentary`` without recipient or to the user (a preamble), other
  channels or none, text without a header. The user then sees the text of a misspelt channel, while
  in the reasoning the turn would seem empty.
- JSON on ``final`` that looks like a call is content: a header would name the tool.
- An empty line separates messages of one kind. White space within them is kept.

Rules for every text:

- Nothing is lost but headers, markers, white space between messages, and the text after the
  ``<|call|>`` of a message to a tool. The turn ends there; a model that goes on invents the tool's
  answer.
- Markers are special tokens, but a text may spell them too. A marker is text where the format has
  no place for it: inside a JSON string of arguments; ``<|end|>`` with neither a header nor the end
  after it (after a call it ends the call); the beginning of a header that does not become one. A
  text that spells a whole header cannot be told from a header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quire.server.tools.formats import Offered, Tools
from quire.server.tools.reader import Delta, MessageParser, overlap

NAMES = ("harmony", "openai", "gpt_oss")
"""Names of the format, here and in other projects."""
STOPS = ("<|return|>", "<|call|>")
"""Tokens that end a turn."""
_CLOSERS = ("<|end|>", *STOPS)
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *_CLOSERS)

_MAX_HEADER = 400
"""Most characters of a header. Names of tools have at most 256."""
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_HEADER_TEXT = re.compile(r"[\w \t\r\n.:=/–—-]*")
"""The text between the markers of a header. Models put dashes before names of channels."""
_RECIPIENT = re.compile(r"to=(\S+)")
_CHANNEL = re.compile(r"(?:(?!to=)\w)+")
_NO_TOOLS = ("user", "assistant")
"""Recipients that are no tools. A message to them is read as one without a recipient."""
_CHANNELS = ("analysis", "commentary", "final")
_JSON_SIGNS = re.compile(r'\\[\s\S]?|["\x00-\x1f]')


def is_harmony(chat_template: str, name: str | None = None) -> bool:
    """Return whether a model writes this format, whose markers are then in its chat template.
    ``name``: the format's name, where it is configured."""
    if name is not None:
        return name in NAMES
    return "<|channel|>" in chat_template and "<|message|>" in chat_template


def in_reasoning(prompt: str) -> bool:
    """Return whether a turn after ``prompt``, with special tokens, begins inside the reasoning."""
    return prompt.rstrip().endswith("<|channel|>analysis<|message|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """The content of a header."""

    kind: Literal["content", "reasoning", "call"]
    name: str = ""
    """Name of the called function."""
    addressed: bool = False
    """Whether its recipient is not the user."""


_PLAIN = _Message(kind="content")


class HarmonyReader(MessageParser):
    """A reader of one turn, as its text arrives."""

    def __init__(self, tools: Tools | None = None, *, in_reasoning: bool = False, only_calls: bool = False) -> None:
        """Begin a turn, inside the reasoning with ``in_reasoning``. Without ``tools``, no calls.
        ``only_calls``: nothing else is written, and a header that was cut is no content."""
        super().__init__()
        self._only_calls = only_calls
        self._offered = Offered(tools).names
        self._message = _Message(kind="reasoning") if in_reasoning else _PLAIN
        self._place: Literal["first", "header", "body", "closed", "over"] = "body" if in_reasoning else "first"
        """``first``: so far only text that may continue the prompt's header. ``closed``: after the
        end of a message, if a header or the text's end follows. ``over``: nothing more is read."""
        self._pending = ""
        """Text that may become a marker; shorter than one."""
        self._held: list[str] = []
        """Parts outside of bodies that belong to the format, or turn out to be text."""
        self._size = 0
        """Characters of the header so far."""
        self._lead = ""
        """The first characters but white space, while they may begin a header."""
        self._num_calls = 0
        self._written: set[str] = set()
        """Kinds of message that have text."""
        self._begins = True
        """Whether the message has no text yet."""
        self._json: bool | None = None
        """Whether arguments are JSON; None: not known yet."""
        self._quoted = self._escaped = False
        """Whether the arguments end within a JSON string, and there after a backslash."""

    def _read(self, text: str, *, last: bool) -> None:
        if last and self._only_calls and self._place != "body":
            return
        text, self._pending, at = self._pending + text, "", 0
        for found in _MARKER.finditer(text):
            self._text(text[at : found.start()])
            self._marker(found.group())
            at = found.end()
        held = 0 if last else overlap(text[at:], MARKERS)
        self._text(text[at : len(text) - held])
        self._pending = text[len(text) - held :]
        if last and (self._place == "first" or (self._place == "header" and not _may_go_on("".join(self._held)))):
            self._give_back()

    # -- between messages --------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        """Read text without markers."""
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
        """Write the held parts as text."""
        text, self._held, self._lead, self._place = "".join(self._held), [], "", "body"
        self._write(text)

    def _meant(self, header: str) -> _Message:
        """Return the content of a header, markers included. The role does not matter."""
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
            self._deltas.append(Delta(index=self._num_calls, name=message.name))
            self._num_calls += 1

    def _write(self, text: str) -> None:
        if not text:
            return
        kind = self._message.kind
        if kind == "call":
            self._follow(text)
            self._deltas.append(Delta(index=self._num_calls - 1, arguments=text))
            return
        if self._begins and kind in self._written:
            text = "\n\n" + text
        self._begins = False
        self._written.add(kind)
        self._deltas.append(Delta(reasoning=text) if kind == "reasoning" else Delta(content=text))

    def _follow(self, text: str) -> None:
        """Track whether the arguments end within a JSON string."""
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
                # This is no JSON. An unclosed string would take all that follows.
                self._json = self._quoted = False
                return


def _may_go_on(header: str) -> bool:
    """Return whether the beginning of a header is spelt correctly; otherwise it may be text."""
    role, _, rest = header.partition("<|channel|>")
    before, after = (
        [word for word in _MARKER.sub(" ", part).split() if not word.startswith("to=")] for part in (role, rest)
    )
    if len(before) > 1 or len(after) > 2:
        return False
    return "assistant".startswith("".join(before)) and any(name.startswith("".join(after[:1])) for name in _CHANNELS)
