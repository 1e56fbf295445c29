"""Branches over HTTP: what sessions of this API key were committed to. No key sees another's.

Push and pull are not here: a server would have to reach addresses that clients choose. The server's
operator copies branches with ``quire state push`` beside it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from quire.base.errors import InvalidArgument, NotFound
from quire.server.http.context import context_of
from quire.server.http.errors import bad_field, naming
from quire.server.http.events import JsonAnswer
from quire.store.commits import SessionCommit


def known_query(request: Request) -> None:
    """Refuse a query parameter that the call does not have: with a mistyped filter it would list
    all."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    if unknown := [name for name in request.query_params if name not in known]:
        accepted = ", ".join(known) or "none"
        message = f"there is no query parameter {unknown[0]!r:.80} here; accepted: {accepted}"
        raise bad_field(unknown[0], message, code="invalid_argument")


router = APIRouter(prefix="/v1/branches", tags=["branches"], dependencies=[Depends(known_query)])

Side = Annotated[str | None, Query(description="A branch, or 8 digits or more of a commit's id.")]


def commit_object(commit: SessionCommit) -> dict[str, Any]:
    """Return a commit as clients see it."""
    return {
        "id": commit.id,
        "object": "commit",
        "parent": commit.parent,
        "created": commit.time,
        "message": commit.message,
        "session_name": commit.session,
        "labels": dict(commit.labels),
        "num_tokens": commit.num_tokens,
        "bytes": commit.nbytes,
        "modified": commit.modified,
    }


@router.get("")
async def overview(request: Request) -> Response:
    """List the branches of this API key, each with the commit at which it stands. `damaged` has a
    sentence for each that cannot be read."""
    damaged = list[str]()
    found = await context_of(request).llm.branches(owner=request.state.owner, damaged=damaged)
    data = [{"name": name, "object": "branch", "commit": commit_object(one)} for name, one in found.items()]
    return JsonAnswer({"object": "list", "data": data, "damaged": damaged})


@router.get("/diff")
async def diff(request: Request, a: Side = None, b: Side = None) -> Response:
    """Compare two commits: their common part, and the rest of each. Without both, return the log of
    a branch called "diff"."""
    if a is None and b is None:
        return await log("diff", request)
    if a is None or b is None:
        raise bad_field("b" if a else "a", "a and b are needed, two branches or commits")
    with _errors_about("a"):
        found = await context_of(request).llm.diff(a, b, owner=request.state.owner)
    return JsonAnswer(
        {
            "a": commit_object(found.a),
            "b": commit_object(found.b),
            "base": found.base,
            "common": found.common,
            "a_adds": found.a_adds,
            "b_adds": found.b_adds,
            "shared_bytes": found.shared_bytes,
            "a_bytes": found.a_bytes,
            "b_bytes": found.b_bytes,
        }
    )


@router.delete("/diff")
async def delete_diff(request: Request) -> Response:
    """Forget the branch "diff"."""
    return await delete("diff", request)


@router.get("/{name:path}")
async def log(name: str, request: Request) -> Response:
    """List a commit and all before it, the latest first."""
    with _errors_about("name"):
        found = await context_of(request).llm.log(name, owner=request.state.owner)
    return JsonAnswer({"object": "list", "data": [commit_object(one) for one in found]})


@router.delete("/{name:path}")
async def delete(name: str, request: Request) -> Response:
    """Forget a branch. Its commits stay until the operator collects garbage."""
    with _errors_about("name"):
        head = await context_of(request).llm.delete(name, owner=request.state.owner)
    return JsonAnswer({"name": name, "object": "branch", "deleted": True, "commit": head})


def _errors_about(param: str) -> AbstractContextManager[None]:
    return naming({}, param, (InvalidArgument, NotFound))
