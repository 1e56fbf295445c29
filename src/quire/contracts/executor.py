"""The executors: two faces of one runtime over one kind of state.

``ModelExecutor`` is ferrum's interface (prefill and decode over handles), ``LlmExecutorInterface`` LiteRT-LM's
(prefill, step and sample over KV caches that are changed in place). A KV cache made by one is usable by the other.
``ExecutorFactory`` makes executors, ``ExecutorRegistry`` names them. The values they exchange live in
``executor_inputs``, ``executor_calls`` and ``executor_reports``, and are found here too.

Letters: B batch rows, S tokens of a row, V vocabulary, N tokens or steps, k draft tokens. p is a position, n a
number of new tokens.

Rules for every verb:

* **State lives in KV caches**, not in executors. An executor holds weights, graphs, adapters, scratch memory and
  the page pool; no call depends on what ran before, but for the generator of ``sample_tokens``.
* **Check, then change.** What is wrong or unsupported is refused before compute and changes nothing: no length,
  page, adapter, generator or counter. On an error during compute lengths are as before the call, pages taken by it go
  back, and a cache made by it is freed. A call for several sequences succeeds for all or changes none.
* **Tokens and tensors.** Ids are int32 or int64 in [0, V). Logits are float32, on the executor's device. Inputs are
  never mutated; results belong to the caller.
* **Threads.** Concurrent calls on one executor are safe; calls that overlap on one cache run in some order.
* **Cancelled** calls leave a usable cache, whose length counts what completed: whole chunks of a prefill, whole
  steps of ``sample_tokens``, nothing of a verify, speculative or batch call.

Errors common to all verbs:

=========================  ==========================================================================================
``InvalidArgument``        type, shape, dtype, range, empty ids, a foreign or stale cache, fingerprint mismatch
``NotFound``               unknown or unloaded adapter, released cache, absent member of an input
``FailedPrecondition``     after ``shutdown``; unload of an adapter that is in use
``ResourceExhausted``      capacity of a cache, model maximum or page pool; always before anything is written
``Unsupported``            a verb or combination that this model, device or kind of state does not have
``Cancelled``              the running call was cancelled; ``token_ids`` holds the ids that it had sampled
``QuireError``             an internal invariant or the device broke; never for bad arguments
=========================  ==========================================================================================

A docstring below names only what its verb refuses beyond this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from quire.contracts.executor_calls import (
    CacheLike,
    DecodeInput,
    DecodeOutput,
    PrefillInput,
    PrefillOutput,
    SpeculativeOutput,
)
from quire.contracts.executor_inputs import (
    AUDIO_PLACEHOLDER,
    END_OF_AUDIO,
    END_OF_IMAGE,
    VISION_PLACEHOLDER,
    AudioData,
    ExecutorInputs,
    ModelAssets,
    TextData,
    VisionData,
)
from quire.contracts.executor_reports import (
    AttentionMechanism,
    ExecutorCapabilities,
    ExecutorInfo,
    ExecutorMetrics,
    ExecutorState,
    ExecutorStatus,
    ExecutorType,
    MemoryRequirements,
    MemoryUsage,
)
from quire.contracts.kv_cache import CacheHandle, KVCacheInterface

__all__ = [
    "AUDIO_PLACEHOLDER",
    "END_OF_AUDIO",
    "END_OF_IMAGE",
    "VISION_PLACEHOLDER",
    "AttentionMechanism",
    "AudioData",
    "CacheLike",
    "DecodeInput",
    "DecodeOutput",
    "ExecutorBase",
    "ExecutorCapabilities",
    "ExecutorFactory",
    "ExecutorInfo",
    "ExecutorInputs",
    "ExecutorMetrics",
    "ExecutorRegistry",
    "ExecutorState",
    "ExecutorStatus",
    "ExecutorType",
    "LlmExecutorInterface",
    "MemoryRequirements",
    "MemoryUsage",
    "ModelAssets",
    "ModelExecutor",
    "PrefillInput",
    "PrefillOutput",
    "RequestSampling",
    "SpeculativeOutput",
    "TextData",
    "VisionData",
]

ConfigT = TypeVar("ConfigT", contravariant=True)


class RequestSampling(Protocol):
    """(ours) How one request draws its tokens. Its generator is its own: batch and other requests do not matter."""

    def probabilities(self, logits_RV: Tensor, drafted: Sequence[int]) -> Tensor:
        """The distributions that raw float32 logits ``[R, V]`` become, float32 ``[R, V]``, fresh.

        The last row stands after the request's tokens so far and all of ``drafted``, the row before it after all but
        the last of ``drafted``, and so on, R <= len(drafted) + 1. Masks, grammar, penalties, temperature, top-k,
        top-p and min-p apply, each for that row's prefix. Temperature 0 is one-hot at the first maximum.
        """

    def uniform(self) -> float:
        """The next draw of the request's generator, in [0, 1)."""


