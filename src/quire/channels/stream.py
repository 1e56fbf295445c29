"""``StreamEnd``: messages over a TCP connection, each behind its length in 8 bytes."""

from __future__ import annotations

import socket

from quire.channels.sealed import Seal
from quire.channels.socket_end import SocketEnd
from quire.contracts.channel import Buffers


class StreamEnd(SocketEnd):
    """One end of a connection whose peer is known (``greeting``)."""

    def __init__(self, connection: socket.socket, peer: str, seal: Seal | None, *, local: bool) -> None:
        """Use a connection; ``seal`` encrypts what passes, None: it passes as it is. ``local``: the
        ends are on one machine. TCP's own checksum of 16 bits is too weak for a network."""
        super().__init__(connection, peer, keeps_bytes=local or seal is not None)
        self._seal = seal

    def _read(self) -> memoryview | None:
        if (head := self._exactly(8)) is None:
            return None
        data = self._exactly(int.from_bytes(head, "little"))
        return data if data is None or self._seal is None else self._seal.open(data)

    def _write(self, parts: Buffers) -> None:
        if self._seal is not None:
            parts = [self._seal.close(parts)]
        self._put([sum(map(len, parts)).to_bytes(8, "little"), *parts])

    def _release(self) -> None:
        self._seal = None
