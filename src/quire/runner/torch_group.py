"""The ranks of one model as ``torch.distributed`` knows them.

Letters: R rows, O output features.
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
from quire.contracts.ranks import Share

HANG_SECONDS = 120.0
"""Seconds that a rank waits for another one, in a sum or for an answer: longer than a step takes
between two sums."""
ENDED = "a process that holds a part of the model has ended, or does not answer; load the model again"


class TorchGroup:
    """A ``Group`` over ``torch.distributed``: gloo for CPUs, NCCL for GPUs."""

    def __init__(self, share: Share, device: torch.device, meeting: Path) -> None:
        """Wait for all ranks. ``meeting``: a file that they share, and that does not exist yet."""
        self.rank, self.size = share.rank, share.size
        store, timeout = FileStore(str(meeting), share.size), timedelta(seconds=HANG_SECONDS)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, share.rank, share.size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            chosen = gloo._Options()
            chosen._devices = [gloo.create_device(hostname="127.0.0.1")]
            chosen._timeout = timeout
            self._group = gloo(store, share.rank, share.size, chosen)

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
