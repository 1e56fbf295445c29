"""gpt-oss's turns: against the messages that they were written from, against a reading of the whole
text, and streams against both.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from quire import AsyncLLM
from quire.base.errors import FailedPrecondition
from quire.server.openai import chat
from quire.server.tools.harmony import MARKERS, HarmonyReader, in_reasoning, is_harmony
from quire.server.tools.messages import MessageFormat, MessageReader, message_of
from quire.server.tools.reader import Delta
from quire.text.chat_rendering import render_chat

from .conftest import OPTIONS, Served, serving, shallow_copy
from .test_chat import ask, refused, same, streamed

Read = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and the names and arguments of calls."""


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TOOLS = [tool("weather"), tool("python"), tool("functions.odd")]


def read(pieces: list[str], tools: Any = TOOLS, *, inside: bool = False) -> Read:
    reader = HarmonyReader(tools, in_reasoning=inside)
    found = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    reasoning, content, calls = "", "", []
    for delta in found:
        if delta.reasoning:
            assert not delta.content
            reasoning += delta.reasoning
        elif delta.index is None:
            assert delta.content
            content += delta.content
        else:
            assert (delta.name is not None) == (delta.index == len(calls)), "the name comes first and once"
            if delta.name is not None:
                calls.append((delta.name, ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return reasoning, content, calls


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


# -- turns that are written by the book ------------------------------------------------------------

TEMPLATE = """
{%- for message in messages -%}
  {%- if message.role == 'user' -%}<|start|>user<|message|>{{ message.content }}<|end|>
  {%- elif message.role == 'tool' -%}<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
  {%- else -%}
    {%- if message.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%- endif -%}
    {%- for call in message.tool_calls -%}
      <|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>
    {%- endfor -%}
    {%- if message.content -%}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""Writes history as gpt-oss's own does."""

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=20) | st.sampled_from(
    ["<", "<|", "a <| b |>", "<|end|", "if a <b:\n", "{", "\n", '"', "<|im_end|>"]
)
MARKED = st.sampled_from(
    ["<|end|>", "<|call|>", "<|start|>assistant<|channel|>final<|message|>", '"', "\\", '\\"', "}"]
)
JSON = st.dictionaries(
    WORDS | MARKED,
    st.recursive(WORDS | MARKED | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3)),
    max_size=3,
)


@settings(deadline=None)
@given(WORDS | st.none(), JSON, st.booleans(), st.lists(st.integers(0, 500), max_size=8))
def test_what_a_template_writes_is_read_again(
    thinking: str | None, arguments: dict[str, Any], calls: bool, places: list[int]
) -> None:
    """With markers in strings of the arguments."""
    answer: dict[str, Any] = {"role": "assistant", "thinking": thinking or ""}
    if calls:
        answer["tool_calls"] = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    else:
        answer["content"] = "It is\n4. "
    user = {"role": "user", "content": "Well?"}
    prompt = render_chat(TEMPLATE, [user])
    whole = render_chat(TEMPLATE, [user, answer], add_generation_prompt=False)
    assert whole.startswith(prompt)
    reasoning, content, found = read(cut(whole[len(prompt) :], places))
    assert reasoning == (thinking or "")
    assert content == ("" if calls else "It is\n4. ")
    assert [(name, json.loads(text)) for name, text in found] == ([("weather", arguments)] if calls else [])


