"""From logits to tokens: draw, keep, decode, and see whether the token ends the request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from quire.engine.grammar_matcher import GrammarMatcher
from quire.engine.grammars import Grammars, RowGrammars
from quire.engine.sequence_request import SequenceRequest
from quire.errors import QuireError
from quire.metrics import EngineMetrics
from quire.ops.draws import Draws
from quire.ops.filters import DrawKernel
from quire.ops.sampled_tokens import SampledTokens, TokenLogprobs
from quire.ops.sampling import can_wait, sample, sample_later
from quire.ops.seen_tokens import SeenTokens
from quire.outputs import FinishReason
from quire.sampling_params import SamplingParams


class Finish(Protocol):
    """Ends a request."""

    def __call__(self, request: SequenceRequest, reason: FinishReason, stop: str | int | None = None) -> None:
        """End it; ``stop``: the stop string or token, or "context"."""
        ...


@dataclass(slots=True, eq=False)
class Drawing:
    """One token for each of some requests, drawn and perhaps not read yet."""

    ready: list[SequenceRequest]
    made: Draws | SampledTokens
    allowed: RowGrammars | None = None
    is_read: bool = False
    redrawn: Collection[int] = ()
    """Rows that drew again when they were read: ``made`` had other tokens on the device."""
    void: set[int] = field(default_factory=set)
    """Rows whose tokens do not count, for they come behind a token that the request has not."""

    @property
    def tokens_R(self) -> Tensor | None:
        """Return the tokens, where the logits were; None: they are known to the host only."""
        return self.made.tokens_R if isinstance(self.made, Draws) else None

    def drop(self) -> None:
        """Take back the random numbers: nobody will read the tokens."""
        if isinstance(self.made, Draws) and not self.is_read:
            self.made.drop(range(len(self.ready)))

    def drop_row(self, row: int) -> None:
        """Let a row's token not count, and take back its random number."""
        self.void.add(row)
        if isinstance(self.made, Draws):
            self.made.drop([row])


