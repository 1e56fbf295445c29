"""The requests of an engine: how they are queued, and how they end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from quire.branches.adapter_keys import api_key_of
from quire.branches.history import TokenHistory
from quire.branches.media import NO_MEDIA, Media
from quire.branches.past_prefixes import PastPrefixes
from quire.branches.prefix_cache import RadixCache
from quire.branches.stored_state import StoredState
from quire.callers import caller
from quire.engine.blending import Blending, lead_text_of, start_of
from quire.engine.checkpoints import Checkpoints
from quire.engine.decodes_ahead import DecodesAhead
from quire.engine.detokenizer import IncrementalDetokenizer
from quire.engine.grammars import Grammars
from quire.engine.miss_search import MissSearch
from quire.engine.pins import Pins, final_length
from quire.engine.prefix_pins import PrefixPins
from quire.engine.prompt_blend import PromptBlend
from quire.engine.prompt_logprobs import PromptLogprobs
from quire.engine.request_checks import RequestChecks
from quire.engine.request_hints import RequestHints
from quire.engine.sampling_step import SamplingStep
from quire.engine.scheduled_request import ScheduledRequest
from quire.engine.scheduler import Scheduler
from quire.engine.sequence_request import SequenceRequest, SessionBranch
from quire.engine.session_branches import SessionBranches, media_of
from quire.engine.step_draft import Limits
from quire.engine.tokenizer import Tokenizer
from quire.engine.views.timeline import Timeline
from quire.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.hints import NO_HINTS, CacheHints
from quire.interrupts import Lock
from quire.metrics import EngineMetrics
from quire.ops.request_sampler import RequestSampler
from quire.orphans import Orphans
from quire.outputs import FinishReason
from quire.runner.local import Runner
from quire.runner.room import Rank
from quire.sampling_params import SamplingParams
from quire.types import BASE, AdapterRuns, SeqId

ENDLESS = 2**31 - 1
"""Tokens of a sequence that nothing else limits."""


class RequestBook:
    """All requests of one engine, and the parts that they need."""

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
        stored: StoredState | None = None,
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
        """Its holder is not interrupted: signals take effect between steps."""
        self.past = PastPrefixes()
        """What the prefix cache had, to tell what prompts missed."""
        self.cache: RadixCache | None = None
        if enable_prefix_caching:
            reach = runner.state.nearest_reachable if runner.state.forgets else None
            self.cache = RadixCache(reach, self.past.note)
        self.metrics = EngineMetrics()
        self.stored = StoredState(runner) if stored is None else stored
        """State outside of the pool."""
        self.sampling = SamplingStep(
            eos_ids=self.eos_ids, grammars=self.grammars, metrics=self.metrics, finish=self._finish, fail=self._fail
        )
        lead_text = lead_text_of(tokenizer, max_model_len)
        self.blending = Blending(runner, self.stored, start_of(tokenizer), lead_text, metrics=self.metrics)
        self.branches = SessionBranches(runner, cache=self.cache, tier=self.stored, metrics=self.metrics)
        self.pins = Pins(runner.state, self.branches.sessions, limits.max_num_batched_tokens)
        self.prefix_pins = PrefixPins(self.branches, self.pins)
        self.checkpoints = None
        if runner.state.recurrent_ids:
            self.checkpoints = Checkpoints(
                runner.state, checkpoint_interval, apply=self.branches.apply, ages=self._ages
            )
        self._forgets = (
            "windows have let go of what a continuation at {0} would need, and the nearest position that is held is {1}"
        )
        if self.checkpoints is not None:
            every = f" every {checkpoint_interval} tokens and" if checkpoint_interval else ""
            self._forgets = (
                "recurrent layers can go on only where their state was kept, and before {0} that is {1} (states are kept"
                f"{every} at the ends of prompts and turns, as far as there is room)"
            )
        self._entropy = torch.Generator().manual_seed(seed)
        self._ids = itertools.count()
        self._requests: dict[ScheduledRequest, SequenceRequest] = {}
        self._by_id: dict[str, list[SequenceRequest]] = {}
        self._cancelled: set[str] = set()
        self.yielding: SequenceRequest | None = None
        """The request that ends as soon as there is any other."""
        self.stepping = False
        self.closed = False
        self.wait: Callable[[Sequence[SequenceRequest]], None] | None = None
        """Lets ``run`` wait for requests that a background thread steps, which sets it."""
        self.orphans = Orphans(self.lock)
        """Sessions and requests of unreferenced objects. The next step ends them."""
        self.scheduler = Scheduler(
            runner.state,
            limits=limits,
            apply=self.branches.apply,
            reclaim=runner.room.make,
            new_seq=runner.new_seq,
            cache=self.cache,
            tier=self.stored,
            checkpoints=self.checkpoints,
            fits=lambda adapters: runner.adapters.fits(adapters),
            misses=None if self.cache is None else MissSearch(self.cache, self.past, self.branches.forgets),
        )
        self.decodes_ahead = DecodesAhead(self.scheduler, runner.state, self.checkpoints)
        runner.room.join(self)
        self.timeline = Timeline(self.scheduler, self.stored, runner.state, self.eos_ids, self.metrics)
        self.sampling.gaps = self.timeline.gaps

    def checks_of(self, session: SessionBranch | None) -> RequestChecks:
        """Return the limits for a session's tokens. With a window neither the context nor the pool
        ends them, if the model rotates keys (of rotations only differences count)."""
        if session is None or session.window is None or not self.runner.state.endless:
            return self.checks
        return self._endless

    def submit(
        self,
        tokens: NDArray[np.int64],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        key: Hashable = None,
        session: SessionBranch | None = None,
        adapter: int | None = None,
        media: Media = NO_MEDIA,
        hints: CacheHints = NO_HINTS,
        blend: PromptBlend | None = None,
    ) -> list[SequenceRequest]:
        """Queue a prompt; return one ``SequenceRequest`` per sample.

        With ``session`` its tokens become ``tokens`` and what follows them, unless the request
        fails, and its state is used as far as it agrees. ``key`` is the salt; only requests of the
        same salt and adapters share cached prefixes. ``adapter`` is the id of a loaded adapter
        for all tokens. A session has both. ``media`` holds the embeddings of ids below 0; those of
        a session's own tokens are known. ``blend``: how cached state of its segments is used.

        Everything is checked here: ``InvalidArgument``, ``ResourceExhausted`` (never fits),
        ``Unsupported``, ``NotFound``, ``FailedPrecondition`` (an embedding that must run is gone),
        and ``QuotaExceeded`` or ``PoolExhausted`` for a pinned session whose account has a limit.
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
            prefix = self.branches.prefix_key(key, runs)
            name = self._name(request_id)
            prompt = TokenHistory(tokens, media)
            samples = [
                self._sample(name, index, prompt.fork(), params, prefix, runs, limit) for index in range(params.n)
            ]
            leader = samples[0]
            leader.siblings = samples[1:]
            leader.work.blend = blend
            if blend is not None:
                self.blending.ask(key, adapter, tokens)
            for sample in samples:
                sample.work.priority = hints.priority
            self._take_hints(leader, hints)
            if params.prompt_logprobs is not None:
                leader.prompt_logprobs = PromptLogprobs(tokens, params.prompt_logprobs)
                leader.on_logits = leader.prompt_logprobs.take
                leader.work.wants, leader.work.fresh_from = "all", 0
            if session is not None:
                if params.prompt_logprobs is not None:
                    self.branches.drop(session)
                self.branches.lend(session, leader)
            self._enqueue(leader, samples)
            return samples

    def give_way(self) -> bool:
        """End what runs only while nothing else does; return whether there was anything. What it
        has computed stays in the prefix cache."""
        if self.yielding is None:
            return False
        self._finish(self.yielding, "cancelled")
        return True

    def _take_hints(self, request: SequenceRequest, hints: CacheHints) -> None:
        if hints is NO_HINTS:
            return
        request.hints = RequestHints(hints, request.num_prompt)
        if self.runner.state.forgets:
            request.work.stops = request.hints.stops

    def _name(self, request_id: str | None) -> str:
        if self.closed:
            raise FailedPrecondition("the LLM is closed; make a new one")
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self._by_id:
            raise InvalidArgument(f"request id {name!r} is in use; give a new one", field="request_id")
        # A late cancel of the last request of this name is not meant for the new one.
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
        context: list[int] = []
        if self.tokenizer is not None:
            table = self.tokenizer.token_bytes
            context = table.end_of(spoken, skip_special_tokens=params.skip_special_tokens)
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

    def _enqueue(self, leader: SequenceRequest, samples: list[SequenceRequest], arrival: int | None = None) -> None:
        self.give_way()
        self._by_id[leader.request_id] = samples
        self._requests[leader.work] = leader
        who = caller.get()
        for sample in samples:
            sample.work.owner = sample.work.owner or who.owner or api_key_of(sample.work.salt)
        if who.owner:
            self.scheduler.queues.shares.set_weight(who.owner, who.weight)
        self.scheduler.submit(leader.work, arrival)
        if arrival is None:
            self.timeline.arrived(samples)
        if leader.params is not None:
            self.metrics.prompt_tokens.inc(leader.num_prompt)

    def request_of(self, work: ScheduledRequest) -> SequenceRequest:
        """Return the request that the scheduler knows by ``work``."""
        return self._requests[work]

    def cancel(self, request_id: str) -> bool:
        """End a request, in any phase, at the next step boundary; return False if there is none."""
        if request_id not in self._by_id:
            return False
        self._cancelled.add(request_id)
        return True

    def end(self, requests: Iterable[SequenceRequest]) -> None:
        """Cancel requests now, not at the next step. Finished ones stay as they are."""
        with self.lock:
            for request in requests:
                self._finish(request, "cancelled")
                if request.verification is not None:
                    self._finish(request.verification, "cancelled")

    def fail_all(self, error: QuireError) -> None:
        """End all requests with the error of a step whose cause is no single request."""
        with self.lock:
            for samples in list(self._by_id.values()):
                for request in samples:
                    self._fail(request, error)

    def forget(self, session: SessionBranch) -> None:
        """End what a closed session does, and give its pages back."""
        with self.lock:
            for one in (session, session.successor):
                if one is not None and one.request is not None:
                    self._finish(one.request, "cancelled")
            self.branches.forget(session)

    def _fail(self, request: SequenceRequest, error: QuireError) -> SequenceRequest:
        if request.finished:
            return request
        request.error = error
        # The prefix cache must not hand out values that are not finite.
        work = request.work
        work.cacheable = False
        if self.cache is not None and work.seq is not None and work.seq in self.cache:
            self.cache.remove(work.seq)
        if request.hints is not None:
            request.hints.failed(self.prefix_pins.drop)
        for sibling in request.siblings:
            sibling.error = error
            self._finish(sibling, "error")
        self._finish(request, "error")
        return request

    def _finish(self, request: SequenceRequest, reason: FinishReason, stop: str | int | None = None) -> None:
        if request.finished:
            return
        self._withdraw(request.work)
        if request.matcher is not None:
            request.matcher.drop()
        request.finished_at = time.monotonic()
        if request is self.yielding:
            self.yielding = None
        if request.detokenizer is not None and (rest := request.detokenizer.finish()):
            request.pieces.append(rest)
        # Other threads read these without the lock: unfinished, or with all of the above.
        request.stop_reason, request.finish_reason = stop, reason
        self.scheduler.finish(request.work)
        if request.work.blend is not None:
            request.work.blend.end()
        if request.capture is not None:
            self.blending.under_way.discard(request.capture.key)
        # What has not come by now is computed when it is needed.
        self.stored.settle(request.work)
        self._requests.pop(request.work, None)
        if request.params is not None:
            self.metrics.request_success.inc(reason)
            self.metrics.e2e_request_latency.observe(request.finished_at - request.arrival)
        self.timeline.ended(request)
        if request.session is not None:
            self.branches.settle(request.session, request)
        else:
            self._release(request)
        samples = self._by_id.get(request.request_id, ())
        if all(sample.finished for sample in samples):
            self._by_id.pop(request.request_id, None)
            for sample in samples:
                if sample.hints is not None:
                    sample.hints.ended(partial(self._demote, samples))

    def _withdraw(self, work: ScheduledRequest) -> None:
        """Take back what a step has run of a request that ends with an earlier token."""

    def _demote(self, samples: Sequence[SequenceRequest], start: int) -> int:
        """Give up what the pool holds of a finished prompt, and of its session, from ``start``
        on; return how many tokens that were."""
        works, session = [one.work for one in samples if one.work.cacheable], samples[0].session
        own = 0 if session is None else self.branches.shorten(session, start)
        return max(own, sum(self.branches.demote(work.tokens.ids, work.key, start) for work in works))

    def _release(self, request: SequenceRequest) -> None:
        """Keep the finished sequence for others, or give its pages back."""
        work = request.work
        if work.seq is None:
            return
        if self.cache is None or not work.cacheable or not work.computed:
            self.branches.remove(work.seq)
        else:
            self.stored.keep(work)
            self.branches.share(work, work.key, live=False)
        work.seq = None

    def give_up(self, rank: Rank) -> bool:
        """Give up one thing of this rank, as a ``Giver``."""
        kept = self.checkpoints
        match rank:
            case Rank.ORPHANS:
                # In a step the yielding request is alone, and asks for itself.
                return self.orphans.bury() or (not self.stepping and self.give_way())
            case Rank.SCARCE_STATES:
                return kept is not None and not self.runner.state.num_available_states and kept.give_up()
            case Rank.WRITING:
                return self.stored.relieve()
            case Rank.PREFIXES:
                self.prefix_pins.expire()
                return self.branches.evict()
            case Rank.IDLE:
                return self.yielding is None and self.branches.drop_idle()
            case Rank.STATES:
                return kept is not None and kept.give_up()

    def loose(self) -> set[SeqId]:
        """Return the sequences that it could give up, as a ``Giver``."""
        return self.branches.loose() | self.stored.forks

    def _ages(self) -> dict[SeqId, int]:
        """Return the engine's sequences and when each was used, without those of written states."""
        ages = {} if self.cache is None else self.cache.ages()
        in_use = len(ages)
        ages |= {one.seq: in_use for one in self.branches.sessions.values() if one.seq is not None}
        works = (*self.scheduler.running, *self.scheduler.waiting)
        ages |= {work.seq: in_use for work in works if work.seq is not None}
        for seq in self.branches.written():
            ages.pop(seq, None)
        return {seq: age for seq, age in ages.items() if not self.stored.is_coming(seq)}
