"""Decodes in turn: while one pipeline stage runs the decodes of some requests, the others run those
of other requests. No torch at run time.

A decode is in one stage at a time, so a single batch would leave the other stages idle. The
scheduler's batch is divided into one group of requests for each stage. A group begins its next
token as soon as its last one is drawn, behind the groups that are still under way. If there is
anything to decide (a request waits, pages are short, groups have become uneven), no group begins;
once all have ended, the scheduler runs again.

All tokens of a step in turn are known when it begins, so nothing of it is taken back. Its logits
are not.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire.base.types import Step
from quire.branches.extension import count_run
from quire.engine.in_flight import DecodesAhead, InFlightSteps, StepInTurn
from quire.engine.request import Request
from quire.engine.step_builder import ScheduledStep
from quire.engine.timeline import StepMark

if TYPE_CHECKING:
    from quire.runner.local import StepOutput
    from quire.runner.ranks import StagedStep


LEAST_ROWS_ON_CPU = 8
"""Requests of a group where stages share the memory of one machine. Each group reads all weights,
and with fewer requests reading takes longer than the stages gain (`bench/ranks.py`)."""


class StagedRunner(Protocol):
    """A runner whose stages run different steps at the same time (``RankedRunner``)."""

    @property
    def stages(self) -> int:
        """Number of stages."""

    def begin(self, step: Step) -> StagedStep:
        """Run the first stage of a step."""

    def finish(self, step: StagedStep) -> StepOutput:
        """Wait for the logits of a step. Steps end in the order in which they began."""


class DecodeTurns:
    """Divides decodes into groups, and lets them take turns."""

    def __init__(
        self, runner: StagedRunner, decodes_ahead: DecodesAhead, in_flight: InFlightSteps, least_rows: int = 1
    ) -> None:
        """``least_rows``: requests of a group."""
        self._runner, self._decodes_ahead, self._in_flight = runner, decodes_ahead, in_flight
        self._least_rows = least_rows

    def groups(self, scheduled: ScheduledStep) -> list[ScheduledStep]:
        """Return the groups of a step, at most one for each stage. Empty: the step is to run at
        once. It has other chunks than decodes, or too few for two groups."""
        count = min(self._runner.stages, len(scheduled.requests) // self._least_rows)
        step = scheduled.step
        if count < 2 or any(request.branch.blend is not None for request in scheduled.requests):
            return []
        # A negative token is a placeholder, which runs with embeddings.
        if any(len(one.tokens) > 1 or one.tokens[0] < 0 or one.logits != "last" for one in step.chunks):
            return []
        bounds = [len(scheduled.requests) * at // count for at in range(count + 1)]
        return [
            replace(
                scheduled,
                step=replace(step, chunks=step.chunks[start:stop]),
                requests=scheduled.requests[start:stop],
                extensions=scheduled.extensions[start:stop],
                failed=(),
            )
            for start, stop in itertools.pairwise(bounds)
        ]

    def next(self, requests: tuple[Request, ...]) -> ScheduledStep | None:
        """Return the next step of a group that has drawn its tokens; None: it waits for the
        scheduler."""
        group = [request for request in requests if not request.finished]
        others = [one for step in self._in_flight.turns for one in step.scheduled.requests if not one.finished]
        total = len(group) + len(others)
        is_uneven = 2 * self._runner.stages * len(group) <= total
        if not others or is_uneven or total < 2 * self._least_rows or any(one.branch.remaining != 1 for one in group):
            return None
        return self._decodes_ahead.step(group, total, known=True)

    def begin(self, scheduled: ScheduledStep, mark: StepMark, launched: float) -> None:
        step = self._runner.begin(scheduled.step)
        count_run(scheduled.step, scheduled.extensions)
        self._in_flight.turns.append(StepInTurn(scheduled, step, mark, launched))

    def finish(self) -> tuple[StepInTurn, StepOutput]:
        """Wait for the logits of the step that began first. It is in flight no more."""
        step = self._in_flight.turns.popleft()
        return step, self._runner.finish(step.running)
