"""``/v1/state/token``, ``/attention``, ``/norms`` and ``/compare``: views into sessions.

Missing values are computed on a fork, which is then removed. The session does not change, and
neither does the time until it is closed.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.async_llm import AsyncSession
from quire.base.errors import FailedPrecondition, Unsupported
from quire.server.http.context import Context
from quire.server.http.errors import bad_field, naming
from quire.server.http.events import long_answer, unless_gone
from quire.sessions.token_chances import MOST_ALTERNATIVES

router = APIRouter(prefix="/v1/state", tags=["state"])

MOST_WEIGHTS = 1 << 22
"""Weights of one answer, at most: 16 MiB of float32."""
PREFIX = "session:"
"""How ids of branches begin that are sessions."""
FIELDS = {name: name for name in ("position", "layer", "head", "top", "a", "b")}

Branch = Annotated[str, Query(description="A session: session: and its id, or its id alone.")]
Position = Annotated[int, Query(ge=0, description="A position, of 0 and later.")]
Layer = Annotated[int, Query(ge=0, description="The number of a layer.")]
Head = Annotated[int | None, Query(ge=0, description="A query head; without it all of them.")]
Top = Annotated[int, Query(ge=1, le=MOST_ALTERNATIVES, description="How many alternatives are told.")]


@router.get("/token")
async def token(request: Request, branch: Branch, position: Position, top: Top = 10) -> Response:
    """Return the probability of the token at a position, and its alternatives."""
    session = looked_at(request, "branch", branch)
    with naming(FIELDS, "branch"):
        view = await unless_gone(request, session.token(position, top=top))
    return await long_answer({"branch": branch, **view.document()})


@router.get("/attention")
async def attention(request: Request, branch: Branch, position: Position, layer: Layer, head: Head = None) -> Response:
    """Return the attention weights of the token at a position, at a layer."""
    session = looked_at(request, "branch", branch)
    specs = _context(request).llm.engine.runner.model.layer_specs
    heads = getattr(specs[layer], "num_heads", 1) if layer < len(specs) and head is None else 1
    if heads * (position + 1) > MOST_WEIGHTS:
        raise bad_field(
            "head", f"{heads} heads over {position + 1} positions are more than {MOST_WEIGHTS} weights; give one head"
        )
    with naming(FIELDS, "branch"):
        view = await unless_gone(request, session.attention(position, layer, head))
    return await long_answer({"branch": branch, **view.document()})


@router.get("/norms")
async def norms(request: Request, branch: Branch, layer: Layer) -> Response:
    """Return the norms of a layer's keys and values, or states, of a session."""
    session = looked_at(request, "branch", branch)
    with naming(FIELDS, "branch"):
        view = await unless_gone(request, session.norms(layer))
    return await long_answer({"branch": branch, **view.document()})


@router.get("/compare")
async def compare(request: Request, a: Branch, b: Branch, top: Top = 10) -> Response:
    """Return the first difference of two sessions, and the probabilities of both there."""
    first, second = looked_at(request, "a", a), looked_at(request, "b", b)
    with naming(FIELDS, "a"):
        view = await unless_gone(request, first.compare(second, top=top))
    return await long_answer({"branches": [a, b], **view.document()})


def looked_at(request: Request, field: str, branch: str) -> AsyncSession:
    """Return a session of the caller's. ``Unsupported`` for a branch of another kind, ``NotFound``
    for an unknown one, ``FailedPrecondition`` while another call uses it; all are about a
    parameter."""
    kind, colon, name = branch.partition(":")
    with naming({}, field):
        if colon and kind != PREFIX.rstrip(":"):
            raise Unsupported(
                f"branch {branch[:60]!r} is no session; its tokens can be looked at once they are one (POST /v1/sessions)"
            )
        held = _context(request).sessions.get(request.state.owner, name if colon else branch)
        if held.busy is not None:
            raise FailedPrecondition(
                f"the session is in use by another call ({held.busy}); look when that has ended, or at a fork"
            )
        return held.session


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context
