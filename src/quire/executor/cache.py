"""``KVCache``: rows that a caller owns, sequences on copy-on-write pages (``KVCacheInterface``).

Letters: B rows; n tokens of a row; Hkv KV heads; D head size of K or of V.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, ResourceExhausted, Unsupported
from quire.base.signatures import checks_arguments
from quire.base.token_history import Ids
from quire.contracts.kv_cache import CacheHandleStats, KVCacheInterface
from quire.contracts.layers import KeyValueAttention
from quire.executor import serialized
from quire.executor.cache_pool import NO_PAGES, CachePool
from quire.executor.cache_rows import CacheRows, locked
from quire.executor.row import Row

_TENSOR_NAME: Final = re.compile(r"kv_cache_[kv]_(0|[1-9][0-9]{0,8})")


@checks_arguments()
class KVCache(CacheRows):
    """See ``KVCacheInterface``; made by ``create_kv_cache``, usable from any thread. ``NotFound``
    after ``release`` (or ``Executor.release_cache``)."""

    batch: weakref.WeakSet[KVCache] | None = None
    """The caches that were prefilled in the same call; None: this one alone."""

    def __repr__(self) -> str:
        state = "released" if self.released else f"batch_size={self.batch_size}, capacity={self.capacity}"
        return f"<KVCache {self.cache_id} {state}>"

    @property
    def num_entries(self) -> int:
        return self.capacity

    @property
    def length(self) -> int:
        return max(self.lengths)

    def contains(self, name: str) -> bool:
        found = _TENSOR_NAME.fullmatch(name)
        return found is not None and isinstance(self.pool.facts.spec_of(int(found[1])), KeyValueAttention)

    @property
    @locked
    def adapters(self) -> frozenset[int]:
        """Ids of the adapters, unloaded ones included, under which tokens ran; without the base
        model."""
        return frozenset(adapter for row in self.rows for adapter in row.runs.ids)

    @locked
    def positions(self, row: int) -> Ids:
        """Return a copy of the rotation positions of a row's tokens. They are the indices unless
        ``position_ids`` were given."""
        found = self._row(row)
        return np.arange(found.computed) if found.positions is None else found.positions.ids.copy()

    @locked
    def token_ids(self, row: int) -> Ids | None:
        """Return a copy of the token ids of a row, or None if they are not known. The id of a
        placeholder is below -4 and computed from its data: equal ids mean equal content."""
        held = self._row(row).tokens
        return held.ids.copy() if held.is_known else None

    def _row(self, index: int) -> Row:
        if not 0 <= index < self.batch_size:
            raise InvalidArgument(f"row {index} does not exist; the cache has rows 0..{self.batch_size - 1}")
        return self.rows[index]

    @locked
    def read(self, layer: int, lengths: Sequence[int], *, values: bool) -> Tensor:
        """Return a gathered copy of K or V of one layer, ``[B, n, Hkv, D]``. Row i has its first
        ``lengths[i]`` tokens, then zeros, and zeros for tokens that a window has dropped."""
        self.commit_chains()
        state = self.pool.state
        none_0HD = state.debug_get_kv(self.rows[0].seq, 0, 0, layer=layer)[values]
        out = none_0HD.new_zeros(len(self.rows), max(lengths), *none_0HD.shape[1:])
        for index, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            for part in state.held(row.seq, layer):
                end = min(part.stop, length)
                if part.start < end:
                    rows = state.debug_get_kv(row.seq, part.start, end, layer=layer)[values]
                    out[index, part.start : end] = rows
        return out

    @locked
    def pages(self) -> list[NDArray[np.int32]]:
        """Return a copy of the page table of each row; -1 for pages that a window has dropped. The
        table is that of one layer class. ``Unsupported`` if no layer keeps pages."""
        self.commit_chains()
        if not self.pool.facts.specs:
            raise Unsupported(f"block_table: {NO_PAGES}")
        return [self.pool.state.page_table(row.seq) for row in self.rows]

    @locked
    def stats(self) -> CacheHandleStats:
        """Return its present use of blocks, memory and tokens."""
        self.commit_chains()
        uses = [self.pool.state.sequence_use(row.seq) for row in self.rows]
        blocks = sum(use.pages for use in uses)
        slots = blocks * self.pool.facts.page_size
        return CacheHandleStats(
            memory_bytes=sum(use.num_bytes for use in uses),
            blocks_allocated=blocks,
            tokens_stored=sum(self.lengths),
            utilization=sum(use.rows for use in uses) / slots if slots else 0.0,
            last_access=self.last_access,
        )

    @locked
    def clear(self) -> None:
        self.truncate([0] * len(self.rows))
        for row in self.rows:
            # An empty row is not cut by truncate, but may have a pending token tree.
            self.set_pending(row, None)
            if row.window != self.pool.facts.row_window:
                # The window came with a session's state; a cleared cache is like a new one.
                self.pool.remove(row.seq)
                (row.seq,), row.window = self.pool.add(1), self.pool.facts.row_window

    @locked
    def resize(self, n: int) -> None:
        if not self.dynamic:
            raise InvalidArgument("KV cache is not dynamic and cannot be resized.")
        if n > self.pool.facts.max_model_len:
            raise ResourceExhausted(
                f"resize to {n} slots is beyond the model's maximum of {self.pool.facts.max_model_len}"
            )
        self.capacity = max(self.capacity, n)

    @locked
    def deep_copy(self) -> Self:
        return self.copy_of(self.lengths)

    @locked
    def select_and_copy_from(self, other: KVCacheInterface, b: int) -> None:
        source = _own(other)
        if source.batch_size <= self.batch_size:
            raise InvalidArgument(
                f"select takes a row out of a larger batch: the other cache has {source.batch_size} rows, this one {self.batch_size}"
            )
        if self.batch_size != 1:
            raise InvalidArgument(f"select copies into a cache of one row; this one has {self.batch_size}")
        if not 0 <= b < source.batch_size:
            raise InvalidArgument(f"row {b} does not exist; the other cache has rows 0..{source.batch_size - 1}")
        self._require_like(source)
        self._copy_rows(source, [b])

    @locked
    def broadcast_and_copy_from(self, other: KVCacheInterface) -> None:
        source = _own(other)
        if source.batch_size != 1:
            raise InvalidArgument(f"broadcast copies from a cache of one row; the other one has {source.batch_size}")
        if self.batch_size <= 1:
            raise InvalidArgument(f"broadcast copies into a cache of several rows; this one has {self.batch_size}")
        self._require_like(source)
        self._copy_rows(source, [0] * self.batch_size)

    def _require_like(self, other: KVCache) -> None:
        """Make the checks shared by select and broadcast, in the order of the contract."""
        if other.num_entries != self.num_entries:
            raise InvalidArgument(f"the other cache has capacity {other.num_entries}, this one {self.num_entries}")
        if other.dynamic != self.dynamic:
            kinds = ("static", "dynamic")
            raise InvalidArgument(f"the other cache is {kinds[other.dynamic]}, this one {kinds[self.dynamic]}")
        # Caches of one executor have equal tensors; pages of another cannot be shared.
        if other.pool is not self.pool:
            raise InvalidArgument("the other cache belongs to another executor; use serialize and load")

    def _copy_rows(self, source: KVCache, indices: Sequence[int]) -> None:
        source.commit_chains()
        origins = [source.rows[index] for index in indices]
        self.replace_content([row.like(self.pool.fork_of(row.seq)) for row in origins])

    @locked
    def serialize(self) -> bytes:
        self.commit_chains()
        return serialized.dump(self)

    def load(self, data: bytes | bytearray | memoryview, *, convert_dtype: bool = False) -> None:
        # A session's file may have tokens that must be run, so it is a call of the executor.
        with self.pool.operations.running("load") as operation, self.pool.lock:
            self.require_live()
            self.pool.sweep()
            serialized.load(self, data, convert_dtype=convert_dtype, operation=operation)


def _own(other: KVCacheInterface) -> KVCache:
    if not isinstance(other, KVCache):
        raise InvalidArgument(f"a KV cache of Quire is needed; got {type(other).__name__}")
    other.require_live()
    return other


def require_kv_layer(pool: CachePool, layer: int) -> None:
    """Raise ``InvalidArgument`` for an unknown layer, ``Unsupported`` for one without K and V."""
    known = (*pool.facts.layer_ids, *pool.facts.recurrent_ids)
    if layer not in known:
        raise InvalidArgument(f"layer {layer} does not exist; the model has layers {min(known)}..{max(known)}")
    if not isinstance(pool.facts.spec_of(layer), KeyValueAttention):
        raise Unsupported(f"layer {layer} keeps no K and V")
