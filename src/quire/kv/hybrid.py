"""``HybridState``: attention in pages and recurrent states, behind one contract; ``RecurrentState``: the latter alone.

Sequences, lengths, trees and the bracket are those of the attention part, which may have no layers at all; a recurrent part keeps
states at some of the positions. **All parts or none**: a call is checked on each part before either changes.

Letters: B entries of the batch; T new tokens, N >= T rows of a padded tensor; Hq query heads, H heads of a state; K, V sizes of keys
and values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from quire.contracts.attention import AttentionBackend
from quire.contracts.layers import LayerSpec, Recurrent, window_refusal
from quire.contracts.recurrence import RecurrenceBackend
from quire.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported
from quire.interrupts import uninterrupted_verbs
from quire.kv import recurrent_verbs
from quire.kv.layer_classes import describe_ids
from quire.kv.need import ForwardNeed
from quire.kv.paged import PagedKVState
from quire.kv.passes import AttentionPass
from quire.kv.recurrent import RecurrentPart, RecurrentPass
from quire.kv.rules import layer_refusal
from quire.kv.sequences import check_integer
from quire.kv.state_slots import StateNeed
from quire.kv.storage import StoredSpec
from quire.kv.trees import TokenTreeParents
from quire.kv.verbs import CHANGES
from quire.kv.windows import Eviction
from quire.ops.recurrence import ReferenceRecurrence
from quire.signatures import checks_arguments
from quire.types import SeqId


class HybridPass(AttentionPass):
    """The open forward of a ``HybridState`` (``contracts.model.Pass``)."""

    def __init__(self, state: PagedKVState, need: ForwardNeed, states: RecurrentPass) -> None:
        super().__init__(state, need)
        self.states = states

    def linear_attention(
        self,
        layer_id: int,
        state_id: int,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        *,
        scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta_TH: Tensor | None = None,
    ) -> Tensor:
        """See ``contracts.model.Pass``."""
        self._require_open()
        return self.states.linear_attention(
            layer_id, state_id, q_THK, k_THK, v_THV, scale=scale, log_decay=log_decay, beta_TH=beta_TH
        )

    def convolve(
        self, layer_id: int, state_id: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
    ) -> Tensor:
        """See ``contracts.model.Pass``."""
        self._require_open()
        return self.states.convolve(layer_id, state_id, x_TC, weight_CW, bias_C)


@checks_arguments(but=("spec",))
@uninterrupted_verbs(*CHANGES)
class HybridState(PagedKVState):
    """The KV state of a model that has recurrent layers, alone or beside attention.

    ``specs`` are of all kinds; layer ids are ``first_layer`` and following. ``num_states``: slots for states, kept ones included; a
    sequence needs one, and one more in a forward (``num_states_for`` adds up). ``recurrence``: what computes recurrences; None: the
    reference, which is exact and slow (``quire.kernels.recurrence.ChunkedRecurrence`` is fast). ``ring``: how many of the last states before the present one are kept while
    there is room. ``checkpoint_interval``: tokens between checkpoints that are kept by themselves, a multiple of
    ``page_size``; 0: none. The rest is as in ``PagedKVState``.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        num_states: int,
        recurrence: RecurrenceBackend | None = None,
        backend: AttentionBackend | None = None,
        ring: int = 4,
        checkpoint_interval: int = 0,
        capacity: int = 1,
        window_capacity: int | None = None,
        cross_capacity: int | None = None,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        first_layer: int = 0,
    ) -> None:
        recurrent = {first_layer + index: spec for index, spec in enumerate(specs) if isinstance(spec, Recurrent)}
        if not recurrent:
            raise InvalidArgument("a hybrid state needs a recurrent layer; PagedKVState is for models without")
        for name, value, least in (("num_states", num_states, 1), ("ring", ring, 0)):
            check_integer(value, name, least)
        interval = check_integer(checkpoint_interval, "checkpoint_interval", 0)
        if interval % page_size:
            raise InvalidArgument(
                f"checkpoint_interval {interval}; a multiple of the page size {page_size}, or 0 for none, is needed"
            )
        ids = [first_layer + index for index in range(len(specs)) if first_layer + index not in recurrent]
        self._states: StateNeed | None = None
        """What the forward that is being opened needs of states."""
        super().__init__(
            [specs[layer - first_layer] for layer in ids],
            capacity=capacity,
            window_capacity=window_capacity,
            cross_capacity=cross_capacity,
            page_size=page_size,
            dtype=dtype,
            device=device,
            backend=backend,
            first_layer=first_layer,
            layer_ids=ids,
            allow_empty=True,
        )
        self.recurrent: RecurrentPart = RecurrentPart(
            list(recurrent.values()),
            list(recurrent),
            num_slots=num_states,
            ring=ring,
            interval=interval,
            device=self.device,
            backend=ReferenceRecurrence() if recurrence is None else recurrence,
        )
        self.all_specs = list(specs)

    @staticmethod
    def num_states_for(
        num_sequences: int,
        *,
        max_length: int = 1,
        checkpoint_interval: int = 0,
        ring: int = 4,
        checkpoints: int = 0,
        tree_nodes: int = 0,
    ) -> int:
        """The ``num_states`` with which so many sequences, which share no states, run in one forward and nothing that is kept is
        given up: of each the present state, what a forward writes, the ring and the checkpoints.

        ``max_length``: tokens of a sequence; ``checkpoint_interval``, ``ring``: those of the state; ``checkpoints``: what the
        caller keeps besides; ``tree_nodes``: uncommitted nodes at most. All of each sequence; ``InvalidArgument`` below 0.
        """
        given = {"num_sequences": num_sequences, "max_length": max_length, "checkpoint_interval": checkpoint_interval}
        given |= {"ring": ring, "checkpoints": checkpoints, "tree_nodes": tree_nodes}
        for name, value in given.items():
            check_integer(value, f"num_states_for: {name}", 1 if name in ("num_sequences", "max_length") else 0)
        # A forward that ends on a multiple of the interval writes one state for both.
        multiples = (max_length - 1) // checkpoint_interval if checkpoint_interval else 0
        return num_sequences * (1 + max(1, tree_nodes) + ring + multiples + checkpoints)

    @property
    def states(self) -> RecurrentPass:
        """The recurrent half of the open forward; ``FailedPrecondition`` if none is open."""
        opened = self.open_pass()
        assert isinstance(opened, HybridPass)
        return opened.states

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.recurrent.storage.num_bytes

    def spec(self, layer_id: int) -> StoredSpec:
        """An attention layer; ``Unsupported`` for a recurrent one, ``InvalidArgument`` for an unknown one."""
        if layer_id in self.recurrent.layer_ids:
            raise Unsupported(f"layer {layer_id} is of kind 'recurrent': {layer_refusal('append_kv', 'recurrent')}")
        if layer_id not in self.stored_specs:
            raise InvalidArgument(
                f"layer {layer_id}; {describe_ids(sorted([*self.stored_specs, *self.recurrent.layer_ids]))}"
            )
        return super().spec(layer_id)

    # -- sequences -------------------------------------------------------------------------------------------

    def clear(self) -> None:
        super().clear()
        self.recurrent.clear()

    def add_sequence(self, seq_id: SeqId) -> None:
        super().add_sequence(seq_id)
        self.recurrent.table.add(seq_id)

    def remove_sequence(self, seq_id: SeqId) -> None:
        super().remove_sequence(seq_id)
        self.recurrent.table.remove(seq_id)

    def fork_sequence(self, parent_id: SeqId, child_id: SeqId, fork_pos: int = -1, *, exact: bool = False) -> int:
        """The child stands at the nearest kept state at or before ``fork_pos`` (-1: the end). Returns the tokens that must be
        run on it to arrive there; with ``exact`` a fork that would return any is refused (``FailedPrecondition``). Shares pages
        and states, copies nothing."""
        fork_pos = check_integer(fork_pos, "fork_sequence: position", -1)
        target = kept = fork_pos
        if parent_id in self.table and fork_pos <= (length := self.table.get(parent_id).length):
            target = length if fork_pos == -1 else fork_pos
            kept = self.recurrent.table.nearest(parent_id, target)
        # Checks all that can be wrong, an unknown parent and a position beyond its end included.
        self.table.check_fork(parent_id, child_id, kept)
        if exact:
            self._require_kept(parent_id, target, kept, "fork_sequence")
        super().fork_sequence(parent_id, child_id, kept)
        self.recurrent.table.fork(parent_id, child_id, kept)
        return target - kept

    def popn(self, seq_id: SeqId, n: int, *, exact: bool = False) -> int:
        """Go back to the nearest kept state at or before the present end less ``n`` tokens. Returns the tokens between, which
        must be run again; with ``exact`` a pop that would return any is refused (``FailedPrecondition``)."""
        n = check_integer(n, "popn: token count", 0)
        kept = target = 0
        if seq_id in self.table and n <= (length := self.table.get(seq_id).length):
            target = length - n
            kept = self.recurrent.table.nearest(seq_id, target)
            n = length - kept
        self.table.check_pop(seq_id, n)
        if exact:
            self._require_kept(seq_id, target, kept, "popn")
        super().popn(seq_id, n)
        self.recurrent.table.pop(seq_id, kept)
        return target - kept

    def _require_kept(self, seq_id: SeqId, target: int, kept: int, verb: str) -> None:
        """``FailedPrecondition`` unless there is a state at ``target`` itself; ``kept`` is the nearest one."""
        if target != kept:
            raise FailedPrecondition(
                f"{verb}: position {target} of sequence {seq_id} is reachable only by running {target - kept} tokens again from a "
                f"recurrent state that is kept; go to {kept} and run them, or leave exact=False; states are kept at "
                f"{self.kept_positions(seq_id)}"
            )

    def rewind_cost(self, seq_id: SeqId, pos: int) -> int:
        """Tokens that must be run again after a pop or fork to ``pos``. Refuses as those do."""
        pos = check_integer(pos, "rewind_cost: position", 0)
        if seq_id not in self.table or pos > self.table.get(seq_id).length:
            return super().rewind_cost(seq_id, pos)  # refuses
        kept = self.recurrent.table.nearest(seq_id, pos)
        return pos - kept + super().rewind_cost(seq_id, kept)

    def reachable(self, seq_id: SeqId) -> list[range]:
        """Positions that ``popn`` and ``fork_sequence`` can go to, with or without tokens to run again; ascending."""
        if self.table.get(seq_id).reserved is not None:
            return super().reachable(seq_id)  # It is being imported, and stands nowhere yet.
        length = self.table.get(seq_id).length
        attention = super().reachable(seq_id)
        kept = self.kept_positions(seq_id)
        found: list[range] = []
        for position, following in zip(kept, [*kept[1:], length + 1], strict=True):
            if any(position in part for part in attention):
                if found and found[-1].stop == position:
                    found[-1] = range(found[-1].start, following)
                else:
                    found.append(range(position, following))
        return found

    def nearest_reachable(self, seq_id: SeqId, position: int) -> int:
        """The latest position, not behind ``position``, that can be gone back to with nothing to run again."""
        attention = super().reachable(seq_id)
        return max(
            (
                kept
                for kept in self.kept_positions(seq_id)
                if kept <= position and any(kept in part for part in attention)
            ),
            default=0,
        )

    def kept_positions(self, seq_id: SeqId) -> list[int]:
        """Positions of all states that are there, ascending: the beginning, checkpoints, ring, the end."""
        table = self.recurrent.table
        self.table.get(seq_id)
        return sorted({0, *table.kept(seq_id), *table.ring_positions(seq_id), table.position(seq_id)})

    def enable_sliding_window_for_seq(
        self, seq_id: SeqId, window: int | None, sink: int = 0, *, eviction: Eviction = "token"
    ) -> None:
        """As ``PagedKVState``; recurrent layers are not concerned. ``Unsupported`` without any attention layer."""
        if reason := window_refusal(self.all_specs):
            raise Unsupported(f"enable_sliding_window_for_seq: {reason}")
        super().enable_sliding_window_for_seq(seq_id, window, sink, eviction=eviction)

    def commit_accepted_token_tree_nodes(self, seq_ids: Sequence[SeqId], leaf_indices: Sequence[int]) -> None:
        """Keep, for each sequence, the path from a root to the given node (-1: nothing), forget all other nodes."""
        paths = [path for _, path in self.table.check_commit(seq_ids, leaf_indices)]
        super().commit_accepted_token_tree_nodes(seq_ids, leaf_indices)
        for seq_id, path in zip(seq_ids, paths, strict=True):
            self.recurrent.table.commit(seq_id, path)

    # -- kept states -----------------------------------------------------------------------------------------

    def require_settled(self, seq_id: SeqId, verb: str) -> None:
        sequence = self.table.get(seq_id)
        self.table.require_closed(verb)
        self.table.require_ready(seq_id, sequence, verb)
        self.table.require_committed(seq_id, sequence, verb)

    def checkpoint(self, seq_id: SeqId) -> None:
        """Keep the present recurrent state, so that a rewind to this length replays nothing. Copies nothing.

        ``FailedPrecondition``: the sequence has uncommitted nodes or is being imported, or a forward is open."""
        self.require_settled(seq_id, "checkpoint")
        self.recurrent.table.keep(seq_id)

    def checkpoints(self, seq_id: SeqId) -> list[int]:
        """Ascending positions of the checkpoints, without 0 and without the ring of recent states."""
        self.table.get(seq_id)
        return self.recurrent.table.kept(seq_id)

    def drop_checkpoint(self, seq_id: SeqId, position: int) -> None:
        """Give up the checkpoint at ``position``; forks keep theirs. ``InvalidArgument``: none is kept there.
        ``FailedPrecondition``: as ``checkpoint``."""
        position = check_integer(position, "drop_checkpoint: position", 0)
        if seq_id in self.table and position not in self.recurrent.table.kept(seq_id):
            raise InvalidArgument(
                f"drop_checkpoint: no checkpoint of sequence {seq_id} at {position}; there are {self.recurrent.table.kept(seq_id)}"
            )
        self.require_settled(seq_id, "drop_checkpoint")
        self.recurrent.table.drop(seq_id, position)

    # -- queries ---------------------------------------------------------------------------------------------

    def empty(self) -> bool:
        return super().empty() and self.recurrent.table.pool.num_used == 0

    @property
    def forgets(self) -> bool:
        """True: only at kept positions is nothing to run again."""
        return True

    @property
    def endless(self) -> bool:
        """Whether positions may run on for ever behind a window."""
        return bool(self.specs) and super().endless

    @property
    def num_pages(self) -> int:
        """Pages of all classes, states among them."""
        return super().num_pages + self.recurrent.table.pool.num_pages

    @property
    def num_used_pages(self) -> int:
        """Pages and states that somebody holds."""
        return super().num_used_pages + self.recurrent.table.pool.num_used

    def pool_sizes(self) -> list[int]:
        """Pages of each class that tokens take, and states."""
        return [*super().pool_sizes(), self.recurrent.table.pool.num_pages]

    def pages_held(self, seq_ids: Collection[SeqId], kept: Collection[SeqId] = ()) -> list[int]:
        """As ``PagedKVState``, and the states that cannot be given up: present ones, and checkpoints of the sequences in
        ``kept``."""
        return [*super().pages_held(seq_ids), self.recurrent.table.num_fixed(seq_ids, kept)]

    def pages_at_most(self, length: int, window: tuple[int, int] | None, step: int) -> list[int]:
        """As ``PagedKVState``, and two states: the present one, and the next while that is made."""
        return [*super().pages_at_most(length, window, step), 2]

    def num_available_pages(self) -> int:
        """As ``PagedKVState``; without any attention layer the free states."""
        return super().num_available_pages() if self.specs else self.recurrent.table.num_available

    def missing_pages(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> int:
        """Pages and states that this ``begin_forward`` would be short of."""
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents, verb="missing_pages")
        return self.table.shortage(need) + self.recurrent.table.shortage(self._state_need(need))

    def shortage_in_steps(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], most: int) -> int:
        """An upper bound of what these tokens are short of if they come in forwards of ``most`` tokens at most."""
        states = self._state_need(self.table.plan_forward(seq_ids, append_lengths, verb="shortage_in_steps"))
        return super().shortage_in_steps(seq_ids, append_lengths, most) + self.recurrent.table.shortage(states)

    def check(self) -> None:
        """Recount everything; ``QuireError`` names what is broken."""
        super().check()
        self.recurrent.table.check()
        for seq_id in self.table.ids:
            sequence, stands = self.table.get(seq_id), self.recurrent.table.position(seq_id)
            length = sequence.length if sequence.reserved is None else sequence.reserved
            if stands != length:
                raise FailedPrecondition(
                    f"invariant: the recurrent state of sequence {seq_id} stands at {stands}, its length is {length}"
                )

    # -- states beside pages (what a scheduler of checkpoints asks) -------------------------------------------

    def spare_states(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> int:
        """State slots that are left beside those that this ``begin_forward`` takes; below 0: it is short of so many."""
        need = self.table.plan_forward(seq_ids, append_lengths, verb="spare_states")
        return self.recurrent.table.spare(self._state_need(need))

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        """Checkpoints (sequence and position) by state slot, of the slots that become free if these are dropped."""
        return self.recurrent.table.loose_checkpoints()

    # -- forward ---------------------------------------------------------------------------------------------

    def _state_need(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]] = ()) -> StateNeed:
        trees = [
            None if tree is None else tree.parents[-count:] for tree, count in zip(need.trees, need.counts, strict=True)
        ]
        return self.recurrent.table.plan(need.seq_ids, need.counts, trees, checkpoints)

    def begin_forward(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents = None,
        *,
        checkpoints: Sequence[Sequence[int]] = (),
    ) -> None:
        """Announce new tokens; takes pages and states, and plans the forward.

        ``checkpoints`` (beyond the contract): per entry, after how many of its new tokens the recurrent state is kept as a
        checkpoint, ascending, beside the multiples of ``checkpoint_interval``; empty: after none. Each takes a state slot.
        ``InvalidArgument`` unless they are in 1..n_i, and for an entry of tree nodes.
        """
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents)
        check_checkpoints(need, checkpoints)
        self.table.require_closed("begin_forward")
        states = self._state_need(need, checkpoints)
        if short := self.recurrent.table.shortage(states):
            pool = self.recurrent.table.pool
            raise ResourceExhausted(
                f"begin_forward: {short} states more than there are free of {pool.num_pages} are needed; remove sequences, drop "
                "checkpoints or give fewer sequences"
            )
        self._states = states
        try:
            super().begin_forward(seq_ids, append_lengths, token_tree_parents)
        finally:
            self._states = None

    def make_pass(self, need: ForwardNeed) -> AttentionPass:
        """See ``PagedKVState.make_pass``."""
        assert self._states is not None
        states = self.recurrent.begin(self._states)
        try:
            return HybridPass(self, need, states)
        except BaseException:
            self.recurrent.abort()
            raise

    def end_forward(self, *, skipped: Iterable[int] = ()) -> None:
        """Publish. A recurrent layer that did not set its state keeps it."""
        paged = [layer for layer in skipped if layer not in self.recurrent.layer_ids]
        self.require_written(paged)
        self.recurrent.complete()
        super().end_forward(skipped=paged)
        self.recurrent.publish()

    def abort_forward(self) -> None:
        """Lengths, trees, states and pages as before ``begin_forward``."""
        super().abort_forward()
        self.recurrent.abort()

    # -- recurrent verbs (``contracts.recurrent_state``) -----------------------------------------------------

    def get(self, layer_id: int, state_id: int, *, per_token: bool = False, out: Tensor | None = None) -> Tensor:
        return recurrent_verbs.get(self, layer_id, state_id, per_token, out)

    def set(self, layer_id: int, state_id: int, data: Tensor, *, per_token: bool = False) -> None:
        recurrent_verbs.put(self, layer_id, state_id, data, per_token)

    def linear_attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sm_scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return recurrent_verbs.linear_attention(self, layer_id, q, k, v, sm_scale, log_decay, beta, out)

    def debug_get(self, layer_id: int, state_id: int, seq_id: SeqId, *, position: int | None = None) -> Tensor:
        return recurrent_verbs.read(self, layer_id, state_id, seq_id, position)

    def debug_set(self, layer_id: int, state_id: int, seq_id: SeqId, data: Tensor) -> None:
        recurrent_verbs.overwrite(self, layer_id, state_id, seq_id, data)