class ExecutorBase(Protocol):
    """What both faces have: KV caches, adapters, cancelling."""

    def create_kv_cache(
        self, *, batch_size: int = 1, capacity: int | None = None, dynamic: bool = False
    ) -> KVCacheInterface:
        """A KV cache of length 0 for this model: static, or ``dynamic``.

        ``capacity`` in token slots per row; None: the model's context length if static, 1 if dynamic.
        ``InvalidArgument``: batch_size or capacity < 1. ``ResourceExhausted``: capacity beyond the model's maximum.
        """

    def load_lora(self, assets: ModelAssets) -> int:
        """Load a LoRA adapter and return its id. ``assets`` is the path of a directory that PEFT saved, or of the weights in it,
        beside which their configuration lies; or an adapter in one piece, by path, open file, bytes or stream: a zip archive of
        such a directory, or a safetensors file whose metadata holds the text of ``adapter_config.json`` as ``adapter_config``. That
        is read into memory, at most 2 GiB of it; nothing is written or executed.

        The executor chooses ids >= 0, unique for its life, never reused; two loads of one file give two. Modules
        that the adapter lacks behave as base weights. Base results are unchanged after it was loaded, used and
        unloaded.

        ``CheckpointError``: rank, shapes, target modules, base model, unknown tensors, damaged bytes, another form, or too long, all
        checked before anything changes. ``InvalidArgument``: a file or stream that gives no bytes. ``NotFound``: no such
        directory. ``Unsupported``: a model that cannot run adapters, an adapter that asks for what is not computed. ``ResourceExhausted``: its rank is beyond what one forward can hold, or
        the memory for loaded adapters is full.
        """

    def unload_lora(self, lora_id: int) -> None:
        """Forget an adapter. It waits for the calls that use it; ``FailedPrecondition`` where a request or session of an engine
        that shares the model needs it.

        ``NotFound``: unknown or unloaded already. Caches made under it stay usable; only what would run their tokens again is
        refused (``truncate_kv``).
        """

    def cancel(self) -> None:
        """Cancel the operations that are in progress on this executor at this moment.

        Callable from any thread, idempotent, never waits; best effort. The flag belongs to a running operation and
        dies with it: with none in progress nothing happens, to the next call neither. It is checked before each
        prefill chunk and each sampled token; the cancelled call raises ``Cancelled``.
        """


