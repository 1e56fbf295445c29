"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ThreadGroup:
    """See ``Group``. What the others gave is read between two barriers."""

    def __init__(self, rank: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def gather(self, x_RO: Tensor) -> Tensor | None:
        found = self._all(x_RO)
        return torch.cat(found, -1) if self.rank == 0 else None

    def _all(self, x: Tensor) -> list[Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait(60)
        found = [one for one in self._slots if one is not None]
        self._barrier.wait(60)
        assert len(found) == self.size
        assert all(one.shape == x.shape and one.dtype == x.dtype for one in found)
        return found


def on_ranks(size: int, function: Callable[[ThreadGroup], T]) -> list[T]:
    """What the function returns on each of ``size`` ranks, which run together."""
    slots: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> T:
        try:
            return function(ThreadGroup(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