@st.composite
def turns(draw: st.DrawFn) -> tuple[str, Read]:
    """A turn as models write them, and what it says."""
    text, reasoning, content = "", [], []
    calls: list[tuple[str, str]] = []
    space = st.sampled_from(["", "", " ", "\n"])
    for index in range(draw(st.integers(1, 4))):
        text += (
            ("<|start|>" + draw(st.sampled_from(["assistant", "assistant", "assistantassistant", ""]))) if index else ""
        )
        kind = draw(st.sampled_from(["analysis", "final", "preamble", "unknown", "none", "call", "builtin"]))
        body = draw(WORDS)
        if kind in ("call", "builtin"):
            name = draw(st.sampled_from(["weather", "python", "nobodys"])) if kind == "call" else ""
            to = {"": "to=browser.search", "python": draw(st.sampled_from(["to=python", "to=functions.python"]))}.get(
                name, f"to=functions.{name}"
            )
            channel = draw(st.sampled_from(["commentary", "analysis"]))
            type = draw(st.sampled_from(["", " json", "<|constrain|>json", " <|constrain|>json", " code"]))
            header = draw(
                st.sampled_from(
                    [f" {to}<|channel|>{channel}{type}", f"<|channel|>{channel} {to}{type}", f" {to}{type}"]
                )
            )
            body = json.dumps(draw(JSON), ensure_ascii=False) if kind == "call" else body
            calls += [(name, body)] if kind == "call" else []
            reasoning += [body] if kind == "builtin" else []
        else:
            header = {"preamble": "<|channel|>commentary", "unknown": "<|channel|>news", "none": ""}.get(
                kind, f"<|channel|>{kind}"
            ) + draw(st.sampled_from(["", " "]))
            (reasoning if kind == "analysis" else content).append(body)
        # A message that has no end ends where the next header begins.
        end = draw(st.sampled_from(["<|end|>", "<|end|>", ""]))
        text += f"{header}<|message|>{body}" + (end + draw(space) if end else "")
    last = draw(st.sampled_from(["", "<|return|>", "<|end|>"]))
    return text + last, ("\n\n".join(reasoning), "\n\n".join(content), calls)


@settings(deadline=None)
@given(turns(), st.lists(st.integers(0, 1000), max_size=8))
def test_turns_however_they_are_cut(turn: tuple[str, Read], places: list[int]) -> None:
    text, wanted = turn
    assert read([text]) == wanted
    assert read(cut(text, places)) == wanted
    assert read(list(text)) == wanted


CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
ROME = ("weather", '{"city": "Rome"}')
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|>" + FINAL + "4<|return|>", ("Hm.", "4", [])),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + CALL + "<|call|>", ("Hm.", "", [ROME])),
        (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}', ("", "", [ROME])),
        ("<|channel|>analysis to=functions.weather code<|message|>{}<|call|>", ("", "", [("weather", "{}")])),
        # What the model invents behind a call is not its turn.
        (CALL + "<|call|><|start|>functions.weather to=assistant<|message|>Sun<|end|>" + FINAL, ("", "", [ROME])),
        (CALL + "<|end|><|start|>assistant" + CALL + "<|call|>", ("", "", [ROME, ROME])),
        (CALL + FINAL + "4", ("", "4", [ROME])),
        (CALL + "<|end|> 4", ("", " 4", [ROME])),
        # A name without its prefix, one of nobody's, and tools that were not offered.
        ("<|channel|>commentary to=weather<|message|>{}", ("", "", [("weather", "{}")])),
        ("<|channel|>commentary to=functions.nobodys<|message|>{}", ("", "", [("nobodys", "{}")])),
        ("<|channel|>commentary to=functions.odd<|message|>{}", ("", "", [("functions.odd", "{}")])),
        ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>more", ("{}", "", [])),
        ("<|channel|>commentary to=browser.search<|message|>{}<|end|>" + FINAL + "4", ("{}", "4", [])),
        ("<|channel|>commentary to=functions.<|message|>{}", ("{}", "", [])),
        ("<|channel|>final to=user<|message|>4", ("", "4", [])),
        ("<|channel|>commentary to=user<|message|>4", ("", "4", [])),
        (" to=assistant<|channel|>commentary<|message|>4", ("", "4", [])),
        ("<|channel|>analysis to=assistant<|message|>4", ("4", "", [])),
        ("<|channel|>commentary\nto=functions.weather\n<|constrain|>json<|message|>{}", ("", "", [("weather", "{}")])),
        ('<|channel|>commentary to=weather<|message|>\n{"a": "<|end|>"}', ("", "", [("weather", '\n{"a": "<|end|>"}')])),
        # Messages of one kind.
        ("<|channel|>commentary<|message|>Let me see.<|end|>" + FINAL + "4", ("", "Let me see.\n\n4", [])),
        ("<|channel|>final<|message|><|end|>" + FINAL + "4", ("", "4", [])),
        # Channels that are missing or misspelt.
        ("Plain.", ("", "Plain.", [])),
        ("  to do: <b>", ("", "  to do: <b>", [])),
        ("to", ("", "to", [])),
        ("", ("", "", [])),
        ("<|message|>4", ("", "4", [])),
        ("Well, <|channel|>analysis<|message|>Hm.", ("Hm.", "Well, ", [])),
        ("<|channel|>––commentary<|message|>a", ("", "a", [])),
        ("<|channel|>analysis<|channel|>final<|message|>a", ("", "a", [])),
        ("<|channel|>commentaryto=functions.weather<|message|>{}", ("", "", [("weather", "{}")])),
        ("to<|channel|>final<|message|>4", ("", "to\n\n4", [])),
        ("to<|end|>", ("", "to", [])),
        ("<|constrain|>json<|message|>4", ("", "4", [])),
        ("<|channel|>analysis<|message|>Hm.<|end|><|constrain|>json<|message|>4", ("Hm.", "4", [])),
        # Cut short.
        ("<|channel|>analysis<|message|>Hm", ("Hm", "", [])),
        (CALL[:-5], ("", "", [("weather", '{"city": "R')])),
        *[(CALL[:size], ("", "", [])) for size in (11, 15, 25, 40, 56, 58, 60)],
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", ("Hm.", "", [])),
        ("<|channel|>final<|message|>4<|end|>\n", ("", "4", [])),
        ("<|channel|>final<|message|>4<|en", ("", "4<|en", [])),
        # Markers that are text.
        ("`<|end|>` ends, `<|start|>` begins.", ("", "`<|end|>` ends, `<|start|>` begins.", [])),
        ("<|channel|>analysis<|message|>The <|end|> marker.<|end|>", ("The <|end|> marker.", "", [])),
        ("Markers:\n<|channel|>\n<|message|>\n<|call|> ends.", ("", "Markers:\n\n\n\n<|call|> ends.", [])),
        ("<|channel|> is the first one", ("", "<|channel|> is the first one", [])),
        ("<|channel|>final answers are shown", ("", "<|channel|>final answers are shown", [])),
        ("<|start|>begins", ("", "<|start|>begins", [])),
        ("a<|channel|>" + "b" * 500 + "<|message|>", ("", "a<|channel|>" + "b" * 500 + "<|message|>", [])),
        ("a<|constrain|>b<|message|>c", ("", "a<|constrain|>b<|message|>c", [])),
        ("<|start|>assistant<|end|>" + FINAL + "4", ("", "<|start|>assistant\n\n4", [])),
        # No JSON: a quote that is never closed takes what follows up to a line's end.
        (CALL[:-16] + '{"a\n<|end|>' + FINAL + "4", ("", "4", [("weather", '{"a\n')])),
        ("<|channel|>analysis to=python<|message|>print('\"')<|end|>" + FINAL + "4", ("", "4", [("python", "print('\"')")])),
    ],
)  # fmt: skip
def test_examples(text: str, wanted: Read) -> None:
    assert read([text]) == wanted
    assert read(list(text)) == wanted


def test_no_tools_no_calls() -> None:
    """What goes to a tool that was not offered is no answer either."""
    assert read([CALL + "<|call|>"], None) == ('{"city": "Rome"}', "", [])
    assert read([CALL], []) == ("", "", [ROME])


def test_names_with_the_prefix() -> None:
    """The prefix is the format's if both names are there."""
    for to, name in (("functions.odd", "odd"), ("functions.functions.odd", "functions.odd"), ("odd", "odd")):
        assert read([f"<|channel|>commentary to={to}<|message|>{{}}"], [*TOOLS, tool("odd")])[2] == [(name, "{}")]


