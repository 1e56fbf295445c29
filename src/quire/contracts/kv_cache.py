"""The KV cache that a caller owns, and the immutable handle of it.

``KVCacheInterface`` is LiteRT-LM's KV cache: a batch of rows on copy-on-write pages. ``CacheHandle`` is ferrum's
handle: a view of such a cache at one moment, with a revision. ``BlockTable`` says which pages a row holds.

Letters: B rows of a cache; n tokens of a row; Hkv KV heads; Dk, Dv head sizes of K and V.
*Length*: tokens whose state is valid. *Capacity*: token slots that a row may use, whatever the page size; pages
are taken as they are needed. A *block* is a page.

Every failed check is ``InvalidArgument`` unless a docstring says otherwise, and leaves all caches as they were.
Forks, selections, broadcasts and deep copies share pages: they cost O(pages) integers whatever the length, and
writes to one side never show in the other. Layer states that are no K and V (recurrent, latent, windowed) live in
the same cache and obey the same verbs. No torch is imported at run time here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from quire.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class KVCacheInterface(Protocol):
    """A batch of B sequences in a pool of pages. The caller owns it; pages go back with its last reference.

    *Static*: the capacity is fixed. *Dynamic*: it starts at 1 and grows by itself, up to the model's maximum.
    """

    @property
    def num_entries(self) -> int:
        """Capacity in token slots per row, **not** tokens used; the smallest over all layer states."""

    @property
    def batch_size(self) -> int:
        """Number of rows B, as given at creation; never changes."""

    @property
    def length(self) -> int:
        """(ours) Tokens used by the longest row; with one row, its length."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """(ours) Tokens used, per row."""

    def serialize(self) -> bytes:
        """All state as a safetensors container: no code in it, little-endian, only used slots.

        It holds format version, the model's fingerprint, of each row under which adapters its tokens ran, dtype, batch size, capacity, lengths and next
        positions, token ids where known, per layer kind and geometry, recurrent checkpoints with their positions,
        per tensor name, shape, byte length and checksum. O(bytes used).
        """

    def load(self, data: bytes, *, convert_dtype: bool = False) -> None:
        """Replace all content by what ``serialize`` gave, or that of one row by a session's state file, of which tokens that the file has
        no state of are run; validated completely first, committed in one step.

        Afterwards any call equals that call on the serialised cache, bit-exact on the same device; where going back runs other
        tokens again than there, since recent recurrent states are not stored, up to rounding. Another dtype is
        converted only with ``convert_dtype=True``. Handles of the replaced content become stale.

        ``DataLoss``: truncated, malformed, checksum, trailing bytes. ``InvalidArgument`` with expected and found:
        version, model, an adapter that is not loaded here, dtype, geometry, batch size, rank or shape, missing or
        surplus tensors, static capacity below the stored length (larger is fine; a dynamic cache grows).
        ``ResourceExhausted``: pages, or slots for recurrent states. ``Cancelled``: while such tokens ran; nothing is replaced.
        """

    def select_and_copy_from(self, other: KVCacheInterface, b: int) -> None:
        """Row 0 of this cache becomes row ``b`` of ``other``, in every state tensor, with its length.

        Checked in this order: other is Quire's own cache; other.batch_size > this.batch_size (strict: 1 to 1 is
        refused); this.batch_size = 1; 0 <= b < other.batch_size; equal ``num_entries``; both static or both
        dynamic; every tensor name of this exists in other; same model fingerprint and dtype.
        """

    def broadcast_and_copy_from(self, other: KVCacheInterface) -> None:
        """Every row of this cache becomes row 0 of ``other``, with its length.

        Checked in this order: other is Quire's own cache; other.batch_size = 1; this.batch_size > 1 (strict); then
        as ``select_and_copy_from``.
        """

    def deep_copy(self) -> Self:
        """A new independent cache: contents, capacity, kind, lengths, positions, and which adapter each token ran under."""

    def contains(self, name: str) -> bool:
        """Whether a state tensor of that name is held: ``kv_cache_k_0``, ``kv_cache_v_0``, ..."""

    def clear(self) -> None:
        """Contents read as zero, lengths become 0, pages go back; capacity, kind and batch size stay."""

    def resize(self, n: int) -> None:
        """Raise the capacity of a dynamic cache to ``n`` slots per row; contents stay, new slots read as zero.

        n <= capacity does nothing: a cache never shrinks. A static cache: ``InvalidArgument`` "KV cache is not
        dynamic and cannot be resized." Beyond the model's maximum: ``ResourceExhausted``.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTable:
    """The pages of one row, in order, and how many of its token slots are in use. A value: growing gives a new one."""

    block_size: int
    """Token slots of a block."""
    blocks: tuple[int, ...] = ()
    """Page ids by logical index; the null page stands where a window has passed."""
    sequence_length: int = 0
    """Tokens in use."""

    def __post_init__(self) -> None:
        needed = self.blocks_needed(self.sequence_length, self.block_size)
        if needed > len(self.blocks):
            raise InvalidArgument(
                f"sequence_length {self.sequence_length} needs {needed} blocks of {self.block_size}; "
                f"got {len(self.blocks)}"
            )

    @staticmethod
    def blocks_needed(length: int, block_size: int) -> int:
        """ceil(length / block_size). ``InvalidArgument`` if length < 0 or block_size < 1."""
        if block_size < 1:
            raise InvalidArgument(f"block_size must be >= 1; got {block_size}")
        if length < 0:
            raise InvalidArgument(f"length must be >= 0; got {length}")
        return -(-length // block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self.blocks)

    @property
    def free_tokens(self) -> int:
        """Slots of held blocks that are not in use; 0 without blocks."""
        return self.num_blocks * self.block_size - self.sequence_length

    @property
    def has_free_space(self) -> bool:
        """Whether one more token fits into the held blocks."""
        return self.free_tokens > 0

    def extend(self, num_tokens: int) -> BlockTable:
        """The table with ``num_tokens`` >= 0 more tokens in use.

        ``ResourceExhausted`` "Insufficient blocks: need x, have y" past the held blocks.
        """
        if num_tokens < 0:
            raise InvalidArgument(f"num_tokens must be >= 0; got {num_tokens}")
        length = self.sequence_length + num_tokens
        needed = self.blocks_needed(length, self.block_size)
        if needed > self.num_blocks:
            raise ResourceExhausted(f"Insufficient blocks: need {needed}, have {self.num_blocks}")
        return replace(self, sequence_length=length)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheHandleStats:
    """What the cache behind a handle uses now."""

    memory_bytes: int
    """Bytes of the pages and recurrent states held, shared ones included."""
    blocks_allocated: int
    tokens_stored: int
    """Sum over rows."""
    utilization: float
    """Token slots in use over token slots held, in [0, 1]; 0.0 if none is held."""
    last_access: float | None = None
    """``time.monotonic()`` of the last call that used the cache, None before the first."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "blocks_allocated", "tokens_stored"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must be >= 0; got {getattr(self, name)}")
        if not 0.0 <= self.utilization <= 1.0:
            raise InvalidArgument(f"utilization must be in [0, 1]; got {self.utilization}")


class CacheHandle(Protocol):
    """An immutable view of a KV cache: its id, its lengths, its revision. The storage behind the id is shared.

    ``decode`` returns a *new* handle. Using an older, shorter one means: rewind to its length and overwrite; two
    live branches need ``clone_handle``. A handle is *stale* once its cache was rewound, truncated or cleared below the
    handle's length, or had its content replaced; using it is ``InvalidArgument``. A released cache is ``NotFound``,
    a handle of another executor ``InvalidArgument``.
    """

    @property
    def cache_id(self) -> str:
        """Name of the cache, unique for the process."""

    @property
    def sequence_length(self) -> int | tuple[int, ...]:
        """Tokens that this handle covers; where B > 1 a tuple, one per row."""

    @property
    def num_tokens(self) -> int | tuple[int, ...]:
        """The same as ``sequence_length``, which is authoritative."""

    @property
    def revision(self) -> int:
        """Grows whenever content that an older handle covered is rewound, cleared or replaced."""

    @property
    def block_table(self) -> BlockTable | tuple[BlockTable, ...]:
        """The pages that this handle covers; where B > 1 a tuple, one per row. ``Unsupported`` where recurrent layers are all
        that there is."""

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""

    @property
    def num_layers(self) -> int:
        """Layers with state."""

    @property
    def num_heads(self) -> int:
        """KV heads (Hkv); 0 without K and V."""

    @property
    def head_dim(self) -> int:
        """Dk, which need not be hidden size over heads; 0 without K and V."""

    @property
    def stats(self) -> CacheHandleStats:
        """Bytes, blocks and tokens in use. Measured."""

    @property
    def is_valid(self) -> bool:
        """Whether the next call may use it: neither stale nor released. Never raises."""

    def key_cache(self, layer: int) -> Tensor:
        """A gathered copy of K of one layer, ``[B, n, Hkv, Dk]``, as stored; zero beyond the length of a row, and where a
        window has let go of a token.

        n is the largest length of the handle's rows. ``InvalidArgument``: no such layer, stale. ``Unsupported``: a
        layer without K and V. ``NotFound``: released. O(rows).
        """

    def value_cache(self, layer: int) -> Tensor:
        """A gathered copy of V of one layer, ``[B, n, Hkv, Dv]``; otherwise as ``key_cache``."""

    def clone_handle(self) -> CacheHandle:
        """A copy-on-write fork with an id and a hold on the pages of its own. O(pages) integers.

        Of a handle that ends before its cache does, where no recurrent state is kept there, the fork runs the tokens that lead to it
        again, which takes room. ``InvalidArgument``: stale. ``NotFound``: released. ``ResourceExhausted`` and
        ``FailedPrecondition``: as ``ModelExecutor.truncate_kv``.
        """
