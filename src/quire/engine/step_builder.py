"""A step, and one in the making: what the scheduler has put into it so far. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from quire.base.errors import QuireError
from quire.base.types import Chunk, LogitsWanted, SeqId, Step
from quire.branches.extension import Extension
from quire.engine.request import Request
from quire.speculation.proposer import NO_DRAFT, Draft

if TYPE_CHECKING:
    from quire.branches.owner import BranchOwner

ALL_LOGITS_CHUNK = 256
"""Tokens of a step whose logits are all wanted: float32 rows of the whole vocabulary."""

Failure: TypeAlias = tuple[Request, QuireError]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """``max_num_seqs`` requests run at a time, ``max_num_batched_tokens`` tokens in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step and its requests: ``extensions[i]`` of ``requests[i]`` runs ``step.chunks[i]``."""

    step: Step
    requests: tuple[Request, ...]
    extensions: tuple[Extension, ...]
    failed: tuple[Failure, ...] = ()
    """Requests that can never run, with the reason; they hold nothing any more."""
    drafts: tuple[Draft, ...] = ()
    """The last tokens of each chunk that are drafts; empty: no chunk has any."""

    def draft(self, index: int) -> Draft:
        return self.drafts[index] if self.drafts else NO_DRAFT


@dataclass(slots=True)
class StepBuilder:
    """A step that the scheduler is filling. (The drafts of speculation are in ``drafts``.)"""

    budget: int
    kept: int = 0
    """Tokens of it that are kept for decodes; prompts may not use them."""
    rows: int = ALL_LOGITS_CHUNK
    """Tokens that may still have the logits of each."""
    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    adapters: set[int] = field(default_factory=set)
    """Those that it uses."""
    branches: BranchOwner | None = None
    """Limits the adapters of one forward; None: there is no limit."""
    held_back: bool = False
    """Whether a request waits for room for its adapter."""
    used: dict[str, int] = field(default_factory=dict)
    """Tokens of the budget by API key."""

    def add(self, request: Request, count: int) -> None:
        self.requests.append(request)
        self.counts.append(count)
        self._spend(request, count)
        if (adapter := request.branch.next_adapter) is not None:
            self.adapters.add(adapter)

    def drop(self, request: Request) -> None:
        if request in self.requests:
            index = self.requests.index(request)
            del self.requests[index]
            self._spend(request, -self.counts.pop(index))
            self.adapters = {one.branch.next_adapter for one in self.requests if one.branch.next_adapter is not None}

    def count(self, request: Request, most: int) -> int:
        """Return the number of a request's tokens that it may still take, all under one adapter,
        and at most ``most``."""
        branch, wants, stops = request.branch, request.output.wants, request.asked.stops
        remaining, computed = branch.remaining, branch.computed
        room = (self.budget if remaining == 1 else self.budget - self.kept) * branch.budget_factor
        if wants == "all":
            room = min(room, self.rows)
        if (end := branch.runs.end(computed)) is not None:
            room = min(room, end - computed)
        if stops and (stop := next((one for one in stops if one > computed), None)):
            room = min(room, stop - computed)
        return max(0, min(remaining, room, most))

    def has_adapter(self, request: Request) -> bool:
        """Return whether the adapter of its next token fits beside the adapters of the step."""
        adapter, others, branches = request.branch.next_adapter, self.adapters, self.branches
        if adapter is None or branches is None or not others or adapter in others or branches.fits({*others, adapter}):
            return True
        self.held_back = True
        return False

    def waits_for_adapter(self, request: Request) -> bool:
        """Return whether its adapters, or an earlier request's, lack the room to admit it."""
        return (self.held_back and bool(request.branch.runs.ids)) or not self.has_adapter(request)

    def _spend(self, request: Request, count: int) -> None:
        owner, blend, spent = request.asked.owner, request.branch.blend, count
        if blend is not None:
            spent = -(-abs(count) // blend.budget_factor) * (1 if count > 0 else -1)
        self.budget -= spent
        self.used[owner] = self.used.get(owner, 0) + spent
        if request.output.wants == "all":
            self.rows -= count

    @property
    def seqs(self) -> list[SeqId]:
        return [request.branch.seq for request in self.requests if request.branch.seq is not None]


def build_step(
    requests: Sequence[Request],
    counts: Sequence[int],
    checkpoints: Iterable[tuple[int, ...]],
    failed: Sequence[Failure] = (),
    drafts: Sequence[Draft] = (),
    *,
    trees: bool = False,
) -> ScheduledStep:
    """Return the step of the next ``counts[i]`` tokens of each request, and ``drafts[i]`` behind
    them. ``trees``: chains run as a tree of one path too, so that each node keeps the states of
    recurrent layers."""
    extensions = tuple(Extension(one.branch, one.branch.computed, one.branch.runs) for one in requests)
    chunks = tuple(map(_chunk, requests, extensions, counts, checkpoints))
    if not any(drafts):
        return ScheduledStep(Step(chunks=chunks), tuple(requests), extensions, tuple(failed))
    for extension, draft in zip(extensions, drafts, strict=True):
        if draft and (trees or draft.parents):
            extension.parents = (-1, *(parent + 1 for parent in draft.tree.parents))
    chunks = tuple(
        extension.chunk(np.array([*chunk.tokens, *draft.tokens], dtype=np.int64), "all") if draft else chunk
        for extension, chunk, draft in zip(extensions, chunks, drafts, strict=True)
    )
    return ScheduledStep(Step(chunks=chunks), tuple(requests), extensions, tuple(failed), tuple(drafts))


def _chunk(request: Request, extension: Extension, count: int, checkpoints: tuple[int, ...]) -> Chunk:
    branch, start = request.branch, extension.start
    wants: LogitsWanted = request.output.wants
    if wants == "last" and count < branch.remaining:
        wants = "none"
    return extension.chunk(branch.tokens.ids[start : start + count].copy(), wants, checkpoints)
