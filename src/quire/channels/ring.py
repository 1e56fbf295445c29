"""``RingEnd``: messages through shared memory, with notes about its content through a Unix socket.

The memory has no name: the caller makes it and passes its descriptor through the socket. So the
kernel frees it when both processes have ended, however they end, and the socket tells each end when
the other has ended. Each direction has one ring. The writer announces each piece by a note, and the
reader gives its room back by another one when it has copied the piece.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import threading
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import DataLoss
from quire.channels.socket_end import SocketEnd, drop

RING_BYTES = 16 << 20
"""Of each direction."""
_PIECE = RING_BYTES // 8
_LEAST = 4096
"""Bytes that a piece counts at least, so that notes of small ones never fill the socket."""
_Bytes: TypeAlias = NDArray[np.uint8]
_NOTE = struct.Struct("<BQ")
_HERE, _BACK = 1, 2


class RingEnd(SocketEnd):
    """One end of a connection between two processes of one machine (Linux)."""

    def __init__(self, connection: socket.socket, peer: str, *, connects: bool) -> None:
        """Share memory with the peer; ``connects``: this end makes it."""
        # Before the connection waits without a limit of time.
        if connects:
            found = [os.memfd_create("quire-handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)]
        else:
            _, found, _, _ = socket.recv_fds(connection, 1, 1)
        try:
            if connects:
                os.ftruncate(found[0], 2 * RING_BYTES)
                fcntl.fcntl(found[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                socket.send_fds(connection, [b"m"], found)
            # A memory that could shrink would end this process at the next access.
            elif not found or (
                os.fstat(found[0]).st_size != 2 * RING_BYTES
                or not fcntl.fcntl(found[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            ):
                raise DataLoss(f"{peer} gave no memory of {2 * RING_BYTES} bytes that cannot shrink")
            self._memory = mmap.mmap(found[0], 2 * RING_BYTES)
        finally:
            for memory in found:
                os.close(memory)
        super().__init__(connection, peer, None)
        halves = np.frombuffer(self._memory, dtype=np.uint8).reshape(2, RING_BYTES)
        self._out, self._back = halves if connects else halves[::-1]
        self._written = self._read_to = 0
        """Bytes that have gone through the rings, by direction."""
        self._room = RING_BYTES
        self._here = self._piece = 0
        """Bytes of the last piece that were not read, and all of them."""
        self._noting = threading.Lock()

    def _write(self, left: list[memoryview], seconds: float) -> None:
        while left:
            with self._changed:
                if not self._changed.wait_for(lambda: self._room >= _LEAST or self._fault, seconds) or self._fault:
                    return
            size, most = 0, min(self._room, _PIECE)
            while left and size < most:
                part = np.frombuffer(left[0][: most - size], dtype=np.uint8)
                for ring, piece in _turned(self._out, self._written + size, part):
                    ring[:] = piece
                size += part.size
                drop(left, part.size)
            self._written += size
            with self._changed:
                self._room -= max(size, _LEAST)
            self._note(_HERE, size)

    def _note(self, kind: int, count: int) -> None:
        with self._noting:  # Both directions have notes.
            self._socket.sendall(_NOTE.pack(kind, count))

    def _fill(self, data: memoryview) -> bool:
        target, come = np.frombuffer(data, dtype=np.uint8), 0
        while come < target.size:
            if not self._here and not self._wait():
                if come:
                    raise DataLoss("it ended within a message")
                return False
            count = min(self._here, target.size - come)
            for ring, part in _turned(self._back, self._read_to, target[come : come + count]):
                part[:] = ring
            self._read_to += count
            self._here -= count
            come += count
            if not self._here:
                with contextlib.suppress(ConnectionError):  # The rest is read, though the peer is gone.
                    self._note(_BACK, max(self._piece, _LEAST))
        return True

    def _wait(self) -> bool:
        """Wait until something lies in the ring; False at the end of the connection."""
        note = bytearray(_NOTE.size)
        while super()._fill(memoryview(note)):
            kind, count = _NOTE.unpack(note)
            if kind == _HERE and 0 < count <= RING_BYTES:
                self._here = self._piece = count
                return True
            if kind != _BACK:
                raise DataLoss(f"a note of kind {kind} with {count} came out of turn")
            with self._changed:
                self._room = min(RING_BYTES, self._room + count)
                self._changed.notify_all()
        return False

    def _release(self) -> None:
        del self._out, self._back
        self._memory.close()


def _turned(ring: _Bytes, at: int, data: _Bytes) -> list[tuple[_Bytes, _Bytes]]:
    """Return the pieces of a ring from byte ``at`` on, around its end, and of the data there."""
    place = at % RING_BYTES
    first = min(data.size, RING_BYTES - place)
    return [(ring[place : place + first], data[:first]), (ring[: data.size - first], data[first:])]
