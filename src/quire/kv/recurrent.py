"""The recurrent part of a KV state: tensors of recurrent layers, and one open forward over them.

Bookkeeping is in ``recurrent_states``; the tensors are here. A *slot* holds the state tensors of
all recurrent layers after one token. A forward reads the slots of earlier states and writes slots
of its own, so published states never change, and an abort only gives slots back.

Letters: L layers and state tensors of one geometry; S slots; B entries of the batch; T new tokens;
G given states; M rows whose states are wanted; n rows read or written; H heads, K, V key and value
size of a state; Hq query heads; C channels; W taps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported
from quire.base.types import SeqId
from quire.base.uploads import uploaded
from quire.contracts.kv_state import TensorPlan
from quire.contracts.layers import InitialValues, Recurrent, StateTensor
from quire.contracts.ranks import STATES
from quire.contracts.recurrence import (
    PooledRecurrence,
    Recurred,
    RecurrenceBackend,
    RecurrencePlan,
    RecurrentParts,
    StackPools,
    StackStates,
    StatePlaces,
)
from quire.kv.divided_rows import DividedRows, Plane
from quire.kv.forward_need import ForwardNeed
from quire.kv.part import Part
from quire.kv.recurrent_states import NULL, OpenRecurrent, RecurrentNeed, Slots
from quire.kv.recurrent_table import RecurrentTable
from quire.kv.sequence_table import SequenceTable
from quire.kv.sequences import Sequence as Tokens
from quire.kv.storage import allocate, check_tensor, copy_rows


def bytes_per_state(specs: Iterable[Recurrent]) -> int:
    """Return the bytes of one state slot of these layers."""
    return sum(math.prod(one.shape) * dtype_of(one).itemsize for spec in specs for one in spec.states)


def dtype_of(tensor: StateTensor) -> torch.dtype:
    """Return the dtype that a state tensor names."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def initial_of(tensor: StateTensor) -> Tensor:
    """Return the initial values of a state tensor, ``[*shape]``, fresh, on the CPU."""
    values = tensor.initial.array.copy() if isinstance(tensor.initial, InitialValues) else np.array(tensor.initial)
    return torch.from_numpy(values).to(dtype_of(tensor)).expand(tensor.shape).clone()


class Gates(TypedDict, total=False):
    """Keyword arguments of ``RecurrenceBackend.linear_attention``."""

    scale: float
    log_decay: Tensor | None
    beta_TH: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PoolStack:
    """Layers that run one after the other."""

    layer_ids: tuple[int, ...]
    members: tuple[tuple[int, int], ...]
    """Layer and number of all of their states."""
    pools: StackPools


