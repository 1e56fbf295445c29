"""The inspector over HTTP: the page at ``/``, and the documents that it draws (``/v1/state/...``).

``state_routes``, ``token_routes`` over ``state_answers``: documents. ``state_events``: changes.
``page_routes``: static files. ``install`` is the entry point of ``quire serve``.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from quire_inspector.routes import page_routes, state_routes, token_routes


def install(app: FastAPI, responses: dict[int | str, dict[str, Any]]) -> None:
    """Add the page and its documents; ``responses`` describes the errors of documents."""
    app.include_router(page_routes.router)
    for module in (state_routes, token_routes):
        app.include_router(module.router, responses=responses)
