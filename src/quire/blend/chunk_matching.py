"""Which chunks stand where in a prompt. No torch.

Letters: T tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.contracts.store import ObjectKey


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows of a prompt that a chunk gives."""

    key: ObjectKey
    start: int
    """The first one."""
    stop: int
    """Behind the last one."""
    skip: int
    """Rows of the chunk before those."""


class KnownChunks:
    """The chunks under one parent, as they were when this was made. Any thread may use it."""

    def __init__(self, parent: bytes, keys: Collection[ObjectKey]) -> None:
        raise NotImplementedError

    def match(self, ids: NDArray[np.int64], indices: Sequence[int], begin: int, end: int) -> list[Placement]:
        """Return, in order, what gives rows ``begin..end - 1`` of a prompt ``ids [T]``.

        Segments, which ``indices`` begin, are looked up first, as wholes or as ``cuts`` cuts them.
        Of what they leave, chunks that stand anywhere give the set of rows that is largest. Of
        equal sets it is that with the earlier chunk where they first differ, then the longer one. A
        chunk counts with those of its rows that are wanted and free, ``LEAST`` or more.
        """
        raise NotImplementedError
