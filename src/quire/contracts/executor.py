"""The executors: two faces of one runtime over one kind of state.

``ModelExecutor`` is ferrum's interface: prefill and decode over handles. ``LlmExecutorInterface``
is LiteRT-LM's: prefill, step and sample over KV caches that change in place. Both can use a KV
cache that the other made. ``ExecutorFactory`` makes executors; ``ExecutorRegistry`` names them. The
values in ``executor_inputs``, ``executor_calls`` and ``executor_reports`` are also exported here.

Letters: B batch rows, S tokens of a row, V vocabulary, N tokens or steps, k draft tokens. p is a
position, n a number of new tokens.

Rules for every verb:

* **State lives in KV caches**, not in executors. An executor holds weights, graphs, adapters,
  scratch memory and the page pool. Of earlier calls only the generator of ``sample_tokens``
  matters.
* **Check, then change.** Wrong or unsupported calls are refused before compute and change nothing:
  no length, page, adapter, generator or counter. After an error during compute, lengths are as
  before; pages that the call took are freed; a cache that it made is freed. A call for several
  sequences succeeds for all or changes none.
* **Tokens and tensors.** Ids are int32 or int64 in [0, V). Logits are float32, on the executor's
  device. Inputs are never mutated; results belong to the caller.
* **Threads.** Concurrent calls on one executor are safe; calls on one cache run in some order.
* **Cancelled** calls leave a usable cache. Its length counts completed work: whole chunks of a
  prefill, whole steps of ``sample_tokens``, nothing of a verify, speculative or batch call.

Errors common to all verbs:

=======================  ==========================================================================
``InvalidArgument``      type, shape, dtype, range, empty ids, foreign or stale cache, fingerprint
``NotFound``             unknown or unloaded adapter, released cache, absent member of an input
``FailedPrecondition``   after ``shutdown``; unload of an adapter that is in use
``ResourceExhausted``    capacity of a cache, model maximum or page pool; before anything is written
``Unsupported``          a verb or combination that this model, device or kind of state lacks
``Cancelled``            the running call was cancelled; ``token_ids`` holds the ids sampled so far
``QuireError``           an internal invariant or the device broke; never for bad arguments
=======================  ==========================================================================

A docstring below names only errors beyond this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from quire.contracts.executor_calls import CacheLike as CacheLike
from quire.contracts.executor_calls import DecodeInput as DecodeInput
from quire.contracts.executor_calls import DecodeOutput as DecodeOutput
from quire.contracts.executor_calls import PrefillInput as PrefillInput
from quire.contracts.executor_calls import PrefillOutput as PrefillOutput
from quire.contracts.executor_calls import SpeculativeOutput as SpeculativeOutput
from quire.contracts.executor_inputs import AUDIO_PLACEHOLDER as AUDIO_PLACEHOLDER
from quire.contracts.executor_inputs import END_OF_AUDIO as END_OF_AUDIO
from quire.contracts.executor_inputs import END_OF_IMAGE as END_OF_IMAGE
from quire.contracts.executor_inputs import VISION_PLACEHOLDER as VISION_PLACEHOLDER
from quire.contracts.executor_inputs import AudioData as AudioData
from quire.contracts.executor_inputs import ExecutorInputs as ExecutorInputs
from quire.contracts.executor_inputs import ModelAssets as ModelAssets
from quire.contracts.executor_inputs import TextData as TextData
from quire.contracts.executor_inputs import VisionData as VisionData
from quire.contracts.executor_reports import AttentionMechanism as AttentionMechanism
from quire.contracts.executor_reports import ExecutorCapabilities as ExecutorCapabilities
from quire.contracts.executor_reports import ExecutorInfo as ExecutorInfo
from quire.contracts.executor_reports import ExecutorMetrics as ExecutorMetrics
from quire.contracts.executor_reports import ExecutorState as ExecutorState
from quire.contracts.executor_reports import ExecutorStatus as ExecutorStatus
from quire.contracts.executor_reports import ExecutorType as ExecutorType
from quire.contracts.executor_reports import MemoryRequirements as MemoryRequirements
from quire.contracts.executor_reports import MemoryUsage as MemoryUsage
from quire.contracts.kv_cache import CacheHandle, KVCacheInterface

ConfigT = TypeVar("ConfigT", contravariant=True)


class RequestSampling(Protocol):
    """(ours) The draws of one request, with its own generator, independent of the batch."""

    def probabilities(self, logits_RV: Tensor, drafted: Sequence[int]) -> Tensor:
        """Return the distributions of raw float32 logits ``[R, V]``: float32 ``[R, V]``, fresh.

        The last row follows the request's tokens and all of ``drafted``; the row before it follows
        all but the last of ``drafted``; and so on, R <= len(drafted) + 1. Masks, grammar,
        penalties, temperature, top-k, top-p and min-p apply to each row's prefix. Temperature 0 is
        one-hot at the first maximum.
        """

    def uniform(self) -> float:
        """Return the next draw of the request's generator, in [0, 1)."""


