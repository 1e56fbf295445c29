"""How model families write tool calls: one small grammar each, read incrementally.

A grammar is a generator over a ``Reader``. It yields where it needs more text, so it keeps its place between the pieces of a
stream and looks at every character once; how the text was cut can make no difference. It fails at the first character that
its format does not allow. A call begins when its name is known and its arguments have opened; from then on every piece of
them is passed on as it is read, and what its strings hold may be no JSON. Where the arguments come before the name, or as a
string, the call is given when it is whole. Where a grammar fails in a call that has begun, the call gets everything up to the
mark that ends it (``Reader.ends``), or, in formats without one, up to the next marker.
What was read and belongs to no call is the model's text, whether the grammar ended or failed, and the search for markers goes
on at the character that did not fit. So nothing is read twice but the few characters of a marker, and the time is linear.

The formats are those that the chat templates of the families write:

=============  ====================================================================================================
hermes         ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4)
granite        ``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`` (Granite 3, Phi-4-mini)
llama3_json    ``<|python_tag|>{"name": ..., "parameters": {...}}; {...}`` or a list of such objects; the marker may be missing
               where a message begins
mistral        ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` and ``[TOOL_CALLS]name[ARGS]{...}``
deepseek_v3    ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` and the arguments in a block of JSON (V3, R1), or
               ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}`` (V3.1)
qwen3_coder    ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``
glm45          ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``
lfm2           ``<|tool_call_start|>[name(key=value, ...), ...]<|tool_call_end|>`` as in Python (``server.tool_literals``), or a
               list of JSON objects as above; without the list if it is one
cohere         ``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>``
               (Command R7B, Command A)
=============  ====================================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from quire.server.tool_literals import closing, literal_json, python_call, python_calls, quoted, within_quotes
from quire.server.tool_reader import Malformed, Reader, Steps, ToolCall, checked_name, checked_text

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""For each tool: the JSON schemas of its parameters, by name."""


class Offered:
    """The tools that a model may call."""

    def __init__(self, names: frozenset[str] | None, schemas: Schemas) -> None:
        """``names``: None if nobody said."""
        self.names = names
        self._schemas = schemas
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    def types(self, name: str, key: str) -> frozenset[str]:
        """The types that a parameter may have; empty where nothing says."""
        schema = self._schemas.get(name, {}).get(key)
        if schema is None:
            return frozenset()
        if (name, key) not in self._types:
            self._types[name, key] = frozenset(_types(schema))
        return self._types[name, key]


_KEY = re.compile(r"[^<>\r\n]*")
_WHOLE_FLOAT = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


