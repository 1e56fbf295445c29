"""Compressed position maps: the slots of a receiver for the tokens that it is sent. No torch.

A map is a flat list of integers ``[num_runs, begin_1, len_1, begin_2, len_2, ...]``. Run r stands
for the slots ``begin_r``, ``begin_r + 1`` and so on, with the receiver's page size; ``begin`` -1:
``len`` tokens are not stored. Maps of several layer classes follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument
from quire.kv.forward_need import breaks_of
from quire.kv.sequences import check_integer

UNSTORED = -1
"""The slot of a token that no later query sees."""
LONGEST = 1 << 24
"""Tokens of a map at most, so that a damaged one takes no memory."""


def runs_of(slots: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the runs (begin, length) of slots; tokens that are not stored are runs, too."""
    if not slots.size:
        return []
    # Numbers in a row, which none of a slot follows, stand for tokens that are not stored.
    numbers = np.where(slots == UNSTORED, np.arange(-2 * slots.size, -slots.size), slots)
    ends = [0, *breaks_of(numbers).tolist(), slots.size]
    return [(int(slots[low]), high - low) for low, high in pairwise(ends)]


def slots_of_runs(runs: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the slots of such runs."""
    parts = [
        np.full(count, UNSTORED, dtype=np.int64) if begin == UNSTORED else np.arange(begin, begin + count)
        for begin, count in runs
    ]
    return np.concatenate([*parts, np.empty(0, dtype=np.int64)])


def compressed(classes: Sequence[NDArray[np.int64]]) -> tuple[int, ...]:
    """Return the map of the slots of each class."""
    found: list[int] = []
    for slots in classes:
        runs = runs_of(slots)
        found += [len(runs), *(number for run in runs for number in run)]
    return tuple(found)


def expanded(given: Sequence[int], classes: int, verb: str) -> list[NDArray[np.int64]]:
    """Return the slots of each class; ``InvalidArgument`` for a malformed map."""
    numbers = [check_integer(number, f"{verb}: an entry of the map", UNSTORED) for number in given]
    found: list[NDArray[np.int64]] = []
    place = 0
    for index in range(classes):
        count = numbers[place] if place < len(numbers) else 0
        pairs = numbers[place + 1 : place + 1 + 2 * count]
        runs = list(zip(pairs[::2], pairs[1::2], strict=False))
        if (
            count < 1
            or len(pairs) != 2 * count
            or min(lengths := [length for _, length in runs]) < 1
            or sum(lengths) > LONGEST
        ):
            raise InvalidArgument(
                f"{verb}: the map of {len(numbers)} integers is malformed in class {index}; [num_runs, begin, length, ...] "
                f"of each of {classes} classes is expected, with lengths from 1 on and {LONGEST} tokens at most"
            )
        found.append(slots_of_runs(runs))
        place += 1 + 2 * count
    if place != len(numbers):
        raise InvalidArgument(f"{verb}: the map has {len(numbers)} integers, {place} for {classes} classes expected")
    return found
