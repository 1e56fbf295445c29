"""Hints over HTTP: the envelope of vLLM and SGLang, Anthropic's marks, priorities; from raw bodies
and from the official client. Every answer says what was done with each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.http.settings import ServerSettings
from quire.text.tokenizer import Tokenizer

from .conftest import Served, pages_free, serving, wait_for
from .official import openai

TEXT = "def f(x):\n    return [x, x + 1, x + 2, x * 3, x ** 4]\n\n"
LIMITS: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
MARK = {"type": "ephemeral"}
KEYS = ("first", "second")


def action(kind: str, payload: Any = None, **changes: Any) -> dict[str, Any]:
    made = {
        "action_id": "a1",
        "action_type": kind,
        "action_version": "1.0",
        "payload": {} if payload is None else payload,
    }
    return {**made, **changes}


def envelope(*actions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m1", "actions": list(actions), **changes}


def post(served: Served, path: str, key: str = "", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = served.client.post(f"/v1/{path}", json={**LIMITS, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def hints(answer: Any) -> Any:
    return answer["quire"]["hints"]


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def evict_all(llm: AsyncLLM) -> None:
    with llm.engine.lock:
        while llm.engine.branches.evict():
            pass


@pytest.fixture(autouse=True)
def nothing_is_left(llm: AsyncLLM, chat_llm: AsyncLLM) -> Iterator[None]:
    yield
    for one in (llm, chat_llm):
        wait_for(lambda one=one: pages_free(one))  # type: ignore[misc]


@pytest.fixture(scope="module")
def keyed(llm: AsyncLLM) -> Iterator[Served]:
    settings = ServerSettings(api_key=KEYS, max_pinned_share=0.02, max_pinned_share_per_key=0.01, pinned_ttl=100)
    with serving(llm, settings) as found:
        yield found


# -- the envelope ----------------------------------------------------------------------------------


def test_a_pin_of_an_envelope(served: Served) -> None:
    pin = action("kv.pin", {"end": 10, "duration": 60})
    answer = post(served, "completions", prompt=TEXT, kv_hints=envelope(pin))
    assert hints(answer) == [{"hint": "pin", "id": "a1", "status": "done", "tokens": 10, "ttl": 60}]
    evict_all(served.llm)
    again = post(served, "completions", prompt=TEXT)
    assert cached(again) == 10
    assert "quire" not in again or "hints" not in again["quire"], "nothing is said of no hints"


def test_its_time_is_over(served: Served) -> None:
    pins, now = served.llm.engine.prefix_pins, [50.0]
    clock, pins.clock = pins.clock, lambda: now[0]
    try:
        post(served, "completions", prompt=TEXT, kv_hints=envelope(action("kv.pin", {"duration": 9.5})))
        now[0] += 9
        post(served, "completions", prompt="x")
        evict_all(served.llm)
        assert cached(post(served, "completions", prompt=TEXT)) > 10
        now[0] += 0.5
        post(served, "completions", prompt="x")
        evict_all(served.llm)
        assert cached(post(served, "completions", prompt=TEXT)) == 0
    finally:
        pins.clock = clock


def test_retained_ranges(served: Served) -> None:
    """vLLM's form: a priority over 0 pins up to the end of the range, 0 lets go."""
    directives = [
        {"start": 0, "end": 8, "priority": 100, "duration": 60},
        {"start": 8, "end": None, "priority": 0},
        {"covers_output": True, "priority": 0},
    ]
    retain = action("kv.retain", {"scope": None, "directives": directives})
    answer = post(served, "completions", prompt=TEXT, kv_hints=envelope(retain))
    kinds = {one["hint"]: one for one in hints(answer) if one["status"] == "done"}
    assert kinds["pin"]["tokens"] == 8
    assert kinds["demote"]["tokens"] == answer["usage"]["prompt_tokens"] + 1 - 8
    assert [one["reason"] for one in hints(answer) if one["status"] == "refused"] == [
        "the output is not pinned, only tokens of the prompt"
    ]
    assert cached(post(served, "completions", prompt=TEXT)) == 8


