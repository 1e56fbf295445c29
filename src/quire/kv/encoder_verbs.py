"""The verbs about encoder rows: arguments checked, then done (``contracts.attention_state``).

Letters: S, n rows of the encoder in one layer; Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

from torch import Tensor

from quire.errors import FailedPrecondition, InvalidArgument
from quire.kv.encoders import EncoderPart
from quire.kv.parts import StateParts
from quire.kv.rules import refuse_layer
from quire.kv.sequences import check_integer
from quire.kv.tensor_checks import check_apart, check_out, check_type
from quire.types import SeqId


def put(state: StateParts, part: EncoderPart, layer_id: int, seq_id: SeqId, k: Tensor, v: Tensor) -> None:
    """See ``AttentionVerbs.set_cross_kv``."""
    verb = "set_cross_kv"
    if layer_id not in part.specs:
        refuse_layer(verb, layer_id, state.spec(layer_id).kind)
    count = _count_rows(state, part, layer_id, k, v, verb)
    if count < 1:
        raise InvalidArgument(f"{verb}: no rows for layer {layer_id}; at least 1 is needed")
    state.table.require_ready(seq_id, state.table.get(seq_id), verb)
    if rows := part.table.rows(seq_id, layer_id):
        raise FailedPrecondition(
            f"{verb}: layer {layer_id} of sequence {seq_id} has its {rows} encoder rows already; they are written once, and a "
            "fork holds those of its parent"
        )
    part.table.require_room(seq_id, count, verb)
    part.storage.copy(part.table.own(seq_id, count))
    part.table.note(seq_id, layer_id, count)
    part.fill(seq_id, layer_id, k, v)


def read(
    state: StateParts,
    part: EncoderPart,
    layer_id: int,
    seq_id: SeqId,
    start: int,
    end: int | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return ``k [n, Hkv, Dk]``, ``v [n, Hkv, Dv]`` of rows ``start..end - 1``
    (``debug_get_kv``)."""
    verb = "debug_get_kv"
    start = check_integer(start, f"{verb}: start", 0)
    end = None if end is None else check_integer(end, f"{verb}: end", start)
    if out is not None and len(out) != 2:
        raise InvalidArgument(f"{verb}: out has {len(out)} tensors; a pair for K and V is needed")
    total = _require_set(state, part, layer_id, seq_id, start, end, verb)
    found = part.read(seq_id, layer_id, range(start, total if end is None else end))
    if out is None:
        return found.k, found.v
    for given, value in zip(out, found, strict=True):
        check_out(given, tuple(value.shape), state.dtype, value)
    check_apart(out[0], out[1])
    out[0].copy_(found.k)
    out[1].copy_(found.v)
    return out


def overwrite(
    state: StateParts, part: EncoderPart, layer_id: int, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None
) -> None:
    """Overwrite rows (``debug_set_kv``), in a split encoding, so no other sequence changes."""
    verb = "debug_set_kv"
    if v is None:
        raise InvalidArgument(f"{verb}: v is missing; cross layers have K and V")
    count = _count_rows(state, part, layer_id, k, v, verb)
    start = check_integer(start, f"{verb}: start", 0)
    total = _require_set(state, part, layer_id, seq_id, start, start + count, verb)
    state.table.require_closed(verb)
    if not count:
        return
    part.table.require_room(seq_id, total, verb)
    part.storage.copy(part.table.own(seq_id, total))
    part.write(seq_id, layer_id, start, k, v)


def _require_set(
    state: StateParts, part: EncoderPart, layer_id: int, seq_id: SeqId, start: int, end: int | None, verb: str
) -> int:
    """Return S of a layer that is set and has these rows."""
    sequence, total = state.table.get(seq_id), part.table.rows(seq_id, layer_id)
    if total and not start <= (total if end is None else end) <= total:
        raise InvalidArgument(
            f"{verb}: rows {start}..{total if end is None else end} of layer {layer_id}, whose encoder rows of sequence "
            f"{seq_id} are 0..{total}"
        )
    state.table.require_ready(seq_id, sequence, verb)
    if not total:
        raise FailedPrecondition(
            f"{verb}: layer {layer_id} has no encoder rows of sequence {seq_id}; call set_cross_kv"
        )
    return total


def _count_rows(state: StateParts, part: EncoderPart, layer_id: int, k: Tensor, v: Tensor, verb: str) -> int:
    """Return the number of rows of K and V. ``InvalidArgument`` unless both have the layer's
    geometry, equally many rows, and the state's type."""
    spec = part.specs[layer_id]
    count = k.shape[0] if k.dim() else 0
    for name, given, dim in (("k", k, spec.head_dim), ("v", v, spec.value_dim)):
        if tuple(given.shape) != (count, spec.num_kv_heads, dim):
            raise InvalidArgument(
                f"{verb}: {name} of layer {layer_id} has shape {tuple(given.shape)}; [rows, {spec.num_kv_heads}, {dim}] is needed, "
                "with as many rows in k and v"
            )
        check_type(state, f"{verb}: {name} of layer {layer_id}", given)
    return count
