"""Steps in flight: they were queued, and their tokens are not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.engine.request import Request
from quire.engine.step_builder import ScheduledStep

if TYPE_CHECKING:
    from torch import Tensor

    from quire.branches.session_branches import SessionBranches
    from quire.engine.sampling_step import Drawing
    from quire.engine.timeline import StepMark
    from quire.runner.ranks import StagedStep
    from quire.speculation.proposer import Draft


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
    """The steps of an engine that are in flight."""

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
        """Roll back a request that ends. This does nothing unless a step ahead has run its next
        token, or the step that is being read has run drafts of it."""
        if self.reading is None:
            return
        ahead = self.last is not None and request in self.last.scheduled.requests
        if ahead or request in self.reading.drafted:
            self._branches.rollback(request.branch, request.branch.computed)

    def repair(self, running: Iterable[Request]) -> None:
        """Correct the requests' counts of computed tokens, after an interrupted step."""
        for flight in (self.last, self.reading):
            if flight is not None:
                flight.drawing.drop()
        self.clear()
        for request in running:
            self._branches.rollback(request.branch, len(request.branch.tokens) - 1)

    def clear(self) -> None:
        """Forget all steps. Nobody will read their tokens."""
        self.last = self.reading = None
        self.turns.clear()
