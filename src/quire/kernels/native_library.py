"""The C++ kernels, ``cpu/*.cpp``: one library, called through ctypes.

It is compiled on installation if there is a C++ compiler. Without it every kernel's PyTorch form
runs. It uses no header of Python or PyTorch, so that one build serves every version of these. Its
parallel regions run on the threads of PyTorch's OpenMP runtime: a second pool of threads would
compete with it for the cores.
"""

from __future__ import annotations

import ctypes
import logging
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire.kernels.cpu_process import openmp_function

logger = logging.getLogger("quire")

VERSION = 14
"""Version of all structures and calls; ``cpu/version.cpp`` has the same number."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library."""

    library: ctypes.CDLL
    parallel: int | None
    """Address of GOMP_parallel in PyTorch's OpenMP runtime; None: calls run on one thread."""

    def function(self, name: str, *arguments: type[Any], result: type[Any] | None = None) -> Any:
        """Return a function of the library, with the types of its arguments and of its result."""
        found = getattr(self.library, name)
        found.argtypes, found.restype = list(arguments), result
        return found


@cache
def native_library() -> NativeLibrary | None:
    """Return the library; None if there is none (``native_problem``)."""
    if isinstance(found := _load(), str):
        return None
    parallel = openmp_function("GOMP_parallel")
    if parallel is None:
        logger.warning("the C++ kernels run on one thread: PyTorch has no OpenMP runtime with GOMP_parallel")
    return NativeLibrary(found, None if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value)


def native_problem() -> str:
    """Return the reason why there is no library; "" if there is one."""
    found = _load()
    return found if isinstance(found, str) else ""


@cache
def _load() -> ctypes.CDLL | str:
    path = Path(__file__).parent / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        return "the C++ kernels were not built: there was no C++ compiler (GCC 12 or later, or clang) when Quire was installed"
    try:
        library = ctypes.CDLL(str(path))
        version = library.quire_version()
    except (OSError, AttributeError) as error:
        return f"the C++ kernels cannot be loaded: {error}"
    if version != VERSION:
        return f"the C++ kernels are of version {version}, version {VERSION} is needed: install Quire again"
    return library
