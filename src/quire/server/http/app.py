"""The application: ``create_app(llm, settings)``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from quire.async_llm import AsyncLLM
from quire.base.errors import InvalidArgument
from quire.server.anthropic import routes as anthropic_messages
from quire.server.chats import routes as chat_routes
from quire.server.chats.store import Chats
from quire.server.http import errors, status
from quire.server.http.context import Context, public_name
from quire.server.http.gate import Gate, GateMiddleware
from quire.server.http.settings import ServerSettings
from quire.server.http.spans import RequestSpans, exporter_for
from quire.server.llamacpp import routes as llamacpp_routes
from quire.server.ollama import routes as ollama_routes
from quire.server.openai import adapter_routes, chat, completions, tokens, warm_routes
from quire.server.openai.reruns import Reruns
from quire.server.responses import routes as responses
from quire.server.responses.store import Responses
from quire.server.sessions import branch_routes
from quire.server.sessions import routes as session_routes
from quire.server.sessions.held import Sessions, StoredBytes
from quire.server.sessions.keeper import SessionKeeper


def create_app(llm: AsyncLLM, settings: ServerSettings | None = None) -> FastAPI:
    """Return the server of one model as an ASGI application. The end of its lifespan closes the
    sessions, and leaves ``llm`` to the caller. The routes share ``app.state.context``.
    ``Unsupported`` for an ``otlp_endpoint`` without OpenTelemetry's packages."""
    settings = settings or ServerSettings()
    gate = Gate(settings.max_waiting, settings.key_weights)
    owners = list(settings.key_weights)
    context = Context(
        llm=llm,
        settings=settings,
        base_names=settings.model_names or (public_name(llm.config.model),),
        gate=gate,
        sessions=Sessions(settings),
        stored=StoredBytes(settings),
        reruns=Reruns(llm, settings),
        responses=Responses(settings, llm.kept, owners),
        chats=Chats(settings, llm.kept, owners),
        started=time.time(),
        adapters={"": set(llm.config.adapters or ())},
    )

    if settings.adopt_from is not None and llm.kept is None:
        raise InvalidArgument("adopt_from needs state_dir, where the sessions continue", field="adopt_from")
    if llm.kept is not None:
        others = None if settings.adopt_from is None else Path(settings.adopt_from)
        context.sessions.keeper = SessionKeeper(llm, llm.kept, owners, context.salt, others)

    exporter = exporter_for(settings.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        spans = None if exporter is None else RequestSpans(llm.engine.timeline, exporter, context.model_name)
        await context.refresh_adapters()
        await context.sessions.resume()
        await context.responses.resume()
        await context.chats.resume()
        try:
            yield
        finally:
            await context.reruns.close()
            await context.sessions.close_all()
            context.texts.close()
            if spans is not None:
                await asyncio.to_thread(spans.close)

    app = FastAPI(
        title="Quire",
        version=metadata.version("quire"),
        description="OpenAI's and Anthropic's endpoints, and sessions that can be forked, rewound and saved.",
        lifespan=lifespan,
        redirect_slashes=False,
        responses=errors.errors_as(errors.ErrorBody),
    )
    app.state.context = context
    errors.install(app)
    app.include_router(status.router)
    routes = (
        *(chat, responses, anthropic_messages, completions, ollama_routes, llamacpp_routes, warm_routes),
        *(session_routes, branch_routes, chat_routes, tokens, adapter_routes),
    )
    for module in routes:
        app.include_router(module.router, responses=errors.REFUSED_VALUES)
    from quire_inspector import routes as inspector

    inspector.install(app, errors.REFUSED_VALUES)
    app.add_middleware(GateMiddleware, gate=gate, settings=settings)
    if settings.allowed_origin:
        # Around the gate: browsers may then read its refusals, and ask beforehand without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origin),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app
