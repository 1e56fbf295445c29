"""What the pools of a KV state hold, and what they have room for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pool_verbs import Holding, SequenceUse, Shortage, StateGeometry
from quire.errors import Unsupported
from quire.kv.forward_need import ForwardNeed, pages_for
from quire.kv.occupancy import num_named
from quire.kv.pages import PagePool
from quire.kv.parts import StateParts
from quire.kv.rules import RECURRENT_REFUSAL
from quire.kv.state_slots import StateNeed
from quire.kv.states import StateTable
from quire.kv.trees import TokenTreeParents
from quire.kv.windows import Window
from quire.signatures import checks_arguments
from quire.types import SeqId


@checks_arguments()
class StatePools(StateParts):
    """Lengths and room: pages of tokens and of encoder rows, slots of recurrent states."""

    def empty(self) -> bool:
        """Return whether there is no sequence and every page is free."""
        return len(self.table) == 0 and self.num_used_pages == 0

    @property
    def forgets(self) -> bool:
        """Whether there are positions that cannot be gone back to, or not without running tokens again: behind the windows of
        layers, and where no recurrent state is kept."""
        return self.recurrent is not None or any(one.window is not None for one in self.classes)

    @property
    def endless(self) -> bool:
        """Whether positions may run on for ever behind a window: rotations, of which only differences count, or nothing."""
        return all(spec.rope is not None or spec.rope_mode == "none" for spec in self.specs) and any(
            spec.rope is not None for spec in self.specs
        )

    def _pools(self) -> list[PagePool]:
        """The pools of all classes, then that of cross layers and that of states."""
        tables = [part.table for part in (self.encoders, self.recurrent) if part is not None]
        return [*self.table.pools, *(table.pool for table in tables)]

    @property
    def num_pages(self) -> int:
        """Pages of all classes, those of encoder rows and states among them."""
        return sum(pool.num_pages for pool in self._pools())

    @property
    def num_used_pages(self) -> int:
        """Pages and states that sequences hold."""
        return sum(pool.num_used for pool in self._pools())

    @cached_property
    def _page_bytes(self) -> list[int]:
        """Bytes of a page, or slot, of each of ``_pools``."""
        sizes = [one.storage.num_bytes for one in self.classes]
        sizes += [part.storage.num_bytes for part in (self.encoders, self.recurrent) if part is not None]
        return [size // pool.num_pages for size, pool in zip(sizes, self._pools(), strict=True)]

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the pages and states that sequences hold."""
        return sum(pool.num_used * size for pool, size in zip(self._pools(), self._page_bytes, strict=True))

    @cached_property
    def geometry(self) -> StateGeometry:
        """Sizes of what the layers keep."""
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
        """Return the ids of the layers that attend in steps that form the weights."""
        layers = zip(self.layer_ids, self.specs, strict=True)
        return [layer for layer, spec in layers if not self.backend.fuses(spec, self.device)]

    def _counting_pools(self) -> list[PagePool]:
        """Pools of the classes that keep all tokens, or of all if none does."""
        keeping = [pool for pool, one in zip(self.table.pools, self.classes, strict=True) if one.window is None]
        return keeping or self.table.pools

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest sequence that fits into the empty pools; None: windows leave none of them a limit."""
        keeping = [
            pool.num_pages for pool, one in zip(self.table.pools, self.classes, strict=True) if one.window is None
        ]
        return min(keeping) * self.page_size if keeping else None

    def largest_step(self, window: int, sink: int) -> int:
        """Tokens of one forward that fit into the empty pools beside a sliding window of a sequence; may be below 1."""
        pages = min((pool.num_pages for pool in self.table.pools), default=0) - pages_for(sink, self.page_size) - 1
        return pages * self.page_size - (window - sink)

    def shortage_in_steps(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], most: int) -> int:
        """Pages that these tokens would be short of if they came in forwards of at most ``most`` tokens, so that windows
        slide in between. An upper bound; what one forward is short of ``missing_pages`` says exactly."""
        short = self.table.shortage_in_steps(seq_ids, append_lengths, most)
        if self.recurrent is None:
            return short
        need = self.table.plan_forward(seq_ids, append_lengths, verb="shortage_in_steps")
        return short + self.recurrent.table.shortage(self._state_need(need))

    def num_available_pages(self) -> int:
        """Return the free pages of the class, among those that keep all tokens, that has the fewest. Pages of encoder rows do not
        count: where there are cross layers only it is the whole ``capacity``, for no token takes a page. With recurrent layers
        only it is the states that can be had."""
        if not self.specs:
            return self._pages_of_tokens if self.recurrent is None else self.recurrent.table.num_available
        return min(pool.num_free for pool in self._counting_pools())

    def missing_pages(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> int:
        """Return the pages and states that this ``begin_forward`` would be short of, over all classes: copies on write included,
        pages that leave their windows deducted. While a forward is open: as before it."""
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents, verb="missing_pages")
        states = 0 if self.recurrent is None else self.recurrent.table.shortage(self._state_need(need))
        return self.table.shortage(need) + states

    def page_shortage(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> Shortage:
        """Return the pages that this ``begin_forward`` is short of, states aside."""
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents)
        missing = self.table.shortage(need)
        return Shortage(missing, missing > 0 and self.table.never_fits(need))

    def full_page_shortage(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> Shortage:
        """Return the pages that these tokens are short of in a class that keeps all tokens, in any number of forwards."""
        if self.capacity is None:
            return Shortage(0, False)
        needed = self.table.num_full_pages(seq_ids, append_lengths)
        return Shortage(max(0, needed - self.num_available_pages()), needed * self.page_size > self.capacity)

    def free_pages(self, without: Collection[SeqId] = ()) -> list[int]:
        """Return the pages of each class that are free once these sequences are removed; of states those that can be had."""
        states = [] if self.recurrent is None else [self.recurrent.table.num_available_without(without)]
        return [*self.table.num_free_without(without), *states]

    def shares_tail(self, seq_id: SeqId) -> bool:
        """Return whether another sequence holds the partly filled last page too."""
        return self.table.shares_tail(seq_id)

    def pages_freed(self, seq_id: SeqId, child_id: SeqId) -> int:
        """Return the pages that are free, or the child's own, once ``seq_id`` is removed."""
        return self.table.num_freed(seq_id, child_id)

    def states_freed(self, seq_id: SeqId) -> int:
        """Return the slots that a forward can take in addition once ``seq_id`` is removed."""
        return 0 if self.recurrent is None else self.recurrent.table.num_freed(seq_id)

    @property
    def forward_is_open(self) -> bool:
        """Whether a forward is open."""
        return self.table.forward is not None

    def has_sequence(self, seq_id: SeqId) -> bool:
        """Return whether there is such a sequence."""
        return seq_id in self.table

    def window(self, seq_id: SeqId) -> Window | None:
        """Return the window of a sequence; None: it keeps all tokens."""
        return self.table.get(seq_id).window

    def page_table(self, seq_id: SeqId) -> NDArray[np.int32]:
        """Return a copy of a sequence's page table in the first class, one that keeps all tokens if there is one."""
        if not self.classes:
            raise Unsupported("page_table: no layer keeps rows of tokens")
        first = next((index for index, one in enumerate(self.classes) if one.window is None), 0)
        return self.table.get(seq_id).tables[first].pages.copy()

    def sequence_use(self, seq_id: SeqId) -> SequenceUse:
        """Return what the tokens of a sequence take."""
        pages, rows, num_bytes = 0, 0, self.sequence_states(seq_id).held * self.geometry.state_bytes
        for index, table in enumerate(self.table.get(seq_id).tables):
            held = table.held.size
            pages, num_bytes = pages + held, num_bytes + held * self._page_bytes[index]
            rows += sum(len(part) for part in self.table.held(seq_id, index))
        return SequenceUse(pages, rows, num_bytes)

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

    def sequence_ids(self) -> list[SeqId]:
        """Return the ids of all sequences."""
        return self.table.ids

    def sequence_states(self, seq_id: SeqId) -> Holding:
        """Return the slots of recurrent states that a sequence holds."""
        return Holding(0, 0) if self.recurrent is None else Holding(*self.recurrent.table.held_slots(seq_id))

    def num_needed(self, seq_ids: Collection[SeqId], *, with_kept: Collection[SeqId] = ()) -> int:
        """Return how many pages these sequences cannot go on without (see ``PoolVerbs``)."""
        return num_named(self, seq_ids, with_kept=with_kept)

    def sequence_pages(self, seq_id: SeqId) -> Holding:
        """Return the pages that the sequence holds, and how many of them others hold too."""
        sequence = self.table.get(seq_id)
        held, shared = (0, 0) if self.encoders is None else self.encoders.table.num_pages(seq_id)
        pages = sum(table.held.size for table in sequence.tables)
        return Holding(pages + held, self.table.shared_pages(seq_id) + shared)

    def pool_sizes(self) -> list[int]:
        """Return the pages of each class that tokens take, and the slots of recurrent layers if there are any."""
        states = [] if self.recurrent is None else [self.recurrent.table.pool.num_pages]
        return [*(pool.num_pages for pool in self.table.pools), *states]

    def pages_held(self, seq_ids: Collection[SeqId], kept: Collection[SeqId] = ()) -> list[int]:
        """Return the pages of each class that these sequences hold together; what they share counts once. Of states those that
        cannot be given up: present ones, and checkpoints of the sequences in ``kept``."""
        states = [] if self.recurrent is None else [self.recurrent.table.num_fixed(seq_ids, kept)]
        return [*self.table.pages_held(seq_ids), *states]

    def pages_at_most(self, length: int, window: tuple[int, int] | None, step: int) -> list[int]:
        """Return the pages of each class that a sequence of ``length`` tokens and with this window (size, sink) holds at most
        while its tokens are run, ``step`` at a time; of states the present one, and the next while that is made."""
        states = [] if self.recurrent is None else [2]
        return [*self.table.pages_at_most(length, None if window is None else Window(*window), step), *states]

    def num_shared_pages(self) -> int:
        """Pages that more than one sequence holds."""
        shared = 0 if self.encoders is None else self.encoders.table.num_shared
        return sum(int((pool.references > 1).sum()) for pool in self.table.pools) + shared

    @property
    def num_splits(self) -> int:
        """Shared pages that were copied because one of their owners wrote, since the state was made."""
        return self.table.num_splits + (0 if self.encoders is None else self.encoders.table.num_splits)

    # -- states (what a scheduler of checkpoints asks) --------------------------------------------------------

    @property
    def num_available_states(self) -> int:
        """Slots for recurrent states that a forward can take now; 0 without recurrent layers."""
        return 0 if self.recurrent is None else self.recurrent.table.num_available

    @property
    def num_free_states(self) -> int:
        """Slots that hold no state; 0 without recurrent layers."""
        return 0 if self.recurrent is None else self.recurrent.table.pool.num_free

    @property
    def num_checkpoints(self) -> int:
        """Slots that checkpoints name."""
        return 0 if self.recurrent is None else self.recurrent.table.num_kept

    def spare_states(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> int:
        """Return the state slots that are left beside those that this ``begin_forward`` takes; below 0: it is short of so many."""
        need = self.table.plan_forward(seq_ids, append_lengths, verb="spare_states")
        return self.states_of("spare_states").spare(self._state_need(need))

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        """Return checkpoints (sequence and position) by state slot, of the slots that become free if these are dropped."""
        return {} if self.recurrent is None else self.recurrent.table.loose_checkpoints()

    def states_of(self, verb: str) -> StateTable:
        """Return the books of recurrent states; ``Unsupported`` where there are no recurrent layers."""
        if self.recurrent is None:
            raise Unsupported(f"{verb}: {RECURRENT_REFUSAL}")
        return self.recurrent.table

    def _state_need(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]] = ()) -> StateNeed:
        trees = [
            None if tree is None else tree.parents[-count:] for tree, count in zip(need.trees, need.counts, strict=True)
        ]
        return self.states_of("begin_forward").plan(need.seq_ids, need.counts, trees, checkpoints)
