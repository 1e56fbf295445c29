"""The official ``openai`` client, sync and async, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.exact import TINY_PYTHON

from .conftest import Served
from .official import openai
from .test_completions import alone
from .test_disconnects import broken_at, generated, until_free

PROMPT = "def fib(n):"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def api(served: Served) -> Iterator[Any]:
    with openai().OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as client:
        yield client


@pytest.fixture
def chat_api(chat_served: Served) -> Iterator[Any]:
    with openai().OpenAI(
        base_url=f"{chat_served.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as client:
        yield client


def test_text_and_streams(api: Any, served: Served) -> None:
    wanted = alone(served.llm, PROMPT, temperature=0, max_tokens=20).outputs[0]
    options: dict[str, Any] = {"model": "tiny-python", "prompt": PROMPT, "temperature": 0, "max_tokens": 20}
    whole = api.completions.create(**options)
    assert whole.choices[0].text == wanted.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    chunks = list(api.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == wanted.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert chunks[-2].choices[0].finish_reason == "length"


def test_a_chat_with_the_bundled_model_needs_nothing_else(api: Any, served: Served) -> None:
    """What everybody tries first: streamed and whole it is the engine's own answer."""
    messages = [{"role": "user", "content": "Say this is a test"}]
    options = {"model": "tiny-python", "messages": messages, "seed": 1, "max_tokens": 40}
    whole = api.chat.completions.create(**options)
    prompt = whole.usage.prompt_tokens
    assert served.llm.tokenizer is not None
    assert prompt == len(served.llm.tokenizer.encode("Say this is a test"))
    assert whole.choices[0].message.role == "assistant"
    chunks = api.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    wanted = alone(served.llm, "Say this is a test", seed=1, max_tokens=40).outputs[0]
    assert whole.choices[0].message.content == wanted.text


def test_samples_seeds_and_stops(api: Any, served: Served) -> None:
    params = {"seed": 17, "max_tokens": 12, "n": 3, "temperature": 1.3}
    wanted = [sample.text for sample in alone(served.llm, PROMPT, **params).outputs]
    for _ in range(2):
        found = api.completions.create(model="tiny-python", prompt=PROMPT, **params)
        assert [choice.text for choice in found.choices] == wanted
    texts = ["", "", ""]
    for chunk in api.completions.create(model="tiny-python", prompt=PROMPT, stream=True, **params):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted
    whole = api.completions.create(model="tiny-python", prompt=PROMPT, max_tokens=40, temperature=0)
    stop = whole.choices[0].text[9:14]
    cut = api.completions.create(model="tiny-python", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop)
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs_and_extra_fields(api: Any, served: Served) -> None:
    found = api.completions.create(
        model="tiny-python", prompt=PROMPT, max_tokens=5, seed=1, logprobs=2, extra_body={"top_k": 1, "min_p": 0.1}
    )
    wanted = alone(served.llm, PROMPT, max_tokens=5, temperature=0, logprobs=2).outputs[0]
    assert found.choices[0].text == wanted.text
    assert found.choices[0].logprobs.token_logprobs == pytest.approx(
        [entry[token].logprob for token, entry in zip(wanted.token_ids, wanted.logprobs or [], strict=True)],
        abs=TINY_PYTHON,
    )
    assert found.choices[0].logprobs.text_offset[0] == 0


