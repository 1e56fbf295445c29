"""ollama's API, as its clients use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.base.errors import PoolExhausted
from quire.server.http.settings import ServerSettings

from .conftest import Served, serving, wait_for

GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def client(chat_llm: AsyncLLM) -> Iterator[httpx.Client]:
    with serving(chat_llm, ServerSettings(served_model_name="tiny", tool_call_parser="hermes")) as served:
        yield served.client


def post(client: httpx.Client, path: str, **body: Any) -> httpx.Response:
    return client.post(f"/api/{path}", json={"model": "tiny", "options": GREEDY, **body})


def answer(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    found = post(client, path, stream=False, **body)
    assert found.status_code == 200, found.text
    return dict(found.json())


def lines(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    found = post(client, path, **body)
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in found.text.splitlines()]


def test_a_chat_is_answered_as_by_openais_endpoint(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    theirs = client.post("/v1/chat/completions", json=body).json()
    ours = answer(client, "chat", messages=messages)
    assert ours["message"] == {"role": "assistant", "content": theirs["choices"][0]["message"]["content"]}
    assert (ours["done"], ours["done_reason"], ours["model"]) == (True, "length", "tiny")
    assert ours["eval_count"] == 8
    assert ours["prompt_eval_count"] == theirs["usage"]["prompt_tokens"]
    assert ours["total_duration"] >= ours["eval_duration"] > 0
    streamed = lines(client, "chat", messages=messages)
    assert "".join(one["message"]["content"] for one in streamed) == ours["message"]["content"]
    assert [one["done"] for one in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["done_reason"] == "length"
    assert streamed[-1]["eval_count"] == 8


def test_durations_are_of_the_prompt_and_of_the_text(client: httpx.Client) -> None:
    messages = {"messages": [{"role": "user", "content": "x = 1"}]}
    for path, asked in [
        ("chat", messages),
        ("generate", {"prompt": "x = 1"}),
        ("generate", {"prompt": "x", "raw": True}),
    ]:
        for found in (answer(client, path, **asked), lines(client, path, **asked)[-1]):
            assert found["total_duration"] >= found["prompt_eval_duration"] + found["eval_duration"] - 2
            assert min(found["prompt_eval_duration"], found["eval_duration"]) > 0


@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat", {"messages": [{"role": "user", "content": "x = 1"}]}), ("generate", {"prompt": "x", "raw": True})],
)
def test_a_stream_that_breaks_ends_with_ollamas_error(
    client: httpx.Client, chat_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    engine = chat_llm.engine
    execute = engine.runner.execute

    def broken(step: Any) -> Any:
        if step.chunks and any(one.output.text for samples in engine.requests.by_id.values() for one in samples):
            raise PoolExhausted("no room")
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", broken)
    *before, last = lines(client, path, **asked)
    assert [one["done"] for one in before] == [False] * len(before)
    assert last == {"error": "no room"}


def test_a_prompt_is_a_chat_of_one_message(client: httpx.Client) -> None:
    chat = answer(client, "chat", messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "x = 1"}])
    text = answer(client, "generate", prompt="x = 1", system="s")
    assert text["response"] == chat["message"]["content"]
    assert "".join(one["response"] for one in lines(client, "generate", prompt="x = 1", system="s")) == text["response"]


def test_a_raw_prompt_is_continued_as_it_is(client: httpx.Client) -> None:
    body = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 8}
    theirs = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert answer(client, "generate", prompt="def add(a, b):", raw=True)["response"] == theirs
    streamed = lines(client, "generate", prompt="def add(a, b):", raw=True)
    assert "".join(one["response"] for one in streamed) == theirs
    body = {"model": "tiny", "prompt": "x", "raw": True, "options": {"temperature": 0}}
    with client.stream("POST", "/api/generate", json=body) as long:
        assert sum(1 for _ in zip(range(20), long.iter_lines(), strict=False)) == 20, "not the 16 tokens of OpenAI's"


def test_forms(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    messages = [{"role": "user", "content": "a number"}]
    found = answer(client, "chat", messages=messages, format=schema, options={"temperature": 0, "num_predict": 40})
    assert list(json.loads(found["message"]["content"])) == ["a"]
    assert post(client, "chat", messages=messages, format="xml").json() == {
        "error": "format must be \"json\" or a JSON schema, got 'xml'"
    }


def test_calls_have_objects_and_results_have_names(client: httpx.Client) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "clear"},
    ]
    tools = [{"type": "function", "function": function}]
    assert answer(client, "chat", messages=messages, tools=tools)["eval_count"] == 8
    wrong = [{"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]}]
    assert "tool_calls" in post(client, "chat", messages=wrong).json()["error"]
    assert "only text" in post(client, "chat", messages=[{"role": "user", "images": ["x"]}]).json()["error"]


def test_names_may_have_a_tag(client: httpx.Client) -> None:
    found = answer(client, "chat", model="tiny:latest", messages=[{"role": "user", "content": "x"}])
    assert found["model"] == "tiny"
    missing = post(client, "chat", model="other", messages=[{"role": "user", "content": "x"}])
    assert missing.status_code == 404
    assert "there is no model 'other'" in missing.json()["error"]


@pytest.mark.parametrize(
    ("path", "said"), [("chat", {"message": {"role": "assistant", "content": ""}}), ("generate", {"response": ""})]
)
def test_without_a_prompt_the_model_is_only_looked_for(path: str, said: dict[str, Any], client: httpx.Client) -> None:
    found = post(client, path, keep_alive="5m").json()
    assert found["done_reason"] == "load"
    assert said.items() <= found.items()
    assert post(client, path, model="other").status_code == 404


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"template": "x"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["x"]}, "images"),
        ({"raw": True, "system": "x"}, "system"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"think": "high"}, "think is not supported"),
        ({"think": True}, "think is not supported"),
        ({"options": {"num_predict": 0}}, "num_predict must be"),
        ({"options": {"n": 2}}, "n is not supported"),
        ({"options": {"logprobs": True}}, "beside options"),
        ({"options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"top_logprobs": 2, "raw": True}, "top_logprobs needs logprobs"),
    ],
)
def test_nothing_is_ignored_that_would_change_the_text(fields: dict[str, Any], name: str, client: httpx.Client) -> None:
    found = post(client, "generate", prompt="x", **fields)
    assert found.status_code == 400
    assert name in found.json()["error"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("generate", {"prompt": "x"}),
        ("generate", {"prompt": "x", "raw": True}),
    ],
    ids=str,
)
def test_wrong_types_are_refused_by_name(path: str, asked: dict[str, Any], client: httpx.Client) -> None:
    for options in ({"temperature": "hot"}, {"seed": 1.5}, {"stop": 3}, {"logit_bias": {"1": "x"}}, {"top_k": []}):
        found = post(client, path, **asked, options=options)
        assert (found.status_code, next(iter(options)) in found.json()["error"]) == (400, True), found.text


def test_wrong_tools_are_refused_by_name(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x"}]
    for tools, name in (([{}], "tools.0.type"), ([{"type": "function", "function": {"name": 3}}], "function.name")):
        found = post(client, "chat", messages=messages, tools=tools)
        assert (found.status_code, name in found.json()["error"]) == (400, True), found.text


def flat(one: dict[str, Any]) -> list[Any]:
    """Return the tokens of an entry, and their bytes."""
    return [(token["token"], token["bytes"]) for token in (one, *one["top_logprobs"])]


def test_log_probabilities_are_those_of_openais_endpoint(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    theirs = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(theirs) == 8
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    for path, asked in (
        ("chat", {"messages": messages}),
        ("generate", {"prompt": "def add(a, b):"}),
        ("generate", {"prompt": prompt, "raw": True}),
    ):
        told = {**asked, "logprobs": True, "top_logprobs": 2}
        streamed = [one for line in lines(client, path, **told) for one in line.get("logprobs", ())]
        for ours in (answer(client, path, **told)["logprobs"], streamed):
            assert [flat(one) for one in ours] == [flat(one) for one in theirs]
            assert [one["logprob"] for one in ours] == pytest.approx([one["logprob"] for one in theirs])
        (least,) = {len(one["top_logprobs"]) for one in answer(client, path, **asked, logprobs=True)["logprobs"]}
        assert least == 0
        assert "logprobs" not in answer(client, path, **asked)


def test_options_about_the_machine_and_the_body_have_no_effect(client: httpx.Client) -> None:
    plain = answer(client, "generate", prompt="x")
    machine = {"num_ctx": 2048, "num_gpu": 99, "num_thread": 2, "use_mmap": True, "session_id": "no", "stop": []}
    again = answer(client, "generate", prompt="x", options={**GREEDY, **machine})
    assert again["response"] == plain["response"]


def test_what_is_told_of_models(client: httpx.Client) -> None:
    (listed,) = client.get("/api/tags").json()["models"]
    assert (listed["name"], listed["model"]) == ("tiny", "tiny")
    assert listed["details"]["family"] == "llama"
    shown = client.post("/api/show", json={"model": "tiny:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] > 0
    assert client.post("/api/show", json={"name": "tiny"}).json() == shown
    assert client.post("/api/show", json={}).status_code == 400
    assert client.get("/api/ps").json()["models"][0]["name"] == "tiny"
    assert client.get("/api/version").json() == {"version": client.get("/version").json()["version"]}
    assert "embeddings" in client.post("/api/embed", json={"model": "tiny", "input": "x"}).json()["error"]


def test_a_client_that_goes_away_cancels(client: httpx.Client, chat_llm: AsyncLLM) -> None:
    body = {"model": "tiny", "prompt": "x", "options": {"num_predict": 3000, "temperature": 0}}
    with client.stream("POST", "/api/generate", json=body) as stream:
        next(stream.iter_lines())
    wait_for(lambda: chat_llm.engine.timeline is not None and not client.get("/v1/state").json()["requests"]["running"])


def test_errors_of_the_gate_have_ollamas_shape(chat_llm: AsyncLLM) -> None:
    with serving(chat_llm, ServerSettings(api_key=("secret",))) as served:
        found = served.client.get("/api/tags")
        assert (found.status_code, list(found.json())) == (401, ["error"])
        assert isinstance(found.json()["error"], str)
        page: Served = served
        origin = {"origin": page.url, "sec-fetch-site": "same-origin", "authorization": "Bearer secret"}
        told = page.client.post("/api/show", json={"model": page.context.model_name}, headers=origin)
        assert told.status_code == 200
