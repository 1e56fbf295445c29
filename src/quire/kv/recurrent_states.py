"""The recurrent states of one sequence, and the need of a forward. No torch.

A *state slot* holds the state of all recurrent layers of a model at one position of a sequence. One
forward writes it; once published it is immutable, and forks share it. It is free when its last
reference goes. A sequence has its *present* state, at its length, and *kept* ones that it can go
back to: position 0 (always; the initial values, in no slot), *checkpoints*, and a *ring* of the
states published last before the present one. A checkpoint and the ring name the same slot where
they keep the same state. If slots are needed, only those that rings alone name are given up, oldest
first.

Letters: B entries of a batch; T new tokens; G given states; M rows whose states are wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import QuireError
from quire.base.types import SeqId
from quire.kv.pages import PageIds

Slots = NDArray[np.int64]

NULL = -1
"""The slot of the initial values: never written, owned by no sequence."""


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