class ExecutorBase(Protocol):
    """Verbs of both faces: KV caches, adapters, cancelling."""

    def create_kv_cache(
        self, *, batch_size: int = 1, capacity: int | None = None, dynamic: bool = False
    ) -> KVCacheInterface:
        """Make a KV cache of length 0 for this model, static or ``dynamic``.

        ``capacity``: token slots per row; None: the model's context length if static, 1 if dynamic.
        ``InvalidArgument``: batch_size or capacity < 1. ``ResourceExhausted``: beyond the model's
        maximum.
        """

    def load_lora(self, assets: ModelAssets) -> int:
        """Load a LoRA adapter and return its id.

        ``assets`` is the path of a directory that PEFT saved, or of the weights in it, with the
        configuration beside them. Or it is one whole adapter by path, open file, bytes or stream: a
        zip archive of such a directory, or a safetensors file with the text of
        ``adapter_config.json`` as ``adapter_config`` in its metadata. It is read into memory, at
        most 2 GiB; nothing is written or executed.

        The executor chooses ids >= 0, unique for its life, never reused; two loads of one file give
        two. Modules that the adapter lacks behave as base weights. Base results stay the same after
        an adapter was loaded, used and unloaded.

        ``CheckpointError``: rank, shapes, target modules, base model, unknown tensors, damaged
        bytes, another form, or too long; all checked before anything changes. ``InvalidArgument``:
        a file or stream without bytes. ``NotFound``: no such directory. ``Unsupported``: a model
        that cannot run adapters, an adapter with an unsupported computation. ``ResourceExhausted``:
        a rank beyond the limit of one forward, or the memory for loaded adapters is full.
        """

    def unload_lora(self, lora_id: int) -> None:
        """Unload an adapter, after the calls that use it.

        Caches made under it stay usable; only running their tokens again is refused
        (``truncate_kv``). ``NotFound``: unknown or unloaded already. ``FailedPrecondition``: a
        request or session of an engine that shares the model needs it.
        """

    def cancel(self) -> None:
        """Cancel the operations that are in progress on this executor at this moment.

        Callable from any thread, idempotent, best effort; never waits. The flag belongs to a
        running operation alone. With none in progress nothing happens, not to the next call either.
        The flag is checked before each prefill chunk and each sampled token; the cancelled call
        raises ``Cancelled``.
        """


