"""The KV state: the stored state of all tokens so far, for every sequence and every layer.

``KVState`` holds the verbs of every kind of state. ``AttentionKVCache`` adds attention over K and V
or latent rows (verbs in ``attention_state``), ``RNNState`` recurrent state (``recurrent_state``).
``ModelState`` is what runners, engines and executors hold: it reports its room (``pool_verbs``),
and its layers are run through ``model.OpenPass``. Names are those of TVM's ``KVState``,
``AttentionKVCache`` and ``RNNState`` in snake_case; *(ours)* marks verbs that TVM lacks.

Letters: L layers; B entries of the batch; n_i new tokens of entry i; T the sum of n_i; N >= T rows
of a padded tensor; Hq, Hkv query and KV heads; Dk, Dv head sizes of K and V; P page size; W, s
window and sink of a sequence. *Position*: index of a token in its sequence, from 0, for ever.
*Slot*: ``page_id * P + offset``. *Forward*: the bracket ``begin_forward`` ... ``end_forward``.
Sequence ids are any int64. An id, length or position may be anything that ``operator.index`` takes
(a NumPy integer, a tensor of one integer), a list of them a 1-D tensor or array.

Rules for every verb:

* **Check, then change.** A call is checked completely before it changes anything. A refused call
  leaves no trace in pages, lengths, trees, tables, windows, checkpoints or counters. Exhaustion is
  found before taking pages.
* **Results** are fresh tensors that belong to the caller. ``out=`` (a tensor or a tuple of tensors)
  is written in place and returned. It has the result's shape, dtype and device and shares no memory
  with an input, else ``InvalidArgument``.
* **Padding.** A tensor of new tokens may have N >= T rows. Rows from T on are ignored; in a fresh
  result they are 0 (lse -inf), in ``out=`` they stay. N < T is ``InvalidArgument``.
* **The bracket.** Sequence verbs belong outside a forward; attention, recurrent and position verbs
  inside. While a forward is open, verbs that edit a sequence raise ``FailedPrecondition``, except
  ``clear``, ``abort_forward`` and ``set_cross_kv``; reading verbs show the state before the
  forward. A failed compute (device out of memory) leaves the forward open for ``abort_forward``.
* **Cost.** Bookkeeping is on the host, O(1) per sequence or O(pages touched), never proportional to
  bytes. Past forks, pops, removals and trees make no verb more expensive.
* **Threads.** A state is used by one thread at a time. In addition other threads may read an
  ``Export``, and write an import that is published.

Errors common to all verbs; if several apply, the first in this order is raised:

=======================  ==========================================================================
``InvalidArgument``      types, shapes, dtypes, devices, ranges; lists of different length; a
                         duplicate id in one call; an unknown ``layer_id``; parents that are no
                         tree; an id that exists already
``NotFound``             a sequence id that does not exist
``Unsupported``          a verb or combination that this kind of layer, device or backend lacks
``FailedPrecondition``   a forward is open, or none is; uncommitted tree nodes; a sequence that is
                         being imported; a position that is no longer reachable
``ResourceExhausted``    not enough pages; says how many are needed and how many are free
=======================  ==========================================================================

A docstring below names only errors beyond this table. No torch at run time: schedulers may use
these Protocols.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.base.types import SeqId
from quire.contracts.attention_state import AttentionVerbs, StoredRows
from quire.contracts.channel import Channel
from quire.contracts.pool_verbs import Eviction, PoolVerbs, TokenTreeParents
from quire.contracts.recurrent_state import RecurrentVerbs, StoredStates

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from quire.contracts.model import OpenPass


class TensorPlan(NamedTuple):
    """One tensor of an export."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RowPieces(Protocol):
    """Rows of one layer in host memory, in consecutive pieces, such as those of stored objects."""

    @property
    def plan(self) -> Mapping[str, TensorPlan]:
        """The plan of all rows together."""

    @property
    def counts(self) -> Sequence[int]:
        """Number of rows of each piece."""

    def piece(self, number: int) -> Mapping[str, Tensor]:
        """Return the rows of a piece. Raise if they are damaged."""

    def write(self, targets: Mapping[str, Tensor], slots_N: NDArray[np.int64]) -> bool:
        """Write all rows to slots of ``targets [S, ...]``, each piece only after verification.
        Raise as ``piece`` does. Or write nothing and return False; the caller then calls ``piece``.
        Slots and types of the rows fit."""


