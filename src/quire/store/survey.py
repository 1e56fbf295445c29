"""``survey``: an overview of a store, for people: the commits of all spaces, and the presence of
their objects. No torch.

Damaged records are named and skipped, so that the rest can be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import DataLoss, Unsupported
from quire.contracts.store import Blob, ObjectKey, StoreTier, TierStat
from quire.store.collection import spaces_of
from quire.store.commits import SessionCommit, Space
from quire.store.history import History, batches
from quire.store.keys import StoredPiece

MOST = 1000
"""Most commits whose tokens and objects are read: the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedCommit:
    """A commit, and the presence of its objects."""

    commit: SessionCommit
    space: str
    branches: tuple[str, ...]
    """Names of the branches whose head it is."""
    ids: NDArray[np.int32]
    """``[T]``"""
    pieces: Mapping[StoredPiece, int]
    """Its objects in order of positions, with their bytes of state."""
    there: frozenset[ObjectKey]

    @property
    def stops(self) -> list[int]:
        """Positions of the stops that are present."""
        return [one.stop for one in self.pieces if one.start == one.stop and one.key in self.there]

    @property
    def computed(self) -> int:
        """Number of leading tokens whose rows are present; without rows the last stop."""
        runs = [one for one in self.pieces if one.start < one.stop]
        if not runs:
            return max(self.stops, default=0)
        reached = 0
        for one in runs:
            if one.start == reached and one.key in self.there:
                reached = one.stop
        return reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """An overview of a store. Commits are in order of time, then of id."""

    kind: str
    label: str
    stat: TierStat
    commits: tuple[SurveyedCommit, ...]
    total: int
    """Number of commits, skipped ones included."""
    damaged: tuple[str, ...]
    """A sentence for each record that could not be read."""

    def branches(self) -> dict[tuple[str, str], SurveyedCommit]:
        """Return the head commit of each branch, by space and name."""
        return {
            (one.space, name): one
            for one in sorted(self.commits, key=lambda one: one.space)
            for name in sorted(one.branches)
        }


async def survey(tier: StoreTier) -> Survey:
    """Read all of a store but the state itself. ``TierError``: the store cannot be read;
    ``DataLoss``: the record of a space is damaged, so that the content is unknown."""
    found: list[tuple[Space, SessionCommit]] = []
    damaged: list[str] = []
    names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    records = cast("StoreTier", _Remembered(tier))
    for space in await spaces_of(tier):
        history = History(records, space)
        told = list[str]()
        for name, head in await history.heads(told):
            names[space.name, head].append(name)
        damaged += [f"the record of a branch is damaged: {one}" for one in told]
        (keys,) = await tier.children([space.commits])
        for key in keys:
            try:
                found.append((space, await history.commit(key.digest.hex())))
            except (DataLoss, Unsupported) as error:
                damaged.append(str(error))
    known = {(space.name, commit.id) for space, commit in found}
    damaged += [
        f"branch {one!r} stands at commit {head[:12]}, which is not there"
        for (space, head), listed in sorted(names.items())
        for one in listed
        if (space, head) not in known
    ]
    found.sort(key=lambda pair: (pair[1].time, pair[1].id))
    commits: list[SurveyedCommit] = []
    for space, commit in found[-MOST:]:
        try:
            commits.append(await _surveyed(History(records, space), commit, names[space.name, commit.id]))
        except DataLoss as error:
            damaged.append(f"commit {commit.id[:12]}: {error}")
    return Survey(
        kind=tier.kind,
        label=tier.label,
        stat=await tier.stat(),
        commits=tuple(commits),
        total=len(found),
        damaged=tuple(damaged),
    )


async def _surveyed(history: History, commit: SessionCommit, names: Collection[str]) -> SurveyedCommit:
    ids = await history.tokens(commit)
    pieces = commit.state.pieces(ids, commit.adapters)
    there = await history.there([one.key for one in pieces])
    return SurveyedCommit(
        commit=commit,
        space=history.space.name,
        branches=tuple(sorted(names)),
        ids=ids.astype(np.int32),
        pieces=pieces,
        there=frozenset(key for key, is_there in there.items() if is_there),
    )


class _Remembered:
    """A tier that reads each record once: commits of one session name mostly the same pieces."""

    def __init__(self, tier: StoreTier) -> None:
        self._tier = tier
        self._found: dict[ObjectKey, Blob | None] = {}
        self.children, self.contains = tier.children, tier.contains

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        for some in batches([key for key in dict.fromkeys(keys) if key not in self._found]):
            self._found.update(zip(some, await self._tier.get(some), strict=True))
        return [self._found[key] for key in keys]
