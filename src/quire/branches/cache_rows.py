"""``CacheRows``: the rows of a KV cache, and how calls change them.

Transactions, rewinds and files work on these. ``KVCache`` adds the verbs of its contract on top.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Concatenate, Final, ParamSpec, Self, TypeVar

from quire.branches import spare_states
from quire.branches.branch import Branch
from quire.branches.cache_pool import CachePool
from quire.branches.history import Ids
from quire.branches.row import Pending, Row
from quire.errors import NotFound, QuireError
from quire.signatures import checks_arguments
from quire.types import AdapterRuns, Commit, Pop, SetWindow

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound="CacheRows")


def locked(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Let a method run alone, and on a cache that was not released only."""

    @wraps(method)
    def wrapper(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.pool.lock:
            self.require_live()
            self.pool.sweep()
            return method(self, *args, **kwargs)

    return wrapper


@checks_arguments()
class CacheRows:
    """Rows over a pool, which frees them once nobody holds this."""

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
        self._finalizer = weakref.finalize(self, pool.orphans.leave, end)
        self._finalizer.atexit = False
        pool.orphans.watch(self, end)  # noted first, for it comes last

    @classmethod
    def create(cls, pool: CachePool, batch_size: int, capacity: int, dynamic: bool) -> Self:
        """An empty cache; arguments are checked already."""
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
    def lengths(self) -> tuple[int, ...]:
        return self._lengths()

    def require_live(self) -> None:
        """``NotFound`` if it was released."""
        if self.released:
            raise NotFound(f"KV cache {self.cache_id} was released; make a new one")

    @locked
    def _lengths(self) -> tuple[int, ...]:
        return tuple(row.computed for row in self.rows)

    # -- changing --------------------------------------------------------------------------------------------

    @locked
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

    def record(self, row: Row, start: int, ids: Ids, runs: AdapterRuns, positions: Ids | None = None) -> None:
        """The row's sequence holds ``ids`` from ``start`` on, and nothing behind them, at ``positions`` (None: their indices); all
        its tokens ran as ``runs`` say."""
        row.tokens.replace_from(start, ids)
        row.computed, row.runs = row.tokens.size, runs
        row.runs = row.runs_before(row.computed)
        row.stand(start, positions)
        self.capacity = max(self.capacity, row.computed)
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

    @locked
    def copy_of(self, lengths: Sequence[int]) -> Self:
        """A new cache of the first ``lengths[i]`` tokens of row i. ``FailedPrecondition`` as ``truncate``."""
        self.settle()
        seqs = self.pool.fork([row.seq for row in self.rows], lengths)
        rows = [row.like(seq, length) for seq, row, length in zip(seqs, self.rows, lengths, strict=True)]
        return type(self)(self.pool, rows, capacity=self.capacity, dynamic=self.dynamic)

    def replace_content(self, fresh: Sequence[Row]) -> None:
        """Swap in new sequences; the old ones are freed and all handles with tokens are stale."""
        self.pool.remove([seq for row in self.rows for seq in row.seqs])
        for row, new in zip(self.rows, fresh, strict=True):
            row.pending = row.chain = None
            self.mark_cut(row, 0)
            row.seq, row.tokens, row.computed, row.window = new.seq, new.tokens, new.computed, new.window
            row.runs, row.positions, row.mark, row.origin = new.runs, new.positions, new.mark, new.origin
        self.touch()

    def take_over(self, other: CacheRows) -> None:
        """Swap in the rows of another cache with as many, which is released and holds nothing any more."""
        self.replace_content(other.rows)
        other.rows.clear()
        other.release()

    def mark_cut(self, row: Row, length: int) -> None:
        """Handles of this row that are longer than ``length`` are stale from now on."""
        self.revision += 1
        row.cut(self.revision, length)

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
        self.touch()

    def mark(self, row: Row) -> None:
        """Keep the present recurrent state of a settled row to come back to, in the place of the one that was marked before. Not
        where slots are scarce: a mark saves work and nothing else."""
        row.mark = spare_states.mark(self.pool.state, row.seq, row.mark)

    def give_up_states(self) -> int:
        """Let go of recurrent states that only save work: those inside of verified chains, marks, and what is kept where the tokens
        that lead to it are known, and the adapters are loaded that they ran under; how many they were."""
        found = self.settle()
        state = self.pool.state
        for row in self.rows:
            if not (held := state.checkpoints(row.seq)):
                row.mark = None
                continue
            ids = row.tokens.ids
            known = ids.size if not (ids < 0).any() else int((ids < 0).argmax())
            known = 0 if row.origin.modified else known
            known = min([known, *(start for start, adapter in row.runs.runs if not self.pool.is_loaded(adapter))])
            for position in held:
                if position <= known or position == row.mark:
                    state.drop_checkpoint(row.seq, position)
                    found += 1
            row.mark = None
        return found


def become_fork(cache: CacheRows, branch: Branch, *, private: bool) -> None:
    """Let the only row of a cache be a copy-on-write fork of a branch of which all tokens are computed.

    ``private``: no prompt may begin with what the row holds. Call it under the lock.
    """
    length, row = len(branch.tokens), cache.rows[0]
    if branch.seq is None:
        if branch.window is not None:
            cache.pool.edit(SetWindow(row.seq, branch.window.size, branch.window.sink))
            row.window = branch.window
        return
    runs = branch.runs_before(length)
    cache.pool.note_adapters([runs])
    (seq,) = cache.pool.fork([branch.seq])
    origin = replace(branch.origin, private=private)
    tokens = branch.tokens.fork()
    cache.replace_content(
        [Row(seq=seq, tokens=tokens, computed=length, runs=runs, window=branch.window, origin=origin)]
    )
    cache.capacity = max(cache.capacity, length)
