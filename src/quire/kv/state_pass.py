"""The open forward of a KV state: one pass over all of its parts.

Letters: T new tokens; S slots of a pool; Hq, Hkv heads; Dk, Dv head sizes; P page size; K, V sizes
of keys and values of a recurrence; C channels; W taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeAlias, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.base.types import SeqId
from quire.base.uploads import uploaded
from quire.contracts.attention import AttentionState, ForwardPlan, Scoring
from quire.contracts.block_calls import AttentionParts, StackParts
from quire.contracts.kv_format import PLAIN, KVView, PlainRows
from quire.contracts.layers import LatentAttention, RopeSpec
from quire.contracts.model import LatentExpansion
from quire.contracts.recurrence import RecurrentParts
from quire.contracts.rows import HeadNormWeights, Rotation
from quire.kv import latent, plans
from quire.kv.block_calls import ForwardPart, LayerPart, LayerParts
from quire.kv.chosen_rows import ChosenRows, narrow_refusal
from quire.kv.encoders import EncoderPass
from quire.kv.forward_need import ForwardNeed
from quire.kv.imports import Import
from quire.kv.layer_classes import Layer, key_value_spec
from quire.kv.pages import PageIds
from quire.kv.parts import StateParts
from quire.kv.plans import Batch, Keys, Masks, Prepared
from quire.kv.recurrent import Gates, RecurrentPass
from quire.kv.rules import RECURRENT_REFUSAL, layer_refusal
from quire.kv.send_mark import marks_of
from quire.kv.storage import check_tensor, geometry
from quire.ops.attention import attention_weights, merge, visible_keys, weight_sums
from quire.ops.rope import rotate, rotate_last
from quire.ops.rows import normed_heads

MaskedKeys: TypeAlias = Literal["masked past", "masked own"]
"""The latter two of ``Keys`` under the mask of the forward."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A plan over the pages of this batch only; keys rotate when read (RoPE mode ``inline``)."""

    prepared: Prepared
    slots_M: Tensor
    """Slots of the pool that the M slots of the compact pool hold."""
    positions_M: Tensor
    max_position: int