def test_a_prompt_that_ends_inside_of_the_reasoning() -> None:
    assert in_reasoning("<|start|>assistant<|channel|>analysis<|message|>")
    assert not in_reasoning("<|start|>assistant<|channel|>final<|message|>")
    assert not in_reasoning("<|start|>assistant")
    assert read(["Hm.<|end|>" + FINAL + "4"], inside=True) == ("Hm.", "4", [])


# -- any text --------------------------------------------------------------------------------------

FRAGMENTS = (
    *MARKERS, *MARKERS, "<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final", " to=python",
    " to=functions.weather", "to=", "json", " ", "\n", "a", "word", "é😀", "<", "<|", "|>", "`", '"', "\\", "{", '{"a": "', '"}', "to",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)

END = r"(?:<\|(?:end|return)\|>\s*)"
HEADER = r"(?:<\|start\|>|<\|channel\|>)(?:[\w \t\r\n.:=/–—-]|<\|(?:start|channel)\|>)*"
BETWEEN = re.compile(rf"(?:{END}*(?P<header>{HEADER})|{END}+)<\|message\|>")


def naive(text: str) -> Read:
    """All at once, of a text that begins with reasoning, without calls, and does not end between
    messages.
    """
    texts: dict[str, list[str]] = {"analysis": [], "final": []}
    kind, at = "analysis", 0
    for found in BETWEEN.finditer(text):
        texts[kind].append(text[at : found.start()])
        at, header = found.end(), found["header"] or ""
        to = "to=" in header and re.search(r"to=\S", re.sub(r"<\|\w+\|>", " ", header))
        last = re.search(r"(?:(?!to=)\w)+", header.rpartition("<|channel|>")[2]) if "<|channel|>" in header else None
        channel = last.group() if last else ""
        kind = "analysis" if channel == "analysis" or (to and channel != "final") else "final"
    texts[kind].append(text[at:])
    reasoning, content = ("\n\n".join(filter(None, parts)) for parts in texts.values())
    return reasoning, content, []


@settings(max_examples=examples(66, 200), deadline=None)
@given(st.lists(st.sampled_from([one for one in FRAGMENTS if one not in ("<|call|>", "<|constrain|>")]), max_size=14))
@example(["<|end|>", " ", "<|end|>", "<|message|>", "a", "<|end|>", "`", "<|start|>", "<|message|>"])
def test_texts_read_all_at_once(fragments: list[str]) -> None:
    text = "".join(fragments) + "!"
    assert read([text], None, inside=True) == naive(text)


@settings(deadline=None)
@given(TEXTS, st.booleans())
def test_nothing_is_lost(text: str, inside: bool) -> None:
    """No header has such a character, so each that is not behind the end of the turn is text."""
    reasoning, content, calls = read([text], TOOLS, inside=inside)
    kept = reasoning + content + "".join(arguments for _, arguments in calls)
    assert kept.count("😀") >= text.partition("<|call|>")[0].count("😀")


@settings(max_examples=examples(66, 200), deadline=None)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
@example("<|channel|>", [5], False, False)
@example('<|channel|> to=functions.weather<|message|>{"\\<|end|>"<|end|>', [], True, False)
def test_any_text_however_it_is_cut(text: str, places: list[int], tools: bool, inside: bool) -> None:
    offered = TOOLS if tools else None
    whole = read([text], offered, inside=inside)
    assert read(cut(text, places), offered, inside=inside) == whole
    assert read(list(text), offered, inside=inside) == whole


