"""Tool calls that arrive piece by piece: how soon, how they end where their text breaks, and those
written as in Python.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.server.test_tools import (
    CALLS,
    JSON,
    STRINGS,
    TRANSLATED,
    WRITERS,
    cut,
    format_of,
    granite,
    lfm2,
    parsed,
    streamed,
    tools_of,
)

from quire.server.tools.messages import MessageFormat, MessageReader, message_of
from quire.server.tools.tools import StreamingToolParser, ToolFormat, forced_format, parser_for

STREAMED = [write for write in WRITERS if write not in TRANSLATED and write is not granite]
"""Whose arguments are passed on as they are written. What Granite writes has the name last."""
CLOSERS = ("</arg_value>", *(n + t for n in ("", "\n") for t in ("</parameter>", "<parameter=", "</function>")))
ENDS = ("</tool_call>", "<|END_ACTION|>", "<|tool_call_end|>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "<|python_tag|>")
NAMED = {"type": "function", "function": {"name": "find"}}


def emitted(format: ToolFormat, text: str, tools: Any = None) -> str:
    """The arguments of the first call that are known after ``text``, with more to come."""
    deltas = StreamingToolParser(format, tools).feed(text)
    return "".join(delta.arguments for delta in deltas if delta.index == 0)


def written(write: Any, value: str) -> str:
    return str(write([("find", {"q": value})]))


# -- how soon --------------------------------------------------------------------------------------


@pytest.mark.turns(2)
@pytest.mark.parametrize("write", STREAMED, ids=lambda write: write.__name__)
@settings(max_examples=examples(10, 40), deadline=None)
@given(parts=st.lists(STRINGS, max_size=12), place=st.integers(0, 10_000))
def test_arguments_are_given_as_they_are_written(write: Any, parts: list[str], place: int) -> None:
    """All but an escape that is not whole."""
    format, text = format_of(WRITERS[write]), written(write, "".join(parts))
    (whole,) = parsed(format, text).calls
    begin = text.index(whole.arguments)
    size = 1 + place % len(whole.arguments)
    known = emitted(format, text[: begin + size])
    assert whole.arguments.startswith(known)
    held = whole.arguments[len(known) : size]
    assert not held or (held[0] == "\\" and len(held) < 6)
    assert emitted(format, text[:begin]) == ""


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_arguments_are_given_as_they_are_written(choice: Any) -> None:
    value = '{"q": "' + "x" * 500 + '"}'
    text = value if choice is NAMED else f'[{{"name": "find", "parameters": {value}}}]'
    for size in range(1, len(value) + 1):
        assert emitted(forced_format(choice), text[: text.index(value) + size]) == value[:size]


def _literal(source: str) -> Any:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return None


@pytest.mark.turns(2)
@pytest.mark.parametrize("write", TRANSLATED, ids=lambda write: write.__name__)
@settings(max_examples=examples(12, 60), deadline=None)
@given(parts=st.lists(STRINGS, max_size=12), place=st.integers(0, 10_000))
def test_strings_are_given_as_they_are_written(write: Any, parts: list[str], place: int) -> None:
    """Also where they become JSON: all but what may belong to the tag that ends them."""
    value = "x" + "".join(parts) + "x"
    assume("</" not in value)
    format, text = format_of(WRITERS[write]), written(write, value)
    tools = tools_of([("find", {"q": value})])
    begin = text.index("=") + 2 if write is lfm2 else text.index(value)
    size = begin + 1 + place % (text.rindex("x") + 1 - begin)
    known = emitted(format, text[:size], tools)
    assert parsed(format, text, tools).calls[0].arguments.startswith(known)
    assert known.startswith('{"q": "')
    now = json.loads(known + '"}', strict=False)["q"]
    assert value.startswith(now)
    source = text[begin:size]
    if write is lfm2:
        quote = text[begin - 1]
        assert any(_literal(quote + source[: len(source) - held] + quote) == now for held in range(10))
    else:
        held = source.removeprefix(now)
        assert any(end.startswith(held) and held != end for end in CLOSERS)


def test_values_of_other_types_are_given_when_they_are_whole() -> None:
    tools = tools_of([("f", {"n": 12, "s": "", "m": 0})])
    parser = StreamingToolParser(format_of("qwen3_coder"), tools)

    def feed(text: str) -> list[tuple[str | None, str]]:
        return [(delta.name, delta.arguments) for delta in parser.feed(text)]

    assert feed("<tool_call>\n<function=f>\n<para") == []
    assert feed("meter=n>\n") == [("f", "")]
    assert feed("12\n</para") == []
    assert feed("meter>") == [(None, '{"n": 12')]
    assert feed("\n<parameter=s>") == []
    assert feed("\n\n") == [(None, ', "s": "')]
    assert feed('a"\n') == [(None, '\\na\\"')]
    assert feed("\n") == [(None, "\\n")]
    assert feed("</parameter") == []
    assert feed(">\n<parameter=m>none</parameter>") == [(None, '", "m": "none"')]
    assert feed("</function>") == [(None, "}")]
    assert feed("\n</tool_call>") == []
    assert parser.finish() == []


def test_messages_show_calls_being_written() -> None:
    reader = MessageReader(MessageFormat(calls=format_of("hermes")))
    deltas = [
        reader.feed(piece) for piece in ('<tool_call>{"name": "f", "arguments": {', '"a": "x', 'y"', "}}</tool_call>")
    ]
    assert [delta["tool_calls"][0]["function"] for delta in deltas] == [
        {"name": "f", "arguments": "{"},
        {"arguments": '"a": "x'},
        {"arguments": 'y"'},
        {"arguments": "}"},
    ]
    assert "id" in deltas[0]["tool_calls"][0]
    assert "id" not in deltas[1]["tool_calls"][0]


# -- where the text breaks -------------------------------------------------------------------------


@pytest.mark.parametrize("write", STREAMED, ids=lambda write: write.__name__)
@settings(max_examples=examples(20, 60), deadline=None)
@given(
    values=st.dictionaries(st.sampled_from("abc"), JSON, max_size=3),
    place=st.integers(0, 10_000),
    places=st.lists(st.integers(0, 2000), max_size=6),
)
def test_a_malformed_call_gets_all_of_it(write: Any, values: dict[str, Any], place: int, places: list[int]) -> None:
    """A control character in a string passes; anywhere else the arguments are the call as it is
    written, up to its end.
    """
    format, text = format_of(WRITERS[write]), write([("find", values)])
    (whole,) = parsed(format, text).calls
    assume(not any(end in whole.arguments for end in ENDS))
    begin = text.index(whole.arguments)
    at = begin + 1 + place % (len(whole.arguments) - 1)
    before = re.sub(r"\\.", "", text[begin:at], flags=re.DOTALL)
    assume(not before.endswith("\\"))
    broken = text[:at] + "\x01" + text[at:]
    message = parsed(format, broken)
    found = [place for end in ENDS if (place := broken.find(end, begin)) >= 0]
    end = begin + len(whole.arguments) + 1 if before.count('"') % 2 else min(found, default=len(broken))
    assert [(call.name, call.arguments) for call in message.calls] == [("find", broken[begin:end])]
    assert not message.content or message.content.isspace()
    assert streamed(format, cut(broken, places)) == message


@pytest.mark.turns(2)
@pytest.mark.parametrize("write", TRANSLATED, ids=lambda write: write.__name__)
@settings(max_examples=examples(12, 60), deadline=None)
@given(calls=CALLS, place=st.integers(0, 10_000), places=st.lists(st.integers(0, 2000), max_size=6))
def test_a_prefix_of_the_text_is_a_prefix_of_the_calls(
    write: Any, calls: list[Any], place: int, places: list[int]
) -> None:
    format, text, tools = format_of(WRITERS[write]), write(calls), tools_of(calls)
    whole = parsed(format, text, tools).calls
    size = place % (len(text) + 1)
    parser = StreamingToolParser(format, tools)
    known: list[str] = []
    for piece in cut(text[:size], places):
        for delta in parser.feed(piece):
            if delta.name is not None:
                assert delta.name == whole[len(known)].name
                known.append("")
            if delta.index is not None:
                known[delta.index] += delta.arguments
    assert [call.arguments for call in whole[: max(len(known) - 1, 0)]] == known[:-1]
    assert not known or whole[len(known) - 1].arguments.startswith(known[-1])
    # At the end nothing of it changes.
    ended = parsed(format, text[:size], tools).calls
    assert len(ended) >= len(known)
    assert all(call.arguments.startswith(start) for call, start in zip(ended, known, strict=False))


# -- calls as in Python ----------------------------------------------------------------------------


def read(source: str) -> Any:
    """The value of a literal; a failure if it is none."""
    text = f"<|tool_call_start|>[f(a={source})]<|tool_call_end|>"
    message = parsed(format_of("lfm2"), text)
    assert streamed(format_of("lfm2"), list(text)) == message
    try:
        values = json.loads(message.calls[0].arguments)
    except ValueError:
        values = None
    if values is None or message.content is not None:
        raise ValueError(f"no literal: {source}")
    return values["a"]


@pytest.mark.filterwarnings("ignore:invalid")
@pytest.mark.parametrize(
    "source",
    [
        "''",
        "'''it's'''",
        '"""a\n"b" c"""',
        "''''a'''",
        r"'\033[0m\0\18\777'",
        r"'\x41\u00e9\U0001F600'",
        r"'\ud83d\ude00'",
        r"'\q\'\"\\\a\b\f\n\r\t\v'",
        "'a\\\nb'",
        "[1, -2.5e-3, 1e+16, 0, True, False, None,]",
        "[[], {}, [[]], {'a': {'b': [1,]},},]",
        "{'a' : 1 , \"b\":'x'}",
        "[.5, -.5e1]",
    ],
)
def test_literals_are_what_python_reads(source: str) -> None:
    expected = ast.literal_eval(source)
    if isinstance(expected, str):
        # JSON joins the halves of a pair, Python does not.
        expected = expected.encode("utf-16", "surrogatepass").decode("utf-16")
    assert read(source) == expected


PARTS = ["\\", "\\'", '"', "n", "x4", "1", "u00e9", "U0001", "F600", "07", "8", "N", "é", "😀", "{", ",", ")", "d83d"]


@pytest.mark.filterwarnings("ignore:invalid")
@settings(max_examples=examples(100, 500), deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
@example("\\ud83d")
def test_strings_are_what_python_reads(body: str) -> None:
    source = f"'{body}'"
    try:
        expected = ast.literal_eval(source)
    except (ValueError, SyntaxError):
        with pytest.raises(ValueError, match="no literal"):
            read(source)
        return
    assert read(source) == expected


@pytest.mark.parametrize("source", ["(1, 2)", "(1,)", "()", "[(1, (2, 'x')), {'a': ()}]"])
def test_tuples_are_lists(source: str) -> None:
    assert read(source) == json.loads(json.dumps(ast.literal_eval(source)))


@settings(max_examples=examples(60, 300), deadline=None)
@given(JSON)
def test_json_literals_are_literals_too(value: Any) -> None:
    assert read(json.dumps(value)) == value
    assert read(repr(value)) == value


@pytest.mark.parametrize(
    "source",
    [
        "f()", "x", "1 + 1", "'a' 'b'", "f'a'", "r'a'", "b'a'", "(1)", "(1 2)", "{1, 2}", "{1: 2}", "{'a'}", "[1 2]", "[,]", "[1,,]",
        "1_000", "0x10", "01", "-.", "nan", "__import__('os')", r"'\N{DASH}'", r"'\x4'", r"'\U00110000'", "lambda: 1", "[1)", "",
    ],
)  # fmt: skip
def test_what_is_no_literal(source: str) -> None:
    with pytest.raises(ValueError, match="no literal"):
        read(source)


# -- Command R7B -----------------------------------------------------------------------------------


def test_the_markers_of_an_answer_are_no_content() -> None:
    template = "{{ '<|START_ACTION|>' }}"
    action = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>'
    for text, content in (
        ("<|START_RESPONSE|>Hello <|b|> you.<|END_RESPONSE|>", "Hello <|b|> you."),
        (action, None),
        (f"<|START_RESPONSE|>Wait.<|END_RESPONSE|>{action}", "Wait."),
        ("<|START_RESPONSE|><|END_RESPONSE|>", ""),
    ):
        for pieces in ([text], list(text)):
            reader = MessageReader(MessageFormat(calls=parser_for({}, template)))
            message = message_of([*(reader.feed(piece) for piece in pieces), reader.finish()])
            assert message["content"] == content
            calls = [call["function"] for call in message.get("tool_calls", ())]
            assert calls == ([{"name": "f", "arguments": '{"a": 1}'}] if action in text else [])
