"""The base of parsers of text that arrives in pieces, and the reader for grammars of tool calls."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from quire.base.errors import FailedPrecondition

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A generator that yields where it needs more text."""
Put: TypeAlias = Callable[[str], object]
"""A function that gets text piece by piece, each as soon as it was read."""

MAX_DEPTH = 128
"""Most levels of JSON; deeper is malformed. Well below Python's limit of recursion."""
MAX_NAME = 256
"""Most characters of a name; a longer one is malformed."""
SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ANY_STRING = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_PART_OF_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][-+]?[0-9]*)?)?")
_NAME = re.compile(r"[\w.:/-]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Malformed(Exception):
    """The text is not in the format. The parsers let it out nowhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that a model asks for."""

    name: str
    arguments: str
    """JSON text of an object, as the model wrote it. It is the beginning of one if the call was cut
    short, and no JSON if the model made a mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """The addition of a piece of text: content, reasoning, or a part of the call ``index``."""

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    """Number of the call, from 0; None for content and reasoning."""
    name: str | None = None
    """The call's name, in its first delta only."""
    call_id: str | None = None
    """The call's id beside its name, if the model wrote one before the arguments."""
    arguments: str = ""
    """A piece of the arguments as they are written; "" in the first delta of a call."""


class MessageParser(ABC):
    """A parser of one message, as its text arrives. However the text is cut, its deltas add up to
    the same. No text raises, and the time is linear in its length."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        """The deltas of the text that is being read."""
        self._finished = False

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that ``text`` adds. Raise ``FailedPrecondition`` after ``finish``."""
        return self._parse(text, last=False)

    def finish(self) -> list[Delta]:
        """Return deltas of the text held back. Raise ``FailedPrecondition`` at a second call."""
        return self._parse("", last=True)

    def _parse(self, text: str, *, last: bool) -> list[Delta]:
        if self._finished:
            raise FailedPrecondition("this parser is finished; a message needs one of its own")
        self._finished = last
        self._deltas = []
        self._read(text, last=last)
        return self._deltas

    @abstractmethod
    def _read(self, text: str, *, last: bool) -> None:
        """Read text and add its deltas. ``last``: no text follows."""


def overlap(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest end of ``text`` that is the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


class Reader:
    """Text that arrives in pieces, with a place in it. Read text is held until it is known to
    belong to a call."""

    def __init__(self, emit: Callable[[str | None, str], None]) -> None:
        """Begin without text. ``emit`` gets a call's name, then with None pieces of arguments."""
        self.call_id: str | None = None
        """The id that the model wrote for the call that was begun last."""
        self.closed = False
        """Whether the text is complete."""
        self.text, self.at = "", 0
        """The text that is kept, and the place in it."""
        self.ends: tuple[str, ...] = ()
        """Marks that end a call after the grammar failed; if empty, the end of the text does."""
        self.whole = False
        """Whether the arguments of the last call that was begun are complete."""
        self._open = False
        """Whether that call is still open."""
        self._emit = emit
        self._held: list[str] = []
        self._start = 0

    def push(self, text: str) -> None:
        self._held.append(self.text[self._start : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._start = 0

    def hold(self) -> None:
        """Hold the text that is read from here on."""
        self._held, self._start = [], self.at

    def held(self) -> str:
        """Return the text read since the last ``hold``, ``begin``, ``add`` or ``commit``."""
        return "".join(self._held) + self.text[self._start : self.at]

    def unread(self) -> None:
        """Go back to where the held text begins."""
        self.text, self.at = self.held() + self.text[self.at :], 0
        self.hold()

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call with the held text. It stays a call whatever follows."""
        self.call_id = call_id
        self._emit(name, "")
        self._open, self.whole = True, False
        self.hold()

    def add(self, arguments: str) -> None:
        """Take the held text for this text in the arguments of the open call."""
        if arguments:
            self._emit(None, arguments)
        self.hold()

    def commit(self, *calls: ToolCall) -> None:
        """Take the held text for these whole calls, or for a part of the format."""
        for call in calls:
            self.begin(call.name)
            self.add(call.arguments)
        self.over()
        self.hold()

    def over(self) -> None:
        """End the open call before the held text."""
        self._open = False

    def rest_of_call(self, markers: Sequence[str] = ()) -> Steps[bool]:
        """Recover after ``Malformed``. Return whether a call was open.

        An open call's arguments get the rest of its text as it is, so that they do not seem whole.
        The mark that ends it is taken unless it is one of ``markers``. If the text ended after the
        call's arguments, the rest stays held.
        """
        if not self._open or (self.closed and self.whole):
            self.over()
            return False
        self.add(self.held())
        with contextlib.suppress(Malformed):
            end = yield from self.until(self.add, *self.ends)
            if end in markers:
                self.back(len(end))
        self.commit()
        return True

    def more(self) -> Steps[bool]:
        """Wait for more text. Return whether there is any."""
        size = len(self.text) - self.at
        while len(self.text) - self.at == size:
            if self.closed:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character, without taking it; "" at the end."""
        if self.at == len(self.text):
            yield from self.more()
        return self.text[self.at : self.at + 1]

    def ahead(self, size: int) -> Steps[str]:
        """Return the next ``size`` characters without taking them. ``Malformed`` at the end."""
        while len(self.text) - self.at < size:
            if not (yield from self.more()):
                raise Malformed
        return self.text[self.at : self.at + size]

    def take(self, size: int, put: Put) -> None:
        """Take ``size`` characters that have arrived."""
        if size:
            begin, self.at = self.at, self.at + size
            put(self.text[begin : self.at])

    def run(self, pattern: re.Pattern[str], put: Put) -> Steps[None]:
        """Take all characters that ``pattern``, a repeated class, matches."""
        while True:
            self.take(pattern.match(self.text, self.at).end() - self.at, put)  # type: ignore[union-attr]
            if self.at < len(self.text) or not (yield from self.peek()):
                return

    def space(self) -> Steps[None]:
        yield from self.run(SPACE, _drop)

    def next_is(self, literal: str) -> Steps[bool]:
        """Return whether ``literal`` is next, without taking it."""
        while (there := self.text[self.at : self.at + len(literal)]) != literal:
            if self.closed or not literal.startswith(there):
                return False
            yield
        return True

    def accept(self, literal: str) -> Steps[bool]:
        """Take ``literal`` if it is next."""
        found = yield from self.next_is(literal)
        if found:
            self.at += len(literal)
        return found

    def one_of(self, literals: Collection[str]) -> Steps[str]:
        """Take and return one of some literals, none of which begins another. ``Malformed`` as soon
        as none can be next."""
        longest = max(map(len, literals), default=0)
        while True:
            there = self.text[self.at : self.at + longest]
            fitting = [each for each in literals if each.startswith(there) or there.startswith(each)]
            if len(fitting) == 1 and there.startswith(fitting[0]):
                self.at += len(fitting[0])
                return fitting[0]
            if not fitting or not (yield from self.more()):
                raise Malformed

    def expect(self, literal: str, *, or_end: bool = False) -> Steps[None]:
        """Take ``literal``. ``or_end``: the text may end before it is whole."""
        if not (yield from self.accept(literal)) and not (or_end and self.ended(literal)):
            raise Malformed

    def ended(self, *literals: str) -> bool:
        """Return whether the text ends here or within one of ``literals``, and take that rest."""
        if not self.closed or not any(literal.startswith(self.text[self.at :]) for literal in literals):
            return False
        self.at = len(self.text)
        return True

    def back(self, size: int) -> None:
        """Give back ``size`` characters that ``until`` has just taken."""
        self.at -= size
        self.hold()

    def name(self, pattern: re.Pattern[str] = _NAME) -> Steps[str]:
        taken: list[str] = []
        yield from self.run(pattern, taken.append)
        return checked_name("".join(taken))

    def until(self, put: Put, *ends: str) -> Steps[str]:
        """Put the text before the first of ``ends``; take that one too, and return it. Raise
        ``Malformed`` after all the text if there is none."""
        pattern = re.compile("|".join(map(re.escape, ends)) or "(?!)")
        longest = max(map(len, ends), default=0)
        while not (found := pattern.search(self.text, self.at)):
            held = overlap(self.text[max(self.at, len(self.text) - longest) :], ends)
            self.take(len(self.text) - held - self.at, put)
            if not (yield from self.more()):
                self.take(held, put)
                raise Malformed
        self.take(found.start() - self.at, put)
        self.at += len(found.group())
        return found.group()

    def scalar(self) -> Steps[str]:
        """Read the characters of a number or a word of JSON."""
        taken: list[str] = []
        yield from self.run(_SCALAR_RUN, taken.append)
        return "".join(taken)

    def json(self) -> Steps[str]:
        taken: list[str] = []
        yield from self.value(taken.append)
        return "".join(taken)

    def value(self, put: Put, depth: int = 0, *, lenient: bool = False) -> Steps[None]:
        """Read a JSON value, and give it to ``put`` as it is written, while it arrives.

        ``depth``: the number of values around it. ``lenient``: strings may hold control characters
        and unknown escapes. If the text ends within the value, ``put`` has got all of it before
        ``Malformed``.
        """
        closers: list[str] = []
        state = "value"
        while True:
            yield from self.run(SPACE, put)
            char = yield from self.peek()
            if char == '"' and state != "next" and state != "colon":
                yield from self._string(put, lenient)
                state = "colon" if state.startswith("key") else "next"
            elif char in ("{", "[") and state.startswith("value"):
                if depth + len(closers) >= MAX_DEPTH:
                    raise Malformed
                closers.append("}" if char == "{" else "]")
                state = "key or end" if char == "{" else "value or end"
                self.take(1, put)
            elif closers and char == closers[-1] and (state == "next" or state.endswith("end")):
                closers.pop()
                state = "next"
                self.take(1, put)
            elif char == "," and state == "next":
                state = "key" if closers[-1] == "}" else "value"
                self.take(1, put)
            elif char == ":" and state == "colon":
                state = "value"
                self.take(1, put)
            elif char and state.startswith("value"):
                scalar = yield from self.scalar()
                whole = SCALAR.fullmatch(scalar)
                if whole or (self.at == len(self.text) and _part_of_scalar(scalar)):
                    put(scalar)
                if not whole:
                    raise Malformed
                state = "next"
            else:
                raise Malformed
            if state == "next" and not closers:
                return

    def string(self) -> Steps[str]:
        """Read a JSON string, as it is written."""
        taken: list[str] = []
        if (yield from self.peek()) != '"':
            raise Malformed
        yield from self._string(taken.append)
        return "".join(taken)

    def _string(self, put: Put, lenient: bool = False) -> Steps[None]:
        self.take(1, put)
        while True:
            yield from self.run(_ANY_STRING if lenient else _STRING, put)
            char = yield from self.peek()
            if char == '"':
                self.take(1, put)
                return
            if not char:
                raise Malformed
            while not (escape := _ESCAPE.match(self.text, self.at)):
                if not _PART_OF_ESCAPE.fullmatch(self.text, self.at):
                    if not lenient:
                        raise Malformed
                    break
                if not (yield from self.more()):
                    self.take(len(self.text) - self.at, put)
                    raise Malformed
            self.take(len(escape.group()) if escape else 2, put)


def checked_name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME or _SURROGATE.search(name):
        raise Malformed
    return name


def checked_text(text: str) -> str:
    """Return a JSON string's text. ``Malformed`` if it has half a surrogate pair."""
    if _SURROGATE.search(text):
        raise Malformed
    return text


def _part_of_scalar(text: str) -> bool:
    words = ("true", "false", "null")
    return bool(_PART_OF_NUMBER.fullmatch(text)) or any(word.startswith(text) for word in words)


def _drop(text: str) -> None:
    """Drop text that need not be kept."""
