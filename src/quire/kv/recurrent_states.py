"""The recurrent states of all sequences: which slot holds which, and what forwards need. No torch.

A *state slot* holds the state of all recurrent layers of a model at one position of a sequence. One
forward writes it; once published it is immutable, and forks share it. It is free when its last
reference goes. A sequence has its *present* state, at its length, and *kept* ones that it can go
back to: position 0 (always; the initial values, in no slot), *checkpoints*, and a *ring* of the
states published last before the present one. A checkpoint and the ring name the same slot where
they keep the same state. If slots are needed, only those that rings alone name are given up, oldest
first.

This module only looks and counts; ``recurrent_table.RecurrentTable`` changes the states.

Letters: B entries of a batch; T new tokens; G given states; M rows whose states are wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pool_verbs import StateRole
from quire.errors import FailedPrecondition, QuireError
from quire.kv.pages import PageIds, PagePool
from quire.types import SeqId

Slots = NDArray[np.int64]

NULL = -1
"""The slot of the initial values: never written, nobody's."""


@dataclass(slots=True)
class RecurrentStates:
    """The states of one sequence. Each slot that is named here is one reference."""

    length: int = 0
    present: int = NULL
    kept: dict[int, int] = field(default_factory=dict)
    """Checkpoints: slot by position, ascending, without 0."""
    ring: dict[int, int] = field(default_factory=dict)
    """Slot by position, ascending, all before ``length``."""
    nodes: list[int] = field(default_factory=list)
    """The slot of each uncommitted node."""
    importing: bool = False
    """Whether an import is still writing the slots, which are the sequence's alone until then."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentNeed:
    """The need of a forward: states before each row, wanted states. See ``RecurrencePlan``."""

    seq_ids: tuple[SeqId, ...]
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    trees: tuple[bool, ...]
    """Whether the entry adds nodes; otherwise it is a chain."""
    starts: Slots
    """``[B + 1]``"""
    parents: Slots
    """``[T]``: the row of this forward that comes before each row; -1: a given state does."""
    given: Slots
    """``[T]``: which of the given states comes before; -1 where ``parents`` is not."""
    sources: Slots
    """``[G]``: the slots of the given states."""
    wanted: Slots
    """``[M]``: rows with wanted states, ascending: multiples of the interval, ends, all nodes."""
    offsets: Slots
    """``[B + 1]``: the wanted rows of entry i are ``wanted[offsets[i]:offsets[i + 1]]``."""
    present: Slots
    """``[B]``: the slot of each entry's present state."""
    kept: tuple[tuple[int, ...], ...]
    """Per entry, ascending: the positions reached or passed whose states become checkpoints."""

    @property
    def chains(self) -> bool:
        """Return whether every entry is a chain."""
        return not any(self.trees)

    @property
    def slots(self) -> int:
        """M: how many slots the forward takes."""
        return self.wanted.size

    def origins(self) -> Slots:
        """Return ``[M]``: the slot of the last earlier state on the way to each wanted row."""
        first = np.where(self.given >= 0, self.sources[np.maximum(self.given, 0)], NULL)
        if self.chains:
            rows = np.repeat(self.starts[:-1], np.diff(self.starts))
        else:
            rows = np.arange(self.parents.size)
            for row in np.flatnonzero(self.parents >= 0).tolist():
                rows[row] = rows[self.parents[row]]
        return first[rows[self.wanted]]


@dataclass(slots=True, eq=False)
class OpenRecurrent:
    """A forward with its slots."""

    need: RecurrentNeed
    targets: Slots
    """``[M]``: where the state after each wanted row goes."""
    recent: list[tuple[int, int, int]] = field(default_factory=list)
    """Entry, row and slot of states for the ring (``RecurrentTable.reserve_recent``), in order."""


def check_recurrent_states(seq_id: SeqId, states: RecurrentStates, ring: int) -> None:
    """Raise ``QuireError`` unless the positions of this sequence's states are possible."""
    if len(states.ring) > ring:
        raise QuireError(f"the ring of sequence {seq_id} holds {len(states.ring)} states; its size is {ring}")
    for what, positions, last in (
        ("checkpoints", list(states.kept), states.length),
        ("ring", list(states.ring), max(0, states.length - 1)),
    ):
        if any(low >= high for low, high in zip([0, *positions], [*positions, last + 1], strict=True)):
            raise QuireError(f"the {what} of sequence {seq_id} of length {states.length} stand at {positions}")
    if states.length and states.present == NULL:
        raise QuireError(f"sequence {seq_id} of length {states.length} is at the initial values")
    if NULL in (*states.kept.values(), *states.ring.values(), *states.nodes):
        raise QuireError(f"sequence {seq_id} keeps a state in no slot")


