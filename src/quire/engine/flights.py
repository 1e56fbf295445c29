"""Steps in flight: they were queued, and their tokens are not read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.base.types import Commit
from quire.engine.request import Request, RequestBranch
from quire.engine.step_draft import Scheduled

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.sampling_step import Drawing
    from quire.engine.session_branches import SessionBranches
    from quire.engine.timeline import StepMark


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """The drafts of a request that a step has run."""

    tokens: tuple[int, ...]
    logits_RV: Tensor
    """The logits behind each of them, ``[R, V]``."""
    first: Sequence[int] | None = None
    """Their ``first_maxima``, if they are known."""


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was queued and whose tokens are not read."""

    scheduled: Scheduled
    drawing: Drawing
    mark: StepMark
    launched: float
    """When, in monotonic time."""
    changed: list[Request]
    """The requests that ended, without a token, while it was queued."""
    drafted: dict[Request, DraftRows] = field(default_factory=dict)
    """The requests whose drafts it has run."""


class Flights:
    """The steps of an engine that are in flight."""

    def __init__(self, branches: SessionBranches) -> None:
        self._branches = branches
        self.stepping = False
        """Whether a step is under way."""
        self.last: Flight | None = None
        """The last step that was queued, while its tokens are not read."""
        self.reading: Flight | None = None
        """The step before it, while its tokens are being read."""

    def withdraw(self, request: Request) -> None:
        """Take back what a step has run of a request that ends with an earlier token, or with a
        token before its last draft."""
        if self.reading is None:
            return
        ahead = self.last is not None and request in self.last.scheduled.requests
        if ahead or request in self.reading.drafted:
            self.take_back(request)

    def take_back(self, request: Request) -> None:
        """Take back what has run of a request beyond what counts as computed."""
        branch = request.branch
        if branch.seq is not None:
            self._cut(branch, branch.computed)

    def _cut(self, branch: RequestBranch, length: int) -> None:
        """Cut a sequence to ``length`` tokens, a path of drafts of it included."""
        assert branch.seq is not None
        state = self._branches.runner.state
        held = state.sequence_length(branch.seq)
        if state.pending_nodes(branch.seq):
            self._branches.apply(Commit((branch.seq,), (length - held - 1 if length > held else -1,)))
            held = max(held, length)
        branch.recede(self._branches.pop(branch.seq, held, length))

    def repair(self, running: Iterable[Request]) -> None:
        """Correct the requests' counts of computed tokens, after an interrupted step."""
        for flight in (self.last, self.reading):
            if flight is not None:
                flight.drawing.drop()
        self.last = self.reading = None
        for branch in (request.branch for request in running):
            if branch.seq is not None:
                self._cut(branch, self._safe_length(branch))

    def _safe_length(self, branch: RequestBranch) -> int:
        """Return the number of tokens whose rows are certain: of drafts only the input token's."""
        assert branch.seq is not None
        state = self._branches.runner.state
        held = state.sequence_length(branch.seq) + min(1, state.pending_nodes(branch.seq))
        return min(held, len(branch.tokens) - 1)
