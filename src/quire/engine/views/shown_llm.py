"""``ShownLLM``: what an LLM shows of its memory in notebooks and terminals."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from quire.contracts.views import HistoryView
from quire.drawing.page_maps import PageMaps
from quire.drawing.summaries import Summary
from quire.engine.engine import Engine
from quire.engine.views.state_views import StateViews


class ShownLLM:
    """The part of an LLM that is looked at."""

    _engine: Engine

    @property
    def views(self) -> StateViews:
        """Return the views of the state."""
        raise NotImplementedError

    def pages(self) -> PageMaps:
        """Return the pages of all pools, by who holds them, to be drawn in notebooks and terminals,
        and by ``plot``. Its ``pools`` are the views. ``FailedPrecondition`` once it is closed."""
        views = self.views
        state = views.state()
        summaries = views.overview(state).pools
        return PageMaps([views.pages(pool, state=state) for pool in range(len(summaries))], summaries)

    def history(self) -> HistoryView:
        """Return all branches as trees over tokens, to be drawn as ``pages`` is.
        ``FailedPrecondition`` once it is closed."""
        return self.views.history(owner=None)

    def _repr_html_(self) -> str:
        return self._summary()._repr_html_()

    def __rich__(self) -> RenderableType:
        return self._summary().__rich__()

    def __repr__(self) -> str:
        (_, model), *more = self._facts()
        facts = ", ".join([repr(model), *(value if name == "state" else f"{value} {name}" for name, value in more)])
        return f"<{type(self).__name__} of {facts}>"

    def _summary(self) -> Summary:
        return Summary(type(self).__name__, self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """Return facts by name, the model first. It never raises and never waits: pages are left
        out while a step runs."""
        config: Any = getattr(self, "config", None)
        facts = [("model", str(getattr(config, "model", "?")))]
        engine = getattr(self, "_engine", None)
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
