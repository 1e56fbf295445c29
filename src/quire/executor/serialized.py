"""KV caches as bytes: writes and reads state files of kind ``kv_cache``, and reads ``session``.

A file has one sequence for each row under the prefix ``row.<b>.``, and describes the rows: model,
adapters, dtype, capacity, lengths, token ids. If tokens are at other positions than their indices,
the file is of another kind and lists the positions: a reader that does not know them would continue
at wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import Tensor

from quire.adapters.history import written
from quire.base.errors import InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.branches.saved_rows import (
    KV_CACHE,
    KV_CACHE_WITH_POSITIONS,
    SavedRow,
    load_row,
    read_rows,
    row_prefix,
)
from quire.executor.cache_rows import CacheRows
from quire.executor.rewinding import run_replays
from quire.executor.row import Row
from quire.executor.running_calls import Operation
from quire.kv import exchange, sequencefile
from quire.kv.forward_need import pages_for
from quire.statefile.container import StateFile, read_state, to_bytes
from quire.statefile.header import TensorSpec
from quire.statefile.schema import check_metadata


def dump(cache: CacheRows) -> bytes:
    """See ``KVCacheInterface.serialize``. Call it under the lock."""
    state = cache.pool.state
    rows: list[dict[str, Any]] = []
    plan: list[TensorSpec] = []
    tensors: list[Iterator[tuple[str, Tensor]]] = []
    for index, row in enumerate(cache.rows):
        sequence, specs, found = sequencefile.describe(state, row.seq, row_prefix(index))
        rows.append(sequence)
        plan += specs
        tensors.append(found)
    histories = [written(row.runs, cache.pool.fingerprint_of) for row in cache.rows]
    positions = [None if row.positions is None else row.positions.ids.tolist() for row in cache.rows]
    inexact = [row.origin.inexact_from for row in cache.rows]
    is_placed = any(one is not None for one in positions)
    metadata: dict[str, Any] = {
        "kind": KV_CACHE_WITH_POSITIONS if is_placed else KV_CACHE,
        "model": dict(cache.pool.facts.identity.fields()),
        "adapters": histories if any(histories) else [],
        "dtype": exchange.dtype_name(state.dtype),
        "batch_size": cache.batch_size,
        "capacity": cache.capacity,
        "dynamic": cache.dynamic,
        "lengths": list(cache.lengths),
        "next_positions": [row.next_position(length) for row, length in zip(cache.rows, cache.lengths, strict=True)],
        **({"positions": positions} if is_placed else {}),
        "tokens": [row.tokens.ids.tolist() if row.tokens.is_known else None for row in cache.rows],
        "exact": [row.origin.exact for row in cache.rows],
        **({"exact_tokens": inexact} if any(one is not None for one in inexact) else {}),
        "modified": [row.origin.modified for row in cache.rows],
        "rows": rows,
    }
    return to_bytes(metadata, plan, chain.from_iterable(tensors))


def load(cache: CacheRows, data: bytes | bytearray | memoryview, *, convert_dtype: bool, operation: Operation) -> None:
    """Load a file into a cache, as ``KVCacheInterface.load``; run tokens without state in the file.

    Call it under the lock.
    """
    with read_state(data) as file:
        check_metadata(file.metadata)
        saved = _check(cache, file, convert_dtype)
        fresh = _import_rows(cache, file, saved)
    cache.pool.note_adapters([row.runs for row in saved])
    if any(row.to_replay.size for row in saved):
        _run_owed(cache, fresh, saved, operation)
    else:
        cache.replace_content(fresh)
    if cache.dynamic:
        cache.capacity = max(cache.capacity, *(row.total for row in saved))


def _run_owed(cache: CacheRows, fresh: list[Row], saved: Sequence[SavedRow], operation: Operation) -> None:
    """Replace the cache's rows by ``fresh``, after running their missing tokens; on an error the
    cache is unchanged."""
    loaded = CacheRows(cache.pool, fresh, capacity=cache.pool.facts.max_model_len, dynamic=False)
    try:
        run_replays(loaded, [row.to_replay for row in saved], [row.runs for row in saved], operation)
    except BaseException:
        loaded.release()
        raise
    cache.take_over(loaded)


def _check(cache: CacheRows, file: StateFile, convert_dtype: bool) -> list[SavedRow]:
    """Check all of a file before the pool is touched; return its rows."""
    pool, facts = cache.pool, cache.pool.facts
    saved = read_rows(
        file,
        pool.runner,
        facts.identity,
        vocab_size=facts.vocab_size,
        convert_dtype=convert_dtype,
        batch_size=cache.batch_size,
    )
    if facts.position_refusal and any(row.positions is not None for row in saved):
        raise Unsupported(f"the state has tokens at positions that are not their indices: {facts.position_refusal}")
    highest = max((int(row.positions.max(initial=0)) for row in saved if row.positions is not None), default=0)
    if highest >= facts.max_model_len:
        raise ResourceExhausted(
            f"the state has a token at position {highest}; the model's maximum is {facts.max_model_len} positions"
        )
    longest = max(row.total for row in saved)
    if not cache.dynamic and longest > cache.capacity:
        raise InvalidArgument(f"the state has {longest} tokens in a row; this static cache has {cache.capacity} slots")
    if longest > facts.max_model_len:
        raise ResourceExhausted(
            f"the state has {longest} tokens in a row; the model's maximum is {facts.max_model_len}"
        )
    return saved


def _import_rows(cache: CacheRows, file: StateFile, saved: Sequence[SavedRow]) -> list[Row]:
    """Return a file's rows as new sequences, without the tokens to replay; on an error none is
    left."""
    pool = cache.pool
    pages = sum(pages_for(row.length, pool.facts.page_size) for row in saved)
    states = sum(1 + len(row.sequence["kept_recurrent_positions"]) for row in saved if row.sequence is not None)
    pool.require_free(pages, states, "load (beside the content that it replaces)")
    fresh: list[Row] = []
    try:
        for row in saved:
            if row.sequence is None:
                seq = pool.add_seq(row.window)
            else:
                seq = pool.new_seq()
                load_row(pool.runner, seq, file, row)
            new = Row(seq=seq, computed=row.length)
            row.fill(new, row.length)
            new.runs = new.runs_before(row.length)
            new.stand(0, row.positions)
            fresh.append(new)
    except BaseException:
        with suppress(NotFound):
            pool.remove(*(row.seq for row in fresh))
        raise
    return fresh
