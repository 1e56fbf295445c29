"""Admission, chunking and preemption: what runs next. No torch; it knows contracts and values only.

Continuous batching is one rule: every running request has tokens that are not computed yet, and a
step computes some of them. Decodes have one; prompts have many and are cut to the token budget, so
both share a step (Sarathi-Serve, arXiv:2403.02310). Requests are served by priority, equal ones in
order of arrival.

API keys share steps and places (``KeyShares``). What decodes leave of a step goes to the prompts
of the key with the least virtual time, running and waiting ones, then to the next key. A key that
has fewer places than its share takes one from a key that has more: the last request of that key
waits, and keeps its state while there is room. Pages are taken likewise (``displaced_for``).
Priorities order the requests of one key. Only background requests come behind the requests of all
keys. Without keys there is one, and all this changes nothing.

The KV state says how many pages a batch lacks. The scheduler drops checkpoints first. Then it asks
``runner.reclaim``, which gives up cached sequences before idle sessions. Then it takes the state of
requests that have lost their places. At last it preempts the running request of the lowest
priority, the youngest one among equals, of the key that holds most. Tiers keep what is worth it.
A request that waits for pages is not overtaken by others of its key, and by requests of other keys
only for ``OVERTAKING`` steps.

The adapters of one step must fit into the device's memory together. A request whose adapter does
not fit beside the adapters of earlier ones waits a step. Then no new request with an adapter is
admitted, so that it is not overtaken for ever. The first one always fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from quire.base.errors import PoolExhausted, QuireError, ResourceExhausted
from quire.base.outputs import Miss
from quire.base.token_history import common_prefix
from quire.base.types import Remove, SeqId
from quire.branches.prefix_cache import RadixCache
from quire.engine.checkpoints import Checkpoints
from quire.engine.miss_search import MissSearch
from quire.engine.request import BACKGROUND, Request, Status
from quire.engine.request_queues import RequestQueues
from quire.engine.step_builder import Failure, Limits, ScheduledStep, StepBuilder, build_step

if TYPE_CHECKING:
    from quire.branches.owner import BranchOwner
    from quire.branches.stored_state import StoredState
    from quire.contracts.kv_state import ModelState
    from quire.engine.drafts import Drafts

DUPLICATE_PREFIX = 32
"""A prompt waits for one being computed if that shares so many tokens more than the cache does."""

HEADROOM = 32
"""Tokens of room for every running request before a preempted one comes back, so that it stays."""

BACKGROUND_CHUNK = 256
"""Tokens of a background request in a step, for whose end a new request may have to wait."""

OVERTAKING = 64
"""Steps for which requests of other keys may overtake a request that waits for pages."""

RETRY = 16
"""Steps until pages are taken from other keys again for a request that lacked them even then."""


class Scheduler:
    """The decisions about steps."""

    def __init__(
        self,
        state: ModelState,
        *,
        queues: RequestQueues,
        branches: BranchOwner,
        cache: RadixCache | None,
        tier: StoredState | None = None,
        checkpoints: Checkpoints | None = None,
        misses: MissSearch | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self._state = state
        self.queues = queues
        self.waiting, self.running = queues.waiting, queues.running
        self._branches = branches
        self._cache = cache
        self._tier = tier
        self._checkpoints = checkpoints
        self._misses = misses
        self._drafts = drafts
        self._arrivals = 0
        self._steps = 0
        self.num_preemptions = 0
        self.lacks_room = False
        """Whether the queue's first request last found no pages, and no request has come or ended
        since."""

    @property
    def limits(self) -> Limits:
        return self.queues.limits

    def submit(self, request: Request, arrival: int | None = None) -> None:
        """Queue a request. If it has a sequence already, it keeps it. ``arrival`` is that of an
        earlier request that this one continues, in its place."""
        if arrival is None:
            arrival = self._arrivals
            self._arrivals += 1
        request.seat.arrival = arrival
        self.lacks_room = False
        self._ask(request)
        if self._checkpoints is not None:
            self._checkpoints.branch_points.note(request)
        self.queues.wait(request)

    def join(self, request: Request, leader: Request) -> None:
        """Run a request that has its sequence and all of its state: a fork of a running one, of
        which it is a sibling."""
        leader.seat.siblings.remove(request)
        request.seat.reuse = replace(leader.seat.reuse)
        self.run(request)

    def run(self, request: Request) -> None:
        """Run a request that has its sequence, from now on."""
        request.seat.arrival = self._arrivals
        self._arrivals += 1
        self.queues.run(request)

    def finish(self, request: Request) -> None:
        """Take it out of the queues; its sequence is the caller's business."""
        self.queues.remove(request)
        request.seat.status = Status.FINISHED
        self.lacks_room = False
        if self._checkpoints is not None:
            self._checkpoints.branch_points.forget(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> ScheduledStep:
        """Return the next step; without chunks if nothing can run."""
        self._settle()
        # Some decodes return to the queue after each token (beams). They wait for no prompt either.
        coming = sum(
            one.branch.seq is not None and one.branch.remaining == 1 and not one.seat.num_preemptions
            for one in self.waiting
        )
        batch = StepBuilder(self.queues.limits.max_num_batched_tokens, branches=self._branches)
        if coming:  # One token is left to a prompt: decodes may wait for its pages.
            batch.kept = min(coming, max(0, self.queues.limits.max_num_seqs - self.queues.seated), batch.budget - 1)
        failed: list[Failure] = []
        # Admit adapters in order of arrival: no request waits for later ones.
        for request in self.running:
            if (adapter := request.branch.next_adapter) is not None and request.ready and batch.has_adapter(request):
                batch.adapters.add(adapter)
        # Decodes first: a long prompt fills what they leave of the step and never holds them up.
        self._fill([running for running in self.running if running.branch.remaining <= 1], batch)
        prompts = [running for running in self.running if running.branch.remaining > 1]
        self._steps += 1
        self.queues.contend(prompts)
        barred: set[str] = set()
        turns, first = self.queues.turns(batch, barred, prompts), None
        if not prompts and (not self.waiting or self.queues.is_full):
            turns = iter(())  # There is no room for a request, nor a prompt to share the step with.
        for request in turns:
            if request.seat.status is Status.WAITING:
                first = request
                break
            self._fill([request], batch)
        if not batch.requests and (loading := next(filter(self._is_followed, self.running), None)):
            # With nothing else to do, a forward follows its state, layer by layer.
            batch.add(loading, self._count(loading, batch))
        barred |= self._make_room(batch, failed)
        self.lacks_room = False
        if first is not None:
            self.lacks_room = self._admit(chain([first], turns), batch, failed, barred)
            # A request without room may have left a fork of a running one, which needs a page.
            self._make_room(batch, failed)
        kept = None if self._checkpoints is None else self._checkpoints.wishes(batch.requests, batch.counts)
        self.queues.shares.charge(batch.used)
        if self._drafts is None:
            return build_step(batch.requests, batch.counts, kept or repeat(()), failed)
        drafts = self._drafts.choose(batch, kept)
        return build_step(
            batch.requests, batch.counts, kept or repeat(()), failed, drafts, trees=self._drafts.are_trees
        )

    def _fill(self, requests: Iterable[Request], batch: StepBuilder) -> None:
        """Add running requests to a step. More may run than it takes (samples of one prompt)."""
        for request in requests:
            if batch.budget < 1 or len(batch.requests) >= self.queues.limits.max_num_seqs:
                break
            adapter = request.branch.next_adapter
            if not request.ready or not (adapter is None or adapter in batch.adapters) or self._is_coming(request):
                continue
            self._add(request, batch)

    def _add(self, request: Request, batch: StepBuilder) -> None:
        # Windows of exact requests run alone.
        if not request.asked.exact and (count := self._count(request, batch)):
            batch.add(request, count)

    def _make_room(self, batch: StepBuilder, failed: list[Failure]) -> set[str]:
        """Reclaim, then preempt, until running ones fit; return the keys that lost any."""
        lost: set[str] = set()
        while batch.requests and (missing := self._state.missing_pages(batch.seqs, batch.counts)):
            if (
                self._relieve(batch.seqs, batch.counts)
                or self._branches.make_room()
                or self._reclaim_waiting(displaced=True)
            ):
                continue
            loose = [request for request in self.running if not request.branch.pinned]
            youngest = self.queues.youngest(loose or self.running)
            batch_goes_on = bool(loose) and len(self.running) > 1
            if not batch_goes_on and self._reclaim_waiting(youngest):
                continue
            batch.drop(youngest)
            lost.add(youngest.asked.owner)
            if batch_goes_on:
                self.preempt(youngest)
            else:
                # Nothing else can be given up, so waiting would be for ever.
                self._give_up(youngest, missing, failed)
        return lost

    def _relieve(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> bool:
        """Give up a checkpoint, if that is what is short."""
        return self._checkpoints is not None and self._checkpoints.free_state_slots(seqs, counts)

    def _give_up(self, request: Request, missing: int, failed: list[Failure]) -> None:
        """Take a request that can never run out of its queue, and its state away."""
        self.queues.remove(request)
        self._free(request)
        failed.append((request, no_room(request, missing, alone=self._state.empty())))

    def preempt(self, request: Request) -> None:
        """Give up its state, and let it wait in its old place until that comes back."""
        self._displace(request, keeps=False)

    def _displace(self, request: Request, *, keeps: bool) -> None:
        """Let a running request wait in its old place. ``keeps``: with its state, until pages are
        short. A guess ends: what it has guessed is verified."""
        if request.asked.guesses:
            self.queues.remove(request)
            self._free(request)
            request.seat.status, request.output.finish_reason = Status.FINISHED, "cancelled"
            return
        if not keeps:
            self._set_aside(request)
        request.seat.num_preemptions += 1
        self.num_preemptions += 1
        self.queues.wait(request)

    def _set_aside(self, request: Request) -> None:
        """Release its state, a copy of which may be kept."""
        if self._tier is not None and not request.branch.pinned and not request.asked.exact:
            self._tier.save(request.branch)
        self._free(request)
        self._ask(request)

    def _free(self, request: Request) -> None:
        """Remove the sequence of a request, and set its number of computed tokens to 0. A pinned
        request keeps both."""
        branch = request.branch
        if branch.pinned:
            return
        if branch.seq is not None:
            if self._cache is not None and branch.seq in self._cache:
                self._cache.remove(branch.seq)
            self._branches.apply(Remove(branch.seq))
        branch.seq = None
        branch.truncate_computed(0)

    def _admit(self, turns: Iterator[Request], batch: StepBuilder, failed: list[Failure], barred: set[str]) -> bool:
        """Admit waiting requests, as far as there is room, and add running ones, in their turns;
        return whether the first one lacks pages. ``barred``: keys that have just lost a request."""
        lost, untried, short = frozenset(barred), True, False
        places = self.queues.places()
        taken, total = self.queues.taken(), self.queues.total(places)
        # Places that other keys cannot use now go to those that have their share.
        for shared in (True, False):
            full: set[str] = set()
            for request in turns:
                key, victim = request.asked.owner, None
                if request.seat.status is Status.RUNNING:
                    if key not in lost:
                        self._fill([request], batch)
                    continue
                if key in barred:
                    continue
                if shared and taken[key] >= places[key]:
                    full.add(key)
                    barred.add(key)
                    continue
                if taken.total() >= total and shared:
                    victim = self.queues.over_share(places, taken, self._is_loose)
                if victim is None and (taken.total() >= total or batch.budget < 1):
                    break
                admitted = self._enter(request, victim, batch, failed, barred)
                if admitted:
                    taken = self.queues.taken()
                elif admitted is False:
                    short |= untried
                    barred.add(key)
                    if request.seat.short_since is None:
                        request.seat.short_since = self._steps
                    if self._steps - request.seat.short_since >= OVERTAKING:
                        return short
                untried = False
            if not full:
                break
            barred -= full - lost
            turns = self.queues.turns(batch, barred)
        return short

    def _enter(
        self,
        request: Request,
        victim: Request | None,
        batch: StepBuilder,
        failed: list[Failure],
        barred: set[str],
    ) -> bool | None:
        """Admit a request, in the place of ``victim``, unless something holds it up (None) or it
        lacks pages (False). Keys that lose requests by that join ``barred``."""
        duplicates = request.branch.seq is None and self._duplicates(request)
        held_up = duplicates or not request.ready
        if held_up or not (victim or self._count(request, batch)) or batch.waits_for_adapter(request):
            return None
        attached = request.branch.seq is None
        self._attach(request)
        if attached and batch.waits_for_adapter(request):
            # What was found of it ends within another run of its history.
            self._detach(request)
            return None
        # Room for all of its tokens, not only this chunk: else prompts preempt each other.
        if (missing := self._shortage(request)) and (missing := self._shortage_beside_less(request, batch, barred)):
            if not self.running:
                self._give_up(request, missing, failed)
                return None
            if attached:
                self._detach(request)
            return False
        if victim is not None and victim.seat.status is Status.RUNNING:
            batch.drop(victim)
            self._displace(victim, keeps=victim.branch.blend is None)
            barred.add(victim.asked.owner)
        self._bring(request, attached)
        self.queues.run(request)
        request.seat.short_since = None
        if request.branch.remaining == 1:
            batch.kept = max(0, batch.kept - 1)
        # Its stored state may have to come, or end within another adapter's run: then it waits.
        if not self._is_coming(request) and batch.has_adapter(request):
            self._add(request, batch)
        return True

    def _shortage_beside_less(self, request: Request, batch: StepBuilder, barred: set[str]) -> int:
        """Preempt requests of keys that hold more, if that can help; return the remaining
        shortage."""
        waited = 0 if request.seat.short_since is None else self._steps - request.seat.short_since
        for other in () if waited % RETRY else self.queues.displaced_for(request, self._is_loose):
            batch.drop(other)
            self.preempt(other)
            barred.add(other.asked.owner)
            if not self._shortage(request):
                return 0
        return self._shortage(request)

    def _is_loose(self, request: Request) -> bool:
        """Return whether it may be displaced for a request of another key."""
        loose = request.ready and not request.branch.pinned and not request.asked.guesses
        return loose and not self._is_coming(request)

    def _most(self, request: Request) -> int:
        """Return the largest number of its tokens for a step; a sliding window sets it instead."""
        window = request.branch.window
        if window is None:
            most = self.queues.limits.max_num_batched_tokens * request.branch.budget_factor
            return min(most, BACKGROUND_CHUNK) if request.seat.priority == BACKGROUND else most
        return max(1, self._state.largest_step(window.size, window.sink))

    def _count(self, request: Request, batch: StepBuilder) -> int:
        """Return the number of its tokens that the step may still take, all under one adapter."""
        if request.branch.remaining == 1 and request.output.wants != "all":
            return max(0, min(1, batch.budget))  # A stop and the end of an adapter's run are behind it.
        return batch.count(request, self._most(request))

    def _shortage(self, request: Request) -> int:
        """Return the pages that it lacks beside all that the running ones still have to compute."""
        branch = request.branch
        if branch.seq is None:
            raise QuireError("a request was admitted without a sequence")
        headroom = HEADROOM if request.seat.num_preemptions else 0
        others = [(one.branch.seq, one.branch.remaining) for one in self.running if one.branch.seq is not None]
        seqs = [*(seq for seq, _ in others), branch.seq]
        counts = [*(remaining + headroom for _, remaining in others), branch.remaining]
        most = min(self.queues.limits.max_num_batched_tokens, self._most(request))
        while missing := self._state.shortage_in_steps(seqs, counts, most):
            if (
                self._relieve(seqs, counts)
                or self._branches.make_room()
                or self._reclaim_waiting(request, displaced=True)
            ):
                continue
            if not self.running and self._reclaim_waiting(request):
                continue
            return missing
        return 0

    def room_for(self, request: Request, seq: SeqId, count: int) -> int:
        """Make room for more tokens of a sequence of a running request, which stays; return the
        pages that are missing nevertheless."""
        while missing := self._state.missing_pages([seq], [count]):
            if self._relieve([seq], [count]) or self._branches.make_room() or self._reclaim_waiting(request):
                continue
            others = [one for one in self.running if one is not request and not one.branch.pinned]
            if not others:
                return missing
            self._displace(self.queues.youngest(others), keeps=False)
        return 0

    def _reclaim_waiting(self, keep: Request | None = None, *, displaced: bool = False) -> bool:
        """Give up the state with which a waiting request came (a session's), or which it has kept
        when it was ``displaced``. It comes back, or is computed again, when it runs."""
        for request in reversed(self.waiting):
            if displaced and not request.seat.num_preemptions:
                continue
            if request is not keep and request.branch.seq is not None and not request.branch.pinned:
                self._set_aside(request)
                return True
        return False

    def _attach(self, request: Request) -> None:
        """Give it a sequence: a fork of the cached prefix of its tokens, or an empty one."""
        branch, reuse = request.branch, request.seat.reuse
        if branch.seq is not None:
            return
        limit = self._limit(request)
        found = None
        if self._cache is not None and branch.cacheable and limit > 0:
            ids = branch.tokens.ids[:limit]
            found = self._cache.match(ids, branch.key)
            reuse.known = max(reuse.known, self._cache.held(ids, branch.key))
        if found is None or not found[1]:
            branch.seq, branch.computed = self._branches.add_seq(branch.window), 0
        else:
            parent, length = found
            while request.asked.exact and (beyond := length % request.asked.window):
                # An exact request continues where a window ends.
                length = self._state.nearest_reachable(parent, length - beyond)
            branch.seq, branch.computed = self._branches.fork_of(parent, length), length
        if self._checkpoints is not None and branch.computed < reuse.known:
            # Here this prompt parts from another: the next one with this beginning will find a
            # state.
            request.seat.branch_points.add(reuse.known)
        request.note_reuse()

    def _bring(self, request: Request, attached: bool) -> None:
        """Bring back the state that tiers have of it, if it was just ``attached``; note the
        reuse."""
        limit = self._limit(request)
        if self._tier is not None and request.seat.question is not None:
            if attached:
                request.note_found(self._tier.bring(request.branch, request.seat.question, limit))
            request.seat.question = None
            request.note_reuse()
        if self._misses is not None:
            self._misses.explain(request, limit)

    @staticmethod
    def _limit(request: Request) -> int:
        """Return the number of tokens that may be found: the last, and any with logits, must
        run."""
        limit = len(request.branch.tokens) - 1
        return limit if request.output.fresh_from is None else min(limit, request.output.fresh_from)

    def _ask(self, request: Request) -> None:
        """Ask the tiers for the state of a request without any, unless it wants none."""
        branch = request.branch
        if request.asked.exact:
            return  # Tiers do not know which of their state is that of windows.
        if self._tier is not None and branch.seq is None and (branch.cacheable or branch.window is not None):
            request.seat.question = self._tier.ask(branch)

    def _is_coming(self, request: Request) -> bool:
        """Return whether some of its state has still to come from a tier."""
        return self._tier is not None and bool(self._tier.open) and self._tier.is_coming(request.branch.seq)

    def _is_followed(self, request: Request) -> bool:
        """Return whether a forward may run behind its state, which is coming."""
        return request.ready and self._tier is not None and self._tier.is_near(request.branch.seq)

    def _settle(self) -> None:
        """End loads that are over."""
        if self._tier is not None and self._tier.open:
            for request in [one for one in self.running if not self._is_coming(one)]:
                self.finish_load(request)

    def finish_load(self, request: Request) -> None:
        """End the load of a running request, at once. If its state did not come, it waits again."""
        length = request.branch.computed
        if self._tier is not None and (miss := self._tier.finish_load(request.branch)) is not Miss.NONE:
            request.note_lost(miss, length)
            self.queues.wait(request)

    def _detach(self, request: Request) -> None:
        """Take back ``_attach``, so that other requests can use the pages."""
        branch = request.branch
        if self._cache is not None and branch.seq is not None and branch.computed and not branch.pinned:
            # What it had found may have been evicted in the search for room; it stays findable.
            found = branch.tokens.ids[: branch.computed]
            for redundant in self._cache.insert(branch.seq, found, branch.key):
                self._branches.apply(Remove(redundant))
            branch.seq, branch.computed = None, 0
        else:
            self._free(request)
        if not request.seat.admitted:
            request.seat.reuse.by_tier.clear()
        request.note_reuse()

    def _duplicates(self, request: Request) -> bool:
        """Return whether a running prompt computes a prefix that this request could fork later."""
        branch = request.branch
        if self._cache is None or not branch.cacheable:
            return False
        ids = branch.tokens.ids[: self._limit(request)]
        held = -1
        for other in self.running:
            prompt = other.branch
            if (
                prompt.remaining <= 1
                or (other.asked.exact and other.output.token_ids)
                or not prompt.cacheable
                or prompt.blend
                or prompt.key != branch.key
            ):
                continue
            if other.asked.owner != request.asked.owner:  # Its turn may be late.
                continue
            common = prompt.origin.exact_part(common_prefix(ids, prompt.tokens.ids))
            if common < DUPLICATE_PREFIX:
                continue
            if held < 0:
                held = self._cache.peek(ids, branch.key)
                if self._tier is not None and request.seat.question is not None:
                    held = max(held, self._tier.held(request.seat.question, ids.size))
            if common >= held + DUPLICATE_PREFIX:
                self.queues.hurry(other, request.seat.priority)  # what waits for it makes it as urgent
                return True
        return False


def no_room(request: Request, missing: int, *, alone: bool) -> ResourceExhausted:
    """Return the error of a request that cannot run; ``alone``: even in an empty pool."""
    length = len(request.branch.tokens)
    short = f"a sequence of {length} tokens is short of {missing} pages (of tokens, or of recurrent states)"
    if alone:
        return ResourceExhausted(f"{short} of an empty pool; give fewer tokens, or a larger kv_cache_memory")
    return PoolExhausted(
        f"{short} with nothing left to give up; close or unpin sessions, release KV caches, or give a larger kv_cache_memory"
    )
