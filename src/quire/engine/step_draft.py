"""A step, and one in the making: what the scheduler has put into it so far. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from quire.engine.scheduled_request import ScheduledRequest
from quire.errors import QuireError
from quire.types import SeqId, Step

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
    held_back: bool = False
    """Whether a request waits for room for its adapter."""

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

    def _spend(self, request: ScheduledRequest, count: int) -> None:
        spent = -(-abs(count) // request.dilution)
        self.budget -= spent if count > 0 else -spent
        if request.wants == "all":
            self.rows -= count

    @property
    def seqs(self) -> list[SeqId]:
        return [request.seq for request in self.requests if request.seq is not None]
