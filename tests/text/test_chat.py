"""Chat templates render what ``transformers`` renders, on templates in the style of the well-known
models.
"""

from __future__ import annotations

import copy
import enum
import json
import re
from functools import cache
from typing import Any

import pytest
import tokenizers

from quire.base.errors import InvalidArgument
from quire.text.chat_prompts import encode_chat
from quire.text.chat_rendering import render_chat, select_template
from quire.text.tokenizer import Tokenizer
from small_tokenizers import byte_level, saved

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- if tools is not none %}
    {{- "[AVAILABLE_TOOLS] [" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '{"type": "function", "function": {' }}
        {%- for key, val in tool.items() if key != "return" %}
            {%- if val is string %}
                {{- '"' + key + '": "' + val + '"' }}
            {%- else %}
                {{- '"' + key + '": ' + val|tojson }}
            {%- endif %}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "}}" }}
    {%- endfor %}
    {{- "] [/AVAILABLE_TOOLS]" }}
{%- endif %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " }}{%- if loop.last and system_message is defined %}{{- system_message + "\\n\\n" }}{%- endif %}
        {{- message["content"] + "[/INST]" }}
    {%- else %}
        {% generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""

TOOLS_WITH_BREAK = """{%- for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
[{{ message.role }}] {{ message.reasoning_content | default('-') }} {{ message.content | default('none') }}
    {%- for call in message.tool_calls | default([]) %} {{ call.function.arguments.items() | list }}{% endfor %}
{% endfor %}
{{ dict(a=1) | tojson }}{{ documents is none }}{{ thinking_on | default(true) }}
"""

PARTS = """{%- for message in messages %}{{ message.role }}:
    {%- set content = message.content %}
    {%- if content is string %}{{ content }}{% else %}
    {%- for part in content %}<{{ part.text }}>{% endfor %}{% endif %}
{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "tools": TOOLS_WITH_BREAK, "parts": PARTS}

USER = {"role": "user", "content": "  What is <b>2 & 2</b>? 'é' 你好 "}
ASSISTANT = {"role": "assistant", "content": " four ", "reasoning": "two and two"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "<é>", "y": [1, None]}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "adds <é>", "parameters": {"type": "object"}}}]
CHATS = {
    "one": [USER],
    "three": [USER, ASSISTANT, USER],
    "system": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER],
    "call": [USER, CALL, RESULT],
}


@cache
def oracle() -> Any:
    import transformers

    tokenizer = tokenizers.Tokenizer.from_str(saved("byte_level"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "with_tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", TEMPLATES)
def test_renders_as_transformers(style: str, chat: str, prompt: bool, tools: list[Any] | None) -> None:
    messages, extra = copy.deepcopy(CHATS[chat]), {"thinking_on": False, "date_string": "1 May 2026"}
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    before = copy.deepcopy((messages, tools))

    def render() -> str:
        return render_chat(TEMPLATES[style], messages, add_generation_prompt=prompt, tools=tools, **tokens, **extra)

    def by_transformers(messages: list[Any]) -> Any:
        return oracle().apply_chat_template(
            messages, tools, chat_template=TEMPLATES[style], add_generation_prompt=prompt, tokenize=False, **extra
        )

    expected: Any = None
    # A call without a content has an empty one where a template needs it.
    for said in (messages, [{**one, "content": one.get("content") or ""} for one in messages]):
        try:
            expected = by_transformers(said)
            break
        except Exception as error:
            refusal = str(error)
    if expected is None:
        with pytest.raises(InvalidArgument, match=re.escape(refusal)):
            render()
    else:
        assert render() == expected
    assert (messages, tools) == before


def test_most_templates_render_most_chats() -> None:
    # The comparison above also accepts that both sides refuse; these must not.
    for style, chat in [
        ("chatml", "system"),
        ("llama_3", "call"),
        ("mistral", "three"),
        ("tools", "call"),
        ("parts", "one"),
    ]:
        assert render_chat(TEMPLATES[style], CHATS[chat], tools=TOOLS, bos_token="<s>", eos_token="</s>")


def test_strftime_now() -> None:
    assert len(render_chat("{{ strftime_now('%Y-%m-%d') }}", [USER])) == len("2026-01-01")


def test_text_parts() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render_chat(PARTS, [message]) == "user:<a><b>"
    assert "<|im_start|>user\na\nb<|im_end|>" in render_chat(CHATML, [message])
    for loop in ("message['content']", "message.get('content')", "message.content | list", "message.content[1:]"):
        template = "{% for message in messages %}{% for p in LOOP %}{{ p.text }}{% endfor %}{% endfor %}"
        assert render_chat(template.replace("LOOP", loop), [message]) in ("ab", "b")
    held = "{% set body = messages[0].content %}{% for p in body %}[{{ p.text }}]{% endfor %}"
    assert render_chat(held, [message]) == "[a][b]"
    macro = "{% macro show(content) %}{% for p in content %}({{ p.text }}){% endfor %}{% endmacro %}{{ show(messages[0].content) }}"
    assert render_chat(macro, [message]) == "(a)(b)"


def test_arguments_of_tool_calls_as_json_text() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "é"}'}}]}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render_chat(template, [call]) == '{"x": "é"}'
    assert call["tool_calls"][0]["function"]["arguments"] == '{"x": "é"}'  # type: ignore[index]


NO_ARGUMENTS = ['{"city": "Ro', "{", "[1]", '"a"', "{}}", "[" * 5000, "1" * 5000, "{'a': 1}"]


@pytest.mark.parametrize("text", [*NO_ARGUMENTS, *('{"a":' * depth + "1" + "}" * depth for depth in (65, 900, 5000))])
def test_arguments_that_are_no_object_are_taken(text: str) -> None:
    """What a model wrote comes back in the history: as it is, or ``{}`` for whom it cannot be."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    plain = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render_chat(plain, [call]) == text
    assert json.loads(render_chat(f"{plain[:-2]}| tojson }}}}", [call])) == text
    for needs in (f"{plain[:-2]}.items() | list }}}}", f"{plain[:-2]}| dictsort }}}}"):
        assert render_chat(needs, [call]) == "[]"
    only = f"{{% if {plain[2:-2]} is not mapping %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    assert render_chat(only, [call]) == ""
    with pytest.raises(InvalidArgument, match="refused the messages: no"):
        render_chat("{{ raise_exception('no') }}", [call])


@pytest.mark.parametrize("function", [{"arguments": ""}, {"arguments": " \n"}, {"arguments": None}, {}])
def test_no_arguments_are_an_empty_object(function: dict[str, Any]) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}
    for shown in ("{{ C.arguments | tojson }}", "{{ C.arguments }}", "{{ '' + C.arguments }}"):
        assert render_chat(shown.replace("C", "messages[0].tool_calls[0].function"), [call]) == "{}"


@pytest.mark.parametrize("given", ['{"b": 1,"a": "<\\u00e9>"}', {"b": 1, "a": "<é>"}], ids=["text", "object"])
def test_arguments_are_joined_as_text_and_written_and_walked_over_as_an_object(given: Any) -> None:
    text = given if isinstance(given, str) else '{"b": 1, "a": "<é>"}'
    call = {"role": "assistant", "tool_calls": [{"function": {"arguments": given, "name": "f"}}]}
    for joined in ("{{ 'x' + A + 'y' }}", "{{ 'x' ~ A ~ 'y' }}", "x{{ A }}y", "{{ 'x%sy' | format(A) }}"):
        assert render_chat(joined.replace("A", "messages[0].tool_calls[0].function.arguments"), [call]) == f"x{text}y"
    walked = "{% for k, v in A.items() %}{{ k }}{{ v }}{% endfor %}{{ A is mapping }}{{ A.a }}{{ A['b'] + 1 }}"
    found = render_chat(walked.replace("A", "messages[0].tool_calls[0].function.arguments"), [call])
    assert found == "b1a<é>True<é>2"
    whole = render_chat("{{ messages[0].tool_calls[0].function | tojson }}", [call])
    assert whole == '{"name": "f", "arguments": {"b": 1, "a": "<é>"}}'
    with pytest.raises(InvalidArgument, match="failed on the messages: TypeError"):
        render_chat("{{ messages[0].tool_calls[0].function.arguments + 1 }}", [call])


NO_CONTENT: tuple[dict[str, Any], ...] = ({"content": None}, {"content": ""}, {"content": []}, {})


@pytest.mark.parametrize("content", NO_CONTENT)
def test_no_content_beside_calls_is_none_where_a_template_asks(content: dict[str, Any]) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], **content}
    set_first = "{% set content = messages[0].content %}{% if content is none %}no{% else %}{{ content }}{% endif %}"
    for asks in (
        "{% if messages[0]['content'] is none %}no{% else %}{{ messages[0]['content'] }}{% endif %}",
        "{% if messages[0].content == none %}no{% endif %}",
        "{{ 'no' if not messages[0].content is not none else messages[0].content + 'x' }}",
        set_first,
    ):
        assert render_chat(asks, [call]) == "no"
    other = "{% if tools is none %}{{ messages[0].content }}|{{ messages[0].content | default('-', true) }}{% endif %}"
    assert render_chat(other, [call]) == "|-"
    spoken = {**call, "content": "a"}
    assert render_chat(set_first, [spoken]) == "a"
    assert render_chat(set_first, [{"role": "assistant", "content": None}]) == ""


