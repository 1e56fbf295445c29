"""What a KV state holds and has room for. ``kv_state.ModelState`` is these verbs and all others.

*(ours)*, all of it: whoever schedules asks here and looks at no page. Legal at any time; nothing changes. Lists
have one number for each pool of pages that tokens take, in one order, and then one for the slots of recurrent
states if there are recurrent layers. No torch is imported at run time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from quire.contracts.layers import KeyValueAttention, LatentAttention, LayerSpec
from quire.types import SeqId

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Eviction: TypeAlias = Literal["token", "forward"]
"""When a token leaves a window: at each query (``token``), or once per forward (TVM's rule)."""
TokenTreeParents: TypeAlias = Sequence[int] | Sequence[Sequence[int] | None]
"""T parents in one list (every entry is a tree), or B items, each a list of parents or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry:
    """Sizes of what the layers of a state keep; they never change.

    A *layer class* is the layers that keep the same positions: they share a pool of pages.
    """

    specs: tuple[KeyValueAttention | LatentAttention, ...]
    """The layers that keep rows of tokens."""
    layer_ids: tuple[int, ...]
    """Global ids of ``specs``, ascending."""
    windows: tuple[int | None, ...]
    """The window of each layer class; None: it keeps all tokens."""
    page_bytes: tuple[int, ...]
    """Bytes of one page of each layer class."""
    state_bytes: int
    """Bytes of the states of all recurrent layers at one position."""
    interval: int
    """Tokens between recurrent states that are kept by themselves; 0: none is."""
    ring: int
    """Most recent recurrent states that each sequence keeps while there is room."""


class SequenceWindow(NamedTuple):
    """The window of one sequence; ``0 <= sink < size``."""

    size: int
    sink: int = 0
    eviction: Eviction = "token"


class Holding(NamedTuple):
    """What a sequence holds."""

    held: int
    shared: int
    """How many of these others hold too."""


class SequenceUse(NamedTuple):
    """What the tokens of a sequence take."""

    pages: int
    """Pages of all layer classes."""
    rows: int
    """Tokens of which these pages hold rows, summed over the layer classes."""
    num_bytes: int
    """Bytes of these pages and of the sequence's recurrent states."""


class Shortage(NamedTuple):
    """Pages that are not free."""

    missing: int
    never: bool
    """Whether they are more than there are, whatever other sequences give up."""


class PoolVerbs(Protocol):
    """Sizes, room, and who holds how much."""

    dtype: torch.dtype
    """Of stored rows."""
    device: torch.device
    page_size: int
    """P"""

    # -- layers ------------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> StateGeometry:
        """Sizes of what the layers keep."""

    @property
    def recurrent_ids(self) -> tuple[int, ...]:
        """Global ids of the recurrent layers, ascending."""

    def layer_spec(self, layer_id: int) -> LayerSpec:
        """Return what a layer is; ``InvalidArgument`` for an unknown one."""

    def unfused_layers(self) -> list[int]:
        """Return the ids of attention layers without fused attention: those form the weights."""

    # -- sizes -------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""

    @property
    def num_pages(self) -> int:
        """Pages of all pools, those of encoder rows and the slots of recurrent states among them."""

    @property
    def num_used_pages(self) -> int:
        """Of ``num_pages`` those that some sequence holds."""

    @property
    def num_used_bytes(self) -> int:
        """Bytes of these pages and slots."""

    @property
    def num_splits(self) -> int:
        """Shared pages that were copied because one of their owners wrote, since the state was made."""

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest sequence that fits into the empty pools; None: windows leave no limit."""

    def pool_sizes(self) -> list[int]:
        """Return the pages of each pool."""

    # -- going back --------------------------------------------------------------------------------------------

    @property
    def forgets(self) -> bool:
        """Whether some positions cannot be gone back to, or not without running tokens again."""

    @property
    def endless(self) -> bool:
        """Whether positions may run on for ever behind a window."""

    def nearest_reachable(self, seq_id: SeqId, position: int) -> int:
        """Return the latest position, not behind ``position``, to go back to with nothing to run again."""

    def kept_positions(self, seq_id: SeqId) -> list[int]:
        """Return the positions of all recurrent states that are there, ascending, with 0 and the end."""

    def held(self, seq_id: SeqId, layer_id: int) -> list[range]:
        """Return the positions of which a layer holds rows, ascending."""

    # -- sequences ---------------------------------------------------------------------------------------------

    @property
    def forward_is_open(self) -> bool:
        """Whether a forward is open."""

    def has_sequence(self, seq_id: SeqId) -> bool:
        """Return whether there is such a sequence."""

    def window(self, seq_id: SeqId) -> SequenceWindow | None:
        """Return the window of a sequence; None: it keeps all tokens."""

    def page_table(self, seq_id: SeqId) -> NDArray[np.int32]:
        """Return a copy of a sequence's page table, of a class that keeps all tokens if any does.

        -1 stands for a page that a window has let go of. ``Unsupported``: no layer has pages of tokens.
        """

    def sequence_use(self, seq_id: SeqId) -> SequenceUse:
        """Return what the tokens of a sequence take, what it shares with others included."""

    def sequence_ids(self) -> list[SeqId]:
        """Return the ids of all sequences."""

    def sequence_pages(self, seq_id: SeqId) -> Holding:
        """Return the pages that a sequence holds."""

    def sequence_states(self, seq_id: SeqId) -> Holding:
        """Return the slots of recurrent states that a sequence holds."""

    def num_shared_pages(self) -> int:
        """Return how many pages more than one sequence holds."""

    def num_needed(self, seq_ids: Collection[SeqId], *, with_kept: Collection[SeqId] = ()) -> int:
        """Return how many pages these sequences cannot go on without, each counted once.

        Of recurrent states the present one and those of uncommitted nodes; checkpoints only save work, but count
        for the sequences in ``with_kept``. Cost O(pages, and entries of page tables).
        """

    def pages_held(self, seq_ids: Collection[SeqId], kept: Collection[SeqId] = ()) -> list[int]:
        """Return the pages of each pool that these sequences hold together; what they share counts once.

        Of states those that cannot be given up: present ones, and checkpoints of the sequences in ``kept``.
        """

    # -- room --------------------------------------------------------------------------------------------------

    def free_pages(self, without: Collection[SeqId] = ()) -> list[int]:
        """Return the pages of each pool that are free once the sequences ``without`` are removed.

        Of slots those that a forward can take. Without any sequence O(1), else O(pages).
        """

    def page_shortage(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
    ) -> Shortage:
        """Return the pages that this ``begin_forward`` is short of, slots of states aside."""

    def full_page_shortage(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> Shortage:
        """Return the pages that these tokens are short of in a layer class that keeps all tokens.

        However many forwards they take; copies of shared pages, and sequences with a window, aside.
        """

    def shares_tail(self, seq_id: SeqId) -> bool:
        """Return whether another sequence holds the partly filled last page too."""

    def pages_freed(self, seq_id: SeqId, child_id: SeqId) -> int:
        """Return the pages that removing ``seq_id`` frees or spares ``child_id`` from copying.

        ``child_id`` is a fork of ``seq_id`` that nothing has been appended to.
        """

    def states_freed(self, seq_id: SeqId) -> int:
        """Return the slots that a forward can take in addition once ``seq_id`` is removed.

        It has no uncommitted nodes. A lower bound: slots in rings of others are not counted.
        """

    def pages_at_most(self, length: int, window: tuple[int, int] | None, step: int) -> list[int]:
        """Return the pages of each pool that a sequence of ``length`` tokens takes at most.

        ``window``: its size and sink; ``step``: tokens that are run at a time.
        """

    def largest_step(self, window: int, sink: int) -> int:
        """Return the tokens of one forward that fit into the empty pools beside such a window; may be below 1."""

    def shortage_in_steps(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], most: int) -> int:
        """Return an upper bound of the pages that these tokens are short of in forwards of at most ``most``."""

    # -- recurrent states ----------------------------------------------------------------------------------------

    @property
    def num_available_states(self) -> int:
        """Slots for recurrent states that a forward can take now; 0 without recurrent layers."""

    @property
    def num_free_states(self) -> int:
        """Slots for recurrent states that hold none; 0 without recurrent layers."""

    @property
    def num_checkpoints(self) -> int:
        """Slots that checkpoints name."""

    def spare_states(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> int:
        """Return the slots that this ``begin_forward`` leaves; below 0: it is short of so many."""

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        """Return checkpoints (sequence and position) by slot, of the slots that are free without them."""
