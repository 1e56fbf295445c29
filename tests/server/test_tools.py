"""Tool calls in texts: against messages written by other code, against Python's JSON, and streams
against ``parse``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import llguidance
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.server.tools.reader import MAX_DEPTH, Malformed, Reader, ToolCall
from quire.server.tools.tools import StreamingToolParser, ToolFormat, forced_format, parser_for, schema_for

NAMES = (
    "hermes",
    "granite",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "kimi_k2",
    "qwen3_coder",
    "glm45",
    "lfm2",
    "cohere",
)
BLOCK, BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
Calls = list[tuple[str, dict[str, Any]]]


def format_of(name: str) -> ToolFormat:
    format = parser_for({}, None, name)
    assert format is not None
    return format


def every_format() -> list[ToolFormat]:
    named = {"type": "function", "function": {"name": "f"}}
    return [*map(format_of, NAMES), forced_format("required"), forced_format(named)]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedMessage:
    """A message and the calls in it."""

    content: str | None
    """The text around the calls; None if there are calls only."""
    calls: tuple[ToolCall, ...] = ()


def parsed(format: ToolFormat, text: str, tools: Any = None) -> ParsedMessage:
    return streamed(format, [text], tools)


def streamed(format: ToolFormat, pieces: list[str], tools: Any = None) -> ParsedMessage:
    parser = StreamingToolParser(format, tools)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    names: list[str] = []
    arguments: list[str] = []
    content = ""
    for delta in deltas:
        if delta.index is None:
            assert delta.content
            assert delta.name is None
            assert not delta.arguments
            content += delta.content
            continue
        assert not delta.content
        if delta.name is not None:
            assert delta.index == len(names)
            assert not delta.arguments
            names.append(delta.name)
            arguments.append("")
        else:
            assert delta.arguments
        assert delta.index == len(names) - 1
        arguments[-1] += delta.arguments
    calls = tuple(ToolCall(name=name, arguments=text) for name, text in zip(names, arguments, strict=True))
    return ParsedMessage(content=None if calls and not content else content, calls=calls)


# The messages that the chat templates write, written here in another way.
def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=len(json.dumps(value)) % 2 == 0)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Calls) -> str:
    return "".join(f"\n<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def granite(calls: Calls) -> str:
    return "<|tool_call|>" + dumps([{"arguments": a, "name": n} for n, a in calls])


def llama(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls)


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": n, "arguments": a, "id": "abcdefghi"} for n, a in calls])


def mistral_args(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def mistral_ids(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]abcdefghi[ARGS]{dumps(a)}" for n, a in calls)


def deepseek(calls: Calls) -> str:
    each = [f"{CALL}function{SEP}{n}\n```json\n{dumps(a)}\n```{CALL_END}" for n, a in calls]
    return BLOCK + "\n".join(each) + BLOCK_END


def deepseek_v31(calls: Calls) -> str:
    return BLOCK + "".join(f"{CALL}{n}{SEP}{dumps(a)}{CALL_END}" for n, a in calls) + BLOCK_END


def kimi(calls: Calls) -> str:
    each = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def qwen_coder(calls: Calls) -> str:
    written = ""
    for name, values in calls:
        each = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in values.items())
        written += f"\n<tool_call>\n<function={name}>\n{each}</function>\n</tool_call>"
    return written


def glm(calls: Calls) -> str:
    written = ""
    for name, values in calls:
        each = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{bare(v)}</arg_value>\n" for k, v in values.items())
        written += f"\n<tool_call>{name}\n{each}</tool_call>"
    return written


def lfm2(calls: Calls) -> str:
    each = [f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls]
    return f"<|tool_call_start|>[{', '.join(each)}]<|tool_call_end|>"


def lfm2_json(calls: Calls) -> str:
    return f"<|tool_call_start|>{dumps([{'name': n, 'arguments': a} for n, a in calls])}<|tool_call_end|>"


def cohere(calls: Calls) -> str:
    each = [{"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(map(dumps, each)) + "\n]<|END_ACTION|>"


WRITERS: dict[Callable[[Calls], str], str] = {
    hermes: "hermes",
    granite: "granite",
    llama: "llama3_json",
    mistral: "mistral",
    mistral_args: "mistral",
    mistral_ids: "mistral",
    deepseek: "deepseek_v3",
    deepseek_v31: "deepseek_v3",
    kimi: "kimi_k2",
    qwen_coder: "qwen3_coder",
    glm: "glm45",
    lfm2: "lfm2",
    lfm2_json: "lfm2",
    cohere: "cohere",
}
TRANSLATED = (qwen_coder, glm, lfm2)
"""Of their arguments the text is not JSON."""
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|tool_call_end|>",
    "<|START_RESPONSE|>",
    BLOCK,
    CALL_END,
    "```",
    '"}',
    "\\",
    "\n",
)
# Values that are bare text must not hold the tags that end them; that is all that their formats
# cannot write.
STRINGS = st.lists(st.sampled_from([*MARKERS, "a", "é", "😀", " ", "1"]) | st.text(max_size=3), max_size=4).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z_$é]{1,6}", fullmatch=True)
CALLS = st.lists(
    st.tuples(st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True), st.dictionaries(KEYS, JSON, max_size=3)),
    min_size=1,
    max_size=3,
)
CONTENTS = st.sampled_from(["", "Let me look.", " One <b> {x}\n two; [T", "😀 <tool\n<", "Sure:\n\n```json\n{}\n```"])


def kind(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def tools_of(calls: Calls) -> list[dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = {}
    for name, values in calls:
        for key, value in values.items():
            schemas.setdefault(name, {})[key] = {"type": kind(value)}
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": each}}}
        for name, each in schemas.items()
    ]


@pytest.mark.turns(2)
@pytest.mark.parametrize("write", list(WRITERS), ids=lambda write: write.__name__)
@settings(max_examples=examples(12, 100), deadline=None)
@given(content=CONTENTS, calls=CALLS, places=st.lists(st.integers(0, 2000), max_size=12))
def test_what_templates_write(write: Callable[[Calls], str], content: str, calls: Calls, places: list[int]) -> None:
    format = format_of(WRITERS[write])
    if write in (qwen_coder, glm):
        assume(len({name for name, _ in calls}) == len(calls))
        assume(not any("</" in bare(value) for _, values in calls for value in values.values()))
    text, tools = content + write(calls), tools_of(calls)
    message = parsed(format, text, tools)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert message.content == (content.rstrip() or None)
    if write not in TRANSLATED:
        assert all(call.arguments in text for call in message.calls)
    assert streamed(format, cut(text, places), tools) == message
    assert streamed(format, list(text), tools) == message


@pytest.mark.turns(2)
@pytest.mark.parametrize("write", list(WRITERS), ids=lambda write: write.__name__)
def test_a_call_that_is_cut_short_stays_one(write: Callable[[Calls], str]) -> None:
    format = format_of(WRITERS[write])
    calls: Calls = [("find", {"q": 'a </b> "c\\ 😀', "n": {"m": [1, 2.5, None]}})]
    text = "Well. " + write(calls)
    (whole,) = parsed(format, text).calls
    seen: list[bool] = []
    for size in range(len(text) + 1):
        message = parsed(format, text[:size])
        assert streamed(format, list(text[:size])) == message
        seen.append(bool(message.calls))
        if not message.calls:
            assert message == ParsedMessage(content=text[:size])
            continue
        (call,) = message.calls
        assert call.name == "find"
        assert message.content is not None
        assert message.content.startswith("Well.")
        if write in TRANSLATED:
            continue
        begin = text.index(whole.arguments)
        end = begin + len(whole.arguments)
        # Exactly from the first character on, and every one of them.
        assert size > begin
        assert call.arguments == text[begin : min(size, end)]
        if size <= end:
            assert message.content == "Well."
        else:
            assert text[:size].rstrip().endswith(message.content.removeprefix("Well.").lstrip())
    # Once there is a call it stays.
    assert seen == sorted(seen)
    if write is granite:  # whose arguments come before the name
        assert seen.index(True) == text.index("}]") + 1
    elif write in TRANSLATED:
        assert seen[text.index("find") + 20]
    else:
        assert seen.index(True) == text.index(whole.arguments) + 1


FRAGMENTS = [
    # Calls that have begun, which pieces in any order seldom make.
    "<tool_call>f<arg_key>k</arg_key><arg_value>", "<function=f><parameter=x>", f"{CALL}f{SEP}", f'{CALL}f{SEP}{{"a": ', "<|tool_call_start|>[f(a=",
    *MARKERS, SEP, CALL, BLOCK_END, "<|tool_call|>", "<function=f>", "<function=", "<parameter=x>", "</parameter>", "</function>",
    "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>", "[CALL_ID]", "```json\n", '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "parameters": {}}', '{"name": "', '{"arguments": {"a": 1}, "name": "f"}', '"arguments": ', '{"tool_name": "f", "parameters": ',
    "<|START_ACTION|>", "<|END_ACTION|>", "<|END_RESPONSE|>", "<|tool_call_start|>[", "f(a='", "f(", "b=[1, ", "')", ")]", "'", "True", '{"a": "<tool_call>', '{"a": [1, {"b": "\\u00e9\\ud83d\\ude00"}]}', "{", "}",
    "[", "]", ",", ";", ":", '"', "f", "name", " ", "\n", "1.5e3", "true", "tru", "\\u12", "\ud83d", "é", "<", "<tool", "｜",
]  # fmt: skip


_OBJECTS = llguidance.LLMatcher.grammar_from_json_schema({"type": "object"})


def begins_an_object(text: str) -> bool:
    """Whether a JSON object can begin with ``text``, or is ``text``."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), _OBJECTS)
    # llguidance knows few escapes and no DEL, and half a surrogate pair cannot be encoded.
    text = re.sub(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt]|u?[0-9a-fA-F]{0,3}$)|\x7f', "x", text)
    data = list(text.encode(errors="replace"))
    return bool(matcher.try_consume_tokens(data) == len(data))


