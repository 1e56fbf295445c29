"""``/health``, ``/version``, ``/metrics``, ``/v1/models``, and endpoints that no model supports."""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from quire.async_llm import AsyncLLM
from quire.engine.named_adapters import AdapterInfo
from quire.errors import QuireError
from quire.server.context import Context, public_name
from quire.server.errors import ApiError, bad_field
from quire.server.metrics_text import CONTENT_TYPE, metrics_text

router = APIRouter()

HEALTH_SECONDS = 10.0
"""Seconds without an answer after which the engine counts as stuck. A slow step takes seconds."""

_probes: WeakKeyDictionary[AsyncLLM, asyncio.Task[Any]] = WeakKeyDictionary()
"""The open health check of each engine, so that only one worker thread waits for it."""


class Health(BaseModel):
    """The engine answers."""

    status: str = "ok"


class Version(BaseModel):
    """The package's version."""

    version: str


class ModelCard(BaseModel):
    """A model as OpenAI lists it, with the fields that vLLM adds."""

    id: str
    object: str = "model"
    created: int
    """Time of loading, in Unix time."""
    owned_by: str = "quire"
    root: str
    """The source that was loaded."""
    parent: str | None = None
    """For an adapter: the model that it belongs to."""
    max_model_len: int | None = None
    """Longest sequence in tokens."""


class ModelList(BaseModel):
    """All models."""

    object: str = "list"
    data: list[ModelCard]


class EmbeddingRequest(BaseModel):
    """OpenAI's ``usage`` object."""

    model: str | None = None
    input: Any = Field(default=None, description="Text or token ids.")


@router.get("/health", tags=["status"])
async def health(request: Request) -> Health:
    """Answer 200 if the engine answers, 503 if it does not or while the server shuts down."""
    context: Context = request.app.state.context
    if context.gate.closing:
        raise ApiError(503, "this server is shutting down", code="shutting_down")
    probe = _probes.get(context.llm)
    if probe is None or probe.done() or probe.get_loop() is not asyncio.get_running_loop():
        probe = _probes[context.llm] = asyncio.ensure_future(context.llm.metrics())
    # It is not cancelled at the timeout: the next request waits for the same answer.
    await asyncio.wait([probe], timeout=HEALTH_SECONDS)
    if not probe.done():
        raise ApiError(503, f"the engine has not answered for {HEALTH_SECONDS:g} seconds", code="unhealthy")
    try:
        probe.result()
    except QuireError as error:
        raise ApiError(503, f"the engine does not run: {error}", code="unhealthy") from error
    return Health()


@router.get("/version", tags=["status"])
async def version() -> Version:
    """Tell the server's version."""
    return Version(version=metadata.version("quire"))


@router.get("/metrics", tags=["status"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Send all metrics in Prometheus' text format."""
    context: Context = request.app.state.context
    text = await metrics_text(context.llm, under_way=context.gate.under_way, sessions=len(context.sessions))
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/v1/models", tags=["models"])
async def models(request: Request) -> ModelList:
    """List the model and its adapters."""
    return ModelList(data=await model_cards(request.app.state.context))


@router.get("/v1/models/{model:path}", tags=["models"])
async def model(request: Request, model: str) -> ModelCard:
    """Describe the model or one of its adapters."""
    context: Context = request.app.state.context
    cards = await model_cards(context)
    context.adapter_of(model)
    return next(card for card in cards if card.id == model)


@router.post("/v1/embeddings", tags=["models"], responses={200: {"description": "Never."}})
async def embeddings(body: EmbeddingRequest) -> None:
    """Refuse the call: the models that run here generate text."""
    raise bad_field(
        "model",
        "embeddings: no model that this server can run has them; /v1/completions and /v1/chat/completions generate text",
        code="unsupported",
    )


async def model_cards(context: Context) -> list[ModelCard]:
    """Return the base model and the adapters, in order of loading."""
    loaded = await context.llm.adapters()
    context.adapters = set(loaded)
    base = ModelCard(
        id=context.model_name,
        created=int(context.started),
        root=public_name(context.llm.config.model),
        max_model_len=context.longest,
    )
    return [base, *(adapter_card(context, info) for info in loaded.values() if info.name != base.id)]


def adapter_card(context: Context, info: AdapterInfo) -> ModelCard:
    """Return an adapter as a model."""
    return ModelCard(
        id=info.name,
        created=int(context.started),
        root=public_name(info.path),
        parent=context.model_name,
        max_model_len=context.longest,
    )
