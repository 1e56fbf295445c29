"""Stores of state outside of the pool: immutable objects under keys, and the tiers that keep them.

An object is the state of a run of tokens, or what a continuation at one position needs besides; its
bytes are a state file (``docs/statefile.md``). Its key is a hash of everything that it depends on,
so that equal keys mean equal state, and a store is a tree: each object stands under the key of the
chunk of tokens before it. ``quire.store`` has the tiers, ``docs/store.md`` the design. No torch.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeAlias

from quire.errors import InvalidArgument

KEY_BYTES = 20
"""Of a digest."""

Blob: TypeAlias = bytes | bytearray | memoryview
"""The bytes of an object. Nobody writes into them."""


class ObjectKind(enum.StrEnum):
    """Kinds of objects."""

    ROWS = "rows"
    """Rows of a run of tokens in the layers that keep all tokens."""
    STOP = "stop"
    """What the other layers (windows, recurrent ones) need to go on at one position."""
    CHUNK = "chunk"
    """Rows of a piece of text in all layers, computed by itself, for any place in a prompt."""
    RECORD = "record"
    """A document without tensors: a commit, a name."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """The key of an object."""

    parent: bytes
    """The digest of all tokens up to the last boundary of chunks before those of the object; of
    records the digest of their kind; of chunks that of all that they depend on but their tokens."""
    kind: ObjectKind
    count: int
    """Tokens behind ``parent`` that the object reaches to; 0 for records."""
    digest: bytes
    """The digest of all tokens that the object depends on; of records, of their name or content; of
    chunks what ``blend.chunks`` says."""

    @property
    def name(self) -> str:
        """Return the key as text: at most 100 characters of ``[0-9a-z-]``, so that a file of this
        name stays inside of its folder."""
        return f"{self.parent.hex()}-{self.kind}-{self.count}-{self.digest.hex()}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the key of a name; ``InvalidArgument`` for what is none."""
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
    """What a tier holds."""

    objects: int
    bytes: int
    capacity: int | None
    """Bytes that it may hold; None: it knows no limit."""
    pinned: int = 0
    """Bytes of objects that are never given up."""


class ObjectPart(NamedTuple):
    """Some bytes of an object."""

    blob: Blob
    size: int
    """Bytes of the whole object."""


class StoreTier(Protocol):
    """One place that keeps objects. A new tier is one file that implements this.

    All verbs are coroutines, run on the store's own event loop; a tier that blocks uses threads.
    Any number of calls may be under way. Errors of the medium (no route, disk full, permission) are
    raised as ``TierError``: the store counts them and leaves the tier alone for a while. What is
    damaged or not there is a miss and no error. Two processes may use one place at once: an object
    is visible complete or not at all, and the writer that comes last wins (both wrote the same).

    A tier with a capacity gives up nothing that others stand under. Of the rest goes first what was
    used longest ago, by a count of uses: clocks may jump.
    """

    kind: str
    """``memory``, ``disk``, ``redis``, ``object``: what outputs and metrics call it."""
    label: str
    """Where it is, without secrets, for messages."""
    is_durable: bool
    """Whether what it keeps outlives the process."""

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        """Return the objects in the order of the keys, None where one is not there. It counts as
        use of them and of all that they stand under."""
        ...

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        """Return the bytes of an object from ``start`` to ``stop``, or to its end if that is
        before; None if it is not there. A part from 0 on counts as use, others may."""
        ...

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        """Keep an object; return False, and change nothing, if there is no room that may be had.
        The same key twice keeps one, records excepted, which are replaced. Once it returns True
        from a durable tier, the object is there after a crash of the machine."""
        ...

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return which objects are there. Counts as no use."""
        ...

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        """Return the keys of all objects under each parent. Counts as no use."""
        ...

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        """Forget objects, pinned ones too; return how many were there."""
        ...

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        """Let objects, and what they stand under, never be given up for others (``pinned``), or let
        them again. Durable in a durable tier. Unknown keys are passed over."""
        ...

    async def stat(self) -> TierStat:
        """Return what it holds."""
        ...

    async def close(self) -> None:
        """Give back connections and files; what is kept stays kept in a durable tier."""
        ...
