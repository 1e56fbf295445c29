"""The whole way of a call in templates like those of popular models: a history is rendered, what
the model would have written is read as the same call, and that is rendered as it was written.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from typing import Any

import jinja2
import llguidance
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from popular_templates import TEMPLATES
from quire.server.tools.call_grammars import forced_calls
from quire.server.tools.harmony import is_harmony
from quire.server.tools.messages import MessageFormat, MessageReader, message_of
from quire.server.tools.reasoning import reasoning_for
from quire.server.tools.tools import ToolFormat, parser_for
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


BARE_OR_UNKNOWN = (*BARE, *UNREAD)
"""Models that are forced to write a JSON array."""


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in BARE_OR_UNKNOWN])
def test_forced_calls_are_what_the_template_writes(name: str) -> None:
    known = own(name)
    written_as = "harmony" if known is None else known.name
    one, many = (forced_calls(written_as, TOOLS, one_call=it, special=lambda mark: None) for it in (True, False))
    for count in (1, 2):
        if count == 2 and name in ONE_CALL:
            continue
        calls = [("weather", ROME), ("time", {})][:count]
        text = render(name, USER, turn(*calls), *results(count))
        written = text[begin_of_call(name, text) :]
        written = written[: min(at for one in ENDS if (at := written.find(one)) >= 0)].rstrip()
        # Ids that a template writes are not the model's.
        for id_ in IDS:
            written = written.replace(f', "id": "{id_}"', "")
        assert fits(many, written), written
        assert fits(one, written) == (count == 1)
        for other in (written[:-1], written + "x", written.replace(": [1", ":[1"), written.replace("days", "day")):
            assert not fits(many, other)
        format = MessageFormat(calls=known and known.forced, harmony=known is None, only_calls=True, tools=TOOLS)
        assert calls_of(format, written) == calls


@pytest.mark.parametrize("name", BARE_OR_UNKNOWN)
def test_forced_calls_of_others_are_json(name: str) -> None:
    known = own(name)
    assert known is None or forced_calls(known.name, TOOLS, one_call=True, special=lambda mark: None) is None


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in BARE_OR_UNKNOWN])
def test_a_forced_call_that_was_cut_is_in_the_call_or_nowhere(name: str) -> None:
    known = own(name)
    format = MessageFormat(calls=known and known.forced, harmony=known is None, only_calls=True, tools=TOOLS)
    text = render(name, USER, turn(("weather", ROME)), *results(1))
    written = text[begin_of_call(name, text) :]
    written = written[: min(at for one in ENDS if (at := written.find(one)) >= 0)]
    arguments = json.dumps(ROME, ensure_ascii=False)
    for size in range(len(written)):
        reader = MessageReader(format)
        message = message_of([*map(reader.feed, written[:size]), reader.finish()])
        given = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        assert all(arguments.startswith(one) for one in given), (size, given)
        assert not message["content"]


def begin_of_call(name: str, text: str) -> int:
    """Return where a call begins that no marker begins in every model."""
    begin = text.index("What is the weather?")
    if name == "gpt-oss":
        return text.index(" to=functions.", begin)
    return text.index('{"name"', begin) if name == "llama-3" else begin_of(name, text)


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


def fits(wanted: Any, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), str(wanted.grammar))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())