class Export(Protocol):
    """A snapshot of a sequence's state, independent of pages.

    Any thread may read it, at any time and while forwards run, as long as the sequence is not
    removed, run, popped or overwritten. An otherwise unused fork is such a sequence, because
    writers to shared pages or states copy them first. Reading uses no bookkeeping.
    """

    @property
    def length(self) -> int:
        """Committed tokens of the sequence."""

    @property
    def positions(self) -> list[int]:
        """Positions for ``states``: checkpoints and the length, ascending. [] without recurrent
        layers."""

    def held(self, layer: int) -> list[range]:
        """Return the positions for ``rows`` of a layer, ascending. Errors: as ``rows``."""

    def rows(self, layer: int, start: int, stop: int) -> dict[str, Tensor]:
        """Return the rows of tokens ``start..stop - 1``, at least one, in the names and layout of
        ``export_page_group``; fresh. ``InvalidArgument``: not all are held. ``Unsupported``: a
        cross or recurrent layer. Cost: the bytes."""

    def plain_rows(self, layer: int, start: int, stop: int) -> dict[str, Tensor]:
        """Return rows as ``rows`` does, in the plain format whatever the state's is: ``k`` and
        ``v``, or ``latent``."""

    def held_rows(self, layer: int) -> dict[str, Tensor]:
        """Return the rows of all ``held`` positions of a layer, as ``export_page_group`` does.
        Errors and cost: as ``rows``."""

    def states(self, layer: int, position: int) -> dict[str, Tensor]:
        """Return ``state.i`` of a recurrent layer at one of ``positions``; fresh.
        ``InvalidArgument``: another position. ``Unsupported``: another kind of layer."""


