"""``RingEnd``: messages through shared memory, beside a Unix socket that says what lies in it.

The memory has no name: the caller makes it and passes its descriptor through the socket. So it goes
when both processes have, however they end, and the socket tells either that the other has. Each
direction has one ring. What is written is announced, and given back when it was copied out.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import threading

import numpy as np

from quire.base.errors import DataLoss
from quire.channels.socket_end import MOST_BYTES, STALL_SECONDS, SocketEnd
from quire.contracts.channel import Buffers

RING_BYTES = 16 << 20
"""Of each direction."""
_PIECE = RING_BYTES // 8
_LEAST = 4096
"""Bytes that a piece counts at least, so that notes of small ones never fill the socket."""
_NOTE = struct.Struct("<BQ")
_BEGIN, _HERE, _BACK = 1, 2, 3


class RingEnd(SocketEnd):
    """One end of a connection between two processes of one machine (Linux)."""

    def __init__(self, connection: socket.socket, peer: str, *, connects: bool) -> None:
        """Share memory with the peer; ``connects``: this end makes it."""
        super().__init__(connection, peer, keeps_bytes=True)
        if connects:
            memory = os.memfd_create("quire-handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(memory, 2 * RING_BYTES)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            socket.send_fds(connection, [b"m"], [memory])
        else:
            _, (memory, *_), _, _ = socket.recv_fds(connection, 1, 1)
            # A memory that could shrink would end this process at the next access.
            if (
                os.fstat(memory).st_size != 2 * RING_BYTES
                or not fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            ):
                os.close(memory)
                raise DataLoss(f"the memory of {peer} is none of {2 * RING_BYTES} bytes that cannot shrink")
        self._memory = mmap.mmap(memory, 2 * RING_BYTES)
        os.close(memory)
        halves = np.frombuffer(self._memory, dtype=np.uint8).reshape(2, RING_BYTES)
        self._out, self._back = halves if connects else halves[::-1]
        self._written = self._read_to = 0
        """Bytes that have gone through the rings, by direction."""
        self._room = RING_BYTES
        self._noting = threading.Lock()

    def _write(self, parts: Buffers) -> None:
        notes = [_NOTE.pack(_BEGIN, sum(map(len, parts)))]
        for part in parts:
            data = np.frombuffer(part, dtype=np.uint8)
            for start in range(0, data.size, _PIECE):
                piece = data[start : start + _PIECE]
                if not self._takes(max(piece.size, _LEAST)):
                    return
                _copy(self._out, self._written, piece)
                self._written += piece.size
                self._note(*notes, _NOTE.pack(_HERE, piece.size))
                notes = []
        if notes:
            self._note(*notes)

    def _takes(self, size: int) -> bool:
        """Wait for room in the ring, and take it; False if the channel is broken."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._room >= size or self._fault, STALL_SECONDS):
                raise DataLoss(f"it took nothing for {STALL_SECONDS} seconds")
            self._room -= size
            return not self._fault

    def _note(self, *notes: bytes) -> None:
        with self._noting:  # Both threads write notes.
            self._socket.sendall(b"".join(notes))

    def _read(self) -> memoryview | None:
        message, come = np.empty(0, dtype=np.uint8), -1
        while come < message.size:
            if (note := self._exactly(_NOTE.size)) is None:
                if come < 0:
                    return None
                raise DataLoss("it ended within a message")
            kind, count = _NOTE.unpack(note)
            if kind == _BACK:
                with self._changed:
                    self._room = min(RING_BYTES, self._room + count)
                    self._changed.notify_all()
            elif kind == _BEGIN and come < 0 and count <= MOST_BYTES:
                message, come = np.empty(count, dtype=np.uint8), 0
            elif kind == _HERE and 0 <= come <= come + count <= message.size and count <= RING_BYTES:
                place = self._read_to % RING_BYTES
                first = min(count, RING_BYTES - place)
                message[come : come + first] = self._back[place : place + first]
                message[come + first : come + count] = self._back[: count - first]
                self._read_to += count
                come += count
                with contextlib.suppress(ConnectionError):  # The rest is read, though the peer is gone.
                    self._note(_NOTE.pack(_BACK, max(count, _LEAST)))
            else:
                raise DataLoss(f"a note of kind {kind} with {count} came out of turn")
        return message.data

    def _release(self) -> None:
        del self._out, self._back
        self._memory.close()


def _copy(
    ring: np.ndarray[tuple[int], np.dtype[np.uint8]], at: int, piece: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> None:
    """Write bytes into a ring, around its end."""
    place = at % RING_BYTES
    first = min(piece.size, RING_BYTES - place)
    ring[place : place + first] = piece[:first]
    ring[: piece.size - first] = piece[first:]