@pytest.mark.parametrize(
    ("begin", "body"),
    [
        ("", "word "),
        ("", " "),
        ("", "<"),
        ("<|channel|>analysis<|message|>", "<|end|>\n"),
        ("<|channel|>analysis<|message|><|end|>", "\n"),
        ("", "<|start|>"),
        ("", "<|channel|>a"),
        ("", "<|end|>"),
        ("<|channel|>analysis to=weather<|message|>", '{"a": "\\"<|end|>"}'),
        ("<|channel|>analysis to=weather<|message|>", " "),
        ("", "<|channel|>final<|message|>a<|end|>"),
    ],
)
@pytest.mark.slow
def test_time_is_linear(begin: str, body: str) -> None:
    def seconds(size: int) -> float:
        text = begin + body * (size // len(body))
        best = float("inf")
        for _ in range(3):
            reader = HarmonyReader(TOOLS)
            start = time.process_time()
            for char in text:
                reader.feed(char)
            reader.finish()
            best = min(best, time.process_time() - start)
        return best

    # Eight times the text: 8 if linear, 64 if quadratic.
    assert seconds(12_000) < 24 * seconds(1_500)


def test_all_is_streamed_as_it_comes() -> None:
    reader = HarmonyReader(TOOLS)

    def fed(text: str) -> list[Any]:
        return reader.feed(text)

    assert fed("<|channel|>") == fed("analysis") == []
    assert fed("<|message|>") == []
    assert fed("Hm") == [Delta(reasoning="Hm")]
    assert fed(" <") == [Delta(reasoning=" ")]
    assert fed("b>.") == [Delta(reasoning="<b>.")]
    assert (
        fed("<|end|>")
        == fed("<|start|>")
        == fed("assistant")
        == fed("<|channel|>")
        == fed("commentary to=weather")
        == []
    )
    assert fed("<|message|>") == [Delta(index=0, name="weather")]
    assert fed('{"ci') == [Delta(index=0, arguments='{"ci')]
    assert fed('ty": 1}') == [Delta(index=0, arguments='ty": 1}')]
    assert fed("<|end|>") == fed(FINAL) == []
    assert fed("Yes") == [Delta(content="Yes")]
    assert reader.finish() == []
    for call in (reader.finish, lambda: reader.feed("a")):
        with pytest.raises(FailedPrecondition, match="finished"):
            call()
    plain = HarmonyReader()
    assert plain.feed("T") == [Delta(content="T")]


# -- which models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "wanted"), [(TEMPLATE, True), ("<|im_start|>{{ messages }}", False), ("<|channel>thought", False)]
)
def test_the_template_tells(template: str, wanted: bool) -> None:
    assert is_harmony(template) is wanted


