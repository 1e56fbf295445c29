"""Calls as in Python, ``name(key=value, ...)``, whose literals become JSON as they are read.

Literals are strings, numbers as in JSON (or with nothing before the point), ``True``, ``False`` and
``None`` (or JSON's words), lists, tuples, which become lists, and dictionaries with strings for
keys. Nothing is evaluated. Strings may hold line breaks, as the models' templates write them.
"""

from __future__ import annotations

import codecs
import json
import re

from quire.server.tools.reader import MAX_DEPTH, SCALAR, Malformed, Put, Reader, Steps

_KEY = re.compile(r"[\w$.-]*")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_POINT_FIRST = re.compile(r"^(-?)\.")
_CLOSERS = {"[": "]", "(": ")", "(,": ")", "{": "}"}
"""``(,``: a tuple after a comma."""
_LIST = {"(": "[", ")": "]"}
_ESCAPES = {"x": 4, "u": 6, "U": 10, **dict.fromkeys("01234567", 4), **dict.fromkeys("\n\\'\"abfnrtv", 2)}
"""Characters of Python's escapes, by the first one behind the backslash."""
_OCTAL = re.compile(r"\\[0-7]{1,3}")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def within_quotes(text: str) -> str:
    """Return ``text`` escaped for a JSON string."""
    return quoted(text)[1:-1]


def closing(separator: str) -> str:
    """Return an object's end. ``separator`` would stand before a next member: "{" for none yet."""
    return "{}" if separator == "{" else "}"


def literal_json(text: str) -> str | None:
    """Return JSON for a text that is one literal; None for other texts."""
    taken: list[str] = []
    reader = Reader(lambda name, arguments: taken.append(arguments))
    reader.push(text)
    reader.closed = True
    try:
        for _ in literal(reader):
            raise AssertionError("waits for text after the end")
    except Malformed:
        return None
    return None if reader.text[reader.at :].strip() else "".join(taken)


def python_calls(reader: Reader) -> Steps[None]:
    """Read the calls of a list, after its opening bracket and with its closing one."""
    while True:
        yield from reader.space()
        yield from python_call(reader)
        yield from reader.space()
        if (yield from reader.accept("]")):
            reader.commit()
            return
        if (yield from reader.next_is(",")):
            reader.over()
        yield from reader.expect(",")


def python_call(reader: Reader) -> Steps[None]:
    """Read a call, which begins with its first keyword or its end: all arguments are keywords."""
    name = yield from reader.name()
    yield from reader.space()
    yield from reader.expect("(")
    separator = "{"
    while True:
        yield from reader.space()
        if (yield from reader.accept(")")):
            if separator == "{":
                reader.begin(name)
            reader.add(closing(separator))
            reader.whole = True
            return
        key = yield from reader.name(_KEY)
        yield from reader.space()
        yield from reader.expect("=")
        if separator == "{":
            reader.begin(name)
        reader.add(f"{separator}{quoted(key)}: ")
        separator = ", "
        yield from reader.space()
        yield from literal(reader)
        yield from reader.space()
        if (yield from reader.peek()) != ")":
            yield from reader.expect(",")


def literal(reader: Reader) -> Steps[None]:
    """Read a literal, and add it to the arguments as JSON."""
    openers: list[str] = []
    state, separator = "value", ""
    while True:
        yield from reader.space()
        char = yield from reader.peek()
        if char and char in "'\"" and state.startswith(("value", "key")):
            yield from _string(reader, char, separator)
            state, separator = "colon" if state.startswith("key") else "next", ""
        elif char and char in "[({" and state.startswith("value"):
            # The arguments are an object themselves.
            if len(openers) + 1 >= MAX_DEPTH:
                raise Malformed
            openers.append(char)
            reader.take(1, _adding(reader, separator))
            state, separator = "key or end" if char == "{" else "value or end", ""
        elif openers and char == _CLOSERS[openers[-1]] and (state == "next" or state.endswith("end")):
            if openers.pop() == "(" and state == "next":
                raise Malformed  # brackets around a value, which is no tuple
            reader.take(1, _adding(reader, ""))
            state = "next"
        elif char == "," and state == "next":
            yield from reader.expect(",")
            if openers[-1] == "(":
                openers[-1] = "(,"
            # A comma may stand before the end, where JSON has none.
            state, separator = "key or end" if openers[-1] == "{" else "value or end", ", "
        elif char == ":" and state == "colon":
            yield from reader.expect(":")
            reader.add(": ")
            state = "value"
        elif char and state.startswith("value"):
            scalar = yield from reader.scalar()
            written = _WORDS.get(scalar, _POINT_FIRST.sub(r"\g<1>0.", scalar))
            if not SCALAR.fullmatch(written):
                raise Malformed
            reader.add(separator + written)
            state, separator = "next", ""
        else:
            raise Malformed
        if state == "next" and not openers:
            return


def _adding(reader: Reader, before: str) -> Put:
    return lambda text: reader.add(before + _LIST.get(text, text))


def _string(reader: Reader, quote: str, before: str) -> Steps[None]:
    end = quote * 3 if (yield from reader.accept(quote * 3)) else quote
    if end == quote:
        yield from reader.expect(quote)
    reader.add(before + '"')

    def put(text: str) -> None:
        reader.add(within_quotes(text))

    while True:
        yield from reader.run(_PLAIN[quote], put)
        if (yield from reader.accept(end)):
            reader.add('"')
            return
        char = yield from reader.peek()
        if char == "\\":
            yield from _escape(reader)
        elif char:
            reader.take(1, put)
        else:
            raise Malformed


def _escape(reader: Reader) -> Steps[None]:
    """Read an escape. A backslash before any character unknown to Python stands for itself."""
    kind = (yield from reader.ahead(2))[1]
    if kind == "N":
        raise Malformed  # a character by its name
    # Behind an octal number, at least a quote, a bracket and another one follow.
    written = yield from reader.ahead(_ESCAPES.get(kind, 2))
    try:
        if octal := _OCTAL.match(written):
            written = octal.group()
            meant = chr(int(written[1:], 8))
        else:
            meant = codecs.decode(written, "unicode_escape") if kind in _ESCAPES else written
    except UnicodeError:
        raise Malformed from None
    # Half a surrogate pair is no character; JSON has an escape for it.
    added = f"\\u{ord(meant):04x}" if "\ud800" <= meant <= "\udfff" else within_quotes(meant)
    reader.take(len(written), lambda text: reader.add(added))
