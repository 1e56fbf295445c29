"""What the pools of a KV state have room for: what forwards need, and what sequences would free."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.contracts.pool_verbs import Shortage
from quire.errors import Unsupported
from quire.kv.forward_need import ForwardNeed, pages_for
from quire.kv.rules import RECURRENT_REFUSAL
from quire.kv.state_pools import StatePools
from quire.kv.state_slots import StateNeed
from quire.kv.state_table import StateTable
from quire.kv.trees import TokenTreeParents
from quire.kv.windows import Window
from quire.signatures import checks_arguments
from quire.types import SeqId


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
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> int:
        """Return the missing pages and states of all classes; in an open forward as before it."""
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents, verb="missing_pages")
        states = 0 if self.recurrent is None else self.recurrent.table.shortage(self._state_need(need))
        return self.table.shortage(need) + states

    def page_shortage(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
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
        return short + self.recurrent.table.shortage(self._state_need(need))

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
        return pages * self.page_size - (window - sink)

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
        return self.states_of("spare_states").spare(self._state_need(need))

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        return {} if self.recurrent is None else self.recurrent.table.loose_checkpoints()

    def states_of(self, verb: str) -> StateTable:
        """Return the table of recurrent states; ``Unsupported`` without recurrent layers."""
        if self.recurrent is None:
            raise Unsupported(f"{verb}: {RECURRENT_REFUSAL}")
        return self.recurrent.table

    def _state_need(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]] = ()) -> StateNeed:
        trees = [
            None if tree is None else tree.parents[-count:] for tree, count in zip(need.trees, need.counts, strict=True)
        ]
        return self.states_of("begin_forward").plan(need.seq_ids, need.counts, trees, checkpoints)