# Numbers stay text: Python refuses to read integers of more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)
_TYPED = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.5, parse_constant=_no_constant)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keys:
    """What the members of a JSON object that describes a call are called."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """The first of them counts."""
    needs_arguments: bool = False


_PLAIN = _Keys()
_LLAMA = _Keys(needs_arguments=True)
_COHERE = _Keys(name="tool_name", arguments=("parameters",))


def json_call(reader: Reader, keys: _Keys = _PLAIN, names: frozenset[str] | None = None) -> Steps[tuple[ToolCall, ...]]:
    """Reads a JSON object that describes a call of one of ``names``, or of any. Returns the call, which is to be committed;
    nothing if it was begun."""
    yield from reader.expect("{")
    fields: dict[str, str] = {}
    begun = False
    yield from reader.space()
    closed = yield from reader.accept("}")
    while not closed:
        key = _DECODER.decode((yield from reader.string()))
        if begun and (key == keys.name or key in keys.arguments):
            raise Malformed  # what was sent cannot be replaced
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        opened = key in keys.arguments and (yield from reader.peek()) == "{"
        if opened and fields.get(keys.name, "").startswith('"') and not _outranked(key, fields, keys):
            reader.begin(_name_of(fields, keys, names))
            begun = True
            yield from reader.value(reader.add, depth=1, lenient=True)
            reader.whole = True
        else:
            fields[key] = yield from reader.json()
        yield from reader.space()
        closed = yield from reader.accept("}")
        if not closed:
            yield from reader.expect(",")
            yield from reader.space()
    if not begun:
        return (_call_of(fields, keys, names),)
    reader.commit()
    return ()


def _outranked(key: str, fields: Mapping[str, str], keys: _Keys) -> bool:
    """Whether other arguments, which were written before, count."""
    return any(other in fields for other in keys.arguments[: keys.arguments.index(key)])


def _name_of(fields: Mapping[str, str], keys: _Keys, names: frozenset[str] | None) -> str:
    if not fields.get(keys.name, "").startswith('"'):
        raise Malformed
    name = checked_name(_DECODER.decode(fields[keys.name]))
    if names is not None and name not in names:
        raise Malformed
    return name


def _call_of(fields: Mapping[str, str], keys: _Keys, names: frozenset[str] | None) -> ToolCall:
    """The call that the members of an object describe. Some models write the arguments as a string that holds an object."""
    name = _name_of(fields, keys, names)
    arguments = next((fields[key] for key in keys.arguments if key in fields), None)
    if arguments is None:
        if keys.needs_arguments:
            raise Malformed
        arguments = "{}"
    if arguments == "null":
        arguments = "{}"
    if arguments[0] == '"':
        arguments = checked_text(_DECODER.decode(arguments).strip())
        if json_type(arguments) != "object":
            raise Malformed
    if arguments[0] != "{":
        raise Malformed
    return ToolCall(name=name, arguments=arguments)


def _rest_of_list(reader: Reader, keys: _Keys = _PLAIN, names: frozenset[str] | None = None) -> Steps[None]:
    """The objects of a JSON array, each a call, after the bracket that opens it, and the one that closes it. ``names``: of which
    the first is one."""
    while True:
        yield from reader.space()
        reader.commit(*(yield from json_call(reader, keys, names)))
        names = None
        yield from reader.space()
        if (yield from reader.accept("]")):
            break
        yield from reader.expect(",")
    reader.commit()


def _object_or_list(reader: Reader, keys: _Keys, end: str) -> Steps[None]:
    """An object or a list of them before ``end``, which may be missing at the end: it may have been a stop string."""
    calls: tuple[ToolCall, ...] = ()
    yield from reader.space()
    if (yield from reader.accept("[")):
        yield from _rest_of_list(reader, keys)
    else:
        calls = yield from json_call(reader, keys)
    yield from reader.space()
    yield from reader.expect(end, or_end=True)
    reader.commit(*calls)


def json_type(text: str) -> str | None:
    """What JSON Schema calls the type of a JSON text; None if it is no JSON."""
    try:
        value = _TYPED.decode(text)
    except (ValueError, RecursionError):
        return None
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return {str: "string", int: "integer", float: "number", dict: "object", list: "array"}[type(value)]


def _types(schema: object) -> set[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = (
        {named}
        if isinstance(named, str)
        else {each for each in named if isinstance(each, str)}
        if isinstance(named, list)
        else set()
    )
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(word), list):
            types.update(*map(_types, branches))
    if not types and isinstance(choices := schema.get("enum"), list):
        types = {json_type(json.dumps(choice)) or "string" for choice in choices}
    return types


def json_value(text: str, types: frozenset[str]) -> str:
    """JSON for a value that a model wrote bare: of one of ``types`` if it can be read so, else JSON if it is any and there are no
    types, else a string.

    A boolean is only what is spelt as one: 1 and 0 stay strings, of which it can be seen that they are none (vLLM takes all but
    "true" for false)."""
    bare = text.strip()
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if not types.isdisjoint(("null", "object", "array")) and bare in ("null", "None"):
        return "null"
    kind = json_type(bare)
    if kind is not None and (
        not types or (kind != "string" and kind in types) or (kind == "integer" and "number" in types)
    ):
        return bare
    if "integer" in types and (found := _WHOLE_FLOAT.fullmatch(bare)):
        return found.group(1)
    # Models that read much Python write lists and dictionaries as it does.
    if (bare[:1] in ("{", "(") and "object" in types) or (bare[:1] in ("[", "(") and "array" in types):
        value = literal_json(bare)
        if value is not None and json_type(value) in types:
            return value
    return json.dumps(text, ensure_ascii=False)


def _begin_before(reader: Reader, name: str, *tags: str, or_end: bool = False) -> Steps[None]:
    """Begins a call of ``name`` if one of ``tags`` is next. What only looks like the beginning of a call is text. ``or_end``: the
    text may end before a tag is whole."""
    yield from reader.space()
    for tag in tags:
        if (yield from reader.next_is(tag)):
            break
    else:
        if not (or_end and reader.closed and any(tag.startswith(reader.text[reader.at :]) for tag in tags)):
            raise Malformed
    reader.begin(name)


def _bare_value(reader: Reader, types: frozenset[str], before: str, *ends: str) -> Steps[str]:
    """A value that is written bare and ended by one of ``ends``, which is returned; the arguments get ``before`` and the value. It
    is read whole, for its type depends on all of it, unless it can only be a string."""
    if types == {"string"}:
        reader.add(before + '"')
        end = yield from reader.until(lambda text: reader.add(within_quotes(text)), *ends)
        reader.add('"')
        return end
    taken: list[str] = []
    end = yield from reader.until(taken.append, *ends)
    reader.add(before + json_value("".join(taken), types))
    return end


def hermes(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """An object or a list of them between two tags."""
    end = {"<tool_call>": "</tool_call>", "<|tool_call|>": "<|/tool_call|>"}[marker]
    reader.ends = (end,)
    yield from _object_or_list(reader, _PLAIN, end)


def cohere(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """A list of objects between two markers."""
    reader.ends = ("<|END_ACTION|>",)
    yield from _object_or_list(reader, _COHERE, "<|END_ACTION|>")


def lfm2(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """A list between two markers: of calls as in Python, or of JSON objects if the system prompt asks for them. Or one of these."""
    end = "<|tool_call_end|>"
    reader.ends = (end,)
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from _object_or_list(reader, _PLAIN, end)
        return
    if (yield from reader.accept("[")):
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            yield from _rest_of_list(reader)
        else:
            yield from python_calls(reader)
    else:
        yield from python_call(reader)
    yield from reader.space()
    yield from reader.expect(end, or_end=True)
    reader.commit()


def llama3_json(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Objects, one after the other or with semicolons between them, or a list of them. What begins with neither marker nor the
    name of a tool is an answer in JSON; so is a list, which behind the marker may be code."""
    end_marks = ("<|eom_id|>", "<|eot_id|>")
    reader.ends = (*end_marks, "<|python_tag|>")
    names = offered.names if marker == "" else None
    yield from reader.space()
    if (yield from reader.accept("[")):
        yield from _rest_of_list(reader, _LLAMA, offered.names)
        yield from reader.space()
    else:
        while True:
            yield from reader.space()
            reader.commit(*(yield from json_call(reader, _LLAMA, names)))
            names = None
            yield from reader.space()
            if not (yield from reader.accept(";")) and (yield from reader.peek()) != "{":
                break
    for mark in end_marks:
        if (yield from reader.accept(mark)):
            reader.commit()
            return


