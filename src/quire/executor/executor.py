"""``Executor``: all verbs of ``ModelExecutor`` over one runner.

A verb checks its arguments (``arguments``), runs a ``Transaction`` and records what it took. Nothing that a later call
depends on is kept here: state lives in KV caches.

Letters: B batch rows; S tokens of a row with padding; V vocabulary; k draft tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.contracts.executor import (
    CacheLike,
    DecodeInput,
    DecodeOutput,
    ExecutorCapabilities,
    ExecutorInfo,
    ExecutorMetrics,
    ExecutorState,
    ExecutorStatus,
    ModelAssets,
    PrefillInput,
    PrefillOutput,
    RequestSampling,
    SpeculativeOutput,
)
from quire.errors import Cancelled, FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.executor import reports, speculation, warmup
from quire.executor.arguments import (
    NO_ADAPTERS,
    Request,
    check_positions,
    decode_request,
    naming_item,
    prefill_request,
    require_distinct,
    resolve_cache,
)
from quire.executor.cache import KVCache
from quire.executor.handle import Handle, handle_of
from quire.executor.operations import Operation, Operations, Stopwatch
from quire.executor.pool import CachePool, Identity
from quire.executor.transaction import Extension, Transaction, extensions, require_vocabulary
from quire.kv.sequences import check_integer
from quire.metrics import OperationMetrics
from quire.runner.local import Runner
from quire.types import LogitsWanted


class Executor:
    """See ``ModelExecutor``; ``LlmExecutor`` is the other face of the same object.

    ``identity``: which model the runner has. ``max_model_len``: tokens of a row at most, None: the model's.
    ``max_batch_size``: rows of a call at most. ``prefill_chunk_size``: tokens of a forward at most, for prompts; <= 0: all
    at once. ``lock``: the one of whoever else drives the same runner (a serving engine); None: nobody does.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        identity: Identity,
        max_model_len: int | None = None,
        max_batch_size: int = 64,
        prefill_chunk_size: int = 2048,
        lock: threading.RLock | None = None,
    ) -> None:
        limit = runner.model.max_position
        max_model_len = limit if max_model_len is None else check_integer(max_model_len, "max_model_len", 1)
        if max_model_len > limit:
            raise InvalidArgument(f"max_model_len {max_model_len} is beyond the model's {limit} positions")
        self.max_batch_size = check_integer(max_batch_size, "max_batch_size", 1)
        self.prefill_chunk_size = prefill_chunk_size
        self.lock = threading.RLock() if lock is None else lock
        self.pool = CachePool(runner, identity, max_model_len, self.lock)
        self._facts = reports.ModelFacts.of(runner)
        self._operations = Operations()
        self._metrics = OperationMetrics(self.max_batch_size)
        self._measured: warmup.Measured | None = None
        self._closed = False

    # -- KV caches -------------------------------------------------------------------------------------------

    def create_kv_cache(self, *, batch_size: int = 1, capacity: int | None = None, dynamic: bool = False) -> KVCache:
        """See ``ExecutorBase``. ``InvalidArgument`` also for more rows than ``max_batch_size``."""
        batch_size = check_integer(batch_size, "batch_size", 1)
        self._require_batch(batch_size, "create_kv_cache")
        if capacity is None:
            capacity = 1 if dynamic else self.pool.max_model_len
        capacity = check_integer(capacity, "capacity", 1)
        if capacity > self.pool.max_model_len:
            raise ResourceExhausted(f"capacity {capacity} is beyond the model's maximum of {self.pool.max_model_len}")
        with self.operation("create_kv_cache"):
            return KVCache.create(self.pool, batch_size, capacity, bool(dynamic))

    def truncate_kv(self, handle: CacheLike, new_len: int) -> Handle:
        """See ``ModelExecutor``. All rows are cut to ``new_len``, which none may be shorter than."""
        with self.operation("truncate_kv"):
            cache, _ = resolve_cache(self.pool, handle)
            new_len = check_integer(new_len, "truncate_kv: new_len", 0)
            if new_len > min(cache.lengths):
                raise InvalidArgument(
                    f"truncate_kv: new_len {new_len} is beyond the cache's length {min(cache.lengths)}"
                )
            cache.truncate([new_len] * cache.batch_size)
            return handle_of(cache)

    def release_cache(self, cache_id: str) -> None:
        """See ``ModelExecutor``."""
        with self.lock:
            cache = self.pool.caches.get(cache_id) if isinstance(cache_id, str) else None
            if cache is not None:
                cache.release()

    # -- running ---------------------------------------------------------------------------------------------

    def prefill(self, input: PrefillInput) -> PrefillOutput:
        """See ``ModelExecutor``."""
        with self.operation("prefill") as operation:
            request = prefill_request(self.pool, input)
            return self._prefill([request], [input.logits], operation, keep_chunks=True)[0]

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """See ``ModelExecutor``. One forward, or several if there are more than ``prefill_chunk_size`` tokens."""
        with self.operation("batch_prefill") as operation:
            requests = []
            for index, item in enumerate(inputs):
                with naming_item("batch_prefill", index):
                    requests.append(prefill_request(self.pool, item))
            require_distinct(requests, "batch_prefill")
            if not requests:
                return []
            return self._prefill(requests, [item.logits for item in inputs], operation, keep_chunks=False)

    def decode(self, input: DecodeInput) -> DecodeOutput:
        """See ``ModelExecutor``."""
        with self.operation("decode") as operation:
            return self._decode([decode_request(self.pool, input)], operation)[0]

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """See ``ModelExecutor``."""
        with self.operation("batch_decode") as operation:
            requests = []
            for index, item in enumerate(inputs):
                with naming_item("batch_decode", index):
                    requests.append(decode_request(self.pool, item))
            require_distinct(requests, "batch_decode")
            return self._decode(requests, operation) if requests else []

    def forward(self, input_ids: Tensor) -> Tensor:
        """See ``ModelExecutor``. Counts as a prefill of each row."""
        with self.operation("forward") as operation:
            given = PrefillInput(input_ids=input_ids)
            if input_ids.dim() != 2:
                raise InvalidArgument(f"forward takes ids [batch, tokens]; got shape {list(input_ids.shape)}")
            output = self._prefill([prefill_request(self.pool, given)], ["all"], operation, keep_chunks=False)[0]
            self.release_cache(output.kv_cache.cache_id)
            assert output.logits is not None
            return output.logits

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """See ``ModelExecutor``."""
        with self.operation("forward_verify") as operation:
            requests = []
            for index, item in enumerate(inputs):
                with naming_item("forward_verify", index):
                    requests.append(self._verify_request(item, inputs[0], index))
            if not requests:
                return []
            cache, start = requests[0].cache, requests[0].starts[0]
            assert cache is not None
            watch = Stopwatch(self.pool.device)
            ids = torch.tensor([int(request.tokens[0][0]) for request in requests]).numpy()
            with Transaction(self.pool, extensions(cache, [start], [len(ids)]), operation) as work:
                rows_RV = work.run([ids], ["all"])[0]
                work.commit()
            self._metrics.record_decode(1, watch.seconds(), 1)
            return [
                DecodeOutput(
                    logits=rows_RV[index : index + 1], kv_cache=Handle(cache, (start + index + 1,), cache.revision)
                )
                for index in range(len(ids))
            ]

    def _verify_request(self, item: DecodeInput, first: DecodeInput, index: int) -> Request:
        """Input ``index`` of a chain, whose token stands ``index`` behind the common start."""
        if not isinstance(item, DecodeInput):
            raise InvalidArgument(f"forward_verify takes DecodeInputs; got {type(item).__name__}")
        item.tokens("forward_verify")
        request = decode_request(self.pool, item.with_position_ids(None), "forward_verify")
        check_positions(item.position_ids, [start + index for start in request.starts], request.spans, 1)
        cache, starts = resolve_cache(self.pool, first.kv_cache)
        if request.cache is not cache or request.starts != starts:
            raise InvalidArgument("all inputs must carry the same starting handle, and this one has another")
        if request.batch_size != 1:
            raise InvalidArgument(f"a chain belongs to one sequence; the cache has {request.batch_size} rows")
        return request

    def speculative_decode(
        self,
        input: DecodeInput,
        draft_tokens: Sequence[int],
        acceptance_threshold: float,
        *,
        draft_probabilities: Tensor | None = None,
        sampling: RequestSampling | None = None,
    ) -> SpeculativeOutput:
        """See ``ModelExecutor``. Exact mode needs ``sampling``, and only exact mode has it (``InvalidArgument``)."""
        with self.operation("speculative_decode") as operation:
            speculation.check_threshold(acceptance_threshold)
            request = decode_request(self.pool, input, "speculative_decode")
            if request.batch_size != 1 or request.cache is None:
                raise InvalidArgument(f"speculation is for one sequence; the cache has {request.batch_size} rows")
            drafts = [check_integer(token, "draft token", 0) for token in draft_tokens]
            ids = torch.tensor([int(request.tokens[0][0]), *drafts]).numpy()
            require_vocabulary(ids, self.pool.vocab_size, "draft_tokens")
            if (draft_probabilities is None) != (sampling is None):
                raise InvalidArgument(
                    "exact mode takes draft_probabilities and sampling together; the threshold rule takes neither"
                )
            draft_kV = None
            if draft_probabilities is not None:
                draft_kV = speculation.check_draft_probabilities(draft_probabilities, drafts, self.pool.vocab_size)
            cache, start = request.cache, request.starts[0]
            watch = Stopwatch(self.pool.device)
            with Transaction(self.pool, extensions(cache, [start], [len(ids)]), operation) as work:
                rows_RV = work.run([ids], ["all"])[0]
                if draft_kV is None or sampling is None:
                    verdict = speculation.judge_by_threshold(rows_RV, drafts, acceptance_threshold)
                else:
                    verdict = speculation.judge_by_sampling(rows_RV, drafts, draft_kV, sampling)
                work.commit([1 + verdict.accepted])
            self._metrics.record_decode(1, watch.seconds(), 1 + verdict.accepted)
            return SpeculativeOutput(
                accepted_tokens=tuple(drafts[: verdict.accepted]),
                next_logits=rows_RV[verdict.accepted : verdict.accepted + 1].clone(),
                kv_cache=handle_of(cache),
                next_probs=verdict.next_probs,
            )

    def _prefill(
        self, requests: Sequence[Request], wanted: Sequence[LogitsWanted], operation: Operation, *, keep_chunks: bool
    ) -> list[PrefillOutput]:
        """Run checked prompts. ``keep_chunks``: a cancelled call keeps the whole chunks that it ran."""
        self._require_batch(sum(request.batch_size for request in requests), operation.verb)
        fresh = {
            index: KVCache.create(self.pool, request.batch_size, self.pool.max_model_len, False)
            for index, request in enumerate(requests)
            if request.cache is None
        }
        caches = [fresh[index] if request.cache is None else request.cache for index, request in enumerate(requests)]
        watch = Stopwatch(self.pool.device)
        try:
            parts = self._parts(requests, caches, operation.verb)
            tokens = [ids for request in requests for ids in request.tokens]
            kinds = [kind for request, kind in zip(requests, wanted, strict=True) for _ in request.tokens]
            with Transaction(self.pool, parts, operation, several=True) as work:
                try:
                    logits = work.run(tokens, kinds, budget=self.prefill_chunk_size)
                except Cancelled:
                    if keep_chunks:
                        work.commit()
                    raise
                work.commit()
        except BaseException:
            for cache in fresh.values():
                cache.release()
            raise
        rows = iter(logits)
        outputs = [
            self._prefill_output(request, cache, kind, [next(rows) for _ in request.tokens])
            for request, cache, kind in zip(requests, caches, wanted, strict=True)
        ]
        self._metrics.record_prefill(len(tokens), watch.seconds())
        return outputs

    def _prefill_output(
        self, request: Request, cache: KVCache, wanted: LogitsWanted, rows: Sequence[Tensor]
    ) -> PrefillOutput:
        handle = handle_of(cache)
        if wanted == "none":
            return PrefillOutput(logits=None, kv_cache=handle)
        if wanted == "last":
            return PrefillOutput(logits=torch.stack(list(rows)), kv_cache=handle)
        if len(rows) == 1 and request.spans[0] == (0, request.columns):
            return PrefillOutput(logits=rows[0][None], kv_cache=handle)
        logits_BSV = rows[0].new_zeros(len(rows), request.columns, rows[0].shape[1])
        for row_SV, given, (a, b) in zip(logits_BSV, rows, request.spans, strict=True):
            row_SV[a:b] = given
        last = tuple(b - 1 for _, b in request.spans)
        return PrefillOutput(logits=logits_BSV, kv_cache=handle, last_indices=last)

    def _decode(self, requests: Sequence[Request], operation: Operation) -> list[DecodeOutput]:
        """One forward with one token of each row of each item."""
        sizes = [request.batch_size for request in requests]
        self._require_batch(sum(sizes), operation.verb)
        caches = [request.cache for request in requests if request.cache is not None]
        watch = Stopwatch(self.pool.device)
        with Transaction(self.pool, self._parts(requests, caches, operation.verb), operation) as work:
            rows = work.run([ids for request in requests for ids in request.tokens], ["last"] * sum(sizes))
            work.commit()
        # Joined per item, so that no two outputs share memory.
        joined = iter(rows)
        outputs = [
            DecodeOutput(logits=torch.cat([next(joined) for _ in range(size)]), kv_cache=handle_of(cache))
            for size, cache in zip(sizes, caches, strict=True)
        ]
        self._metrics.record_decode(sum(sizes), watch.seconds(), sum(sizes))
        return outputs

    def _parts(self, requests: Sequence[Request], caches: Sequence[KVCache], verb: str) -> list[Extension]:
        return [
            part
            for index, (request, cache) in enumerate(zip(requests, caches, strict=True))
            for part in extensions(
                cache,
                request.starts,
                [ids.size for ids in request.tokens],
                f"{verb} item {index}" if len(requests) > 1 else "",
            )
        ]

    # -- adapters --------------------------------------------------------------------------------------------

    def load_lora(self, assets: ModelAssets) -> int:
        """``Unsupported``."""
        raise Unsupported(f"load_lora: {NO_ADAPTERS}")

    def unload_lora(self, lora_id: int) -> None:
        """``Unsupported``."""
        raise Unsupported(f"unload_lora({lora_id!r}): {NO_ADAPTERS}")

    # -- life ------------------------------------------------------------------------------------------------

    @contextmanager
    def operation(self, verb: str) -> Iterator[Operation]:
        """A running call: counted as inside from here on, alone on the runner from the lock on."""
        self._require_open(verb)
        with self._operations.running(verb) as operation, self.lock:
            self._require_open(verb)
            self.pool.sweep()
            try:
                yield operation
            finally:
                self.pool.sweep()

    def _require_open(self, verb: str) -> None:
        if self._closed:
            raise FailedPrecondition(f"{verb}: the executor is shut down; make a new one")
        if self.pool.broken:
            raise QuireError(f"{verb}: {self.pool.broken}; make a new executor")

    def _require_batch(self, rows: int, verb: str) -> None:
        if rows > self.max_batch_size:
            raise InvalidArgument(f"{verb}: {rows} rows; max_batch_size is {self.max_batch_size}")

    def cancel(self) -> None:
        """See ``ExecutorBase``."""
        self._operations.cancel()

    def warmup(self) -> None:
        """See ``ModelExecutor``. Measures activation memory and decode times once, on sequences of its own."""
        with self.operation("warmup"):
            if self._measured is None:
                self._measured = warmup.measure(self.pool, self.max_batch_size)

    def shutdown(self) -> None:
        """See ``ModelExecutor``. Running calls are cancelled; caches are released; the runner is let go."""
        self._closed = True
        self._operations.cancel()
        with self.lock:
            self.pool.close()

    # -- looking ---------------------------------------------------------------------------------------------

    def supports_batch_size(self, batch_size: int) -> bool:
        """See ``ModelExecutor``. A row needs a page of its own at least."""
        runner = self.pool.runner_or_none
        if runner is None or isinstance(batch_size, bool) or not isinstance(batch_size, int):
            return False
        if not 1 <= batch_size <= self.max_batch_size:
            return False
        return batch_size <= runner.state.num_available_pages() and warmup.fits(
            self._measured, batch_size, self.pool.device
        )

    def optimal_batch_size(self) -> int:
        """See ``ModelExecutor``. 1 where nothing is supported now."""
        # What fits is monotone, so the largest is found by halving.
        low, high = 1, self.max_batch_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.supports_batch_size(middle) else (low, middle - 1)
        return min(low, self._measured.knee) if self._measured is not None else low

    def info(self) -> ExecutorInfo:
        """See ``ModelExecutor``. The first call may read the weights once, for their digest."""
        return self._facts.info(self.pool)

    def capabilities(self) -> ExecutorCapabilities:
        """See ``ModelExecutor``."""
        return self._facts.capabilities(self.pool, self.max_batch_size, self._measured)

    def status(self) -> ExecutorStatus:
        """See ``ModelExecutor``. Never waits for a running call."""
        summary = self._metrics.summary()
        return ExecutorStatus(
            state=self._state(),
            current_batch_size=self._operations.num_sequences,
            prefill_operations=summary.prefill_operations,
            decode_operations=summary.decode_operations,
            avg_prefill_time_ms=summary.avg_prefill_latency,
            avg_decode_time_ms=summary.avg_decode_latency,
            memory_usage=self._facts.memory_usage(self.pool),
            last_operation=summary.last_operation,
        )

    def _state(self) -> ExecutorState:
        if self._closed:
            return ExecutorState.SHUTDOWN
        if self.pool.broken:
            return ExecutorState.ERROR
        return ExecutorState.BUSY if self._operations.busy else ExecutorState.READY

    def metrics(self) -> ExecutorMetrics:
        """See ``ModelExecutor``."""
        summary, memory = self._metrics.summary(), self._facts.memory_usage(self.pool)
        return ExecutorMetrics(
            prefill_operations=summary.prefill_operations,
            decode_operations=summary.decode_operations,
            avg_prefill_latency=summary.avg_prefill_latency,
            avg_decode_latency=summary.avg_decode_latency,
            p95_prefill_latency=summary.p95_prefill_latency,
            p95_decode_latency=summary.p95_decode_latency,
            throughput_tps=summary.throughput_tps,
            memory_efficiency=memory.utilization_percent / 100.0,
            batch_utilization=summary.batch_utilization,
        )

    # -- for the other face ----------------------------------------------------------------------------------

    def record_prefill(self, num_sequences: int, seconds: float) -> None:
        self._metrics.record_prefill(num_sequences, seconds)

    def record_decode(self, num_sequences: int, seconds: float) -> None:
        self._metrics.record_decode(num_sequences, seconds, num_sequences)
