"""The engine: requests in, tokens out, one step at a time.

``submit`` checks and queues, ``step`` runs one forward for whatever the scheduler chose, samples, turns tokens into
text and finishes what is finished. Continuous batching is the loop over ``step``; nothing here knows pages or layers.

Any thread may call; one lock serialises. A thread that waits for its own requests steps the engine for everybody.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.detokenizer import IncrementalDetokenizer
from quire.engine.prefix_cache import RadixCache
from quire.engine.request import ScheduledRequest, TokenBuffer
from quire.engine.scheduler import Limits, Scheduled, Scheduler
from quire.engine.tokenizer import Tokenizer
from quire.errors import InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.metrics import EngineMetrics
from quire.ops.sampling import RequestSampler, TokenLogprobs, sample
from quire.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from quire.runner.local import Runner, StepOutput
from quire.sampling_params import SamplingParams
from quire.types import Edit, Fork, Pop, Remove, SeqId, Step

logger = logging.getLogger("quire.engine")

DETOKENIZER_CONTEXT = 64
"""Tokens of the prompt that decide how the output's text begins: a split character, a leading space."""

OnLogits = Callable[[int, Tensor], None]
"""Called with the position of the first row and float32 logits ``[rows, V]`` of consecutive tokens."""


@dataclass(eq=False, slots=True)
class SequenceRequest:
    """One sequence under way: a sample of a request, or tokens that only have to be run (``params`` is None)."""

    request_id: str
    work: ScheduledRequest
    num_prompt: int
    params: SamplingParams | None
    index: int = 0
    owned: bool = False
    """A session owns the sequence: it stays when the request ends."""
    sampler: RequestSampler | None = None
    detokenizer: IncrementalDetokenizer | None = None
    on_logits: OnLogits | None = None
    siblings: list[SequenceRequest] = field(default_factory=list)
    """Further samples of the same prompt, which fork from this one when the prompt is computed."""
    limit: int = 0
    """Length at which the context, or what the empty pool holds, ends."""
    arrival: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float = 0.0
    finished_at: float | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    kept: int | None = None
    """Output tokens before the stop token or stop string; all of them if there was none."""
    error: QuireError | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class IdleState:
    """The state of a session between its requests. The engine may drop it when the pool is needed."""

    def __init__(self, tokens: TokenBuffer, key: Hashable) -> None:
        self.tokens = tokens
        self.key = key
        self.seq: SeqId | None = None
        self.computed = 0
        self.pinned = False
        self.busy = False
        self.modified = False
        """Somebody wrote into the state: it must not feed the prefix cache, nor be recomputed."""


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
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.max_model_len = max_model_len
        self.lock = threading.RLock()
        self.cache = RadixCache() if enable_prefix_caching else None
        self.metrics = EngineMetrics()
        self._entropy = torch.Generator().manual_seed(seed)
        self._ids = itertools.count()
        self._requests: dict[ScheduledRequest, SequenceRequest] = {}
        self._by_id: dict[str, list[SequenceRequest]] = {}
        self._cancelled: set[str] = set()
        self._idle: dict[int, IdleState] = {}
        """Sessions' states, least recently used first."""
        self.scheduler = Scheduler(
            runner.state,
            limits=limits,
            apply=self.apply,
            reclaim=self.reclaim,
            new_seq=runner.new_seq,
            cache=self.cache,
        )
        runner.reclaim = self.reclaim

    # -- submitting ------------------------------------------------------------------------------------------

    @property
    def pool_tokens(self) -> int:
        """Tokens that the empty pool holds."""
        return self.runner.state.num_pages * self.runner.state.page_size

    def check_tokens(self, tokens: NDArray[np.int64]) -> None:
        """``InvalidArgument`` for ids that the model does not have."""
        vocab = self.runner.model.vocab_size
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
            bad = next(token for token in tokens.tolist() if not 0 <= token < vocab)
            raise InvalidArgument(f"token id {bad} is outside of the model's vocabulary, 0..{vocab - 1}")

    def check_length(self, length: int, params: SamplingParams | None) -> int:
        """Refuse what can never run; return the length at which the sequence must end."""
        if length < 1:
            raise InvalidArgument("the prompt is empty; give at least one token")
        new = 0 if params is None else (params.max_tokens or 1)
        if length + (1 if params else 0) > self.max_model_len:
            raise InvalidArgument(
                f"the prompt has {length} tokens, and the context ends at {self.max_model_len}"
                + ("; at least one token must be left to generate" if params else "")
            )
        if length + new > self.max_model_len:
            raise InvalidArgument(
                f"max_tokens {new} after a prompt of {length} tokens passes the end of the context at {self.max_model_len}; "
                f"max_tokens up to {self.max_model_len - length}, or None for as many as fit, is accepted"
            )
        # The last sampled token is never computed.
        if length + max(new - 1, 0) > self.pool_tokens:
            raise ResourceExhausted(
                f"{length} prompt tokens and {new} new ones need more than the {self.pool_tokens} tokens that the whole KV pool "
                "holds; give a larger kv_cache_memory, or fewer tokens"
            )
        return min(self.max_model_len, self.pool_tokens + 1)

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that this model cannot serve."""
        if params.stop_strings and self.tokenizer is None:
            raise Unsupported("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        vocab = self.runner.model.vocab_size
        for name, ids in (("stop_token_ids", params.stop_ids), ("logit_bias", params.token_bias)):
            for token in ids:
                if not 0 <= token < vocab:
                    raise InvalidArgument(
                        f"{name}: token id {token} is outside of the model's vocabulary, 0..{vocab - 1}"
                    )
        if params.logprobs is not None and params.logprobs > vocab:
            raise InvalidArgument(f"logprobs {params.logprobs}; at most {vocab} (the vocabulary) are there")

    def submit(
        self,
        tokens: NDArray[np.int64],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        key: Hashable = None,
        state: IdleState | None = None,
    ) -> list[SequenceRequest]:
        """Queue a prompt (or go on with ``state``, whose tokens ``tokens`` are); one ``SequenceRequest`` per sample.

        Everything is checked here: ``InvalidArgument``, ``ResourceExhausted`` (never fits), ``Unsupported``.
        """
        self.check_tokens(tokens)
        self.check_params(params)
        limit = self.check_length(tokens.size, params)
        if state is not None and params.n != 1:
            raise InvalidArgument(f"n is {params.n}; a session continues once, fork it for more")
        with self.lock:
            name = self._name(request_id)
            samples = [self._sample(name, index, tokens, params, key, limit) for index in range(params.n)]
            leader = samples[0]
            leader.siblings = samples[1:]
            if state is not None:
                self._lend(state, leader)
            self._enqueue(leader, samples)
            return samples

    def submit_run(
        self,
        state: IdleState,
        *,
        on_logits: OnLogits | None = None,
        fresh_from: int = 0,
        all_logits: bool = False,
    ) -> SequenceRequest:
        """Queue the tokens of ``state`` that are not computed yet, without sampling."""
        self.check_length(len(state.tokens), None)
        with self.lock:
            work = ScheduledRequest(
                state.tokens.copy(),
                key=state.key,
                wants="none" if on_logits is None else ("all" if all_logits else "last"),
                fresh_from=fresh_from,
                cacheable=not state.modified,
            )
            request = SequenceRequest(self._name(None), work, len(state.tokens), None, on_logits=on_logits)
            self._lend(state, request)
            self._enqueue(request, [request])
            return request

    def _name(self, request_id: str | None) -> str:
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self._by_id:
            raise InvalidArgument(f"request id {name!r} is in use; give a new one")
        return name

    def _sample(
        self, name: str, index: int, tokens: NDArray[np.int64], params: SamplingParams, key: Hashable, limit: int
    ) -> SequenceRequest:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                tokens.tolist()[-DETOKENIZER_CONTEXT:],
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        return SequenceRequest(
            name,
            ScheduledRequest(TokenBuffer(tokens), key=key),
            tokens.size,
            params,
            index=index,
            sampler=RequestSampler(
                params, tokens, vocab_size=self.runner.model.vocab_size, index=index, entropy=self._entropy
            ),
            detokenizer=detokenizer,
            limit=limit,
        )

    def _lend(self, state: IdleState, request: SequenceRequest) -> None:
        """The request works on the session's sequence, at least one token of which must run."""
        request.owned = True
        request.work.cacheable = not state.modified
        request.work.pinned = state.pinned or state.modified
        computed = min(state.computed, len(state.tokens) - 1)
        if state.seq is not None:
            self.rewind(state, computed)
        request.work.seq, request.work.computed = state.seq, computed if state.seq is not None else 0
        request.work.admitted = state.seq is not None
        state.busy = True

    def _enqueue(self, leader: SequenceRequest, samples: list[SequenceRequest]) -> None:
        self._by_id[leader.request_id] = samples
        self._requests[leader.work] = leader
        self.scheduler.submit(leader.work)
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

    def run(self, requests: Iterable[SequenceRequest], on_step: Callable[[], None] | None = None) -> None:
        """Step until these requests are finished. Whatever interrupts it (Ctrl-C) cancels them first."""
        waiting = list(requests)
        try:
            while waiting := [request for request in waiting if not request.finished]:
                self.step()
                if on_step is not None:
                    on_step()
        except BaseException:
            with self.lock:
                for request in waiting:
                    self._finish(request, "cancelled")
            raise

    def step(self) -> list[SequenceRequest]:
        """One forward. Returns the requests that got a token or ended."""
        with self.lock:
            changed = self._cancel_pending()
            scheduled = self.scheduler.schedule()
            for work, error in scheduled.failed:
                changed.append(self._fail(self._requests[work], error))
            if not scheduled.step.chunks:
                return changed
            try:
                output = self.runner.execute(scheduled.step)
            except Exception as error:
                logger.exception("a step of %d tokens failed; its requests end", scheduled.step.num_tokens)
                reason = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
                return changed + [self._fail(self._requests[work], reason) for work in scheduled.requests]
            self.scheduler.computed(scheduled)
            return changed + self._sample_step(scheduled, output)

    def _cancel_pending(self) -> list[SequenceRequest]:
        changed: list[SequenceRequest] = []
        while self._cancelled:
            for request in list(self._by_id.get(self._cancelled.pop(), ())):
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
                request.on_logits(work.computed - rows_RV.shape[0], rows_RV)
            if work.remaining:
                continue
            if request.params is None:
                self._finish(request, "stop")
                changed.append(request)
                continue
            if not request.output_ids:
                self._share_prompt(request)
                forks = [self._fork_sample(request, sibling) for sibling in request.siblings]
                request.siblings = []
            else:
                forks = []
            for ready_request in (request, *forks):
                ready.append(ready_request)
                rows.append(output.starts[index + 1] - 1)
        if ready:
            logits_RV = output.logits_RV
            if rows != list(range(logits_RV.shape[0])):
                logits_RV = logits_RV.index_select(0, torch.tensor(rows, device=logits_RV.device))
            self._draw(logits_RV, ready)
        return changed + ready

    def _share_prompt(self, request: SequenceRequest) -> None:
        """A computed prompt can be forked by others from now on."""
        work = request.work
        self.metrics.prompt_tokens_cached.inc(work.num_cached)
        if self.cache is not None and work.cacheable and work.seq is not None:
            self._remove(self.cache.insert(work.seq, work.tokens.ids[: work.computed], work.key, live=True))

    def _fork_sample(self, leader: SequenceRequest, sibling: SequenceRequest) -> SequenceRequest:
        if leader.work.seq is None:
            raise QuireError("a prompt was computed without a sequence")
        seq = self.runner.new_seq()
        self.apply(Fork(leader.work.seq, seq))
        sibling.work.seq, sibling.work.computed = seq, leader.work.computed
        sibling.work.num_cached = leader.work.num_cached
        self._requests[sibling.work] = sibling
        self.scheduler.join(sibling.work)
        return sibling

    def _draw(self, logits_RV: Tensor, ready: list[SequenceRequest]) -> None:
        samplers = [request.sampler for request in ready if request.sampler is not None]
        banned: list[tuple[int, ...]] | None = None
        if any(request.params is not None and len(request.output_ids) < request.params.min_tokens for request in ready):
            banned = [self._banned(request) for request in ready]
        drawn = sample(logits_RV, samplers, banned)
        self.metrics.generation_tokens.inc(len(ready))
        now = time.monotonic()
        for row, (request, token) in enumerate(zip(ready, drawn.token_ids, strict=True)):
            if request.finished:
                continue
            if row in drawn.failures:
                self._fail(request, drawn.failures[row])
                continue
            self._take(request, token, drawn.logprobs[row], now)

    def _banned(self, request: SequenceRequest) -> tuple[int, ...]:
        params = request.params
        if params is None or len(request.output_ids) >= params.min_tokens:
            return ()
        return tuple((set() if params.ignore_eos else self.eos_ids) | params.stop_ids)

    def _take(self, request: SequenceRequest, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """One more token: keep it, turn it into text, see whether it ends the request."""
        params = request.params
        if params is None:
            raise QuireError("a token was sampled for a request that samples nothing")
        if request.first_token is None:
            request.first_token = now
            self.metrics.time_to_first_token.observe(now - request.arrival)
        else:
            self.metrics.inter_token_latency.observe(now - request.last_token)
        request.last_token = now
        request.work.tokens.append(token)
        request.output_ids.append(token)
        if request.sampler is not None:
            request.sampler.observe(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        count = len(request.output_ids)
        ends = token in params.stop_ids or (token in self.eos_ids and not params.ignore_eos)
        if ends and count > params.min_tokens:
            request.kept = count - 1
            self._finish(request, "stop", token)
            return
        detokenizer = request.detokenizer
        if detokenizer is not None:
            request.text += detokenizer.push(token)
            if detokenizer.stopped_by is not None:
                request.kept = detokenizer.tokens_before_stop
                self._finish(request, "stop", detokenizer.stopped_by)
                return
        if count == params.max_tokens:
            self._finish(request, "length")
        elif len(request.work.tokens) >= request.limit:
            self._finish(request, "length", "context")

    # -- ending ----------------------------------------------------------------------------------------------

    def _fail(self, request: SequenceRequest, error: QuireError) -> SequenceRequest:
        request.error = error
        # Values that are not finite must not be found by anybody else.
        request.work.cacheable = False
        for sibling in request.siblings:
            sibling.error = error
            self._finish(sibling, "error")
        self._finish(request, "error")
        return request

    def _finish(self, request: SequenceRequest, reason: FinishReason, stop: str | int | None = None) -> None:
        if request.finished:
            return
        request.finish_reason, request.stop_reason = reason, stop
        request.finished_at = time.monotonic()
        if request.detokenizer is not None and request.detokenizer.stopped_by is None:
            request.text += request.detokenizer.finish()
        self.scheduler.finish(request.work)
        self._requests.pop(request.work, None)
        if request.params is not None:
            self.metrics.request_success.inc(reason)
            self.metrics.e2e_request_latency.observe(request.finished_at - request.arrival)
        self._release(request)
        samples = self._by_id.get(request.request_id, [])
        if all(sample_.finished for sample_ in samples):
            self._by_id.pop(request.request_id, None)

    def _release(self, request: SequenceRequest) -> None:
        """Keep the finished sequence for others, or give its pages back. A session's sequence goes back to it."""
        work = request.work
        if work.seq is None or request.owned:
            return
        if self.cache is None or not work.cacheable or request.finish_reason == "error" or not work.computed:
            self.remove_sequence(work.seq)
        else:
            self._remove(self.cache.insert(work.seq, work.tokens.ids[: work.computed], work.key, live=True))
            self._remove(self.cache.finish(work.seq))
        work.seq = None

    # -- sequences -------------------------------------------------------------------------------------------

    def apply(self, edit: Edit) -> None:
        """Execute an edit now."""
        self.runner.execute(Step(edits=(edit,)))
        if isinstance(edit, Fork):
            self.metrics.forks.inc()

    def remove_sequence(self, seq: SeqId) -> None:
        """Forget a sequence everywhere."""
        if self.cache is not None and seq in self.cache:
            self.cache.remove(seq)
        self.apply(Remove(seq))

    def _remove(self, seqs: Iterable[SeqId]) -> None:
        for seq in seqs:
            self.apply(Remove(seq))

    def reclaim(self) -> bool:
        """Give up one thing that can be had again: a cached sequence, or else an idle session's state."""
        seq = self.cache.evict() if self.cache is not None else None
        if seq is not None:
            self.apply(Remove(seq))
            return True
        for state in self._idle.values():
            if state.seq is not None and not (state.busy or state.pinned or state.modified):
                self.drop(state)
                return True
        return False

    def reset_prefix_cache(self) -> None:
        """Forget all finished sequences."""
        with self.lock:
            if self.cache is not None:
                self._remove(self.cache.clear())

    # -- sessions' states ------------------------------------------------------------------------------------

    def hold(self, state: IdleState) -> None:
        """Remember a session's state, as the one used last."""
        self._idle.pop(id(state), None)
        self._idle[id(state)] = state

    def settle(self, state: IdleState, request: SequenceRequest) -> None:
        """A session's request has ended: its sequence is idle again."""
        with self.lock:
            state.busy = False
            state.seq = request.work.seq
            state.computed = request.work.computed if request.work.seq is not None else 0
            if state.seq is None:
                state.modified = False
            self.hold(state)
            if self.cache is not None and state.seq is not None and state.computed and request.work.cacheable:
                self._remove(
                    self.cache.insert(state.seq, request.work.tokens.ids[: state.computed], state.key, live=True)
                )

    def rewind(self, state: IdleState, length: int) -> None:
        """Take back the tokens of a session's sequence from ``length`` on, as far as they are computed."""
        if state.seq is None or state.computed <= length:
            return
        self.apply(Pop(state.seq, state.computed - length))
        if self.cache is not None and state.seq in self.cache and self.cache.length(state.seq) > length:
            self.cache.truncate(state.seq, length)
        state.computed = length

    def drop(self, state: IdleState) -> None:
        """Give a session's pages back; its tokens stay, to be computed again when needed."""
        if state.seq is not None:
            self.remove_sequence(state.seq)
        state.seq, state.computed = None, 0

    def forget(self, state: IdleState) -> None:
        """A session was closed."""
        with self.lock:
            self._idle.pop(id(state), None)
            self.drop(state)

    # -- results ---------------------------------------------------------------------------------------------

    def output(self, samples: Sequence[SequenceRequest], prompt: str | None = None) -> RequestOutput:
        """What the user gets for one prompt."""
        first = samples[0]
        stamps = [sample_.first_token for sample_ in samples if sample_.first_token is not None]
        ends = [sample_.finished_at for sample_ in samples if sample_.finished_at is not None]
        return RequestOutput(
            request_id=first.request_id,
            prompt=prompt,
            prompt_token_ids=first.work.tokens.ids[: first.num_prompt].tolist(),
            outputs=[self._completion(sample_) for sample_ in samples],
            finished=all(sample_.finished for sample_ in samples),
            num_cached_tokens=first.work.num_cached,
            metrics=RequestMetrics(
                arrival_time=first.arrival,
                first_token_time=min(stamps, default=None),
                finished_time=max(ends, default=None),
                num_preemptions=sum(sample_.work.num_preemptions for sample_ in samples),
            ),
        )

    def _completion(self, request: SequenceRequest) -> CompletionOutput:
        wanted = request.params is not None and request.params.logprobs is not None
        return CompletionOutput(
            index=request.index,
            text=request.text,
            token_ids=list(request.output_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            cumulative_logprob=sum(entry.chosen.logprob for entry in request.logprobs) if wanted else None,
            logprobs=[self._logprobs(entry) for entry in request.logprobs] if wanted else None,
            error=str(request.error) if request.error is not None else None,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        def text(token: int) -> str | None:
            return self.tokenizer.token_text(token) if self.tokenizer is not None else None

        return {
            found.token_id: Logprob(logprob=found.logprob, rank=found.rank, decoded_token=text(found.token_id))
            for found in (entry.chosen, *entry.top)
        }

    def snapshot(self) -> dict[str, float]:
        """All metrics by name, gauges as of now."""
        with self.lock:
            metrics, state = self.metrics, self.runner.state
            metrics.num_requests_running.set(self.num_running)
            metrics.num_requests_waiting.set(self.num_waiting)
            metrics.kv_cache_usage.set(1 - state.num_available_pages() / state.num_pages)
            metrics.pages_shared.set(state.num_shared_pages())
            for counter, value in (
                (metrics.num_preemptions, self.scheduler.num_preemptions),
                (metrics.copy_on_write_splits, state.num_splits),
            ):
                counter.inc(value - counter.value)
            return metrics.snapshot()

    def shutdown(self) -> None:
        """Cancel what runs and give all pages back."""
        with self.lock:
            for request in list(self._requests.values()):
                self._finish(request, "cancelled")
            for state in list(self._idle.values()):
                self.drop(state)
            self.reset_prefix_cache()

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)
