"""``/v1/state/timeline``: what the engine did last, step by step and request by request."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from quire.engine.views.timeline import Timeline
from quire.engine.views.timeline_reader import timeline_document
from quire.server.context import Context
from quire.server.state_answers import count_answer, viewer_of

router = APIRouter()

LONGEST_WAIT = 1.0
"""Seconds that an answer waits, at most, for its turn."""


@router.get("/v1/state/timeline", tags=["state"])
async def timeline(
    request: Request,
    since: Annotated[int, Query(ge=0, description="The number of the last step that is known; 0: of none.")] = 0,
) -> dict[str, Any]:
    """Tell the steps after ``since``, the requests that changed, latencies and rates."""
    context: Context = request.app.state.context
    count_answer(request)
    line, owner = context.llm.engine.timeline, viewer_of(request).owner
    # It takes no lock of the engine's, but Python runs one thread at a time.
    if not line.budget.is_free:
        await asyncio.sleep(min(line.budget.wait, LONGEST_WAIT))
    return await asyncio.to_thread(_read, line, since, owner)


def _read(line: Timeline, since: int, owner: str | None) -> dict[str, Any]:
    with line.budget.spent():
        return timeline_document(line, since, owner)
