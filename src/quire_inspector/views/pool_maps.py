"""Pages of a pool by owner, holder and position, out of a reading. In NumPy, and no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import NotFound
from quire.base.types import SeqId
from quire.contracts.pool_verbs import StateRole
from quire.contracts.views import (
    NOBODY,
    OWNER_NAMES,
    SOMEBODY_ELSE,
    BranchPagesView,
    PageHolder,
    PageView,
    PoolView,
    ShownToken,
)
from quire_inspector.views.state_reading import ReadBranch, StateReading
from quire_inspector.views.token_texts import TextReader
from quire_inspector.views.viewer import Viewer

FREE, EVICTABLE, HELD, PINNED = range(len(OWNER_NAMES))
STATE_TOKENS = 16
"""Tokens before a recurrent state that are shown with it."""
ROLE_NAMES = {role.value: role.name.lower() for role in StateRole}

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Namings:
    """Every entry of a page table that names a page of one pool, null pages left out; all arrays
    are ``[entries]``."""

    pages: Places
    seqs: Places
    """Places in ``StateReading.seqs``."""
    positions: Places
    """The position of the page's first slot; of a recurrent state where it stands."""
    roles: NDArray[np.uint8] | None
    """The ``StateRole`` of each; None: the pool holds no recurrent states."""