def test_a_demotion(served: Served) -> None:
    answer = post(served, "completions", prompt=TEXT, kv_hints=envelope(action("kv.demote", {"start": 5})))
    assert hints(answer) == [
        {"hint": "demote", "id": "a1", "status": "done", "tokens": answer["usage"]["prompt_tokens"] + 1 - 5}
    ]
    assert cached(post(served, "completions", prompt=TEXT)) == 5


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_prefetch_without_tokens(served: Served, path: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    asked = envelope(action("kv.prefetch"))
    answer = post(served, path, **prompt, max_tokens=0, kv_hints=asked)
    size = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
    assert hints(answer) == [{"hint": "prefetch", "id": "a1", "status": "done", "tokens": size}]
    again = post(served, path, **prompt, kv_hints=asked)
    assert cached(again) == size - 1
    assert again["usage"]["completion_tokens"] == 2
    assert hints(again)[0]["status"] == "done"
    refused = served.client.post(f"/v1/{path}", json={**prompt, "max_tokens": 0, "stream": True, "kv_hints": asked})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    refused = served.client.post(f"/v1/{path}", json={**prompt, "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_each_prompt_has_answers(served: Served) -> None:
    pin = envelope(action("kv.pin", {"end": 4}))
    answer = post(served, "completions", prompt=[TEXT, "class Other:\n    pass\n"], kv_hints=pin)
    assert [(one["prompt"], one["status"], one["tokens"]) for one in hints(answer)] == [(0, "done", 4), (1, "done", 4)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (envelope(action("kv.fetch", {"block_hashes": [1]})), "this server acts on"),
        (envelope(action("kv.deref")), "this server acts on"),
        (envelope(action("kv.pin", action_version="2.0")), "action_version"),
        (envelope(action("kv.pin"), protocol_version="0.2"), "protocol_version"),
        (envelope(action("kv.demote", {"session_id": "s"})), "session_id"),
        (envelope(action("kv.retain", {"scope": "s", "directives": []})), "scope"),
    ],
)
def test_what_is_not_done_is_answered(served: Served, given: Any, reason: str) -> None:
    """An orchestrator's envelope may hold actions for others; the request goes on."""
    answer = post(served, "completions", prompt=TEXT, kv_hints=given)
    assert [(one["id"], one["status"]) for one in hints(answer)] == [("a1", "refused")]
    assert reason in hints(answer)[0]["reason"]


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"kv_hints": []}, "kv_hints"),
    ({"kv_hints": {"message_id": "m", "actions": []}}, "kv_hints.protocol_version"),
    ({"kv_hints": {"protocol_version": "0.1", "actions": []}}, "kv_hints.message_id"),
    ({"kv_hints": {"protocol_version": "0.1", "message_id": "m"}}, "kv_hints.actions"),
    ({"kv_hints": envelope({"action_type": "kv.pin", "action_version": "1.0"})}, "kv_hints.actions.0.action_id"),
    ({"kv_hints": envelope(action("kv.pin", action_id=3))}, "kv_hints.actions.0.action_id"),
    ({"kv_hints": envelope(action("kv.pin", []))}, "kv_hints.actions.0.payload"),
    ({"kv_hints": envelope(action("kv.pin", {"end": 0}))}, "kv_hints.actions.0.payload.end"),
    ({"kv_hints": envelope(action("kv.pin", {"end": True}))}, "kv_hints.actions.0.payload.end"),
    ({"kv_hints": envelope(action("kv.pin", {"duration": 0}))}, "kv_hints.actions.0.payload.duration"),
    ({"kv_hints": envelope(action("kv.pin", {"tokens": 3}))}, "kv_hints.actions.0.payload.tokens"),
    (
        {"kv_hints": envelope(action("kv.demote"), action("kv.demote", {"start": -1}))},
        "kv_hints.actions.1.payload.start",
    ),
    ({"kv_hints": envelope(action("kv.prefetch", {"tokens": [1]}))}, "kv_hints.actions.0.payload.tokens"),
    ({"kv_hints": envelope(action("kv.retain"))}, "kv_hints.actions.0.payload.directives"),
    ({"kv_hints": envelope(action("kv.retain", {"directives": [3]}))}, "kv_hints.actions.0.payload.directives.0"),
    (
        {"kv_hints": envelope(action("kv.retain", {"directives": [{"priority": 101}]}))},
        "kv_hints.actions.0.payload.directives.0.priority",
    ),
    ({"kv_hints": envelope(*[action("kv.pin")] * 17)}, "kv_hints.actions"),
    ({"kv_hints": envelope(*[action("kv.other")] * 65)}, "kv_hints.actions"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"cache_control": {"type": "persistent"}}, "cache_control"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"cache_control": {"type": "ephemeral", "ttl": 300}}, "cache_control.ttl"),
    ({"cache_control": {"type": "ephemeral", "other": 1}}, "cache_control"),
]


