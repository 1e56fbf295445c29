"""All parts of a KV state together, and what is known of its layers of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.host_link import host_link
from quire.base.types import SeqId
from quire.contracts.channel import Channel
from quire.contracts.layers import KeyValueAttention, LatentAttention, LayerSpec, StateTensor
from quire.contracts.ranks import STATES
from quire.kv.divided_rows import DividedRows, Plane
from quire.kv.encoders import EncoderPart
from quire.kv.imports import Import
from quire.kv.layer_classes import Layer, describe_ids
from quire.kv.messages import Transfer
from quire.kv.paged import PagedPart
from quire.kv.pages import PagePool
from quire.kv.part import Part
from quire.kv.recurrent import RecurrentPart, RecurrentStorage
from quire.kv.rules import RECURRENT_REFUSAL, layer_refusal, refuse_layer
from quire.kv.sequences import check_integer
from quire.kv.storage import PagedStorage, StoredSpec, geometry


class StateParts:
    """The parts of a KV state. Iterate over it for the verbs of ``Part``."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        stored_specs: Mapping[int, StoredSpec],
        first_layer: int,
        paged: PagedPart,
        encoders: EncoderPart | None,
        recurrent: RecurrentPart | None,
        division: DividedRows | None = None,
        whole: Mapping[int, LayerSpec] | None = None,
    ) -> None:
        """Hold the parts. ``specs``: all layers; ``stored_specs``: those with pages, by id;
        ``whole``: the layers with all heads, by id, if ranks divide them."""
        self.paged = paged
        self.encoders = encoders
        """What cross layers read; None: there are no such layers."""
        self.recurrent = recurrent
        """The states of recurrent layers; None: there are no such layers."""
        self._all: tuple[Part, ...] = tuple(part for part in (paged, encoders, recurrent) if part is not None)
        self.sequences = paged.sequences
        self.device = paged.device
        self.all_specs = list(specs)
        self.stored_specs = dict(stored_specs)
        """All layers with pages, by global id, ascending."""
        self.first_layer = first_layer
        self.division = division
        """The ranks that hold the heads; None: all heads are here."""
        self.whole_specs = self.stored_specs
        """``stored_specs`` with the heads of all ranks, as files and callers see them."""
        if whole:
            self.whole_specs = {layer: _with_heads_of(spec, whole[layer]) for layer, spec in self.stored_specs.items()}
        self.imports: dict[SeqId, Import] = {}
        """Those under way."""
        self.transfers: dict[SeqId, Transfer] = {}
        """What comes from another state, and goes to one."""
        self.offers: WeakKeyDictionary[Channel, list[dict[str, Any]]] = WeakKeyDictionary()
        """Of each channel: what the other end has offered to receive."""
        self.link = host_link(paged.device)
        """How imports come to a device; None: they are written at once."""

    # -- rows of all heads -------------------------------------------------------------------------

    def storage(self, place: tuple[int, int]) -> PagedStorage | RecurrentStorage:
        """Return the storage of what is here (``contracts.ranks.PeerRows``)."""
        if place[0] == STATES:
            return self.recurrent_part("storage").storage
        return self.paged.classes[place[0]].storage

    def take(self, layer_id: int, slots_N: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return fresh planes of these slots of a layer, of all heads."""
        layer = self.paged.layers[layer_id]
        own = partial(self.paged.classes[layer.class_index].storage.take, layer.index, slots_N)
        if self.division is None:
            return own()
        place, whole = (layer.class_index, layer.index), self._planes(self.whole_specs[layer_id])
        return self.division.join(layer_id, place, slots_N, own, self._planes(layer.spec), whole, self.device)

    def lend(self, layer_id: int, slots_N: NDArray[np.int64]) -> list[Tensor]:
        """Return the planes of ``take`` one after the other, in pieces that may be views."""
        if self.division is not None:
            return list(self.take(layer_id, slots_N).values())
        layer = self.paged.layers[layer_id]
        return self.paged.classes[layer.class_index].storage.lend(layer.index, slots_N)

    def own_planes(
        self, seq_id: SeqId, layer_id: int, slots_N: NDArray[np.int64], planes: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return this rank's part of planes of all heads, which an import writes to slots; give the
        other ranks theirs."""
        if self.division is None:
            return planes
        layer = self.paged.layers[layer_id]
        place, whole = (layer.class_index, layer.index), self._planes(self.whole_specs[layer_id])
        return self.division.put(seq_id, layer_id, place, slots_N, planes, self._planes(layer.spec), whole)

    def _planes(self, spec: StoredSpec) -> dict[str, Plane]:
        return {name: Plane(tuple(plane.shape)) for name, plane in self.paged.format.planes(geometry(spec)).items()}

    def __iter__(self) -> Iterator[Part]:
        return iter(self._all)

    def __reversed__(self) -> Iterator[Part]:
        return reversed(self._all)

    @property
    def pools(self) -> list[PagePool]:
        """The pools of all layer classes, then that of encoder rows and that of states."""
        tables = [part.table for part in (self.encoders, self.recurrent) if part is not None]
        return [*self.sequences.pools, *(table.pool for table in tables)]

    @property
    def num_bytes(self) -> list[int]:
        """The bytes of the storage of each of ``pools``."""
        storages = [part.storage for part in (self.encoders, self.recurrent) if part is not None]
        return [*(one.storage.num_bytes for one in self.paged.classes), *(storage.num_bytes for storage in storages)]

    @cached_property
    def page_bytes(self) -> list[int]:
        """The bytes of a page, or slot, of each of ``pools``."""
        return [size // pool.num_pages for size, pool in zip(self.num_bytes, self.pools, strict=True)]

    # -- layers ------------------------------------------------------------------------------------

    def layer(self, layer_id: int, verb: str = "append_kv") -> Layer:
        """Return a layer that keeps rows of tokens. ``InvalidArgument`` for an unknown id;
        ``Unsupported``, with the reason, for a cross or recurrent layer."""
        found = self.paged.layers.get(layer_id)
        if found is None:
            refuse_layer(verb, layer_id, self.spec(layer_id).kind)
        return found

    def rows_layer(self, layer_id: int, verb: str) -> Layer:
        """Return a layer that keeps rows of tokens. ``InvalidArgument`` for an unknown id;
        ``Unsupported`` for a cross or recurrent layer, which verbs about pieces leave out."""
        if (found := self.paged.layers.get(layer_id)) is None:
            kind = self.layer_spec(layer_id).kind
            raise Unsupported(f"{verb}: layer {layer_id} is of kind {kind!r} and keeps no rows of tokens")
        return found

    def spec(self, layer_id: int) -> StoredSpec:
        """Return an attention layer's spec; ``Unsupported`` for a recurrent layer,
        ``InvalidArgument`` for an unknown id."""
        found = self.stored_specs.get(layer_id)
        if found is None:
            if layer_id in self.recurrent_ids:
                raise Unsupported(f"layer {layer_id} is of kind 'recurrent': {layer_refusal('append_kv', 'recurrent')}")
            raise InvalidArgument(
                f"layer {layer_id}; {describe_ids(sorted([*self.stored_specs, *self.recurrent_ids]))}"
            )
        return found

    def layer_spec(self, layer_id: int) -> LayerSpec:
        """Return a layer of any kind, with all heads; ``InvalidArgument`` for an unknown id."""
        if self.recurrent is not None and layer_id in self.recurrent.specs:
            return self.recurrent.whole_specs[layer_id]
        return self.whole_specs.get(layer_id) or self.spec(layer_id)

    def own_spec(self, layer_id: int) -> LayerSpec:
        """Return a layer of any kind, with the heads that are here; ``InvalidArgument`` for an
        unknown id."""
        if self.recurrent is not None and layer_id in self.recurrent.specs:
            return self.recurrent.specs[layer_id]
        return self.spec(layer_id)

    @property
    def recurrent_ids(self) -> tuple[int, ...]:
        return () if self.recurrent is None else tuple(self.recurrent.specs)

    def recurrent_part(self, verb: str) -> RecurrentPart:
        """Return the recurrent layers; ``Unsupported`` where there are none."""
        if self.recurrent is None:
            raise Unsupported(f"{verb}: {RECURRENT_REFUSAL}")
        return self.recurrent

    def state_tensor(self, layer_id: int, state_id: int, verb: str, seq_id: SeqId | None = None) -> StateTensor:
        """Return a state tensor of a recurrent layer, with the heads that are here. ``seq_id``:
        ``NotFound`` if it is unknown."""
        state_id = check_integer(state_id, f"{verb}: state", 0)
        part = self.recurrent_part(verb)
        if layer_id not in part.specs:
            kind = self.spec(layer_id).kind  # InvalidArgument for an unknown one
            if seq_id is not None:
                self.sequences.get(seq_id)
            refuse_layer(verb, layer_id, kind)
        spec = part.specs[layer_id]
        if state_id >= len(spec.states):
            raise InvalidArgument(f"{verb}: layer {layer_id} has states 0..{len(spec.states) - 1}, got {state_id}")
        return spec.states[state_id]

    # -- kept states -------------------------------------------------------------------------------

    def checkpoints(self, seq_id: SeqId) -> list[int]:
        self.sequences.get(seq_id)
        return [] if self.recurrent is None else self.recurrent.table.kept(seq_id)

    def kept_positions(self, seq_id: SeqId) -> list[int]:
        length = self.sequences.get(seq_id).length
        return sorted({0, length}) if self.recurrent is None else list(self.recurrent.table.slots(seq_id))


def _with_heads_of(spec: StoredSpec, whole: LayerSpec) -> StoredSpec:
    """Return a layer with the heads of the model's layer of which it is one rank's part."""
    if isinstance(spec, LatentAttention):
        assert isinstance(whole, LatentAttention)
        return replace(spec, num_heads=whole.num_heads)
    assert isinstance(spec, KeyValueAttention)
    assert isinstance(whole, KeyValueAttention)
    return replace(spec, num_heads=whole.num_heads, num_kv_heads=whole.num_kv_heads)
