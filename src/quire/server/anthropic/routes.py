"""Anthropic's Messages API: ``/v1/messages`` and its count of tokens. Chats answer them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from quire.server.anthropic.blocks import BlockTurns
from quire.server.anthropic.body import REFUSED, RENAMED, CountedMessages, MessagesRequest, chat_of
from quire.server.anthropic.events import MessagesReply
from quire.server.http.bodies import BodyRoute, off_loop
from quire.server.http.errors import MESSAGES, REFUSED_VALUES, AnthropicErrorBody, ApiError, errors_as
from quire.server.http.events import STREAMED
from quire.server.openai.chat import answer_chat, count_chat
from quire.server.openai.protocol import ChatRequest, refuse_unlisted

_ERRORS = {400: {**REFUSED_VALUES[400], "model": AnthropicErrorBody}, **errors_as(AnthropicErrorBody)}
router = APIRouter(route_class=BodyRoute, prefix=MESSAGES, tags=["Anthropic"], responses=_ERRORS)


class TokenCount(BaseModel):
    """The length of a prompt."""

    input_tokens: int


@router.post("", responses=STREAMED)
async def create(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    async with _chat(body, request) as (turns, chat):
        return await answer_chat(request, chat, lambda *given: MessagesReply(turns, *given))


@router.post("/count_tokens")
async def count_tokens(body: CountedMessages, request: Request) -> TokenCount:
    """Count the tokens of the prompt that a conversation makes."""
    async with _chat(body, request) as (_, chat):
        return TokenCount(input_tokens=await count_chat(request, chat))


@asynccontextmanager
async def _chat(body: CountedMessages, request: Request) -> AsyncIterator[tuple[BlockTurns, ChatRequest]]:
    """Yield the chat that a body becomes, and let errors of it name the fields of the body."""
    refuse_unlisted(body, REFUSED)
    turns = await off_loop(request, lambda: BlockTurns(body.system, body.messages))
    turns.places |= RENAMED
    chat = await off_loop(request, lambda: chat_of(body, turns))
    try:
        yield turns, chat
    except ApiError as error:
        said = error.message.replace(".function.parameters", ".input_schema").replace(".function.", ".")
        if error.param is not None:
            place = turns.place(error.param)
            said, error.param = said.replace(error.param, place, 1), place
        error.message = said
        raise
