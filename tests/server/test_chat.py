"""``/v1/chat/completions`` against ``LLM.chat`` on the same messages; tool calls, reasoning,
sessions.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.exact import TINY_PYTHON

from quire import AsyncLLM, RequestOutput, SamplingParams
from quire.server.http.settings import ServerSettings
from quire.server.openai import chat
from quire.server.tools.messages import MessageFormat, MessageReader, message_of
from quire.server.tools.reader import Delta
from quire.server.tools.reasoning import reasoning_for
from quire.server.tools.tools import parser_for
from quire.text.chat_rendering import render_chat

from .conftest import OPTIONS, TEMPLATE, Served, pages_free, serving, shallow_copy, wait_for
from .test_completions import events
from .test_disconnects import generated, until_free

MESSAGES = [{"role": "user", "content": "def fib(n):"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def alone(llm: AsyncLLM, messages: Any = MESSAGES, **params: Any) -> RequestOutput:
    """What the engine gives for one conversation."""
    return asyncio.run(llm.chat(messages, SamplingParams(**params)))[0]


def ask(client: httpx.Client, messages: Any = MESSAGES, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": messages, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """The error, which must be the same for a stream."""
    for stream in (False, True):
        answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream, **body})
        assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def streamed(client: httpx.Client, messages: Any = MESSAGES, **body: Any) -> dict[int, dict[str, Any]]:
    """The choices that the chunks of a stream make up."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(client, "/v1/chat/completions", messages=messages, **body):
        assert chunk["object"] == "chat.completion.chunk"
        for part in chunk["choices"]:
            known = choices.setdefault(part["index"], {"deltas": [], "finish_reason": None, "logprobs": []})
            assert ("role" in part["delta"]) == (not known["deltas"]), "the role comes first and once"
            assert known["finish_reason"] is None, "nothing comes after the end"
            known["deltas"].append(part["delta"])
            known["finish_reason"] = part["finish_reason"]
            if part["logprobs"] is not None:
                known["logprobs"] += part["logprobs"]["content"]
    for known in choices.values():
        known["message"] = message_of(known["deltas"])
    return choices