class LlmExecutorInterface(ExecutorBase, Protocol):
    """LiteRT-LM's executor, with external (``step``) and internal (``sample_tokens``) sampling.

    Each call names at most one adapter, under which its tokens run, whatever those before them ran under; ``lora_id=None`` is the
    base model. ``inputs.next_position`` p, if given, must
    be 0..length; a lower one is a rewind. After running n tokens the length is p + n.
    """

    def prefill(self, inputs: ExecutorInputs, kv_cache: KVCacheInterface, lora_id: int | None = None) -> None:
        """Run **all** given tokens and write them all. No logits: keep the last prompt token for the first ``step``.

        Legal at any time, also after ``step``. ``prefill(a)`` then ``prefill(b)`` equals ``prefill(a + b)`` (an image that
        sees itself as a whole must not be divided between the two).

        Vision and audio embeddings take the places of their placeholders. Any decoder takes embeddings of its width, so a
        modality is one that the executor was made for, whose encoder is the caller's.

        ``InvalidArgument``: "Prefill token ids must be non-empty." (absent, or S = 0); B is not the cache's batch
        size; a foreign cache or another model's; media rows that do not match the placeholders, or the model's width.
        ``ResourceExhausted``: p + n beyond a static cache's capacity or the model's maximum (a dynamic cache grows).
        ``Unsupported``: a modality that this executor was not made for; per-layer embeddings for a model without such.
        """

    def step(self, inputs: ExecutorInputs, kv_cache: KVCacheInterface, lora_id: int | None = None) -> Tensor:
        """Write the given token of each row; return the distribution of what follows: logits ``[B, 1, V]``.

        An empty cache is legal. ``InvalidArgument``: "Expect 1 token id for decode."; vision or audio data.
        ``ResourceExhausted``: "KV cache full" if static, or the model's maximum.
        """

    def sample_tokens(
        self,
        num_steps: int,
        inputs: ExecutorInputs,
        kv_cache: KVCacheInterface,
        lora_id: int | None = None,
        *,
        sampling: RequestSampling | None = None,
    ) -> list[int]:
        """``num_steps`` decode steps with sampling inside, for B = 1; exactly that many ids.

        The id sampled at a step is the input of the next. There is no stop logic. The last sampled id is **not** in
        the cache: the length becomes start + N, where the caller passes it next. ``sampling=None``: the sampling fixed
        at construction, greedy by default. 0 steps give [] and change nothing. Room for all N is checked first.

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
        """(ours) ``sample_tokens`` for any B: ``[B][num_steps]`` ids. ``sampling``: one per row."""


class ModelExecutor(ExecutorBase, Protocol):
    """ferrum's model, batch and speculative executor."""

    def prefill(self, input: PrefillInput) -> PrefillOutput:
        """Run prompts, or further pieces of them, and return logits and the handle.

        With a ``kv_cache`` the new length is prior + n; without one a fresh cache is made. Padding never enters the
        cache. Room is reserved first. ``InvalidArgument``: "Input token tensor is empty". ``ResourceExhausted``: also a position
        beyond the model's maximum. ``Unsupported``: positions, hidden states or attention weights that cannot be honoured. What is asked for is computed for all real tokens.
        """

    def decode(self, input: DecodeInput) -> DecodeOutput:
        """Run one token for each row of the handle: logits ``[B, V]`` and a new handle, one token longer."""

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """Many prompts of different lengths in one forward; rules of ``batch_decode``. Adapters that do not fit together run one
        after the other."""

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Many sequences in one forward; equal to its members one by one.

        Order and length are kept; no inputs, no outputs. All or nothing: an error names the item. Items may name different
        adapters. ``InvalidArgument``: one cache twice. ``ResourceExhausted``: adapters that one forward cannot hold together.
        """

    def forward(self, input_ids: Tensor) -> Tensor:
        """A full pass without cache: ids ``[B, S]`` to logits ``[B, S, V]``, equal to those of ``prefill``."""

    def forward_verify(
        self, inputs: Sequence[DecodeInput], *, parents: Sequence[int] | None = None
    ) -> list[DecodeOutput]:
        """N + 1 tokens of one sequence in one forward; equal to N + 1 chained ``decode`` calls.

        All inputs carry the **same starting handle** and name the same adapter. Token i runs at start + i (or is rotated where its
        ``position_ids`` say); output i holds the distribution after
        it and a handle of length start + i + 1; the last is the final state. No inputs, no outputs. Room for all is
        reserved first. ``InvalidArgument``: different handles or adapters; "forward_verify input token empty".

        (ours) ``parents``: the tokens are a tree. Parent of each, -1 (behind the handle's last token; several roots are
        legal) or an index below its own. Token i runs at start + its depth and sees its ancestors only, so each path
        equals that path run alone. The cache stays as it was; output i's handle ends in node i, and is for
        ``commit_path`` alone (``FailedPrecondition`` elsewhere). A call that changes the cache, another tree included, drops
        the tree, and such handles are stale. ``InvalidArgument``: parents that are no tree.
        """

    def commit_path(self, handle: CacheHandle) -> CacheHandle:
        """(ours) Keep the path of a verified tree that ends in the node of ``handle``; forget its other nodes.

        Equal to having decoded the path: the tokens of the cache behind the tree's start are replaced by it. Returns the
        handle of the new content. ``InvalidArgument``: a handle that ends in no tree, or a stale one.
        """

    def truncate_kv(self, handle: CacheHandle, new_len: int) -> CacheHandle:
        """Keep exactly the first ``new_len`` tokens; return the shortened handle.

        Counts from the *cache's* length, any valid handle will do; equal is a no-op. Pages wholly beyond go back;
        shared ones are not touched. Recurrent layers go to the nearest state that is kept before it and run the tokens from there on
        again, at once; ``ExecutorMetrics.replayed_tokens`` counts them. Inside of what ``forward_verify`` has just run every state
        is kept, while there is room. Older handles of length <= new_len stay good, longer ones are stale.

        ``InvalidArgument``: new_len negative or beyond the cache's length, foreign handle. ``NotFound``: released.
        ``FailedPrecondition``: a recurrent state without checkpoint or token record for that, or of tokens whose adapter was
        unloaded, or a window that has let go of what a continuation there would need; so does every rewind.
        ``ResourceExhausted``: room to run tokens again.
        """

    def speculative_decode(
        self,
        input: DecodeInput,
        draft_tokens: Sequence[int],
        acceptance_threshold: float,
        *,
        draft_probabilities: Tensor | None = None,
        sampling: RequestSampling | None = None,
        draft_parents: Sequence[int] | None = None,
    ) -> SpeculativeOutput:
        """Verify drafts d_1..d_k after the input token; keep the accepted prefix. No bonus token is sampled.

        With p_i the softmax of the target logits before d_i, d_i is accepted while
        ``p_i(d_i) >= acceptance_threshold * max_v p_i(v)``: 1.0 is exact greedy verification (ties accepted), 0.0
        accepts all.

        Exact mode, with ``draft_probabilities [k, V]`` from which the drafts were *sampled*: with u uniform in
        [0, 1), accept iff u * pD(d) < pT(d); pT is taken through ``sampling`` for each running prefix. ``next_probs``
        is then the distribution to draw from: after a rejection the normalised positive part of pT - pD (pT if that is
        zero), after full acceptance pT of the last row. The output has the target's distribution (Leviathan et al.,
        arXiv:2211.17192). The threshold is validated and otherwise unused.

        (ours) ``draft_parents``: the drafts are a tree; parent of each draft, -1 for the input token, or an earlier draft. Of
        the drafts below one token that the threshold accepts, the most probable is taken. In exact mode they are
        tried in order, pT less pD after each rejection; each must have been sampled independently of the others (SpecInfer,
        arXiv:2305.09781).

        Afterwards the length is start + 1 + acceptance_count. An empty draft gives the logits of ``decode``.

        ``InvalidArgument``: threshold outside [0, 1] or not finite, a draft id outside [0, V), a draft of draft
        probability 0, rows that are no distributions. ``Unsupported``: hidden states or attention weights.
        """

    def release_cache(self, cache_id: str) -> None:
        """Free a sequence. Never raises: an unknown id or a second call has no effect; shared pages survive."""

    def capabilities(self) -> ExecutorCapabilities:
        """What this model on this device can do, and the rule table of what is refused. In any state. Memory of activations is
        measured once, by the first call that finds the executor open and room for two tokens."""

    def status(self) -> ExecutorStatus:
        """A measured snapshot: state, counts, times, memory. In any state."""

    def metrics(self) -> ExecutorMetrics:
        """Measured latencies, throughput, use of memory and batch. In any state."""

    def info(self) -> ExecutorInfo:
        """The model's metadata, constant for the executor's life. In any state."""

    def warmup(self) -> None:
        """Measure memory of activations and the speed of decoding. Optional and idempotent: everything works without it."""

    def shutdown(self) -> None:
        """End or cancel what runs and free everything. Idempotent and terminal."""

    def supports_batch_size(self, batch_size: int, sequence_length: int = 1) -> bool:
        """Whether so many new sequences of so many tokens can run now: 1..``max_batch_size``, pages and states that are free or
        would be given up for them suffice, and the activations of a decode fit what memory is free, once they are measured.
        Gives nothing up."""

    def optimal_batch_size(self, sequence_length: int = 1) -> int:
        """The best batch now: the largest supported, or the throughput knee that ``warmup`` measured."""


class ExecutorFactory(Protocol[ConfigT]):
    """Makes executors from a configuration."""

    def create_executor(self, config: ConfigT) -> ModelExecutor:
        """Validate, then load and make. ``CheckpointError``: a model that cannot be loaded; errors of validation."""

    def create_batch_executor(self, config: ConfigT) -> ModelExecutor:
        """The same for a type that batches; ``InvalidArgument`` for one that does not."""

    def validate_config(self, config: ConfigT) -> None:
        """Check every field without loading.

        ``InvalidArgument`` names the field, its value and what is accepted. ``Unsupported``: an executor type that
        needs absent devices.
        """

    def supported_types(self) -> list[ExecutorType]:
        """Exactly the types that can be made on this machine."""


class ExecutorRegistry(Protocol):
    """Executors by name. Holds, does not own: nothing is shut down here."""

    def register(self, name: str, executor: ModelExecutor) -> ModelExecutor:
        """Keep and return ``executor``. ``AlreadyExists``: the name is taken. ``InvalidArgument``: it is empty."""

    def get(self, name: str) -> ModelExecutor | None:
        """The executor, or None for an unknown name."""

    def remove(self, name: str) -> ModelExecutor | None:
        """Forget and return the executor, not shut down, or None for an unknown name."""

    def list_names(self) -> list[str]:
        """All registered names, sorted, in a fresh list."""

    def get_metrics(self, name: str) -> ExecutorMetrics | None:
        """The executor's metrics, or None for an unknown name."""
