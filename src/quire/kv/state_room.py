"""What pools of a KV state and sequences hold, what there is room for, where rewinds may go.

The docstrings of ``contracts.pool_verbs`` are not repeated here. A *class* is a layer class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import Unsupported
from quire.base.types import SeqId
from quire.contracts.pool_verbs import (
    Holding,
    PoolFacts,
    SequencePages,
    SequenceUse,
    Shortage,
    StateGeometry,
    TokenTreeParents,
)
from quire.kv.forward_need import pages_for
from quire.kv.pages import PageIds, PagePool
from quire.kv.parts import StateParts
from quire.kv.recurrent import bytes_per_state
from quire.kv.storage import bytes_per_token
from quire.kv.windows import Window

NO_ENCODING = np.empty(0, dtype=np.int32)
NO_POSITIONS = np.empty(0, dtype=np.int64)
NO_ROLES = np.empty(0, dtype=np.uint8)


def reachable(state: StateParts, seq_id: SeqId) -> list[range]:
    sequence = state.sequences.get(seq_id)
    attention = state.sequences.reachable(sequence)
    if state.recurrent is None or sequence.reserved is not None:
        return attention  # A sequence that is being imported has no position yet.
    kept = state.kept_positions(seq_id)
    found: list[range] = []
    for position, following in zip(kept, [*kept[1:], sequence.length + 1], strict=True):
        if any(position in part for part in attention):
            if found and found[-1].stop == position:
                found[-1] = range(found[-1].start, following)
            else:
                found.append(range(position, following))
    return found


def nearest_reachable(state: StateParts, seq_id: SeqId, position: int) -> int:
    attention = state.sequences.reachable(state.sequences.get(seq_id))
    if state.recurrent is None:
        return max((min(position, part.stop - 1) for part in attention if part.start <= position), default=0)
    kept = (one for one in state.kept_positions(seq_id) if one <= position)
    return max((one for one in kept if any(one in part for part in attention)), default=0)


def geometry(state: StateParts) -> StateGeometry:
    states = None if state.recurrent is None else state.recurrent.table
    return StateGeometry(
        specs=tuple(state.whole_specs[layer] for layer in state.paged.specs),  # type: ignore[misc]
        layer_ids=tuple(state.paged.specs),
        windows=tuple(one.window for one in state.paged.classes),
        page_bytes=tuple(
            bytes_per_token([state.paged.specs[layer] for layer in one.layers], state.paged.format)
            * state.paged.page_size
            for one in state.paged.classes
        ),
        state_bytes=0 if state.recurrent is None else bytes_per_state(state.recurrent.specs.values()),
        interval=0 if states is None else states.interval,
        ring=0 if states is None else states.ring,
        num_ranks=1 if state.division is None else state.division.grid.slices,
        num_stages=1 if state.division is None else state.division.grid.stages,
    )


def capacity(state: StateParts) -> int | None:
    pools = zip(state.sequences.pools, state.paged.classes, strict=True)
    return min((pool.num_pages * state.paged.page_size for pool, one in pools if one.window is None), default=None)


def pool_facts(state: StateParts) -> tuple[PoolFacts, ...]:
    size = state.paged.page_size
    found: list[tuple[Literal["tokens", "encoder", "states"], tuple[int, ...], int | None, int]] = [
        ("tokens", one.layers, one.window, size) for one in state.paged.classes
    ]
    if state.encoders is not None:
        found.append(("encoder", tuple(state.encoders.specs), None, size))
    if state.recurrent is not None:
        found.append(("states", tuple(state.recurrent.specs), None, 1))
    return tuple(
        PoolFacts(
            kind=kind,
            layers=layers,
            window=window,
            num_pages=pool.num_pages,
            page_tokens=tokens,
            page_bytes=num_bytes,
        )
        for (kind, layers, window, tokens), pool, num_bytes in zip(found, state.pools, state.page_bytes, strict=True)
    )


def page_table(state: StateParts, seq_id: SeqId) -> NDArray[np.int32]:
    sequence = state.sequences.get(seq_id)
    if not state.paged.classes:
        raise Unsupported("page_table: no layer keeps rows of tokens")
    first = next((index for index, one in enumerate(state.paged.classes) if one.window is None), 0)
    return sequence.tables[first].pages.copy()


def held_pages(state: StateParts, seq_ids: Sequence[SeqId]) -> list[SequencePages]:
    return [_held_pages(state, seq_id) for seq_id in seq_ids]


def _held_pages(state: StateParts, seq_id: SeqId) -> SequencePages:
    sequence = state.sequences.get(seq_id)
    tables = [table.pages.copy() for table in sequence.tables]
    if state.encoders is not None:
        encoding = state.encoders.table.get(seq_id)
        tables.append(NO_ENCODING if encoding is None else encoding.pages.copy())
    positions, roles = NO_POSITIONS, NO_ROLES
    if state.recurrent is not None:
        slots, positions, roles = state.recurrent.table.named_slots(seq_id)
        tables.append(slots)
    return SequencePages(
        length=sequence.length if sequence.reserved is None else sequence.reserved,
        window=sequence.window,
        tables=tuple(tables),
        state_positions=positions,
        state_roles=roles,
        held=tuple(tuple(state.sequences.held(seq_id, index)) for index in range(len(state.paged.classes))),
        reachable=tuple(reachable(state, seq_id)),
    )


def sequence_use(state: StateParts, seq_id: SeqId) -> SequenceUse:
    pages = rows = num_bytes = 0
    for index, table in enumerate(state.sequences.get(seq_id).tables):
        held = table.held.size
        pages, num_bytes = pages + held, num_bytes + held * state.page_bytes[index]
        rows += sum(len(part) for part in state.sequences.held(seq_id, index))
    state_bytes = 0 if state.recurrent is None else state.page_bytes[-1]
    return SequenceUse(pages, rows, num_bytes + sequence_states(state, seq_id).held * state_bytes)


def sequence_pages(state: StateParts, seq_id: SeqId) -> Holding:
    sequence = state.sequences.get(seq_id)
    held, shared = (0, 0) if state.encoders is None else state.encoders.table.num_pages(seq_id)
    pages = sum(table.held.size for table in sequence.tables)
    return Holding(pages + held, state.sequences.shared_pages(seq_id) + shared)


def sequence_states(state: StateParts, seq_id: SeqId) -> Holding:
    return Holding(0, 0) if state.recurrent is None else Holding(*state.recurrent.table.held_slots(seq_id))


def num_needed(state: StateParts, seq_ids: Collection[SeqId], *, with_kept: Collection[SeqId] = ()) -> int:
    tables = [state.sequences.get(seq_id).tables for seq_id in seq_ids]
    found = sum(
        count_named(pool, (one[index].held for one in tables)) for index, pool in enumerate(state.sequences.pools)
    )
    if state.encoders is not None:
        encodings = [state.encoders.table.get(seq_id) for seq_id in seq_ids]
        found += count_named(state.encoders.table.pool, (one.pages for one in encodings if one is not None))
    if state.recurrent is not None:
        slots = state.recurrent.table
        found += count_named(slots.pool, (slots.needed(seq, kept=seq in with_kept) for seq in seq_ids))
    return found


def num_available_pages(state: StateParts) -> int:
    """Return the free pages of the class, among those that keep all tokens, with the fewest.
    Pages of encoder rows do not count: with cross layers only it is the whole ``capacity``, for
    no token takes a page. With recurrent layers only it is the available states."""
    if not state.paged.specs:
        return state.paged.pages_of_tokens if state.recurrent is None else state.recurrent.table.num_available
    keeping = [pool for pool, one in zip(state.sequences.pools, state.paged.classes, strict=True) if one.window is None]
    return min(pool.num_free for pool in keeping or state.sequences.pools)


def missing_pages(
    state: StateParts,
    seq_ids: Sequence[SeqId],
    append_lengths: Sequence[int],
    token_tree_parents: TokenTreeParents | None = None,
) -> int:
    """Return the missing pages and states of all classes; in an open forward as before it."""
    if (
        token_tree_parents is None
        and state.recurrent is None
        and state.sequences.has_room(seq_ids, append_lengths, "missing_pages")
    ):
        return 0
    need = state.sequences.plan_forward(seq_ids, append_lengths, token_tree_parents, verb="missing_pages")
    states = 0 if state.recurrent is None else state.recurrent.table.shortage(state.recurrent.need_of(need))
    return state.sequences.shortage(need) + states


def page_shortage(
    state: StateParts,
    seq_ids: Sequence[SeqId],
    append_lengths: Sequence[int],
    token_tree_parents: TokenTreeParents | None = None,
) -> Shortage:
    need = state.sequences.plan_forward(seq_ids, append_lengths, token_tree_parents)
    if not (missing := state.sequences.shortage(need)):
        return Shortage(0, False)
    classes = zip(need.classes, state.sequences.pools, strict=True)
    return Shortage(missing, any(part.pages - part.freed > pool.num_pages for part, pool in classes))


def full_page_shortage(state: StateParts, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> Shortage:
    if (longest := capacity(state)) is None:
        return Shortage(0, False)
    needed, size = 0, state.paged.page_size
    for seq_id, count in zip(seq_ids, append_lengths, strict=True):
        sequence = state.sequences.get(seq_id)
        if sequence.window is None:
            needed += pages_for(sequence.length + count, size) - pages_for(sequence.length, size)
    return Shortage(max(0, needed - num_available_pages(state)), needed * size > longest)


def shortage_in_steps(state: StateParts, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], most: int) -> int:
    short = state.sequences.shortage_in_steps(seq_ids, append_lengths, most)
    if state.recurrent is None:
        return short
    need = state.sequences.plan_forward(seq_ids, append_lengths, verb="shortage_in_steps")
    return short + state.recurrent.table.shortage(state.recurrent.need_of(need))


def shares_tail(state: StateParts, seq_id: SeqId) -> bool:
    sequence = state.sequences.get(seq_id)
    if sequence.length % state.paged.page_size == 0:
        return False
    held = zip(state.sequences.pools, sequence.tables, strict=True)
    return any(bool(pool.references[pages.pages[-1]] > 1) for pool, pages in held)


def pages_freed(state: StateParts, seq_id: SeqId, child_id: SeqId) -> int:
    parent, child = state.sequences.get(seq_id), state.sequences.get(child_id)
    freed, partly = 0, child.length % state.paged.page_size != 0
    for pool, pages, kept in zip(state.sequences.pools, parent.tables, child.tables, strict=True):
        behind = pages.pages[kept.size :]
        freed += int((pool.references[behind[behind >= 0]] == 1).sum())
        # The child writes the last common page; of two holders it is alone once the other is
        # gone.
        freed += int(partly and pool.references[pages.pages[kept.size - 1]] == 2)
    return freed


def pages_at_most(state: StateParts, length: int, window: tuple[int, int] | None, step: int) -> list[int]:
    states = [] if state.recurrent is None else [2]  # the present one, and the next while it is made
    return [*state.sequences.pages_at_most(length, None if window is None else Window(*window), step), *states]


def largest_step(state: StateParts, window: int, sink: int) -> int:
    pages = (
        min((pool.num_pages for pool in state.sequences.pools), default=0) - pages_for(sink, state.paged.page_size) - 1
    )
    return pages * state.paged.page_size - (window - sink) - state.sequences.slack


def count_named(pool: PagePool, named: Iterator[PageIds]) -> int:
    """Return the number of named pages."""
    marks = np.zeros(pool.num_pages, dtype=bool)
    for pages in named:
        marks[pages] = True
    return int(marks.sum())
