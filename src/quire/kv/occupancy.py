"""How much of a KV state's pools some of its sequences take. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np

from quire.kv.pages import PageIds, PagePool
from quire.types import SeqId

if TYPE_CHECKING:
    from quire.kv.parts import StateParts


def num_named(state: StateParts, seq_ids: Collection[SeqId], *, with_kept: Collection[SeqId] = ()) -> int:
    """Return how many pages of all pools these sequences cannot go on without, each counted once.

    Pages of tokens, pages of encoder rows, and slots of recurrent states: the present state and those
    of uncommitted nodes. What a ring or a checkpoint keeps only saves work, except for the sequences in
    ``with_kept``, of which checkpoints count too. Cost O(pages, and entries of the page tables).
    """
    return sum(
        _count(pool, (state.table.get(seq).tables[index].held for seq in seq_ids))
        for index, pool in enumerate(state.table.pools)
    ) + sum(_count(pool, named) for pool, named in _others(state, seq_ids, with_kept))


def _others(
    state: StateParts, seq_ids: Collection[SeqId], with_kept: Collection[SeqId]
) -> Iterator[tuple[PagePool, Iterator[PageIds]]]:
    """Yield the pools beside those of tokens, each with what every sequence names of it."""
    if state.encoders is not None:
        encodings = state.encoders.table
        found = (encodings.get(seq) for seq in seq_ids)
        yield encodings.pool, (one.pages for one in found if one is not None)
    if state.recurrent is not None:
        slots = state.recurrent.table
        yield slots.pool, (slots.needed(seq, kept=seq in with_kept) for seq in seq_ids)


def _count(pool: PagePool, named: Iterator[PageIds]) -> int:
    marks = np.zeros(pool.num_pages, dtype=bool)
    for pages in named:
        marks[pages] = True
    return int(marks.sum())
