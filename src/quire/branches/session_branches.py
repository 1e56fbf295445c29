"""``SessionBranches``: branches that outlive a request, of sessions and of the prefix cache.

A session's sequence is held by the request that works on it, until the request ends. What can be
had again (a cached sequence, an idle session's state) is given up when the pool is short; a copy of
a session's state may go to host memory. The caller holds the engine's lock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.adapters.keys import AdapterKey, prefix_key, runs_of_session
from quire.base.errors import QuireError, ResourceExhausted
from quire.base.media import Media
from quire.base.metrics import EngineMetrics
from quire.base.outputs import Miss
from quire.base.types import AdapterRuns, DropCheckpoint, Edit, Fork, Overwrite, Pop, Remove, SeqId, Step
from quire.branches import spare_states
from quire.branches.branch import COMPUTED, Branch
from quire.branches.owner import BranchOwner
from quire.branches.prefix_cache import LOOKED_AT, RadixCache
from quire.branches.session_branch import SessionBranch
from quire.branches.stored_state import StoredState
from quire.runner.local import Runner

AHEAD = 4
"""A pool is nearly full if less than one in so many pages is free. As many are copied ahead."""


def media_of(session: SessionBranch, tokens: NDArray[np.int64], media: Media) -> Media:
    """Return the embeddings for ``tokens`` on a session: its own and new ones.
    ``FailedPrecondition`` if a token that must run is gone."""
    known = session.tokens.media | media
    known.require(tokens[max(0, min(session.computed, tokens.size - 1)) :])
    return known


class SessionBranches(BranchOwner):
    """The branches of all sessions of one engine, beside the prefix cache of the same pool."""

    def __init__(self, runner: Runner, *, cache: RadixCache | None, tier: StoredState, metrics: EngineMetrics) -> None:
        self._runner = runner
        self.cache = cache
        self.tier = tier
        self.metrics = metrics
        self.forgets = Miss.NO_CHECKPOINT if runner.state.recurrent_ids else Miss.WINDOW
        """Why a sequence cannot be forked at each of its positions, if it cannot."""
        self.sessions: dict[int, SessionBranch] = {}
        """By identity, least recently used first."""
        self.revision = 0
        """How often a session was used, named or closed."""

    @property
    def runner(self) -> Runner:
        return self._runner

    def apply(self, *edits: Edit) -> None:
        """Execute edits one after the other, and count them."""
        state = self._runner.state
        for edit in edits:
            if isinstance(edit, Remove):
                self.tier.drop(edit.seq)
            if state.recurrent_ids and isinstance(edit, (Fork, Pop)):
                seq = edit.parent if isinstance(edit, Fork) else edit.seq
                length = state.sequence_length(seq)
                position = edit.pos if isinstance(edit, Fork) else length - edit.n
                self.metrics.checkpoints_used.inc(0 < position < length)
            self._runner.execute(Step(edits=(edit,)))
            if isinstance(edit, Fork):
                self.metrics.forks.inc()

    def remove(self, *seqs: SeqId) -> None:
        """Forget sequences everywhere."""
        for seq in seqs:
            if self.cache is not None and seq in self.cache:
                self.cache.remove(seq)
            self.apply(Remove(seq))

    def pop(self, seq: SeqId, held: int, length: int) -> int:
        kept = BranchOwner.pop(self, seq, held, length)
        if kept < held and self.cache is not None and seq in self.cache and self.cache.length(seq) > kept:
            self.cache.truncate(seq, kept)
        return kept

    def reach(self, branch: Branch, length: int, what: str = "session: ") -> int:
        return BranchOwner.reach(self, branch, length, what)

    def share(self, branch: Branch, key: Hashable, *, live: bool, keep: bool = False) -> None:
        """Let prompts find what a branch has computed, up to the first token whose state is not
        what the tokens give. A branch that is not ``live`` gives up its sequence. ``keep``: the
        present end of a live one, too, if windows would release it."""
        seq, exact = branch.seq, branch.origin.exact_part(branch.computed)
        if self.cache is None or seq is None or (live and not exact):
            return
        if not live:
            exact = self.pop(seq, branch.computed, exact)
        held = branch.tokens.ids[:exact]
        self.remove(*self.cache.insert(seq, held, key, live=live))
        if keep and branch.origin.exact and self.state.forgets:
            self.remove(*self.cache.insert(self.fork_of(seq), held, key))

    def fingerprint_of(self, adapter: int) -> str:
        """Return a loaded adapter's fingerprint; ``NotFound``."""
        return self.runner.adapters.get(adapter).fingerprint

    def prefix_key(self, salt: Hashable, runs: AdapterRuns) -> Hashable:
        """Return the prefix cache's key for tokens that run like this."""
        return prefix_key(salt, runs, self.fingerprint_of)

    def key_of(self, session: SessionBranch) -> Hashable:
        """Return the prefix cache's key of a session's computed tokens."""
        return self.prefix_key(session.key, session.runs)

    def leave_other_key(self, session: SessionBranch, key: Hashable) -> None:
        """Let a session's sequence continue under ``key``. If the prefix cache knows it under
        another key, a fork of it takes its place there, for prompts with the old history."""
        seq = session.seq
        if self.cache is None or seq is None or seq not in self.cache or self.cache.key_of(seq) == key:
            return
        old, length = self.cache.key_of(seq), self.cache.length(seq)
        self.cache.remove(seq)
        if length and self.state.nearest_reachable(seq, length) == length:
            self.remove(*self.cache.insert(self.fork_of(seq, length), session.tokens.ids[:length], old))

    def note_use(self, session: SessionBranch) -> None:
        """Record a session as the one that was used last."""
        self.revision += 1
        self.sessions.pop(id(session), None)
        self.sessions[id(session)] = session

    def fork(self, parent: SessionBranch, length: int) -> SessionBranch:
        """Return a session of the first ``length`` tokens, under the same adapter, with their state
        as far as there is one."""
        child = SessionBranch(key=parent.key, adapter=parent.adapter)
        child.become(parent, length, None)
        child.runs = runs_of_session(parent.runs, length, parent.adapter)
        agreed = parent.runs.agreed(child.runs, length)
        self.fork_state(parent, child, self.reach(parent, agreed))
        self.note_use(child)
        return child

    def change(self, session: SessionBranch, length: int, adapter: int | None) -> None:
        """Cut a session to its first ``length`` tokens, to continue under ``adapter``. Its computed
        state counts while its history is the same. ``FailedPrecondition`` as in ``reach``;
        ``NotFound``: no such adapter."""
        runs = runs_of_session(session.runs, length, adapter)
        if adapter is not None:
            self.runner.adapters.get(adapter)
        if session.modified and length and (length < len(session.tokens) or runs != session.runs):
            # Its last token runs again, and what leads to it cannot be computed again.
            self.reach(session, length - 1)
        self.rewind(session, session.runs.agreed(runs, length))
        if length < len(session.tokens) or runs != session.runs:
            session.logits = None
        session.truncate(length)
        session.runs, session.adapter = runs, adapter

    def rewind(self, session: SessionBranch, length: int) -> None:
        """Take back a session's state from token ``length`` on, or from the nearest position
        before."""
        if session.seq is None or session.computed <= length:
            return
        kept, found = self.reach(session, length), self.found(session, length)
        if found is None or found[1] <= kept:
            self.rollback(session, length)
        else:
            self.continue_from(session, *found)

    def continue_from(self, session: SessionBranch, seq: SeqId, length: int) -> None:
        """Let a session continue from a fork of another sequence, whose first ``length`` tokens are
        its own."""
        fork = self.fork_of(seq, length)
        if session.seq is not None:
            self.remove(session.seq)
        session.seq, session.computed, session.origin = fork, length, COMPUTED

    def found(self, session: SessionBranch, length: int) -> tuple[SeqId, int] | None:
        """Return another sequence in the prefix cache, and at how many of the session's first
        ``length`` tokens it can be forked."""
        forgets = self.state.forgets
        if self.cache is None or not forgets or session.modified or session.window is not None:
            return None
        return self.cache.find(session.tokens.ids[:length], self.key_of(session), without=session.seq)

    def overwrite(self, session: SessionBranch, layer: int, start: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite a layer's rows or states of a session. It is then pinned and no prefix for
        others. ``ResourceExhausted`` if no room can be made; then nothing is changed."""
        if session.seq is None:
            raise QuireError("the session has no state that could be written")
        pinned, session.pinned = session.pinned, True  # so that room is made at the cost of others
        try:
            self._write(session, layer, start, tensors)
        except BaseException:
            session.pinned = pinned
            raise
        if self.cache is not None and session.seq in self.cache:
            self.cache.remove(session.seq)
        session.origin = replace(session.origin, modified=True)
        session.logits = None

    def _write(self, session: SessionBranch, layer: int, start: int, tensors: Mapping[str, Tensor]) -> None:
        seq, state = session.seq, self.state
        assert seq is not None
        recurrent = layer in state.recurrent_ids
        if recurrent and session.computed in state.checkpoints(seq):
            # This is the state before the write, to which no rewind shall return.
            self.apply(DropCheckpoint(seq, session.computed))
        try:
            while True:
                try:
                    self.apply(Overwrite(seq, layer, start, tensors))
                    return
                except ResourceExhausted:
                    if not self.runner.room.make():
                        raise
        finally:
            if recurrent:
                self.anchor(session)

    def anchor(self, session: SessionBranch) -> None:
        """Keep the present recurrent state of a session that cannot be computed again, and drop the
        one kept before: each turn runs its last token again, and the ring's slots may be reused."""
        if session.seq is not None:
            session.mark = spare_states.mark(self.runner, session.seq, session.mark, always=True)

    def drop(self, session: SessionBranch) -> None:
        """Give a session's pages back; its tokens stay, to be computed again when needed."""
        if session.seq is not None:
            self.remove(session.seq)
        session.seq = None
        session.truncate_computed(0)

    def evict(self) -> bool:
        """Give up the cached sequence that was used longest ago; return whether there was any."""
        if self.cache is None or (seq := self.cache.oldest()) is None:
            return False
        self._save_cached(seq)
        self.cache.evict()
        self.apply(Remove(seq))
        return True

    def save_ahead(self) -> None:
        """Let the tier copy cached prefixes that would go next, in the background, if the pool is
        nearly full: so that no request waits for the copy when they are evicted. Idle sessions may
        continue, and a copy's fork would make them split a page."""
        state = self.state
        if all(AHEAD * free >= size for free, size in zip(state.free_pages(), state.pool_sizes(), strict=True)):
            return
        most = math.inf if state.capacity is None else state.capacity / AHEAD
        for seq in () if self.cache is None else self.cache.next_to_go(LOOKED_AT):
            length = state.sequence_length(seq)
            if self.tier.ahead.get(seq) != length:
                self.tier.ahead[seq] = length
                self._save_cached(seq, ahead=True)
            most -= length
            if most <= 0:
                break

    def _save_cached(self, seq: SeqId, *, ahead: bool = False) -> None:
        """Let the tier keep a sequence of the prefix cache that is about to go."""
        assert self.cache is not None
        key = self.cache.key_of(seq)
        salt, runs = (key.salt, key.runs) if isinstance(key, AdapterKey) else (key, ())
        self.tier.save_prefix(seq, self.cache.tokens_of(seq), runs, salt, ahead=ahead)

    def demote(self, tokens: NDArray[np.int64], key: Hashable, start: int) -> int:
        """Give up the cached state of these tokens from ``start`` on, as if the pool were short;
        return the number of its tokens. What others hold of them stays."""
        if self.cache is None:
            return 0
        given_up = 0
        for seq, length in self.cache.cached_on(tokens, key, start):
            kept = self.state.nearest_reachable(seq, start)
            fork = self.fork_of(seq, kept) if kept else None
            self._save_cached(seq)
            self.remove(seq)
            if fork is not None:
                self.remove(*self.cache.insert(fork, tokens[:kept], key))
            given_up = max(given_up, length - start)
        return given_up

    def shorten(self, session: SessionBranch, start: int) -> int:
        """Give up an idle session's state from token ``start`` on, as if the pool were short;
        return the number of its tokens. A session that is pinned, or that tokens do not give, keeps
        it."""
        if not session.droppable or session.computed <= start:
            return 0
        given_up = session.computed - start
        self.tier.save(session)
        if start and session.seq is not None:
            self.rollback(session, start)
        else:
            self.drop(session)
        return given_up

    def drop_idle(self) -> bool:
        """Give up the least recently used idle session's state; return whether there was any."""
        idle = next((session for session in self.sessions.values() if session.droppable), None)
        if idle is None:
            return False
        # State that was not exact becomes exact when it is computed again.
        self.tier.save(idle)
        self.drop(idle)
        return True

    def reclaimable(self) -> set[SeqId]:
        """Return the sequences that these two could give up."""
        found = set() if self.cache is None else set(self.cache.ages())
        return found | {one.seq for one in self.sessions.values() if one.droppable and one.seq is not None}

    def written(self) -> set[SeqId]:
        """Return the sequences with written state, or about to have: not computable again."""
        found = set()
        for session in self.sessions.values():
            if session.modified or session.mark is not None:
                found |= {session.seq, session.undo_fork}
        return {seq for seq in found if seq is not None}

    def clear_cache(self) -> None:
        """Forget all finished sequences."""
        if self.cache is not None:
            self.remove(*self.cache.clear())

    def forget(self, session: SessionBranch) -> None:
        """Give back the pages of a closed session."""
        self.revision += 1
        self.sessions.pop(id(session), None)
        self.drop(session)
