"""``/v1/chats``: conversations of the page at ``/``, kept for its next visit and other windows."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from starlette.responses import Response

from quire.server.http.bodies import BodyRoute
from quire.server.http.context import context_of
from quire.server.http.events import JsonAnswer
from quire.server.sessions.bodies import StrictBody
from quire.server.sessions.branch_routes import known_query

router = APIRouter(route_class=BodyRoute, prefix="/v1/chats", tags=["chats"], dependencies=[Depends(known_query)])


class ChatBody(StrictBody):
    """``PUT /v1/chats/{id}``."""

    title: Annotated[str, Field(max_length=256)] = ""
    document: dict[str, Any]
    """The conversation; only the page reads it."""
    version: Annotated[int, Field(ge=0)] = 0
    """The version that was read; 0: the conversation is new."""
    pinned: bool = False
    """Whether the page lists it before the others."""


@router.get("")
async def overview(request: Request, search: Annotated[str, Query(max_length=200)] = "") -> Response:
    """List the conversations of this API key, the latest first, without their documents. `search`:
    only those that have these words."""
    chats, owner = context_of(request).chats, request.state.owner
    found = await chats.search(owner, search) if search.strip() else [one.summary() for one in chats.of(owner)]
    return JsonAnswer({"object": "list", "data": found})


@router.get("/{chat_id}")
async def read(chat_id: str, request: Request) -> Response:
    """Return a conversation: its summary, and its `document`."""
    found = context_of(request).chats.get(request.state.owner, chat_id)
    head = JsonAnswer(found.summary()).body
    body = bytes(head)[:-1] + b',"document":' + found.text + b"}"
    return Response(body, media_type="application/json")


@router.put("/{chat_id}")
async def write(chat_id: str, body: ChatBody, request: Request) -> Response:
    """Store a conversation. 409, `chat_changed`: another window has stored it since `version`."""
    made = await context_of(request).chats.put(
        request.state.owner, chat_id, body.title, body.document, body.version, pinned=body.pinned
    )
    return JsonAnswer(made.summary())


@router.delete("/{chat_id}")
async def delete(chat_id: str, request: Request) -> Response:
    """Forget a conversation."""
    await context_of(request).chats.delete(request.state.owner, chat_id)
    return JsonAnswer({"id": chat_id, "object": "chat", "deleted": True})
