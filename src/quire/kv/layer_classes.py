"""The attention layers of a KV state: accepted kinds, ids, and classes with a common page table."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.attention import AttentionBackend, Scoring
from quire.contracts.kv_format import KVFormat, KVView
from quire.contracts.layers import (
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    RopeSpec,
    WindowedAttention,
)
from quire.kv.rules import refuse_layer
from quire.kv.storage import KeyValueSpec, PagedSpec, PagedStorage, StoredSpec
from quire.ops.attention import ReferenceAttention

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers that keep the same positions: they share one page table per sequence."""

    window: int | None
    """None: all tokens are kept."""
    layers: tuple[int, ...]
    """Ids, ascending."""
    storage: PagedStorage


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the state, ready to run."""

    spec: PagedSpec
    class_index: int
    index: int
    """Among the layers of its class."""
    rows: KVView | None
    """Its rows, by slot; None: another stage holds them."""
    scoring: Scoring
    sinks_H: Tensor | None
    """Learned logits, float32."""

    @property
    def view(self) -> KVView:
        """Return its rows, by slot, of a layer that is here."""
        assert self.rows is not None
        return self.rows

    @property
    def rope(self) -> RopeSpec | None:
        """Return the rotation that the state does. None: the caller has rotated, or there is
        none."""
        return self.spec.rope if self.spec.rope_mode != "none" else None


def key_value_spec(verb: str, layer_id: int, layer: Layer) -> KeyValueSpec:
    """Return the spec of a layer with K and V; ``Unsupported`` for other layers."""
    spec = layer.spec
    if isinstance(spec, LatentAttention):
        refuse_layer(verb, layer_id, spec.kind)
    return spec


def ids_of(count: int, first_layer: int, layer_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Return the global ids of ``count`` layers: those given, or ``first_layer`` and following.
    ``InvalidArgument`` unless given ones are as many, ascend and are at least ``first_layer``."""
    if layer_ids is None:
        return tuple(range(first_layer, first_layer + count))
    ids = tuple(layer_ids)
    if len(ids) != count or any(one >= other for one, other in zip((first_layer - 1, *ids), ids, strict=False)):
        raise InvalidArgument(
            f"layer_ids {list(ids)} for {count} layers; as many ids are needed, ascending, from {first_layer} on"
        )
    return ids


def describe_ids(ids: Sequence[int]) -> str:
    """Return the ids of a state's layers in words."""
    if not ids:
        return "this state has no attention layers"
    if len(ids) == ids[-1] - ids[0] + 1:
        return f"this state has layers {ids[0]}..{ids[-1]}"
    return f"this state has attention in layers {', '.join(map(str, ids))}"


def supported(layer_id: int, spec: LayerSpec, backend: AttentionBackend, device: torch.device) -> StoredSpec:
    """Return the spec; ``InvalidArgument`` or ``Unsupported``, if no state can have the layer."""
    if isinstance(spec, LatentAttention):
        fault = _latent_fault(spec)
    elif isinstance(spec, CrossAttention):
        fault = _heads_fault(spec)
    elif isinstance(spec, (FullAttention, WindowedAttention)):
        fault = _heads_fault(spec) or _key_value_fault(spec)
    else:
        raise Unsupported(
            f"layer {layer_id} is of kind {spec.kind!r}; kinds are 'full', 'window', 'latent', 'cross' and 'recurrent'"
        )
    if fault:
        raise InvalidArgument(f"layer {layer_id}: {fault}")
    if reason := backend.refusal(_asked(spec), device):
        raise Unsupported(f"layer {layer_id}: {reason}")
    return spec


def backend_for_format(
    backend: AttentionBackend, specs: Iterable[StoredSpec], device: torch.device, format: KVFormat
) -> AttentionBackend:
    """Return ``backend`` if it reads this format for all layers, which it supports. Otherwise log
    the reason, and return the reference attention, which reads every format."""
    reason = next(filter(None, (backend.refusal(_asked(spec), device, format.name) for spec in specs)), "")
    if not reason:
        return backend
    logger.warning("%s; the reference attention computes, which is exact and slow", reason)
    return ReferenceAttention()


def _asked(spec: StoredSpec) -> FullAttention | WindowedAttention:
    """Return the layer as a backend sees it."""
    if isinstance(spec, (FullAttention, WindowedAttention)):
        return spec
    if isinstance(spec, LatentAttention):
        # Its rows are the key of all heads: attention with one KV head.
        heads, key_dim = 1, spec.row_dim
    else:
        # Its rows are keys from before the forward.
        heads, key_dim = spec.num_kv_heads, spec.head_dim
    return FullAttention(num_heads=spec.num_heads, num_kv_heads=heads, head_dim=key_dim, value_dim=spec.value_dim)


def _heads_fault(spec: KeyValueSpec | CrossAttention) -> str:
    """Return the fault in the numbers of heads; empty: none."""
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads; give a divisor"
    return ""


def _key_value_fault(spec: KeyValueSpec) -> str:
    if isinstance(spec, WindowedAttention) and spec.window < 1:
        return f"window {spec.window}; at least 1 is needed"
    if spec.softcap is not None and not spec.softcap > 0:
        return f"softcap {spec.softcap}; a number above 0, or None, is needed"
    if spec.sinks and len(spec.sinks) != spec.num_heads:
        return f"{len(spec.sinks)} learned sinks for {spec.num_heads} query heads; one each is needed"
    if spec.rope_mode != "none" and spec.rope is None:
        return f"RoPE mode {spec.rope_mode!r} needs frequencies (rope=)"
    if spec.rope and (spec.rope.rotary_dim > spec.head_dim or spec.rope.rotary_dim % 2):
        return f"{spec.rope.rotary_dim} rotary columns in heads of {spec.head_dim}; an even number that fits is needed"
    return ""


def _latent_fault(spec: LatentAttention) -> str:
    rest, columns = spec.row_dim - spec.value_dim, f"rows of {spec.row_dim}"
    if spec.num_heads < 1 or not 1 <= spec.value_dim <= spec.row_dim:
        needed = "at least one head and 1 <= value_dim <= row_dim are needed"
        return f"{spec.num_heads} heads over {columns} columns with a value of {spec.value_dim}; {needed}"
    if spec.rope and (spec.rope.rotary_dim > rest or spec.rope.rotary_dim % 2):
        rope = f"{spec.rope.rotary_dim} rotary columns behind a value of {spec.value_dim} in {columns}"
        return f"{rope}; an even number of {rest} at most is needed"
    return ""
