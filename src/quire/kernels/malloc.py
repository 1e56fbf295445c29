"""Memory of activations on a CPU.

A prompt's activations are tens of megabytes that are allocated and freed in each layer. glibc
returns such blocks to the operating system, which provides them again page by page, zeroed: that is
400,000 page faults for 2,048 tokens of a model of 1B parameters, a tenth of the time.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt``, from glibc's malloc.h."""
KEPT = 512 << 20
"""Most bytes of freed memory that the process keeps for its next blocks."""
LARGEST = (128 << 20, 32 << 20)
"""Least bytes of a block that is mapped separately, and unmapped when it is freed; the second where
glibc refuses the first, as older versions do."""
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD", "GLIBC_TUNABLES")
"""Environment variables by which a user has chosen these values or another allocator."""


def keep_freed_memory() -> bool:
    """Let the process keep up to ``KEPT`` bytes of freed memory. Return False if nothing was
    changed.

    Nothing is changed if a user has chosen (``CHOSEN``), or without glibc. Call it after the
    weights are loaded, because their temporary blocks are better returned to the system.
    """
    if any(os.environ.get(name) for name in CHOSEN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