def test_chat(chat_api: Any) -> None:
    options: dict[str, Any] = {"model": "tiny-chat", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 4}
    whole = chat_api.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    content = whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert content
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in entries).decode(errors="replace") == content
    assert all(len(one.top_logprobs) == 2 for one in entries)
    chunks = list(chat_api.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    assert chunks[-1].choices[0].finish_reason == "length"
    options["extra_body"] = {"structured_outputs": {"choice": ["done"]}}
    with chat_api.chat.completions.stream(**options) as stream:
        assert stream.get_final_completion().choices[0].message.content == "done"


def test_structured_outputs(chat_api: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    found = chat_api.chat.completions.create(
        model="tiny-chat",
        messages=MESSAGES,
        seed=5,
        max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert json.loads(found.choices[0].message.content)["a"] in (1, 2)
    found = chat_api.chat.completions.create(
        model="tiny-chat", messages=MESSAGES, extra_body={"structured_outputs": {"regex": "[ab]{4}"}}
    )
    assert len(found.choices[0].message.content) == 4
    assert found.choices[0].finish_reason == "stop"


def test_tools(chat_api: Any) -> None:
    options: dict[str, Any] = {
        "model": "tiny-chat",
        "messages": MESSAGES,
        "tools": [TOOL],
        "seed": 2,
        "max_tokens": 400,
    }
    options["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    (call,) = chat_api.chat.completions.create(**options).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    with chat_api.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    (other,) = final.choices[0].message.tool_calls
    assert (other.function.name, other.function.arguments) == ("weather", call.function.arguments)
    history = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = chat_api.chat.completions.create(model="tiny-chat", messages=history, max_tokens=4)
    assert answer.choices[0].message.content


def test_errors(api: Any, chat_api: Any) -> None:
    with pytest.raises(openai().BadRequestError) as caught:
        api.completions.create(model="tiny-python", prompt=PROMPT, temperature=-1)
    assert caught.value.param == "temperature"
    assert "temperature" in caught.value.message
    for stream in (False, True):
        with pytest.raises(openai().NotFoundError) as missing:
            api.completions.create(model="no-such-model", prompt=PROMPT, stream=stream)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai().BadRequestError) as caught:
            api.completions.create(model="tiny-python", prompt=PROMPT, suffix="end", stream=stream)
        assert caught.value.param == "suffix"
    with pytest.raises(openai().BadRequestError) as caught:
        chat_api.chat.completions.create(model="tiny-chat", messages=[])
    assert caught.value.param == "messages"


def test_errors_in_mid_stream(api: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_at(5, served.llm, monkeypatch)
    stream = api.completions.create(model="tiny-python", prompt=PROMPT, max_tokens=100, stream=True)
    assert next(stream).choices[0].text
    with pytest.raises(openai().APIError):
        list(stream)
    monkeypatch.undo()
    until_free(served.llm)


def test_closing_a_stream(api: Any, served: Served) -> None:
    stream = api.completions.create(
        model="tiny-python", prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert served.llm.engine.has_work
    stream.close()
    before = generated(served.llm)
    until_free(served.llm)
    assert generated(served.llm) - before < 500


def test_async_client(chat_served: Served, served: Served) -> None:
    """Many at a time, streamed and not, each with the text that it has alone; one of them is
    cancelled.
    """

    async def run() -> None:
        async with openai().AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, timeout=60),
        ) as api:

            async def one(number: int) -> str:
                options: dict[str, Any] = {"model": "tiny-python", "temperature": 0, "max_tokens": 10 + number}
                prompt = f"def f{number}("
                if number % 2:
                    stream = await api.completions.create(**options, prompt=prompt, stream=True)
                    return "".join([chunk.choices[0].text async for chunk in stream])
                return (await api.completions.create(**options, prompt=prompt)).choices[0].text

            endless = asyncio.create_task(
                api.completions.create(
                    model="tiny-python", prompt=PROMPT, max_tokens=4000, extra_body={"ignore_eos": True}
                )
            )
            found = await asyncio.gather(*(one(number) for number in range(12)))
            assert not endless.done()
            endless.cancel()
            await asyncio.gather(endless, return_exceptions=True)
            wanted = [
                await asyncio.to_thread(
                    lambda n=number: alone(served.llm, f"def f{n}(", temperature=0, max_tokens=10 + n).outputs[0].text
                )
                for number in range(12)
            ]
            assert found == wanted

    asyncio.run(run())
    before = generated(served.llm)
    until_free(served.llm)
    assert generated(served.llm) - before < 500
