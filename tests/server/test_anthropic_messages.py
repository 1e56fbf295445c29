"""``/v1/messages`` against chats of the same messages. ``test_anthropic_client`` has the official
client.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.http.gate import KeyPortions
from quire.server.http.settings import ServerSettings

from .conftest import Served, serving
from .test_chat import CALL, WEATHER, capable, says
from .test_chat import ask as ask_chat
from .test_disconnects import broken_at, until_free
from .test_responses import fits

__all__ = ["capable", "says"]

SAID = "def fib(n):"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
FREE = {"ignore_eos": False, "max_tokens": 400}
MARK = {"type": "ephemeral"}
LONG = "x = [1, 2, 3]\n" * 20
TOOL = {
    "name": "weather",
    "description": WEATHER["function"]["description"],  # type: ignore[index]
    "input_schema": WEATHER["function"]["parameters"],  # type: ignore[index]
}
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}


def user(content: Any = SAID) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def ask(client: httpx.Client, messages: Any = None, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/messages", json={"messages": messages or [user()], **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(client: httpx.Client, messages: Any = None, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each with its own name."""
    given = {"messages": messages or [user()], **GREEDY, **body, "stream": True}
    answer = client.post("/v1/messages", json=given)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(client: httpx.Client, messages: Any = None, **body: Any) -> dict[str, Any]:
    """The message that the events of a stream make up, in the order that Anthropic has them."""
    found = events(client, messages, **body)
    assert [one["type"] for one in found[:2]] == ["message_start", "ping"]
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = found[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    block: dict[str, Any] | None = None
    written = ""
    for event in found[2:-2]:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert block is None, "the block before goes on"
            block, written = event["content_block"], ""
            message["content"].append(block)
        assert event["index"] == len(message["content"]) - 1
        assert block is not None
        if kind == "delta":
            name, value = next(item for item in event["delta"].items() if item[0] != "type")
            assert value
            assert event["delta"]["type"] == ("input_json_delta" if name == "partial_json" else f"{name}_delta")
            if name == "partial_json":
                written += value
            else:
                block[name] += value
        elif kind == "stop":
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(written)
            block = None
    assert block is None
    end = {name: value for name, value in found[-2].items() if name not in ("type", "delta")}
    return {**message, **found[-2]["delta"], **end}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without ids, which are random, and without what runs before change."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**{name: message[name] for name in ("type", "role", "stop_reason", "stop_sequence")}, "content": content}


def said_in(message: dict[str, Any]) -> str:
    (block,) = message["content"]
    assert block["type"] == "text"
    return str(block["text"])


def input_of(message: dict[str, Any]) -> int:
    usage = message["usage"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] for name in names)


def refused(client: httpx.Client, status: int = 400, **body: Any) -> tuple[str, str]:
    """The field and the message of an error, which must be the same for a stream."""
    for stream in (False, True):
        answer = client.post("/v1/messages", json={"messages": [user()], "max_tokens": 4, "stream": stream, **body})
        assert answer.status_code == status, answer.text
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    return found["error"]["param"], found["error"]["message"]


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer_is_that_of_the_chat(chat_client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user()]
    chat = ask_chat(chat_client, messages, max_tokens=12, temperature=0, ignore_eos=True)
    found = ask(chat_client, system="Be brief.", metadata={"user_id": "me"}, service_tier="auto", top_k=5, top_p=0.9)
    assert said_in(found) == chat["choices"][0]["message"]["content"]
    assert input_of(found) == chat["usage"]["prompt_tokens"]
    assert found["usage"]["cache_read_input_tokens"] == found["quire"]["reuse"]["cached"] > 0
    assert found["usage"]["cache_creation_input_tokens"] == 0
    assert (found["usage"]["output_tokens"], found["stop_reason"], found["stop_sequence"]) == (12, "max_tokens", None)
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny-chat")
    assert found["id"].startswith("msg_")
    other = streamed(chat_client, system="Be brief.")
    assert plain(other) == plain(found)
    assert other["usage"] == {
        **found["usage"],
        **{name: other["usage"][name] for name in other["usage"] if "input" in name},
    }
    assert input_of(other) == input_of(found)
    assert other["quire"]["reuse"]


