"""``CachePool``: the sequences of an executor's KV caches, and the pages for more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from quire.base.errors import FailedPrecondition, QuireError, ResourceExhausted
from quire.base.finalizers import FinalizerQueue
from quire.base.interrupts import Lock
from quire.base.types import AdapterRuns, SeqId
from quire.branches import spare_states
from quire.branches.model_facts import ModelFacts
from quire.branches.owner import BranchOwner
from quire.branches.spare_states import SpareStateOwner
from quire.executor.row import Row
from quire.executor.running_calls import Operations
from quire.runner.local import Runner
from quire.runner.reclaim import ReclaimKind

NO_PAGES = "the model has recurrent layers only, whose state lies in no pages of tokens"


class PooledCache(SpareStateOwner, Protocol):
    """The interface of a cache to its pool."""

    rows: list[Row]

    def commit_chains(self) -> int:
        """Commit verified chains; return the number of their tokens."""

    def release(self) -> None:
        """Give the pages back now."""


class CachePool(BranchOwner):
    """The services of an executor for its KV caches.

    ``lock`` serialises all use of the runner; all users of the runner must share it. Until
    ``close`` the pool gives up sequences for others on request (``runner.reclaim``).
    """

    def __init__(self, runner: Runner, facts: ModelFacts, lock: Lock) -> None:
        state = runner.state
        self.facts = facts
        self.lock = lock
        self.caches: WeakValueDictionary[str, PooledCache] = WeakValueDictionary()
        self.peak_bytes = 0
        """The most bytes of pages and recurrent states that were in use."""
        self._fingerprints: dict[int, str] = {}
        """Fingerprints of the adapters that caches may name."""
        self.replayed_tokens = 0
        """Number of replayed tokens in completed calls."""
        self._runner: Runner | None = runner
        # The closure holds the state but not this pool, so that the pool's memory can be freed.
        self.finalizers = FinalizerQueue(lock, lambda: not state.forward_is_open)
        self.operations = Operations()
        """The running calls, of the executor and of handles."""
        self.broken = ""
        """Reason why nothing can run any more; empty while calls can run."""
        runner.room.join(self)

    @property
    def runner(self) -> Runner:
        """Return the runner. ``FailedPrecondition`` after shutdown."""
        if self._runner is None:
            raise FailedPrecondition("the executor is shut down; make a new one")
        return self._runner

    def require_working(self, verb: str) -> None:
        """Raise ``QuireError`` if nothing can run any more."""
        if self.broken:
            raise QuireError(f"{verb}: {self.broken}; make a new executor")

    @property
    def runner_or_none(self) -> Runner | None:
        """Return the runner; None after shutdown."""
        return self._runner

    def add(self, count: int) -> list[SeqId]:
        """Add empty sequences."""
        return [self.add_seq(self.facts.row_window) for _ in range(count)]

    def fork_rows(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[SeqId]:
        """Fork the first ``lengths[i]`` tokens of each row. Copies no page. Raises the errors of
        ``require_reachable`` before any fork."""
        self.require_reachable([row.seq for row in rows], lengths)
        return [self.fork_of(row.seq, length) for row, length in zip(rows, lengths, strict=True)]

    def require_reachable(self, seqs: Sequence[SeqId], positions: Sequence[int]) -> None:
        """Raise ``FailedPrecondition`` unless each sequence can be cut to its position without a
        replay.

        A replay is needed if a window has dropped tokens that a continuation needs, or no recurrent
        state is kept there.
        """
        for seq, position in zip(seqs, positions, strict=True):
            if again := self.state.rewind_cost(seq, position):
                raise FailedPrecondition(
                    f"position {position} of sequence {seq} is reachable only by running {again} tokens again from a recurrent "
                    f"state that is kept; go to {position - again} and run them"
                )

    def replay_start(self, row: Row, start: int, label: str = "") -> int:
        """Return the position, at most ``start``, from which a fork of a row without an open chain
        must run the row's tokens.

        It is ``start`` if no layer is recurrent or the state there is kept.
        ``FailedPrecondition``: the tokens cannot be replayed (``replay_refusal``).
        """
        if not self.facts.recurrent_ids or start >= self.state.sequence_length(row.seq):
            return start
        return self.reach(row, start, f"{label}: " if label else "")

    def make_room(self) -> bool:
        """See ``BranchOwner``. A running call may still need states of this owner's own."""
        return self.runner.room.make(self)

    def has_room(self, rows: int, tokens: int) -> bool:
        """Return True if ``rows`` new rows of ``tokens`` fit the pages and states that are free or
        could be given up. Gives up nothing. States that only save work count as taken. Call it
        under the lock."""
        if rows < 1 or not 1 <= tokens <= self.facts.max_model_len:
            return False
        self.sweep()
        kept = self.facts.row_window
        window = None if kept is None else (kept.size, kept.sink)
        step = min(tokens, self.facts.chunk_size) if self.facts.chunk_size > 0 else tokens
        needed = self.state.pages_at_most(tokens, window, step)
        if self.facts.recurrent_ids:
            # One for the row's present state and one for the state after its next token.
            needed[-1] = min(2, tokens)
        free = self.state.free_pages(self.runner.room.reclaimable())
        return all(rows * pages <= there for pages, there in zip(needed, free, strict=True))

    def reclaim_one(self, kind: ReclaimKind) -> bool:
        """See ``SequenceOwner``."""
        if self._runner is None or self.state.forward_is_open:
            return False
        if kind is ReclaimKind.FINALIZERS:
            return self.sweep()
        short = kind is ReclaimKind.SCARCE_STATES and spare_states.are_short(self.state)
        return short and spare_states.drop(spare_states.by_last_access(self.caches.values()), 1) > 0

    def reclaimable(self) -> Collection[SeqId]:
        """See ``SequenceOwner``. Empty: sequences of objects that are gone are freed before they
        could count."""
        return ()

    def missing_pages(
        self, seqs: Sequence[SeqId], counts: Sequence[int], trees: Sequence[tuple[int, ...] | None] | None = None
    ) -> int:
        """Make room for ``counts[i]`` more tokens of each sequence; return the number of pages
        still missing. Gives up nothing for more pages than the pool has. Recurrent states are not
        counted."""
        parents = trees if trees is not None and any(tree is not None for tree in trees) else None
        while (short := self.state.page_shortage(seqs, counts, parents)).missing:
            if short.never or not self.make_room():
                return short.missing
        return 0

    def missing_full_pages(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> int:
        """As ``missing_pages``, for layers that keep all tokens, without copies of shared tails."""
        while (short := self.state.full_page_shortage(seqs, counts)).missing:
            if short.never or not self.make_room():
                return short.missing
        return 0

    @property
    def available_states(self) -> int:
        """Number of slots for recurrent states that a forward can take now; 0 without recurrent
        layers."""
        return self.state.num_available_states

    def missing_states(self, needed: int) -> int:
        """Make room for ``needed`` recurrent states; return the number of slots still missing.
        Gives up nothing for more slots than the pool has."""
        never = not self.facts.recurrent_ids or needed > self.state.pool_sizes()[-1]
        caches = spare_states.by_last_access(self.caches.values())
        while (missing := needed - self.available_states) > 0:
            if never or not (spare_states.drop(caches, missing) or self.make_room()):
                return missing
        return 0

    def require_free(self, pages: int, states: int, what: str) -> None:
        """Raise ``ResourceExhausted`` unless these pages and recurrent states are free or can be
        made free."""
        if self.facts.recurrent_ids and self.missing_states(states):
            raise ResourceExhausted(
                f"{what} needs {states} recurrent states and {self.available_states} are free; release or clear caches"
            )
        while self.facts.specs and pages > self.state.num_available_pages():
            if not self.make_room():
                free = self.state.num_available_pages()
                raise ResourceExhausted(
                    f"{what} needs {pages} pages of {self.facts.page_size} tokens and {free} of {self.state.num_pages} are free; "
                    "release or clear caches"
                )

    @property
    def used_bytes(self) -> int:
        """Bytes of the runner's pages and recurrent states that are in use by any owner; 0 after
        shutdown. Needs no lock."""
        runner = self._runner
        return 0 if runner is None else runner.state.num_used_bytes

    def note_use(self) -> None:
        """Update ``peak_bytes``."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def note_adapters(self, histories: Iterable[AdapterRuns]) -> None:
        """Keep the fingerprints of adapters, which may be unloaded while caches name them."""
        wanted = frozenset[int]().union(*(runs.ids for runs in histories))
        if new := wanted - self._fingerprints.keys():
            # Drop the fingerprints that no cache names any more, so that the table stays short.
            rows = [row for cache in list(self.caches.values()) for row in cache.rows]
            named = wanted.union(*(row.named_adapters for row in rows))
            kept = {one: text for one, text in self._fingerprints.items() if one in named}
            self._fingerprints = kept | {one: self.runner.adapters.get(one).fingerprint for one in new}

    def fingerprint_of(self, adapter: int) -> str:
        """Return the fingerprint of an adapter that a cache names, loaded or not."""
        return self._fingerprints[adapter]

    def free(self, rows: list[Row]) -> bool:
        """Remove the sequences of rows; return False if none of them existed any more."""
        left = [] if self._runner is None else [seq for row in rows for seq in row.seqs if self.state.has_sequence(seq)]
        self.remove(*left)
        return bool(left)

    def sweep(self) -> bool:
        """Remove the sequences of caches that were garbage collected; return False if there were
        none. Call it under the lock."""
        return self.finalizers.run_finalizers()

    def close(self) -> None:
        """Release all caches and the runner."""
        if self._runner is None:
            return
        for cache in list(self.caches.values()):
            cache.release()
        self.sweep()
        self._runner.room.leave(self)
        self._runner = None
