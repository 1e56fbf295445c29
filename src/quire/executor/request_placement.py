"""Where checked requests go: their caches, and the rows that a transaction extends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.branches.cache_pool import CachePool
from quire.branches.forward_packing import LOGITS_ONLY
from quire.branches.prefix_sharing import shared_rows
from quire.branches.row_extension import Extension, extensions
from quire.executor.arguments import Request
from quire.executor.cache import KVCache
from quire.types import LogitsWanted


def place(pool: CachePool, request: Request, wanted: LogitsWanted, *, share: bool) -> tuple[Request, KVCache]:
    """Return what of a prompt must run, and the cache that it goes to. ``share``: a fresh cache may
    begin with what live caches hold of the prompt."""
    if request.cache is not None:
        return request, request.cache
    limits = [0] * request.batch_size
    if share and wanted != "all" and request.asked == LOGITS_ONLY:
        limits = [ids.size - (wanted == "last") for ids in request.tokens]
    rows, starts = shared_rows(pool, request.tokens, limits, request.adapter, request.positions)
    cache = KVCache(pool, rows, capacity=pool.facts.max_model_len, dynamic=False)
    tokens = tuple(ids[start:] for ids, start in zip(request.tokens, starts, strict=True))
    positions = tuple(
        None if given is None else given[start:] for given, start in zip(request.positions, starts, strict=True)
    )
    return replace(request, cache=cache, starts=starts, tokens=tokens, positions=positions), cache


def rows_to_extend(placed: Sequence[tuple[Request, KVCache]], verb: str) -> list[Extension]:
    """Return the rows of all requests, to be extended; errors name one of several requests."""
    return [
        part
        for index, (request, cache) in enumerate(placed)
        for part in extensions(
            cache,
            request.starts,
            [ids.size for ids in request.tokens],
            f"{verb} item {index}" if len(placed) > 1 else "",
            request.adapter,
            request.positions,
        )
    ]