def same(message: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages are equal but for the random ids of their calls."""
    return without_ids(message) == without_ids(other)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


def test_answers_are_the_engines(chat_client: httpx.Client, chat_served: Served) -> None:
    wanted = alone(chat_served.llm, temperature=0, max_tokens=20)
    for name in ("max_tokens", "max_completion_tokens"):
        body = ask(chat_client, model="tiny-chat", temperature=0, **{name: 20})
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": wanted.outputs[0].text, "refusal": None}
        assert choice["finish_reason"] == wanted.outputs[0].finish_reason == "length"
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
        assert body["usage"]["completion_tokens"] == 20


def test_conversations(chat_client: httpx.Client, chat_served: Served) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "naïve 你好", "name": "Zoë"},
    ]
    wanted = alone(chat_served.llm, messages, seed=8, max_tokens=12, n=3)
    body = ask(chat_client, messages, seed=8, max_tokens=12, n=3)
    texts = [sample.text for sample in wanted.outputs]
    assert [choice["message"]["content"] for choice in body["choices"]] == texts
    found = streamed(chat_client, messages, seed=8, max_tokens=12, n=3)
    assert [found[index]["message"]["content"] for index in range(3)] == texts
    assert len(set(texts)) > 1


def test_streams_say_the_same(chat_client: httpx.Client) -> None:
    body = {
        "seed": 21,
        "temperature": 1.2,
        "max_tokens": 30,
        "stop": ["\n\n", "("],
        "logprobs": True,
        "top_logprobs": 2,
    }
    (whole,) = ask(chat_client, **body)["choices"]
    found = streamed(chat_client, **body)[0]
    assert found["message"] == whole["message"]
    assert found["finish_reason"] == whole["finish_reason"]
    entries = whole["logprobs"]["content"]
    assert [one["token"] for one in found["logprobs"]] == [one["token"] for one in entries]


def test_logprobs(chat_client: httpx.Client, chat_served: Served) -> None:
    params = {"seed": 6, "temperature": 2.0, "max_tokens": 12}
    wanted = alone(chat_served.llm, **params, logprobs=3).outputs[0]
    tokenizer = chat_served.llm.tokenizer
    assert wanted.logprobs is not None
    assert tokenizer is not None
    content = ask(chat_client, **params, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    for one, token, entry in zip(content, wanted.token_ids, wanted.logprobs, strict=True):
        assert one["token"] == tokenizer.token_text(token)
        assert bytes(one["bytes"]) == tokenizer.token_bytes.piece(token)
        assert one["logprob"] == pytest.approx(entry[token].logprob, abs=TINY_PYTHON)
        best = sorted((found.logprob for found in entry.values()), reverse=True)[:3]
        assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(best, abs=TINY_PYTHON)
    assert any(entry[token].rank > 3 for token, entry in zip(wanted.token_ids, wanted.logprobs, strict=True))
    plain = ask(chat_client, **params, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in plain] == [[]] * 12
    assert ask(chat_client, **params)["choices"][0]["logprobs"] is None


def test_an_answer_may_fill_the_context(chat_folder: Path) -> None:
    llm = AsyncLLM(chat_folder, **OPTIONS, max_model_len=64)
    with serving(llm) as found:
        body = ask(found.client, temperature=0, ignore_eos=True)
        assert body["usage"]["total_tokens"] == 64
        assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("length", None)
    asyncio.run(llm.close())


def test_response_format(chat_client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    (choice,) = ask(chat_client, response_format=form, max_tokens=50)["choices"]
    assert json.loads(choice["message"]["content"]) in ({"ok": True}, {"ok": False})
    free = ask(chat_client, response_format={"type": "json_object"}, max_tokens=3)["choices"][0]["message"]["content"]
    assert free.startswith("{")


# -- tools -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template writes tools, calls and reasoning, and which has special tokens
    <tool_call> and </think>.
    """
    folder = tmp_path_factory.mktemp("models") / "capable"
    shallow_copy(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace("<|pad|>", "<tool_call>").replace("<|user|>", "</think>")
        (folder / name).write_text(text)
    tools = '{% if tools %}{{ tools | tojson }}<tool_call>{"name": ...}</tool_call>{% endif %}'
    thinking = "{% if thinking %}<think>\n{% elif thinking is false %}<think>\n</think>\n{% endif %}"
    (folder / "chat_template.jinja").write_text(tools + TEMPLATE + thinking)
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


@pytest.mark.parametrize("named", [False, True])
def test_forced_calls(chat_client: httpx.Client, named: bool) -> None:
    """Also where it is not known how the model writes calls."""
    choice: Any = {"type": "function", "function": {"name": "weather"}} if named else "required"
    body = {"tools": [WEATHER] if not named else [WEATHER, TIME], "tool_choice": choice, "seed": 3, "max_tokens": 400}
    body["parallel_tool_calls"] = False
    (found,) = ask(chat_client, **body)["choices"]
    (call,) = found["message"]["tool_calls"]
    assert found["message"]["content"] is None
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) in ({"city": "Rome"}, {"city": "Paris"})
    assert found["finish_reason"] == ("stop" if named else "tool_calls")
    other = streamed(chat_client, **body)[0]
    assert same(other["message"], found["message"])
    assert other["finish_reason"] == found["finish_reason"]
    parts = [one["tool_calls"][0]["function"] for one in other["deltas"] if "tool_calls" in one]
    assert [part["name"] for part in parts if "name" in part] == ["weather"]
    assert len([part for part in parts if part["arguments"]]) > 2, "arguments are given as they are written"


def test_a_forced_call_is_written_as_the_template_writes_it(chat_folder: Path, tmp_path: Path) -> None:
    """So the next turn begins with the tokens of the call."""
    calls = (
        """{% for call in message.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": """
        "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>"
    )
    file = tmp_path / "calls.jinja"
    template = "{{ tools | tojson }}" + TEMPLATE.replace("<|end|>", calls)
    file.write_text(template)
    llm = AsyncLLM(chat_folder, chat_template=str(file), **OPTIONS)
    try:
        with serving(llm) as found:
            named = {"type": "function", "function": {"name": "weather"}}
            for choice in ("required", named):
                body = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
                answer = ask(found.client, **body, temperature=0, logprobs=True)
                (message,) = (one["message"] for one in answer["choices"])
                (call,) = message["tool_calls"]
                assert call["function"]["name"] == "weather"
                assert call["function"]["arguments"] in ('{"city": "Rome"}', '{"city": "Paris"}')
                result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
                more = ask(
                    found.client, [*MESSAGES, message, result], tools=[WEATHER], tool_choice="none", max_tokens=1
                )
                tokens = [one["token"] for one in answer["choices"][0]["logprobs"]["content"]]
                arguments = call["function"]["arguments"]
                written = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
                assert "".join(tokens).removesuffix("<|end|>") == written
                assert written in render_chat(template, [*MESSAGES, message, result], tools=[WEATHER])
                # The model may spell its call in other tokens than the tokenizer.
                assert more["usage"]["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"]
    finally:
        asyncio.run(llm.close())


def test_forced_calls_that_are_cut_short_are_no_content(chat_client: httpx.Client) -> None:
    """What there is of them is in the call, or nowhere."""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, size in (("required", 3), ("required", 14), (named, 1), (named, 4)):
        body = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": size, "seed": 3}
        (found,) = ask(chat_client, **body)["choices"]
        assert found["finish_reason"] == "length"
        assert not found["message"]["content"]
        assert same(streamed(chat_client, **body)[0]["message"], found["message"])
        for call in found["message"].get("tool_calls", ()):
            assert '{"city":"Paris"}{"city":"Rome"}'.find(call["function"]["arguments"]) >= 0


FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "ok",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
}
TOOL_CALL = 1
"""The token of "<tool_call>", a special one."""
THINK_END = 2
"""That of "</think>"."""