@pytest.mark.parametrize(("body", "param"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_ones_are_refused(served: Served, body: Any, param: str) -> None:
    answer = served.client.post("/v1/completions", json={**LIMITS, "prompt": TEXT, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(served.llm.engine.prefix_pins) == 0


# -- marks -----------------------------------------------------------------------------------------


def tokens_of(served: Served, text: str) -> int:
    tokenizer = served.llm.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    return len(tokenizer.encode(text, add_special_tokens=False))


def test_marks_pin_what_stands_before_them(chat_served: Served) -> None:
    """On parts and on messages; up to their own ends, and no further."""
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "x", "cache_control": MARK}],
        },
        {"role": "user", "content": "Who?", "cache_control": {**MARK, "ttl": "1h"}},
    ]
    answer = post(chat_served, "chat/completions", messages=messages)
    first, second = hints(answer)
    one = f"<|user|>{TEXT}\nx"
    assert first == {
        "hint": "pin",
        "id": "messages.0.content.1",
        "status": "done",
        "tokens": first["tokens"],
        "ttl": 300,
    }
    assert tokens_of(chat_served, one) - 1 <= first["tokens"] <= tokens_of(chat_served, one)
    assert (second["id"], second["ttl"]) == ("messages.1", 3600)
    two = f"{one}<|end|><|user|>Who?"
    assert tokens_of(chat_served, two) - 1 <= second["tokens"] <= tokens_of(chat_served, two)
    evict_all(chat_served.llm)
    unmarked = [{"role": "system", "content": f"{TEXT}\nx"}, {"role": "user", "content": "Why not? Never mind."}]
    again = post(chat_served, "chat/completions", messages=unmarked)
    assert cached(again) >= first["tokens"], "the template has not seen the marks"


def test_marks_on_tools(served: Served) -> None:
    """The definitions up to the marked one; the template sees none of it."""
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    second = {**tool, "function": {**tool["function"], "name": "g"}}
    tools = [tool, {**second, "cache_control": MARK}]
    body = {"messages": [{"role": "user", "content": TEXT}]}
    none = post(served, "chat/completions", **body, tools=tools, tool_choice="none")
    assert hints(none)[0]["status"] == "done"
    evict_all(served.llm)
    answer = post(served, "chat/completions", **body, tools=tools, tool_choice="required", max_tokens=40)
    (found,) = hints(answer)
    assert (found["id"], found["status"]) == ("tools.1", "done")
    evict_all(served.llm)
    other = {"messages": [{"role": "user", "content": "class Other:"}], "tools": [tool, second], "max_tokens": 40}
    again = post(served, "chat/completions", **other, tool_choice="required")
    assert cached(again) >= found["tokens"] > 20


def test_marks_that_the_template_does_not_show(chat_served: Served) -> None:
    """It writes no tools: so there is nothing to pin at one."""
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "cache_control": MARK}}
    answer = post(
        chat_served,
        "chat/completions",
        messages=[{"role": "user", "content": TEXT}],
        tools=[tool],
        tool_choice="required",
        max_tokens=40,
    )
    assert [(one["id"], one["status"]) for one in hints(answer)] == [("tools.0", "refused")]
    assert "template" in hints(answer)[0]["reason"]


