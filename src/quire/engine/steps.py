"""The steps of an engine: what is scheduled runs, tokens are drawn, and requests take them in.

**Steps ahead.** On a GPU a step is queued, and the host could wait until its tokens are there. In
that time it does something better: it schedules and queues the next step, which takes these tokens
from where the device has drawn them. So the device continues at once when the first step is done,
and while it runs the second one, the host reads the tokens of the first one, makes texts of them
and sends them.

Between two calls of ``step`` there is at most one step in flight, and all tokens that it ran are
known. Only within ``step`` a second one begins before the tokens of the first one are read. It
holds one more token of requests that continue for certain (``DecodesAhead``), and of requests that
a stop may end: what ran of these is taken back (``InFlightSteps.withdraw``), and so is what came
behind a token that was drawn again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.base.blend_inputs import BlendInputs
from quire.base.errors import BlendLoadError, FailedPrecondition, QuireError
from quire.base.finalizers import FinalizerQueue
from quire.base.interrupts import Lock
from quire.base.metrics import EngineMetrics
from quire.base.outputs import Miss
from quire.base.types import Inputs
from quire.branches.extension import extend, keep
from quire.branches.session_branches import SessionBranches
from quire.branches.state_loads import LoadFailed
from quire.branches.stored_state import StoredState
from quire.engine.blend_runs import BlendRuns
from quire.engine.blending import Blending
from quire.engine.decode_turns import DecodeTurns
from quire.engine.drafts import Drafts
from quire.engine.exact import ExactWindow, ExactWindows
from quire.engine.in_flight import DecodesAhead, DraftRows, InFlightStep, InFlightSteps
from quire.engine.pins import PrefixPins
from quire.engine.prompts import embeddings_of
from quire.engine.request import Request
from quire.engine.requests import Requests
from quire.engine.sampling_step import Drawing, SamplingStep
from quire.engine.scheduler import Scheduler
from quire.engine.step_builder import ScheduledStep
from quire.engine.timeline import StepMark, Timeline
from quire.runner.local import Runner, StepOutput
from quire.sampling.filters import take_rows, uploaded_rows
from quire.sampling.sampled_tokens import SampledTokens

logger = logging.getLogger("quire.engine")

MOST_LOST_LOADS = 64
"""Steps in a row whose state did not come, before their requests end: a fault, not bad luck."""
NOTHING_DRAWN = SampledTokens(token_ids=[], logprobs=[], failures={})
ANSWER_SECONDS = 0.02
"""The longest wait for tiers' answers while nothing can run. Then the engine schedules again."""


