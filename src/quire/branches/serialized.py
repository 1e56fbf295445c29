"""KV caches as bytes: writes and reads state files of kind ``kv_cache``, and reads ``session``.

A file has one sequence for each row under the prefix ``row.<b>.``, and what the rows are: model,
adapters, dtype, capacity, lengths, token ids. Where tokens stand at other positions than their
indices, the file is of another kind and lists the positions: a reader that knows nothing of them
would go on at wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quire.branches.branch import Origin
from quire.branches.cache_rows import CacheRows
from quire.branches.history import LAST_PLACEHOLDER, UNKNOWN, Ids, TokenHistory
from quire.branches.replay import NOTHING
from quire.branches.rewinding import run_owed
from quire.branches.row import Row
from quire.branches.running_calls import Operation
from quire.branches.saved_kinds import (
    KV_CACHE,
    KV_CACHE_WITH_POSITIONS,
    SESSION,
    cache_of_session,
    of_row,
    row_prefix,
    window_of,
)
from quire.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.kv import exchange, sequencefile
from quire.kv.forward_need import pages_for
from quire.kv.rule_table import POSITIONS_OF_WINDOWS
from quire.kv.state_schema import check_metadata
from quire.kv.statefile import StateFile, TensorSpec, read_state, to_bytes
from quire.kv.windows import Window
from quire.runner.adapter_history import as_read, written
from quire.types import BASE, AdapterRuns, Add, SeqId, SetWindow


def dump(cache: CacheRows) -> bytes:
    """See ``KVCacheInterface.serialize``. Call it under the lock."""
    state = cache.pool.state
    rows: list[dict[str, Any]] = []
    plan: list[TensorSpec] = []
    for index, row in enumerate(cache.rows):
        metadata, specs = sequencefile.describe(state, row.seq, row_prefix(index))
        rows.append(metadata)
        plan += specs
    histories = [written(row.runs, cache.pool.fingerprint_of) for row in cache.rows]
    positions = [None if row.positions is None else row.positions.ids.tolist() for row in cache.rows]
    is_placed = any(one is not None for one in positions)
    metadata = {
        "kind": KV_CACHE_WITH_POSITIONS if is_placed else KV_CACHE,
        "model": dict(cache.pool.identity.fields()),
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
        "modified": [row.origin.modified for row in cache.rows],
        "rows": rows,
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for index, row in enumerate(cache.rows):
            yield from sequencefile.tensors(state, row.seq, row_prefix(index))

    return to_bytes(metadata, plan, tensors())


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """What a file holds of one row, checked."""

    sequence: dict[str, Any] | None
    """Its metadata; None: nothing of it was computed."""
    prefix: str
    """Of the names of its tensors."""
    ids: Ids | None
    """All token ids; None where the writer did not know them."""
    positions: Ids | None
    """Where they stand; None: at their indices."""
    window: Window | None
    runs: AdapterRuns
    origin: Origin

    @property
    def length(self) -> int:
        """Tokens whose state the file has."""
        return 0 if self.sequence is None else int(self.sequence["length"])

    def computed(self, seq: SeqId) -> Row:
        """Return the row of these tokens, whose state is in ``seq``."""
        ids = np.full(self.length, UNKNOWN) if self.ids is None else self.ids[: self.length]
        found = Row(seq=seq, tokens=TokenHistory(ids), computed=self.length, runs=self.runs, origin=self.origin)
        found.runs, found.window = found.runs_before(self.length), self.window
        found.stand(0, self.positions)
        return found

    @property
    def owed(self) -> Ids:
        """Tokens behind these, which a session computes when it needs them."""
        return NOTHING if self.ids is None else self.ids[self.length :]


def load(cache: CacheRows, data: bytes | bytearray | memoryview, *, convert_dtype: bool, operation: Operation) -> None:
    """Load a file into a cache, as ``KVCacheInterface.load``; run tokens that have no state in it.

    Call it under the lock.
    """
    with read_state(data) as file:
        saved = _check(cache, file, convert_dtype)
        fresh = _import_rows(cache, file, saved)
    cache.pool.note_adapters([row.runs for row in saved])
    lengths = [row.length + row.owed.size for row in saved]
    if any(row.owed.size for row in saved):
        _run_owed(cache, fresh, saved, operation)
    else:
        cache.replace_content(fresh)
    if cache.dynamic:
        cache.capacity = max(cache.capacity, *lengths)


def _run_owed(cache: CacheRows, fresh: list[Row], saved: Sequence[SavedRow], operation: Operation) -> None:
    """Give the cache these rows, with what is owed to them; if that fails, it stays as it was."""
    loaded = CacheRows(cache.pool, fresh, capacity=cache.pool.max_model_len, dynamic=False)
    try:
        run_owed(loaded, [row.owed for row in saved], [row.runs for row in saved], operation)
    except BaseException:
        loaded.release()
        raise
    cache.take_over(loaded)


def _check(cache: CacheRows, file: StateFile, convert_dtype: bool) -> list[SavedRow]:
    """Check all of a file before the pool is touched; return its rows."""
    check_metadata(file.metadata)
    found: Mapping[str, Any] = file.metadata
    prefixes = [row_prefix(index) for index in range(cache.batch_size)]
    of_session = found["kind"] == SESSION
    if of_session:
        found, prefixes = cache_of_session(found), [""]
    sequencefile.check_model(found["model"], cache.pool.identity.fields())
    if found["batch_size"] != cache.batch_size:
        raise InvalidArgument(f"the state has {found['batch_size']} rows, {cache.batch_size} are expected")
    rows = _listed(found, "rows", cache.batch_size)
    state = cache.pool.state
    checked = [
        None if of_session and row is None else sequencefile.check(state, file, row, prefix, convert_dtype)
        for prefix, row in zip(prefixes, rows, strict=True)
    ]
    expected = {
        name
        for prefix, row in zip(prefixes, checked, strict=True)
        if row is not None
        for name in sequencefile.tensor_names(row, prefix)
    }
    if surplus := sorted(set(file.names) - expected):
        raise InvalidArgument(f"the state holds tensors that no row has: {surplus[:3]}; expected only k and v of rows")
    lengths = [0 if row is None else int(row["length"]) for row in checked]
    places = _check_places(cache, found, checked)
    following = [n if one is None or not n else int(one[-1]) + 1 for n, one in zip(lengths, places, strict=True)]
    for name, expected_list in (("lengths", lengths), ("next_positions", following)):
        if _listed(found, name, cache.batch_size) != expected_list:
            raise DataLoss(f"{name} of the state are {found[name]!r:.80}, and its rows say {expected_list}")
    listed = _listed(found, "tokens", cache.batch_size)
    tokens = [
        _check_tokens(ids, length, cache.pool.vocab_size, owed=of_session)
        for ids, length in zip(listed, lengths, strict=True)
    ]
    totals = [length if ids is None else ids.size for ids, length in zip(tokens, lengths, strict=True)]
    if any(ids is not None and (ids[length:] < 0).any() for ids, length in zip(tokens, lengths, strict=True)):
        raise DataLoss("the state has no state of tokens that stand for embeddings, which are not in it")
    longest = max(totals)
    if not cache.dynamic and longest > cache.capacity:
        raise InvalidArgument(f"the state has {longest} tokens in a row; this static cache has {cache.capacity} slots")
    if longest > cache.pool.max_model_len:
        raise ResourceExhausted(
            f"the state has {longest} tokens in a row; the model's maximum is {cache.pool.max_model_len}"
        )
    return [
        SavedRow(
            sequence=row,
            prefix=prefix,
            ids=ids,
            positions=positions,
            window=_window_of(file, row),
            runs=runs,
            origin=_origin_of(cache, found, index, row),
        )
        for index, (row, prefix, ids, positions, runs) in enumerate(
            zip(checked, prefixes, tokens, places, _check_adapters(cache, found, totals), strict=True)
        )
    ]


def _check_places(
    cache: CacheRows, found: Mapping[str, Any], checked: Sequence[Mapping[str, Any] | None]
) -> list[Ids | None]:
    """Return the positions of each row's tokens; None: their indices.

    ``Unsupported`` where this executor's rows have no others, or the row has a window.
    """
    if "positions" not in found:
        return [None] * cache.batch_size
    if cache.pool.position_refusal:
        raise Unsupported(
            f"the state has tokens at positions that are not their indices: {cache.pool.position_refusal}"
        )
    places: list[Ids | None] = []
    for value, row in zip(_listed(found, "positions", cache.batch_size), checked, strict=True):
        if value is not None and row is not None and row["window"] is not None:
            raise Unsupported(f"the state has a row with positions of its own: {POSITIONS_OF_WINDOWS}")
        length = 0 if row is None else int(row["length"])
        if value is not None and len(value) != length:
            raise DataLoss(f"positions of a row of {length} tokens are {len(value)}; as many are expected")
        places.append(None if value is None else np.array(value, dtype=np.int64))
    highest = max((int(one.max(initial=0)) for one in places if one is not None), default=0)
    if highest >= cache.pool.max_model_len:
        raise ResourceExhausted(
            f"the state has a token at position {highest}; the model's maximum is {cache.pool.max_model_len} positions"
        )
    return places


def _check_adapters(cache: CacheRows, found: Mapping[str, Any], lengths: Sequence[int]) -> list[AdapterRuns]:
    """Return the adapters of each row, all loaded; ``BASE`` where the base model alone ran."""
    if not found["adapters"]:
        return [BASE] * cache.batch_size
    listed = _listed(found, "adapters", cache.batch_size)
    adapters = cache.pool.runner.adapters
    for index, (value, length) in enumerate(zip(listed, lengths, strict=True)):
        if value and not length:
            raise DataLoss(f"row {index} of the state has no tokens and adapters {value!r:.80}; [] is expected")
    return [
        as_read(value, length, adapters.find, adapters.fingerprints, f"row {index} of the state")
        for index, (value, length) in enumerate(zip(listed, lengths, strict=True))
    ]


def _window_of(file: StateFile, row: Mapping[str, Any] | None) -> Window | None:
    """Return a row's window, as its sequence says, or the session of a row without one."""
    if row is None:
        found = window_of(file.metadata)
        return None if found is None else Window(*found)
    return None if row["window"] is None else Window(row["window"], row["sink"], row["eviction"])


