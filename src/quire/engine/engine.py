"""The engine: requests in, tokens out, one step at a time.

``submit`` checks and queues. ``step`` runs one forward of what the scheduler chose, samples, turns
tokens into text and ends what is finished. Continuous batching is the loop over ``step``; nothing
here knows pages or layers.

Any thread may call; one lock serialises. A thread that waits for its own requests steps all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial

from quire.blend.forward import BlendedForward
from quire.branches.adapter_keys import AdapterKey, users
from quire.branches.state_loads import LoadFailed
from quire.engine.page_use import OWNERS, PageUse, page_use
from quire.engine.prompts import embeddings_of
from quire.engine.scheduler import Scheduled
from quire.engine.sequence_request import SequenceRequest
from quire.engine.unsampled_runs import UnsampledRuns
from quire.errors import BlendLoadError, FailedPrecondition, QuireError
from quire.interrupts import check, uninterrupted
from quire.ops.filters import take_rows
from quire.outputs import Miss
from quire.runner.local import Extras, StepOutput

logger = logging.getLogger("quire.engine")

CLOSE_SECONDS = 10.0
"""How long a closing engine waits for state to become durable."""
MOST_LOST_LOADS = 64
"""Steps in a row whose state did not come, before their requests end: a fault, not bad luck."""
ANSWER_SECONDS = 0.02
"""The longest wait for tiers' answers while nothing can run. Then the engine looks around again."""


