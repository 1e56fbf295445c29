"""How model families write tool calls: one small grammar each, read incrementally.

A grammar is a generator over a ``Reader``. It yields where it needs more text, so it keeps its place between the pieces of a
stream and looks at every character once; how the text was cut can make no difference. It fails at the first character that
its format does not allow. A call begins when its name is known and its arguments have opened; from then on every piece of
them is passed on as it is read. Where the arguments come before the name, or as a string, the call is given when it is whole.
What was read and belongs to no call is the model's text, whether the grammar ended or failed, and the search for markers goes
on at the character that did not fit. So nothing is read twice but the few characters of a marker, and the time is linear.

The formats are those that the chat templates of the families write:

=============  ====================================================================================================
hermes         ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4)
granite        ``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`` (Granite 3, Phi-4-mini)
llama3_json    ``<|python_tag|>{"name": ..., "parameters": {...}}; {...}``; the marker may be missing where a message begins
mistral        ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` and ``[TOOL_CALLS]name[ARGS]{...}``
deepseek_v3    ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` and the arguments in a block of JSON (V3, R1), or
               ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}`` (V3.1)
qwen3_coder    ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``
glm45          ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``
lfm2           ``<|tool_call_start|>[name(key=value, ...), ...]<|tool_call_end|>`` as in Python (``server.tool_literals``), or a
               list of JSON objects as above
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

from quire.server.tool_literals import closing, python_calls, quoted, within_quotes
from quire.server.tool_reader import Malformed, Reader, Steps, ToolCall, checked_name

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""For each tool: the JSON schemas of its parameters, by name."""

_KEY = re.compile(r"[^<>\r\n]*")


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


def json_call(reader: Reader, keys: _Keys = _PLAIN) -> Steps[tuple[ToolCall, ...]]:
    """Reads a JSON object that describes a call. Returns the call, which is to be committed; nothing if it was begun."""
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
            reader.begin(checked_name(_DECODER.decode(fields[keys.name])))
            begun = True
            yield from reader.value(reader.add, depth=1)
        else:
            fields[key] = yield from reader.json()
        yield from reader.space()
        closed = yield from reader.accept("}")
        if not closed:
            yield from reader.expect(",")
            yield from reader.space()
    if not begun:
        return (_call_of(fields, keys),)
    reader.commit()
    return ()


def _outranked(key: str, fields: Mapping[str, str], keys: _Keys) -> bool:
    """Whether other arguments, which were written before, count."""
    return any(other in fields for other in keys.arguments[: keys.arguments.index(key)])


def _call_of(fields: Mapping[str, str], keys: _Keys) -> ToolCall:
    """The call that the members of an object describe. Some models write the arguments as a string that holds an object."""
    if not fields.get(keys.name, "").startswith('"'):
        raise Malformed
    name = checked_name(_DECODER.decode(fields[keys.name]))
    arguments = next((fields[key] for key in keys.arguments if key in fields), None)
    if arguments is None:
        if keys.needs_arguments:
            raise Malformed
        arguments = "{}"
    if arguments[0] == '"':
        arguments = _DECODER.decode(arguments).strip()
        if json_type(arguments) != "object":
            raise Malformed
    if arguments[0] != "{":
        raise Malformed
    return ToolCall(name=name, arguments=arguments)


def _rest_of_list(reader: Reader, keys: _Keys = _PLAIN) -> Steps[None]:
    """The objects of a JSON array, each a call, after the bracket that opens it, and the one that closes it."""
    while True:
        yield from reader.space()
        reader.commit(*(yield from json_call(reader, keys)))
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


def json_value(text: str, schema: object) -> str:
    """JSON for a value that a model wrote bare: what its schema asks for, else JSON if it is any, else a string."""
    types, bare = _types(schema), text.strip()
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if "null" in types and bare in ("null", "None"):
        return "null"
    kind = json_type(bare)
    if kind is not None and (
        not types or (kind != "string" and kind in types) or (kind == "integer" and "number" in types)
    ):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _begin_before(reader: Reader, name: str, *tags: str) -> Steps[None]:
    """Begins a call of ``name`` if one of ``tags`` is next. What only looks like the beginning of a call is text."""
    yield from reader.space()
    for tag in tags:
        if (yield from reader.next_is(tag)):
            reader.begin(name)
            return
    raise Malformed


