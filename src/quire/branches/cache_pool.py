"""The sequences of a runner that belong to KV caches: who holds them, room for more, what happens when nobody does.

All caches of one executor share a ``CachePool``. It also knows what stays true after shutdown: geometry, limits, identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from quire.branches.branch import Branch
from quire.branches.row import Row
from quire.branches.running_calls import Operations
from quire.contracts.kv_state import ModelState
from quire.contracts.layers import KeyValueAttention, LatentAttention, sink_refusal, window_refusal
from quire.errors import FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.interrupts import Lock
from quire.kv.rule_table import POSITIONS_OF_WINDOWS, position_refusal
from quire.kv.sequences import check_integer
from quire.kv.windows import Window
from quire.models.fingerprint import ModelIdentity
from quire.orphans import Orphans
from quire.runner.local import Runner
from quire.runner.room import Rank
from quire.types import AdapterRuns, Add, Edit, Fork, Remove, SeqId, SetWindow, Step

NO_PAGES = "the model has recurrent layers only, whose state lies in no pages of tokens"


class PooledCache(Protocol):
    """What a pool knows of a cache over it."""

    rows: list[Row]
    last_access: float | None

    def give_up_states(self) -> int:
        """Let go of recurrent states that only save work; how many they were."""
        ...

    def settle(self) -> int:
        """Let verified chains become ordinary tokens; how many these were."""
        ...

    def release(self) -> None:
        """Give the pages back now."""
        ...


class CachePool:
    """What KV caches need of the executor that made them.

    ``lock`` serialises everything that touches the runner; whoever else drives the same runner must use the same one.
    ``window``, ``sink``: what each sequence keeps, its last ``window - sink`` tokens and its first ``sink``; None: all.
    ``chunk_size``: tokens of a forward at most where tokens are run again; <= 0: any number.

    Until ``close`` it gives up what others need more (``runner.room``).
    """

    def __init__(
        self,
        runner: Runner,
        identity: ModelIdentity,
        max_model_len: int,
        lock: Lock,
        *,
        window: int | None = None,
        sink: int = 0,
        chunk_size: int = 0,
    ) -> None:
        state, geometry = runner.state, runner.state.geometry
        self.lock = lock
        self.chunk_size = chunk_size
        self.identity = identity
        self.max_model_len = max_model_len
        self.vocab_size = runner.model.vocab_size
        self.hidden_size = runner.model.hidden_size
        self.specs: tuple[KeyValueAttention | LatentAttention, ...] = geometry.specs
        """Of the layers with attention."""
        self.layer_ids = geometry.layer_ids
        """Their global ids, ascending."""
        self.recurrent_ids: tuple[int, ...] = state.recurrent_ids
        """Those of recurrent layers."""
        self.num_blocks = len(runner.model.blocks)
        self.layer_kinds = tuple(sorted({spec.kind for spec in runner.model.layer_specs}))
        self.page_size = state.page_size
        self.page_bytes = geometry.page_bytes
        """Of a page of each layer class."""
        self.state_bytes = geometry.state_bytes
        """Of the states of all recurrent layers at one position."""
        self.state_interval = geometry.interval
        """Tokens between recurrent states that are kept by themselves; 0: none is."""
        self.keeps_last_state = geometry.ring > 0 or not self.recurrent_ids
        """Whether a forward can always be undone by taking its tokens back."""
        window = None if window is None else check_integer(window, "window", 1)
        sink = check_integer(sink, "sink", 0)
        if sink and (window is None or sink >= window):
            raise InvalidArgument(f"sink {sink} with window {window}; 0 <= sink < window is needed")
        if window is not None and (reason := window_refusal(runner.model.layer_specs)):
            raise Unsupported(f"window {window}: {reason}")
        if sink and (reason := sink_refusal(runner.model.layer_specs)):
            raise Unsupported(f"sink {sink}: {reason}")
        self.row_window = None if window is None else Window(window, sink)
        """What each new row keeps; None: all of its tokens."""
        self.is_windowed = window is not None or any(one is not None for one in geometry.windows)
        """Whether some layer lets go of tokens."""
        self.dtype: torch.dtype = state.dtype
        self.device: torch.device = state.device
        self.caches: WeakValueDictionary[str, PooledCache] = WeakValueDictionary()
        self.peak_bytes = 0
        self.position_refusal = position_refusal(runner.model.layer_specs)
        """Why tokens can stand at no positions but their indices; empty: they can."""
        if window is not None and not self.position_refusal:
            self.position_refusal = POSITIONS_OF_WINDOWS
        self.adapter_refusal = runner.adapters.refusal
        """Why the model can run no adapter; empty: it can."""
        self._fingerprints: dict[int, str] = {}
        """Of the adapters that caches may name."""
        self.replayed_tokens = 0
        """Tokens that completed calls have run again to go back to a position."""
        self._runner: Runner | None = runner
        # Holds the state and not this pool, whose memory is free once its last holder is gone.
        self.orphans = Orphans(lock, lambda: not state.forward_is_open)
        self.operations = Operations()
        """The calls that are inside, of the executor and of handles."""
        self.broken = ""
        """Why nothing can run any more; empty while it can."""
        runner.room.join(self)

    @property
    def runner(self) -> Runner:
        """``FailedPrecondition`` after shutdown."""
        if self._runner is None:
            raise FailedPrecondition("the executor is shut down; make a new one")
        return self._runner

    def require_working(self, verb: str) -> None:
        """``QuireError`` if nothing can run any more."""
        if self.broken:
            raise QuireError(f"{verb}: {self.broken}; make a new executor")

    @property
    def runner_or_none(self) -> Runner | None:
        """None after shutdown."""
        return self._runner

    @property
    def state(self) -> ModelState:
        return self.runner.state

    def spec_of(self, layer: int) -> KeyValueAttention | LatentAttention | None:
        """What an attention layer is; None for others."""
        return self.specs[self.layer_ids.index(layer)] if layer in self.layer_ids else None

    def logits(self, *shape: int) -> torch.Tensor:
        """A place for logits, float32 ``[*shape, V]``, zeros."""
        return torch.zeros(*shape, self.vocab_size, device=self.device)

    # -- sequences -------------------------------------------------------------------------------------------

    def edit(self, *edits: Edit) -> None:
        """Apply edits through the runner, so that every rank hears of them."""
        if edits:
            self.runner.execute(Step(edits=edits))

    def add(self, count: int) -> list[SeqId]:
        """New empty sequences."""
        seqs = [self.runner.new_seq() for _ in range(count)]
        self.edit(*(Add(seq) for seq in seqs))
        if (window := self.row_window) is not None:
            self.edit(*(SetWindow(seq, window.size, window.sink) for seq in seqs))
        return seqs

    def fork(self, parents: Sequence[SeqId], positions: Sequence[int] | None = None) -> list[SeqId]:
        """Copy-on-write forks of the first ``positions[i]`` tokens; None: of all. Copies no page.

        ``FailedPrecondition``, and no fork, as ``require_reachable``.
        """
        if positions is not None:
            self.require_reachable(parents, positions)
        seqs = [self.runner.new_seq() for _ in parents]
        starts = [-1] * len(seqs) if positions is None else positions
        self.edit(*(Fork(parent, child, pos) for parent, child, pos in zip(parents, seqs, starts, strict=True)))
        return seqs

    def require_reachable(self, seqs: Sequence[SeqId], positions: Sequence[int]) -> None:
        """``FailedPrecondition`` unless each sequence can go back to its position with nothing to run again: where a window has let
        go of what a continuation there would need, or no recurrent state is kept."""
        for seq, position in zip(seqs, positions, strict=True):
            if again := self.state.rewind_cost(seq, position):
                raise FailedPrecondition(
                    f"position {position} of sequence {seq} is reachable only by running {again} tokens again from a recurrent "
                    f"state that is kept; go to {position - again} and run them"
                )

    def remove(self, seqs: Sequence[SeqId]) -> None:
        self.edit(*(Remove(seq) for seq in seqs))

    # -- room ------------------------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Make room by giving up one thing of any owner; return whether there was any. Call it under the lock."""
        return self.runner.room.make(self)

    def has_room(self, rows: int, tokens: int) -> bool:
        """Return whether so many new rows can come to hold ``tokens`` each, in what is free or could be given up for them.

        Nothing is given up to find out. States of caches that only save work count as taken. Call it under the lock.
        """
        if rows < 1 or not 1 <= tokens <= self.max_model_len:
            return False
        self.sweep()
        window = None if self.row_window is None else (self.row_window.size, self.row_window.sink)
        step = min(tokens, self.chunk_size) if self.chunk_size > 0 else tokens
        needed = self.state.pages_at_most(tokens, window, step)
        if self.recurrent_ids:
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
        return rank is Rank.SCARCE_STATES and self._states_are_short and self.reclaim_states()

    def loose(self) -> Collection[SeqId]:
        """See ``Giver``. What orphans hold is given back before anybody counts."""
        return ()

    @property
    def _states_are_short(self) -> bool:
        """Whether states rather than pages are what a call of the owner lacks: at most half of the slots can be had, or more than
        half of the pages of each class are free."""
        if not self.recurrent_ids:
            return False
        *free, (states, slots) = zip(self.state.free_pages(), self.state.pool_sizes(), strict=True)
        return 2 * states <= slots or all(2 * pages > size for pages, size in free)

    def missing_pages(
        self, seqs: Sequence[SeqId], counts: Sequence[int], trees: Sequence[tuple[int, ...] | None] | None = None
    ) -> int:
        """Pages that are missing for ``counts[i]`` more tokens of each, when nothing more can be given up; nothing is given up for
        more than there is. Recurrent states are not counted."""
        parents = trees if trees is not None and any(tree is not None for tree in trees) else None
        while (short := self.state.page_shortage(seqs, counts, parents)).missing:
            if short.never or not self.reclaim():
                return short.missing
        return 0

    @property
    def available_states(self) -> int:
        """Slots for recurrent states that a forward can take now; 0 without recurrent layers."""
        return self.state.num_available_states

    def missing_states(self, needed: int) -> int:
        """Slots for recurrent states that are missing of so many, when nothing more can be given up; nothing is given up for more
        than there are."""
        never = not self.recurrent_ids or needed > self.state.pool_sizes()[-1]
        caches = self._by_last_access()
        while (missing := needed - self.available_states) > 0:
            if never or not (self._give_up_states(caches, missing) or self.reclaim()):
                return missing
        return 0

    def is_roomy(self, states: int) -> bool:
        """Whether so many slots for recurrent states may be held only to save work: half of the free ones."""
        return bool(self.recurrent_ids) and 2 * states <= self.state.num_free_states

    def mark(self, seq: SeqId, old: int | None) -> int | None:
        """Keep the present recurrent state of a sequence, if there is room to save work, and let go of the one that was kept so
        at ``old``. Returns the position that stands for ``old`` from now on."""
        state = self.state
        if not self.recurrent_ids:
            return None
        position, held = state.sequence_length(seq), state.checkpoints(seq)
        if position == 0 or position in held:
            return old if old in held else None
        if old is not None and old in held:
            state.drop_checkpoint(seq, old)
        if not self.is_roomy(1):
            return None
        state.checkpoint(seq)
        return position

    def reclaim_states(self) -> bool:
        """Give up recurrent states of caches that only save work, of the cache first that was not used for longest; whether
        there were any."""
        return self._give_up_states(self._by_last_access(), 1) > 0

    def _by_last_access(self) -> Iterator[PooledCache]:
        return iter(sorted(self.caches.values(), key=lambda cache: cache.last_access or 0.0))

    @staticmethod
    def _give_up_states(caches: Iterator[PooledCache], wanted: int) -> int:
        """Let the next of these caches let go of states that only save work, until those are ``wanted``; how many they are. Fewer
        slots may be free by that: others name some of them, too."""
        found = 0
        while found < wanted and (cache := next(caches, None)) is not None:
            found += cache.give_up_states()
        return found

    # -- adapters --------------------------------------------------------------------------------------------

    def is_loaded(self, adapter: int | None) -> bool:
        """Whether tokens can run under it; under the base model they always can."""
        return adapter is None or adapter in self.runner.adapters.ids

    def note_adapters(self, histories: Iterable[AdapterRuns]) -> None:
        """Rows are about to be so: keep what identifies their adapters, which may be unloaded while caches name them."""
        wanted = frozenset[int]().union(*(runs.ids for runs in histories))
        if new := wanted - self._fingerprints.keys():
            # What no cache names any more goes, so that this is never much longer than what they name.
            rows = [row for cache in list(self.caches.values()) for row in cache.rows]
            named = wanted.union(*(row.named_adapters for row in rows))
            kept = {one: text for one, text in self._fingerprints.items() if one in named}
            self._fingerprints = kept | {one: self.runner.adapters.get(one).fingerprint for one in new}

    def fingerprint_of(self, adapter: int) -> str:
        """What identifies an adapter that a cache names, loaded or not."""
        return self._fingerprints[adapter]

    def lets_go(self, branch: Branch) -> bool:
        """Whether some layer forgets tokens of a branch: by the model's windows, or by the branch's own."""
        return self.is_windowed or branch.window is not None

    def missing_full_pages(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> int:
        """As ``missing_pages``, for what keeps all tokens, for as many forwards as it takes; copies of shared tails aside."""
        while (short := self.state.full_page_shortage(seqs, counts)).missing:
            if short.never or not self.reclaim():
                return short.missing
        return 0

    def require_free(self, pages: int, states: int, what: str) -> None:
        """``ResourceExhausted`` unless so many pages, and slots for recurrent states, can be had."""
        if self.recurrent_ids and self.missing_states(states):
            raise ResourceExhausted(
                f"{what} needs {states} recurrent states and {self.available_states} are free; release or clear caches"
            )
        while self.specs and pages > self.state.num_available_pages():
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
        return 0 if runner is None else runner.state.num_used_pages

    @property
    def used_bytes(self) -> int:
        """Bytes of these pages and of recurrent states."""
        runner = self._runner
        return 0 if runner is None else runner.state.num_used_bytes

    def note_use(self) -> None:
        """Remember the most bytes of pages and states that were in use."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    # -- the end of caches -----------------------------------------------------------------------------------

    def free(self, rows: list[Row]) -> bool:
        """Give the pages of rows back, which may be gone already; return whether there were any."""
        left = [] if self._runner is None else [seq for row in rows for seq in row.seqs if self.state.has_sequence(seq)]
        self.remove(left)
        return bool(left)

    def sweep(self) -> bool:
        """Give back the pages of caches that are gone; return whether there were any. Call it under the lock."""
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
