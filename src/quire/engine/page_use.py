"""Counts of pages by owner: none, one that can give them up, or one that needs them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.branches.prefix_cache import RadixCache

if TYPE_CHECKING:
    from quire.contracts.kv_state import ModelState
    from quire.engine.session_branches import SessionBranches


OWNERS = ("free", "evictable", "held", "pinned")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUse:
    """Numbers of pages, over all pools of a KV state, slots of recurrent states among them. Each
    page counts once: ``free + evictable + held + pinned == total``."""

    total: int
    free: int
    """Without an owner."""
    evictable: int
    """Of finished sequences in the prefix cache, of idle unpinned sessions, and of recurrent states
    kept on the way: given up for any need of a page, since they can be had again."""
    held: int
    """Of requests that run or wait, also if the cache shares them, and of the executor's KV
    caches."""
    pinned: int
    """Of sessions that are pinned or were written into, even if they are shared."""

    @property
    def usage(self) -> float:
        """The share of pages, in [0, 1], that cannot be given up: those held or pinned."""
        return (self.held + self.pinned) / self.total if self.total else 0.0


def page_use(state: ModelState, sessions: SessionBranches, cache: RadixCache | None) -> PageUse:
    """Count the pages as they are now. Call it under the engine's lock, between forwards. Cost
    O(pages, sequences, and entries of page tables), in NumPy."""
    written = sessions.written()
    evictable = set() if cache is None else set(cache.ages())
    pinned = set(written)
    for session in sessions.sessions.values():
        seq = session.seq if session.request is None else session.request.work.seq
        if seq is None:
            continue
        if session.pinned or session.modified:
            pinned.add(seq)
        elif session.droppable:
            evictable.add(seq)
    needed = [seq for seq in state.sequence_ids() if seq in pinned or seq not in evictable]
    num_needed = state.num_needed(needed, with_kept=written)
    num_pinned = state.num_needed([seq for seq in needed if seq in pinned], with_kept=written)
    return PageUse(
        total=state.num_pages,
        free=state.num_pages - state.num_used_pages,
        evictable=state.num_used_pages - num_needed,
        held=num_needed - num_pinned,
        pinned=num_pinned,
    )
