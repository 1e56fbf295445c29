"""Tiles of work for attention over pages on a GPU: rows that read the same keys together.

A *tile* is some neighbouring rows of one entry. Its range of keys is cut into *items* at fixed
addresses. An item is the work of one program for each KV head. A tile with one item writes its
result; a tile with several writes attention states, which a second pass merges in order. Everything
is arrays: no step of Python depends on the number of rows.

Letters: T rows of the batch; B entries; N tiles; I items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.contracts.attention import ForwardPlan
from quire.kernels.attention.visibility import VisibleKeys

Ints = NDArray[np.int64]

ITEM_FIELDS = (
    "row", "rows", "table", "first", "stop", "plain_first", "plain_stop",
    "state", "bits", "bits_stride", "bits_first", "bits_stop",
)  # fmt: skip
"""Fields of an item. It has the keys ``first .. stop - 1`` and ``rows`` rows from ``row`` on, which
all see ``plain_first .. plain_stop - 1``. ``table``: start of the entry's pages, or the slot of its
address 0. ``state``: the first of ``rows`` states, or -1 to write the result. ``bits``: the byte
with the first row's bit for address ``bits_first``."""
MERGE_FIELDS = ("row", "state", "step", "count")
"""Fields of a merged row: its states are ``state + step * i`` for ``i < count``."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The visible keys of a batch's rows in one part of the plan, as arrays for programs."""

    low_T: Ints
    high_T: Ints
    bits: NDArray[np.uint8]
    """The bits of all rows with a rule, row after row; bit 0 of a byte is the first key."""
    first_B: Ints
    """``bits_first`` of each entry; 0 without a rule."""
    stop_B: Ints
    byte_B: Ints
    stride_B: Ints


