"""``History``: the branches and commits of one owner in one tier.

All verbs are coroutines on the tier's event loop. A record is written after everything that it
names: objects, commit, pieces, pins, and the branch last. So a crash in between leaves a commit
that no branch reaches (``quire.store.collection`` removes it), and never a branch without its
state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import AlreadyExists, DataLoss, NotFound, StoreDamaged, StoreFull
from quire.contracts.store import ObjectKey, StoreTier
from quire.store.commits import (
    BranchRecord,
    PieceRecord,
    SessionCommit,
    Space,
    checked_branch,
    checked_piece,
    is_id,
    space_key,
)
from quire.store.records import Unfit, pack_record, unpack_record

T = TypeVar("T")
SHOWN = 8
"""Most branches that an error names."""
AT_ONCE = 256
"""Most keys in one request to a tier."""
REPAIR = "delete it by its name, or let a commit with force take its place"
"""Advice for a damaged branch, in errors."""


def batches(keys: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield keys, or others, in parts for one request to a tier each."""
    return (keys[start : start + AT_ONCE] for start in range(0, len(keys), AT_ONCE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The common part of two commits, and the rest of each."""

    a: SessionCommit
    b: SessionCommit
    base: str | None
    """The last common ancestor of both; None: there is none."""
    common: int
    """Number of tokens before the first difference."""
    a_adds: list[int]
    """Tokens of ``a`` from the first difference on."""
    b_adds: list[int]
    shared_bytes: int
    """Bytes of the objects that both name."""
    a_bytes: int
    """Bytes of the objects that only ``a`` names."""
    b_bytes: int


class History:
    """See the module."""

    def __init__(self, tier: StoreTier, space: Space) -> None:
        self.tier, self.space = tier, space

    # -- reading -----------------------------------------------------------------------------------

    async def branches(self, damaged: list[str] | None = None) -> dict[str, SessionCommit]:
        """Return the head commit of each branch, sorted by name. A sentence for each unreadable
        record is added to ``damaged``; ``StoreDamaged`` if that is None."""
        told = list[str]()
        heads = await self.heads(told)
        told = [f"the name of a branch is lost ({one}): {REPAIR}" for one in told]
        found = dict[str, SessionCommit]()
        for name, head in heads:
            try:
                found[name] = await self.commit(head)
            except DataLoss as error:
                told.append(f"branch {name!r} is lost ({error}): {REPAIR}")
        if told and damaged is None:
            raise StoreDamaged(told[0])
        if damaged is not None:
            damaged += told
        return found

    async def heads(self, damaged: list[str]) -> list[tuple[str, str]]:
        """Return the name of each branch and the id of its head commit, sorted. A sentence for each
        damaged record is added to ``damaged``."""
        (keys,) = await self.tier.children([self.space.branches])
        records = await self._records(keys, BranchRecord, damaged)
        return sorted((found.name, found.commit) for found in records if found is not None)

    async def head(self, name: str) -> str | None:
        """Return the id of a branch's head commit; None: there is no such branch.
        ``StoreDamaged``."""
        told = list[str]()
        (found,) = await self._records([self.space.branch(name)], BranchRecord, told)
        if told:
            raise StoreDamaged(f"branch {name!r} is lost ({told[0]}): {REPAIR}")
        return None if found is None else found.commit

    async def find(self, name: str) -> SessionCommit:
        """Return the commit of a branch, or of the first 8 or more digits of an id.
        ``NotFound``."""
        if (head := await self.head(checked_branch(name))) is not None:
            return await self.commit(head)
        if is_id(name):
            (keys,) = await self.tier.children([self.space.commits])
            ids = [key.digest.hex() for key in keys if key.digest.hex().startswith(name)]
            if len(ids) == 1:
                return await self.commit(ids[0])
            if ids:
                raise NotFound(f"{len(ids)} commits begin with {name}: {', '.join(sorted(ids)[:SHOWN])}")
        short = "" if set(name) - set("0123456789abcdef") or is_id(name) else "; of a commit's id 8 digits are needed"
        nor = ", and no commit whose id begins so" if is_id(name) else ""
        told = f"there is no branch {name!r}{nor}; there are: {await self._known()}{short}"
        raise NotFound(told, field="name", given=name)

    async def commit(self, name: str) -> SessionCommit:
        """Return the commit with an id. ``StoreDamaged``: it is damaged or gone."""
        (found,) = await self._records([self.space.commit(name)], dict[str, Any])
        if found is None:
            raise StoreDamaged(f"commit {name} is not there any more")
        return SessionCommit.read(found, name)

    async def log(self, head: SessionCommit) -> list[SessionCommit]:
        """Return a commit and its ancestors, the latest first."""
        found = [head]
        while (parent := found[-1].parent) is not None:
            found.append(await self.commit(parent))
        return found

    async def tokens(self, commit: SessionCommit) -> NDArray[np.int64]:
        """Return the token ids of a commit."""
        ids = np.array(await self.items(commit.tokens), dtype=np.int64)
        if ids.size != commit.num_tokens:
            raise StoreDamaged(f"commit {commit.id} has {ids.size} tokens in its pieces, not {commit.num_tokens}")
        return ids

    async def items(self, names: Sequence[str]) -> list[Any]:
        """Return the items of pieces, joined. ``StoreDamaged``: one is damaged or gone."""
        return [item for piece in await self._pieces(names) for item in piece]

    async def pieces(self, commit: SessionCommit) -> dict[str, list[Any]]:
        """Return all pieces of a commit, by name."""
        found = [*await self._pieces(commit.tokens), *await self._pieces(commit.turns)]
        return dict(zip(commit.pieces, found, strict=True))

    async def objects(self, commit: SessionCommit) -> dict[ObjectKey, int]:
        """Return the keys of a commit's objects, with their bytes of state."""
        return commit.state.objects(await self.tokens(commit), commit.adapters)

    async def diff(self, a: SessionCommit, b: SessionCommit) -> Difference:
        """Compare two commits."""
        before = {one.id for one in await self.log(a)}
        base = next((one.id for one in await self.log(b) if one.id in before), None)
        a_ids, b_ids = await self.tokens(a), await self.tokens(b)
        size = min(a_ids.size, b_ids.size)
        same = a_ids[:size] == b_ids[:size]
        common = size if same.all() else int(same.argmin())
        a_has, b_has = await self.objects(a), await self.objects(b)
        return Difference(
            a=a,
            b=b,
            base=base,
            common=common,
            a_adds=a_ids[common:].tolist(),
            b_adds=b_ids[common:].tolist(),
            shared_bytes=sum(a_has[key] for key in a_has.keys() & b_has),
            a_bytes=sum(a_has[key] for key in a_has.keys() - b_has),
            b_bytes=sum(b_has[key] for key in b_has.keys() - a_has),
        )

    # -- writing -----------------------------------------------------------------------------------

    async def require_way(self, name: str, since: str | None) -> None:
        """Raise ``AlreadyExists`` unless a branch may move to a child of commit ``since``: it must
        be new, or its head be ``since`` or an ancestor of it."""
        head = await self.head(name)
        seen, at = set[str](), since
        while head is not None and at != head:
            if at is None or at in seen:
                raise AlreadyExists(
                    f"branch {name!r} stands at commit {head[:12]}, from which this is no continuation; give another name, or "
                    "force=True to let the branch go from there",
                    field="name",
                    given=name,
                )
            seen.add(at)
            try:
                at = (await self.commit(at)).parent
            except DataLoss:
                at = None

    async def add(
        self, commit: SessionCommit, pieces: Mapping[str, Sequence[Any]], objects: Collection[ObjectKey]
    ) -> None:
        """Write a commit and its pieces, and pin these and its objects, which must exist.
        ``StoreFull``: the tier has no room."""
        # The commit first: from then on, a collection keeps its pieces and objects.
        await self.put(self.space.commit(commit.id), commit.document())
        keys = {self.space.piece(name): items for name, items in pieces.items()}
        for key, there in (await self.there(list(keys))).items():
            if not there:
                await self.put(key, {"items": list(keys[key])})
        named = [self.space.commit(commit.id), *keys]
        await self.pin([*named, *objects])
        if lacking := [key for key, there in (await self.there([*named, *objects])).items() if not there]:
            raise StoreFull(
                f"{self.tier.label} has no room for the commit: {len(lacking)} of its objects were given up; give the tier "
                "more room"
            )

    async def move(self, name: str, commit: str) -> None:
        """Set the head of a branch to an existing commit."""
        key, space = self.space.branch(name), space_key(self.space)
        await self.put(space, {"name": self.space.name})
        await self.put(key, {"name": name, "commit": commit})
        await self.pin([space, key])

    async def delete(self, name: str) -> str:
        """Delete a branch, and return the id of its head commit, which stays until a collection; ""
        if that is damaged. ``NotFound``."""
        try:
            head = await self.head(checked_branch(name))
        except StoreDamaged:
            head = ""
        if head is None:
            raise NotFound(f"there is no branch {name!r}; there are: {await self._known()}", field="name", given=name)
        await self.tier.remove([self.space.branch(name)])
        return head

    async def put(self, key: ObjectKey, document: Mapping[str, Any]) -> None:
        """Write a record. ``StoreFull``: the tier has no room."""
        if not await self.tier.put(key, pack_record(key, document)):
            raise StoreFull(f"{self.tier.label} has no room for a record; give the tier more room")

    async def pin(self, keys: Sequence[ObjectKey], pinned: bool = True) -> None:
        """Pin or unpin objects."""
        for some in batches(keys):
            await self.tier.pin(some, pinned)

    async def there(self, keys: Sequence[ObjectKey]) -> dict[ObjectKey, bool]:
        """Return, for each key, True if its object exists."""
        found: list[bool] = []
        for some in batches(keys):
            found += await self.tier.contains(some)
        return dict(zip(keys, found, strict=True))

    # -- records -----------------------------------------------------------------------------------

    async def _records(
        self, keys: Iterable[ObjectKey], kind: type[T], damaged: list[str] | None = None
    ) -> list[T | None]:
        """Return documents. A damaged one is None, with a sentence in ``damaged``; ``StoreDamaged``
        if that is None."""
        found = list[T | None]()
        for some in batches(list(keys)):
            for key, blob in zip(some, await self.tier.get(some), strict=True):
                try:
                    found.append(None if blob is None else unpack_record(key, blob, kind))
                except Unfit as error:
                    if damaged is None:
                        raise StoreDamaged(str(error)) from None
                    damaged.append(str(error))
                    found.append(None)
            await asyncio.sleep(0)
        return found

    async def _pieces(self, names: Sequence[str]) -> list[list[Any]]:
        found: list[list[Any]] = []
        records = await self._records(map(self.space.piece, names), PieceRecord)
        for number, (name, record) in enumerate(zip(names, records, strict=True)):
            if record is None:
                raise StoreDamaged(f"piece {name} is not there any more")
            found.append(checked_piece(name, number, record.items))
        return found

    async def _known(self) -> str:
        (keys,) = await self.tier.children([self.space.branches])
        names = [found.name for found in await self._records(keys[:SHOWN], BranchRecord, []) if found is not None]
        return ", ".join([*map(repr, sorted(names)), *(["..."] if len(keys) > SHOWN else [])]) or "none"
