"""Steps that take their time: a tiny model is done before another thread has had its turn."""

from __future__ import annotations

import time
from typing import Any

from quire import AsyncLLM


def slow_steps(llm: AsyncLLM, seconds: float = 0.01) -> None:
    """Let each forward wait so long before it runs, as long as the LLM lives."""
    execute = llm.engine.runner.execute

    def slow(step: Any, *extras: Any) -> Any:
        if step.chunks:
            time.sleep(seconds)
        return execute(step, *extras)

    llm.engine.runner.execute = slow  # type: ignore[method-assign]
