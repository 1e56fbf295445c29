"""Admission, chunking and preemption: what runs next. No torch; it knows contracts and values only.

Continuous batching is one rule: every running request has tokens that are not computed yet, and a
step computes some of them. Decodes have one; prompts have many and are cut to the token budget, so
both share a step (Sarathi-Serve, arXiv:2403.02310). Requests are served by priority, equal ones in
order of arrival.

API keys share steps and places (``key_shares``). What decodes leave of a step goes to the prompts
of the key with the least virtual time, running and waiting ones, then to the next key. A key that
has fewer places than its share takes one from a key that has more: the last request of that key
waits, and keeps its state while there is room. Pages are taken likewise (``displaced_for``).
Priorities order the requests of one key. Only background requests come behind those of all keys.
Without keys there is one, and all this changes nothing.

The KV state says how many pages a batch lacks. They come, in this order, from finished sequences in
the prefix cache, from idle sessions (``reclaim``), from requests that have lost their places, and
from the running request of the lowest priority, the youngest one among equals, of the key that
holds most. It is preempted. Tiers keep what is worth it. A request that waits for pages is not
overtaken by others of its key, and by those of other keys only for ``OVERTAKING`` steps.

The adapters of one step must fit into the device's memory together. A request whose adapter does
not fit beside those of earlier ones waits a step. Then no new request with an adapter is admitted,
so that it is not overtaken for ever. The first one always fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

from quire.branches.history import common_prefix
from quire.branches.prefix_cache import RadixCache
from quire.engine.checkpoints import Checkpoints
from quire.engine.miss_search import MissSearch
from quire.engine.partings import Partings
from quire.engine.request_queues import RequestQueues
from quire.engine.scheduled_request import BACKGROUND, ScheduledRequest, Status, no_room
from quire.engine.step_draft import Failure, Limits, Scheduled, StepDraft, chunk_of
from quire.errors import QuireError
from quire.outputs import Miss
from quire.types import Add, Edit, Fork, Remove, SeqId, SetWindow, Step

if TYPE_CHECKING:
    from quire.branches.tiers import Tier
    from quire.contracts.kv_state import ModelState

DUPLICATE_PREFIX = 32
"""A prompt waits for one being computed if that shares so many tokens more than the cache does."""

HEADROOM = 32
"""Tokens of room for every running request before a preempted one comes back, so that it stays."""

BACKGROUND_CHUNK = 256
"""Tokens of a background request in a step, for whose end a new request may have to wait."""

OVERTAKING = 64
"""Steps for which requests of other keys may overtake one that waits for pages."""

RETRY = 16
"""Steps until pages are taken from other keys again for a request that lacked them even then."""


class Scheduler:
    """The decisions about steps. ``apply`` executes an edit at once. ``reclaim`` gives up something
    that can be had again, a cached sequence or an idle session's state, and returns whether it did.
    ``fits`` tells whether one forward can use these adapters together (None: any); one alone must
    always fit."""

    def __init__(
        self,
        state: ModelState,
        *,
        limits: Limits,
        apply: Callable[[Edit], None],
        reclaim: Callable[[], bool],
        new_seq: Callable[[], SeqId],
        cache: RadixCache | None,
        tier: Tier | None = None,
        checkpoints: Checkpoints | None = None,
        fits: Callable[[Collection[int]], bool] | None = None,
        misses: MissSearch | None = None,
    ) -> None:
        self._state = state
        self.limits = limits
        self._apply = apply
        self._reclaim = reclaim
        self._new_seq = new_seq
        self._cache = cache
        self._tier = tier
        self._checkpoints = checkpoints
        self._adapters_fit = fits
        self._misses = misses
        self._arrivals = 0
        self._partings = Partings()
        self.queues = RequestQueues(lambda: self.limits)
        self.waiting, self.running = self.queues.waiting, self.queues.running
        self._steps = 0
        self.num_preemptions = 0
        self.lacks_room = False
        """Whether the last look at the queue found no pages for the first one, and nobody has come
        or ended since."""

    def submit(self, request: ScheduledRequest, arrival: int | None = None) -> None:
        """Queue a request. One that comes with a sequence keeps it. ``arrival`` is that of an
        earlier request that this one continues, in its place."""
        if arrival is None:
            arrival = self._arrivals
            self._arrivals += 1
        request.arrival = arrival
        self.lacks_room = False
        self._ask(request)
        if self._checkpoints is not None:
            self._partings.note(request)
        self.queues.wait(request)

    def join(self, request: ScheduledRequest) -> None:
        """Run a request that has its sequence and all of its state: a fork of a running one."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self.queues.run(request)

    def finish(self, request: ScheduledRequest) -> None:
        """Take it out of the queues; its sequence is the caller's business."""
        self.queues.remove(request)
        request.status = Status.FINISHED
        self.lacks_room = False
        if self._checkpoints is not None:
            self._partings.forget(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> Scheduled:
        """Return the next step; without chunks if nothing can run."""
        self._settle()
        # Some decodes return to the queue after each token (beams). They wait for no prompt either.
        coming = sum(one.seq is not None and one.remaining == 1 and not one.num_preemptions for one in self.waiting)
        batch = StepDraft(self.limits.max_num_batched_tokens, fits=self._adapters_fit)
        if coming:  # One token is left to a prompt: decodes may wait for its pages.
            batch.kept = min(coming, max(0, self.limits.max_num_seqs - self.queues.seated), batch.budget - 1)
        failed: list[Failure] = []
        # Admit adapters in order of arrival: no request waits for later ones.
        for request in self.running:
            if (adapter := request.next_adapter) is not None and request.ready and batch.has_adapter(request):
                batch.adapters.add(adapter)
        # Decodes first: a long prompt fills what they leave of the step and never holds them up.
        self._fill([running for running in self.running if running.remaining <= 1], batch)
        self._steps += 1
        self.queues.contend()
        barred: set[str] = set()
        turns, first = self.queues.turns(batch, barred), None
        for request in turns:
            if request.status is Status.WAITING:
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
        chunks = tuple(map(chunk_of, batch.requests, batch.counts, kept or repeat(())))
        self.queues.shares.charge(batch.used)
        return Scheduled(Step(chunks=chunks), tuple(batch.requests), tuple(failed))

    def _fill(self, requests: Iterable[ScheduledRequest], batch: StepDraft) -> None:
        """Add running requests to a step. More may run than it takes (samples of one prompt)."""
        for request in requests:
            if batch.budget < 1 or len(batch.requests) >= self.limits.max_num_seqs:
                break
            adapter = request.next_adapter
            if not request.ready or not (adapter is None or adapter in batch.adapters) or self._is_coming(request):
                continue
            self._add(request, batch)

    def _add(self, request: ScheduledRequest, batch: StepDraft) -> None:
        if count := self._count(request, batch):
            batch.add(request, count)

    def computed(self, scheduled: Scheduled) -> None:
        """Note that the step has run."""
        for request, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True):
            if request.seq is not None:
                request.computed += len(chunk.tokens)

    def _make_room(self, batch: StepDraft, failed: list[Failure]) -> set[str]:
        """Reclaim, then preempt, until running ones fit; return the keys that lost any."""
        lost: set[str] = set()
        while batch.requests and (missing := self._state.missing_pages(batch.seqs, batch.counts)):
            if self._relieve(batch.seqs, batch.counts) or self._reclaim() or self._reclaim_waiting(displaced=True):
                continue
            loose = [request for request in self.running if not request.pinned]
            youngest = self.queues.youngest(loose or self.running)
            batch_goes_on = bool(loose) and len(self.running) > 1
            if not batch_goes_on and self._reclaim_waiting(youngest):
                continue
            batch.drop(youngest)
            lost.add(youngest.owner)
            if batch_goes_on:
                self.preempt(youngest)
            else:
                # Nothing else can be given up, so waiting would be for ever.
                self._give_up(youngest, missing, failed)
        return lost

    def _relieve(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> bool:
        """Give up a checkpoint, if that is what is short."""
        return self._checkpoints is not None and self._checkpoints.relieve(seqs, counts)

    def _give_up(self, request: ScheduledRequest, missing: int, failed: list[Failure]) -> None:
        """Take a request that can never run out of its queue, and its state away."""
        self.queues.remove(request)
        self._release(request)
        failed.append((request, no_room(request, missing, alone=self._state.empty())))

    def preempt(self, request: ScheduledRequest) -> None:
        """Give up its state, and let it wait in its old place until that comes back."""
        self._displace(request, keeps=False)

    def _displace(self, request: ScheduledRequest, *, keeps: bool) -> None:
        """Let a running request wait in its old place. ``keeps``: with its state, until pages are
        short."""
        if not keeps:
            self._set_aside(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.queues.wait(request)

    def _set_aside(self, request: ScheduledRequest) -> None:
        """Release its state, a copy of which may be kept."""
        if self._tier is not None and not request.pinned:
            self._tier.save(request)
        self._release(request)
        self._ask(request)

    def _release(self, request: ScheduledRequest) -> None:
        if request.pinned:
            return
        if request.seq is not None:
            if self._cache is not None and request.seq in self._cache:
                self._cache.remove(request.seq)
            self._apply(Remove(request.seq))
        request.seq = None
        request.recede(0)

    def _admit(
        self, turns: Iterator[ScheduledRequest], batch: StepDraft, failed: list[Failure], barred: set[str]
    ) -> bool:
        """Admit waiting requests, as far as there is room, and add running ones, in their turns;
        return whether the first one lacks pages. ``barred``: keys that have just lost a request."""
        lost, untried, short = frozenset(barred), True, False
        places = self.queues.places()
        taken, total = self.queues.taken(), self.queues.total(places)
        # Places that other keys cannot use now go to those that have their share.
        for shared in (True, False):
            full: set[str] = set()
            for request in turns:
                key, victim = request.owner, None
                if request.status is Status.RUNNING:
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
                    if request.short_since is None:
                        request.short_since = self._steps
                    if self._steps - request.short_since >= OVERTAKING:
                        return short
                untried = False
            if not full:
                break
            barred -= full - lost
            turns = self.queues.turns(batch, barred, prompts=False)
        return short

    def _enter(
        self,
        request: ScheduledRequest,
        victim: ScheduledRequest | None,
        batch: StepDraft,
        failed: list[Failure],
        barred: set[str],
    ) -> bool | None:
        """Admit a request, in the place of ``victim``, unless something holds it up (None) or it
        lacks pages (False). Keys that lose requests by that join ``barred``."""
        duplicates = request.seq is None and self._duplicates(request)
        held_up = duplicates or not request.ready
        if held_up or not (victim or self._count(request, batch)) or batch.waits_for_adapter(request):
            return None
        attached = request.seq is None
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
        if victim is not None and victim.status is Status.RUNNING:
            batch.drop(victim)
            self._displace(victim, keeps=victim.blend is None)
            barred.add(victim.owner)
        self._bring(request, attached)
        self.queues.run(request)
        request.short_since = None
        if request.remaining == 1:
            batch.kept = max(0, batch.kept - 1)
        # Its stored state may have to come, or end within another adapter's run: then it waits.
        if not self._is_coming(request) and batch.has_adapter(request):
            self._add(request, batch)
        return True

    def _shortage_beside_less(self, request: ScheduledRequest, batch: StepDraft, barred: set[str]) -> int:
        """Preempt requests of keys that hold more, if that can help; return what is then short."""
        waited = 0 if request.short_since is None else self._steps - request.short_since
        for other in () if waited % RETRY else self.queues.displaced_for(request, self._is_loose):
            batch.drop(other)
            self.preempt(other)
            barred.add(other.owner)
            if not self._shortage(request):
                return 0
        return self._shortage(request)

    def _is_loose(self, request: ScheduledRequest) -> bool:
        """Return whether it may be displaced for a request of another key."""
        return request.ready and not request.pinned and not self._is_coming(request)

    def _most(self, request: ScheduledRequest) -> int:
        """Return how many of its tokens a step may take, beside its window if that slides."""
        if request.window is None:
            most = self.limits.max_num_batched_tokens * request.dilution
            return min(most, BACKGROUND_CHUNK) if request.priority == BACKGROUND else most
        return max(1, self._state.largest_step(request.window.size, request.window.sink))

    def _count(self, request: ScheduledRequest, batch: StepDraft) -> int:
        """Return how many of its tokens the step may still take, all under one adapter."""
        return batch.count(request, self._most(request))

    def _shortage(self, request: ScheduledRequest) -> int:
        """Return the pages that it lacks beside all that the running ones still have to compute."""
        if request.seq is None:
            raise QuireError("a request was admitted without a sequence")
        headroom = HEADROOM if request.num_preemptions else 0
        others = [running for running in self.running if running.seq is not None]
        seqs = [*(running.seq for running in others if running.seq is not None), request.seq]
        counts = [*(running.remaining + headroom for running in others), request.remaining]
        most = min(self.limits.max_num_batched_tokens, self._most(request))
        while missing := self._state.shortage_in_steps(seqs, counts, most):
            if self._relieve(seqs, counts) or self._reclaim() or self._reclaim_waiting(request, displaced=True):
                continue
            if not self.running and self._reclaim_waiting(request):
                continue
            return missing
        return 0

    def _reclaim_waiting(self, keep: ScheduledRequest | None = None, *, displaced: bool = False) -> bool:
        """Give up the state with which a waiting request came (a session's), or which it has kept
        when it was ``displaced``. It comes back, or is computed again, when it runs."""
        for request in reversed(self.waiting):
            if displaced and not request.num_preemptions:
                continue
            if request is not keep and request.seq is not None and not request.pinned:
                self._set_aside(request)
                return True
        return False

    def _attach(self, request: ScheduledRequest) -> None:
        """Give it a sequence: a fork of what the cache holds of its tokens, or an empty one."""
        if request.seq is not None:
            return
        seq = self._new_seq()
        limit = self._limit(request)
        found = None
        if self._cache is not None and request.cacheable and limit > 0:
            found = self._cache.match(request.tokens.ids[:limit], request.key)
        if self._cache is not None and request.cacheable and limit > 0:
            known = self._cache.held(request.tokens.ids[:limit], request.key)
            request.known = max(request.known, known)
        if found is None or not found[1]:
            self._apply(Add(seq))
            if request.window is not None:
                self._apply(SetWindow(seq, request.window.size, request.window.sink))
            request.computed = 0
        else:
            parent, length = found
            self._apply(Fork(parent, seq, length))
            request.computed = length
        if self._checkpoints is not None and request.computed < request.known:
            # Here this prompt parts from another: the next one with this beginning will find a
            # state.
            request.partings.add(request.known)
        request.seq = seq
        request.note_reuse()

    def _bring(self, request: ScheduledRequest, attached: bool) -> None:
        """Bring back what tiers have of it, if it was just ``attached``; note what was found."""
        limit = self._limit(request)
        if self._tier is not None and request.question is not None:
            if attached:
                request.note_found(self._tier.bring(request, request.question, limit))
            request.question = None
            request.note_reuse()
        if self._misses is not None:
            self._misses.explain(request, limit)

    @staticmethod
    def _limit(request: ScheduledRequest) -> int:
        """Return how many tokens may be found: the last one, and those with logits, must run."""
        limit = len(request.tokens) - 1
        return limit if request.fresh_from is None else min(limit, request.fresh_from)

    def _ask(self, request: ScheduledRequest) -> None:
        """Ask what tiers have of a request that holds no state, unless it wants none of it."""
        if self._tier is not None and request.seq is None and (request.cacheable or request.window is not None):
            request.question = self._tier.ask(request)

    def _is_coming(self, request: ScheduledRequest) -> bool:
        """Return whether some of its state has still to come from a tier."""
        return self._tier is not None and bool(self._tier.open) and self._tier.is_coming(request.seq)

    def _is_followed(self, request: ScheduledRequest) -> bool:
        """Return whether a forward may run behind its state, which is coming."""
        return request.ready and self._tier is not None and self._tier.is_near(request.seq)

    def _settle(self) -> None:
        """End loads that are over."""
        if self._tier is not None and self._tier.open:
            for request in [one for one in self.running if not self._is_coming(one)]:
                self.settle(request)

    def settle(self, request: ScheduledRequest) -> None:
        """End the load of a running request, at once. If its state did not come, it waits again."""
        length = request.computed
        if self._tier is not None and (miss := self._tier.settle(request)) is not Miss.NONE:
            request.note_lost(miss, length)
            self.queues.wait(request)

    def _detach(self, request: ScheduledRequest) -> None:
        """Take back ``_attach``: a waiting request holds no pages that others cannot take."""
        if self._cache is not None and request.seq is not None and request.computed and not request.pinned:
            # What it had found may have been evicted in the search for room; it stays findable.
            found = request.tokens.ids[: request.computed]
            for redundant in self._cache.insert(request.seq, found, request.key):
                self._apply(Remove(redundant))
            request.seq, request.computed = None, 0
        else:
            self._release(request)
        if not request.admitted:
            request.reuse_note.by_tier.clear()
        request.note_reuse()

    def _duplicates(self, request: ScheduledRequest) -> bool:
        """Return whether a running prompt computes a prefix that this request could fork later."""
        if self._cache is None or not request.cacheable:
            return False
        ids = request.tokens.ids[: self._limit(request)]
        held = -1
        for other in self.running:
            if other.remaining <= 1 or not other.cacheable or other.blend or other.key != request.key:
                continue
            if other.owner != request.owner:  # Its turn may be late.
                continue
            common = other.origin.exact_part(common_prefix(ids, other.tokens.ids))
            if common < DUPLICATE_PREFIX:
                continue
            if held < 0:
                held = self._cache.peek(ids, request.key)
                if self._tier is not None and request.question is not None:
                    held = max(held, self._tier.held(request.question, ids.size))
            if common >= held + DUPLICATE_PREFIX:
                self.queues.hurry(other, request.priority)  # what waits for it makes it as urgent
                return True
        return False
