"""``Channel``: one end of an ordered, reliable pair of ends that carries a state as it is computed.

No torch at run time. ``quire.channels`` has the channels: in one process, shared memory, TCP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Buffers: TypeAlias = Sequence[bytes | bytearray | memoryview]
"""The parts of one message, in order."""


class Channel(Protocol):
    """One end. Messages arrive whole, once, in the order in which they were sent.

    One thread at a time receives; any threads send. An end belongs to its caller, who closes it.
    """

    def send(self, parts: Buffers) -> None:
        """Send one message, whose parts may change afterwards. It waits no longer than milliseconds
        for the peer to read. ``DataLoss``: the end is closed, or the peer is gone."""

    def receive(self, timeout: float | None = None) -> memoryview | None:
        """Return the next message, in memory of its own; None if there is none for ``timeout``
        seconds (None: wait for ever). ``DataLoss``: the end is closed, or the peer is gone and all
        that it had sent was received."""

    def close(self) -> None:
        """Close this end, after all sent messages have left or failed to leave. A second call does
        nothing."""
