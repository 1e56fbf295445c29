"""The engine: requests in, tokens out, one step at a time.

``submit`` checks and queues, ``step`` runs one forward for whatever the scheduler chose, samples, turns tokens into
text and finishes what is finished. Continuous batching is the loop over ``step``; nothing here knows pages or layers.

Any thread may call; one lock serialises. A thread that waits for its own requests steps the engine for everybody.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.branches.adapter_keys import AdapterKey, users
from quire.branches.history import TokenHistory
from quire.branches.host_store import HostStore
from quire.branches.media import NO_MEDIA, Media
from quire.branches.prefix_cache import RadixCache
from quire.engine.checkpoints import Checkpoints
from quire.engine.detokenizer import IncrementalDetokenizer
from quire.engine.grammars import Grammars
from quire.engine.page_use import PageUse, page_use
from quire.engine.pins import Pins, final_length
from quire.engine.prompt_logprobs import PromptLogprobs
from quire.engine.prompts import embeddings_of
from quire.engine.request_checks import RequestChecks
from quire.engine.sampling_step import SamplingStep
from quire.engine.scheduled_request import ScheduledRequest
from quire.engine.scheduler import Limits, Scheduled, Scheduler
from quire.engine.sequence_request import OnLogits, SequenceRequest, SessionState
from quire.engine.session_states import SessionStates, media_of
from quire.engine.tokenizer import Tokenizer
from quire.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.interrupts import Lock, check, uninterrupted
from quire.metrics import EngineMetrics
from quire.ops.request_sampler import RequestSampler
from quire.orphans import Orphans
from quire.outputs import FinishReason
from quire.runner.local import Extras, Runner, StepOutput
from quire.runner.room import Rank
from quire.sampling_params import SamplingParams
from quire.types import BASE, AdapterRuns, Fork, SeqId

logger = logging.getLogger("quire.engine")

ENDLESS = 2**31 - 1
"""Tokens of a sequence that nothing else limits."""

DETOKENIZER_CONTEXT = 64
"""Tokens of the prompt that decide how the output's text begins: a split character, a leading space."""


