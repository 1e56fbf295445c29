"""One end of a connection over which a KV state moves to another process.

Shared memory, TCP, torch.distributed or a loopback pair: whatever is ordered and reliable. A channel moves
bytes and knows no state. It may carry many transfers at a time; each message names its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from quire.errors import InvalidArgument

MessageKind: TypeAlias = Literal["offer", "rows", "end", "delivered", "cancel"]
"""``offer``: the receiver announces a transfer id and its position map. ``rows``: one run of one layer. ``end``: the
sender has sent everything. ``delivered``: the receiver has published. ``cancel``: either side gave up."""

MESSAGE_KINDS: tuple[MessageKind, ...] = ("offer", "rows", "end", "delivered", "cancel")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferMessage:
    """One message. Only ``rows`` has a layer and a run; the others have -1 there."""

    transfer_id: int
    """Chosen by the receiver, never used again on this channel; messages of an ended transfer are dropped."""
    kind: MessageKind
    layer_id: int = -1
    run: int = -1
    """Index of the run in the layer class's part of the compressed position map."""
    payload: bytes = b""
    checksum: int = 0
    """Of ``payload``; the receiver of a damaged message ends the transfer with ``DataLoss``."""

    def __post_init__(self) -> None:
        if self.kind not in MESSAGE_KINDS:
            raise InvalidArgument(f"message kind must be one of {', '.join(MESSAGE_KINDS)}; got {self.kind!r}")
        if self.transfer_id < 0:
            raise InvalidArgument(f"transfer_id must be >= 0; got {self.transfer_id}")
        if self.kind == "rows":
            if self.layer_id < 0 or self.run < 0:
                raise InvalidArgument(f"rows need layer_id and run >= 0; got {self.layer_id} and {self.run}")
        elif (self.layer_id, self.run) != (-1, -1):
            raise InvalidArgument(
                f"a message of kind {self.kind!r} has no layer and no run; got {self.layer_id} and {self.run}"
            )


class Channel(Protocol):
    """An ordered, reliable pair of ends; this is one of them. Safe to use from two threads, one per direction."""

    @property
    def layout(self) -> str:
        """``KVState.get_layout_hash()`` of both ends.

        Compared when the channel is opened: a difference is ``InvalidArgument`` with expected and found. Page
        sizes and devices of the ends may differ.
        """

    def send(self, message: TransferMessage) -> None:
        """Queue a message; returns when it is accepted, not when it has arrived.

        ``DataLoss``: the peer is gone. ``FailedPrecondition``: this end is closed.
        """

    def receive(self, timeout: float | None = None) -> TransferMessage | None:
        """The next message in order, or None if none came within ``timeout`` seconds (None: wait).

        ``DataLoss``: the peer is gone and nothing is left to read. ``FailedPrecondition``: this end is closed.
        """

    def close(self) -> None:
        """End the connection; the peer reads what was sent, then ``DataLoss``. Idempotent."""
