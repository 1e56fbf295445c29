"""Pydantic AI's agents over OpenAI's two endpoints and Anthropic's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
from abilities import KEY, Abilities, Task, run
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput, exceptions
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(pydantic.BaseModel):
    """The form of the task, as users of the library write it."""

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


def agents(task: Task, made: Callable[[str, int], Any]) -> Abilities:
    """What an agent can do over a model, which ``made`` makes of a URL and a number of retries."""

    def agent(url: str, tokens: int = 16, retries: int = 0, **options: Any) -> Agent[Any, Any]:
        # The answers of weak models are cut at the limit; that is no reason for a retry.
        return Agent(made(url, retries), model_settings={"max_tokens": tokens, "temperature": 0}, **options)

    async def text(url: str, retries: int = 0) -> Any:
        return (await agent(url, retries=retries).run(task.prompt)).output

    async def stream(url: str) -> Any:
        async with agent(url).run_stream(task.prompt) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    async def tools(url: str) -> Any:
        """A tool that forms the answer, which is a forced call; then a turn over the history."""
        result = await agent(url, 200, output_type=ToolOutput(Weather, name="weather")).run(task.prompt)
        after = await agent(url).run("more", message_history=result.all_messages())
        return {"calls": [["weather", result.output.model_dump()]], "after": after.output}

    async def structured(url: str) -> Any:
        return [(await agent(url, 200, output_type=NativeOutput(Weather)).run(task.prompt)).output.model_dump()]

    async def cancel(url: str) -> Any:
        async with agent(url, task.endless).run_stream(task.prompt) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                break
            await result.cancel()
        return True

    async def overflow(url: str) -> Any:
        try:
            await agent(url).run(task.overflow)
        except exceptions.ModelContextWindowExceededError:
            return True
        except ModelHTTPError as error:
            return isinstance(error.body, dict) and error.body.get("code") == "context_length_exceeded"
        return False

    return {
        "text": text,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "cancel": cancel,
        "retry": lambda url: text(url, 2),
        "overflow": overflow,
    }


def of_openai(task: Task, kind: type[Any]) -> Abilities:
    def made(url: str, retries: int) -> Any:
        api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=retries, timeout=120)
        return kind(task.model, provider=OpenAIProvider(openai_client=api))

    return agents(task, made)


def of_anthropic(task: Task) -> Abilities:
    import anthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    def made(url: str, retries: int) -> Any:
        api = anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=retries, timeout=120)
        return AnthropicModel(task.model, provider=AnthropicProvider(anthropic_client=api))

    # The library refuses native outputs for models that it does not know.
    return {name: made for name, made in agents(task, made).items() if name != "structured"}


if __name__ == "__main__":
    run(
        "pydantic-ai-slim",
        {
            "pydantic-ai-chat": lambda task: of_openai(task, OpenAIChatModel),
            "pydantic-ai-responses": lambda task: of_openai(task, OpenAIResponsesModel),
            "pydantic-ai-anthropic": of_anthropic,
        },
    )
