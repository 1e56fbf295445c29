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
from quire.contracts.layers import KeyValueAttention
from quire.errors import InvalidArgument, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.executor import serialized
from quire.executor.pool import NO_PAGES, CachePool
from quire.executor.rows import NO_IDS, Ids, Pending, Row, TokenRecord, history
from quire.kv.state_slots import NULL
from quire.signatures import checks_arguments
from quire.types import AdapterRuns, Commit, Pop

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


@checks_arguments()
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
    ) -> None:
        self.pool = pool
        self.rows = rows
        self.capacity = capacity
        self.dynamic = dynamic
        self.cache_id: Final = f"kv-{uuid.uuid4().hex}"
        self.revision = 0
        self.last_access: float | None = None
        self.released = False
        self.batch: weakref.WeakSet[KVCache] | None = None
        """The caches that were prefilled in the same call; None: it alone."""
        pool.caches[self.cache_id] = self
        pool.watch(self)
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
        return found is not None and isinstance(self.pool.spec_of(int(found[1])), KeyValueAttention)

    @property
    def adapters(self) -> frozenset[int]:
        """Ids of the adapters under which content was made; the base model is not among them. Some may be unloaded by now."""
        return frozenset(adapter for row in self.rows for adapter in row.runs.ids)

    def require_live(self) -> None:
        """``NotFound`` if it was released."""
        if self.released:
            raise NotFound(f"KV cache {self.cache_id} was released; make a new one")

    def token_ids(self, row: int) -> Ids | None:
        """A copy of the ids that made a row, or None where they are not known.

        What stands at a placeholder is below -4 and made from its data: equal ids mean equal content.
        """
        record = self.rows[row].tokens
        return None if record is None else record.ids.copy()

    @_locked
    def read(self, layer: int, lengths: Sequence[int], *, values: bool) -> Tensor:
        """A gathered copy of K or V of one layer, ``[B, n, Hkv, D]``: the first ``lengths[i]`` tokens of row i, then zeros;
        zeros also where a window has let go of a token."""
        self.settle()
        state = self.pool.state
        found = state.layer(layer)
        stored_SHD = found.v_SHD if values else found.k_SHD
        out = stored_SHD.new_zeros(len(self.rows), max(lengths), *stored_SHD.shape[1:])
        for index, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            for part in state.table.held(row.seq, found.class_index):
                end = min(part.stop, length)
                if part.start < end:
                    rows = state.debug_get_kv(row.seq, part.start, end, layer=layer)[values]
                    out[index, part.start : end] = rows
        return out

    @_locked
    def pages(self) -> list[NDArray[np.int32]]:
        """A copy of the page table of each row, in the layer class that stands for all; -1 where a window has passed.

        ``Unsupported`` where no layer keeps pages.
        """
        self.settle()
        if not self.pool.specs:
            raise Unsupported(f"block_table: {NO_PAGES}")
        table = self.pool.state.table
        return [table.get(row.seq).tables[self.pool.main_class].pages.copy() for row in self.rows]

    @_locked
    def _lengths(self) -> tuple[int, ...]:
        state = self.pool.state
        return tuple(
            state.sequence_length(row.seq) + (0 if row.chain is None else row.chain.ids.size) for row in self.rows
        )

    def stats(self) -> CacheHandleStats:
        """What it uses now."""
        blocks = memory = used = 0
        with self.pool.lock:
            self.require_live()
            self.settle()
            table, part = self.pool.state.table, self.pool.state.recurrent
            for row in self.rows:
                if part is not None:
                    memory += len(set(part.table.slots(row.seq).values()) - {NULL}) * self.pool.state_bytes
                for index, (pages, size) in enumerate(
                    zip(table.get(row.seq).tables, self.pool.page_bytes, strict=True)
                ):
                    blocks += pages.held.size
                    memory += pages.held.size * size
                    used += sum(len(part) for part in table.held(row.seq, index))
            tokens = sum(self.lengths)
        slots = blocks * self.pool.page_size
        return CacheHandleStats(
            memory_bytes=memory,
            blocks_allocated=blocks,
            tokens_stored=tokens,
            utilization=used / slots if slots else 0.0,
            last_access=self.last_access,
        )

    # -- changing --------------------------------------------------------------------------------------------

    @_locked
    def clear(self) -> None:
        self.truncate([0] * len(self.rows))
        for row in self.rows:
            # An empty row is not cut, and a tree may wait beside it.
            self.set_pending(row, None)
            row.tokens = TokenRecord()
            if not self.pool.has_its_window(row.seq):
                # It came with a session, and a cleared cache is as a new one.
                self.pool.remove([row.seq])
                (row.seq,) = self.pool.add(1)

    @_locked
    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[i]`` tokens of row i; each is at most the row's length. Runs nothing.

        ``FailedPrecondition``, with all rows as they were, where a window has let go of what a continuation would need, or where
        tokens must be run again (``rewinding.truncate`` runs them).
        """
        self.settle()
        surplus = [present - length for present, length in zip(self.lengths, lengths, strict=True)]
        self.pool.require_reachable([row.seq for row in self.rows], lengths)
        self.pool.edit(*(Pop(row.seq, count) for row, count in zip(self.rows, surplus, strict=True) if count))
        for row, length, count in zip(self.rows, lengths, surplus, strict=True):
            if count:
                self.mark_cut(row, length)
                self.set_pending(row, None)
            if row.tokens is not None:
                row.tokens.size = length

    def record(self, row: Row, start: int, ids: Ids, runs: AdapterRuns, positions: Ids | None = None) -> None:
        """The row's sequence holds ``ids`` from ``start`` on, and nothing behind them, at ``positions`` (None: their indices); all
        its tokens ran as ``runs`` say."""
        row.runs = history(runs, start + ids.size)
        row.stand(start, positions)
        if row.tokens is not None:
            row.tokens.replace_from(start, ids)
        self.capacity = max(self.capacity, start + ids.size)
        self.set_pending(row, None)
        self.touch()

    def set_pending(self, row: Row, pending: Pending | None) -> None:
        """Let a tree wait beside a row, in the place of one that waited before."""
        if row.pending is not None:
            self.pool.remove([row.pending.seq])
        row.pending = pending

    def keep_path(self, row: Row, node: int) -> None:
        """The row becomes that of its tree's path to ``node``; the tree is gone."""
        pending = row.pending
        if pending is None:
            raise QuireError("there is no tree to keep a path of")
        self.pool.edit(Commit((pending.seq,), (node,)))
        if pending.start < self.pool.state.sequence_length(row.seq):
            self.mark_cut(row, pending.start)
        self.pool.remove([row.seq])
        row.seq, row.pending = pending.seq, None
        path = pending.path(node)
        positions = None if pending.positions is None else pending.positions[path]
        self.record(row, pending.start, pending.ids[path], pending.runs, positions)

    # -- recurrent states ------------------------------------------------------------------------------------

    def settle(self) -> int:
        """Verified chains become ordinary tokens, of which only the last states are kept; how many tokens these were."""
        tokens = 0
        for row in self.rows:
            if row.chain is not None:
                self.pool.edit(Commit((row.seq,), (row.chain.ids.size - 1,)))
                tokens += row.chain.ids.size
                row.chain = None
        return tokens

    def cut_chain(self, row: Row, length: int) -> None:
        """Keep of a row, and of its verified chain, ``length`` tokens, which do not end before the chain begins."""
        chain = row.chain
        if chain is None:
            raise QuireError("there is no chain to cut")
        self.pool.edit(Commit((row.seq,), (length - chain.start - 1,)))
        row.chain = None
        if length < chain.start + chain.ids.size:
            self.mark_cut(row, length)
            if row.tokens is not None:
                row.tokens.size = length
        self.touch()

    def mark(self, row: Row) -> None:
        """Keep the present recurrent state of a settled row to come back to, in the place of the one that was marked before. Not
        where slots are scarce: a mark saves work and nothing else."""
        row.mark = self.pool.mark(row.seq, row.mark)

    def give_up_states(self) -> int:
        """Let go of recurrent states that only save work: those inside of verified chains, marks, and what is kept where the tokens
        that lead to it are known, and the adapters are loaded that they ran under; how many they were."""
        found = self.settle()
        state = self.pool.state
        for row in self.rows:
            if not (held := state.checkpoints(row.seq)):
                row.mark = None
                continue
            ids = NO_IDS if row.tokens is None else row.tokens.ids
            known = ids.size if not (ids < 0).any() else int((ids < 0).argmax())
            known = 0 if row.origin.modified else known
            known = min([known, *(start for start, adapter in row.runs.runs if not self.pool.is_loaded(adapter))])
            for position in held:
                if position <= known or position == row.mark:
                    state.drop_checkpoint(row.seq, position)
                    found += 1
            row.mark = None
        return found

    def mark_cut(self, row: Row, length: int) -> None:
        """Handles of this row that are longer than ``length`` are stale from now on."""
        self.revision += 1
        row.cut(self.revision, length)

    @_locked
    def resize(self, n: int) -> None:
        if not self.dynamic:
            raise InvalidArgument("KV cache is not dynamic and cannot be resized.")
        if n > self.pool.max_model_len:
            raise ResourceExhausted(f"resize to {n} slots is beyond the model's maximum of {self.pool.max_model_len}")
        self.capacity = max(self.capacity, n)

    @_locked
    def deep_copy(self) -> KVCache:
        return self.copy_of(self.lengths)

    @_locked
    def copy_of(self, lengths: Sequence[int]) -> KVCache:
        """A new cache of the first ``lengths[i]`` tokens of row i. ``FailedPrecondition`` as ``truncate``."""
        self.settle()
        seqs = self.pool.fork([row.seq for row in self.rows], lengths)
        rows = [row.like(seq, length) for seq, row, length in zip(seqs, self.rows, lengths, strict=True)]
        return KVCache(self.pool, rows, capacity=self.capacity, dynamic=self.dynamic)

    @_locked
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
        source.settle()
        origins = [source.rows[index] for index in indices]
        seqs = self.pool.fork([row.seq for row in origins])
        self.replace_content([row.like(seq) for seq, row in zip(seqs, origins, strict=True)])

    def replace_content(self, fresh: Sequence[Row]) -> None:
        """Swap in new sequences; the old ones are freed and all handles with tokens are stale."""
        self.pool.remove([seq for row in self.rows for seq in row.seqs])
        for row, new in zip(self.rows, fresh, strict=True):
            row.seq, row.tokens = new.seq, new.tokens
            row.pending = row.chain = None
            self.mark_cut(row, 0)
            row.runs, row.positions, row.mark, row.origin = new.runs, new.positions, new.mark, new.origin
        self.touch()

    def take_over(self, other: KVCache) -> None:
        """Swap in the rows of another cache with as many, which is released and holds nothing any more."""
        self.replace_content(other.rows)
        other.rows.clear()
        other.release()

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
            self.settle()
            return serialized.dump(self)

    def load(self, data: bytes | bytearray | memoryview, *, convert_dtype: bool = False) -> None:
        # A session's file may have tokens that must be run, so it is a call of the executor like any other.
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
    """``InvalidArgument`` for a layer that does not exist, ``Unsupported`` for one without K and V."""
    known = (*pool.layer_ids, *pool.recurrent_ids)
    if layer not in known:
        raise InvalidArgument(f"layer {layer} does not exist; the model has layers {min(known)}..{max(known)}")
    if not isinstance(pool.spec_of(layer), KeyValueAttention):
        raise Unsupported(f"layer {layer} keeps no K and V")
