"""Memory for packed weights, which moves into huge pages after a model is loaded.

A decode reads all weights, and each page of 4 KiB costs a TLB lookup. To provide a huge page when
it is first touched, Linux may have to move others out of the way, or a host its guest's memory:
that took half of the loading time of a 0.5B model (docs/log.md). So a thread collapses the small
pages while the model already answers (``MADV_COLLAPSE``, Linux 6.1). The small pages are requested
many at a time, which takes a third of the time of one after the other, when they are first touched.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SLAB = 64 << 20
"""Bytes of a memory block that packed weights share, much more than a huge page."""
ALIGNMENT = 64
HUGE = 2 << 20
"""Bytes of a huge page on x86 and most ARM systems. Others refuse the call, and keep small ones."""
PAGE = mmap.PAGESIZE
LEAST = 64 << 10
"""Least bytes that are worth a call to the system."""
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
SHARE = 0.25
"""Part of one processor's time for collapsing."""

COLLAPSING = "quire-huge-pages"
"""Name of the thread."""

Slab = np.ndarray[Any, Any]


class PackedMemory:
    """Allocates consecutively in slabs. A slab lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._slab: weakref.ref[Slab] | None = None
        self._end = 0
        self._waiting: list[tuple[weakref.ref[Slab], int]] = []
        """Full slabs in small pages, and the number of their used bytes."""

    def take(self, nbytes: int, *, requested: bool = True) -> Tensor:
        """Return uint8 ``[nbytes]``, uninitialised. ``requested`` False: who writes to it requests
        its pages first, if the system ``collapses`` them."""
        slab = None if self._slab is None else self._slab()
        if slab is None or self._end + nbytes > slab.size:
            self._close()
            slab = _mapped(max(SLAB, nbytes + ALIGNMENT))
            self._slab, self._end = weakref.ref(slab), -slab.ctypes.data % ALIGNMENT
        begin = self._end
        self._end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if requested and nbytes >= LEAST and collapses():
            _advise(slab.ctypes.data + begin, nbytes, MADV_POPULATE_WRITE)
        return torch.from_numpy(slab)[begin : begin + nbytes]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        return self.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def collapse(self) -> threading.Thread | None:
        """Start a thread that moves all used memory into huge pages; return it. None: there is
        nothing to move, or the system cannot. Call it when weights have been packed."""
        self._close()
        waiting, self._waiting = self._waiting, []
        if not collapses() or not any(used >= HUGE for _, used in waiting):
            return None
        thread = threading.Thread(target=_collapse, args=(waiting,), name=COLLAPSING, daemon=True)
        thread.start()
        return thread

    def _close(self) -> None:
        if self._slab is not None:
            self._waiting.append((self._slab, self._end))
        self._slab = None


def _mapped(size: int) -> Slab:
    """Return uninitialised bytes: small pages that can be collapsed, or else NumPy's memory, which
    requests huge pages."""
    return _small_pages(size) if collapses() else np.empty(size, np.uint8)


def _small_pages(size: int) -> Slab:
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _collapse(waiting: list[tuple[weakref.ref[Slab], int]]) -> None:
    for found, used in waiting:
        start = 0
        while (slab := found()) is not None:
            first = -(-(slab.ctypes.data + start) // HUGE) * HUGE
            if first + HUGE > slab.ctypes.data + used:
                break
            began = time.monotonic()
            if _advise(first, HUGE, MADV_COLLAPSE):
                return  # no huge page can be had now
            start = first + HUGE - slab.ctypes.data
            del slab  # it may be freed while this thread waits
            time.sleep((time.monotonic() - began) * (1 / SHARE - 1))


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Call ``madvise`` for all pages of some bytes; 0: it is followed."""
    first = address // PAGE * PAGE
    madvise = ctypes.CDLL(None).madvise
    return int(madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), advice))


@cache
def collapses() -> bool:
    """Return whether the system collapses pages on request, and its administrator lets huge pages
    be used."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        allowed = "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    if not allowed:
        return False
    probe = _small_pages(2 * HUGE)
    first = -probe.ctypes.data % HUGE
    probe[first] = 1
    return _advise(probe.ctypes.data + first, HUGE, MADV_COLLAPSE) == 0
