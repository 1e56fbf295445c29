"""Changes of recurrent states: edits, checkpoints, rings, forwards, imports. No torch.

The caller (``sequence_table.SequenceTable``) checks sequence ids, lengths, tree parents and the
bracket of a forward. This module checks, before anything changes, what concerns states.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from quire.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.kv.pages import PageIds
from quire.kv.recurrent_states import NULL, OpenRecurrent, RecurrentBooks, RecurrentNeed, RecurrentStates, rounds
from quire.types import SeqId


class RecurrentTable(RecurrentBooks):
    """The states of all sequences, and what changes them."""

    # -- edits -------------------------------------------------------------------------------------

    def add(self, seq_id: SeqId) -> None:
        self._sequences[int(seq_id)] = RecurrentStates()

    def remove(self, seq_id: SeqId) -> None:
        states = self._sequences.pop(seq_id)
        ringed = self._leave_ring(seq_id, states, list(states.ring))
        self._release([states.present, *states.kept.values(), *states.nodes, *ringed])

    def clear(self) -> None:
        self._sequences.clear()
        self._ringed.clear()
        self.forward = None
        self.pool.clear()

    def fork(self, parent_id: SeqId, child_id: SeqId, position: int) -> None:
        """Share the parent's state at ``position``, and all that is kept before it, with a new
        child; copy nothing. ``FailedPrecondition`` if there is no state at ``position``."""
        parent = self._sequences[parent_id]
        child = RecurrentStates(position, self._stood_at(parent_id, position))
        child.kept = {held: slot for held, slot in parent.kept.items() if held <= position}
        child.ring = {held: slot for held, slot in parent.ring.items() if held < position}
        self._share([child.present, *child.kept.values(), *child.ring.values()])
        self._sequences[int(child_id)] = child
        for slot in child.ring.values():
            self._ringed[slot].add(int(child_id))

    def pop(self, seq_id: SeqId, position: int) -> None:
        """Go back and forget later states. ``FailedPrecondition`` if none is at ``position``."""
        states = self._sequences[seq_id]
        slot = self._stood_at(seq_id, position)
        if position == states.length:
            return
        self._share([slot])
        gone = [states.present]
        gone += [states.kept.pop(held) for held in list(states.kept) if held > position]
        gone += self._leave_ring(seq_id, states, [held for held in states.ring if held >= position])
        states.length, states.present = position, slot
        self._release(gone)

    def commit(self, seq_id: SeqId, path: Seq[int]) -> None:
        """Take the states of the nodes on ``path`` (from a root on) as a chain's; forget others."""
        states = self._sequences[seq_id]
        on_path = [states.nodes[node] for node in path]
        stay = set(path)
        gone = [slot for node, slot in enumerate(states.nodes) if node not in stay]
        states.nodes = []
        if on_path:
            begin = states.length + 1
            passed = dict(enumerate(on_path, start=begin))
            self._keep_multiples(states, passed)
            gone += self._advance(seq_id, states, passed)
        self._release(gone)

    # -- checkpoints -------------------------------------------------------------------------------

    def keep(self, seq_id: SeqId) -> None:
        """Keep the present state as a checkpoint. Position 0 is kept without."""
        states = self._sequences[seq_id]
        if states.length:
            self._keep(states, states.length, states.present)

    def drop(self, seq_id: SeqId, position: int) -> None:
        """Give up the checkpoint at ``position``; ``InvalidArgument`` if there is none."""
        states = self._sequences[seq_id]
        if position not in states.kept:
            raise InvalidArgument(
                f"drop_checkpoint: sequence {seq_id} has no checkpoint at {position!r}; it has {list(states.kept) or 'none'}"
            )
        self._release([states.kept.pop(position)])

    def _keep(self, states: RecurrentStates, position: int, slot: int) -> None:
        self._share([slot])
        old = states.kept.get(position, NULL)
        states.kept[position] = slot
        self._release([old])

    def _keep_multiples(self, states: RecurrentStates, passed: dict[int, int]) -> None:
        """Keep those of these states (slot by position) that are at a multiple of the interval."""
        if self.interval:
            for position, slot in passed.items():
                if position % self.interval == 0:
                    self._keep(states, position, slot)

    # -- the ring ----------------------------------------------------------------------------------

    def _advance(self, seq_id: SeqId, states: RecurrentStates, passed: dict[int, int]) -> list[int]:
        """Make the last of ``passed`` (slot by ascending position) the present state; put the one
        before and the others into the ring. Takes over the references; returns slots to release."""
        *earlier, (length, present) = passed.items()
        gone: list[int] = []
        if states.length:
            earlier.insert(0, (states.length, states.present))
        else:
            gone.append(states.present)
        for position, slot in earlier:
            states.ring[position] = slot
            self._ringed.setdefault(slot, set()).add(seq_id)
        gone += self._leave_ring(seq_id, states, list(states.ring)[: max(0, len(states.ring) - self.ring)])
        states.length, states.present = length, present
        return gone

    def _leave_ring(self, seq_id: SeqId, states: RecurrentStates, positions: Iterable[int]) -> list[int]:
        """Take these positions out of the ring; returns their slots, still to be released."""
        gone: list[int] = []
        for position in positions:
            slot = states.ring.pop(position)
            holders = self._ringed[slot]
            holders.discard(seq_id)
            if not holders:
                del self._ringed[slot]
            gone.append(slot)
        return gone

    def _take(self, count: int, verb: str) -> PageIds:
        """Take ``count`` slots, from rings too if needed; else ``ResourceExhausted``, unchanged."""
        short = max(0, count - self.pool.num_free)
        yielding = self._yielding(short)
        if len(yielding) < short:
            raise ResourceExhausted(
                f"{verb}: {count} state slots are needed and {self.pool.num_free + len(yielding)} of {self.pool.num_pages} are "
                "free; drop checkpoints, remove sequences or give fewer tokens"
            )
        for slot in yielding:
            for seq_id in list(self._ringed[slot]):
                states = self._sequences[seq_id]
                self._release(self._leave_ring(seq_id, states, [p for p, held in states.ring.items() if held == slot]))
        return self.pool.take(count)

    # -- the bracket -------------------------------------------------------------------------------

    def open(self, need: RecurrentNeed) -> OpenRecurrent:
        """Take the slots, those of the oldest states of rings too as far as needed.
        ``ResourceExhausted`` before any change."""
        opened = OpenRecurrent(need, self._take(need.slots, "begin_forward").astype(np.int64))
        self.forward = opened
        return opened

    def reserve_recent(self) -> list[tuple[int, int, int]]:
        """Take slots, while any are free, for the last states of each chain before its end.
        ``publish`` puts them into the ring. Returns entry, row and slot of each, by entry and row.
        A wanted row keeps the slot that it has."""
        opened = self._require_open()
        need, found = opened.need, list[tuple[int, int, int]]()
        taken = dict(zip(need.wanted.tolist(), opened.targets.tolist(), strict=True))
        entries = [entry for entry, tree in enumerate(need.trees) if not tree]
        for back in range(1, self.ring + 1):
            for entry in entries:
                row = int(need.starts[entry + 1]) - 1 - back
                if row < need.starts[entry]:
                    continue
                if row in taken:
                    self._share([taken[row]])
                    found.append((entry, row, taken[row]))
                elif self.pool.num_free:
                    found.append((entry, row, int(self.pool.take(1)[0])))
        opened.recent = sorted(found)
        return opened.recent

    def release_recent(self) -> None:
        """Take ``reserve_recent`` back."""
        opened = self._require_open()
        self._release(slot for _, _, slot in opened.recent)
        opened.recent = []

    def publish(self, *, inside: bool = True) -> None:
        """Make the new states count. ``inside=False``: the states within chains were not computed,
        so those that a chain passed are not kept."""
        opened = self._require_open()
        need, gone = opened.need, list[int]()
        recent: dict[int, dict[int, int]] = {}
        for entry, row, slot in opened.recent:
            position = need.lengths[entry] + row - int(need.starts[entry]) + 1
            recent.setdefault(entry, {})[position] = slot
        for entry, seq_id in enumerate(need.seq_ids):
            states = self._sequences[seq_id]
            slots = opened.targets[need.offsets[entry] : need.offsets[entry + 1]].tolist()
            if need.trees[entry]:
                states.nodes += slots
                continue
            end = states.length + need.counts[entry]
            passed = [position for position in need.kept[entry] if position < end]
            for position, slot in zip(passed, slots[:-1], strict=True):
                if inside:
                    self._keep(states, position, slot)
                gone.append(slot)
            if need.kept[entry] and need.kept[entry][-1] == end:
                self._keep(states, end, slots[-1])
            gone += self._advance(seq_id, states, {**recent.get(entry, {}), end: slots[-1]})
        self._release(gone)
        self.forward = None

    def abort(self) -> None:
        """Restore all states as before ``open``, less what rings have given up for it."""
        opened = self._require_open()
        self._release([*opened.targets.tolist(), *(slot for _, _, slot in opened.recent)])
        self.forward = None

    def _require_open(self) -> OpenRecurrent:
        if self.forward is None:
            raise FailedPrecondition("no forward is open; call begin_forward first")
        return self.forward

    # -- states that are written from outside ------------------------------------------------------

    def own(self, seq_id: SeqId) -> tuple[int, int] | None:
        """Make the slot of the present state this sequence's own, before it is overwritten. Returns
        the slot to copy from (or ``NULL``) and the slot to copy to; None if the slot was its own
        already. ``ResourceExhausted`` before any change."""
        states = self._sequences[seq_id]
        old = states.present
        if old != NULL and self.pool.references[old] == 1:
            return None
        new = int(self._take(1, "debug_set")[0])
        states.present = new
        self._release([old])
        return old, new

    def import_states(self, seq_id: SeqId, length: int, kept: Seq[int]) -> None:
        """Add a sequence at ``length`` that is *importing* until ``finish_import``.

        It has its own slots for the present state (also at length 0) and for each checkpoint, also
        for one at ``length``, which may be another state. ``InvalidArgument`` unless ``kept``
        ascends in 1..``length``; ``ResourceExhausted``.
        """
        positions = list(kept)
        if any(low >= high for low, high in zip([0, *positions], positions, strict=False)) or (
            positions and positions[-1] > length
        ):
            raise InvalidArgument(
                f"kept positions {positions} of {length} tokens; ascending ones in 1..{length} are needed"
            )
        present, *slots = self._take(1 + len(positions), "prepare_import").tolist()
        kept_slots = dict(zip(positions, slots, strict=True))
        self._sequences[int(seq_id)] = RecurrentStates(length, present, kept_slots, importing=True)

    def finish_import(self, seq_id: SeqId) -> None:
        """End an import; its slots have been written. ``FailedPrecondition`` if there is none."""
        states = self._sequences[seq_id]
        if not states.importing:
            raise FailedPrecondition(
                f"finish_import: sequence {seq_id} is not being imported; call prepare_import first"
            )
        states.importing = False

    def _share(self, slots: Iterable[int]) -> None:
        for part in rounds(slots):
            self.pool.share(part)

    def _release(self, slots: Iterable[int]) -> None:
        for part in rounds(slots):
            self.pool.release(part)
