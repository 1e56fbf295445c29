"""``CommitReader``: commits in the durable tier, as branches. It never takes the engine's lock.

A commit never changes, so each is read once. Which commits there are is asked again after a while,
for other processes commit, too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from quire.adapters.keys import AdapterKey, read_key
from quire.base.errors import DataLoss, QuireError, Unsupported
from quire.base.token_history import Ids
from quire.sessions import commits
from quire.store.commits import SessionCommit, space_of
from quire.store.history import History
from quire_inspector.views.state_reading import ReadBranch

if TYPE_CHECKING:
    from quire.engine.engine import Engine

MOST_COMMITS = 256
"""Commits of one owner that are shown, those nearest to where branches stand."""
REMEMBERED = 2048
"""Commits whose tokens are kept."""
SECONDS = 5.0
"""Seconds for which the list of one owner's commits holds."""


@dataclass(slots=True)
class _Listed:
    """What is known of one owner's commits."""

    until: float = float("-inf")
    found: list[ReadBranch] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)


class CommitReader:
    """The commits of all owners. Any thread may call; calls wait for the tier."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._known: OrderedDict[str, tuple[SessionCommit, Ids]] = OrderedDict()
        self._owners: dict[str, _Listed] = {}
        self._lock = Lock()

    @property
    def is_there(self) -> bool:
        """Return whether there is a durable tier. Without one there are no commits."""
        store = self._engine.stored.store
        return store is not None and store.is_durable

    def read(self, owner: str, wanted: frozenset[str] = frozenset()) -> list[ReadBranch]:
        """Return an owner's commits: those where branches stand first. Of a tier that fails, what
        was read last. ``wanted``: commits that are there; if one is unknown, the tier is asked."""
        if not self.is_there:
            return []
        with self._lock:
            listed = self._owners.setdefault(owner, _Listed())
        with listed.lock:
            ids = {one.label for one in listed.found}
            if self._clock() < listed.until and wanted <= ids:
                return listed.found
            listed.until = self._clock() + SECONDS
            with suppress(QuireError):  # the tier is asked again after a while
                listed.found = commits.ask(self._engine, space_of(owner), lambda history: self._read(history, owner))
            return listed.found

    async def _read(self, history: History, owner: str) -> list[ReadBranch]:
        names: dict[str, str] = {}
        waiting: list[str] = []
        for name, head in (await history.branches([])).items():
            if head.id in names:
                names[head.id] += f", {name}"
            else:
                names[head.id] = name
                waiting.append(head.id)
        found: dict[str, ReadBranch] = {}
        while waiting and len(found) < MOST_COMMITS:
            later: list[str] = []
            for id in waiting[: MOST_COMMITS - len(found)]:
                try:
                    commit, ids_T = await self._commit(history, id)
                except (DataLoss, Unsupported):
                    continue
                found[id] = _branch(commit, ids_T, owner, names.get(id))
                if commit.parent is not None and commit.parent not in found and commit.parent not in later:
                    later.append(commit.parent)
            waiting = [id for id in later if id not in found]
        return list(found.values())

    async def _commit(self, history: History, id: str) -> tuple[SessionCommit, Ids]:
        with self._lock:
            if (known := self._known.get(id)) is not None:
                self._known.move_to_end(id)
                return known
        commit = await history.commit(id)
        found = commit, await history.tokens(commit)
        with self._lock:
            self._known[id] = found
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found


def _branch(commit: SessionCommit, ids_T: Ids, owner: str, name: str | None) -> ReadBranch:
    adapters = tuple((int(start), fingerprint) for start, fingerprint in commit.adapters)
    salt = read_key(tuple(commit.key), owner)
    return ReadBranch(
        kind="commit",
        label=commit.id,
        key=AdapterKey(salt, adapters) if adapters else salt,
        pieces=[ids_T],
        length=ids_T.size,
        computed=0,
        seq=None,
        name=name if name is not None else commit.message or None,
        modified=commit.modified,
        adapter=adapters[-1][1] if adapters else None,
        window=None if commit.window is None else (commit.window[0], commit.window[1]),
        last_commit=commit.parent,
    )
