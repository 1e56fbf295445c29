"""Pieces of a batch, one kernel call each, with the positions of the batch's rows and keys in them.

Letters: T new tokens; S slots; P page size; b entries of a group; n rows, m keys, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.attention import ForwardPlan
from quire.contracts.kv_format import PlainRows
from quire.kernels.attention.lse_attention import is_head_of
from quire.kernels.attention.visibility import VisibleKeys

MAX_WASTE = 1.25
"""Largest ratio of computed to necessary keys of a padded group."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows of a group in the batch: a slice if they are neighbours, else an index."""

    first: int
    stop: int
    index: Tensor | None

    def take(self, x_THD: Tensor) -> Tensor:
        return x_THD[self.first : self.stop] if self.index is None else x_THD.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class Keys:
    """m keys of each of b entries: pages or slots to gather, or one run of slots."""

    b: int
    m: int
    pages: Tensor | None
    """int64 ``[b * pages]``; None: the slots ``first_slot..first_slot + m - 1``."""
    page_size: int
    """Keys of a page; 1 if ``pages`` are slots."""
    first_slot: int

    def gather(self, pool: PlainRows) -> tuple[Tensor, Tensor]:
        """Return K and V, ``[b, Hkv, m, D]`` (strided). V stays a view of K's first columns."""
        k = self._rows(pool.k)
        if is_head_of(pool.v, pool.k):
            return k, k[..., : pool.v.shape[-1]]
        return k, self._rows(pool.v)

    def _rows(self, x_SHD: Tensor) -> Tensor:
        if self.pages is None:
            return x_SHD[self.first_slot : self.first_slot + self.m].unsqueeze(0).transpose(1, 2)
        heads, dim = x_SHD.shape[1:]
        shape = (-1, self.page_size * heads * dim) if x_SHD.is_contiguous() else (-1, self.page_size, heads, dim)
        rows = x_SHD.view(shape).index_select(0, self.pages)
        return rows.view(self.b, -1, heads, dim)[:, : self.m].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class CausalGroup:
    """b prompts without a past, padded to n tokens."""

    b: int
    n: int
    rows: BatchRows
    """b * n rows; padding repeats a row of the same entry."""
    real: Tensor | None
    """Indices of the b * n rows without padding; None: all."""
    target: BatchRows


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """b entries of up to n tokens over m keys, given by ``keys``."""

    b: int
    n: int
    rows: BatchRows
    real: Tensor | None
    target: BatchRows
    keys: Keys
    mask: Tensor | None
    """``[b, 1, n, m]`` in the dtype of the queries, 0 or -inf."""


@dataclass(frozen=True, slots=True)
class LongChunk:
    """One entry of many new tokens after a past."""

    start: int
    stop: int
    keys: Keys


def waste_bounded(entries: list[int], cost: NDArray[np.int64], slack: int) -> list[list[int]]:
    """Cut entries, sorted by cost, into groups whose padding stays below ``MAX_WASTE``."""
    groups: list[list[int]] = []
    order = sorted(entries, key=lambda entry: -int(cost[entry]))
    total = 0
    for entry in order:
        total += int(cost[entry])
        top = int(cost[groups[-1][0]]) if groups else 0
        if groups and top * (len(groups[-1]) + 1) <= MAX_WASTE * total + slack:
            groups[-1].append(entry)
        else:
            groups.append([entry])
            total = int(cost[entry])
    return [sorted(group) for group in groups]


def is_run(table: NDArray[np.int32]) -> bool:
    """Return True if the pages are consecutive and ascending, none of them null."""
    size, first = table.size, int(table[0])
    return first >= 0 and (size == 1 or (int(table[-1]) - first == size - 1 and bool((np.diff(table) == 1).all())))


