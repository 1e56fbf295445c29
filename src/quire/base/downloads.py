"""Copies from a device to the host that do not wait for work queued later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Download:
    """Tensors on their way to the host.

    A plain copy to the host waits until the device has done all queued work. This copy is queued
    behind the work that makes the tensors, and ``wait`` returns once it is done, even if more work
    was queued since. On the CPU the tensors are returned as they are.
    """

    __slots__ = ("_event", "_there")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Queue the copies. All tensors are on one device."""
        self._event: torch.cuda.Event | None = None
        # PyTorch uses pinned memory for such a copy, and keeps its source alive until it is done.
        self._there = [one.to("cpu", non_blocking=True) for one in tensors]
        if tensors and tensors[0].is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[Tensor]:
        """Return the tensors on the CPU, in their order, once they have come."""
        if self._event is not None:
            self._event.synchronize()
        return self._there
