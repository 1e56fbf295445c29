"""``read_state``: a copy of who holds what, made under the engine's lock between two steps.

All documents of one reading agree with each other. What they need besides, as texts and trees, is
made from the copy after the lock was given back. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.adapters.keys import NO_SALT, AdapterKey, AdapterNames, api_key_of, salt_of
from quire.base.token_history import UNKNOWN, Ids, TokenHistory
from quire.base.types import SeqId
from quire.branches.branch import Branch
from quire.contracts.pool_verbs import PoolFacts, SequencePages
from quire.contracts.views import BranchKind
from quire.engine.page_use import SequenceOwners, sequence_owners
from quire.executor.cache_pool import CachePool
from quire.executor.row import Row

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.engine.request import Request
from quire.branches.session_branch import SessionBranch

NO_TOKENS: Ids = np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False, kw_only=True)
class ReadBranch:
    """A branch as it was at a reading."""

    kind: BranchKind
    label: str
    """What tells it from others of its kind."""
    key: Hashable
    """What may share state with it: salt and adapters."""
    pieces: Sequence[Ids]
    """Its token ids, in pieces of which none changes."""
    placeholders: Mapping[int, int] = field(default_factory=dict)
    """The ids that its user wrote where embeddings stand, by those in the pieces."""
    length: int
    computed: int
    seq: SeqId | None
    name: str | None = None
    busy: bool = False
    pinned: bool = False
    modified: bool = False
    exact: bool = True
    adapter: str | None = None
    window: tuple[int, int] | None = None
    last_commit: str | None = None
    number: int | None = None
    """Of a session: its number in this process."""

    @property
    def id(self) -> str:
        """Its id, as far as no other name was given to it (``Viewer.id_of``)."""
        return f"{self.kind}:{self.label}"

    def ids(self, start: int = 0, stop: int | None = None) -> Ids:
        """Return token ids; ids below 0 are those that histories have for embeddings."""
        if len(self.pieces) != 1:
            self.pieces = [np.concatenate(self.pieces)] if self.pieces else [NO_TOKENS]
        return self.pieces[0][start : self.length if stop is None else min(stop, self.length)]

    def given(self, start: int, stop: int) -> list[int]:
        """Return token ids as their user wrote them: -1 to -4 stand for embeddings."""
        ids_T = self.ids(start, stop)
        if not ids_T.size or ids_T.min() >= 0:
            return ids_T.tolist()  # type: ignore[no-any-return]
        return [token if token >= 0 else self.placeholders.get(token, UNKNOWN) for token in ids_T.tolist()]


@dataclass(frozen=True, kw_only=True)
class StateReading:
    """Who held what at one moment."""

    number: int
    """Later readings of one process have higher numbers."""
    time: float
    """Unix time."""
    seconds: float
    """Seconds for which the engine's lock was held."""
    facts: tuple[PoolFacts, ...]
    references: Sequence[NDArray[np.int32]]
    """Reference counts of all pages, for each pool."""
    seqs: Sequence[SeqId]
    """All sequences of the KV state."""
    pages: Sequence[SequencePages]
    """What each of ``seqs`` holds."""
    branches: Sequence[ReadBranch]
    """Every branch, and every sequence as a branch: sequences of no branch are ``other`` ones."""
    owners: SequenceOwners
    order: Mapping[SeqId, int]
    """When each sequence that may be given up is, from 0 on."""
    adapters: Mapping[tuple[str, str], str]
    """Names of loaded adapters by the API keys that know them so, and by fingerprints."""
    running: int
    waiting: int

    @cached_property
    def places(self) -> dict[SeqId, int]:
        """Return the place of each sequence in ``seqs``."""
        return {seq: place for place, seq in enumerate(self.seqs)}

    @cached_property
    def branch_of(self) -> list[int]:
        """Return, for each of ``seqs``, the place of its branch in ``branches``."""
        known = {one.seq: place for place, one in enumerate(self.branches) if one.seq is not None}
        return [known[seq] for seq in self.seqs]

    def pages_of(self, branch: ReadBranch) -> SequencePages | None:
        """Return the pages of a branch's sequence; None: it has none."""
        return None if branch.seq is None else self.pages[self.places[branch.seq]]


def read_state(engine: Engine, names: AdapterNames, number: int) -> StateReading:
    """Read all of an engine; ``names`` are the names of its adapters. Cost O(branches, and entries
    of page tables), and O(tokens) of those branches that a call works on."""
    with engine.lock:
        started = time.perf_counter()
        state = engine.runner.state
        seqs = state.sequence_ids()
        adapters = {
            (names.owner_of(one), engine.branches.fingerprint_of(one)): names.name_of(one)
            for one in engine.runner.adapters.ids
        }
        branches = list(_branches(engine, names))
        known = {one.seq for one in branches}
        branches += [_loose(seq, state.sequence_length(seq)) for seq in seqs if seq not in known]
        return StateReading(
            number=number,
            time=time.time(),
            facts=state.pool_facts,
            references=state.page_references(),
            seqs=seqs,
            pages=state.held_pages(seqs),
            branches=branches,
            owners=sequence_owners(state, engine.branches, engine.cache),
            order=_order(engine),
            adapters={key: name for key, name in adapters.items() if name is not None},
            running=engine.num_running,
            waiting=engine.num_waiting,
            seconds=time.perf_counter() - started,
        )


def _order(engine: Engine) -> dict[SeqId, int]:
    """Return in which order sequences are given up (``runner.reclaim.Rank``)."""
    going: list[SeqId] = []
    if engine.cache is not None and (oldest := engine.cache.oldest()) is not None:
        going = [oldest, *(seq for seq in engine.cache.ages() if seq != oldest)]
    going += [one.seq for one in engine.branches.sessions.values() if one.droppable and one.seq is not None]
    return {seq: place for place, seq in enumerate(going)}


