"""Reports of an executor: model, capabilities, status, metrics. Values without torch.

Every number comes from the loaded model, the device or the implementation, or is measured; none is
a constant. Memory is in bytes, latency in milliseconds, throughput in tokens per second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.signatures import checks_arguments


def _require_at_least(value: Any, lowest: int, *names: str) -> None:
    """Raise ``InvalidArgument`` for a smaller number in these fields, or in any."""
    for name in names or value.__dataclass_fields__:
        number = getattr(value, name)
        if isinstance(number, int | float) and not number >= lowest:
            raise InvalidArgument(f"{type(value).__name__}.{name} must be >= {lowest}; got {number}")


class ExecutorType(StrEnum):
    """How an executor runs its sequences."""

    SEQUENTIAL = "Sequential"
    """Runs one sequence at a time: its largest batch is 1."""
    BATCH = "Batch"
    """Runs a fixed batch to completion: rows of one prefill decode together until released."""
    CONTINUOUS_BATCH = "ContinuousBatch"
    """Sequences join and leave between steps."""
    SPECULATIVE = "Speculative"
    """A draft proposes, the target verifies."""
    PIPELINE_PARALLEL = "PipelineParallel"
    """Layers are split over devices."""
    TENSOR_PARALLEL = "TensorParallel"
    """Each layer is split over devices."""


class AttentionMechanism(StrEnum):
    MULTI_HEAD = "MultiHead"
    MULTI_QUERY = "MultiQuery"
    GROUPED_QUERY = "GroupedQuery"
    FLASH = "Flash"
    PAGED = "Paged"
    SLIDING_WINDOW = "SlidingWindow"


class ExecutorState(StrEnum):
    INITIALIZING = "Initializing"
    READY = "Ready"
    BUSY = "Busy"
    """A call is running; further calls are accepted and wait."""
    ERROR = "Error"
    """The device failed and cannot be recovered."""
    SHUTDOWN = "Shutdown"
    """Terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorInfo:
    """The loaded model; constant for the executor's life."""

    architecture: str
    """As in ``config.json``, for example ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    """Query heads; 0 without attention, as the two fields below."""
    num_kv_heads: int
    head_dim: int
    """From the configuration; need not be hidden size over heads."""
    max_sequence_length: int
    """Largest number of tokens of a row."""
    dtype: str
    """Dtype of the weights, such as ``float32``."""
    device: str
    """Such as ``cuda:0``."""
    num_parameters: int
    fingerprint: str
    """Digest of architecture, configuration and weights, stored in caches and state files."""
    path: str = ""
    """The checkpoint's directory, for ``ExecutorConfig(model_info=...)``; "": none."""

    def __post_init__(self) -> None:
        _require_at_least(self, 1, "vocab_size", "hidden_size", "num_layers", "max_sequence_length")
        _require_at_least(self, 0, "num_heads", "num_kv_heads", "head_dim", "num_parameters")
        for name in ("architecture", "dtype", "device", "fingerprint"):
            if not getattr(self, name):
                raise InvalidArgument(f"ExecutorInfo.{name} must not be empty")
        if bool(self.num_heads) != bool(self.num_kv_heads) or (
            self.num_kv_heads and self.num_heads % self.num_kv_heads
        ):
            raise InvalidArgument(
                f"num_heads must be a multiple of num_kv_heads, or both 0; got {self.num_heads} and {self.num_kv_heads}"
            )


