"""Garbage collection: removes commits that no branch reaches, in all spaces of a tier.

It considers commits only. An object that only removed commits name is removed, unless other state
has it as its parent: then it becomes a cache entry like any other. Commits younger than an hour
stay with all that they name, because their branch may be about to be written; so other processes
may commit meanwhile. State that is removed by mistake is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from quire.base.errors import DataLoss, StoreDamaged
from quire.contracts.store import ObjectKey, StoreTier
from quire.store.commits import SPACES, SessionCommit, Space, SpaceRecord
from quire.store.history import History, batches
from quire.store.records import Unfit, unpack_record

SPARED_SECONDS = 3600.0
"""Age in seconds below which commits stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of a collection, or of a dry run."""

    commits: int
    objects: int
    bytes: int
    """Bytes of the state in these objects."""
    pieces: int
    released: int
    """Number of objects that were pinned, and are now cache entries."""
    keys: tuple[ObjectKey, ...]
    """Keys of the removed objects."""
    damaged: tuple[str, ...] = ()
    """A sentence for each damaged record that hides references; everything that it may reference
    has stayed."""


async def collect(
    tier: StoreTier, *, dry_run: bool = False, now: float | None = None, spared_seconds: float = SPARED_SECONDS
) -> Collected:
    """Remove the commits that no branch of any space reaches; ``dry_run``: only report them. If a
    branch of a space is damaged, all commits of that space stay, because it may have reached them.
    """
    now = time.time() if now is None else now
    damaged = list[str]()
    spaces = [_Marked(History(tier, space)) for space in await spaces_of(tier, damaged)]
    for one in spaces:
        await one.mark(now, spared_seconds)
    kept = {key for one in spaces for key in one.kept}
    gone = {key: nbytes for one in spaces for key, nbytes in one.gone.items() if key not in kept}
    # Keep the objects of commits that were written meanwhile.
    for one in spaces:
        for key in await one.late():
            gone.pop(key, None)
    below = await _with_others(tier, gone)
    removed = {key: nbytes for key, nbytes in gone.items() if key not in below}
    commits = [key for one in spaces for key in one.garbage]
    pieces = [key for one in spaces for key in one.loose]
    if not dry_run:
        # Remove the objects before the commits and pieces that name them, so that an interrupted
        # collection can be repeated.
        await spaces[0].history.pin(list(below), False)
        for keys in (list(removed), commits, pieces):
            for some in batches(keys):
                await tier.remove(some)
    return Collected(
        commits=len(commits),
        objects=len(removed),
        bytes=sum(removed.values()),
        pieces=len(pieces),
        released=len(below),
        keys=tuple(removed),
        damaged=(*damaged, *(sentence for one in spaces for sentence in one.damaged)),
    )


async def spaces_of(tier: StoreTier, damaged: list[str] | None = None) -> list[Space]:
    """Return all spaces, the space of programs first. A sentence for each damaged record is added
    to ``damaged``; ``StoreDamaged`` if that is None."""
    (keys,) = await tier.children([SPACES])
    found = {""}
    for key, blob in zip(keys, await tier.get(keys), strict=True):
        try:
            if blob is not None:
                found.add(unpack_record(key, blob, SpaceRecord).name)
        except Unfit as error:
            if damaged is None:
                raise StoreDamaged(str(error)) from None
            damaged.append(f"the name of a space is lost ({error}), so nothing of it is collected")
    return [Space(name) for name in sorted(found)]


async def _with_others(tier: StoreTier, gone: Collection[ObjectKey]) -> set[ObjectKey]:
    """Return the objects of ``gone`` that have a descendant outside of ``gone``."""
    listed, found = list(gone), set[ObjectKey]()
    under: dict[ObjectKey, list[ObjectKey]] = {}
    for some in batches(listed):
        under.update(zip(some, await tier.children([key.digest for key in some]), strict=True))
    while True:
        stays = {key for key in listed if any(one not in gone or one in found for one in under[key] if one != key)}
        if stays == found:
            return found
        found = stays


class _Marked:
    """The records of a space, and the part that its branches reach."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.kept: set[ObjectKey] = set()
        """Objects of commits that stay."""
        self.gone: dict[ObjectKey, int] = {}
        """Objects of the other commits, with their bytes."""
        self.garbage: list[ObjectKey] = []
        """Commits to remove."""
        self.loose: list[ObjectKey] = []
        """Pieces that no staying commit names."""
        self.damaged: list[str] = []
        """A sentence for each damaged record that hides references."""
        self._seen: set[ObjectKey] = set()

    async def mark(self, now: float, spared: float) -> None:
        history, space = self.history, self.history.space
        # In this order, so that the commit of each listed piece is listed too.
        (pieces,) = await history.tier.children([space.pieces])
        (keys,) = await history.tier.children([space.commits])
        found = {key.digest.hex(): await self._commit(key) for key in keys}
        heads = [one.id for one in (await history.branches(self.damaged)).values()]
        young = [name for name, one in found.items() if one is not None and now - one.time < spared]
        stays = set[str]()
        for name in [*heads, *young]:
            at: str | None = name
            while at is not None and at not in stays:
                if (commit := found.get(at)) is None:
                    if name in heads:
                        self.damaged.append(
                            f"commit {at} is damaged or gone, and commit {name} of a branch goes on from it"
                        )
                    break
                stays.add(at)
                at = commit.parent
        if hides := bool(self.damaged):
            stays = {name for name, one in found.items() if one is not None}
        self._seen, named = set(keys), set[ObjectKey]()
        for name in stays:
            commit = found[name]
            assert commit is not None
            named.update(map(space.piece, commit.pieces))
            try:
                self.kept |= (await history.objects(commit)).keys()
            except DataLoss as error:  # the commit cannot be checked out any more, so its state has no value
                self.damaged.append(f"commit {name} is lost ({error})")
        if hides:
            return
        for key in keys:
            if (name := key.digest.hex()) not in stays:
                self.garbage.append(key)
                self.gone |= await self._objects(found[name])
        self.loose = [key for key in pieces if key not in named]

    async def late(self) -> Iterable[ObjectKey]:
        """Return the objects of commits that were added after ``mark``."""
        (keys,) = await self.history.tier.children([self.history.space.commits])
        late = [await self._commit(key) for key in keys if key not in self._seen]
        return [key for one in late for key in await self._objects(one)]

    async def _commit(self, key: ObjectKey) -> SessionCommit | None:
        """Return a commit; None if it is damaged."""
        try:
            return await self.history.commit(key.digest.hex())
        except DataLoss:
            return None

    async def _objects(self, commit: SessionCommit | None) -> dict[ObjectKey, int]:
        """Return the objects of a commit; none if its pieces are gone: such a commit was never
        complete, and has pinned nothing."""
        try:
            return {} if commit is None else await self.history.objects(commit)
        except DataLoss:
            return {}
