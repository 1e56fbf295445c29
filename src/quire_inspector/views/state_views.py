"""``StateViews``: the views of an engine's state, from one reading for all viewers.

    views = llm.views
    views.history().document()

No view changes anything, and none computes state.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from importlib import metadata
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from quire.adapters.keys import AdapterNames
from quire.base.errors import NotFound
from quire.contracts.layers import CrossAttention, LatentAttention, LayerSpec, Recurrent
from quire.contracts.views import (
    OWNER_NAMES,
    BranchPagesView,
    HistoryView,
    OverviewView,
    PageView,
    PoolSummary,
    PoolView,
    TextView,
    TiersView,
    TierView,
)
from quire_inspector.views.branch_list import BranchList, shown_unread
from quire_inspector.views.commit_list import CommitReader
from quire_inspector.views.history_tree import history_of
from quire_inspector.views.pool_maps import PoolMap
from quire_inspector.views.state_reading import ReadBranch, StateReading, read_state
from quire_inspector.views.token_texts import TextReader
from quire_inspector.views.viewer import EVERYBODY, Viewer

if TYPE_CHECKING:
    from quire.engine.engine import Engine

T = TypeVar("T")

REMEMBERED = 64
"""Documents of one reading that are kept, over all viewers."""
TIER_SECONDS = 2.0
"""Seconds for which what tiers said holds."""


class ReadState:
    """One reading, and what was made of it so far. Any thread may call."""

    def __init__(self, reading: StateReading) -> None:
        self.reading = reading
        self._lock = Lock()
        self._pools: dict[int, PoolMap] = {}

    @cached_property
    def branches(self) -> BranchList:
        """All branches."""
        return BranchList(self.reading)

    def pool(self, pool: int) -> PoolMap:
        """Return a pool; ``NotFound``."""
        with self._lock:
            if pool not in self._pools:
                self._pools[pool] = PoolMap(self.reading, pool)
            return self._pools[pool]

    def find(self, name: str, viewer: Viewer) -> ReadBranch | None:
        """Return the branch of an id that a viewer sees; None: there is none."""
        found = (one for one in self.reading.branches if viewer.id_of(one) == name and viewer.sees(one))
        return next(found, None)


class StateViews:
    """The views of one engine. Any thread may call."""

    def __init__(self, engine: Engine, names: AdapterNames, model: str) -> None:
        """``names``: the names of its adapters; ``model``: the name of the model."""
        self._engine = engine
        self._names = names
        self._model = model
        self.budget = engine.timeline.budget
        self.texts = TextReader(engine.tokenizer)
        self.commits = CommitReader(engine)
        self.is_behind = False
        """Whether a viewer was shown an old state, since the budget allowed no reading. The
        notifier of viewers then notifies them once more, and sets it back."""
        self._lock = Lock()
        self._last: ReadState | None = None
        self._mark: Hashable = None
        self._number = 0
        self._started = time.time()
        self._made: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._tiers: tuple[float, TiersView] | None = None

    # -- reading -----------------------------------------------------------------------------------

    @property
    def mark(self) -> Hashable:
        """Return a value that is another one if something may have changed since. Takes no lock."""
        engine = self._engine
        return (engine.runner.revision, engine.branches.revision, engine.num_running, engine.num_waiting)

    @property
    def is_last(self) -> bool:
        """Return whether nothing has changed since the last reading; False before the first."""
        return self._last is not None and self.mark == self._mark

    def state(self, *, anew: bool = True) -> ReadState:
        """Return the state as it is now. With ``anew=False``, for many viewers, the last reading,
        if nothing has changed since or the budget allows no other."""
        with self._lock:
            mark = self.mark
            if not anew and self._last is not None and (mark == self._mark or not self.budget.is_free):
                self.is_behind |= mark != self._mark
                return self._last
            self._number += 1
            before = time.thread_time()
            with self.budget.spent():
                found = ReadState(read_state(self._engine, self._names, self._number))
            # Others may have computed while this thread had the lock, but no step could run.
            self.budget.spend(max(0.0, found.reading.seconds - (time.thread_time() - before)))
            self._last, self._mark = found, mark
            return found

    def shared(self, name: Hashable, make: Callable[[ReadState], T]) -> T:
        """Return a document that all who ask for ``name`` share, made once of each reading. What it
        costs to make puts off the next reading."""
        found = self.state(anew=False)
        with self._lock:
            if (known := self._made.get(name)) is not None:
                self._made.move_to_end(name)
                if known[0] == found.reading.number:
                    return known[1]  # type: ignore[no-any-return]
        with self.budget.spent():
            made = make(found)
        with self._lock:
            self._made[name] = found.reading.number, made
            while len(self._made) > REMEMBERED:
                self._made.popitem(last=False)
        return made

    def remembered(self, name: Hashable) -> Any:
        """Return the result of ``shared`` if it needs no reading of the state, and no wait; None:
        it would have to read it."""
        known, last = self._made.get(name), self._last
        if known is None or last is None or known[0] != last.reading.number:
            return None
        if self.mark != self._mark:
            if self.budget.is_free:
                return None
            self.is_behind = True
        return known[1]

    def forget(self) -> None:
        """Free the memory of the readings."""
        with self._lock:
            self._last, self._mark = None, None
            self._made.clear()

    # -- documents ---------------------------------------------------------------------------------

    def overview(self, state: ReadState | None = None) -> OverviewView:
        """Return the model, its memory and its load."""
        found = self.state() if state is None else state
        reading, kv, engine = found.reading, self._engine.runner.state, self._engine
        pools = tuple(self._summary(found, pool) for pool in range(len(reading.facts)))
        use = {name: sum(one.counts[name] for one in pools) for name in OWNER_NAMES}
        model: dict[str, Any] = {
            "name": self._model,
            "max_length": engine.max_model_len,
            "vocab_size": engine.runner.model.vocab_size,
            "dtype": str(kv.dtype).removeprefix("torch."),
            "page_size": kv.page_size,
            "tokenizer": engine.tokenizer is not None,
            "chat_template": engine.tokenizer is not None and engine.tokenizer.chat_template is not None,
            "prefix_cache": engine.cache is not None,
        }
        return OverviewView(
            source="server",
            reading=reading.number,
            time=reading.time,
            model=model,
            layers=self._layers,
            pools=pools,
            tiers=tuple(one.kind for one in self.tiers().tiers),
            use={"total": sum(one.num_pages for one in pools), **use},
            requests={"running": reading.running, "waiting": reading.waiting},
            branches=found.branches.kinds(),
            started=self._started,
            versions=self._versions,
        )

    def history(
        self, viewer: Viewer = EVERYBODY, *, owner: str | None = "", state: ReadState | None = None
    ) -> HistoryView:
        """Return all branches and the trees that they make. ``owner``: the owner of the commits
        among them, "" for a program's; None: no commits."""
        found = self.state() if state is None else state
        branches = found.branches.shown(viewer)
        if owner is not None:
            named = frozenset(view.last_commit for _, view in branches if view.last_commit is not None)
            branches += [(one, shown_unread(one)) for one in self.commits.read(owner, named)]
        known = found.reading.adapters.items()
        names = {print_: name for (whose, print_), name in known if viewer.owner is None or whose in ("", viewer.owner)}
        return history_of(found.reading.number, branches, self.texts, names)

    def pages(self, pool: int, viewer: Viewer = EVERYBODY, *, state: ReadState | None = None) -> PoolView:
        """Return the pages of a pool; ``NotFound``."""
        return (self.state() if state is None else state).pool(pool).view(viewer)

    def page(self, pool: int, page: int, viewer: Viewer = EVERYBODY, *, state: ReadState | None = None) -> PageView:
        """Return a page; ``NotFound``."""
        return (self.state() if state is None else state).pool(pool).page(page, viewer, self.texts)

    def branch_pages(
        self,
        branch: str,
        pool: int,
        viewer: Viewer = EVERYBODY,
        *,
        owner: str | None = "",
        state: ReadState | None = None,
    ) -> BranchPagesView:
        """Return the pages of a branch in a pool, in their order; ``NotFound``. The rest as in
        ``history``."""
        found = self.state() if state is None else state
        wanted = self.branch(branch, viewer, owner=owner, state=found)
        return found.pool(pool).branch_pages(wanted, branch)

    def text(
        self,
        branch: str,
        start: int = 0,
        stop: int | None = None,
        viewer: Viewer = EVERYBODY,
        *,
        owner: str | None = "",
        state: ReadState | None = None,
    ) -> TextView:
        """Return tokens of a branch (``TextReader.view``); ``NotFound``. The rest as in
        ``history``."""
        found = self.state() if state is None else state
        return self.texts.view(self.branch(branch, viewer, owner=owner, state=found), viewer, start, stop)

    def branch(
        self, name: str, viewer: Viewer = EVERYBODY, *, owner: str | None = "", state: ReadState | None = None
    ) -> ReadBranch:
        """Return the branch of an id; ``NotFound`` if there is none that the viewer sees."""
        found = (self.state() if state is None else state).find(name, viewer)
        if found is None and owner is not None and name.startswith("commit:"):
            found = next((one for one in self.commits.read(owner) if one.id == name), None)
        if found is None:
            raise NotFound(f"there is no branch {name[:80]!r}; it may have ended", field="branch", given=name[:80])
        return found

    def tiers(self) -> TiersView:
        """Return the contents of each tier outside of the pool. It may wait for a tier, seldom."""
        with self._lock:
            if self._tiers is not None and time.monotonic() < self._tiers[0]:
                return self._tiers[1]
        store = self._engine.stored.store
        found = TiersView(
            tiers=tuple(
                TierView(
                    kind=one.kind,
                    label=one.label,
                    durable=one.is_durable,
                    objects=None if one.stat is None else one.stat.objects,
                    num_bytes=None if one.stat is None else one.stat.bytes,
                    capacity=None if one.stat is None else one.stat.capacity,
                    pinned=None if one.stat is None else one.stat.pinned,
                    resting=max(one.rest_of_reads, one.rest_of_writes),
                )
                for one in ([] if store is None else store.stat())
            )
        )
        with self._lock:
            self._tiers = time.monotonic() + TIER_SECONDS, found
        return found

    def _summary(self, state: ReadState, pool: int) -> PoolSummary:
        found = state.pool(pool)
        counts = found.counts
        facts = found.facts
        return PoolSummary(
            kind=facts.kind,
            layers=facts.layers,
            window=facts.window,
            num_pages=facts.num_pages,
            page_tokens=facts.page_tokens,
            page_bytes=facts.page_bytes,
            counts=counts,
        )

    @cached_property
    def _versions(self) -> dict[str, str]:
        return {"quire": metadata.version("quire")}

    @cached_property
    def _layers(self) -> tuple[Mapping[str, Any], ...]:
        state = self._engine.runner.state
        pools = {layer: pool for pool, facts in enumerate(state.pool_facts) for layer in facts.layers}
        return tuple(_layer(layer, pool, state.layer_spec(layer)) for layer, pool in sorted(pools.items()))


def _layer(layer: int, pool: int, spec: LayerSpec) -> dict[str, Any]:
    """Return the facts of a layer."""
    found: dict[str, Any] = {"id": layer, "kind": spec.kind, "pool": pool}
    if not isinstance(spec, Recurrent):
        found["heads"] = spec.num_heads
        found["kv_heads"] = 1 if isinstance(spec, LatentAttention) else spec.num_kv_heads
        found["window"] = None if isinstance(spec, CrossAttention) else spec.layer_window
    return found