@checks_arguments()
@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequirements:
    """Memory that a batch needs, in bytes: a linear estimate that bounds the measured peak.

    It holds for B prompts of S tokens in one forward with all logits. It exceeds the peak by at
    most 10 %, apart from the logits of 64 tokens and the unused slots of one page of K and V per
    row. It falls below the peak by at most 10 %, or 1 % if the vocabulary is large. Both bounds are
    25 % with recurrent layers, because their kernels work on pieces of a fixed length and on the
    states of all rows. Prompts of different lengths or with fewer logits, and decodes of rows of S
    >= 2 tokens need no more.

    Further memory is needed for: the activations of one forward if prompts run in several;
    requested hidden states and attention weights; a second copy of the logits of prompts of
    different lengths under an adapter; recurrent states beyond the present one of each row (the one
    that a forward writes, and those kept for rewinds while there is room).
    """

    parameter_memory: int
    """Storage of all weights."""
    activation_memory_per_token: int | None
    """Measured; None: not yet, for lack of room."""
    kv_cache_memory_per_token: int
    """Per token **per layer**: K and V of all KV heads in their dtype, with scales if quantised."""
    overhead_memory: int | None
    """Measured; None as above."""
    recurrent_memory_per_row: int = 0
    """(ours) The present states of all recurrent layers of one row, whatever its length."""

    def __post_init__(self) -> None:
        _require_at_least(self, 0)

    def calculate_total_memory(self, batch_size: int, sequence_length: int, num_layers: int) -> int:
        """Return bytes for B rows (``batch_size``) of S tokens (``sequence_length``) in L layers.

        That is parameters + activation * B * S + K/V * B * S * L + overhead + recurrent states of B
        rows if S > 0. ``InvalidArgument``: a negative argument. ``FailedPrecondition``: unmeasured
        activations.
        """
        if self.activation_memory_per_token is None or self.overhead_memory is None:
            raise FailedPrecondition(
                "memory of activations is not measured: the pool had no room for two tokens; release caches, and ask for "
                "capabilities() again"
            )
        if min(batch_size, sequence_length, num_layers) < 0:
            raise InvalidArgument(
                "batch_size, sequence_length and num_layers must be >= 0; "
                f"got {batch_size}, {sequence_length}, {num_layers}"
            )
        tokens = batch_size * sequence_length
        per_token = self.activation_memory_per_token + self.kv_cache_memory_per_token * num_layers
        states = self.recurrent_memory_per_row * batch_size if sequence_length else 0
        return self.parameter_memory + per_token * tokens + states + self.overhead_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorCapabilities:
    """Abilities of this model on this device, as far as implemented."""

    max_batch_size: int
    max_sequence_length: int
    attention_mechanisms: tuple[AttentionMechanism, ...]
    supports_dynamic_batching: bool
    supports_continuous_batching: bool
    supports_speculative_decoding: bool
    supports_tensor_parallelism: bool
    supports_pipeline_parallelism: bool
    supported_dtypes: tuple[str, ...]
    supported_devices: tuple[str, ...]
    memory_requirements: MemoryRequirements
    layer_kinds: tuple[str, ...] = ()
    """(ours) Kinds of layer state in KV caches, sorted: "full", "window", "latent", "recurrent"."""
    refusals: tuple[tuple[str, str], ...] = ()
    """(ours) The rule table: verbs and combinations that raise ``Unsupported`` here, with
    reasons."""

    def __post_init__(self) -> None:
        _require_at_least(self, 1, "max_batch_size", "max_sequence_length")
        names = [name for name, _ in self.refusals]
        if len(set(names)) != len(names):
            raise InvalidArgument(f"each refusal must be named once; got {names}")

    def why_not(self, name: str) -> str | None:
        """Return the reason of a refusal; None if the table has no such entry."""
        return dict(self.refusals).get(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUsage:
    """Device memory of an executor in bytes: 0 <= used <= allocated, used <= peak."""

    allocated_bytes: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    """The largest ``used_bytes`` so far."""

    def __post_init__(self) -> None:
        _require_at_least(self, 0, "used_bytes")
        _require_at_least(self, self.used_bytes, "allocated_bytes", "peak_bytes")

    @property
    def utilization_percent(self) -> float:
        """100 * used / allocated; 0.0 if nothing is allocated."""
        return 100.0 * self.used_bytes / self.allocated_bytes if self.allocated_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorStatus:
    """A snapshot. One operation is one sequence's prefill or one sequence's decode step.

    A batch of 8 counts as 8, a verify or speculative call as one decode. Failed and cancelled calls
    count 0.
    """

    state: ExecutorState
    current_batch_size: int = 0
    prefill_operations: int = 0
    decode_operations: int = 0
    avg_prefill_time_ms: float = 0.0
    """Lifetime mean; 0.0 without samples."""
    avg_decode_time_ms: float = 0.0
    memory_usage: MemoryUsage = field(default_factory=MemoryUsage)
    last_operation: float | None = None
    """``time.monotonic()`` of the last completed operation; None before the first."""
    fallbacks: tuple[str, ...] = ()
    """(ours) Features requested "if supported" that this device lacks, with their replacements."""

    def __post_init__(self) -> None:
        _require_at_least(self, 0)

    @property
    def is_ready(self) -> bool:
        """Return True if a call would be accepted: the state is Ready or Busy."""
        return self.state in (ExecutorState.READY, ExecutorState.BUSY)

    def to_dict(self) -> dict[str, object]:
        """Return JSON types, without ``last_operation``: monotonic time is local to a process."""
        values: dict[str, Any] = asdict(self)
        del values["last_operation"]
        values["memory_usage"]["utilization_percent"] = self.memory_usage.utilization_percent
        return values | {"state": self.state.value, "is_ready": self.is_ready, "fallbacks": list(self.fallbacks)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorMetrics:
    """Measured since the start, 0 without samples. Operations are those of ``ExecutorStatus``."""

    prefill_operations: int = 0
    decode_operations: int = 0
    avg_prefill_latency: float = 0.0
    """Mean since the start in ms, around device-synchronised execution."""
    avg_decode_latency: float = 0.0
    p95_prefill_latency: float = 0.0
    """95th percentile in ms, linearly interpolated over the last 1000 samples."""
    p95_decode_latency: float = 0.0
    throughput_tps: float = 0.0
    """Generated tokens per busy second, prefill included: decode step 1, speculative call 1 +
    accepted, verify 1."""
    batch_utilization: float = 0.0
    """Mean decode batch over ``max_batch_size``, in [0, 1]."""
    memory_efficiency: float = 0.0
    """Used over allocated, in [0, 1]."""
    replayed_tokens: int = 0
    """(ours) Number of replayed tokens in completed calls: tokens after the nearest kept recurrent
    state on a rewind, and accepted drafts without room for a state after each."""

    def __post_init__(self) -> None:
        _require_at_least(self, 0)
        for name in ("memory_efficiency", "batch_utilization"):
            if getattr(self, name) > 1.0:
                raise InvalidArgument(f"ExecutorMetrics.{name} must be in [0, 1]; got {getattr(self, name)}")

    @property
    def total_operations(self) -> int:
        return self.prefill_operations + self.decode_operations

    def to_dict(self) -> dict[str, object]:
        return {"total_operations": self.total_operations, **asdict(self)}