def test_half_a_surrogate_pair_is_escaped_in_json_and_named_elsewhere() -> None:
    half = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": r'{"s": "\ud83d"}'}}]}
    for written in ("A | tojson", "'' + A"):
        template = "{{ " + written.replace("A", "messages[1].tool_calls[0].function.arguments") + " }}"
        assert render_chat(template, [USER, half]) == r'{"s": "\ud83d"}'
    with pytest.raises(InvalidArgument, match=r"messages\.1\.tool_calls has half a surrogate pair"):
        render_chat("{{ messages[1].tool_calls[0].function.arguments.s }}", [USER, half])
    with pytest.raises(InvalidArgument, match=r"messages\.1\.content has half") as caught:
        render_chat(CHATML, [USER, {"role": "user", "content": "\ud83d"}])
    assert caught.value.field == "messages.1.content"
    with pytest.raises(InvalidArgument, match="the prompt has half"):
        render_chat("{{ x }}", [USER], x="\ud83d")


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"role": "assistant", "content": [], "reasoning_content": "Hm."}, ""),
        ({"role": "tool", "tool_call_id": "a", "content": None}, ""),
    ],
)
def test_what_a_server_answered_comes_back(message: dict[str, Any], content: str) -> None:
    shown = "{{ messages[0].content }}|{{ 'tool_calls' in messages[0] }}"
    assert render_chat(shown, [message]) == f"{content}|False"
    walks = "{% for part in messages[0].content %}{{ part.text if part is mapping else part }}{% endfor %}"
    assert render_chat(walks, [message]) == content


