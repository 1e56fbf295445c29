"""Forwards over device memory that keeps its place, so that work on them can be captured.

A captured forward repeats the very launches of an earlier one, with the same arguments. So all that
differs between forwards is in ``StaticInputs``: tokens, positions, slots, and the numbers of
attention's plans. A forward has ``entries`` sequences at most, each of ``count`` new tokens. Rows
that no token has, behind the others, are at position 0, see no key, and write the slot of padding.

Letters: T rows, ``entries * count``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import Unsupported
from quire.base.uploads import SharedMemory, StaticInputs
from quire.contracts.attention import ForwardPlan
from quire.contracts.layers import LatentAttention, RopeSpec
from quire.contracts.recurrence import RecurrencePlan
from quire.contracts.rows import Rotation
from quire.kv import plans
from quire.kv.chosen_rows import ChosenRows
from quire.kv.forward_need import ForwardNeed, pages_for
from quire.kv.parts import StateParts
from quire.kv.plans import Batch, Prepared
from quire.kv.recurrent import RecurrentMemory, RecurrentPart, RecurrentPass
from quire.kv.recurrent_states import NULL
from quire.kv.state_pass import StatePass


@runtime_checkable
class StaticBackend(Protocol):
    """An attention backend with plans that can be replaced in their place."""

    def static_plan(self, plan: ForwardPlan, dtype: torch.dtype, memory: StaticInputs, entries: int) -> Any:
        """Prepare ``run`` for batches of up to ``entries`` entries with as many rows each; None if
        such a plan is not possible."""

    def replan(self, prepared: Any, plan: ForwardPlan) -> None:
        """Replace the batch of such a plan. What it appends to the memory's tail is new."""


def static_refusal(state: StateParts, count: int) -> str:
    """Return the reason against memory that keeps its place, for forwards of ``count`` tokens for
    each sequence; "" if there is none."""
    if not state.paged.padding:
        return "the state has no slot for padding"
    if not isinstance(state.paged.backend, StaticBackend):
        return f"attention backend {state.paged.backend.name!r} has no plans that stay where they are"
    if state.encoders is not None:
        return "cross layers read rows of encoders"
    if any(spec.rope_mode == "inline" for spec in state.paged.specs.values() if not isinstance(spec, LatentAttention)):
        return "keys that turn when they are read are gathered for each forward"
    if count > 1 and (
        state.recurrent is not None or any(isinstance(one, LatentAttention) for one in state.paged.specs.values())
    ):
        return "recurrent and latent layers have other forms for several tokens"
    return ""


