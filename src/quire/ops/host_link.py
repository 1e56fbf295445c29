"""``HostLink``: copies between host memory and a device, on streams beside what it computes.

Bytes go through a few pinned buffers. Whatever the device computes, neither it nor the host waits
for the other: events say what has to come before what. Who calls ``compute_waits`` before it gives
the device work on what was loaded, and ``side_waits`` before it loads to where work may still be
going on, orders everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

STAGING_BYTES = 8 << 20
"""Bytes of a pinned buffer; each direction has two."""
ALIGNMENT = 64


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Let the host wait until it is reached."""


class Streams(Protocol):
    """A stream for copies in one direction, beside the stream on which a device computes."""

    def queue(self, work: Callable[[], None]) -> None:
        """Give the side stream work."""

    def event(self, *, side: bool) -> Event:
        """Return the point after all that one of the streams was given so far."""

    def side_waits(self, event: Event) -> None:
        """Let what the side stream is given from now on begin after an event."""

    def compute_waits(self, event: Event) -> None:
        """Let what the device is given to compute from now on begin after an event."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return host memory that is copied while the host goes on, uint8 ``[nbytes]``."""


class CudaStreams:
    """Streams of a CUDA device; it computes on the default one."""

    def __init__(self, device: torch.device) -> None:
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._compute: Any = torch.cuda.default_stream(device)

    def queue(self, work: Callable[[], None]) -> None:
        """See ``Streams``. Tensors that the work makes belong to the side stream."""
        with torch.cuda.stream(self._side):
            work()

    def event(self, *, side: bool) -> Event:
        """See ``Streams``."""
        found: Event = (self._side if side else self._compute).record_event()
        return found

    def side_waits(self, event: Event) -> None:
        """See ``Streams``."""
        self._side.wait_event(event)

    def compute_waits(self, event: Event) -> None:
        """See ``Streams``."""
        self._compute.wait_event(event)

    def pinned(self, nbytes: int) -> Tensor:
        """See ``Streams``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class _Lane:
    """One direction: its streams and buffers."""

    def __init__(self, streams: Streams, nbytes: int) -> None:
        self.streams = streams
        self.lock = threading.Lock()
        self._nbytes = nbytes
        self._buffers: list[Tensor] = []
        self._used: list[Event | None] = [None, None]
        self._turn = self._place = 0

    def parts(self, size: int) -> Iterator[tuple[slice, Tensor, int]]:
        """Yield bytes, the part of a buffer for them, and the buffer's number. What was queued with
        that part before is done: buffers are filled in turn, each up to its end."""
        while len(self._buffers) < 2:
            self._buffers.append(self.streams.pinned(self._nbytes))
        start = 0
        while start < size:
            if self._place == self._nbytes:
                self._turn, self._place = self._turn ^ 1, 0
                if (used := self._used[self._turn]) is not None:
                    used.synchronize()
            begin, stop = self._place, min(start + self._nbytes - self._place, size)
            end = begin + stop - start
            self._place = min(-(-end // ALIGNMENT) * ALIGNMENT, self._nbytes)
            yield slice(start, stop), self._buffers[self._turn][begin:end], self._turn
            start = stop

    def note(self, number: int) -> Event:
        """Return the end of what was queued with a buffer."""
        found = self._used[number] = self.streams.event(side=True)
        return found


class HostLink:
    """See the module. Any thread may call; one load and one reading of rows run at a time."""

    def __init__(
        self, device: torch.device, loads: Streams, reads: Streams, *, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self._device = device
        self._loads, self._reads = _Lane(loads, staging_bytes), _Lane(reads, staging_bytes)

    def load(self, tensors: Sequence[Tensor], write: Callable[..., None]) -> None:
        """Queue copies of host tensors, then ``write`` of the copies, on the side stream. The
        tensors may change afterwards."""
        lane = self._loads
        with lane.lock:
            copies: list[Tensor] = []
            lane.streams.queue(
                lambda: copies.extend(torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in tensors)
            )
            for index, tensor in enumerate(tensors):
                data = _bytes(tensor)
                for part, buffer, number in lane.parts(data.numel()):
                    buffer.numpy()[:] = data[part].numpy()

                    def copy(index: int = index, part: slice = part, buffer: Tensor = buffer) -> None:
                        _bytes(copies[index])[part].copy_(buffer, non_blocking=True)

                    lane.streams.queue(copy)
                    lane.note(number)
            lane.streams.queue(lambda: write(*copies))

    def loaded(self) -> Event:
        """Return the point after all that was loaded so far."""
        return self._loads.streams.event(side=True)

    def computed(self) -> Event:
        """Return the point after all that the device was given to compute so far."""
        return self._loads.streams.event(side=False)

    def side_waits(self, event: Event) -> None:
        """Let loads from now on begin after an event."""
        self._loads.streams.side_waits(event)

    def compute_waits(self, event: Event) -> None:
        """Let what the device computes from now on begin after an event."""
        self._loads.streams.compute_waits(event)

    def to_host(self, rows: Tensor) -> Tensor:
        """Return a copy in host memory of a dense tensor of the device, after all that the device
        was given to compute so far. The device is given nothing to wait for."""
        lane, found = self._reads, torch.empty(rows.shape, dtype=rows.dtype)
        source, target = _bytes(rows), _bytes(found)
        with lane.lock:
            lane.streams.side_waits(lane.streams.event(side=False))
            waiting: list[tuple[slice, Tensor, Event]] = []

            def take() -> None:
                part, buffer, event = waiting.pop(0)
                event.synchronize()
                target[part].numpy()[:] = buffer.numpy()

            for part, buffer, number in lane.parts(source.numel()):
                lane.streams.queue(lambda part=part, buffer=buffer: buffer.copy_(source[part], non_blocking=True))  # type: ignore[misc]
                waiting.append((part, buffer, lane.note(number)))
                if len(waiting) > 1:
                    take()
            while waiting:
                take()
        return found


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 ``[n]``, of any other one those of a copy."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


@cache
def host_link(device: torch.device) -> HostLink | None:
    """Return the link of a device; None for the CPU, whose memory is the host's."""
    if device.type != "cuda":
        return None
    return HostLink(device, CudaStreams(device), CudaStreams(device))
