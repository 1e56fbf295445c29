"""Admission, chunking and preemption: what runs next. No torch; it knows contracts and values only.

Continuous batching is one rule: every running request has tokens that are not computed yet, and a
step computes some of them. Decodes have one; prompts have many and are cut to the token budget, so
both share a step (Sarathi-Serve, arXiv:2403.02310). Requests are served by priority, equal ones in
order of arrival.

The KV state says how many pages a batch lacks. They come, in this order, from finished sequences in
the prefix cache, from idle sessions (``reclaim``), and from the running request of the lowest
priority, the youngest one among equals, which is preempted. Tiers keep what is worth it.

The adapters of one step must fit into the device's memory together. A request whose adapter does
not fit beside those of earlier ones waits a step. Then no new request with an adapter is admitted,
so that it is not overtaken for ever. The first one always fits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING

from quire.branches.history import common_prefix
from quire.branches.prefix_cache import RadixCache
from quire.engine.checkpoints import Checkpoints
from quire.engine.miss_search import MissSearch
from quire.engine.scheduled_request import BACKGROUND, ScheduledRequest, Status, no_room
from quire.engine.step_draft import Failure, Limits, Scheduled, StepDraft
from quire.errors import QuireError
from quire.outputs import Miss
from quire.types import Add, Chunk, Edit, Fork, LogitsWanted, Remove, SeqId, SetWindow, Step

if TYPE_CHECKING:
    from quire.branches.tiers import Tier
    from quire.contracts.kv_state import ModelState

DUPLICATE_PREFIX = 32
"""A prompt waits for one being computed if that shares so many tokens more than the cache does."""

COMPARED = 16
"""Prompts with the same beginning, of those that arrived last, with which a new one is compared."""

HEADROOM = 32
"""Tokens of room for every running request before a preempted one comes back, so that it stays."""

BACKGROUND_CHUNK = 256
"""Tokens of a background request in a step, for whose end a new request may have to wait."""


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
        self._alike: dict[tuple[Hashable, bytes], dict[ScheduledRequest, None]] = {}
        """Requests under way by key and first tokens, in order of arrival."""
        self.waiting: list[ScheduledRequest] = []
        """By priority, then in order of arrival."""
        self.running: list[ScheduledRequest] = []
        """By priority, then in order of arrival."""
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
            self._note_branches(request)
        bisect.insort(self.waiting, request, key=_order)

    def _note_branches(self, request: ScheduledRequest) -> None:
        """Note where states are to be kept: where it parts from others, and before its last token,
        which a request of the same tokens runs again (without logits: at its end)."""
        request.partings.add(len(request.tokens) - (request.wants != "none"))
        if not request.cacheable or len(request.tokens) <= DUPLICATE_PREFIX:
            return
        alike = self._alike.setdefault((request.key, request.tokens.ids[:DUPLICATE_PREFIX].tobytes()), {})
        for other in islice(reversed(alike), COMPARED):
            common = common_prefix(request.tokens.ids, other.tokens.ids)
            common = min(common, len(request.tokens) - 1, len(other.tokens) - 1)
            if common >= DUPLICATE_PREFIX:
                other.partings.add(common)
                request.partings.add(common)
        alike[request] = None

    def _forget_branches(self, request: ScheduledRequest) -> None:
        name = (request.key, request.tokens.ids[:DUPLICATE_PREFIX].tobytes())
        alike = self._alike.get(name, {})
        alike.pop(request, None)
        if not alike:
            self._alike.pop(name, None)

    def join(self, request: ScheduledRequest) -> None:
        """Run a request that has its sequence and all of its state: a fork of a running one."""
        request.arrival = self._arrivals
        self._arrivals += 1
        request.admit()
        bisect.insort(self.running, request, key=_order)

    def finish(self, request: ScheduledRequest) -> None:
        """Take it out of the queues; its sequence is the caller's business."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = Status.FINISHED
        self.lacks_room = False
        if self._checkpoints is not None:
            self._forget_branches(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def seated(self) -> int:
        """Return how many running requests can take part in a step. The others, for which something
        is being made, take no place."""
        return sum(request.is_ready is None or request.is_ready() for request in self.running)

    @property
    def held_up(self) -> list[ScheduledRequest]:
        """Those for which something is being made."""
        return [one for one in (*self.running, *self.waiting) if one.is_ready is not None and not one.is_ready()]

    def schedule(self) -> Scheduled:
        """Return the next step; without chunks if nothing can run."""
        self._settle()
        # Some decodes return to the queue after each token (beams). They wait for no prompt either.
        coming = sum(request.seq is not None and request.remaining == 1 for request in self.waiting)
        batch = StepDraft(self.limits.max_num_batched_tokens)
        if coming:  # One token is left to a prompt: decodes may wait for its pages.
            batch.kept = min(coming, max(0, self.limits.max_num_seqs - self.seated), batch.budget - 1)
        failed: list[Failure] = []
        # Admit adapters in order of arrival: no request waits for later ones.
        for request in self.running:
            if (adapter := request.next_adapter) is not None and request.ready and self._has_adapter(request, batch):
                batch.adapters.add(adapter)
        # Decodes first: a long prompt fills what they leave of the step and never holds them up.
        # Prompts of a lower priority than one that waits get what that leaves.
        most = self.waiting[0].priority if self.waiting else BACKGROUND
        later = [running for running in self.running if running.priority > most and running.remaining > 1]
        now = [running for running in self.running if running not in later] if later else self.running
        self._fill(sorted(now, key=lambda running: running.remaining > 1), batch)
        if not batch.requests and (loading := next(filter(self._is_followed, now), None)):
            # With nothing else to do, a forward follows its state, layer by layer.
            batch.add(loading, self._count(loading, batch))
        preempted = self._make_room(batch, failed)
        self.lacks_room = False
        if not preempted and (self.waiting or later):
            self.lacks_room = self._admit(batch, failed)
            self._fill(later, batch)
            # A request without room may have left a fork of a running one, which needs a page.
            self._make_room(batch, failed)
        kept = None if self._checkpoints is None else self._checkpoints.wishes(batch.requests, batch.counts)
        chunks = tuple(map(self._chunk, batch.requests, batch.counts, kept or repeat(())))
        return Scheduled(Step(chunks=chunks), tuple(batch.requests), tuple(failed))

    def _fill(self, requests: Sequence[ScheduledRequest], batch: StepDraft) -> None:
        """Add running requests to a step. More may run than it takes (samples of one prompt)."""
        for request in requests:
            if batch.budget < 1 or len(batch.requests) >= self.limits.max_num_seqs:
                break
            adapter = request.next_adapter
            if not request.ready or not (adapter is None or adapter in batch.adapters) or self._is_coming(request):
                continue
            if count := self._count(request, batch):
                batch.add(request, count)

    def computed(self, scheduled: Scheduled) -> None:
        """Note that the step has run."""
        for request, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True):
            if request.seq is not None:
                request.computed += len(chunk.tokens)

    @staticmethod
    def _chunk(request: ScheduledRequest, count: int, checkpoints: tuple[int, ...]) -> Chunk:
        start = request.computed
        wants: LogitsWanted = request.wants
        if wants == "last" and count < request.remaining:
            wants = "none"
        if request.seq is None:
            raise QuireError("a scheduled request has no sequence")
        ids = request.tokens.ids[start : start + count].copy()
        adapter = request.next_adapter
        return Chunk(request.seq, ids, adapter=adapter, logits=wants, checkpoints=checkpoints)  # type: ignore[arg-type]

    def _make_room(self, batch: StepDraft, failed: list[Failure]) -> bool:
        """Reclaim, then preempt the last, until running ones fit; return whether any left."""
        left = False
        while batch.requests and (missing := self._state.missing_pages(batch.seqs, batch.counts)):
            if self._relieve(batch.seqs, batch.counts) or self._reclaim():
                continue
            loose = [request for request in self.running if not request.pinned]
            youngest = (loose or self.running)[-1]
            batch_goes_on = bool(loose) and len(self.running) > 1
            if not batch_goes_on and self._reclaim_waiting(youngest):
                continue
            batch.drop(youngest)
            left = True
            if batch_goes_on:
                self.preempt(youngest)
            else:
                # Nothing else can be given up, so waiting would be for ever.
                self._give_up(self.running, youngest, missing, failed)
        return left

    def _relieve(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> bool:
        """Give up a checkpoint, if that is what is short."""
        return self._checkpoints is not None and self._checkpoints.relieve(seqs, counts)

    def _give_up(
        self, queue: list[ScheduledRequest], request: ScheduledRequest, missing: int, failed: list[Failure]
    ) -> None:
        """Take a request that can never run out of its queue, and its state away."""
        queue.remove(request)
        self._release(request)
        failed.append((request, no_room(request, missing, alone=self._state.empty())))

    def preempt(self, request: ScheduledRequest) -> None:
        """Give up its state, and let it wait in its old place until that comes back."""
        self.running.remove(request)
        self._set_aside(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=_order)

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

    def _admit(self, batch: StepDraft, failed: list[Failure]) -> bool:
        """Admit who waits, as far as there is room; return whether the first one lacks pages."""
        index, seated = 0, self.seated
        while index < len(self.waiting) and batch.budget > 0 and seated < self.limits.max_num_seqs:
            request = self.waiting[index]
            duplicates = request.seq is None and self._duplicates(request)
            held_up = duplicates or not request.ready
            if held_up or not self._count(request, batch) or self._waits_for_adapter(request, batch):
                index += 1
                continue
            attached = request.seq is None
            self._attach(request)
            if attached and self._waits_for_adapter(request, batch):
                # What was found of it ends within another run of its history.
                self._detach(request)
                index += 1
                continue
            # Room for all of its tokens, not only this chunk: else prompts preempt each other.
            if missing := self._shortage(request):
                if not self.running:
                    self._give_up(self.waiting, request, missing, failed)
                    continue
                if attached:
                    self._detach(request)
                return index == 0
            self._bring(request, attached)
            del self.waiting[index]
            request.admit()
            seated += 1
            bisect.insort(self.running, request, key=_order)
            if request.remaining == 1:
                batch.kept = max(0, batch.kept - 1)
            # Its stored state may have to come, or end within another adapter's run: then it waits.
            if not self._is_coming(request) and self._has_adapter(request, batch):
                batch.add(request, self._count(request, batch))
        return False

    def _has_adapter(self, request: ScheduledRequest, batch: StepDraft) -> bool:
        """Return whether the adapter of its next token fits beside those of the step."""
        adapter, others = request.next_adapter, batch.adapters
        fits = self._adapters_fit
        if adapter is None or fits is None or not others or adapter in others or fits({*others, adapter}):
            return True
        batch.held_back = True
        return False

    def _waits_for_adapter(self, request: ScheduledRequest, batch: StepDraft) -> bool:
        """Return whether its adapters, or an earlier request's, lack the room to admit it."""
        return (batch.held_back and bool(request.runs.ids)) or not self._has_adapter(request, batch)

    def _most(self, request: ScheduledRequest) -> int:
        """Return how many of its tokens a step may take, beside its window if that slides."""
        if request.window is None:
            most = self.limits.max_num_batched_tokens * request.dilution
            return min(most, BACKGROUND_CHUNK) if request.priority == BACKGROUND else most
        return max(1, self._state.largest_step(request.window.size, request.window.sink))

    def _count(self, request: ScheduledRequest, batch: StepDraft) -> int:
        """Return how many of its tokens the step may still take, all under one adapter."""
        remaining = request.remaining
        if remaining == 1 and request.wants != "all":
            return max(0, min(1, batch.budget))  # A stop and the end of an adapter's run are behind it.
        room = (batch.budget if remaining == 1 else batch.budget - batch.kept) * request.dilution
        if request.wants == "all":
            room = min(room, batch.rows)
        if (end := request.runs.end(request.computed)) is not None:
            room = min(room, end - request.computed)
        if request.stops and (stop := next((one for one in request.stops if one > request.computed), None)):
            room = min(room, stop - request.computed)
        return max(0, min(remaining, room, self._most(request)))

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
            if self._relieve(seqs, counts) or self._reclaim() or (not self.running and self._reclaim_waiting(request)):
                continue
            return missing
        return 0

    def _reclaim_waiting(self, keep: ScheduledRequest) -> bool:
        """Give up the state with which a waiting request came (a session's). It comes back, or is
        computed again, when it runs."""
        for request in reversed(self.waiting):
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
            self.running.remove(request)
            request.status = Status.WAITING
            request.note_lost(miss, length)
            bisect.insort(self.waiting, request, key=_order)

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
            common = other.origin.exact_part(common_prefix(ids, other.tokens.ids))
            if common < DUPLICATE_PREFIX:
                continue
            if held < 0:
                held = self._cache.peek(ids, request.key)
                if self._tier is not None and request.question is not None:
                    held = max(held, self._tier.held(request.question, ids.size))
            if common >= held + DUPLICATE_PREFIX:
                if other.priority > request.priority:  # what waits for it makes it as urgent
                    other.priority = request.priority
                    self.running.sort(key=_order)
                return True
        return False


def _order(request: ScheduledRequest) -> tuple[int, int]:
    return request.order
