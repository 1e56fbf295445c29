"""``Room``: giving up sequences when pages or states are short, in a fixed order. No torch."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol
from weakref import WeakSet

from quire.base.types import SeqId


class Rank(enum.Enum):
    """Kinds of things that can be given up, in the order of giving them up."""

    ORPHANS = "what belongs to an object that is gone"
    SCARCE_STATES = "recurrent states that only save work, while states are what is short"
    WRITING = "forks from which state is written to a store"
    PREFIXES = "finished sequences that are kept for prompts to begin with"
    IDLE = "the state of idle sessions, which may be copied to host memory"
    STATES = "recurrent states that only save work"


class Giver(Protocol):
    """An owner of sequences of which some can be given up and made again."""

    def give_up(self, rank: Rank) -> bool:
        """Give up one thing of this rank; return False if there is none."""

    def loose(self) -> Collection[SeqId]:
        """Return the sequences that ``give_up`` could free. Changes nothing."""


class Room:
    """The givers of one runner, held by weak references. Callers hold the runner's lock, between
    forwards."""

    def __init__(self) -> None:
        self._givers: WeakSet[Giver] = WeakSet()

    def join(self, giver: Giver) -> None:
        """Include ``giver`` from now on."""
        self._givers.add(giver)

    def givers(self) -> list[Giver]:
        """Return all givers."""
        return list(self._givers)

    def leave(self, giver: Giver) -> None:
        """Exclude ``giver`` from now on."""
        self._givers.discard(giver)

    def make(self, asker: Giver | None = None) -> bool:
        """Give up one thing, of the first rank that has any; return False if there is none. Of
        ``asker`` only orphans are given up: its running call may still need its own states."""
        return any(
            giver.give_up(rank)
            for rank in Rank
            for giver in list(self._givers)
            if giver is not asker or rank is Rank.ORPHANS
        )

    def loose(self) -> set[SeqId]:
        """Return the sequences that ``make`` could give up."""
        return {seq for giver in list(self._givers) for seq in giver.loose()}