class RecurrentStorage:
    """The state tensors of all layers. Tensors of equal shape, dtype and initial value share one
    ``[L, S, *shape]``, to be copied at once. Its last slot holds the initial values and is never
    written. ``ResourceExhausted`` if they do not fit in memory."""

    def __init__(
        self,
        specs: Mapping[int, Recurrent],
        num_slots: int,
        device: torch.device,
        *,
        padding: bool = False,
        absent: Collection[int] = (),
    ) -> None:
        """Take memory for ``num_slots`` slots of these layers, by id; ``padding``, ``absent``: see
        ``PagedStorage``."""
        self.num_slots = num_slots
        self.device = device
        groups: dict[StateTensor, list[tuple[int, int]]] = {}
        for layer, spec in specs.items():
            for state, tensor in enumerate(spec.states if layer not in absent else ()):
                groups.setdefault(tensor, []).append((layer, state))
        self.initial = num_slots + padding
        """The slot of the initial values."""
        self._groups: list[Tensor] = []
        self.rows_S: dict[tuple[int, int], Tensor] = {}
        """By layer and state ``[S, *shape]``, of layers that are here."""
        for tensor, members in groups.items():
            shape = (len(members), self.initial + 1, *tensor.shape)
            tensor_LS = allocate(shape, dtype_of(tensor), device, f"{num_slots} state slots are wanted", "give fewer")
            initial = initial_of(tensor)
            if initial.count_nonzero():
                # A CPU does not back memory that is never written.
                tensor_LS[:, self.initial] = initial.to(device)
            self._groups.append(tensor_LS)
            for index, member in enumerate(members):
                self.rows_S[member] = tensor_LS[index]

    @property
    def num_bytes(self) -> int:
        """Bytes of the ``num_slots`` slots."""
        return sum(tensor_LS[:, : self.num_slots].nbytes for tensor_LS in self._groups)

    def places(self, slots: Slots) -> Slots:
        """Return the places of these slots in memory; ``NULL`` stands for the initial values."""
        return np.where(slots == NULL, self.initial, slots)

    def index(self, slots: Slots) -> Tensor:
        """Return ``places`` on the device, for any number of reads."""
        return uploaded(self.places(slots), self.device)

    def read(self, layer: int, state: int, slots: Slots | Tensor) -> Tensor:
        """Return ``[n, *shape]``, fresh, of slots or what ``index`` made of them."""
        index_N = slots if isinstance(slots, Tensor) else self.index(slots)
        return self.rows_S[layer, state].index_select(0, index_N)

    def write(self, layer: int, state: int, slots_N: Tensor, rows_N: Tensor) -> None:
        """Write rows to slots; ``slots_N``: int64 on the device, without ``NULL``, none twice."""
        self.rows_S[layer, state].index_copy_(0, slots_N, rows_N)

    def write_one(self, layer: int, state: int, slot: int, row: Tensor) -> None:
        """Write one row, on any device; see ``copy_rows``."""
        copy_rows(self.rows_S[layer, state], row[None], slot)

    def take(self, layer: int, slots: Slots) -> dict[str, Tensor]:
        """Return the fresh states of a layer in these slots, ``[n, *shape]``, by number."""
        index_N = self.index(slots)
        return {str(state): self.read(one, state, index_N) for one, state in self.rows_S if one == layer}

    def put(self, layer: int, slots: Slots, planes: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        """Write the states of a layer to slots that the host knows, none of them ``NULL``."""
        for state, rows_N in planes.items():
            for slot, row in zip(slots.tolist(), rows_N, strict=True):
                self.write_one(layer, int(state), slot, row)

    def copy(self, sources: Slots, targets: Slots) -> None:
        """Copy whole slots, over all layers; the source ``NULL`` writes the initial values."""
        if sources.size == 0:
            return
        index_N = self.index(sources)
        target_N = uploaded(targets, self.device)
        for tensor_LS in self._groups:
            tensor_LS.index_copy_(1, target_N, tensor_LS.index_select(1, index_N))


class RecurrentPart(Part):
    """Recurrent layers of a KV state: bookkeeping (``table``), slots (``storage``), open forward.

    ``specs``: the layers by id, ascending. ``num_slots``: states that fit in all, of present ones,
    checkpoints and rings. ``ring``, ``interval``: see ``RecurrentTable``. Verbs of the state check
    all arguments and the bracket; those of a pass are checked here.
    """

    def __init__(
        self,
        specs: Mapping[int, Recurrent],
        *,
        num_slots: int,
        ring: int = 4,
        interval: int = 0,
        device: torch.device | str = "cpu",
        backend: RecurrenceBackend,
        padding: bool = False,
        division: DividedRows | None = None,
        whole: Mapping[int, Recurrent] | None = None,
    ) -> None:
        """``division``: the ranks that hold the layers; None: all are here. ``whole``: the layers
        with all heads, if ranks divide them."""
        for layer_id, spec in specs.items():
            if not spec.states:
                raise InvalidArgument(f"layer {layer_id} has no states; at least one is needed")
        self.specs = dict(specs)
        self.whole_specs = dict(whole or specs)
        """``specs`` with the heads of all ranks, as files and callers see them."""
        self.device = torch.device(device)
        self.backend = backend
        # ``isinstance`` of a protocol looks at all of its members: too slow for each layer.
        self.pooled = backend if isinstance(backend, PooledRecurrence) else None
        """The backend, if it computes on states where they are stored."""
        self.division = division
        absent = () if division is None else division.absent
        self.storage = RecurrentStorage(self.specs, num_slots, self.device, padding=padding, absent=absent)
        self.table = RecurrentTable(num_slots, ring=ring, interval=interval)
        self.current_pass: RecurrentPass | None = None
        """The open forward."""
        self._stack: PoolStack | None = None

    def stack(self, layer_ids: tuple[int, ...]) -> PoolStack:
        """Return the pools of layers that run one after the other; ``InvalidArgument`` for an
        unknown id."""
        if self._stack is None or self._stack.layer_ids is not layer_ids:
            members = [[(layer, state) for state in range(len(self.layer(layer).states))] for layer in layer_ids]
            pools = tuple(tuple(self.storage.rows_S[one] for one in states) for states in members)
            self._stack = PoolStack(layer_ids, tuple(one for states in members for one in states), StackPools(pools))
        return self._stack

    def layer(self, layer_id: int) -> Recurrent:
        """Return a layer, with the heads that are here; ``InvalidArgument`` for an unknown id."""
        if layer_id not in self.specs:
            raise InvalidArgument(f"layer {layer_id!r}; the recurrent layers are {list(self.specs)}")
        return self.specs[layer_id]

    # -- the bracket -------------------------------------------------------------------------------

    def reserve(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]]) -> RecurrentNeed:
        states = self.need_of(need, checkpoints)
        if short := self.table.shortage(states):
            raise ResourceExhausted(
                f"begin_forward: {short} states more than there are free of {self.table.pool.num_pages} are needed; remove sequences, "
                "drop checkpoints or give fewer sequences"
            )
        return states

    def need_of(self, need: ForwardNeed, checkpoints: Sequence[Sequence[int]] = ()) -> RecurrentNeed:
        """Return the slots needed by these layers for a forward."""
        trees = [
            None if tree is None else tree.parents[-count:] for tree, count in zip(need.trees, need.counts, strict=True)
        ]
        return self.table.plan(need.seq_ids, need.counts, trees, checkpoints)

    def open(self, reserved: RecurrentNeed) -> None:
        """Take the slots. ``ResourceExhausted`` before anything changes."""
        self.table.open(reserved)

    def new_pass(self, memory: RecurrentMemory | None = None) -> RecurrentPass:
        """Return the pass of the open forward. ``memory``: see ``RecurrentPass``."""
        assert self.table.forward is not None
        self.current_pass = RecurrentPass(self, self.table.forward, memory)
        return self.current_pass

    def complete(self) -> None:
        """Write the states that no layer has written: state tensors that were not set keep their
        state. The forward stays open; after further writes this is to be called again."""
        assert self.current_pass is not None
        self.current_pass.complete()

    def publish(self) -> None:
        """Make the new states count, after ``complete``. Moves no tensor."""
        assert self.current_pass is not None
        self.table.publish(inside=self.current_pass.inside_known)
        self.current_pass = None

    def abort(self) -> None:
        """Restore all states as before ``open``, less what rings have given up for it."""
        self.table.abort()
        self.current_pass = None

    # -- sequences ---------------------------------------------------------------------------------

    def clear(self) -> None:
        self.table.clear()
        self.current_pass = None

    def add(self, seq_id: SeqId) -> None:
        self.table.add(seq_id)

    def remove(self, seq_id: SeqId) -> None:
        self.table.remove(seq_id)

    def fork(self, parent_id: SeqId, child_id: SeqId, length: int) -> None:
        self.table.fork(parent_id, child_id, length)

    def pop(self, seq_id: SeqId, length: int) -> None:
        self.table.pop(seq_id, length)

    def commit(self, seq_ids: Sequence[SeqId], kept: Sequence[tuple[Tokens, list[int]]]) -> None:
        for seq_id, (_, path) in zip(seq_ids, kept, strict=True):
            self.table.commit(seq_id, path)

    def check(self, sequences: SequenceTable) -> None:
        self.table.check()
        for seq_id in sequences.ids:
            sequence, stands = sequences.get(seq_id), self.table.get(seq_id).length
            length = sequence.length if sequence.reserved is None else sequence.reserved
            if stands != length:
                raise FailedPrecondition(
                    f"invariant: the recurrent state of sequence {seq_id} stands at {stands}, its length is {length}"
                )

    # -- reading from outside ----------------------------------------------------------------------

    def debug_get(self, layer_id: int, state_id: int, seq_id: SeqId, position: int | None = None) -> Tensor:
        """Return a copy ``[*shape]`` of the present state, or of the one kept at ``position``."""
        slot = self.table.slot_at(seq_id, position)
        return self.take(layer_id, np.array([slot], dtype=np.int64))[str(state_id)][0]

    def debug_set(self, layer_id: int, state_id: int, seq_id: SeqId, data: Tensor) -> None:
        """Overwrite a tensor of this sequence's present state, no other. ``ResourceExhausted``."""
        moved = self.table.own(seq_id)
        if moved is not None:
            source, target = (np.array([slot], dtype=np.int64) for slot in moved)
            self.storage.copy(source, target)
        if (layer_id, state_id) in self.storage.rows_S:
            if self.division is not None:
                name, slice = str(state_id), self.division.share.rank
                own, whole = (_planes(specs[layer_id])[name] for specs in (self.specs, self.whole_specs))
                data = self.division.part_of(slice, data[None], own, whole)[0]
            self.storage.write_one(layer_id, state_id, self.table.get(seq_id).present, data)

    # -- exchange ----------------------------------------------------------------------------------

    def group_plan(self, layer_id: int, kept: Iterable[int]) -> dict[str, TensorPlan]:
        """Return a layer's tensors: ``state.i`` is the present state, ``state.i@position`` the one
        kept there."""
        states = self.whole_specs[layer_id].states
        suffixes = ["", *(f"@{position}" for position in kept)]
        return {
            f"state.{index}{suffix}": TensorPlan(one.shape, dtype_of(one))
            for index, one in enumerate(states)
            for suffix in suffixes
        }

    def export(self, seq_id: SeqId, layer_id: int) -> dict[str, Tensor]:
        """Return a layer's present state and checkpoints, named as in ``group_plan``; fresh."""
        rows = self.take(layer_id, self._held_slots(seq_id)).values()
        names = self.group_plan(layer_id, self.table.kept(seq_id))
        return {name: row.clone() for name, row in zip(names, (row for rows_N in rows for row in rows_N), strict=True)}

    def _held_slots(self, seq_id: SeqId) -> Slots:
        """Return the slots of the present state and checkpoints, as in ``group_plan``."""
        positions = (None, *self.table.kept(seq_id))
        return np.array([self.table.slot_at(seq_id, position) for position in positions], dtype=np.int64)

    def import_group(self, seq_id: SeqId, layer_id: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of ``group_plan`` of a sequence that is being imported."""
        slots = self._held_slots(seq_id)
        rows = [tensors[name] for name in self.group_plan(layer_id, self.table.kept(seq_id))]
        given = [rows[start : start + len(slots)] for start in range(0, len(rows), len(slots))]
        self.put(seq_id, layer_id, slots, given)

    # -- states of all ranks -----------------------------------------------------------------------

    def take(self, layer_id: int, slots: Slots) -> Mapping[str, Tensor]:
        """Return the fresh states of a layer in these slots, ``[n, *shape]``, by number."""
        taken = partial(self.storage.take, layer_id, slots)
        if self.division is None:
            return taken()
        own, whole = _planes(self.specs[layer_id]), _planes(self.whole_specs[layer_id])
        return self.division.join(layer_id, (STATES, layer_id), slots, taken, own, whole, self.device)

    def put(self, seq_id: SeqId, layer_id: int, slots: Slots, states: Sequence[Sequence[Tensor]]) -> None:
        """Write states of a layer, by number those of all ``slots``, to slots of a sequence that is
        being imported or received."""
        if self.division is None:
            self.storage.put(layer_id, slots, {str(state): one for state, one in enumerate(states)})
            return
        planes = {str(state): torch.stack([*one]) for state, one in enumerate(states)}
        own, whole = _planes(self.specs[layer_id]), _planes(self.whole_specs[layer_id])
        place = (STATES, layer_id)
        self.storage.put(layer_id, slots, self.division.put(seq_id, layer_id, place, slots, planes, own, whole))


def _planes(spec: Recurrent) -> dict[str, Plane]:
    return {str(state): Plane(tuple(one.shape), one.parts) for state, one in enumerate(spec.states)}


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMemory:
    """The states that a forward reads and writes, on the device."""

    plan: RecurrencePlan
    sources: Tensor
    """``[G]``: the places of the given states."""
    targets_M: Tensor
    """The slots of the wanted states."""
    known: dict[tuple[int, int], Literal["wanted", "end", "token"]] = field(default_factory=dict)
    """By layer and state: of which rows the new states are known (wanted, ends, all tokens)."""


class RecurrentPass:
    """The open forward of a ``RecurrentPart``: T rows, none padded, in the order of ``plan``. The
    pass of the whole state, ``StatePass``, asks whether it is still open."""

    def __init__(self, part: RecurrentPart, opened: OpenRecurrent, memory: RecurrentMemory | None = None) -> None:
        """Open the pass. ``memory``: what it reads and writes; None: its own."""
        need = opened.need
        self._part = part
        self._opened = opened
        self._keeps_place = memory is not None
        self._recent: list[int] = []
        """Rows whose states the ring could take besides: the last of each chain before its end."""
        if memory is None:
            plan = RecurrencePlan(
                starts=need.starts, parents=need.parents, given=need.given, wanted=need.wanted, chains=need.chains
            )
            memory = RecurrentMemory(plan, part.storage.index(need.sources), self._tensor(opened.targets))
            self._recent = [
                row
                for end, count, tree in zip(need.starts[1:].tolist(), need.counts, need.trees, strict=True)
                if not tree
                for row in range(max(end - count, end - 1 - part.table.ring), end - 1)
            ]
        self.plan, self._sources, self._targets_M = memory.plan, memory.sources, memory.targets_M
        self._set = memory.known
        self._recent_rows: dict[tuple[int, int], Tensor] = {}
        """Their states, by layer and state."""

    def _tensor(self, values: Slots | list[int]) -> Tensor:
        return uploaded(np.asarray(values, dtype=np.int64), self._part.device)

    # -- recurrences -------------------------------------------------------------------------------

    def linear_attention(
        self, layer_id: int, state_id: int, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, **options: Unpack[Gates]
    ) -> Tensor:
        """Run ``RecurrenceBackend.linear_attention`` from the state before this forward and store
        the new state. Returns ``[T, Hq, V]``.

        ``InvalidArgument`` unless the state tensor is float32 (or float64) ``[H, K, V]`` of the
        heads and sizes of k and v.
        """
        tensor = self._part.layer(layer_id).states[state_id]
        wanted = (*k_THK.shape[1:], v_THV.shape[-1])
        if tensor.shape != wanted or tensor.dtype not in ("float32", "float64"):
            raise InvalidArgument(
                f"linear_attention: state {state_id} of layer {layer_id} is {tensor.dtype} {tensor.shape}; k {tuple(k_THK.shape)} "
                f"and v {tuple(v_THV.shape)} need float32 {wanted}"
            )
        self._check_rows("linear_attention", q_THK, k_THK, v_THV)
        given = q_THK, k_THK, v_THV
        if (pooled := self._part.pooled) is not None:
            found = pooled.linear_attention_at(self.plan, *given, self._places(layer_id, state_id), **options)
            if found is not None:
                self._set[layer_id, state_id] = "wanted"
                return found
        states_GHKV = self._part.storage.read(layer_id, state_id, self._sources)
        result = self._part.backend.linear_attention(self.plan, *given, states_GHKV, **options)
        return self._take(layer_id, state_id, result)

    def convolve(
        self, layer_id: int, state_id: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
    ) -> Tensor:
        """Run ``RecurrenceBackend.convolve`` behind the inputs before this forward, ``[T, C]``;
        store the new state. ``InvalidArgument`` unless the state tensor is ``[W - 1, C]``."""
        tensor = self._part.layer(layer_id).states[state_id]
        wanted = (weight_CW.shape[1] - 1, x_TC.shape[-1])
        if tensor.shape != wanted:
            raise InvalidArgument(
                f"convolve: state {state_id} of layer {layer_id} is {tensor.shape}; x {tuple(x_TC.shape)} and weight "
                f"{tuple(weight_CW.shape)} need {wanted}"
            )
        self._check_rows("convolve", x_TC)
        given = x_TC, weight_CW, bias_C
        if (pooled := self._part.pooled) is not None:
            found = pooled.convolve_at(self.plan, *given, self._places(layer_id, state_id))
            if found is not None:
                self._set[layer_id, state_id] = "wanted"
                return found
        states_GWC = self._part.storage.read(layer_id, state_id, self._sources)
        return self._take(layer_id, state_id, self._part.backend.convolve(self.plan, *given, states_GWC))

    def parts(self, layer_id: int) -> RecurrentParts | None:
        """Return the states of a layer for a call that computes all of them, and count them as
        written; None if the plan does not pass them on, or this forward has memory that keeps its
        place."""
        states = range(len(self._part.layer(layer_id).states))
        if self._keeps_place or not self._passes_on:
            return None
        self._set.update(((layer_id, state), "wanted") for state in states)
        pools = tuple(self._part.storage.rows_S[layer_id, state] for state in states)
        return RecurrentParts(self.plan, self._sources, self._targets_M, pools)

    def stack(self, layer_ids: tuple[int, ...]) -> StackStates | None:
        """Return the same of several layers that one call runs."""
        if self._keeps_place or not self._passes_on:
            return None
        stack = self._part.stack(layer_ids)
        self._set.update(dict.fromkeys(stack.members, "wanted"))
        return StackStates(self.plan, self._sources, self._targets_M, stack.pools)

    @cached_property
    def _passes_on(self) -> bool:
        return self.plan.passes_on

    def _check_rows(self, verb: str, *tensors: Tensor) -> None:
        if any(one.shape[0] != self.plan.num_rows for one in tensors):
            found = ", ".join(str(one.shape[0]) for one in tensors)
            raise InvalidArgument(f"{verb}: {found} rows; {self.plan.num_rows} tokens are new")

    def _places(self, layer_id: int, state_id: int) -> StatePlaces:
        return StatePlaces(self._part.storage.rows_S[layer_id, state_id], self._sources, self._targets_M)

    def _take(self, layer_id: int, state_id: int, recurred: Recurred) -> Tensor:
        self._part.storage.write(layer_id, state_id, self._targets_M, recurred.states)
        self._set[layer_id, state_id] = "wanted"
        return recurred.out

    # -- states by themselves ----------------------------------------------------------------------

    def get(self, layer_id: int, state_id: int, per_token: bool = False) -> Tensor:
        """Return the state before this forward, ``[B, *shape]``, fresh; ``per_token``:
        ``[T, *shape]``, of each row's predecessor if that is older than the forward, else 0."""
        self._require_own_memory("get", layer_id, state_id)
        tensor = self._part.layer(layer_id).states[state_id]
        storage = self._part.storage
        if not per_token:
            return storage.read(layer_id, state_id, self._opened.need.present)
        found_G = storage.read(layer_id, state_id, self._sources)
        first = np.flatnonzero(self.plan.given >= 0)
        rows_T = torch.zeros((self.plan.num_rows, *tensor.shape), dtype=found_G.dtype, device=found_G.device)
        rows_T[self._tensor(first)] = found_G[self._tensor(self.plan.given[first])]
        return rows_T

    def set(self, layer_id: int, state_id: int, data: Tensor, per_token: bool = False) -> None:
        """Set the new state: ``[B, *shape]`` after the last token of each entry, or with
        ``per_token`` ``[T, *shape]`` after every token. ``InvalidArgument``: shape or dtype, or a
        token tree in the batch without ``per_token``."""
        self._require_own_memory("set", layer_id, state_id)
        tensor = self._part.layer(layer_id).states[state_id]
        need = self._opened.need
        rows = self.plan.num_rows if per_token else len(need.counts)
        check_tensor("set: data", data, dtype_of(tensor), (rows, *tensor.shape), self._part.device)
        if not per_token and not need.chains:
            raise InvalidArgument(
                "set: the batch has a token tree; give the state after every token with per_token=True"
            )
        storage = self._part.storage
        if per_token:
            storage.write(layer_id, state_id, self._targets_M, data[self._tensor(need.wanted)])
            self._set[layer_id, state_id] = "token"
            self._recent_rows[layer_id, state_id] = data[self._tensor(self._recent)]
        else:
            storage.write(layer_id, state_id, self._targets_M[self._tensor(need.offsets[1:] - 1)], data)
            self._set[layer_id, state_id] = "end"

    def _require_own_memory(self, verb: str, layer_id: int, state_id: int) -> None:
        """Raise ``Unsupported`` in a forward whose memory keeps its place: it may be captured."""
        if self._keeps_place:
            raise Unsupported(
                f"{verb}: state {state_id} of layer {layer_id}: this forward has memory that keeps its place"
            )

    # -- the end -----------------------------------------------------------------------------------

    @property
    def inside_known(self) -> bool:
        """Return whether the states of all wanted rows are known, not only those after the last
        tokens."""
        return "end" not in self._set.values()

    def complete(self) -> None:
        """Fill the slots that no layer has written: what was not set keeps its state. If the state
        of every token was set, the last ones of each chain go into slots for the ring."""
        storage, table = self._part.storage, self._part.table
        table.release_recent()
        members = list(storage.rows_S)
        unset = [member for member in members if member not in self._set]
        origins = self._opened.need.origins() if unset else np.empty(0, dtype=np.int64)
        if len(unset) == len(members):
            storage.copy(origins, self._opened.targets)
            return
        if unset:
            index = storage.index(origins)
            for layer, state in unset:
                storage.write(layer, state, self._targets_M, storage.read(layer, state, index))
        if not self._recent or any(known != "token" for known in self._set.values()):
            return
        recent = table.reserve_recent()
        targets = self._tensor([slot for _, _, slot in recent])
        places = {row: place for place, row in enumerate(self._recent)}
        chosen = self._tensor([places[row] for _, row, _ in recent])
        first = self._opened.need.present[[entry for entry, _, _ in recent]]
        for layer, state in members:
            if (layer, state) in self._recent_rows:
                rows = self._recent_rows[layer, state][chosen]
            else:
                rows = storage.read(layer, state, first)
            storage.write(layer, state, targets, rows)
