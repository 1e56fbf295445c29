"""What clients of OpenAI's protocol send and read: overflow, histories, fields of other servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import AsyncLLM

from .conftest import OPTIONS, Served, serving
from .test_chat import MESSAGES, ask


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("/v1/completions", {"prompt": [5] * 5000}, "prompt", "your prompt has 5000 tokens"),
        ("/v1/completions", {"prompt": [5], "max_tokens": 10**6}, "max_tokens", "requested 1000001 tokens"),
        ("/v1/completions", {"prompt": "x " * 10**6}, "prompt", "The text has at least"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 9000}]}, "messages", "your prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 10**6}]}, "messages", "The messages"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 10**6},
            "max_completion_tokens",
            "in the completion",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_overflow(chat_served: Served, path: str, body: dict[str, Any], param: str, problem: str, stream: bool) -> None:
    """As programs recognise it: by the code, or by the beginning of the message."""
    answer = chat_served.client.post(path, json={**body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(
        f"This model's maximum context length is {chat_served.llm.engine.max_model_len} tokens. "
    )
    assert problem in error["message"]


def test_overflow_of_the_pool() -> None:
    llm = AsyncLLM("tiny-python", **{**OPTIONS, "kv_cache_memory": "512KiB"})
    with serving(llm) as small:
        longest = small.client.get("/v1/models").json()["data"][0]["max_model_len"]
        for body in ({"prompt": [5] * (longest + 1), "max_tokens": 1}, {"prompt": [5], "max_tokens": longest + 1}):
            answer = small.client.post("/v1/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["message"].startswith(f"This model's maximum context length is {longest} tokens here")
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def walking(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """What talks to a model whose template walks over arguments, and knows no content of None."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{% endfor %}"
        "{{ (m.content or '') + (m.reasoning_content or '') }}<|end|>{% endfor %}<|assistant|>"
    )
    llm = AsyncLLM(chat_folder, **OPTIONS, chat_template=template)
    with serving(llm) as found:
        yield found.client
    asyncio.run(llm.close())


HISTORIES: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}]
    for function in (
        {"name": "weather", "arguments": '{"city": "Ro'},
        {"name": "weather", "arguments": ""},
        {"name": "weather", "arguments": "[1]"},
    )
] + [
    [{"role": "assistant", "content": None}],
    [{"role": "assistant", "content": None, "refusal": "No.", "tool_calls": []}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
    [{"role": "assistant", "content": None, "reasoning_content": "Hm.", "function_call": None, "audio": None}],
    [{"role": "developer", "content": "Be brief."}],
]


@pytest.mark.parametrize("history", HISTORIES)
def test_a_conversation_goes_on(chat_client: httpx.Client, walking: httpx.Client, history: list[Any]) -> None:
    messages = [*MESSAGES, *history, {"role": "tool", "tool_call_id": "a", "content": None}, *MESSAGES]
    for client in (chat_client, walking):
        for more in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}):
            assert ask(client, messages, max_tokens=1, **more)["choices"][0]["message"]["role"] == "assistant"
