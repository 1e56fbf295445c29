"""A recurrence plan as arrays for programs: chunks of long chains, and single rows.

An entry is run by one program for each head and some columns of the state. The state after a chunk
or row stays in the program. A chunk ends at each wanted state. Entries with short chunks run row by
row, and so do trees: a state from which a row other than the next one starts is kept in memory.

Letters: T rows; N chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.contracts.recurrence import RecurrencePlan
from quire.kernels.recurrence.groups import beginnings

WALKED = 8
"""Mean length of an entry's chunks up to which it runs row by row."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Tables of int32, for the entries that have rows."""

    chunks: NDArray[np.int32]
    """``[N, 3]``: first row, number of rows, wanted state after the last or -1."""
    chunked: NDArray[np.int32]
    """``[.., 3]``: first chunk, number of chunks and given state of an entry."""
    rows: NDArray[np.int32]
    """``[T, 3]``: source of the state before a row (a given state; -1: the row before; -2 - i: kept
    state i), the wanted state after it or -1, the kept state or -1."""
    walked: NDArray[np.int32]
    """``[.., 3]``: first row and number of rows of an entry, and 0."""
    kept: int
    """Number of kept states."""


def steps_of(plan: RecurrencePlan, longest: int) -> Steps:
    """Return the steps of a plan with at least one row, in chunks of at most ``longest`` rows."""
    total, starts, counts = plan.num_rows, plan.starts[:-1], np.diff(plan.starts)
    rows = np.arange(total)
    entry = np.repeat(np.arange(len(counts)), counts)
    begins = beginnings(plan, longest)
    pieces = np.bincount(entry[begins], minlength=len(counts))
    jumps = plan.parents != rows - 1
    jumps[starts[counts > 0]] = False
    walks = (counts <= WALKED * pieces) | (np.bincount(entry[jumps], minlength=len(counts)) > 0)
    kept = np.unique(plan.parents[jumps & (plan.parents >= 0)])
    source = np.where(jumps, -2 - np.searchsorted(kept, plan.parents), -1)
    places = np.full((2, total), -1)
    places[0, plan.wanted], places[1, kept] = np.arange(len(plan.wanted)), np.arange(len(kept))
    table = np.stack((np.where(plan.parents < 0, plan.given, source), *places), 1)

    first = np.flatnonzero(begins)
    last = np.append(first[1:], total) - 1
    chunks = np.stack((first, last - first + 1, places[0, last]), 1)[~walks[entry[first]]]
    pieces[walks] = 0
    chosen, walked = np.flatnonzero(pieces), np.flatnonzero(walks & (counts > 0))
    chunked = np.stack(((np.cumsum(pieces) - pieces)[chosen], pieces[chosen], plan.given[starts[chosen]]), 1)
    walking = np.stack((starts[walked], counts[walked], np.zeros_like(walked)), 1)
    chunks, chunked, table, walking = (x.astype(np.int32) for x in (chunks, chunked, table, walking))
    return Steps(chunks, chunked, table, walking, len(kept))
