"""The ranks of one model as ``torch.distributed`` knows them.

Letters: T tokens, W columns from stage to stage, R rows, O output features, V vocabulary.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from quire.base.errors import RanksBroken
from quire.contracts.ranks import Grid, Share, Stages

HANG_SECONDS = 120.0
"""Seconds that a rank waits for another one, in a sum or for an answer: longer than a step takes
between two sums."""
ENDED = "a process that holds a part of the model has ended, or does not answer; load the model again"

LOGITS, SCORES = 1, 2
"""Tags of messages; rows of the residual stream have 0."""


def _group_of(rank: int, size: int, device: torch.device, meeting: Path) -> Any:
    """Wait for all ranks. ``meeting``: a file that they share, and that does not exist yet."""
    store, timeout = FileStore(str(meeting), size), timedelta(seconds=HANG_SECONDS)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    chosen = gloo._Options()
    chosen._devices = [gloo.create_device(hostname="127.0.0.1")]
    chosen._timeout = timeout
    return gloo(store, rank, size, chosen)


class TorchGroup:
    """A ``Group`` over ``torch.distributed``: gloo for CPUs, NCCL for GPUs."""

    def __init__(self, share: Share, device: torch.device, meeting: Path) -> None:
        """See ``_group_of``."""
        self.rank, self.size = share.rank, share.size
        self._group = _group_of(share.rank, share.size, device, meeting)

    def sum(self, x: Tensor) -> Tensor:
        """See ``Group``."""
        # The sum of two numbers is rounded once in any type; each further number rounds it again.
        sums = x.float() if self.size > 2 and x.element_size() == 2 else x
        try:
            self._group.allreduce([sums]).wait()
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error
        return x if sums is x else x.copy_(sums)

    def gather(self, x_RO: Tensor) -> Tensor | None:
        """See ``Group``."""
        found = [[torch.empty_like(x_RO) for _ in range(self.size)]] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        try:
            self._group.gather(found, [x_RO.contiguous()], options).wait()
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error
        return torch.cat(found[0], -1) if self.rank == 0 else None


class TorchLine:
    """A ``Line`` over ``torch.distributed``. Neighbours are the ranks of one slice."""

    def __init__(self, rank: int, grid: Grid, device: torch.device, meeting: Path) -> None:
        """See ``_group_of``."""
        self._rank, self._grid, self._device = rank, grid, device
        self._group = _group_of(rank, grid.size, device, meeting)
        self._moving: list[tuple[Any, Tensor]] = []
        self._row: tuple[int, torch.dtype, int] = (0, torch.float32, 0)

    def use(self, stages: Stages, vocab_size: int) -> None:
        """Learn the shapes and the type of what is received."""
        self._row = (stages.width, stages.dtype, vocab_size)

    def receive(self, count: int) -> Tensor:
        """See ``Line``."""
        width, dtype, _ = self._row
        x_TW = torch.empty(count, width, dtype=dtype, device=self._device)
        return self._receive(x_TW, self._rank - self._grid.slices, 0)

    def send(self, x_TW: Tensor) -> None:
        """See ``Line``."""
        self._give(x_TW, self._rank + self._grid.slices)

    def receive_scores(self, count: int) -> Tensor:
        """See ``Line``."""
        return self._receive(torch.empty(count, device=self._device), self._rank - self._grid.slices, SCORES)

    def send_scores(self, scores_N: Tensor) -> None:
        """See ``Line``."""
        self._give(scores_N.to(self._device), self._rank + self._grid.slices, SCORES)

    def sum(self, x_N: Tensor) -> Tensor:
        """See ``Line``. The last stage gives all others the sum."""
        slices, last = self._grid.slices, self._rank % self._grid.slices + (self._grid.stages - 1) * self._grid.slices
        if self._rank >= slices:
            x_N = x_N + self.receive_scores(len(x_N))
        if self._rank < last:
            self.send_scores(x_N)
            return self._receive(torch.empty_like(x_N), last, SCORES)
        for rank in range(last - slices, -1, -slices):
            self._give(x_N, rank, SCORES)
        return x_N

    def fetch(self, count: int) -> Tensor:
        """See ``Line``."""
        logits_RV = torch.empty(count, self._row[2], device=self._device)
        last = (self._grid.stages - 1) * self._grid.slices
        self._moving.append((self._begin_receiving(logits_RV, last, LOGITS), logits_RV))
        return logits_RV

    def give(self, logits_RV: Tensor) -> None:
        """See ``Line``."""
        self._give(logits_RV, 0, LOGITS)

    def _give(self, x: Tensor, rank: int, tag: int = 0) -> None:
        x = x.contiguous()
        try:
            self._moving.append((self._group.send([x], rank, tag), x))
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error

    def _receive(self, x: Tensor, rank: int, tag: int) -> Tensor:
        self._wait(self._begin_receiving(x, rank, tag))
        return x

    def _begin_receiving(self, x: Tensor, rank: int, tag: int) -> Any:
        # Gloo may know already that the peer is gone.
        try:
            return self._group.recv([x], rank, tag)
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error

    def finish_sends(self) -> None:
        """See ``Line``."""
        moving, self._moving = self._moving, []
        for work, _ in moving:
            self._wait(work)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error
