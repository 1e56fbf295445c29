"""Calls that a model writes without the marks of its format, where its answer begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from quire.server.tools.messages import MessageFormat, MessageReader, message_of
from quire.server.tools.reasoning import reasoning_for
from quire.server.tools.tools import StreamingToolParser

from .test_tools import CALLS, JSON, NAMES, STRINGS, Calls, cut, dumps, format_of, parsed, streamed, tool

TOOLS = [tool("weather"), tool("time")]


def objects(calls: Calls, arguments: str = "arguments", **more: Any) -> list[str]:
    return [dumps({"name": name, arguments: values, **more}) for name, values in calls]


def last_name(calls: Calls) -> str:
    return "\n".join(dumps({"arguments": values, "name": name}) for name, values in calls)


def in_strings(calls: Calls) -> str:
    return "\n".join(dumps({"name": name, "arguments": dumps(values)}) for name, values in calls)


WRITERS: Mapping[str, Callable[[Calls], str]] = {
    "row": lambda calls: "\n".join(objects(calls)),
    "semicolons": lambda calls: "; ".join(objects(calls, "parameters")),
    "array": lambda calls: f"[{', '.join(objects(calls))}]",
    "fence": lambda calls: "```json\n" + "\n".join(objects(calls)) + "\n```",
    "fences": lambda calls: "\n\n".join(f"```\n{one}\n```" for one in objects(calls, "parameters")),
    "fenced_array": lambda calls: f"\n```json\n[\n  {',  '.join(objects(calls))}\n]\n```\n",
    "openai": lambda calls: "\n".join(
        f'{{"type": "function", "id": "1", {one[1:]}' for one in objects(calls, why="it is {asked} for")
    ),
    "half_marked": lambda calls: "\n".join(f"{one}\n</tool_call>" for one in objects(calls)),
    "last_name": last_name,
    "in_strings": in_strings,
}


@pytest.mark.product(2)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_they_are_calls_in_every_format(name: str, writer: str) -> None:
    calls: Calls = [("weather", {"city": 'a "}{" b'}), ("time", {}), ("weather", {"at": {"x": [{}, "```"]}})]
    for written in (calls, calls[:1]):
        for pieces in ([text := WRITERS[writer](written)], list(text)):
            message = streamed(format_of(name), pieces, TOOLS)
            assert [(call.name, json.loads(call.arguments)) for call in message.calls] == written
            assert message.content is None


@pytest.mark.turns(2)
@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=examples(6, 15), deadline=None)
@given(calls=CALLS, places=st.lists(st.integers(0, 10_000), max_size=6), more=STRINGS)
def test_any_calls_in_any_pieces(writer: str, calls: Calls, places: list[int], more: str) -> None:
    text = WRITERS[writer](calls)
    message = streamed(format_of("hermes"), cut(text, places), [tool(name) for name, _ in calls])
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    told = f"So: {more}"
    followed = parsed(format_of("lfm2"), f"{text}\n\n{told}", [tool(name) for name, _ in calls])
    assert len(followed.calls) == len(calls)
    assert (followed.content or "").endswith(told.rstrip())


ANSWERS = (
    '{"name": "Bob", "arguments": {}}',
    '{"name": "weathers", "arguments": {}}',
    '{"name": "weather"}',
    '{"name": "weather", "city": "Rome"}',
    '{"name": "weather", "arguments": [1]}',
    '{"name": "weather", "arguments": "Rome"}',
    '{"type": "object", "name": "weather", "arguments": {}}',
    '{"title": "weather", "arguments": {}}',
    '[{"name": "Bob", "arguments": {}}]',
    "[1, 2]",
    "[]",
    "{}",
    '{"name": "wea',
    '```json\n{"city": "Rome"}\n```',
    '```python\n{"name": "weather", "arguments": {}}\n```',
    "```",
    'Sure: {"name": "weather", "arguments": {}}',
    "",
    " \n",
)


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("name", NAMES)
def test_other_json_is_an_answer(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        message = streamed(format_of(name), pieces, TOOLS)
        assert message.content == text
        assert not message.calls


@pytest.mark.parametrize("tools", [None, []], ids=["unknown", "none"])
def test_without_offered_tools_there_are_none(tools: Any) -> None:
    text = '{"name": "weather", "arguments": {}}'
    assert parsed(format_of("hermes"), text, tools).content == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"name": "weather", "c|ity"',
            '{"name": "weathern|',
            '{"name": "weather", "arguments": [|',
            '{"ti|',
            '{"name":3|',
        ),
        *("```p|ython", "```json\n{}|", "```json x|", "[1|", "S|ure", '{"name": "B|', '{"arguments": "a"|', '{"ab|'),
        '{"parameters": {"a": 1}, "name": "B|',
    ],
)
def test_text_is_held_only_while_it_can_be_a_call(text: str) -> None:
    """The sign stands behind the first character that no call has there."""
    at = text.index("|") - 1
    whole = text.replace("|", "")
    parser = StreamingToolParser(format_of("hermes"), TOOLS)
    sent = ["".join(delta.content for delta in parser.feed(letter)) for letter in whole]
    assert "".join(sent).strip() == whole.strip()
    assert next(size for size, now in enumerate(sent) if now) == at


def test_a_marker_in_text_that_was_held_begins_a_call() -> None:
    for before in ("", "{", "[", "```json\n[", '{"name": "', '{"arguments": {}, "name": '):
        for pieces in ([text := before + '<tool_call>{"name": "f"}</tool_call>'], list(text)):
            message = streamed(format_of("hermes"), pieces, [tool("f")])
            assert [call.name for call in message.calls] == ["f"]
            assert (message.content or "").rstrip() == before.rstrip()
        mistral = f'{before}[TOOL_CALLS][{{"name": "f", "arguments": {{}}}}]'
        assert [call.name for call in parsed(format_of("mistral"), mistral, [tool("f")]).calls] == ["f"]


def test_a_call_that_was_cut_stays_one() -> None:
    for text in (
        '{"name": "weather", "arguments": {"city": "Ro',
        '```json\n{"name": "weather", "arguments": {"city": "Ro',
    ):
        message = parsed(format_of("hermes"), text, TOOLS)
        assert [(call.name, call.arguments) for call in message.calls] == [("weather", '{"city": "Ro')]
        assert message.content is None
    broken = parsed(format_of("hermes"), '```json\n{"name": "time", "arguments": {"a": }}\n```\nSo.', TOOLS)
    assert [(call.name, call.arguments) for call in broken.calls] == [("time", '{"a": }}\n')]
    assert broken.content == "\nSo."


@settings(max_examples=examples(40, 100), deadline=None)
@given(value=JSON, text=st.text(max_size=10), places=st.lists(st.integers(0, 10_000), max_size=5))
def test_no_answer_is_changed(value: Any, text: str, places: list[int]) -> None:
    answer = f"{json.dumps(value, ensure_ascii=False)}{text}"
    message = streamed(format_of("granite"), cut(answer, places), TOOLS)
    assert message.content == answer
    assert not message.calls


def test_it_takes_linear_time() -> None:
    """Text that was held is read again once, however it is cut."""
    text = '{"arguments": "' + "[" * 100_000 + '", "name": "nothing"}'
    parser = StreamingToolParser(format_of("hermes"), TOOLS)
    sent = [delta.content for at in range(0, len(text), 100) for delta in parser.feed(text[at : at + 100])]
    assert "".join([*sent, *(delta.content for delta in parser.finish())]) == text


def test_they_stand_behind_the_reasoning() -> None:
    reasoning = reasoning_for("<think></think>")
    reader = MessageReader(MessageFormat(reasoning=reasoning, calls=format_of("hermes"), tools=TOOLS))
    text = '<think>{"name": "weather"}</think>\n\n```json\n{"name": "time", "arguments": {}}\n```'
    message = message_of([*map(reader.feed, text), reader.finish()])
    assert message["reasoning_content"] == '{"name": "weather"}'
    assert message["content"] is None
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "time", "arguments": "{}"}]
    assert reader.calls_are_whole
