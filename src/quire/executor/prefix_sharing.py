"""Sharing of prompt prefixes: a fresh cache begins as a fork of a live one.

Only live caches count, so nothing is kept for sharing alone. A match may be partial. A placeholder
is recorded by its data, and never equals the id of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.base.token_history import Ids, common_prefix
from quire.base.types import BASE
from quire.executor.cache_pool import CachePool
from quire.executor.row import Row


def shared_rows(
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
