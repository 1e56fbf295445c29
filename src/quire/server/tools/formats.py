"""How model families write tool calls: one small grammar each, read incrementally.

A grammar is a generator over a ``Reader``. It yields where it needs more text, so it keeps its
place between the pieces of a stream and reads every character once, however the text is cut. It
fails at the first character that its format does not allow.

What a call gets of its text, if its grammar fails too, is in ``tools.tools``. Text that belongs to
no call is the model's, and the search for markers continues at the character that did not fit. Only
the few characters of a marker are read twice, so the time is linear.

The formats are those in the chat templates of the families:

===========  ====================================================================================
hermes       ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
             (Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4)
granite      ``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`` (Granite 3, Phi-4-mini)
llama3_json  ``<|python_tag|>{"name": ..., "parameters": {...}}; {...}`` or a list of such
             objects
mistral      ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``,
             ``[TOOL_CALLS]name[ARGS]{...}``
deepseek_v3  ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` and the arguments in a block of
             JSON (V3, R1), or ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}`` (V3.1)
kimi_k2      ``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}`` and
             ``<|tool_call_end|>``, within a section of calls
qwen3_coder  ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``
glm45        ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``
lfm2         ``<|tool_call_start|>[name(key=value, ...), ...]<|tool_call_end|>`` as in Python
             (``server.tools.literals``), or JSON objects as above; one call may lack the list
cohere       ``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}},
             ...]<|END_ACTION|>`` (Command R7B, Command A)
===========  ====================================================================================

``server.tools.bare_calls`` reads calls without marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

from quire.server.tools.literals import closing, literal_json, python_call, python_calls, quoted, within_quotes
from quire.server.tools.reader import Malformed, Reader, Steps, ToolCall, checked_name, checked_text

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""OpenAI's tools: ``{"type": "function", "function": {"name": str, "parameters": {...}, ...}}``, as
the request's body was checked to be."""


class Offered:
    """The tools that a model may call."""

    def __init__(self, tools: Tools | None) -> None:
        """Take the tools; None if they are unknown."""
        self._roots = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()}
        self.names = None if tools is None else frozenset(self._roots)
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    def types(self, name: str, key: str) -> frozenset[str]:
        """Return the types that a parameter may have; none if its schema does not say."""
        if (name, key) not in self._types:
            root = self._roots.get(name, {})
            properties = root.get("properties")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            self._types[name, key] = types_of(schema, root)
        return self._types[name, key]


_KEY = re.compile(r"[^<>\r\n]*")
_KIMI_ID = re.compile(r"(?P<prefix>functions\.)?(?P<name>.+?)(?P<number>:[0-9]+)?")
_WHOLE_FLOAT = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


# Numbers stay text: Python refuses to read integers of more than 4,300 digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)
_TYPED = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.5, parse_constant=_no_constant)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keys:
    """Names of members in a JSON object that describes a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Names of the arguments. The first one found counts."""
    needs_arguments: bool = False


_PLAIN = _Keys()
_LLAMA = _Keys(needs_arguments=True)
_COHERE = _Keys(name="tool_name", arguments=("parameters",))
_ENDS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|START_ACTION|>": "<|END_ACTION|>",
}
"""The marks behind calls, by those before them."""


def json_call(reader: Reader, keys: _Keys = _PLAIN, names: frozenset[str] | None = None) -> Steps[tuple[ToolCall, ...]]:
    """Read a JSON object that describes a call of one of ``names``, or of any tool. Return the
    call, to be committed; no call if it was begun."""
    yield from reader.expect("{")
    fields: dict[str, str] = {}
    begun = False
    yield from reader.space()
    closed = yield from reader.accept("}")
    while not closed:
        key = _DECODER.decode((yield from reader.string()))
        if begun and (key == keys.name or key in keys.arguments):
            raise Malformed  # sent text cannot be replaced
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
    """Return whether other arguments, which were written before, count."""
    return any(other in fields for other in keys.arguments[: keys.arguments.index(key)])


