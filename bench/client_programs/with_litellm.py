"""LiteLLM, which is told that the server is OpenAI's, vLLM's or Anthropic's, and its proxy, which
speaks responses with the server on behalf of OpenAI's client."""

from __future__ import annotations

import copy
from typing import Any

import litellm
from abilities import KEY, Abilities, Task, run


def library(task: Task, provider: str) -> Abilities:
    litellm.suppress_debug_info = True
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": task.form}}
    named = {"type": "function", "function": {"name": "weather"}}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": task.form, "strict": True}}

    def ask(url: str, tokens: int = 16, **options: Any) -> Any:
        messages = options.pop("messages", task.messages)
        return litellm.completion(
            model=f"{provider}/{task.model}",
            messages=copy.deepcopy(messages),
            api_base=url if provider == "anthropic" else f"{url}/v1",
            api_key=KEY,
            timeout=120,
            temperature=0,
            max_tokens=tokens,
            **{"max_retries": 0, **options},
        )

    def text(url: str, **options: Any) -> Any:
        whole = ask(url, **options)
        assert whole.usage.completion_tokens == 16
        return whole.choices[0].message.content

    def stream(url: str) -> Any:
        return [chunk.choices[0].delta.content or "" for chunk in ask(url, stream=True)]

    def tools(url: str) -> Any:
        found = ask(url, 200, tools=[copy.deepcopy(tool)], tool_choice=named).choices[0].message
        calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
        result = {"role": "tool", "tool_call_id": found.tool_calls[0].id, "content": "sunny"}
        history = [*task.messages, found.model_dump(exclude_none=True), result]
        after = ask(url, messages=history, tools=[copy.deepcopy(tool)])
        return {"calls": calls, "after": after.choices[0].message.content}

    def structured(url: str) -> Any:
        return [ask(url, 200, response_format=copy.deepcopy(form)).choices[0].message.content]

    def cancel(url: str) -> Any:
        chunks = ask(url, task.endless, stream=True)
        assert any(chunk.choices[0].delta.content for chunk in chunks)
        stop = getattr(chunks.completion_stream, "close", None) or chunks.completion_stream.response.close
        stop()
        return True

    def overflow(url: str) -> Any:
        try:
            ask(url, messages=[{"role": "user", "content": task.overflow}])
        except litellm.ContextWindowExceededError:
            return True
        return False

    return {
        "text": text,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "cancel": cancel,
        "retry": lambda url: text(url, max_retries=2, num_retries=2),
        "overflow": overflow,
    }


if __name__ == "__main__":
    run(
        "litellm",
        {
            "litellm-openai": lambda task: library(task, "openai"),
            "litellm-vllm": lambda task: library(task, "hosted_vllm"),
            "litellm-anthropic": lambda task: library(task, "anthropic"),
        },
    )
