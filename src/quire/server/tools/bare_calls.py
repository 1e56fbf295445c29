"""Calls that a model writes without the marks of its format, where its answer begins.

Models do that whose marks were not trained well (Qwen2.5-Coder, Llama 3)::

  {"name": "weather", "arguments": {"city": "Rome"}}

The object may be in a fence of Markdown, in an array or in a row of others; ``arguments`` may be
called ``parameters``. It is a call only if it names a tool that was offered, and has arguments. It
is malformed, and so text, at the first character with which it can be no call any more.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from quire.server.tools.formats import Offered, json_type
from quire.server.tools.reader import Malformed, Reader, Steps, ToolCall, checked_name, checked_text

_FENCE = "```"
_LANGUAGES = ("json", "tool_call", "xml")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = tuple(map(json.dumps, ("name", *_ARGUMENTS, "type", "id")))
_ENDS = ("</tool_call>", "<|eom_id|>", "<|eot_id|>")
"""Marks behind calls, which models write also where they forgot the one before."""


def bare_calls(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Read the calls at the beginning of a message."""
    while True:
        yield from reader.space()
        fenced = yield from reader.accept(_FENCE)
        if fenced:
            for language in _LANGUAGES:
                if (yield from reader.accept(language)):
                    break
            yield from reader.space()
        reader.ends = (_FENCE,) if fenced else _ENDS
        if (yield from reader.accept("[")):
            yield from _list(reader, offered.names)
        else:
            yield from _row(reader, offered.names)
        yield from reader.space()
        for end in (_FENCE,) if fenced else _ENDS:
            if (yield from reader.accept(end)):
                reader.commit()
                break
        yield from reader.space()
        if (yield from reader.peek()) not in ("{", "[", "`"):
            return


def _list(reader: Reader, names: Collection[str] | None) -> Steps[None]:
    """Read the calls of an array, after its opening bracket."""
    while True:
        yield from reader.space()
        yield from _call(reader, names)
        yield from reader.space()
        if (yield from reader.accept("]")):
            reader.commit()
            return
        yield from reader.expect(",")


def _row(reader: Reader, names: Collection[str] | None) -> Steps[None]:
    """Read calls one after the other; semicolons may stand between them."""
    while True:
        yield from _call(reader, names)
        yield from reader.space()
        yield from reader.accept(";")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return


def _call(reader: Reader, names: Collection[str] | None) -> Steps[None]:
    name: str | None = None
    arguments: str | None = None
    begun = False
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = json.loads((yield from reader.string() if begun else reader.one_of(_KEYS)))
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if begun:  # whatever else there is, it is a call
            yield from reader.json()
        elif key == "name":
            name = yield from _name(reader, names)
        elif key not in _ARGUMENTS:
            yield from reader.expect('"function"') if key == "type" else reader.string()
        elif name is not None and arguments is None and (yield from reader.peek()) == "{":
            reader.begin(name)
            begun = True
            yield from reader.value(reader.add, depth=1, lenient=True)
            reader.whole = True
        else:
            arguments = yield from _held_arguments(reader)
        yield from reader.space()
        if (yield from reader.accept("}")):
            break
        yield from reader.expect(",")
    if begun:
        reader.commit()
    elif name is None or arguments is None:
        raise Malformed
    else:
        reader.commit(ToolCall(name=name, arguments=arguments))


def _name(reader: Reader, names: Collection[str] | None) -> Steps[str]:
    written = yield from (reader.string() if names is None else reader.one_of(tuple(map(json.dumps, names))))
    return checked_name(json.loads(written))


def _held_arguments(reader: Reader) -> Steps[str]:
    """Return arguments that stand before the name, or are a string with an object."""
    first = yield from reader.peek()
    if first == "n":
        yield from reader.expect("null")
        return "{}"
    if first not in ("{", '"'):
        raise Malformed
    written = yield from reader.json()
    text = checked_text(json.loads(written).strip()) if first == '"' else written
    if json_type(text) != "object":
        raise Malformed
    return text
