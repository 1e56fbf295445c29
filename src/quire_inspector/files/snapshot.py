"""``Snapshot``: a state file, or a store at one moment, as the views of the inspector's page.

No model is loaded, so there are no requests, no engine and no probabilities. ``file_snapshot`` and
``store_snapshot`` make snapshots; ``snapshot_server`` shows them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.documents import FORMAT
from quire.base.errors import NotFound
from quire.contracts.token_views import ComparisonView, NormsView, PartingSide
from quire.contracts.views import (
    NOBODY,
    OWNER_NAMES,
    BranchPagesView,
    BranchView,
    HistoryView,
    OverviewView,
    PageHolder,
    PageView,
    PoolSummary,
    PoolView,
    ShownToken,
    Source,
    TextView,
    TiersView,
)
from quire_inspector.views.history_tree import history_of
from quire_inspector.views.state_reading import ReadBranch
from quire_inspector.views.token_texts import TextReader
from quire_inspector.views.viewer import EVERYBODY

FREE, HELD, PINNED = (OWNER_NAMES.index(name) for name in ("free", "held", "pinned"))
SHOWN_BEFORE = 16
"""Tokens before a recurrent state that are shown with it."""


STARTED = time.time()
"""When this process began to show snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredBranch:
    """A sequence of a file, or a commit."""

    view: BranchView
    ids: NDArray[np.int64]
    """``[T]``. -1 to -4, and what is below, stand for inputs that are no tokens."""
    key: Hashable
    """What it may share with others: salt and adapters, as in ``adapters.keys``."""

    @property
    def read(self) -> ReadBranch:
        """Return the same branch in the form in which readers of an engine have it."""
        return ReadBranch(
            kind=self.view.kind,
            label=self.view.id.partition(":")[2],
            key=self.key,
            pieces=[self.ids],
            length=self.ids.size,
            computed=self.view.computed,
            seq=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredPage:
    """Rows of a run of positions, or a recurrent state; or a hole where there were some."""

    owner: int
    holders: tuple[PageHolder, ...]
    """Of a hole who let go of it."""
    references: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredPool:
    """The pages of one class of layers."""

    kind: str
    layers: tuple[int, ...]
    window: int | None
    page_tokens: int
    page_bytes: int
    pages: Sequence[StoredPage]

    def summary(self) -> PoolSummary:
        """Return it as the overview tells it."""
        owners = np.array([one.owner for one in self.pages], dtype=np.uint8)
        found = np.bincount(owners, minlength=len(OWNER_NAMES)).tolist()
        return PoolSummary(
            kind=self.kind,  # type: ignore[arg-type]
            layers=self.layers,
            window=self.window,
            num_pages=len(self.pages),
            page_tokens=self.page_tokens,
            page_bytes=self.page_bytes,
            counts=dict(zip(OWNER_NAMES, found, strict=True)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """See the module."""

    source: Source
    model: Mapping[str, Any]
    """As in ``OverviewView``."""
    layers: tuple[Mapping[str, Any], ...]
    branches: tuple[StoredBranch, ...]
    pools: tuple[StoredPool, ...]
    tiers: TiersView
    texts: TextReader
    notes: tuple[str, ...] = ()
    """What could not be read, a sentence each."""
    reading: int = 1
    time: float = field(default_factory=time.time)
    started: float = STARTED
    norms: Callable[[StoredBranch, int], Awaitable[NormsView]]
    """Norms of a branch's state in a layer. ``NotFound``: there is no such layer."""

    # -- views -------------------------------------------------------------------------------------

    def overview(self) -> OverviewView:
        """Return the overview."""
        pools = tuple(one.summary() for one in self.pools)
        use = {name: sum(one.counts[name] for one in pools) for name in OWNER_NAMES}
        kinds = [one.view.kind for one in self.branches]
        return OverviewView(
            source=self.source,
            reading=self.reading,
            time=self.time,
            started=self.started,
            model={**self.model, "damaged": list(self.notes)} if self.notes else self.model,
            layers=self.layers,
            pools=pools,
            tiers=tuple(one.kind for one in self.tiers.tiers),
            use={"total": sum(use.values()), **use},
            requests={"running": 0, "waiting": 0},
            branches={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            versions={"quire": metadata.version("quire")},
        )

    def history(self) -> HistoryView:
        """Return all branches, and the trees that their tokens make."""
        return history_of(self.reading, [(one.read, one.view) for one in self.branches], self.texts)

    def text(self, branch: str, start: int = 0, stop: int | None = None) -> TextView:
        """Return tokens of a branch; see ``TextReader.view``. ``NotFound``, ``InvalidArgument``."""
        return self.texts.view(self.branch(branch).read, EVERYBODY, start, stop)

    def pool(self, pool: int) -> PoolView:
        """Return a pool's pages. ``NotFound``."""
        pages = self._pool(pool).pages
        index = {one.view.id: number for number, one in enumerate(self.branches)}
        first = [one.holders[0] if one.holders else None for one in pages]
        return PoolView(
            reading=self.reading,
            pool=pool,
            references=np.array([one.references for one in pages], dtype=np.int32),
            owner=np.array([one.owner for one in pages], dtype=np.uint8),
            holder=np.array([NOBODY if one is None else index[one.branch] for one in first], dtype=np.int32),
            position=np.array([-1 if one is None else one.start for one in first], dtype=np.int32),
            eviction=np.full(len(pages), -1, dtype=np.int32),
            branches=tuple(index),
        )

    def branch_pages(self, branch: str, pool: int) -> BranchPagesView:
        """Return the pages of a branch in their order; -1 where a window let go. ``NotFound``."""
        self.branch(branch)
        named = sorted(
            (holder.start, page if one.owner != FREE else -1)
            for page, one in enumerate(self._pool(pool).pages)
            for holder in one.holders
            if holder.branch == branch
        )
        return BranchPagesView(
            reading=self.reading,
            pool=pool,
            branch=branch,
            pages=np.array([page for _, page in named], dtype=np.int32),
            positions=np.array([start for start, _ in named], dtype=np.int64),
        )

    def page(self, pool: int, page: int) -> PageView:
        """Return a page. ``NotFound``."""
        pages = self._pool(pool).pages
        if not 0 <= page < len(pages):
            raise NotFound(f"pool {pool} has no page {page}; it has {len(pages)}", field="page", given=page)
        found = pages[page]
        tokens: tuple[ShownToken, ...] = ()
        if found.holders:
            one = found.holders[0]
            before = one.start if one.start < one.stop else max(0, one.stop - SHOWN_BEFORE)
            tokens = self.texts.tokens(self.branch(one.branch).read, before, one.stop)
        return PageView(
            reading=self.reading,
            pool=pool,
            page=page,
            references=found.references,
            owner=OWNER_NAMES[found.owner],
            eviction=-1,
            holders=found.holders,
            others=0,
            tokens=tokens,
        )

    def compare(self, a: str, b: str) -> ComparisonView:
        """Return the first difference of two branches, without probabilities. ``NotFound``."""
        first, second = self.branch(a), self.branch(b)
        size = min(first.ids.size, second.ids.size)
        same = first.ids[:size] == second.ids[:size]
        shared = size if same.all() else int(same.argmin())
        sides = [self._side(one, shared) for one in (first, second)]
        return ComparisonView(shared=shared, a=sides[0], b=sides[1], divergences=None, num_run=0)

    def _side(self, branch: StoredBranch, shared: int) -> PartingSide:
        following = int(branch.ids[shared]) if shared < branch.ids.size else None
        return PartingSide(
            num_tokens=branch.ids.size,
            token=None,
            id=following,
            text=None if following is None else self.texts.token(following),
            other=None,
            alternatives=(),
            entropy=None,
            exact=branch.view.exact and not branch.view.modified,
            adapter=branch.view.adapter,
        )

    def change(self) -> dict[str, Any]:
        """Return the event that tells viewers of it, as ``state_events`` do."""
        found = self.overview()
        return {
            "type": "changed",
            "format": FORMAT,
            "reading": self.reading,
            "time": self.time,
            "documents": ["overview", "history", "pages", "tiers"],
            "use": dict(found.use),
            "requests": dict(found.requests),
            "branches": dict(found.branches),
        }

    def shows(self, other: Snapshot) -> bool:
        """Return whether another snapshot of the same store shows the same."""
        return self._facts() == other._facts()

    def _facts(self) -> tuple[object, ...]:
        pages = [(one.owner, one.holders) for pool in self.pools for one in pool.pages]
        return [one.view for one in self.branches], pages, self.notes

    # -- what views are made of --------------------------------------------------------------------

    def branch(self, name: str) -> StoredBranch:
        """Return the branch of an id. ``NotFound``."""
        found = next((one for one in self.branches if one.view.id == name), None)
        if found is None:
            raise NotFound(f"there is no branch {name!r:.200} here", field="branch", given=name)
        return found

    def _pool(self, pool: int) -> StoredPool:
        if not 0 <= pool < len(self.pools):
            raise NotFound(f"there is no pool {pool}; there are {len(self.pools)}", field="pool", given=pool)
        return self.pools[pool]


def require_layer(kinds: Mapping[int, str], layer: int) -> None:
    """Raise ``NotFound`` for a layer of which there is no state."""
    if layer not in kinds:
        ids = sorted(kinds)
        known = f"there are {len(ids)}, {ids[0]} to {ids[-1]}" if ids else "there are none"
        raise NotFound(f"there is no state of layer {layer}; {known}", field="layer", given=layer)
