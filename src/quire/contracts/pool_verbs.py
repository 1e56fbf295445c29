"""Holdings and room of a KV state. ``kv_state.ModelState`` is these verbs and all others.

All are *(ours)*: a scheduler uses them and reads no page. Legal at any time; nothing changes. Lists
have one number for each pool of token pages, in one order, then one for the slots of recurrent
states if there are recurrent layers. No torch is imported at run time.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from quire.base.types import SeqId
from quire.contracts.layers import KeyValueAttention, LatentAttention, LayerSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Eviction: TypeAlias = Literal["token", "forward"]
"""When a token leaves the window of a sequence: at each query, or once per forward (TVM's rule)."""
TokenTreeParents: TypeAlias = Sequence[int] | Sequence[Sequence[int] | None]
"""T parents in one list (all entries are trees), or B items, each a list of parents or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry:
    """Constant sizes of the memory of all layers.

    A *layer class* is the layers that keep the same positions; they share a pool of pages.
    """

    specs: tuple[KeyValueAttention | LatentAttention, ...]
    """The layers that keep rows of tokens, with the heads of all ranks."""
    layer_ids: tuple[int, ...]
    """Global ids of ``specs``, ascending."""
    windows: tuple[int | None, ...]
    """The window of each layer class; None: it keeps all tokens."""
    page_bytes: tuple[int, ...]
    """Bytes of one page of each layer class."""
    state_bytes: int
    """Bytes of the states of all recurrent layers at one position."""
    interval: int
    """Tokens between recurrent states that are kept automatically; 0: none are."""
    ring: int
    """Most recent recurrent states that each sequence keeps while there is room."""
    num_ranks: int
    """Number of processes among which the heads are divided."""
    num_stages: int
    """Number of stages among which the layers are divided."""

    @property
    def keeping_layers(self) -> tuple[int, ...]:
        """Global ids of the layers that keep the rows of all tokens, ascending."""
        layers = zip(self.layer_ids, self.specs, strict=True)
        return tuple(layer for layer, spec in layers if spec.layer_window is None)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Global ids of the layers that keep the rows of a window, ascending."""
        keeping = self.keeping_layers
        return tuple(layer for layer in self.layer_ids if layer not in keeping)


class SequenceWindow(NamedTuple):
    """The window of one sequence; ``0 <= sink < size``."""

    size: int
    sink: int = 0
    eviction: Eviction = "token"


class Holding(NamedTuple):
    """The holding of a sequence."""

    held: int
    shared: int
    """Number of these that other sequences hold too."""


class SequenceUse(NamedTuple):
    """Memory taken by the tokens of a sequence."""

    pages: int
    """Pages of all layer classes."""
    rows: int
    """Tokens with rows in these pages, summed over the layer classes."""
    num_bytes: int
    """Bytes of these pages and of the sequence's recurrent states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """The purpose of one pool. Constant."""

    kind: Literal["tokens", "encoder", "states"]
    """Whether its pages hold rows of tokens, rows of encoders, or recurrent states."""
    layers: tuple[int, ...]
    """Global ids of the layers that it serves, ascending."""
    window: int | None
    """The window of these layers; None: they keep all tokens."""
    num_pages: int
    page_tokens: int
    """Positions of a page; 1 for a recurrent state."""
    page_bytes: int
    """Bytes of a page, over all of its layers."""


class StateRole(enum.IntEnum):
    """Why a sequence keeps a recurrent state."""

    PRESENT = 0
    """The state at the end of the committed tokens."""
    CHECKPOINT = 1
    RING = 2
    """A state shortly before the present one, dropped for any forward that needs the slot."""
    NODE = 3
    """The state of an uncommitted node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePages:
    """The pages in one sequence's tables, copied, and its positions."""

    length: int
    """Number of its committed tokens; while importing, of the tokens to come."""
    window: SequenceWindow | None
    tables: tuple[NDArray[np.int32], ...]
    """For each pool, in the order of ``pool_facts``. For tokens and encoders: the page of each
    ``page_tokens`` positions from 0 on, -1 for a null page. For states: slots, which may occur
    twice, for example for a checkpoint and the ring."""
    state_positions: NDArray[np.int64]
    """The position of each slot of the last table."""
    state_roles: NDArray[np.uint8]
    """The ``StateRole`` of each slot of the last table."""
    held: tuple[tuple[range, ...], ...]
    """The positions whose rows each pool of token pages holds, ascending."""
    reachable: tuple[range, ...]
    """The positions that a rewind may reach, ascending."""


class Shortage(NamedTuple):
    """Pages that are not free."""

    missing: int
    never: bool
    """Whether the pools are too small even without other sequences."""


class PoolVerbs(Protocol):
    """Sizes, room, and holdings of sequences."""

    dtype: torch.dtype
    """Dtype of stored rows."""
    device: torch.device
    page_size: int
    """P"""

    # -- layers ------------------------------------------------------------------------------------

    @property
    def geometry(self) -> StateGeometry:
        """Sizes of the layers' memory."""

    @property
    def recurrent_ids(self) -> tuple[int, ...]:
        """Global ids of the recurrent layers, ascending."""

    def layer_spec(self, layer_id: int) -> LayerSpec:
        """Return the spec of a layer, with all heads; ``InvalidArgument`` for an unknown one."""

    def own_spec(self, layer_id: int) -> LayerSpec:
        """Return the spec of a layer, with the heads that are here: those of a rank, or all."""

    def unfused_layers(self) -> list[int]:
        """Return the ids in ``geometry.layer_ids`` of layers that form attention weights."""

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""

    @property
    def num_pages(self) -> int:
        """Pages of all pools, including those of encoder rows and the slots of recurrent states."""

    @property
    def num_used_pages(self) -> int:
        """Number of ``num_pages`` that some sequence holds."""

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the pages and slots in use."""

    @property
    def num_splits(self) -> int:
        """Number of shared pages copied since the state was made, because one of their owners
        wrote."""

    @property
    def capacity(self) -> int | None:
        """Longest sequence, in tokens, that fits into empty pools; None: windows leave no limit."""

    def pool_sizes(self) -> list[int]:
        """Return the pages of each pool."""

    @property
    def pool_facts(self) -> tuple[PoolFacts, ...]:
        """The purpose of each pool: first pools of token pages, then of encoder rows, then of
        recurrent states. There is no pool for a kind of layers that the model lacks."""

    def page_references(self) -> list[NDArray[np.int32]]:
        """Return copies of the reference counts of all pages, for each pool of ``pool_facts``."""

    # -- going back --------------------------------------------------------------------------------

    @property
    def forgets(self) -> bool:
        """True if layers have windows or are recurrent. Then a rewind cannot reach some positions,
        or only by a replay."""

    @property
    def endless(self) -> bool:
        """True if a sequence with a window may continue beyond the context. It may if the state
        rotates, because only differences of rotations count."""

    def nearest_reachable(self, seq_id: SeqId, position: int) -> int:
        """Return the latest position <= ``position`` that a rewind reaches without a replay."""

    def kept_positions(self, seq_id: SeqId) -> list[int]:
        """Return the positions of all recurrent states, ascending, including 0 and the end."""

    def held(self, seq_id: SeqId, layer_id: int) -> list[range]:
        """Return the positions of rows that a layer holds, ascending."""

    # -- sequences ---------------------------------------------------------------------------------

    @property
    def forward_is_open(self) -> bool:
        """Return True if a forward is open."""

    def has_sequence(self, seq_id: SeqId) -> bool:
        """Return True if there is such a sequence."""

    def window(self, seq_id: SeqId) -> SequenceWindow | None:
        """Return the window of a sequence; None: it keeps all tokens."""

    def page_table(self, seq_id: SeqId) -> NDArray[np.int32]:
        """Return a copy of a sequence's page table, of the first layer class that keeps all tokens;
        if there is none, of the first layer class. -1 is a page that a window has evicted.
        ``Unsupported``: no layer keeps rows of tokens."""

    def sequence_use(self, seq_id: SeqId) -> SequenceUse:
        """Return the memory that the tokens of a sequence take, shared memory included."""

    def sequence_ids(self) -> list[SeqId]:
        """Return the ids of all sequences."""

    def sequence_pages(self, seq_id: SeqId) -> Holding:
        """Return the pages that a sequence holds."""

    def sequence_states(self, seq_id: SeqId) -> Holding:
        """Return the slots of recurrent states that a sequence holds."""

    def held_pages(self, seq_ids: Sequence[SeqId]) -> list[SequencePages]:
        """Return copies of these sequences' entries in every pool; ``NotFound`` for an unknown one.
        O(entries of their page tables)."""

    def num_shared_pages(self) -> int:
        """Return the number of pages that several sequences hold."""

    def num_needed(self, seq_ids: Collection[SeqId], *, with_kept: Collection[SeqId] = ()) -> int:
        """Return the number of pages that these sequences need to continue; shared ones count once.
        Of recurrent states, count the present one and those of uncommitted nodes. Checkpoints only
        save work; they count for the sequences in ``with_kept``. O(pages, and entries of page
        tables)."""

    def pages_held(self, seq_ids: Collection[SeqId], kept: Collection[SeqId] = ()) -> list[int]:
        """Return the pages of each pool that these sequences hold together; shared ones count once.
        Count only states that must stay: present ones, and checkpoints of sequences in ``kept``."""

    # -- room --------------------------------------------------------------------------------------

    def free_pages(self, without: Collection[SeqId] = ()) -> list[int]:
        """Return the number of pages of each pool that are free after removing the sequences
        ``without``. Slots count if a forward can take them. O(1) if ``without`` is empty, else
        O(pages)."""

    def page_shortage(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
    ) -> Shortage:
        """Return the pages that this ``begin_forward`` lacks, without slots of recurrent states."""

    def full_page_shortage(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> Shortage:
        """Return the pages that these tokens lack in a layer class that keeps all tokens. Holds for
        any number of forwards; ignores copies of shared pages and sequences with a window."""

    def shares_tail(self, seq_id: SeqId) -> bool:
        """Return True if another sequence holds the partly filled last page too."""

    def pages_freed(self, seq_id: SeqId, child_id: SeqId) -> int:
        """Return the number of pages that removing ``seq_id`` frees, or saves from being copied for
        ``child_id``, a fork of ``seq_id`` without appended tokens."""

    def states_freed(self, seq_id: SeqId) -> int:
        """Return the number of additional slots that a forward can take after removing ``seq_id``,
        which has no pending nodes. A lower bound: it ignores slots that rings of other sequences
        hold too."""

    def pages_at_most(self, length: int, window: tuple[int, int] | None, step: int) -> list[int]:
        """Return the most pages of each pool that a sequence of ``length`` tokens can take.
        ``window``: its size and sink; ``step``: tokens of one forward."""

    def largest_step(self, window: int, sink: int) -> int:
        """Return the tokens of one forward that fit into empty pools with a window; may be < 1."""

    def shortage_in_steps(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], most: int) -> int:
        """Return an upper bound of the missing pages for these tokens in forwards of at most
        ``most`` tokens."""

    # -- recurrent states --------------------------------------------------------------------------

    @property
    def num_available_states(self) -> int:
        """Slots for recurrent states that a forward can take now; 0 without recurrent layers."""

    @property
    def num_free_states(self) -> int:
        """Empty slots for recurrent states; 0 without recurrent layers."""

    @property
    def num_checkpoints(self) -> int:
        """Slots that hold checkpoints."""

    def spare_states(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> int:
        """Return the number of slots that this ``begin_forward`` leaves; negative: the number of
        missing slots."""

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        """Return (sequence, position) of checkpoints by slot, for slots held by nothing else."""