class LlmExecutorInterface(ExecutorBase, Protocol):
    """LiteRT-LM's executor, with external (``step``) and internal (``sample_tokens``) sampling.

    Each call names at most one adapter, for its own tokens only; earlier tokens may have run under
    others. ``lora_id=None`` is the base model. ``inputs.next_position`` p, if given, must be
    0..length; p < length is a rewind. After n tokens the length is p + n.
    """

    def prefill(self, inputs: ExecutorInputs, kv_cache: KVCacheInterface, lora_id: int | None = None) -> None:
        """Run and write **all** tokens, without logits. Keep the last prompt token for ``step``.

        Legal at any time, also after ``step``. ``prefill(a)`` then ``prefill(b)`` equals
        ``prefill(a + b)``, unless that divides an image that sees itself as a whole.

        Vision and audio embeddings take the places of their placeholders. Any decoder takes
        embeddings of its width; the caller runs the encoders of the executor's modalities.

        ``InvalidArgument``: "Prefill token ids must be non-empty." (absent, or S = 0); B is not the
        cache's batch size; a foreign cache or another model's; media rows that do not fit the
        placeholders or the model's width. ``ResourceExhausted``: p + n beyond a static cache's
        capacity or the model's maximum (a dynamic cache grows). ``Unsupported``: a modality that
        this executor was not made for; per-layer embeddings for a model without them.
        """

    def step(self, inputs: ExecutorInputs, kv_cache: KVCacheInterface, lora_id: int | None = None) -> Tensor:
        """Write one token for each row; return the logits of the next, ``[B, 1, V]``. An empty
        cache is legal. ``InvalidArgument``: "Expect 1 token id for decode."; vision or audio data.
        ``ResourceExhausted``: "KV cache full" if static, or the model's maximum."""

    def sample_tokens(
        self,
        num_steps: int,
        inputs: ExecutorInputs,
        kv_cache: KVCacheInterface,
        lora_id: int | None = None,
        *,
        sampling: RequestSampling | None = None,
    ) -> list[int]:
        """Run ``num_steps`` decode steps with sampling inside, for B = 1; return that many ids.

        The id sampled at a step is the input of the next. There is no stop logic. The last sampled
        id is **not** in the cache: the length becomes start + N, and the caller passes that id
        next. ``sampling=None``: the sampling fixed at construction, greedy by default. 0 steps give
        [] and change nothing. Room for all N is checked first.

        ``InvalidArgument``: num_steps < 0, B > 1, otherwise as ``step``.
        """

    def sample_tokens_batch(
        self,
        num_steps: int,
        inputs: ExecutorInputs,
        kv_cache: KVCacheInterface,
        lora_id: int | None = None,
        *,
        sampling: Sequence[RequestSampling] | None = None,
    ) -> list[list[int]]:
        """(ours) Run ``sample_tokens`` for any B: ``[B][num_steps]`` ids; ``sampling`` per row."""