def _branches(engine: Engine, names: AdapterNames) -> Iterator[ReadBranch]:
    seen = set[int]()
    pins = {id(one) for one in engine.prefix_pins.branches}
    for session in engine.branches.sessions.values():
        yield _session(engine, names, session, is_prefix=id(session) in pins)
        if session.request is not None:
            seen.add(id(session.request))
            yield from _way_back(engine, session)
    for request in (*engine.scheduler.running, *engine.scheduler.waiting):
        if id(request) not in seen:
            yield _request(names, request)
    yield from _cached(engine, names)
    for giver in engine.runner.room.owners():
        if isinstance(giver, CachePool):
            yield from _rows(giver, names)


def _session(engine: Engine, names: AdapterNames, session: SessionBranch, *, is_prefix: bool) -> ReadBranch:
    user = None if session.user is None else session.user()
    work = session.present
    return ReadBranch(
        kind="session" if session.user is not None else "cached" if is_prefix else "other",
        label=f"{'pin' if is_prefix else ''}{session.number}",
        name=None if user is None else user.name,
        last_commit=None if user is None else user.last_commit,
        number=session.number,
        key=session.key if is_prefix else engine.branches.prefix_key(session.key, work.runs),
        busy=session.busy,
        pinned=session.pinned,
        modified=session.modified,
        adapter=_adapter(names, session.adapter),
        window=_window(session),
        **_held_by(work, busy=session.busy),
    )


def _request(names: AdapterNames, request: Request) -> ReadBranch:
    work = request.branch
    return ReadBranch(
        kind="request",
        label=request.request_id if not request.asked.index else f"{request.request_id}#{request.asked.index}",
        key=work.key,
        busy=True,
        pinned=work.pinned,
        modified=work.modified,
        adapter=_adapter(names, work.runs.at(len(work.tokens))),
        window=_window(work),
        **_held_by(work),
    )


def _way_back(engine: Engine, session: SessionBranch) -> Iterator[ReadBranch]:
    """Yield the state that a session had when its request began, if that is kept."""
    if (seq := session.undo_fork) is not None:
        length = engine.runner.state.sequence_length(seq)
        yield ReadBranch(
            kind="other",
            label=f"{seq}",
            key=session.key,
            pieces=[session.tokens.ids[:length].copy()],
            placeholders=session.tokens.media.placeholders,
            length=length,
            computed=length,
            seq=seq,
            pinned=True,
        )


def _cached(engine: Engine, names: AdapterNames) -> Iterator[ReadBranch]:
    cache = engine.cache
    for seq in () if cache is None else cache.ages():
        assert cache is not None
        key, length = cache.key_of(seq), cache.length(seq)
        yield ReadBranch(
            kind="cached",
            label=f"{seq}",
            key=key,
            pieces=cache.edges_of(seq),
            length=length,
            computed=length,
            seq=seq,
            adapter=_fingerprint(engine, names, key),
        )


def _rows(pool: CachePool, names: AdapterNames) -> Iterator[ReadBranch]:
    """Yield the rows of an executor's KV caches, and the trees that wait beside them."""
    for cache_id, cache in list(pool.caches.items()):
        for number, row in enumerate(cache.rows):
            if not pool.state.has_sequence(row.seq):
                continue  # it was released
            label = f"{cache_id}.{number}"
            yield _row(names, row, label)
            if row.pending is not None:
                beside = _row(names, row, f"{label}.tree")
                beside.seq = row.pending.seq
                yield beside


def _row(names: AdapterNames, row: Row, label: str) -> ReadBranch:
    return ReadBranch(
        kind="cache",
        label=label,
        key=NO_SALT,
        pinned=True,
        modified=row.modified,
        adapter=_adapter(names, row.runs.at(len(row.tokens))),
        window=_window(row),
        **_held_by(row),
    )


def _loose(seq: SeqId, length: int) -> ReadBranch:
    """Return a sequence of which no branch is known: a copy on its way to a store, or one whose
    owner is gone and that is removed soon."""
    ids_T = np.full(length, UNKNOWN, dtype=np.int64)
    return ReadBranch(kind="other", label=f"{seq}", key=None, pieces=[ids_T], length=length, computed=length, seq=seq)


def _ids_of(tokens: TokenHistory, *, busy: bool) -> Ids:
    """Return the ids of a history, which may grow: copied now if it surely does, else when it
    does."""
    return tokens.ids.copy() if busy else tokens.fork().ids


def _held_by(branch: Branch, *, busy: bool = True) -> dict[str, Any]:
    """Return the fields of ``ReadBranch`` that any branch has."""
    tokens = branch.tokens
    return {
        "pieces": [_ids_of(tokens, busy=busy)],
        "placeholders": tokens.media.placeholders,
        "length": len(tokens),
        "computed": branch.computed if branch.seq is not None else 0,
        "seq": branch.seq,
        "exact": branch.origin.exact,
    }


def _window(branch: Branch) -> tuple[int, int] | None:
    return None if branch.window is None else (branch.window.size, branch.window.sink)


def _adapter(names: AdapterNames, adapter: int | None) -> str | None:
    return None if adapter is None else names.name_of(adapter)


def _fingerprint(engine: Engine, names: AdapterNames, key: Hashable) -> str | None:
    """Return the adapter of a cached prefix's last tokens, by the name that its owner has for
    it."""
    found = key.last if isinstance(key, AdapterKey) else None
    owners = ("", api_key_of(salt_of(key)))
    for loaded in engine.runner.adapters.ids if found is not None else ():
        if engine.branches.fingerprint_of(loaded) == found and names.owner_of(loaded) in owners:
            return names.name_of(loaded)
    return found
