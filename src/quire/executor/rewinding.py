"""Cutting and copying caches at any position, with the replay that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from quire.base.token_history import Ids
from quire.base.types import AdapterRuns
from quire.executor.cache_rows import CacheRows
from quire.executor.row_extension import extensions, packed
from quire.executor.running_calls import Operation
from quire.executor.transaction import Transaction

C = TypeVar("C", bound=CacheRows)


def truncate(cache: CacheRows, lengths: Sequence[int], operation: Operation) -> None:
    """Keep the first ``lengths[i]`` tokens of row i. Call it under the lock.

    Tokens to replay are run before it returns, so a row's state is always complete. On an error no
    row is changed. A cut inside a verified chain runs nothing.
    """
    if tuple(lengths) == cache.lengths:
        return
    row = cache.rows[0]
    if row.chain is not None and row.chain.start <= lengths[0]:
        # A chain belongs to a cache of one row.
        cache.cut_chain(row, lengths[0])
        return
    cache.commit_chains()
    rows = zip(cache.rows, lengths, strict=True)
    if all(cache.pool.replay_start(row, length, operation.verb) == length for row, length in rows):
        cache.truncate(lengths)
        return
    parts = extensions(cache, lengths, [0] * cache.batch_size)
    with Transaction(cache.pool, parts, operation, several=True, forwards=()) as work:
        work.commit_cuts()


def copy_of(cache: C, lengths: Sequence[int], operation: Operation) -> C:
    """Return a cache of the first ``lengths[i]`` tokens of row i. Call it under the lock."""
    pool = cache.pool
    cache.commit_chains()
    origins = [pool.replay_start(row, n, operation.verb) for row, n in zip(cache.rows, lengths, strict=True)]
    to_replay = [row.tokens.ids[begin:end] for row, begin, end in zip(cache.rows, origins, lengths, strict=True)]
    copy = cache.copy_of(origins)
    if tuple(origins) == tuple(lengths):
        return copy
    try:
        run_replays(copy, to_replay, [row.runs for row in cache.rows], operation)
    except BaseException:
        copy.release()
        raise
    pool.replayed_tokens += sum(lengths) - sum(origins)
    return copy


def run_replays(cache: CacheRows, to_replay: Sequence[Ids], runs: Sequence[AdapterRuns], operation: Operation) -> None:
    """Extend row i by ``to_replay[i]``, each token under its adapter in ``runs[i]``. On an error no
    row is changed."""
    pool, origins, counts = cache.pool, cache.lengths, [ids.size for ids in to_replay]
    parts = extensions(cache, origins, counts)
    for part, history in zip(parts, runs, strict=True):
        part.new.runs = history
    forwards = packed(pool, parts, origins, counts, pool.facts.chunk_size)
    with Transaction(pool, parts, operation, several=True, forwards=forwards) as work:
        work.run(to_replay, ["none"] * len(to_replay), budget=pool.facts.chunk_size)
        work.commit()
