"""``Transfer``: one half of a hand-over. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire.base.errors import QuireError
from quire.base.types import SeqId
from quire.contracts.channel import Channel


class Transfer(ABC):
    """A sequence that is received (``reception``) or sent (``send_mark``) over a channel."""

    def __init__(self, seq_id: SeqId, channel: Channel, name: str) -> None:
        """Begin one; ``name`` is in all of its messages."""
        self.seq_id, self.channel, self.name = seq_id, channel, name
        self.error: QuireError | None = None
        """What ended it before its time."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether all has come, or counts at the receiver."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.is_done or self.error is not None

    @abstractmethod
    def told(self) -> str:
        """Return the progress, for errors."""

    def fail(self, error: QuireError) -> None:
        """Note the first error."""
        self.error = self.error or error