@dataclass(eq=False, kw_only=True)
class EngineSteps:
    runner: Runner
    lock: Lock
    finalizers: FinalizerQueue
    requests: Requests
    scheduler: Scheduler
    decodes_ahead: DecodesAhead
    in_flight: InFlightSteps
    sampling: SamplingStep
    branches: SessionBranches
    stored: StoredState
    blending: Blending
    blend_runs: BlendRuns
    prefix_pins: PrefixPins
    timeline: Timeline
    metrics: EngineMetrics
    exact: ExactWindows
    drafts: Drafts | None = None
    turns: DecodeTurns | None = None
    """Decodes in turn; None: the model is in one stage."""
    runs_ahead: bool = False
    """Whether steps are queued before the tokens of the steps before are known."""
    _lost_loads: int = 0
    """Steps in a row whose state did not come."""
    _read_at: float = 0.0
    """When tokens were read last, in monotonic time."""

    def step(self) -> list[Request]:
        """Run one forward. Return the requests that got a token or ended."""
        with self.lock.interruptible:
            if self.sampling.under_way:
                raise FailedPrecondition(
                    "a step is under way; a logits processor cannot run anything on its own engine"
                )
            self.finalizers.run_finalizers()
            self.prefix_pins.expire()
            changed = self.requests.end_cancelled()
            self.in_flight.stepping = True
            try:
                flight, self.in_flight.last = self.in_flight.last, None
                scheduled = None
                if self.in_flight.turns:
                    flight = self._end_turn(changed)
                elif flight is None:
                    began = time.monotonic()
                    scheduled = self.scheduler.schedule()
                    mark = self.timeline.scheduled(scheduled, began)
                    for request, error in scheduled.failed:
                        changed.append(self.requests.fail(request, error))
                    if scheduled.step.chunks:
                        flight = self._launch_all(scheduled, mark, changed)
                if flight is not None:
                    self.in_flight.reading = flight
                    self._run_ahead(flight)
                    changed += self._read(flight)
                    self._take_turn(flight, changed)
                is_idle = self.in_flight.last is None and not self.in_flight.turns
                if is_idle and any(one.asked.exact for one in self.scheduler.running):
                    changed += self._run_window()
                if self.stored.store is not None:
                    self.branches.save_ahead()
            except BaseException:
                self.in_flight.repair(self.scheduler.running)
                raise
            finally:
                self.in_flight.stepping = False
        self._rest(scheduled, changed)
        return [request for request in changed if not request.asked.guesses]

    def _rest(self, scheduled: ScheduledStep | None, changed: list[Request]) -> None:
        """Wait, without the lock, for what keeps requests from running. ``scheduled``: the step
        that was scheduled; None: an earlier call did that."""
        if scheduled is None:
            return
        idle = not scheduled.step.chunks and not changed
        if idle:
            # Tiers are asked; they answer, or their time is over.
            questions = [one.seat.question for one in list(self.scheduler.waiting)]
            asked = [one.answer for one in questions if one is not None]
            wait(asked, timeout=ANSWER_SECONDS, return_when=FIRST_COMPLETED)
            self.stored.wait_for_news(ANSWER_SECONDS)

    # -- a step, to the draw of its tokens ---------------------------------------------------------

    def _launch(self, scheduled: ScheduledStep, mark: StepMark, changed: list[Request]) -> InFlightStep | None:
        """Run a step up to its draws. None: the step failed, and its requests have ended; or stored
        state did not arrive."""
        launched = time.monotonic()
        try:
            output = self._forward(scheduled)
            if output is None:
                return None
            self._count_step(output, mark)
            if self.drafts is not None:
                self.drafts.ran_rows(scheduled, output)
            ran = scheduled.extensions
            if scheduled.drafts:
                # What of the drafts counts is known when tokens are drawn.
                ran = tuple(one for one, draft in zip(ran, scheduled.drafts, strict=True) if not draft)
                for one, draft in zip(scheduled.extensions, scheduled.drafts, strict=True):
                    one.branch.computed += bool(draft)  # the token before the drafts
            keep(self.branches, ran)
            for request in scheduled.requests:
                self._note_run(request)
            return self._draw(scheduled, output, mark, launched)
        except Exception as error:
            logger.exception("a step of %d tokens failed; its requests end", scheduled.step.num_tokens)
            changed += self._failed(scheduled, error)
            return None

    def _launch_all(self, scheduled: ScheduledStep, mark: StepMark, changed: list[Request]) -> InFlightStep | None:
        """Run a step up to its draws, as ``_launch``; or begin it in groups, which take turns, and
        run the first group up to its draws."""
        is_alone = self.drafts is not None or self.stored.open or any(one.asked.exact for one in self.scheduler.running)
        groups = [] if self.turns is None or is_alone else self.turns.groups(scheduled)
        if not groups:
            return self._launch(scheduled, mark, changed)
        for group in groups:
            if not self._begin_turn(group, time.monotonic(), changed):
                return None
        return self._end_turn(changed)

    def _begin_turn(self, scheduled: ScheduledStep, began: float, changed: list[Request]) -> bool:
        """Begin decodes in turn with others. Return False if they failed, and their requests have
        ended."""
        assert self.turns is not None
        mark, launched = self.timeline.scheduled(scheduled, began, ahead=True), time.monotonic()
        try:
            self.turns.begin(scheduled, mark, launched)
        except Exception as error:
            logger.exception("a step of %d tokens failed; its requests end", scheduled.step.num_tokens)
            changed += self._failed(scheduled, error)
            return False
        self.metrics.steps.inc("plain")
        self.timeline.ran(mark)
        keep(self.branches, scheduled.extensions)
        for request in scheduled.requests:
            self._note_run(request)
        return True

    def _end_turn(self, changed: list[Request]) -> InFlightStep | None:
        """Wait for the logits of the decodes that began first, and draw. None: they failed."""
        assert self.turns is not None
        scheduled = self.in_flight.turns[0].scheduled
        try:
            step, output = self.turns.finish()
            return self._draw(scheduled, output, step.mark, step.launched)
        except Exception as error:
            logger.exception("a step of %d tokens failed; its requests end", scheduled.step.num_tokens)
            changed += self._failed(scheduled, error)
            return None

    def _take_turn(self, flight: InFlightStep, changed: list[Request]) -> None:
        """Begin the next decodes of the requests of a flight, behind those that others run."""
        if self.turns is None:
            return
        began = time.monotonic()
        if (scheduled := self.turns.next(flight.scheduled.requests)) is not None:
            self._begin_turn(scheduled, began, changed)

    def _failed(self, scheduled: ScheduledStep, error: Exception) -> list[Request]:
        for index, request in enumerate(scheduled.requests):
            if scheduled.draft(index) and not request.finished:
                self.branches.rollback(request.branch, request.branch.computed)
        reason = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
        failed = [self.requests.fail(request, reason) for request in scheduled.requests if not request.finished]
        self.in_flight.repair(self.scheduler.running)
        return failed

    def _count_step(self, output: StepOutput, mark: StepMark) -> None:
        self.metrics.steps.inc("captured" if output.captured else "plain")
        self.timeline.ran(mark)

    def _forward(self, scheduled: ScheduledStep) -> StepOutput | None:
        """Run the forward of a step. None: nothing has run, for what was to come did not come."""
        blended = any(request.branch.blend is not None for request in scheduled.requests)
        blend = self.blending.inputs(scheduled) if blended else None
        try:
            output = self._run(scheduled, blend)
        except BlendLoadError as error:
            # What the chunks of these prompts lack is computed.
            if not self.blending.failed(scheduled, error):
                raise
            return None
        except LoadFailed:
            # The request whose state did not come begins again, others continue.
            self._lost_loads += 1
            if self._lost_loads > MOST_LOST_LOADS:
                raise
            for request in scheduled.requests:
                self.scheduler.finish_load(request)
            return None
        self._lost_loads = 0
        for request in scheduled.requests if self.stored.open else ():
            self.scheduler.finish_load(request)
        if blend is not None:
            self.blending.ran(scheduled, blend, output.left_out)
        return output

    def _run(self, scheduled: ScheduledStep, blend: BlendInputs | None) -> StepOutput:
        """Run the forward of a step, with the embeddings of its placeholders."""
        embeddings = embeddings_of(
            request.branch.tokens.media.embeddings(chunk.tokens)
            for request, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True)
            if request.branch.tokens.media.rows
        )
        awaited = tuple(chunk.seq for chunk in scheduled.step.chunks if chunk.seq in self.stored.open)
        features = () if self.drafts is None or blend is not None else self.drafts.layers(scheduled.requests)
        if embeddings is None and not awaited and blend is None and not features:
            return extend(self.runner, scheduled.step, scheduled.extensions)
        inputs = Inputs(embeddings=embeddings, features=features)
        step = replace(scheduled.step, inputs=inputs, awaited=awaited, blend=blend)
        return extend(self.runner, step, scheduled.extensions)

    def _note_run(self, request: Request) -> None:
        """Update the pins and the capture of a request once more of its tokens are computed."""
        asked, branch = request.asked, request.branch
        if asked.hints is not None:
            self.prefix_pins.pin_due(asked.hints, branch)
        if asked.capture is not None and branch.seq is not None:
            asked.capture.ran(branch.seq, branch.computed)

    def _draw(self, scheduled: ScheduledStep, output: StepOutput, mark: StepMark, launched: float) -> InFlightStep:
        """Hand out logits, fork the samples of finished prompts, and draw."""
        rows: list[int] = []
        ready: list[Request] = []
        changed: list[Request] = []
        drafted: dict[Request, DraftRows] = {}
        for index, request in enumerate(scheduled.requests):
            asked, branch, wanted = request.asked, request.branch, request.output
            if branch.seq is None:
                continue  # Its stored state failed to load, or it ended while others had their turn.
            if wanted.on_logits is not None and output.starts[index] < output.starts[index + 1]:
                rows_RV = output.rows(index)
                try:
                    wanted.on_logits(branch.computed - rows_RV.shape[0], rows_RV)
                except QuireError as error:
                    changed.append(self.requests.fail(request, error))
                    continue
                if asked.params is not None:
                    # These log-probabilities of the prompt are known, also after a preemption.
                    wanted.fresh_from = branch.computed
            if branch.remaining:
                continue
            if asked.params is None:
                if asked.capture is not None and asked.capture.store():
                    wanted.num_kept = asked.capture.key.count
                if not asked.uncounted:
                    self.metrics.prompt_tokens.inc(asked.num_prompt - request.seat.reuse.cached)
                self.requests.finish(request, "stop")
                changed.append(request)
                continue
            samples = [request]
            if wanted.on_logits is not None:
                wanted.on_logits, wanted.wants, wanted.fresh_from = None, "last", None
            if not wanted.token_ids:
                self._share_prompt(request)
                if branch.blend is not None:
                    self.blend_runs.verify(request, branch.blend, output.rows(index)[-1])
                while request.seat.siblings:
                    samples.append(self._fork_sample(request, request.seat.siblings[0]))
            ready += samples
            start, stop = output.starts[index], output.starts[index + 1]
            if draft := scheduled.draft(index):
                rows.append(start)
                known = None if output.known_maxima is None else output.known_maxima[start + 1 : stop]
                drafted[request] = DraftRows(draft, output.logits_RV[start + 1 : stop], known)
            else:
                rows += [stop - 1] * len(samples)
        if not ready:
            return InFlightStep(scheduled, Drawing([], NOTHING_DRAWN), mark, launched, changed)
        logits_RV, maxima = output.logits_RV, output.known_maxima
        if rows != list(range(logits_RV.shape[0])):
            logits_RV = take_rows(logits_RV, rows)
            maxima = None if maxima is None else [maxima[row] for row in rows]
        drawing = self.sampling.draw(logits_RV, ready, maxima)
        return InFlightStep(scheduled, drawing, mark, launched, changed, drafted)

    def _share_prompt(self, request: Request) -> None:
        """Let others fork a computed prompt from now on."""
        branch, reuse = request.branch, request.seat.reuse
        # Both at once, so that the cached ones of no period are more than all.
        self.metrics.prompt_tokens.inc(request.asked.num_prompt)
        self.metrics.prompt_tokens_cached.inc(reuse.cached)
        self.metrics.tokens_replayed.inc(reuse.replayed)
        for tier, count in reuse.cached_by_tier.items():
            self.metrics.prompt_tokens_reused.inc(tier, count)
        if branch.blend is not None:
            self.blend_runs.keep_chunks(request, branch.blend)
        if reuse.missed is not Miss.NONE:
            self.metrics.reuse_misses.inc(reuse.missed)
        if self.branches.cache is not None and branch.cacheable and branch.seq is not None:
            self.branches.share(branch, branch.key, live=True, keep=True)
            self.stored.keep(branch, again=True)

    def _fork_sample(self, leader: Request, sibling: Request) -> Request:
        branch, parent = sibling.branch, leader.branch
        if parent.seq is None:
            raise QuireError("a prompt was computed without a sequence")
        branch.seq, branch.computed = self.branches.fork_of(parent.seq), parent.computed
        branch.origin = parent.origin
        self.scheduler.join(sibling, leader)
        return sibling

    def _run_window(self) -> list[Request]:
        """Run the window of an exact request, if one is full. Return the request."""
        if (request := self.exact.next()) is None:
            return []
        try:
            with self.exact.window(request) as window:
                output = extend(self.runner, window.step, [window.extension])
                self.metrics.exact_windows.inc()
                if window.draws:
                    self._draw_window(window, output.rows(0))
        except Exception as error:
            logger.exception("a window of an exact request failed; the request ends")
            reason = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
            return [self.requests.fail(request, reason)]
        if not request.finished:
            self._note_run(request)
        return [request]

    def _draw_window(self, window: ExactWindow, rows_RV: Tensor) -> None:
        """Draw tokens from the rows of a window, up to the first that is not the guessed one."""
        request, row = window.request, window.first_row
        if not request.output.token_ids:
            self._share_prompt(request)
            while request.seat.siblings:
                self._fork_sample(request, request.seat.siblings[0])
        while True:
            self.sampling.take(self.sampling.draw(rows_RV[row : row + 1], [request]))
            row += 1
            if request.finished or not request.ready or not window.is_next(row):
                return

    # -- steps ahead -------------------------------------------------------------------------------

    def _run_ahead(self, flight: InFlightStep) -> None:
        """Queue the step behind a flight whose tokens are not known, where that can be."""
        tokens_R, ready = flight.drawing.tokens_R, flight.drawing.ready
        if not self.runs_ahead or tokens_R is None or self.stored.open:
            return
        if flight.drafted or (self.drafts is not None and not self.drafts.may_run_ahead()):
            return
        if any(not ready[row].finished for row in flight.drawing.discarded):
            return  # It continues with a token that this flight has not run.
        rows = [row for row, one in enumerate(ready) if not (one.finished or self.sampling.is_last(one))]
        going_on = [ready[row] for row in rows]
        if any(one.branch.blend is not None or not self.sampling.may_run_ahead(one) for one in going_on):
            return
        began = time.monotonic()
        live = sum(not one.finished for one in ready)
        if (scheduled := self.decodes_ahead.step(going_on, live)) is None:
            return
        mark = self.timeline.scheduled(scheduled, began, ahead=True)
        if len(rows) < len(ready):
            tokens_R = tokens_R.index_select(0, uploaded_rows(rows, tokens_R.device))
        launched = time.monotonic()
        try:
            # Of a row that fails any token will do: its request ends.
            tokens_R = tokens_R.clamp(min=0)
            step = replace(scheduled.step, inputs=Inputs(drawn=tokens_R))
            output = extend(self.runner, step, scheduled.extensions)
            drawing = self.sampling.draw(output.logits_RV, going_on, unread_R=tokens_R)
        except Exception:
            logger.warning("a step ahead failed; its tokens run again behind those before them", exc_info=True)
            for request in scheduled.requests:
                self.branches.rollback(request.branch, request.branch.computed)
            return
        self._count_step(output, mark)
        self.metrics.steps_ahead.inc()
        self.in_flight.last = InFlightStep(scheduled, drawing, mark, launched, [])

    def _read(self, flight: InFlightStep) -> list[Request]:
        """Wait for the tokens of a flight and take them in. Return the requests that got a token
        or ended in it."""
        scheduled, drawing = flight.scheduled, flight.drawing
        try:
            self.sampling.take(drawing)
            if flight.drafted:
                self._verify_drafts(flight)
        except Exception as error:
            logger.exception("the tokens of a step of %d tokens did not come", scheduled.step.num_tokens)
            return flight.changed + self._failed(scheduled, error)
        self.in_flight.reading = None
        now = time.monotonic()
        step, seconds = scheduled.step, now - max(flight.launched, self._read_at)
        self._read_at = now
        ended = bool(drawing.ready or flight.changed)
        self.stored.costs.ran(step.num_tokens, len(step.chunks), seconds, waited=ended)
        self.timeline.stepped(flight.mark, step.num_tokens, self.metrics.generation_tokens.value)
        if self.drafts is not None and self.in_flight.last is None:
            decodes = len(step.chunks) if len(drawing.ready) == len(step.chunks) else 0
            rows, seconds = decodes + sum(map(len, scheduled.drafts)), now - flight.launched
            if rows == step.num_tokens:
                self.drafts.ran(rows, decodes, seconds)
            else:
                self.drafts.controller.costs.measured_prompts(step.num_tokens, seconds)
        if self.in_flight.last is not None:
            self._count_ahead(self.in_flight.last, {drawing.ready[row] for row in drawing.redrawn})
        return flight.changed + drawing.ready

    def _verify_drafts(self, flight: InFlightStep) -> None:
        """Verify the drafts of a step. The first token of each request is drawn already. While the
        last token of a request is its next draft, count the draft as computed, and draw again from
        the logits behind it. Then roll back the rejected drafts."""
        assert self.drafts is not None
        places = dict.fromkeys(flight.drafted, -1)
        while places := self._with_next_draft(flight, places):
            for request in places:
                request.branch.computed += 1
                self._note_run(request)
            rows = [(flight.drafted[request], place) for request, place in places.items()]
            logits_RV = torch.stack([one.logits_RV[place] for one, place in rows])
            known = [one.first[place] for one, place in rows if one.first is not None]
            self.sampling.take(self.sampling.draw(logits_RV, list(places), known if len(known) == len(rows) else None))
        for request in flight.drafted:
            if not request.finished:
                self.branches.rollback(request.branch, request.branch.computed)

    def _with_next_draft(self, flight: InFlightStep, places: Mapping[Request, int]) -> dict[Request, int]:
        """Return the requests whose last token is a draft below node ``places[request]``, with the
        node of that draft. A request that has ended is left out. Record the number of accepted
        drafts of each request that is left out."""
        found = {}
        for request, before in places.items():
            draft, tokens = flight.drafted[request].draft, request.output.token_ids
            place = draft.tree.child(before, tokens[-1], draft.tokens) if tokens else None
            if place is not None and not request.finished and request.ready:
                found[request] = place
            elif self.drafts is not None:
                self.drafts.record_accepted(request)
        return found

    def _count_ahead(self, flight: InFlightStep, redrawn: set[Request]) -> None:
        """Count the tokens that a step ahead has run, now that they are known. It ran another token
        of ``redrawn`` requests, which is taken back."""
        going_on = 0
        for row, (request, extension) in enumerate(zip(flight.drawing.ready, flight.scheduled.extensions, strict=True)):
            if not request.finished:
                keep(self.branches, [extension], [int(request not in redrawn)])
            if request in redrawn or request.finished:
                flight.drawing.drop_row(row)
                continue
            self._note_run(request)
            going_on += 1
        self.metrics.tokens_withdrawn.inc(len(flight.drawing.ready) - going_on)
        if not going_on:
            self.in_flight.last = None
