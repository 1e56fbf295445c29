"""From logits to tokens: draw, keep, decode, and see whether the token ends the request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.metrics import EngineMetrics
from quire.base.outputs import FinishReason
from quire.base.sampling_params import SamplingParams
from quire.base.token_history import TokenHistory
from quire.engine.request import Output, Request
from quire.grammars.grammars import Grammars, RowGrammars
from quire.sampling.draws import Draws
from quire.sampling.exclusions import Exclusions
from quire.sampling.filters import DrawKernel
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampled_tokens import SampledTokens, TokenLogprobs
from quire.sampling.sampler import can_wait, sample, sample_later
from quire.sampling.seen_tokens import SeenTokens
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


class Ends(Protocol):
    def finish(self, request: Request, reason: FinishReason, stop: str | int | None = None) -> None:
        """End a request; ``stop``: the stop string or token, or "context"."""
        ...

    def fail(self, request: Request, error: QuireError) -> Request: ...


@dataclass(slots=True, eq=False)
class Drawing:
    """One token for each of some requests, drawn and perhaps not read yet."""

    ready: list[Request]
    made: Draws | SampledTokens
    allowed: RowGrammars | None = None
    is_read: bool = False
    redrawn: Collection[int] = ()
    """Rows that drew again when they were read: ``made`` had other tokens on the device."""
    discarded: set[int] = field(default_factory=set)
    """Rows whose tokens do not count, for they come behind a token that the request has not."""

    @property
    def tokens_R(self) -> Tensor | None:
        """Return the tokens, where the logits were; None: they are known to the host only."""
        return self.made.tokens_R if isinstance(self.made, Draws) else None

    def drop(self) -> None:
        """Take back the random numbers: the tokens will not be read."""
        if isinstance(self.made, Draws) and not self.is_read:
            self.made.drop(range(len(self.ready)))

    def drop_row(self, row: int) -> None:
        """Let a row's token not count, and take back its random number."""
        self.discarded.add(row)
        if isinstance(self.made, Draws):
            self.made.drop([row])


