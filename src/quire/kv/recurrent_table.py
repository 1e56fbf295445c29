"""The recurrent states of all sequences: look-up, room, edits, rings, forwards, imports. No torch.

The verbs of the state check their arguments and the bracket of a forward before they change a
table. Here only slots can be lacking, which is found before anything changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import FailedPrecondition, QuireError, ResourceExhausted
from quire.base.types import SeqId
from quire.contracts.pool_verbs import StateRole
from quire.kv.pages import PageIds, PagePool
from quire.kv.recurrent_states import (
    NULL,
    OpenRecurrent,
    RecurrentNeed,
    RecurrentStates,
    Slots,
    check_recurrent_states,
    rounds,
)


class RecurrentTable:
    """The states of all sequences: look-up, counts, edits. ``ring``: recent states that a sequence
    keeps; ``interval``: a checkpoint is kept at each multiple of it (0: at none)."""

    def __init__(self, num_slots: int, *, ring: int, interval: int) -> None:
        self.pool = PagePool(num_slots)
        self.ring = ring
        self.interval = interval
        self.forward: OpenRecurrent | None = None
        self._sequences: dict[SeqId, RecurrentStates] = {}
        self.received: dict[SeqId, int] = {}
        """The slots of states that come from another state, by sequence."""
        self._ringed: dict[int, set[SeqId]] = {}
        """The sequences whose rings name a slot, by slot. The slot longest in rings comes first."""

    # -- look-up -----------------------------------------------------------------------------------

    def get(self, seq_id: SeqId) -> RecurrentStates:
        """Return the states of a sequence, which exists."""
        return self._sequences[seq_id]

    def kept(self, seq_id: SeqId) -> list[int]:
        """Return the positions of the checkpoints, ascending, without 0 and the ring."""
        return list(self._sequences[seq_id].kept)

    def nearest(self, seq_id: SeqId, position: int) -> int:
        """Return the nearest position to go back to that is at or before ``position``."""
        states = self._sequences[seq_id]
        if position >= states.length:
            return states.length
        before = (held for one in (states.kept, states.ring) for held in reversed(one) if held <= position)
        return max(before, default=0)

    def slots(self, seq_id: SeqId) -> dict[int, int]:
        """Return the slots of all states to go back to, the present one too, by position."""
        states = self._sequences[seq_id]
        found = {0: NULL, **states.kept, **states.ring, states.length: states.present}
        return dict(sorted(found.items()))

    def committed_slots(self, seq_id: SeqId) -> dict[int, int]:
        """Return the slots of checkpoints and, last, of the present state, by position. Rings are
        left out: they may be given up for others."""
        states = self._sequences[seq_id]
        return {**states.kept, states.length: states.present}

    def slot_at(self, seq_id: SeqId, position: int | None = None) -> int | None:
        """Return the slot of the state kept at ``position``, or of the present state (no position).
        ``NULL``: the initial values; None: no state is kept there. A checkpoint at the present
        position stays visible after the present state was overwritten."""
        states = self._sequences[seq_id]
        if position is None:
            return states.present
        return {0: NULL, states.length: states.present, **states.ring, **states.kept}.get(position)

    def needed(self, seq_id: SeqId, *, kept: bool) -> PageIds:
        """Return the slots of the present state and of nodes, with ``kept`` of checkpoints too."""
        states = self._sequences[seq_id]
        named = [states.present, *states.nodes, *(states.kept.values() if kept else ())]
        return np.array([slot for slot in named if slot != NULL], dtype=np.int32)

    def named_slots(self, seq_id: SeqId) -> tuple[PageIds, Slots, NDArray[np.uint8]]:
        """Return every slot that the sequence names, one for each reference, with its position and
        its ``StateRole``. An uncommitted node stands behind the committed tokens, at their end."""
        states = self._sequences[seq_id]
        named = [(states.present, states.length, StateRole.PRESENT)]
        named += [(slot, position, StateRole.CHECKPOINT) for position, slot in states.kept.items()]
        named += [(slot, position, StateRole.RING) for position, slot in states.ring.items()]
        named += [(slot, states.length, StateRole.NODE) for slot in states.nodes]
        found = np.array([one for one in named if one[0] != NULL], dtype=np.int64).reshape(-1, 3)
        return found[:, 0].astype(np.int32), found[:, 1], found[:, 2].astype(np.uint8)

    def held_slots(self, seq_id: SeqId) -> tuple[int, int]:
        """Return two counts: the slots named by the sequence, and the shared ones among them."""
        states = self._sequences[seq_id]
        own = Counter([states.present, *states.kept.values(), *states.ring.values(), *states.nodes])
        del own[NULL]
        return len(own), sum(int(self.pool.references[slot]) > count for slot, count in own.items())

    # -- room --------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Slots that a forward can take: the free ones and those that only rings name."""
        return self.pool.num_free + len(self._yielding(self.pool.num_used))

    def num_available_without(self, gone: Iterable[SeqId]) -> int:
        """Return ``num_available`` as it is once these sequences are removed."""
        names: Counter[int] = Counter()
        for seq_id in gone:
            states = self._sequences[seq_id]
            names.update([states.present, *states.kept.values(), *states.nodes])
        references, ringed = self.pool.references, self._ringed
        slots = (names.keys() | ringed.keys()) - {NULL}
        return self.pool.num_free + sum(
            int(references[slot]) == names[slot] + len(ringed.get(slot, ())) for slot in slots
        )

    def num_fixed(self, seq_ids: Iterable[SeqId], kept: Iterable[SeqId]) -> int:
        """Return the number of slots with present states, or with checkpoints of sequences in
        ``kept``."""
        slots = {self._sequences[seq_id].present for seq_id in seq_ids}
        slots.update(slot for seq_id in kept for slot in self._sequences[seq_id].kept.values())
        return len(slots - {NULL})

    def num_freed(self, seq_id: SeqId) -> int:
        """Return the slots to be had in addition once ``seq_id``, which has no nodes, is gone."""
        states = self._sequences[seq_id]
        firm = [states.present, *states.kept.values()]
        named = Counter([*firm, *states.ring.values()])
        # What only rings name can be had already.
        return sum(slot != NULL and int(self.pool.references[slot]) == named[slot] for slot in set(firm))

    @property
    def num_kept(self) -> int:
        """Slots that checkpoints name."""
        return len({slot for states in self._sequences.values() for slot in states.kept.values()})

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        """Return checkpoints (sequence, position) by slot, of slots that are free without them."""
        holders: dict[int, list[tuple[SeqId, int]]] = {}
        for seq_id, states in self._sequences.items():
            if not states.importing:
                for position, slot in states.kept.items():
                    holders.setdefault(slot, []).append((seq_id, position))
        references = self.pool.references
        return {
            slot: named
            for slot, named in holders.items()
            if references[slot] == len(named) + len(self._ringed.get(slot, ()))
        }

    def _yielding(self, most: int) -> list[int]:
        """Return slots that only rings name, oldest first, ``most`` at most."""
        found: list[int] = []
        references = self.pool.references
        for slot, holders in self._ringed.items():
            if len(found) >= most:
                break
            if references[slot] == len(holders):
                found.append(slot)
        return found

    def spare(self, need: RecurrentNeed) -> int:
        """Return the slots that a forward leaves, rings' ones too; below 0: it lacks so many."""
        return self.num_available - need.slots

    def shortage(self, need: RecurrentNeed) -> int:
        """Return the number of slots missing for ``need``; 0 if there is room. Slots that only
        rings name count as free, and so do slots of the open forward."""
        free = self.pool.num_free
        if self.forward is not None:
            free += len({*self.forward.targets.tolist(), *(slot for _, _, slot in self.forward.recent)})
        short = max(0, need.slots - free)
        return short - len(self._yielding(short))

    def plan(
        self, seq_ids: Seq[SeqId], counts: Seq[int], trees: Seq[Seq[int] | None], checkpoints: Seq[Seq[int]] = ()
    ) -> RecurrentNeed:
        """Return the slots needed by a forward; change nothing. Cost O(B + T). ``trees``: per entry
        None (a chain), or the parents of its new nodes, as indices over all uncommitted nodes (-1:
        a root). ``checkpoints``: per entry, the counts of its new tokens after which a state is
        kept, in addition to the multiples of the interval; empty: none."""
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        parents = np.full(int(starts[-1]), -1, dtype=np.int64)
        given = parents.copy()
        sources: list[int] = []
        wanted: list[int] = []
        offsets = [0]
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        kept: list[tuple[int, ...]] = []
        for entry, (states, count, tree, start) in enumerate(
            zip(sequences, counts, trees, starts.tolist(), strict=False)
        ):
            kept.append(())
            if tree is None:
                kept[-1] = self._to_keep(states.length, count, checkpoints[entry] if checkpoints else ())
                parents[start + 1 : start + count] = np.arange(start, start + count - 1)
                given[start] = len(sources)
                sources.append(states.present)
                rows = [start + position - states.length - 1 for position in kept[-1]]
                wanted += [row for row in rows if row < start + count - 1]
                wanted.append(start + count - 1)
            else:
                old, found = len(states.nodes), dict[int, int]()
                for row, parent in enumerate(tree, start=start):
                    if parent >= old:
                        parents[row] = start + parent - old
                        continue
                    if parent not in found:
                        found[parent] = len(sources)
                        sources.append(states.present if parent < 0 else states.nodes[parent])
                    given[row] = found[parent]
                wanted += range(start, start + count)
            offsets.append(len(wanted))
        return RecurrentNeed(
            tuple(seq_ids),
            tuple(states.length for states in sequences),
            tuple(counts),
            tuple(tree is not None for tree in trees),
            starts,
            parents,
            given,
            np.array(sources, dtype=np.int64),
            np.array(wanted, dtype=np.int64),
            np.array(offsets, dtype=np.int64),
            np.array([states.present for states in sequences], dtype=np.int64),
            tuple(kept),
        )

    def _to_keep(self, length: int, count: int, asked: Seq[int]) -> tuple[int, ...]:
        """Return the positions of a chain, its end included, whose states are to be kept."""
        found = {length + tokens for tokens in asked}
        if self.interval:
            found.update(range((length // self.interval + 1) * self.interval, length + count + 1, self.interval))
        return tuple(sorted(found))

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
        self.received.clear()
        self.forward = None
        self.pool.clear()

    def fork(self, parent_id: SeqId, child_id: SeqId, position: int) -> None:
        """Share the parent's state at ``position`` (``nearest``), and all that is kept before it,
        with a new child; copy nothing."""
        parent = self._sequences[parent_id]
        child = RecurrentStates(position, self.slots(parent_id)[position])
        child.kept = {held: slot for held, slot in parent.kept.items() if held <= position}
        child.ring = {held: slot for held, slot in parent.ring.items() if held < position}
        self._share([child.present, *child.kept.values(), *child.ring.values()])
        self._sequences[int(child_id)] = child
        for slot in child.ring.values():
            self._ringed[slot].add(int(child_id))

    def pop(self, seq_id: SeqId, position: int) -> None:
        """Go back to the state at ``position`` (``nearest``); forget later ones."""
        states, slot = self._sequences[seq_id], self.slots(seq_id)[position]
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
        """Give up the checkpoint at ``position``."""
        self._release([self._sequences[seq_id].kept.pop(position)])

    def _keep(self, states: RecurrentStates, position: int, slot: int) -> None:
        self._share([slot])
        old = states.kept.get(position, NULL)
        states.kept[position] = slot
        self._release([old])

    def _keep_multiples(self, states: RecurrentStates, passed: dict[int, int]) -> None:
        """Keep the states (slot by position) at multiples of the interval."""
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
        """Take the slots, as far as needed also from the oldest states of rings.
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
        for one at ``length``, which may be another state. ``kept`` ascends in 1..``length``.
        ``ResourceExhausted``.
        """
        present, *slots = self._take(1 + len(kept), "prepare_import").tolist()
        kept_slots = dict(zip(kept, slots, strict=True))
        self._sequences[int(seq_id)] = RecurrentStates(length, present, kept_slots, importing=True)

    def finish_import(self, seq_id: SeqId) -> None:
        """End an import; its slots have been written."""
        self._sequences[seq_id].importing = False

    def reserve_reception(self, seq_id: SeqId) -> int:
        """Take a slot for a state that comes from another state; the present one stays.
        ``ResourceExhausted`` before any change."""
        slot = self.received[int(seq_id)] = int(self._take(1, "disagg_prepare_recv")[0])
        return slot

    def give_back_reception(self, seq_id: SeqId) -> None:
        """Release that slot."""
        self._release([self.received.pop(seq_id)])

    def publish_reception(self, seq_id: SeqId, length: int) -> None:
        """Make the state that has come the present one, behind ``length`` tokens."""
        states, passed = self._sequences[seq_id], {length: self.received.pop(seq_id)}
        self._keep_multiples(states, passed)
        self._release(self._advance(seq_id, states, passed))

    def _share(self, slots: Iterable[int]) -> None:
        for part in rounds(slots):
            self.pool.share(part)

    def _release(self, slots: Iterable[int]) -> None:
        for part in rounds(slots):
            self.pool.release(part)

    # -- for tests ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything; ``QuireError`` names what is broken."""
        named: Counter[int] = Counter()
        ringed: dict[int, set[SeqId]] = {}
        for seq_id, states in self._sequences.items():
            named.update([*states.kept.values(), *states.ring.values(), *states.nodes, states.present])
            for slot in states.ring.values():
                ringed.setdefault(slot, set()).add(seq_id)
            check_recurrent_states(seq_id, states, self.ring)
        named.update(self.received.values())
        opened = self.forward
        written, recent = list[int](), list[int]()
        if opened is not None:
            written, recent = opened.targets.tolist(), [slot for _, _, slot in opened.recent]
            named.update([*written, *recent])
            lengths = tuple(self._sequences[seq_id].length for seq_id in opened.need.seq_ids)
            if lengths != opened.need.lengths:
                raise QuireError(f"the open forward began at lengths {opened.need.lengths}; they are {lengths}")
        del named[NULL]
        expected = np.zeros(self.pool.num_pages, dtype=np.int32)
        for slot, count in named.items():
            expected[slot] = count
        self.pool.check(expected)
        if ringed != self._ringed:
            raise QuireError("the slots that rings name are not those that are noted")
        for states in self._sequences.values():
            own = Counter([states.present, *states.kept.values(), *states.ring.values(), *states.nodes])
            if states.importing and any(self.pool.references[slot] != own[slot] for slot in own if slot != NULL):
                raise QuireError("a sequence that is being imported shares a state slot")
        for slot in (slot for slot in written if slot not in recent):
            if self.pool.references[slot] != 1:
                raise QuireError(f"state slot {slot} is being written and has {self.pool.references[slot]} holders")