def test_why_it_ends(chat_client: httpx.Client) -> None:
    whole = said_in(ask(chat_client, max_tokens=40))
    stop = whole[20:23]
    for found in (
        ask(chat_client, max_tokens=40, stop_sequences=["@@", stop]),
        streamed(chat_client, max_tokens=40, stop_sequences=["@@", stop]),
    ):
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
        assert said_in(found) == whole[: whole.index(stop)]
    # An end at once is a message without blocks.
    for found in (
        ask(chat_client, logit_bias={"0": 100}, ignore_eos=False),
        streamed(chat_client, logit_bias={"0": 100}, ignore_eos=False),
    ):
        assert (found["content"], found["stop_reason"]) == ([], "end_turn")
    form = {"type": "json_schema", "schema": {"enum": ["done"]}}
    assert said_in(ask(chat_client, output_config={"format": form}, **FREE)) == '"done"'


def test_turns_become_messages(chat_client: httpx.Client) -> None:
    """Texts of one role in a row are parts of one message, and the assistant's one text."""
    given = [
        user("one"),
        {"role": "assistant", "content": []},
        user([text("two"), text("three")]),
        {"role": "assistant", "content": [text("fo"), text("ur")]},
        user("five"),
    ]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        user([text("one"), text("two"), text("three")]),
        {"role": "assistant", "content": "four"},
        user("five"),
    ]
    chat = ask_chat(chat_client, messages, max_tokens=12, temperature=0, ignore_eos=True)
    found = ask(chat_client, given, system=[text("Be"), text("brief.")])
    assert said_in(found) == chat["choices"][0]["message"]["content"]
    assert input_of(found) == chat["usage"]["prompt_tokens"]


@pytest.mark.turns(2)
@pytest.mark.parametrize("whole", [False, True])
def test_thinking_text_and_calls(capable: Served, says: Callable[[str], None], whole: bool) -> None:
    says(f"<think>\nHm.\n</think>\n\nYes.{CALL}{CALL.replace('Rome', 'Paris')}")
    run = ask if whole else streamed
    body: dict[str, Any] = {"tools": [{**TOOL, "type": "custom"}], "ignore_eos": False, "max_tokens": 300}
    found = run(capable.client, **body)
    assert [{**block, "id": None} for block in found["content"]] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned", "id": None},
        {"type": "text", "text": "Yes.", "id": None},
        *({"type": "tool_use", "name": "weather", "input": {"city": city}, "id": None} for city in ("Rome", "Paris")),
    ]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    one = run(capable.client, **body, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]
    # What was called goes on.
    says("Sunny.")
    uses = found["content"][2:]
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": use["id"], "content": "hot"} for use in uses
    ]
    results[1] |= {"content": [text("hot")], "is_error": False}
    again = run(
        capable.client,
        [user(), {"role": "assistant", "content": found["content"]}, user([*results, text("So?")])],
        **body,
    )
    assert (said_in(again), again["stop_reason"]) == ("Sunny.", "end_turn")
    calls = [
        {"id": use["id"], "type": "function", "function": {"name": use["name"], "arguments": json.dumps(use["input"])}}
        for use in uses
    ]
    messages = [
        user(),
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": use["id"], "content": "hot"} for use in uses),
        user("So?"),
    ]
    usage = ask_chat(capable.client, messages, tools=[WEATHER], max_tokens=300)["usage"]
    assert input_of(again) == usage["prompt_tokens"]


def test_calls_that_are_cut_are_not_to_be_made(capable: Served, says: Callable[[str], None]) -> None:
    says(CALL)
    tokens = ask(capable.client, tools=[TOOL], **FREE)["usage"]["output_tokens"]
    for short in range(1, tokens, 3):
        found = ask(capable.client, tools=[TOOL], ignore_eos=False, max_tokens=short)
        assert found["stop_reason"] == "max_tokens"
        for block in found["content"]:
            assert block["type"] == "text" or block["input"] in ({}, {"city": "Rome"})
    says(CALL.replace('"Rome"', "Rome"))
    broken = ask(capable.client, tools=[TOOL], **FREE)
    assert broken["stop_reason"] == "end_turn"


def test_chosen_tools(chat_client: httpx.Client) -> None:
    other = {"name": "time", "input_schema": {"type": "object"}}
    body: dict[str, Any] = {"tools": [TOOL, other], "seed": 3, "temperature": 1, **FREE}
    for run in (ask, streamed):
        found = run(chat_client, tool_choice={"type": "tool", "name": "weather"}, **body)
        (use,) = found["content"]
        assert (use["type"], use["name"], found["stop_reason"]) == ("tool_use", "weather", "tool_use")
        assert use["input"]["city"] in ("Rome", "Paris")
        anyone = {"type": "any", "disable_parallel_tool_use": True}
        (use,) = run(chat_client, tool_choice=anyone, **{**body, "tools": [TOOL]})["content"]
        assert use["type"] == "tool_use"
        none = run(chat_client, tool_choice={"type": "none"}, **body)
        assert [block["type"] for block in none["content"]] == ["text"]