class SamplingStep:
    """Sampling for requests with logits. ``eos_ids`` end a text, ``ends`` a request. ``gaps`` takes
    the times between tokens, in seconds."""

    def __init__(
        self,
        *,
        eos_ids: frozenset[int],
        grammars: Grammars | None,
        metrics: EngineMetrics,
        ends: Ends,
        gaps: deque[float],
    ) -> None:
        self.eos_ids = eos_ids
        self.grammars = grammars
        self.metrics = metrics
        self.ends = ends
        self._gaps = gaps
        self.kernel: DrawKernel | None = None
        """Draws tokens on the logits' device; None: PyTorch's operations do."""
        self.seen: SeenTokens | None = None
        """Counts tokens for penalties on the logits' device; None: they are brought there."""
        self.later = False
        """Whether tokens are drawn to be read later also on a CPU."""
        self.under_way = False
        """Whether logits processors may be running, which are the user's."""

    def draw(
        self,
        logits_RV: Tensor,
        ready: list[Request],
        maxima: Sequence[int] | None = None,
        *,
        unread_R: Tensor | None = None,
    ) -> Drawing:
        """Draw one token for each row of ``logits_RV [R, V]``, that of ``ready[row]``. Where the
        tokens need no value of the host, nothing waits for them. ``maxima``: as for ``sample``.
        ``unread_R``: as for ``sample_later``."""
        unread = 0 if unread_R is None else 1
        samplers = [request.output.sampler for request in ready if request.output.sampler is not None]
        banned: list[tuple[int, ...]] | None = None
        if any(self._is_early(request, unread) for request in ready):
            banned = [self._end_tokens(one.params) if self._is_early(one, unread) else () for one in ready]
        allowed = self._allowed(ready)
        if allowed is None and (self.later or not logits_RV.is_cpu) and all(map(can_wait, samplers)):
            return Drawing(ready, sample_later(logits_RV, samplers, banned, self.kernel, self.seen, unread_R))
        self.under_way = True
        try:
            return Drawing(ready, sample(logits_RV, samplers, banned, allowed, self.kernel, maxima), allowed)
        finally:
            self.under_way = False

    def take(self, drawing: Drawing) -> None:
        """Wait for the tokens, and take in the tokens of requests that continue."""
        made = drawing.made
        drawn = made.read() if isinstance(made, Draws) else made
        drawing.is_read = True
        if isinstance(made, Draws):
            drawing.redrawn = made.redrawn
        now, allowed = time.monotonic(), drawing.allowed
        discarded = drawing.discarded | {row for row, request in enumerate(drawing.ready) if request.finished}
        guessed = sum(request.asked.guesses for row, request in enumerate(drawing.ready) if row not in discarded)
        self.metrics.generation_tokens.inc(len(drawing.ready) - len(discarded) - guessed)
        for row, (request, token) in enumerate(zip(drawing.ready, drawn.token_ids, strict=True)):
            if row in discarded or request.finished:
                continue
            matcher = request.output.matcher
            if allowed is not None and matcher is not None and request.branch.session is not None:
                request.output.mask_counts.append(allowed.num_allowed(row))
            if row in drawn.failures:
                if matcher is not None and matcher.over:
                    # The text is whole, and no token that ends it may be drawn (yet).
                    self.ends.finish(request, "stop")
                else:
                    problem = None if matcher is None else matcher.problem()
                    self.ends.fail(request, problem or drawn.failures[row])
                continue
            self._take(request, token, drawn.logprobs[row], now)

    def may_run_ahead(self, request: Request) -> bool:
        """Return whether its next token can be drawn before the last one is known. Grammars,
        users' processors and bad words read the tokens before; so do penalties without ``seen``."""
        sampler = request.output.sampler
        if sampler is None or request.output.matcher is not None or not can_wait(sampler):
            return False
        return sampler.counts is None or self.seen is not None

    def is_last(self, request: Request) -> bool:
        """Return whether a token that was drawn and is not read yet is a request's last one."""
        params = request.params
        if params is None:
            return True
        count = len(request.output.token_ids) + 1
        return count == params.max_tokens or len(request.branch.tokens) + 1 >= request.asked.limit

    @staticmethod
    def _is_early(request: Request, unread: int) -> bool:
        """Return whether no token may end the request yet."""
        return request.params is not None and len(request.output.token_ids) + unread < request.params.min_tokens

    def _end_tokens(self, params: SamplingParams | None) -> tuple[int, ...]:
        if params is None:
            return ()
        return tuple((set() if params.ignore_eos else self.eos_ids) | params.stop_ids)

    def _allowed(self, ready: list[Request]) -> RowGrammars | None:
        """Return the grammars of these requests by row; None: there are none."""
        matchers = {
            row: request.output.matcher for row, request in enumerate(ready) if request.output.matcher is not None
        }
        if not matchers or self.grammars is None:
            return None
        ends = {row: self._end_tokens(ready[row].params) for row in matchers}
        return RowGrammars(self.grammars, matchers, ends)

    def _take(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Keep one more token, turn it into text, see whether it ends the request."""
        params, output = request.params, request.output
        if params is None:
            raise QuireError("a token was sampled for a request that samples nothing")
        if request.asked.guesses:
            pass
        elif output.first_token is None:
            output.first_token = now
            self.metrics.time_to_first_token.observe(now - request.asked.arrival)
        else:
            self.metrics.inter_token_latency.observe(now - output.last_token)
            self._gaps.append(now - output.last_token)
        output.last_token = now
        request.branch.tokens.append(token)
        output.token_ids.append(token)
        if output.sampler is not None:
            output.sampler.observe(token)
        if logprobs is not None:
            output.logprobs.append(logprobs)
        count = len(output.token_ids)
        ends = token in params.stop_ids or (token in self.eos_ids and not params.ignore_eos)
        if ends and count > params.min_tokens:
            output.kept = count - 1
            if params.include_stop_str_in_output:
                self._add_text(output, token)
            self.ends.finish(request, "stop", token)
            return
        detokenizer, matcher = output.detokenizer, output.matcher
        if detokenizer is not None:
            self._add_text(output, token)
            if detokenizer.stopped_by is not None:
                output.kept = detokenizer.tokens_before_stop
                self.ends.finish(request, "stop", detokenizer.stopped_by)
                return
        if matcher is not None:
            try:
                matcher.accept(token)
            except QuireError as error:
                self.ends.fail(request, error)
                return
            if matcher.complete:
                self.ends.finish(request, "stop")
                return
        if count == params.max_tokens:
            self.ends.finish(request, "length")
        elif len(request.branch.tokens) >= request.asked.limit:
            self.ends.finish(request, "length", "context")

    @staticmethod
    def _add_text(output: Output, token: int) -> None:
        if output.detokenizer is not None and (piece := output.detokenizer.push(token)):
            output.pieces.append(piece)


@dataclass(frozen=True, slots=True)
class SampleOutputs:
    """The maker of outputs of one engine. ``entropy`` draws the seeds of samples without one."""

    tokenizer: Tokenizer | None
    grammars: Grammars | None
    vocab_size: int
    entropy: torch.Generator

    def exclusions(self, params: SamplingParams) -> Exclusions:
        """Return the tokens that the samples of a request may not draw."""
        bad = () if self.tokenizer is None or not params.words else self.tokenizer.spellings(params.words)
        return Exclusions.of(params, self.vocab_size, bad)

    def make(self, tokens: TokenHistory, params: SamplingParams, index: int, exclusions: Exclusions) -> Output:
        """Return the output of the sample with this index, which follows ``tokens``."""
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
        sampler = RequestSampler(
            params,
            spoken,
            vocab_size=self.vocab_size,
            index=index,
            entropy=self.entropy,
            exclusions=exclusions,
        )
        return Output(sampler=sampler, detokenizer=detokenizer, matcher=matcher)
