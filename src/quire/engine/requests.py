"""The requests of an engine: how they are queued, and how they end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.adapters.keys import api_key_of
from quire.base.caller_context import caller
from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.base.metrics import EngineMetrics
from quire.base.outputs import FinishReason
from quire.engine import session_requests
from quire.engine.in_flight import InFlightSteps
from quire.engine.request import Request
from quire.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.branches.session_branches import SessionBranches
    from quire.branches.stored_state import StoredState
    from quire.engine.blending import Blending
    from quire.engine.drafts import Drafts
    from quire.engine.pins import PrefixPins
    from quire.engine.timeline import Timeline


def owner_of(salt: Hashable) -> str:
    """Return the API key of a request that is made now: its caller's, else that in its salt."""
    return caller.get().owner or api_key_of(salt)


@dataclass(eq=False, slots=True, kw_only=True)
class Requests:
    """All requests of one engine that are under way. The caller holds the engine's lock."""

    scheduler: Scheduler
    in_flight: InFlightSteps
    branches: SessionBranches
    stored: StoredState
    blending: Blending
    prefix_pins: PrefixPins
    timeline: Timeline
    metrics: EngineMetrics
    drafts: Drafts | None = None
    by_id: dict[str, list[Request]] = field(default_factory=dict)
    """The samples of each prompt, until all of them have ended."""
    yielding: Request | None = None
    """The request that ends as soon as there is any other."""
    closed: bool = False
    """Whether no more requests are accepted."""
    _cancelled: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    # -- the beginning -----------------------------------------------------------------------------

    def name(self, request_id: str | None = None) -> str:
        """Return the id of a new request, a fresh one without ``request_id``."""
        if self.closed:
            raise FailedPrecondition("the LLM is closed; make a new one")
        name = request_id
        while name is None:
            fresh = f"request-{next(self._numbers)}"
            name = None if fresh in self.by_id else fresh  # a caller may have given that name to one
        if name in self.by_id:
            raise InvalidArgument(f"request id {name!r} is in use; give a new one", field="request_id")
        # A late cancel of the last request of this name is not meant for the new one.
        self._cancelled.discard(name)
        return name

    def queue(self, samples: list[Request], arrival: int | None = None) -> None:
        """Queue the samples of a prompt, of which the first one runs it. ``arrival``: the place of
        an earlier request that it continues."""
        self.end_yielding()
        leader = samples[0]
        self.by_id[leader.request_id] = samples
        who = caller.get()
        if who.owner:
            self.scheduler.queues.shares.set_weight(who.owner, who.weight)
        self.scheduler.submit(leader, arrival)
        if arrival is None:
            self.timeline.arrived(samples)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step boundary; return False if there is none."""
        if request_id not in self.by_id:
            return False
        self._cancelled.add(request_id)
        return True

    def end_cancelled(self) -> list[Request]:
        ended: list[Request] = []
        while self._cancelled:
            for request in self.by_id.get(self._cancelled.pop(), ()):
                if not request.finished:
                    self.finish(request, "cancelled")
                    ended.append(request)
        return ended

    def end_yielding(self) -> bool:
        """End the request that runs only while nothing else does; return whether there was one. Its
        computed tokens stay in the prefix cache."""
        if self.yielding is None:
            return False
        self.finish(self.yielding, "cancelled")
        return True

    def end(self, requests: Iterable[Request]) -> None:
        """Cancel requests now, not at the next step. Finished ones stay as they are."""
        for request in requests:
            self.finish(request, "cancelled")
            if request.output.verification is not None:
                self.finish(request.output.verification, "cancelled")

    def fail_all(self, error: QuireError) -> None:
        """End all requests with the error of a step whose cause is no single request."""
        for samples in list(self.by_id.values()):
            for request in samples:
                self.fail(request, error)

    def fail(self, request: Request, error: QuireError) -> Request:
        if request.finished:
            return request
        request.output.error = error
        # The prefix cache must not hand out values that are not finite.
        branch, cache = request.branch, self.branches.cache
        branch.cacheable = False
        if cache is not None and branch.seq is not None and branch.seq in cache:
            cache.remove(branch.seq)
        if request.asked.hints is not None:
            for pin in request.asked.hints.failed():
                self.prefix_pins.drop(pin)
        for sibling in request.seat.siblings:
            sibling.output.error = error
            self.finish(sibling, "error")
        self.finish(request, "error")
        return request

    def finish(self, request: Request, reason: FinishReason, stop: str | int | None = None) -> None:
        """End a request; ``stop``: the stop string or token, or "context"."""
        if request.finished:
            return
        branch, output = request.branch, request.output
        self.in_flight.withdraw(request)
        output.finished_at = time.monotonic()
        if request is self.yielding:
            self.yielding = None
        if output.detokenizer is not None and (rest := output.detokenizer.finish()):
            output.pieces.append(rest)
        # Other threads read these without the lock: unfinished, or with all of the above.
        output.stop_reason, output.finish_reason = stop, reason
        self.scheduler.finish(request)
        if branch.blend is not None:
            branch.blend.end()
        if request.seat.guess is not None:
            self.finish(request.seat.guess, "cancelled")
        if request.asked.capture is not None:
            self.blending.under_way.discard(request.asked.capture.key)
        # What has not come by now is computed when it is needed.
        self.stored.finish_load(branch)
        if request.params is not None and not request.asked.guesses:
            self.metrics.request_success.inc(reason)
            self.metrics.e2e_request_latency.observe(output.finished_at - request.asked.arrival)
        if not request.asked.guesses:
            self.timeline.ended(request)
        if self.drafts is not None:
            self.drafts.ended(request)
        if branch.session is not None:
            session_requests.end(self.branches, branch.session, request)
        else:
            self._release(request)
        samples = self.by_id.get(request.request_id, ())
        if all(sample.finished for sample in samples):
            self.by_id.pop(request.request_id, None)
            for sample in samples:
                self._demote(sample, samples)

    def _release(self, request: Request) -> None:
        """Keep the finished sequence for others, or give its pages back."""
        branch = request.branch
        if branch.seq is None:
            return
        if self.branches.cache is None or not branch.cacheable or not branch.computed:
            self.branches.remove(branch.seq)
        else:
            self.stored.keep(branch)
            self.branches.share(branch, branch.key, live=False)
        branch.seq = None

    def _demote(self, request: Request, samples: Sequence[Request]) -> None:
        """Give up what the pool holds of a finished prompt, and of its session, if hints say so."""
        hints = request.asked.hints
        if hints is None or (start := hints.ended()) is None:
            return
        session = samples[0].branch.session
        given_up = 0 if session is None else self.branches.shorten(session, start)
        for branch in [sample.branch for sample in samples if sample.branch.cacheable]:
            given_up = max(given_up, self.branches.demote(branch.tokens.ids, branch.key, start))
        hints.demoted(start, given_up)
