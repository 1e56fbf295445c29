"""What calls over whole blocks need of a KV state's layers (``contracts.block_calls``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.block_calls import DecodeForwards, PartsBackend, StackParts
from quire.contracts.layers import LatentAttention, RopeSpec
from quire.contracts.rows import HeadNormWeights, Rotation
from quire.kv.layer_classes import Layer
from quire.kv.pages import PageIds
from quire.ops.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer, with the norms of its heads."""

    layer: Layer
    norms: HeadNormWeights | None
    made: Any
    """The backend's structure."""
    kind: tuple[int, ...]
    """Equal for layers that share the structure of a forward."""


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """What layers of one kind have in common in a forward, and what it was made of."""

    prepared: Any
    rotation: Rotation | None
    slots_T: Tensor
    made: Any
    """The backend's structure; None if ``attend_qkv`` must be called."""

    def is_of(self, prepared: Any, rotation: Rotation | None, slots_T: Tensor) -> bool:
        """Return whether it was made of these."""
        return self.prepared is prepared and self.rotation is rotation and self.slots_T is slots_T


@dataclass(frozen=True, slots=True, eq=False)
class PartStack:
    """Layers that run one after the other."""

    layers: tuple[tuple[int, HeadNormWeights | None], ...]
    """Ids, and norms of the heads."""
    ids: frozenset[int]
    parts: tuple[LayerPart, ...]
    places: NDArray[np.int64]
    """Addresses of their structures."""
    kinds: tuple[LayerPart, ...]
    """One layer of each kind."""
    kind: NDArray[np.int64]
    """Of each layer its index in ``kinds``."""
    decodes: tuple[tuple[DecodeForwards, int, RotaryTable | None], ...] | None
    """Of each kind the structure of decodes, the layer class, and what turns; None: there is none
    for a kind."""
    decode_parts: StackParts
    """With these structures."""


class LayerParts:
    """The layers of one state, each made ready once."""

    def __init__(
        self,
        backend: PartsBackend,
        layer: Callable[[int], Layer],
        rotary_table: Callable[[RopeSpec], RotaryTable],
        page_size: int,
    ) -> None:
        self._backend, self._layer, self._rotary_table, self._page_size = backend, layer, rotary_table, page_size
        self._known: dict[int, LayerPart | None] = {}
        self._stack: PartStack | None = None

    def of(self, layer_id: int, norms: HeadNormWeights | None) -> LayerPart | None:
        """Return a layer with K and V; None if a call over a block cannot do what it needs."""
        if layer_id in self._known:
            found = self._known[layer_id]
            if found is None or found.norms is norms:
                return found
        found = self._known[layer_id] = self._made(self._layer(layer_id), norms)
        return found

    def stack(self, layers: tuple[tuple[int, HeadNormWeights | None], ...]) -> PartStack | None:
        """Return layers that run one after the other; None if one of them cannot be called so."""
        if self._stack is not None and self._stack.layers is layers:
            return self._stack  # Neither the tuple nor what the state is made of ever changes.
        parts: list[LayerPart] = []
        for layer_id, norms in layers:
            part = self.of(layer_id, norms)
            if part is None:
                return None
            parts.append(part)
        first = {part.kind: part for part in reversed(parts)}
        order = list(first)
        kind = np.array([order.index(part.kind) for part in parts], dtype=np.int64)
        places = np.array([part.made.place for part in parts], dtype=np.int64)
        found = [self._decodes(part.layer) for part in first.values()]
        decodes = tuple(one for one in found if one is not None)
        whole = len(decodes) == len(found)
        forwards = np.array([made.place for made, _, _ in decodes] if whole else [0] * len(found), dtype=np.int64)[kind]
        ids = frozenset(layer_id for layer_id, _ in layers)
        self._stack = PartStack(
            layers,
            ids,
            tuple(parts),
            places,
            tuple(first.values()),
            kind,
            decodes if whole else None,
            StackParts(places, forwards),
        )
        return self._stack

    def _decodes(self, layer: Layer) -> tuple[DecodeForwards, int, RotaryTable | None] | None:
        spec, rope = layer.spec, layer.rope
        made = self._backend.decode_forwards(spec.num_heads, layer.view, spec.layer_window, self._page_size, rope)
        table = None if rope is None else self._rotary_table(rope)
        return None if made is None else (made, layer.class_index, table)

    def of_decodes(
        self, stack: PartStack, lengths: Sequence[int], tables: Sequence[Sequence[PageIds]]
    ) -> StackParts | None:
        """Return the parts of these layers, for a forward of one new token behind ``lengths`` ones
        of each sequence; ``tables``: of each layer class their pages. None: use the parts of other
        forwards. The result is valid until the next call."""
        if stack.decodes is None:
            return None
        for decodes, class_index, rotary in stack.decodes:
            turns = None if rotary is None else rotary.up_to(max(lengths))
            if (rotary is not None and turns is None) or not decodes.plan(lengths, tables[class_index], turns):
                return None
        return stack.decode_parts

    def _made(self, layer: Layer, norms: HeadNormWeights | None) -> LayerPart | None:
        spec = layer.spec
        if isinstance(spec, LatentAttention) or spec.rope_mode == "inline":
            return None
        made = self._backend.layer_part(spec.num_heads, layer.view, layer.scoring, layer.sinks_H, norms)
        if made is None:
            return None
        return LayerPart(layer, norms, made, (layer.class_index, id(layer.rope), spec.num_heads, *layer.view.sizes))

    def in_forward(self, part: LayerPart, prepared: Any, rotation: Rotation | None, slots_T: Tensor) -> ForwardPart:
        """Return the part of a forward shared by all layers of this kind."""
        layer, heads = part.layer, part.layer.spec.num_heads
        made = self._backend.forward_part(prepared, heads, layer.view, rotation, slots_T)
        return ForwardPart(prepared, rotation, slots_T, made)
