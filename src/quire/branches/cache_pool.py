"""``CachePool``: the sequences that belong to the KV caches of an executor, and room for more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from quire.branches import spare_states
from quire.branches.model_facts import ModelFacts
from quire.branches.row import Row
from quire.branches.running_calls import Operations
from quire.branches.spare_states import SpareStateOwner
from quire.contracts.kv_state import ModelState
from quire.errors import FailedPrecondition, QuireError, ResourceExhausted
from quire.finalizers import Orphans
from quire.interrupts import Lock
from quire.runner.local import Runner
from quire.runner.room import Rank
from quire.types import AdapterRuns, Add, Edit, Fork, Remove, SeqId, SetWindow, Step

NO_PAGES = "the model has recurrent layers only, whose state lies in no pages of tokens"


class PooledCache(SpareStateOwner, Protocol):
    """What a pool knows of a cache over it."""

    rows: list[Row]

    def commit_chains(self) -> int:
        """Let verified chains become ordinary tokens; return the number of their tokens."""
        ...

    def release(self) -> None:
        """Give the pages back now."""
        ...


class CachePool:
    """What KV caches need of the executor that made them.

    ``lock`` serialises everything that touches the runner; all users of the runner must share it.
    Until ``close`` the pool gives up what others need more (``runner.room``).
    """

    def __init__(self, runner: Runner, facts: ModelFacts, lock: Lock) -> None:
        state = runner.state
        self.facts = facts
        # Those that users outside of executor and branches ask for, too.
        self.identity, self.vocab_size, self.page_size = facts.identity, facts.vocab_size, facts.page_size
        self.max_model_len, self.position_refusal = facts.max_model_len, facts.position_refusal
        self.lock = lock
        self.caches: WeakValueDictionary[str, PooledCache] = WeakValueDictionary()
        self.peak_bytes = 0
        """The most bytes of pages and recurrent states that were in use."""
        self._fingerprints: dict[int, str] = {}
        """Fingerprints of the adapters that caches may name."""
        self.replayed_tokens = 0
        """Tokens that completed calls have run again to go back to a position."""
        self._runner: Runner | None = runner
        # Holds the state and not this pool, whose memory is free once its last holder is gone.
        self.orphans = Orphans(lock, lambda: not state.forward_is_open)
        self.operations = Operations()
        """The running calls, of the executor and of handles."""
        self.broken = ""
        """Why nothing can run any more; empty while it can."""
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

    @property
    def state(self) -> ModelState:
        return self.runner.state

    def edit(self, *edits: Edit) -> None:
        """Apply edits through the runner, so that every rank hears of them."""
        if edits:
            self.runner.execute(Step(edits=edits))

    def add(self, count: int) -> list[SeqId]:
        """Add empty sequences."""
        seqs = [self.runner.new_seq() for _ in range(count)]
        self.edit(*(Add(seq) for seq in seqs))
        if (window := self.facts.row_window) is not None:
            self.edit(*(SetWindow(seq, window.size, window.sink) for seq in seqs))
        return seqs

    def fork(self, parents: Sequence[SeqId], positions: Sequence[int] | None = None) -> list[SeqId]:
        """Fork the first ``positions[i]`` tokens of each (None: all). Copies no page.
        ``FailedPrecondition``, and no fork, as ``require_reachable``."""
        if positions is not None:
            self.require_reachable(parents, positions)
        seqs = [self.runner.new_seq() for _ in parents]
        starts = [-1] * len(seqs) if positions is None else positions
        self.edit(*(Fork(parent, child, pos) for parent, child, pos in zip(parents, seqs, starts, strict=True)))
        return seqs

    def require_reachable(self, seqs: Sequence[SeqId], positions: Sequence[int]) -> None:
        """Raise ``FailedPrecondition`` unless each sequence can go back with nothing to run again.

        It cannot where a window let go of what a continuation needs, or no recurrent state is kept.
        """
        for seq, position in zip(seqs, positions, strict=True):
            if again := self.state.rewind_cost(seq, position):
                raise FailedPrecondition(
                    f"position {position} of sequence {seq} is reachable only by running {again} tokens again from a recurrent "
                    f"state that is kept; go to {position - again} and run them"
                )

    def remove(self, seqs: Sequence[SeqId]) -> None:
        self.edit(*(Remove(seq) for seq in seqs))

    def reclaim(self) -> bool:
        """Give up one thing of any owner; return whether there was any. Call it under the lock."""
        return self.runner.room.make(self)

    def has_room(self, rows: int, tokens: int) -> bool:
        """Return whether so many new rows of ``tokens`` fit what is free or could be given up.
        Gives up nothing. States that only save work count as taken. Call it under the lock."""
        if rows < 1 or not 1 <= tokens <= self.max_model_len:
            return False
        self.sweep()
        kept = self.facts.row_window
        window = None if kept is None else (kept.size, kept.sink)
        step = min(tokens, self.facts.chunk_size) if self.facts.chunk_size > 0 else tokens
        needed = self.state.pages_at_most(tokens, window, step)
        if self.facts.recurrent_ids:
            # One that a row has and one that its next token writes.
            needed[-1] = min(2, tokens)
        free = self.state.free_pages(self.runner.room.loose())
        return all(rows * pages <= there for pages, there in zip(needed, free, strict=True))

    def give_up(self, rank: Rank) -> bool:
        """See ``Giver``."""
        if self._runner is None or self.state.forward_is_open:
            return False
        if rank is Rank.ORPHANS:
            return self.sweep()
        short = rank is Rank.SCARCE_STATES and spare_states.are_short(self.state)
        return short and spare_states.give_up(spare_states.by_last_access(self.caches.values()), 1) > 0

    def loose(self) -> Collection[SeqId]:
        """See ``Giver``. What orphans hold is given back before others count."""
        return ()

    def missing_pages(
        self, seqs: Sequence[SeqId], counts: Sequence[int], trees: Sequence[tuple[int, ...] | None] | None = None
    ) -> int:
        """Make room for ``counts[i]`` more tokens of each; return how many pages are missing still.
        Gives up nothing for more pages than there are. Recurrent states are not counted."""
        parents = trees if trees is not None and any(tree is not None for tree in trees) else None
        while (short := self.state.page_shortage(seqs, counts, parents)).missing:
            if short.never or not self.reclaim():
                return short.missing
        return 0

    def missing_full_pages(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> int:
        """Do as ``missing_pages`` for layers that keep all tokens, copies of shared tails aside."""
        while (short := self.state.full_page_shortage(seqs, counts)).missing:
            if short.never or not self.reclaim():
                return short.missing
        return 0

    @property
    def available_states(self) -> int:
        """Slots for recurrent states that a forward can take now; 0 without recurrent layers."""
        return self.state.num_available_states

    def missing_states(self, needed: int) -> int:
        """Make room for ``needed`` recurrent states; return how many slots are missing still. Gives
        up nothing for more slots than there are."""
        never = not self.facts.recurrent_ids or needed > self.state.pool_sizes()[-1]
        caches = spare_states.by_last_access(self.caches.values())
        while (missing := needed - self.available_states) > 0:
            if never or not (spare_states.give_up(caches, missing) or self.reclaim()):
                return missing
        return 0

    def require_free(self, pages: int, states: int, what: str) -> None:
        """Raise ``ResourceExhausted`` unless so many pages and recurrent states can be had."""
        if self.facts.recurrent_ids and self.missing_states(states):
            raise ResourceExhausted(
                f"{what} needs {states} recurrent states and {self.available_states} are free; release or clear caches"
            )
        while self.facts.specs and pages > self.state.num_available_pages():
            if not self.reclaim():
                free = self.state.num_available_pages()
                raise ResourceExhausted(
                    f"{what} needs {pages} pages of {self.page_size} tokens and {free} of {self.state.num_pages} are free; "
                    "release or clear caches"
                )

    @property
    def used_pages(self) -> int:
        """Pages of the runner that are in use by any owner; 0 after shutdown. Needs no lock."""
        runner = self._runner
        return 0 if runner is None else runner.state.num_used_pages

    @property
    def used_bytes(self) -> int:
        """Bytes of these pages and of the recurrent states in use."""
        runner = self._runner
        return 0 if runner is None else runner.state.num_used_bytes

    def note_use(self) -> None:
        """Keep ``peak_bytes`` up to date."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @property
    def adapter_ids(self) -> Collection[int]:
        """Return the ids of the loaded adapters."""
        return self.runner.adapters.ids

    def note_adapters(self, histories: Iterable[AdapterRuns]) -> None:
        """Keep the fingerprints of adapters, which may be unloaded while caches name them."""
        wanted = frozenset[int]().union(*(runs.ids for runs in histories))
        if new := wanted - self._fingerprints.keys():
            # Those that no cache names any more go: the table stays as short as what caches name.
            rows = [row for cache in list(self.caches.values()) for row in cache.rows]
            named = wanted.union(*(row.named_adapters for row in rows))
            kept = {one: text for one, text in self._fingerprints.items() if one in named}
            self._fingerprints = kept | {one: self.runner.adapters.get(one).fingerprint for one in new}

    def fingerprint_of(self, adapter: int) -> str:
        """Return the fingerprint of an adapter that a cache names, loaded or not."""
        return self._fingerprints[adapter]

    def free(self, rows: list[Row]) -> bool:
        """Give back what rows hold; return whether any of their sequences was left."""
        left = [] if self._runner is None else [seq for row in rows for seq in row.seqs if self.state.has_sequence(seq)]
        self.remove(left)
        return bool(left)

    def sweep(self) -> bool:
        """Give back what caches that are gone held; return whether there was any. Take the lock."""
        return self.orphans.bury()

    def close(self) -> None:
        """Release all caches and let the runner go."""
        if self._runner is None:
            return
        for cache in list(self.caches.values()):
            cache.release()
        self.sweep()
        self._runner.room.leave(self)
        self._runner = None
