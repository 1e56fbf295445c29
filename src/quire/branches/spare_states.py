"""Recurrent states that are kept only to save work, and are dropped when slots are short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from quire.base.types import DropCheckpoint, KeepCheckpoint, SeqId, Step
from quire.contracts.kv_state import ModelState
from quire.runner.local import Runner


class SpareStateOwner(Protocol):
    """An owner of such states."""

    last_access: float | None

    def drop_spare_states(self) -> int:
        """Drop recurrent states that only save work; return their number."""


def is_roomy(state: ModelState, slots: int) -> bool:
    """Return True if ``slots`` more states may be kept to save work: they may take half of the free
    slots."""
    return bool(state.recurrent_ids) and 2 * slots <= state.num_free_states


def are_short(state: ModelState) -> bool:
    """Return True if a call lacks slots for states rather than pages: at most half of the slots are
    free, or more than half of the pages of each layer class."""
    if not state.recurrent_ids:
        return False
    *free, (slots, size) = zip(state.free_pages(), state.pool_sizes(), strict=True)
    return 2 * slots <= size or all(2 * pages > there for pages, there in free)


def mark(runner: Runner, seq: SeqId, old: int | None, *, always: bool = False) -> int | None:
    """Keep the present recurrent state of a sequence, if there is room or ``always``, in place of
    the state at ``old``. Return the position of the state that is kept now; None: none is."""
    state = runner.state
    if not state.recurrent_ids:
        return None
    position, held = state.sequence_length(seq), state.checkpoints(seq)
    if position == 0 or position in held:
        return old if old in held else None
    if old is not None and old in held:
        runner.execute(Step(edits=(DropCheckpoint(seq, old),)))
    if not always and not is_roomy(state, 1):
        return None
    runner.execute(Step(edits=(KeepCheckpoint(seq),)))
    return position


def by_last_access(savers: Iterable[SpareStateOwner]) -> Iterator[SpareStateOwner]:
    """Return the savers, the least recently used first."""
    return iter(sorted(savers, key=lambda saver: saver.last_access or 0.0))


def drop(savers: Iterator[SpareStateOwner], wanted: int) -> int:
    """Let the next savers drop their states until ``wanted`` are gone; return their number. Fewer
    slots may become free, because other sequences may hold some of the states too."""
    found = 0
    while found < wanted and (saver := next(savers, None)) is not None:
        found += saver.drop_spare_states()
    return found
