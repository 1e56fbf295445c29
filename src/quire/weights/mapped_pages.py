"""Pages of mapped files: they count as memory of a process once they are read, until they are
dropped. Read again, they come from the system's cache of files."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from torch import Tensor

DROP = 4
"""``MADV_DONTNEED`` of Linux."""
LEAST = 1 << 20
"""Fewest bytes of a tensor that are worth the search for its map, half a millisecond."""


def drop_pages(tensor: Tensor) -> int:
    """Drop the pages within a contiguous tensor that is a part of a read-only mapped file;
    return their bytes. Other memory, and a small tensor, stays as it is."""
    is_small = tensor.nbytes < LEAST
    if is_small or tensor.device.type != "cpu" or not tensor.is_contiguous() or not sys.platform.startswith("linux"):
        return 0
    first, stop = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    start, size = first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE
    if size <= 0 or not any(begin <= start and start + size <= end for begin, end in _mapped_files()):
        return 0
    return size if _advise()(ctypes.c_void_p(start), ctypes.c_size_t(size), DROP) == 0 else 0


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Yield the addresses of maps of files."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, _, _, _, node, *_ = line.split(None, 5)
        if node != "0":
            begin, _, end = addresses.partition("-")
            yield int(begin, 16), int(end, 16)


@cache
def _advise() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL(None).madvise
