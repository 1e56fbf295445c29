"""What calls over whole blocks need of a KV state's layers (``contracts.block_calls``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.contracts.attention import AttentionBackend
from quire.contracts.block_calls import PartsBackend
from quire.contracts.layers import LatentAttention
from quire.contracts.rows import HeadNormWeights, Rotation
from quire.kv.layer_classes import Layer


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


class LayerParts:
    """The layers of one state, each made ready once."""

    def __init__(self, backend: PartsBackend, layer: Callable[[int], Layer]) -> None:
        self._backend, self._layer = backend, layer
        self._known: dict[int, LayerPart | None] = {}

    def of(self, layer_id: int, norms: HeadNormWeights | None) -> LayerPart | None:
        """Return a layer with K and V; None if a call over a block cannot do what it needs."""
        if layer_id in self._known:
            found = self._known[layer_id]
            if found is None or found.norms is norms:
                return found
        found = self._known[layer_id] = self._made(self._layer(layer_id), norms)
        return found

    def _made(self, layer: Layer, norms: HeadNormWeights | None) -> LayerPart | None:
        spec = layer.spec
        if isinstance(spec, LatentAttention) or spec.rope_mode == "inline":
            return None
        made = self._backend.layer_part(spec.num_heads, layer.k_SHD, layer.v_SHD, layer.scoring, layer.sinks_H, norms)
        if made is None:
            return None
        shape = (spec.num_heads, *layer.k_SHD.shape[1:], *layer.v_SHD.shape[1:])
        return LayerPart(layer, norms, made, (layer.class_index, id(layer.turning), *shape))

    def in_forward(self, part: LayerPart, prepared: Any, rotation: Rotation | None, slots_T: Tensor) -> ForwardPart:
        """Return what layers of this kind have in common in a forward."""
        layer, heads = part.layer, part.layer.spec.num_heads
        made = self._backend.forward_part(prepared, heads, layer.k_SHD, layer.v_SHD, rotation, slots_T)
        return ForwardPart(prepared, rotation, slots_T, made)


def layer_parts(backend: AttentionBackend, layer: Callable[[int], Layer]) -> LayerParts | None:
    """Return the layers for a backend that has structures of them; None for others."""
    return LayerParts(backend, layer) if isinstance(backend, PartsBackend) else None
