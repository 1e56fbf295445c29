"""``KVCache``: a batch of rows that a caller owns, each a sequence on copy-on-write pages (``KVCacheInterface``).

Letters: B rows; n tokens of a row; Hkv KV heads; D head size of K or of V.
"""

from __future__ import annotations

import re
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, Final, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.kv_cache import CacheHandleStats, KVCacheInterface
from quire.errors import InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.executor import serialized
from quire.executor.pool import CachePool
from quire.executor.rows import Ids, Row, TokenRecord
from quire.types import Pop

P = ParamSpec("P")
R = TypeVar("R")

_TENSOR_NAME: Final = re.compile(r"kv_cache_[kv]_(0|[1-9][0-9]{0,8})")


def _locked(method: Callable[Concatenate[KVCache, P], R]) -> Callable[Concatenate[KVCache, P], R]:
    """The method, run alone, on a cache that was not released."""

    @wraps(method)
    def wrapper(self: KVCache, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.pool.lock:
            self.require_live()
            self.pool.sweep()
            return method(self, *args, **kwargs)

    return wrapper


class KVCache:
    """See ``KVCacheInterface``; made by ``create_kv_cache``. Its methods may be called from any thread.

    ``NotFound`` after ``release`` (or ``Executor.release_cache``).
    """

    def __init__(
        self,
        pool: CachePool,
        rows: list[Row],
        *,
        capacity: int,
        dynamic: bool,
        adapters: frozenset[int] = frozenset(),
    ) -> None:
        self.pool = pool
        self.rows = rows
        self.capacity = capacity
        self.dynamic = dynamic
        self.adapters = adapters
        """Ids of the adapters under which content was made; the base model is not among them."""
        self.cache_id: Final = f"kv-{uuid.uuid4().hex}"
        self.revision = 0
        self.last_access: float | None = None
        self.released = False
        pool.caches[self.cache_id] = self
        self._finalizer = weakref.finalize(self, pool.abandon, rows)
        self._finalizer.atexit = False

    @classmethod
    def create(cls, pool: CachePool, batch_size: int, capacity: int, dynamic: bool) -> Self:
        """An empty cache; arguments are checked already."""
        return cls(pool, [Row(seq) for seq in pool.add(batch_size)], capacity=capacity, dynamic=dynamic)

    def __repr__(self) -> str:
        state = "released" if self.released else f"batch_size={self.batch_size}, capacity={self.capacity}"
        return f"<KVCache {self.cache_id} {state}>"

    # -- looking ---------------------------------------------------------------------------------------------

    @property
    def num_entries(self) -> int:
        return self.capacity

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        return max(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._lengths()

    def contains(self, name: str) -> bool:
        found = _TENSOR_NAME.fullmatch(name)
        first = self.pool.first_layer
        return found is not None and first <= int(found[1]) < first + len(self.pool.specs)

    def require_live(self) -> None:
        """``NotFound`` if it was released."""
        if self.released:
            raise NotFound(f"KV cache {self.cache_id} was released; make a new one")

    def token_ids(self, row: int) -> Ids | None:
        """A copy of the ids that made a row, or None where they are not known."""
        record = self.rows[row].tokens
        return None if record is None else record.ids.copy()

    @_locked
    def read(self, layer: int, lengths: Sequence[int], *, values: bool) -> Tensor:
        """A gathered copy of K or V of one layer, ``[B, n, Hkv, D]``: the first ``lengths[i]`` tokens of row i, then zeros."""
        spec, state = self.pool.state.spec(layer), self.pool.state
        dim = spec.value_dim if values else spec.head_dim
        out = state.storage.layers[layer - state.first_layer].k.new_zeros(
            len(self.rows), max(lengths), spec.num_kv_heads, dim
        )
        for index, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            out[index, :length] = state.debug_get_kv(row.seq, 0, length, layer=layer)[values]
        return out

    @_locked
    def pages(self) -> list[NDArray[np.int32]]:
        """A copy of the page table of each row."""
        return [self.pool.state.table.get(row.seq).tables[0].pages.copy() for row in self.rows]

    @_locked
    def _lengths(self) -> tuple[int, ...]:
        return tuple(self.pool.state.sequence_length(row.seq) for row in self.rows)

    def stats(self) -> CacheHandleStats:
        """What it uses now."""
        with self.pool.lock:
            blocks, tokens = sum(pages.size for pages in self.pages()), sum(self.lengths)
        slots = blocks * self.pool.page_size
        return CacheHandleStats(
            memory_bytes=blocks * self.pool.page_bytes,
            blocks_allocated=blocks,
            tokens_stored=tokens,
            utilization=tokens / slots if slots else 0.0,
            last_access=self.last_access,
        )

    # -- changing --------------------------------------------------------------------------------------------

    @_locked
    def clear(self) -> None:
        self.truncate([0] * len(self.rows))
        for row in self.rows:
            row.tokens = TokenRecord()
        self.adapters = frozenset()

    @_locked
    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[i]`` tokens of row i; each is at most the row's length."""
        surplus = [present - length for present, length in zip(self.lengths, lengths, strict=True)]
        self.pool.edit(*(Pop(row.seq, count) for row, count in zip(self.rows, surplus, strict=True) if count))
        for row, length, count in zip(self.rows, lengths, surplus, strict=True):
            if count:
                self.mark_cut(row, length)
            if row.tokens is not None:
                row.tokens.size = length

    def mark_cut(self, row: Row, length: int) -> None:
        """Handles of this row that are longer than ``length`` are stale from now on."""
        self.revision += 1
        row.cut(self.revision, length)

    @_locked
    def resize(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise InvalidArgument(f"resize takes a number of token slots; got {n!r}")
        if not self.dynamic:
            raise InvalidArgument("KV cache is not dynamic and cannot be resized.")
        if n > self.pool.max_model_len:
            raise ResourceExhausted(f"resize to {n} slots is beyond the model's maximum of {self.pool.max_model_len}")
        self.capacity = max(self.capacity, n)

    @_locked
    def deep_copy(self) -> KVCache:
        seqs = self.pool.fork([row.seq for row in self.rows])
        rows = [row.like(seq) for seq, row in zip(seqs, self.rows, strict=True)]
        return KVCache(self.pool, rows, capacity=self.capacity, dynamic=self.dynamic, adapters=self.adapters)

    @_locked
    def select_and_copy_from(self, other: KVCacheInterface, b: int) -> None:
        source = _own(other)
        if source.batch_size <= self.batch_size:
            raise InvalidArgument(
                f"select takes a row out of a larger batch: the other cache has {source.batch_size} rows, this one {self.batch_size}"
            )
        if self.batch_size != 1:
            raise InvalidArgument(f"select copies into a cache of one row; this one has {self.batch_size}")
        if isinstance(b, bool) or not isinstance(b, int) or not 0 <= b < source.batch_size:
            raise InvalidArgument(f"row {b!r} does not exist; the other cache has rows 0..{source.batch_size - 1}")
        self._require_like(source)
        self._copy_rows(source, [b])

    @_locked
    def broadcast_and_copy_from(self, other: KVCacheInterface) -> None:
        source = _own(other)
        if source.batch_size != 1:
            raise InvalidArgument(f"broadcast copies from a cache of one row; the other one has {source.batch_size}")
        if self.batch_size <= 1:
            raise InvalidArgument(f"broadcast copies into a cache of several rows; this one has {self.batch_size}")
        self._require_like(source)
        self._copy_rows(source, [0] * self.batch_size)

    def _require_like(self, other: KVCache) -> None:
        """The checks that select and broadcast share, in the order of the contract."""
        if other.num_entries != self.num_entries:
            raise InvalidArgument(f"the other cache has capacity {other.num_entries}, this one {self.num_entries}")
        if other.dynamic != self.dynamic:
            kinds = ("static", "dynamic")
            raise InvalidArgument(f"the other cache is {kinds[other.dynamic]}, this one {kinds[self.dynamic]}")
        # Caches of one executor have equal tensors, model and dtype; pages of another one cannot be shared.
        if other.pool is not self.pool:
            raise InvalidArgument("the other cache belongs to another executor; use serialize and load")

    def _copy_rows(self, source: KVCache, indices: Sequence[int]) -> None:
        origins = [source.rows[index] for index in indices]
        seqs = self.pool.fork([row.seq for row in origins])
        self.replace_content([row.like(seq) for seq, row in zip(seqs, origins, strict=True)])
        self.adapters = source.adapters

    def replace_content(self, fresh: Sequence[Row]) -> None:
        """Swap in new sequences; the old ones are freed and all handles with tokens are stale."""
        self.pool.remove([row.seq for row in self.rows])
        for row, new in zip(self.rows, fresh, strict=True):
            row.seq, row.tokens = new.seq, new.tokens
            self.mark_cut(row, 0)
        self.touch()

    def touch(self) -> None:
        """A call used it."""
        self.last_access = time.monotonic()

    def release(self) -> None:
        """Give the pages back now; a second call has no effect. Forks keep theirs."""
        with self.pool.lock:
            if self.released:
                return
            self.released = True
            self._finalizer.detach()
            self.pool.caches.pop(self.cache_id, None)
            self.pool.free(self.rows)

    # -- bytes -----------------------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        with self.pool.lock:
            self.require_live()
            return serialized.dump(self)

    def load(self, data: bytes, *, convert_dtype: bool = False) -> None:
        with self.pool.lock:
            self.require_live()
            self.pool.sweep()
            serialized.load(self, data, convert_dtype=convert_dtype)


def _own(other: KVCacheInterface) -> KVCache:
    if not isinstance(other, KVCache):
        raise InvalidArgument(f"a KV cache of Quire is needed; got {type(other).__name__}")
    other.require_live()
    return other


def require_kv_layer(pool: CachePool, layer: int) -> None:
    """``InvalidArgument`` for a layer that does not exist, ``Unsupported`` for one without K and V."""
    last = pool.first_layer + len(pool.specs) - 1
    if isinstance(layer, bool) or not isinstance(layer, int) or not pool.first_layer <= layer <= last:
        raise InvalidArgument(f"layer {layer!r} does not exist; the model has layers {pool.first_layer}..{last}")
    if pool.specs[layer - pool.first_layer].kind != "full":
        raise Unsupported(f"layer {layer} keeps no K and V")
