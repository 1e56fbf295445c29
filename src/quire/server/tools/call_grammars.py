"""Grammars of texts that are tool calls, as a model's family writes them, or an answer in a form
that was asked for.

Such a text begins with a call or is an answer as a whole, and the arguments of calls follow the
schemas of their functions, but for the formats that write values bare. Where calls are forced, the
white space in them is that of chat templates, so the prompt of the next turn begins with the tokens
of the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.base.sampling_params import StructuredOutputs
from quire.grammars.formats import json_schema
from quire.server.tools.formats import Tools
from quire.server.tools.tools import call_schema, functions_of

CALL_SPACE = r"[ \n]?"
"""White space between the tokens of JSON in calls: models were trained on some."""
_TEMPLATES_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_REST = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class _Spelling:
    """The parts of a grammar for some tools."""

    functions: Mapping[str, Mapping[str, Any]]
    one_call: bool
    special: Callable[[str], int | None]
    """Returns the token of a mark that is a special token, which no text spells."""
    forced: bool = False
    """Whether there is no answer beside calls."""
    ends: list[str] = field(default_factory=list)
    """What ends the texts that are anything."""

    def mark(self, text: str) -> str:
        token = self.special(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def several(self, call: str, between: str = "") -> str:
        return call if self.one_call else f"{call} ({between} {call})*"

    def object(self, name: str = "name", arguments: str = "arguments") -> str:
        """Return the rule of an object that describes a call."""
        return self.json(call_schema(self.functions, name, arguments))

    def named(self, between: str) -> str:
        """Return a function's name and, behind ``between``, its arguments as an object."""
        return self.each(lambda name, schema: f"{json.dumps(name)} {between} {self.json(schema)}")

    def json(self, schema: Mapping[str, Any]) -> str:
        if self.forced:
            own = schema.get("x-guidance")
            options = {**_TEMPLATES_SPACE, **own} if isinstance(own, Mapping) else _TEMPLATES_SPACE
            wanted = StructuredOutputs(json={**schema, "x-guidance": options})
        else:
            wanted = StructuredOutputs(json=schema, whitespace_pattern=CALL_SPACE)
        return f"%json {json.dumps(json_schema(wanted), ensure_ascii=False)}"

    def each(self, write: Callable[[str, Mapping[str, Any]], str]) -> str:
        return "(" + " | ".join(write(name, schema) for name, schema in self.functions.items()) + ")"

    def up_to(self, end: str) -> str:
        """Return any text before the mark ``end``, and the mark."""
        if end not in self.ends:
            self.ends.append(end)
        return f"up_to_{self.ends.index(end)}"

    def texts(self) -> list[str]:
        """Return the rules of the texts that ``up_to`` named."""
        return [
            f"up_to_{number}: {_REST} {self.mark(end)}"
            if self.special(end) is not None
            else f"up_to_{number}[suffix={json.dumps(end, ensure_ascii=False)}]: {_REST}"
            for number, end in enumerate(self.ends)
        ]

    def items(self, schema: Mapping[str, Any], write: Callable[[str], str]) -> str:
        """Return the bare values of any properties."""
        properties = schema.get("properties")
        keys = [key for key in properties if key.isprintable()] if isinstance(properties, Mapping) else []
        return "(" + " | ".join(write(json.dumps(key, ensure_ascii=False)) for key in keys) + ")*" if keys else '""'


def _hermes(s: _Spelling) -> str:
    begin, end = s.mark("<tool_call>"), s.mark("</tool_call>")
    space, between = (r'"\n"', r'"\n"?') if s.forced else ("SPACE", "SPACE")  # Falcon writes none between
    return s.several(f"({begin} {space} {s.object()} {space} {end})", between)


def _granite(s: _Spelling) -> str:
    end = s.mark("<|/tool_call|>")  # of Phi, not of Granite
    return f'{s.mark("<|tool_call|>")} "[" {s.several(s.object(), "SEPARATOR")} "]" {end}?'


def _llama(s: _Spelling) -> str:
    if s.forced:  # in its template a turn has one call, without the mark
        return s.object(arguments="parameters")
    return f"{s.mark('<|python_tag|>')}? {s.several(s.object(arguments='parameters'), 'SEMICOLON')}"


