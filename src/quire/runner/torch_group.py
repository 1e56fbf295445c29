"""The ranks of one model as ``torch.distributed`` knows them.

Letters: T tokens, W columns from stage to stage, R rows, O output features, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from quire.base.errors import RanksBroken
from quire.contracts.ranks import Grid, Share, Stages
from quire.kernels.native_library import native_library
from quire.runner.shared_sums import SharedSums, memory_bytes

HANG_SECONDS = 120.0
"""Seconds that a rank waits for another one, in a sum or for an answer: longer than a step takes
between two sums."""
ENDED = "a process that holds a part of the model has ended, or does not answer; load the model again"

LOGITS, SCORES = 1, 2
"""Tags of messages; rows of the residual stream have 0."""


def _group_of(rank: int, size: int, device: torch.device, store: FileStore) -> Any:
    """Wait for all ranks."""
    timeout = timedelta(seconds=HANG_SECONDS)
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
    """A ``Group`` over ``torch.distributed``: NCCL for GPUs, gloo for CPUs, on which ranks add and
    gather in memory that they share if there are C++ kernels."""

    def __init__(self, share: Share, device: torch.device, meeting: Path) -> None:
        """Wait for all ranks. ``meeting``: a file that they share, and that does not exist yet."""
        self.rank, self.size = share.rank, share.size
        store = FileStore(str(meeting), share.size)
        self._group = _group_of(share.rank, share.size, device, store)
        self._shared: SharedSums | None = None  # The ranks agree by a sum.
        if device.type == "cpu" and sys.platform == "linux":
            self._shared = self._shared_sums(store)

    def _shared_sums(self, store: FileStore) -> SharedSums | None:
        """Share memory with the other ranks; None unless all of them can."""
        library, made, found = native_library(), None, None
        if self.rank == 0:
            try:
                made = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
                os.ftruncate(made, memory_bytes(self.size))
            except OSError:
                pass  # The others find no file of that name.
            # The memory has no name, so nothing of it is left however the ranks end.
            store.set("memory", f"/proc/{os.getpid()}/fd/{made}")
        try:
            if library is not None:
                file = os.open(store.get("memory").decode(), os.O_RDWR | os.O_CLOEXEC)
                found = SharedSums(library, file, self.rank, self.size, HANG_SECONDS, ENDED)
        except OSError:
            pass  # The processes do not see each other's files; sockets do.
        count = int(self.sum(torch.tensor([found is not None], dtype=torch.float32)))
        if made is not None:
            os.close(made)
        return found if count == self.size else None

    def sum(self, x: Tensor) -> Tensor:
        """See ``Group``."""
        if self._shared is not None and x.is_contiguous():
            return self._shared.sum(x)
        # The sum of two numbers is rounded once in any type; each further number rounds it again.
        sums = x.float() if self.size > 2 and x.element_size() == 2 else x
        try:
            self._group.allreduce([sums]).wait()
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error
        return x if sums is x else x.copy_(sums)

    def gather(self, x_RO: Tensor) -> Tensor | None:
        """See ``Group``."""
        if self._shared is not None:
            return self._shared.gather(x_RO.contiguous())
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
        """Wait for all ranks, as ``TorchGroup`` does."""
        self._rank, self._grid, self._device = rank, grid, device
        self._group = _group_of(rank, grid.size, device, FileStore(str(meeting), grid.size))
        self._moving: deque[tuple[Any, Tensor]] = deque()
        self._num_ended = 0
        """Number of messages that have left ``_moving``."""
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

    @property
    def num_begun(self) -> int:
        """See ``Line``."""
        return self._num_ended + len(self._moving)

    def finish_sends(self, until: int | None = None) -> None:
        """See ``Line``."""
        while self._moving and (until is None or self._num_ended < until):
            # Its memory stays until it is there, also if a signal arrives meanwhile.
            self._wait(self._moving[0][0])
            self._moving.popleft()
            self._num_ended += 1

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error
