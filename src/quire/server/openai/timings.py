"""How fast an answer was made, and how far its prompt is, as llama-server tells them."""

from __future__ import annotations

import time
from typing import Any

from quire.async_llm.stream import PromptProgress
from quire.base.outputs import RequestOutput


def timings_of(output: RequestOutput, tokens: int, *, cached: int, began: float) -> dict[str, Any]:
    """Return ``timings``: of a prompt, asked for at ``began``, and of the ``tokens`` behind it."""
    now, metrics = time.monotonic(), output.metrics
    first = metrics.first_token_time or metrics.finished_time or now
    end = metrics.finished_time or now
    computed = len(output.prompt_token_ids) - cached
    return {
        "cache_n": cached,
        **_rates("prompt", computed, max(0.0, first - began)),
        **_rates("predicted", tokens, max(0.0, end - first)),
    }


def progress_of(progress: PromptProgress, *, began: float) -> dict[str, Any]:
    """Return ``prompt_progress``."""
    elapsed = round(1000 * (time.monotonic() - began))
    return {"total": progress.total, "cache": progress.cached, "processed": progress.done, "time_ms": elapsed}


def _rates(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }
