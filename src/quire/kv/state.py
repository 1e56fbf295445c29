"""``State``: the KV state of a model with layers of any kinds (``contracts.kv_state.ModelState``).

It consists of sequences and parts. **All parts or none**: a verb checks all that can be wrong, then
each part changes. This file is the table of contents. The bodies of verbs ``of_parts`` are in other
modules, by subject: ``exchange`` (export), ``import_verbs``, ``stored_rows``, ``transfer_verbs``
(hand-over), ``state_room`` (holdings, room).
Verbs about one layer of an open forward belong to ``state_pass``. Callers outside of Quire hold a
``contract.ContractState``, which checks arguments and delays signals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.base.signatures import checks_arguments
from quire.base.types import SeqId
from quire.base.uploads import SharedMemory
from quire.contracts.attention import AttentionBackend
from quire.contracts.kv_format import KVFormat
from quire.contracts.layers import CrossAttention, LayerSpec, Recurrent, sink_refusal, window_refusal
from quire.contracts.pool_verbs import (
    Eviction,
    PoolFacts,
    StateGeometry,
    TokenTreeParents,
)
from quire.contracts.recurrence import RecurrenceBackend
from quire.contracts.rows import RowKernels
from quire.kv import exchange, import_verbs, state_room, static_pass, stored_rows, transfer_verbs
from quire.kv.divided_rows import DividedRows
from quire.kv.encoders import EncoderPart
from quire.kv.formats.plain import PlainFormat
from quire.kv.forward_need import ForwardNeed
from quire.kv.layer_classes import backend_for_format, ids_of, supported
from quire.kv.paged import PagedPart
from quire.kv.part import Part
from quire.kv.parts import StateParts
from quire.kv.recurrent import RecurrentPart
from quire.kv.rules import RECURRENT_REFUSAL
from quire.kv.send_mark import marks_of
from quire.kv.sequences import check_integer
from quire.kv.state_pass import StatePass
from quire.kv.static_pass import StaticForward
from quire.kv.windows import Window
from quire.ops.attention import ReferenceAttention
from quire.ops.recurrence import ReferenceRecurrence
from quire.ops.rows import REFERENCE_ROWS

P = ParamSpec("P")
R = TypeVar("R")


def of_parts(function: Callable[Concatenate[StateParts, P], R]) -> Callable[Concatenate[State, P], R]:
    """Return a verb of the state that calls ``function`` of its parts."""

    @wraps(function)
    def verb(state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(state.parts, *args, **kwargs)

    return verb


@checks_arguments(only=("__init__",))
class State:
    """The KV state of a model of any layers. Docstrings of ``contracts`` are not repeated here.

    ``specs``: the layers, of which ``first_layer`` is the global id of the first (a pipeline stage
    owns a range); ``layer_ids``: the ids of all layers, ascending, if not a range. One thread at a
    time.

    Attention layers that keep the same positions form a *layer class* with a pool of its own: those
    of one window, and all without, latent ones among them. ``capacity``: tokens that the pool of
    each class holds, rounded up to whole pages, needed if there is an attention layer;
    ``window_capacity``: the same for classes with a window, which need less (None: as many).
    ``cross_capacity``: rows of encoders over all sequences, needed if and only if there are cross
    layers. ``format``: how rows of K and V lie in pages; ``dtype``: in the place of a format, plain
    rows of it; neither: float32. ``backend``: computes attention; None: the reference, which is
    exact and slow (``quire.kernels.attention.sdpa.SdpaAttention`` is fast). The reference also
    stands in for a backend that does not read the format.

    ``num_states``: slots for recurrent states, kept ones included, needed if and only if there are
    recurrent layers; a sequence needs one, and one more in a forward (``num_states_for`` adds up).
    ``ring``: how many of the last states before the present one are kept while there is room.
    ``checkpoint_interval``: tokens between checkpoints that are kept by themselves, a multiple of
    ``page_size``; 0: none. ``recurrence``: computes recurrences; None: the reference
    (``quire.kernels.recurrence.chunked.ChunkedRecurrence`` is fast).

    ``rows``: rotates queries and keys and writes K and V; None: PyTorch's operations. ``padding``:
    whether forwards over memory that keeps its place are possible (``static_pass``); these need a
    slot more. ``slack``: tokens by which windows let go later than they must, so that so many
    forwards of one token can be taken back.

    Raises ``Unsupported`` for a layer that the backend lacks, ``ResourceExhausted`` without memory.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        capacity: int | None = None,
        window_capacity: int | None = None,
        cross_capacity: int | None = None,
        num_states: int | None = None,
        ring: int = 4,
        checkpoint_interval: int = 0,
        page_size: int = 16,
        dtype: torch.dtype | None = None,
        format: KVFormat | None = None,
        device: torch.device | str = "cpu",
        backend: AttentionBackend | None = None,
        recurrence: RecurrenceBackend | None = None,
        rows: RowKernels | None = None,
        padding: bool = False,
        slack: int = 0,
        first_layer: int = 0,
        layer_ids: Sequence[int] | None = None,
        division: DividedRows | None = None,
    ) -> None:
        """See above. ``division``: the ranks, of which ``specs`` have one's heads, and each stage
        keeps rows and states of some layers; None: all is here."""
        ids = ids_of(len(specs), first_layer, layer_ids)
        divided = () if division is None else division.specs
        whole = dict(zip(ids, divided, strict=True)) if divided else {}
        recurrent = {layer: spec for layer, spec in zip(ids, specs, strict=True) if isinstance(spec, Recurrent)}
        attention = {layer: spec for layer, spec in zip(ids, specs, strict=True) if layer not in recurrent}
        if not specs:
            raise InvalidArgument("a KV state needs at least one layer")
        check_integer(page_size, "page_size", 1)
        missing = "capacity is missing; give the tokens that attention layers have room for" if attention else ""
        surplus = "" if attention else "there is no attention layer that would keep any"
        _check_room("capacity", capacity, "tokens", missing, surplus)
        _check_room("window_capacity", window_capacity, "tokens", "", surplus)
        if format is None:
            format = PlainFormat(torch.float32 if dtype is None else dtype)
        elif dtype is not None:
            raise InvalidArgument(f"dtype {dtype} and format {format.name!r}, which has a dtype; give one of both")
        if format.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise InvalidArgument(f"KV dtype {format.dtype}; float32, float16, bfloat16 or float64 are stored")
        _check_slots(list(recurrent), num_states, ring, checkpoint_interval, page_size)
        backend, device = ReferenceAttention() if backend is None else backend, torch.device(device)
        stored = {layer: supported(layer, spec, backend, device) for layer, spec in attention.items()}
        backend = backend_for_format(backend, stored.values(), device, format)
        encoders = {layer: spec for layer, spec in stored.items() if isinstance(spec, CrossAttention)}
        missing = f"layers {list(encoders)} are cross layers and cross_capacity is missing; give the encoder rows of all sequences"
        surplus = "" if encoders else "there is no cross layer"
        _check_room("cross_capacity", cross_capacity, "encoder rows", missing if encoders else "", surplus)
        check_integer(slack, "slack", 0)
        paged = PagedPart(
            {layer: spec for layer, spec in stored.items() if not isinstance(spec, CrossAttention)},
            capacity=capacity or 1,
            window_capacity=window_capacity,
            page_size=page_size,
            format=format,
            device=device,
            backend=backend,
            rows=REFERENCE_ROWS if rows is None else rows,
            padding=padding,
            slack=slack,
            absent=() if division is None else division.absent,
        )
        crossed = slots = None
        if cross_capacity is not None:
            crossed = EncoderPart(encoders, capacity=cross_capacity, page_size=page_size, format=format, device=device)
        if num_states is not None:
            slots = RecurrentPart(
                recurrent,
                num_slots=num_states,
                ring=ring,
                interval=checkpoint_interval,
                device=device,
                backend=ReferenceRecurrence() if recurrence is None else recurrence,
                padding=padding,
                division=division,
                whole={layer: spec for layer, spec in whole.items() if isinstance(spec, Recurrent)},
            )
        self.parts = StateParts(specs, stored, first_layer, paged, crossed, slots, division, whole)
        self.sequences = paged.sequences
        self.dtype, self.device, self.page_size = format.dtype, device, page_size
        self.current_pass: StatePass | None = None
        """The open forward."""

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

        Of each sequence: ``max_length``: tokens; ``checkpoint_interval``, ``ring``: as for the
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
        transfer_verbs.end_transfers(self.parts, self.sequences.ids)
        for seq_id in list(self.parts.imports):
            import_verbs.end_import(self.parts, seq_id)
        for part in self.parts:
            part.clear()
        self._close_pass()

    def add_sequence(self, seq_id: SeqId) -> None:
        self.sequences.check_new(seq_id, "add_sequence")
        for part in self.parts:
            part.add(seq_id)

    def remove_sequence(self, seq_id: SeqId) -> None:
        self.sequences.get(seq_id)
        self.sequences.require_closed("remove_sequence")
        transfer_verbs.end_transfers(self.parts, [seq_id])
        import_verbs.end_import(self.parts, seq_id)
        for part in self.parts:
            part.remove(seq_id)

    def fork_sequence(self, parent_id: SeqId, child_id: SeqId, fork_pos: int = -1, *, exact: bool = False) -> int:
        target = self.sequences.check_fork(parent_id, child_id, fork_pos)
        stop = self._way_back(parent_id, target, "fork_sequence", exact)
        for part in self.parts:
            part.fork(parent_id, child_id, stop)
        return target - stop

    def popn(self, seq_id: SeqId, n: int, *, exact: bool = False) -> int:
        target = self.sequences.check_pop(seq_id, n)
        stop = self._way_back(seq_id, target, "popn", exact)
        transfer_verbs.check_pop(self.parts, seq_id, stop)
        for part in self.parts:
            part.pop(seq_id, stop)
        return target - stop

    def _way_back(self, seq_id: SeqId, target: int, verb: str, exact: bool = False) -> int:
        """Return the nearest position with recurrent states, at ``target`` or before it.
        ``FailedPrecondition`` if it is evicted or, if ``exact``, is not ``target``."""
        recurrent = self.parts.recurrent
        stop = target if recurrent is None else recurrent.table.nearest(seq_id, target)
        self.sequences.require_reachable(seq_id, stop, verb)
        if exact and target != stop:
            raise FailedPrecondition(
                f"{verb}: position {target} of sequence {seq_id} is reachable only by running {target - stop} tokens again from a "
                f"recurrent state that is kept; go to {stop} and run them, or leave exact=False; states are kept at "
                f"{self.kept_positions(seq_id)}"
            )
        return stop

    def rewind_cost(self, seq_id: SeqId, pos: int) -> int:
        pos = check_integer(pos, "rewind_cost: position", 0)
        sequence = self.sequences.get(seq_id)
        if pos > sequence.length:
            raise InvalidArgument(
                f"rewind_cost: position {pos} of sequence {seq_id} is outside of 0..{sequence.length}"
            )
        self.sequences.require_ready(seq_id, sequence, "rewind_cost")
        self.sequences.require_committed(seq_id, sequence, "rewind_cost")
        return pos - self._way_back(seq_id, pos, "rewind_cost")

    reachable = of_parts(state_room.reachable)
    nearest_reachable = of_parts(state_room.nearest_reachable)

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
            if kept and (reason := sink_refusal(self.parts.paged.specs.values())):
                raise Unsupported(f"window {size} with sink {kept}: {reason}")
            wanted = Window(size, kept, eviction)
        elif sink != 0:
            raise InvalidArgument(f"sink {sink} without a window; give a window, or sink=0")
        if not self.parts.paged.specs:
            self.sequences.get(seq_id)
            raise Unsupported(f"enable_sliding_window_for_seq: {window_refusal(self.parts.all_specs)}")
        self.sequences.set_window(seq_id, wanted)

    def commit_accepted_token_tree_nodes(self, seq_ids: Sequence[SeqId], leaf_indices: Sequence[int]) -> None:
        kept = self.sequences.check_commit(seq_ids, leaf_indices)
        for part in self.parts:
            part.commit(seq_ids, kept)

    def check(self) -> None:
        self.sequences.check()
        import_verbs.check_imports(self.parts)
        transfer_verbs.check_transfers(self.parts)
        for part in self.parts:
            part.check(self.sequences)

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(
        self,
        seq_ids: Sequence[SeqId],
        append_lengths: Sequence[int],
        token_tree_parents: TokenTreeParents | None = None,
        *,
        checkpoints: Sequence[Sequence[int]] = (),
    ) -> None:
        need = self.sequences.plan_forward(seq_ids, append_lengths, token_tree_parents)
        self._begin(need, checkpoints, None)

    static_refusal = of_parts(static_pass.static_refusal)

    def static_forward(self, entries: int, count: int, longest: int, shared: SharedMemory) -> StaticForward:
        """Return memory that keeps its place, for ``begin_static``; see ``StaticForward``."""
        return StaticForward(self.parts, entries, count, longest, shared)

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
        need = self.sequences.plan_forward(seq_ids, append_lengths, None)
        if not static.admits(need) or marks_of(self.parts, seq_ids):
            return False
        self._begin(need, checkpoints, static)
        return True

    def _begin(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]], static: StaticForward | None) -> None:
        check_checkpoints(need, checkpoints)
        if self.parts.recurrent is None and any(checkpoints):
            raise Unsupported(f"begin_forward with checkpoints: {RECURRENT_REFUSAL}, whose states they keep")
        self.sequences.require_closed("begin_forward")
        if self.parts.transfers:
            transfer_verbs.check_forward(self.parts, need)
        # Of two shortages the error names that of states.
        reserved = [part.reserve(need, checkpoints) for part in reversed(self.parts)]
        opened: list[Part] = []
        try:
            for part in self.parts:
                part.open(reserved.pop())
                opened.append(part)
            self.current_pass = self._new_pass(need) if static is None else static.open(need)
        except BaseException:
            for part in opened:
                part.abort()
            raise

    def _new_pass(self, need: ForwardNeed) -> StatePass:
        recurrent = self.parts.recurrent
        return StatePass(self.parts, need, None if recurrent is None else recurrent.new_pass())

    def open_pass(self) -> StatePass:
        """Return the open forward; ``FailedPrecondition`` if there is none."""
        if self.current_pass is None:
            raise FailedPrecondition("no forward is open; call begin_forward first")
        return self.current_pass

    @property
    def open_tokens(self) -> int:
        """T of the open forward; 0 if there is none."""
        return 0 if self.current_pass is None else self.current_pass.batch.num_tokens

    def end_forward(self, *, skipped: Collection[int] = ()) -> None:
        left_out = {*skipped}.difference(self.recurrent_ids)
        opened = self._require_written(left_out)
        for part in self.parts:
            part.complete()
        if left_out:
            opened.blank(left_out.intersection(self.parts.paged.specs) - opened.written)
        opened.send_rest()
        for part in self.parts:
            part.publish()
        for seq_id, mark in opened.marks.items():
            mark.advance(self.sequences.get(seq_id).length)
        self._close_pass()

    def _require_written(self, skipped: set[int]) -> StatePass:
        """Return the open forward, in which each layer was written or is in ``skipped``."""
        for layer_id in skipped:
            self.parts.spec(layer_id)
        opened = self.open_pass()
        if opened.awaited:
            for layer_id in self.recurrent_ids:  # A state that no layer has set is copied.
                opened.require_come(layer_id)
        paged = self.parts.paged
        if missing := sorted(paged.layers.keys() - opened.written - skipped - {*paged.absent}):
            raise FailedPrecondition(
                f"end_forward: layers {missing} were not written; run them, or name them in skipped=, or call abort_forward"
            )
        return opened

    def abort_forward(self) -> None:
        for part in self.parts:
            part.abort()
        self._close_pass()

    def _close_pass(self) -> None:
        """Let the pass of a finished forward refuse from now on: its slots may be taken."""
        if self.current_pass is not None:
            self.current_pass.is_open = False
            self.current_pass = None

    def get_query_positions(self, *, relative: bool = False) -> Tensor:
        opened = self.open_pass()
        return opened.relative_T.to(torch.int32) if relative else opened.positions_T

    # -- kept recurrent states ---------------------------------------------------------------------

    def checkpoint(self, seq_id: SeqId) -> None:
        part = self.parts.recurrent_part("checkpoint")
        self.sequences.require_settled(seq_id, "checkpoint")
        part.table.keep(seq_id)

    checkpoints = of_parts(StateParts.checkpoints)

    def drop_checkpoint(self, seq_id: SeqId, position: int) -> None:
        table = self.parts.recurrent_part("drop_checkpoint").table
        position = check_integer(position, "drop_checkpoint: position", 0)
        if seq_id in self.sequences and position not in table.kept(seq_id):
            raise InvalidArgument(
                f"drop_checkpoint: no checkpoint of sequence {seq_id} at {position}; there are {table.kept(seq_id)}"
            )
        self.sequences.require_settled(seq_id, "drop_checkpoint")
        table.drop(seq_id, position)

    kept_positions = of_parts(StateParts.kept_positions)

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        recurrent = self.parts.recurrent
        return {} if recurrent is None else recurrent.table.loose_checkpoints()

    # -- stored rows and states --------------------------------------------------------------------

    set_cross_kv = of_parts(stored_rows.set_cross_kv)
    debug_get_kv = of_parts(stored_rows.debug_get_kv)
    debug_get_kv_mla = of_parts(stored_rows.debug_get_kv_mla)
    debug_set_kv = of_parts(stored_rows.debug_set_kv)
    debug_get = of_parts(stored_rows.debug_get)
    debug_set = of_parts(stored_rows.debug_set)

    # -- export and import -------------------------------------------------------------------------

    get_layout = of_parts(exchange.get_layout)
    get_layout_hash = of_parts(exchange.get_layout_hash)
    get_checkpoint_metadata = of_parts(exchange.get_checkpoint_metadata)
    export_page_group = of_parts(exchange.export_page_group)
    open_export = of_parts(exchange.open_export)
    plan_import = of_parts(import_verbs.plan_import)
    import_metadata = of_parts(import_verbs.import_metadata)
    import_need = of_parts(import_verbs.import_need)
    prepare_import = of_parts(import_verbs.prepare_import)
    import_page_group = of_parts(import_verbs.import_page_group)
    import_rows = of_parts(import_verbs.import_rows)
    pending_layers = of_parts(import_verbs.pending_layers)
    publish_import = of_parts(import_verbs.publish_import)
    finish_import = of_parts(import_verbs.finish_import)

    # -- hand-over ---------------------------------------------------------------------------------

    disagg_prepare_recv = of_parts(transfer_verbs.disagg_prepare_recv)
    disagg_mark_send = of_parts(transfer_verbs.disagg_mark_send)
    disagg_receive = of_parts(transfer_verbs.disagg_receive)
    disagg_wait = of_parts(transfer_verbs.disagg_wait)
    disagg_cancel = of_parts(transfer_verbs.disagg_cancel)

    # -- layers ------------------------------------------------------------------------------------

    @property
    def recurrent_ids(self) -> tuple[int, ...]:
        return self.parts.recurrent_ids

    layer_spec = of_parts(StateParts.layer_spec)
    own_spec = of_parts(StateParts.own_spec)

    @cached_property
    def geometry(self) -> StateGeometry:
        return state_room.geometry(self.parts)

    def unfused_layers(self) -> list[int]:
        paged = self.parts.paged
        return [layer for layer, spec in paged.specs.items() if not paged.backend.fuses(spec, self.device)]

    @property
    def forgets(self) -> bool:
        return self.parts.recurrent is not None or any(one.window is not None for one in self.parts.paged.classes)

    @property
    def endless(self) -> bool:
        # Of rotations only differences count.
        specs = self.parts.paged.specs.values()
        return all(spec.rope is not None or spec.rope_mode == "none" for spec in specs) and any(
            spec.rope is not None for spec in specs
        )

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.num_bytes)

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self.parts.pools)

    @property
    def num_used_pages(self) -> int:
        return sum(pool.num_used for pool in self.parts.pools)

    @property
    def num_used_bytes(self) -> int:
        return sum(pool.num_used * size for pool, size in zip(self.parts.pools, self.parts.page_bytes, strict=True))

    @property
    def num_splits(self) -> int:
        encoders = self.parts.encoders
        return self.sequences.num_splits + (0 if encoders is None else encoders.table.num_splits)

    @property
    def capacity(self) -> int | None:
        return state_room.capacity(self.parts)

    def pool_sizes(self) -> list[int]:
        recurrent = self.parts.recurrent
        states = [] if recurrent is None else [recurrent.table.pool.num_pages]
        return [*(pool.num_pages for pool in self.sequences.pools), *states]

    @cached_property
    def pool_facts(self) -> tuple[PoolFacts, ...]:
        return state_room.pool_facts(self.parts)

    def page_references(self) -> list[NDArray[np.int32]]:
        return [pool.references.copy() for pool in self.parts.pools]

    # -- holdings of sequences ---------------------------------------------------------------------

    def empty(self) -> bool:
        return len(self.sequences) == 0 and self.num_used_pages == 0

    @property
    def forward_is_open(self) -> bool:
        return self.sequences.forward is not None

    def has_sequence(self, seq_id: SeqId) -> bool:
        return seq_id in self.sequences

    def sequence_ids(self) -> list[SeqId]:
        return self.sequences.ids

    def sequence_length(self, seq_id: SeqId) -> int:
        return self.sequences.get(seq_id).length

    def cached_length(self, seq_id: SeqId) -> int:
        sequence = self.sequences.get(seq_id)
        return sequence.length - sequence.evicted

    def pending_nodes(self, seq_id: SeqId) -> int:
        return self.sequences.get(seq_id).nodes

    def total_sequence_length(self) -> int:
        sequences = [self.sequences.get(seq_id) for seq_id in self.sequences.ids]
        return sum(sequence.stored - sequence.evicted for sequence in sequences)

    def window(self, seq_id: SeqId) -> Window | None:
        return self.sequences.get(seq_id).window

    def held(self, seq_id: SeqId, layer_id: int) -> list[range]:
        return self.sequences.held(seq_id, self.parts.layer(layer_id).class_index)

    held_pages = of_parts(state_room.held_pages)
    page_table = of_parts(state_room.page_table)
    sequence_use = of_parts(state_room.sequence_use)
    sequence_pages = of_parts(state_room.sequence_pages)
    sequence_states = of_parts(state_room.sequence_states)

    def num_shared_pages(self) -> int:
        encoders = [] if self.parts.encoders is None else [self.parts.encoders.table.pool]
        return sum(int((pool.references > 1).sum()) for pool in (*self.sequences.pools, *encoders))

    num_needed = of_parts(state_room.num_needed)

    def pages_held(self, seq_ids: Collection[SeqId], kept: Collection[SeqId] = ()) -> list[int]:
        recurrent = self.parts.recurrent
        states = [] if recurrent is None else [recurrent.table.num_fixed(seq_ids, kept)]
        return [*self.sequences.pages_held(seq_ids), *states]

    # -- room --------------------------------------------------------------------------------------

    num_available_pages = of_parts(state_room.num_available_pages)
    missing_pages = of_parts(state_room.missing_pages)
    page_shortage = of_parts(state_room.page_shortage)
    full_page_shortage = of_parts(state_room.full_page_shortage)
    shortage_in_steps = of_parts(state_room.shortage_in_steps)

    def free_pages(self, without: Collection[SeqId] = ()) -> list[int]:
        recurrent = self.parts.recurrent
        states = [] if recurrent is None else [recurrent.table.num_available_without(without)]
        return [*self.sequences.num_free_without(without), *states]

    shares_tail = of_parts(state_room.shares_tail)
    pages_freed = of_parts(state_room.pages_freed)
    pages_at_most = of_parts(state_room.pages_at_most)
    largest_step = of_parts(state_room.largest_step)

    def states_freed(self, seq_id: SeqId) -> int:
        recurrent = self.parts.recurrent
        return 0 if recurrent is None else recurrent.table.num_freed(seq_id)

    @property
    def num_available_states(self) -> int:
        recurrent = self.parts.recurrent
        return 0 if recurrent is None else recurrent.table.num_available

    @property
    def num_free_states(self) -> int:
        recurrent = self.parts.recurrent
        return 0 if recurrent is None else recurrent.table.pool.num_free

    @property
    def num_checkpoints(self) -> int:
        recurrent = self.parts.recurrent
        return 0 if recurrent is None else recurrent.table.num_kept

    def spare_states(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> int:
        need = self.sequences.plan_forward(seq_ids, append_lengths, verb="spare_states")
        part = self.parts.recurrent_part("spare_states")
        return part.table.spare(part.need_of(need))


def _check_room(name: str, given: int | None, unit: str, missing: str, surplus: str) -> None:
    """Raise ``InvalidArgument`` for the size of a pool. ``missing``: why it must be given, or
    empty; ``surplus``: why it must not, or empty."""
    if given is None:
        if missing:
            raise InvalidArgument(missing)
    elif given < 1:
        raise InvalidArgument(f"{name} {given} {unit}; at least 1 is needed")
    elif surplus:
        raise InvalidArgument(f"{name} {given} {unit}, and {surplus}")


def _check_slots(layers: Sequence[int], num_states: int | None, ring: int, interval: int, page_size: int) -> None:
    """Raise ``InvalidArgument`` unless there are slots exactly if there are recurrent layers."""
    check_integer(ring, "ring", 0)
    if check_integer(interval, "checkpoint_interval", 0) % page_size:
        raise InvalidArgument(
            f"checkpoint_interval {interval}; a multiple of the page size {page_size}, or 0 for none, is needed"
        )
    if num_states is not None:
        check_integer(num_states, "num_states", 1)
    if layers and num_states is None:
        raise InvalidArgument(f"layers {list(layers)} are recurrent and num_states is missing; see num_states_for")
    if not layers and (num_states is not None or interval):
        raise InvalidArgument(
            f"num_states {num_states} and checkpoint_interval {interval}, and there is no recurrent layer"
        )


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
