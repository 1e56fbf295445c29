"""From the bookkeeping of a forward to what attention backends plan with.

``Batch`` is what all layer classes have in common.

Letters: B entries; T new tokens of all entries; n new tokens of one entry; P page size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.base.uploads import uploaded
from quire.contracts.attention import ForwardPlan, KeyRule
from quire.kv.forward_need import ForwardNeed, pages_for, slots_of
from quire.kv.pages import PageIds
from quire.kv.trees import Tree
from quire.kv.windows import Window, visibility

Keys: TypeAlias = Literal["fused", "past", "own"]
"""Which keys: all stored ones, those from before this forward, the new tokens only."""
Masks = tuple[NDArray[np.bool_], ...]
"""One ``[n, keys]`` per entry."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan, and what the backend has made of it."""

    plan: ForwardPlan
    made: Any


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of a forward, or only the running ones (``narrowed``)."""

    counts: NDArray[np.int64]
    added: NDArray[np.int64]
    """``[B]``: tokens that the forward appends: ``counts``, and those that do not run"""
    bases: NDArray[np.int64]
    """``[B]``: committed tokens"""
    stored: NDArray[np.int64]
    """``[B]``: addresses in use before: committed tokens and uncommitted nodes"""
    starts: NDArray[np.int64]
    """``[B + 1]``: first row of each entry"""
    positions: NDArray[np.int64]
    """``[T]``"""
    evicted: NDArray[np.int64] | None
    """``[T]``: e of each query; None: nothing is evicted"""
    trees: tuple[Tree | None, ...]
    """All nodes of each entry, the new ones last; None for ordinary tokens"""
    windows: tuple[Window | None, ...]
    device: torch.device
    positions_T: Tensor
    """int64 on the device"""
    max_position: int

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])


def batch_of(need: ForwardNeed, device: torch.device, positions_T: Tensor | None = None) -> Batch:
    """Return the bookkeeping of the new tokens, as arrays. ``positions_T``: the tensor for their
    positions on the device; None: they are copied there."""
    counts = np.array(need.counts, dtype=np.int64)
    bases = np.array(need.lengths, dtype=np.int64)
    if sum(need.counts) == len(counts) and not any(need.trees):
        stored = positions = bases  # decodes
        starts = np.arange(len(counts) + 1)
    else:
        stored = np.array(need.stored, dtype=np.int64)
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(starts[-1]) + np.repeat(bases - starts[:-1], counts)
    for entry, tree in enumerate(need.trees):
        if tree is not None:
            positions[starts[entry] : starts[entry + 1]] = bases[entry] + tree.depths[-need.counts[entry] :]
    evicted: NDArray[np.int64] | None = None
    if any(need.windows):
        evicted = np.zeros_like(positions)
        for entry, window in enumerate(need.windows):
            if window is not None:
                rows = slice(int(starts[entry]), int(starts[entry + 1]))
                evicted[rows] = window.evicted(positions[rows], need.lengths[entry])
        if not evicted.any():
            evicted = None
    return Batch(
        counts,
        counts,
        bases,
        stored,
        starts,
        positions,
        evicted,
        need.trees,
        need.windows,
        device,
        uploaded(positions, device) if positions_T is None else positions_T,
        int(positions.max()),
    )


def narrowed(batch: Batch, rows: NDArray[np.int64]) -> Batch:
    """Return the batch of these rows only: ascending, some of each entry, without trees."""
    starts = np.searchsorted(rows, batch.starts)
    positions = batch.positions[rows]
    return replace(
        batch,
        counts=np.diff(starts),
        starts=starts,
        positions=positions,
        positions_T=uploaded(positions, batch.device),
        max_position=int(positions.max()),
        evicted=None if batch.evicted is None else batch.evicted[rows],
    )


def new_slots(batch: Batch, tables: Sequence[PageIds], page_size: int) -> NDArray[np.int64]:
    """Return ``[T]``: where the rows of the new tokens go."""
    if batch.num_tokens == len(tables):
        last = np.array([table.item(-1) for table in tables])
        return last * page_size + batch.stored % page_size
    parts = [
        slots_of(table, stored, stored + count, page_size)
        for table, stored, count in zip(tables, batch.stored.tolist(), batch.counts.tolist(), strict=True)
    ]
    return np.concatenate(parts)


def planned(
    batch: Batch, keys: Keys, tables: Sequence[PageIds], page_size: int, layer_window: int | None
) -> ForwardPlan:
    """Plan the new tokens over these keys. Of ``own`` the pool is the rows of all tokens that the
    forward appends, a page one row."""
    size, number, origins = page_size, batch.stored + batch.added, np.zeros(len(tables), dtype=np.int64)
    if keys == "past":
        number = batch.stored
        tables = [table[: pages_for(old, size)] for table, old in zip(tables, number.tolist(), strict=True)]
    elif keys == "own":
        size, number, origins = 1, batch.added, batch.bases
        rows = itertools.pairwise([0, *np.cumsum(batch.added).tolist()])
        tables = [np.arange(start, stop, dtype=np.int32) for start, stop in rows]
    rules: list[KeyRule | None] = [None] * len(batch.trees)
    for entry, tree in enumerate(batch.trees):
        if tree is None:
            continue
        base, count = int(batch.bases[entry]), int(batch.counts[entry])
        if keys == "past" and tree.size == count:
            continue
        part = {"fused": slice(None), "past": slice(-count), "own": slice(-count, None)}[keys]
        first = 0 if keys == "own" else base
        rules[entry] = KeyRule(first=first, allowed=tree.ancestry[-count:, part], positions=base + tree.depths[part])
    lows, sinks = _windows(batch, layer_window)
    return ForwardPlan(
        page_size=size,
        counts=batch.counts,
        keys=number,
        origins=origins,
        starts=batch.starts,
        tables=tuple(tables),
        positions=batch.positions,
        rules=tuple(rules),
        lows=lows,
        sinks=sinks,
        device=batch.device,
    )


def encoded(batch: Batch, tables: Sequence[PageIds], page_size: int, rows_B: NDArray[np.int64]) -> ForwardPlan:
    """Plan the new tokens over all rows of encoders, ``rows_B[i]`` of entry i.

    To a backend these are earlier keys: the queries are behind them at any positions of their own,
    and neither trees nor windows concern them.
    """
    behind = np.repeat(rows_B - batch.starts[:-1], batch.counts)
    return ForwardPlan(
        page_size=page_size,
        counts=batch.counts,
        keys=rows_B,
        origins=np.zeros_like(batch.counts),
        starts=batch.starts,
        tables=tuple(tables),
        positions=np.arange(batch.num_tokens) + behind,
        rules=(None,) * len(tables),
        device=batch.device,
    )


def masked(plan: ForwardPlan, masks: Masks) -> ForwardPlan:
    """Return the plan with the keys visible where the mask says so; windows still apply."""
    rules: list[KeyRule | None] = []
    for entry, mask in enumerate(masks):
        origin, keys = int(plan.origins[entry]), int(plan.keys[entry])
        if not keys:
            rules.append(None)
            continue
        positions = np.arange(origin, origin + keys, dtype=np.int64)
        tree = plan.rules[entry]
        if tree is not None:
            positions[tree.first :] = tree.positions
        rules.append(KeyRule(first=0, allowed=mask, positions=positions))
    return replace(plan, rules=tuple(rules))


def parts_of(masks: Masks, batch: Batch) -> tuple[Masks, Masks]:
    """Split masks over all keys into those over earlier keys and those over the new tokens."""
    stored = batch.stored.tolist()
    return (
        tuple(mask[:, :before] for mask, before in zip(masks, stored, strict=True)),
        tuple(mask[:, before:] for mask, before in zip(masks, stored, strict=True)),
    )


def check_mask(mask: Tensor, device: torch.device) -> None:
    """Raise ``InvalidArgument`` unless it is a flat bool tensor on such a device."""
    if mask.dtype != torch.bool or mask.dim() != 1 or mask.device.type != device.type:
        raise InvalidArgument(
            f"mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}; a flat bool tensor on {device} is needed"
        )


def cut_mask(mask: Tensor, batch: Batch, *, own: bool = False) -> Masks:
    """Cut a flat mask, row-major ``[n, keys]`` (``own``: new keys only), into one per entry."""
    counts = batch.counts.tolist()
    keys = counts if own else (batch.stored + batch.counts).tolist()
    sizes = [count * width for count, width in zip(counts, keys, strict=True)]
    if mask.numel() != sum(sizes):
        raise InvalidArgument(
            f"mask has {mask.numel()} elements; {sum(sizes)} are needed, for {counts} new tokens over {keys} keys"
        )
    flat = mask.detach().cpu().numpy()
    ends = np.cumsum(sizes).tolist()
    return tuple(
        flat[end - size : end].reshape(count, width)
        for end, size, count, width in zip(ends, sizes, counts, keys, strict=True)
    )


def _windows(batch: Batch, layer_window: int | None) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return the lowest visible position of each row and the range of its sink; None: no limit."""
    if batch.evicted is None:
        if layer_window is None or batch.max_position < layer_window:
            return None, None
        return np.maximum(batch.positions + 1 - layer_window, 0), None
    lows = np.zeros_like(batch.positions)
    sinks = np.zeros((batch.num_tokens, 2), dtype=np.int64)
    for entry, window in enumerate(batch.windows):
        rows = slice(int(batch.starts[entry]), int(batch.starts[entry + 1]))
        seen = visibility(batch.positions[rows], int(batch.bases[entry]), window, layer_window)
        lows[rows] = seen.lows_T
        if seen.sinks_T2 is not None:
            sinks[rows] = seen.sinks_T2
    return lows, sinks if bool((sinks[:, 0] < sinks[:, 1]).any()) else None


def compacted(plan: ForwardPlan) -> tuple[ForwardPlan, NDArray[np.int64], NDArray[np.int64]]:
    """Return the plan over a pool of this batch's pages only, in which every slot has one position;
    the slots of the whole pool that its slots stand for, and their positions. Entries share a page
    only where they agree on the positions of its rows."""
    size = plan.page_size
    pages = np.unique(np.concatenate([*plan.tables, np.empty(0, dtype=np.int32)]))
    pages = pages[pages >= 0]
    positions = np.zeros((pages.size, size), dtype=np.int64)
    tables = []
    for entry, table in enumerate(plan.tables):
        place = np.where(table >= 0, np.searchsorted(pages, table), -1).astype(np.int32)
        addresses = np.arange(table.size * size) + int(plan.origins[entry])
        rule = plan.rules[entry]
        if rule is not None:
            addresses[rule.first : rule.first + rule.positions.size] = rule.positions
        held = place >= 0
        positions[place[held]] = addresses.reshape(-1, size)[held]
        tables.append(place)
    slots = (pages.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
    return replace(plan, tables=tuple(tables)), slots, positions.ravel()