def test_developers_are_systems_where_they_are_unknown() -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert render_chat("{# developer #}developer {{ messages[0].role }}", [message]) == "developer system"
    for known in ("m.role == 'developer'", "m.role in ['system', 'developer']"):
        template = f"{{% for m in messages %}}{{% if {known} %}}{{{{ m.role }}}}{{% endif %}}{{% endfor %}}"
        assert render_chat(template, [message]) == "developer"
    assert message["role"] == "developer"


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ("hi", "messages must be a list of messages, got 'hi'"),
        (USER, "messages must be a list of messages, got {'role': 'user'"),
        ([], "at least one message"),
        ([USER, "hi"], r"messages\.1 must be an object with 'role' and 'content', got 'hi'"),
        ([{"content": "a"}], r"messages\.0\.role must be a non-empty string .* got None"),
        ([{"role": 3, "content": "a"}], r"messages\.0\.role must be .* got 3"),
        ([USER, {"role": "user"}], r"messages\.1 has no content"),
        ([{"role": "user", "content": None}], r"messages\.0 has no content"),
        ([{"role": "system"}], r"messages\.0 has no content"),
        ([{"role": "user", "content": 3}], r"messages\.0\.content must be a string or a list of text parts, got 3"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            r"messages\.0\.content\.1 must be .* got {'type': 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\.0\.content\.0 must be"),
        ([{"role": "user", "content": ["a"]}], r"messages\.0\.content\.0 must be .* got 'a'"),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\.0\.tool_calls must be a list of objects"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], r"messages\.0\.tool_calls\.0\.function must be"),
        ([{"role": "user", "content": "a", "extra": object()}], r"messages\.0\.extra must be JSON data"),
        ([{"role": "user", "content": "a", 3: 4}], r"messages\.0 must have strings as keys, got 3"),
    ],
)
def test_malformed_messages_are_named(messages: Any, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        render_chat(CHATML, messages)


@pytest.mark.parametrize("depth", [65, 400, 5000])
def test_what_nests_too_deeply_is_named(depth: int) -> None:
    def nested(levels: int, value: Any) -> Any:
        for level in range(levels):
            value = [value] if level % 2 else {"a": value}
        return value

    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(saved("sentencepiece")), chat_templates={"default": CHATML})
    deep, deepest = nested(depth, 1), nested(62, 1)
    calls = [{"function": {"name": "f", "arguments": deep}}]
    for messages, tools, variables, where in (
        ([USER, {**USER, "more": deep}], None, {}, "messages.1"),
        ([{**USER, "content": [{"type": "text", "text": "a", "more": deep}]}], None, {}, "messages.0"),
        ([USER, {"role": "assistant", "tool_calls": calls}], None, {}, "messages.1"),
        ([USER], [{"type": "function", "function": {"name": "f", "parameters": deep}}], {}, "tools"),
        ([USER], None, {"documents": [deep]}, "documents"),
    ):
        with pytest.raises(InvalidArgument, match="nests more than 64 lists and objects in each other") as caught:
            encode_chat(tokenizer, messages, variables, tools=tools)
        assert caught.value.field == where
    assert encode_chat(tokenizer, [{**USER, "more": deepest}], {"documents": [deepest]}, tools=[{"a": deepest}])


