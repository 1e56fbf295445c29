"""The requests that wait and those that run, and in whose turn they are. No torch.

Both queues are in order of priority, then of arrival. API keys share the tokens of steps by virtual
time, and the places of running requests by need.

Each key has a virtual time, which grows by the tokens that are computed for it over its weight
(a virtual token counter, arXiv:2401.00588). Among the keys that contend, whose prompts want tokens
of a step, the one with the least time comes first. So each of them gets tokens in proportion to its
weight, and a key that asks for less gets what it asks for. A key that begins to contend starts at
the time of those that do, so idle time is no credit. What it had beyond that stays.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

from quire.engine.request import BACKGROUND, Request, Status
from quire.engine.step_builder import Limits, StepBuilder

TURN = 64
"""Weighted tokens after which a key gives its place to another, if there are more keys than
places."""


class KeyShares:
    """The virtual times of keys. ``lag``: weighted tokens by which the time of a contending key may
    be behind that of another, so that a key that could not use its share waits for no long time
    of others later."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._weights: dict[str, float] = {}
        self._times: dict[str, float] = {}
        self._contending: frozenset[str] = frozenset()

    def weight(self, key: str) -> float:
        """Return a key's weight, 1 by default."""
        return self._weights.get(key, 1.0)

    def set_weight(self, key: str, weight: float) -> None:
        """Give a key this share, relative to others, from now on."""
        self._weights[key] = weight

    def time(self, key: str, tokens: int = 0) -> float:
        """Return a key's virtual time once so many tokens more are computed."""
        return self._times.get(key, 0.0) + tokens / self.weight(key)

    def charge(self, used: Mapping[str, int]) -> None:
        """Count the tokens of a step by key."""
        for key, tokens in used.items():
            self._times[key] = self.time(key, tokens)

    def contend(self, keys: Set[str]) -> None:
        """Begin a step for whose tokens these keys contend."""
        if len(keys) < 2 and self._contending == keys:
            return  # One key, or none, continues: its time is behind that of no other.
        stayed = self._contending.intersection(keys)
        # With no contention there is nothing to be remembered: all start at the latest time.
        now = min(map(self.time, stayed)) if stayed else max(self._times.values(), default=0.0)
        for key in keys:
            if key not in stayed:
                self._times[key] = max(self.time(key), now)
        floor = max(map(self.time, keys), default=0.0) - self._lag
        for key in keys:
            self._times[key] = max(self.time(key), floor)
        self._contending = frozenset(keys)

    def places(self, total: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """Divide places among keys in proportion to their weights. What a key does not want goes to
        the others. With more keys than places, those with the least time get one each, in turns."""
        keys = sorted(wanted, key=lambda key: (self.time(key) // TURN, key))
        left = dict.fromkeys(keys[:total])
        places = dict.fromkeys(keys, 0)
        # The key that wants least for its weight comes first: it is the first to have enough.
        for key in sorted(left, key=lambda key: wanted[key] / self.weight(key)):
            weights = sum(map(self.weight, left))
            share = max(1, round(total * self.weight(key) / weights))
            # One place stays for each of the others.
            places[key] = min(wanted[key], share, total - len(left) + 1)
            total -= places[key]
            del left[key]
        return places


LAG = 4
"""Whole steps by which a key may be behind others that contend for steps with it."""


class RequestQueues:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.shares = KeyShares(LAG * limits.max_num_batched_tokens)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._waiting_of: dict[str, list[Request]] = {}
        """Those that wait, by API key."""

    def wait(self, request: Request) -> None:
        """Let a request wait in its place, which may have run until now."""
        if request in self.running:
            self.running.remove(request)
        request.seat.status = Status.WAITING
        for line in (self.waiting, self._waiting_of.setdefault(request.asked.owner, [])):
            bisect.insort(line, request, key=_order)

    def run(self, request: Request) -> None:
        """Let a request run, which may have waited until now."""
        self.remove(request)
        request.admit()
        bisect.insort(self.running, request, key=_order)

    def remove(self, request: Request) -> None:
        """Take a request out of the queues, if it is there."""
        if request in self.running:
            self.running.remove(request)
        elif request in (line := self._waiting_of.get(request.asked.owner, [])):
            self.waiting.remove(request)
            line.remove(request)
            if not line:
                del self._waiting_of[request.asked.owner]

    def hurry(self, request: Request, priority: int) -> None:
        """Give a running request this priority, if that is more urgent."""
        if request.seat.priority > priority:
            request.seat.priority = priority
            self.running.sort(key=_order)

    # -- tokens of a step --------------------------------------------------------------------------

    def contend(self, prompts: Sequence[Request]) -> None:
        """Begin a step: note the keys whose prompts want its tokens, running requests included."""
        self.shares.contend({one.asked.owner for one in prompts}.union(self._waiting_of))

    def turns(self, batch: StepBuilder, barred: Collection[str], prompts: Sequence[Request] = ()) -> Iterator[Request]:
        """Yield waiting requests, and running ``prompts``, in the order in which they get tokens.
        What the batch gives them counts for the next turn. Waiting ones of ``barred`` keys have
        none."""
        lines: dict[str, list[Request]] = {}
        for one in prompts:
            lines.setdefault(one.asked.owner, []).append(one)
        # Of equal priorities those that run come first.
        merged: dict[str, Iterator[Request]] = {
            key: heapq.merge(lines.get(key, ()), tuple(self._waiting_of.get(key, ())), key=_priority)
            for key in {**lines, **self._waiting_of}
        }

        def is_out(one: Request) -> bool:
            """Return whether it was given up meanwhile, or has no turn."""
            return one.asked.owner in barred if one.seat.status is Status.WAITING else one.branch.seq is None

        if len(merged) < 2:
            yield from (one for line in merged.values() for one in line if not is_out(one))
            return
        taken = Counter(one.asked.owner for one in self.running)
        turns: list[tuple[bool, float, float, str, Request, Iterator[Request]]] = []

        def queue(line: Iterator[Request]) -> None:
            """Queue a key by its next request: its time, and among equals whether it has less."""
            for one in line:
                key = one.asked.owner
                if not is_out(one):
                    time, load = self.shares.time(key, batch.used.get(key, 0)), taken[key] / self.shares.weight(key)
                    heapq.heappush(turns, (one.seat.priority == BACKGROUND, time, load, key, one, line))
                    return

        for waiting in merged.values():
            queue(waiting)
        while turns:
            *_, one, line = heapq.heappop(turns)
            if not is_out(one):
                yield one
            queue(line)

    # -- places ------------------------------------------------------------------------------------

    def taken(self) -> Counter[str]:
        """Return the number of places of each key. Guesses have those of their requests."""
        return Counter(one.asked.owner for one in self.running if not one.asked.guesses)

    @property
    def seated(self) -> int:
        """Return the number of running requests that can take part in a step."""
        return self.taken().total()

    @property
    def is_full(self) -> bool:
        """Return whether only one key has requests, and as many as may run."""
        return self._has_one_key and self.seated >= self.limits.max_num_seqs

    @property
    def _has_one_key(self) -> bool:
        """Return whether at most one key waits, and all that run are of it."""
        return len(self._waiting_of) < 2 and all(one.asked.owner in self._waiting_of for one in self.running)

    def places(self) -> dict[str, int]:
        """Return the number of places due to each key."""
        wanted = self.taken()
        if len({*wanted, *self._waiting_of}) < 2:
            return dict.fromkeys({*wanted, *self._waiting_of}, self.limits.max_num_seqs)
        for key, line in self._waiting_of.items():
            wanted[key] += bisect.bisect_left(line, BACKGROUND, key=_priority)
        return self.shares.places(self.total(wanted), wanted)

    def total(self, keys: Collection[str]) -> int:
        """Return the number of requests that may run. Of several keys each one gets a token in a
        step."""
        limits = self.limits
        return limits.max_num_seqs if len(keys) < 2 else min(limits.max_num_seqs, limits.max_num_batched_tokens)

    @property
    def owes_places(self) -> bool:
        """Return whether a key that waits has fewer places than its share."""
        if self._has_one_key:
            return False
        places, taken = self.places(), self.taken()
        lines = self._waiting_of.items()
        return any(taken[key] < places[key] and any(one.ready for one in line) for key, line in lines)

    def over_share(
        self, places: Mapping[str, int], taken: Mapping[str, int], loose: Callable[[Request], bool]
    ) -> Request | None:
        """Return the last running request of the key that has most places beyond its share."""
        beyond = {key: (count - places.get(key, 0)) / self.shares.weight(key) for key, count in taken.items()}
        found = [one for one in reversed(self.running) if beyond.get(one.asked.owner, 0) > 0 and loose(one)]
        return max(found, key=lambda one: beyond[one.asked.owner], default=None)

    # -- pages -------------------------------------------------------------------------------------

    def held(self, requests: Sequence[Request]) -> dict[str, float]:
        """Return the computed tokens of each key over its weight."""
        held: Counter[str] = Counter()
        for one in requests:
            held[one.asked.owner] += one.branch.computed
        return {key: count / self.shares.weight(key) for key, count in held.items()}

    def youngest(self, requests: Sequence[Request]) -> Request:
        """Return the last one of the key that holds most, or a background one."""
        if requests[-1].seat.priority == BACKGROUND:
            return requests[-1]
        held = self.held(requests)
        return max(reversed(requests), key=lambda one: held[one.asked.owner])

    def displaced_for(self, request: Request, loose: Callable[[Request], bool]) -> list[Request]:
        """Return running requests whose state leaves the pages that a waiting one needs, none if
        there are too few: of keys that then still hold as much as this one's, or a request not
        preempted before, of a key that holds more."""
        need, weight = len(request.branch.tokens), self.shares.weight
        held = self.held([one for one in self.running if one.branch.seq is not None])
        most = held.get(request.asked.owner, 0.0) + need / weight(request.asked.owner)
        found: list[Request] = []
        for one in sorted(
            self.running, key=lambda one: (-held.get(one.asked.owner, 0.0), -one.seat.priority, -one.seat.arrival)
        ):
            owner, seat, computed = one.asked.owner, one.seat, one.branch.computed
            if need <= 0:
                break
            if owner == request.asked.owner or one.branch.seq is None or not loose(one):
                continue
            left = held[owner] - computed / weight(owner)
            if seat.priority == BACKGROUND or left >= most or (not seat.num_preemptions and held[owner] > most):
                held[owner] = left
                found.append(one)
                # What others share with it stays.
                need -= computed - seat.reuse.cached
        return [] if need > 0 else found


def _priority(request: Request) -> int:
    return request.seat.priority


def _order(request: Request) -> tuple[int, int]:
    """Return the key that sorts requests, the next one to run first."""
    return request.seat.priority, request.seat.arrival