class PoolMap:
    """One pool of one reading. Cost O(pages and entries), once."""

    def __init__(self, reading: StateReading, pool: int) -> None:
        """``NotFound`` unless there is a pool of that number."""
        if not 0 <= pool < len(reading.facts):
            known = f"0 to {len(reading.facts) - 1}" if reading.facts else "none"
            raise NotFound(f"there is no pool {pool}; pools are {known}", field="pool", given=pool)
        self.reading = reading
        self.pool = pool
        self.facts = reading.facts[pool]
        self.named = _namings(reading, pool)
        self.references = reading.references[pool]
        self.owner = self._owners()
        self.eviction = self._evictions()

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of pages by owner."""
        return dict(zip(OWNER_NAMES, np.bincount(self.owner, minlength=len(OWNER_NAMES)).tolist(), strict=True))

    def _owners(self) -> NDArray[np.uint8]:
        reading, named = self.reading, self.named
        owner = np.where(self.references > 0, EVICTABLE, FREE).astype(np.uint8)
        for seqs, mark in ((reading.owners.needed, HELD), (reading.owners.pinned, PINNED)):
            chosen = self._marks(seqs)[named.seqs]
            if named.roles is not None:
                # Checkpoints only save work, unless tokens do not give the state.
                firm = (named.roles == StateRole.PRESENT) | (named.roles == StateRole.NODE)
                kept = (named.roles == StateRole.CHECKPOINT) & self._marks(reading.owners.written)[named.seqs]
                chosen = chosen & (firm | kept)
            owner[named.pages[chosen]] = mark
        return owner

    def _marks(self, seqs: Iterable[SeqId]) -> NDArray[np.bool_]:
        """Return a mask of the reading's sequences that are among ``seqs``."""
        places = self.reading.places
        marks = np.zeros(len(places), dtype=bool)
        marks[[places[seq] for seq in seqs if seq in places]] = True
        return marks

    def _evictions(self) -> NDArray[np.int32]:
        """Return the place of each page in the order of eviction: a page is free with the last
        sequence that names it."""
        order = self.reading.order
        never = len(order) + 1
        last = np.full(self.references.size, -1, dtype=np.int64)
        whens = np.array([order.get(seq, never) for seq in self.reading.seqs], dtype=np.int64)
        named = whens[self.named.seqs]
        if self.named.roles is not None:
            # Of what is needed, states that only save work go before anything else does.
            loose = self.owner[self.named.pages] == EVICTABLE
            named = np.where(loose & (named == never), 0, named)
        np.maximum.at(last, self.named.pages, named)
        last[(self.owner != EVICTABLE) | (last == never)] = -1
        return last.astype(np.int32)

    def view(self, viewer: Viewer) -> PoolView:
        """Return the pool as a viewer sees it. Of several holders of a page it names a visible one,
        of these the holder that keeps the page, and of these the first."""
        reading, named = self.reading, self.named
        seen = np.array([viewer.sees(reading.branches[one]) for one in reading.branch_of], dtype=bool)
        rank = np.full(len(reading.seqs), EVICTABLE)
        rank[self._marks(reading.owners.needed)] = HELD
        rank[self._marks(reading.owners.pinned)] = PINNED
        first = np.argsort(np.array(reading.branch_of, dtype=np.int64), kind="stable")
        turn = np.empty(len(reading.seqs), dtype=np.int64)
        turn[first] = np.arange(len(reading.seqs))
        shown = seen[named.seqs]
        # The last write stays.
        order = np.lexsort((-named.positions, -turn[named.seqs], rank[named.seqs], shown))
        holding = np.flatnonzero(np.bincount(named.seqs[shown], minlength=len(reading.seqs)))
        listed = np.full(len(reading.seqs), SOMEBODY_ELSE, dtype=np.int32)
        listed[holding] = np.arange(holding.size)
        holder = np.full(self.references.size, NOBODY, dtype=np.int32)
        holder[self.references > 0] = SOMEBODY_ELSE
        position = np.full(self.references.size, -1, dtype=np.int32)
        holder[named.pages[order]] = listed[named.seqs[order]]
        position[named.pages[order]] = named.positions[order]
        position[holder < 0] = -1
        return PoolView(
            reading=reading.number,
            pool=self.pool,
            references=self.references,
            owner=self.owner,
            holder=holder,
            position=position,
            eviction=self.eviction,
            branches=tuple(viewer.id_of(reading.branches[reading.branch_of[place]]) for place in holding.tolist()),
        )

    def branch_pages(self, branch: ReadBranch, name: str) -> BranchPagesView:
        """Return the pages of a branch, whose id for the viewer is ``name``, in their order. A
        branch without a sequence has none."""
        held = self.reading.pages_of(branch)
        pages = np.empty(0, dtype=np.int32) if held is None else held.tables[self.pool]
        if held is not None and self.named.roles is not None:
            order = np.argsort(held.state_positions, kind="stable")
            pages, positions = pages[order], held.state_positions[order]
        else:
            positions = np.arange(pages.size, dtype=np.int64) * self.facts.page_tokens
        number = self.reading.number
        return BranchPagesView(reading=number, pool=self.pool, branch=name, pages=pages, positions=positions)

    def page(self, page: int, viewer: Viewer, texts: TextReader) -> PageView:
        """Return a page as a viewer sees it; ``NotFound`` unless there is such a page."""
        if not 0 <= page < self.references.size:
            raise NotFound(
                f"there is no page {page} in pool {self.pool}; its pages are 0 to {self.references.size - 1}",
                field="page",
                given=page,
            )
        reading, named = self.reading, self.named
        holders: list[PageHolder] = []
        tokens: tuple[ShownToken, ...] | None = None
        others = 0
        for entry in np.flatnonzero(named.pages == page).tolist():
            place = int(named.seqs[entry])
            branch = reading.branches[reading.branch_of[place]]
            if not viewer.sees(branch):
                others += 1
                continue
            start, role = int(named.positions[entry]), None
            stop = min(start + self.facts.page_tokens, max(start, reading.pages[place].length))
            if named.roles is not None:
                role, stop = ROLE_NAMES[int(named.roles[entry])], start
            elif self.facts.kind == "encoder":
                stop = start + self.facts.page_tokens
            holders.append(PageHolder(branch=viewer.id_of(branch), start=start, stop=stop, role=role))
            if tokens is None and self.facts.kind != "encoder":
                tokens = texts.tokens(branch, max(0, start - STATE_TOKENS) if role else start, stop)
        return PageView(
            reading=reading.number,
            pool=self.pool,
            page=page,
            references=int(self.references[page]),
            owner=OWNER_NAMES[self.owner[page]],
            eviction=int(self.eviction[page]),
            holders=tuple(holders),
            others=others,
            tokens=tokens or (),
        )


def _namings(reading: StateReading, pool: int) -> Namings:
    tables = [one.tables[pool] for one in reading.pages]
    sizes = np.array([table.size for table in tables], dtype=np.int64)
    pages = np.concatenate(tables).astype(np.int64) if tables else np.empty(0, dtype=np.int64)
    seqs = np.repeat(np.arange(len(tables)), sizes)
    if reading.facts[pool].kind == "states":
        none: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        positions = np.concatenate([one.state_positions for one in reading.pages] or none)
        roles = np.concatenate([one.state_roles for one in reading.pages] or none).astype(np.uint8)
        return Namings(pages, seqs, positions, roles)
    starts = np.cumsum(sizes) - sizes
    positions = (np.arange(pages.size) - np.repeat(starts, sizes)) * reading.facts[pool].page_tokens
    held = pages >= 0
    return Namings(pages[held], seqs[held], positions[held], None)