class Engine:
    """Continuous batching over one runner."""

    def __init__(
        self,
        runner: Runner,
        *,
        limits: Limits,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] = (),
        enable_prefix_caching: bool = True,
        checkpoint_interval: int = 0,
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.max_model_len = max_model_len
        self.grammars = None
        if tokenizer is not None:
            on_gpu = runner.state.device.type != "cpu"
            self.grammars = Grammars(tokenizer, runner.model.vocab_size, threads=on_gpu)
        self.checks = RequestChecks(
            vocab_size=runner.model.vocab_size,
            max_model_len=max_model_len,
            pool_tokens=max_model_len if runner.state.capacity is None else runner.state.capacity,
            tokenizer=tokenizer,
            grammars=self.grammars,
        )
        self._endless = replace(self.checks, max_model_len=ENDLESS, pool_tokens=ENDLESS)
        self.lock = Lock()
        """Whoever holds it is not interrupted: signals take effect between steps."""
        self.cache: RadixCache | None = None
        if enable_prefix_caching:
            self.cache = RadixCache(runner.state.nearest_reachable if runner.state.forgets else None)
        self.metrics = EngineMetrics()
        self.host = HostStore(runner)
        """State of preempted requests and idle sessions; it keeps none before somebody sets its capacity."""
        self.sampling = SamplingStep(
            eos_ids=self.eos_ids,
            grammars=self.grammars,
            metrics=self.metrics,
            finish=self._finish,
            fail=self._fail,
        )
        self.states = SessionStates(runner, cache=self.cache, tier=self.host, metrics=self.metrics)
        self.pins = Pins(runner.state, self.states.sessions, limits.max_num_batched_tokens)
        self.checkpoints = None
        if runner.state.recurrent_ids:
            self.checkpoints = Checkpoints(
                runner.state,
                checkpoint_interval,
                apply=self.states.apply,
                ages=self._ages,
            )
        self._forgets = (
            "windows have let go of what a continuation at {0} would need, and the nearest position that is held is {1}"
        )
        if self.checkpoints is not None:
            every = (
                f"states are kept every {checkpoint_interval} tokens and" if checkpoint_interval else "states are kept"
            )
            self._forgets = (
                "recurrent layers can go on only where their state was kept, and before {0} that is {1} ("
                + every
                + " at the "
                "ends of prompts and turns, as far as there is room)"
            )
        self._entropy = torch.Generator().manual_seed(seed)
        self._ids = itertools.count()
        self._requests: dict[ScheduledRequest, SequenceRequest] = {}
        self._by_id: dict[str, list[SequenceRequest]] = {}
        self._cancelled: set[str] = set()
        self.closed = False
        self.wait: Callable[[Sequence[SequenceRequest]], None] | None = None
        """Waits until these requests are finished. Whoever steps the engine in the background sets it, and ``run`` waits."""
        self.orphans = Orphans(self.lock)
        """Sessions and requests of objects that nobody holds any more. The next step ends them."""
        self.scheduler = Scheduler(
            runner.state,
            limits=limits,
            apply=self.states.apply,
            reclaim=runner.room.make,
            new_seq=runner.new_seq,
            cache=self.cache,
            tier=self.host,
            checkpoints=self.checkpoints,
            fits=lambda adapters: runner.adapters.fits(adapters),
        )
        runner.room.join(self)

    def checks_of(self, session: SessionState | None) -> RequestChecks:
        """The limits that hold for a session's tokens: with a window neither the context nor the pool ends them, as long as
        the model's positions are rotations (of which only differences count) or nothing."""
        if session is None or session.window is None or not self.runner.state.endless:
            return self.checks
        return self._endless

    # -- submitting ------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: NDArray[np.int64],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        key: Hashable = None,
        session: SessionState | None = None,
        adapter: int | None = None,
        media: Media = NO_MEDIA,
    ) -> list[SequenceRequest]:
        """Queue a prompt; one ``SequenceRequest`` per sample. With ``session`` the tokens of the session become
        ``tokens`` and what follows them, unless the request fails, and its state is used as far as it agrees.

        ``key``: the salt; only requests of the same salt and the same adapters share cached prefixes. ``adapter``: id of a loaded
        adapter under which all tokens run. A session has both. ``media``: the embeddings of ids below 0; those of a session's
        own tokens are known.

        Everything is checked here: ``InvalidArgument``, ``ResourceExhausted`` (never fits), ``Unsupported``, ``NotFound``,
        ``FailedPrecondition`` (an embedding that must be run is gone); and ``QuotaExceeded`` or ``PoolExhausted`` for a pinned
        session whose account has a limit.
        """
        if session is not None and adapter is not None:
            raise InvalidArgument(f"adapter {adapter} and a session, which has its own; give None", field="adapter")
        if session is None:
            self.checks.tokens(tokens, media)
        else:
            self.checks.history(tokens)
            media = media_of(session, tokens, media)
        self.checks.params(params, in_session=session is not None)
        self.checks.scored(tokens, params)
        if params.prompt_logprobs is not None and session is not None and session.modified:
            raise FailedPrecondition(
                "prompt_logprobs run all tokens of a session again, and a state that set_kv wrote into cannot be computed "
                "again; ask for them before set_kv",
                field="prompt_logprobs",
            )
        limit = self.checks_of(session).length(tokens.size, params)
        with self.lock:
            self.runner.adapters.check([adapter])
            if session is not None:
                self.pins.check(session, final_length(tokens.size, params.max_tokens, limit), session.account)
            runs = BASE.then(0, adapter)
            prefix = self.states.prefix_key(key, runs)
            name = self._name(request_id)
            prompt = TokenHistory(tokens, media)
            samples = [
                self._sample(name, index, prompt.fork(), params, prefix, runs, limit) for index in range(params.n)
            ]
            leader = samples[0]
            leader.siblings = samples[1:]
            if params.prompt_logprobs is not None:
                leader.prompt_logprobs = PromptLogprobs(tokens, params.prompt_logprobs)
                leader.on_logits = leader.prompt_logprobs.take
                leader.work.wants, leader.work.fresh_from = "all", 0
            if session is not None:
                if params.prompt_logprobs is not None:
                    self.states.drop(session)
                self.states.lend(session, leader)
            self._enqueue(leader, samples)
            return samples

    def submit_run(
        self,
        session: SessionState,
        tokens: NDArray[np.int64],
        *,
        tail: Sequence[int] = (),
        media: Media = NO_MEDIA,
        on_logits: OnLogits | None = None,
        fresh_from: int | None = None,
        all_logits: bool = False,
        priority: int | None = None,
    ) -> SequenceRequest:
        """Queue tokens to be run without sampling. When they have been, the tokens of ``session`` are these and ``tail``.

        ``on_logits`` gets the logits of the last token, or with ``all_logits`` of every one that runs, which are at least
        those from ``fresh_from`` on. A ``QuireError`` from it ends the request. ``priority``: the place in the queue of an
        earlier request that this one goes on with. ``media``: as of ``submit``, of the tail too.
        """
        media = media_of(session, tokens, media)
        self.checks_of(session).length(len(tokens) + len(tail), None)
        with self.lock:
            self.pins.check(session, len(tokens), session.account)
            work = ScheduledRequest(
                tokens=TokenHistory(tokens, media),
                reusable=True,
                wants="none" if on_logits is None else ("all" if all_logits else "last"),
                fresh_from=fresh_from,
            )
            request = SequenceRequest(self._name(None), work, len(tokens), None, tail=tuple(tail), on_logits=on_logits)
            self.states.lend(session, request)
            self._enqueue(request, [request], priority)
            return request

    def _name(self, request_id: str | None) -> str:
        if self.closed:
            raise FailedPrecondition("the LLM is closed; make a new one")
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self._by_id:
            raise InvalidArgument(f"request id {name!r} is in use; give a new one", field="request_id")
        # A cancel that came too late for the last request of this name is not meant for the new one.
        self._cancelled.discard(name)
        return name

    def _sample(
        self,
        name: str,
        index: int,
        tokens: TokenHistory,
        params: SamplingParams,
        key: Hashable,
        runs: AdapterRuns,
        limit: int,
    ) -> SequenceRequest:
        detokenizer = matcher = None
        spoken = tokens.ids[tokens.ids >= 0]  # An image has no text, and no penalty counts it.
        context = spoken[-DETOKENIZER_CONTEXT:].tolist()
        if params.grammar is not None and self.grammars is not None:
            matcher = self.grammars.matcher(params.grammar)
            context = self.grammars.context(context)
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                context,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        return SequenceRequest(
            name,
            ScheduledRequest(tokens=tokens, key=key, runs=runs, reusable=self.cache is not None),
            len(tokens),
            params,
            index=index,
            sampler=RequestSampler(
                params, spoken, vocab_size=self.runner.model.vocab_size, index=index, entropy=self._entropy
            ),
            detokenizer=detokenizer,
            matcher=matcher,
            forgets=self._forgets,
            limit=limit,
        )

    def _enqueue(self, leader: SequenceRequest, samples: list[SequenceRequest], priority: int | None = None) -> None:
        self._by_id[leader.request_id] = samples
        self._requests[leader.work] = leader
        self.scheduler.submit(leader.work, priority)
        if leader.params is not None:
            self.metrics.prompt_tokens.inc(leader.num_prompt)

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step boundary, in any phase; False if it is not there (any more). Never waits."""
        if request_id not in self._by_id:
            return False
        self._cancelled.add(request_id)
        return True

    # -- stepping --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return not self.scheduler.idle

    @uninterrupted
    def run(self, requests: Iterable[SequenceRequest], on_step: Callable[[], None] | None = None) -> None:
        """Step until these requests are finished. Whatever interrupts it (Ctrl-C, between two steps) cancels them first."""
        waiting = list(requests)
        try:
            if self.wait is not None:
                self.wait(waiting)
            while waiting := [request for request in waiting if not request.finished]:
                if self.closed:
                    # Whoever closes waits for the lock, which this loop would take again and again.
                    self.end(waiting)
                    return
                self.step()
                if on_step is not None:
                    on_step()
                check()
        except BaseException:
            self.end(waiting)
            raise

    def fail_all(self, error: QuireError) -> None:
        """End everything under way with an error: a step raised, and nobody knows whose fault it was."""
        with self.lock:
            for samples in list(self._by_id.values()):
                for request in samples:
                    self._fail(request, error)

    def end(self, requests: Iterable[SequenceRequest]) -> None:
        """Cancel now, not at the next step. Those that are finished stay as they are."""
        with self.lock:
            for request in requests:
                self._finish(request, "cancelled")

    def step(self) -> list[SequenceRequest]:
        """One forward. Returns the requests that got a token or ended."""
        with self.lock.interruptible:
            if self.sampling.under_way:
                raise FailedPrecondition(
                    "a step is under way; a logits processor cannot run anything on its own engine"
                )
            self.orphans.bury()
            changed = self._cancel_pending()
            try:
                scheduled = self.scheduler.schedule()
                for work, error in scheduled.failed:
                    changed.append(self._fail(self._requests[work], error))
                if scheduled.step.chunks:
                    started = time.perf_counter()
                    ready = self._execute(scheduled)
                    seconds = time.perf_counter() - started
                    self.host.costs.ran(
                        scheduled.step.num_tokens, len(scheduled.step.chunks), seconds, waited=bool(ready)
                    )
                    changed += ready
            except BaseException:
                self._repair()
                raise
        if self.grammars is not None:
            # Slow grammars rest for others, if there are any.
            self.grammars.slow.shared = any(work.is_ready is None for work in scheduled.requests)
            if not scheduled.step.chunks and not changed and (held_up := self.scheduler.held_up):
                self.grammars.slow.wait(lambda: any(work.ready for work in held_up))
        return changed

    def _execute(self, scheduled: Scheduled) -> list[SequenceRequest]:
        """Run a step and take its results in. If that fails, its requests end and the others go on."""
        try:
            output = self._run(scheduled)
            self.scheduler.computed(scheduled)
            return self._sample_step(scheduled, output)
        except Exception as error:
            logger.exception("a step of %d tokens failed; its requests end", scheduled.step.num_tokens)
            reason = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
            requests = [self._requests[work] for work in scheduled.requests if work in self._requests]
            failed = [self._fail(request, reason) for request in requests]
            self._repair()
            return failed

    def _run(self, scheduled: Scheduled) -> StepOutput:
        """The forward of a step, with the embeddings of its placeholders."""
        embeddings = embeddings_of(
            work.tokens.media.embeddings(chunk.tokens)
            for work, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True)
        )
        if embeddings is None:
            return self.runner.execute(scheduled.step)
        return self.runner.execute(scheduled.step, Extras(embeddings=embeddings))

    def _repair(self) -> None:
        """After an interruption in mid-step: let what each request counts as computed be what its sequence holds."""
        for work in self.scheduler.running:
            if work.seq is not None:
                held = self.runner.state.sequence_length(work.seq)
                work.computed = self.states.pop(work.seq, held, min(held, len(work.tokens) - 1))

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
            if request.on_logits is not None and output.starts[index] < output.starts[index + 1]:
                rows_RV = output.rows(index)
                try:
                    request.on_logits(work.computed - rows_RV.shape[0], rows_RV)
                except QuireError as error:
                    changed.append(self._fail(request, error))
                    continue
                if request.params is not None:
                    # Log-probabilities of the prompt. Preempted, it needs no logits of these tokens again.
                    work.fresh_from = work.computed
            if work.remaining:
                continue
            if request.params is None:
                self._finish(request, "stop")
                changed.append(request)
                continue
            samples = [request]
            if request.on_logits is not None:
                request.on_logits, work.wants, work.fresh_from = None, "last", None
            if not request.output_ids:
                self._share_prompt(request)
                while request.siblings:
                    samples.append(self._fork_sample(request, request.siblings[0]))
                    del request.siblings[0]
            ready += samples
            rows += [output.starts[index + 1] - 1] * len(samples)
        if ready:
            logits_RV = output.logits_RV
            if rows != list(range(logits_RV.shape[0])):
                logits_RV = logits_RV.index_select(0, torch.tensor(rows, device=logits_RV.device))
            self.sampling.draw(logits_RV, ready)
        return changed + ready

    def _share_prompt(self, request: SequenceRequest) -> None:
        """A computed prompt can be forked by others from now on."""
        work = request.work
        self.metrics.prompt_tokens_cached.inc(work.num_cached)
        self.metrics.tokens_replayed.inc(work.num_replayed)
        if self.cache is not None and work.cacheable and work.seq is not None:
            held = work.tokens.ids[: work.computed]
            self.states.remove_all(self.cache.insert(work.seq, held, work.key, live=True))
            self.states.keep(work.seq, held, work.key)

    def _fork_sample(self, leader: SequenceRequest, sibling: SequenceRequest) -> SequenceRequest:
        if leader.work.seq is None:
            raise QuireError("a prompt was computed without a sequence")
        seq = self.runner.new_seq()
        self.states.apply(Fork(leader.work.seq, seq))
        sibling.work.seq, sibling.work.computed = seq, leader.work.computed
        sibling.work.num_cached, sibling.work.num_replayed = leader.work.num_cached, leader.work.num_replayed
        self._requests[sibling.work] = sibling
        self.scheduler.join(sibling.work)
        return sibling

    # -- ending ----------------------------------------------------------------------------------------------

    def _fail(self, request: SequenceRequest, error: QuireError) -> SequenceRequest:
        if request.finished:
            return request
        request.error = error
        # Values that are not finite must not be found by anybody else.
        work = request.work
        work.cacheable = False
        if self.cache is not None and work.seq is not None and work.seq in self.cache:
            self.cache.remove(work.seq)
        for sibling in request.siblings:
            sibling.error = error
            self._finish(sibling, "error")
        self._finish(request, "error")
        return request

    def _finish(self, request: SequenceRequest, reason: FinishReason, stop: str | int | None = None) -> None:
        if request.finished:
            return
        if request.matcher is not None:
            request.matcher.drop()
        request.finished_at = time.monotonic()
        if request.detokenizer is not None and (rest := request.detokenizer.finish()):
            request.pieces.append(rest)
        # Other threads read these without the lock, so they are last seen as unfinished, or with everything.
        request.stop_reason, request.finish_reason = stop, reason
        self.scheduler.finish(request.work)
        self._requests.pop(request.work, None)
        if request.params is not None:
            self.metrics.request_success.inc(reason)
            self.metrics.e2e_request_latency.observe(request.finished_at - request.arrival)
        if request.session is not None:
            self.states.settle(request.session, request)
        else:
            self._release(request)
        self.host.discard(request.work)
        if all(sample_.finished for sample_ in self._by_id.get(request.request_id, ())):
            self._by_id.pop(request.request_id, None)

    def _release(self, request: SequenceRequest) -> None:
        """Keep the finished sequence for others, or give its pages back."""
        work = request.work
        if work.seq is None:
            return
        if self.cache is None or not work.cacheable or not work.computed:
            self.states.remove(work.seq)
        else:
            self.states.remove_all(self.cache.insert(work.seq, work.tokens.ids[: work.computed], work.key))
        work.seq = None

    # -- sessions and what is given up -------------------------------------------------------------------------

    def give_up(self, rank: Rank) -> bool:
        """See ``Giver``."""
        kept = self.checkpoints
        match rank:
            case Rank.ORPHANS:
                return self.orphans.bury()
            case Rank.SCARCE_STATES:
                return kept is not None and not self.runner.state.num_available_states and kept.give_up()
            case Rank.PREFIXES:
                return self.states.evict()
            case Rank.IDLE:
                return self.states.drop_idle()
            case Rank.STATES:
                return kept is not None and kept.give_up()

    def loose(self) -> set[SeqId]:
        """See ``Giver``."""
        return self.states.loose()

    def _ages(self) -> dict[SeqId, int]:
        """Sequences of the engine, the least recently used first, but those of which somebody wrote the state."""
        ages = {} if self.cache is None else self.cache.ages()
        in_use = len(ages)
        ages |= {one.seq: in_use for one in self.states.sessions.values() if one.seq is not None}
        works = (*self.scheduler.running, *self.scheduler.waiting)
        ages |= {work.seq: in_use for work in works if work.seq is not None}
        for seq in self.states.written():
            ages.pop(seq, None)
        return ages

    def reset_prefix_cache(self) -> None:
        """Forget all finished sequences."""
        with self.lock:
            self.states.clear_cache()

    # -- adapters --------------------------------------------------------------------------------------------

    def users_of(self, adapter_id: int) -> str:
        """Who uses an adapter, as in "2 requests and 1 session use it": requests that wait or run, and open sessions that go on
        under it or have tokens that would have to be run under it again. Empty if nobody does."""
        with self.lock:
            self.orphans.bury()
            requests = [request for samples in self._by_id.values() for request in samples if not request.finished]
            plain = {one.request_id for one in requests if one.session is None and adapter_id in one.work.runs.ids}
            held = [*self.states.sessions.values(), *(one.session for one in requests if one.session is not None)]
            sessions = {id(one) for one in held if adapter_id in one.runs.ids}
            return users(len(plain), len(sessions))

    def forget_adapter(self, fingerprint: str) -> None:
        """An adapter was unloaded: give back the finished sequences that it had a part in, which only the same adapter, loaded
        again, could find. Nobody uses it, so no state of its is left in host memory."""
        if self.cache is not None:
            with self.lock:
                gone = self.cache.forget_keys(lambda key: isinstance(key, AdapterKey) and key.names(fingerprint))
                self.states.remove_all(gone)

    # -- sessions' ends --------------------------------------------------------------------------------------

    def forget(self, session: SessionState) -> None:
        """A session is closed: end what it does, give its pages back."""
        with self.lock:
            if session.request is not None:
                self._finish(session.request, "cancelled")
            self.states.forget(session)

    def page_use(self) -> PageUse:
        """Return who has the pages now. Counted when it is asked for, not in each step."""
        with self.lock:
            return page_use(self.runner.state, self.states, self.cache)

    def snapshot(self) -> dict[str, float]:
        """All metrics by name, gauges as of now."""
        with self.lock:
            self.orphans.bury()
            metrics, state = self.metrics, self.runner.state
            metrics.num_requests_running.set(self.num_running)
            metrics.num_requests_waiting.set(self.num_waiting)
            use = self.page_use()
            metrics.kv_cache_usage.set(use.usage)
            for gauge, pages in (
                (metrics.pages_free, use.free),
                (metrics.pages_evictable, use.evictable),
                (metrics.pages_held, use.held),
                (metrics.pages_pinned, use.pinned),
            ):
                gauge.set(pages)
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
            return metrics.snapshot() | self.host.snapshot()

    def shutdown(self) -> None:
        """Cancel what runs and give all pages back. Nothing is accepted any more."""
        self.closed = True
        if self.grammars is not None:
            self.grammars.close()
        with self.lock:
            for samples in list(self._by_id.values()):
                self.end(samples)
            for session in list(self.states.sessions.values()):
                self.forget(session)
            self.reset_prefix_cache()

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)
