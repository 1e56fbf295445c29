"""Snapshots of a sequence: rows and states that any thread may read.

Letters: n rows (tokens); Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.signatures import checks_arguments
from quire.base.types import SeqId
from quire.contracts.layers import LatentAttention
from quire.kv.forward_need import slots_in, slots_of
from quire.kv.pages import PageIds
from quire.kv.parts import StateParts
from quire.kv.storage import geometry
from quire.kv.windows import describe_ranges, holds


@checks_arguments()
@dataclass(frozen=True, slots=True, eq=False)
class SequenceExport:
    """``contracts.kv_state.Export``: copies of page tables, and the tensors that they are of."""

    state: StateParts
    """Only its layers and storages are read here, never the tables of sequences."""
    length: int
    pages: list[PageIds]
    """By layer class."""
    ranges: list[list[range]]
    """By layer class: held positions."""
    slots: dict[int, int]
    """Of the present recurrent state and of checkpoints, by position."""

    @classmethod
    def of(cls, state: StateParts, seq_id: SeqId) -> SequenceExport:
        """Describe the present content of a sequence."""
        sequence, slots = state.sequences.get(seq_id), dict[int, int]()
        if state.recurrent is not None:
            slots = state.recurrent.table.committed_slots(seq_id)
        return cls(
            state,
            sequence.length,
            [table.pages.copy() for table in sequence.tables],
            [state.sequences.held(seq_id, index) for index in range(len(state.paged.classes))],
            slots,
        )

    @property
    def positions(self) -> list[int]:
        return sorted(self.slots)

    def held(self, layer: int) -> list[range]:
        return list(self.ranges[self.state.rows_layer(layer, "held").class_index])

    def rows(self, layer: int, start: int, stop: int) -> dict[str, Tensor]:
        found = self.state.rows_layer(layer, "rows")
        kept = self.ranges[found.class_index]
        if start >= stop or not holds(kept, range(start, stop)):
            raise InvalidArgument(
                f"rows: positions {start}..{stop - 1} of layer {layer}; one or more of a range of {describe_ranges(kept)} are needed"
            )
        slots = slots_of(self.pages[found.class_index], start, stop, self.state.paged.page_size)
        return self.state.take(layer, slots)

    def plain_rows(self, layer: int, start: int, stop: int) -> dict[str, Tensor]:
        planes, spec = self.rows(layer, start, stop), self.state.whole_specs[layer]
        found = self.state.paged.format.expand(geometry(spec), planes)
        return {"latent": found.k.squeeze(1)} if isinstance(spec, LatentAttention) else found._asdict()

    def held_rows(self, layer: int) -> dict[str, Tensor]:
        found = self.state.rows_layer(layer, "held_rows")
        pages, ranges = self.pages[found.class_index], self.ranges[found.class_index]
        return self.state.take(layer, slots_in(pages, ranges, self.state.paged.page_size))

    def states(self, layer: int, position: int) -> dict[str, Tensor]:
        if layer in self.state.stored_specs:
            raise Unsupported(f"states: layer {layer} keeps rows and no state of fixed size; call rows")
        part = self.state.recurrent_part("states")
        part.layer(layer)  # InvalidArgument for an unknown one
        if position not in self.slots:
            raise InvalidArgument(f"states: position {position}; there are states at {self.positions}")
        slot = np.array([self.slots[position]], dtype=np.int64)
        return {f"state.{state}": row_1[0] for state, row_1 in part.take(layer, slot).items()}
