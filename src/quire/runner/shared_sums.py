"""Sums over ranks of one machine, in memory that they share.

Gloo's sums go through sockets and a thread: on two busy cores one of 4 KiB takes 0.3 ms in the
median, and 4 ms when the thread must wait for a core. A decode has two for each block.

Each rank has two buffers and a counter. It writes a piece of a tensor to one of its buffers, in
turn, and counts it; when all ranks have counted it, each adds the buffers. A rank counts a piece
after it has read the one before, so a buffer is free again when the next piece is there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from quire.base.errors import RanksBroken
from quire.base.finalizers import unless_exiting
from quire.kernels.native_library import NativeLibrary

PIECE = 1 << 20
"""Bytes of a buffer."""
LINE = 64
"""Bytes of a counter."""
LOOK_SECONDS = 0.01
"""Seconds of a wait after which it is looked whether the other ranks are alive."""
_LOCK = struct.Struct("hhqqi4x")  # struct flock


def memory_bytes(size: int) -> int:
    """Return the bytes that so many ranks share."""
    return size * (LINE + 2 * PIECE)


class Counters:
    """A counter for each process, in shared memory. In C++ (``kernels/cpu/waiting.cpp``) one
    process waits for others without a system call, and without the GIL."""

    def __init__(self, library: NativeLibrary, memory: Tensor, size: int) -> None:
        """``memory``: ``LINE * size`` bytes of zeros, which all processes see."""
        self._memory, self._size = memory, size
        self._count = library.function("quire_count", c_void_p, c_int64, c_uint64)
        self._await = library.function("quire_await", c_void_p, c_int64, c_uint64, c_int64, result=c_int)

    def count(self, own: int, number: int) -> None:
        """Set counter ``own`` to ``number``. A process that reads the number also sees all earlier
        writes of this one."""
        self._count(self._memory.data_ptr(), own, number)

    def wait(self, number: int, seconds: float) -> bool:
        """Wait until all counters are ``number`` at least; return False if that takes longer."""
        return bool(self._await(self._memory.data_ptr(), self._size, number, int(seconds * 1e9)))


class SharedSums:
    """The memory as one rank sees it. All ranks make the same calls in the same order."""

    def __init__(self, library: NativeLibrary, file: int, rank: int, size: int, seconds: float, ended: str) -> None:
        """``file``: a descriptor of ``memory_bytes(size)`` zeros, opened by this rank itself, which
        this object closes. ``RanksBroken`` with the message ``ended``: another rank has ended, or
        does not answer for so many ``seconds``."""
        self._file, self._rank, self._size = file, rank, size
        self._seconds, self._ended = seconds, ended
        self._map = mmap.mmap(file, memory_bytes(size))
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._counters = Counters(library, memory, size)
        self._buffers_SP = memory[LINE * size :].view(2, size, PIECE)
        self._number = 0
        # The kernel releases it when this rank ends, however it does.
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, self._lock_of(rank, fcntl.F_WRLCK))

    @unless_exiting
    def __del__(self) -> None:
        os.close(self._file)

    def sum(self, x: Tensor) -> Tensor:
        """See ``Group``. ``x`` is contiguous."""
        flat = x.view(-1)
        for begin, parts in self._exchanged(flat):
            piece = flat[begin : begin + len(parts[0])]
            if self._size == 2:
                torch.add(parts[0], parts[1], out=piece)
                continue
            # Each addition in a type of 16 bits would round.
            sums = parts[0].float() if piece.element_size() == 2 else parts[0].clone()
            for part in parts[1:]:
                sums += part
            piece.copy_(sums)
        return x

    def gather(self, x_RO: Tensor) -> Tensor | None:
        """See ``Group``. ``x_RO`` is contiguous."""
        flat, is_first = x_RO.view(-1), self._rank == 0
        found_SN = x_RO.new_empty(self._size, flat.numel()) if is_first else None
        for begin, parts in self._exchanged(flat):
            if found_SN is not None:
                for rank, part in enumerate(parts):
                    found_SN[rank, begin : begin + len(part)] = part
        return None if found_SN is None else torch.cat([one.view(x_RO.shape) for one in found_SN], -1)

    def _exchanged(self, flat: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each piece's place, and the ranks' pieces."""
        most = PIECE // flat.element_size()
        for begin in range(0, flat.numel(), most):
            own = flat[begin : begin + most]
            self._number += 1
            buffers_RP = self._buffers_SP[self._number % 2][:, : own.numel() * own.element_size()].view(flat.dtype)
            buffers_RP[self._rank].copy_(own)
            self._counters.count(self._rank, self._number)
            self._wait()
            yield begin, list(buffers_RP)

    def _wait(self) -> None:
        if self._counters.wait(self._number, LOOK_SECONDS):
            return
        end = time.monotonic() + self._seconds
        while not self._counters.wait(self._number, LOOK_SECONDS):
            if time.monotonic() > end or not all(map(self._is_alive, range(self._size))):
                # A rank that has counted all of its pieces may end.
                if self._counters.wait(self._number, 0.0):
                    return
                raise RanksBroken(self._ended)

    def _is_alive(self, rank: int) -> bool:
        if rank == self._rank:
            return True
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, self._lock_of(rank, fcntl.F_WRLCK))
        kind, *_ = _LOCK.unpack(found)
        return bool(kind != fcntl.F_UNLCK)

    @staticmethod
    def _lock_of(rank: int, kind: int) -> bytes:
        return _LOCK.pack(kind, os.SEEK_SET, rank, 1, 0)
