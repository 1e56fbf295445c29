"""A state with recurrent layers and the oracle of such states side by side (see ``pair``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.contracts.layers import Recurrent, StateTensor
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kv.contract import ContractState
from quire.ops.recurrence import ReferenceRecurrence

from .faces import contract
from .machine import BACKENDS
from .oracle_recurrent import HybridOracle
from .pair import Pair

TAPS, CHANNELS, HEADS, KEYS, VALUES = 3, 4, 2, 3, 2
DELTA = Recurrent(
    states=(
        StateTensor(shape=(TAPS - 1, CHANNELS), dtype="float64"),
        StateTensor(shape=(HEADS, KEYS, VALUES), dtype="float64"),
    )
)
LINEAR = Recurrent(states=(StateTensor(shape=(HEADS, KEYS, VALUES), dtype="float32", initial=0.5),))
CONV = Recurrent(states=(StateTensor(shape=(TAPS - 1, CHANNELS), dtype="float32"),))
RAW = Recurrent(
    states=(StateTensor(shape=(3,), dtype="float16", initial=1.0), StateTensor(shape=(2, 2), dtype="int64", initial=7))
)
MIXERS: dict[str, list[Recurrent]] = {
    "delta": [DELTA],
    "linear": [LINEAR, RAW],
    "both": [DELTA, LINEAR],
    "conv": [CONV, RAW],
    "raw": [RAW],
}


class HybridPair(Pair):
    """As ``Pair``; attention layers first."""

    state: ContractState
    oracle: HybridOracle

    def __init__(
        self,
        specs: Sequence[Any],
        recurrent: Sequence[Recurrent],
        *,
        num_states: int,
        ring: int,
        interval: int,
        capacity: int,
        page_size: int,
        dtype: torch.dtype,
        window_capacity: int | None = None,
        backend: str = "torch",
        chunked: bool = False,
    ) -> None:
        sizes: dict[str, Any] = {"capacity": capacity, "page_size": page_size, "dtype": dtype}
        sizes["window_capacity"] = window_capacity
        super().__init__(specs, **sizes)
        self.recurrent = list(recurrent)
        self.state = contract(
            [*specs, *recurrent],
            num_states=num_states,
            ring=ring,
            checkpoint_interval=interval,
            recurrence=ChunkedRecurrence() if chunked else ReferenceRecurrence(),
            backend=BACKENDS[backend](),
            **sizes,
        )
        self.oracle = HybridOracle(specs, recurrent, num_states=num_states, ring=ring, interval=interval, **sizes)

    def compare_rows(self, seq_id: int) -> None:
        super().compare_rows(seq_id)
        if self.oracle.is_importing(seq_id):
            return
        for layer, index in self.oracle.members:
            for position in (None, *self.oracle.kept_positions(seq_id)):
                shown = self.oracle.shown_at(seq_id, position)
                assert shown is not None
                shown.check((layer, index), self.state.debug_get(layer, index, seq_id, position=position))

    def compare_books(self) -> None:
        super().compare_books()
        table = self.state.state.parts.recurrent.table
        assert table.num_available == self.oracle.free_states + len(self.oracle._yielding())
        for seq_id, part in self.oracle.parts.items():
            assert table.kept(seq_id) == sorted(part.kept)
            assert list(table.get(seq_id).ring) == sorted(part.ring)
            assert len(table.get(seq_id).nodes) == len(part.nodes)
            assert self.state.checkpoints(seq_id) == self.oracle.checkpoints(seq_id)
            if not self.oracle.is_importing(seq_id):
                assert self.state.kept_positions(seq_id) == self.oracle.kept_positions(seq_id)
                found = self.oracle.reachable_set(seq_id) & set(self.oracle.kept_positions(seq_id))
                for position in range(self.oracle.sequences[seq_id].length + 1):
                    nearest = max((kept for kept in found if kept <= position), default=0)
                    assert self.state.nearest_reachable(seq_id, position) == nearest
