"""KV caches as bytes: the content of a state file of kind ``kv_cache``.

One sequence per row under the prefix ``row.<b>.``, and what the rows are: model, adapters, dtype, capacity, lengths, token ids. Where
tokens stand at other positions than their indices, the kind is another and the positions are listed: whoever does not know of them
would go on at wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from quire.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.executor.rows import LAST_PLACEHOLDER, Ids, Row, TokenRecord
from quire.kv import exchange, sequencefile
from quire.kv.need import pages_for
from quire.kv.rule_table import POSITIONS_OF_WINDOWS
from quire.kv.statefile import StateFile, TensorSpec, read_state, to_bytes
from quire.runner.adapter_history import as_read, written
from quire.types import BASE, AdapterRuns

if TYPE_CHECKING:
    from quire.executor.cache import KVCache

KIND = "kv_cache"
KIND_WITH_POSITIONS = "kv_cache_with_positions"
MAX_POSITION = 2**31 - 1


def _prefix(row: int) -> str:
    return f"row.{row}."


def dump(cache: KVCache) -> bytes:
    """See ``KVCacheInterface.serialize``. Call it under the lock."""
    state = cache.pool.state
    rows: list[dict[str, Any]] = []
    plan: list[TensorSpec] = []
    for index, row in enumerate(cache.rows):
        metadata, specs = sequencefile.describe(state, row.seq, _prefix(index))
        rows.append(metadata)
        plan += specs
    histories = [written(row.runs, cache.pool.fingerprint_of) for row in cache.rows]
    positions = [None if row.positions is None else row.positions.ids.tolist() for row in cache.rows]
    is_placed = any(one is not None for one in positions)
    metadata = {
        "kind": KIND_WITH_POSITIONS if is_placed else KIND,
        "model": dict(cache.pool.identity.fields()),
        "adapters": histories if any(histories) else [],
        "dtype": exchange.dtype_name(state.dtype),
        "batch_size": cache.batch_size,
        "capacity": cache.capacity,
        "dynamic": cache.dynamic,
        "lengths": list(cache.lengths),
        "next_positions": [row.next_position(length) for row, length in zip(cache.rows, cache.lengths, strict=True)],
        **({"positions": positions} if is_placed else {}),
        "tokens": [None if row.tokens is None else row.tokens.ids.tolist() for row in cache.rows],
        "rows": rows,
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for index, row in enumerate(cache.rows):
            yield from sequencefile.tensors(state, row.seq, _prefix(index))

    return to_bytes(metadata, plan, tensors())


def load(cache: KVCache, data: bytes, *, convert_dtype: bool) -> None:
    """See ``KVCacheInterface.load``. Call it under the lock."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidArgument(f"a KV cache is loaded from the bytes of serialize(); got {type(data).__name__}")
    with read_state(data) as file:
        checked, tokens, places, histories = _check(cache, file, convert_dtype)
        lengths = [int(row["length"]) for row in checked]
        fresh = _import_rows(cache, file, checked, tokens)
    for row, positions, runs in zip(fresh, places, histories, strict=True):
        row.runs = runs
        row.stand(0, positions)
    cache.pool.note_adapters(histories)
    cache.replace_content(fresh)
    if cache.dynamic:
        cache.capacity = max(cache.capacity, *lengths)


def _check(
    cache: KVCache, file: StateFile, convert_dtype: bool
) -> tuple[list[dict[str, Any]], list[Ids | None], list[Ids | None], list[AdapterRuns]]:
    """Everything about a file, before the pool is touched: metadata, token ids, positions and adapters of the rows."""
    found = file.metadata
    if found.get("kind") not in (KIND, KIND_WITH_POSITIONS):
        raise InvalidArgument(f"the state holds a {found.get('kind')!r}, and a {KIND!r} is expected")
    sequencefile.check_model(found.get("model"), cache.pool.identity.fields())
    if found.get("batch_size") != cache.batch_size:
        raise InvalidArgument(f"the state has {found.get('batch_size')!r} rows, {cache.batch_size} are expected")
    rows = _listed(found, "rows", cache.batch_size)
    state = cache.pool.state
    checked = [
        sequencefile.check(state, file, row, _prefix(index), convert_dtype)  # type: ignore[arg-type]
        for index, row in enumerate(rows)
    ]
    expected = {name for index, row in enumerate(checked) for name in sequencefile.tensor_names(row, _prefix(index))}
    if surplus := sorted(set(file.names) - expected):
        raise InvalidArgument(f"the state holds tensors that no row has: {surplus[:3]}; expected only k and v of rows")
    lengths = [int(row["length"]) for row in checked]
    places = _check_places(cache, found, checked)
    following = [n if one is None or not n else int(one[-1]) + 1 for n, one in zip(lengths, places, strict=True)]
    for name, expected_list in (("lengths", lengths), ("next_positions", following)):
        if _listed(found, name, cache.batch_size) != expected_list:
            raise DataLoss(f"{name} of the state are {found.get(name)!r:.80}, and its rows say {expected_list}")
    longest = max(lengths)
    if not cache.dynamic and longest > cache.capacity:
        raise InvalidArgument(f"the state has {longest} tokens in a row; this static cache has {cache.capacity} slots")
    if longest > cache.pool.max_model_len:
        raise ResourceExhausted(
            f"the state has {longest} tokens in a row; the model's maximum is {cache.pool.max_model_len}"
        )
    listed = _listed(found, "tokens", cache.batch_size)
    tokens = [_check_tokens(ids, length, cache.pool.vocab_size) for ids, length in zip(listed, lengths, strict=True)]
    return checked, tokens, places, _check_adapters(cache, found, lengths)


