"""``/v1/state/timeline``: what the engine did last, step by step and request by request."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from quire.engine.views.timeline_reader import timeline_document
from quire.server.context import Context

router = APIRouter()


@router.get("/v1/state/timeline", tags=["state"])
async def timeline(
    request: Request,
    since: Annotated[int, Query(ge=0, description="The number of the last step that is known; 0: of none.")] = 0,
) -> dict[str, Any]:
    """Tell the steps after ``since``, the requests that changed, latencies and rates."""
    context: Context = request.app.state.context
    owner = viewer(context, request.state.owner)
    return await asyncio.to_thread(timeline_document, context.llm.engine.timeline, since, owner)


def viewer(context: Context, owner: str) -> str | None:
    """Return whose requests a caller may see; None: all, where there are not two keys."""
    return owner if len(set(context.settings.api_key)) > 1 else None