def mistral(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """A list of objects, or a name and its arguments."""
    reader.ends = ("[TOOL_CALLS]",)
    yield from reader.space()
    if (yield from reader.accept("[")):
        yield from _rest_of_list(reader)
        return
    name = yield from reader.name()
    yield from reader.space()
    if (yield from reader.accept("[CALL_ID]")):
        yield from reader.name()
    yield from reader.accept("[ARGS]")
    yield from reader.space()
    yield from _arguments(reader, name)


def _arguments(reader: Reader, name: str) -> Steps[None]:
    """A JSON object: the arguments of a call of ``name``."""
    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.begin(name)
    yield from reader.value(reader.add, lenient=True)
    reader.whole = True


def deepseek_v3(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Calls, each between two markers, and two around all of them. The last ones may be missing at the end."""
    call_begin, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    reader.ends = (call_end,)
    if marker != call_begin:
        yield from reader.space()
        yield from reader.expect(call_begin)
    while True:
        try:
            yield from _deepseek_call(reader)
            yield from reader.expect(call_end, or_end=True)
        except Malformed:
            # What comes behind a call that was lost is of the format again.
            if not (yield from reader.rest_of_call()):
                raise
        reader.commit()
        yield from reader.space()
        if not (yield from reader.accept(call_begin)):
            break
    yield from reader.expect("<｜tool▁calls▁end｜>", or_end=True)
    reader.commit()


def _deepseek_call(reader: Reader) -> Steps[None]:
    """What is between the two markers of a call."""
    yield from reader.space()
    name = yield from reader.name()
    yield from reader.expect("<｜tool▁sep｜>")
    yield from reader.space()
    fenced = (yield from reader.peek()) != "{"
    if fenced:
        name = yield from reader.name()
        yield from reader.space()
        yield from reader.expect("```json")
        yield from reader.space()
    yield from _arguments(reader, name)
    yield from reader.space()
    if fenced:
        yield from reader.expect("```")
        yield from reader.space()


def qwen3_coder(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Parameters as bare text between tags. The model forgets tags at times: the outer ones, and those that close."""
    call_end, function_end, parameter = "</tool_call>", "</function>", "<parameter="
    reader.ends = (call_end,) if marker == "<tool_call>" else (function_end, call_end)
    if marker == "<tool_call>":
        yield from reader.space()
        yield from reader.expect("<function=")
    name = yield from reader.name()
    yield from reader.expect(">")
    yield from _begin_before(reader, name, parameter, function_end)
    closers = ("</parameter>", parameter, function_end)
    separator = "{"
    while True:
        yield from reader.space()
        if not (yield from reader.accept(parameter)):
            break
        key = yield from reader.name(_KEY)
        yield from reader.expect(">")
        yield from reader.accept("\n")  # like the one at the end, it is not of the value
        ends = (*("\n" + closer for closer in closers), *closers)
        before = f"{separator}{quoted(key)}: "
        end = (yield from _bare_value(reader, offered.types(name, key), before, *ends)).lstrip("\n")
        if end != "</parameter>":
            reader.back(len(end))
        separator = ", "
    closed = yield from reader.accept(function_end)
    if not (closed or (yield from reader.next_is(call_end)) or reader.ended(function_end, call_end)):
        raise Malformed
    reader.add(closing(separator))
    reader.commit()
    yield from reader.space()
    if marker == "<tool_call>":
        yield from reader.expect(call_end, or_end=True)
        reader.commit()
    elif (yield from reader.accept(call_end)):
        reader.commit()


def glm45(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Keys and values as bare text between tags. The last tag may be missing at the end: it may have been a stop string."""
    end = "</tool_call>"
    reader.ends = (end,)
    yield from reader.space()
    name = yield from reader.name()
    whole = (yield from reader.peek()) == "\n"
    yield from _begin_before(reader, name, "<arg_key>", end, or_end=whole)
    separator = "{"
    while True:
        yield from reader.space()
        if not (yield from reader.accept("<arg_key>")):
            break
        key = yield from reader.name(_KEY)
        yield from reader.expect("</arg_key>")
        yield from reader.space()
        yield from reader.expect("<arg_value>")
        before = f"{separator}{quoted(key)}: "
        yield from _bare_value(reader, offered.types(name, key), before, "</arg_value>")
        separator = ", "
    yield from reader.expect(end, or_end=True)
    reader.add(closing(separator))
    reader.commit()


def one_object(name: str) -> Callable[[Reader, str, Offered], Steps[None]]:
    """The arguments of a call of ``name``, and nothing else."""

    def read(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
        yield from reader.space()
        yield from _arguments(reader, name)

    return read


def array_of_calls(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """A JSON array of calls."""
    yield from reader.space()
    yield from reader.expect("[")
    yield from _rest_of_list(reader)
