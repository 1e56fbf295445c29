"""Steps in flight: queued, with tokens that are not read; and the decodes behind them. No torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.base.token_history import Ids
from quire.base.types import Step
from quire.branches.extension import Extension
from quire.engine.checkpoints import Checkpoints
from quire.engine.request import Request
from quire.engine.scheduler import Scheduler
from quire.engine.step_builder import ScheduledStep

if TYPE_CHECKING:
    from torch import Tensor

    from quire.branches.session_branches import SessionBranches
    from quire.contracts.kv_state import ModelState
    from quire.engine.sampling_step import Drawing
    from quire.engine.timeline import StepMark
    from quire.runner.ranks import StagedStep
    from quire.speculation.proposer import Draft


PATIENCE = 16
"""Steps ahead in a row beside requests that wait for pages. Then the scheduler checks whether there
are any: pages come free in other ways than by the end of a request."""

UNREAD: Final[Ids] = np.zeros(1, dtype=np.int64)
"""The token of a chunk that the host has not read."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """The drafts of a request that a step has run."""

    draft: Draft
    logits_RV: Tensor
    """The logits behind each of them, ``[R, V]``."""
    first: Sequence[int] | None = None
    """Their ``first_maxima``, if they are known."""


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that was queued and whose tokens are not read."""

    scheduled: ScheduledStep
    drawing: Drawing
    mark: StepMark
    launched: float
    """When, in monotonic time."""
    changed: list[Request]
    """The requests that ended, without a token, while it was queued."""
    drafted: dict[Request, DraftRows] = field(default_factory=dict)
    """The requests whose drafts it has run."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInTurn:
    """A step of decodes that pipeline stages run, and whose logits are not there."""

    scheduled: ScheduledStep
    running: StagedStep
    mark: StepMark
    launched: float
    """When, in monotonic time."""


class InFlightSteps:
    def __init__(self, branches: SessionBranches) -> None:
        self._branches = branches
        self.stepping = False
        """Whether a step is under way."""
        self.last: InFlightStep | None = None
        """The last step that was queued, while its tokens are not read."""
        self.reading: InFlightStep | None = None
        """The step before it, while its tokens are being read."""
        self.turns: deque[StepInTurn] = deque()
        """The steps that pipeline stages run, the first one first. All their tokens are known."""

    def withdraw(self, request: Request) -> None:
        """Take back what steps have run of a request that ends, and does not count: its next token
        in a step ahead, or drafts that are not verified yet."""
        branch, state = request.branch, self._branches.state
        if branch.seq is None:
            return
        if state.sequence_length(branch.seq) > branch.computed or state.pending_nodes(branch.seq):
            self._branches.rollback(branch, branch.computed)

    def repair(self, running: Iterable[Request]) -> None:
        """Correct the requests' counts of computed tokens, after an interrupted step."""
        for flight in (self.last, self.reading):
            if flight is not None:
                flight.drawing.drop()
        self.clear()
        for request in running:
            self._branches.rollback(request.branch, len(request.branch.tokens) - 1)

    def clear(self) -> None:
        """Remove all steps. Their tokens are not read."""
        self.last = self.reading = None
        self.turns.clear()


class DecodesAhead:
    """Chooses a step behind one whose tokens are not known yet: one more token of each request that
    continues. It makes no room and admits no request, for a scheduler that knows all tokens does
    that better."""

    def __init__(self, scheduler: Scheduler, state: ModelState, checkpoints: Checkpoints | None) -> None:
        self._scheduler, self._state, self._checkpoints = scheduler, state, checkpoints
        self._steps = 0
        """Steps in a row beside requests that wait for pages."""

    def step(self, requests: Sequence[Request], running: int, *, known: bool = False) -> ScheduledStep | None:
        """Return the step of one more token of each of ``requests``. None: the scheduler is to
        choose once all tokens are known, for others might run beside these, or room must be made.
        ``running``: requests of the steps in flight that have not ended. ``known``: whether the
        last token of each request is known, and is the one to run; else the chunks have token
        0."""
        scheduler, limits = self._scheduler, self._scheduler.limits
        if not requests or len(requests) > min(limits.max_num_batched_tokens, limits.max_num_seqs):
            return None
        if len(scheduler.running) != running or not self._nobody_comes():
            return None
        seqs = [request.branch.seq for request in requests if request.branch.seq is not None]
        counts = [1] * len(seqs)
        if len(seqs) < len(requests) or self._state.missing_pages(seqs, counts):
            return None
        kept = [()] * len(seqs) if self._checkpoints is None else self._checkpoints.wishes(requests, counts)
        extensions = tuple(Extension(one.branch, one.branch.computed, one.branch.runs) for one in requests)
        chunks = tuple(
            one.chunk(one.branch.tokens.ids[-1:].copy() if known else UNREAD, "last", positions)
            for one, positions in zip(extensions, kept, strict=True)
        )
        scheduler.queues.shares.charge(Counter(request.asked.owner for request in requests))
        return ScheduledStep(Step(chunks=chunks), tuple(requests), extensions)

    def _nobody_comes(self) -> bool:
        """Return whether no request waits, or none of the waiting could be admitted now."""
        scheduler = self._scheduler
        self._steps = self._steps + 1 if scheduler.waiting and scheduler.lacks_room else 0
        if not scheduler.waiting:
            return True
        if scheduler.queues.seated >= scheduler.limits.max_num_seqs and not scheduler.queues.owes_places:
            return True
        return scheduler.lacks_room and self._steps % PATIENCE != 0