def without_wrappers(format: ToolFormat, text: str) -> str:
    for wrapper in format.wrappers:
        text = text.replace(wrapper, "")
    return text


SOUP = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@settings(max_examples=examples(60, 400), deadline=None)
@given(SOUP, st.lists(st.integers(0, 1000), max_size=10))
def test_any_text_however_it_is_cut(text: str, places: list[int]) -> None:
    for format in every_format():
        message = parsed(format, text)
        assert streamed(format, cut(text, places)) == message
        assert streamed(format, list(text)) == message
        if not message.calls:
            assert message.content == ("" if format.only_calls else without_wrappers(format, text))
        for call in message.calls:
            assert call.name
            if format.name in ("hermes", "granite", "llama3_json", "mistral", "cohere", "required", "named"):
                assert call.arguments == "{}" or call.arguments in text, "as they are written"
            # In every format: the beginning of an object, and of a call that turned malformed the
            # rest as it is written.
            written = next(k for k in range(len(call.arguments) + 1) if call.arguments[k:] in text)
            assert begins_an_object(call.arguments[:written])


@settings(max_examples=examples(100, 300), deadline=None)
@given(SOUP)
def test_what_is_around_a_call_does_not_change_it(text: str) -> None:
    format = format_of("hermes")
    assume("<tool_call>" not in text)
    call = hermes([("f", {"a": "</tool_call>"})])
    message = parsed(format, text + call + text)
    assert [each.name for each in message.calls] == ["f"]
    assert message.content == ((text + "\n" + text).rstrip() or None)


