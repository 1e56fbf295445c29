"""OpenAI's Agents SDK, whose default is responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
from abilities import KEY, Abilities, Task, run
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel


class Weather(pydantic.BaseModel):
    """The form of the task, as users of the SDK write it."""

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


def agents(task: Task, kind: type[Any]) -> Abilities:
    set_tracing_disabled(True)
    called: list[Any] = []

    @function_tool
    def weather(city: Literal["Rome", "Paris"], days: Literal[1, 2, 3]) -> str:
        """Weather of a city."""
        called.append(["weather", {"city": city, "days": days}])
        return "sunny"

    def agent(url: str, tokens: int = 200, retries: int = 0, **options: Any) -> Agent[Any]:
        api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=retries, timeout=120)
        # The SDK refuses a response that was cut at its limit.
        ends = {} if {"tools", "output_type"} & set(options) else {"extra_body": {"stop": task.extra["stops"]}}
        choice = "weather" if "tools" in options else None
        settings = ModelSettings(max_tokens=tokens, temperature=0, tool_choice=choice, **ends)
        return Agent(name="agent", model=kind(task.model, api), model_settings=settings, **options)

    async def text(url: str, retries: int = 0) -> Any:
        return (await Runner.run(agent(url, retries=retries), task.prompt)).final_output

    async def stream(url: str) -> Any:
        result = Runner.run_streamed(agent(url), task.prompt)
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        pieces = [one.delta for one in raw if one.type == "response.output_text.delta"]
        assert result.final_output == "".join(pieces)
        return pieces

    async def tools(url: str) -> Any:
        able = agent(url, tools=[weather], tool_use_behavior="stop_on_first_tool")
        streamed = Runner.run_streamed(able, task.prompt)
        async for _ in streamed.stream_events():
            pass
        first = await Runner.run(able, task.prompt)
        after = await Runner.run(agent(url), [*first.to_input_list(), {"role": "user", "content": "more"}])
        return {"calls": called, "after": after.final_output}

    async def structured(url: str) -> Any:
        return [(await Runner.run(agent(url, output_type=Weather), task.prompt)).final_output.model_dump()]

    async def cancel(url: str) -> Any:
        result = Runner.run_streamed(agent(url, task.endless), task.prompt)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                result.cancel()
        return True

    async def overflow(url: str) -> Any:
        try:
            await Runner.run(agent(url), task.overflow)
        except openai.BadRequestError as error:
            return error.code == "context_length_exceeded"
        return False

    async def turns(url: str) -> Any:
        """The second turn with all items, and with the first one's id."""
        first = await Runner.run(agent(url), task.prompt)
        items: Any = [*first.to_input_list(), {"role": "user", "content": "more"}]
        own = (await Runner.run(agent(url), items)).final_output
        if kind is not OpenAIResponsesModel:
            return [isinstance(own, str)]
        other = await Runner.run(agent(url), "more", previous_response_id=first.last_response_id)
        return [own == other.final_output]

    return {
        "text": text,
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "cancel": cancel,
        "retry": lambda url: text(url, 2),
        "overflow": overflow,
        "details": turns,
    }


if __name__ == "__main__":
    run(
        "openai-agents",
        {
            "agents-responses": lambda task: agents(task, OpenAIResponsesModel),
            "agents-chat": lambda task: agents(task, OpenAIChatCompletionsModel),
        },
    )
