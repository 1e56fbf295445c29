"""Grammars of calls or an answer: what templates write is in them, and is read; what is neither is
not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import llguidance
import pytest

from quire import InvalidArgument, StructuredOutputs
from quire.grammars.formats import grammar_text
from quire.server.tools.call_grammars import calls_or_answer
from quire.server.tools.tools import StreamingToolParser, schema_for

from .test_tools import NAMES, WRITERS, Calls, format_of, glm, granite, lfm2, lfm2_json, mistral, parsed, qwen_coder

ARGUMENTS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": "time"}},
]
ANSWER = StructuredOutputs(json={"type": "object", "properties": {"say": {"type": "string"}}, "required": ["say"]})
ROME: Calls = [("weather", {"city": "Rome"})]
BOTH: Calls = [*ROME, ("time", {})]
PLAIN = [write for write in WRITERS if write not in (granite, mistral, lfm2_json)]
"""Not those that write arguments before the name, ids of the history, JSON instead of Python."""
BARE: tuple[Any, ...] = (qwen_coder, glm, lfm2)
"""Values of arguments are any text."""


@cache
def grammar(name: str, one_call: bool = False) -> StructuredOutputs:
    return calls_or_answer(name, TOOLS, ANSWER, one_call=one_call, special=lambda mark: None)


def fits(wanted: StructuredOutputs, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), str(wanted.grammar))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize("write", PLAIN, ids=lambda write: write.__name__)
def test_what_templates_write_is_in_the_grammar(write: Callable[[Calls], str]) -> None:
    name = WRITERS[write]
    both, one = write(BOTH).lstrip("\n"), write(ROME).lstrip("\n")
    assert fits(grammar(name), both)
    assert fits(grammar(name, one_call=True), one)
    assert fits(grammar(name, one_call=True), both) == (write is lfm2)
    message = parsed(replace(format_of(name), whole=True), both, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == BOTH
    assert message.content is None
    assert not fits(grammar(name), write([("unknown", {})]).lstrip("\n"))
    assert fits(grammar(name), write([("weather", {"city": "Bonn"})]).lstrip("\n")) == (write in BARE)


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", NAMES)
def test_answers_and_nothing_else(name: str) -> None:
    assert fits(grammar(name), '{"say":"<tool_call>"}')
    for text in ("", "Hello", "{}", '{"say":"a","more":1}', '{"say":"a"}<tool_call>', 'So: {"say":"a"}'):
        assert not fits(grammar(name), text)
    granites = '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]'
    assert fits(grammar(name), granites) == (name == "granite")


def test_marks_that_are_special_tokens() -> None:
    tokens = {"<tool_call>": 7, "</tool_call>": 8}
    form = calls_or_answer("hermes", TOOLS, ANSWER, one_call=True, special=tokens.get)
    assert "<[7]>" in str(form.grammar)
    assert "<[8]>" in str(form.grammar)
    assert not fits(replace(form, grammar=str(form.grammar).replace("<[7]>", '"x"').replace("<[8]>", '"y"')), "xy")
    ends = {"<|tool_call_end|>": 9}
    assert "<[9]>" in str(calls_or_answer("lfm2", TOOLS, ANSWER, one_call=True, special=ends.get).grammar)


def test_tools_are_checked() -> None:
    twice = [TOOLS[0], TOOLS[0]]
    with pytest.raises(InvalidArgument, match="as that of another tool"):
        calls_or_answer("hermes", twice, ANSWER, one_call=False, special=lambda mark: None)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_speaks_of_calls_is_one(name: str) -> None:
    """Marks inside of it begin no call."""
    format = replace(format_of(name), whole=True)
    calls = "".join(write([("time", {})]) for write, of in WRITERS.items() if of == name)
    for text in (json.dumps({"say": calls}, ensure_ascii=False), f'{{"say": "{calls}"}}', "", " "):
        assert parsed(format, text, TOOLS).content == text
        assert not parsed(format, text, TOOLS).calls


@pytest.mark.parametrize("write", [*WRITERS], ids=lambda write: write.__name__)
def test_what_was_cut_is_in_the_call_or_nowhere(write: Callable[[Calls], str]) -> None:
    """Also in pieces: no content is sent before it is known that it is an answer."""
    format = replace(format_of(WRITERS[write]), whole=True)
    text = write(ROME).lstrip("\n")
    marker = next(mark for mark in sorted(format.markers, key=len, reverse=True) if text.startswith(mark))
    for size in range(len(text)):
        message = parsed(format, text[:size], TOOLS)
        begun = size >= len(marker)
        assert (message.content or "") == ("" if begun else text[:size])
        parser = StreamingToolParser(format, TOOLS)
        sent = [delta for letter in text[:size] for delta in parser.feed(letter)]
        assert not any(delta.content for delta in sent)


NUMBERS = {"enum": [1, 2]}


@pytest.mark.parametrize(
    ("whole", "reference"),
    [
        ({"$defs": {"n": NUMBERS}}, "#/$defs/n"),
        ({"$id": "https://e.test/f", "$defs": {"n": NUMBERS}}, "#/$defs/n"),
        ({"$id": "https://e.test/f", "$defs": {"n": NUMBERS}}, "https://e.test/f#/$defs/n"),
        ({"$defs": {"n": {"$anchor": "n", **NUMBERS}}}, "#n"),
        ({"$id": "https://e.test/f", "$defs": {"a/ %~é": {"$anchor": "n", **NUMBERS}}}, "https://e.test/f#n"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {"$id": "#n", **NUMBERS}}}, "#n"),
        (
            {"$defs": {"n": {"$id": "https://e.test/n", "$ref": "#/$defs/m", "$defs": {"m": NUMBERS}}}},
            "https://e.test/n",
        ),
    ],
)
def test_references_of_a_tool_lead_into_its_own_schema(whole: dict[str, Any], reference: str) -> None:
    """Also if another tool has the same ``$id`` and anchors, and a tool is forced."""
    schema = {"type": "object", "properties": {"a": {"$ref": reference}}, "required": ["a"], **whole}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": schema}}]
    if "https://e.test/n" not in str(whole):
        other = json.loads(json.dumps(schema).replace("[1, 2]", "[3]"))
        tools.append({"type": "function", "function": {"name": "g", "parameters": other}})
    before = json.dumps(tools)
    for text, wanted in (
        ('[{"name":"f","parameters":{"a":%s}}]', schema_for(tools, "required")),
        ('{"a":%s}', schema_for(tools, {"type": "function", "function": {"name": "f"}})),
    ):
        form = StructuredOutputs(json=wanted)
        found = [value for value in range(5) if fits_schema(form, text % value)]
        assert found == [1, 2]
    assert json.dumps(tools) == before


def fits_schema(wanted: StructuredOutputs, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar_text(wanted))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())
