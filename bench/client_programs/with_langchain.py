"""LangChain's chat models: over chats and responses of OpenAI's, and over Anthropic's messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from abilities import KEY, Abilities, Task, run


def asked_of(task: Task, made: Callable[..., Any], methods: tuple[str, ...]) -> Abilities:
    """What every chat model of LangChain's can do. ``made`` takes a URL, a number of tokens and of
    retries."""
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, ToolMessage

    tool = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": task.form}}

    def text(url: str, retries: int = 0) -> Any:
        whole = made(url, 16, retries).invoke(task.prompt)
        assert whole.usage_metadata["output_tokens"] == 16
        return whole.text

    async def stream(url: str) -> Any:
        pieces = [chunk.text for chunk in made(url, 16).stream(task.prompt)]
        assert "".join([chunk.text async for chunk in made(url, 16).astream(task.prompt)]) == "".join(pieces)
        return pieces

    def tools(url: str) -> Any:
        first = made(url, 200).bind_tools([tool], tool_choice="weather").invoke(task.prompt)
        history = [HumanMessage(task.prompt), first, ToolMessage("sunny", tool_call_id=first.tool_calls[0]["id"])]
        after = made(url, 16).bind_tools([tool]).invoke(history)
        return {"calls": [[call["name"], call["args"]] for call in first.tool_calls], "after": after.text}

    def structured(url: str) -> Any:
        return [
            made(url, 200).with_structured_output(task.form, method=method).invoke(task.prompt) for method in methods
        ]

    def cancel(url: str) -> Any:
        chunks = made(url, task.endless).stream(task.prompt)
        assert any(chunk.text for chunk in chunks)
        chunks.close()
        return True

    def overflow(url: str) -> Any:
        try:
            made(url, 16).invoke(task.overflow)
        except ContextOverflowError:
            return True
        return False

    def details(url: str) -> Any:
        """Several at a time."""
        return [one.text for one in made(url, 16).batch([f"def f{number}(" for number in range(4)])]

    return {
        "text": text,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "cancel": cancel,
        "retry": lambda url: text(url, 2),
        "overflow": overflow,
        "details": details,
    }


def of_openai(task: Task, responses: bool) -> Abilities:
    from langchain_openai import ChatOpenAI

    def made(url: str, tokens: int, retries: int = 0) -> Any:
        return ChatOpenAI(
            base_url=f"{url}/v1",
            api_key=KEY,
            model=task.model,
            temperature=0,
            max_tokens=tokens,
            max_retries=retries,
            use_responses_api=responses,
        )

    return asked_of(task, made, ("json_schema", "function_calling"))


def messages(task: Task) -> Abilities:
    from langchain_anthropic import ChatAnthropic

    def made(url: str, tokens: int, retries: int = 0) -> Any:
        return ChatAnthropic(
            base_url=url, api_key=KEY, model=task.model, temperature=0, max_tokens=tokens, max_retries=retries
        )

    return asked_of(task, made, ("json_schema", "function_calling"))


if __name__ == "__main__":
    run(
        "langchain-anthropic" if sys.argv[2] == "langchain-anthropic" else "langchain-openai",
        {
            "langchain-chat": lambda task: of_openai(task, False),
            "langchain-responses": lambda task: of_openai(task, True),
            "langchain-anthropic": messages,
        },
    )
