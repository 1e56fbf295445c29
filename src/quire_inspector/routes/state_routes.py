"""``/v1/state``: who holds what of the KV state, for the page at ``/`` and for programs.

``docs/inspector.md`` describes the documents. They are read; nothing here changes anything.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.base.errors import InvalidArgument, NotFound
from quire.contracts.views import TextView, TiersView
from quire.engine.timeline import Timeline
from quire.server.http.events import STREAMED, NamedEventStream
from quire_inspector.routes.state_answers import context_of, count_answer, own_answer, shared_answer, viewer_of
from quire_inspector.routes.state_events import events_of
from quire_inspector.views.state_views import ReadState, StateViews
from quire_inspector.views.timeline_reader import timeline_document

router = APIRouter(prefix="/v1/state", tags=["state"])

BranchId = Annotated[str, Query(max_length=512, description="The id of a branch, as /v1/state/history has it.")]
LONGEST_WAIT = 1.0
"""Seconds that an answer waits, at most, for its turn."""


@router.get("")
async def overview(request: Request) -> Response:
    """Describe the model, its memory and its load."""
    context, viewer = context_of(request), viewer_of(request)

    def read(views: StateViews, state: ReadState) -> object:
        found = views.overview(state)
        return replace(
            found,
            model={**found.model, "name": context.model_name},
            started=context.started,
            allow_edits=context.settings.allow_edits,
            keys=not viewer.sees_all,
        )

    return await shared_answer(request, "overview", read)  # type: ignore[arg-type]


@router.get("/history")
async def history(request: Request) -> Response:
    """List the branches, and their tokens as trees."""
    viewer, owner = viewer_of(request), str(request.state.owner)
    return await shared_answer(request, "history", lambda views, state: views.history(viewer, owner=owner, state=state))


@router.get("/text")
async def text(
    request: Request,
    branch: BranchId,
    start: Annotated[int, Query(description="The first position.")] = 0,
    stop: Annotated[int | None, Query(description="One past the last position; at most 2,048 on.")] = None,
) -> Response:
    """List tokens of a branch with their texts."""
    viewer, owner = viewer_of(request), str(request.state.owner)

    def read(views: StateViews, state: ReadState) -> TextView:
        try:
            found = views.text(branch, start, stop, viewer, owner=owner, state=state)
            if views.is_last or found.num_tokens >= (start if stop is None else stop):
                return found
        except (InvalidArgument, NotFound):
            if views.is_last:
                raise
        # A branch that has just begun, or grown, is in no reading yet.
        return views.text(branch, start, stop, viewer, owner=owner)

    return await own_answer(request, read)


@router.get("/pages")
async def pages(
    request: Request, pool: Annotated[int, Query(description="The pool's place in the overview.")] = 0
) -> Response:
    """Describe every page of a pool."""
    viewer = viewer_of(request)
    return await shared_answer(request, f"pages {pool}", lambda views, state: views.pages(pool, viewer, state=state))


@router.get("/branch-pages")
async def branch_pages(
    request: Request, branch: BranchId, pool: Annotated[int, Query(description="The pool's place in the overview.")] = 0
) -> Response:
    """List the pages of a branch in the order of their positions."""
    viewer, owner = viewer_of(request), str(request.state.owner)
    return await own_answer(
        request, lambda views, state: views.branch_pages(branch, pool, viewer, owner=owner, state=state)
    )


@router.get("/pages/{pool}/{page}")
async def page(request: Request, pool: int, page: int) -> Response:
    """Describe one page: who holds it, and which tokens."""
    viewer = viewer_of(request)
    return await own_answer(request, lambda views, state: views.page(pool, page, viewer, state=state))


@router.get("/tiers")
async def tiers(request: Request) -> Response:
    """Describe the contents of each tier outside of the pool."""
    sees_all = viewer_of(request).sees_all

    def read(views: StateViews, state: ReadState) -> TiersView:
        del state
        found = views.tiers()
        return found if sees_all else TiersView(tiers=tuple(replace(one, label=None) for one in found.tiers))

    return await own_answer(request, read)


@router.get("/events", responses=STREAMED)
async def events(request: Request) -> Response:
    """Tell, as server-sent events, when there is something new to be read."""
    return NamedEventStream(events_of(context_of(request)).follow(), ())


@router.get("/timeline")
async def timeline(
    request: Request,
    since: Annotated[int, Query(ge=0, description="The number of the last step that is known; 0: of none.")] = 0,
) -> dict[str, Any]:
    """Tell the steps after ``since``, the requests that changed, latencies and rates."""
    context = context_of(request)
    count_answer(request)
    line, owner = context.llm.engine.timeline, viewer_of(request).owner
    # It takes no lock of the engine's, but Python runs one thread at a time.
    if not line.budget.is_free:
        await asyncio.sleep(min(line.budget.wait, LONGEST_WAIT))
    return await asyncio.to_thread(_read_timeline, line, since, owner)


def _read_timeline(line: Timeline, since: int, owner: str | None) -> dict[str, Any]:
    with line.budget.spent():
        return timeline_document(line, since, owner)