def test_thinking_reaches_the_template(capable: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(**more: Any) -> int:
        return input_of(ask(capable.client, **more))

    templates = {"default": "{{ messages[0].content }}"}
    monkeypatch.setattr(capable.llm.tokenizer, "chat_templates", templates)
    on, off = {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}
    field, message = refused(capable.client, thinking=on)
    assert (field, "never lets it think" in message) == ("thinking.type", True)
    assert tokens(thinking=off) == tokens(thinking={"type": "adaptive"}) == tokens()
    templates["default"] += "{# <think> </think> #}"
    assert "always" in refused(capable.client, thinking=off)[1]
    assert tokens(thinking=on) == tokens()
    templates["default"] = "{{ 'a b c d' if enable_thinking is false else '' }}{{ messages[0].content }}"
    assert tokens(thinking=off) > tokens(thinking=on) == tokens()
    assert refused(capable.client, output_config={"effort": "low"})[0] == "output_config.effort"
    templates["default"] = "{{ 'a b c d' if reasoning_effort == 'low' else '' }}{{ messages[0].content }}"
    assert tokens(output_config={"effort": "low"}) > tokens(output_config={"effort": "high"}) == tokens()


# -- the cache -------------------------------------------------------------------------------------


def test_marks_pin_what_they_mark(capable: Served) -> None:
    system = [text("Be brief."), text(LONG, cache_control={**MARK, "ttl": "1h"})]
    assistant = [text("Well.", cache_control=MARK), USE]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "hot", "cache_control": MARK}
    messages = [user("a"), {"role": "assistant", "content": assistant}, user([result, text("So?")])]
    tools = [{**TOOL, "cache_control": MARK}]
    first = ask(capable.client, messages, system=system, tools=tools)
    hints = {hint["id"]: hint for hint in first["quire"]["hints"]}
    assert list(hints) == ["tools.0", "system.1", "messages.1.content.0", "messages.2.content.0"]
    assert [hint["status"] for hint in hints.values()] == ["done"] * 4
    assert [hint["ttl"] for hint in hints.values()] == [300, 3600, 300, 300]
    pinned = [hint["tokens"] for hint in hints.values()]
    assert pinned == sorted(pinned)
    usage = first["usage"]
    assert usage["cache_creation_input_tokens"] == pinned[-1] - usage["cache_read_input_tokens"] > 0
    again = streamed(capable.client, messages, system=system, tools=tools)
    assert again["usage"]["cache_read_input_tokens"] >= pinned[-1]
    assert again["usage"]["cache_creation_input_tokens"] == 0
    assert [hint["id"] for hint in again["quire"]["hints"]] == list(hints)
    assert input_of(first) == input_of(again)
    (whole,) = ask(capable.client, cache_control=MARK)["quire"]["hints"]
    assert (whole["id"], whole["tokens"]) == ("cache_control", input_of(ask(capable.client)))


def test_no_tokens_only_warm_the_cache(chat_client: httpx.Client) -> None:
    messages = [user(f"{LONG}?")]
    found = ask(chat_client, messages, max_tokens=0, ignore_eos=None)
    assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert [(hint["hint"], hint["status"]) for hint in found["quire"]["hints"]] == [("prefetch", "done")]
    assert ask(chat_client, messages)["usage"]["cache_read_input_tokens"] > 100