class StaticForward:
    """What forwards of one size share, and the pass over it."""

    def __init__(self, state: StateParts, entries: int, count: int, longest: int, shared: SharedMemory) -> None:
        """Take memory. ``longest``: tokens of a sequence, at most. ``shared``: what forwards of
        other sizes use in turn. ``Unsupported``: see ``static_refusal``."""
        if reason := static_refusal(state, count):
            raise Unsupported(reason)
        self.state, self.entries, self.count, self.longest = state, entries, count, longest
        shapes = {
            (spec.layer_window, spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in state.paged.specs.values()
        }
        tail = len(shapes) * entries * pages_for(longest, state.paged.page_size)
        self.memory = StaticInputs(tail, shared)
        self.tokens = self.memory.part(self.rows, np.int64)
        self.recurrent: StaticRecurrence | None = None
        if state.recurrent is not None:
            self.recurrent = StaticRecurrence(state.recurrent, self.rows, self.memory)
        self.pass_: StaticPass | None = None

    @property
    def rows(self) -> int:
        """T"""
        return self.entries * self.count

    def admits(self, need: ForwardNeed) -> bool:
        """Return whether this memory is for such a forward."""
        return (
            len(need.counts) <= self.entries
            and all(count == self.count for count in need.counts)
            and max(need.stored) + self.count <= self.longest
            and not any(need.windows)
            and not any(tree is not None for tree in need.trees)
            and not any(seq_id in self.state.imports for seq_id in need.seq_ids)
        )

    def open(self, need: ForwardNeed) -> StaticPass:
        """Return the pass, over this forward. ``send`` brings its numbers to the device."""
        recurrent = None if self.recurrent is None else self.recurrent.open()
        self.memory.rewind()
        if self.pass_ is None:
            self.pass_ = StaticPass(self, need, recurrent)
        else:
            self.pass_.reopen(need, recurrent)
        return self.pass_

    def begin_again(self) -> None:
        """Let blocks run over the open forward, after ``send``."""
        assert self.pass_ is not None
        self.pass_.begin_again()
        if self.recurrent is not None:
            self.recurrent.begin_again()

    @property
    def is_whole(self) -> bool:
        """Return whether the blocks that have run leave nothing to do at the forward's end."""
        return self.recurrent is None or self.recurrent.is_whole


class StaticPass(StatePass):
    """The open forward. To blocks it has T rows; plans are made for the actual tokens."""

    def __init__(self, static: StaticForward, need: ForwardNeed, recurrent: RecurrentPass | None) -> None:
        self._static = static
        memory, rows = static.memory, static.rows
        self._positions = memory.part(rows, np.int64)
        self._new = [memory.part(rows, np.int64) for _ in static.state.paged.classes]
        self._held: list[Tensor] = []
        """Tables that captured work reads."""
        super().__init__(static.state, need, recurrent)
        self.prepare()
        self.are_decodes = False  # To blocks: they run over T rows.
        counts, zeros = np.full(static.entries, static.count), np.zeros(static.entries, dtype=np.int64)
        self._real = self.batch
        self.batch = self._whole = replace(
            self.batch,
            counts=counts,
            added=counts,
            bases=zeros,
            stored=zeros,
            starts=np.arange(static.entries + 1) * static.count,
            positions=np.zeros(rows, dtype=np.int64),
            trees=(None,) * static.entries,
            windows=(None,) * static.entries,
            max_position=static.longest - 1,
        )
        self.chosen = ChosenRows(self.batch.starts)
        self._max_place = self.batch.max_position

    def prepare(self) -> None:
        """Copy the facts of the first forward to their places, then plan."""
        self._real, self._slots = self.batch, self._new_slots()
        super().prepare()

    def reopen(self, need: ForwardNeed, recurrent: RecurrentPass | None) -> None:
        """Take another forward. What blocks have written in the last one counts as written."""
        self.is_open, self._recurrent = True, recurrent
        self._real = self._batch_of(need)
        self._tables = self._tables_of(need)
        self._slots = self._new_slots()
        for (keys, index), found in self._prepared.items():
            plan = self._plan(keys, index)  # type: ignore[arg-type]
            self._backend.replan(found.made, plan)
            self._prepared[keys, index] = Prepared(plan, found.made)

    def begin_again(self) -> None:
        """Forget the results of blocks in the forward."""
        self.written.clear()
        self._rotations.clear()
        self._held.clear()

    @property
    def _backend(self) -> StaticBackend:
        # Checked when a pass was asked for; ``isinstance`` of a protocol is too slow for each step.
        return cast("StaticBackend", self._paged.backend)

    def _batch_of(self, need: ForwardNeed) -> Batch:
        self._real = plans.batch_of(need, self._state.device, self._positions.tensor)
        self._positions.fill(self._real.positions)
        return self._real

    def _new_slots(self) -> list[NDArray[np.int64]]:
        found = [plans.new_slots(self._real, tables, self._paged.page_size) for tables in self._tables]
        for part, slots, one in zip(self._new, found, self._paged.classes, strict=True):
            part.fill(slots, rest=one.storage.num_slots)
        return found

    def _slots_there(self) -> list[Tensor]:
        return [part.tensor for part in self._new]

    def _plan(self, keys: plans.Keys, class_index: int) -> ForwardPlan:
        paged, tables = self._paged, self._tables[class_index]
        return plans.planned(self._real, keys, tables, paged.page_size, paged.classes[class_index].window)

    def _prepare(self, plan: ForwardPlan) -> Prepared:
        static = self._static
        made = self._backend.static_plan(plan, self._paged.dtype, static.memory, static.entries)
        if made is None:
            raise Unsupported(f"attention backend {self._paged.backend.name!r} has no static plan for this batch")
        return Prepared(plan, made)

    def _rotation(self, spec: RopeSpec, relative: bool = False) -> Rotation:
        found = super()._rotation(spec, relative)
        self._held.append(self._paged.rotary_table(spec).held)
        return found


class StaticRecurrence:
    """What forwards of at most ``rows`` sequences, each of one new token, read and write of
    recurrent states, in memory that keeps its place. Rows that no token has begin at the initial
    values, and write the slot of padding."""

    def __init__(self, part: RecurrentPart, rows: int, memory: StaticInputs) -> None:
        self._part = part
        self._read, self._written = memory.part(rows, np.int64), memory.part(rows, np.int64)
        every = np.arange(rows)
        plan = RecurrencePlan(
            starts=np.arange(rows + 1), parents=np.full(rows, NULL), given=every, wanted=every, chains=True
        )
        self._memory = RecurrentMemory(plan, self._read.tensor, self._written.tensor)

    def open(self) -> RecurrentPass:
        """Take the slots of the open forward; what layers have set stays as it was in the last
        one."""
        storage, opened = self._part.storage, self._part.table.forward
        assert opened is not None
        self._read.fill(storage.places(opened.need.sources), rest=storage.initial)
        self._written.fill(opened.targets, rest=storage.num_slots)
        return self._part.new_pass(self._memory)

    def begin_again(self) -> None:
        """Forget the states set by layers."""
        self._memory.known.clear()

    @property
    def is_whole(self) -> bool:
        """Return whether layers have set all states, so that nothing is left for ``complete``."""
        return len(self._memory.known) == sum(len(spec.states) for spec in self._part.specs.values())
