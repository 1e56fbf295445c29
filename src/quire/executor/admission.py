"""Whether more rows fit beside what is there, without giving anything up to find out."""

from __future__ import annotations

from quire.executor.pool import CachePool
from quire.kv.forward_need import pages_for
from quire.kv.windows import window_pages


def has_room(pool: CachePool, rows: int, tokens: int) -> bool:
    """Whether so many new rows can come to hold ``tokens`` each: in what is free, and in what nobody holds or the owner of the
    runner would give up for them. Recurrent states of other caches that only save work count as taken. Call it under the lock."""
    if rows < 1 or not 1 <= tokens <= pool.max_model_len:
        return False
    pool.sweep()
    state, gone = pool.state, pool.runner.room.loose()
    if state.recurrent is not None and rows * min(2, tokens) > state.recurrent.table.num_available_without(gone):
        # One that a row has and one that its next token writes.
        return False
    chunk = min(tokens, pool.chunk_size) if pool.chunk_size > 0 else tokens
    for one, free in zip(state.classes, state.table.num_free_without(gone), strict=True):
        needed = pages_for(tokens, pool.page_size)
        bound = window_pages(pool.row_window, one.window, chunk, pool.page_size)
        if rows * (needed if bound is None else min(needed, bound)) > free:
            return False
    return True
