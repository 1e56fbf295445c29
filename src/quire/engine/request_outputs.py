"""From finished (or running) sequences to what the user gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.base.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Reuse, WarmedSegment
from quire.base.speculation import SpeculationCounts
from quire.base.token_history import Ids
from quire.blend.chunk_matching import LEAST
from quire.engine.request import Request
from quire.sampling.sampled_tokens import TokenLogprobs
from quire.text.tokenizer import Tokenizer


def request_output(samples: Sequence[Request], tokenizer: Tokenizer | None, prompt: str | None = None) -> RequestOutput:
    first = samples[0]
    stamps = [sample.output.first_token for sample in samples if sample.output.first_token is not None]
    ends = [sample.output.finished_at for sample in samples if sample.output.finished_at is not None]
    scored = first.output.prompt_logprobs
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.branch.tokens.media.as_given(first.branch.tokens.ids[: first.asked.num_prompt]),
        outputs=[completion(sample, tokenizer) for sample in samples if sample.params is not None],
        prompt_logprobs=[None, *(by_token(entry, tokenizer) for entry in scored.entries)]
        if scored is not None and scored.complete
        else None,
        finished=all(sample.finished for sample in samples),
        num_cached_tokens=first.seat.reuse.cached,
        num_replayed_tokens=first.seat.reuse.replayed,
        cache_note=cache_note(first),
        reuse=reuse_of(first, tokenizer),
        hints=() if first.asked.hints is None else tuple(first.asked.hints.results),
        blend=None if first.branch.blend is None else first.branch.blend.report(first.branch),
        speculation=_speculation(samples),
        metrics=RequestMetrics(
            arrival_time=first.asked.arrival,
            first_token_time=min(stamps, default=None),
            finished_time=max(ends, default=None),
            num_preemptions=sum(sample.seat.num_preemptions for sample in samples),
        ),
    )


def _speculation(samples: Sequence[Request]) -> SpeculationCounts | None:
    counts = [sample.output.speculation for sample in samples if sample.output.speculation is not None]
    return sum(counts[1:], counts[0]) if counts else None


def warmed(submitted: Sequence[tuple[int, Sequence[Request]]]) -> list[WarmedSegment]:
    """Return the counts of tokens kept of segments, submitted by
    ``PromptRequests.prepare_warm``. Raise the error of a request that failed."""
    found = []
    for tokens, requests in submitted:
        for request in requests:
            if request.output.error is not None:
                raise request.output.error
        computed = sum(request.output.num_kept for request in requests)
        everything = tokens >= LEAST and all(request.output.num_kept for request in requests)
        kept = tokens if everything else computed
        found.append(WarmedSegment(tokens=tokens, kept=kept, computed=computed))
    return found


def prefix_output(request: Request, tokenizer: Tokenizer | None, prompt: str | None = None) -> RequestOutput:
    """Return the output of a run for the prefix cache. Its prompt is what the pool holds of it.
    Raise the run's error."""
    if request.output.error is not None:
        raise request.output.error
    output = request_output([request], tokenizer, prompt)
    held = output.prompt_token_ids[: max(request.seat.reuse.cached, request.branch.computed)]
    return replace(output, prompt_token_ids=held, finished=request.succeeded)


def cache_note(request: Request) -> str:
    """Return the reason for known prompt tokens that were not reused; empty if all were."""
    reuse = request.seat.reuse
    if not reuse.replayed:
        return ""
    known, kept = reuse.cached + reuse.replayed, reuse.cached
    return f"{known} tokens of the prompt were known and the first {kept} reused: {request.asked.forgets.format(known, kept)}"


def reuse_of(request: Request, tokenizer: Tokenizer | None) -> Reuse:
    """Return the reuse at a request's first admission, and its miss."""
    note = request.seat.reuse
    quote = ""
    if note.there is not None and note.missed_at is not None:
        here = request.branch.tokens.ids[note.missed_at : note.missed_at + note.there.size]
        quote = f" ({_quoted(here, tokenizer)} here, {_quoted(note.there, tokenizer)} there)"
    return Reuse(
        cached=note.cached,
        by_tier=note.cached_by_tier,
        replayed=note.replayed,
        miss=note.missed,
        missed_at=note.missed_at,
        quote=quote,
    )


def _quoted(ids: Ids, tokenizer: Tokenizer | None) -> str:
    spoken = ids[ids >= 0].tolist()  # an image has no text
    return str(spoken) if tokenizer is None else repr(tokenizer.decode(spoken, skip_special_tokens=False))


def completion(request: Request, tokenizer: Tokenizer | None) -> CompletionOutput:
    wanted = request.params is not None and request.params.logprobs is not None
    return CompletionOutput(
        index=request.asked.index,
        text=request.output.text,
        token_ids=list(request.output.token_ids),
        finish_reason=request.output.finish_reason,
        stop_reason=request.output.stop_reason,
        cumulative_logprob=sum(entry.chosen.logprob for entry in request.output.logprobs) if wanted else None,
        logprobs=[by_token(entry, tokenizer) for entry in request.output.logprobs] if wanted else None,
        error=str(request.output.error) if request.output.error is not None else None,
        failure=request.output.error,
    )


def by_token(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return the chosen token first, then the most probable ones."""
    return {
        found.token_id: Logprob(
            logprob=found.logprob,
            rank=found.rank,
            decoded_token=None if tokenizer is None else tokenizer.token_text(found.token_id),
        )
        for found in (entry.chosen, *entry.top)
    }
