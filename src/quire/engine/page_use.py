"""Counts of pages by owner: none, an evictable one, or one in need of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.types import SeqId
from quire.branches.prefix_cache import RadixCache

if TYPE_CHECKING:
    from quire.branches.session_branches import SessionBranches
    from quire.contracts.kv_state import ModelState


OWNERS = ("free", "evictable", "held", "pinned")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUse:
    """Numbers of pages, over all pools of a KV state, slots of recurrent states among them. Each
    page counts once: ``free + evictable + held + pinned == total``."""

    total: int
    free: int
    """Without an owner."""
    evictable: int
    """Of finished sequences in the prefix cache and their copies on the way to a store, of idle
    unpinned sessions, and of recurrent states kept on the way: given up for any need of a page,
    since they can be had again."""
    held: int
    """Of requests that run or wait, also if the cache shares them, and of the executor's KV
    caches."""
    pinned: int
    """Of sessions that are pinned or were written into, even if they are shared."""

    @property
    def usage(self) -> float:
        """Return the share of pages, in [0, 1], that cannot be given up: those held or pinned."""
        return (self.held + self.pinned) / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class SequenceOwners:
    """The sequences of a KV state by what may be done with them."""

    needed: list[SeqId]
    """Those that may not be given up, for requests, KV caches, or as pinned."""
    pinned: set[SeqId]
    """Those that sessions must not lose. They are among ``needed`` as far as they are there."""
    written: set[SeqId]
    """Those whose state tokens do not give: of them checkpoints are needed, too."""


def sequence_owners(state: ModelState, sessions: SessionBranches, cache: RadixCache | None) -> SequenceOwners:
    """Sort the sequences as they are now. Call it under the engine's lock, between forwards."""
    written = sessions.written()
    evictable = set(sessions.tier.forks)
    if cache is not None:
        evictable.update(cache.ages())
    pinned = set(written)
    for session in sessions.sessions.values():
        seq = session.present.seq
        if seq is None:
            continue
        if session.pinned or session.modified:
            pinned.add(seq)
        elif session.droppable:
            evictable.add(seq)
    needed = [seq for seq in state.sequence_ids() if seq in pinned or seq not in evictable]
    return SequenceOwners(needed, pinned, written)


def page_use(state: ModelState, sessions: SessionBranches, cache: RadixCache | None) -> PageUse:
    """Count the pages as they are now. Call it under the engine's lock, between forwards. Cost
    O(pages, sequences, and entries of page tables), in NumPy."""
    by = sequence_owners(state, sessions, cache)
    num_needed = state.num_needed(by.needed, with_kept=by.written)
    num_pinned = state.num_needed([seq for seq in by.needed if seq in by.pinned], with_kept=by.written)
    return PageUse(
        total=state.num_pages,
        free=state.num_pages - state.num_used_pages,
        evictable=state.num_used_pages - num_needed,
        held=num_needed - num_pinned,
        pinned=num_pinned,
    )
