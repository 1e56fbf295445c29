"""``LlmExecutor``: LiteRT-LM's face of an ``Executor``, which changes KV caches in place.

Its only own state is the generators of its sampling.

Letters: B rows of a cache; S tokens of the longest row; N steps; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import Cancelled, InvalidArgument, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.base.signatures import checks_arguments
from quire.base.token_history import Ids
from quire.branches.extension import NOTHING
from quire.branches.row_media import media_of_rows
from quire.contracts.executor import CacheLike, ExecutorInputs, ModelAssets, RequestSampling
from quire.executor.arguments import NO_MASKS, require_adapter, resolve_cache, to_ids
from quire.executor.cache import KVCache
from quire.executor.drafting import Drafting, sample_with_drafts
from quire.executor.executor import Executor
from quire.executor.executor_types import require_whole
from quire.executor.forward_packing import Piece, stacked
from quire.executor.handle import Handle
from quire.executor.request_sampling import (
    Draw,
    ParamsSampling,
    check_params,
    check_steps,
    drawing,
    known_ids,
)
from quire.executor.row_extension import RowExtension, extensions, packed, require_vocabulary
from quire.executor.running_calls import Operation, Stopwatch
from quire.executor.transaction import Transaction
from quire.kv.sequences import check_integer

GREEDY = SamplingParams(temperature=0.0)

Sampling = SamplingParams | RequestSampling


@checks_arguments()
class LlmExecutor:
    """See ``LlmExecutorInterface``. Its caches belong to ``executor`` and can be used there.

    ``sampling``: default sampling of ``sample_tokens``; None: greedy. Row b of a batch draws from
    generator (seed, b), which lives as long as this object. ``kv_increment_size``: least number of
    token slots by which a full dynamic cache grows in ``step``. ``prefill_chunk_size``: most tokens
    of a forward; <= 0: all at once; None: the executor's.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        sampling: SamplingParams = GREEDY,
        kv_increment_size: int = 16,
        prefill_chunk_size: int | None = None,
    ) -> None:
        self.executor = executor
        self.sampling = check_params(sampling)
        self.kv_increment_size = check_integer(kv_increment_size, "kv_increment_size", 0)
        self.prefill_chunk_size = executor.prefill_chunk_size if prefill_chunk_size is None else prefill_chunk_size
        self._entropy = torch.Generator()
        self._entropy.seed()
        self._samplings: list[ParamsSampling] = []

    def create_kv_cache(self, *, batch_size: int = 1, capacity: int | None = None, dynamic: bool = False) -> KVCache:
        """See ``ExecutorBase``."""
        return self.executor.create_kv_cache(batch_size=batch_size, capacity=capacity, dynamic=dynamic)

    def load_lora(self, assets: ModelAssets) -> int:
        """See ``ExecutorBase``."""
        return self.executor.load_lora(assets)

    def unload_lora(self, lora_id: int) -> None:
        """See ``ExecutorBase``."""
        self.executor.unload_lora(lora_id)

    def cancel(self) -> None:
        """See ``ExecutorBase``."""
        self.executor.cancel()

    def prefill(self, inputs: ExecutorInputs, kv_cache: CacheLike, lora_id: int | None = None) -> None:
        """See ``LlmExecutorInterface``."""
        with self.executor.operation("prefill") as operation:
            if inputs.text is None or inputs.text.token_ids.numel() == 0:
                raise InvalidArgument("Prefill token ids must be non-empty.")
            tokens = [to_ids(row) for row in inputs.text.token_rows()]
            cache, starts = self._begin(inputs, kv_cache, lora_id, tokens)
            pool = self.executor.pool
            media = media_of_rows(inputs, tokens, self.executor.modalities, pool.facts.hidden_size)
            if pool.facts.recurrent_ids and any(found is not None and found.blocks for found in media):
                raise Unsupported(f"vision bidirectional: {NO_MASKS}")
            watch = Stopwatch(pool.facts.device)
            counts = [ids.size for ids in tokens]
            parts = extensions(cache, starts, counts, adapter=lora_id)
            forwards = packed(pool, parts, starts, counts, self.prefill_chunk_size)
            with Transaction(pool, parts, operation, several=True, forwards=forwards) as work:
                try:
                    work.run(tokens, ["none"] * len(tokens), budget=self.prefill_chunk_size, media=media)
                except Cancelled:
                    work.commit()
                    raise
                work.commit()
            for row in cache.rows:
                cache.mark(row)
            self.executor.operation_metrics.record_prefill(len(tokens), watch.seconds())

    def step(self, inputs: ExecutorInputs, kv_cache: CacheLike, lora_id: int | None = None) -> Tensor:
        """See ``LlmExecutorInterface``."""
        with self.executor.operation("step") as operation:
            tokens, cache, parts = self._decode_parts(operation, inputs, kv_cache, lora_id, 1)
            watch = Stopwatch(self.executor.pool.facts.device)
            with Transaction(self.executor.pool, parts, operation) as work:
                rows = work.run(tokens, ["last"] * len(tokens))
                self._commit(work, cache)
            logits_B1V = stacked([row.logits_RV for row in rows])
            self.executor.operation_metrics.record_decode(len(tokens), watch.seconds(), len(tokens))
            return logits_B1V

    def sample_tokens(
        self,
        num_steps: int,
        inputs: ExecutorInputs,
        kv_cache: CacheLike,
        lora_id: int | None = None,
        *,
        sampling: Sampling | None = None,
    ) -> list[int]:
        """See ``LlmExecutorInterface``. ``sampling`` may be ``SamplingParams`` of one call. More
        steps than a ``max_tokens`` that is not the default are refused."""
        if isinstance(kv_cache, KVCache | Handle) and (rows := len(kv_cache.lengths)) != 1:
            raise InvalidArgument(
                f"sample_tokens takes a cache of one row, and this one has {rows}; use sample_tokens_batch"
            )
        choices = None if sampling is None else [sampling]
        return self._sample("sample_tokens", num_steps, inputs, kv_cache, lora_id, choices)[0]

    def sample_tokens_batch(
        self,
        num_steps: int,
        inputs: ExecutorInputs,
        kv_cache: CacheLike,
        lora_id: int | None = None,
        *,
        sampling: Sequence[Sampling] | None = None,
    ) -> list[list[int]]:
        """See ``LlmExecutorInterface``. A cancelled call reports the ids of all rows, in order."""
        return self._sample("sample_tokens_batch", num_steps, inputs, kv_cache, lora_id, sampling)

    def _sample(
        self,
        verb: str,
        num_steps: int,
        inputs: ExecutorInputs,
        kv_cache: CacheLike,
        lora_id: int | None,
        sampling: Sequence[Sampling] | None,
    ) -> list[list[int]]:
        with self.executor.operation(verb) as operation:
            num_steps = check_integer(num_steps, f"{verb}: num_steps", 0)
            tokens, cache, parts = self._decode_parts(operation, inputs, kv_cache, lora_id, num_steps)
            for choice in [self.sampling] if sampling is None else sampling:
                if isinstance(choice, SamplingParams):
                    check_steps(verb, num_steps, choice)
            if num_steps == 0:
                return [[] for _ in tokens]
            draws = self._draws(cache, parts, tokens, sampling)
            drafting = self.executor.drafting
            if drafting is not None and not any(part.rewinds for part in parts):
                return self._drafted(drafting, num_steps, tokens, cache, lora_id, draws, operation)
            steps = ([Piece(row, step, step + 1) for row in range(len(tokens))] for step in range(num_steps))
            with Transaction(self.executor.pool, parts, operation, several=True, forwards=steps) as work:
                return self._steps(num_steps, tokens, work, cache, draws)

    def _steps(
        self,
        num_steps: int,
        tokens: Sequence[Ids],
        work: Transaction,
        cache: KVCache,
        draws: Sequence[Draw],
    ) -> list[list[int]]:
        """Run and draw, step by step; a cancelled call keeps its complete steps."""
        drawn: list[list[int]] = [[] for _ in tokens]
        seconds: list[float] = []
        for _ in range(num_steps):
            watch = Stopwatch(self.executor.pool.facts.device)
            try:
                rows = work.run(tokens, ["last"] * len(tokens))
            except Cancelled:
                self._commit(work, cache)
                raise Cancelled(
                    f"{work.operation.verb} was cancelled after {len(seconds)} of {num_steps} steps",
                    [token for row in drawn for token in row],
                ) from None
            for row, draw, output in zip(drawn, draws, rows, strict=True):
                row.append(draw(output.logits_RV))
            tokens = [np.array(row[-1:], dtype=np.int64) for row in drawn]
            seconds.append(watch.seconds())
        self._commit(work, cache)
        for taken in seconds:
            self.executor.operation_metrics.record_decode(len(tokens), taken, len(tokens))
        return drawn

    def _drafted(
        self,
        drafting: Drafting,
        num_steps: int,
        tokens: Sequence[Ids],
        cache: KVCache,
        lora_id: int | None,
        draws: Sequence[Draw],
        operation: Operation,
    ) -> list[list[int]]:
        """Run and draw, several tokens in a forward where drafts are the tokens drawn."""

        def make(rows: Sequence[int], counts: Sequence[int]) -> list[RowExtension]:
            wanted = dict(zip(rows, counts, strict=True))
            sizes = [wanted.get(row, 0) for row in range(cache.batch_size)]
            parts = extensions(cache, cache.lengths, sizes, adapter=lora_id)
            return [parts[row] for row in rows]

        record, before = self.executor.operation_metrics.record_decode, cache.capacity
        try:
            return sample_with_drafts(drafting, num_steps, tokens, cache, make, draws, operation, record)
        finally:
            self._grow(cache, before)

    def _begin(
        self, inputs: ExecutorInputs, kv_cache: CacheLike, lora_id: int | None, tokens: Sequence[Ids]
    ) -> tuple[KVCache, tuple[int, ...]]:
        """Check cache, adapter, ids and positions; return the cache and the start of each of its
        rows."""
        cache, lengths = resolve_cache(self.executor.pool, kv_cache)
        require_adapter(self.executor.pool, lora_id)
        if len(tokens) != cache.batch_size:
            raise InvalidArgument(f"token ids have {len(tokens)} rows, and the KV cache has {cache.batch_size}")
        for ids in tokens:
            # Inputs refuse placeholders without data when they are built.
            require_vocabulary(ids, self.executor.pool.facts.vocab_size, "token_ids", placeholders=True)
        return cache, inputs.start_positions(lengths)

    def _decode_parts(
        self, operation: Operation, inputs: ExecutorInputs, kv_cache: CacheLike, lora_id: int | None, count: int
    ) -> tuple[list[Ids], KVCache, list[RowExtension]]:
        if inputs.vision is not None or inputs.audio is not None:
            raise InvalidArgument("a decode step takes token ids only; give vision and audio data to prefill")
        if inputs.text is None or inputs.text.token_ids.shape[1] != 1:
            raise InvalidArgument("Expect 1 token id for decode.")
        tokens = [to_ids(row) for row in inputs.text.token_rows()]
        cache, starts = self._begin(inputs, kv_cache, lora_id, tokens)
        require_whole(self.executor.executor_type, [cache], operation.verb)
        return tokens, cache, extensions(cache, starts, [count] * len(tokens), adapter=lora_id)

    def _commit(self, work: Transaction, cache: KVCache) -> None:
        """Commit; grow a full dynamic cache by ``kv_increment_size`` slots, if the model allows."""
        before = cache.capacity
        work.commit()
        self._grow(cache, before)

    def _grow(self, cache: KVCache, before: int) -> None:
        """Grow a dynamic cache that had ``before`` slots and has more."""
        if cache.capacity > before:
            roomy = min(before + self.kv_increment_size, self.executor.pool.facts.max_model_len)
            cache.capacity = max(cache.capacity, roomy)

    def _draws(
        self, cache: KVCache, parts: Sequence[RowExtension], tokens: Sequence[Ids], sampling: Sequence[Sampling] | None
    ) -> list[Draw]:
        if sampling is not None and len(sampling) != len(parts):
            raise InvalidArgument(f"sampling has {len(sampling)} entries for {len(parts)} rows; give one per row")
        draws: list[Draw] = []
        for index, part in enumerate(parts):
            choice = self.sampling if sampling is None else sampling[index]
            if not isinstance(choice, SamplingParams):
                draws.append(drawing(choice))
                continue
            history = NOTHING
            if choice.repetition_penalty != 1.0:
                past = np.concatenate((known_ids(cache.token_ids(index))[: part.start], tokens[index]))
                history = past[past >= 0]  # placeholders of images have negative ids
            own = (
                self._own_sampling(index, history) if sampling is None else self._make_sampling(choice, index, history)
            )
            draws.append(own.draw)
        return draws

    def _make_sampling(self, params: SamplingParams, row: int, history: Ids = NOTHING) -> ParamsSampling:
        size = self.executor.pool.facts.vocab_size
        return ParamsSampling(params, history, vocab_size=size, index=row, entropy=self._entropy)

    def _own_sampling(self, row: int, history: Ids) -> ParamsSampling:
        """Return the default sampling of a row: with its generator continued and its history
        replaced."""
        while len(self._samplings) <= row:
            self._samplings.append(self._make_sampling(self.sampling, len(self._samplings)))
        self._samplings[row].restart(history)
        return self._samplings[row]
