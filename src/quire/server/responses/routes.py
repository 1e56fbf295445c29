"""OpenAI's Responses API: ``/v1/responses`` and the paths below. Chats answer them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.server.http.bodies import BodyRoute, off_loop
from quire.server.http.context import context_of
from quire.server.http.errors import ApiError, bad_field
from quire.server.http.events import STREAMED, JsonAnswer, long_answer
from quire.server.openai.chat import answer_chat
from quire.server.openai.protocol import refuse_unlisted
from quire.server.responses.body import REFUSED, ResponseRequest, chat_request
from quire.server.responses.events import ResponseReply
from quire.server.responses.items import Item, messages_of, read_items

router = APIRouter(route_class=BodyRoute, prefix="/v1/responses", tags=["OpenAI"])

RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of chats that responses call differently."""

Include = Annotated[list[Literal["reasoning.encrypted_content"]] | None, Query(description="Of no effect.")]


@router.post("", responses=STREAMED)
async def create(body: ResponseRequest, request: Request) -> Response:
    """Answer items, or continue a stored response."""
    context, owner = context_of(request), request.state.owner
    refuse_unlisted(body, REFUSED)
    salt, items = body.cache_salt, list[Item]()
    if body.previous_response_id is not None:
        stored = await context.responses.get(owner, body.previous_response_id, "previous_response_id")
        items += stored.items + stored.body["output"]
        salt = stored.salt if salt is None else salt
    before = len(items)
    for number, item in enumerate(await off_loop(request, lambda: list(read_items(body.input)))):
        if item["type"] == "item_reference":
            found = await context.responses.item(owner, item["id"])
            if found is None:
                path = f"input.{number}.id"
                message = f"{path}: there is no stored item {item['id']!r:.80}; send the item itself"
                raise ApiError(404, message, param=path, code="item_not_found")
            item = found
        items.append(item)
    if len(items) == before:
        raise bad_field("input", "input must hold at least one item, got none", code="invalid_argument")
    messages = await off_loop(request, lambda: messages_of(items, lambda number: f"input.{number - before}"))
    chat = await off_loop(request, lambda: chat_request(body, messages, salt))
    stored_before = sum(len(str(message)) for message in messages) if before else 0
    with _renamed():
        return await answer_chat(request, chat, partial(ResponseReply, body, items), more=stored_before)


@contextmanager
def _renamed() -> Iterator[None]:
    """Let errors of the chat name the fields of responses."""
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            error.param = RENAMED.get(error.param.split(".")[0], error.param.replace(".function.", "."))
        raise


@router.get("/{response_id}")
async def retrieve(
    response_id: str,
    request: Request,
    include: Include = None,
    stream: Annotated[
        bool, Query(description="A stored response is not streamed again.", json_schema_extra={"const": False})
    ] = False,
) -> Response:
    """Return a stored response."""
    if stream:
        raise bad_field("stream", "a stored response is not streamed again; leave stream out", code="unsupported")
    return await long_answer((await context_of(request).responses.get(request.state.owner, response_id)).body)


@router.delete("/{response_id}")
async def delete(response_id: str, request: Request) -> Response:
    """Forget a stored response. Those that went on from it stay."""
    await context_of(request).responses.delete(request.state.owner, response_id)
    return JsonAnswer({"id": response_id, "object": "response", "deleted": True})


@router.post("/{response_id}/cancel")
async def cancel(response_id: str, request: Request) -> Response:
    """Refuse: a stored response has ended. A client cancels by closing its connection."""
    await context_of(request).responses.get(request.state.owner, response_id)
    message = (
        "a response without background=true cannot be cancelled: it has ended; close the connection of one that runs"
    )
    raise ApiError(400, message, param="response_id", code="unsupported")


@router.get("/{response_id}/input_items")
async def input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100, description="Items at most.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="From the first item, or from the last.")] = "desc",
    after: Annotated[str | None, Query(description="Go on behind the item of this id.")] = None,
    include: Include = None,
) -> Response:
    """List the items of the conversation that a stored response answered."""
    items = (await context_of(request).responses.get(request.state.owner, response_id)).items
    items = items if order == "asc" else items[::-1]
    if after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_field("after", f"after is {after[:60]!r}, no item of this response", code="invalid_argument")
        items = items[places[0] + 1 :]
    shown = items[:limit]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return await long_answer({"object": "list", "data": shown, **ends, "has_more": len(items) > limit})
