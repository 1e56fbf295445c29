"""The text of an LLM in a notebook, a debugger or a log."""

from __future__ import annotations

from typing import Any

from quire_inspector.drawing.page_maps import PageMaps
from quire_inspector.drawing.summaries import Summary
from quire_inspector.views.state_views import StateViews


def llm_repr(llm: Any) -> str:
    """Return model, requests, sessions and pages on one line. It never raises and never waits."""
    (_, model), *more = _facts(llm)
    facts = ", ".join([repr(model), *(value if name == "state" else f"{value} {name}" for name, value in more)])
    return f"<{type(llm).__name__} of {facts}>"


def llm_summary(llm: Any) -> Summary:
    """Return the facts of ``llm_repr`` as a table."""
    return Summary(type(llm).__name__, _facts(llm))


def pool_pages(views: StateViews) -> PageMaps:
    """Return the pages of all pools, from one reading."""
    state = views.state()
    summaries = views.overview(state).pools
    return PageMaps([views.pages(pool, state=state) for pool in range(len(summaries))], summaries)


def _facts(llm: Any) -> list[tuple[str, str]]:
    """Return facts by name, the model first: also of an LLM whose constructor failed. Pages are
    left out while a step runs."""
    config: Any = getattr(llm, "config", None)
    facts = [("model", str(getattr(config, "model", "?")))]
    engine = getattr(llm, "_engine", None)
    if engine is None or engine.closed:
        return [*facts, ("state", "closed")]
    facts += [("running", str(engine.num_running)), ("waiting", str(engine.num_waiting))]
    facts.append(("sessions", str(len(engine.branches.sessions))))
    if engine.lock.acquire(blocking=False):
        try:
            state = engine.runner.state
            facts.append(("pages", f"{state.num_used_pages:,} of {state.num_pages:,}"))
        finally:
            engine.lock.release()
    return facts
