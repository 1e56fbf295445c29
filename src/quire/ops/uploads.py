"""From the host to a device, without waiting for what the device has to do before."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device; on the CPU it shares the array's memory.

    A copy from ordinary memory to a GPU waits until the GPU has done all that it was given. One
    from pinned memory is queued, and PyTorch keeps that memory until the copy was made. So the
    array may change afterwards only if the device is no CPU."""
    found = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)
