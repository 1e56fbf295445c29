"""Stored rows and states: reading and overwriting any (the debug verbs), writing rows of encoders.

Letters: L layers; n rows; S rows of the encoder in one layer; Hkv heads; Dk, Dv head sizes; row
columns of a latent row.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.base.types import SeqId
from quire.contracts.kv_format import PlainRows
from quire.kv.encoders import EncoderPart
from quire.kv.layer_classes import Layer
from quire.kv.parts import StateParts
from quire.kv.recurrent import dtype_of
from quire.kv.rules import PAGED_REFUSALS, layer_refusal, refuse_layer
from quire.kv.sequences import check_integer
from quire.kv.storage import geometry
from quire.kv.tensor_checks import check_out, check_type, filled
from quire.kv.windows import describe_ranges, holds


def set_cross_kv(state: StateParts, layer_id: int, seq_id: SeqId, k: Tensor, v: Tensor) -> None:
    part, verb = state.encoders, "set_cross_kv"
    if part is None:
        raise Unsupported(f"{verb}: {PAGED_REFUSALS[verb]}")
    if layer_id not in part.specs:
        refuse_layer(verb, layer_id, state.spec(layer_id).kind)
    count = _count_rows(state, part, layer_id, k, v, verb)
    if count < 1:
        raise InvalidArgument(f"{verb}: no rows for layer {layer_id}; at least 1 is needed")
    state.sequences.require_ready(seq_id, state.sequences.get(seq_id), verb)
    if rows := part.table.rows(seq_id, layer_id):
        raise FailedPrecondition(
            f"{verb}: layer {layer_id} of sequence {seq_id} has its {rows} encoder rows already; they are written once, and a "
            "fork holds those of its parent"
        )
    part.table.require_room(seq_id, count, verb)
    part.storage.copy(part.table.own(seq_id, count))
    part.table.note(seq_id, layer_id, count)
    part.set_rows(seq_id, layer_id, k, v)


def debug_get_kv(
    state: StateParts,
    seq_id: SeqId,
    start: int | None = 0,
    end: int | None = None,
    *,
    layer: int | None = None,
    relative: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    if state.encoders is not None and layer in state.encoders.specs:
        return read_encoder(state, state.encoders, layer, seq_id, start, end, out)
    _require_token_rows(state, seq_id, layer, "debug_get_kv")
    found = _gathered(state, seq_id, start, end, layer, relative, "debug_get_kv")
    k = found[0].k if layer is not None else torch.stack([row.k for row in found])
    v = found[0].v if layer is not None else torch.stack([row.v for row in found])
    return (k, v) if out is None else filled(out, (k, v), state.paged.dtype)


def debug_get_kv_mla(
    state: StateParts,
    seq_id: SeqId,
    start: int | None = 0,
    end: int | None = None,
    *,
    layer: int | None = None,
    relative: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    _require_token_rows(state, seq_id, layer, "debug_get_kv_mla")
    found = _gathered(state, seq_id, start, end, layer, relative, "debug_get_kv_mla")
    rows = [row.k.squeeze(1) for row in found]
    latent = rows[0] if layer is not None else torch.stack(rows)
    if out is None:
        return latent
    check_out(out, tuple(latent.shape), state.paged.dtype, latent)
    return out.copy_(latent)


def debug_set_kv(
    state: StateParts, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None = None, *, layer: int | None = None
) -> None:
    if state.encoders is not None and layer in state.encoders.specs:
        overwrite_encoder(state, state.encoders, layer, seq_id, start, k, v)
        return
    _require_token_rows(state, seq_id, layer, "debug_set_kv")
    recurrent = not has_rows(state, layer)
    layers, count = ({}, k.shape[0] if k.dim() else 0) if recurrent else rows_to_set(state, k, v, layer)
    start = check_integer(start, "debug_set_kv: start", 0)
    sequence = state.sequences.get(seq_id)
    if start + count > sequence.length:
        raise InvalidArgument(
            f"debug_set_kv: rows {start}..{start + count} of sequence {seq_id}, whose length is {sequence.length}"
        )
    if recurrent:
        refuse_layers(state, layer, "debug_set_kv")
    state.sequences.require_closed("debug_set_kv")
    state.sequences.require_ready(seq_id, sequence, "debug_set_kv")
    classes = sorted({one.class_index for one in layers.values()})
    part = range(start, start + count)
    for index in classes:
        require_held(state, seq_id, index, [part] if part else [], "debug_set_kv")
    owned = state.sequences.own_pages(seq_id, part.start, part.stop, classes)
    for kept, copies in zip(state.paged.classes, owned, strict=True):
        kept.storage.copy(copies)
    for row, one in enumerate(layers.values()):
        slots = torch.from_numpy(state.sequences.slots(one.class_index, seq_id, [part])).to(state.device)
        new_k = (k if layer is not None else k[row]).to(state.device)
        storage = state.paged.classes[one.class_index].storage
        if one.rows is None:  # Another stage holds them.
            continue
        if v is None:
            storage.write(one.index, slots, new_k.unsqueeze(1))
            continue
        new_v = (v if layer is not None else v[row]).to(state.device)
        if state.division is not None:
            slice, heads = state.division.share.rank, geometry(one.spec).kv_heads
            new_k, new_v = (state.division.heads_of(slice, new, heads) for new in (new_k, new_v))
        storage.write(one.index, slots, new_k, new_v)


def _require_token_rows(state: StateParts, seq_id: SeqId, layer: int | None, verb: str) -> None:
    """Raise ``Unsupported`` where a verb about rows of tokens meets cross layers only."""
    if state.encoders is None or (layer not in state.encoders.specs if layer is not None else state.paged.specs):
        return
    state.sequences.get(seq_id)
    if layer is not None:
        refuse_layer(verb, layer, "cross")
    raise Unsupported(
        f"{verb}: the layers of this state keep rows of encoders and none of tokens; name one with layer="
    )


def debug_get(state: StateParts, layer_id: int, state_id: int, seq_id: SeqId, *, position: int | None = None) -> Tensor:
    if position is not None:
        position = check_integer(position, "debug_get: position", 0)
    state.state_tensor(layer_id, state_id, "debug_get", seq_id)
    state.sequences.require_ready(seq_id, state.sequences.get(seq_id), "debug_get")
    part = state.recurrent_part("debug_get")
    if position is not None and part.table.slot_at(seq_id, position) is None:
        raise FailedPrecondition(
            f"debug_get: no state of sequence {seq_id} is kept at {position}; there are {state.kept_positions(seq_id)}"
        )
    return part.debug_get(layer_id, state_id, seq_id, position)


def debug_set(state: StateParts, layer_id: int, state_id: int, seq_id: SeqId, data: Tensor) -> None:
    state.state_tensor(layer_id, state_id, "debug_set", seq_id)
    part = state.recurrent_part("debug_set")
    one = part.whole_specs[layer_id].states[state_id]
    if tuple(data.shape) != one.shape or data.dtype != dtype_of(one):
        raise InvalidArgument(
            f"debug_set: data is {data.dtype} {tuple(data.shape)}; {dtype_of(one)} {one.shape} is needed"
        )
    state.sequences.require_settled(seq_id, "debug_set")
    part.debug_set(layer_id, state_id, seq_id, data.to(state.device))


def _gathered(
    state: StateParts,
    seq_id: SeqId,
    start: int | None,
    end: int | None,
    layer_id: int | None,
    relative: bool,
    verb: str,
) -> list[PlainRows]:
    """Return fresh copies of these rows, layer by layer."""
    start, end = _checked_range(start, end, verb)
    layers = layers_of(state, layer_id, verb) if has_rows(state, layer_id) else {}
    sequence = state.sequences.get(seq_id)
    gone = sequence.evicted if relative else 0
    total = sequence.stored - gone
    end = total if end is None else end
    if not 0 <= start <= end <= total:
        raise InvalidArgument(
            f"{verb}: rows {start}..{end} of sequence {seq_id}; 0 <= start <= end <= {total} is needed"
        )
    if not layers:
        refuse_layers(state, layer_id, verb)
    state.sequences.require_ready(seq_id, sequence, verb)
    parts = [range(start, end)]
    if gone and sequence.window is not None:
        # Cached tokens: the sink, then the window.
        sink = sequence.window.sink
        parts = [range(start, min(end, sink)), range(max(start, sink) + gone, end + gone)]
    parts = [part for part in parts if part]
    for layer in layers.values():
        require_held(state, seq_id, layer.class_index, parts, verb)
    found = []
    for number, layer in layers.items():
        slots = state.sequences.slots(layer.class_index, seq_id, parts)
        found.append(state.paged.format.expand(geometry(state.whole_specs[number]), state.take(number, slots)))
    return found


def _checked_range(start: int | None, end: int | None, verb: str) -> tuple[int, int | None]:
    start = check_integer(start or 0, f"{verb}: start", 0)
    return start, None if end is None else check_integer(end, f"{verb}: end", start)


def rows_to_set(state: StateParts, k: Tensor, v: Tensor | None, layer_id: int | None) -> tuple[dict[int, Layer], int]:
    """Return the layers for these rows, by id, and their number of rows, else
    ``InvalidArgument``."""
    if layer_id is not None:
        latent = state.layer(layer_id).spec.kind == "latent"
    else:
        latent = v is None and any(spec.kind == "latent" for spec in state.paged.specs.values())
    if latent and v is not None:
        raise InvalidArgument(f"debug_set_kv: layer {layer_id} is latent and has no V; give its rows as k, without v")
    if not latent and v is None:
        raise InvalidArgument("debug_set_kv: v is missing; attention layers have K and V")
    layers = layers_of(state, layer_id, "debug_get_kv_mla" if latent else "debug_get_kv")
    if not layers:
        raise InvalidArgument("debug_set_kv: no layer has K and V; give the rows of latent layers as k, without v")
    shape = geometry(state.whole_specs[next(iter(layers))])
    lead = () if layer_id is not None else (len(layers),)
    count = k.shape[len(lead)] if k.dim() > len(lead) else -1
    inner = (
        {"k": (shape.key_dim,)}
        if latent
        else {"k": (shape.kv_heads, shape.key_dim), "v": (shape.kv_heads, shape.value_dim)}
    )
    for name, given in (("k", k), ("v", v)):
        if given is None:
            continue
        wanted = (*lead, count, *inner[name])
        if tuple(given.shape) != wanted or given.dtype != state.paged.dtype:
            raise InvalidArgument(
                f"debug_set_kv: {name} is {given.dtype} {tuple(given.shape)}; {state.paged.dtype} {wanted} with the same number of rows is needed"
            )
    return layers, count


def require_held(state: StateParts, seq_id: SeqId, class_index: int, parts: list[range], verb: str) -> None:
    """Raise ``FailedPrecondition`` if an address of ``parts`` is evicted; say which are held."""
    length = state.sequences.get(seq_id).length
    kept = state.sequences.held(seq_id, class_index)
    for part in parts:
        committed = range(part.start, min(part.stop, length))
        if committed and not holds(kept, committed):
            raise FailedPrecondition(
                f"{verb}: positions {committed.start}..{committed.stop - 1} of sequence {seq_id} are evicted, at least in part; "
                f"held: {describe_ranges(kept)}"
            )


def has_rows(state: StateParts, layer_id: int | None) -> bool:
    """Return whether a layer, if one is named, keeps rows of tokens; a recurrent one does not."""
    return state.recurrent is None or layer_id not in state.recurrent.specs


def layers_of(state: StateParts, layer_id: int | None, verb: str) -> dict[int, Layer]:
    """Return a layer, or all layers, by id: the kinds that have the verb, of one geometry."""
    ids = list(state.paged.specs) if layer_id is None else [layer_id]
    layers = {one: layer for one in ids if not layer_refusal(verb, (layer := state.layer(one)).spec.kind)}
    if len({geometry(layer.spec) for layer in layers.values()}) > 1:
        raise InvalidArgument("the layers differ in geometry; name one with layer=")
    return layers


def refuse_layers(state: StateParts, layer_id: int | None, verb: str) -> NoReturn:
    """Raise ``Unsupported``: this layer does not have the verb, or no layer has."""
    ids = list(state.paged.specs) if layer_id is None else [layer_id]
    if not ids:
        raise Unsupported(f"{verb}: the state has no attention layers")
    kind = state.layer(ids[0]).spec.kind if has_rows(state, layer_id) else "recurrent"
    refuse_layer(verb, ids[0], kind)


def read_encoder(
    state: StateParts,
    part: EncoderPart,
    layer_id: int,
    seq_id: SeqId,
    start: int | None,
    end: int | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return rows of an encoder for ``debug_get_kv``: ``k [n, Hkv, Dk]``, ``v [n, Hkv, Dv]``."""
    verb = "debug_get_kv"
    start, end = _checked_range(start, end, verb)
    total = _require_set(state, part, layer_id, seq_id, start, end, verb)
    found = part.read(seq_id, layer_id, range(start, total if end is None else end))
    return (found.k, found.v) if out is None else filled(out, (found.k, found.v), state.paged.dtype)