def test_messages() -> None:
    format = MessageFormat(harmony=True, tools=TOOLS, one_call=True)
    text = "<|channel|>analysis<|message|>Hm.<|end|>" + CALL + "<|end|>" + CALL + "<|end|>" + FINAL + "Yes."
    for pieces in ([text], list(text)):
        reader = MessageReader(format)
        message = message_of([*map(reader.feed, pieces), reader.finish()])
        assert reader.calls_are_whole
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        (call,) = message["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harmonic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with gpt-oss's format, of whose special tokens three are in the format, and EOS is
    another.
    """
    folder: Path = tmp_path_factory.mktemp("models") / "harmonic"
    shallow_copy(folder)
    names = {
        "<|end|>": "<|endoftext|>",
        "<|pad|>": "<|channel|>",
        "<|user|>": "<|call|>",
        "<|assistant|>": "<|return|>",
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in names.items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    opened = "{% if thinking %}<|channel|>analysis<|message|>{% endif %}"
    strict = (
        "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('channel tags in the content') }}"
        "{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(
        strict + TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}" + opened
    )
    llm = AsyncLLM(folder, **OPTIONS)
    with serving(llm) as found:
        yield found
    asyncio.run(llm.close())


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``says(text)``: the model answers with that text."""
    reading = chat._reading

    def say(text: str) -> None:
        form = {"structured_outputs": {"choice": [text]}}

        def forced(*given: Any) -> Any:
            format, params = reading(*given)
            return format, params.replace(**form)

        monkeypatch.setattr(chat, "_reading", forced)

    return say


def test_a_plain_chat(harmonic: Served, says: Callable[[str], None]) -> None:
    says("<|channel|>analysis<|message|>Hm.<|end|>" + FINAL + "Yes.")
    body = {"max_tokens": 300}
    (found,) = ask(harmonic.client, **body)["choices"]
    assert found["message"] == {
        "role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "Hm."
    }  # fmt: skip
    assert found["finish_reason"] == "stop"
    other = streamed(harmonic.client, **body)[0]
    assert other["message"] == found["message"]
    assert len([one for one in other["deltas"] if "reasoning_content" in one]) > 1
    cut = ask(harmonic.client, max_tokens=40)["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] == ""
    says("Hm.<|end|>" + FINAL + "Yes.")
    (found,) = ask(harmonic.client, **body, chat_template_kwargs={"thinking": True})["choices"]
    assert (found["message"]["reasoning_content"], found["message"]["content"]) == ("Hm.", "Yes.")


def test_calls(harmonic: Served, says: Callable[[str], None]) -> None:
    says("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + CALL)
    body = {"tools": TOOLS, "max_tokens": 300}
    (found,) = ask(harmonic.client, **body)["choices"]
    assert found["finish_reason"] == "tool_calls"
    assert (found["message"]["reasoning_content"], found["message"]["content"]) == ("Hm.", None)
    (call,) = found["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    other = streamed(harmonic.client, **body)[0]
    assert same(other["message"], found["message"])
    assert other["finish_reason"] == "tool_calls"
    parts = [one["tool_calls"][0]["function"]["arguments"] for one in other["deltas"] if "tool_calls" in one]
    assert len([part for part in parts if part]) > 1, "arguments are given as they are written"
    none = ask(harmonic.client, **body, tool_choice="none")["choices"][0]
    assert none["finish_reason"] == "stop"
    assert "tool_calls" not in none["message"]


def test_a_session(harmonic: Served, says: Callable[[str], None]) -> None:
    says("<|channel|>analysis<|message|>Hm.<|end|>" + FINAL + "Yes.")
    name = harmonic.client.post("/v1/sessions", json={}).json()["id"]
    message = ask(harmonic.client, session_id=name, max_tokens=300)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    # The next turn's template gets the answer alone: that of gpt-oss refuses messages that hold
    # markers.
    says(FINAL + "No.")
    message = ask(harmonic.client, session_id=name, max_tokens=300)["choices"][0]["message"]
    assert message["content"] == "No."
    text = harmonic.client.get(f"/v1/sessions/{name}").json()["text"]
    assert text.count("Yes.") == text.count("No.") == 1
    assert "Hm." not in text
    harmonic.client.delete(f"/v1/sessions/{name}")


def test_special_tokens_are_seen_and_end_the_turn(harmonic: Served) -> None:
    """``<|channel|>`` is in the text, and begins a header; ``<|call|>`` and ``<|return|>`` end it,
    though they are no EOS.
    """
    client: httpx.Client = harmonic.client
    greedy = {"temperature": 0, "max_tokens": 9}
    (found,) = ask(client, temperature=0, max_tokens=60, logit_bias={"1": 100})["choices"]
    assert found["message"]["content"] == "<|channel|>" * 37, "what is too long for a header is text"
    for token in (2, 3):
        (found,) = ask(client, **greedy, logit_bias={str(token): 100}, min_tokens=2)["choices"]
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", token)
        assert "<|" not in found["message"]["content"]
        (found,) = ask(client, **greedy, logit_bias={str(token): 100}, ignore_eos=True)["choices"]
        assert found["finish_reason"] == "length"
    (found,) = ask(client, **greedy, logit_bias={"2": 100}, min_tokens=2, stop_token_ids=[5])["choices"]
    assert found["stop_reason"] == 2, "beside the request's own"


def test_a_form_is_the_whole_text(harmonic: Served) -> None:
    text = "<|channel|>final<|message|>plain"
    message = ask(harmonic.client, structured_outputs={"choice": [text]}, max_tokens=99)["choices"][0]["message"]
    assert message["content"] == text
    cut = ask(harmonic.client, tools=[tool("weather")], tool_choice="required", max_tokens=1)["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", ""), "its header is no content"
    forced = ask(harmonic.client, tools=[tool("weather")], tool_choice="required", max_tokens=200)["choices"][0]
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert refused(harmonic.client, tools=TOOLS, response_format={"type": "json_object"})["param"] == "response_format"