class ModelExecutor(ExecutorBase, Protocol):
    """ferrum's model, batch and speculative executor."""

    def prefill(self, input: PrefillInput) -> PrefillOutput:
        """Run prompts, or further pieces of them; return logits and the handle.

        With a ``kv_cache`` the new length is prior + n; without one a fresh cache is made. Padding
        never enters the cache. Room is reserved first. Requested outputs are computed for all real
        tokens. ``InvalidArgument``: "Input token tensor is empty". ``ResourceExhausted``: also a
        position beyond the model's maximum. ``Unsupported``: impossible positions, hidden states or
        attention weights.
        """

    def decode(self, input: DecodeInput) -> DecodeOutput:
        """Run one token per row of the handle; return logits ``[B, V]`` and a longer handle."""

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """Run prompts of different lengths in one forward, by the rules of ``batch_decode``.
        Adapters that do not fit together run one after the other."""

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run many sequences in one forward; results equal those of single calls.

        Order and length are kept; no inputs, no outputs. All or nothing: an error names the item.
        Items may name different adapters. ``InvalidArgument``: one cache twice.
        ``ResourceExhausted``: adapters that one forward cannot hold together.
        """

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run ids ``[B, S]`` without a cache; return logits ``[B, S, V]`` equal to ``prefill``."""

    def forward_verify(
        self, inputs: Sequence[DecodeInput], *, parents: Sequence[int] | None = None
    ) -> list[DecodeOutput]:
        """Run N + 1 tokens of one sequence in one forward; equal to N + 1 chained ``decode`` calls.

        All inputs carry the **same starting handle** and name the same adapter. Token i runs at
        start + i, or is rotated at its ``position_ids``. Output i holds the distribution after
        token i and a handle of length start + i + 1; the last handle is the final state. No inputs,
        no outputs. Room for all is reserved first. ``InvalidArgument``: different handles or
        adapters; "forward_verify input token empty".

        (ours) ``parents``: the tokens are a tree. A parent is an index below the token's own, or
        -1: the handle's last token; several roots are legal. Token i runs at start + its depth and
        sees only its ancestors, so each path equals that path run alone. The cache stays as it was.
        Output i's handle ends in node i and serves ``commit_path`` alone (elsewhere
        ``FailedPrecondition``). A call that changes the cache, another tree included, drops the
        tree; its handles are then stale. ``InvalidArgument``: parents that are no tree.
        """

    def commit_path(self, handle: CacheHandle) -> CacheHandle:
        """(ours) Keep the path of a verified tree that ends in ``handle``; drop other nodes.

        Equal to having decoded the path: it replaces the cache's tokens after the tree's start.
        Returns the handle of the new content. ``InvalidArgument``: the handle ends in no tree or is
        stale.
        """

    def truncate_kv(self, handle: CacheHandle, new_len: int) -> CacheHandle:
        """Keep exactly the first ``new_len`` tokens; return the shortened handle.

        Counts from the *cache's* length; any valid handle will do; equal is a no-op. Pages wholly
        beyond are freed; shared ones are not touched. Recurrent layers return to the nearest kept
        state and replay the tokens after it, at once; ``ExecutorMetrics.replayed_tokens`` counts
        them. Within the tokens of the last ``forward_verify`` every state is kept while there is
        room. Older handles of length <= new_len stay valid; longer ones are stale.

        ``InvalidArgument``: new_len negative or beyond the cache's length, foreign handle.
        ``NotFound``: released. ``FailedPrecondition``, as for every rewind: the replay lacks a
        checkpoint or token record, or its adapter was unloaded; or a window has evicted tokens that
        a continuation there would need. ``ResourceExhausted``: room for the replay.
        """

    def speculative_decode(
        self,
        input: DecodeInput,
        draft_tokens: Sequence[int] | None,
        acceptance_threshold: float,
        *,
        draft_probabilities: Tensor | None = None,
        sampling: RequestSampling | None = None,
        draft_parents: Sequence[int] | None = None,
    ) -> SpeculativeOutput:
        """Verify drafts d_1..d_k after the input token; keep the accepted prefix. No bonus token.

        Let p_i be the softmax of the target logits before d_i. d_i is accepted while
        ``p_i(d_i) >= acceptance_threshold * max_v p_i(v)``: 1.0 is exact greedy (ties accepted),
        0.0 accepts all.

        Exact mode: ``draft_probabilities [k, V]`` are given, and the drafts were *sampled* from
        them. With u uniform in [0, 1), accept iff u * pD(d) < pT(d); pT goes through ``sampling``
        for each running prefix. ``next_probs`` is then the distribution to draw from: after a
        rejection the normalised positive part of pT - pD (pT if that is zero), after full
        acceptance pT of the last row. The output has the target's distribution (Leviathan et al.,
        arXiv:2211.17192). The threshold is validated and otherwise unused.

        (ours) ``draft_parents``: the drafts are a tree. The parent of each is an earlier draft, or
        -1 for the input token. Among the drafts below one token that pass the threshold, the most
        probable is taken. In exact mode they are tried in order, with pT less pD after each
        rejection; they must be independent samples (SpecInfer, arXiv:2305.09781).

        (ours) ``draft_tokens`` None: an executor of type Speculative asks its own proposer, and
        ``sampling`` needs no ``draft_probabilities``, since such drafts are not drawn.

        The length becomes start + 1 + acceptance_count. An empty draft gives the logits of
        ``decode``.

        ``InvalidArgument``: threshold outside [0, 1] or not finite, draft ids outside [0, V) or of
        draft probability 0, rows that are no distributions. ``Unsupported``: hidden states or
        attention weights.
        """

    def batch_speculative_decode(
        self,
        inputs: Sequence[DecodeInput],
        draft_tokens: Sequence[Sequence[int]] | None,
        acceptance_threshold: float,
        *,
        draft_probabilities: Sequence[Tensor | None] | None = None,
        sampling: Sequence[RequestSampling | None] | None = None,
        draft_parents: Sequence[Sequence[int] | None] | None = None,
    ) -> list[SpeculativeOutput]:
        """(ours) Run ``speculative_decode`` for several sequences in one forward, with an entry of
        each argument for each. Each cache may occur once. If one item is refused, none runs."""

    def release_cache(self, cache_id: str) -> None:
        """Free a sequence; shared pages survive. Never raises; unknown ids do nothing."""

    def capabilities(self) -> ExecutorCapabilities:
        """Return this model's abilities on this device, and the rule table of refusals. In any
        state. The first call on an open executor with room for two tokens measures activation
        memory."""

    def status(self) -> ExecutorStatus:
        """Return a measured snapshot: state, counts, times, memory. In any state."""

    def metrics(self) -> ExecutorMetrics:
        """Return measured latencies, throughput, use of memory and batch. In any state."""

    def info(self) -> ExecutorInfo:
        """Return the model's metadata, constant for the executor's life. In any state."""

    def warmup(self) -> None:
        """Measure memory of activations and speed of decoding. Optional and idempotent."""

    def shutdown(self) -> None:
        """Cancel or finish running calls and free everything. Idempotent and terminal."""

    def supports_batch_size(self, batch_size: int, sequence_length: int = 1) -> bool:
        """Return True if ``batch_size`` new sequences of ``sequence_length`` tokens can run now.
        Gives nothing up. True if ``batch_size`` is 1..``max_batch_size``, if pages and states
        suffice that are free or would be given up, and if a decode's measured activations fit the
        free memory."""

    def optimal_batch_size(self, sequence_length: int = 1) -> int:
        """Return the best batch now: the largest supported, or ``warmup``'s throughput knee."""


