"""The KV state: what the tokens so far have left behind, for every sequence and every layer.

``KVState`` holds the verbs of every kind of state. ``AttentionKVCache`` adds attention over K and V or latent
rows (verbs in ``attention_state``), ``RNNState`` recurrent state (in ``recurrent_state``). ``ModelState`` is
both, and says what it has room for (``pool_verbs``): what runners, engines and executors hold. Names are those of TVM's ``KVState``, ``AttentionKVCache`` and ``RNNState`` in snake_case; *(ours)* marks
verbs that TVM does not have.

Letters: L layers; B entries of the batch; n_i new tokens of entry i; T the sum of n_i; N >= T rows of a padded
tensor; Hq, Hkv query and KV heads; Dk, Dv head sizes of K and V; P page size; W, s window and sink of a sequence.
*Position*: index of a token in its sequence, from 0, for ever. *Slot*: ``page_id * P + offset``. *Forward*: the
bracket ``begin_forward`` ... ``end_forward``. Sequence ids are any int64, negative ones too.
An id, a length or a position may be given as anything that ``operator.index`` takes (an integer of NumPy, a tensor
of one integer), a list of them as a 1-D tensor or array.

Rules for every verb:

* **Check, then change.** A call is checked completely, then it changes. A refused call leaves no trace: no page,
  length, tree, table, window, checkpoint or counter differs. Exhaustion is found before a page is taken.
* **Results** are fresh tensors that belong to the caller. ``out=`` (a tensor, or a tuple of tensors) is written in
  place and returned; it has the exact shape, dtype and device of the result and shares no memory with an input,
  else ``InvalidArgument``.
* **Padding.** A tensor of new tokens may have N >= T rows. Rows from T on are ignored; in a fresh result they are
  0 (lse -inf), in ``out=`` they stay as they are. N < T is ``InvalidArgument``.
* **The bracket.** Sequence verbs belong outside a forward, attention, recurrent and position verbs inside. While
  a forward is open every verb that edits a sequence raises ``FailedPrecondition``, except ``clear``,
  ``abort_forward`` and ``set_cross_kv``; reading verbs show the state before the forward. A failure inside
  compute (device out of memory) leaves the forward open: ``abort_forward``.
* **Cost.** Bookkeeping is on the host, O(1) per sequence or O(pages touched), never proportional to bytes, and
  no verb costs more because of forks, pops, removals or trees in the past.
* **Threads.** A state is used by one thread at a time.

Errors common to all verbs; where several apply, the first in this order is raised:

=========================  ==========================================================================================
``InvalidArgument``        types, shapes, dtypes, devices, ranges; lists of different length; a duplicate id in one call; a
                           ``layer_id`` that is not of this state; parents that are no tree; an id that exists already
``NotFound``               a sequence id that does not exist
``Unsupported``            a verb or combination that this kind of layer, device or backend does not have
``FailedPrecondition``     a forward is open, or none is; uncommitted tree nodes; a sequence that is being
                           imported; a position that is no longer reachable
``ResourceExhausted``      not enough pages; says how many are needed and how many are free
=========================  ==========================================================================================

A docstring below names only what its verb refuses beyond this table. No torch is imported at run time here: a
scheduler may use these Protocols.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.contracts.attention_state import AttentionVerbs
from quire.contracts.pool_verbs import Eviction, PoolVerbs, TokenTreeParents
from quire.contracts.recurrent_state import RecurrentVerbs
from quire.types import SeqId

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.contracts.model import OpenPass

__all__ = [
    "AttentionKVCache",
    "AttentionVerbs",
    "Eviction",
    "KVState",
    "ModelState",
    "PoolVerbs",
    "RNNState",
    "RecurrentVerbs",
    "TensorPlan",
    "TokenTreeParents",
]


class TensorPlan(NamedTuple):
    """One tensor of an export."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class KVState(Protocol):
    """Sequences and forwards of any kind of layer state."""

    # -- sequences ---------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything: sequences, an open forward, pending trees, imports.

        Legal at any time, refuses nothing. Afterwards the state is as new: all pages free, ``empty()`` true.
        O(sequences).
        """

    def add_sequence(self, seq_id: SeqId) -> None:
        """Make a sequence of length 0 that holds no page; recurrent layers stand at their initial values.

        ``InvalidArgument`` if the id exists. O(1).
        """

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Forget a sequence; a page is free when its last reference goes.

        Legal with uncommitted nodes; ends an import. Forks of the sequence are untouched:
        a shared prefix lives while anybody uses it. O(pages).
        """

    def fork_sequence(self, parent_id: SeqId, child_id: SeqId, fork_pos: int = -1, *, exact: bool = False) -> int:
        """Make ``child_id`` a copy of the parent as it was after its first ``fork_pos`` tokens.

        -1 is the present end, 0 an empty child. Legal at every reachable position of every sequence, windowed
        ones included, nested to any depth. Whole pages are shared, the partly filled tail page too, and nothing is
        copied: whoever first writes into a shared page gets a copy of that page's valid slots then, the last owner
        writes in place. So a fork takes no page and cannot fail for lack of one. No write of one side is ever seen
        by the other. The child takes over window, encoder states and, up to the position, kept recurrent states;
        it has no uncommitted nodes.

        Returns the number of tokens that the caller must run on the child to arrive at ``fork_pos``: 0 for
        attention; with recurrent layers the child stands at the nearest kept state (as ``popn``). (ours) With
        ``exact=True`` the child stands at ``fork_pos`` itself and the result is 0, or the call is refused.

        ``InvalidArgument``: the child exists, position outside -1..length. ``FailedPrecondition``: the parent has
        uncommitted nodes, or the position is not reachable; with ``exact``, no state is kept there. O(pages) integers,
        no bytes.
        """

    def popn(self, seq_id: SeqId, n: int, *, exact: bool = False) -> int:
        """Take back the last ``n`` tokens, 0 <= n <= length; let t = length - n.

        Attention: the length becomes t, empty pages go back, the result is 0; other owners of the pages see
        nothing. With recurrent layers the sequence, attention parts included, goes to c, the nearest kept state at
        or before t, and the result is t - c: the tokens c..t-1 that the caller must run again. Kept states after
        that position are dropped here, not on forks. Any continuation then equals that of a fresh run. (ours) With
        ``exact=True`` the length becomes t itself and the result is 0, or the call is refused.

        ``InvalidArgument``: n out of range. ``FailedPrecondition``: uncommitted nodes, or the target lies below
        what a window has evicted (names the reachable positions); with ``exact``, no state is kept at t (names those
        that are). O(pages freed).
        """

    def rewind_cost(self, seq_id: SeqId, pos: int) -> int:
        """(ours) What ``popn(seq_id, length - pos)`` would return, without changing anything; refuses as it would."""

    def reachable(self, seq_id: SeqId) -> list[range]:
        """(ours) The positions to which ``popn`` and at which ``fork_sequence`` are legal, as ascending ranges.

        m is reachable if everything that a query at m or later may see of the tokens before m is still held.
        Without windows that is 0..length. With a window (W, s; for a layer window s = 0), let p be the lowest
        position >= s from which on all tokens are held: reachable are 0..s, all m >= p + (W - s) - 1 (one more
        with ``eviction="forward"``), and everything if p = s. 0 and the length are always among them, and the
        tokens of the last forward or commit can always be popped. To keep a position for later, fork there.
        """

    def enable_sliding_window_for_seq(
        self, seq_id: SeqId, window: int | None, sink: int = 0, *, eviction: Eviction = "token"
    ) -> None:
        """Keep the first ``sink`` tokens and the last ``window - sink`` (StreamingLLM, arXiv:2309.17453).

        ``eviction="token"``: a query at q sees exactly the positions i <= q with i < s or i > q - (W - s),
        whatever the chunks were. ``"forward"``: TVM's rule, slid once per ``begin_forward``; a query sees what was
        cached before and its own chunk up to itself. On a longer sequence the cut happens at its next forward.
        The setting may be replaced, or dropped with ``window=None``, while nothing is evicted. After a
        forward ``cached_length = min(length, W)``. Attention positions are then cache-relative, q - e for e evicted
        tokens; keys stay where they were written. Recurrent and cross layers are not concerned.

        ``InvalidArgument``: window < 1, sink < 0, sink >= window. ``FailedPrecondition``: evicted already,
        uncommitted nodes. ``Unsupported``: no layer that a window could concern; a sink, where layers
        rotate by a rule of their own. O(1).
        """

    # -- queries: legal at any time, change nothing, O(1) or O(sequences) -----------------------------------------

    def empty(self) -> bool:
        """Whether there is no sequence and every page is free."""

    def num_available_pages(self) -> int:
        """How many more pages of P tokens, over all layers, can be taken.

        ``ceil(capacity / P)`` after ``clear()``. It may be 0 while tail pages have room: ask ``missing_pages``.
        """

    def missing_pages(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
    ) -> int:
        """(ours) How many pages this ``begin_forward`` would be short of; 0 exactly if there is room.

        Copies on write are counted, pages that the same call would free are deducted.
        """

    def sequence_length(self, seq_id: SeqId) -> int:
        """Committed tokens of the sequence, evicted ones included."""

    def cached_length(self, seq_id: SeqId) -> int:
        """Committed tokens of the sequence less those that a window has evicted."""

    def pending_nodes(self, seq_id: SeqId) -> int:
        """(ours) Uncommitted nodes of the sequence's token tree."""

    def total_sequence_length(self) -> int:
        """Sum over sequences of cached length plus uncommitted nodes; a token that k share counts k times."""

    def check(self) -> None:
        """(ours) Verify all invariants: references, tables, lengths, trees, windows, kept states, reservations.

        ``QuireError`` names the first one that is broken. O(everything); for tests and debugging.
        """

    # -- forward --------------------------------------------------------------------------------------------------

    def begin_forward(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
        *,
        checkpoints: Sequence[Sequence[int]] = (),
    ) -> None:
        """Announce n_i new tokens for sequence i; reserves, while ``end_forward`` publishes.

        Rows of all tensors of this forward are the tokens of entry 0, then entry 1, and so on. Prompts, pieces of
        prompts, decodes, drafts and trees mix freely, in any order. ``token_tree_parents`` None means all chains;
        entries with parents add uncommitted nodes: the parent of a node is -1 (a root, whose predecessor is the
        last committed token) or an index below its own, counted over all uncommitted nodes of the sequence in
        order of appending. A node's position is base + depth; it sees the committed tokens, its ancestors and
        itself, less what windows remove there.

        In order: releases what no query from the committed length on can see; copies shared tail pages that will
        be written; takes pages; plans every layer class once. Released pages count as free for the same call.
        Lengths read as before until ``end_forward``. Once it slides, a sequence never holds more than
        ``ceil(s / P) + ceil((W - s + n) / P) + 1`` pages (n new tokens or nodes, pending ones included).

        (ours) ``checkpoints``: per entry, ascending, after how many of its new tokens (1..n_i, none of
        a tree) the recurrent state is kept as a checkpoint, beside the multiples of the interval.
        Empty: after none. Each takes a slot.

        ``InvalidArgument``: lists differ in length, empty batch, n_i < 1, duplicate id, a parent not in
        -1..own index - 1. ``FailedPrecondition``: a forward is open; ordinary tokens for a sequence with uncommitted
        nodes; a sequence that is being imported. ``ResourceExhausted``, also when kept recurrent states fill
        the pool. O(B + T + pages taken), plus one copy of at most P - 1 slots for each page that splits.
        """

    def end_forward(self, *, skipped: Collection[int] = ()) -> None:
        """Publish: lengths grow, tree nodes become pending, recurrent states advance.

        Every layer that stores tokens must have been written in this forward. ``skipped`` names layers that were
        left out on purpose (early exit); their rows read as zeros. A recurrent layer that did not set keeps its
        state.

        ``FailedPrecondition``: no open forward; missing layers (names them; the forward stays open). O(B).
        """

    def abort_forward(self) -> None:
        """(ours) Take the forward back: lengths, trees, recurrent states and pages as before ``begin_forward``.

        What had left every window stays gone; encoder rows that were set meanwhile stay. ``FailedPrecondition``: no open forward. O(B + pages).
        """

    def get_query_positions(self, *, relative: bool = False) -> Tensor:
        """Positions of the new tokens, int32 ``[T]``, on the state's device.

        True positions: length + j, for a tree node base + depth. With ``relative=True`` position minus the evicted
        tokens of that query, for models with absolute embeddings or a rotation of their own.
        ``FailedPrecondition``: no open forward. O(T).
        """

    def commit_accepted_token_tree_nodes(self, seq_ids: Sequence[SeqId], leaf_indices: Sequence[int]) -> None:
        """Keep, for each sequence, the path from a root to the given node, and forget its other nodes.

        Any node will do, a leaf or not; -1 rejects everything. Keyed by ``seq_ids``: any subset of the pending
        sequences, in any order, at any time outside a forward. The path moves to the front; K is not rotated
        again, for positions were depths. Recurrent layers take the node's state. Afterwards length = base + path
        length, no uncommitted nodes, freed pages back: equal to having appended the path as ordinary tokens.

        ``InvalidArgument``: lists differ in length, duplicate id, leaf outside -1..nodes - 1.
        ``FailedPrecondition``: no uncommitted nodes (even for -1), or a forward is open. At most path length slots
        per layer are copied; a path of the first nodes copies nothing.
        """

    # -- kept recurrent states ------------------------------------------------------------------------------------

    def checkpoint(self, seq_id: SeqId) -> None:
        """(ours) Keep the present recurrent state, so that a rewind to this length replays nothing.

        Copies nothing; the page stays. Kept states are never dropped silently. Keeping one twice is one.
        ``Unsupported``: no recurrent layer (every reachable position is exact already). ``FailedPrecondition``: the
        sequence has uncommitted nodes, is being imported, or a forward is open. O(1).
        """

    def checkpoints(self, seq_id: SeqId) -> list[int]:
        """(ours) Ascending positions of the checkpoints, without 0 and the ring of recent states.

        There are none without recurrent layers.
        """

    def drop_checkpoint(self, seq_id: SeqId, position: int) -> None:
        """(ours) Give up the checkpoint at ``position``; forks keep theirs.

        ``InvalidArgument``: none is kept there. ``Unsupported``: no recurrent layer. ``FailedPrecondition``: as
        ``checkpoint``. O(1).
        """

    # -- export and import ----------------------------------------------------------------------------------------

    def get_checkpoint_metadata(self, seq_id: SeqId, *, checksums: bool = True) -> dict[str, Any]:
        """What an export of this sequence consists of, in JSON types; without ``checksums`` those are empty.

        Format version, layers and kinds, dtypes, geometry, RoPE fingerprint, length, positions held per layer
        class, window, sink and eviction, kept recurrent positions, rows of each cross layer (None: not set), and per
        group names, shapes, bytes, checksums.
        ``FailedPrecondition``: uncommitted nodes, importing.
        """

    def get_layout_hash(self) -> str:
        """A digest of what exporter and importer must agree on: kinds, geometry, dtype, RoPE, windows.

        Page size, capacity, device and ranks are not part of it.
        """

    def get_layout(self) -> dict[str, Any]:
        """(ours) What the layout hash is of, in JSON types: ``layers`` with pages, and which ids layers have."""

    def export_page_group(self, seq_id: SeqId, group: int, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors of one layer (``group`` is its id), in order of position, free of pages.

        ``k [n, Hkv, Dk]`` and ``v [n, Hkv, Dv]``; ``latent [n, row]``; ``state.i`` and ``state.i@position``; n
        positions held, or the rows of the encoder of a cross layer. Shared prefixes are resolved. A cross layer that is
        not set is no group (``FailedPrecondition``), as the metadata says. ``InvalidArgument``: no such layer, names or shapes of
        ``out``. ``FailedPrecondition``: uncommitted nodes, importing. Cost: the bytes of the group.
        """

    def plan_import(self, metadata: Mapping[str, object]) -> dict[int, dict[str, TensorPlan]]:
        """(ours) The tensors that an import of this metadata takes, by layer and name; its checksums are not read.

        Changes nothing, and refuses metadata as ``prepare_import`` does.
        """

    def prepare_import(self, seq_id: SeqId, metadata: Mapping[str, object]) -> None:
        """Make the new sequence ``seq_id``, *importing*, and reserve its pages; no other sequence is touched.

        Until ``finish_import`` it can be used for nothing else; ``remove_sequence`` gives up.
        ``InvalidArgument``: the id exists; version or layout (expected and found). ``ResourceExhausted``.
        """

    def import_page_group(self, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one layer of an import, as ``export_page_group`` gave it; any order, once each.

        ``InvalidArgument``: group, names, shapes or dtypes (expected and found). ``FailedPrecondition``: not
        prepared, or imported already. ``DataLoss``: checksum. Cost: the bytes of the group.
        """

    def finish_import(self, seq_id: SeqId) -> None:
        """Publish an import: stored values equal those of the exported sequence to the bit.

        ``FailedPrecondition``: not prepared, or a group is missing (names it). O(pages).
        """


class AttentionKVCache(KVState, AttentionVerbs, Protocol):
    """The state of ``full``, ``window``, ``latent`` and ``cross`` layers, in pages."""


class RNNState(KVState, RecurrentVerbs, Protocol):
    """The state of ``recurrent`` layers: immutable published states, shared by forks, some of them kept."""


class ModelState(AttentionKVCache, RNNState, PoolVerbs, Protocol):
    """The state of a model with layers of any kinds; verbs that none of them has are ``Unsupported``."""

    def open_pass(self) -> OpenPass:
        """Return the open forward; ``FailedPrecondition`` if there is none."""
        ...
