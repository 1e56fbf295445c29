"""Push and pull: copies a branch with its whole history from one tier to another.

Everything is verified before the branch is written at the target. Records and objects at the target
are not sent again. An interrupted transfer leaves commits that no branch reaches; the next transfer
resumes from there.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from quire.base.errors import NotFound, QuireError, StoreDamaged, StoreFull
from quire.base.progress import Bar
from quire.contracts.store import KEY_BYTES, Blob, ObjectKey, StoreTier
from quire.store.commits import checked_branch
from quire.store.history import History, batches

PARALLEL = 4
"""Objects that are sent concurrently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """The result of a push or a pull."""

    name: str
    commit: str
    """The id of the branch's head commit at the target."""
    commits: int
    """Number of commits that were new."""
    objects: int
    """Number of objects that were sent."""
    bytes: int
    """Bytes of state in them."""
    there: int
    """Number of objects that were present already."""
    missing: int
    """Number of objects that the source has lost. Their state will be computed again."""


async def transfer(source: History, target: History, name: str, *, force: bool, show: bool) -> Transferred:
    """Copy a branch; ``show`` the bytes of state on stderr. ``NotFound``: there is no such branch.
    ``AlreadyExists``: the target's branch has other commits, and not ``force``. ``StoreDamaged``:
    records, or state that cannot be computed again, are damaged or gone."""
    if await source.head(checked_branch(name)) is None:
        await source.find(name)
        raise NotFound(f"{name!r} is a commit and no branch; give the name of a branch", field="name", given=name)
    log = await source.log(await source.find(name))
    if not force and (head := await target.head(name)) is not None and head not in {one.id for one in log}:
        await target.require_way(name, None)
    objects = {commit.id: await source.objects(commit) for commit in reversed(log)}
    wanted = {key: nbytes for found in objects.values() for key, nbytes in found.items()}
    whole = {key for commit in log if commit.modified for key in objects[commit.id]}
    with Bar(total=sum(wanted.values()), desc=name, unit="B", unit_scale=True, disable=not show) as bar:
        sending = _Sending(source.tier, target, wanted, whole, bar)
        await sending.run()
    known = await target.there([target.space.commit(one.id) for one in log])
    for commit in reversed(log):
        await target.add(commit, await source.pieces(commit), objects[commit.id].keys() - sending.lost)
    await target.move(name, log[0].id)
    return Transferred(
        name=name,
        commit=log[0].id,
        commits=list(known.values()).count(False),
        objects=sending.sent,
        bytes=sending.sent_bytes,
        there=len(wanted) - sending.sent - len(sending.lost),
        missing=len(sending.lost),
    )


class _Sending:
    """The objects of a transfer."""

    def __init__(
        self,
        source: StoreTier,
        target: History,
        wanted: dict[ObjectKey, int],
        whole: set[ObjectKey],
        bar: Bar,
    ) -> None:
        self.sent = self.sent_bytes = 0
        self.lost: set[ObjectKey] = set()
        self._source, self._target, self._wanted, self._whole = source, target, wanted, whole
        self._bar = bar

    async def run(self) -> None:
        there = await self._target.there(list(self._wanted))
        turns = asyncio.Semaphore(PARALLEL)

        async def one(key: ObjectKey) -> None:
            async with turns:
                await self._one(key, there[key])
                self._bar.update(self._wanted[key])

        # In order, so that an object's ancestors are in the same group or an earlier one.
        for some in batches(list(self._wanted)):
            try:
                async with asyncio.TaskGroup() as group:
                    for key in some:
                        group.create_task(one(key))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _one(self, key: ObjectKey, is_there: bool) -> None:
        if is_there and key in self._whole:
            # The object cannot be computed again, so verify the copy that exists.
            (blob,) = await self._target.tier.get([key])
            if blob is None or not _is_whole(key, blob, file=True):
                await self._target.tier.remove([key])
                is_there = False
        if is_there:
            return
        (blob,) = await self._source.get([key])
        if blob is None or not _is_whole(key, blob, file=key in self._whole):
            if key in self._whole:
                raise StoreDamaged(f"object {key.name} is damaged or gone, and its state cannot be computed again")
            self.lost.add(key)
            return
        if not await self._target.tier.put(key, blob):
            raise StoreFull(f"{self._target.tier.label} has no room for the branch; give the tier more room")
        self.sent += 1
        self.sent_bytes += self._wanted[key]


def _is_whole(key: ObjectKey, blob: Blob, *, file: bool) -> bool:
    """Return True if an object matches its key and all checksums."""
    if file:
        return hashlib.blake2b(blob, digest_size=KEY_BYTES).digest() == key.digest
    from quire.statefile.container import read_state  # with torch

    try:
        with read_state(blob) as found:
            return bool(found.metadata.get("name") == key.name)
    except QuireError:
        return False
