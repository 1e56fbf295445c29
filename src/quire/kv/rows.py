"""Reading and overwriting stored rows (the debug verbs of the contract).

Letters: L layers; n rows; Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.errors import FailedPrecondition, InvalidArgument
from quire.kv.sequences import check_integer
from quire.kv.verbs import check_apart, check_out
from quire.kv.windows import describe_ranges
from quire.types import SeqId

if TYPE_CHECKING:
    from quire.kv.paged import PagedKVState
    from quire.kv.passes import Layer


def read(
    state: PagedKVState,
    seq_id: SeqId,
    start: int,
    end: int | None,
    layer_id: int | None,
    relative: bool,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """See ``PagedKVState.debug_get_kv``."""
    layers = layers_of(state, layer_id)
    start = check_integer(start, "debug_get_kv: start", 0)
    end = None if end is None else check_integer(end, "debug_get_kv: end", start)
    if out is not None and len(out) != 2:
        raise InvalidArgument(f"debug_get_kv: out has {len(out)} tensors; a pair for K and V is needed")
    sequence = state.table.get(seq_id)
    gone = sequence.evicted if relative else 0
    total = sequence.stored - gone
    end = total if end is None else end
    if not 0 <= start <= end <= total:
        raise InvalidArgument(
            f"debug_get_kv: rows {start}..{end} of sequence {seq_id}; 0 <= start <= end <= {total} is needed"
        )
    state.table.require_ready(seq_id, sequence, "debug_get_kv")
    parts = [range(start, end)]
    if gone and sequence.window is not None:
        # Cached tokens: the sink, then the window.
        sink = sequence.window.sink
        parts = [range(start, min(end, sink)), range(max(start, sink) + gone, end + gone)]
    parts = [part for part in parts if part]
    for layer in layers:
        require_held(state, seq_id, layer.class_index, parts, "debug_get_kv")
    found = []
    for layer in layers:
        slots = state.table.slots(layer.class_index, seq_id, parts)
        found.append(state.classes[layer.class_index].storage.read(layer.index, slots))
    k = found[0].k if layer_id is not None else torch.stack([row.k for row in found])
    v = found[0].v if layer_id is not None else torch.stack([row.v for row in found])
    if out is None:
        return k, v
    for given, value in zip(out, (k, v), strict=True):
        check_out(given, tuple(value.shape), state.dtype, value)
    check_apart(out[0], out[1])
    out[0].copy_(k)
    out[1].copy_(v)
    return out


def overwrite(
    state: PagedKVState, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None, layer_id: int | None
) -> None:
    """See ``PagedKVState.debug_set_kv``."""
    layers = layers_of(state, layer_id)
    start = check_integer(start, "debug_set_kv: start", 0)
    if v is None:
        raise InvalidArgument("debug_set_kv: v is missing; attention layers have K and V")
    spec = layers[0].spec
    count = k.shape[-3] if k.dim() >= 3 else -1
    lead = () if layer_id is not None else (len(layers),)
    for name, given, dim in (("k", k, spec.head_dim), ("v", v, spec.value_dim)):
        wanted = (*lead, count, spec.num_kv_heads, dim)
        if tuple(given.shape) != wanted or given.dtype != state.dtype:
            raise InvalidArgument(
                f"debug_set_kv: {name} is {given.dtype} {tuple(given.shape)}; {state.dtype} {wanted} with the same number of rows is needed"
            )
    sequence = state.table.get(seq_id)
    if start + count > sequence.length:
        raise InvalidArgument(
            f"debug_set_kv: rows {start}..{start + count} of sequence {seq_id}, whose length is {sequence.length}"
        )
    state.table.require_closed("debug_set_kv")
    state.table.require_ready(seq_id, sequence, "debug_set_kv")
    classes = sorted({layer.class_index for layer in layers})
    part = range(start, start + count)
    for index in classes:
        require_held(state, seq_id, index, [part] if part else [], "debug_set_kv")
    for one, copies in zip(state.classes, state.table.own_pages(seq_id, part.start, part.stop, classes), strict=True):
        one.storage.copy(copies)
    for row, layer in enumerate(layers):
        slots = torch.from_numpy(state.table.slots(layer.class_index, seq_id, [part])).to(state.device)
        new_k, new_v = (k, v) if layer_id is not None else (k[row], v[row])
        storage = state.classes[layer.class_index].storage
        storage.write(layer.index, slots, new_k.to(state.device), new_v.to(state.device))


def require_held(state: PagedKVState, seq_id: SeqId, class_index: int, parts: list[range], verb: str) -> None:
    """``FailedPrecondition`` if an address of ``parts`` is evicted; says which are held."""
    length = state.table.get(seq_id).length
    kept = state.table.held(seq_id, class_index)
    for part in parts:
        committed = range(part.start, min(part.stop, length))
        if committed and not any(one.start <= committed.start and committed.stop <= one.stop for one in kept):
            raise FailedPrecondition(
                f"{verb}: positions {committed.start}..{committed.stop - 1} of sequence {seq_id} are evicted, at least in part; "
                f"held: {describe_ranges(kept)}"
            )


def layers_of(state: PagedKVState, layer_id: int | None) -> list[Layer]:
    """One layer, or all of them, which then must be of one geometry."""
    if layer_id is not None:
        return [state.layer(layer_id)]
    layers = [state.layer(index + state.first_layer) for index in range(len(state.specs))]
    geometries = {(layer.spec.num_kv_heads, layer.spec.head_dim, layer.spec.value_dim) for layer in layers}
    if len(geometries) > 1:
        raise InvalidArgument("the layers differ in geometry; name one with layer=")
    return layers