def _bare_value(reader: Reader, schema: object, before: str, *ends: str) -> Steps[None]:
    """A value that is written bare and ended by one of ``ends``; the arguments get ``before`` and the value. It is read whole,
    for its type depends on all of it, unless it can only be a string."""
    if _types(schema) == {"string"}:
        reader.add(before + '"')
        yield from reader.until(lambda text: reader.add(within_quotes(text)), *ends)
        reader.add('"')
        return
    taken: list[str] = []
    yield from reader.until(taken.append, *ends)
    reader.add(before + json_value("".join(taken), schema))


def hermes(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """An object or a list of them between two tags."""
    end = {"<tool_call>": "</tool_call>", "<|tool_call|>": "<|/tool_call|>"}[marker]
    yield from _object_or_list(reader, _PLAIN, end)


def cohere(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """A list of objects between two markers."""
    yield from _object_or_list(reader, _COHERE, "<|END_ACTION|>")


def lfm2(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """A list between two markers: of calls as in Python, or of JSON objects if the system prompt asks for them."""
    yield from reader.space()
    yield from reader.expect("[")
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from _rest_of_list(reader)
    else:
        yield from python_calls(reader)
    yield from reader.space()
    yield from reader.expect("<|tool_call_end|>", or_end=True)
    reader.commit()


def llama3_json(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """Objects, one after the other or with semicolons between them."""
    while True:
        yield from reader.space()
        reader.commit(*(yield from json_call(reader, _LLAMA)))
        yield from reader.space()
        if not (yield from reader.accept(";")) and (yield from reader.peek()) != "{":
            return


def mistral(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """A list of objects, or a name and its arguments."""
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
    yield from reader.value(reader.add)


def deepseek_v3(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """Calls, each between two markers, and two around all of them. The last ones may be missing at the end."""
    call_begin = "<｜tool▁call▁begin｜>"
    if marker != call_begin:
        yield from reader.space()
        yield from reader.expect(call_begin)
    while True:
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
        yield from reader.expect("<｜tool▁call▁end｜>", or_end=True)
        reader.commit()
        yield from reader.space()
        if not (yield from reader.accept(call_begin)):
            break
    yield from reader.expect("<｜tool▁calls▁end｜>", or_end=True)
    reader.commit()


def qwen3_coder(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """Parameters as bare text between tags. The model forgets the outer tags at times."""
    if marker == "<tool_call>":
        yield from reader.space()
        yield from reader.expect("<function=")
    name = yield from reader.name()
    yield from reader.expect(">")
    yield from _begin_before(reader, name, "<parameter=", "</function>")
    separator = "{"
    while True:
        yield from reader.space()
        if (yield from reader.accept("</function>")):
            break
        yield from reader.expect("<parameter=")
        key = yield from reader.name(_KEY)
        yield from reader.expect(">")
        yield from reader.accept("\n")  # like the one at the end, it is not of the value
        schema = schemas.get(name, {}).get(key)
        yield from _bare_value(reader, schema, f"{separator}{quoted(key)}: ", "\n</parameter>", "</parameter>")
        separator = ", "
    reader.add(closing(separator))
    if marker == "<tool_call>":
        yield from reader.space()
        yield from reader.expect("</tool_call>", or_end=True)
    reader.commit()


def glm45(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """Keys and values as bare text between tags."""
    yield from reader.space()
    name = yield from reader.name()
    yield from _begin_before(reader, name, "<arg_key>", "</tool_call>")
    separator = "{"
    while True:
        yield from reader.space()
        if not (yield from reader.accept("<arg_key>")):
            break
        key = yield from reader.name(_KEY)
        yield from reader.expect("</arg_key>")
        yield from reader.space()
        yield from reader.expect("<arg_value>")
        schema = schemas.get(name, {}).get(key)
        yield from _bare_value(reader, schema, f"{separator}{quoted(key)}: ", "</arg_value>")
        separator = ", "
    yield from reader.expect("</tool_call>")
    reader.add(closing(separator))


def one_object(name: str) -> Callable[[Reader, str, Schemas], Steps[None]]:
    """The arguments of a call of ``name``, and nothing else."""

    def read(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
        yield from reader.space()
        yield from _arguments(reader, name)

    return read


def array_of_calls(reader: Reader, marker: str, schemas: Schemas) -> Steps[None]:
    """A JSON array of calls."""
    yield from reader.space()
    yield from reader.expect("[")
    yield from _rest_of_list(reader)