class KVState(Protocol):
    """Sequences and forwards of any kind of layer state."""

    # -- sequences ---------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything: sequences, an open forward, pending trees, imports. Legal at any time.
        Afterwards the state is as new: all pages free, ``empty()`` true. O(sequences)."""

    def add_sequence(self, seq_id: SeqId) -> None:
        """Make a sequence of length 0 without pages, with recurrent layers at their initial values.
        ``InvalidArgument`` if the id exists. O(1)."""

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Remove a sequence; free each page with its last reference. Legal with uncommitted nodes;
        ends an import. Forks keep their pages. O(pages)."""

    def fork_sequence(self, parent_id: SeqId, child_id: SeqId, fork_pos: int = -1, *, exact: bool = False) -> int:
        """Make ``child_id`` a copy of the parent's first ``fork_pos`` tokens.

        -1 is the present end, 0 an empty child. Legal at every reachable position of every
        sequence, windowed ones included, nested to any depth. All pages are shared, even the partly
        filled tail page, and nothing is copied. The first write into a shared page copies its valid
        slots; the last owner writes in place. So a fork takes no page and cannot fail for lack of
        one, and neither side sees the other's writes. The child inherits window, encoder states and
        kept recurrent states up to the position, but no uncommitted nodes.

        Returns the number of tokens that the caller must run on the child to reach ``fork_pos``: 0
        for attention; with recurrent layers the child is at the nearest kept state (as ``popn``).
        (ours) ``exact=True`` forks at exactly that position with result 0, or is refused.

        ``FailedPrecondition``: also, with ``exact``, no state kept there. O(pages) integers, no
        bytes.
        """

    def popn(self, seq_id: SeqId, n: int, *, exact: bool = False) -> int:
        """Take back the last ``n`` tokens, 0 <= n <= length; let t = length - n.

        Attention: the length becomes t, empty pages are freed, the result is 0; other owners see
        nothing. With recurrent layers the whole sequence is cut to c, the nearest kept state at or
        before t. The result is then t - c: the caller must run tokens c..t-1 again. Kept states
        after c are dropped here, not on forks. Any continuation equals that of a fresh run. (ours)
        ``exact=True`` cuts to exactly t with result 0, or is refused.

        ``FailedPrecondition`` names the reachable positions; with ``exact`` also if no state is
        kept at t (names the kept ones). O(pages freed).
        """

    def rewind_cost(self, seq_id: SeqId, pos: int) -> int:
        """(ours) Return the result of ``popn(seq_id, length - pos)``, or raise its errors; change
        nothing."""

    def reachable(self, seq_id: SeqId) -> list[range]:
        """(ours) Return, as ascending ranges, the positions for ``popn`` and ``fork_sequence``.

        m is reachable if everything that a query at m or later may see of the tokens before m is
        still held. Without windows that is 0..length. For a window (W, s; s = 0 for a layer's
        window), let p be the lowest position >= s from which on all tokens are held. Then 0..s are
        reachable, all m >= p + (W - s) - 1 (one more with ``eviction="forward"``), and everything
        if p = s. 0 and the length are always reachable, and the tokens of the last forward or
        commit can always be popped. To keep a position, fork there.
        """

    def enable_sliding_window_for_seq(
        self, seq_id: SeqId, window: int | None, sink: int = 0, *, eviction: Eviction = "token"
    ) -> None:
        """Keep the first ``sink`` tokens and the last ``window - sink`` (StreamingLLM,
        arXiv:2309.17453).

        ``eviction="token"``: a query at q sees exactly the positions i <= q with i < s or i > q -
        (W - s), whatever the chunks were. ``"forward"``: TVM's rule; the window slides once per
        ``begin_forward``, and a query sees what was cached before and its own chunk up to itself. A
        longer sequence is cut at its next forward. While nothing is evicted, the setting may be
        replaced, or dropped with ``window=None``. After a forward
        ``cached_length = min(length, W)``. Attention positions are then cache-relative, q - e for e
        evicted tokens; keys stay where they were written. Recurrent and cross layers ignore the
        window.

        ``InvalidArgument`` unless 0 <= sink < window. ``FailedPrecondition``: also evicted already.
        ``Unsupported``: no layer that a window could concern; a sink with layers that rotate by
        their own rule. O(1).
        """

    # -- queries: legal at any time, change nothing, O(1) or O(sequences) --------------------------

    def empty(self) -> bool:
        """Return True if there is no sequence and every page is free."""

    def num_available_pages(self) -> int:
        """Return the number of pages of P tokens, over all layers, that can still be taken. It may
        be 0 while tail pages have room: use ``missing_pages``. ``ceil(capacity / P)`` after
        ``clear()``."""

    def missing_pages(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
    ) -> int:
        """(ours) Return the number of pages that this ``begin_forward`` would lack; 0 exactly if
        there is room. Counts copies on write, less the pages that the same call would free."""

    def sequence_length(self, seq_id: SeqId) -> int:
        """Return the committed tokens of the sequence, evicted ones included."""

    def cached_length(self, seq_id: SeqId) -> int:
        """Return the committed tokens of the sequence without evicted ones."""

    def pending_nodes(self, seq_id: SeqId) -> int:
        """(ours) Return the number of uncommitted nodes of the sequence's token tree."""

    def total_sequence_length(self) -> int:
        """Sum cached lengths and uncommitted nodes; a token of k sequences counts k times."""

    def check(self) -> None:
        """(ours) Verify all invariants: references, tables, lengths, trees, windows, states,
        reservations. ``QuireError`` names the first broken one. O(everything); for tests."""

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
        *,
        checkpoints: Sequence[Sequence[int]] = (),
    ) -> None:
        """Announce n_i new tokens of sequence i and reserve their pages; ``end_forward`` publishes.

        Rows of all tensors of this forward are the tokens of entry 0, then entry 1, and so on.
        Prompts, pieces of prompts, decodes, drafts and trees mix in any order.
        ``token_tree_parents`` None means all chains. Entries with parents add uncommitted nodes.
        The parent of a node is -1 (a root after the last committed token) or an index below its
        own, over all uncommitted nodes of the sequence in order of appending. A node's position is
        base + depth. It sees committed tokens, ancestors and itself, within windows.

        In order: frees pages that no query from the committed length on can see, copies shared tail
        pages that will be written, takes pages, plans every layer class once. The call may use
        pages that it frees. Lengths read as before until ``end_forward``. A sliding sequence never
        holds more than ``ceil(s / P) + ceil((W - s + n) / P) + 1`` pages (n new tokens or pending
        nodes).

        (ours) ``checkpoints``: for each entry, ascending counts of new tokens, 1..n_i, after which
        the recurrent state is kept, besides multiples of the interval. Each takes a slot.

        ``InvalidArgument``: also an empty batch, n_i < 1, checkpoints of a tree.
        ``ResourceExhausted``: also when kept recurrent states fill the pool. O(B + T + pages
        taken), plus one copy of at most P - 1 slots for each page that splits.
        """

    def end_forward(self, *, skipped: Collection[int] = ()) -> None:
        """Publish: lengths grow, tree nodes become pending, recurrent states advance.

        Every layer that stores tokens must have been written. ``skipped`` names layers left out on
        purpose (early exit); their rows read as zeros. A recurrent layer without ``set`` keeps its
        state.

        ``FailedPrecondition``: no open forward; missing layers (named; the forward stays open).
        O(B).
        """

    def abort_forward(self) -> None:
        """(ours) Undo the forward: lengths, trees, recurrent states and pages as before
        ``begin_forward``. Evicted tokens stay evicted; encoder rows that were set meanwhile stay.
        ``FailedPrecondition``: no open forward. O(B + pages)."""

    def get_query_positions(self, *, relative: bool = False) -> Tensor:
        """Return the positions of the new tokens, int32 ``[T]``, on the state's device.

        True positions are length + j, for a tree node base + depth. ``relative=True`` subtracts the
        query's evicted tokens, for models with absolute embeddings or a rotation of their own.
        ``FailedPrecondition``: no open forward. O(T).
        """

    def commit_accepted_token_tree_nodes(self, seq_ids: Sequence[SeqId], leaf_indices: Sequence[int]) -> None:
        """Keep, for each sequence, the path from a root to the given node; drop its other nodes.

        Any node will do, a leaf or not; -1 rejects everything. ``seq_ids`` is any subset of the
        pending sequences, in any order, at any time outside a forward. The path moves to the front.
        K is not rotated again, because positions were depths. Recurrent layers take the node's
        state. Afterwards length = base + path length, no nodes are pending, and freed pages are
        back, as if the path had been ordinary tokens.

        ``FailedPrecondition``: also no uncommitted nodes (even for -1). Copies at most path length
        slots per layer; a path of the first nodes copies nothing.
        """

    # -- kept recurrent states ---------------------------------------------------------------------

    def checkpoint(self, seq_id: SeqId) -> None:
        """(ours) Keep the present recurrent state, so that a rewind to this length replays nothing.

        Copies nothing; the page stays. Kept states are never dropped silently. Keeping twice equals
        once. ``Unsupported``: no recurrent layer (every reachable position is exact already).
        ``FailedPrecondition``: uncommitted nodes, an import, or an open forward. O(1).
        """

    def checkpoints(self, seq_id: SeqId) -> list[int]:
        """(ours) Return the ascending positions of checkpoints, without 0 and the ring of recent
        states. [] without recurrent layers."""

    def drop_checkpoint(self, seq_id: SeqId, position: int) -> None:
        """(ours) Drop the checkpoint at ``position``; forks keep theirs. ``InvalidArgument``: none
        is kept there. ``Unsupported``, ``FailedPrecondition``: as ``checkpoint``. O(1)."""

    # -- export and import -------------------------------------------------------------------------

    def get_checkpoint_metadata(self, seq_id: SeqId, *, checksums: bool = True) -> dict[str, Any]:
        """Describe an export of this sequence in JSON types; without ``checksums`` those are empty.

        Format version, layers and kinds, dtypes, geometry, RoPE fingerprint, length, positions held
        per layer class, window, sink and eviction, kept recurrent positions, rows of each cross
        layer (None: not set), and per group names, shapes, bytes, checksums.
        ``FailedPrecondition``: uncommitted nodes, importing.
        """

    def get_layout_hash(self) -> str:
        """Return a digest of the facts on which both sides must agree: kinds, geometry, dtype,
        RoPE, windows. Page size, capacity, device and ranks are not part of it."""

    def get_layout(self) -> dict[str, Any]:
        """(ours) Return the hashed layout as JSON: ``layers`` with pages, layer ids."""

    def export_page_group(self, seq_id: SeqId, group: int, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the tensors of one layer (``group`` is its id) by position, free of pages.

        ``k [n, Hkv, Dk]`` and ``v [n, Hkv, Dv]``; ``latent [n, row]``; ``state.i`` and
        ``state.i@position``; n positions held, or encoder rows of a cross layer. Shared prefixes
        are resolved. ``InvalidArgument``: no such layer, names or shapes of ``out``.
        ``FailedPrecondition``: uncommitted nodes, importing, a cross layer that is not set (the
        metadata has no such group). Cost: the bytes of the group.
        """

    def open_export(self, seq_id: SeqId) -> Export:
        """(ours) Return a snapshot of the sequence, to be read in pieces by any thread.
        ``FailedPrecondition``: uncommitted nodes, importing. Legal in an open forward. O(pages)."""

    def plan_import(self, metadata: Mapping[str, object]) -> dict[int, dict[str, TensorPlan]]:
        """(ours) Return the tensors of an import, by layer and name, without reading checksums.
        Changes nothing. Raises the errors of ``prepare_import`` for bad metadata."""

    def import_metadata(self, length: int, *, kept: Sequence[int] = ()) -> dict[str, Any]:
        """(ours) Return import metadata for a sequence of ``length`` tokens that does not exist
        yet.

        It has no window of its own, no checksums, and cross layers that are not set. Layers that
        keep all tokens hold 0..length - 1. Layers with a window W hold the last W - 1 tokens, which
        a query at ``length`` or later may see. Recurrent layers have the state at ``length`` and
        checkpoints at ``kept``. ``InvalidArgument`` unless ``kept`` ascends in 1..length; without
        recurrent layers it is empty.
        """

    def import_need(self, metadata: Mapping[str, object], *, shared: int = 0) -> list[int]:
        """(ours) Return the number of pages that ``prepare_import`` takes of each pool, in the
        order of ``free_pages``. Changes nothing. Raises the errors of ``prepare_import`` for bad
        metadata."""

    def prepare_import(
        self, seq_id: SeqId, metadata: Mapping[str, object], *, parent: SeqId | None = None, shared: int = 0
    ) -> None:
        """Make the new sequence ``seq_id``, *importing*, with its pages; touch no other. Until
        ``finish_import`` it has no other use; ``remove_sequence`` gives up.

        (ours) In layers that keep all tokens, the first ``shared`` tokens are those of ``parent``,
        whose pages are shared as a fork's are, and only later rows are expected. The caller knows
        that both sequences begin with the same tokens. Layers with a window and recurrent layers
        take all that the metadata name from the import.

        ``InvalidArgument``: the id exists; version or layout; ``shared`` is no multiple of P, is
        above either length, is given without a parent, or the metadata do not hold these tokens or
        have checksums over them. ``FailedPrecondition``: also a parent with uncommitted nodes, that
        is importing, or of which a window has evicted some of them. ``ResourceExhausted``.
        O(pages).
        """

    def import_page_group(self, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one layer of an import, in the form of ``export_page_group``; any order, once each.

        These are all of its rows less those that are shared. ``InvalidArgument``: group, names,
        shapes or dtypes (expected and found). ``FailedPrecondition``: not prepared, or imported
        already, at least in part. ``DataLoss``: checksum. Cost: the bytes of the group.
        """

    def import_rows(self, seq_id: SeqId, group: int, start: int, rows: Mapping[str, Tensor] | RowPieces) -> None:
        """(ours) Write rows of tokens of one layer of an import, from position ``start`` on.

        In any order, each row once. ``rows``: their tensors, or pieces of them, each read right
        before it is written. If one raises, it is not written, and all are still expected. These
        are one row or more, all of them expected, without a gap. ``InvalidArgument``: else; names,
        shapes or dtypes. ``Unsupported``: a cross or recurrent layer, which is imported whole.
        ``FailedPrecondition``: not prepared; a row that is written already; a layer with a
        checksum, which covers all of its rows. Cost: the bytes.
        """

    def pending_layers(self, seq_id: SeqId) -> list[int]:
        """(ours) Return the layers that an import has not completed, ascending. A layer without
        expected rows is complete; [] for a sequence that is not importing."""

    def publish_import(self, seq_id: SeqId) -> None:
        """(ours) Let the tokens of an import count before all layers are written.

        From then on the sequence takes part in forwards, and ``import_rows`` and
        ``import_page_group`` are legal while one is open, from another thread too. A forward that
        reaches an incomplete layer raises ``FailedPrecondition``; it can wait instead
        (``OpenPass.wait_for_layers``). So does ``end_forward`` for a recurrent layer. Other verbs
        refuse the sequence as importing until ``finish_import``, ``remove_sequence`` and commits
        excepted. Windows evict nothing until then. ``FailedPrecondition``: not prepared, or
        published already. O(1).
        """

    def finish_import(self, seq_id: SeqId) -> None:
        """Publish an import, if it is not yet, and end it. Stored values equal those of the
        exported sequence to the bit. ``FailedPrecondition``: not prepared, or a layer is missing
        (names it). O(1)."""

    # -- hand-over to another state ----------------------------------------------------------------

    def disagg_prepare_recv(self, seq_id: SeqId, length: int, *, channel: Channel) -> tuple[int, ...]:
        """Take slots for the next ``length`` (>= 1) tokens of a sequence, which another state sends
        over ``channel``, and return the compressed position map for its ``disagg_mark_send``.

        The map is ``[num_runs, begin_1, len_1, ...]``: runs of slots here, in the order of the
        tokens; ``begin`` -1: these are not stored, as no later token sees them. Layer classes
        follow one another, by first layer; recurrent layers have one run, ``[1, slot, 1]``.

        The sequence is *receiving*, and its length stays. Only queries, ``disagg_receive``,
        ``disagg_wait``, ``disagg_cancel`` and ``remove_sequence`` are legal on it. Other sequences
        go on. A shared or partly filled last page is copied. ``FailedPrecondition``: uncommitted
        nodes, receiving or sending already. O(pages), one page copied.
        """

    def disagg_mark_send(
        self, seq_id: SeqId, begin: int, compressed_remote_position_map: Sequence[int], receiver: Channel
    ) -> None:
        """Send the tokens from ``begin`` (0..length) on to the slots of a map that the other end of
        ``receiver`` has offered, as many as it has.

        Cached tokens are sent now, others by each layer of the forward that computes them; where
        ranks divide the state, behind that forward.
        Recurrent states and encoder rows are sent once the last token counts. The mark ends there;
        later tokens are not sent. While it stands, trees, a ``popn`` below what was sent, and, with
        recurrent layers, a forward that crosses the end are refused; ``remove_sequence`` cancels.
        A channel that fails ends the mark and disturbs no forward.

        ``InvalidArgument``: a map that is malformed or was not offered; a receiver of another
        version or layout (expected and found); ``begin``; no recurrent state kept at the end.
        ``FailedPrecondition``: a mark stands, or a window has evicted a token that the map names.
        Cost: the bytes of the rows, on the channel.
        """

    def disagg_receive(self, seq_id: SeqId, timeout: float | None = None) -> bool:
        """(ours) Take one message from the channel of a sequence that is received or sent, waiting
        for it at most ``timeout`` seconds; return whether ``disagg_wait`` has nothing more to wait
        for. Any thread may call it, one for a channel at a time, also while a forward is open."""

    def disagg_wait(self, seq_id: SeqId, timeout: float | None = None) -> None:
        """Wait until all has come, which then counts, and the sequence is an ordinary one again; on
        the sender, until all counts at the receiver. All or nothing.

        ``DataLoss``: the peer is gone or failed, sent damaged bytes, or was silent for ``timeout``
        seconds (None: for ever); says how much had come. ``Cancelled``: by the peer. Then the
        sequence is as before, with its pages back, and what still comes is dropped.
        """

    def disagg_cancel(self, seq_id: SeqId) -> None:
        """End a hand-over on either side, as ``disagg_wait`` if it fails; tell the other side."""


class AttentionKVCache(KVState, AttentionVerbs, StoredRows, Protocol):
    """The state of ``full``, ``window``, ``latent`` and ``cross`` layers, in pages."""


class RNNState(KVState, RecurrentVerbs, StoredStates, Protocol):
    """The state of ``recurrent`` layers: immutable published states, shared by forks."""


class ModelState(KVState, StoredRows, StoredStates, PoolVerbs, Protocol):
    """The state of a model with layers of any kinds; verbs of absent kinds are ``Unsupported``. The
    verbs about one layer are those of the open pass."""

    def open_pass(self) -> OpenPass:
        """Return the open forward; ``FailedPrecondition`` if there is none."""
