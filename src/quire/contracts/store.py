"""Stores of state outside of the pool: immutable objects under keys, and the tiers that keep them.

An object is the state of a run of tokens (rows), or the further state that a continuation at one
position needs (a stop); its bytes are a state file (``docs/statefile.md``). Its key is a hash of
everything that it depends on, so that equal keys mean equal state, and a store is a tree: the
parent of an object is the key of the chunk of tokens before it. ``quire.store`` has the tiers,
``docs/store.md`` the design. No torch.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeAlias

from quire.base.errors import InvalidArgument

KEY_BYTES = 20
"""Bytes of a digest."""

Blob: TypeAlias = bytes | bytearray | memoryview
"""The bytes of an object. Read only."""


class ObjectKind(enum.StrEnum):
    """Kinds of objects."""

    ROWS = "rows"
    """Rows of a run of tokens in the layers that keep all tokens."""
    STOP = "stop"
    """The state of the other layers (windows, recurrent ones) for a continuation at one
    position."""
    CHUNK = "chunk"
    """Rows of a piece of text in all layers, computed separately, for any position in a prompt."""
    RECORD = "record"
    """A document without tensors: a commit, a name."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """The key of an object."""

    parent: bytes
    """The digest of all tokens up to the last chunk boundary before the object's tokens. For
    records: the digest of their kind; for chunks: of all that they depend on but their tokens."""
    kind: ObjectKind
    count: int
    """Number of tokens from ``parent`` to the end of the object; 0 for records."""
    digest: bytes
    """The digest of all tokens that the object depends on. For records: of their name or content;
    for chunks: see ``blend.chunks``."""

    @property
    def name(self) -> str:
        """The key as text: at most 100 characters of ``[0-9a-z-]``, so that a file of this name
        stays inside its folder."""
        return f"{self.parent.hex()}-{self.kind}-{self.count}-{self.digest.hex()}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the key of a name; ``InvalidArgument`` for an invalid name."""
        try:
            parent, kind, count, digest = name.split("-")
            found = cls(bytes.fromhex(parent), ObjectKind(kind), int(count), bytes.fromhex(digest))
        except ValueError:
            found = None
        if found is None or found.name != name or len(found.parent) != KEY_BYTES or len(found.digest) != KEY_BYTES:
            raise InvalidArgument(f"{name!r:.120} is no name of an object")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStat:
    """Totals of a tier."""

    objects: int
    bytes: int
    capacity: int | None
    """Most bytes that it may hold; None: it knows no limit."""
    pinned: int = 0
    """Bytes of pinned objects, which are never evicted."""


class ObjectPart(NamedTuple):
    """A range of bytes of an object."""

    blob: Blob
    size: int
    """Bytes of the whole object."""


class StoreTier(Protocol):
    """A durable tier: a place that keeps objects beyond the process. A new one is one file that
    implements this.

    All verbs are coroutines, run on the store's own event loop; a tier that blocks uses threads.
    Any number of calls may run at once. Errors of the medium (no route, disk full, permission) are
    raised as ``TierError``: the store counts them and skips the tier for a while. Damaged or
    missing objects are misses and no errors. Two processes may use one place at once: an object is
    visible completely or not at all, and the last writer wins (both wrote the same).

    A tier with a capacity never evicts an object with children. Of the others it evicts the least
    recently used first, by a count of uses, because clocks may jump.
    """

    kind: str
    """``disk``, ``redis``, ``object``: its name in outputs and metrics."""
    label: str
    """Its location, without secrets, for messages."""

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        """Return the objects in the order of the keys, None for missing ones. It counts as use of
        them and of all their ancestors."""

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        """Return the bytes of an object from ``start`` to ``stop``, or to its end if that is
        before; None if it is missing. A part from 0 on counts as use, others may."""

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        """Keep an object; return False, and change nothing, if no room can be made. The same key
        twice keeps one, but a record is replaced. Once a tier has returned True, the object
        survives a crash of the machine."""

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, for each key, True if its object exists. Counts as no use."""

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        """Return the keys of all objects under each parent. Counts as no use."""

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        """Remove objects, pinned ones too; return the number of removed ones."""

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        """Pin objects (or unpin: not ``pinned``). Neither a pinned object nor its ancestors are
        evicted, also in other processes. Unknown keys are ignored."""

    async def stat(self) -> TierStat:
        """Return its totals."""

    async def close(self) -> None:
        """Close connections and files; objects stay."""
