"""The steps of an engine: what is scheduled runs, tokens are drawn, and requests take them in.

**Steps ahead.** On a GPU a step is queued, and the host could wait until its tokens are there. In
that time it does something better: it schedules and queues the next step, which takes these tokens
from where the device has drawn them. So the device goes on at once when the first step is done, and
while it runs the second one, the host reads the tokens of the first one, makes texts of them and
sends them.

A *flight* is a step that was queued and whose tokens nobody has read. Between two calls of ``step``
there is at most one, and all tokens that it ran are known. Only within ``step`` a second flight
begins before the first one lands. It holds one more token of requests that go on for certain
(``decodes_ahead``), and of those that a stop may end: what ran of these is taken back
(``_withdraw``), and so is what came behind a token that was drawn again.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial

from quire.blend.forward import BlendedForward
from quire.branches.state_loads import LoadFailed
from quire.engine.prompts import embeddings_of
from quire.engine.sampling_step import Drawing
from quire.engine.scheduled_request import ScheduledRequest
from quire.engine.sequence_request import SequenceRequest
from quire.engine.step_draft import Scheduled
from quire.engine.unsampled_runs import UnsampledRuns
from quire.engine.views.timeline import StepMark
from quire.errors import BlendLoadError, FailedPrecondition, QuireError
from quire.ops.filters import take_rows, uploaded_rows
from quire.ops.sampled_tokens import SampledTokens
from quire.outputs import Miss
from quire.runner.local import Extras, StepOutput

logger = logging.getLogger("quire.engine")

MOST_LOST_LOADS = 64
"""Steps in a row whose state did not come, before their requests end: a fault, not bad luck."""
NOTHING_DRAWN = SampledTokens(token_ids=[], logprobs=[], failures={})
ANSWER_SECONDS = 0.02
"""The longest wait for tiers' answers while nothing can run. Then the engine looks around again."""


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was queued and whose tokens nobody has read."""

    scheduled: Scheduled
    drawing: Drawing
    mark: StepMark
    launched: float
    """When, in monotonic time."""
    changed: list[SequenceRequest]
    """The requests that ended, without a token, while it was queued."""


class EngineSteps(UnsampledRuns):
    """The requests of an engine, and the steps that serve them."""

    runs_ahead = False
    """Whether steps are queued before the tokens of those before are known."""
    _lost_loads = 0
    """Steps in a row whose state did not come."""
    _flight: Flight | None = None
    """The last step that was queued, while its tokens are not read."""
    _landing: Flight | None = None
    """The step before it, while its tokens are being read."""
    _landed = 0.0
    """When tokens were read last, in monotonic time."""

    def step(self) -> list[SequenceRequest]:
        """Run one forward. Return the requests that got a token or ended."""
        with self.lock.interruptible:
            if self.sampling.under_way:
                raise FailedPrecondition(
                    "a step is under way; a logits processor cannot run anything on its own engine"
                )
            self.orphans.bury()
            self.prefix_pins.expire()
            changed = self._cancel_pending()
            self.stepping = True
            try:
                flight, self._flight = self._flight, None
                scheduled = None
                if flight is None:
                    began = time.monotonic()
                    scheduled = self.scheduler.schedule()
                    mark = self.timeline.scheduled(scheduled, began)
                    for work, error in scheduled.failed:
                        changed.append(self._fail(self._requests[work], error))
                    if scheduled.step.chunks:
                        flight = self._launched(scheduled, mark, changed)
                if flight is not None:
                    self._landing = flight
                    self._run_ahead(flight)
                    changed += self._land(flight)
                if self.stored.store is not None:
                    self.branches.save_ahead()
            except BaseException:
                self._repair()
                raise
            finally:
                self.stepping = False
        self._rest(scheduled, changed)
        return changed

    def _rest(self, scheduled: Scheduled | None, changed: list[SequenceRequest]) -> None:
        """Wait, without the lock, for what keeps requests from running. ``scheduled``: the step
        that was scheduled; None: an earlier call did that."""
        if scheduled is None:
            return
        idle = not scheduled.step.chunks and not changed
        if self.grammars is not None:
            # Slow grammars rest if there are other requests.
            self.grammars.slow.shared = any(work.is_ready is None for work in scheduled.requests)
            if idle and (held_up := self.scheduler.queues.held_up):
                self.grammars.slow.wait(lambda: any(work.ready for work in held_up))
        if idle:
            # Tiers are asked; they answer, or their time is over.
            asked = [one.question.answer for one in list(self.scheduler.waiting) if one.question is not None]
            wait(asked, timeout=ANSWER_SECONDS, return_when=FIRST_COMPLETED)
            self.stored.wait_for_news(ANSWER_SECONDS)

    # -- a step, to the draw of its tokens ---------------------------------------------------------

    def _launched(self, scheduled: Scheduled, mark: StepMark, changed: list[SequenceRequest]) -> Flight | None:
        """Run a step up to its draws. If that fails, its requests end, others go on, and there is
        None. So it is if what was to come did not come."""
        launched = time.monotonic()
        try:
            output = self._forward(scheduled)
            if output is None:
                return None
            self._count_step(output, mark)
            self.scheduler.computed(scheduled)
            for work in scheduled.requests:
                self._note_run(self._requests[work])
            return self._drawn(scheduled, output, mark, launched)
        except Exception as error:
            logger.exception("a step of %d tokens failed; its requests end", scheduled.step.num_tokens)
            changed += self._failed(scheduled, error)
            return None

    def _failed(self, scheduled: Scheduled, error: Exception) -> list[SequenceRequest]:
        """End the requests of a step that failed."""
        reason = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
        requests = [self._requests[work] for work in scheduled.requests if work in self._requests]
        failed = [self._fail(request, reason) for request in requests]
        self._repair()
        return failed

    def _count_step(self, output: StepOutput, mark: StepMark) -> None:
        self.metrics.steps.inc("captured" if output.captured else "plain")
        self.timeline.ran(mark)

    def _forward(self, scheduled: Scheduled) -> StepOutput | None:
        """Run the forward of a step. None: nothing has run, for what was to come did not come."""
        blended = self.blending.forward(scheduled)
        try:
            output = self._run(scheduled, blended)
        except BlendLoadError as error:
            # What the chunks of these prompts lack is computed.
            if blended is None or blended.failed is None:
                raise
            self.blending.failed(scheduled, blended, error)
            return None
        except LoadFailed:
            # The request whose state did not come begins again, others go on.
            self._lost_loads += 1
            if self._lost_loads > MOST_LOST_LOADS:
                raise
            for work in scheduled.requests:
                self.scheduler.settle(work)
            return None
        self._lost_loads = 0
        for work in scheduled.requests if self.stored.open else ():
            self.scheduler.settle(work)
        if blended is not None:
            self.blending.ran(scheduled, blended)
        return output

    def _run(self, scheduled: Scheduled, blended: BlendedForward | None) -> StepOutput:
        """Run the forward of a step, with the embeddings of its placeholders."""
        embeddings = embeddings_of(
            work.tokens.media.embeddings(chunk.tokens)
            for work, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True)
            if work.tokens.media.rows
        )
        coming = [chunk.seq for chunk in scheduled.step.chunks if chunk.seq in self.stored.open]
        if embeddings is None and not coming and blended is None:
            return self.runner.execute(scheduled.step)
        follow = partial(self.stored.wait, coming) if coming else None
        return self.runner.execute(scheduled.step, Extras(embeddings=embeddings, await_layer=follow, rows=blended))

    def _note_run(self, request: SequenceRequest) -> None:
        """Do what is to be done once more tokens of a request are computed."""
        if request.hints is not None:
            request.hints.ran(request.work, self.prefix_pins.pin)
        if request.capture is not None and request.work.seq is not None:
            request.capture.ran(request.work.seq, request.work.computed)

    def _drawn(self, scheduled: Scheduled, output: StepOutput, mark: StepMark, launched: float) -> Flight:
        """Hand out logits, fork the samples of finished prompts, and draw."""
        rows: list[int] = []
        ready: list[SequenceRequest] = []
        changed: list[SequenceRequest] = []
        for index, work in enumerate(scheduled.requests):
            request = self._requests[work]
            if work.seq is None:
                continue  # what it ran behind did not come
            if request.on_logits is not None and output.starts[index] < output.starts[index + 1]:
                rows_RV = output.rows(index)
                try:
                    request.on_logits(work.computed - rows_RV.shape[0], rows_RV)
                except QuireError as error:
                    changed.append(self._fail(request, error))
                    continue
                if request.params is not None:
                    # These log-probabilities of the prompt are known, also after a preemption.
                    work.fresh_from = work.computed
            if work.remaining:
                continue
            if request.params is None:
                if request.capture is not None and request.capture.store():
                    request.num_kept = request.capture.key.count
                self._finish(request, "stop")
                changed.append(request)
                continue
            samples = [request]
            if request.on_logits is not None:
                request.on_logits, work.wants, work.fresh_from = None, "last", None
            if not request.output_ids:
                self._share_prompt(request)
                self.verify(request, output.rows(index)[-1])
                while request.siblings:
                    samples.append(self._fork_sample(request, request.siblings[0]))
                    del request.siblings[0]
            ready += samples
            rows += [output.starts[index + 1] - 1] * len(samples)
        if not ready:
            return Flight(scheduled, Drawing([], NOTHING_DRAWN), mark, launched, changed)
        logits_RV, first = output.logits_RV, output.known_maxima
        if rows != list(range(logits_RV.shape[0])):
            logits_RV = take_rows(logits_RV, rows)
            first = None if first is None else [first[row] for row in rows]
        return Flight(scheduled, self.sampling.draw(logits_RV, ready, first), mark, launched, changed)

    def _share_prompt(self, request: SequenceRequest) -> None:
        """Let others fork a computed prompt from now on."""
        work = request.work
        self.metrics.prompt_tokens_cached.inc(work.num_cached)
        self.metrics.tokens_replayed.inc(work.num_replayed)
        for tier, count in work.cached_by_tier.items():
            self.metrics.prompt_tokens_reused.inc(tier, count)
        self.keep_chunks(work)
        if work.reuse_note.missed is not Miss.NONE:
            self.metrics.reuse_misses.inc(work.reuse_note.missed)
        if self.cache is not None and work.cacheable and work.seq is not None:
            self.branches.share(work, work.key, live=True, keep=True)
            self.stored.keep(work, again=True)

    def _fork_sample(self, leader: SequenceRequest, sibling: SequenceRequest) -> SequenceRequest:
        if leader.work.seq is None:
            raise QuireError("a prompt was computed without a sequence")
        sibling.work.seq, sibling.work.computed = self.branches.fork_of(leader.work.seq), leader.work.computed
        sibling.work.origin = leader.work.origin
        sibling.work.num_cached, sibling.work.num_replayed = leader.work.num_cached, leader.work.num_replayed
        sibling.work.reuse_note = leader.work.reuse_note
        self._requests[sibling.work] = sibling
        self.scheduler.join(sibling.work)
        return sibling

    # -- steps ahead -------------------------------------------------------------------------------

    def _run_ahead(self, flight: Flight) -> None:
        """Queue the step behind a flight whose tokens are not known, where that can be."""
        tokens_R, ready = flight.drawing.tokens_R, flight.drawing.ready
        if not self.runs_ahead or tokens_R is None or self.stored.open:
            return
        if any(not ready[row].finished for row in flight.drawing.void):
            return  # It goes on with a token that this flight has not run.
        rows = [row for row, one in enumerate(ready) if not (one.finished or self.sampling.is_last(one))]
        going_on = [ready[row] for row in rows]
        if any(one.work.blend is not None or not self.sampling.may_run_ahead(one) for one in going_on):
            return
        began = time.monotonic()
        live = sum(not one.finished for one in ready)
        if (scheduled := self.decodes_ahead.step([one.work for one in going_on], live)) is None:
            return
        mark = self.timeline.scheduled(scheduled, began, ahead=True)
        if len(rows) < len(ready):
            tokens_R = tokens_R.index_select(0, uploaded_rows(rows, tokens_R.device))
        launched = time.monotonic()
        try:
            # Of a row that fails any token will do: its request ends.
            tokens_R = tokens_R.clamp(min=0)
            output = self.runner.execute(scheduled.step, Extras(drawn=tokens_R))
            drawing = self.sampling.draw(output.logits_RV, going_on, unread_R=tokens_R)
        except Exception:
            logger.warning("a step ahead failed; its tokens run again behind those before them", exc_info=True)
            for work in scheduled.requests:
                self._take_back(work)
            return
        self._count_step(output, mark)
        self.metrics.steps_ahead.inc()
        self._flight = Flight(scheduled, drawing, mark, launched, [])

    def _land(self, flight: Flight) -> list[SequenceRequest]:
        """Wait for the tokens of a flight and take them in. Return the requests that got a token
        or ended in it."""
        scheduled, drawing = flight.scheduled, flight.drawing
        try:
            self.sampling.take(drawing)
        except Exception as error:
            logger.exception("the tokens of a step of %d tokens did not come", scheduled.step.num_tokens)
            return flight.changed + self._failed(scheduled, error)
        self._landing = None
        now = time.monotonic()
        step, seconds = scheduled.step, now - max(flight.launched, self._landed)
        self._landed = now
        ended = bool(drawing.ready or flight.changed)
        self.branches.tier.ran(step.num_tokens, len(step.chunks), seconds, waited=ended)
        self.timeline.stepped(flight.mark, step.num_tokens, self.metrics.generation_tokens.value)
        if self._flight is not None:
            self._board(self._flight, {drawing.ready[row] for row in drawing.redrawn})
        return flight.changed + drawing.ready

    def _board(self, flight: Flight, redrawn: set[SequenceRequest]) -> None:
        """Count what a step ahead has run, now that its tokens are known. It ran another token of
        ``redrawn`` requests, which is taken back."""
        going_on = 0
        for row, request in enumerate(flight.drawing.ready):
            if request in redrawn and not request.finished:
                self._take_back(request.work)
            if request in redrawn or request.finished:
                flight.drawing.drop_row(row)
                continue
            request.work.computed += 1
            self._note_run(request)
            going_on += 1
        self.metrics.tokens_withdrawn.inc(len(flight.drawing.ready) - going_on)
        if not going_on:
            self._flight = None

    def _withdraw(self, work: ScheduledRequest) -> None:
        """See ``RequestBook``."""
        if self._landing is not None and self._flight is not None and work in self._flight.scheduled.requests:
            self._take_back(work)

    def _take_back(self, work: ScheduledRequest) -> None:
        """Take back what has run of a request beyond what counts as computed."""
        if work.seq is not None:
            held = self.runner.state.sequence_length(work.seq)
            work.recede(self.branches.pop(work.seq, held, work.computed))

    # -- repair ------------------------------------------------------------------------------------

    def _repair(self) -> None:
        """Correct what requests count as computed, after an interrupted step."""
        for flight in (self._flight, self._landing):
            if flight is not None:
                flight.drawing.drop()
        self._flight = self._landing = None
        for work in self.scheduler.running:
            if work.seq is not None:
                held = self.runner.state.sequence_length(work.seq)
                work.recede(self.branches.pop(work.seq, held, min(held, len(work.tokens) - 1)))

    def _cancel_pending(self) -> list[SequenceRequest]:
        changed: list[SequenceRequest] = []
        while self._cancelled:
            for request in self._by_id.get(self._cancelled.pop(), ()):
                if not request.finished:
                    self._finish(request, "cancelled")
                    changed.append(request)
        return changed
