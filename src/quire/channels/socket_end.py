"""``SocketEnd``: one end of a channel over a connected socket.

A message is its length in 8 bytes and its bytes, encrypted or not. The sending thread writes it
itself while the peer keeps up. The rest of a message is queued, and a thread of the end writes it.
Another thread reads.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque

import numpy as np

from quire.base.errors import DataLoss
from quire.channels.sealed import Seal
from quire.contracts.channel import Buffers

STALL_SECONDS = 30
"""Seconds for which a peer may take nothing of what is sent."""
PATIENCE_SECONDS = 0.005
"""Seconds that ``send`` waits for a peer that takes nothing. Then it queues the message for the
writing thread, and so all later messages, until the queue is empty."""
CLOSE_SECONDS = 5
"""Seconds that a closing end gives the peer to take what was sent."""
MOST_BYTES = 1 << 30
"""Of a message. A larger one is no message of a state."""


class SocketEnd(ABC):
    """See ``contracts.channel.Channel``. Its heirs say how bytes pass."""

    def __init__(self, connection: socket.socket, peer: str, seal: Seal | None) -> None:
        """Use a connection, in blocking mode, from now on; ``peer`` names the other end; ``seal``
        encrypts what passes, None: it passes as it is."""
        self._socket, self.peer, self._seal = connection, peer, seal
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALL_SECONDS, 0))
        self._inbox: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._outbox: deque[memoryview] = deque()
        """Messages, or their ends, for the thread that writes; the first one is being written."""
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._fault = ""
        """Why nothing passes any more."""
        self._closing = False
        self._threads = [
            threading.Thread(target=self._read_all, name="quire-channel-read", daemon=True),
            threading.Thread(target=self._write_all, name="quire-channel-write", daemon=True),
        ]

    def start(self) -> None:
        """Begin to read and to write."""
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Return False once this end was closed, or an error ended the connection."""
        return not (self._closing or self._fault)

    def send(self, parts: Buffers) -> None:
        with self._sending:
            if not self.is_open:
                raise DataLoss(self._fault or "this end of the channel is closed")
            if self._seal is not None:
                parts = [self._seal.close(parts)]
            left = [memoryview(part) for part in (sum(map(len, parts)).to_bytes(8, "little"), *parts) if len(part)]
            if not self._outbox and not self._writes(left, PATIENCE_SECONDS):
                raise DataLoss(self._fault)
            if left:
                with self._changed:
                    self._outbox.append(memoryview(b"".join(left)))
                    self._changed.notify_all()

    def receive(self, timeout: float | None = None) -> memoryview | None:
        if self._closing:
            raise DataLoss("this end of the channel is closed")
        try:
            found = self._inbox.get(timeout=timeout) if timeout != 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if found is None:
            self._inbox.put(None)
            raise DataLoss(self._fault or "this end of the channel is closed")
        return found

    def close(self) -> None:
        with self._sending, self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._threads[1].join(CLOSE_SECONDS)
        self._break("this end of the channel is closed")
        for thread in self._threads:
            thread.join()
        self._socket.close()
        self._release()

    def _break(self, reason: str) -> None:
        """Let nothing pass from now on."""
        with self._changed:
            self._fault = self._fault or reason
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # The peer is gone.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._inbox.put(None)

    def _read_all(self) -> None:
        try:
            while (message := self._read()) is not None:
                self._inbox.put(message)
            self._break(f"{self.peer} has closed the channel")
        except (OSError, ValueError, DataLoss) as error:
            self._break(f"the channel to {self.peer} is broken: {error}")

    def _read(self) -> memoryview | None:
        """Return the next message; None at the end of the connection."""
        head = np.empty(8, dtype=np.uint8).data
        if not self._fill(head):
            return None
        if (count := int.from_bytes(head, "little")) > MOST_BYTES:
            raise DataLoss(f"a message of {count} bytes; {MOST_BYTES} are possible at most")
        data = np.empty(count, dtype=np.uint8).data
        if not self._fill(data):
            raise DataLoss("it ended within a message")
        return data if self._seal is None else self._seal.open(data)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outbox or self._closing or self._fault)
                if self._fault or not self._outbox:
                    return
            left = [self._outbox[0]]
            if self._writes(left, STALL_SECONDS) and left:
                self._break(f"the channel to {self.peer} is broken: it took nothing for {STALL_SECONDS} seconds")
            self._outbox.popleft()

    def _writes(self, left: list[memoryview], seconds: float) -> bool:
        """Write as ``_write`` does; False, with the fault noted, if the channel broke before that.
        A peer may answer and close right after it."""
        try:
            self._write(left, seconds)
        except ConnectionError as error:  # What the peer has sent before it went is still to be read.
            with self._changed:
                self._fault = self._fault or f"the channel to {self.peer} is broken: {error}"
                self._changed.notify_all()
            return False
        except BaseException as error:  # Half of a message may have passed.
            self._break(f"the channel to {self.peer} is broken: {str(error) or type(error).__name__}")
            if not isinstance(error, (OSError, DataLoss)):
                raise
            return False
        return not (left and self._fault)

    @abstractmethod
    def _write(self, left: list[memoryview], seconds: float) -> None:
        """Write the bytes of ``left``, and remove them from it; return if the peer takes none for
        ``seconds``."""

    @abstractmethod
    def _release(self) -> None:
        """Free what the end holds besides the socket."""

    def _fill(self, data: memoryview) -> bool:
        """Read into ``data``; False if the connection ends before the first byte of it."""
        come = 0
        while come < len(data):
            count = self._socket.recv_into(data[come:])
            if not count:
                if come:
                    raise DataLoss("it ended within a message")
                return False
            come += count
        return True


def drop(left: list[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes."""
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
