"""``SocketEnd``: one end of a channel over a connected socket, which two threads read and write."""

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
from quire.contracts.channel import Buffers

STALL_SECONDS = 30
"""Seconds for which a peer may take nothing of what is sent."""
CLOSE_SECONDS = 5
"""Seconds that a closing end gives the peer to take what was sent."""
MOST_BYTES = 1 << 30
"""Of a message. A larger one is no message of a state."""


class SocketEnd(ABC):
    """See ``contracts.channel.Channel``. Its heirs say how a message passes."""

    def __init__(self, connection: socket.socket, peer: str, *, keeps_bytes: bool) -> None:
        """Use a connection, in blocking mode, from now on; ``peer`` names the other end."""
        self._socket, self.peer, self.keeps_bytes = connection, peer, keeps_bytes
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALL_SECONDS, 0))
        self._inbox: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._outbox: deque[Buffers] = deque()
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
        """Whether messages pass, as far as is known."""
        return not (self._closing or self._fault)

    def send(self, parts: Buffers) -> None:
        with self._changed:
            if self._closing or self._fault:
                raise DataLoss(self._fault or "this end of the channel is closed")
            self._outbox.append(parts)
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
        with self._changed:
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

    def _write_all(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._outbox or self._closing or self._fault)
                    if self._fault or not self._outbox:
                        return
                    parts = self._outbox.popleft()
                self._write(parts)
        except ConnectionError as error:  # What the peer has sent before it went is still to be read.
            with self._changed:
                self._fault = self._fault or f"the channel to {self.peer} is broken: {error}"
                self._changed.notify_all()
        except (OSError, DataLoss) as error:
            self._break(f"the channel to {self.peer} is broken: {error}")

    @abstractmethod
    def _read(self) -> memoryview | None:
        """Return the next message; None at the end of the connection."""

    @abstractmethod
    def _write(self, parts: Buffers) -> None:
        """Write one message."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the end holds besides the socket."""

    def _exactly(self, count: int) -> memoryview | None:
        """Return the next bytes; None if the connection ends before the first of them."""
        if count > MOST_BYTES:
            raise DataLoss(f"a message of {count} bytes; {MOST_BYTES} are possible at most")
        data = np.empty(count, dtype=np.uint8).data
        return data if self._fill(data) else None

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

    def _put(self, parts: Buffers) -> None:
        """Write these bytes."""
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            sent = self._socket.sendmsg(left[:64])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]
