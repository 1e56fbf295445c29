"""ollama's API: ``/api/chat``, ``/api/generate``, and what its clients ask about models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.http.bodies import BodyRoute, off_loop
from quire.server.http.context import context_of
from quire.server.http.errors import OLLAMA, ApiError, OllamaErrorBody, bad_field, errors_as
from quire.server.http.events import JsonAnswer
from quire.server.ollama.body import (
    ChatBody,
    GenerateBody,
    ModelBody,
    chat_of,
    chat_of_prompt,
    completion_of,
    model_of,
)
from quire.server.ollama.models import described, listed
from quire.server.ollama.replies import OllamaChat, OllamaRaw, OllamaText, loaded
from quire.server.openai.chat import answer_chat
from quire.server.openai.completions import answer_completion

_ERRORS = {
    400: {"model": OllamaErrorBody, "description": "A body, or a value that this server does not take."},
    **errors_as(OllamaErrorBody),
}
RENAMED = {"enable_thinking": "think", "reasoning_effort": "think", "response_format": "format"}
"""Fields of chats that ollama calls differently."""
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}}}
router = APIRouter(route_class=BodyRoute, prefix=OLLAMA, tags=["ollama"], responses=_ERRORS)


@router.post("/chat", responses=LINES)
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, in lines of JSON unless `stream` is false."""
    context = context_of(request)
    if not body.messages:
        said = {"message": {"role": "assistant", "content": ""}}
        return JsonAnswer(loaded(model_of(context, body.model), said))
    asked = await off_loop(request, lambda: chat_of(context, body))
    with _renamed():
        return await answer_chat(request, asked, OllamaChat)


@router.post("/generate", responses=LINES)
async def generate(body: GenerateBody, request: Request) -> Response:
    """Answer a prompt as a chat of one message, continue it as it is (`raw`), or fill in the text
    before a `suffix`."""
    context = context_of(request)
    if not body.prompt and not body.suffix:
        return JsonAnswer(loaded(model_of(context, body.model), {"response": ""}))
    if body.raw or body.suffix:
        return await answer_completion(request, completion_of(context, body), OllamaRaw)
    with _renamed():
        return await answer_chat(request, chat_of_prompt(context, body), OllamaText)


@contextmanager
def _renamed() -> Iterator[None]:
    """Let errors of the chat name the fields of ollama."""
    try:
        yield
    except ApiError as error:
        if error.param in RENAMED:
            error.message = error.message.replace(error.param, RENAMED[error.param], 1)
        raise


@router.get("/tags")
async def tags(request: Request) -> Response:
    """List the model and its adapters."""
    return JsonAnswer({"models": await listed(context_of(request))})


@router.get("/ps")
async def running(request: Request) -> Response:
    """List what is in memory: the same, for as long as the server runs."""
    models = await listed(context_of(request))
    more = {"expires_at": "9999-12-31T23:59:59Z", "context_length": context_of(request).longest}
    return JsonAnswer({"models": [{**one, "size_vram": one["size"], **more} for one in models]})


@router.post("/show")
async def show(body: ModelBody, request: Request) -> Response:
    """Describe a model."""
    context, name = context_of(request), body.model or body.name
    if name is None:
        raise bad_field("model", "model is needed: the name of a model, as /api/tags lists them")
    return JsonAnswer(described(context, model_of(context, name)))


@router.get("/version")
async def version() -> Response:
    """Tell the server's version."""
    return JsonAnswer({"version": metadata.version("quire")})


@router.post("/embed")
@router.post("/embeddings")
async def embed(request: Request) -> Response:
    """Refuse the call: the models that run here generate text."""
    raise bad_field("model", "embeddings: no model that this server can run has them", code="unsupported")