def test_tokens_are_counted(capable: Served) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [user()]},
        {"messages": [user([text("a", cache_control=MARK)])], "system": "Be brief.", "tools": [TOOL]},
        {"messages": [user()], "tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [user()], "chat_template_kwargs": {"thinking": True}},
    ]
    counts = []
    for body in bodies:
        answer = capable.client.post("/v1/messages/count_tokens", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"input_tokens": input_of(ask(capable.client, **body))}
        counts.append(answer.json()["input_tokens"])
    assert counts[0] < counts[3] < counts[2]
    for bad, field in (
        ({"messages": []}, "messages"),
        ({"messages": [user()], "tools": [{}]}, "tools.0.name"),
        ({"messages": [user()], "temperature": -1}, "temperature"),
    ):
        answer = capable.client.post("/v1/messages/count_tokens", json=bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


# -- errors ----------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1"}
CALLED = {"role": "assistant", "content": [USE]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "integer"),
    ({"max_tokens": -1}, "max_tokens", "0"),
    ({"temperature": -1}, "temperature", ">= 0"),
    ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences", "list"),
    ({"stop": ["x"]}, "stop", "stop_sequences"),
    ({"n": 2}, "n", "/v1/chat/completions"),
    ({"speed": "fast"}, "speed", "one speed"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "no tools"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management", "fewer messages"),
    ({"service_tier": "flex"}, "service_tier", "standard_only"),
    ({"metadata": {"user_id": 3}}, "metadata.user_id", "string"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "'adaptive'"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display", "summarized"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "'json_schema'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
        "output_config.format",
        "compiled",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", "web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "required"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", "False"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples", "at most 0"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": [{**TOOL, "input_schema": {"type": 3}}]}, "tools", "tools.0.input_schema.type must"),
    ({"tools": [{**TOOL, "name": "a b"}], "tool_choice": {"type": "any"}}, "tools", "letters"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", "object"),
    ({"tool_choice": {"type": "required"}, "tools": [TOOL]}, "tool_choice.type", "'any'"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name", "required"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, "tool_choice", "weather"),
    ({"system": 3}, "system", "a text or a list"),
    ({"system": [IMAGE]}, "system.0.type", "text only"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "x"}, "messages", "list"),
    ({"messages": [3]}, "messages.0.role", "role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "got null"),
    ({"messages": [user([])]}, "messages.0.content", "got []"),
    ({"messages": [user([IMAGE])]}, "messages.0.content.0.type", "'image'"),
    ({"messages": [user([{"type": "document"}])]}, "messages.0.content.0.type", "'document'"),
    ({"messages": [user([{"type": "text"}])]}, "messages.0.content.0.text", "required"),
    ({"messages": [user([USE])]}, "messages.0.content.0.type", "'tool_result'"),
    ({"messages": [user(), {"role": "assistant", "content": "So"}]}, "messages.1", "prefill"),
    (
        {"messages": [user(), CALLED, user([{**RESULT, "content": [IMAGE]}])]},
        "messages.2.content.0.content.0.type",
        "image",
    ),
    ({"messages": [user(), CALLED, user([{**RESULT, "content": 3}])]}, "messages.2.content.0.content", "got 3"),
    ({"messages": [user(), user([RESULT])]}, "messages.1.content.0.tool_use_id", "no tool_use"),
    (
        {"messages": [user("a"), user([text("b", cache_control={"type": "x"})])], "system": "c"},
        "messages.1.content.0.cache_control",
        "messages.1.content.0.cache_control must be",
    ),
    ({"messages": [user([text("a", cache_control=MARK)] * 5)]}, "messages.0.content.4.cache_control", "too many"),
    ({"cache_control": {"type": "x"}}, "cache_control", "ephemeral"),
    ({"messages": [user("x " * 9000)]}, "messages", "prompt is too long: "),
    ({"max_tokens": 9000}, "max_tokens", "input length and `max_tokens` exceed context limit: "),
]


@pytest.mark.parametrize(
    ("body", "field", "said"), REFUSED, ids=[f"{field}-{i}" for i, (_, field, _) in enumerate(REFUSED)]
)
def test_what_is_not_taken_is_refused_by_name(
    chat_client: httpx.Client, body: dict[str, Any], field: str, said: str
) -> None:
    found, message = refused(chat_client, **body)
    assert found == field
    assert said in message


def test_the_description_is_as_strict_as_the_checks(chat_client: httpx.Client) -> None:
    document = chat_client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["MessagesRequest"]
    whole = {"messages": [user()], "max_tokens": 4}
    good: list[dict[str, Any]] = [
        {},
        {"messages": [user([text("x", cache_control=MARK)]), CALLED, user([{**RESULT, "content": [text("a")]}])]},
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "speed": "standard"},
        {"context_management": {"edits": []}, "mcp_servers": []},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "system": [text("x")], "stop_sequences": ["a"]},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "metadata": {"user_id": "x"}},
    ]
    for body in good:
        assert fits({**whole, **body}, schema, document), body
    # What depends on values, on other fields or on the model, no schema says.
    allowed = [field for body, field, _ in REFUSED if fits({**whole, **body}, schema, document)]
    assert allowed == [
        *("stop_sequences", "output_config.format", "tools", "tools", "tool_choice", "tool_choice"),
        *("messages.1", "messages.1.content.0.tool_use_id", "messages.1.content.0.cache_control"),
        *("messages.0.content.4.cache_control", "cache_control", "messages", "max_tokens"),
    ]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for status in ("400", "4XX", "5XX"):
            answer = document["paths"][path]["post"]["responses"][status]
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/AnthropicErrorBody")


def test_errors_on_the_way_have_anthropics_shape(chat_llm: AsyncLLM) -> None:
    settings = ServerSettings(api_key=("first", "second"), max_body_bytes="1KiB", max_waiting=1)
    body = {"messages": [user()], **GREEDY}

    def kind(answer: httpx.Response, status: int) -> str:
        assert answer.status_code == status, answer.text
        found = answer.json()
        assert found["type"] == "error"
        assert found["error"]["message"]
        return str(found["error"]["type"])

    with serving(chat_llm, settings) as served:
        post = served.client.post
        for headers in ({}, {"x-api-key": "other"}, {"x-api-key": ""}, {"Authorization": "first"}):
            refusal = post("/v1/messages", json=body, headers=headers)
            assert kind(refusal, 401) == "authentication_error"
            assert "x-api-key" in refusal.json()["error"]["message"]
        twice = [("x-api-key", "first"), ("x-api-key", "first")]
        assert kind(post("/v1/messages", json=body, headers=twice), 401) == "authentication_error"
        key = {"x-api-key": "second", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        for headers in (key, {"Authorization": "Bearer first"}, {**key, "Authorization": "Bearer other"}):
            assert post("/v1/messages?beta=true", json=body, headers=headers).status_code == 200
        assert served.client.get("/v1/models", headers=key).status_code == 200
        assert kind(post("/v1/messages", content=b"{", headers=key), 400) == "invalid_request_error"
        assert kind(post("/v1/messages", content=b"[" * 99, headers=key), 400) == "invalid_request_error"
        assert kind(post("/v1/messages", content=b" " * 2000, headers=key), 413) == "request_too_large"
        assert kind(post("/v1/messages", json={**body, "model": "x"}, headers=key), 404) == "not_found_error"
        assert kind(post("/v1/messages/batches", json={}, headers=key), 404) == "not_found_error"
        assert kind(served.client.get("/v1/messages", headers=key), 405) == "invalid_request_error"
        for path in ("/v1/messagesx", "/v1/chat/completions"):
            assert "type" not in post(path, json={}, headers=key).json()
        served.context.gate._requests = KeyPortions(0, settings.key_weights)
        assert kind(post("/v1/messages", json=body, headers=key), 429) == "rate_limit_error"
        served.context.gate.close()
        assert kind(post("/v1/messages", json=body, headers=key), 503) == "overloaded_error"


def test_keys_keep_their_caches_apart(chat_llm: AsyncLLM) -> None:
    """Also those that come as Anthropic's header."""
    with serving(chat_llm, ServerSettings(api_key=("first", "second"))) as served:

        def cached(**headers: str) -> int:
            body = {"messages": [user(f"{LONG}!")], **GREEDY}
            answer = served.client.post("/v1/messages", json=body, headers=headers).json()
            return int(answer["usage"]["cache_read_input_tokens"])

        assert cached(**{"x-api-key": "first"}) < 10
        assert cached(**{"x-api-key": "second"}) < 10
        assert cached(Authorization="Bearer first") > 100


def test_a_failure_in_mid_stream(chat_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    left = broken_at(5, chat_served.llm, monkeypatch)
    found = events(chat_served.client)
    assert found[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "internal error", "param": None, "code": "internal_error"},
    }
    assert any(event["type"] == "content_block_delta" for event in found)
    left[0] = 1
    body = {"messages": [user()], "stream": True, **GREEDY}
    answer = chat_served.client.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")


def test_a_client_that_goes_away(chat_served: Served) -> None:
    body = {"messages": [user()], "stream": True, **GREEDY, "max_tokens": 4000}
    with chat_served.client.stream("POST", "/v1/messages", json=body) as answer:
        # The iterator is kept: httpx closes the connection when it is gone.
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        assert chat_served.llm.engine.has_work
    until_free(chat_served.llm)