class StatePass:
    """The open forward of a state over layers of every kind: ``Pass`` and ``OpenPass`` of
    ``contracts.model``, whose docstrings are not repeated here.

    It rotates and stores rows, and calls the attention backend. Each set of keys (see ``plans``) is
    planned once per layer class, when it is first asked for. Positions and slots of the new tokens
    are made when they are first asked for: of decodes that run as one call nothing of them is made.
    """

    def __init__(self, state: StateParts, need: ForwardNeed, recurrent: RecurrentPass | None) -> None:
        self._state, self._paged, self._need = state, state.paged, need
        self._recurrent = recurrent
        self._tables = self._tables_of(need)
        self.are_decodes = sum(need.counts) == len(need.counts) and not (any(need.trees) or any(need.windows))
        """Whether each entry has one new token, at its length, and sees what the layers' own
        windows leave."""
        self._runs: dict[tuple[int, int, int], int | None] = {}
        """By layer class, first row and count: the first slot of adjacent ones."""
        self._prepared: dict[tuple[Keys | MaskedKeys, int], Prepared] = {}
        self._raw: dict[tuple[Keys, int], Raw] = {}
        self._rotations: dict[tuple[int, bool], Rotation] = {}
        """By the identity of a ``RopeSpec`` of the state: its hash costs more than the look-up."""
        self._mask: Masks | None = None
        self._relative_T: Tensor | None = None
        self.awaited: dict[SeqId, Import] = {}
        if state.imports:
            self.awaited = {seq: state.imports[seq] for seq in need.seq_ids if seq in state.imports}
        """The imports of its sequences of which something may not have come."""
        self._wait: Callable[[int], None] | None = None
        self.marks = marks_of(state, need.seq_ids)
        """The sequences of this forward that go to another state."""
        self._unsent: dict[int, None] = {}
        """The layers whose rows were written, and not sent yet."""
        self.is_open = True  # Whether its forward is still the open one.
        self.written: set[int] = set()
        self.capturing = False  # Whether attention weights are kept.
        self._observed: frozenset[int] | None = None  # Of which layers; None: all.
        self.weights: dict[int, list[Tensor]] = {}
        """By layer, per entry ``[Hq, n, keys]`` float32, for layers that ran after
        ``capture_weights``. The keys of a cross layer are the encoder's rows."""
        self._parts: dict[tuple[int, ...], ForwardPart] = {}
        """For calls over whole blocks, by the kind of layer."""
        if not (self.are_decodes and state.paged.layer_parts is not None):
            self.prepare()
        self._encoders: EncoderPass | None = None
        if state.encoders is not None:
            self._encoders = EncoderPass(state.encoders, need.seq_ids, self.batch, state.paged.backend)

    def prepare(self) -> None:
        """Compute the cached properties now, not at their first use. Plan for all layer classes:
        what a backend cannot do is refused before compute."""
        _ = self._whole, self._running_slots, self.chosen, self._places_T, self._max_place
        for index in range(len(self._paged.classes)):
            self.prepared("fused", index)

    # -- the new tokens ----------------------------------------------------------------------------

    @cached_property
    def batch(self) -> Batch:
        """Return the new tokens that run."""
        return self._batch_of(self._need)

    @cached_property
    def chosen(self) -> ChosenRows:
        """Return the running rows among the new tokens."""
        return ChosenRows(self.batch.starts)

    @cached_property
    def slots(self) -> list[Tensor]:
        """By layer class, of all new tokens."""
        return self._slots_there()

    @cached_property
    def _whole(self) -> Batch:
        """All new tokens."""
        return self.batch

    @cached_property
    def _slots(self) -> list[NDArray[np.int64]]:
        """On the host: reading it there waits for no device."""
        return self._new_slots()

    @cached_property
    def _running_slots(self) -> list[Tensor]:
        """Return the slots of the tokens that run, by layer class."""
        return self.slots

    @cached_property
    def _places_T(self) -> Tensor:
        """Return the positions at which the new tokens are rotated."""
        return self.batch.positions_T

    @cached_property
    def _max_place(self) -> int:
        return self.batch.max_position

    def _batch_of(self, need: ForwardNeed) -> Batch:
        return plans.batch_of(need, self._state.device)

    def _tables_of(self, need: ForwardNeed) -> list[list[PageIds]]:
        sequences = [self._state.sequences.get(seq_id) for seq_id in need.seq_ids]
        return [[one.tables[index].pages for one in sequences] for index in range(len(self._paged.classes))]

    def _new_slots(self) -> list[NDArray[np.int64]]:
        return [plans.new_slots(self._whole, tables, self._paged.page_size) for tables in self._tables]

    def _slots_there(self) -> list[Tensor]:
        return [uploaded(slots, self._state.device) for slots in self._slots]

    # -- positions ---------------------------------------------------------------------------------

    @property
    def positions_T(self) -> Tensor:
        """int32: true positions."""
        return self.batch.positions_T.to(torch.int32)

    @property
    def places_T(self) -> Tensor:
        return self._places_T

    @property
    def relative_T(self) -> Tensor:
        """int64: positions less the evicted tokens of each query."""
        if self._relative_T is None:
            if self.batch.evicted is None:
                self._relative_T = self.batch.positions_T
            else:
                self._relative_T = uploaded(self.batch.positions - self.batch.evicted, self._state.device)
        return self._relative_T

    def _rotation(self, spec: RopeSpec, relative: bool = False) -> Rotation:
        found = self._rotations.get((id(spec), relative))
        if found is None:
            positions_T = self.relative_T if relative else self._places_T
            cos, sin = self._paged.rotary_table(spec).rows(positions_T, self._max_place)
            found = self._rotations[id(spec), relative] = Rotation(cos, sin, spec.interleaved)
        return found

    def _turn(self, x_THD: Tensor, spec: RopeSpec, *, relative: bool = False) -> Tensor:
        cos, sin, interleaved = self._rotation(spec, relative)
        return rotate(x_THD, cos, sin, interleaved=interleaved)

    def turn(self, layer_id: int, x_THD: Tensor) -> Tensor:
        layer = self._state.layer(layer_id)
        if isinstance(layer.spec, LatentAttention):
            return self.turn_last(x_THD, layer.spec.rope)
        return x_THD if layer.rope is None else self._turn(x_THD, layer.rope)

    def turn_last(self, x_THD: Tensor, spec: RopeSpec | None, *, relative: bool = False) -> Tensor:
        """Rotate the last rotary columns of every head, as latent layers have them."""
        if spec is None:
            return x_THD
        return self._paged.rows.turn_last(x_THD, self._rotation(spec, relative))

    def _sink_queries(self, prepared: Prepared, layer: Layer, q_THD: Tensor) -> Tensor | None:
        """Rotate the verb's queries for the sink part, if there is one, at relative positions."""
        if prepared.plan.sinks is None:
            return None
        rope = layer.spec.rope
        if layer.rope is not None:
            return self._turn(q_THD, layer.rope, relative=True).to(self._paged.dtype)
        if rope is None or self.batch.evicted is None:
            return q_THD.to(self._paged.dtype)
        # The caller has rotated at the true position: turn back by the number of evicted tokens.
        back_T = uploaded(self.batch.evicted, self._state.device)
        cos, sin = self._paged.rotary_table(rope).turn_back(back_T, int(self.batch.evicted.max()))
        turn = rotate_last if isinstance(layer.spec, LatentAttention) else rotate
        return turn(q_THD, cos, sin, interleaved=rope.interleaved).to(self._paged.dtype)

    # -- plans -------------------------------------------------------------------------------------

    def prepared(self, keys: Keys, class_index: int) -> Prepared:
        """Return the plan of one set of keys in one layer class."""
        found = self._prepared.get((keys, class_index))
        if found is None:
            found = self._prepared[keys, class_index] = self._prepare(self._plan(keys, class_index))
        return found

    def _plan(self, keys: Keys, class_index: int) -> ForwardPlan:
        tables = self._tables[class_index]
        plan = plans.planned(self.batch, keys, tables, self._paged.page_size, self._paged.classes[class_index].window)
        return plan if keys != "fused" or self._mask is None else plans.masked(plan, self._mask)

    def _prepare(self, plan: ForwardPlan) -> Prepared:
        return Prepared(plan, self._paged.backend.plan(plan, self._paged.dtype))

    def masked(self, keys: Keys, class_index: int, masks: Masks | None) -> Prepared:
        """Return the plan of these keys; masks replace the causal and tree rule."""
        found = self.prepared(keys, class_index)
        return found if masks is None else self._prepare(plans.masked(found.plan, masks))

    def parts(self, class_index: int) -> tuple[Prepared, Prepared]:
        """Return the plans over earlier rows and new tokens, under the forward's mask, if any."""
        if self._mask is None:
            return self.prepared("past", class_index), self.prepared("own", class_index)
        past, own = self._prepared.get(("masked past", class_index)), self._prepared.get(("masked own", class_index))
        if past is None or own is None:
            before, new = plans.parts_of(self._mask, self.batch)
            past = self._prepared["masked past", class_index] = self.masked("past", class_index, before)
            own = self._prepared["masked own", class_index] = self.masked("own", class_index, new)
        return past, own

    def use_mask(self, mask: Tensor) -> None:
        """Use one mask for all layers, laid out as for ``attention_with_fused_qkv``;
        ``InvalidArgument`` for another."""
        plans.check_mask(mask, self._state.device)
        self.chosen.require_all("a mask")
        self.are_decodes = False
        self._mask = plans.cut_mask(mask, self.batch)
        self._prepared = {key: value for key, value in self._prepared.items() if key[0] in ("past", "own")}
        self._raw.clear()

    def use_positions(self, positions: NDArray[np.int64]) -> None:
        """Rotate the new tokens at these positions, ``[T]`` of 0 or more, else ``InvalidArgument``.
        Their indices still decide what they see. For layers that ``position_refusal`` allows."""
        self.chosen.require_all("positions")
        if positions.shape != (self.batch.num_tokens,) or positions.min() < 0:
            raise InvalidArgument(
                f"{positions.size} positions, the least of which is {positions.min(initial=0)}; {self.batch.num_tokens} of 0 or more are "
                "needed, one for each new token"
            )
        self.are_decodes = False
        self._places_T = uploaded(positions, self._state.device)
        self._max_place = int(positions.max())
        self._rotations.clear()

    def capture_weights(self, layers: frozenset[int] | None = None) -> None:
        """Keep weights of these layers (None: all) from now on, which computes them once more."""
        self.chosen.require_all("captured weights")
        self.capturing, self._observed = True, layers

    # -- rows that continue ------------------------------------------------------------------------

    def narrow(self, rows: NDArray[np.int64]) -> None:
        self.require_all_alike("narrow")
        if not self.chosen.choose(rows):
            return
        self.batch = plans.narrowed(self._whole, rows)
        rows_S = uploaded(rows, self._state.device)
        self._running_slots = [slots_T.index_select(0, rows_S) for slots_T in self.slots]
        self._places_T, self._relative_T = self.batch.positions_T, None
        self._prepared.clear()
        self._rotations.clear()

    def require_all_alike(self, verb: str) -> None:
        """Raise ``Unsupported`` if no rows of this forward can run without the others."""
        self._require_current()
        if reason := narrow_refusal(self._state, self.batch):
            raise Unsupported(f"{verb}: {reason}")
        if self._mask is not None or self.capturing or self._places_T is not self.batch.positions_T:
            raise Unsupported(f"{verb}: the forward has a mask, positions or captured weights, which are of all rows")

    def write_rows(self, layer_id: int, rows: NDArray[np.int64], k: Tensor, v: Tensor | None) -> None:
        layer = self._state.rows_layer(layer_id, "write_rows")
        self.chosen.check(rows)
        shape, state = geometry(layer.spec), self._state
        if shape.latent != (v is None):
            needed = "None: the row is k" if shape.latent else "a tensor"
            raise InvalidArgument(field="v", given=type(v).__name__, allowed=needed)
        if v is None:
            check_tensor(f"k of layer {layer_id}", k, self._paged.dtype, (len(rows), shape.key_dim), state.device)
            k = k.unsqueeze(1)
        else:
            for name, given, width in (("k", k, shape.key_dim), ("v", v, shape.value_dim)):
                wanted = (len(rows), shape.kv_heads, width)
                check_tensor(f"{name} of layer {layer_id}", given, self._paged.dtype, wanted, state.device)
        self.require_open(layer_id)
        if layer_id in self.written:
            raise FailedPrecondition(f"write_rows: layer {layer_id} has run in this forward; give its rows before")
        storage, slots_T = self._paged.classes[layer.class_index].storage, self.slots[layer.class_index]
        if (first := self._run_of(layer.class_index, rows)) is not None:
            storage.write_run(layer.index, first, k, v)
        else:
            storage.write(layer.index, slots_T.index_select(0, uploaded(rows, state.device)), k, v)
        self.chosen.give(layer_id, rows)

    def _run_of(self, class_index: int, rows: NDArray[np.int64]) -> int | None:
        """Return the slot of the first of adjacent rows whose slots are adjacent too; else None."""
        if not rows.size or rows[-1] - rows[0] != rows.size - 1:
            return None
        name = (class_index, int(rows[0]), rows.size)
        if name not in self._runs:
            slots = self._slots[class_index][rows[0] : rows[0] + rows.size]
            self._runs[name] = int(slots[0]) if bool((np.diff(slots) == 1).all()) else None
        return self._runs[name]

    # -- what blocks call --------------------------------------------------------------------------

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        layer = self._state.layer(layer_id, "attention_with_fused_qkv")
        key_value_spec("attention_with_fused_qkv", layer_id, layer)
        return self._attend(layer_id, layer, q_THD, k_THD, v_THD, layer.scoring, None)

    def attend_qkv(
        self,
        layer_id: int,
        qkv_TC: Tensor,
        norms: HeadNormWeights | None = None,
        *,
        scale: float | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        """See ``contracts.model.Pass``; ``scale`` and ``masks`` for this layer only."""
        state = self._state
        layer = state.layer(layer_id, "attention_with_fused_qkv")
        spec, rope = key_value_spec("attention_with_fused_qkv", layer_id, layer), layer.rope
        heads, columns = spec.num_heads, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        v_THD = qkv_TC[:, columns:].view(-1, spec.num_kv_heads, spec.value_dim)
        scoring = layer.scoring if scale is None else replace(layer.scoring, scale=scale)
        self.require_open(layer_id)
        prepared = self.masked("fused", layer.class_index, masks)
        q_sink, by_itself = None, qkv_TC.dtype != self._paged.dtype or spec.rope_mode == "inline"
        if by_itself or prepared.plan.sinks is not None:
            # The heads are needed as they are before they turn, or are stored so.
            qk_THD = qkv_TC[:, :columns].view(-1, heads + spec.num_kv_heads, spec.head_dim)
            q_THD, k_THD = normed_heads(self._paged.rows, qk_THD[:, :heads], qk_THD[:, heads:], norms)
            if by_itself:
                return self._attend(layer_id, layer, q_THD, k_THD, v_THD, scoring, masks)
            q_sink = self._sink_queries(prepared, layer, q_THD)
        self.begin_write(layer_id)
        rotation, slots_T = None if rope is None else self._rotation(rope), self._running_slots[layer.class_index]
        turned_THD = self._paged.rows.rope_and_write_kv(qkv_TC, heads, rotation, norms, layer.view, slots_T)
        self.end_write(layer_id)
        q_THD, k_THD = turned_THD.split_with_sizes([heads, spec.num_kv_heads], 1)
        new, sinks_H = (k_THD, v_THD), layer.sinks_H
        out_THD = self._paged.backend.run(
            prepared.made, q_THD, new, layer.view, scoring, q_sink_THD=q_sink, sinks_H=sinks_H
        )
        if self.capturing:
            self.weigh(layer_id, prepared.plan, q_THD, layer.view, scoring, q_sink, sinks_H)
        return out_THD

    def attend_shared(self, source_layer_id: int, q_THD: Tensor) -> Tensor:
        layer = self._state.layer(source_layer_id, "attention_with_shared_kv")
        key_value_spec("attention_with_shared_kv", source_layer_id, layer)
        prepared, view, turned_THD, q_sink = self._over_stored(source_layer_id, layer, "fused", q_THD)
        found_THD = self._paged.backend.run(
            prepared.made, turned_THD, None, view, layer.scoring, q_sink_THD=q_sink, sinks_H=layer.sinks_H
        )
        return found_THD.to(q_THD.dtype)

    def _attend(
        self,
        layer_id: int,
        layer: Layer,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        scoring: Scoring,
        masks: Masks | None,
    ) -> Tensor:
        rope = layer.rope
        self.require_open(layer_id)
        dtype, q_turned_THD = q_THD.dtype, q_THD
        if rope is not None:
            q_turned_THD = self._turn(q_THD, rope)
            if layer.spec.rope_mode == "normal":
                k_THD = self._turn(k_THD, rope)
        if dtype != self._paged.dtype or k_THD.dtype != self._paged.dtype:
            # Attention reads stored rows, so that results do not depend on where a chunk began.
            q_turned_THD, k_THD, v_THD = (x_THD.to(self._paged.dtype) for x_THD in (q_turned_THD, k_THD, v_THD))
        self.write(layer_id, layer, k_THD, v_THD)
        prepared = self.masked("fused", layer.class_index, masks)
        q_sink = self._sink_queries(prepared, layer, q_THD)
        view: KVView = layer.view
        new: tuple[Tensor, Tensor] | None = (k_THD, v_THD)
        if layer.spec.rope_mode == "inline" and rope is not None:
            raw = self._compact("fused", layer.class_index) if masks is None else self._compacted(prepared.plan)
            # These rows are plain now, and the new ones may not be as the format has rounded them.
            new = (self._turn(k_THD, rope).to(self._paged.dtype), v_THD) if view.format == PLAIN else None
            prepared, view = raw.prepared, self._read_raw(layer, raw)
        out_THD = self._paged.backend.run(
            prepared.made, q_turned_THD, new, view, scoring, q_sink_THD=q_sink, sinks_H=layer.sinks_H
        )
        if self.capturing:
            self.weigh(layer_id, prepared.plan, q_turned_THD, view, scoring, q_sink, layer.sinks_H)
        return out_THD if dtype == self._paged.dtype else out_THD.to(dtype)

    def weigh(
        self,
        layer_id: int,
        plan: ForwardPlan,
        q_THD: Tensor,
        view: KVView,
        scoring: Scoring,
        q_sink_THD: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Keep the attention weights of a layer, if they are wanted."""
        if self._observed is None or layer_id in self._observed:
            found = attention_weights(plan, q_THD, view, scoring, q_sink_THD=q_sink_THD, sinks_H=sinks_H)
            self.weights[layer_id] = found

    def require_open(self, layer_id: int) -> None:
        """Raise ``FailedPrecondition`` if the forward is over, or the layer has not come."""
        self._require_current()
        if self.awaited:
            self.require_come(layer_id)

    def _require_current(self) -> None:
        if not self.is_open:
            # Its slots may belong to somebody else by now.
            raise FailedPrecondition("this forward is over; take the pass of the open one")

    def require_come(self, layer_id: int) -> None:
        """Wait for a layer of imports; ``FailedPrecondition`` if it has not come then."""
        for seq_id, started in self.awaited.items():
            if layer_id in started.missing and self._wait is not None:
                self._wait(layer_id)
            if layer_id in started.missing:
                raise FailedPrecondition(
                    f"layer {layer_id} of sequence {seq_id}, which is being imported, has not come; write it, or wait for it"
                )
            started.let_wait(self._state.link, layer_id)

    def wait_for_layers(self, wait: Callable[[int], None]) -> None:
        self._wait = wait

    def write(self, layer_id: int, layer: Layer, k_THD: Tensor, v_THD: Tensor | None = None) -> None:
        """Store the rows of the new tokens as they are; a latent layer has no ``v``."""
        self.begin_write(layer_id)
        slots_T = self._running_slots[layer.class_index]
        self._paged.classes[layer.class_index].storage.write(layer.index, slots_T, k_THD, v_THD)
        self.end_write(layer_id)

    def blank(self, layer_ids: Iterable[int]) -> None:
        """Store zeros as the new tokens' rows of these layers."""
        for layer_id in layer_ids:
            layer = self._state.layer(layer_id)
            self._unsent[layer_id] = None
            self._paged.classes[layer.class_index].storage.blank_at(layer.index, self.slots[layer.class_index])

    def begin_write(self, layer_id: int) -> None:
        """Raise ``FailedPrecondition`` if the layer lacks rows that were left out."""
        if layer_id not in self.written:
            self.chosen.require_given(layer_id)

    def end_write(self, layer_id: int) -> None:
        """Record the layer's rows as stored, or as stored by the call that comes now. Send those of
        layers before it."""
        self.written.add(layer_id)
        if self.marks:
            self._unsent.pop(layer_id, None)
            self.send_rest(keep={layer_id: None})

    def send_rest(self, keep: Mapping[int, None] = MappingProxyType({})) -> None:
        """Send the new rows of all layers that have them and did not send them. ``keep``: layers
        that follow later. Where ranks divide the state, rank 0 sends behind the step."""
        if not self.marks or self._state.division is not None:
            return
        waiting, self._unsent = self._unsent or {}, dict(keep)
        for layer_id in waiting:
            slots = self._slots[self._state.layer(layer_id).class_index]
            for entry, seq_id in enumerate(self._need.seq_ids):
                if (mark := self.marks.get(seq_id)) is not None:
                    low, high = self._whole.starts[entry], self._whole.starts[entry + 1]
                    mark.send_rows(layer_id, self._need.stored[entry], slots[low:high])

    # -- the parts of attention --------------------------------------------------------------------

    def append(self, layer_id: int, k_THD: Tensor, v_THD: Tensor) -> None:
        """Store the rows of the new tokens, rotated as the layer's mode says."""
        layer = self._state.layer(layer_id)
        self.require_open(layer_id)
        if layer.rope is not None and layer.spec.rope_mode == "normal":
            k_THD = self._turn(k_THD, layer.rope)
        self.write(layer_id, layer, k_THD.to(self._paged.dtype), v_THD.to(self._paged.dtype))

    def append_rows(self, layer_id: int, rows_TR: Tensor) -> None:
        """Store the latent rows of the new tokens as they are given."""
        self.require_open(layer_id)
        self.write(layer_id, self._state.layer(layer_id), rows_TR.to(self._paged.dtype).unsqueeze(1))

    def own(
        self,
        layer_id: int,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        scoring: Scoring,
        masks: Masks | None,
        *,
        coarse: bool = False,
    ) -> AttentionState:
        """Attend over new tokens of the same sequence; store nothing. ``coarse``: the backend's."""
        self.chosen.require_all("attention over given new tokens")
        layer = self._state.layer(layer_id)
        prepared = self.masked("own", layer.class_index, masks)
        q_sink = self._sink_queries(prepared, layer, q_THD)
        if layer.rope is not None:
            q_THD, k_THD = self._turn(q_THD, layer.rope), self._turn(k_THD, layer.rope)
        q_THD, k_THD, v_THD = (x_THD.to(self._paged.dtype).contiguous() for x_THD in (q_THD, k_THD, v_THD))
        return self._paged.backend.run_state(
            prepared.made, q_THD, (k_THD, v_THD), PlainRows(k_THD, v_THD), scoring, q_sink_THD=q_sink, coarse=coarse
        )

    def cross(
        self, layer_id: int, q_THD: Tensor, keys: Keys, scoring: Scoring, *, coarse: bool = False
    ) -> AttentionState:
        """Attend over stored tokens (``past`` or ``fused``). ``coarse``: see ``own``."""
        prepared, view, q_THD, q_sink = self._over_stored(layer_id, self._state.layer(layer_id), keys, q_THD)
        return self._paged.backend.run_state(
            prepared.made, q_THD, None, view, scoring, q_sink_THD=q_sink, coarse=coarse
        )

    def _over_stored(
        self, layer_id: int, layer: Layer, keys: Keys, q_THD: Tensor
    ) -> tuple[Prepared, KVView, Tensor, Tensor | None]:
        """Return the inputs of attention over stored tokens: the plan, the view of the rows, and
        the rotated queries ``[T, H, D]``, for the window and for the sink (None: no sink)."""
        self.require_open(layer_id)
        prepared, view = self.prepared(keys, layer.class_index), layer.view
        q_sink = self._sink_queries(prepared, layer, q_THD)
        if layer.rope is not None:
            q_THD = self._turn(q_THD, layer.rope)
            if layer.spec.rope_mode == "inline":
                raw = self._compact(keys, layer.class_index)
                prepared, view = raw.prepared, self._read_raw(layer, raw)
        return prepared, view, q_THD.to(self._paged.dtype), q_sink

    def shared(
        self, source_layer_id: int, q_THD: Tensor, new: tuple[Tensor, Tensor] | None, scoring: Scoring
    ) -> Tensor:
        """Attend over another layer's keys; ``new`` stands for what that layer would store."""
        if new is None:
            return self.cross(source_layer_id, q_THD, "fused", scoring, coarse=True).out
        own = self.own(source_layer_id, q_THD, *new, scoring, None, coarse=True)
        return merge(own, self.cross(source_layer_id, q_THD, "past", scoring, coarse=True)).out

    # -- keys that are rotated when they are read --------------------------------------------------

    def _compact(self, keys: Keys, class_index: int) -> Raw:
        found = self._raw.get((keys, class_index))
        if found is None:
            found = self._raw[keys, class_index] = self._compacted(self.prepared(keys, class_index).plan)
        return found

    def _compacted(self, plan: ForwardPlan) -> Raw:
        compact, slots, positions = plans.compacted(plan)
        slots_M, positions_M = (uploaded(x, self._state.device) for x in (slots, positions))
        return Raw(self._prepare(compact), slots_M, positions_M, int(positions.max(initial=0)))

    def _read_raw(self, layer: Layer, raw: Raw) -> PlainRows:
        """Return K, rotated, and V of the compact pool."""
        assert layer.rope is not None
        k_MHD = layer.view.keys(raw.slots_M)
        cos, sin = self._paged.rotary_table(layer.rope).rows(raw.positions_M, raw.max_position)
        turned = rotate(k_MHD, cos, sin, interleaved=layer.rope.interleaved)
        return PlainRows(turned.to(self._paged.dtype), layer.view.values(raw.slots_M))

    # -- layers of other kinds, and calls over whole blocks ----------------------------------------

    def attention_parts(
        self, layer_id: int, norms: HeadNormWeights | None, dtype: torch.dtype
    ) -> AttentionParts | None:
        if self.capturing or self._paged.layer_parts is None or dtype != self._paged.dtype:
            return None
        part = self._paged.layer_parts.of(layer_id, norms)
        if part is None:
            return None
        self.require_open(layer_id)
        forward = self._forward_part(self._paged.layer_parts, part)
        if forward.made is None:
            return None
        self.begin_write(layer_id)
        self.end_write(layer_id)
        return AttentionParts(part.made.place, forward.made.place)

    def stack_parts(
        self,
        layers: tuple[tuple[int, HeadNormWeights | None], ...],
        dtype: torch.dtype,
        recurrent: tuple[int, ...] = (),
    ) -> StackParts | None:
        known = self._paged.layer_parts
        if self.awaited or self.marks or self.capturing or known is None or dtype != self._paged.dtype:
            return None
        self._require_current()
        stack = None if not self.are_decodes and self.chosen.rows is not None else known.stack(layers)
        if stack is None:
            return None
        parts = known.of_decodes(stack, self._need.lengths, self._tables) if self.are_decodes else None
        if parts is None:
            forwards = [self._forward_part(known, part).made for part in stack.kinds]
            if any(made is None for made in forwards):
                return None
            places = np.array([made.place for made in forwards], dtype=np.int64)
            parts = StackParts(stack.places, places[stack.kind])
        if recurrent:
            states = self.recurrent("stack_parts").stack(recurrent)
            if states is None:
                return None
            parts = parts._replace(states=states)
        self.written |= stack.ids
        return parts

    def _forward_part(self, known: LayerParts, part: LayerPart) -> ForwardPart:
        index, rope = part.layer.class_index, part.layer.rope
        made = (
            self.prepared("fused", index).made,
            None if rope is None else self._rotation(rope),
            self._running_slots[index],
        )
        forward = self._parts.get(part.kind)
        if forward is None or not forward.is_of(*made):
            forward = self._parts[part.kind] = known.in_forward(part, *made)
        return forward

    def rehearse(self, rows: NDArray[np.int64], asking: NDArray[np.int64], first_layer: int) -> Rehearsal:
        self.require_all_alike("rehearse")
        if any(self.batch.windows):
            raise Unsupported("rehearse: a sequence has a window of its own, whose sink is read at relative positions")
        for chosen in (rows, asking):
            self.chosen.check(chosen)
        if not (rows.size and np.isin(asking, rows, assume_unique=True).all()):
            raise InvalidArgument(
                field="asking", given=asking, allowed="a part of rows, of which there is at least one"
            )
        if self.chosen.rows is not None or self.written:
            raise FailedPrecondition("rehearse: the forward is narrowed, or a layer has run; rehearse before")
        return Rehearsal(self, rows, asking, first_layer)

    def attend_latent(self, layer_id: int, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion) -> Tensor:
        """See ``contracts.model.Pass`` and ``latent``. ``Unsupported`` for a layer that is not
        latent, ``InvalidArgument`` for wrong shapes; nothing is stored then."""
        state = self._state
        layer = state.layer(layer_id, "append_mla_kv")
        self.require_open(layer_id)
        spec = layer.spec
        if not isinstance(spec, LatentAttention):
            raise Unsupported(f"attend_latent: layer {layer_id} is of kind {spec.kind!r}; call attend")
        latent.check_shapes(self.batch.num_tokens, layer_id, spec, q_THD, rows_TR, expansion)
        rows_T1R = self.turn_last(rows_TR.unsqueeze(1), spec.rope).to(self._paged.dtype)
        self.write(layer_id, layer, rows_T1R)
        turned_THD = self.turn_last(q_THD, spec.rope)
        batch = self.batch

        def absorbed(keys: Prepared) -> tuple[Tensor, Tensor | None]:
            """Return the queries for these keys, and for their sink part if they have one."""
            q = latent.absorb(turned_THD, expansion, self._paged.dtype)
            if keys.plan.sinks is None:
                return q, None
            return q, latent.absorb(self.turn_last(q_THD, spec.rope, relative=True), expansion, self._paged.dtype)

        if self.capturing:
            # From absorbed scores over all rows.
            keys = self.prepared("fused", layer.class_index)
            q, q_sink = absorbed(keys)
            self.weigh(layer_id, keys.plan, q, layer.view, layer.scoring, q_sink)
        narrowed = self.chosen.rows is not None
        if (batch.counts == 1).all() or (narrowed and not latent.worth_expanding(batch, expansion)):
            everything = self.prepared("fused", layer.class_index)
            q, q_sink = absorbed(everything)
            out_THR = self._paged.backend.run(
                everything.made, q, (rows_T1R, rows_T1R[..., : spec.value_dim]), layer.view, layer.scoring,
                q_sink_THD=q_sink,
            )  # fmt: skip
            return latent.expand_values(out_THR.to(q_THD.dtype), expansion)
        past, own = self.parts(layer.class_index)
        q = turned_THD.to(self._paged.dtype)
        q_sink = None
        if own.plan.sinks is not None:
            q_sink = self.turn_last(q_THD, spec.rope, relative=True).to(self._paged.dtype)
        # From the stored rows, so that results do not depend on where a chunk began.
        if narrowed or layer.view.format != PLAIN:
            rows_T1R = layer.view.keys(self.slots[layer.class_index])
        expanded = PlainRows(*latent.expand(rows_T1R.squeeze(1).to(q_THD.dtype), expansion, self._paged.dtype))
        new = None if narrowed else expanded
        if not batch.stored.any():
            found = self._paged.backend.run(own.made, q, new, expanded, layer.scoring, q_sink_THD=q_sink)
            return found.to(q_THD.dtype)
        mine = self._paged.backend.run_state(own.made, q, new, expanded, layer.scoring, q_sink_THD=q_sink, coarse=True)
        q, q_sink = absorbed(past)
        before = self._paged.backend.run_state(
            past.made, q, None, layer.view, layer.scoring, q_sink_THD=q_sink, coarse=True
        )
        earlier = AttentionState(latent.expand_values(before.out.to(q_THD.dtype), expansion), before.lse)
        return merge(AttentionState(mine.out.to(q_THD.dtype), mine.lse), earlier).out

    def attend_cross(self, layer_id: int, q_THD: Tensor) -> Tensor:
        encoders = self.encoder_rows(layer_id, "attend_cross")
        out_THD = encoders.attend(layer_id, q_THD)
        if self.capturing:
            self.weights[layer_id] = encoders.weights(layer_id, q_THD)
        return out_THD

    def encoder_rows(self, layer_id: int, verb: str) -> EncoderPass:
        """Return this forward over a cross layer's encoder rows; ``Unsupported`` for others."""
        kind = self._state.spec(layer_id).kind
        if self._encoders is None or kind != "cross":
            raise Unsupported(f"{verb}: layer {layer_id} is of kind {kind!r}: {layer_refusal('set_cross_kv', kind)}")
        self.require_open(layer_id)
        return self._encoders

    def recurrent(self, verb: str) -> RecurrentPass:
        """Return this forward over the recurrent layers; ``Unsupported`` where there are none."""
        if self._recurrent is None:
            raise Unsupported(f"{verb}: {RECURRENT_REFUSAL}")
        return self._recurrent

    def linear_attention(
        self, layer_id: int, state_id: int, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, **options: Unpack[Gates]
    ) -> Tensor:
        recurrent = self.recurrent(f"linear_attention of layer {layer_id}")
        self.require_open(layer_id)
        return recurrent.linear_attention(layer_id, state_id, q_THK, k_THK, v_THV, **options)

    def convolve(
        self, layer_id: int, state_id: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
    ) -> Tensor:
        recurrent = self.recurrent(f"convolve of layer {layer_id}")
        self.require_open(layer_id)
        return recurrent.convolve(layer_id, state_id, x_TC, weight_CW, bias_C)

    def recurrent_parts(self, layer_id: int) -> RecurrentParts | None:
        recurrent = self.recurrent(f"recurrent_parts of layer {layer_id}")
        self.require_open(layer_id)
        return recurrent.parts(layer_id)


class Rehearsal(StatePass):
    """Some rows of a forward alone (``contracts.model.RehearsalPass``).

    Letters: N keys that a query of an entry sees."""

    def __init__(
        self, forward: StatePass, rows: NDArray[np.int64], asking: NDArray[np.int64], first_layer: int
    ) -> None:
        parts, starts = forward._state, forward.batch.starts
        assert parts.sequences.forward is not None
        need = parts.sequences.forward.need
        entries = np.flatnonzero(np.diff(np.searchsorted(rows, starts)))
        some = replace(
            need,
            seq_ids=tuple(need.seq_ids[entry] for entry in entries),
            lengths=tuple(need.lengths[entry] for entry in entries),
            stored=tuple(need.stored[entry] for entry in entries),
            counts=tuple(need.counts[entry] for entry in entries),
            trees=tuple(need.trees[entry] for entry in entries),
            windows=tuple(need.windows[entry] for entry in entries),
        )
        super().__init__(parts, some, None)
        self._forward, self._first_layer, self._wait, self.marks = forward, first_layer, forward._wait, {}
        self._at = np.concatenate([np.arange(starts[entry], starts[entry + 1]) for entry in entries])
        """Where each of this pass's rows is among the forward's."""
        self._firsts = [int(starts[entry]) for entry in entries]
        """Where the rows of each entry begin there."""
        self.narrow(np.searchsorted(self._at, rows))
        self._asks = np.isin(rows, asking, assume_unique=True)
        """Of each row that runs: whether its attention is summed."""
        self.capturing = True
        self._seen: dict[int, list[tuple[Tensor, ...]]] = {}
        """By layer class, of each entry that asks: its n asking rows among those that run, the
        slots of the N keys, a mask of the keys visible to each query ``[n, N]``, the new tokens
        among the N, and their rows in the forward."""
        self.mass_T = torch.zeros(int(starts[-1]), device=parts.device)

    def _require_current(self) -> None:
        self._forward._require_current()

    def write_rows(self, layer_id: int, rows: NDArray[np.int64], k: Tensor, v: Tensor | None) -> None:
        """See ``contracts.model.OpenPass``; ``rows`` are the forward's."""
        self._forward.write_rows(layer_id, rows, k, v)

    def begin_write(self, layer_id: int) -> None:
        """Take over the rows given to the forward, then check as it does."""
        self.chosen.give(layer_id, np.flatnonzero(self._forward.chosen.given(layer_id)[self._at]))
        super().begin_write(layer_id)

    def end_write(self, layer_id: int) -> None:
        """Note the layer as written. The forward needs these rows again: they lie in its places."""
        super().end_write(layer_id)
        again = self._at if self.chosen.rows is None else self._at[self.chosen.rows]
        self._forward.chosen.rollback(layer_id, again)

    def weigh(
        self,
        layer_id: int,
        plan: ForwardPlan,
        q_THD: Tensor,
        view: KVView,
        scoring: Scoring,
        q_sink_THD: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Add the asking rows' weights to the masses."""
        if layer_id < self._first_layer:
            return
        for rows, slots_N, visible_nN, new, into in self._seen_by(self._state.layer(layer_id).class_index, plan):
            q_nHD, k_NHD = q_THD.index_select(0, rows), view.keys(slots_N)
            sums_N = weight_sums(q_nHD, k_NHD, visible_nN, scoring, sinks_H)
            self.mass_T.index_add_(0, into, sums_N.index_select(0, new))

    def _seen_by(self, class_index: int, plan: ForwardPlan) -> list[tuple[Tensor, ...]]:
        """Return the keys visible to the asking rows in the layers of one class (``_seen``)."""
        if class_index in self._seen:
            return self._seen[class_index]
        found, size = self._seen.setdefault(class_index, []), plan.page_size
        for entry, table in enumerate(plan.tables):
            rows = int(plan.starts[entry]) + np.flatnonzero(self._asks[plan.starts[entry] : plan.starts[entry + 1]])
            if not rows.size:
                continue
            visible = visible_keys(plan, entry)[0][rows - plan.starts[entry]]
            seen = np.flatnonzero(visible.any(0))
            slots = table[seen // size].astype(np.int64) * size + seen % size
            new = np.flatnonzero(seen >= self.batch.stored[entry])
            into = self._firsts[entry] + seen[new] - int(self.batch.stored[entry])
            arrays = (rows, slots, visible[:, seen], new, into)
            found.append(tuple(torch.from_numpy(x).to(self._state.device) for x in arrays))
        return found