def sight_of(plan: ForwardPlan, part: VisibleKeys) -> Sight:
    """Return a part's ranges and bits."""
    first, stop, byte, stride = (np.zeros(plan.num_entries, dtype=np.int64) for _ in range(4))
    packed: list[NDArray[np.uint8]] = []
    used = 0
    for entry, columns in part.columns.items():
        bits = np.packbits(columns.visible, axis=1, bitorder="little")
        first[entry], stop[entry], byte[entry], stride[entry] = columns.first, columns.stop, used, bits.shape[1]
        used += bits.size
        packed.append(bits.ravel())
    return Sight(
        part.low, part.high, np.concatenate(packed) if packed else np.zeros(0, np.uint8), first, stop, byte, stride
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """Runs of rows that programs process together, in order of rows."""

    entry_N: Ints
    row_N: Ints
    rows_N: Ints

    def chosen(self, which_N: NDArray[np.bool_]) -> Tiles:
        """Return the tiles selected by a mask."""
        return Tiles(self.entry_N[which_N], self.row_N[which_N], self.rows_N[which_N])


def tiles_of(plan: ForwardPlan, most_B: Ints) -> Tiles:
    """Cut each entry's rows into tiles of at most ``most_B`` rows."""
    number_B = -(-plan.counts // most_B)
    entry_N = np.repeat(np.arange(plan.num_entries), number_B)
    before_B = np.cumsum(number_B) - number_B
    offset_N = (np.arange(entry_N.size) - before_B[entry_N]) * most_B[entry_N]
    rows_N = np.minimum(most_B[entry_N], plan.counts[entry_N] - offset_N)
    return Tiles(entry_N, plan.starts[entry_N] + offset_N, rows_N)


@dataclass(frozen=True, slots=True)
class Reach:
    """The addresses that tiles see in one part."""

    first_N: Ints
    stop_N: Ints
    """Not above ``first``: the tile sees nothing."""
    plain_first_N: Ints
    plain_stop_N: Ints
    """All rows see all keys from ``plain_first`` to here, if ``plain_first`` is below."""
    bits_N: Ints
    """The byte of the first row's bits."""

    @property
    def keys_N(self) -> Ints:
        """Number of addresses that each tile spans."""
        keys_N: Ints = np.maximum(self.stop_N - self.first_N, 0)
        return keys_N

    def chosen(self, which_N: NDArray[np.bool_]) -> Reach:
        """Return the entries of the tiles selected by a mask."""
        return Reach(*(getattr(self, name)[which_N] for name in self.__slots__))


def reach_of(plan: ForwardPlan, tiles: Tiles, sight: Sight) -> Reach:
    """Return the addresses that tiles see. The tiles hold all rows of the batch, in order."""
    nothing_T = sight.low_T >= sight.high_T
    low_T = np.where(nothing_T, np.iinfo(np.int32).max, sight.low_T)
    high_T = np.where(nothing_T, 0, sight.high_T)
    first_N, stop_N = np.minimum.reduceat(low_T, tiles.row_N), np.maximum.reduceat(high_T, tiles.row_N)
    plain_first_N = np.maximum.reduceat(low_T, tiles.row_N)
    plain_stop_N = np.minimum.reduceat(high_T, tiles.row_N)
    bits_first_N, bits_stop_N = sight.first_B[tiles.entry_N], sight.stop_B[tiles.entry_N]
    ruled_N = bits_stop_N > bits_first_N
    first_N = np.where(ruled_N, np.minimum(first_N, bits_first_N), first_N)
    stop_N = np.where(ruled_N, np.maximum(stop_N, bits_stop_N), stop_N)
    offset_N = tiles.row_N - plan.starts[tiles.entry_N]
    bits_N = sight.byte_B[tiles.entry_N] + offset_N * sight.stride_B[tiles.entry_N]
    return Reach(first_N, stop_N, plain_first_N, plain_stop_N, bits_N)


def split_size(keys: int, heads: int, programs: int, least: int) -> int:
    """Return the number of keys of an item, so that about ``programs`` programs share ``keys`` keys
    of ``heads`` heads: ``least`` times a power of two."""
    wanted, size = -(-keys * heads // max(1, programs)), least
    while size < wanted:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class Work:
    """The items of some tiles, and the merges of their states."""

    items: tuple[NDArray[np.int32], ...]
    """``[I, ITEM_FIELDS]`` of each part, the longest first."""
    merges: NDArray[np.int32]
    """``[rows, MERGE_FIELDS]``: rows of tiles with several items or none."""
    num_states: int


def work_of(
    tiles: Tiles, parts: Sequence[tuple[Sight, Reach]], table_B: Ints, size: int, block: int, used: int
) -> Work:
    """Cut the keys of tiles at multiples of ``size``, a multiple of ``block``, the number of keys
    in a program's step. States are numbered from ``used``."""
    begins = [reach.first_N // size for _, reach in parts]
    numbers = [
        np.where(reach.keys_N > 0, -(-reach.stop_N // size) - begin_N, 0)
        for (_, reach), begin_N in zip(parts, begins, strict=True)
    ]
    number_N = np.sum(numbers, axis=0)
    need_N = np.where(number_N > 1, number_N * tiles.rows_N, 0)
    state_N = np.cumsum(need_N) - need_N + used
    items, before_N = [], np.zeros_like(number_N)
    for (sight, reach), begin_N, part_N in zip(parts, begins, numbers, strict=True):
        tile = np.repeat(np.arange(part_N.size), part_N)
        index = np.arange(tile.size) - (np.cumsum(part_N) - part_N)[tile]
        entry, cut = tiles.entry_N[tile], (index + begin_N[tile]) * size
        first, stop = np.maximum(reach.first_N[tile], cut), np.minimum(reach.stop_N[tile], cut + size)
        plain_first = -(-np.maximum(reach.plain_first_N[tile], first) // block) * block
        plain_stop = np.minimum(reach.plain_stop_N[tile], stop) // block * block
        some = plain_first < plain_stop
        nowhere = first // block * block
        fields = (
            tiles.row_N[tile],
            tiles.rows_N[tile],
            table_B[entry],
            first,
            stop,
            np.where(some, plain_first, nowhere),
            np.where(some, plain_stop, nowhere),
            np.where(number_N[tile] > 1, state_N[tile] + (before_N[tile] + index) * tiles.rows_N[tile], -1),
            reach.bits_N[tile],
            sight.stride_B[entry],
            sight.first_B[entry],
            sight.stop_B[entry],
        )
        order = np.argsort(first - stop, kind="stable")
        items.append(np.stack(fields, axis=1)[order].astype(np.int32))
        before_N = before_N + part_N
    return Work(tuple(items), _merges(tiles, state_N, number_N), int(need_N.sum()))


def _merges(tiles: Tiles, state_N: Ints, number_N: Ints) -> NDArray[np.int32]:
    merged = np.flatnonzero(number_N != 1)
    tile = np.repeat(merged, tiles.rows_N[merged])
    index = np.arange(tile.size) - (np.cumsum(tiles.rows_N[merged]) - tiles.rows_N[merged]).repeat(tiles.rows_N[merged])
    fields = (tiles.row_N[tile] + index, state_N[tile] + index, tiles.rows_N[tile], number_N[tile])
    return np.stack(fields, axis=1).astype(np.int32)