def rounds(slots: Iterable[int]) -> Iterable[PageIds]:
    """Yield the slots that are not ``NULL``, in parts that name none twice."""
    rest = Counter(slot for slot in slots if slot != NULL)
    while rest:
        yield np.fromiter(rest, dtype=np.int32, count=len(rest))
        rest = Counter({slot: count - 1 for slot, count in rest.items() if count > 1})


class RecurrentBooks:
    """The states of all sequences, looked up and counted. ``ring``: recent states that a sequence
    keeps; ``interval``: a checkpoint is kept at each multiple of it (0: at none)."""

    def __init__(self, num_slots: int, *, ring: int, interval: int) -> None:
        self.pool = PagePool(num_slots)
        self.ring = ring
        self.interval = interval
        self.forward: OpenRecurrent | None = None
        self._sequences: dict[SeqId, RecurrentStates] = {}
        self._ringed: dict[int, set[SeqId]] = {}
        """The sequences whose rings name a slot, by slot. The slot longest in rings comes first."""

    # -- look-up -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    def position(self, seq_id: SeqId) -> int:
        """Return the position of the present state, which is the sequence's length."""
        return self._sequences[seq_id].length

    def kept(self, seq_id: SeqId) -> list[int]:
        """Return the positions of the checkpoints, ascending, without 0 and the ring."""
        return list(self._sequences[seq_id].kept)

    def ring_positions(self, seq_id: SeqId) -> list[int]:
        """Return the positions of the ring's states, ascending. A checkpoint may share one."""
        return list(self._sequences[seq_id].ring)

    def nodes(self, seq_id: SeqId) -> int:
        """Uncommitted nodes."""
        return len(self._sequences[seq_id].nodes)

    def importing(self, seq_id: SeqId) -> bool:
        """Return whether the sequence is being imported."""
        return self._sequences[seq_id].importing

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

    def firm_slots(self, seq_id: SeqId) -> dict[int, int]:
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
        for held in (states.kept, states.ring, {states.length: states.present}, {0: NULL}):
            if position in held:
                return held[position]
        return None

    def _stood_at(self, seq_id: SeqId, position: int) -> int:
        """Return the slot of the state that the sequence had when its length was ``position``."""
        states = self._sequences[seq_id]
        for held in ({states.length: states.present}, states.ring, states.kept, {0: NULL}):
            if position in held:
                return held[position]
        raise FailedPrecondition(
            f"sequence {seq_id} has no recurrent state at position {position}; there is one at {sorted(self.slots(seq_id))}"
        )

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
        """Return how many slots the sequence names, and how many of them others name too."""
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
        """Return how many slots hold present states, or checkpoints of sequences in ``kept``."""
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
        """Return how many slots ``need`` is short of; 0 if there is room. Slots that only rings
        name count as free, and so do those of the open forward."""
        free = self.pool.num_free
        if self.forward is not None:
            free += len({*self.forward.targets.tolist(), *(slot for _, _, slot in self.forward.recent)})
        short = max(0, need.slots - free)
        return short - len(self._yielding(short))

    def plan(
        self, seq_ids: Seq[SeqId], counts: Seq[int], trees: Seq[Seq[int] | None], checkpoints: Seq[Seq[int]] = ()
    ) -> RecurrentNeed:
        """Return what a forward needs; change nothing. Cost O(B + T). ``trees``: per entry None (a
        chain), or the parents of its new nodes, as indices over all uncommitted nodes (-1: a root).
        ``checkpoints``: per entry, the counts of its new tokens after which a state is kept, in
        addition to the multiples of the interval; empty: none."""
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

    def check(self) -> None:
        """Recount everything; ``QuireError`` names what is broken."""
        named: Counter[int] = Counter()
        ringed: dict[int, set[SeqId]] = {}
        for seq_id, states in self._sequences.items():
            named.update([*states.kept.values(), *states.ring.values(), *states.nodes, states.present])
            for slot in states.ring.values():
                ringed.setdefault(slot, set()).add(seq_id)
            check_recurrent_states(seq_id, states, self.ring)
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