class SamplingStep:
    """Sampling for requests with logits. ``eos_ids`` end a text; ``finish`` and ``fail`` a
    request."""

    def __init__(
        self,
        *,
        eos_ids: frozenset[int],
        grammars: Grammars | None,
        metrics: EngineMetrics,
        finish: Finish,
        fail: Callable[[SequenceRequest, QuireError], object],
    ) -> None:
        self.eos_ids = eos_ids
        self.grammars = grammars
        self.metrics = metrics
        self._finish = finish
        self._fail = fail
        self.gaps: deque[float] = deque(maxlen=1)
        """Takes the times between tokens, in seconds."""
        self.kernel: DrawKernel | None = None
        """Draws for rows that need no order; None: PyTorch's operations do."""
        self.seen: SeenTokens | None = None
        """Counts tokens for penalties on the logits' device; None: they are brought there."""
        self.later = False
        """Whether tokens are drawn to be read later also on a CPU."""
        self.under_way = False
        """Whether logits processors may be running, which are the user's."""

    def draw(
        self,
        logits_RV: Tensor,
        ready: list[SequenceRequest],
        first: Sequence[int] | None = None,
        *,
        unread_R: Tensor | None = None,
    ) -> Drawing:
        """Draw one token for each row of ``logits_RV [R, V]``, that of ``ready[row]``. Where the
        tokens need no value of the host, nothing waits for them. ``first``: as for ``sample``.
        ``unread_R``: as for ``sample_later``."""
        unread = 0 if unread_R is None else 1
        samplers = [request.sampler for request in ready if request.sampler is not None]
        banned: list[tuple[int, ...]] | None = None
        if any(self._is_early(request, unread) for request in ready):
            banned = [self._ends(one.params) if self._is_early(one, unread) else () for one in ready]
        allowed = self._allowed(ready)
        if allowed is None and (self.later or not logits_RV.is_cpu) and all(map(can_wait, samplers)):
            return Drawing(ready, sample_later(logits_RV, samplers, banned, self.kernel, self.seen, unread_R))
        self.under_way = True
        try:
            return Drawing(ready, sample(logits_RV, samplers, banned, allowed, self.kernel, first), allowed)
        finally:
            self.under_way = False

    def take(self, drawing: Drawing) -> None:
        """Wait for the tokens, and take in those of requests that go on."""
        made = drawing.made
        drawn = made.read() if isinstance(made, Draws) else made
        drawing.is_read = True
        if isinstance(made, Draws):
            drawing.redrawn = made.redrawn
        now, allowed = time.monotonic(), drawing.allowed
        void = drawing.void | {row for row, request in enumerate(drawing.ready) if request.finished}
        self.metrics.generation_tokens.inc(len(drawing.ready) - len(void))
        for row, (request, token) in enumerate(zip(drawing.ready, drawn.token_ids, strict=True)):
            if row in void or request.finished:
                continue
            if allowed is not None and request.matcher is not None and request.session is not None:
                request.mask_counts.append(allowed.num_allowed(row))
            if row in drawn.failures:
                matcher = request.matcher
                if matcher is not None and matcher.over:
                    # The text is whole, and no token that ends it may be drawn (yet).
                    self._finish(request, "stop")
                else:
                    problem = None if matcher is None else matcher.problem()
                    self._fail(request, problem or drawn.failures[row])
                continue
            self._take(request, token, drawn.logprobs[row], now)

    def may_run_ahead(self, request: SequenceRequest) -> bool:
        """Return whether its next token can be drawn before the last one is known. Grammars and
        users' processors look at the tokens before; so do penalties without ``seen``."""
        sampler = request.sampler
        if sampler is None or request.matcher is not None or not can_wait(sampler):
            return False
        return sampler.counts is None or self.seen is not None

    def is_last(self, request: SequenceRequest) -> bool:
        """Return whether a token that was drawn and is not read yet is a request's last one."""
        params = request.params
        if params is None:
            return True
        count = len(request.output_ids) + 1
        return count == params.max_tokens or len(request.work.tokens) + 1 >= request.limit

    @staticmethod
    def _is_early(request: SequenceRequest, unread: int) -> bool:
        """Return whether no token may end the request yet."""
        return request.params is not None and len(request.output_ids) + unread < request.params.min_tokens

    def _ends(self, params: SamplingParams | None) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        if params is None:
            return ()
        return tuple((set() if params.ignore_eos else self.eos_ids) | params.stop_ids)

    def _allowed(self, ready: list[SequenceRequest]) -> RowGrammars | None:
        """Return what grammars leave, by row."""
        matchers = {row: request.matcher for row, request in enumerate(ready) if request.matcher is not None}
        if not matchers or self.grammars is None:
            return None
        ends = {row: self._ends(ready[row].params) for row in matchers}
        return RowGrammars(self.grammars, matchers, ends)

    def _take(self, request: SequenceRequest, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Keep one more token, turn it into text, see whether it ends the request."""
        params = request.params
        if params is None:
            raise QuireError("a token was sampled for a request that samples nothing")
        if request.first_token is None:
            request.first_token = now
            self.metrics.time_to_first_token.observe(now - request.arrival)
        else:
            self.metrics.inter_token_latency.observe(now - request.last_token)
            self.gaps.append(now - request.last_token)
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
            if params.include_stop_str_in_output:
                self._add_text(request, token)
            self._finish(request, "stop", token)
            return
        detokenizer = request.detokenizer
        if detokenizer is not None:
            self._add_text(request, token)
            if detokenizer.stopped_by is not None:
                request.kept = detokenizer.tokens_before_stop
                self._finish(request, "stop", detokenizer.stopped_by)
                return
        if request.matcher is not None:
            try:
                seconds = request.matcher.accept(token)
            except QuireError as error:
                self._fail(request, error)
                return
            if request.matcher.complete:
                self._finish(request, "stop")
                return
        if count == params.max_tokens:
            self._finish(request, "length")
        elif len(request.work.tokens) >= request.limit:
            self._finish(request, "length", "context")
        elif request.matcher is not None:
            self._make_ahead(request, request.matcher, seconds)

    def _make_ahead(self, request: SequenceRequest, matcher: GrammarMatcher, seconds: float) -> None:
        """Let a request with a slow grammar wait for its mask; its token took ``seconds``."""
        if not matcher.slow or self.grammars is None:
            request.work.is_ready = None
            return
        self.grammars.slow.spent(seconds)
        # First: an interrupt must leave no request that goes on while its mask is being made.
        request.work.is_ready = lambda: matcher.ready
        self.grammars.make_ahead(matcher)

    @staticmethod
    def _add_text(request: SequenceRequest, token: int) -> None:
        if request.detokenizer is not None and (piece := request.detokenizer.push(token)):
            request.pieces.append(piece)
