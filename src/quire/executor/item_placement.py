"""Placement of checked items: their caches, and the rows that a transaction extends.

A fresh cache may begin as a fork of a live one, of which a prompt shares the beginning. Only live
caches count, so nothing is kept for sharing alone. A match may be partial. A placeholder is
recorded by its data, and never equals the id of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.base.token_history import Ids, common_prefix
from quire.base.types import BASE, LogitsWanted
from quire.executor.arguments import CallItem
from quire.executor.cache import KVCache
from quire.executor.cache_pool import CachePool
from quire.executor.forward_packing import LOGITS_ONLY
from quire.executor.row import Row
from quire.executor.row_extension import RowExtension, extensions


def place(pool: CachePool, item: CallItem, wanted: LogitsWanted, *, share: bool) -> tuple[CallItem, KVCache]:
    """Return the part of a prompt that must run, and its cache. ``share``: a fresh cache may start
    from the longest prefix of the prompt in live caches."""
    if item.cache is not None:
        return item, item.cache
    limits = [0] * item.batch_size
    if share and wanted != "all" and item.asked == LOGITS_ONLY:
        limits = [ids.size - (wanted == "last") for ids in item.tokens]
    rows, starts = _shared_rows(pool, item.tokens, limits, item.adapter, item.positions)
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


def _shared_rows(
    pool: CachePool,
    tokens: Sequence[Ids],
    limits: Sequence[int],
    adapter: int | None,
    positions: Sequence[Ids | None],
) -> tuple[list[Row], tuple[int, ...]]:
    """Return a row for each prompt of ``tokens``, and the number of its first tokens that the row
    holds.

    The number is at most ``limits[i]``. The shared tokens ran under ``adapter`` at ``positions[i]``
    (None: at their indices). Call it under the lock.
    """
    rows: list[Row] = []
    lengths: list[int] = []
    for ids, limit, given in zip(tokens, limits, positions, strict=True):
        places = np.arange(limit) if given is None else given[:limit]
        parent, length = _longest(pool, ids[:limit], adapter, places) if limit else (None, 0)
        if parent is None:
            rows.append(Row(seq=pool.add(1)[0], window=pool.facts.row_window))
        else:
            rows.append(parent.like(pool.fork_of(parent.seq, length), length))
        lengths.append(length)
    return rows, tuple(lengths)


def _longest(pool: CachePool, ids: Ids, adapter: int | None, places: Ids) -> tuple[Row | None, int]:
    """Return the row of a live cache with the longest possible fork, and the fork's length. Its
    tokens equal ``ids`` up to there, ran under ``adapter`` and are at ``places``."""
    best: tuple[Row | None, int] = (None, 0)
    wanted = BASE.then(0, adapter)
    for cache in list(pool.caches.values()):
        for row in cache.rows:
            if row.window != pool.facts.row_window:
                continue
            common = common_prefix(row.tokens.ids[: row.origin.shareable(len(row.tokens))], ids)
            common = row.runs.agreed(wanted, common)
            stood = np.arange(common) if row.positions is None else row.positions.ids[:common]
            common = common_prefix(stood, places[:common])
            if common > best[1]:
                cache.commit_chains()
                length = pool.state.nearest_reachable(row.seq, common)
                if length > best[1]:
                    best = (row, length)
    return best
