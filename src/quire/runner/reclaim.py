"""``Room``: giving up sequences when pages or states are short, in a fixed order. No torch."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol
from weakref import WeakSet

from quire.base.types import SeqId


class ReclaimKind(enum.Enum):
    """What can be given up, in the order in which ``Room.make`` tries it."""

    FINALIZERS = "what belongs to an object that is gone"
    SCARCE_STATES = "recurrent states that only save work, while states are what is short"
    WRITING = "forks from which state is written to a store"
    PREFIXES = "finished sequences that are kept for prompts to begin with"
    IDLE = "the state of idle sessions, which may be copied to host memory"
    STATES = "recurrent states that only save work"


class SequenceOwner(Protocol):
    """An owner of sequences of which some can be given up and made again."""

    def reclaim_one(self, kind: ReclaimKind) -> bool:
        """Give up one thing of this kind; return False if there is none."""

    def reclaimable(self) -> Collection[SeqId]:
        """Return the sequences that ``reclaim_one`` could free. Changes nothing."""


class Room:
    """The owners of a runner's sequences, held by weak references. Callers hold the runner's
    lock, between forwards."""

    def __init__(self) -> None:
        self._owners: WeakSet[SequenceOwner] = WeakSet()

    def join(self, owner: SequenceOwner) -> None:
        """Include ``owner`` from now on."""
        self._owners.add(owner)

    def owners(self) -> list[SequenceOwner]:
        """Return all owners."""
        return list(self._owners)

    def leave(self, owner: SequenceOwner) -> None:
        """Exclude ``owner`` from now on."""
        self._owners.discard(owner)

    def make(self, asker: SequenceOwner | None = None) -> bool:
        """Give up one thing, of the first kind that has any; return False if there is none. Of
        ``asker`` only finalizers run: its running call may still need its own states."""
        return any(
            owner.reclaim_one(kind)
            for kind in ReclaimKind
            for owner in list(self._owners)
            if owner is not asker or kind is ReclaimKind.FINALIZERS
        )

    def reclaimable(self) -> set[SeqId]:
        """Return the sequences that ``make`` could give up."""
        return {seq for owner in list(self._owners) for seq in owner.reclaimable()}