class ExecutorFactory(Protocol[ConfigT]):
    """Makes executors from a configuration."""

    def create_executor(self, config: ConfigT) -> ModelExecutor:
        """Validate, load, make. ``CheckpointError``: the model cannot load; errors of
        validation."""

    def create_batch_executor(self, config: ConfigT) -> ModelExecutor:
        """Make an executor of a type that batches; ``InvalidArgument`` for another type."""

    def validate_config(self, config: ConfigT) -> None:
        """Check every field without loading. ``InvalidArgument`` names the field, its value and the
        accepted values. ``Unsupported``: an executor type that needs absent devices."""

    def supported_types(self) -> list[ExecutorType]:
        """Return exactly the types that can be made on this machine."""


class ExecutorRegistry(Protocol):
    """Executors by name. The registry references them and does not own them: it shuts none down."""

    def register(self, name: str, executor: ModelExecutor) -> ModelExecutor:
        """Store and return ``executor``. ``AlreadyExists``: a taken name. ``InvalidArgument``: an
        empty one."""

    def get(self, name: str) -> ModelExecutor | None:
        """Return the executor, or None for an unknown name."""

    def remove(self, name: str) -> ModelExecutor | None:
        """Remove and return the executor, not shut down, or None for an unknown name."""

    def list_names(self) -> list[str]:
        """Return all registered names, sorted, in a fresh list."""

    def get_metrics(self, name: str) -> ExecutorMetrics | None:
        """Return the executor's metrics, or None for an unknown name."""
