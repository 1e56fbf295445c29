"""Copies from the host to a device that do not wait for the device's queued work."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device; on the CPU it shares the array's memory.

    A copy from ordinary memory to a GPU waits until the GPU has done all queued work. A copy from
    pinned memory is queued, and PyTorch keeps that memory until the copy is done. So the array may
    change afterwards only if the device is not the CPU.
    """
    found = torch.from_numpy(array)
    if device.type == "cpu":
        return found
    if device.type != "cuda" or not array.size:
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)


ALIGNED = 16
"""Alignment of parts in bytes, so that programs are compiled for aligned pointers only."""


ROOM = 1 << 20
"""Bytes for all parts of one ``StaticInputs``."""


class SharedMemory:
    """Device memory for works that run one after the other and do not read each other's results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return ``count`` undefined numbers, in the same memory for all callers that give this
        name. A caller that took fewer before keeps its memory."""
        nbytes = count * dtype.itemsize
        found = self._held.get(name)
        if found is None or found.numel() < nbytes:
            found = self._held[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return found[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())


class StaticInputs:
    """Device memory at a fixed address with changing contents, for the inputs of captured work.

    It consists of parts of fixed size and a tail that all parts share, of which a forward sends
    only the used beginning. Device memory changes by ``send`` alone, in one copy for the parts and
    one for the tail. Another work may have overwritten it since the last ``send``.
    """

    def __init__(self, tail: int, shared: SharedMemory) -> None:
        """Take memory for parts, and for a tail of ``tail`` int32 numbers."""
        self.shared = shared
        """Memory for temporaries, which the work writes before it reads them."""
        self._values = np.zeros(ROOM, dtype=np.uint8)
        self._held = shared.take("parts", ROOM, torch.uint8)
        self._used = 0
        self._tail = np.zeros(tail, dtype=np.int32)
        self.tail = shared.take("tail", tail, torch.int32)
        """int32, on the device."""
        self._appended = 0

    def part(self, count: int, dtype: DTypeLike) -> StaticPart:
        """Return a part of ``count`` numbers, all 0. ``MemoryError`` if all exceed ``ROOM``."""
        start, stop = self._used, self._used + count * np.dtype(dtype).itemsize
        if stop > self._values.size:
            raise MemoryError(f"parts of {stop} bytes, and there is room for {self._values.size}")
        self._used = -(-stop // ALIGNED) * ALIGNED
        values = self._values[start:stop].view(dtype)
        return StaticPart(values, self._held[start:stop].view(torch.from_numpy(values).dtype))

    def rewind(self) -> None:
        """Empty the tail."""
        self._appended = 0

    def append(self, values: NDArray[np.int32]) -> int:
        """Append to the tail; return the position of the first value. ``MemoryError`` if they do
        not fit."""
        start, stop = self._appended, self._appended + values.size
        if stop > self._tail.size:
            raise MemoryError(f"a tail of {stop} numbers, and there is room for {self._tail.size}")
        self._tail[start:stop] = values
        self._appended = stop
        return start

    def send(self) -> None:
        """Copy the parts and the used tail to the device. Later changes need another call."""
        for values, held in ((self._values, self._held[: self._used]), (self._tail, self.tail[: self._appended])):
            if held.numel():
                given = torch.from_numpy(values[: held.numel()])
                held.copy_(given.pin_memory() if held.is_cuda else given, non_blocking=True)


class StaticPart:
    """Some numbers of ``StaticInputs``."""

    __slots__ = ("_values", "tensor")

    def __init__(self, values: NDArray[Any], tensor: Tensor) -> None:
        self._values = values
        self.tensor = tensor
        """The numbers on the device, flat, as of the last ``send``."""

    def fill(self, values: NDArray[Any], rest: int = 0) -> None:
        """Set the first numbers, and all others to ``rest``. ``MemoryError`` if they do not fit."""
        if values.size > self._values.size:
            raise MemoryError(f"{values.size} numbers, and there is room for {self._values.size}")
        self._values[: values.size] = values.reshape(-1)
        self._values[values.size :] = rest