def test_a_mark_of_the_whole_request(served: Served) -> None:
    answer = post(served, "completions", prompt=TEXT, cache_control=MARK)
    assert hints(answer)[0]["tokens"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a", "cache_control": 1}], "messages.0.cache_control"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}],
            "messages.0.content.0.cache_control",
        ),
        (
            [{"role": "user", "content": "a", "cache_control": {**MARK, "ttl": "1d"}}],
            "messages.0.cache_control.ttl",
        ),
        ([{"role": "user", "content": "a", "cache_control": MARK}] * 5, "messages.4.cache_control"),
    ],
)
def test_malformed_marks_are_refused(chat_served: Served, messages: Any, param: str) -> None:
    answer = chat_served.client.post("/v1/chat/completions", json={**LIMITS, "messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_null_mark_is_none(chat_served: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}]
    assert "hints" not in post(chat_served, "chat/completions", messages=messages)["quire"]


# -- sessions, streams, clients --------------------------------------------------------------------


@pytest.mark.parametrize("road", ["chat/completions", "completions", "sessions", "batch"])
@pytest.mark.parametrize("stream", [False, True])
def test_sessions_take_them(chat_served: Served, road: str, stream: bool) -> None:
    """A pin is of all that the session holds, and outlives it."""
    client, llm = chat_served.client, chat_served.llm
    names = [client.post("/v1/sessions", json={"prompt": TEXT}).json()["id"] for _ in range(1 + (road == "batch"))]
    (name, *_), chat = names, road in ("chat/completions", "sessions")
    body: dict[str, Any] = {
        "priority": 3,
        "kv_hints": envelope(
            action("kv.pin", {"end": 9}, action_id="begin"), action("kv.demote", {"start": 12}), action("kv.prefetch")
        ),
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "stream": stream,
    }
    if chat:
        body["messages"] = [{"role": "user", "content": "a", "cache_control": MARK}]
    match road:
        case "sessions":
            path = f"sessions/{name}/generate"
        case "batch":
            path, body["ids"] = "sessions/generate", names
        case _:
            path, body["session_id"] = road, name
    answer = last(chat_served, path, **body) if stream else post(chat_served, path, **body)
    found = hints(answer)
    assert {one["status"] for one in found} == {"done"}
    kinds = ["demote", "pin", "pin", *(["pin"] if chat else []), "prefetch", "priority"]
    assert sorted(one["hint"] for one in found) == sorted(kinds * len(names))
    assert {one.get("prompt") for one in found} == ({0, 1} if road == "batch" else {None})
    held = {one["id"]: one["tokens"] for one in found if one["hint"] == "pin"}
    size = held["cache_control"]
    assert held["begin"] == 9
    assert held.get("messages.0", size) == size > 12
    tokens = client.get(f"/v1/sessions/{name}").json()["tokens"]
    for one in names:
        assert client.delete(f"/v1/sessions/{one}").status_code == 200
    evict_all(llm)
    assert cached(post(chat_served, "completions", prompt=[*tokens[:size], 5])) == size


def last(served: Served, path: str, **body: Any) -> Any:
    """The last event of a stream."""
    answer = served.client.post(f"/v1/{path}", json={**LIMITS, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return json.loads(lines[-1])


def test_a_session_that_is_demoted_and_brought_back(served: Served) -> None:
    client = served.client
    name = client.post("/v1/sessions", json={"prompt": TEXT}).json()["id"]
    path = f"sessions/{name}/generate"

    def computed() -> int:
        return int(client.get(f"/v1/sessions/{name}").json()["num_computed"])

    post(served, path, kv_hints=envelope(action("kv.demote")))
    assert computed() == 0
    fetch = envelope(action("kv.prefetch", action_id="back"), action("kv.pin"))
    answer = post(served, path, max_tokens=0, kv_hints=fetch)
    size = answer["num_tokens"]
    assert computed() == size - 1
    assert answer["choices"][0]["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0
    assert sum(answer["quire"]["reuse"]["by_tier"].values()) == answer["quire"]["reuse"]["cached"]
    pin, fetched = hints(answer)
    assert (pin["status"], fetched) == ("refused", {"hint": "prefetch", "id": "back", "status": "done", "tokens": size})
    for more, param in (({"prompt": "x"}, "prompt"), ({"stream": True}, "stream"), ({"kv_hints": None}, "max_tokens")):
        refused = client.post(f"/v1/{path}", json={"max_tokens": 0, "kv_hints": fetch, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert client.get(f"/v1/sessions/{name}").json()["in_use"] is None
    assert client.delete(f"/v1/sessions/{name}").status_code == 200


def test_malformed_ones_of_sessions_are_refused(served: Served) -> None:
    name = served.client.post("/v1/sessions", json={"prompt": TEXT}).json()["id"]
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"priority": 2**31}, "priority"),
        ({"cache_control": {"type": "x"}}, "cache_control"),
        ({"kv_hints": envelope(action("kv.pin", {"end": 0}))}, "kv_hints.actions.0.payload.end"),
        (
            {"messages": [{"role": "user", "content": "a", "cache_control": {"type": "x"}}]},
            "messages.0.cache_control",
        ),
    ]
    for body, param in bodies:
        for path, more in ((f"sessions/{name}/generate", {}), ("sessions/generate", {"ids": [name]})):
            if more and "messages" in body:
                continue
            answer = served.client.post(f"/v1/{path}", json={**LIMITS, **body, **more})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert len(served.client.get(f"/v1/sessions/{name}").json()["tokens"]) > 3
    assert served.client.delete(f"/v1/sessions/{name}").status_code == 200


@pytest.mark.parametrize("with_usage", [False, True])
def test_streams_end_with_what_was_done(served: Served, with_usage: bool) -> None:
    """On the last chunk with a choice, or beside the usage."""
    body = {**LIMITS, "prompt": TEXT, "stream": True, "kv_hints": envelope(action("kv.pin", {"end": 6}))}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    told = [chunk for chunk in chunks if "quire" in chunk]
    assert told == chunks[-1:]
    assert hints(told[0])[0]["tokens"] == 6
    assert bool(told[0]["choices"]) != with_usage
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert text == post(served, "completions", prompt=TEXT)["choices"][0]["text"]


def test_the_official_client(chat_served: Served) -> None:
    with openai().OpenAI(
        base_url=f"{chat_served.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as api:
        marked: Any = [{"role": "user", "content": [{"type": "text", "text": TEXT, "cache_control": MARK}]}]
        options: Any = {"model": "tiny-chat", "messages": marked, "temperature": 0, "max_tokens": 3}
        extra = {"kv_hints": envelope(action("kv.pin", {"end": 5})), "priority": 7}
        answer = api.chat.completions.create(**options, extra_body=extra)
        told = answer.model_extra["quire"]["hints"]
        assert [(one["hint"], one["status"]) for one in told] == [
            ("priority", "done"),
            ("pin", "done"),
            ("pin", "done"),
        ]
        chunks = list(api.chat.completions.create(**options, extra_body=extra, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
        assert len(chunks[-1].model_extra["quire"]["hints"]) == 3
        with pytest.raises(openai().BadRequestError) as caught:
            api.chat.completions.create(**options, extra_body={"kv_hints": {"actions": []}})
        assert caught.value.param == "kv_hints.protocol_version"


# -- keys ------------------------------------------------------------------------------------------


def test_pins_keep_to_the_share_of_a_key(keyed: Served) -> None:
    """Beyond it a pin is refused; another key has its own share, and times are cut to the
    server's.
    """
    pin = envelope(action("kv.pin", {"duration": 1000}))
    size = keyed.llm.engine.runner.state.pool_sizes()[0]
    page = keyed.llm.engine.runner.state.page_size
    long = [7 + number % 11 for number in range(int(size * 0.01) * page - 1)]
    (first,) = hints(post(keyed, "completions", "first", prompt=long, kv_hints=pin))
    assert (first["status"], first["tokens"], first["ttl"]) == ("done", len(long), 100)
    (refused,) = hints(post(keyed, "completions", "first", prompt=TEXT, kv_hints=pin))
    assert (refused["status"], "tokens" in refused) == ("refused", False)
    assert "your pinned" in refused["reason"]
    (other,) = hints(post(keyed, "completions", "second", prompt=TEXT, kv_hints=pin))
    assert other["status"] == "done"
    name = keyed.client.post(
        "/v1/sessions", json={"pin": True, "prompt": TEXT}, headers={"authorization": "Bearer first"}
    )
    assert name.status_code == 429, "pinned sessions and prompts share one account"


def test_keys_do_not_touch_each_others_pins(keyed: Served) -> None:
    """Neither find, nor demote, nor prolong."""
    pins, now = keyed.llm.engine.prefix_pins, [50.0]
    clock, pins.clock = pins.clock, lambda: now[0]
    try:
        post(keyed, "completions", "first", prompt=TEXT, kv_hints=envelope(action("kv.pin", {"duration": 10})))
        actions = envelope(action("kv.pin", {"duration": 50, "end": 3}), action("kv.demote", {}))
        answer = post(keyed, "completions", "second", prompt=TEXT, kv_hints=actions)
        assert cached(answer) == 0
        evict_all(keyed.llm)
        assert cached(post(keyed, "completions", "first", prompt=TEXT)) > 10
        now[0] += 11
        post(keyed, "completions", "second", prompt="x")
        evict_all(keyed.llm)
        assert cached(post(keyed, "completions", "first", prompt=TEXT)) == 0
        assert cached(post(keyed, "completions", "second", prompt=TEXT)) == 3
    finally:
        pins.clock = clock


def test_each_key_has_priorities_of_its_own(keyed: Served, served: Served) -> None:
    """They order its requests, not those of other keys, so all are taken."""
    for server, priority in ((keyed, 5), (keyed, 0), (keyed, -1), (served, -1)):
        key = "first" if server is keyed else ""
        (answer,) = hints(post(server, "completions", key, prompt=TEXT, priority=priority))
        assert answer == {"hint": "priority", "id": "priority", "status": "done"}
