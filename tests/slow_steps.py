"""Steps that take their time: on a busy machine a tiny model is done before another thread has had
its turn, so that streams come in one piece and nobody sees what runs."""

from __future__ import annotations

import time
from typing import Any

from quire import AsyncLLM


def slow_steps(llm: AsyncLLM, seconds: float = 0.01) -> None:
    """Let each forward wait so long before it runs, as long as the LLM lives; once for an LLM."""
    execute = llm.engine.runner.execute
    if execute.__name__ == "slow":
        return

    def slow(step: Any) -> Any:
        if step.chunks:
            time.sleep(seconds)
        return execute(step)

    llm.engine.runner.execute = slow  # type: ignore[method-assign]
