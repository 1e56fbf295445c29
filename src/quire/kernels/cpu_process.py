"""What this process needs for compute on a CPU: the number of threads, OpenMP's runtime, and freed
memory that it keeps.

PyTorch starts one thread for each visible core, on some builds for each hardware thread. It ignores
a control group's limit of processor time (``docker run --cpus``). A parallel region ends with its
slowest thread: a thread without a core of its own delays all others.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

import torch

from quire.base.process_limits import ROOT, time_limit

logger = logging.getLogger("quire")

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
"""Environment variables by which users choose the number of threads."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of ``mallopt``, from glibc's malloc.h."""
KEPT_BYTES = 512 << 20
"""Most bytes of freed memory that the process keeps for its next blocks."""
MAPPED_BYTES = (128 << 20, 32 << 20)
"""Least bytes of a block that is mapped separately, and unmapped when it is freed; the second where
glibc refuses the first, as older versions do."""
ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD", "GLIBC_TUNABLES")
"""Environment variables by which a user has chosen these values or another allocator."""


def limit_threads() -> None:
    """Lower PyTorch's default number of threads to the cores of this process.

    A user's choice stays: by the environment, or by ``torch.set_num_threads`` to another number
    than the default.
    """
    cpus = len(_affinity())
    usable, now = usable_cores(), torch.get_num_threads()
    defaults = {cpus, os.cpu_count(), physical_cores()}
    if usable < now and now in defaults and not any(name in os.environ for name in THREAD_VARIABLES):
        torch.set_num_threads(usable)
        logger.info("%d threads of PyTorch, which had %d: as many cores has this process", usable, now)


def openmp_function(name: str) -> Any:
    """Return a function of the OpenMP runtime that PyTorch computes with: the one in its wheel, in
    an environment of conda, in the system, or one that a user has loaded before. None: the runtime
    has none of that name, or there is no runtime."""
    # The order of the dynamic linker: what is visible to all, then what PyTorch was linked with.
    every = (ctypes.CDLL(None), ctypes.CDLL(torch._C.__file__))
    return next((found for one in every if (found := getattr(one, name, None)) is not None), None)


def _end_threads() -> None:
    """End the threads of this thread's parallel regions, which the next region starts again."""
    if _pause is not None:
        _pause(_PAUSE_HARD)


# A child of a fork would wait for threads that only the parent has.
_pause = openmp_function("omp_pause_resource_all")
_PAUSE_HARD = 2
os.register_at_fork(before=_end_threads)


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores that this process may run on, or fewer if its control
    group's limit of processor time is lower. ``root`` holds proc and sys."""
    cores, limit = physical_cores(root), time_limit(root)
    return cores if limit is None else max(1, min(cores, int(limit)))


def physical_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores among the CPUs that this process may run on."""
    siblings = set()
    for cpu in _affinity():
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings.add(path.read_text(encoding="ascii").strip())
        except OSError:  # Not Linux, or no topology: each is one core.
            siblings.add(f"{cpu}")
    return len(siblings)


def _affinity() -> set[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def keep_freed_memory() -> bool:
    """Let the process keep up to ``KEPT_BYTES`` bytes of freed memory. Return False if nothing was
    changed.

    A prompt's activations are tens of megabytes that are allocated and freed in each layer. glibc
    returns such blocks to the operating system, which provides them again page by page, zeroed:
    that is 400,000 page faults for 2,048 tokens of a model of 1B parameters, a tenth of the time.

    Nothing is changed if a user has chosen (``ALLOCATOR_VARIABLES``), or without glibc. Call it
    after the weights are loaded, because their temporary blocks are better returned to the system.
    """
    if any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return any(mallopt(M_MMAP_THRESHOLD, size) for size in MAPPED_BYTES) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
