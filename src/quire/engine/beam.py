"""Beam search: the most probable continuations of a prompt, some of them followed at a time.

A beam is a live sequence like a session's. In each round every beam runs its last token, all in one
step beside whatever else is there. Then the continuations are ranked, and the next round's beams
fork the sequences that they continue, without a copy. Between rounds a beam's state is an idle
session's: if the pool is short it is given up and computed again.

Letters: R rows, one for each beam; V vocabulary; K most probable tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError
from quire.base.interrupts import check
from quire.base.outputs import BeamSearchOutput, BeamSearchSequence, FinishReason
from quire.base.sampling_params import BeamSearchParams
from quire.base.token_history import TokenHistory
from quire.branches.session_branch import SessionBranch
from quire.engine.engine import Engine
from quire.engine.request import Request
from quire.engine.request_outputs import by_token
from quire.sampling.sampled_tokens import RankedLogprob, TokenLogprobs
from quire.sampling.token_logprobs import top_logprobs
from quire.text.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation, and what it is worth."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    """Sum of the log-probabilities: float32 each, added in float64."""
    reason: FinishReason | None = None
    stop: str | int | None = None
    text: IncrementalDetokenizer | None = None
    """The text so far, of an unfinished one that a stop string may end."""


@dataclass(eq=False, slots=True)
class Beam:
    """An unfinished hypothesis, and the sequence that holds its state."""

    hypothesis: Hypothesis
    branch: SessionBranch
    request: Request | None = None
    rows: list[Tensor] = field(default_factory=list)
    """Logits of the next token, float32 ``[V]``, once they are there."""


class BeamSearch:
    """The search for one prompt: ``start``, ``advance`` between steps until ``done``,
    ``release``."""

    def __init__(
        self,
        engine: Engine,
        prompt: NDArray[np.int64],
        params: BeamSearchParams,
        *,
        key: Hashable = None,
        adapter: int | None = None,
    ) -> None:
        """Check a search. ``key`` and ``adapter`` are as in ``Engine.submit``. ``InvalidArgument``:
        more beams than sequences in a step; ``NotFound``: an adapter that is not loaded."""
        if params.beam_width > (most := engine.scheduler.limits.max_num_seqs):
            allowed = f"at most {most}, the engine's max_num_seqs"
            raise InvalidArgument(field="beam_width", given=params.beam_width, allowed=allowed)
        with engine.lock:
            engine.runner.adapters.check([adapter])
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._key = key
        self._adapter = adapter
        self._ends = (frozenset() if params.ignore_eos else engine.eos_ids) | frozenset(params.stop_token_ids or ())
        self._stops = params.sampling().stop_strings
        self._beams: list[Beam] = []
        self._branches: list[SessionBranch] = []
        """All that are to be given back."""
        self._finished: list[Hypothesis] = []
        """By score, the best first."""
        self._arrival: int | None = None
        self._num_cached = 0
        self._error: QuireError | None = None
        self.done = False

    def start(self) -> None:
        """Queue the prompt."""
        with self._engine.lock:
            self._engine.metrics.prompt_tokens.inc(self._prompt.size)
            first = SessionBranch(tokens=TokenHistory(self._prompt), key=self._key, adapter=self._adapter)
            self._branches.append(first)
            self._run([Beam(Hypothesis(text=self._detokenizer() if self._stops else None), first)])

    def advance(self) -> None:
        """Continue if all beams have run; an error ends the search and is noted in its result."""
        with self._engine.lock:
            if self.done or not all(beam.request is None or beam.request.finished for beam in self._beams):
                return
            try:
                self._advance()
            except QuireError as error:
                self._end("error", error)
            except BaseException:
                self._end("cancelled")
                raise

    def _advance(self) -> None:
        requests = [beam.request for beam in self._beams if beam.request is not None]
        for request in requests:
            if request.output.error is not None:
                raise request.output.error
        if any(request.output.finish_reason == "cancelled" for request in requests):
            self._end("cancelled")
            return
        if self._arrival is None:
            seat = requests[0].seat
            self._arrival, self._num_cached = seat.arrival, seat.reuse.cached
            first, branches = self._beams[0].branch, self._engine.branches
            branches.share(first, branches.key_of(first), live=True, keep=True)
        following = self._choose()
        if self._is_over([hypothesis for _, hypothesis in following]):
            self.done = True
        else:
            self._run(self._forked(following))

    def _choose(self) -> list[tuple[Beam, Hypothesis]]:
        """Rank the continuations of all beams: finish some hypotheses, and return the others, best
        first, with the beams that they come from."""
        width = self._params.beam_width
        logits_RV = torch.stack([beam.rows[-1] for beam in self._beams])
        # As many that at least ``width`` of them end by no token.
        count = max(2, 1 + len(self._ends)) * width
        ids_RK, logprobs_RK = top_logprobs(logits_RV, min(count, logits_RV.shape[1]))
        if logprobs_RK.isnan().any():
            raise QuireError(f"the logits after {len(self._beams[0].hypothesis.tokens)} tokens hold NaN or +inf")
        totals = [beam.hypothesis.total for beam in self._beams]
        following: list[tuple[Beam, Hypothesis]] = []
        for place, (row, entry) in enumerate(best_continuations(totals, ids_RK, logprobs_RK, count)):
            if place >= width and len(following) == width:
                break
            beam = self._beams[row]
            grown = self._grown(beam.hypothesis, entry)
            if grown.reason is None:
                following += [(beam, grown)] if len(following) < width else []
            elif place < width:
                self._finished.append(grown)
        self._finished.sort(key=self._score, reverse=True)
        del self._finished[width:]
        self._engine.metrics.generation_tokens.inc(len(self._beams))
        return following

    def _grown(self, hypothesis: Hypothesis, entry: RankedLogprob) -> Hypothesis:
        """Return a hypothesis with one token more, and whether and why it ends with that."""
        token, text = entry.token_id, hypothesis.text
        stop: str | int | None = None
        if token in self._ends:
            stop = token
        elif text is not None:
            text = text.fork()
            text.push(token)
            stop = text.stopped_by
        is_last = len(hypothesis.tokens) + 1 == self._params.max_tokens
        reason: FinishReason | None = "stop" if stop is not None else "length" if is_last else None
        return Hypothesis(
            (*hypothesis.tokens, token),
            (*hypothesis.logprobs, TokenLogprobs(entry)),
            hypothesis.total + entry.logprob,
            reason,
            stop,
            text if reason is None else None,
        )

    def _score(self, hypothesis: Hypothesis) -> float:
        return self._worth(hypothesis.total, len(hypothesis.tokens))

    def _worth(self, total: float, length: int) -> float:
        return float(total / length**self._params.length_penalty)

    def _is_over(self, following: Sequence[Hypothesis]) -> bool:
        params = self._params
        if not following:
            return True
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        best = following[0]
        at_the_end = params.early_stopping == "never" and params.length_penalty > 0
        hoped = self._worth(best.total, params.max_tokens if at_the_end else len(best.tokens))
        return hoped <= self._score(self._finished[-1])

    def _forked(self, following: Sequence[tuple[Beam, Hypothesis]]) -> list[Beam]:
        """Return beams for hypotheses. A beam's best takes its sequence over, the others fork
        it."""
        engine, taken, beams = self._engine, set[Beam](), list[Beam]()
        for parent, hypothesis in following:
            branch = parent.branch
            if parent in taken:
                branch = engine.branches.fork(parent.branch, len(parent.branch.tokens))
                self._branches.append(branch)
            taken.add(parent)
            beams.append(Beam(hypothesis, branch))
        for beam in self._beams:
            if beam not in taken:
                engine.forget(beam.branch)
                self._branches.remove(beam.branch)
        return beams

    def _run(self, beams: list[Beam]) -> None:
        self._beams = beams
        for beam in beams:
            tokens = np.append(self._prompt, np.array(beam.hypothesis.tokens, dtype=np.int64))
            rows = beam.rows
            beam.request = self._engine.submit_run(
                beam.branch,
                tokens,
                on_logits=lambda _, rows_RV, rows=rows: rows.append(rows_RV[-1].float().clone()),  # type: ignore[misc]
                arrival=self._arrival,
                uncounted=True,
            )

    def _end(self, reason: FinishReason, error: QuireError | None = None) -> None:
        """Ended before its time: what the beams have counts as it is."""
        self._error = error
        for beam in self._beams:
            found = beam.hypothesis
            if found.tokens:
                self._finished.append(Hypothesis(found.tokens, found.logprobs, found.total, reason))
        self._finished.sort(key=self._score, reverse=True)
        del self._finished[self._params.beam_width :]
        self.done = True

    def release(self) -> None:
        """Give all sequences back, but one for the prefix cache. What is under way is cancelled."""
        with self._engine.lock:
            if not self.done:
                self._end("cancelled")
            engine = self._engine
            idle = (branch for branch in self._branches if branch.seq is not None and not branch.busy)
            kept = next(idle, None) if self._error is None else None
            if kept is not None and engine.cache is not None:
                engine.branches.share(kept, engine.branches.key_of(kept), live=False)
                kept.seq, kept.computed = None, 0
            for branch in self._branches:
                engine.forget(branch)
            self._beams, self._branches = [], []

    def output(self, prompt: str | None = None) -> BeamSearchOutput:
        params, tokenizer = self._params, self._engine.tokenizer
        ids = self._prompt.tolist()
        before = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        sequences = []
        for found in self._finished:
            tokens = list(found.tokens)
            shown = tokens
            if isinstance(found.stop, int) and not params.include_stop_str_in_output:
                shown = tokens[:-1]
            text = self._read(shown)
            sequences.append(
                BeamSearchSequence(
                    tokens=ids + tokens,
                    token_ids=tokens,
                    text=before + text,
                    output_text=text,
                    logprobs=[by_token(entry, tokenizer) for entry in found.logprobs],
                    cum_logprob=found.total,
                    score=self._score(found),
                    finish_reason=found.reason,
                    stop_reason=found.stop,
                )
            )
        return BeamSearchOutput(
            prompt=prompt,
            prompt_token_ids=ids,
            sequences=sequences,
            num_cached_tokens=self._num_cached,
            error=None if self._error is None else str(self._error),
            failure=self._error,
        )

    def _read(self, tokens: Sequence[int]) -> str:
        """Return the text of a continuation."""
        detokenizer = self._detokenizer()
        if detokenizer is None:
            return ""
        for token in tokens:
            detokenizer.push(token)
            if detokenizer.stopped_by is not None:
                break
        detokenizer.finish()
        return detokenizer.text

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        """Return a detokenizer of what follows the prompt; None without a tokenizer."""
        tokenizer, skips = self._engine.tokenizer, self._params.skip_special_tokens
        if tokenizer is None:
            return None
        return IncrementalDetokenizer(
            tokenizer,
            tokenizer.token_bytes.end_of(self._prompt, skip_special_tokens=skips),
            skip_special_tokens=skips,
            stop=self._stops,
            include_stop_str_in_output=self._params.include_stop_str_in_output,
        )


def best_continuations(
    totals: Sequence[float], ids_RK: Tensor, logprobs_RK: Tensor, count: int
) -> list[tuple[int, RankedLogprob]]:
    """Return the (at most ``count``) continuations with the largest sums: row, token, its rank.

    ``totals``: R sums of the hypotheses so far. ``ids_RK`` int64, ``logprobs_RK`` float32: tokens
    of each row by rank, without NaN. Sums are float64; among equals the lower row comes first, then
    the better rank. One of -inf is none.
    """
    logprobs = logprobs_RK.cpu()
    num_ranks = logprobs.shape[1]
    sums_M = (torch.tensor(totals, dtype=torch.float64)[:, None] + logprobs.double()).flatten()
    worst = sums_M.topk(min(count, len(sums_M))).values[-1]
    # All that are not worse than the last winner, since topk leaves open which of equals it takes.
    places_N = ((sums_M >= worst) & (sums_M > -torch.inf)).nonzero()[:, 0]
    places_N = places_N[sums_M[places_N].argsort(descending=True, stable=True)][:count]
    columns = (ids_RK.cpu().flatten()[places_N], logprobs.flatten()[places_N])
    return [
        (place // num_ranks, RankedLogprob(token, logprob, place % num_ranks + 1))
        for place, token, logprob in zip(places_N.tolist(), *(column.tolist() for column in columns), strict=True)
    ]


def search(engine: Engine, searches: Sequence[BeamSearch], on_step: Callable[[], None] | None = None) -> None:
    """Run searches to their ends, all beams of all of them together; an interrupt cancels them."""
    try:
        with engine.lock:
            for one in searches:
                one.start()
        while True:
            for one in searches:
                one.advance()
            if on_step is not None:
                on_step()
            if all(one.done for one in searches):
                return
            engine.step()
            check()
    finally:
        for one in searches:
            one.release()
