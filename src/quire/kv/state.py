"""``State``: the KV state of a model with layers of any kinds (``contracts.kv_state``).

It consists of sequences and parts (``parts``). **All parts or none**: a verb asks each part whether
it can, then each changes. Verbs are in ``attention_verbs``, ``recurrent_verbs``, ``stored_rows``,
``exchange`` and ``import_verbs`` (files, transfers) and ``state_room``; those of the parts are
here.

Letters: T new tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.contracts.layers import sink_refusal, window_refusal
from quire.contracts.pool_verbs import Eviction, SequencePages, TokenTreeParents
from quire.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported
from quire.interrupts import uninterrupted_verbs
from quire.kv.attention_verbs import StateAttention
from quire.kv.forward_need import ForwardNeed
from quire.kv.import_verbs import StateImports
from quire.kv.recurrent_states import RecurrentNeed
from quire.kv.recurrent_verbs import StateRecurrence
from quire.kv.rules import RECURRENT_REFUSAL, RefusedVerbs
from quire.kv.sequences import check_integer
from quire.kv.state_pass import StatePass
from quire.kv.state_room import StateRoom
from quire.kv.static_pass import StaticForward
from quire.kv.stored_rows import StateRows
from quire.kv.windows import Window
from quire.signatures import checks_arguments
from quire.types import SeqId

CHANGES = (
    "clear",
    "add_sequence",
    "remove_sequence",
    "fork_sequence",
    "popn",
    "enable_sliding_window_for_seq",
    "commit_accepted_token_tree_nodes",
    "checkpoint",
    "drop_checkpoint",
    "begin_forward",
    "begin_static",
    "end_forward",
    "abort_forward",
    "set_cross_kv",
    "debug_set_kv",
    "debug_set",
    "set",
    "prepare_import",
    "import_page_group",
    "import_rows",
    "publish_import",
    "finish_import",
)
"""Verbs that change a state. An interrupt takes effect before or after one."""

NO_ENCODING = np.empty(0, dtype=np.int32)
NO_POSITIONS = np.empty(0, dtype=np.int64)
NO_ROLES = np.empty(0, dtype=np.uint8)


@checks_arguments()
@uninterrupted_verbs(*CHANGES)
class State(StateAttention, StateRecurrence, StateRows, StateImports, StateRoom, RefusedVerbs):
    """The KV state of a model of any layers. The contract's docstrings are not repeated here.

    ``specs``: the layers, of which ``first_layer`` is the global id of the first (a pipeline stage
    owns a range); ``layer_ids``: those of all, ascending, if not a range. One thread at a time.

    Attention layers that keep the same positions form a *layer class* with a pool of its own: those
    of one window, and all without, latent ones among them. ``capacity``: tokens that the pool of
    each class holds, rounded up to whole pages, needed if there is an attention layer;
    ``window_capacity``: the same for classes with a window, which need less (None: as many).
    ``cross_capacity``: rows of encoders over all sequences, needed if and only if there are cross
    layers. ``backend``: computes attention; None: the reference, which is exact and slow
    (``quire.kernels.sdpa.SdpaAttention`` is fast).

    ``num_states``: slots for recurrent states, kept ones included, needed if and only if there are
    recurrent layers; a sequence needs one, and one more in a forward (``num_states_for`` adds up).
    ``ring``: how many of the last states before the present one are kept while there is room.
    ``checkpoint_interval``: tokens between checkpoints that are kept by themselves, a multiple of
    ``page_size``; 0: none. ``recurrence``: computes recurrences; None: the reference
    (``quire.kernels.recurrence.ChunkedRecurrence`` is fast).

    ``rows``: rotates queries and keys and writes K and V; None: PyTorch's operations. ``padding``:
    whether forwards over memory that keeps its place are possible (``static_pass``); these need a
    slot more. ``slack``: tokens by which windows let go later than they must, so that so many
    forwards of one token can be taken back.

    Raises ``Unsupported`` for a layer that the backend lacks, ``ResourceExhausted`` without memory.
    """

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
        """Return the ``num_states`` with which so many sequences, sharing no states, run in one
        forward and give up nothing that is kept: present states, new ones, rings and checkpoints.

        Of each sequence: ``max_length``: tokens; ``checkpoint_interval``, ``ring``: those of the
        state; ``checkpoints``: kept by the caller besides; ``tree_nodes``: uncommitted nodes at
        most. ``InvalidArgument`` below 0.
        """
        given = {"num_sequences": num_sequences, "max_length": max_length, "checkpoint_interval": checkpoint_interval}
        given |= {"ring": ring, "checkpoints": checkpoints, "tree_nodes": tree_nodes}
        for name, value in given.items():
            check_integer(value, f"num_states_for: {name}", 1 if name in ("num_sequences", "max_length") else 0)
        # A forward that ends on a multiple of the interval writes one state for both.
        multiples = (max_length - 1) // checkpoint_interval if checkpoint_interval else 0
        return num_sequences * (1 + max(1, tree_nodes) + ring + multiples + checkpoints)

    # -- sequences ---------------------------------------------------------------------------------

    def clear(self) -> None:
        for seq_id in list(self.imports):
            self._end_import(seq_id)
        self.table.clear()
        if self.encoders is not None:
            self.encoders.table.clear()
        if self.recurrent is not None:
            self.recurrent.clear()
        self.close_pass()

    def add_sequence(self, seq_id: SeqId) -> None:
        self.table.add(seq_id)
        if self.recurrent is not None:
            self.recurrent.table.add(seq_id)

    def remove_sequence(self, seq_id: SeqId) -> None:
        self.table.get(seq_id)
        self.table.require_closed("remove_sequence")
        self._end_import(seq_id)
        self.table.remove(seq_id)
        if self.encoders is not None:
            self.encoders.table.remove(seq_id)
        if self.recurrent is not None:
            self.recurrent.table.remove(seq_id)

    def fork_sequence(self, parent_id: SeqId, child_id: SeqId, fork_pos: int = -1, *, exact: bool = False) -> int:
        target = stop = check_integer(fork_pos, "fork_sequence: position", -1)
        if parent_id in self.table and fork_pos <= (length := self.table.get(parent_id).length):
            target = length if fork_pos == -1 else target
            stop = self._stop(parent_id, target)
        if target != stop:
            # Checks all that can be wrong, unknown parents and positions beyond the end included.
            self.table.check_fork(parent_id, child_id, stop)
            self._require_no_rerun(parent_id, target, stop, exact, "fork_sequence")
        self.table.fork(parent_id, child_id, stop)
        if self.encoders is not None:
            self.encoders.table.fork(parent_id, child_id)
        if self.recurrent is not None:
            self.recurrent.table.fork(parent_id, child_id, stop)
        return target - stop

    def popn(self, seq_id: SeqId, n: int, *, exact: bool = False) -> int:
        n = check_integer(n, "popn: token count", 0)
        stop = target = 0
        if seq_id in self.table and n <= (length := self.table.get(seq_id).length):
            target = length - n
            stop = self._stop(seq_id, target)
            n = length - stop
        if target != stop:
            self.table.check_pop(seq_id, n)
            self._require_no_rerun(seq_id, target, stop, exact, "popn")
        self.table.pop(seq_id, n)
        if self.recurrent is not None:
            self.recurrent.table.pop(seq_id, stop)
        return target - stop

    def _stop(self, seq_id: SeqId, position: int) -> int:
        """Return where recurrent layers can stand, at ``position`` or before it."""
        return position if self.recurrent is None else self.recurrent.table.nearest(seq_id, position)

    def _require_no_rerun(self, seq_id: SeqId, target: int, stop: int, exact: bool, verb: str) -> None:
        """Raise ``FailedPrecondition`` if ``exact``: ``stop``, not ``target``, has a state."""
        if exact:
            raise FailedPrecondition(
                f"{verb}: position {target} of sequence {seq_id} is reachable only by running {target - stop} tokens again from a "
                f"recurrent state that is kept; go to {stop} and run them, or leave exact=False; states are kept at "
                f"{self.kept_positions(seq_id)}"
            )

    def rewind_cost(self, seq_id: SeqId, pos: int) -> int:
        pos = check_integer(pos, "rewind_cost: position", 0)
        sequence = self.table.get(seq_id)
        if pos > sequence.length:
            raise InvalidArgument(
                f"rewind_cost: position {pos} of sequence {seq_id} is outside of 0..{sequence.length}"
            )
        self.table.require_ready(seq_id, sequence, "rewind_cost")
        self.table.require_committed(seq_id, sequence, "rewind_cost")
        stop = self._stop(seq_id, pos)
        self.table.require_reachable(seq_id, sequence, stop, "rewind_cost")
        return pos - stop

    def reachable(self, seq_id: SeqId) -> list[range]:
        sequence = self.table.get(seq_id)
        attention = self.table.reachable(sequence)
        if self.recurrent is None or sequence.reserved is not None:
            return attention  # One that is being imported stands nowhere yet.
        kept = self.kept_positions(seq_id)
        found: list[range] = []
        for position, following in zip(kept, [*kept[1:], sequence.length + 1], strict=True):
            if any(position in part for part in attention):
                if found and found[-1].stop == position:
                    found[-1] = range(found[-1].start, following)
                else:
                    found.append(range(position, following))
        return found

    def nearest_reachable(self, seq_id: SeqId, position: int) -> int:
        attention = self.table.reachable(self.table.get(seq_id))
        if self.recurrent is None:
            return max((min(position, part.stop - 1) for part in attention if part.start <= position), default=0)
        kept = (one for one in self.kept_positions(seq_id) if one <= position)
        return max((one for one in kept if any(one in part for part in attention)), default=0)

    def held(self, seq_id: SeqId, layer_id: int) -> list[range]:
        return self.table.held(seq_id, self.layer(layer_id).class_index)

    def held_pages(self, seq_ids: Sequence[SeqId]) -> list[SequencePages]:
        return [self._pages_of(seq_id) for seq_id in seq_ids]

    def _pages_of(self, seq_id: SeqId) -> SequencePages:
        sequence = self.table.get(seq_id)
        tables = [table.pages.copy() for table in sequence.tables]
        if self.encoders is not None:
            encoding = self.encoders.table.get(seq_id)
            tables.append(NO_ENCODING if encoding is None else encoding.pages.copy())
        positions, roles = NO_POSITIONS, NO_ROLES
        if self.recurrent is not None:
            slots, positions, roles = self.recurrent.table.named_slots(seq_id)
            tables.append(slots)
        return SequencePages(
            length=sequence.length if sequence.reserved is None else sequence.reserved,
            window=sequence.window,
            tables=tuple(tables),
            state_positions=positions,
            state_roles=roles,
            held=tuple(tuple(self.table.held(seq_id, index)) for index in range(len(self.classes))),
            reachable=tuple(self.reachable(seq_id)),
        )

    def enable_sliding_window_for_seq(
        self, seq_id: SeqId, window: int | None, sink: int = 0, *, eviction: Eviction = "token"
    ) -> None:
        if eviction not in ("token", "forward"):
            raise InvalidArgument(f"eviction {eviction!r}; 'token' or 'forward' are accepted")
        wanted: Window | None = None
        if window is not None:
            size = check_integer(window, "enable_sliding_window_for_seq: window", 1)
            kept = check_integer(sink, "enable_sliding_window_for_seq: sink", 0)
            if kept >= size:
                raise InvalidArgument(f"window {size} with sink {kept}; 0 <= sink < window is needed")
            if kept and (reason := sink_refusal(self.specs)):
                raise Unsupported(f"window {size} with sink {kept}: {reason}")
            wanted = Window(size, kept, eviction)
        elif sink != 0:
            raise InvalidArgument(f"sink {sink} without a window; give a window, or sink=0")
        if not self.specs:
            self.table.get(seq_id)
            raise Unsupported(f"enable_sliding_window_for_seq: {window_refusal(self.all_specs)}")
        self.table.set_window(seq_id, wanted)

    def commit_accepted_token_tree_nodes(self, seq_ids: Sequence[SeqId], leaf_indices: Sequence[int]) -> None:
        kept = self.table.check_commit(seq_ids, leaf_indices)
        for one, copies in zip(self.classes, self.table.commit(kept), strict=True):
            one.storage.copy(copies)
        if self.recurrent is not None:
            for seq_id, (_, path) in zip(seq_ids, kept, strict=True):
                self.recurrent.table.commit(seq_id, path)

    def check(self) -> None:
        self.table.check()
        self.check_imports()
        if self.encoders is not None:
            self.encoders.table.check(self.table.ids)
        if self.recurrent is None:
            return
        self.recurrent.table.check()
        for seq_id in self.table.ids:
            sequence, stands = self.table.get(seq_id), self.recurrent.table.position(seq_id)
            length = sequence.length if sequence.reserved is None else sequence.reserved
            if stands != length:
                raise FailedPrecondition(
                    f"invariant: the recurrent state of sequence {seq_id} stands at {stands}, its length is {length}"
                )

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
        *,
        checkpoints: Sequence[Sequence[int]] = (),
    ) -> None:
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents)
        self._begin(need, checkpoints, None)

    def begin_static(
        self,
        static: StaticForward,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        *,
        checkpoints: Sequence[Sequence[int]] = (),
    ) -> bool:
        """``begin_forward`` over memory that keeps its place. False, and nothing has changed, if
        that is not for this forward."""
        need = self.table.plan_forward(seq_ids, append_lengths, None)
        if not static.admits(need):
            return False
        self._begin(need, checkpoints, static)
        return True

    def _begin(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]], static: StaticForward | None) -> None:
        check_checkpoints(need, checkpoints)
        if self.recurrent is None and any(checkpoints):
            raise Unsupported(f"begin_forward with checkpoints: {RECURRENT_REFUSAL}, whose states they keep")
        self.table.require_closed("begin_forward")
        states = None if self.recurrent is None else self._reserve_recurrent(need, checkpoints)
        opened = self.table.open_forward(need)
        try:
            for one, copies, blanks in zip(self.classes, opened.copies, opened.blanks, strict=True):
                one.storage.copy(copies)
                one.storage.blank(blanks)
            begun = None
            if self.recurrent is not None and states is not None:
                begun = self.recurrent.begin(states, None if static is None else static.open_recurrent)
            self.current_pass = StatePass(self, need, begun) if static is None else static.open(need, begun)
        except BaseException:
            if self.recurrent is not None and self.recurrent.table.forward is not None:
                self.recurrent.abort()
            self.table.abort()
            raise

    def _reserve_recurrent(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]]) -> RecurrentNeed:
        """Return what recurrent layers need for a forward; ``ResourceExhausted`` if slots lack."""
        states = self._recurrent_need(need, checkpoints)
        table = self.recurrent_part("begin_forward").table
        if short := table.shortage(states):
            raise ResourceExhausted(
                f"begin_forward: {short} states more than there are free of {table.pool.num_pages} are needed; remove sequences, "
                "drop checkpoints or give fewer sequences"
            )
        return states

    def end_forward(self, *, skipped: Collection[int] = ()) -> None:
        skipped = {*skipped}.difference(self.recurrent_ids)
        opened = self._require_written(skipped)
        if self.recurrent is not None:
            self.recurrent.complete()
        for layer_id in skipped.intersection(self.layer_ids) - opened.written if skipped else ():
            layer = self.layer(layer_id)
            for stored in (layer.k_SHD, layer.v_SHD):
                stored.index_fill_(0, opened.slots[layer.class_index], 0.0)
        self.table.publish()
        if self.recurrent is not None:
            self.recurrent.publish()
        self.close_pass()

    def _require_written(self, skipped: set[int]) -> StatePass:
        """Return the open forward, in which each layer was written or is in ``skipped``."""
        for layer_id in skipped:
            self.spec(layer_id)
        opened = self.open_pass()
        if opened.awaited:
            for layer_id in self.recurrent_ids:  # One that no layer has set is copied.
                opened.require_come(layer_id)
        if missing := sorted(self._layers.keys() - opened.written - skipped):
            raise FailedPrecondition(
                f"end_forward: layers {missing} were not written; run them, or name them in skipped=, or call abort_forward"
            )
        return opened

    def abort_forward(self) -> None:
        self.table.abort()
        if self.recurrent is not None:
            self.recurrent.abort()
        self.close_pass()

    def get_query_positions(self, *, relative: bool = False) -> Tensor:
        opened = self.open_pass()
        return opened.relative_T.to(torch.int32) if relative else opened.positions_T


def check_checkpoints(need: ForwardNeed, checkpoints: Sequence[Sequence[int]]) -> None:
    """Raise ``InvalidArgument`` unless these are ascending counts of new tokens per entry."""
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
