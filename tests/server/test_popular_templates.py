"""The whole way of a call in templates like those of popular models: a history is rendered, what
the model would have written is read as the same call, and that is rendered as it was written.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import jinja2
import llguidance
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from popular_templates import TEMPLATES
from quire.server.tools.call_forms import CallForm, ItemForm, _derived
from quire.server.tools.harmony import is_harmony
from quire.server.tools.messages import MessageFormat, MessageReader, message_of
from quire.server.tools.reasoning import reasoning_for
from quire.server.tools.tools import ToolFormat, functions_of, parser_for
from quire.text.chat_rendering import render_chat

from .test_tools import tool

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = (
    "</s>",
    "<|im_end|>",
    "<|eot_id|>",
    "<｜end▁of▁sentence｜>",
    "<|call|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
}
TOOLS = [tool("weather", CITY), tool("time", {"type": "object", "properties": {}})]
USER = {"role": "user", "content": "What is the weather?"}
ROME: dict[str, Any] = {"city": 'Rome "é"', "days": [1, 2]}
IDS = ("abcdefgh1", "abcdefgh2")
ONE_CALL = ("llama-3", "gpt-oss")
BARE = ("qwen-3-coder", "glm-4.5", "lfm-2")
UNREAD = ("nemotron", "gemma-3")
"""Models whose calls are read only where they were forced, if at all."""


def render(name: str, *messages: dict[str, Any], asks: bool = False, by: Any = None, **more: Any) -> str:
    if name == "kimi-k2":  # its ids have the names
        calls = [call for one in messages for call in one.get("tool_calls", ())]
        ids = {call["id"]: f"functions.{call['function']['name']}:{place}" for place, call in enumerate(calls)}
        text = json.dumps(messages)
        for id_, named in ids.items():
            text = text.replace(id_, named)
        messages = json.loads(text)
    if by is not None:
        return str(
            by(messages, TOOLS, chat_template=TEMPLATES[name], add_generation_prompt=asks, tokenize=False, **more)
        )
    return render_chat(TEMPLATES[name], messages, add_generation_prompt=asks, tools=TOOLS, **TOKENS, **more)


def turn(*calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    listed = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, (name, arguments) in zip(IDS, calls, strict=False)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed, **more}


def results(count: int) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": id_, "content": "sunny"} for id_ in IDS[:count]]


@cache
def form(name: str) -> CallForm | ItemForm | None:
    known = own(name)
    reasoning = reasoning_for(TEMPLATES[name])
    markers = () if known is None else known.markers
    return _derived(TEMPLATES[name], ENDS, markers, reasoning and reasoning.closer, tuple(sorted(TOKENS.items())))


def own(name: str) -> ToolFormat | None:
    return None if is_harmony(TEMPLATES[name]) else parser_for({}, TEMPLATES[name])


def calls_of(format: MessageFormat, text: str) -> list[tuple[str, Any]]:
    reader = MessageReader(format)
    message = message_of([*map(reader.feed, text), reader.finish()])
    assert not message["content"], message
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


@pytest.mark.parametrize("arguments", [ROME, json.dumps(ROME, ensure_ascii=False)], ids=["object", "text"])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "missing"])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "gemma-3"])
def test_histories_are_rendered(name: str, content: dict[str, Any], arguments: Any) -> None:
    called = {**turn(("weather", arguments)), **content}
    if not content:
        del called["content"]
    text = render(name, USER, called, *results(1), asks=True)
    assert text == render(name, USER, turn(("weather", ROME)), *results(1), asks=True)
    assert "None" not in text
    assert text.count("sunny") == 1
    written = text[: text.index("sunny")].rpartition("What is the weather?")[2]
    assert "weather" in written
    assert ('"days": [1, 2]' in written) == (name not in BARE)
    assert 'Rome "é"' in written.replace("\\", "")
    thought = render(name, USER, {**called, "reasoning_content": "Hm."}, *results(1), asks=True)
    assert ("Hm." in thought) == (name in ("qwen-3", "qwen-3-first", "gpt-oss"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_without_content_are_rendered(name: str) -> None:
    for content in (None, ""):
        text = render(name, USER, {"role": "assistant", "content": content}, USER, asks=True)
        assert "None" not in text
        assert text.count("What is the weather?") == 2


def oracle(messages: Any, tools: Any, **more: Any) -> str:
    (text,), _ = render_jinja_template(conversations=[messages], tools=tools, **TOKENS, **more)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_what_transformers_renders(name: str) -> None:
    joined = name in ("deepseek-v3", "deepseek-r1", "deepseek-v3.1", "kimi-k2")
    rome = json.dumps(ROME, ensure_ascii=False) if joined else ROME
    answer = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm."}
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny."}
    called = [turn(("weather", rome)), *results(1)]
    chats = [[USER], [USER, answer, USER], [USER, thought, USER], [USER, *called], [USER, *called, answer]]
    modes: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"thinking": True}, {"think": True}]
    rendered = 0
    for messages, asks, mode in product(chats, (True, False), modes):
        wanted = set()
        # Callers of transformers choose how an absent content beside calls is written.
        for empty in (None, ""):
            said = [{**one, "content": empty} if "tool_calls" in one else one for one in messages]
            with suppress(jinja2.TemplateError, TypeError):
                wanted.add(render(name, *said, asks=asks, by=oracle, **mode))
        if wanted:
            rendered += 1
            assert render(name, *messages, asks=asks, **mode) in wanted
    assert rendered >= 32 or name == "gemma-3"


def begin_of(name: str, text: str) -> int:
    """Where the call stands after a prompt that went on in another way."""
    known = own(name)
    assert known is not None
    return text.index(known.markers[0], text.index("What is the weather?"))


READ = [(name, count) for name in TEMPLATES for count in (1, 2) if name not in UNREAD]


@pytest.mark.parametrize(
    ("name", "count"), [(name, count) for name, count in READ if count == 1 or name not in ONE_CALL]
)
def test_what_a_template_writes_is_read_and_written_again(name: str, count: int) -> None:
    calls = [("weather", ROME), ("time", {})][:count]
    prompt, text = render(name, USER, asks=True), render(name, USER, turn(*calls), *results(count))
    begin = len(prompt) if text.startswith(prompt) else begin_of(name, text)
    end = min(at for one in ENDS if (at := text.find(one, begin)) >= 0) if name != "glm-4.5" else text.index("<|obs")
    if is_harmony(TEMPLATES[name]):
        format = MessageFormat(harmony=True, tools=TOOLS)
    else:
        reasoning = reasoning_for(TEMPLATES[name])
        format = MessageFormat(reasoning=reasoning, in_reasoning=False, calls=own(name), tools=TOOLS)
    found = calls_of(format, text[begin:end])
    assert found == calls
    assert render(name, USER, turn(*found), *results(count)) == text


def test_a_template_without_calls_has_no_form() -> None:
    assert form("gemma-3") is None


FORCED = [name for name in TEMPLATES if name != "gemma-3"]


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_are_what_the_template_writes(name: str) -> None:
    found = form(name)
    assert found is not None
    format = found.format(own(name))
    assert format is not None
    functions = functions_of(TOOLS)
    for count in (1, 2):
        if count == 2 and found.mid is None:
            assert name in ONE_CALL
            continue
        calls = [("weather", ROME), ("time", {})][:count]
        text = render(name, USER, turn(*calls), *results(count))
        begin = text.index(found.head.replace("\0", IDS[0]), text.rindex("What is the weather?"))
        end = min(at for one in (*ENDS, "<|observation|>") if (at := text.find(one, begin)) >= 0)
        written = text[begin:end]
        # In the grammar, alone and behind a model's own beginning of it.
        assert fits(found.grammar(functions, {}, one_call=count == 1), written)
        assert fits(found.grammar(functions, {}, one_call=True), written) == (count == 1)
        for other in (
            written[:-1] or "x",
            written + "x",
            written.replace(": [1", ":[1"),
            written.replace("days", "day"),
        ):
            assert other == written or not fits(found.grammar(functions, {}, one_call=False), other)
        # The model would write it behind the prompt, and is read as the call.
        assert calls_of(MessageFormat(calls=format, tools=TOOLS), written) == calls
        assert calls_of(MessageFormat(calls=format, tools=TOOLS), written.rstrip()) == calls


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_that_was_cut_is_in_the_call_or_nowhere(name: str) -> None:
    found = form(name)
    assert found is not None
    format = found.format(own(name))
    arguments = json.dumps(ROME, ensure_ascii=False)
    if isinstance(found, ItemForm):
        whole = found.text([("weather", ROME)])
    else:
        whole = f"{found.head}weather{found.between}{arguments}{found.tail}"
    whole = whole.replace("\0", IDS[0]).replace("\1", "0")
    for size in range(len(whole)):
        reader = MessageReader(MessageFormat(calls=format, tools=TOOLS))
        message = message_of([*map(reader.feed, whole[:size]), reader.finish()])
        given = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        # Those that were not written as JSON are text as it was written from where they were cut.
        assert isinstance(found, ItemForm) or all(arguments.startswith(one) for one in given), (size, given)
        begun = (
            size > len(found.head.lstrip())
            if format and format.only_calls
            else size >= len("<|tool_calls_section_begin|>")
        )
        assert not message["content"] or not begun


def test_tokens_in_a_form_are_tokens() -> None:
    found = form("qwen-2.5")
    assert found is not None
    grammar = str(found.grammar(functions_of(TOOLS), {"<tool_call>": 7, "</tool_call>": 8}, one_call=False).grammar)
    assert grammar.count("<[7]>") == 2
    assert grammar.count("<[8]>") == 2
    assert "tool_call>" not in grammar


MEMBERS: dict[str, dict[str, Any]] = {
    "mode": {"enum": ["fast", "slow"]},
    "note": {"type": "string"},
    "deep": {"type": "boolean"},
    "size": {"$ref": "#/$defs/size"},
    "more": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
}
SEARCH = tool(
    "search",
    {
        "type": "object",
        "properties": MEMBERS,
        "required": ["mode"],
        "$defs": {"size": {"type": "integer", "maximum": 9}},
    },
)


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        ({"mode": "fast"}, True),
        ({"mode": "slow", "note": "a\n\n<b>", "deep": True, "size": 3, "more": None}, True),
        ({"mode": "slow", "deep": False, "more": "5 of them"}, True),
        ({"mode": "slow", "size": 9}, True),
        ({"mode": "slow", "size": 10}, False),
        ({"mode": "odd"}, False),
        ({"note": "x"}, False),
        ({"mode": "fast", "other": 1}, False),
        ({"note": "x", "mode": "fast"}, False),
        ({"mode": "fast", "deep": "yes"}, False),
    ],
)
def test_bare_arguments_follow_the_schema(name: str, arguments: dict[str, Any], held: bool) -> None:
    found = form(name)
    assert isinstance(found, ItemForm)
    grammar = found.grammar(functions_of([SEARCH]), {}, one_call=True)
    written = found.text([("search", arguments)])
    assert fits(grammar, written) == held
    if held:
        assert calls_of(MessageFormat(calls=found.format(own(name)), tools=[SEARCH]), written) == [
            ("search", arguments)
        ]
        assert render(name, USER, turn(("search", arguments)), *results(1)).count(written) == 1


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string", "pattern": "a"}, False),
        ({"type": "string", "maxLength": 3}, False),
        ({"type": ["string", "integer"], "minimum": 3}, False),
        ({"enum": [1, "a"]}, False),
        ({"enum": ["a</parameter>", "</arg_value>"]}, False),
        ({"$ref": "#/properties/b"}, False),
        ({"$ref": "#/$defs/a"}, False),
        ({"$ref": "#/$defs/c"}, True),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, False),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, True),
        ({}, True),
    ],
)
def test_what_bare_text_cannot_hold_is_written_as_json(schema: dict[str, Any], written: bool) -> None:
    definitions = {"a": {"$ref": "#/$defs/a"}, "c": {"$ref": "#/$defs/d"}, "d": {"enum": ["x", "y"]}}
    properties = {"a": schema, "b": {"type": "integer"}}
    functions = functions_of([tool("f", {"type": "object", "properties": properties, "$defs": definitions})])
    for name in ("qwen-3-coder", "glm-4.5"):
        found = form(name)
        assert found is not None
        assert (found.grammar(functions, {}, one_call=True) is not None) == written
    for more in ({"patternProperties": {}}, {"required": ["c"]}, {"$id": "x"}):
        other = {"f": {**functions["f"], "properties": {}, **more}}
        assert found.grammar(other, {}, one_call=True) is None


def test_a_tag_behind_a_bare_value_is_whole() -> None:
    found = form("qwen-3-coder")
    assert isinstance(found, ItemForm)
    assert (found.last, found.none) == ("\n</parameter>", ">")


def test_a_mark_behind_a_bare_value_may_be_a_token() -> None:
    found = form("glm-4.5")
    assert found is not None
    tokens = {"<tool_call>": 7, "</tool_call>": 8, "</arg_value>": 9}
    grammar = found.grammar(functions_of(TOOLS), tokens, one_call=True)
    assert grammar is not None
    assert "rest: /(?s:.*)/ <[9]>" in str(grammar.grammar)


def test_ids_that_the_model_wrote() -> None:
    format = MessageFormat(calls=own("kimi-k2"), tools=TOOLS, ids="named")
    call = "<|tool_call_begin|>%s<|tool_call_argument_begin|>{}<|tool_call_end|>"
    section = "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>"
    for written, ids in (
        (["functions.time:3", "functions.time:4"], ["functions.time:3", "functions.time:4"]),
        (["functions.time:0", "functions.time:0"], ["functions.time:0", "functions.time:1"]),
        (["time"], ["functions.time:0"]),
    ):
        text = section % "".join(call % one for one in written)
        reader = MessageReader(format)
        message = message_of([*map(reader.feed, text), reader.finish()])
        assert [one["id"] for one in message["tool_calls"]] == ids
        assert {one["function"]["name"] for one in message["tool_calls"]} == {"time"}
    mistral = MessageFormat(calls=own("mistral-v11"), tools=TOOLS, ids="short")
    for written_id, kept in (("abcdefghi", True), ("abc", False)):
        reader = MessageReader(mistral)
        message = message_of([reader.feed(f"[TOOL_CALLS]time[CALL_ID]{written_id}[ARGS]{{}}"), reader.finish()])
        (one,) = message["tool_calls"]
        assert (one["id"] == written_id) == kept
        assert len(one["id"]) == 9


def test_a_form_of_numbered_calls_has_two_at_most() -> None:
    found = form("command-r7b")
    assert found is not None
    assert found.mid is not None
    assert not found.repeats


def fits(wanted: Any, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), str(wanted.grammar))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())
