"""A step, and one in the making: what the scheduler has put into it so far. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from quire.engine.scheduled_request import ScheduledRequest
from quire.errors import QuireError
from quire.types import Chunk, LogitsWanted, SeqId, Step

ALL_LOGITS_CHUNK = 256
"""Tokens of a step whose logits are all wanted: float32 rows of the whole vocabulary."""

Failure: TypeAlias = tuple[ScheduledRequest, QuireError]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """``max_num_seqs`` requests run at a time, ``max_num_batched_tokens`` tokens in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step and its requests: ``requests[i]`` runs ``step.chunks[i]``."""

    step: Step
    requests: tuple[ScheduledRequest, ...]
    failed: tuple[Failure, ...] = ()
    """Requests that can never run, with the reason; they hold nothing any more."""


@dataclass(slots=True)
class StepDraft:
    """A step in the making."""

    budget: int
    kept: int = 0
    """Tokens of it that no prompt takes: decodes wait for them."""
    rows: int = ALL_LOGITS_CHUNK
    """Tokens that may still have the logits of each."""
    requests: list[ScheduledRequest] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    adapters: set[int] = field(default_factory=set)
    """Those that it uses."""
    fits: Callable[[Collection[int]], bool] | None = None
    """Tells whether one forward can use these adapters together; None: any."""
    held_back: bool = False
    """Whether a request waits for room for its adapter."""
    used: Counter[str] = field(default_factory=Counter)
    """Tokens of the budget by API key."""

    def add(self, request: ScheduledRequest, count: int) -> None:
        self.requests.append(request)
        self.counts.append(count)
        self._spend(request, count)
        if (adapter := request.next_adapter) is not None:
            self.adapters.add(adapter)

    def drop(self, request: ScheduledRequest) -> None:
        if request in self.requests:
            index = self.requests.index(request)
            del self.requests[index]
            self._spend(request, -self.counts.pop(index))
            self.adapters = {one.next_adapter for one in self.requests if one.next_adapter is not None}

    def count(self, request: ScheduledRequest, most: int) -> int:
        """Return how many of a request's tokens it may still take, all under one adapter, and at
        most this many."""
        remaining = request.remaining
        if remaining == 1 and request.wants != "all":
            return max(0, min(1, self.budget))  # A stop and the end of an adapter's run are behind it.
        room = (self.budget if remaining == 1 else self.budget - self.kept) * request.dilution
        if request.wants == "all":
            room = min(room, self.rows)
        if (end := request.runs.end(request.computed)) is not None:
            room = min(room, end - request.computed)
        if request.stops and (stop := next((one for one in request.stops if one > request.computed), None)):
            room = min(room, stop - request.computed)
        return max(0, min(remaining, room, most))

    def has_adapter(self, request: ScheduledRequest) -> bool:
        """Return whether the adapter of its next token fits beside those of the step."""
        adapter, others, fits = request.next_adapter, self.adapters, self.fits
        if adapter is None or fits is None or not others or adapter in others or fits({*others, adapter}):
            return True
        self.held_back = True
        return False

    def waits_for_adapter(self, request: ScheduledRequest) -> bool:
        """Return whether its adapters, or an earlier request's, lack the room to admit it."""
        return (self.held_back and bool(request.runs.ids)) or not self.has_adapter(request)

    def _spend(self, request: ScheduledRequest, count: int) -> None:
        spent = -(-abs(count) // request.dilution)
        spent = spent if count > 0 else -spent
        self.budget -= spent
        self.used[request.owner] += spent
        if request.wants == "all":
            self.rows -= count

    @property
    def seqs(self) -> list[SeqId]:
        return [request.seq for request in self.requests if request.seq is not None]


def chunk_of(request: ScheduledRequest, count: int, checkpoints: tuple[int, ...]) -> Chunk:
    """Return the next tokens of a request as a part of a step."""
    start = request.computed
    wants: LogitsWanted = request.wants
    if wants == "last" and count < request.remaining:
        wants = "none"
    if request.seq is None:
        raise QuireError("a scheduled request has no sequence")
    ids = request.tokens.ids[start : start + count].copy()
    adapter = request.next_adapter
    return Chunk(request.seq, ids, adapter=adapter, logits=wants, checkpoints=checkpoints)  # type: ignore[arg-type]
