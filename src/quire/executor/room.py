"""Whether more rows fit beside what is there, without giving anything up to find out."""

from __future__ import annotations

from quire.executor.pool import CachePool


def has_room(pool: CachePool, rows: int, tokens: int) -> bool:
    """Whether so many new rows can come to hold ``tokens`` each: in what is free, and in what nobody holds or the owner of the
    runner would give up for them. Recurrent states of other caches that only save work count as taken. Call it under the lock."""
    if rows < 1 or not 1 <= tokens <= pool.max_model_len:
        return False
    state, gone = pool.state, pool.reclaimable
    window = None if pool.window is None else (pool.window, pool.sink)
    needed = state.pages_at_most(tokens, window, min(tokens, pool.chunk_size) if pool.chunk_size > 0 else tokens)
    if pool.recurrent_ids:
        # One that a row has and one that its next token writes.
        needed[-1] = min(2, tokens)
    return all(rows * pages <= free for pages, free in zip(needed, state.free_pages(gone), strict=True))
