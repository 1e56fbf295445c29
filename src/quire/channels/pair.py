"""``channel_pair``: two ends in one process."""

from __future__ import annotations

import queue

from quire.base.errors import DataLoss
from quire.contracts.channel import Buffers, Channel


class PairEnd:
    """One end (``contracts.channel.Channel``). What is sent is copied once."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._peer: PairEnd | None = None
        self._closed = False

    def send(self, parts: Buffers) -> None:
        if self._closed or self._peer is None or self._peer._closed:
            raise DataLoss("this end of the channel is closed" if self._closed else "the other end is closed")
        self._peer._inbox.put(bytearray().join(parts))

    def receive(self, timeout: float | None = None) -> memoryview | None:
        if self._closed:
            raise DataLoss("this end of the channel is closed")
        try:
            found = self._inbox.get(timeout=timeout) if timeout != 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if found is None:
            self._inbox.put(None)
            raise DataLoss(f"{'this' if self._closed else 'the other'} end of the channel is closed")
        return memoryview(found)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            if self._peer is not None:
                self._peer._inbox.put(None)


def channel_pair() -> tuple[Channel, Channel]:
    """Return two ends that are connected."""
    first, second = PairEnd(), PairEnd()
    first._peer, second._peer = second, first
    return first, second