def _listed(found: Mapping[str, Any], name: str, count: int) -> list[Any]:
    value: list[Any] = found[name]
    if len(value) != count:
        raise DataLoss(f"{name} of the state are {len(value)}; a list of {count} is expected")
    return value


def _check_tokens(ids: list[int] | None, length: int, vocab_size: int, *, owed: bool) -> Ids | None:
    """Return a row's ids, None where they are not known. ``owed``: of more than ``length``, too."""
    if ids is None:
        return None
    if len(ids) != length and not (owed and len(ids) > length):
        raise DataLoss(f"the state has {length} tokens in a row and does not list as many ids")
    for token in ids:
        if not _is_recorded(token, vocab_size):
            raise DataLoss(f"the state names token {token!r}; ids in 0..{vocab_size - 1} are expected")
    return np.array(ids, dtype=np.int64)


def _is_recorded(token: int, vocab_size: int) -> bool:
    """Return whether a history may hold it: an id, or what stands for data at a placeholder."""
    return 0 <= token < vocab_size or -(2**63) <= token < LAST_PLACEHOLDER


def _origin_of(cache: CacheRows, found: Mapping[str, Any], index: int, row: Mapping[str, Any] | None) -> Origin:
    exact, modified = of_row(found, "exact", index, True), of_row(found, "modified", index, False)
    for name, value in (("exact", exact), ("modified", modified)):
        if not isinstance(value, bool):
            raise DataLoss(f"row {index} of the state is {name} {value!r:.80}; true or false is expected")
    converted = row is not None and not sequencefile.is_exact(cache.pool.state, found["rows"][index])
    return Origin(exact=exact and not converted, modified=modified)


def _import_rows(cache: CacheRows, file: StateFile, saved: Sequence[SavedRow]) -> list[Row]:
    """Return a file's rows as new sequences, without what they are owed; all rows, or none."""
    pool = cache.pool
    pages = sum(pages_for(row.length, pool.page_size) for row in saved)
    states = sum(1 + len(row.sequence["kept_recurrent_positions"]) for row in saved if row.sequence is not None)
    pool.require_free(pages, states, "load (beside the content that it replaces)")
    fresh: list[Row] = []
    try:
        for row in saved:
            seq = pool.runner.new_seq()
            if row.sequence is None:
                pool.edit(
                    Add(seq), *(() if row.window is None else (SetWindow(seq, row.window.size, row.window.sink),))
                )
            else:
                sequencefile.load(pool.state, seq, file, row.sequence, row.prefix)
            fresh.append(row.computed(seq))
    except BaseException:
        with suppress(NotFound):
            pool.remove([row.seq for row in fresh])
        raise
    return fresh
