"""The engine: requests in, tokens out, one step at a time.

``submit`` checks and queues. ``step`` runs one forward of what the scheduler chose, samples, turns
tokens into text and ends what is finished. Continuous batching is the loop over ``step``; nothing
here knows pages or layers. ``quire.engine.assembly`` makes the parts and hands them over.

Any thread may call; one lock serialises. A thread that waits for its own requests steps all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.adapters.keys import AdapterKey, users
from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.base.finalizers import FinalizerQueue
from quire.base.hints import NO_HINTS, CacheHints, RequestHints
from quire.base.interrupts import Lock, check
from quire.base.media import NO_MEDIA, Media
from quire.base.metrics import EngineMetrics
from quire.base.sampling_params import SamplingParams
from quire.base.token_history import Ids, TokenHistory
from quire.base.types import BASE
from quire.branches.prefix_cache import RadixCache
from quire.branches.session_branch import SessionBranch
from quire.branches.session_branches import SessionBranches, media_of
from quire.branches.stored_state import StoredState
from quire.engine import session_requests
from quire.engine.blend_runs import BlendRuns
from quire.engine.blending import Blending
from quire.engine.checkpoints import Checkpoints
from quire.engine.exact import ExactWindows, exact_key
from quire.engine.miss_search import PastPrefixes
from quire.engine.page_use import OWNERS, PageUse, page_use
from quire.engine.pins import Pins, PrefixPins
from quire.engine.prompt_blend import PromptBlend
from quire.engine.reclaim import EngineReclaim
from quire.engine.request import (
    BACKGROUND,
    AskedFor,
    OnLogits,
    Output,
    Request,
    RequestBranch,
    Seat,
    final_length,
)
from quire.engine.request_checks import RequestChecks
from quire.engine.requests import Requests, owner_of
from quire.engine.sampling_step import SampleOutputs, SamplingStep
from quire.engine.scheduler import Scheduler
from quire.engine.steps import EngineSteps
from quire.engine.timeline import Timeline
from quire.grammars.grammars import Grammars
from quire.runner.local import Runner
from quire.sampling.token_logprobs import PromptLogprobs
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.engine")

CLOSE_SECONDS = 10.0
"""How long a closing engine waits for state to become durable."""
ENDLESS = 2**31 - 1
"""Tokens of a sequence that nothing else limits."""


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """The result of the checks of a prompt, which hold as long as the engine lives."""

    limit: int
    """Length at which its sequences end."""
    windows: bool
    """Whether its tokens are verified by windows (``engine.exact``)."""


@dataclass(eq=False, kw_only=True)
class Engine:
    """Continuous batching over one runner."""

    runner: Runner
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    max_model_len: int
    lock: Lock
    """Its holder is not interrupted: signals take effect between steps."""
    finalizers: FinalizerQueue
    """Sessions and requests of unreferenced objects. The next step ends them."""
    requests: Requests
    scheduler: Scheduler
    stepper: EngineSteps
    outputs: SampleOutputs
    sampling: SamplingStep
    branches: SessionBranches
    cache: RadixCache | None
    past: PastPrefixes
    """What the prefix cache had, to tell what prompts missed."""
    stored: StoredState
    """State outside of the pool."""
    checkpoints: Checkpoints | None
    pins: Pins
    prefix_pins: PrefixPins
    blending: Blending
    blend_runs: BlendRuns
    grammars: Grammars | None
    checks: RequestChecks
    forgets: str
    """The reason why state at position ``{0}`` may have to be computed again, from ``{1}``."""
    reclaim: EngineReclaim
    exact: ExactWindows
    timeline: Timeline
    metrics: EngineMetrics
    wait: Callable[[Sequence[Request]], None] | None = None
    """Lets ``run`` wait for requests that a background thread steps, which sets it."""

    # -- requests ----------------------------------------------------------------------------------

    def checks_of(self, session: SessionBranch) -> RequestChecks:
        """Return the limits for a session's tokens. With a window neither the context nor the pool
        ends them, if the model rotates keys (of rotations only differences count)."""
        if session.window is None or not self.runner.state.endless:
            return self.checks
        return replace(self.checks, max_model_len=ENDLESS, pool_tokens=ENDLESS)

    def check(
        self,
        tokens: NDArray[np.int64],
        params: SamplingParams,
        *,
        adapter: int | None = None,
        media: Media = NO_MEDIA,
        blended: bool = False,
    ) -> CheckedPrompt:
        """Check a prompt without a session. The arguments and errors are those of ``submit``."""
        self.checks.tokens(tokens, media)
        self.checks.params(params)
        self.checks.scored(tokens, params)
        limit = self.checks.length(tokens.size, params)
        windows = params.exact and self.exact.has_windows(params, tokens, None, adapter=adapter, blended=blended)
        return CheckedPrompt(limit, windows)

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
        checked: CheckedPrompt | None = None,
    ) -> list[Request]:
        """Queue a prompt; return one ``Request`` per sample.

        With ``session`` its tokens become ``tokens`` and what follows them, unless the request
        fails, and its state is used as far as it agrees. ``key`` is the salt; only requests of the
        same salt and adapters share cached prefixes. ``adapter`` is the id of a loaded adapter for
        all tokens. A session has both. ``media`` holds the embeddings of ids below 0; embeddings of
        a session's own tokens are known. ``blend``: how cached state of its segments is used.
        ``checked``: the result of ``check`` for these arguments.

        Everything is checked here: ``InvalidArgument``, ``ResourceExhausted`` (never fits),
        ``Unsupported``, ``NotFound``, ``FailedPrecondition`` (an embedding that must run is gone),
        and ``QuotaExceeded`` or ``PoolExhausted`` for a pinned session whose account has a limit.
        """
        if session is not None and adapter is not None:
            raise InvalidArgument(f"adapter {adapter} and a session, which has its own; give None", field="adapter")
        if session is None:
            checked = checked or self.check(tokens, params, adapter=adapter, media=media, blended=blend is not None)
            limit, windows = checked.limit, checked.windows
        else:
            self.checks.history(tokens)
            media = media_of(session, tokens, media)
            self.checks.params(params, in_session=True)
            windows = params.exact and self.exact.has_windows(
                params, tokens, session, adapter=None, blended=blend is not None
            )
            self.checks.scored(tokens, params)
            limit = self.checks_of(session).length(tokens.size, params)
            if params.prompt_logprobs is not None and session.modified:
                raise FailedPrecondition(
                    "prompt_logprobs run all tokens of a session again, and a state that set_kv wrote into cannot be "
                    "computed again; ask for them before set_kv",
                    field="prompt_logprobs",
                )
        exclusions = self.outputs.exclusions(params)
        with self.lock:
            self.runner.adapters.check([adapter])
            if session is not None:
                self.pins.check(session, final_length(tokens.size, params.max_tokens, limit), session.account)
            runs = BASE.then(0, adapter)
            prefix = self.branches.prefix_key(key, runs)
            if windows:
                prefix = exact_key(prefix)
            asked = AskedFor(
                request_id=self.requests.name(request_id),
                params=params,
                window=self.exact.size if windows else 0,
                num_prompt=tokens.size,
                owner=owner_of(key if session is None else session.key),
                limit=limit,
                forgets=self.forgets,
            )
            prompt, samples = TokenHistory(tokens, media), list[Request]()
            for index in range(params.n):
                branch = RequestBranch(tokens=prompt.fork(), key=prefix, runs=runs, reusable=self.cache is not None)
                output = self.outputs.make(branch.tokens, params, index, exclusions)
                samples.append(Request(replace(asked, index=index), branch, Seat(priority=hints.priority), output))
            leader = samples[0]
            leader.asked, leader.seat.siblings = self._hinted(leader.asked, hints), samples[1:]
            leader.branch.blend = blend
            if blend is not None:
                self.blending.ask(key, adapter, tokens)
            if params.prompt_logprobs is not None:
                scored = PromptLogprobs(tokens, params.prompt_logprobs)
                output = leader.output
                output.prompt_logprobs, output.on_logits = scored, scored.take
                output.wants, output.fresh_from = "all", 0
            if session is not None:
                if params.prompt_logprobs is not None or windows or (params.exact and not session.origin.exact):
                    self.branches.drop(session)
                session_requests.begin(self.branches, session, leader)
                if windows:
                    leader.branch.key = exact_key(leader.branch.key)
            self.requests.queue(samples)
            return samples

    def _hinted(self, asked: AskedFor, hints: CacheHints) -> AskedFor:
        """Return a request with hints about its state."""
        if hints is NO_HINTS:
            return asked
        found = RequestHints(hints, asked.num_prompt)
        return replace(asked, hints=found, stops=found.stops if self.runner.state.forgets else ())

    def submit_run(
        self,
        session: SessionBranch,
        tokens: NDArray[np.int64],
        *,
        tail: Sequence[int] = (),
        media: Media = NO_MEDIA,
        on_logits: OnLogits | None = None,
        fresh_from: int | None = None,
        all_logits: bool = False,
        arrival: int | None = None,
        blend: PromptBlend | None = None,
        priority: int = 0,
        uncounted: bool = False,
    ) -> Request:
        """Queue a run without sampling, after which the session's tokens are these and ``tail``.

        ``on_logits`` gets the logits of the last token, or with ``all_logits`` of every token that
        runs: at least the tokens from ``fresh_from`` on. A ``QuireError`` from it ends the request.
        ``arrival`` is the place in the queue of an earlier request that this one continues.
        ``media`` is as in ``submit``, of the tail too. ``blend``: what gives rows of some tokens.
        ``uncounted``: as in ``AskedFor``.
        """
        media = media_of(session, tokens, media)
        self.checks_of(session).length(len(tokens) + len(tail), None)
        with self.lock:
            self.pins.check(session, len(tokens), session.account)
            request = Request(
                AskedFor(
                    request_id=self.requests.name(),
                    num_prompt=len(tokens),
                    tail=tuple(tail),
                    owner=owner_of(session.key),
                    uncounted=uncounted,
                ),
                RequestBranch(tokens=TokenHistory(tokens, media), reusable=True, blend=blend),
                Seat(priority=priority),
                Output(
                    wants="none" if on_logits is None else ("all" if all_logits else "last"),
                    fresh_from=fresh_from,
                    on_logits=on_logits,
                ),
            )
            session_requests.begin(self.branches, session, request)
            self.requests.queue([request], arrival)
            return request

    def submit_prefix(
        self,
        tokens: NDArray[np.int64],
        *,
        key: Hashable = None,
        adapter: int | None = None,
        media: Media = NO_MEDIA,
        hints: CacheHints = NO_HINTS,
        only_idle: bool = False,
        most: int | None = None,
    ) -> Request:
        """Queue a run without sampling whose state the prefix cache gets, as if it were a finished
        prompt's. Arguments and errors are as for ``submit``.

        ``only_idle``: it is cancelled as soon as anything else is to run, and takes no room from
        idle sessions. It is cancelled at once if it cannot begin now, or if more than ``most``
        tokens of it (None: any number) would have to run.
        """
        self.checks.tokens(tokens, media)
        self.checks.length(tokens.size, None)
        if self.cache is None:
            raise FailedPrecondition("the prefix cache is off, which would hold it; set enable_prefix_caching")
        with self.lock:
            self.runner.adapters.check([adapter])
            runs = BASE.then(0, adapter)
            asked = AskedFor(request_id=self.requests.name(), num_prompt=len(tokens), owner=owner_of(key))
            request = Request(
                self._hinted(asked, hints),
                RequestBranch(
                    tokens=TokenHistory(tokens, media),
                    key=self.branches.prefix_key(key, runs),
                    runs=runs,
                    reusable=True,
                ),
                Seat(priority=hints.priority or BACKGROUND),
                Output(wants="none"),
            )
            if only_idle:
                reuse = request.seat.reuse
                reuse.cached = self.cache.peek(tokens[:-1], request.branch.key)
                if not self.scheduler.idle or (most is not None and tokens.size - reuse.cached > most):
                    request.output.finish_reason = "cancelled"
                    return request
            self.requests.queue([request])
            self.requests.yielding = request if only_idle else None
            return request

    def submit_chunks(
        self, segments: Sequence[Ids], *, key: Hashable, adapter: int | None, behind: Ids | None = None
    ) -> list[tuple[int, list[Request]]]:
        """Queue the computation of all chunks of segments that the store lacks, or of none. Return,
        for each segment, its tokens and these requests. ``behind``: the beginning of the prompts.
        """
        with self.lock:
            return self.blend_runs.submit_chunks(segments, key=key, adapter=adapter, behind=behind)

    def cancel(self, request_id: str) -> bool:
        """End a request, in any phase, at the next step boundary; return False if there is none."""
        return self.requests.cancel(request_id)

    def end(self, requests: Iterable[Request]) -> None:
        """Cancel requests now, not at the next step. Finished ones stay as they are."""
        with self.lock:
            self.requests.end(requests)

    def fail_all(self, error: QuireError) -> None:
        """End all requests with the error of a step whose cause is no single request."""
        with self.lock:
            self.requests.fail_all(error)

    def forget(self, session: SessionBranch) -> None:
        """Cancel the requests of a closed session, and free its pages."""
        with self.lock:
            for one in (session, session.successor):
                if one is not None and isinstance(one.request, Request):
                    self.requests.finish(one.request, "cancelled")
            self.branches.forget(session)

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Run one forward. Return the requests that got a token or ended."""
        return self.stepper.step()

    @property
    def closed(self) -> bool:
        return self.requests.closed

    @property
    def has_work(self) -> bool:
        return not self.scheduler.idle

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return sum(not one.asked.guesses for one in self.scheduler.running)

    def run(self, requests: Iterable[Request], on_step: Callable[[], None] | None = None) -> None:
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
                self.stepper.step()
                if on_step is not None:
                    on_step()
                check()
        except BaseException:
            self.end(waiting)
            raise

    def users_of(self, adapter_id: int) -> str:
        """Return an adapter's users, as in "2 requests and 1 session use it"; "" without any. They
        are requests that wait or run, and open sessions that continue under it or have tokens that
        would have to run under it again."""
        with self.lock:
            self.finalizers.run_finalizers()
            self.requests.end_yielding()
            requests = [
                request for samples in self.requests.by_id.values() for request in samples if not request.finished
            ]
            plain = {
                one.request_id for one in requests if one.branch.session is None and adapter_id in one.branch.runs.ids
            }
            held = [*self.branches.sessions.values(), *(one.branch.session for one in requests if one.branch.session)]
            sessions = {id(one) for one in held if adapter_id in one.runs.ids}
            return users(len(plain), len(sessions))

    def forget_adapter(self, fingerprint: str) -> None:
        """Give back the finished sequences of an unloaded adapter. Only the same adapter, loaded
        again, could find them. It has no user, so host memory holds no state of it."""
        if self.cache is not None:
            with self.lock:
                self.prefix_pins.clear(lambda key: isinstance(key, AdapterKey) and key.names(fingerprint))
                gone = self.cache.forget_keys(lambda key: isinstance(key, AdapterKey) and key.names(fingerprint))
                self.branches.remove(*gone)

    def reset_prefix_cache(self) -> None:
        """Forget all finished sequences, pinned ones too, also those in memory outside of the pool,
        what there was before, and what drafts are taken from. Durable tiers keep what they have."""
        with self.lock:
            self.prefix_pins.clear()
            self.branches.clear_cache()
            self.stored.forget()
            self.past.clear()
            if self.requests.drafts is not None:
                self.requests.drafts.forget()

    def page_use(self) -> PageUse:
        """Count the pages by their kinds of owners, now."""
        with self.lock:
            return page_use(self.runner.state, self.branches, self.cache)

    def snapshot(self) -> dict[str, float]:
        """Return all metrics by name, gauges as of now."""
        with self.lock:
            self.finalizers.run_finalizers()
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
        """Write the state held only by this process to the stores that outlive it, for at most
        ``timeout`` seconds; return whether nothing is left. Any thread may call."""
        until = time.monotonic() + timeout
        handed = self.blending.flush(timeout)
        return self.stored.flush(max(0.0, until - time.monotonic())) and handed

    def shutdown(self) -> None:
        """Cancel all requests, free all pages, and accept no request from now on."""
        self.requests.closed = True
        if self.grammars is not None:
            self.grammars.close()
        self.flush(CLOSE_SECONDS)
        with self.lock:
            for samples in list(self.requests.by_id.values()):
                self.requests.end(samples)
            self.stepper.in_flight.clear()
            self.prefix_pins.clear()
            for session in list(self.branches.sessions.values()):
                self.forget(session)
            self.reset_prefix_cache()
            self.blending.close()
            self.stored.close()