class Engine(UnsampledRuns):
    """Continuous batching over one runner."""

    _lost_loads = 0
    """Steps in a row whose state did not come."""

    @property
    def has_work(self) -> bool:
        return not self.scheduler.idle

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @uninterrupted
    def run(self, requests: Iterable[SequenceRequest], on_step: Callable[[], None] | None = None) -> None:
        """Step until these requests are finished. An interrupt between two steps cancels them."""
        waiting = list(requests)
        try:
            if self.wait is not None:
                self.wait(waiting)
            while waiting := [request for request in waiting if not request.finished]:
                if self.closed:
                    # The closing thread waits for the lock, which this loop would keep taking.
                    self.end(waiting)
                    return
                self.step()
                if on_step is not None:
                    on_step()
                check()
        except BaseException:
            self.end(waiting)
            raise

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
                began = time.monotonic()
                scheduled = self.scheduler.schedule()
                self.timeline.scheduled(scheduled, began)
                for work, error in scheduled.failed:
                    changed.append(self._fail(self._requests[work], error))
                if scheduled.step.chunks:
                    started = time.perf_counter()
                    ready = self._execute(scheduled)
                    seconds = time.perf_counter() - started
                    self.branches.tier.ran(
                        scheduled.step.num_tokens, len(scheduled.step.chunks), seconds, waited=bool(ready)
                    )
                    changed += ready
                    self.timeline.stepped(scheduled.step.num_tokens, self.metrics.generation_tokens.value)
                if self.stored.store is not None:
                    self.branches.save_ahead()
            except BaseException:
                self._repair()
                raise
            finally:
                self.stepping = False
        if self.grammars is not None:
            # Slow grammars rest if there are other requests.
            self.grammars.slow.shared = any(work.is_ready is None for work in scheduled.requests)
            if not scheduled.step.chunks and not changed and (held_up := self.scheduler.held_up):
                self.grammars.slow.wait(lambda: any(work.ready for work in held_up))
        if not scheduled.step.chunks and not changed:
            # Tiers are asked; they answer, or their time is over.
            asked = [one.question.answer for one in list(self.scheduler.waiting) if one.question is not None]
            wait(asked, timeout=ANSWER_SECONDS, return_when=FIRST_COMPLETED)
            self.stored.wait_for_news(ANSWER_SECONDS)
        return changed

    def _execute(self, scheduled: Scheduled) -> list[SequenceRequest]:
        """Run a step and take in its results. If that fails, its requests end and others go on."""
        try:
            blended = self.blending.forward(scheduled)
            try:
                output = self._run(scheduled, blended)
                self.metrics.steps.inc("captured" if output.captured else "plain")
                self.timeline.ran()
            except BlendLoadError as error:
                # Nothing has run. What the chunks of these prompts lack is computed.
                if blended is None or blended.failed is None:
                    raise
                self.blending.failed(scheduled, blended, error)
                return []
            except LoadFailed:
                # Nothing has run. The request whose state did not come begins again, others go on.
                self._lost_loads += 1
                if self._lost_loads > MOST_LOST_LOADS:
                    raise
                for work in scheduled.requests:
                    self.scheduler.settle(work)
                return []
            self._lost_loads = 0
            for work in scheduled.requests if self.stored.open else ():
                self.scheduler.settle(work)
            if blended is not None:
                self.blending.ran(scheduled, blended)
            self.scheduler.computed(scheduled)
            for request in map(self._requests.__getitem__, scheduled.requests):
                if request.hints is not None:
                    request.hints.ran(request.work, self.prefix_pins.pin)
                if request.capture is not None and request.work.seq is not None:
                    request.capture.ran(request.work.seq, request.work.computed)
            return self._sample_step(scheduled, output)
        except Exception as error:
            logger.exception("a step of %d tokens failed; its requests end", scheduled.step.num_tokens)
            reason = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
            requests = [self._requests[work] for work in scheduled.requests if work in self._requests]
            failed = [self._fail(request, reason) for request in requests]
            self._repair()
            return failed

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

    def _repair(self) -> None:
        """Correct what requests count as computed, after an interrupted step."""
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

    def _sample_step(self, scheduled: Scheduled, output: StepOutput) -> list[SequenceRequest]:
        """Hand out logits, fork the samples of finished prompts, draw, and take the tokens in."""
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
                    request.num_kept = request.num_prompt - len(self.blending.lead)
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
        if ready:
            logits_RV, first = output.logits_RV, output.known_maxima
            if rows != list(range(logits_RV.shape[0])):
                logits_RV = take_rows(logits_RV, rows)
                first = None if first is None else [first[row] for row in rows]
            self.sampling.draw(logits_RV, ready, first)
        return changed + ready

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

    def users_of(self, adapter_id: int) -> str:
        """Return an adapter's users, as in "2 requests and 1 session use it"; "" without any. They
        are requests that wait or run, and open sessions that go on under it or have tokens that
        would have to run under it again."""
        with self.lock:
            self.orphans.bury()
            self.give_way()
            requests = [request for samples in self._by_id.values() for request in samples if not request.finished]
            plain = {one.request_id for one in requests if one.session is None and adapter_id in one.work.runs.ids}
            held = [*self.branches.sessions.values(), *(one.session for one in requests if one.session is not None)]
            sessions = {id(one) for one in held if adapter_id in one.runs.ids}
            return users(len(plain), len(sessions))

    def forget_adapter(self, fingerprint: str) -> None:
        """Give back the finished sequences of an unloaded adapter. Only the same adapter, loaded
        again, could find them. It has no user, so host memory holds no state of it."""
        if self.cache is not None:
            with self.lock:
                self.prefix_pins.clear(lambda key: isinstance(key, AdapterKey) and key.names(fingerprint))
                gone = self.cache.forget_keys(lambda key: isinstance(key, AdapterKey) and key.names(fingerprint))
                self.branches.remove_all(gone)

    def reset_prefix_cache(self) -> None:
        """Forget all finished sequences, pinned ones too, also those in memory outside of the pool,
        and what there was before. Durable tiers keep what they have."""
        with self.lock:
            self.prefix_pins.clear()
            self.branches.clear_cache()
            self.stored.forget()
            self.past.clear()

    def page_use(self) -> PageUse:
        """Count the pages by their kinds of owners, now."""
        with self.lock:
            return page_use(self.runner.state, self.branches, self.cache)

    def snapshot(self) -> dict[str, float]:
        """Return all metrics by name, gauges as of now."""
        with self.lock:
            self.orphans.bury()
            metrics, state = self.metrics, self.runner.state
            metrics.num_requests_running.set(self.num_running)
            metrics.num_requests_waiting.set(self.num_waiting)
            use = self.page_use()
            metrics.kv_cache_usage.set(use.usage)
            for owner in OWNERS:
                getattr(metrics, f"pages_{owner}").set(getattr(use, owner))
            metrics.blend_calibrated.set(self.blending.calibration is not None)
            metrics.pages_shared.set(state.num_shared_pages())
            metrics.adapters_loaded.set(len(self.runner.adapters.ids))
            metrics.adapters_resident.set(len(self.runner.adapters.resident))
            metrics.checkpoints_kept.set(state.num_checkpoints)
            for counter, value in (
                (metrics.num_preemptions, self.scheduler.num_preemptions),
                (metrics.copy_on_write_splits, state.num_splits),
                (metrics.adapter_transfers, self.runner.adapters.loads),
            ):
                counter.inc(value - counter.value)
            return metrics.snapshot() | self.branches.tier.snapshot()

    def flush(self, timeout: float) -> bool:
        """Write what only this process has of its state to where it outlives the process, for at
        most ``timeout`` seconds; return whether nothing is left. Any thread may call."""
        until = time.monotonic() + timeout
        handed = self.blending.flush(timeout)
        return self.stored.flush(max(0.0, until - time.monotonic())) and handed

    def shutdown(self) -> None:
        """Cancel what runs, give all pages back, and accept nothing from now on."""
        self.closed = True
        if self.grammars is not None:
            self.grammars.close()
        self.flush(CLOSE_SECONDS)
        with self.lock:
            for samples in list(self._by_id.values()):
                self.end(samples)
            self.prefix_pins.clear()
            for session in list(self.branches.sessions.values()):
                self.forget(session)
            self.reset_prefix_cache()
            self.blending.close()
            self.stored.close()
