"""Copies between host memory and a device: ``HostLink``, on streams beside its compute stream, and
``Download``, which does not wait for work queued later.

A link's bytes pass through a few pinned buffers. Neither the computing device nor the host waits
for the other; events order the work. Call ``compute_waits`` before queueing work that reads loaded
data, and ``side_waits`` before loading into memory that queued work may still use.
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
    """A point in the work queue of a stream."""

    def synchronize(self) -> None:
        """Block the host until the event is reached."""


class Streams(Protocol):
    """A stream for copies in one direction, beside the stream on which a device computes."""

    def queue(self, work: Callable[[], None]) -> None:
        """Queue work on the side stream."""

    def event(self, *, side: bool) -> Event:
        """Return an event after all work queued so far on the side stream or on the compute
        stream."""

    def side_waits(self, event: Event) -> None:
        """Make all later work of the side stream wait for an event."""

    def compute_waits(self, event: Event) -> None:
        """Make all later work of the compute stream wait for an event."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return pinned host memory for asynchronous copies, uint8 ``[nbytes]``."""


class CudaStreams:
    """``Streams`` of a CUDA device, which computes on its default stream."""

    def __init__(self, device: torch.device) -> None:
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._compute: Any = torch.cuda.default_stream(device)

    def queue(self, work: Callable[[], None]) -> None:
        """See ``Streams``. Tensors that the work makes belong to the side stream."""
        with torch.cuda.stream(self._side):
            work()

    def event(self, *, side: bool) -> Event:
        found: Event = (self._side if side else self._compute).record_event()
        return found

    def side_waits(self, event: Event) -> None:
        self._side.wait_event(event)

    def compute_waits(self, event: Event) -> None:
        self._compute.wait_event(event)

    def pinned(self, nbytes: int) -> Tensor:
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
        """Yield byte ranges, the buffer memory for each, and the buffer's number. Earlier copies
        from that memory are done: the two buffers are filled in turn, each up to its end."""
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
        """Return an event after the work queued so far; buffer ``number`` is free once it is
        reached."""
        found = self._used[number] = self.streams.event(side=True)
        return found


class HostLink:
    """See the module. Safe on any thread; one load and one ``to_host`` run at a time."""

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
        """Return an event after all loads queued so far."""
        return self._loads.streams.event(side=True)

    def computed(self) -> Event:
        """Return an event after all compute work queued so far."""
        return self._loads.streams.event(side=False)

    def side_waits(self, event: Event) -> None:
        """Make later loads wait for an event."""
        self._loads.streams.side_waits(event)

    def compute_waits(self, event: Event) -> None:
        """Make later compute work wait for an event."""
        self._loads.streams.compute_waits(event)

    def to_host(self, rows: Tensor) -> Tensor:
        """Return a copy in host memory of a dense device tensor, made after all compute work queued
        so far. The compute stream does not wait for it."""
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
    """Return the bytes of a tensor, uint8 ``[n]``: a view of a contiguous tensor, else of a
    copy."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


@cache
def host_link(device: torch.device) -> HostLink | None:
    """Return the link of a device; None for the CPU, whose memory is the host's."""
    if device.type != "cuda":
        return None
    return HostLink(device, CudaStreams(device), CudaStreams(device))


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
