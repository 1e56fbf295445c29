"""OpenAI's official client: chats, responses, and completions in detail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
from abilities import KEY, Abilities, Task, run

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


def client(url: str, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=retries, timeout=120)


def recognised(call: Callable[[], Any]) -> bool:
    """Whether a program can tell that the context is too small."""
    try:
        call()
    except openai.BadRequestError as error:
        return error.code == "context_length_exceeded" and "maximum context length is" in error.message
    return False


class Weather(pydantic.BaseModel):
    """The form of the task, as users of the client write it."""

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


def chat(task: Task) -> Abilities:
    tool = {"type": "function", "function": {"name": "weather", "parameters": task.form}}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": task.form, "strict": True}}
    asked: dict[str, Any] = {"model": task.model, "messages": task.messages}

    def text(url: str, retries: int = 0) -> Any:
        return client(url, retries).chat.completions.create(**asked, **GREEDY).choices[0].message.content

    def stream(url: str) -> Any:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client(url).chat.completions.create(**asked, **GREEDY, **options))
        assert chunks[-1].usage.completion_tokens == 16
        return [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]

    def tools(url: str) -> Any:
        named: Any = {"type": "function", "function": {"name": "weather"}}
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "tools": [tool], "tool_choice": named}
        (call,) = client(url).chat.completions.create(**asked, **options).choices[0].message.tool_calls
        with client(url).chat.completions.stream(**asked, **options) as events:
            (other,) = events.get_final_completion().choices[0].message.tool_calls
        assert other.function.arguments == call.function.arguments
        history: Any = [
            *task.messages,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        after = client(url).chat.completions.create(model=task.model, messages=history, tools=[tool], **GREEDY)
        calls = [[one.function.name, one.function.arguments] for one in (call, other)]
        return {"calls": calls, "after": after.choices[0].message.content}

    def structured(url: str) -> Any:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
        whole = client(url).chat.completions.create(**asked, **options, response_format=form)
        parsed = client(url).chat.completions.parse(**asked, **options, response_format=Weather)
        return [whole.choices[0].message.content, parsed.choices[0].message.parsed.model_dump()]

    def cancel(url: str) -> Any:
        with client(url).chat.completions.create(**asked, temperature=0, max_tokens=task.endless, stream=True) as one:
            next(iter(one))
        return True

    def overflow(url: str) -> Any:
        long: Any = [{"role": "user", "content": task.overflow}]
        return recognised(
            lambda: client(url).chat.completions.create(model=task.model, messages=long, max_tokens=16)
        ) and recognised(lambda: client(url).chat.completions.create(**asked, max_tokens=100_000))

    return {
        "text": text,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "cancel": cancel,
        "retry": lambda url: text(url, 2),
        "overflow": overflow,
        "details": lambda url: details(url, task),
    }


def details(url: str, task: Task) -> dict[str, Any]:
    """What is the same to the letter or the number as in the caller's process."""
    sampled: dict[str, Any] = {"temperature": 1.2, "max_tokens": 10, "n": 3, "seed": 11}
    found: dict[str, Any] = {}
    with client(url) as api:

        def complete(**options: Any) -> Any:
            return api.completions.create(model=task.model, prompt=task.prompt, **options)

        def talk(**options: Any) -> Any:
            return api.chat.completions.create(**{"model": task.model, "messages": task.messages, **options})

        found["models.list"] = [one.id for one in api.models.list()]
        found["completions"] = complete(**GREEDY).choices[0].text
        chunks = list(complete(**GREEDY, stream=True, stream_options={"include_usage": True}))
        found["completions, stream"] = "".join(one.choices[0].text for one in chunks[:-1])
        found["completions, n and seed"] = [one.text for one in complete(**sampled).choices]
        parts = [""] * 3
        for chunk in complete(**sampled, stream=True):
            parts[chunk.choices[0].index] += chunk.choices[0].text
        found["completions, n and seed, stream"] = parts
        cut = complete(**GREEDY, stop=[task.extra["stop"]]).choices[0]
        found["completions, stop"] = [cut.text, cut.finish_reason]
        found["completions, logprobs"] = complete(**GREEDY, logprobs=2).choices[0].logprobs.token_logprobs
        entries = talk(**GREEDY, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        found["chat, logprobs"] = b"".join(bytes(one.bytes) for one in entries).decode(errors="replace")
        regex = talk(max_tokens=16, extra_body={"structured_outputs": {"regex": "[ab]{4}"}})
        found["chat, regex"] = len(regex.choices[0].message.content)
        for name, wrong in (("temperature", -1), ("model", "no-such-model")):
            try:
                talk(**{name: wrong})
            except openai.APIStatusError as error:
                found[f"error, {name}"] = [error.status_code, error.param]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as api:

            async def one(number: int) -> str:
                options: dict[str, Any] = {"model": task.model, "prompt": f"def f{number}(", **GREEDY}
                if number % 2:
                    stream = await api.completions.create(**options, stream=True)
                    return "".join([chunk.choices[0].text async for chunk in stream])
                return str((await api.completions.create(**options)).choices[0].text)

            return await asyncio.gather(*(one(number) for number in range(8)))

    found["async, 8 at a time"] = asyncio.run(together())
    return found


def responses(task: Task) -> Abilities:
    tool = {"type": "function", "name": "weather", "parameters": task.form, "strict": True}
    form = {"format": {"type": "json_schema", "name": "weather", "schema": task.form, "strict": True}}
    asked: dict[str, Any] = {"model": task.model, "input": task.prompt, "temperature": 0}
    roomy: dict[str, Any] = {**asked, "max_output_tokens": 200}
    brief: dict[str, Any] = {**asked, "max_output_tokens": 16}

    def text(url: str, retries: int = 0) -> Any:
        return client(url, retries).responses.create(**brief).output_text

    def stream(url: str) -> Any:
        with client(url).responses.stream(**brief) as events:
            told = list(events)
        pieces = [event.delta for event in told if event.type == "response.output_text.delta"]
        # The client's ``get_final_response`` knows "response.completed" only.
        assert (told[-1].type, told[-1].response.output_text) == ("response.incomplete", "".join(pieces))
        return pieces

    def tools(url: str) -> Any:
        options: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "function", "name": "weather"}}
        first = client(url).responses.create(**roomy, **options)
        with client(url).responses.stream(**roomy, **options) as events:
            (other,) = [one for one in events.get_final_response().output if one.type == "function_call"]
        (call,) = [one for one in first.output if one.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        after = client(url).responses.create(
            **{**brief, "input": [result]}, previous_response_id=first.id, tools=options["tools"]
        )
        return {"calls": [[one.name, one.arguments] for one in (call, other)], "after": after.output_text}

    def structured(url: str) -> Any:
        parsed = client(url).responses.parse(**roomy, text_format=Weather).output_parsed
        return [client(url).responses.create(**roomy, text=form).output_text, parsed.model_dump()]

    def cancel(url: str) -> Any:
        with client(url).responses.create(**asked, max_output_tokens=task.endless, stream=True) as events:
            assert any(event.type == "response.output_text.delta" for event in events)
        return True

    def overflow(url: str) -> Any:
        return recognised(lambda: client(url).responses.create(**{**brief, "input": task.overflow})) and recognised(
            lambda: client(url).responses.create(**{**brief, "max_output_tokens": 100_000})
        )

    def kept(url: str) -> Any:
        """Continue a stored response, read it, and delete it."""
        api = client(url)
        first = api.responses.create(**brief)
        items = [first.output[0].model_dump(exclude_none=True), {"role": "user", "content": "more"}]
        own = api.responses.create(**{**brief, "input": [*task.messages, *items]})
        other = api.responses.create(**{**brief, "input": "more"}, previous_response_id=first.id)
        again = api.responses.retrieve(first.id).output_text
        listed = len(list(api.responses.input_items.list(other.id)))
        api.responses.delete(first.id)
        return [own.output_text == other.output_text, again == first.output_text, listed]

    return {
        "text": text,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "cancel": cancel,
        "retry": lambda url: text(url, 2),
        "overflow": overflow,
        "details": kept,
    }


if __name__ == "__main__":
    run("openai", {"openai-chat": chat, "openai-responses": responses})
