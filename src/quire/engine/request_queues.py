"""The requests that wait and those that run, and in whose turn they are. No torch.

Both queues are in order of priority, then of arrival. API keys share the places of running requests
and the tokens of steps as ``key_shares`` says.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from quire.engine.key_shares import KeyShares
from quire.engine.scheduled_request import BACKGROUND, ScheduledRequest, Status
from quire.engine.step_draft import Limits, StepDraft

LAG = 4
"""Whole steps by which a key may be behind others that contend for steps with it."""


class RequestQueues:
    """The queues of one scheduler. ``limits`` tells how many requests may run."""

    def __init__(self, limits: Callable[[], Limits]) -> None:
        self._limits = limits
        self.shares = KeyShares(LAG * limits().max_num_batched_tokens)
        self.waiting: list[ScheduledRequest] = []
        self.running: list[ScheduledRequest] = []
        self._waiting_of: dict[str, list[ScheduledRequest]] = {}
        """Those that wait, by API key."""

    def wait(self, request: ScheduledRequest) -> None:
        """Let a request wait in its place, which may have run until now."""
        if request in self.running:
            self.running.remove(request)
        request.status = Status.WAITING
        for line in (self.waiting, self._waiting_of.setdefault(request.owner, [])):
            bisect.insort(line, request, key=_order)

    def run(self, request: ScheduledRequest) -> None:
        """Let a request run, which may have waited until now."""
        self.remove(request)
        request.admit()
        bisect.insort(self.running, request, key=_order)

    def remove(self, request: ScheduledRequest) -> None:
        """Take a request out of the queues, if it is there."""
        if request in self.running:
            self.running.remove(request)
        elif request in (line := self._waiting_of.get(request.owner, [])):
            self.waiting.remove(request)
            line.remove(request)
            if not line:
                del self._waiting_of[request.owner]

    def hurry(self, request: ScheduledRequest, priority: int) -> None:
        """Give a running request this priority, if that is more urgent."""
        if request.priority > priority:
            request.priority = priority
            self.running.sort(key=_order)

    # -- tokens of a step --------------------------------------------------------------------------

    def contend(self) -> None:
        """Begin a step: note whose prompts want its tokens."""
        prompts = {one.owner for one in self.running if one.remaining > 1}
        self.shares.contend(prompts.union(self._waiting_of))

    def turns(self, batch: StepDraft, barred: Collection[str], *, prompts: bool = True) -> Iterator[ScheduledRequest]:
        """Yield waiting requests, and running ``prompts``, in the order in which they get tokens.
        What the batch gives them counts for the next turn. Waiting ones of ``barred`` keys have
        none."""
        lines: dict[str, list[ScheduledRequest]] = {}
        for one in self.running if prompts else ():
            if one.remaining > 1:
                lines.setdefault(one.owner, []).append(one)
        taken = Counter(one.owner for one in self.running)
        turns: list[tuple[bool, float, float, str, ScheduledRequest, Iterator[ScheduledRequest]]] = []

        def queue(line: Iterator[ScheduledRequest]) -> None:
            """Queue a key by its next request: its time, and among equals whether it has less."""
            for one in line:
                key = one.owner
                if not is_out(one):
                    time, load = self.shares.time(key, batch.used[key]), taken[key] / self.shares.weight(key)
                    heapq.heappush(turns, (one.priority == BACKGROUND, time, load, key, one, line))
                    return

        def is_out(one: ScheduledRequest) -> bool:
            """Return whether it was given up meanwhile, or has no turn."""
            return one.owner in barred if one.status is Status.WAITING else one.seq is None

        for key in {**lines, **self._waiting_of}:
            # Of equal priorities those that run come first.
            parts = (lines.get(key, ()), tuple(self._waiting_of.get(key, ())))
            queue(heapq.merge(*parts, key=lambda one: one.priority))
        while turns:
            *_, one, line = heapq.heappop(turns)
            if not is_out(one):
                yield one
            queue(line)

    # -- places ------------------------------------------------------------------------------------

    def taken(self) -> Counter[str]:
        """Return how many places each key has. Requests for which something is made take none."""
        return Counter(one.owner for one in self.running if one.is_ready is None or one.is_ready())

    @property
    def seated(self) -> int:
        """Return how many running requests can take part in a step."""
        return self.taken().total()

    @property
    def held_up(self) -> list[ScheduledRequest]:
        """Return the requests for which something is being made."""
        return [one for one in (*self.running, *self.waiting) if one.is_ready is not None and not one.is_ready()]

    def places(self) -> dict[str, int]:
        """Return how many places each key is to have."""
        wanted = self.taken()
        if len({*wanted, *self._waiting_of}) < 2:
            return dict.fromkeys({*wanted, *self._waiting_of}, self._limits().max_num_seqs)
        for key, line in self._waiting_of.items():
            wanted[key] += bisect.bisect_left(line, BACKGROUND, key=lambda one: one.priority)
        return self.shares.places(self.total(wanted), wanted)

    def total(self, keys: Collection[str]) -> int:
        """Return how many requests may run. Of several keys each one gets a token in a step."""
        limits = self._limits()
        return limits.max_num_seqs if len(keys) < 2 else min(limits.max_num_seqs, limits.max_num_batched_tokens)

    @property
    def owes_places(self) -> bool:
        """Return whether a key that waits has fewer places than its share."""
        if len(self._waiting_of) < 2 and all(one.owner in self._waiting_of for one in self.running):
            return False
        places, taken = self.places(), self.taken()
        lines = self._waiting_of.items()
        return any(taken[key] < places[key] and any(one.ready for one in line) for key, line in lines)

    def over_share(
        self, places: Mapping[str, int], taken: Mapping[str, int], loose: Callable[[ScheduledRequest], bool]
    ) -> ScheduledRequest | None:
        """Return the last running request of the key that has most places beyond its share."""
        beyond = {key: (count - places.get(key, 0)) / self.shares.weight(key) for key, count in taken.items()}
        found = [one for one in reversed(self.running) if beyond.get(one.owner, 0) > 0 and loose(one)]
        return max(found, key=lambda one: beyond[one.owner], default=None)

    # -- pages -------------------------------------------------------------------------------------

    def held(self, requests: Sequence[ScheduledRequest]) -> dict[str, float]:
        """Return the computed tokens of each key over its weight."""
        held: Counter[str] = Counter()
        for one in requests:
            held[one.owner] += one.computed
        return {key: count / self.shares.weight(key) for key, count in held.items()}

    def youngest(self, requests: Sequence[ScheduledRequest]) -> ScheduledRequest:
        """Return the last one of the key that holds most, or a background one."""
        if requests[-1].priority == BACKGROUND:
            return requests[-1]
        held = self.held(requests)
        return max(reversed(requests), key=lambda one: held[one.owner])

    def displaced_for(
        self, request: ScheduledRequest, loose: Callable[[ScheduledRequest], bool]
    ) -> list[ScheduledRequest]:
        """Return running requests whose state leaves the pages that a waiting one needs, none if
        there are too few: of keys that then still hold as much as this one's, or, one that was not
        preempted before, of a key that holds more."""
        need, weight = len(request.tokens), self.shares.weight
        held = self.held([one for one in self.running if one.seq is not None])
        most = held.get(request.owner, 0.0) + need / weight(request.owner)
        found: list[ScheduledRequest] = []
        for one in sorted(self.running, key=lambda one: (-held.get(one.owner, 0.0), -one.priority, -one.arrival)):
            if need <= 0:
                break
            if one.owner == request.owner or one.seq is None or not loose(one):
                continue
            left = held[one.owner] - one.computed / weight(one.owner)
            if one.priority == BACKGROUND or left >= most or (not one.num_preemptions and held[one.owner] > most):
                held[one.owner] = left
                found.append(one)
                # What others share with it stays.
                need -= one.computed - one.num_cached
        return [] if need > 0 else found


def _order(request: ScheduledRequest) -> tuple[int, int]:
    return request.order
