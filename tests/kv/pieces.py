"""Rows in pieces, as a state takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.kv_state import TensorPlan


class Pieces:
    """``contracts.kv_state.RowPieces`` of tensors; ``check`` is called with the number of each."""

    def __init__(
        self, tensors: Sequence[Mapping[str, Tensor]], check: Callable[[int], None] = lambda number: None
    ) -> None:
        self._tensors, self._check = tensors, check

    @property
    def counts(self) -> list[int]:
        return [len(next(iter(one.values()))) for one in self._tensors]

    @property
    def plan(self) -> dict[str, TensorPlan]:
        first = self._tensors[0]
        return {name: TensorPlan((sum(self.counts), *tensor.shape[1:]), tensor.dtype) for name, tensor in first.items()}

    def piece(self, number: int) -> Mapping[str, Tensor]:
        self._check(number)
        return self._tensors[number]

    def write(self, targets: Mapping[str, Tensor], slots_N: NDArray[np.int64]) -> bool:
        return False