def overwrite_encoder(
    state: StateParts, part: EncoderPart, layer_id: int, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None
) -> None:
    """Overwrite rows (``debug_set_kv``), in a split encoding, so no other sequence changes."""
    verb = "debug_set_kv"
    if v is None:
        raise InvalidArgument(f"{verb}: v is missing; cross layers have K and V")
    count = _count_rows(state, part, layer_id, k, v, verb)
    start = check_integer(start, f"{verb}: start", 0)
    total = _require_set(state, part, layer_id, seq_id, start, start + count, verb)
    state.sequences.require_closed(verb)
    if not count:
        return
    part.table.require_room(seq_id, total, verb)
    part.storage.copy(part.table.own(seq_id, total))
    part.write(seq_id, layer_id, start, k, v)


def _require_set(
    state: StateParts, part: EncoderPart, layer_id: int, seq_id: SeqId, start: int, end: int | None, verb: str
) -> int:
    """Return S of a layer that is set and has these rows."""
    sequence, total = state.sequences.get(seq_id), part.table.rows(seq_id, layer_id)
    if total and not start <= (total if end is None else end) <= total:
        raise InvalidArgument(
            f"{verb}: rows {start}..{total if end is None else end} of layer {layer_id}, whose encoder rows of sequence "
            f"{seq_id} are 0..{total}"
        )
    state.sequences.require_ready(seq_id, sequence, verb)
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
