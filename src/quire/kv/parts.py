"""The parts of a KV state: sequences, and what layers keep of each token.

* *Attention*: K and V, or latent rows, of every token, in pages; layers that keep the same
  positions form a *layer class* with a pool and a storage of its own. The page tables belong to the
  sequences (``sequence_table.SequenceTable``).
* *Encoders* (``encoders``): K and V that cross layers read, in pages of a pool of their own.
* *Recurrent* (``recurrent``): states of fixed size at some of the positions, in slots.

This module makes the parts and looks them up. The verbs are mixed into ``state.State``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.contracts.attention import AttentionBackend, Scoring
from quire.contracts.layers import CrossAttention, LatentAttention, LayerSpec, Recurrent, RopeSpec
from quire.contracts.recurrence import RecurrenceBackend
from quire.contracts.rows import RowKernels
from quire.errors import InvalidArgument, Unsupported
from quire.kv.attention_parts import LayerParts, layer_parts
from quire.kv.encoders import EncoderPart
from quire.kv.forward_need import pages_for
from quire.kv.imports import Import
from quire.kv.layer_classes import Layer, LayerClass, describe_ids, ids_of, supported
from quire.kv.pages import PagePool
from quire.kv.recurrent import RecurrentPart
from quire.kv.rules import RECURRENT_REFUSAL, layer_refusal, refuse_layer
from quire.kv.sequence_table import SequenceTable
from quire.kv.sequences import check_integer
from quire.kv.storage import PagedSpec, PagedStorage, StoredSpec
from quire.ops.attention import ReferenceAttention
from quire.ops.host_link import host_link
from quire.ops.recurrence import ReferenceRecurrence
from quire.ops.rope import RotaryTable
from quire.ops.rows import REFERENCE_ROWS
from quire.signatures import checks_arguments
from quire.types import SeqId


@checks_arguments(
    but=("layer", "rows_layer", "spec", "rotary_table", "recurrent_part")
)  # which a forward calls for each layer
class StateParts:
    """The sequences and the parts of a KV state. See ``State`` for what it is made of."""

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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: AttentionBackend | None = None,
        recurrence: RecurrenceBackend | None = None,
        rows: RowKernels | None = None,
        padding: bool = False,
        slack: int = 0,
        first_layer: int = 0,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        """See ``State``."""
        ids = ids_of(len(specs), first_layer, layer_ids)
        recurrent = {layer: spec for layer, spec in zip(ids, specs, strict=True) if isinstance(spec, Recurrent)}
        attention = {layer: spec for layer, spec in zip(ids, specs, strict=True) if layer not in recurrent}
        if not specs:
            raise InvalidArgument("a KV state needs at least one layer")
        check_integer(page_size, "page_size", 1)
        missing = "capacity is missing; give the tokens that attention layers have room for" if attention else ""
        surplus = "" if attention else "there is no attention layer that would keep any"
        _check_room("capacity", capacity, "tokens", missing, surplus)
        _check_room("window_capacity", window_capacity, "tokens", "", surplus)
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise InvalidArgument(f"KV dtype {dtype}; float32, float16, bfloat16 or float64 are stored")
        _check_slots(list(recurrent), num_states, ring, checkpoint_interval, page_size)
        self.backend = ReferenceAttention() if backend is None else backend
        self.rows: RowKernels = REFERENCE_ROWS if rows is None else rows
        self.padding = padding
        self.device = torch.device(device)
        self.dtype = dtype
        self.page_size = page_size
        self.first_layer = first_layer
        self.all_specs: list[LayerSpec] = list(specs)
        self.stored_specs: dict[int, StoredSpec] = {
            layer: supported(layer, spec, self.backend, self.device) for layer, spec in attention.items()
        }
        """All layers with pages, by global id, ascending."""
        encoders = {layer: spec for layer, spec in self.stored_specs.items() if isinstance(spec, CrossAttention)}
        tokens_of = {layer: spec for layer, spec in self.stored_specs.items() if not isinstance(spec, CrossAttention)}
        self.specs: list[PagedSpec] = list(tokens_of.values())
        """Those that keep rows of tokens."""
        self.layer_ids = tuple(tokens_of)
        """Global ids of ``specs``, ascending."""
        missing = f"layers {list(encoders)} are cross layers and cross_capacity is missing; give the encoder rows of all sequences"
        surplus = "" if encoders else "there is no cross layer"
        _check_room("cross_capacity", cross_capacity, "encoder rows", missing if encoders else "", surplus)
        self._pages_of_tokens = pages_for(capacity or 1, page_size)
        self.classes: list[LayerClass] = []
        self._layers: dict[int, Layer] = {}
        self.table = SequenceTable(self._make_pools(window_capacity), page_size, [one.window for one in self.classes])
        self.table.slack = check_integer(slack, "slack", 0)
        self._rotary: dict[RopeSpec, RotaryTable] = {}
        self.encoders: EncoderPart | None = None
        """What cross layers read; None: there are no such layers."""
        if cross_capacity is not None:
            self.encoders = EncoderPart(
                encoders, capacity=cross_capacity, page_size=page_size, dtype=dtype, device=self.device
            )
        self.recurrent: RecurrentPart | None = None
        """The states of recurrent layers; None: there are no such layers."""
        if num_states is not None:
            self.recurrent = RecurrentPart(
                list(recurrent.values()),
                list(recurrent),
                num_slots=num_states,
                ring=ring,
                interval=checkpoint_interval,
                device=self.device,
                backend=ReferenceRecurrence() if recurrence is None else recurrence,
                padding=padding,
            )
        self.imports: dict[SeqId, Import] = {}
        self.link = host_link(self.device)
        """How imports come to a device; None: they are written at once."""
        self.layer_parts: LayerParts | None = layer_parts(self.backend, self.layer, self.rotary_table, page_size)
        """For calls over whole blocks; None if the backend knows none."""

    def _make_pools(self, window_capacity: int | None) -> list[PagePool]:
        """Make the layer classes and their storage; return their pools."""
        members: dict[int | None, list[int]] = {}
        for index, spec in enumerate(self.specs):
            members.setdefault(spec.layer_window, []).append(index)
        pools: list[PagePool] = []
        for window, layers in members.items():
            full = window is None or window_capacity is None
            pools.append(PagePool(self._pages_of_tokens if full else pages_for(window_capacity or 1, self.page_size)))
            slots = pools[-1].num_pages * self.page_size
            storage = PagedStorage(
                [self.specs[index] for index in layers],
                slots,
                self.dtype,
                self.device,
                padding=self.padding,
                row_kernels=self.rows,
            )
            for place, (index, (k_SHD, v_SHD)) in enumerate(zip(layers, storage.layers, strict=True)):
                spec, sinks_H = self.specs[index], None
                scoring = Scoring(spec.scale)
                if not isinstance(spec, LatentAttention):
                    scoring = Scoring(spec.scale, spec.softcap)
                    sinks_H = torch.tensor(spec.sinks, dtype=torch.float32, device=self.device) if spec.sinks else None
                self._layers[self.layer_ids[index]] = Layer(
                    spec, len(self.classes), place, k_SHD, v_SHD, scoring, sinks_H
                )
            self.classes.append(LayerClass(window, tuple(layers), storage))
        return pools

    # -- layers ------------------------------------------------------------------------------------

    def layer(self, layer_id: int, verb: str = "append_kv") -> Layer:
        """Return a layer that keeps rows of tokens. ``InvalidArgument`` for an unknown id;
        ``Unsupported``, with the reason, for a cross or recurrent layer."""
        found = self._layers.get(layer_id)
        if found is None:
            refuse_layer(verb, layer_id, self.spec(layer_id).kind)
        return found

    def rows_layer(self, layer_id: int, verb: str) -> Layer:
        """Return a layer that keeps rows of tokens. ``InvalidArgument`` for an unknown id;
        ``Unsupported`` for a cross or recurrent layer, which verbs about pieces leave out."""
        if (found := self._layers.get(layer_id)) is None:
            kind = self.layer_spec(layer_id).kind
            raise Unsupported(f"{verb}: layer {layer_id} is of kind {kind!r} and keeps no rows of tokens")
        return found

    def spec(self, layer_id: int) -> StoredSpec:
        """Return an attention layer's spec; ``Unsupported`` for a recurrent layer,
        ``InvalidArgument`` for an unknown id."""
        found = self.stored_specs.get(layer_id)
        if found is None:
            recurrent = [] if self.recurrent is None else self.recurrent.layer_ids
            if layer_id in recurrent:
                raise Unsupported(f"layer {layer_id} is of kind 'recurrent': {layer_refusal('append_kv', 'recurrent')}")
            raise InvalidArgument(f"layer {layer_id}; {describe_ids(sorted([*self.stored_specs, *recurrent]))}")
        return found

    def recurrent_part(self, verb: str) -> RecurrentPart:
        """Return the recurrent layers; ``Unsupported`` where there are none."""
        if self.recurrent is None:
            raise Unsupported(f"{verb}: {RECURRENT_REFUSAL}")
        return self.recurrent

    @property
    def recurrent_ids(self) -> tuple[int, ...]:
        return () if self.recurrent is None else tuple(self.recurrent.layer_ids)

    def layer_spec(self, layer_id: int) -> LayerSpec:
        if self.recurrent is not None and layer_id in self.recurrent.layer_ids:
            return self.recurrent.specs[self.recurrent.layer(layer_id)]
        return self.spec(layer_id)

    def rotary_table(self, spec: RopeSpec) -> RotaryTable:
        """Return the table of one set of frequencies, which all layers that use it share."""
        table = self._rotary.get(spec)
        if table is None:
            table = self._rotary[spec] = RotaryTable(spec, self.device)
        return table

    @property
    def num_bytes(self) -> int:
        parts = [one.storage for one in self.classes] + [part.storage for part in (self.encoders,) if part is not None]
        return sum(storage.num_bytes for storage in parts) + (self.recurrent.storage.num_bytes if self.recurrent else 0)

    # -- kept states -------------------------------------------------------------------------------

    def checkpoints(self, seq_id: SeqId) -> list[int]:
        self.table.get(seq_id)
        return [] if self.recurrent is None else self.recurrent.table.kept(seq_id)

    def kept_positions(self, seq_id: SeqId) -> list[int]:
        length = self.table.get(seq_id).length
        return sorted({0, length}) if self.recurrent is None else list(self.recurrent.table.slots(seq_id))


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
