"""Copies of checksummed rows into a pool in host memory, in C++. The reference is the code of
``quire.kv`` without the library: each piece's checksum, then its copy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.native_library import NativeLibrary, native_library

SHORTEST = 241
"""Least bytes of a piece: shorter ones have other forms of checksum."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CheckedPieces:
    """Pieces in memory that the caller keeps alive, and their checksums (XXH3, 128 bits)."""

    places: Numbers
    """Addresses."""
    sizes: Numbers
    """In bytes, ``SHORTEST`` or more each."""
    digests: bytes
    """16 bytes for each, big-endian."""


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Runs of rows that are adjacent both in their piece and in the pool."""

    ends: Numbers
    """For each piece: the number of runs up to its last one."""
    rows: Numbers
    """For each run: its first row in its piece."""
    slots: Numbers
    """For each run: its first slot."""
    lengths: Numbers
    """Number of rows of each run."""

    @classmethod
    def of(cls, counts: Numbers, skipped: Numbers, slots_N: Numbers) -> RowRuns:
        """Cut rows into runs. Of each piece, ``counts`` rows after its first ``skipped`` ones are
        written to ``slots_N`` in order."""
        stops = np.cumsum(counts)
        begins = stops - counts
        first = np.unique(np.concatenate((begins, np.flatnonzero(np.diff(slots_N) != 1) + 1)))
        piece = np.searchsorted(stops, first, side="right")
        rows = first - begins[piece] + skipped[piece]
        return cls(np.searchsorted(first, stops), rows, slots_N[first], np.diff(first, append=slots_N.size))


class CheckedRows:
    """The C++ function with its argument types."""

    def __init__(self, library: NativeLibrary) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run = library.function("quire_checked_rows", number, *[pointer] * 8, number, result=number)

    def __call__(self, stored: CheckedPieces, runs: RowRuns, target_S: Tensor) -> int:
        """Write rows to slots of a contiguous tensor, piece by piece, each right after its checksum
        was verified. Return the number of the first damaged piece, or the number of pieces. The
        call releases the GIL. Nothing else is checked."""
        found: int = self._run(
            stored.places.size, stored.places.ctypes.data, stored.sizes.ctypes.data, stored.digests,
            runs.ends.ctypes.data, runs.rows.ctypes.data, runs.slots.ctypes.data, runs.lengths.ctypes.data,
            target_S.data_ptr(), target_S.stride(0) * target_S.itemsize,
        )  # fmt: skip
        return found


@cache
def checked_rows() -> CheckedRows | None:
    """Return the function; None without the library."""
    library = native_library()
    return None if library is None else CheckedRows(library)
