"""From finished (or running) sequences to what the user gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.blend.chunk_matching import LEAST
from quire.branches.history import Ids
from quire.engine.scheduled_request import ScheduledRequest
from quire.engine.sequence_request import SequenceRequest
from quire.engine.tokenizer import Tokenizer
from quire.ops.sampled_tokens import TokenLogprobs
from quire.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Reuse, WarmedSegment


def request_output(
    samples: Sequence[SequenceRequest], tokenizer: Tokenizer | None, prompt: str | None = None
) -> RequestOutput:
    """Return the output of one prompt with all of its samples."""
    first = samples[0]
    stamps = [sample.first_token for sample in samples if sample.first_token is not None]
    ends = [sample.finished_at for sample in samples if sample.finished_at is not None]
    scored = first.prompt_logprobs
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.work.tokens.media.as_given(first.work.tokens.ids[: first.num_prompt]),
        outputs=[completion(sample, tokenizer) for sample in samples if sample.params is not None],
        prompt_logprobs=[None, *(by_token(entry, tokenizer) for entry in scored.entries)]
        if scored is not None and scored.complete
        else None,
        finished=all(sample.finished for sample in samples),
        num_cached_tokens=first.work.num_cached,
        num_replayed_tokens=first.work.num_replayed,
        cache_note=cache_note(first),
        reuse=reuse_of(first.work, tokenizer),
        hints=() if first.hints is None else tuple(first.hints.results),
        blend=None if first.work.blend is None else first.work.blend.report(first.work),
        metrics=RequestMetrics(
            arrival_time=first.arrival,
            first_token_time=min(stamps, default=None),
            finished_time=max(ends, default=None),
            num_preemptions=sum(sample.work.num_preemptions for sample in samples),
        ),
    )


def warmed(submitted: Sequence[tuple[int, Sequence[SequenceRequest]]]) -> list[WarmedSegment]:
    """Return what is kept of segments, by ``RequestPreparation.submit_warm``. Raise the error of a
    request that failed."""
    found = []
    for tokens, requests in submitted:
        for request in requests:
            if request.error is not None:
                raise request.error
        computed = sum(request.num_kept for request in requests)
        everything = tokens >= LEAST and all(request.num_kept for request in requests)
        kept = tokens if everything else computed
        found.append(WarmedSegment(tokens=tokens, kept=kept, computed=computed))
    return found


def prefix_output(request: SequenceRequest, tokenizer: Tokenizer | None, prompt: str | None = None) -> RequestOutput:
    """Return the output of a run for the prefix cache. Its prompt is what the pool holds of it.
    Raise the run's error."""
    if request.error is not None:
        raise request.error
    output, work = request_output([request], tokenizer, prompt), request.work
    held = output.prompt_token_ids[: max(work.num_cached, work.computed)]
    return replace(output, prompt_token_ids=held, finished=request.succeeded)


def cache_note(request: SequenceRequest) -> str:
    """Return why not all known tokens of a prompt were reused; empty if they were."""
    work = request.work
    if not work.num_replayed:
        return ""
    known, kept = work.num_cached + work.num_replayed, work.num_cached
    return f"{known} tokens of the prompt were known and the first {kept} reused: {request.forgets.format(known, kept)}"


def reuse_of(work: ScheduledRequest, tokenizer: Tokenizer | None) -> Reuse:
    """Return what was reused at a request's first admission, and what was missed."""
    note = work.reuse_note
    quote = ""
    if note.there is not None and note.missed_at is not None:
        here = work.tokens.ids[note.missed_at : note.missed_at + note.there.size]
        quote = f" ({_quoted(here, tokenizer)} here, {_quoted(note.there, tokenizer)} there)"
    return Reuse(
        cached=work.num_cached,
        by_tier=work.cached_by_tier,
        replayed=work.num_replayed,
        miss=note.missed,
        missed_at=note.missed_at,
        quote=quote,
    )


def _quoted(ids: Ids, tokenizer: Tokenizer | None) -> str:
    spoken = ids[ids >= 0].tolist()  # an image has no text
    return str(spoken) if tokenizer is None else repr(tokenizer.decode(spoken, skip_special_tokens=False))


def completion(request: SequenceRequest, tokenizer: Tokenizer | None) -> CompletionOutput:
    """Return one sample."""
    wanted = request.params is not None and request.params.logprobs is not None
    return CompletionOutput(
        index=request.index,
        text=request.text,
        token_ids=list(request.output_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        cumulative_logprob=sum(entry.chosen.logprob for entry in request.logprobs) if wanted else None,
        logprobs=[by_token(entry, tokenizer) for entry in request.logprobs] if wanted else None,
        error=str(request.error) if request.error is not None else None,
        failure=request.error,
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
