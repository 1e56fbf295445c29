"""Answers of ``/completion`` and ``/infill``, in llama-server's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.async_llm import SampleDelta
from quire.base.errors import Cancelled
from quire.base.outputs import FinishReason, RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.server.http.context import Context
from quire.server.http.events import Chunk, Chunks, EventStream
from quire.server.http.foreign_fields import ORDER
from quire.server.llamacpp.body import RANDOM_SEED, LlamaBody
from quire.server.openai.generation import Source
from quire.server.openai.logprobs import chat_logprobs
from quire.server.openai.replies import Reply, timings_of


class BareEventStream(EventStream):
    """A stream of events without a mark at its end: the last one has ``stop``."""

    last = b""


@dataclass(slots=True)
class _Sample:
    """One sample so far."""

    tokens: int = 0
    has_new_line: bool = False
    entries: list[dict[str, Any]] = field(default_factory=list)


class LlamaReply(Reply):
    """An object for each sample. Sample s of prompt p has the index p * n + s."""

    prefix = "cmpl"
    object = chunk_object = "completion"
    stream_class = BareEventStream
    cached: int | None = None
    """Tokens of the prompt whose state was in the slot in which it runs; None: in no slot."""

    def __init__(
        self,
        request: Any,
        context: Context,
        body: LlamaBody,
        given: Mapping[str, Any],
        params: SamplingParams,
        prompts: Sequence[Any],
    ) -> None:
        super().__init__(request, context, body)
        self._body, self._params = body, params
        self._several = len(prompts) * params.n > 1
        self._settings = settings_of(params, context, body)
        self._samples: dict[int, _Sample] = {}

    # -- pieces ------------------------------------------------------------------------------------

    def choice(self, number: int, delta: SampleDelta) -> dict[str, Any]:
        sample = self._added(number, delta)
        tokens = delta.token_ids if self._body.return_tokens else []
        return {**self._piece(number, delta, tokens), **self._end(number, delta, sample, self.outputs[number])}

    def chunk_choices(self, number: int, delta: SampleDelta) -> list[dict[str, Any]]:
        sample = self._added(number, delta)
        found = []
        if delta.token_ids or delta.text:
            found.append({**self._piece(number, delta, delta.token_ids), **self._probabilities(sample.entries)})
            if self._body.timings_per_token:
                found[-1]["timings"] = self._sample_timings(number, sample.tokens, self.outputs[number])
        sample.entries = []
        if delta.finish_reason is not None:
            found.append({"end": delta, "number": number})
        return found

    def _added(self, number: int, delta: SampleDelta) -> _Sample:
        sample = self._samples.setdefault(self._index(number, delta), _Sample())
        sample.tokens += self.count(delta)
        sample.has_new_line |= "\n" in delta.text
        if self._params.logprobs is not None:
            listed = chat_logprobs(delta.token_ids, delta.logprobs or [], self._params.logprobs, self.tokenizer)
            for token_id, entry, found in zip(delta.token_ids, delta.logprobs or [], listed["content"], strict=True):
                best = sorted(entry, key=lambda one: entry[one].rank)
                top = [{"id": one, **top} for one, top in zip(best, found["top_logprobs"], strict=False)]
                sample.entries.append({"id": token_id, **found, "top_logprobs": top})
        return sample

    def _index(self, number: int, delta: SampleDelta) -> int:
        return number * self._params.n + delta.index

    def _piece(self, number: int, delta: SampleDelta, tokens: Sequence[int]) -> dict[str, Any]:
        return {
            "index": self._index(number, delta),
            "content": delta.text,
            "tokens": list(tokens),
            "id_slot": -1 if self._body.slot is None else self._body.slot,
            "stop": False,
            "tokens_predicted": self._samples[self._index(number, delta)].tokens,
            "tokens_evaluated": len(self.outputs[number].prompt_token_ids),
        }

    def _end(self, number: int, delta: SampleDelta, sample: _Sample, output: RequestOutput) -> dict[str, Any]:
        kind, word = stop_of(delta.finish_reason, delta.stop_reason)
        ids = output.prompt_token_ids
        return {
            "stop": True,
            "model": self.model,
            "generation_settings": self._settings,
            "prompt": "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=False),
            "has_new_line": sample.has_new_line,
            "truncated": delta.stop_reason == "context",
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": self._cached(output),
            "timings": self._sample_timings(number, sample.tokens, output),
            **self._probabilities(sample.entries),
        }

    def _probabilities(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {} if self._params.logprobs is None else {"completion_probabilities": list(entries)}

    def _cached(self, output: RequestOutput) -> int:
        return output.num_cached_tokens if self.cached is None else self.cached

    def _sample_timings(self, number: int, tokens: int, output: RequestOutput) -> dict[str, Any]:
        return timings_of(output, tokens, cached=self._cached(output), began=self.began)

    # -- answers -----------------------------------------------------------------------------------

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Any:
        found = [self._chosen(choice) for choice in choices]
        return found if self._several else found[0]

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        async with aclosing(super().chunks(sources)) as stream:
            async for chunk in stream:
                if (progress := chunk.get("prompt_progress")) is not None:
                    yield {"index": 0, "content": "", "tokens": [], "stop": False, "prompt_progress": progress}
                for choice in chunk["choices"]:
                    if (delta := choice.get("end")) is None:
                        yield choice
                        continue
                    number = choice["number"]
                    sample, output = self._samples[self._index(number, delta)], sources[number].output
                    last = {**self._piece(number, delta, []), "content": ""}
                    yield self._chosen({**last, **self._end(number, delta, sample, output)})

    def _chosen(self, answer: Mapping[str, Any]) -> Chunk:
        """Return the fields of an answer that ``response_fields`` name."""
        names = self._body.response_fields
        if not names:
            return answer
        found: dict[str, Any] = {}
        for name in names:
            value: Any = answer
            for part in name.split("/"):
                value = value[part] if isinstance(value, Mapping) and part in value else None
            if value is not None:
                found[name] = value
        return found


def stop_of(reason: FinishReason | None, stop_reason: str | int | None) -> tuple[str, str]:
    """Return a text's kind of end, and the string that ended it."""
    if reason == "cancelled":
        raise Cancelled("the request was cancelled")
    if reason == "stop":
        return ("word", stop_reason) if isinstance(stop_reason, str) else ("eos", "")
    return ("none" if reason is None else "limit"), ""


def settings_of(params: SamplingParams, context: Context, body: LlamaBody | None = None) -> dict[str, Any]:
    """Return the parameters of a request under llama.cpp's names, with those that are off here."""
    grammar = params.grammar.grammar if params.grammar is not None else None
    limit = -1 if params.max_tokens is None else params.max_tokens
    if body is not None and body.no_answer:
        limit = 0
    return {
        "n_predict": limit,
        "max_tokens": limit,
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": max(0, params.top_k),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop_strings),
        "ignore_eos": params.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.token_bias.items()],
        "grammar": grammar or "",
        "n_probs": params.logprobs or 0,
        "stream": bool(body is not None and body.stream),
        "timings_per_token": bool(body is not None and body.timings_per_token),
        "samplers": list(ORDER),
        "n_keep": 0,
        "n_discard": 0,
        "min_keep": 0,
        "mirostat": 0,
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "dynatemp_range": 0.0,
        "top_n_sigma": -1.0,
        "post_sampling_probs": False,
        "lora": [],
        "n_ctx": context.longest,
    }
