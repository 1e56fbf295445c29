"""``StreamEnd``: messages over a TCP connection."""

from __future__ import annotations

import select
import socket

from quire.channels.sealed import Seal
from quire.channels.socket_end import SocketEnd, drop


class StreamEnd(SocketEnd):
    """One end of a connection whose peer is known (``greeting``)."""

    def __init__(self, connection: socket.socket, peer: str, seal: Seal | None) -> None:
        super().__init__(connection, peer, seal)
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)

    def _write(self, left: list[memoryview], seconds: float) -> None:
        while left:
            try:
                drop(left, self._socket.sendmsg(left[:64], (), socket.MSG_DONTWAIT))
            except BlockingIOError:
                if not self._room.poll(seconds * 1000):
                    return

    def _release(self) -> None:
        self._seal = None