@pytest.mark.parametrize("calls", [False, True])
def test_tools_together_with_a_form(capable: Served, calls: bool) -> None:
    """One or the other by one grammar, whatever the model would like better."""
    body = {"tools": [WEATHER], "response_format": FORM, "parallel_tool_calls": False, "seed": 3, "max_tokens": 300}
    body |= {"logit_bias": {str(TOOL_CALL): 100 if calls else -100}}
    (found,) = ask(capable.client, **body)["choices"]
    message = found["message"]
    if calls:
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({"city": "Rome"}, {"city": "Paris"})
        assert (message["content"], found["finish_reason"]) == (None, "tool_calls")
    else:
        assert json.loads(message["content"]) in ({"ok": True}, {"ok": False})
        assert ("tool_calls" in message, found["finish_reason"]) == (False, "stop")
    assert same(streamed(capable.client, **body)[0]["message"], message)
    cut = ask(capable.client, **{**body, "max_tokens": 3})["choices"][0]["message"]
    assert bool(cut["content"]) == (not calls)
    plain = ask(capable.client, **body, tool_choice="none")["choices"][0]["message"]
    assert json.loads(plain["content"]) in ({"ok": True}, {"ok": False})


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_the_tools_are_allowed(capable: Served) -> None:
    """Forced calls are of these, in the prompt for all; else the template sees these alone."""
    body = {"tools": [WEATHER, TIME], "seed": 3, "max_tokens": 300, "parallel_tool_calls": False}
    body["logit_bias"] = {str(TOOL_CALL): 100}  # the model was not trained to call, and would think
    every = ask(capable.client, **body, tool_choice="required")["usage"]["prompt_tokens"]
    for name in ("time", "weather"):
        found = ask(capable.client, **body, tool_choice=allowed("required", name))
        assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name
        assert found["usage"]["prompt_tokens"] == every
    said = {"messages": MESSAGES, "max_tokens": 1}
    one = ask(capable.client, **{**said, "tools": [TIME]})["usage"]["prompt_tokens"]
    found = ask(capable.client, **{**said, "tools": [WEATHER, TIME], "tool_choice": allowed("auto", "time")})
    assert found["usage"]["prompt_tokens"] == one
    form = {**body, "response_format": FORM}
    message = ask(capable.client, **form, tool_choice=allowed("auto", "time"))["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "time"
    assert json.loads(call["function"]["arguments"]) == {}


def test_some_of_the_tools_are_allowed_as_json(chat_client: httpx.Client) -> None:
    """By a template whose format of calls is unknown."""
    body = {"tools": [WEATHER, TIME], "seed": 3, "max_tokens": 300, "parallel_tool_calls": False}
    for name in ("time", "weather"):
        found = ask(chat_client, **body, tool_choice=allowed("required", name))
        assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_wins_over_a_form(capable: Served, choice: Any) -> None:
    body = {"tools": [WEATHER], "response_format": FORM, "tool_choice": choice, "parallel_tool_calls": False}
    bias = {str(TOOL_CALL): 100}
    message = ask(capable.client, **body, seed=3, max_tokens=300, logit_bias=bias)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "weather"


def test_forms_that_tools_cannot_be_with(chat_client: httpx.Client, capable: Served) -> None:
    """An unknown format of calls; a schema that is none; a form under another name."""
    assert refused(chat_client, tools=[WEATHER], response_format=FORM)["param"] == "response_format"
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
    error = refused(capable.client, tools=[WEATHER], response_format=schema)
    assert error["param"] == "response_format"
    assert "grammar" not in error["message"]
    other = {"structured_outputs": {"regex": "a"}}
    assert refused(capable.client, tools=[WEATHER], **other)["param"] == "structured_outputs"


def test_calls_that_the_model_makes(capable: Served, says: Callable[[str], None]) -> None:
    says(f"Let me see.{CALL}{CALL.replace('Rome', 'Paris')}")
    body = {"tools": [WEATHER], "max_tokens": 300}
    (found,) = ask(capable.client, **body)["choices"]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] == "Let me see."
    calls = found["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Rome", "Paris"]
    assert len({call["id"] for call in calls}) == 2
    other = streamed(capable.client, **body)[0]
    assert same(other["message"], found["message"])
    assert other["finish_reason"] == "tool_calls"
    one = ask(capable.client, **body, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
    assert [call["function"] for call in one] == [calls[0]["function"]]
    # A choice of "none": the text is what it is, and the prompt begins with the same tools.
    none = ask(capable.client, **body, tool_choice="none")
    assert none["usage"]["prompt_tokens_details"]["cached_tokens"] == none["usage"]["prompt_tokens"] - 1
    plain = none["choices"][0]
    assert plain["message"]["content"].endswith("</tool_call>")
    assert plain["finish_reason"] == "stop"
    cut = ask(capable.client, tools=[WEATHER], max_tokens=20)["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"].startswith("Let me see.<to")


def test_a_call_without_marks_in_every_protocol(capable: Served, says: Callable[[str], None]) -> None:
    says('```json\n{"name": "weather", "arguments": {"city": "Rome"}}\n```')
    chat_body = {"tools": [WEATHER], "max_tokens": 300}
    for found in (ask(capable.client, **chat_body)["choices"][0], streamed(capable.client, **chat_body)[0]):
        (call,) = found["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert (found["message"]["content"], found["finish_reason"]) == (None, "tool_calls")
    tool = {"type": "function", **WEATHER["function"]}
    body = {"model": "capable", "input": "x", "tools": [tool], "max_output_tokens": 300}
    whole = capable.client.post("/v1/responses", json=body).json()
    assert (whole["status"], whole["output"][0]["arguments"]) == ("completed", '{"city": "Rome"}')
    # A stop string that cuts the call: it must not be made.
    cut = capable.client.post("/v1/responses", json={**body, "stop": ["ome"]}).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "stop"})
    assert [(item["status"], item["arguments"]) for item in cut["output"]] == [("incomplete", '{"city": "R')]
    with capable.client.stream("POST", "/v1/responses", json={**body, "stop": ["ome"], "stream": True}) as answer:
        assert '"type":"response.incomplete"' in answer.read().decode().replace(" ", "").splitlines()[-2]
    given = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    body = {"model": "capable", "max_tokens": 300, "messages": MESSAGES, "tools": [given]}
    message = capable.client.post("/v1/messages", json=body).json()
    assert message["stop_reason"] == "tool_use"
    assert [(block["type"], block["input"]) for block in message["content"]] == [("tool_use", {"city": "Rome"})]


