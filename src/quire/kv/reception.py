"""``Reception``: the tokens that a sequence is being sent, until all have come and count.

What comes goes to pages that no sequence names yet, so any thread may write it while forwards run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from quire.base.errors import DataLoss
from quire.base.types import SeqId
from quire.contracts.channel import Channel
from quire.kv.exchange import group_plan
from quire.kv.forward_need import ReceivedPages
from quire.kv.messages import Transfer, planes_of
from quire.kv.parts import StateParts
from quire.kv.position_maps import slots_of_runs
from quire.kv.storage import FEW_RUNS


class Reception(Transfer):
    """The receiving half of one hand-over."""

    def __init__(
        self,
        state: StateParts,
        seq_id: SeqId,
        length: int,
        channel: Channel,
        name: str,
        classes: Sequence[ReceivedPages],
        state_slot: int | None,
    ) -> None:
        """Receive tokens of ``seq_id``, which then has ``length``, into these pages and slot."""
        super().__init__(seq_id, channel, name)
        self.length = length
        self.ended = False
        """Whether the sender has said that it has sent all."""
        self.lock = threading.Lock()
        self.closed = False
        """Whether the pages are no longer its own: what comes later is dropped."""
        self._state, self._slot = state, state_slot
        self._slots = [one.slots for one in classes]
        self._orders = [np.argsort(slots, kind="stable") for slots in self._slots]
        """By class: the tokens in the order of their slots."""
        self._ascending = [slots[order] for slots, order in zip(self._slots, self._orders, strict=True)]
        self._come = {layer: self._slots[one.class_index] < 0 for layer, one in state.paged.layers.items()}
        """By layer, of each token: whether its row has come, or none is stored."""
        self._states = set(state.recurrent_ids)
        """The recurrent layers whose state has not come."""
        self._encoders: dict[int, dict[str, Tensor]] = {}
        """Rows of cross layers, which get their pages in the end."""

    @property
    def layers_come(self) -> int:
        """The number of layers of which all has come."""
        rows = sum(bool(come.all()) for come in self._come.values())
        return rows + len(self._state.recurrent_ids) - len(self._states)

    @property
    def is_done(self) -> bool:
        return self.ended

    def told(self) -> str:
        total = len(self._come) + len(self._state.recurrent_ids)
        return f"{self.layers_come} of {total} layers of sequence {self.seq_id} had arrived"

    def slots_of_class(self, index: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the slots of the tokens in a layer class; None: that of the recurrent state."""
        return np.array([self._slot]) if index is None else self._slots[index]

    def take(self, header: Mapping[str, Any], data: memoryview) -> None:
        """Write what a message brings; note an error for one that does not fit."""
        with self.lock:
            if self.closed or self.error is not None:
                return
            try:
                self._take(header, data)
            except DataLoss as error:
                self.fail(DataLoss(f"{error}; {self.told()}"))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                self.fail(DataLoss(f"a message of the sender is malformed ({error}); {self.told()}"))

    def _take(self, header: Mapping[str, Any], data: memoryview) -> None:
        state, kind = self._state, header["kind"]
        if kind == "end":
            if self.layers_come < len(self._come) + len(self._state.recurrent_ids):
                raise DataLoss("the sender has ended, and not all has come")
            self.ended = True
            return
        layer = header["layer"]
        if kind == "rows":
            self._take_rows(layer, np.array(header["runs"], dtype=np.int64).reshape(-1, 2), data)
        elif kind == "state":
            part = state.recurrent_part("disagg_wait")
            planes = planes_of(data, part.group_plan(layer, ()), f"the state of layer {layer}")
            part.put(self.seq_id, layer, np.array([self._slot]), [[plane] for plane in planes.values()])
            self._states.discard(layer)
        else:
            plan = group_plan(state.spec(layer), header["rows"], state.paged.format)
            self._encoders[layer] = planes_of(data, plan, f"encoder rows of layer {layer}")

    def _take_rows(self, layer_id: int, runs: np.ndarray[Any, np.dtype[np.int64]], data: memoryview) -> None:
        state = self._state
        layer = state.paged.layers[layer_id]
        mine, (begins, counts) = self._ascending[layer.class_index], runs.T
        low = np.searchsorted(mine, begins)
        fit = bool(begins.size) and ((begins >= 0) & (counts > 0) & (counts <= mine.size - low)).all()
        # Slots differ, so none of a run is missing if its last one is where it must be.
        if not fit or (mine[low + counts - 1] != begins + counts - 1).any():
            raise DataLoss(f"rows of layer {layer_id} came for slots that were not given for them")
        total = int(counts.sum())
        plan = group_plan(state.whole_specs[layer_id], total, state.paged.format)
        planes = planes_of(data, plan, f"{total} rows of layer {layer_id}")
        storage = state.paged.classes[layer.class_index].storage
        if len(runs) > FEW_RUNS:
            slots = slots_of_runs(runs.tolist())
            own = state.own_planes(self.seq_id, layer_id, slots, planes)
            storage.put(layer.index, slots, {name: plane.to(state.device) for name, plane in own.items()})
        else:
            start = 0
            for begin, count in runs.tolist():
                run = {name: plane[start : start + count] for name, plane in planes.items()}
                own = state.own_planes(self.seq_id, layer_id, np.arange(begin, begin + count), run)
                storage.put_run(layer.index, begin, own)
                start += count
        come, order = self._come[layer_id], self._orders[layer.class_index]
        for first, count in zip(low.tolist(), counts.tolist(), strict=True):
            come[order[first : first + count]] = True

    def publish(self) -> None:
        """Make all that has come count. ``ResourceExhausted``, unchanged, without pages for
        encoder rows."""
        state, seq_id, encoders = self._state, self.seq_id, self._state.encoders
        if encoders is not None and self._encoders:
            new = {one: planes for one, planes in self._encoders.items() if not encoders.table.rows(seq_id, one)}
            counts = {one: len(next(iter(planes.values()))) for one, planes in new.items()}
            encoders.table.require_room(seq_id, max(counts.values(), default=0), "disagg_wait")
            if new:
                encoders.storage.copy(encoders.table.own(seq_id, max(counts.values())))
            for layer, planes in new.items():
                encoders.table.note(seq_id, layer, counts[layer])
                encoders.fill(seq_id, layer, planes)
        with self.lock:
            self.closed = True
        state.sequences.publish_reception(seq_id, self.length)
        if state.recurrent is not None:
            state.recurrent.table.publish_reception(seq_id, self.length)

    def give_back(self) -> None:
        """Let the sequence be as before; its pages go once nothing writes into them."""
        with self.lock:
            self.closed = True
        self._state.sequences.give_back_reception(self.seq_id)
        if self._state.recurrent is not None:
            self._state.recurrent.table.give_back_reception(self.seq_id)
