"""Placement of checked items: their caches, and the rows that a transaction extends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.base.types import LogitsWanted
from quire.executor.arguments import CallItem
from quire.executor.cache import KVCache
from quire.executor.cache_pool import CachePool
from quire.executor.forward_packing import LOGITS_ONLY
from quire.executor.prefix_sharing import shared_rows
from quire.executor.row_extension import RowExtension, extensions


def place(pool: CachePool, item: CallItem, wanted: LogitsWanted, *, share: bool) -> tuple[CallItem, KVCache]:
    """Return the part of a prompt that must run, and its cache. ``share``: a fresh cache may start
    from the longest prefix of the prompt in live caches."""
    if item.cache is not None:
        return item, item.cache
    limits = [0] * item.batch_size
    if share and wanted != "all" and item.asked == LOGITS_ONLY:
        limits = [ids.size - (wanted == "last") for ids in item.tokens]
    rows, starts = shared_rows(pool, item.tokens, limits, item.adapter, item.positions)
    cache = KVCache(pool, rows, capacity=pool.facts.max_model_len, dynamic=False)
    tokens = tuple(ids[start:] for ids, start in zip(item.tokens, starts, strict=True))
    positions = tuple(
        None if given is None else given[start:] for given, start in zip(item.positions, starts, strict=True)
    )
    return replace(item, cache=cache, starts=starts, tokens=tokens, positions=positions), cache


def rows_to_extend(placed: Sequence[tuple[CallItem, KVCache]], verb: str) -> list[RowExtension]:
    """Return the extensions of the rows of all items. With several items, errors name the item."""
    return [
        part
        for index, (item, cache) in enumerate(placed)
        for part in extensions(
            cache,
            item.starts,
            [ids.size for ids in item.tokens],
            f"{verb} item {index}" if len(placed) > 1 else "",
            item.adapter,
            item.positions,
        )
    ]
