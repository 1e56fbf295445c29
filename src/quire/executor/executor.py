"""``Executor``: all verbs of ``ModelExecutor`` over one runner.

A verb checks its arguments (``arguments``), runs a ``Transaction`` and records its metrics. State
is in KV caches: a later call depends on nothing in the executor.

Letters: B batch rows; S tokens of a row with padding; V vocabulary; k draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from torch import Tensor

from quire.adapters.assets import read_assets
from quire.base.config import MODALITIES
from quire.base.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidArgument,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.base.interrupts import SHIELD, Lock
from quire.base.process_exit import end_with_process
from quire.base.sampling_params import SamplingParams
from quire.base.signatures import checks_arguments
from quire.base.speculation import Speculation
from quire.base.types import LogitsWanted
from quire.base.uncopied import Uncopied
from quire.branches.model_facts import ModelFacts
from quire.branches.row_media import check_modalities
from quire.contracts.executor import (
    CacheLike,
    DecodeInput,
    DecodeOutput,
    ExecutorCapabilities,
    ExecutorInfo,
    ExecutorMetrics,
    ExecutorState,
    ExecutorStatus,
    ExecutorType,
    ModelAssets,
    PrefillInput,
    PrefillOutput,
    RequestSampling,
    SpeculativeOutput,
)
from quire.executor import acceptance, executor_types, reports, rewinding, verification, warmup
from quire.executor.arguments import (
    CallItem,
    decode_item,
    distinct_items,
    naming_item,
    prefill_item,
    require_together,
    resolve_cache,
    union,
)
from quire.executor.cache import KVCache
from quire.executor.cache_pool import CachePool
from quire.executor.call_outputs import decode_output, places_for_logits, prefill_output
from quire.executor.drafting import Drafting
from quire.executor.handle import Handle, handle_of
from quire.executor.item_placement import place, rows_to_extend
from quire.executor.row_extension import packed
from quire.executor.running_calls import Operation, OperationMetrics, Stopwatch
from quire.executor.transaction import Transaction
from quire.kv.sequences import check_integer
from quire.models.families import LoadedModel
from quire.models.fingerprint import ModelIdentity
from quire.runner.local import Runner
from quire.speculation.proposer import Draft
from quire.speculation.proposers import proposer_of


@checks_arguments()
class Executor(Uncopied):
    """See ``ModelExecutor``; ``LlmExecutor`` is the other face of the same object.

    ``identity``: of the runner's model. ``max_model_len``: most tokens of a row; None: the model's.
    ``max_batch_size``: most rows of a call. ``prefill_chunk_size``: most tokens of a prompt in one
    forward; <= 0: all. ``lock``: shared by all users of the runner, such as a serving engine; None:
    there are no others.

    ``executor_type``: a Sequential executor takes one row a call, whatever ``max_batch_size`` is; a
    Batch executor decodes together the caches that were prefilled together; a ContinuousBatch
    executor takes any rows. ``modalities``: "vision" and "audio", if the caller has an encoder.
    ``share_prefixes``: a prompt without a cache starts from the longest prefix in live caches,
    unless all its logits are wanted. ``window``, ``sink``: see ``ModelFacts.of``. ``fallbacks``:
    listed by ``status``. ``drafting``: the drafts of a Speculative executor, which
    otherwise runs as ContinuousBatch; None: by lookup.
    """

    _instead = "make another LLM where it is needed"

    def __init__(
        self,
        runner: Runner,
        *,
        identity: ModelIdentity,
        max_model_len: int | None = None,
        max_batch_size: int = 64,
        prefill_chunk_size: int = 2048,
        lock: Lock | None = None,
        executor_type: ExecutorType | str = ExecutorType.CONTINUOUS_BATCH,
        modalities: Collection[str] = MODALITIES,
        share_prefixes: bool = False,
        window: int | None = None,
        sink: int = 0,
        fallbacks: Sequence[str] = (),
        drafting: Drafting | None = None,
        on_shutdown: Callable[[], object] = lambda: None,
    ) -> None:
        limit = runner.model.max_position
        max_model_len = limit if max_model_len is None else check_integer(max_model_len, "max_model_len", 1)
        if max_model_len > limit:
            raise InvalidArgument(f"max_model_len {max_model_len} is beyond the model's {limit} positions")
        self.executor_type = executor_types.check_type(executor_type)
        batch_size = check_integer(max_batch_size, "max_batch_size", 1)
        self.max_batch_size = 1 if self.executor_type is ExecutorType.SEQUENTIAL else batch_size
        if drafting is not None and self.executor_type is not ExecutorType.SPECULATIVE:
            raise InvalidArgument(
                f"drafting is for executor_type 'Speculative', and this is {self.executor_type.value!r}"
            )
        if drafting is None and self.executor_type is ExecutorType.SPECULATIVE:
            drafting = Drafting(proposer_of("auto"), Speculation().depth, runner.model.vocab_size)
        self.drafting = drafting
        self.prefill_chunk_size = prefill_chunk_size
        self.modalities = check_modalities(modalities)
        self.share_prefixes = share_prefixes
        self.lock = Lock() if lock is None else lock
        facts = ModelFacts.of(runner, identity, max_model_len, window=window, sink=sink, chunk_size=prefill_chunk_size)
        self.pool = CachePool(runner, facts, self.lock)
        self._fallbacks, self._on_shutdown = tuple(fallbacks), on_shutdown
        self._operations = self.pool.operations
        self.operation_metrics = OperationMetrics(self.max_batch_size)
        self.on_drafts: Callable[[int, int], None] | None = None
        """Called after each speculative call with the numbers of proposed and of accepted tokens.
        """
        self._activations: warmup.Activations | None = None
        self._knee = self.max_batch_size
        """Number of rows in a decode batch beyond which more gain little; ``max_batch_size`` until
        measured."""
        self._warm = self._closed = False
        end_with_process(self.shutdown)

    # -- KV caches ---------------------------------------------------------------------------------

    def create_kv_cache(self, *, batch_size: int = 1, capacity: int | None = None, dynamic: bool = False) -> KVCache:
        """See ``ExecutorBase``. ``InvalidArgument`` also beyond ``max_batch_size`` rows."""
        batch_size = check_integer(batch_size, "batch_size", 1)
        self._require_batch(batch_size, "create_kv_cache")
        if capacity is None:
            capacity = 1 if dynamic else self.pool.facts.max_model_len
        capacity = check_integer(capacity, "capacity", 1)
        if capacity > self.pool.facts.max_model_len:
            raise ResourceExhausted(
                f"capacity {capacity} is beyond the model's maximum of {self.pool.facts.max_model_len}"
            )
        with self.operation("create_kv_cache"):
            return KVCache.create(self.pool, batch_size, capacity, bool(dynamic))

    def truncate_kv(self, handle: CacheLike, new_len: int) -> Handle:
        """See ``ModelExecutor``. All rows are cut to ``new_len``; none may be shorter. Tokens to
        replay are run before it returns (``rewinding.truncate``)."""
        with self.operation("truncate_kv") as operation:
            cache, _ = resolve_cache(self.pool, handle)
            new_len = check_integer(new_len, "truncate_kv: new_len", 0)
            if new_len > min(cache.lengths):
                raise InvalidArgument(
                    f"truncate_kv: new_len {new_len} is beyond the cache's length {min(cache.lengths)}"
                )
            rewinding.truncate(cache, [new_len] * cache.batch_size, operation)
            return handle_of(cache)

    def release_cache(self, cache_id: object) -> None:
        """See ``ModelExecutor``."""
        with self.lock:
            cache = self.pool.caches.get(cache_id) if isinstance(cache_id, str) else None
            if cache is not None:
                cache.release()

    # -- running -----------------------------------------------------------------------------------

    def prefill(self, input: PrefillInput) -> PrefillOutput:
        """See ``ModelExecutor``."""
        with self.operation("prefill") as operation:
            item = prefill_item(self.pool, input)
            return self._prefill([item], [input.logits], operation, keep_chunks=True)[0]

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """See ``ModelExecutor``. Tokens or adapters that do not fit one forward run in several."""
        with self.operation("batch_prefill") as operation:
            items = distinct_items(partial(prefill_item, self.pool), inputs, operation.verb)
            wanted = [given.logits for given in inputs]
            return self._prefill(items, wanted, operation, keep_chunks=False) if items else []

    def decode(self, input: DecodeInput) -> DecodeOutput:
        """See ``ModelExecutor``."""
        with self.operation("decode") as operation:
            return self._decode([decode_item(self.pool, input)], operation)[0]

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """See ``ModelExecutor``."""
        with self.operation("batch_decode") as operation:
            check = partial(decode_item, self.pool, verb=operation.verb)
            items = distinct_items(check, inputs, operation.verb)
            return self._decode(items, operation) if items else []

    def forward(self, input_ids: Tensor) -> Tensor:
        """See ``ModelExecutor``. Counts as a prefill of each row."""
        with self.operation("forward") as operation:
            given = PrefillInput(input_ids=input_ids)
            if input_ids.dim() != 2:
                raise InvalidArgument(f"forward takes ids [batch, tokens]; got shape {list(input_ids.shape)}")
            output = self._prefill([prefill_item(self.pool, given)], ["all"], operation, keep_chunks=False)[0]
            self.release_cache(output.kv_cache.cache_id)
            assert output.logits is not None
            return output.logits

    def forward_verify(
        self, inputs: Sequence[DecodeInput], *, parents: Sequence[int] | None = None
    ) -> list[DecodeOutput]:
        """See ``ModelExecutor``."""
        with self.operation("forward_verify") as operation:
            items, tree = verification.checked_items(self.pool, inputs, parents)
            if not items:
                return []
            executor_types.require_whole(self.executor_type, [item.cache for item in items[:1]], "forward_verify")
            watch = Stopwatch(self.pool.facts.device)
            outputs = verification.verify(self.pool, items, tree, operation)
            self.operation_metrics.record_decode(1, watch.seconds(), 1)
            return outputs

    def commit_path(self, handle: CacheLike) -> Handle:
        """See ``ModelExecutor``. Runs nothing, so it counts as no operation."""
        with self.operation("commit_path"):
            return verification.commit_path(self.pool, handle)

    def speculative_decode(
        self,
        input: DecodeInput,
        draft_tokens: Sequence[int] | None,
        acceptance_threshold: float,
        *,
        draft_probabilities: Tensor | None = None,
        sampling: RequestSampling | SamplingParams | None = None,
        draft_parents: Sequence[int] | None = None,
    ) -> SpeculativeOutput:
        """See ``ModelExecutor``. Only exact mode takes ``sampling`` (``InvalidArgument``).
        ``SamplingParams`` are refused with the class to make from them."""
        with self.operation("speculative_decode") as operation:
            return self._speculate(
                [decode_item(self.pool, input, "speculative_decode")],
                None if draft_tokens is None else [draft_tokens],
                acceptance_threshold,
                operation,
                [draft_probabilities],
                [sampling],
                [draft_parents],
            )[0]

    def batch_speculative_decode(
        self,
        inputs: Sequence[DecodeInput],
        draft_tokens: Sequence[Sequence[int]] | None,
        acceptance_threshold: float,
        *,
        draft_probabilities: Sequence[Tensor | None] | None = None,
        sampling: Sequence[RequestSampling | SamplingParams | None] | None = None,
        draft_parents: Sequence[Sequence[int] | None] | None = None,
    ) -> list[SpeculativeOutput]:
        """See ``ModelExecutor``."""
        with self.operation("batch_speculative_decode") as operation:
            given = (draft_tokens, draft_probabilities, sampling, draft_parents)
            for name, value in zip(
                ("draft_tokens", "draft_probabilities", "sampling", "draft_parents"), given, strict=True
            ):
                if value is not None and len(value) != len(inputs):
                    raise InvalidArgument(
                        f"{name} has {len(value)} entries for {len(inputs)} inputs; give one for each"
                    )
            check = partial(decode_item, self.pool, verb=operation.verb)
            items = distinct_items(check, inputs, operation.verb)
            nothing = [None] * len(items)
            return (
                self._speculate(
                    items,
                    draft_tokens,
                    acceptance_threshold,
                    operation,
                    draft_probabilities or nothing,
                    sampling or nothing,
                    draft_parents or nothing,
                )
                if items
                else []
            )

    def _speculate(
        self,
        items: Sequence[CallItem],
        draft_tokens: Sequence[Sequence[int]] | None,
        threshold: float,
        operation: Operation,
        probabilities: Sequence[Tensor | None],
        samplings: Sequence[RequestSampling | SamplingParams | None],
        parents: Sequence[Sequence[int] | None],
    ) -> list[SpeculativeOutput]:
        """Verify the drafts of checked items in one forward; None: those of the proposer."""
        acceptance.check_threshold(threshold)
        self._require_batch(sum(item.batch_size for item in items), operation.verb)
        executor_types.require_whole(self.executor_type, [item.cache for item in items], operation.verb)
        require_together(self.pool, items)
        certain, drafts = draft_tokens is None, [Draft()] * len(items)
        given: Sequence[Sequence[int]] = [()] * len(items) if draft_tokens is None else draft_tokens
        calls = []
        for number, (item, tokens, rows, sampling, tree) in enumerate(
            zip(items, given, probabilities, samplings, parents, strict=True)
        ):
            with naming_item(operation.verb, number) if len(items) > 1 else nullcontext():
                calls.append(
                    verification.checked_speculation(
                        self.pool,
                        item,
                        tokens,
                        certain=certain,
                        draft_probabilities=rows,
                        sampling=sampling,
                        draft_parents=tree,
                    )
                )
        if certain:
            drafts = self._drafts_of(items, operation.verb)
            calls = [replace(call, drafts=list(draft.tokens)) for call, draft in zip(calls, drafts, strict=True)]
        watch = Stopwatch(self.pool.facts.device)
        outputs = verification.speculate(self.pool, calls, threshold, operation)
        seconds = watch.seconds()
        accepted = sum(output.acceptance_count for output in outputs)
        self.operation_metrics.record_decode(len(items), seconds, len(items) + accepted)
        if self.drafting is not None:
            self.drafting.controller.costs.measured(sum(len(call.drafts) + 1 for call in calls), seconds, len(calls))
            for item, draft, output in zip(items, drafts, outputs, strict=True):
                if certain and item.cache is not None:
                    self.drafting.record_accepted(item.cache, 0, draft, output.acceptance_count)
        if self.on_drafts is not None:
            self.on_drafts(sum(len(call.drafts) for call in calls), accepted)
        return outputs

    def _drafts_of(self, items: Sequence[CallItem], verb: str) -> list[Draft]:
        """Return the drafts of the proposer for rows that run their next token."""
        if self.drafting is None:
            raise InvalidArgument(
                f"{verb}: draft_tokens None asks the executor's own proposer, which only type 'Speculative' has; "
                "give the drafts",
                field="draft_tokens",
            )
        rows = []
        most = []
        for item in items:
            cache, start = item.cache, item.starts[0]
            known = None if cache is None else cache.token_ids(0)
            if cache is None or known is None or item.batch_size != 1:
                return [Draft()] * len(items)
            rows.append((cache, 0, np.append(known[:start], item.tokens[0])))
            limit = self.pool.facts.max_model_len if cache.dynamic else cache.capacity
            most.append(limit - start - 1)
        return self.drafting.drafts(rows, most)

    def _prefill(
        self, items: Sequence[CallItem], wanted: Sequence[LogitsWanted], operation: Operation, *, keep_chunks: bool
    ) -> list[PrefillOutput]:
        """Run checked prompts; ``keep_chunks``: a cancelled call keeps the chunks that ran
        completely."""
        self._require_batch(sum(item.batch_size for item in items), operation.verb)
        fresh: list[KVCache] = []
        watch = Stopwatch(self.pool.facts.device)
        try:
            placed = []
            for item, kind in zip(items, wanted, strict=True):
                placed.append(place(self.pool, item, kind, share=self.share_prefixes))
                if item.cache is None:
                    fresh.append(placed[-1][1])
            parts = rows_to_extend(placed, operation.verb)
            starts, counts = [part.start for part in parts], [part.count for part in parts]
            forwards = packed(self.pool, parts, starts, counts, self.prefill_chunk_size)
            with Transaction(self.pool, parts, operation, several=True, forwards=forwards) as work:
                places = places_for_logits([item for item, _ in placed], wanted, in_pieces=len(forwards) > 1)
                try:
                    found = work.run(
                        [ids for item, _ in placed for ids in item.tokens],
                        [kind for kind, (item, _) in zip(wanted, placed, strict=True) for _ in item.tokens],
                        budget=self.prefill_chunk_size,
                        asked=union(item.asked for item in items),
                        places=places.rows,
                    )
                except Cancelled:
                    if keep_chunks:
                        work.commit()
                    raise
                work.commit()
        except BaseException:
            for cache in fresh:
                cache.release()
            raise
        if fresh:
            executor_types.join([cache for _, cache in placed])
        for _, cache in placed:
            for row in cache.rows:
                cache.mark(row)
        rows, logits = iter(found), [None if name is None else work.logits[name] for name in places.items]
        outputs = [
            prefill_output(item, handle_of(cache), kind, [next(rows) for _ in item.tokens], whole)
            for (item, cache), kind, whole in zip(placed, wanted, logits, strict=True)
        ]
        self.operation_metrics.record_prefill(len(found), watch.seconds())
        return outputs

    def _decode(self, items: Sequence[CallItem], operation: Operation) -> list[DecodeOutput]:
        """Run one forward with one token of each row of each item."""
        sizes = [item.batch_size for item in items]
        self._require_batch(sum(sizes), operation.verb)
        require_together(self.pool, items)
        placed = [(item, item.cache) for item in items if item.cache is not None]
        executor_types.require_whole(self.executor_type, [cache for _, cache in placed], operation.verb)
        watch = Stopwatch(self.pool.facts.device)
        with Transaction(self.pool, rows_to_extend(placed, operation.verb), operation) as work:
            tokens = [ids for item in items for ids in item.tokens]
            rows = iter(work.run(tokens, ["last"] * sum(sizes), asked=union(item.asked for item in items)))
            work.commit()
        outputs = [decode_output(item, handle_of(cache), [next(rows) for _ in item.tokens]) for item, cache in placed]
        self.operation_metrics.record_decode(sum(sizes), watch.seconds(), sum(sizes))
        return outputs

    # -- adapters ----------------------------------------------------------------------------------

    def load_lora(self, assets: ModelAssets) -> int:
        """See ``ExecutorBase``. Files are read before waiting for the runner."""
        self._require_open("load_lora")
        self._require_adapters("load_lora")
        runner = self.pool.runner
        adapter = read_assets(assets, cast(LoadedModel, runner.model), runner.adapters.admit)
        with self.operation("load_lora"):
            return self.pool.runner.adapters.load(adapter)

    def unload_lora(self, lora_id: int) -> None:
        """See ``ExecutorBase``. Waits for the running call. ``FailedPrecondition`` if other users
        of the runner need it."""
        with self.operation("unload_lora"):
            self._require_adapters("unload_lora")
            self.pool.runner.adapters.unload(lora_id)

    def _require_adapters(self, verb: str) -> None:
        if self.pool.facts.adapter_refusal:
            raise Unsupported(f"{verb}: {self.pool.facts.adapter_refusal}")

    # -- life --------------------------------------------------------------------------------------

    @contextmanager
    def operation(self, verb: str) -> Iterator[Operation]:
        """Register a running call, then take the lock for exclusive use of the runner."""
        self._require_open(verb)
        with SHIELD, self._operations.running(verb) as operation, self.lock.interruptible:
            self._require_open(verb)
            self.pool.sweep()
            try:
                yield operation
            finally:
                self.pool.sweep()
                if self.drafting is not None:
                    self.drafting.forget(self.pool.caches)

    def _require_open(self, verb: str) -> None:
        self.lock.require_own()
        if self._closed:
            raise FailedPrecondition(f"{verb}: the executor is shut down; make a new one")
        self.pool.require_working(verb)

    def _require_batch(self, rows: int, verb: str) -> None:
        if rows > self.max_batch_size:
            raise InvalidArgument(f"{verb}: {rows} rows; max_batch_size is {self.max_batch_size}")

    def cancel(self) -> None:
        """See ``ExecutorBase``."""
        self.lock.require_own()
        self._operations.cancel()

    def warmup(self) -> None:
        """See ``ModelExecutor``. Measures memory and decode times once, on sequences of its own."""
        with self.operation("warmup"):
            self._measure()
            if not self._warm:
                self._knee, self._warm = warmup.knee_of(self.pool, self.max_batch_size), True

    def _measure(self) -> None:
        """Measure memory of activations, once that is possible. Call it within an operation."""
        if self._activations is None:
            self._activations = warmup.measure(self.pool, self.prefill_chunk_size)

    def shutdown(self) -> None:
        """See ``ModelExecutor``. Cancels running calls, releases caches, lets the runner go."""
        if self.lock.is_parents:
            return
        self._closed = True
        self._operations.cancel()
        with self.lock:
            self.pool.close()
        self._on_shutdown()

    # -- inspection --------------------------------------------------------------------------------

    def supports_batch_size(self, batch_size: int, sequence_length: int = 1) -> bool:
        """See ``ModelExecutor``. Counts memory of activations if measured. Waits for the running
        call."""
        with self.lock:
            return (
                batch_size <= self.max_batch_size
                and self.pool.runner_or_none is not None
                and self.pool.has_room(batch_size, sequence_length)
                and warmup.fits(self._activations, batch_size, self.pool.facts.device)
            )

    def optimal_batch_size(self, sequence_length: int = 1) -> int:
        """See ``ModelExecutor``. 1 if no batch size is supported now."""
        # Every size below a fitting size also fits, so binary search finds the largest.
        low, high = 1, self.max_batch_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.supports_batch_size(middle, sequence_length) else (low, middle - 1)
        return min(low, self._knee)

    def info(self) -> ExecutorInfo:
        """See ``ModelExecutor``. The first call may read the weights once, for their digest."""
        return reports.info(self.pool.facts)

    def capabilities(self) -> ExecutorCapabilities:
        """See ``ModelExecutor``. The first call measures memory of activations. So it runs a few
        short forwards and waits for a running call."""
        try:
            with self.operation("capabilities"):
                self._measure()
        except QuireError:
            if self.is_usable:
                raise
        return reports.capabilities(
            self.pool.facts, self.max_batch_size, self.executor_type, self.modalities, self._activations
        )

    def status(self) -> ExecutorStatus:
        """See ``ModelExecutor``. Never waits for a running call."""
        summary = self.operation_metrics.summary()
        return ExecutorStatus(
            state=self._state(),
            current_batch_size=self._operations.num_sequences,
            prefill_operations=summary.prefill_operations,
            decode_operations=summary.decode_operations,
            avg_prefill_time_ms=summary.avg_prefill_latency,
            avg_decode_time_ms=summary.avg_decode_latency,
            memory_usage=reports.memory_usage(self.pool),
            last_operation=self.operation_metrics.last_operation,
            fallbacks=self._fallbacks,
        )

    @property
    def is_usable(self) -> bool:
        """Return True if it takes calls: it is not shut down, and its device has not failed."""
        return not self._closed and not self.pool.broken

    def _state(self) -> ExecutorState:
        if self._closed:
            return ExecutorState.SHUTDOWN
        if self.pool.broken:
            return ExecutorState.ERROR
        return ExecutorState.BUSY if self._operations.busy else ExecutorState.READY

    def metrics(self) -> ExecutorMetrics:
        """See ``ModelExecutor``."""
        used = reports.memory_usage(self.pool).utilization_percent / 100.0
        summary = self.operation_metrics.summary()
        return replace(summary, memory_efficiency=used, replayed_tokens=self.pool.replayed_tokens)
