"""What pools of a KV state and sequences hold, and what there is room for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pool_verbs import Holding, PoolFacts, SequenceUse, Shortage, StateGeometry, TokenTreeParents
from quire.errors import Unsupported
from quire.kv.forward_need import ForwardNeed, pages_for
from quire.kv.pages import PageIds, PagePool
from quire.kv.parts import StateParts
from quire.kv.recurrent_states import RecurrentNeed
from quire.kv.windows import Window
from quire.signatures import checks_arguments
from quire.types import SeqId


@checks_arguments()
class StatePools(StateParts):
    """Sizes and lengths: pages of tokens and of encoder rows, slots of recurrent states.

    The docstrings of ``contracts.pool_verbs`` are not repeated here. A *class* is a layer class.
    """

    def _pools(self) -> list[PagePool]:
        """Return the pools of all classes, then that of cross layers and that of states."""
        tables = [part.table for part in (self.encoders, self.recurrent) if part is not None]
        return [*self.table.pools, *(table.pool for table in tables)]

    # -- layers ------------------------------------------------------------------------------------

    @cached_property
    def geometry(self) -> StateGeometry:
        states = None if self.recurrent is None else self.recurrent.table
        return StateGeometry(
            specs=tuple(self.specs),
            layer_ids=self.layer_ids,
            windows=tuple(one.window for one in self.classes),
            page_bytes=tuple(self._page_bytes[: len(self.classes)]),
            state_bytes=0 if states is None else self._page_bytes[-1],
            interval=0 if states is None else states.interval,
            ring=0 if states is None else states.ring,
        )

    def unfused_layers(self) -> list[int]:
        layers = zip(self.layer_ids, self.specs, strict=True)
        return [layer for layer, spec in layers if not self.backend.fuses(spec, self.device)]

    # -- sizes -------------------------------------------------------------------------------------

    @cached_property
    def _page_bytes(self) -> list[int]:
        """Bytes of a page, or slot, of each of ``_pools``."""
        sizes = [one.storage.num_bytes for one in self.classes]
        sizes += [part.storage.num_bytes for part in (self.encoders, self.recurrent) if part is not None]
        return [size // pool.num_pages for size, pool in zip(sizes, self._pools(), strict=True)]

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self._pools())

    @property
    def num_used_pages(self) -> int:
        return sum(pool.num_used for pool in self._pools())

    @property
    def num_used_bytes(self) -> int:
        return sum(pool.num_used * size for pool, size in zip(self._pools(), self._page_bytes, strict=True))

    @property
    def num_splits(self) -> int:
        return self.table.num_splits + (0 if self.encoders is None else self.encoders.table.num_splits)

    @property
    def capacity(self) -> int | None:
        pools = zip(self.table.pools, self.classes, strict=True)
        return min((pool.num_pages * self.page_size for pool, one in pools if one.window is None), default=None)

    def pool_sizes(self) -> list[int]:
        states = [] if self.recurrent is None else [self.recurrent.table.pool.num_pages]
        return [*(pool.num_pages for pool in self.table.pools), *states]

    @cached_property
    def pool_facts(self) -> tuple[PoolFacts, ...]:
        size = self.page_size
        found: list[tuple[Literal["tokens", "encoder", "states"], tuple[int, ...], int | None, int]] = [
            ("tokens", tuple(self.layer_ids[index] for index in one.layers), one.window, size) for one in self.classes
        ]
        if self.encoders is not None:
            found.append(("encoder", tuple(self.encoders.specs), None, size))
        if self.recurrent is not None:
            found.append(("states", tuple(self.recurrent.layer_ids), None, 1))
        return tuple(
            PoolFacts(
                kind=kind,
                layers=layers,
                window=window,
                num_pages=pool.num_pages,
                page_tokens=tokens,
                page_bytes=num_bytes,
            )
            for (kind, layers, window, tokens), pool, num_bytes in zip(
                found, self._pools(), self._page_bytes, strict=True
            )
        )

    def page_references(self) -> list[NDArray[np.int32]]:
        return [pool.references.copy() for pool in self._pools()]

    @property
    def forgets(self) -> bool:
        return self.recurrent is not None or any(one.window is not None for one in self.classes)

    @property
    def endless(self) -> bool:
        # Of rotations only differences count.
        return all(spec.rope is not None or spec.rope_mode == "none" for spec in self.specs) and any(
            spec.rope is not None for spec in self.specs
        )

    # -- sequences ---------------------------------------------------------------------------------

    def empty(self) -> bool:
        return len(self.table) == 0 and self.num_used_pages == 0

    @property
    def forward_is_open(self) -> bool:
        return self.table.forward is not None

    def sequence_length(self, seq_id: SeqId) -> int:
        return self.table.get(seq_id).length

    def cached_length(self, seq_id: SeqId) -> int:
        sequence = self.table.get(seq_id)
        return sequence.length - sequence.evicted

    def pending_nodes(self, seq_id: SeqId) -> int:
        return self.table.get(seq_id).nodes

    def total_sequence_length(self) -> int:
        sequences = [self.table.get(seq_id) for seq_id in self.table.ids]
        return sum(sequence.stored - sequence.evicted for sequence in sequences)

    def has_sequence(self, seq_id: SeqId) -> bool:
        return seq_id in self.table

    def window(self, seq_id: SeqId) -> Window | None:
        return self.table.get(seq_id).window

    def page_table(self, seq_id: SeqId) -> NDArray[np.int32]:
        sequence = self.table.get(seq_id)
        if not self.classes:
            raise Unsupported("page_table: no layer keeps rows of tokens")
        first = next((index for index, one in enumerate(self.classes) if one.window is None), 0)
        return sequence.tables[first].pages.copy()

    def sequence_use(self, seq_id: SeqId) -> SequenceUse:
        pages = rows = num_bytes = 0
        for index, table in enumerate(self.table.get(seq_id).tables):
            held = table.held.size
            pages, num_bytes = pages + held, num_bytes + held * self._page_bytes[index]
            rows += sum(len(part) for part in self.table.held(seq_id, index))
        return SequenceUse(pages, rows, num_bytes + self.sequence_states(seq_id).held * self.geometry.state_bytes)

    def sequence_ids(self) -> list[SeqId]:
        return self.table.ids

    def sequence_pages(self, seq_id: SeqId) -> Holding:
        sequence = self.table.get(seq_id)
        held, shared = (0, 0) if self.encoders is None else self.encoders.table.num_pages(seq_id)
        pages = sum(table.held.size for table in sequence.tables)
        return Holding(pages + held, self.table.shared_pages(seq_id) + shared)

    def sequence_states(self, seq_id: SeqId) -> Holding:
        return Holding(0, 0) if self.recurrent is None else Holding(*self.recurrent.table.held_slots(seq_id))

    def num_shared_pages(self) -> int:
        shared = 0 if self.encoders is None else self.encoders.table.num_shared
        return sum(int((pool.references > 1).sum()) for pool in self.table.pools) + shared

    def num_needed(self, seq_ids: Collection[SeqId], *, with_kept: Collection[SeqId] = ()) -> int:
        tables = [self.table.get(seq_id).tables for seq_id in seq_ids]
        found = sum(_count(pool, (one[index].held for one in tables)) for index, pool in enumerate(self.table.pools))
        if self.encoders is not None:
            encodings = [self.encoders.table.get(seq_id) for seq_id in seq_ids]
            found += _count(self.encoders.table.pool, (one.pages for one in encodings if one is not None))
        if self.recurrent is not None:
            slots = self.recurrent.table
            found += _count(slots.pool, (slots.needed(seq, kept=seq in with_kept) for seq in seq_ids))
        return found

    def pages_held(self, seq_ids: Collection[SeqId], kept: Collection[SeqId] = ()) -> list[int]:
        states = [] if self.recurrent is None else [self.recurrent.table.num_fixed(seq_ids, kept)]
        return [*self.table.pages_held(seq_ids), *states]


@checks_arguments()
class StateRoom(StatePools):
    """Room for tokens and for recurrent states. ``contracts.pool_verbs`` documents the verbs."""

    def num_available_pages(self) -> int:
        """Return the free pages of the class, among those that keep all tokens, with the fewest.
        Pages of encoder rows do not count: with cross layers only it is the whole ``capacity``, for
        no token takes a page. With recurrent layers only it is the available states."""
        if not self.specs:
            return self._pages_of_tokens if self.recurrent is None else self.recurrent.table.num_available
        keeping = [pool for pool, one in zip(self.table.pools, self.classes, strict=True) if one.window is None]
        return min(pool.num_free for pool in keeping or self.table.pools)

    def missing_pages(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
    ) -> int:
        """Return the missing pages and states of all classes; in an open forward as before it."""
        if (
            token_tree_parents is None
            and self.recurrent is None
            and self.table.has_room(seq_ids, append_lengths, "missing_pages")
        ):
            return 0
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents, verb="missing_pages")
        states = 0 if self.recurrent is None else self.recurrent.table.shortage(self._recurrent_need(need))
        return self.table.shortage(need) + states

    def page_shortage(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
    ) -> Shortage:
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents)
        if not (missing := self.table.shortage(need)):
            return Shortage(0, False)
        classes = zip(need.classes, self.table.pools, strict=True)
        return Shortage(missing, any(part.pages - part.freed > pool.num_pages for part, pool in classes))

    def full_page_shortage(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> Shortage:
        if self.capacity is None:
            return Shortage(0, False)
        needed, size = 0, self.page_size
        for seq_id, count in zip(seq_ids, append_lengths, strict=True):
            sequence = self.table.get(seq_id)
            if sequence.window is None:
                needed += pages_for(sequence.length + count, size) - pages_for(sequence.length, size)
        return Shortage(max(0, needed - self.num_available_pages()), needed * size > self.capacity)

    def shortage_in_steps(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], most: int) -> int:
        short = self.table.shortage_in_steps(seq_ids, append_lengths, most)
        if self.recurrent is None:
            return short
        need = self.table.plan_forward(seq_ids, append_lengths, verb="shortage_in_steps")
        return short + self.recurrent.table.shortage(self._recurrent_need(need))

    def free_pages(self, without: Collection[SeqId] = ()) -> list[int]:
        states = [] if self.recurrent is None else [self.recurrent.table.num_available_without(without)]
        return [*self.table.num_free_without(without), *states]

    def shares_tail(self, seq_id: SeqId) -> bool:
        sequence = self.table.get(seq_id)
        if sequence.length % self.page_size == 0:
            return False
        held = zip(self.table.pools, sequence.tables, strict=True)
        return any(bool(pool.references[pages.pages[-1]] > 1) for pool, pages in held)

    def pages_freed(self, seq_id: SeqId, child_id: SeqId) -> int:
        parent, child = self.table.get(seq_id), self.table.get(child_id)
        freed, partly = 0, child.length % self.page_size != 0
        for pool, pages, kept in zip(self.table.pools, parent.tables, child.tables, strict=True):
            behind = pages.pages[kept.size :]
            freed += int((pool.references[behind[behind >= 0]] == 1).sum())
            # The child writes the last common page; of two holders it is alone once the other is
            # gone.
            freed += int(partly and pool.references[pages.pages[kept.size - 1]] == 2)
        return freed

    def states_freed(self, seq_id: SeqId) -> int:
        return 0 if self.recurrent is None else self.recurrent.table.num_freed(seq_id)

    def pages_at_most(self, length: int, window: tuple[int, int] | None, step: int) -> list[int]:
        states = [] if self.recurrent is None else [2]  # the present one, and the next while it is made
        return [*self.table.pages_at_most(length, None if window is None else Window(*window), step), *states]

    def largest_step(self, window: int, sink: int) -> int:
        pages = min((pool.num_pages for pool in self.table.pools), default=0) - pages_for(sink, self.page_size) - 1
        return pages * self.page_size - (window - sink) - self.table.slack

    # -- states (what a scheduler of checkpoints asks) ---------------------------------------------

    @property
    def num_available_states(self) -> int:
        return 0 if self.recurrent is None else self.recurrent.table.num_available

    @property
    def num_free_states(self) -> int:
        return 0 if self.recurrent is None else self.recurrent.table.pool.num_free

    @property
    def num_checkpoints(self) -> int:
        return 0 if self.recurrent is None else self.recurrent.table.num_kept

    def spare_states(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> int:
        need = self.table.plan_forward(seq_ids, append_lengths, verb="spare_states")
        return self.recurrent_part("spare_states").table.spare(self._recurrent_need(need))

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        return {} if self.recurrent is None else self.recurrent.table.loose_checkpoints()

    def _recurrent_need(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]] = ()) -> RecurrentNeed:
        trees = [
            None if tree is None else tree.parents[-count:] for tree, count in zip(need.trees, need.counts, strict=True)
        ]
        return self.recurrent_part("begin_forward").table.plan(need.seq_ids, need.counts, trees, checkpoints)


def _count(pool: PagePool, named: Iterator[PageIds]) -> int:
    """Return how many pages are named."""
    marks = np.zeros(pool.num_pages, dtype=bool)
    for pages in named:
        marks[pages] = True
    return int(marks.sum())
