"""The sequences of a runner that belong to KV caches: who holds them, room for more, what happens when nobody does.

All caches of one executor share a ``CachePool``. It also knows what stays true after shutdown: geometry, limits, identity.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import torch

from quire.contracts.layers import FullAttention
from quire.errors import FailedPrecondition, ResourceExhausted
from quire.executor.rows import Row
from quire.kv.paged import PagedKVState
from quire.runner.local import Runner
from quire.types import Add, Edit, Fork, Remove, SeqId, Step

if TYPE_CHECKING:
    from quire.executor.cache import KVCache


class Identity(Protocol):
    """Which model this is. The digest of the weights may be computed when it is first asked for."""

    def fields(self) -> Mapping[str, str]:
        """``architecture``, ``config`` and ``weights``: equal fields mean that K and V mean the same."""
        ...


class CachePool:
    """What KV caches need of the executor that made them.

    ``lock`` serialises everything that touches the runner; whoever else drives the same runner must use the same one.
    """

    def __init__(self, runner: Runner, identity: Identity, max_model_len: int, lock: threading.RLock) -> None:
        state = runner.state
        self.lock = lock
        self.identity = identity
        self.max_model_len = max_model_len
        self.vocab_size = runner.model.vocab_size
        self.specs: tuple[FullAttention, ...] = tuple(state.specs)
        self.first_layer = state.first_layer
        self.page_size = state.page_size
        self.page_bytes = state.storage.num_bytes // state.num_pages
        self.dtype: torch.dtype = state.dtype
        self.device: torch.device = state.device
        self.caches: WeakValueDictionary[str, KVCache] = WeakValueDictionary()
        self.peak_pages = 0
        self._runner: Runner | None = runner
        self._orphans: deque[list[Row]] = deque()
        self.broken = ""
        """Why nothing can run any more; empty while it can."""

    @property
    def runner(self) -> Runner:
        """``FailedPrecondition`` after shutdown."""
        if self._runner is None:
            raise FailedPrecondition("the executor is shut down; make a new one")
        return self._runner

    @property
    def runner_or_none(self) -> Runner | None:
        """None after shutdown."""
        return self._runner

    @property
    def state(self) -> PagedKVState:
        return self.runner.state

    # -- sequences -------------------------------------------------------------------------------------------

    def edit(self, *edits: Edit) -> None:
        """Apply edits through the runner, so that every rank hears of them."""
        if edits:
            self.runner.execute(Step(edits=edits))

    def add(self, count: int) -> list[SeqId]:
        """New empty sequences."""
        seqs = [self.runner.new_seq() for _ in range(count)]
        self.edit(*(Add(seq) for seq in seqs))
        return seqs

    def fork(self, parents: Sequence[SeqId], positions: Sequence[int] | None = None) -> list[SeqId]:
        """Copy-on-write forks of the first ``positions[i]`` tokens; None: of all. Copies no page."""
        seqs = [self.runner.new_seq() for _ in parents]
        starts = [-1] * len(seqs) if positions is None else positions
        self.edit(*(Fork(parent, child, pos) for parent, child, pos in zip(parents, seqs, starts, strict=True)))
        return seqs

    def remove(self, seqs: Sequence[SeqId]) -> None:
        self.edit(*(Remove(seq) for seq in seqs))

    # -- room ------------------------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Give up what nobody holds, or ask the owner of the runner to give something up; whether there was any."""
        if self.sweep():
            return True
        hook = self.runner.reclaim
        return hook is not None and hook()

    def missing_pages(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> int:
        """Pages that are missing for ``counts[i]`` more tokens of each, when nothing more can be given up."""
        while missing := self.state.missing_pages(seqs, counts):
            if not self.reclaim():
                return missing
        return 0

    def require_free(self, pages: int, what: str) -> None:
        """``ResourceExhausted`` unless so many pages can be had."""
        while pages > self.state.num_available_pages():
            if not self.reclaim():
                free = self.state.num_available_pages()
                raise ResourceExhausted(
                    f"{what} needs {pages} pages of {self.page_size} tokens and {free} of {self.state.num_pages} are free; "
                    "release or clear caches"
                )

    @property
    def used_pages(self) -> int:
        """Pages of the runner that are in use, by whomever; 0 after shutdown. Needs no lock."""
        runner = self._runner
        return 0 if runner is None else runner.state.num_pages - runner.state.num_available_pages()

    def note_use(self) -> None:
        """Remember the most pages that were in use."""
        self.peak_pages = max(self.peak_pages, self.used_pages)

    # -- the end of caches -----------------------------------------------------------------------------------

    def abandon(self, rows: list[Row]) -> None:
        """A cache's last reference is gone. Called by the garbage collector, so at any point of any thread.

        The pages go back at once if nobody is at work. Otherwise whoever is will do it before it leaves: this very
        thread may be in the middle of a change of the page tables.
        """
        self._orphans.append(rows)
        if self.lock._is_owned() or not self.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return
        try:
            self.sweep()
        finally:
            self.lock.release()

    def free(self, rows: list[Row]) -> None:
        """Give the pages of a released cache back. Call it under the lock."""
        self._orphans.append(rows)
        self.sweep()

    def sweep(self) -> bool:
        """Give back the pages of caches that nobody holds; whether there were any. Call it under the lock."""
        if self._runner is None:
            self._orphans.clear()
            return False
        if not self._orphans or self.state.table.forward is not None:
            return False
        while self._orphans:
            self.remove([row.seq for row in self._orphans.popleft() if row.seq in self.state.table])
        return True

    def close(self) -> None:
        """Release all caches and let the runner go."""
        if self._runner is None:
            return
        for cache in list(self.caches.values()):
            cache.release()
        self.sweep()
        self._runner = None
