"""ollama's official client."""

from __future__ import annotations

from typing import Any

import ollama
from abilities import Abilities, Task, run


def official(task: Task) -> Abilities:
    def client(url: str) -> ollama.Client:
        return ollama.Client(host=url, timeout=120)

    asked: dict[str, Any] = {"model": task.model, "messages": task.messages}
    greedy: dict[str, Any] = {"options": {"temperature": 0, "num_predict": 16}}
    roomy: dict[str, Any] = {"options": {"temperature": 0, "num_predict": 200}}
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": task.form}}

    def text(url: str) -> Any:
        return client(url).chat(**asked, **greedy).message.content

    def stream(url: str) -> Any:
        pieces = list(client(url).chat(**asked, **greedy, stream=True))
        assert (pieces[-1].done, pieces[-1].done_reason, pieces[-1].eval_count) == (True, "length", 16)
        return [piece.message.content for piece in pieces]

    def structured(url: str) -> Any:
        made = client(url).generate(model=task.model, prompt=task.prompt, format=task.form, **roomy).response
        return [client(url).chat(**asked, format=task.form, **roomy).message.content, made]

    def cancel(url: str) -> Any:
        options = {"temperature": 0, "num_predict": task.endless}
        pieces = client(url).chat(**asked, options=options, stream=True)
        next(pieces)
        pieces.close()
        return True

    def overflow(url: str) -> Any:
        long = [{"role": "user", "content": task.overflow}]
        try:
            client(url).chat(model=task.model, messages=long, **greedy)
        except ollama.ResponseError as error:
            return error.status_code == 400 and "maximum context length" in error.error
        return False

    async def details(url: str) -> Any:
        one, other = client(url), ollama.AsyncClient(host=url, timeout=120)
        call = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 1}}}
        history: list[Any] = [
            *task.messages,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "weather", "content": "sunny"},
        ]
        shown = one.show(task.model)
        raw = {"model": task.model, "prompt": task.prompt, "raw": True, **greedy}
        pieces = [piece.response async for piece in await other.generate(**raw, stream=True)]
        refusals = []
        for name, function in (
            ("embed", lambda: one.embed(task.model, "x")),
            ("model", lambda: one.chat("no-such-model", task.messages)),
            ("pull", lambda: one.pull(task.model)),
        ):
            try:
                function()
            except ollama.ResponseError as error:
                refusals.append([name, error.status_code])
        return {
            "list": [found.model for found in one.list().models],
            "ps": [found.model for found in one.ps().models],
            "show": [shown.template != "", sorted(shown.capabilities or ())],
            "raw": one.generate(**raw).response,
            "raw, stream": "".join(pieces),
            "load": one.generate(task.model).done_reason,
            "history": one.chat(task.model, history, tools=[tool], **greedy).eval_count,
            "refusals": refusals,
        }

    return {
        "text": text,
        "stream": stream,
        "structured": structured,
        "cancel": cancel,
        "overflow": overflow,
        "details": details,
    }


if __name__ == "__main__":
    run("ollama", {"ollama": official})
