"""``CacheRows``: the rows of a KV cache, and the changes that calls make to them.

Transactions, rewinds and files work on these. ``KVCache`` adds the verbs of its contract.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Concatenate, Final, ParamSpec, Self, TypeVar

from quire.base.errors import NotFound, QuireError
from quire.base.media import NO_MEDIA
from quire.base.signatures import checks_arguments
from quire.base.types import DropCheckpoint, Pop, SetWindow
from quire.base.uncopied import Uncopied
from quire.branches import spare_states
from quire.branches.branch import Branch
from quire.branches.extension import Extension, keep
from quire.branches.owner import replay_refusal
from quire.executor.cache_pool import CachePool
from quire.executor.row import Row

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="CacheRows")


def locked(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorator: run a method under the pool's lock, and only on a cache that is not released."""

    @wraps(method)
    def wrapper(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.pool.lock:
            self.require_live()
            self.pool.sweep()
            return method(self, *args, **kwargs)

    return wrapper


@checks_arguments()
class CacheRows(Uncopied):
    """The rows of a cache over a pool, which frees their sequences after the cache is gone."""

    _instead = "deep_copy() makes another on the same pages, serialize() keeps it"

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
        pool.caches[self.cache_id] = self
        end = partial(pool.free, rows)
        self._finalizer = weakref.finalize(self, pool.finalizers.leave, end)
        self._finalizer.atexit = False
        pool.finalizers.watch(self, end)  # registered last, so that its callback runs first

    @classmethod
    def create(cls, pool: CachePool, batch_size: int, capacity: int, dynamic: bool) -> Self:
        """Return an empty cache. The arguments are checked already."""
        return cls(
            pool,
            [Row(seq=seq, window=pool.facts.row_window) for seq in pool.add(batch_size)],
            capacity=capacity,
            dynamic=dynamic,
        )

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    @property
    @locked
    def lengths(self) -> tuple[int, ...]:
        return tuple(row.computed for row in self.rows)

    def require_live(self) -> None:
        """Raise ``NotFound`` if it was released."""
        if self.released:
            raise NotFound(f"KV cache {self.cache_id} was released; make a new one")

    @locked
    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[i]`` tokens of row i, at most as many as it has. Runs nothing.

        ``FailedPrecondition``, with all rows unchanged, if a window has dropped tokens that a
        continuation needs, or tokens must be replayed (``rewinding.truncate`` replays them).
        """
        self.commit_chains()
        surplus = [present - length for present, length in zip(self.lengths, lengths, strict=True)]
        self.pool.require_reachable([row.seq for row in self.rows], lengths)
        self.pool.apply(*(Pop(row.seq, count) for row, count in zip(self.rows, surplus, strict=True) if count))
        for row, length, count in zip(self.rows, lengths, surplus, strict=True):
            if count:
                self.mark_cut(row, length)
                self.set_pending(row, None)

    def take(self, row: Row, new: Extension, count: int) -> None:
        """Record that a row ends with the tokens of ``new`` that count (``keep``), behind its first
        ``new.start`` ones."""
        taken = new.kept(count)
        row.tokens.replace_from(new.start, new.ids[taken])
        row.computed, row.runs = row.tokens.size, new.runs
        row.runs = row.runs_before(row.computed)
        row.stand(new.start, None if new.positions is None else new.positions[taken])
        self.capacity = max(self.capacity, row.computed)
        self.set_pending(row, None)
        self.touch()

    def set_pending(self, row: Row, pending: Extension | None) -> None:
        """Keep a verified tree beside a row, in place of an earlier one."""
        if row.pending is not None:
            self.pool.remove(row.pending.seq)
        row.pending = pending

    def keep_path(self, row: Row, node: int) -> None:
        """Keep the path of the row's tree to ``node``, and drop the tree."""
        pending = row.pending
        if pending is None:
            raise QuireError("there is no tree to keep a path of")
        keep(self.pool, [pending], [node])
        if pending.start < self.pool.state.sequence_length(row.seq):
            self.mark_cut(row, pending.start)
        self.pool.remove(row.seq)
        row.seq, row.pending = pending.seq, None
        self.take(row, pending, node)

    @locked
    def copy_of(self, lengths: Sequence[int]) -> Self:
        """Return a cache of the first ``lengths[i]`` tokens of row i. Raises the errors of
        ``truncate``."""
        self.commit_chains()
        seqs = self.pool.fork_rows(self.rows, lengths)
        rows = [row.like(seq, length) for seq, row, length in zip(seqs, self.rows, lengths, strict=True)]
        return type(self)(self.pool, rows, capacity=self.capacity, dynamic=self.dynamic)

    def replace_content(self, fresh: Sequence[Row]) -> None:
        """Replace the rows by new sequences; remove the old ones. Their handles with tokens become
        stale."""
        self.pool.remove(*(seq for row in self.rows for seq in row.seqs))
        for row, new in zip(self.rows, fresh, strict=True):
            row.pending = row.chain = None
            self.mark_cut(row, 0)
            row.become(new, new.computed, new.seq)
        self.touch()

    def take_over(self, other: CacheRows) -> None:
        """Take the rows of another cache with equally many, and release that cache."""
        self.replace_content(other.rows)
        other.rows.clear()
        other.release()

    def mark_cut(self, row: Row, length: int) -> None:
        """Make handles of this row that are longer than ``length`` stale."""
        self.revision += 1
        row.cut(self.revision, length)

    def touch(self) -> None:
        """Record the time of a use."""
        self.last_access = time.monotonic()

    def release(self) -> None:
        """Free the pages now; a second call has no effect. Forks keep theirs."""
        with self.pool.lock:
            if self.released:
                return
            self.released = True
            self._finalizer.detach()
            self.pool.caches.pop(self.cache_id, None)
            self.pool.free(self.rows)

    def commit_chains(self) -> int:
        """Commit verified chains as ordinary tokens; return their number. Of their recurrent states
        only the last ones are kept."""
        tokens = 0
        for row in self.rows:
            if row.chain is not None:
                keep(self.pool, [row.chain], [row.chain.num_run - 1])
                tokens += row.chain.num_run
                row.chain = None
        return tokens

    def cut_chain(self, row: Row, length: int) -> None:
        """Cut a row to ``length`` tokens, at or after the beginning of its verified chain."""
        chain = row.chain
        if chain is None:
            raise QuireError("there is no chain to cut")
        keep(self.pool, [chain], [length - chain.start - 1])
        row.chain = None
        if length < chain.end:
            self.mark_cut(row, length)
        self.touch()

    def mark(self, row: Row) -> None:
        """Keep a row's present recurrent state as its mark, in place of an earlier one, if slots
        are free."""
        row.mark = spare_states.mark(self.pool.runner, row.seq, row.mark)

    def drop_spare_states(self) -> int:
        """Drop recurrent states that only save work; return their number.

        These are the states in verified chains, at marks, and at all positions that a replay of
        known tokens can reach.
        """
        found = self.commit_chains()
        for row in self.rows:
            for position in self.pool.state.checkpoints(row.seq):
                if position == row.mark or not replay_refusal(row, 0, position, self.pool.adapter_ids):
                    self.pool.apply(DropCheckpoint(row.seq, position))
                    found += 1
            row.mark = None
        return found


def become_fork(cache: CacheRows, branch: Branch, *, private: bool) -> None:
    """Make the only row of a cache a copy-on-write fork of a completely computed branch.
    ``private``: no prompt may share the row's tokens. Call it under the lock."""
    length, row = len(branch.tokens), cache.rows[0]
    if branch.seq is None:
        if branch.window is not None:
            cache.pool.apply(SetWindow(row.seq, branch.window.size, branch.window.sink))
            row.window = branch.window
        return
    cache.pool.note_adapters([branch.runs_before(length)])
    seq = cache.pool.fork_of(branch.seq)
    fresh = Row(seq=seq)
    fresh.become(branch, length, seq)
    fresh.tokens.media = NO_MEDIA  # a cache does not store embeddings
    fresh.mark, fresh.origin = None, replace(branch.origin, private=private)
    cache.replace_content([fresh])
    cache.capacity = max(cache.capacity, length)