def strict(text: str) -> int | None:
    """Where the JSON value at the beginning of ``text`` ends, as Python reads it."""

    def no(name: str) -> None:
        raise ValueError(name)

    try:
        return json.JSONDecoder(parse_constant=no).raw_decode(text)[1]
    except ValueError:
        return None


def read_json(text: str, pieces: list[str]) -> str | None:
    reader = Reader(lambda name, arguments: None)
    steps = reader.json()
    try:
        for piece in pieces:
            reader.push(piece)
            next(steps)
        reader.closed = True
        next(steps)
    except StopIteration as stop:
        return str(stop.value)
    except Malformed:
        return None
    raise AssertionError("waits for more after the end")


JSON_SOUP = st.lists(
    st.sampled_from([*'{}[]:,"\\/u0123aeE+-. \n\t\x01', '"a"', '"b": ', "true", "null", "-1.5e+3", "NaN", "[1, ", '{"'])
)


@settings(max_examples=examples(50, 500), deadline=None)
@given(st.sampled_from("{["), JSON_SOUP | JSON.map(json.dumps).map(list), st.lists(st.integers(0, 300), max_size=6))
def test_json_is_what_python_reads(opener: str, parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    text = text if text[:1] in ("{", "[") else opener + text
    end = strict(text)
    expected = None if end is None else text[:end]
    assert read_json(text, [text]) == expected
    assert read_json(text, cut(text, places)) == expected


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "Hi", "Hi", []),
        ("hermes", "", "", []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": { "a" :1.0}}', None, [("f", '{ "a" :1.0}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_', None, [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, [("f", '{"a": NaN}}')]),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", ..., []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', None, [("f", '{"a": "x\ny"}')]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"re":"\\d+","n":1}}</tool_call>', None, [("f", '{"re":"\\d+","n":1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "it\\\'s \\u12"}}</tool_call>', None, [("f", '{"a": "it\\\'s \\u12"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"re": "a" b"}}</tool_call> Hi', " Hi", [("f", '{"re": "a" b"}}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "p("}")"}}</tool_call>', None, [("f", '{"a": "p("}")"}}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', None, [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1', None, [("f", '{"a" 1')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call><tool_call>{"name": "g"}</tool_call>', None, [("f", '{"a": 1,}}'), ("g", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}x</tool_call>', "x</tool_call>", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}x</tool_call>', ..., []),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"', ..., []),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}x', ..., []),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f", "parameters": {}}', None, [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}', None, [("g", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "name": "g"}', None, [("f", '{}, "name": "g"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}', None, [("f", '{}, "arguments": {}}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": [1]}', None, [("f", "{}")]),
        ("hermes", '<tool_call>{"n\\u0061me": "f", "arguments" :\n{} }\n', None, [("f", "{}")]),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}] x', " x", [("f", '{"a": 1}'), ("g", "{}")]),
        ("hermes", '<tool_call>[{"name": "f"}, 3]', ", 3]", [("f", "{}")]),
        ("hermes", '<tool_call>[3, {"name": "f"}]', ..., []),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": <tool_call>{"name": "g"}</tool_call>',
            None,
            [("f", '{"a": <tool_call>{"name": "g"}')],
        ),
        ("hermes", "<tool_call>[]</tool_call>", ..., []),
        (
            "hermes",
            '<tool_call>{"name": <tool_call>{"name": "g"}</tool_call>  \nDone. ',
            '<tool_call>{"name":   \nDone.',
            [("g", "{}")],
        ),
        (
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": {{"n": {"9" * 5000}}}}}</tool_call>',
            None,
            [("f", f'{{"n": {"9" * 5000}}}')],
        ),
        ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
        ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', None, [("f", "{}"), ("g", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {}}\n\nDone.', "\n\nDone.", [("f", "{}")]),
        ("llama3_json", '{"name": "Bob", "age": 5}', ..., []),
        ("llama3_json", '{"name": "f", "parameters": {}}<|eot_id|>', None, [("f", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {}} <|eom_id|>x', "x", [("f", "{}")]),
        ("llama3_json", '<|python_tag|>[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]', None, [("f", "{}"), ("g", "{}")]),
        ("llama3_json", 'Write {"name": "f", "parameters": {}}', ..., []),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")', ..., []),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', None, [("f", '{"a": 1}')]),
        ("mistral", "[TOOL_CALLS][]", ..., []),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": ', ', {"name":', [("f", "{}")]),
        ("deepseek_v3", f"{BLOCK}{CALL}f{SEP}{{}}", None, [("f", "{}")]),
        (
            "deepseek_v3",
            f"{BLOCK}{CALL}f{SEP}{{}}{CALL_END}{CALL}g{SEP}{{,{CALL}h{SEP}{{}}{CALL_END}{BLOCK_END}",
            None,
            [("f", "{}"), ("g", f"{{,{CALL}h{SEP}{{}}")],
        ),
        ("deepseek_v3", f"{BLOCK}{CALL}f{SEP}g\n{{}}{CALL_END}", ..., []),
        ("deepseek_v3", f"{CALL}function{SEP}f\n```json\n{{}}\n``{CALL_END}", None, [("f", "{}\n``")]),
        ("qwen3_coder", "<function=f>\n</function>", None, [("f", "{}")]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n\nx\n\n</parameter>\n</function>",
            None,
            [("f", '{"a": 1, "b": "\\nx\\n"}')],
        ),
        ("qwen3_coder", "<function=f><parameter=a>1</function>", None, [("f", '{"a": 1}')]),
        ("qwen3_coder", "<function=f><parameter=a>\n1\n<parameter=b>\nx\n</function>", None, [("f", '{"a": 1, "b": "x"}')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>\n</tool_call> Hi", " Hi", [("f", '{"a": 1}')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>\n", None, [("f", '{"a": 1}')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>x</function></tool_call> Hi", " Hi", [("f", '{"a": 1x</function>')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>12", None, [("f", "<parameter=a>12")]),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>\n</tool_call>", None, [("f", '{"a": 1}')]),
        ("qwen3_coder", "<function=f>\n<parameter=a>1</parameter>\n<param", None, [("f", '{"a": 1\n<param')]),
        ("qwen3_coder", "Write <function=f>, then the parameters.", ..., []),
        ("glm45", "<tool_call>now\n</tool_call>", None, [("now", "{}")]),
        ("glm45", "<tool_call>now\n", None, [("now", "{}")]),
        ("glm45", "<tool_call>now", ..., []),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", None, [("f", '{"a": 1}')]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call> Hi", " Hi", [("f", '{"a": 1x')]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", None, [("f", "<arg_key>a</arg_key>1")]),
        ("lfm2", "<|tool_call_start|>[f()]<|tool_call_end|> Hi", " Hi", [("f", "{}")]),
        ("lfm2", "<|tool_call_start|>[f(a='x', b=[True, {'c': None},]), g(), ]<|tool_call_end|>", ", ]<|tool_call_end|>", [("f", '{"a": "x", "b": [true, {"c": null}]}'), ("g", "{}")]),
        ("lfm2", "<|tool_call_start|>[f(a='x', b=1,)]", None, [("f", '{"a": "x", "b": 1}')]),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", ..., []),
        ("lfm2", '<|tool_call_start|>[f("x")]<|tool_call_end|>', ..., []),
        ("lfm2", "<|tool_call_start|>f(a=1)<|tool_call_end|> Hi", " Hi", [("f", '{"a": 1}')]),
        ("lfm2", '<|tool_call_start|>{"name": "f"}<|tool_call_end|>', None, [("f", "{}")]),
        ("lfm2", "<|tool_call_start|>[f(a='(')')]<|tool_call_end|>", None, [("f", '{"a": "("}\')]')]),
        ("lfm2", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>", None, [("f", '{"a": g())]')]),
        ("lfm2", "<|tool_call_start|>[f(a=1+1)]<|tool_call_end|>", None, [("f", '{"a": 1+1)]')]),
        ("lfm2", "<|tool_call_start|>[f(a='it's')]<|tool_call_end|>", None, [("f", '{"a": "it"s\')]')]),
        ("lfm2", "<|tool_call_start|>[f(a='x\ny'", None, [("f", '{"a": "x\\ny"')]),
        ("lfm2", "<|tool_call_start|>[f", ..., []),
        ("lfm2", "<|tool_call_start|>f()", None, [("f", "{}")]),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", ..., []),
        ("lfm2", '<|tool_call_start|>[{"name": "f"}]', None, [("f", "{}")]),
        ("cohere", "<|START_RESPONSE|>Hi <|x|>.<|END_RESPONSE|>", "Hi <|x|>.", []),
        ("cohere", "<|START_TEXT|>Hi<|END_TEXT|>", "Hi", []),
        ("cohere", "<|START_RESPONSE|>Hi<|END_RESPO", "Hi<|END_RESPO", []),
        ("cohere", '<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>\n', None, [("f", "{}")]),
        ("cohere", '<|START_ACTION|>[{"name": "f", "arguments": {}}]<|END_ACTION|>', ..., []),
        (
            "cohere",
            '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "<|END_RESPONSE|>"}}]<|END_ACTION|>',
            None,
            [("f", '{"a": "<|END_RESPONSE|>"}')],
        ),
    ],
)  # fmt: skip
def test_examples(name: str, text: str, content: Any, calls: list[tuple[str, str]]) -> None:
    # Without its mark a call is one of an offered tool.
    offered = [tool("f"), tool("g")] if name == "llama3_json" and "<|python_tag|>" not in text else None
    message = parsed(format_of(name), text, offered)
    assert message.content == (text if content is ... else content)
    assert [(call.name, call.arguments) for call in message.calls] == calls
    assert streamed(format_of(name), list(text), offered) == message


def test_depth_is_limited() -> None:
    def nested(depth: int) -> str:
        return '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"

    assert len(parsed(format_of("hermes"), nested(MAX_DEPTH - 2)).calls) == 1
    for depth in (MAX_DEPTH - 1, 50_000):
        message = parsed(format_of("hermes"), nested(depth))
        written = nested(depth).partition('"arguments": ')[2].removesuffix("</tool_call>")
        assert message == ParsedMessage(content=None, calls=(ToolCall(name="f", arguments=written),))
    # Before a call has begun there is nothing that could stay.
    for depth in (MAX_DEPTH - 1, 50_000):
        text = '<tool_call>{"x": ' + "[" * depth + "]" * depth + ', "name": "f", "arguments": {}}</tool_call>'
        message = parsed(format_of("hermes"), text)
        assert message == (
            ParsedMessage(content=None, calls=(ToolCall(name="f", arguments="{}"),))
            if depth < MAX_DEPTH
            else ParsedMessage(content=text)
        )

    def python(depth: int) -> str:
        return "<|tool_call_start|>[f(a=" + "[" * depth + "]" * depth + ")]"

    assert json.loads(parsed(format_of("lfm2"), python(MAX_DEPTH - 1)).calls[0].arguments)
    (call,) = parsed(format_of("lfm2"), python(50_000)).calls
    assert call.arguments == '{"a": ' + "[" * 50_000 + "]" * 50_000 + ")]"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "object"}, "{'a': [1, None]}", {"a": [1, None]}),
        ({"type": "array"}, "['x', True]", ["x", True]),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "array"}, "['x'] + y", "['x'] + y"),
        ({"type": "object"}, "None", None),
        ({"type": "object"}, "['x']", "['x']"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, "[1, 2]", "[1, 2]"),
        ({"type": "object"}, "[" * 50_000, "[" * 50_000),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "12", 12),
        ({}, "twelve", "twelve"),
        ("odd", "NaN", "NaN"),
    ],
)
def test_bare_values_get_the_types_of_the_schema(schema: Any, text: str, value: Any) -> None:
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    message = parsed(
        format_of("qwen3_coder"),
        f"<function=f><parameter=x>{text}</parameter></function>",
        [{"type": "function", "function": function}],
    )
    assert json.loads(message.calls[0].arguments) == {"x": value}
    assert type(json.loads(message.calls[0].arguments)["x"]) is type(value)


def test_json_that_names_no_offered_tool_is_an_answer() -> None:
    tools, format = [tool("f")], format_of("llama3_json")
    for text in ('{"name": "Bob", "parameters": {"a": 1}}', '[{"name": "Bob", "parameters": {}}]'):
        for pieces in ([text], list(text)):
            assert streamed(format, pieces, tools) == ParsedMessage(content=text)
            assert streamed(format, pieces, []) == ParsedMessage(content=text)
    for text in ('{"name": "f", "parameters": {}}', '<|python_tag|>{"name": "Bob", "parameters": {}}'):
        assert len(streamed(format, list(text), tools).calls) == 1
    assert not parsed(format, '<|python_tag|>[{"name": "Bob", "parameters": {}}]', tools).calls


def test_a_stream_gives_content_and_arguments_as_they_come() -> None:
    parser = StreamingToolParser(format_of("hermes"))

    def feed(text: str) -> list[tuple[int | None, str | None, str]]:
        return [(delta.index, delta.name, delta.arguments) for delta in parser.feed(text)]

    assert [delta.content for delta in parser.feed("Let me <to")] == ["Let me"]
    assert [delta.content for delta in parser.feed("ol up.\n\n<tool_")] == [" <tool up."]
    assert feed('call>{"name": "f", "arguments": ') == []
    assert feed('{"a"') == [(0, "f", ""), (0, None, '{"a"')]
    assert feed(': "') == [(0, None, ': "')]
    assert feed("x \\") == [(0, None, "x ")]
    assert feed("u00e") == []
    assert feed("9 y") == [(0, None, "\\u00e9 y")]
    assert feed('", "b": tr') == [(0, None, '", "b": ')]
    assert feed("ue}") == [(0, None, "true}")]
    assert feed("}</tool_call>") == []
    assert feed('\n<tool_call>{"name": "g"}') == []
    assert feed("</tool_call>") == [(1, "g", ""), (1, None, "{}")]
    assert parser.finish() == []
    for call in (parser.finish, lambda: parser.feed("a")):
        with pytest.raises(FailedPrecondition, match="finished"):
            call()


HOSTILE = {
    "hermes": ["<tool_call>", '<tool_call>{"', '<tool_call>{"a": "\\', "[", "\n", "<tool_cal"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS][[]", "[TOOL_CALLS]f[ARGS]{"],
    "llama3_json": ["<|python_tag|>{", '{"name": "f", "parameters": {}};', " "],
    "deepseek_v3": [BLOCK, CALL + "f" + SEP, CALL],
    "qwen3_coder": ["<tool_call><function=f>", "<function=f><parameter=x>a", "<parameter=x></parameter>"],
    "lfm2": ["<|tool_call_start|>[f(a='", "<|tool_call_start|>[f(a=[", "f(a=1), ", "\\'", "'''"],
    "cohere": ["<|START_ACTION|>[", "<|START_RESPONSE|>", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": '],
    "glm45": ["<tool_call>f", "<arg_key>k</arg_key><arg_value>", "<tool_call>f<arg_key>k</arg_key><arg_value>"],
}


INSIDE = '<tool_call>{"name": "f", "arguments": {"a": [{}, "'
"""The beginning of a call of ``hermes``; others take it for text."""


@pytest.mark.turns(8)
@pytest.mark.parametrize(
    ("name", "unit", "begin"),
    [
        pytest.param(name, unit, begin, marks=pytest.mark.slow if begin and name != "hermes" else ())
        for name, units in HOSTILE.items()
        for unit in units
        for begin in ("", INSIDE)
    ],
)
def test_time_is_linear(name: str, unit: str, begin: str) -> None:
    def seconds(size: int) -> float:
        text, best = begin + unit * (size // len(unit)), float("inf")
        for _ in range(3):
            parser = StreamingToolParser(format_of(name))
            started = time.process_time()
            for char in text:
                parser.feed(char)
            parser.finish()
            best = min(best, time.process_time() - started)
        return best

    # Eight times the text: 8 if linear, 64 if quadratic.
    assert seconds(8_000) < 24 * seconds(1_000)


LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'


@pytest.mark.parametrize(
    ("architecture", "template", "name"),
    [
        ("LlamaForCausalLM", "{{ '<tool_call>' }}", "hermes"),
        ("LlamaForCausalLM", LLAMA, "llama3_json"),
        ("LlamaForCausalLM", "<|python_tag|>", "llama3_json"),
        ("LlamaForCausalLM", "{{ messages }}", None),
        ("LlamaForCausalLM", None, None),
        ("Qwen2ForCausalLM", f"{{{{ '{BLOCK}{CALL}' }}}}", "deepseek_v3"),
        ("Qwen3MoeForCausalLM", "<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ("Qwen3MoeForCausalLM", None, "hermes"),
        ("Qwen3_5ForCausalLM", None, "qwen3_coder"),
        ("MistralForCausalLM", "[TOOL_CALLS]", "mistral"),
        ("DeepseekV3ForCausalLM", "{{ messages }}", "deepseek_v3"),
        ("DeepseekV3ForCausalLM", "<｜DSML｜invoke name=", None),
        ("Glm4MoeLiteForCausalLM", "<tool_call>f<arg_key>k</arg_key><arg_value>", "glm45"),
        ("GraniteForCausalLM", "<|tool_call|>", "granite"),
        ("Cohere2ForCausalLM", "<|START_ACTION|>[", "cohere"),
        ("Cohere2ForCausalLM", None, "cohere"),
        ("Lfm2ForCausalLM", "<|tool_call_start|>[", "lfm2"),
        ("Lfm2ForCausalLM", "List of tools: <|tool_list_start|>[", "lfm2"),
        ("Lfm2MoeForCausalLM", "List of tools: ", "lfm2"),
        ("DeepseekV3ForCausalLM", "<|tool_calls_section_begin|>", "kimi_k2"),
        ("GptOssForCausalLM", "<|channel|>commentary <tool_call>", None),
        ("Unheard", None, None),
    ],
)
def test_the_template_tells_then_the_architecture(architecture: str, template: str | None, name: str | None) -> None:
    format = parser_for({"architectures": [architecture]}, template)
    assert (format and format.name) == name


def test_formats_by_name() -> None:
    for name in NAMES:
        assert format_of(name).name == name
        assert all(parsed(format_of(name), marker).content == marker for marker in format_of(name).markers)
    assert format_of("deepseek_v31").name == "deepseek_v3"
    assert parser_for({}, None) is None
    with pytest.raises(InvalidArgument, match=r"'pythonic'.*hermes.*mistral"):
        parser_for({}, None, "pythonic")


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TREE = {
    "type": "object",
    "properties": {
        "node": {"$ref": "#/$defs/Node"},
        "default": {"$ref": "#/$defs/Leaf"},
        "$ref": {"const": {"$ref": "#/x"}},
    },
    "required": ["node"],
    "additionalProperties": False,
    "$defs": {
        "Leaf": {"type": "integer"},
        "Node": {
            "type": "object",
            "properties": {"value": {"$ref": "#/$defs/Leaf"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["value"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [tool("now"), tool("walk", TREE), tool("find", {"properties": {"q": {"type": "string"}}, "required": ["q"]})]
NAMED = {"type": "function", "function": {"name": "walk"}}


def fits(schema: dict[str, Any], text: str) -> bool:
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(schema)
    )
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def test_required_is_an_array_of_calls() -> None:
    schema = schema_for(TOOLS, "required")
    arguments = '{"node": {"value": 1, "next": {"value": 2}}, "default": 3, "$ref": {"$ref": "#/x"}}'
    text = f'[{{"name": "walk", "parameters": {arguments}}}, {{"name": "find", "parameters": {{"q": "]"}}}}]'
    assert fits(schema, text)
    calls = (ToolCall(name="walk", arguments=arguments), ToolCall(name="find", arguments='{"q": "]"}'))
    assert parsed(forced_format("required"), text) == ParsedMessage(content=None, calls=calls)
    assert streamed(forced_format("required"), list(text)).calls == calls
    first = text.index(', {"name": "find"')
    # What is of no call yet is nowhere.
    assert parsed(forced_format("required"), text[: first + 9]) == ParsedMessage(content=None, calls=calls[:1])
    begun = ToolCall(name="walk", arguments=arguments[:-5])
    at = text.index(arguments)
    assert parsed(forced_format("required"), text[: at + len(arguments) - 5]) == ParsedMessage(
        content=None, calls=(begun,)
    )
    assert parsed(forced_format("required"), text[:at]) == ParsedMessage(content="")
    for wrong in (
        "[]",
        '[{"name": "walk", "parameters": {"node": {"value": "1"}}}]',
        '[{"name": "find", "parameters": {}}]',
        '[{"name": "walk", "parameters": {"node": {"value": 1}, "default": "x"}}]',
        '[{"name": "other", "parameters": {}}]',
        '{"name": "now", "parameters": {}}',
    ):
        assert not fits(schema, wrong)
    assert fits(schema, '[{"name": "now", "parameters": {}}]')


def test_a_named_function_is_its_arguments() -> None:
    schema = schema_for(TOOLS, NAMED)
    text = ' {"node": {"value": 1}}\n'
    assert fits(schema, text.strip())
    assert not fits(schema, '{"node": 1}')
    assert parsed(forced_format(NAMED), text).calls == (ToolCall(name="walk", arguments=text.strip()),)
    whole = ToolCall(name="walk", arguments=text.strip())
    assert parsed(forced_format(NAMED), text + "x") == ParsedMessage(content=None, calls=(whole,))
    for size in range(2, len(text.rstrip())):
        begun = ToolCall(name="walk", arguments=text[:size].lstrip())
        assert parsed(forced_format(NAMED), text[:size]) == ParsedMessage(content=None, calls=(begun,))
        assert streamed(forced_format(NAMED), list(text[:size])).calls == (begun,)
    for odd in ("[]", "", " ", "x"):
        assert parsed(forced_format(NAMED), odd) == ParsedMessage(content="")


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "tools is empty"),
        (TOOLS, "auto", "tool_choice must be .*, got 'auto'"),
        (TOOLS, {"type": "function"}, "tool_choice must be .*, got {"),
        (TOOLS, {"type": "function", "function": {"name": "fly"}}, "'fly'.*now, walk, find"),
        ([tool("now"), tool("a b")], "required", r"tools\.1\.function\.name must be .*, got 'a b'"),
        ([tool("now"), tool("now")], "required", "another tool"),
        ([tool("now", {"type": "string"})], "required", "parameters.type must be 'object', got 'string'"),
    ],
)
def test_what_cannot_be_forced(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        schema_for(tools, choice)
