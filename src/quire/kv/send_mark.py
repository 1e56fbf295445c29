"""``SendMark``: the tokens of a sequence that go to another state, layer by layer as they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import DataLoss, QuireError
from quire.base.types import SeqId
from quire.contracts.channel import Channel
from quire.kv.exports import SequenceExport
from quire.kv.forward_need import slots_of
from quire.kv.messages import Transfer, packed
from quire.kv.parts import StateParts
from quire.kv.position_maps import runs_of
from quire.kv.storage import IN_PARALLEL, geometry

PIECE_BYTES = IN_PARALLEL
"""Most bytes of rows in a message, which is sent and written while the next one is. Smaller ones
cost more: each has its share of Python, in caches that rows have just filled."""


class SendMark(Transfer):
    """The sending half of one hand-over."""

    def __init__(
        self,
        state: StateParts,
        seq_id: SeqId,
        begin: int,
        end: int,
        classes: list[NDArray[np.int64]],
        channel: Channel,
        name: str,
    ) -> None:
        """Send the tokens from ``begin`` to ``end - 1`` to these slots, by class, of the channel's
        other end."""
        super().__init__(seq_id, channel, name)
        self.begin, self.end = begin, end
        self.sent = begin
        """One behind the last token that was sent and counts. Where ranks divide the state, it is
        sent behind the step."""
        self.ended = False
        """Whether all was sent."""
        self.delivered = False
        """Whether the receiver has said that all of it counts there."""
        self._state, self._slots = state, classes
        self._gone = begin
        """One behind the last token whose rows were sent."""

    @property
    def is_done(self) -> bool:
        return self.delivered

    def told(self) -> str:
        return f"{self.sent - self.begin} of {self.end - self.begin} tokens of sequence {self.seq_id} were sent"

    def say(self, kind: str, planes: Iterable[Tensor] = (), **more: Any) -> None:
        """Send one message. A channel that fails ends the hand-over, not what calls this."""
        if self.error is None:
            try:
                header = {"transfer": self.name, "kind": kind, **more}
                self.channel.send(packed(header, planes))
            except QuireError as error:
                self.fail(DataLoss(f"{error}; {self.told()}"))

    def send_rows(self, layer_id: int, start: int, source: NDArray[np.int64]) -> None:
        """Send the rows of one layer from position ``start`` on, which lie in ``source`` here."""
        layer = self._state.paged.layers[layer_id]
        low, high = max(start, self.begin), min(start + len(source), self.end)
        if low >= high or self.error is not None:
            return
        target, source = self._slots[layer.class_index][low - self.begin : high - self.begin], source[low - start :]
        stored = np.flatnonzero(target >= 0)
        target, source = target[stored], source[stored]
        per_row = self._state.paged.format.bytes_per_row(geometry(self._state.whole_specs[layer_id]))
        most = max(1, PIECE_BYTES // max(1, per_row))
        for first in range(0, stored.size, most):
            some = slice(first, first + most)
            self.say("rows", self._state.lend(layer_id, source[some]), layer=layer_id, runs=runs_of(target[some]))

    def advance(self, length: int) -> None:
        """Count the tokens below ``length``, whose rows were sent layer by layer; send what stands
        at the end if it is reached. Where ranks divide the state, only count."""
        self.sent = max(self.sent, min(length, self.end))
        if self._state.division is None:
            self._gone = self.sent
            self._finish_if_all()

    def send_computed(self, length: int) -> None:
        """Send the rows of the tokens below ``length`` that were not sent, then what stands at the
        end if it is reached."""
        state = self._state
        self.sent = max(self.sent, min(length, self.end))
        tables = state.sequences.get(self.seq_id).tables
        for layer_id, layer in state.paged.layers.items():
            pages = tables[layer.class_index].pages
            self.send_rows(layer_id, self._gone, slots_of(pages, self._gone, self.sent, state.paged.page_size))
        self._gone = self.sent
        self._finish_if_all()

    def _finish_if_all(self) -> None:
        if self.sent == self.end and not self.ended:
            self._finish()

    def _finish(self) -> None:
        """Send what stands at the end: recurrent states and encoder rows; then that it is over."""
        state, encoders = self._state, self._state.encoders
        if state.recurrent is not None:
            export = SequenceExport.of(state, self.seq_id)
            for layer in state.recurrent_ids:
                self.say("state", export.states(layer, self.end).values(), layer=layer)
        if encoders is not None:
            for layer in encoders.specs:
                if rows := encoders.table.rows(self.seq_id, layer):
                    self.say("encoder", encoders.take(self.seq_id, layer).values(), layer=layer, rows=rows)
        self.say("end")
        self.ended = True


def marks_of(state: StateParts, seq_ids: Iterable[SeqId]) -> dict[SeqId, SendMark]:
    """Return the marks of these sequences, of those that have one."""
    if not state.transfers:
        return {}
    return {seq: one for seq in seq_ids if isinstance(one := state.transfers.get(seq), SendMark)}
