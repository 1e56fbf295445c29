"""Export of one sequence: metadata, and tensors by layer, independent of pages.

A *group* is one layer: the planes of its rows. The layout hash covers what writer and reader must
have in common: kinds, geometry, format and dtype, RoPE and windows of the layers. Page size,
capacity and device may differ. Positions that a window has evicted are not exported; the metadata
list those that are. A state file consists of these groups and the tokens.

Letters: n rows (tokens); Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.types import SeqId
from quire.contracts.kv_format import PLAIN, KVFormat
from quire.contracts.kv_state import TensorPlan
from quire.contracts.layers import CrossAttention, LatentAttention
from quire.kv.exports import SequenceExport
from quire.kv.metadata_checks import hash_of, ranges_of
from quire.kv.parts import StateParts
from quire.kv.sequences import Sequence
from quire.kv.storage import StoredSpec, check_tensor, geometry
from quire.statefile.container import bytes_of
from quire.statefile.schema import FORMAT_VERSION


def get_layout_hash(state: StateParts) -> str:
    return hash_of(get_layout(state))


def get_layout(state: StateParts) -> dict[str, Any]:
    ids = list(state.whole_specs)
    found: dict[str, Any] = {"first_layer": state.first_layer}
    if ids != list(range(state.first_layer, state.first_layer + len(ids))):
        found["layer_ids"] = ids
    if state.recurrent is not None:
        found["recurrent"] = [
            {
                "layer": layer,
                "states": [
                    {"shape": list(one.shape), "dtype": one.dtype, "initial": one.initial_as_json()}
                    for one in spec.states
                ],
            }
            for layer, spec in state.recurrent.whole_specs.items()
        ]
    found["layers"] = [layer_metadata(spec, state.paged.format) for spec in state.whole_specs.values()]
    return found


def get_checkpoint_metadata(state: StateParts, seq_id: SeqId, *, checksums: bool = True) -> dict[str, Any]:
    sequence = require_whole(state, seq_id, "get_checkpoint_metadata")
    window = sequence.window
    found = describe(
        state,
        sequence.length,
        [state.sequences.held(seq_id, index) for index in range(len(state.paged.classes))],
        state.checkpoints(seq_id),
        {} if state.encoders is None else {one: state.encoders.table.rows(seq_id, one) for one in state.encoders.specs},
    )
    if window is not None:
        found |= {"window": window.size, "sink": window.sink, "eviction": window.eviction}
        found["evicted"] = sequence.evicted
    for entry in found["groups"] if checksums else ():
        for name, tensor in export_page_group(state, seq_id, entry["group"]).items():
            entry["tensors"][name]["checksum"] = checksum(tensor)
    return found


def require_whole(state: StateParts, seq_id: SeqId, verb: str) -> Sequence:
    """Return the sequence; ``FailedPrecondition`` with uncommitted nodes, or importing."""
    sequence = state.sequences.get(seq_id)
    state.sequences.require_ready(seq_id, sequence, verb)
    state.sequences.require_committed(seq_id, sequence, verb)
    return sequence


def describe(
    state: StateParts, length: int, held: list[list[range]], kept: list[int], encoders: Mapping[int, int]
) -> dict[str, Any]:
    """Describe a sequence without a window and without checksums. ``held``: by layer class;
    ``encoders``: rows of each cross layer, 0 if it is not set."""
    layout = get_layout(state)
    found: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "layout_hash": hash_of(layout),
        **layout,
        "length": length,
        "held": [
            {
                "layers": list(one.layers),
                "ranges": [[part.start, part.stop] for part in parts],
            }
            for one, parts in zip(state.paged.classes, held, strict=True)
        ],
        "window": None,
        "sink": 0,
        "eviction": "token",
        "evicted": 0,
        "kept_recurrent_positions": kept,
    }
    if state.encoders is not None:
        found["cross"] = [{"layer": layer, "rows": rows or None} for layer, rows in encoders.items()]
    found["groups"] = [
        {
            "group": group,
            "tensors": {
                name: {
                    "shape": list(one.shape),
                    "bytes": math.prod(one.shape) * one.dtype.itemsize,
                    "checksum": "",
                }
                for name, one in plan.items()
            },
        }
        for group, plan in groups_of(state, counts_of(rows_by_layer(found)), kept).items()
    ]
    return found


def open_export(state: StateParts, seq_id: SeqId) -> SequenceExport:
    require_whole(state, seq_id, "open_export")
    return SequenceExport.of(state, seq_id)


def export_page_group(
    state: StateParts, seq_id: SeqId, group: int, out: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the held rows of one layer, by position, or the states of a recurrent layer. Rows
    are planes of the format; plain ones are ``k [n, Hkv, Dk]`` and ``v [n, Hkv, Dv]``, or
    ``latent [n, row]``.
    ``FailedPrecondition`` for a cross layer that is not set."""
    part = state.recurrent
    recurrent = part is not None and group in part.specs
    if not recurrent:
        state.spec(group)
    state.sequences.get(seq_id)
    rows = rows_of(state, seq_id)
    if out is not None and (recurrent or group in rows):
        plan = groups_of(state, rows, state.checkpoints(seq_id))[group]
        if set(out) != set(plan):
            raise InvalidArgument(f"export_page_group: out has tensors {sorted(out)}; {sorted(plan)} are needed")
        for name, one in plan.items():
            check_tensor(f"export_page_group: out[{name!r}]", out[name], one.dtype, one.shape, state.device)
    require_whole(state, seq_id, "export_page_group")
    if part is not None and recurrent:
        tensors = part.export(seq_id, group)
    elif state.encoders is not None and group in state.encoders.specs:
        if group not in rows:
            raise FailedPrecondition(
                f"export_page_group: layer {group} has no encoder rows of sequence {seq_id}; set_cross_kv was not called, so there "
                "is no such group"
            )
        tensors = state.encoders.take(seq_id, group)
    else:
        layer = state.layer(group)
        slots = state.sequences.slots(layer.class_index, seq_id, state.sequences.held(seq_id, layer.class_index))
        tensors = state.take(group, slots)
    if out is None:
        return tensors
    for name, tensor in tensors.items():
        out[name].copy_(tensor)
    return out


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_metadata(spec: StoredSpec, format: KVFormat) -> dict[str, Any]:
    """Return the metadata of one layer, in JSON types. Writer and reader must agree in it. The
    plain format is not named, as in files from before there were others."""
    sizes: dict[str, Any]
    rope = None if isinstance(spec, CrossAttention) else spec.rope
    if isinstance(spec, LatentAttention):
        sizes = {"row_dim": spec.row_dim, "value_dim": spec.value_dim}
    else:
        sizes = {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "value_dim": spec.value_dim}
    return {
        "kind": spec.kind,
        "window": spec.layer_window,
        "dtype": dtype_name(format.dtype),
        **({} if format.name == PLAIN else {"format": format.name}),
        **sizes,
        "rope_mode": "none" if isinstance(spec, CrossAttention) else spec.rope_mode,
        "rope": rope.as_json() if rope else None,
        "rope_fingerprint": rope.fingerprint() if rope else "",
    }


