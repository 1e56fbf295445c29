"""Bodies of completions and chats that are refused: status, ``param``, the shape of the error,
streamed or not; nothing runs.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.server.http.foreign_fields import UNSUPPORTED

from .conftest import Served

MESSAGES = [{"role": "user", "content": "x"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 16_385}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**9}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 30, "max_tokens": 3}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x"] * 300}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [99_999]}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"cache_salt": 3}, "cache_salt"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(", "json": None}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"session_id": "session-unknown"}, "session_id"),
    ({"model": 3}, "model"),
]

COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": True}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": [1.5]}, "prompt.0"),
    ({"prompt": ["a", 1]}, "prompt.1"),
    ({"prompt": [1, "a"]}, "prompt.0"),
    ({"prompt": ["a", []]}, "prompt.1"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": [[1], [True]]}, "prompt.1"),
    ({"prompt": [99_999]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt.1"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [5] * 4096}, "prompt"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x " * 9000}]}, "messages"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "n stop"}}]}, "tools"),
    ({"tools": [FUNCTION, FUNCTION], "tool_choice": "required"}, "tools"),
    ({"tools": [FUNCTION], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": ["required"]}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "x"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": "required", "response_format": {"type": "yaml"}}, "response_format.type"),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tokenizer_template": ""}}, "chat_template_kwargs.tokenizer_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


def refused(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    found = []
    for stream in (False, True):
        text = json.dumps({**body, "stream": stream})
        answer = client.post(path, content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == (404 if param == "session_id" else 400), answer.text
        error = answer.json()["error"]
        assert set(answer.json()) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert error["param"] == param, error
        found.append(error)
    assert found[0] == found[1]


@pytest.mark.product(2)
@pytest.mark.parametrize(("body", "param"), BOTH, ids=lambda value: str(value)[:60])
def test_in_both(chat_served: Served, body: dict[str, Any], param: str) -> None:
    before = chat_served.llm.engine.metrics.generation_tokens.value
    refused(chat_served.client, "/v1/completions", {"prompt": "x", **body}, param)
    refused(chat_served.client, "/v1/chat/completions", {"messages": MESSAGES, **body}, param)
    assert chat_served.llm.engine.metrics.generation_tokens.value == before
    assert not chat_served.llm.engine.has_work


@pytest.mark.parametrize(("body", "param"), COMPLETIONS, ids=lambda value: str(value)[:60])
def test_in_completions(chat_served: Served, body: dict[str, Any], param: str) -> None:
    refused(chat_served.client, "/v1/completions", {"prompt": "x", **body}, param)


@pytest.mark.parametrize(("body", "param"), CHATS, ids=lambda value: str(value)[:60])
def test_in_chats(chat_served: Served, body: dict[str, Any], param: str) -> None:
    refused(chat_served.client, "/v1/chat/completions", {"messages": MESSAGES, **body}, param)


@pytest.mark.product(4)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_of_other_servers(chat_served: Served, name: str) -> None:
    """Refused by name, unless they ask for nothing."""
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "repetition_penalty": 1.1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "repeat_penalty": 1.1}),
    ):
        refused(chat_served.client, path, {**body, name: {"some": "thing"}}, name)
        for harmless in (None, *UNSUPPORTED[name][0]):
            answer = chat_served.client.post(path, json={**body, name: harmless})
            assert answer.status_code == 200, answer.text


def test_unknown_fields_are_tolerated(chat_client: httpx.Client) -> None:
    body = {"max_tokens": 1, "no_such_field": {"a": [1]}, "user": "me", "metadata": {"a": "b"}, "stream": None}
    assert chat_client.post("/v1/completions", json={"prompt": "x", **body}).status_code == 200
    assert chat_client.post("/v1/chat/completions", json={"messages": MESSAGES, **body}).status_code == 200
    assert chat_client.post("/v1/completions", json={"prompt": "x", "best_of": 1, **body}).status_code == 200


def test_options_of_streams_without_a_stream(chat_client: httpx.Client) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True}}
    answer = chat_client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"
    body |= {"stream": True, "stream_options": {"include_obfuscation": True}}
    answer = chat_client.post("/v1/completions", json=body)
    assert answer.json()["error"]["param"] == "stream_options.include_obfuscation"


def test_unknown_models(chat_client: httpx.Client) -> None:
    for model in ("nothing", "", "../tiny-chat", 'a"\r\nX: y'):
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
            answer = chat_client.post(path, json={**body, "model": model, "stream": True})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")


def test_nothing_can_be_put_into_an_event(chat_client: httpx.Client) -> None:
    """What comes back in chunks is JSON on one line, whatever was asked for."""
    text = 'data: [DONE]\n\ndata: {"x": 1}\r\n\r\n\u2028\u2029\x85'
    body = {"prompt": text, "echo": True, "max_tokens": 1, "stream": True}
    raw = chat_client.post("/v1/completions", json=body, headers={"X-Request-Id": 'a"b'})
    lines = raw.text.splitlines()
    assert [line for line in lines[1::2] if line] == []
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"].startswith(text)
    surrogate = {"prompt": "x", "max_tokens": 2, "user": "\ud800", "session_id": None}
    answer = chat_client.post(
        "/v1/completions", content=json.dumps(surrogate), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200
