"""Which state slot holds which recurrent state of which sequence, and nothing about what is in them. No torch.

A *state slot* holds the state of all recurrent layers of a model at one position of a sequence. It is written by one forward,
immutable once that is published, shared by forks, and free when its last reference goes. A sequence has its *present* state,
which stands at its length, and *kept* ones that it can go back to: position 0 always (the initial values, in no slot),
*checkpoints*, and a *ring* of the most recently published states before the present one. Both name the same slot where they
keep the same state. Slots that only rings name are given up, the oldest first, when slots are needed; nothing else is.

Sequence ids, lengths, tree parents and the bracket of a forward are checked by whoever drives this table
(``sequences.SequenceTable`` does). Checked here, before anything changes, is what concerns states.

Letters: B entries of a batch; T new tokens; G given states; M rows whose states are wanted; n new tokens of an entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from quire.errors import FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted
from quire.kv.pages import PageIds, PagePool
from quire.kv.state_slots import NULL, OpenStates, StateNeed, States, check_states, rounds
from quire.types import SeqId


class StateTable:
    """The states of all sequences. ``ring``: how many recent states a sequence keeps; ``interval``: a checkpoint is kept at each
    multiple of it (0: none is)."""

    def __init__(self, num_slots: int, *, ring: int, interval: int) -> None:
        self.pool = PagePool(num_slots)
        self.ring = ring
        self.interval = interval
        self.forward: OpenStates | None = None
        self._sequences: dict[SeqId, States] = {}
        self._ringed: dict[int, set[SeqId]] = {}
        """The sequences whose ring names a slot, by slot; those that entered a ring first come first."""

    # -- look-up ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    @property
    def num_available(self) -> int:
        """Slots that a forward can take: the free ones and those that only rings name."""
        return self.pool.num_free + len(self._yielding(self.pool.num_used))

    def num_available_without(self, gone: Iterable[SeqId]) -> int:
        """The same once these sequences are removed."""
        names: Counter[int] = Counter()
        for seq_id in gone:
            states = self._sequences[seq_id]
            names.update([states.present, *states.kept.values(), *states.nodes])
        references, ringed = self.pool.references, self._ringed
        slots = (names.keys() | ringed.keys()) - {NULL}
        return self.pool.num_free + sum(
            int(references[slot]) == names[slot] + len(ringed.get(slot, ())) for slot in slots
        )

    def position(self, seq_id: SeqId) -> int:
        """Where the present state stands: the length of the sequence."""
        return self._sequences[seq_id].length

    def kept(self, seq_id: SeqId) -> list[int]:
        """Positions of the checkpoints, ascending, without 0 and without the ring."""
        return list(self._sequences[seq_id].kept)

    def ring_positions(self, seq_id: SeqId) -> list[int]:
        """Positions of the ring's states, ascending; a checkpoint may stand at one, too."""
        return list(self._sequences[seq_id].ring)

    def nodes(self, seq_id: SeqId) -> int:
        """Uncommitted nodes."""
        return len(self._sequences[seq_id].nodes)

    def nearest(self, seq_id: SeqId, position: int) -> int:
        """The nearest position at or before ``position`` that the sequence can go back to."""
        states = self._sequences[seq_id]
        if position >= states.length:
            return states.length
        before = (held for one in (states.kept, states.ring) for held in reversed(one) if held <= position)
        return max(before, default=0)

    def slots(self, seq_id: SeqId) -> dict[int, int]:
        """The slot of every state that the sequence can go back to, the present one included, by ascending position."""
        states = self._sequences[seq_id]
        found = {0: NULL, **states.kept, **states.ring, states.length: states.present}
        return dict(sorted(found.items()))

    def slot_at(self, seq_id: SeqId, position: int | None = None) -> int | None:
        """The slot of the state that is kept at ``position``, or of the present one; ``NULL``: the initial values; None: there is
        no state. A present state that was overwritten does not hide the checkpoint at its position."""
        states = self._sequences[seq_id]
        if position is None:
            return states.present
        for held in (states.kept, states.ring, {states.length: states.present}, {0: NULL}):
            if position in held:
                return held[position]
        return None

    def needed(self, seq_id: SeqId, *, kept: bool) -> PageIds:
        """Return the slots of the present state and of uncommitted nodes, with ``kept`` those of
        checkpoints too."""
        states = self._sequences[seq_id]
        named = [states.present, *states.nodes, *(states.kept.values() if kept else ())]
        return np.array([slot for slot in named if slot != NULL], dtype=np.int32)

    def held_slots(self, seq_id: SeqId) -> tuple[int, int]:
        """(slots that the sequence names, those of them that others name too)"""
        states = self._sequences[seq_id]
        own = Counter([states.present, *states.kept.values(), *states.ring.values(), *states.nodes])
        del own[NULL]
        return len(own), sum(int(self.pool.references[slot]) > count for slot, count in own.items())

    def num_fixed(self, seq_ids: Iterable[SeqId], kept: Iterable[SeqId]) -> int:
        """Slots that hold present states of these sequences, or checkpoints of those in ``kept``."""
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

    # -- edits -----------------------------------------------------------------------------------------------

    def add(self, seq_id: SeqId) -> None:
        self._sequences[int(seq_id)] = States()

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
        """The child shares the parent's state at ``position`` and all that is kept before it; nothing is copied.

        ``FailedPrecondition`` if there is no state at ``position``.
        """
        parent = self._sequences[parent_id]
        child = States(position, self._stood_at(parent_id, position))
        child.kept = {held: slot for held, slot in parent.kept.items() if held <= position}
        child.ring = {held: slot for held, slot in parent.ring.items() if held < position}
        self._share([child.present, *child.kept.values(), *child.ring.values()])
        self._sequences[int(child_id)] = child
        for slot in child.ring.values():
            self._ringed[slot].add(int(child_id))

    def pop(self, seq_id: SeqId, position: int) -> None:
        """Go back to ``position`` and forget the states after it. ``FailedPrecondition`` if there is no state."""
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

    def _stood_at(self, seq_id: SeqId, position: int) -> int:
        """The slot of the state that the sequence had when its length was ``position``."""
        states = self._sequences[seq_id]
        for held in ({states.length: states.present}, states.ring, states.kept, {0: NULL}):
            if position in held:
                return held[position]
        raise FailedPrecondition(
            f"sequence {seq_id} has no recurrent state at position {position}; there is one at {sorted(self.slots(seq_id))}"
        )

    def commit(self, seq_id: SeqId, path: Seq[int]) -> None:
        """Take the states of the nodes on ``path`` (from a root on; empty: none) as if they had been a chain; forget the others."""
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

    # -- checkpoints -----------------------------------------------------------------------------------------

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        """Slots that become free if these checkpoints (sequence and position) are dropped: nothing else but rings names them."""
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

    @property
    def num_kept(self) -> int:
        """Slots that checkpoints name."""
        return len({slot for states in self._sequences.values() for slot in states.kept.values()})

    def spare(self, need: StateNeed) -> int:
        """Slots that a forward leaves free, those that only rings name among them; below 0: it is short of so many."""
        return self.num_available - need.slots

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

    def _keep(self, states: States, position: int, slot: int) -> None:
        self._share([slot])
        old = states.kept.get(position, NULL)
        states.kept[position] = slot
        self._release([old])

    def _keep_multiples(self, states: States, passed: dict[int, int]) -> None:
        """Keep those of these states (slot by position) that stand at a multiple of the interval."""
        if self.interval:
            for position, slot in passed.items():
                if position % self.interval == 0:
                    self._keep(states, position, slot)

    # -- the ring --------------------------------------------------------------------------------------------

    def _advance(self, seq_id: SeqId, states: States, passed: dict[int, int]) -> list[int]:
        """The last of ``passed`` (slot by ascending position) becomes the present state, the one so far and the others go
        into the ring. Takes over the references; returns slots to release."""
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

    def _leave_ring(self, seq_id: SeqId, states: States, positions: Iterable[int]) -> list[int]:
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

    def _yielding(self, most: int) -> list[int]:
        """Slots that only rings name, oldest first, ``most`` at most."""
        found: list[int] = []
        references = self.pool.references
        for slot, holders in self._ringed.items():
            if len(found) >= most:
                break
            if references[slot] == len(holders):
                found.append(slot)
        return found

    def _take(self, count: int, verb: str) -> PageIds:
        """``count`` slots, given up by rings as far as needed. ``ResourceExhausted`` before anything changes."""
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

    # -- the bracket -----------------------------------------------------------------------------------------

    def plan(
        self,
        seq_ids: Seq[SeqId],
        counts: Seq[int],
        trees: Seq[Seq[int] | None],
        checkpoints: Seq[Seq[int]] = (),
    ) -> StateNeed:
        """What a forward needs. ``trees``: per entry None (a chain), or the parents of its new nodes, as indices over all
        uncommitted nodes (-1: a root). ``checkpoints``: per entry, after how many of its new tokens a state is to be kept,
        beside the multiples of the interval; empty: none. Changes nothing. Cost O(B + T)."""
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
        return StateNeed(
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
        """Positions of a chain, its end included, of which the state is to be kept."""
        found = {length + tokens for tokens in asked}
        if self.interval:
            found.update(range((length // self.interval + 1) * self.interval, length + count + 1, self.interval))
        return tuple(sorted(found))

    def shortage(self, need: StateNeed) -> int:
        """How many slots ``need`` is short of; 0 if there is room. Slots that only rings name count as free, and those of the
        open forward as before it."""
        free = self.pool.num_free
        if self.forward is not None:
            free += self.forward.targets.size + self._num_recent(self.forward)
        short = max(0, need.slots - free)
        return short - len(self._yielding(short))

    @staticmethod
    def _num_recent(opened: OpenStates) -> int:
        """Slots that were taken for the ring only."""
        return len({slot for _, _, slot in opened.recent} - set(opened.targets.tolist()))

    def open(self, need: StateNeed) -> OpenStates:
        """Take the slots, the oldest states of the rings giving up theirs as far as needed. ``ResourceExhausted`` before
        anything changes."""
        opened = OpenStates(need, self._take(need.slots, "begin_forward").astype(np.int64))
        self.forward = opened
        return opened

    def reserve_recent(self) -> list[tuple[int, int, int]]:
        """Slots for the last states of each chain before its end, which ``publish`` puts into the ring, as far as slots are free:
        entry, row and slot of each, by entry and row. A wanted row has its slot already."""
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
        """The new states count from now on. ``inside=False``: the states within chains were not computed, so that those that a
        chain passed are not kept."""
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
        """All states are as before ``open``, less what rings have given up for it."""
        opened = self._require_open()
        self._release([*opened.targets.tolist(), *(slot for _, _, slot in opened.recent)])
        self.forward = None

    def _require_open(self) -> OpenStates:
        if self.forward is None:
            raise FailedPrecondition("no forward is open; call begin_forward first")
        return self.forward

    # -- states that are written from outside ----------------------------------------------------------------

    def own(self, seq_id: SeqId) -> tuple[int, int] | None:
        """Make the slot of the present state this sequence's own (before it is overwritten): from which slot (or ``NULL``) to
        which it must be copied; None: it is its own already. ``ResourceExhausted`` before anything changes."""
        states = self._sequences[seq_id]
        old = states.present
        if old != NULL and self.pool.references[old] == 1:
            return None
        new = int(self._take(1, "debug_set")[0])
        states.present = new
        self._release([old])
        return old, new

    def import_states(self, seq_id: SeqId, length: int, kept: Seq[int]) -> None:
        """A new sequence at ``length``, *importing* until ``finish_import``: with a slot of its own for the present state (also
        at length 0) and for each checkpoint, also for one at ``length``, whose state may be another.

        ``InvalidArgument`` unless ``kept`` ascends from above 0 to ``length`` at most; ``ResourceExhausted``.
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
        self._sequences[int(seq_id)] = States(length, present, kept_slots, importing=True)

    def importing(self, seq_id: SeqId) -> bool:
        """Whether the sequence is being imported."""
        return self._sequences[seq_id].importing

    def finish_import(self, seq_id: SeqId) -> None:
        """The slots have been written. ``FailedPrecondition`` for a sequence that is not being imported."""
        states = self._sequences[seq_id]
        if not states.importing:
            raise FailedPrecondition(
                f"finish_import: sequence {seq_id} is not being imported; call prepare_import first"
            )
        states.importing = False

    # -- references ------------------------------------------------------------------------------------------

    def _share(self, slots: Iterable[int]) -> None:
        for part in rounds(slots):
            self.pool.share(part)

    def _release(self, slots: Iterable[int]) -> None:
        for part in rounds(slots):
            self.pool.release(part)

    def check(self) -> None:
        """Recount everything; ``QuireError`` names what is broken."""
        named: Counter[int] = Counter()
        ringed: dict[int, set[SeqId]] = {}
        for seq_id, states in self._sequences.items():
            named.update([*states.kept.values(), *states.ring.values(), *states.nodes, states.present])
            for slot in states.ring.values():
                ringed.setdefault(slot, set()).add(seq_id)
            check_states(seq_id, states, self.ring)
        opened = self.forward
        written: list[int] = []
        if opened is not None:
            written = opened.targets.tolist()
            named.update(written)
            named.update(slot for _, _, slot in opened.recent)
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
        imported = [one for one in self._sequences.values() if one.importing]
        alone = [slot for one in imported for slot in (one.present, *one.kept.values())]
        recent = {slot for _, _, slot in opened.recent} if opened else set()
        for slot in [*alone, *(slot for slot in written if slot not in recent)]:
            if self.pool.references[slot] != 1:
                raise QuireError(f"state slot {slot} is being written and has {self.pool.references[slot]} holders")