def check_checkpoints(need: ForwardNeed, checkpoints: Sequence[Sequence[int]]) -> None:
    """``InvalidArgument`` unless there are none, or for each entry ascending counts of its new tokens."""
    if checkpoints and len(checkpoints) != len(need.counts):
        raise InvalidArgument(
            f"begin_forward: checkpoints for {len(checkpoints)} entries; there are {len(need.counts)}"
        )
    for entry, asked in enumerate(checkpoints):
        count = need.counts[entry]
        if asked and need.trees[entry] is not None:
            raise InvalidArgument(
                f"begin_forward: checkpoints {list(asked)} of entry {entry}, which adds tree nodes: commit them first"
            )
        if any(low >= high for low, high in zip([0, *asked], [*asked, count + 1], strict=True)):
            raise InvalidArgument(
                f"begin_forward: checkpoints {list(asked)} of entry {entry}; ascending counts in 1..{count} are needed"
            )


@checks_arguments()
class RecurrentState(HybridState):
    """The KV state of a model that has recurrent layers only."""

    def __init__(
        self,
        specs: Sequence[Recurrent],
        *,
        num_states: int,
        recurrence: RecurrenceBackend | None = None,
        ring: int = 4,
        checkpoint_interval: int = 0,
        page_size: int = 16,
        device: torch.device | str = "cpu",
        first_layer: int = 0,
    ) -> None:
        for layer, spec in enumerate(specs, start=first_layer):
            if not isinstance(spec, Recurrent):
                raise Unsupported(
                    f"layer {layer} is of kind {spec.kind!r}; RecurrentState has recurrent layers only, HybridState all kinds"
                )
        super().__init__(
            specs,
            num_states=num_states,
            recurrence=recurrence,
            ring=ring,
            checkpoint_interval=checkpoint_interval,
            page_size=page_size,
            device=device,
            first_layer=first_layer,
        )
