"""What the routes of ``/v1/state`` share: the viewer of a request, a branch by its id, answers for
many viewers.

viewer = viewer_of(request)
return await shared_answer(request, "history", lambda views, state: views.history(viewer))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from fastapi import Request
from starlette.responses import Response

from quire.async_llm.session import inner_session
from quire.llm import LLM
from quire.server.http.context import Context
from quire.server.http.errors import naming
from quire.server.http.events import encoded_in_pieces
from quire.server.sessions.held import Sessions
from quire_inspector.views.state_reading import ReadBranch
from quire_inspector.views.state_views import ReadState, StateViews
from quire_inspector.views.viewer import Viewer

T = TypeVar("T")

ANSWER_SECONDS = 0.001
"""What an answer costs beside its document: a request is read, passes the gate, and is sent
(``bench/inspector.py``)."""
FIELDS = {name: name for name in ("branch", "start", "stop", "pool", "page")}
"""Fields of requests that errors of readers are about."""


class Shown(Protocol):
    """A view of ``contracts.views``."""

    def document(self) -> Mapping[str, Any]:
        """Return the document to send."""


_viewers: WeakKeyDictionary[Sessions, dict[str, tuple[tuple[str, ...], Viewer]]] = WeakKeyDictionary()
"""The last viewer of each key, and the ids of all sessions by then."""


def context_of(request: Request) -> Context:
    """Return the server's shared state."""
    context: Context = request.app.state.context
    return context


def viewer_of(request: Request) -> Viewer:
    """Return the viewer of a request. With several API keys it sees only its own sessions and
    requests; otherwise all."""
    context, owner = context_of(request), str(request.state.owner)
    ids = context.sessions.ids
    known = _viewers.setdefault(context.sessions, {})
    if owner in known and known[owner][0] == ids:
        return known[owner][1]
    several = len(set(context.settings.api_key)) > 1
    viewer = Viewer(
        owner=owner if several else None,
        sessions={inner_session(held.session).number: held.id for held in context.sessions.of(owner)},
        shares_prefixes=context.settings.share_prefix_cache,
    )
    known[owner] = ids, viewer
    return viewer


async def read_views(request: Request, reader: Callable[[StateViews], T]) -> T:
    """Run a reader on a worker thread; ``FailedPrecondition`` once the LLM is closed."""

    def read(llm: LLM) -> T:
        return reader(llm.views)

    with naming(FIELDS):
        return await context_of(request).llm.read(read)


async def own_answer(request: Request, reader: Callable[[StateViews, ReadState], Shown]) -> Response:
    """Answer with a document of the last reading, or of a new one if there is time, that is made
    for this request alone. What that costs puts off the next reading."""

    def read(views: StateViews) -> bytes:
        with views.budget.spent():
            return encoded_in_pieces(reader(views, views.state(anew=False)).document())

    return _counted(request, await read_views(request, read))


async def branch_of(request: Request, name: str, viewer: Viewer | None = None) -> ReadBranch:
    """Return the branch of an id as it is now; ``NotFound`` if there is none that the request's key
    sees. It is a copy: to change anything, find the session under the engine's lock."""
    seen_by = viewer_of(request) if viewer is None else viewer
    owner = str(request.state.owner)
    return await read_views(request, lambda views: views.branch(name, seen_by, owner=owner))


async def shared_answer(
    request: Request, name: str, make: Callable[[StateViews, ReadState], Shown], *, viewer: Viewer | None = None
) -> Response:
    """Answer with a document that all who ask for ``name`` share, if they see the same: read anew
    at most as often as the budget allows. ``name`` holds all that ``make`` depends on but the
    viewer."""
    seen_by = viewer_of(request) if viewer is None else viewer
    called = (name, seen_by.digest, str(request.state.owner))
    known = context_of(request).llm.views.remembered(called)
    if known is None:

        def read(views: StateViews) -> bytes:
            return views.shared(called, lambda state: encoded_in_pieces(make(views, state).document()))

        known = await read_views(request, read)
    return _counted(request, known)


def json_answer(document: Mapping[str, Any] | bytes) -> Response:
    """Return an answer with a document, which no cache keeps."""
    body = document if isinstance(document, bytes) else encoded_in_pieces(document)
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def count_answer(request: Request) -> None:
    """Count an answer against the budget of views: the more viewers, the rarer their news."""
    context_of(request).llm.views.budget.answered(ANSWER_SECONDS)


def _counted(request: Request, document: bytes) -> Response:
    count_answer(request)
    return json_answer(document)