def test_the_server_may_be_told_how_calls_are_written(capable: Served, says: Callable[[str], None]) -> None:
    """Whatever the template shows; also that they are gpt-oss's. Bare JSON always is."""
    llama = '{"name": "weather", "parameters": {"city": "Rome"}}'
    harmony = '<|channel|>commentary to=functions.weather<|message|>{"city": "Rome"}'
    for name, text in (("llama3_json", llama), ("harmony", harmony), ("openai", harmony)):
        says(text)
        body = {"tools": [WEATHER], "max_tokens": 300}
        assert ("tool_calls" in ask(capable.client, **body)["choices"][0]["message"]) == (text is llama)
        with serving(capable.llm, ServerSettings(tool_call_parser=name)) as told:
            (found,) = ask(told.client, **body)["choices"]
        (call,) = found["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert found["finish_reason"] == "tool_calls"


def test_tools_reach_the_template(capable: Served) -> None:
    def prompt_tokens(**more: Any) -> int:
        return ask(capable.client, max_tokens=1, **more)["usage"]["prompt_tokens"]

    plain = prompt_tokens()
    assert prompt_tokens(tools=[WEATHER]) > plain + 20
    # Where none may be called, too: so the prompt begins as before.
    assert prompt_tokens(tools=[WEATHER], tool_choice="none") == prompt_tokens(tools=[WEATHER])
    assert prompt_tokens(chat_template_kwargs={"thinking": True}) > plain
    assert prompt_tokens(add_generation_prompt=False) < plain
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    assert ask(capable.client, history, max_tokens=1)["usage"]["prompt_tokens"] > plain


def test_marks_that_are_special_tokens_are_seen(capable: Served, chat_client: httpx.Client) -> None:
    """Where they are looked for, and nowhere else.

    The end of the message, which is one too, is never in its text.
    """
    body = {"logit_bias": {"1": 100}, "temperature": 0, "max_tokens": 1}
    assert ask(capable.client, **body, tools=[WEATHER])["choices"][0]["message"]["content"] == "<tool_call>"
    assert ask(chat_client, **body)["choices"][0]["message"]["content"] == ""
    body = {"logit_bias": {"0": 100}, "min_tokens": 2, "temperature": 0, "max_tokens": 9, "tools": [WEATHER]}
    (found,) = ask(capable.client, **body)["choices"]
    assert found["finish_reason"] == "stop"
    assert "<|end|>" not in found["message"]["content"]


def test_tools_without_a_known_format(chat_client: httpx.Client) -> None:
    error = refused(chat_client, tools=[WEATHER])
    assert error["param"] == "tools"
    assert "required" in error["message"]


def test_reasoning(capable: Served, says: Callable[[str], None]) -> None:
    for opened, text in ((False, f"<think>\nHm.\n</think>\n\nYes.{CALL}"), (True, f"Hm.\n</think>\n\nYes.{CALL}")):
        says(text)
        body = {"tools": [WEATHER], "max_tokens": 300, "chat_template_kwargs": {"thinking": opened}}
        (found,) = ask(capable.client, **body)["choices"]
        message = found["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        assert len(message["tool_calls"]) == 1
        assert same(streamed(capable.client, **body)[0]["message"], message)


COMMAND = "<|START_THINKING|><|END_THINKING|><|START_ACTION|><|START_RESPONSE|>"
"""What a template of Command A holds, as far as it matters."""


@pytest.mark.turns(2)
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_what_stands_around_an_answer_is_no_part_of_it(
    capable: Served, says: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tools: list[Any] | None
) -> None:
    monkeypatch.setattr(chat, "select_template", lambda templates, **_: "{{ messages }}{#" + COMMAND + "#}")
    says("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes, <b>.<|END_RESPONSE|>")
    body = {"max_tokens": 300} | ({} if tools is None else {"tools": tools})
    message = ask(capable.client, **body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes, <b>.")
    assert same(streamed(capable.client, **body)[0]["message"], message)
    says('Plan.<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {}}]<|END_ACTION|>')
    message = ask(capable.client, **body)["choices"][0]["message"]
    assert message["content"] == "Plan." if tools else message["content"].endswith("<|END_ACTION|>")
    assert [call["function"]["name"] for call in message.get("tool_calls", ())] == ["weather"] * bool(tools)


@pytest.mark.turns(2)
@pytest.mark.parametrize("thinking", [True, None, False])
def test_a_form_holds_behind_the_reasoning(capable: Served, thinking: bool | None) -> None:
    """The prompt opens it, or the model does; where it is switched off, the form holds at once."""
    tokenizer = capable.llm.tokenizer
    assert tokenizer is not None
    bias = {**dict.fromkeys(map(str, tokenizer.encode("<think>")), 40), str(THINK_END): 100}
    body: dict[str, Any] = {"logit_bias": bias, "temperature": 0, "logprobs": True, "max_tokens": 200}
    if thinking is not None:
        body["chat_template_kwargs"] = {"thinking": thinking}
    forms: list[dict[str, Any]] = [{"structured_outputs": {"choice": ["plain"]}}, {"response_format": FORM}]
    for form in (*forms, {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}):
        (found,) = ask(capable.client, **body, **form)["choices"]
        text = "".join(one["token"] for one in found["logprobs"]["content"])
        message = found["message"]
        assert (message["content"] or "").find("think") < 0
        assert text.count("</think>") == (thinking is not False), text
        assert text.startswith("<think>" if thinking is None else "")
        if "tools" in form:
            assert message["tool_calls"][0]["function"]["name"] == "weather"
        else:
            assert message["content"] in ("plain", '{"ok":true}', '{"ok":false}')
        assert same(streamed(capable.client, **body, **form)[0]["message"], message)
    # A thought that was cut is no answer.
    cut = ask(capable.client, **forms[0], max_tokens=5, chat_template_kwargs={"thinking": True})["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "")
    assert cut["message"]["reasoning_content"]


def test_messages_read_in_pieces() -> None:
    """However the text is cut, the deltas make up the message of the whole text."""
    template = "<think></think><tool_call>"
    format = MessageFormat(
        reasoning=reasoning_for(template), in_reasoning=False, calls=parser_for({}, template), tools=[WEATHER]
    )
    rng = random.Random(0)
    for text in (
        f"<think>a\n b</think> c {CALL} d {CALL}\n",
        "plain",
        "",
        "<think>never closed",
        CALL[:-5],
        "<think></think>",
    ):
        reader = MessageReader(format)
        whole = message_of([reader.feed(text), reader.finish()])
        for _ in range(50):
            reader, deltas, rest = MessageReader(format), [], text
            while rest:
                size = rng.randint(1, 9)
                deltas.append(reader.feed(rest[:size]))
                rest = rest[size:]
            deltas.append(reader.finish())
            assert same(message_of(deltas), whole)


def test_ids_that_templates_of_mistral_accept(capable: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made the model call."""
    monkeypatch.setattr(chat, "select_template", lambda templates, **_: "{{ messages }}{# [TOOL_CALLS] #}")
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        body = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400, "seed": 3}
        ids = {
            call["id"] for _ in range(3) for call in ask(capable.client, **body)["choices"][0]["message"]["tool_calls"]
        }
        assert len(ids) >= 3
        assert all(len(name) == 9 and name.isalnum() for name in ids)
    format = MessageFormat(calls=parser_for({}, None, "mistral"), ids="short")
    assert len({format.call_id(Delta(index=0, name="f"), ()) for _ in range(20)}) == 20


def test_a_call_that_is_not_whole_is_no_reason_to_call(capable: Served, says: Callable[[str], None]) -> None:
    """Cut by a stop string or the end of the text: the client sees what there is, and that it is
    not to be carried out.
    """
    says("Hm." + CALL)
    body = {"tools": [WEATHER], "max_tokens": 300, "stop": ["Rome"]}
    (found,) = ask(capable.client, **body)["choices"]
    (call,) = found["message"]["tool_calls"]
    assert CALL.startswith("<tool_call>")
    assert call["function"]["name"] == "weather"
    assert "Rome" not in call["function"]["arguments"]
    assert found["finish_reason"] == "stop"
    other = streamed(capable.client, **body)[0]
    assert same(other["message"], found["message"])
    assert other["finish_reason"] == "stop"
    cut = ask(capable.client, tools=[WEATHER], max_tokens=56)["choices"][0]
    assert (cut["finish_reason"], len(cut["message"]["tool_calls"])) == ("length", 1)


def test_what_stands_around_an_answer_stays_out_of_the_next_turn(
    capable: Served, says: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }};{% else %}<|START_RESPONSE|>{{ m.content }}"
        "<|END_RESPONSE|>{% endif %}{% endfor %}{#" + COMMAND + "#}"
    )
    monkeypatch.setattr(chat, "select_template", lambda templates, **_: template)
    monkeypatch.setattr("quire.text.chat_prompts.select_template", lambda *_, **__: template)
    session = capable.client.post("/v1/sessions", json={}).json()["id"]
    for text in ("Yes.", "No."):
        says(f"<|START_RESPONSE|>{text}<|END_RESPONSE|>")
        message = ask(capable.client, session_id=session, max_tokens=300)["choices"][0]["message"]
        assert message["content"] == text
    held = capable.client.get(f"/v1/sessions/{session}").json()["text"]
    assert held.count("<|START_RESPONSE|>") == held.count("<|END_RESPONSE|>") == 2
    capable.client.delete(f"/v1/sessions/{session}")


# -- sessions and clients that go away -------------------------------------------------------------


def test_a_session_goes_on(chat_client: httpx.Client, chat_served: Served) -> None:
    """With the new messages only."""
    made = chat_client.post("/v1/sessions", json={}).json()
    turns: list[dict[str, str]] = []
    try:
        for text in ("one", "two", "three"):
            new = {"role": "user", "content": text}
            turns.append(new)
            if text == "two":
                content = streamed(chat_client, [new], session_id=made["id"], temperature=0, max_tokens=6)[0]
                content = content["message"]["content"]
            else:
                body = ask(chat_client, [new], session_id=made["id"], temperature=0, max_tokens=6)
                assert body["session_id"] == made["id"]
                content = body["choices"][0]["message"]["content"]
            turns.append({"role": "assistant", "content": content})
        for name, value in (("cache_salt", "x"), ("n", 2)):
            assert refused(chat_client, session_id=made["id"], **{name: value})["param"] == name
    finally:
        chat_client.delete(f"/v1/sessions/{made['id']}")
    wait_for(lambda: pages_free(chat_served.llm))


@pytest.mark.parametrize("thinking", [None, False, True])
def test_a_session_goes_on_with_tools_and_a_switch_of_thinking(
    capable: Served, says: Callable[[str], None], thinking: bool | None
) -> None:
    """Its tokens are those of the whole conversation, sent with the same tools and switch."""
    client = capable.client
    extra = {"tools": [WEATHER], "max_tokens": 300} | ({} if thinking is None else {"enable_thinking": thinking})
    named = {"tools": [WEATHER]} | ({} if thinking is None else {"chat_template_kwargs": {"thinking": thinking}})
    turns: list[dict[str, Any]] = [{"role": "user", "content": "The weather in Rome?"}]
    made = client.post("/v1/sessions", json={"messages": turns, **named}).json()
    assert made["num_tokens"] == client.post("/tokenize", json={"messages": turns, **named}).json()["count"]
    session = client.post("/v1/sessions", json={}).json()["id"]
    opened = "Why?</think>" if thinking else ""
    says(opened + "Hm." + CALL)
    body = ask(client, messages=turns, session_id=session, **extra)
    call = body["choices"][0]["message"]
    assert [one["function"]["name"] for one in call["tool_calls"]] == ["weather"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "24 degrees"}
    turns += [call, result]
    says(opened + "Warm.")
    ask(client, messages=[result], session_id=session, **extra)
    prompt = client.post("/tokenize", json={"messages": turns, **named}).json()["tokens"]
    held = client.get(f"/v1/sessions/{session}").json()["tokens"]
    assert held[: len(prompt)] == prompt
    kept = capable.context.sessions._held[session].session._session._live.turns.written()
    assert kept is not None
    assert kept.count(call["tool_calls"][0]["id"]) == 2, "in the call and in its result"
    for name in (session, made["id"]):
        client.delete(f"/v1/sessions/{name}")


def test_a_form_holds_in_a_session_whose_thoughts_are_closed(capable: Served) -> None:
    """Behind the thoughts that the prompt opens, or at once where it closes them."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"a": 1}}}}
    session = capable.client.post("/v1/sessions", json={}).json()["id"]
    body = {"session_id": session, "enable_thinking": False, "response_format": form, "max_tokens": 60}
    assert json.loads(ask(capable.client, **body)["choices"][0]["message"]["content"]) == {"a": 1}
    capable.client.delete(f"/v1/sessions/{session}")


@pytest.mark.parametrize("stream", [False, True])
def test_going_away_cancels(chat_served: Served, stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True, "stream": stream, "n": 2}
    with httpx.Client(base_url=chat_served.url, timeout=0.3, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body)
    before = generated(chat_served.llm)
    until_free(chat_served.llm)
    assert generated(chat_served.llm) - before < 500