def pages_of(plan: ForwardPlan, entry: int, first: int, stop: int) -> NDArray[np.int32]:
    """Return the pages of the addresses ``first..stop - 1``, at least one."""
    return plan.tables[entry][first // plan.page_size : -(-stop // plan.page_size)]


def keys_of(tables: Sequence[NDArray[np.int32]], plan: ForwardPlan, first: int, stop: int) -> tuple[Keys, int]:
    """Return the keys of these pages, padded to the widest table, and the number of keys omitted at
    the front. A single run of pages is used in place, from slot ``first`` to ``stop - 1``."""
    page_size = plan.page_size
    if len(tables) == 1 and is_run(tables[0]):
        offset = first % page_size
        return Keys(1, stop - first, None, page_size, int(tables[0][0]) * page_size + offset), offset
    width = max(table.size for table in tables)
    index = np.empty((len(tables), width), dtype=np.int64)
    for row, table in zip(index, tables, strict=True):
        row[: table.size] = table
        # Padding repeats rows of the same sequence: a NaN must not reach another one through the
        # mask.
        row[table.size :] = table[0]
    if index.min() < 0:
        # The same holds for an invisible page among visible ones.
        index = np.where(index < 0, index.max(1, keepdims=True), index)
    m = width * page_size if len(tables) > 1 else stop - first // page_size * page_size
    return Keys(len(tables), m, torch.from_numpy(index.ravel()).to(plan.device), page_size, 0), 0


def rows_of(group: list[int], plan: ForwardPlan, part: VisibleKeys) -> Keys:
    """Return the keys of each entry from its first visible key to its last, without other rows of
    pages. After a sink are rows that left the window: a weight of 0 would not hide a NaN there."""
    m = int((part.stop[group] - part.first[group]).max())
    index = np.empty((len(group), m), dtype=np.int64)
    for row, entry in zip(index, group, strict=True):
        address = np.arange(part.first[entry], part.stop[entry])
        pages = plan.tables[entry][address // plan.page_size].astype(np.int64)
        slots = pages * plan.page_size + address % plan.page_size
        # As in keys_of: padding and invisible pages repeat visible rows of the same sequence.
        row[:] = slots[0]
        row[: slots.size] = np.where(pages < 0, slots[0], slots)
    return Keys(len(group), m, torch.from_numpy(index.ravel()).to(plan.device), 1, 0)


def padded_rows(group: list[int], n: int, plan: ForwardPlan) -> tuple[BatchRows, Tensor | None, BatchRows]:
    """Return padded rows, the indices of the real rows, and the targets of the real rows."""
    counts, starts = plan.counts[group], plan.starts[group]
    neighbours = group == list(range(group[0], group[0] + len(group)))
    first, stop = int(starts[0]), int(starts[-1] + counts[-1])
    if neighbours and (counts == n).all():
        rows = BatchRows(first, stop, None)
        return rows, None, rows
    column = np.arange(n)
    padded = row_numbers(group, n, plan)
    real = np.flatnonzero((column < counts[:, None]).ravel())
    rows = BatchRows(0, 0, torch.from_numpy(padded.ravel()).to(plan.device))
    if neighbours:
        target = BatchRows(first, stop, None)
    else:
        target = BatchRows(0, 0, torch.from_numpy(padded.ravel()[real]).to(plan.device))
    exact = real.size == padded.size
    return rows, None if exact else torch.from_numpy(real).to(plan.device), target


def row_numbers(group: list[int], n: int, plan: ForwardPlan) -> NDArray[np.int64]:
    """Return ``[b, n]``: rows in the batch; a shorter entry repeats its last."""
    numbers: NDArray[np.int64] = plan.starts[group][:, None] + np.minimum(np.arange(n), plan.counts[group][:, None] - 1)
    return numbers


def causal_group(group: list[int], plan: ForwardPlan) -> CausalGroup:
    n = int(plan.counts[group].max())
    return CausalGroup(len(group), n, *padded_rows(group, n, plan))


def paged_group(
    group: list[int], tables: list[NDArray[np.int32]], plan: ForwardPlan, part: VisibleKeys, dtype: torch.dtype
) -> PagedGroup:
    """Group entries with visible keys; ``tables``: pages from the first visible to the last."""
    n = int(plan.counts[group].max())
    if part.sink and len(group) > 1:
        keys, base = rows_of(group, plan, part), part.first[group]
    else:
        keys, offset = keys_of(tables, plan, int(part.first[group[0]]), int(part.stop[group[0]]))
        base = part.first[group] // plan.page_size * plan.page_size + offset
    rows = padded_rows(group, n, plan)
    ruled = [(place, entry) for place, entry in enumerate(group) if entry in part.columns]
    if n == 1 and keys.pages is None and not ruled:
        return PagedGroup(1, 1, *rows, keys, None)
    numbers = row_numbers(group, n, plan)
    low, high = part.low[numbers] - base[:, None], part.high[numbers] - base[:, None]
    mask = range_mask(low, high, keys.m, dtype, plan.device).unsqueeze(1)
    for place, entry in ruled:
        columns = part.columns[entry]
        visible = columns.visible[np.minimum(np.arange(n), columns.visible.shape[0] - 1)]
        shift = int(base[place])
        mask[place, 0, :, columns.first - shift : columns.stop - shift].masked_fill_(
            torch.from_numpy(visible).to(plan.device), 0.0
        )
    return PagedGroup(len(group), n, *rows, keys, mask)


def range_mask(
    low: NDArray[np.int64], high: NDArray[np.int64], m: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return ``[..., m]``: 0 for the keys ``low <= key < high``, -inf for others."""
    key = torch.arange(m, device=device)
    hidden = key >= torch.from_numpy(high).to(device).unsqueeze(-1)
    if low.max() > 0:
        hidden |= key < torch.from_numpy(low).to(device).unsqueeze(-1)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
