"""The KV cache that a caller owns, and its immutable handle.

``KVCacheInterface`` is LiteRT-LM's KV cache: a batch of rows on copy-on-write pages.
``CacheHandle`` is ferrum's handle: a view of a cache with a revision. ``BlockTable`` lists a row's
pages.

Letters: B rows of a cache; n tokens of a row; Hkv KV heads; Dk, Dv head sizes of K and V. *Length*:
tokens with valid state. *Capacity*: token slots that a row may use, whatever the page size; pages
are taken as needed. A *block* is a page.

A failed check raises ``InvalidArgument`` unless a docstring says otherwise, and leaves all caches
unchanged. Forks, selections, broadcasts and deep copies share pages: they cost O(pages) integers at
any length, and writes to one side never show in the other. Other layer states (recurrent, latent,
windowed) live in the same cache and obey the same verbs. No torch is imported at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from quire.base.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class KVCacheInterface(Protocol):
    """A batch of B sequences in a pool of pages. The caller owns it; its last reference frees the
    pages. *Static*: fixed capacity. *Dynamic*: it starts at 1 and grows to the model's maximum."""

    @property
    def num_entries(self) -> int:
        """Capacity in token slots per row, **not** tokens used; smallest of all layer states."""

    @property
    def batch_size(self) -> int:
        """Number of rows B, given at creation; never changes."""

    @property
    def length(self) -> int:
        """(ours) Tokens used by the longest row; with one row, its length."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """(ours) Tokens used, per row."""

    def serialize(self) -> bytes:
        """Return all state as a safetensors container: no code, little-endian, only used slots.

        It holds the format version, the model's fingerprint, dtype, batch size, capacity, lengths
        and next positions; each row's adapters by token, and its token ids if known; each layer's
        kind and geometry; recurrent checkpoints with positions; each tensor's name, shape, byte
        length and checksum. O(bytes used).
        """

    def load(self, data: bytes, *, convert_dtype: bool = False) -> None:
        """Replace all content by the output of ``serialize``, or one row by a session's state file.

        Validates everything first, then commits in one step. Tokens of a state file without stored
        state are run. Afterwards any call equals that call on the serialised cache, bit-exact on
        the same device. Only rewinds may differ, up to rounding: recent recurrent states are not
        stored, so a rewind may replay other tokens. Another dtype needs ``convert_dtype=True``.
        Handles of the replaced content become stale.

        ``DataLoss``: truncated, malformed, checksum, trailing bytes. ``InvalidArgument`` with
        expected and found: version, model, an adapter that is not loaded here, dtype, geometry,
        batch size, rank or shape, missing or surplus tensors, static capacity below the stored
        length (larger is fine; a dynamic cache grows). ``ResourceExhausted``: pages, or slots for
        recurrent states. ``Cancelled``: while tokens ran; nothing is replaced.
        """

    def select_and_copy_from(self, other: KVCacheInterface, b: int) -> None:
        """Copy row ``b`` of ``other`` into row 0 of this cache: all state tensors and the length.

        Checks in this order: other is Quire's own cache; other.batch_size > this.batch_size
        (strict: 1 to 1 is refused); this.batch_size = 1; 0 <= b < other.batch_size; equal
        ``num_entries``; both static or both dynamic; all tensor names of this in other; same model
        fingerprint and dtype.
        """

    def broadcast_and_copy_from(self, other: KVCacheInterface) -> None:
        """Make every row of this cache a copy of row 0 of ``other``, with its length. Checks in
        this order: other is Quire's own cache; other.batch_size = 1; this.batch_size > 1; then as
        ``select_and_copy_from``."""

    def deep_copy(self) -> Self:
        """Return an independent copy: contents, capacity, kind, lengths, positions, adapters."""

    def contains(self, name: str) -> bool:
        """Return True if a state tensor has that name: ``kv_cache_k_0``, ``kv_cache_v_0``, ..."""

    def clear(self) -> None:
        """Zero the contents and lengths and free the pages; keep capacity, kind and batch size."""

    def resize(self, n: int) -> None:
        """Raise the capacity of a dynamic cache to ``n`` slots per row; new slots read as zero. n
        <= capacity does nothing: a cache never shrinks. A static cache: ``InvalidArgument`` "KV
        cache is not dynamic and cannot be resized." ``ResourceExhausted``: beyond the maximum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTable:
    """The pages of one row, in order, and the number of token slots in use. An immutable value."""

    block_size: int
    """Token slots of a block."""
    blocks: tuple[int, ...] = ()
    """Page ids by logical index; the null page for evicted pages."""
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
        """Return ceil(length / block_size). ``InvalidArgument``: length < 0 or block_size < 1."""
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
        """Return True if one more token fits into the held blocks."""
        return self.free_tokens > 0

    def extend(self, num_tokens: int) -> BlockTable:
        """Return a table with ``num_tokens`` >= 0 more tokens in use. ``ResourceExhausted``:
        "Insufficient blocks: need x, have y", beyond the held blocks."""
        if num_tokens < 0:
            raise InvalidArgument(f"num_tokens must be >= 0; got {num_tokens}")
        length = self.sequence_length + num_tokens
        needed = self.blocks_needed(length, self.block_size)
        if needed > self.num_blocks:
            raise ResourceExhausted(f"Insufficient blocks: need {needed}, have {self.num_blocks}")
        return replace(self, sequence_length=length)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheHandleStats:
    """Present use of the cache behind a handle."""

    memory_bytes: int
    """Bytes of the pages and recurrent states held, shared ones included."""
    blocks_allocated: int
    tokens_stored: int
    """Sum over rows."""
    utilization: float
    """Token slots in use over slots held, in [0, 1]; 0.0 without slots."""
    last_access: float | None = None
    """``time.monotonic()`` of the last call that used the cache; None before the first."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "blocks_allocated", "tokens_stored"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must be >= 0; got {getattr(self, name)}")
        if not 0.0 <= self.utilization <= 1.0:
            raise InvalidArgument(f"utilization must be in [0, 1]; got {self.utilization}")


class CacheHandle(Protocol):
    """An immutable view of a KV cache: id, lengths, revision. Handles of one id share its storage.

    ``decode`` returns a *new* handle. Using an older, shorter one rewinds to its length and
    overwrites; two live branches need ``clone_handle``. A handle is *stale* (``InvalidArgument``)
    once its cache was rewound, truncated or cleared below the handle's length, or its content
    replaced. A released cache is ``NotFound``, a handle of another executor ``InvalidArgument``.
    """

    @property
    def cache_id(self) -> str:
        """Name of the cache, unique in the process."""

    @property
    def sequence_length(self) -> int | tuple[int, ...]:
        """Tokens that this handle covers; for B > 1 a tuple, one per row."""

    @property
    def num_tokens(self) -> int | tuple[int, ...]:
        """The same as ``sequence_length``, which is authoritative."""

    @property
    def revision(self) -> int:
        """Grows whenever content of an older handle is rewound, cleared or replaced."""

    @property
    def block_table(self) -> BlockTable | tuple[BlockTable, ...]:
        """Pages that this handle covers; for B > 1 a tuple. ``Unsupported``: only recurrent
        layers."""

    @property
    def device(self) -> torch.device:
        """Device of the pages."""

    @property
    def num_layers(self) -> int:
        """Layers with state."""

    @property
    def num_heads(self) -> int:
        """KV heads (Hkv); 0 without K and V."""

    @property
    def head_dim(self) -> int:
        """Dk, which may differ from hidden size over heads; 0 without K and V."""

    @property
    def stats(self) -> CacheHandleStats:
        """Bytes, blocks and tokens in use. Measured."""

    @property
    def is_valid(self) -> bool:
        """Return True if the next call may use the handle: it is neither stale nor released. Never
        raises."""

    def key_cache(self, layer: int) -> Tensor:
        """Return a gathered copy of K of one layer, ``[B, n, Hkv, Dk]``, as stored.

        n is the largest length of the handle's rows. Slots beyond a row's length and tokens evicted
        by a window are zero. ``InvalidArgument``: no such layer, stale. ``Unsupported``: a layer
        without K and V. ``NotFound``: released. O(rows).
        """

    def value_cache(self, layer: int) -> Tensor:
        """Return a copy of V of one layer, ``[B, n, Hkv, Dv]``; otherwise as ``key_cache``."""

    def clone_handle(self) -> CacheHandle:
        """Return a copy-on-write fork with its own id and hold on the pages. O(pages) integers.

        If the handle ends before its cache does and no recurrent state is kept there, the fork runs
        the preceding tokens again, which needs room. ``InvalidArgument``: stale. ``NotFound``:
        released. Otherwise raises as ``ModelExecutor.truncate_kv``.
        """