def test_malformed_tools_and_variables_are_named() -> None:
    for tools, found in (("f", "tools must be a list"), ([print], r"tools\.0 must be a JSON schema")):
        with pytest.raises(InvalidArgument, match=found):
            render_chat(CHATML, [USER], tools=tools)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="callback must be JSON data"):
        render_chat(CHATML, [USER], callback=print)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('only users') }}", "refused the messages: only users"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 'a' + 1 }}", "failed on the messages: TypeError"),
        ("{{ 1 / 0 }}", "failed on the messages: ZeroDivisionError"),
        ("a\n{% for %}", "not valid Jinja: line 2"),
        (
            "{% set x = messages.append(1) %}",
            "refused the messages: .*append.* is not safe|refused the messages: access",
        ),
        ("{{ messages.__class__.__mro__ }}", "refused the messages"),
        ("{{ namespace(__init__=1) }}", "underscore"),
        ("{% set n = namespace() %}{% set n.__x = 1 %}", "underscore"),
    ],
)
def test_errors_of_templates_are_reported(template: str, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        render_chat(template, [USER])


def test_templates_see_plain_values() -> None:
    class Role(enum.StrEnum):
        USER = "user"

        @property
        def escape(self) -> str:
            return "out"

    message = {"role": Role.USER, "content": "a"}
    assert render_chat("{{ messages[0].role }} {{ messages[0].role.escape }}", [message]) == "user "


def test_no_template_says_what_to_do() -> None:
    for call in (lambda: render_chat(None, [USER]), lambda: encode_chat(Tokenizer(byte_level()), [USER])):
        with pytest.raises(
            InvalidArgument, match=r"no chat template: choose one with chat_template \(--chat-template .* built-in"
        ):
            call()


def test_select_template() -> None:
    templates = {"default": "d", "tool_use": "t", "rag": "r"}
    assert select_template(templates) == "d"
    assert select_template(templates, with_tools=True) == "t"
    with pytest.raises(InvalidArgument, match=r"no default: choose one with chat_template, \['rag'\]"):
        select_template({"rag": "r"})


def test_chat_is_encoded_without_further_special_tokens() -> None:
    backend = tokenizers.Tokenizer.from_str(saved("sentencepiece"))
    tokenizer = Tokenizer(
        backend, special_tokens={"bos_token": "<s>"}, chat_templates={"default": "{{ bos_token }}" + CHATML}
    )
    ids = encode_chat(tokenizer, [USER])
    assert tokenizer.adds_bos
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False).count("<|im_start|>") == 2