def group_plan(spec: StoredSpec, rows: int, format: KVFormat) -> dict[str, TensorPlan]:
    """Return the tensors of a layer for ``rows`` tokens, or rows of an encoder."""
    planes = format.planes(geometry(spec))
    return {name: TensorPlan((rows, *plane.shape), plane.dtype) for name, plane in planes.items()}


def groups_of(state: StateParts, rows: Mapping[int, int], kept: Iterable[int]) -> dict[int, dict[str, TensorPlan]]:
    """Return the tensors of every group, by layer: ``rows`` of each attention layer named there,
    the present state and the ``kept`` ones of each recurrent layer."""
    found: dict[int, dict[str, TensorPlan]] = {}
    for layer, spec in state.whole_specs.items():
        if layer in rows:
            found[layer] = group_plan(spec, rows[layer], state.paged.format)
    if state.recurrent is not None:
        kept = list(kept)
        for layer in state.recurrent.specs:
            found[layer] = state.recurrent.group_plan(layer, kept)
    return dict(sorted(found.items()))


def checksum(tensor: Tensor) -> str:
    """Return the xxh3-64 of a tensor's bytes in row-major order."""
    return str(xxhash.xxh3_64_hexdigest(bytes_of(tensor)))


def rows_of(state: StateParts, seq_id: SeqId) -> dict[int, int]:
    """Return the number of rows by layer with pages; cross layers that are not set are left out."""
    found: dict[int, int] = {}
    for index, one in enumerate(state.paged.classes):
        held_rows = sum(map(len, state.sequences.held(seq_id, index)))
        found |= dict.fromkeys(one.layers, held_rows)
    if state.encoders is not None and (encoding := state.encoders.table.get(seq_id)) is not None:
        found |= encoding.rows
    return found


def rows_by_layer(given: Mapping[str, Any], shared: Mapping[int, int] | None = None) -> dict[int, list[range]]:
    """Return the rows of each layer according to metadata that were validated: positions, and rows
    of encoders. ``shared``: the number of first rows that come from elsewhere, by layer."""
    found: dict[int, list[range]] = {}
    for one in given["held"]:
        for layer in one["layers"]:
            low = shared.get(layer, 0) if shared else 0
            found[layer] = [range(max(part.start, low), part.stop) for part in ranges_of(one) if part.stop > low]
    return found | {one["layer"]: [range(one["rows"])] for one in given.get("cross", []) if one["rows"] is not None}


def counts_of(rows: Mapping[int, list[range]]) -> dict[int, int]:
    """Return the number of these rows, by layer."""
    return {layer: sum(map(len, parts)) for layer, parts in rows.items()}
