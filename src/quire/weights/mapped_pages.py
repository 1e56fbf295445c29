"""Pages of mapped files: they count as memory of a process once they are read, until they are
dropped. Read again, they come from the system's cache of files."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from torch import Tensor

DROP = 4
"""``MADV_DONTNEED`` of Linux."""
LEAST = 1 << 20
"""Fewest bytes of a tensor that are worth the search for its map, half a millisecond."""
IN_MEMORY, OF_FILE = 62, 61
"""Lowest of the bits of Linux's pagemap for a page in memory or swapped out, and the bit for one of
a file."""


def drop_pages(tensor: Tensor) -> int:
    """Drop the pages within a contiguous tensor that is a part of a mapped file; return their
    bytes. Pages that were written to, other memory, and a small tensor stay as they are."""
    is_small = tensor.nbytes < LEAST
    if is_small or tensor.device.type != "cpu" or not tensor.is_contiguous() or not sys.platform.startswith("linux"):
        return 0
    first, stop = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    start, size = first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE
    if size <= 0 or not any(begin <= start and start + size <= end for begin, end in _mapped_files()):
        return 0
    if not _is_of_file(first, stop - first):
        return 0
    return size if _advise()(ctypes.c_void_p(start), ctypes.c_size_t(size), DROP) == 0 else 0


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Yield the addresses of maps of files."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, _, _, _, node, *_ = line.split(None, 5)
        if node != "0":
            begin, _, end = addresses.partition("-")
            yield int(begin, 16), int(end, 16)


def _is_of_file(first: int, count: int) -> bool:
    """Return whether all pages in memory are the file's own. The page of a private map becomes the
    process's when it is written to, and would be lost."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(first * 8)
            found = np.frombuffer(pages.read(count * 8), dtype="<u8")
    except OSError:
        return False
    is_there, is_of_file = found >> IN_MEMORY != 0, (found >> OF_FILE) & 1 == 1
    return found.size == count and not bool((is_there & ~is_of_file).any())


@cache
def _advise() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL(None).madvise
