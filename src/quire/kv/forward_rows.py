"""The new tokens of an open forward: their positions, and the slots of their rows.

Of decodes that run as one call nothing of this is made, else all at once.

Letters: T new tokens.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kv import plans
from quire.kv.chosen_rows import ChosenRows
from quire.kv.forward_need import ForwardNeed
from quire.kv.pages import PageIds
from quire.kv.parts import StateParts
from quire.kv.plans import Batch
from quire.ops.uploads import uploaded


class ForwardRows:
    """See the module."""

    def __init__(self, state: StateParts, need: ForwardNeed) -> None:
        self._state, self._need = state, need
        self._tables = self._tables_of(need)
        self.are_decodes = sum(need.counts) == len(need.counts) and not (any(need.trees) or any(need.windows))
        """Whether each entry has one new token, at its length, and sees what the layers' own
        windows leave."""

    def lay_out(self) -> None:
        """Make what follows, which else is made when it is first asked for."""
        _ = self._whole, self._running_slots, self.chosen, self._places_T, self._max_place

    @cached_property
    def batch(self) -> Batch:
        """Return the new tokens that run."""
        return self._batch_of(self._need)

    @cached_property
    def chosen(self) -> ChosenRows:
        """Return which of the new tokens run."""
        return ChosenRows(self.batch.starts)

    @cached_property
    def slots(self) -> list[Tensor]:
        """By layer class, of all new tokens."""
        return self._slots_there()

    @cached_property
    def _whole(self) -> Batch:
        """All new tokens."""
        return self.batch

    @cached_property
    def _slots(self) -> list[NDArray[np.int64]]:
        """On the host: looking there waits for no device."""
        return self._new_slots()

    @cached_property
    def _running_slots(self) -> list[Tensor]:
        """Return the slots of the tokens that run, by layer class."""
        return self.slots

    @cached_property
    def _places_T(self) -> Tensor:
        """Return the positions at which the new tokens are rotated."""
        return self.batch.positions_T

    @cached_property
    def _max_place(self) -> int:
        return self.batch.max_position

    def _batch_of(self, need: ForwardNeed) -> Batch:
        return plans.batch_of(need, self._state.device)

    def _tables_of(self, need: ForwardNeed) -> list[list[PageIds]]:
        sequences = [self._state.table.get(seq_id) for seq_id in need.seq_ids]
        return [[one.tables[index].pages for one in sequences] for index in range(len(self._state.classes))]

    def _new_slots(self) -> list[NDArray[np.int64]]:
        return [plans.new_slots(self._whole, tables, self._state.page_size) for tables in self._tables]

    def _slots_there(self) -> list[Tensor]:
        return [uploaded(slots, self._state.device) for slots in self._slots]