def _check_places(cache: KVCache, found: Mapping[str, Any], checked: Sequence[Mapping[str, Any]]) -> list[Ids | None]:
    """The positions of each row's tokens; None: their indices. ``Unsupported`` where this executor's rows have no others, or the
    row has a window."""
    if (found.get("kind") == KIND) != ("positions" not in found):
        raise DataLoss(
            f"a state of kind {found.get('kind')!r} {'has' if 'positions' in found else 'lacks'} positions of tokens"
        )
    if "positions" not in found:
        return [None] * cache.batch_size
    if cache.pool.position_refusal:
        raise Unsupported(
            f"the state has tokens at positions that are not their indices: {cache.pool.position_refusal}"
        )
    places: list[Ids | None] = []
    for value, row in zip(_listed(found, "positions", cache.batch_size), checked, strict=True):
        if value is not None and row["window"] is not None:
            raise Unsupported(f"the state has a row with positions of its own: {POSITIONS_OF_WINDOWS}")
        length = int(row["length"])
        listed = value if isinstance(value, list) else []
        if value is not None and not (
            len(listed) == length and all(type(one) is int and 0 <= one <= MAX_POSITION for one in listed)
        ):
            raise DataLoss(
                f"positions of a row of {length} tokens are {value!r:.80}; as many in 0..{MAX_POSITION} are expected"
            )
        places.append(None if value is None else np.array(listed, dtype=np.int64))
    highest = max((int(one.max(initial=0)) for one in places if one is not None), default=0)
    if highest >= cache.pool.max_model_len:
        raise ResourceExhausted(
            f"the state has a token at position {highest}; the model's maximum is {cache.pool.max_model_len} positions"
        )
    return places


def _check_adapters(cache: KVCache, found: Mapping[str, Any], lengths: Sequence[int]) -> list[AdapterRuns]:
    """Under which adapters the rows were made, all of them loaded; [] where only the base model ran."""
    if found.get("adapters") == []:
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


def _listed(found: Mapping[str, Any], name: str, count: int) -> list[object]:
    value = found.get(name)
    if not isinstance(value, list) or len(value) != count:
        raise DataLoss(f"{name} of the state are {value!r:.80}; a list of {count} is expected")
    return value


def _check_tokens(ids: object, length: int, vocab_size: int) -> Ids | None:
    """Token ids of a row; None where the writer did not know them."""
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != length:
        raise DataLoss(f"the state has {length} tokens in a row and does not list as many ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not _is_recorded(token, vocab_size):
            raise DataLoss(f"the state names token {token!r}; ids in 0..{vocab_size - 1} are expected")
    return np.array(ids, dtype=np.int64)


def _is_recorded(token: int, vocab_size: int) -> bool:
    """Whether a record may hold it: an id, or what stands for the data at a placeholder."""
    return 0 <= token < vocab_size or -(2**63) <= token < LAST_PLACEHOLDER


def _import_rows(cache: KVCache, file: StateFile, checked: list[dict[str, Any]], tokens: list[Ids | None]) -> list[Row]:
    """The rows of a file as new sequences beside the old ones; all of them, or none and the error."""
    pool = cache.pool
    pages = sum(pages_for(int(row["length"]), pool.page_size) for row in checked)
    states = sum(1 + len(row["kept_recurrent_positions"]) for row in checked)
    pool.require_free(pages, states, "load (beside the content that it replaces)")
    fresh: list[Row] = []
    try:
        for index, (row, ids) in enumerate(zip(checked, tokens, strict=True)):
            seq = pool.runner.new_seq()
            sequencefile.load(pool.state, seq, file, row, _prefix(index))
            fresh.append(Row(seq, None if ids is None else TokenRecord(ids)))
    except BaseException:
        with suppress(NotFound):
            pool.remove([row.seq for row in fresh])
        raise
    return fresh