def _name_of(fields: Mapping[str, str], keys: _Keys, names: frozenset[str] | None) -> str:
    if not fields.get(keys.name, "").startswith('"'):
        raise Malformed
    name = checked_name(_DECODER.decode(fields[keys.name]))
    if names is not None and name not in names:
        raise Malformed
    return name


def _call_of(fields: Mapping[str, str], keys: _Keys, names: frozenset[str] | None) -> ToolCall:
    """Return the call that an object describes. Its arguments may be a string with an object."""
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
    """Read calls as objects of a JSON array, after its opening bracket and with its closing one.
    ``names``: possible names of the first call."""
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
    """Read an object or a list of them before ``end``, which a stop string may have cut off."""
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
    """Return JSON Schema's name for the type of a JSON text; None if it is no JSON."""
    try:
        value = _TYPED.decode(text)
    except (ValueError, RecursionError):
        return None
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return {str: "string", int: "integer", float: "number", dict: "object", list: "array"}[type(value)]


def types_of(schema: object, root: object) -> frozenset[str]:
    """Return the types that a schema within ``root`` allows; none if it does not say."""
    types: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        named = node.get("type")
        own = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := node.get(word), list):
                left += branches
        if not own and isinstance(choices := node.get("enum"), list):
            own = {json_type(json.dumps(choice)) or "string" for choice in choices}
        if not own:
            left.append(target_of(node, root))
        types |= own
    return frozenset(types)


def target_of(schema: Mapping[str, Any], root: object) -> object:
    """Return the schema that a reference within ``root`` names; None for other references."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def json_value(text: str, types: frozenset[str]) -> str:
    """Return JSON for a value that a model wrote bare.

    It is of one of ``types`` if it can be read so. Without types, JSON stays JSON. All other text
    becomes a string. Only "true" and "false" are booleans: 1 and 0 stay strings, which shows the
    mistake (vLLM takes all but "true" for false).
    """
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
    # Models often write lists and dictionaries as Python does.
    if (bare[:1] in ("{", "(") and "object" in types) or (bare[:1] in ("[", "(") and "array" in types):
        value = literal_json(bare)
        if value is not None and json_type(value) in types:
            return value
    return json.dumps(text, ensure_ascii=False)


def _begin_before(reader: Reader, name: str, *tags: str, or_end: bool = False) -> Steps[None]:
    """Begin a call of ``name`` if one of ``tags`` is next. Otherwise its beginning is text.
    ``or_end``: the text may end before a tag is whole."""
    yield from reader.space()
    for tag in tags:
        if (yield from reader.next_is(tag)):
            break
    else:
        if not (or_end and reader.closed and any(tag.startswith(reader.text[reader.at :]) for tag in tags)):
            raise Malformed
    reader.begin(name)


def _bare_value(reader: Reader, types: frozenset[str], before: str, *ends: str) -> Steps[str]:
    """Read a bare value up to one of ``ends``, which is returned. Add ``before`` and the value. It
    is read whole, since its type depends on all of it, unless it can only be a string."""
    if types == {"string"}:
        reader.add(before + '"')
        end = yield from reader.until(lambda text: reader.add(within_quotes(text)), *ends)
        reader.add('"')
        return end
    taken: list[str] = []
    end = yield from reader.until(taken.append, *ends)
    reader.add(before + json_value("".join(taken), types))
    return end


def hermes(reader: Reader, marker: str, offered: Offered, keys: _Keys = _PLAIN) -> Steps[None]:
    """Read an object or a list of them between two tags."""
    end = _ENDS[marker]
    reader.ends = (end,)
    yield from _object_or_list(reader, keys, end)


cohere = partial(hermes, keys=_COHERE)


def lfm2(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Read calls as in Python, or JSON objects if the system prompt asks for them."""
    end = _ENDS[marker]
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
    """Read objects, perhaps with semicolons between them, or a list of them. A list must begin with
    a call of a tool; it may be code."""
    end_marks = ("<|eom_id|>", "<|eot_id|>")
    reader.ends = (*end_marks, "<|python_tag|>")
    yield from reader.space()
    if (yield from reader.accept("[")):
        yield from _rest_of_list(reader, _LLAMA, offered.names)
        yield from reader.space()
    else:
        while True:
            yield from reader.space()
            reader.commit(*(yield from json_call(reader, _LLAMA)))
            yield from reader.space()
            if not (yield from reader.accept(";")) and (yield from reader.peek()) != "{":
                break
    for mark in end_marks:
        if (yield from reader.accept(mark)):
            reader.commit()
            return


