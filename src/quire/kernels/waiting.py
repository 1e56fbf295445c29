"""Counters in shared memory, in C++ (``cpu/waiting.cpp``): a process waits for others without a
system call, and without the GIL."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_uint64, c_void_p

from torch import Tensor

from quire.kernels.native_library import NativeLibrary

LINE = 64
"""Bytes of a counter."""


class Counters:
    """One counter for each process."""

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
