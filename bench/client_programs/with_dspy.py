"""DSPy's models and predictors, over both of OpenAI's endpoints."""

from __future__ import annotations

from typing import Any, Literal

import dspy
import pydantic
from abilities import KEY, Abilities, Task, run


class Weather(pydantic.BaseModel):
    """The form of the task, as users of the library write it."""

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


class Saying(dspy.Module):
    """The plainest program, whose calls of the model can be streamed."""

    def forward(self, prompt: str) -> Any:
        return dspy.Prediction(said=dspy.settings.lm(prompt))


def models(task: Task, kind: str) -> Abilities:
    def model(url: str, tokens: int = 16, retries: int = 0) -> Any:
        return dspy.LM(
            f"openai/{task.model}",
            model_type=kind,
            api_base=f"{url}/v1",
            api_key=KEY,
            temperature=0,
            max_tokens=tokens,
            cache=False,
            num_retries=retries,
        )

    def said(answer: Any) -> Any:
        return answer["text"] if isinstance(answer, dict) else answer

    def text(url: str, retries: int = 0) -> Any:
        return said(model(url, retries=retries)(task.prompt)[0])

    async def stream(url: str) -> Any:
        pieces = []
        with dspy.context(lm=model(url)):
            async for one in dspy.streamify(Saying())(prompt=task.prompt):
                if not isinstance(one, dspy.Prediction):
                    pieces.append(one.choices[0].delta.content or "")
        return pieces

    def structured(url: str) -> Any:
        """As JSONAdapter asks, for models that DSPy's catalogue knows to take schemas."""
        return [said(model(url, 200)(task.prompt, response_format=Weather)[0])]

    def overflow(url: str) -> Any:
        try:
            model(url)(task.overflow)
        except dspy.ContextWindowExceededError:
            return True
        return False

    # DSPy cannot read the stream of a response that was cut at its limit.
    streams = {"stream": stream} if kind == "chat" else {}
    return {
        "text": text,
        **streams,
        "structured": structured,
        "retry": lambda url: text(url, 2),
        "overflow": overflow,
    }


if __name__ == "__main__":
    run(
        "dspy",
        {
            "dspy-chat": lambda task: models(task, "chat"),
            "dspy-responses": lambda task: models(task, "responses"),
        },
    )