def _mistral(s: _Spelling) -> str:
    begin, id_, arguments = map(s.mark, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
    call = s.named(f"({id_} /[a-zA-Z0-9]+/)? {arguments}")
    listed = f'{begin} SPACE "[" {s.several(s.object(), "SEPARATOR")} "]"'
    return f"({listed} | {s.several(f'({begin} {call})')})"


def _deepseek(s: _Spelling) -> str:
    begin, separator, end = map(s.mark, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
    fenced = s.named('"\\n```json\\n"')
    call = f'({begin} ("function" {separator} {fenced} "\\n```" | {s.named(separator)}) {end})'
    return f"{s.mark('<｜tool▁calls▁begin｜>')} {s.several(call, 'SPACE')} {s.mark('<｜tool▁calls▁end｜>')}"


def _kimi(s: _Spelling) -> str:
    begin, separator, end = map(s.mark, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"))
    call = f'({begin} SPACE "functions." {s.named(f"/:[0-9]+/ SPACE {separator} SPACE")} SPACE {end})'
    first, last = map(s.mark, ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"))
    return f"{first} SPACE {s.several(call, 'SPACE')} SPACE {last}"


def _qwen3_coder(s: _Spelling) -> str:
    begin, end = s.mark("<tool_call>"), s.mark("</tool_call>")

    def call(name: str, schema: Mapping[str, Any]) -> str:
        values = s.items(schema, lambda key: f'"<parameter=" {key} ">" {s.up_to("</parameter>")} SPACE')
        return f'({begin} SPACE "<function=" {json.dumps(name)} ">" SPACE {values} "</function>" SPACE {end})'

    return s.several(s.each(call), "SPACE")


def _glm45(s: _Spelling) -> str:
    begin, end = s.mark("<tool_call>"), s.mark("</tool_call>")
    key_begin, key_end, value_begin = map(s.mark, ("<arg_key>", "</arg_key>", "<arg_value>"))

    def call(name: str, schema: Mapping[str, Any]) -> str:
        values = s.items(
            schema, lambda key: f"{key_begin} {key} {key_end} SPACE {value_begin} {s.up_to('</arg_value>')} SPACE"
        )
        return f"({begin} {json.dumps(name)} SPACE {values} {end})"

    return s.several(s.each(call), "SPACE")


def _lfm2(s: _Spelling) -> str:
    end = s.up_to("<|tool_call_end|>")
    return f'{s.mark("<|tool_call_start|>")} "[" {s.each(lambda name, _: json.dumps(name))} "(" {end}'


def _cohere(s: _Spelling) -> str:
    schema = call_schema(s.functions, "tool_name", "parameters")
    number = {"tool_call_id": {"type": "string", "maxLength": 3}}
    calls = [{**call, "properties": {**number, **call["properties"]}} for call in schema["anyOf"]]
    one = s.json({**schema, "anyOf": calls})
    return f'{s.mark("<|START_ACTION|>")} SPACE "[" SPACE {s.several(one, "SEPARATOR")} SPACE "]" {s.mark("<|END_ACTION|>")}'


_CALLS: Mapping[str, Callable[[_Spelling], str]] = {
    "hermes": _hermes,
    "granite": _granite,
    "llama3_json": _llama,
    "mistral": _mistral,
    "deepseek_v3": _deepseek,
    "kimi_k2": _kimi,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "lfm2": _lfm2,
    "cohere": _cohere,
}
_BARE = ("qwen3_coder", "glm45", "lfm2")
"""Formats that write values bare."""


def calls_or_answer(
    format: str, tools: Tools, answer: StructuredOutputs, *, one_call: bool, special: Callable[[str], int | None]
) -> StructuredOutputs:
    """Return the form of calls of ``tools`` in a format, or an answer in the JSON of ``answer``.

    ``special`` returns the token of a mark that is a special token, None for others. Raise
    ``InvalidArgument`` for tools that cannot be forced.
    """
    spelling = _Spelling(functions_of(tools), one_call, special)
    json_answer = f"%json {json.dumps(json_schema(answer), ensure_ascii=False)}"
    return _form(spelling, _CALLS[format](spelling), {"start": "calls | answer", "answer": json_answer})


def forced_calls(
    format: str, tools: Tools, *, one_call: bool, special: Callable[[str], int | None]
) -> StructuredOutputs | None:
    """Return the form of calls of ``tools``, as ``calls_or_answer``; None for a format that cannot
    hold their schemas."""
    spelling = _Spelling(functions_of(tools), one_call, special, forced=True)
    if format == "harmony":
        channel, message = spelling.mark("<|channel|>"), spelling.mark("<|message|>")
        calls = '" to=functions." ' + spelling.named(f'{channel} "commentary json" {message}')
    elif format in _BARE:
        return None
    else:
        calls = _CALLS[format](spelling)
    return _form(spelling, calls, {"start": "calls"})


def _form(spelling: _Spelling, calls: str, rules: Mapping[str, str]) -> StructuredOutputs:
    rules = {
        **rules,
        "calls": calls,
        "SPACE": r"/[ \n]{0,8}/",
        "SEPARATOR": r"/,[ \n]{0,8}/",
        "SEMICOLON": r"/;[ \n]{0,8}/",
    }
    lines = [f"{name}: {body}" for name, body in rules.items()]
    return StructuredOutputs(grammar="\n".join([*lines, *spelling.texts()]))