def mistral(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Read a list of objects, or a name and its arguments."""
    reader.ends = ("[TOOL_CALLS]",)
    yield from reader.space()
    if (yield from reader.accept("[")):
        yield from _rest_of_list(reader)
        return
    name = yield from reader.name()
    yield from reader.space()
    call_id = None
    if (yield from reader.accept("[CALL_ID]")):
        call_id = yield from reader.name()
    yield from reader.accept("[ARGS]")
    yield from reader.space()
    yield from _arguments(reader, name, call_id)


def _arguments(reader: Reader, name: str, call_id: str | None = None) -> Steps[None]:
    """Read a JSON object, the arguments of a call of ``name``."""
    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.begin(name, call_id)
    yield from reader.value(reader.add, lenient=True)
    reader.whole = True


def _section(
    reader: Reader, marker: str, offered: Offered, *, marks: tuple[str, str, str], read: Callable[[Reader], Steps[None]]
) -> Steps[None]:
    """Read calls, each between the first two of ``marks``; the third one ends the last call. The
    last marks may be missing. ``read`` reads the part between the marks of a call."""
    call_begin, call_end, end = marks
    reader.ends = (call_end,)
    if marker != call_begin:
        yield from reader.space()
        yield from reader.expect(call_begin)
    while True:
        try:
            yield from read(reader)
            yield from reader.expect(call_end, or_end=True)
        except Malformed:
            # The text after a lost call is in the format again.
            if not (yield from reader.rest_of_call()):
                raise
        reader.commit()
        yield from reader.space()
        if not (yield from reader.accept(call_begin)):
            break
    yield from reader.expect(end, or_end=True)
    reader.commit()


def _deepseek_call(reader: Reader) -> Steps[None]:
    """Read the part between the two markers of a call."""
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


deepseek_v3 = partial(
    _section,
    marks=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    read=_deepseek_call,
)


def _kimi_call(reader: Reader) -> Steps[None]:
    """Read an id, which has the name, and the arguments."""
    yield from reader.space()
    found = _KIMI_ID.fullmatch((yield from reader.name()))
    if found is None:
        raise Malformed
    yield from reader.space()
    yield from reader.expect("<|tool_call_argument_begin|>")
    yield from reader.space()
    whole = found["prefix"] and found["number"]
    yield from _arguments(reader, found["name"], found.group() if whole else None)
    yield from reader.space()


kimi_k2 = partial(
    _section,
    marks=("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    read=_kimi_call,
)


def qwen3_coder(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Read parameters as bare text between tags. Models forget the outer and the closing tags."""
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
        yield from reader.accept("\n")  # like the last line break, it is not of the value
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
    """Read keys and values as bare text between tags. A stop string may cut off the last tag."""
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
    """Read the arguments of a call of ``name``, and nothing else."""

    def read(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
        yield from reader.space()
        yield from _arguments(reader, name)

    return read


def array_of_calls(reader: Reader, marker: str, offered: Offered) -> Steps[None]:
    """Read a JSON array of calls."""
    yield from reader.space()
    yield from reader.expect("[")
    yield from _rest_of_list(reader)
