"""Anthropic's official client."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pydantic
from abilities import KEY, Abilities, Task, run


class Weather(pydantic.BaseModel):
    """The form of the task, as users of the client write it."""

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


def official(task: Task) -> Abilities:
    def client(url: str, retries: int = 0) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=retries, timeout=120)

    tool = {"name": "weather", "description": "Weather.", "input_schema": task.form}
    asked: dict[str, Any] = {"model": task.model, "messages": task.messages, "extra_body": {"temperature": 0}}
    brief: dict[str, Any] = {**asked, "max_tokens": 16}
    roomy: dict[str, Any] = {**asked, "max_tokens": 200}

    def text(url: str, retries: int = 0) -> Any:
        return client(url, retries).messages.create(**brief).content[0].text

    def stream(url: str) -> Any:
        with client(url).messages.stream(**brief) as events:
            pieces = list(events.text_stream)
            final = events.get_final_message()
        assert (final.content[0].text, final.stop_reason) == ("".join(pieces), "max_tokens")
        return pieces

    def tools(url: str) -> Any:
        options: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "tool", "name": "weather"}}
        first = client(url).messages.create(**roomy, **options)
        with client(url).messages.stream(**roomy, **options) as events:
            other = events.get_final_message()
        (call,) = [block for block in first.content if block.type == "tool_use"]
        history: list[Any] = [
            *task.messages,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
        ]
        after = client(url).messages.create(**{**brief, "messages": history}, tools=[tool])
        return {
            "calls": [[block.name, block.input] for block in (call, *other.content) if block.type == "tool_use"],
            "after": "".join(block.text for block in after.content if block.type == "text"),
        }

    def structured(url: str) -> Any:
        form = {"format": {"type": "json_schema", "schema": task.form}}
        parsed = client(url).messages.parse(**roomy, output_format=Weather).parsed_output
        return [client(url).messages.create(**roomy, output_config=form).content[0].text, parsed.model_dump()]

    def cancel(url: str) -> Any:
        with client(url).messages.stream(**{**asked, "max_tokens": task.endless}) as events:
            next(iter(events.text_stream))
        return True

    def overflow(url: str) -> Any:
        long = [{"role": "user", "content": task.overflow}]
        try:
            client(url).messages.create(**{**brief, "messages": long})
        except anthropic.BadRequestError as error:
            return "prompt is too long" in error.message
        return False

    def details(url: str) -> Any:
        mark = {"type": "ephemeral"}
        system = [{"type": "text", "text": "Be brief. " * 20, "cache_control": mark}]
        counted = client(url).messages.count_tokens(model=task.model, messages=task.messages, system=system)
        used = [client(url).messages.create(**brief, system=system).usage for _ in range(2)]
        whole = [one.input_tokens + one.cache_read_input_tokens + one.cache_creation_input_tokens for one in used]
        return [[one == counted.input_tokens for one in whole], used[1].cache_read_input_tokens > 0]

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


if __name__ == "__main__":
    run("anthropic", {"anthropic": official})
