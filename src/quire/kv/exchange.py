"""Export and import of one sequence: metadata and tensors by layer, free of pages.

A *group* is one layer. What must agree between writer and reader is in the layout hash: kinds, geometry, dtype,
RoPE, windows of layers. Page size, capacity and device are not. What a window has evicted is not exported; the metadata
says which positions are. The state file is made of these groups plus the tokens.

Letters: n rows (tokens); Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from quire.contracts.kv_state import TensorPlan
from quire.contracts.layers import CrossAttention, LatentAttention
from quire.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.kv.encoders import EncoderPart
from quire.kv.forward_need import SlotRange
from quire.kv.parts import Import, StateParts
from quire.kv.recurrent import RecurrentPart, dtype_of
from quire.kv.schema import MOST
from quire.kv.sequences import check_id
from quire.kv.storage import LayerRows, StoredSpec
from quire.kv.windows import NO_HOLE, Hole, Window, describe_ranges, held, visibility
from quire.signatures import checks_arguments
from quire.types import SeqId

FORMAT_VERSION = 2


@checks_arguments()
class StateExchange(StateParts):
    """Export and import of sequences (see ``contracts.kv_state``)."""

    def get_layout_hash(self) -> str:
        return layout_hash(self)

    def get_checkpoint_metadata(self, seq_id: SeqId, *, checksums: bool = True) -> dict[str, Any]:
        return metadata(self, seq_id, checksums=checksums)

    def get_layout(self) -> dict[str, Any]:
        return {**ids_metadata(self), "layers": layers_metadata(self)}

    def export_page_group(self, seq_id: SeqId, group: int, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return export_group(self, seq_id, group, out)

    def plan_import(self, metadata: Mapping[str, Any]) -> dict[int, dict[str, TensorPlan]]:
        validate(self, metadata)
        return groups_of(self, rows_by_layer(metadata), metadata["kept_recurrent_positions"])

    def prepare_import(self, seq_id: SeqId, metadata: Mapping[str, object]) -> None:
        prepare(self, seq_id, metadata)

    def import_page_group(self, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]) -> None:
        import_group(self, seq_id, group, tensors)

    def finish_import(self, seq_id: SeqId) -> None:
        finish(self, seq_id)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_metadata(spec: StoredSpec, dtype: torch.dtype) -> dict[str, Any]:
    """What must agree about one layer, in JSON types."""
    sizes: dict[str, Any]
    rope = None if isinstance(spec, CrossAttention) else spec.rope
    if isinstance(spec, LatentAttention):
        sizes = {"row_dim": spec.row_dim, "value_dim": spec.value_dim}
    else:
        sizes = {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "value_dim": spec.value_dim}
    return {
        "kind": spec.kind,
        "window": spec.layer_window,
        "dtype": dtype_name(dtype),
        **sizes,
        "rope_mode": "none" if isinstance(spec, CrossAttention) else spec.rope_mode,
        "rope": rope.as_json() if rope else None,
        "rope_fingerprint": rope.fingerprint() if rope else "",
    }


def layers_metadata(state: StateParts) -> list[dict[str, Any]]:
    """Of all layers with pages, by ascending id."""
    return [layer_metadata(spec, state.dtype) for spec in state.stored_specs.values()]


def ids_metadata(state: StateParts) -> dict[str, Any]:
    """Which layers a state has, in JSON types: ``layer_ids`` only where those with attention are no range, ``recurrent`` only
    where there are others."""
    ids = list(state.stored_specs)
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
            for layer, spec in zip(state.recurrent.layer_ids, state.recurrent.specs, strict=True)
        ]
    return found


def hash_of(layout: Mapping[str, Any]) -> str:
    """The hash of what ``get_layout`` returns."""
    text = json.dumps(layout, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def layout_hash(state: StateParts) -> str:
    """32 hex digits over what must agree between two states that exchange sequences."""
    return hash_of({**ids_metadata(state), "layers": layers_metadata(state)})


def group_shapes(spec: StoredSpec, rows: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's tensors for ``rows`` tokens, or rows of an encoder."""
    if isinstance(spec, LatentAttention):
        return {"latent": (rows, spec.row_dim)}
    return {"k": (rows, spec.num_kv_heads, spec.head_dim), "v": (rows, spec.num_kv_heads, spec.value_dim)}


def groups_of(state: StateParts, rows: Mapping[int, int], kept: Iterable[int]) -> dict[int, dict[str, TensorPlan]]:
    """The tensors of every group of a sequence, by layer: ``rows`` of each attention layer that is named there, the present state
    and the ``kept`` ones of each recurrent layer."""
    found: dict[int, dict[str, TensorPlan]] = {}
    for layer, spec in state.stored_specs.items():
        if layer in rows:
            shapes = group_shapes(spec, rows[layer])
            found[layer] = {name: TensorPlan(shape, state.dtype) for name, shape in shapes.items()}
    if state.recurrent is not None:
        kept = list(kept)
        for layer in state.recurrent.layer_ids:
            tensors = state.recurrent.group_tensors(layer, kept)
            found[layer] = {name: TensorPlan(one.shape, dtype_of(one)) for name, one in tensors.items()}
    return dict(sorted(found.items()))


def group_tensors(spec: StoredSpec, rows: LayerRows) -> dict[str, Tensor]:
    """What was read of a layer, by the names of ``group_shapes``."""
    if isinstance(spec, LatentAttention):
        return {"latent": rows.k.squeeze(1)}
    return {"k": rows.k, "v": rows.v}


def checksum(tensor: Tensor) -> str:
    """xxh3-64 of a tensor's bytes in row-major order."""
    dense = tensor.detach().cpu().contiguous()
    # Not view(-1): a contiguous tensor of one element may have any stride, and a view of bytes needs stride 1.
    flat = dense.as_strided((dense.numel(),), (1,))
    return str(xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data if flat.numel() else b""))


def metadata(state: StateParts, seq_id: SeqId, *, checksums: bool = True) -> dict[str, Any]:
    """All that a reader needs to know before the first tensor comes. JSON types only."""
    sequence = state.table.get(seq_id)
    state.table.require_ready(seq_id, sequence, "get_checkpoint_metadata")
    state.table.require_committed(seq_id, sequence, "get_checkpoint_metadata")
    window = sequence.window
    groups: list[dict[str, Any]] = []
    rows = all_rows(state, seq_id)
    kept = state.checkpoints(seq_id)
    for group, plan in groups_of(state, rows, kept).items():
        tensors = export_group(state, seq_id, group) if checksums else {}
        groups.append(
            {
                "group": group,
                "tensors": {
                    name: {
                        "shape": list(one.shape),
                        "bytes": math.prod(one.shape) * one.dtype.itemsize,
                        "checksum": checksum(tensors[name]) if checksums else "",
                    }
                    for name, one in plan.items()
                },
            }
        )
    encoders = {} if state.encoders is None else {"cross": encoder_rows(state.encoders, seq_id)}
    return {
        "format_version": FORMAT_VERSION,
        "layout_hash": layout_hash(state),
        **ids_metadata(state),
        "layers": layers_metadata(state),
        "length": sequence.length,
        "held": [
            {
                "layers": [state.layer_ids[layer] for layer in one.layers],
                "ranges": [[part.start, part.stop] for part in state.table.held(seq_id, index)],
            }
            for index, one in enumerate(state.classes)
        ],
        "window": window.size if window else None,
        "sink": window.sink if window else 0,
        "eviction": window.eviction if window else "token",
        "evicted": sequence.evicted,
        "kept_recurrent_positions": kept,
        **encoders,
        "groups": groups,
    }


def all_rows(state: StateParts, seq_id: SeqId) -> dict[int, int]:
    """Rows of a sequence in each layer that has some, or could have: cross layers that are not set are left out."""
    found: dict[int, int] = {}
    for index, one in enumerate(state.classes):
        held_rows = sum(map(len, state.table.held(seq_id, index)))
        found |= dict.fromkeys((state.layer_ids[layer] for layer in one.layers), held_rows)
    if state.encoders is not None and (encoding := state.encoders.table.get(seq_id)) is not None:
        found |= encoding.rows
    return found


def encoder_rows(part: EncoderPart, seq_id: SeqId) -> list[dict[str, Any]]:
    """``layer`` and ``rows`` of each cross layer, in JSON types; None: they are not set."""
    return [{"layer": layer, "rows": part.table.rows(seq_id, layer) or None} for layer in part.specs]


def rows_by_layer(given: Mapping[str, Any]) -> dict[int, int]:
    """Rows of each layer, by the ``held`` and ``cross`` of metadata that were validated; cross layers that are not set are left
    out."""
    tokens = {
        layer: sum(stop - start for start, stop in one["ranges"]) for one in given["held"] for layer in one["layers"]
    }
    return tokens | {one["layer"]: one["rows"] for one in given.get("cross", []) if one["rows"] is not None}


def export_group(
    state: StateParts, seq_id: SeqId, group: int, out: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Rows of one layer that are held, in order of position: ``k [n, Hkv, Dk]`` and ``v [n, Hkv, Dv]``, or ``latent [n, row]``, as
    stored. ``FailedPrecondition`` for a cross layer that is not set."""
    part = state.recurrent
    recurrent = part is not None and group in part.layer_ids
    if not recurrent:
        state.spec(group)
    sequence = state.table.get(seq_id)
    rows = all_rows(state, seq_id)
    if out is not None and (recurrent or group in rows):
        plan = groups_of(state, rows, state.checkpoints(seq_id))[group]
        if set(out) != set(plan):
            raise InvalidArgument(f"export_page_group: out has tensors {sorted(out)}; {sorted(plan)} are needed")
        for name, one in plan.items():
            given = out[name]
            if tuple(given.shape) != one.shape or given.dtype != one.dtype or given.device.type != state.device.type:
                raise InvalidArgument(
                    f"export_page_group: out[{name!r}] is {given.dtype} {tuple(given.shape)} on {given.device}; "
                    f"{one.dtype} {one.shape} on {state.device} is needed"
                )
    state.table.require_ready(seq_id, sequence, "export_page_group")
    state.table.require_committed(seq_id, sequence, "export_page_group")
    if part is not None and recurrent:
        tensors = part.export(seq_id, group)
    elif state.encoders is not None and group in state.encoders.specs:
        if group not in rows:
            raise FailedPrecondition(
                f"export_page_group: layer {group} has no encoder rows of sequence {seq_id}; set_cross_kv was not called, so there "
                "is no such group"
            )
        tensors = group_tensors(state.encoders.specs[group], state.encoders.read(seq_id, group, range(rows[group])))
    else:
        layer = state.layer(group)
        slots = state.table.slots(layer.class_index, seq_id, state.table.held(seq_id, layer.class_index))
        tensors = group_tensors(layer.spec, state.classes[layer.class_index].storage.read(layer.index, slots))
    if out is None:
        return tensors
    for name, tensor in tensors.items():
        out[name].copy_(tensor)
    return out


def prepare(state: StateParts, seq_id: SeqId, given: Mapping[str, Any]) -> None:
    """Check the metadata and reserve pages; the sequence is *importing* until ``finish``."""
    check_id(seq_id)
    if seq_id in state.table:
        raise InvalidArgument(f"prepare_import: sequence {seq_id} exists already; a new id is needed")
    validate(state, given)
    started = Import(rows_by_layer(given), promised_checksums(state, given))
    length, window = int(given["length"]), window_of(given)
    holes = [hole_of(ranges_of(one), length, window.sink if window else 0) for one in given["held"]]
    kept = list(given["kept_recurrent_positions"])
    encoders = {one["layer"]: one["rows"] for one in given.get("cross", []) if one["rows"] is not None}
    state.table.require_closed("prepare_import")
    if state.encoders is not None:
        state.encoders.table.require_room(seq_id, max(encoders.values(), default=0), "prepare_import")
    if state.recurrent is not None and (needed := 1 + len(kept)) > (free := state.recurrent.table.num_available):
        raise ResourceExhausted(f"prepare_import: needs {needed} states, {free} free")
    state.table.reserve_import(seq_id, length, holes, window, slid=bool(given["evicted"]))
    if state.recurrent is not None:
        state.recurrent.prepare_import(seq_id, length, kept)
    if state.encoders is not None and encoders:
        state.encoders.table.own(seq_id, max(encoders.values()))
        for layer, count in encoders.items():
            state.encoders.table.note(seq_id, layer, count)
    for index, one in enumerate(state.classes):
        # Of a page that is held in part the rest is never written, and a kernel reads whole pages.
        one.storage.blank(_rows_between(state, seq_id, index, length))
    state.imports[seq_id] = started


def _rows_between(state: StateParts, seq_id: SeqId, index: int, length: int) -> list[SlotRange]:
    """The sequence's own pages, in one class, of which some row below the length will not be written."""
    size, pages = state.page_size, state.table.get(seq_id).tables[index].pages
    lacking = np.zeros(pages.size * size, dtype=np.bool_)
    lacking[:length] = True
    for part in state.table.held(seq_id, index):
        lacking[part.start : part.stop] = False
    partly = np.flatnonzero(lacking.reshape(-1, size).any(1) & (pages >= 0))
    return [SlotRange(int(pages[page]) * size, size) for page in partly]


def window_of(given: Mapping[str, Any]) -> Window | None:
    """The sequence's window; ``InvalidArgument`` for what is none."""
    size, sink, eviction = given.get("window"), given.get("sink"), given.get("eviction")
    if size is None:
        if sink != 0 or eviction != "token":
            raise InvalidArgument(
                f"import: sink {sink!r} and eviction {eviction!r} without a window found, 0 and 'token' expected"
            )
        return None
    if (
        not isinstance(size, int)
        or not isinstance(sink, int)
        or not is_count(size)
        or not is_count(sink)
        or not sink < size
        or eviction not in ("token", "forward")
    ):
        raise InvalidArgument(
            f"import: window {size!r}, sink {sink!r}, eviction {eviction!r} found; 0 <= sink < window and 'token' or 'forward' expected"
        )
    return Window(size, sink, eviction)


def is_count(value: object) -> bool:
    """Whether it is a number of tokens, or a position, with which an int64 can calculate."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def ranges_of(one: object) -> list[range]:
    """The ``ranges`` of one item of ``held``; ``InvalidArgument`` for what are none."""
    ranges = one.get("ranges") if isinstance(one, dict) else None
    if not isinstance(ranges, list) or not all(
        isinstance(part, (list, tuple)) and len(part) == 2 and all(map(is_count, part)) for part in ranges
    ):
        raise InvalidArgument(f"import: held {one!r} found; layers and ranges [[start, stop], ...] expected")
    return [range(start, stop) for start, stop in ranges]


def hole_of(ranges: list[range], length: int, sink: int) -> Hole:
    """What is not held if these ranges are; ``InvalidArgument`` if no window leaves such ranges."""
    if ranges == held(length, sink, NO_HOLE):
        return NO_HOLE
    first = ranges[0].start if ranges else min(sink, length)
    if len(ranges) == 2:
        found = Hole(first, ranges[1].start)
    elif not ranges or ranges[0].stop < length:
        # The hole reaches up to the end: the next token sees nothing behind the sink.
        found = Hole(first, length)
    elif first <= sink:
        found = Hole(first, 0)
    else:
        found = Hole(sink, first)
    if held(length, sink, found) != ranges:
        raise InvalidArgument(
            f"import: positions {describe_ranges(ranges)} of {length} are held, which no window with sink {sink} leaves"
        )
    return found


def validate(state: StateParts, given: Mapping[str, Any]) -> None:
    """``InvalidArgument`` with expected and found, for the first thing that does not agree."""
    if given.get("format_version") != FORMAT_VERSION:
        raise InvalidArgument(
            f"import: format version {given.get('format_version')!r} found, {FORMAT_VERSION} expected"
        )
    layers, mine = given.get("layers"), layers_metadata(state)
    if not isinstance(layers, list) or len(layers) != len(mine):
        found = len(layers) if isinstance(layers, list) else "no"
        raise InvalidArgument(f"import: {found} layers found, {len(mine)} expected")
    for index, (found_layer, expected_layer) in enumerate(zip(layers, mine, strict=True)):
        if found_layer != expected_layer:
            for name, expected in expected_layer.items():
                value = found_layer.get(name) if isinstance(found_layer, dict) else None
                if value != expected:
                    raise InvalidArgument(f"import: layer {index} has {name} {value!r}, expected {expected!r}")
            raise InvalidArgument(
                f"import: layer {index} has unknown properties {sorted(set(found_layer) - set(expected_layer))}"
            )
    ids = ids_metadata(state)
    agree = all(given.get(name) == ids.get(name) for name in ("first_layer", "layer_ids", "recurrent"))
    if not agree or given.get("layout_hash") != layout_hash(state):
        raise InvalidArgument(f"import: layout {given.get('layout_hash')!r} found, {layout_hash(state)!r} expected")
    length = given.get("length")
    if not isinstance(length, int) or not is_count(length):
        raise InvalidArgument(f"import: length {length!r} found, a number of tokens expected")
    _validate_windows(state, given, length)
    kept = given.get("kept_recurrent_positions")
    expected = "[]" if state.recurrent is None else f"ascending positions in 1..{length}"
    ascends = isinstance(kept, list) and all(
        is_count(high) and low < high for low, high in zip([0, *kept], [*kept, length + 1], strict=True)
    )
    if not ascends or (kept and state.recurrent is None):
        raise InvalidArgument(f"import: kept_recurrent_positions {kept!r} found, {expected} expected")
    _validate_encoders(state, given)


def _validate_encoders(state: StateParts, given: Mapping[str, Any]) -> None:
    """Whether each cross layer is said to have rows or none."""
    found = given.get("cross")
    if state.encoders is None:
        if found is not None:
            raise InvalidArgument(f"import: cross {found!r} found, and this state has no cross layers")
        return
    layers = list(state.encoders.specs)
    items = found if isinstance(found, list) else []
    fits = [one.get("layer") if isinstance(one, dict) else None for one in items] == layers and all(
        set(one) == {"layer", "rows"} and (one["rows"] is None or (is_count(one["rows"]) and one["rows"] > 0))
        for one in items
    )
    if not fits:
        raise InvalidArgument(
            f"import: cross {found!r} found; layer and rows, a number above 0 or null, of each of the layers {layers} expected"
        )


def _validate_windows(state: StateParts, given: Mapping[str, Any], length: int) -> None:
    """Whether all is held that a continuation needs."""
    window = window_of(given)
    evicted = given.get("evicted")
    accepted = [0] if window is None else [0, max(0, length - window.size)]
    if evicted not in accepted or isinstance(evicted, bool):
        raise InvalidArgument(f"import: evicted {evicted!r} found, one of {accepted} expected")
    items, mine = given.get("held"), [[state.layer_ids[layer] for layer in one.layers] for one in state.classes]
    if not isinstance(items, list) or [one.get("layers") if isinstance(one, dict) else None for one in items] != mine:
        raise InvalidArgument(f"import: held {items!r} found; one item for each of the layers {mine} expected")
    sink = window.sink if window else 0
    for one, item in zip(state.classes, items, strict=True):
        ranges = ranges_of(item)
        hole = hole_of(ranges, length, sink)
        if hole.sink and one.window is None:
            raise InvalidArgument(f"import: positions {describe_ranges(ranges)} are held, those from 0 expected too")
        seen = visibility(np.array([length]), length, window, one.window)
        needed = [range(int(seen.lows_T[0]), length)]
        if seen.sinks_T2 is not None:
            needed.append(range(*seen.sinks_T2[0].tolist()))
        for part in needed:
            if part and not any(kept.start <= part.start and part.stop <= kept.stop for kept in ranges):
                raise InvalidArgument(
                    f"import: positions {describe_ranges(ranges)} are held, and the next token sees {describe_ranges([part])}"
                )


def promised_checksums(state: StateParts, given: Mapping[str, Any]) -> dict[tuple[int, str], str]:
    """Checksums by layer and name; ``InvalidArgument`` unless the groups are this state's layers, each once."""
    groups, rows = given.get("groups"), rows_by_layer(given)
    plans = groups_of(state, rows, given["kept_recurrent_positions"])
    wanted = list(plans)
    entries = groups if isinstance(groups, list) else []
    found = sorted(
        entry["group"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("group"), int)
    )
    if found != wanted or len(entries) != len(wanted):
        raise InvalidArgument(f"import: groups {found} found, {wanted} expected")
    checksums: dict[tuple[int, str], str] = {}
    for entry in entries:
        layer, tensors = entry["group"], entry.get("tensors")
        shapes = {name: one.shape for name, one in plans[layer].items()}
        if not isinstance(tensors, dict) or set(tensors) != set(shapes):
            names = sorted(tensors) if isinstance(tensors, dict) else tensors
            raise InvalidArgument(f"import: tensors {names} of layer {layer} found, {sorted(shapes)} expected")
        for name, shape in shapes.items():
            about = tensors[name]
            if not isinstance(about, dict) or about.get("shape") != list(shape):
                raise InvalidArgument(f"import: {name} of layer {layer} is {about!r}, shape {list(shape)} expected")
            if about.get("checksum"):
                checksums[layer, name] = str(about["checksum"])
    return checksums


def import_group(state: StateParts, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]) -> None:
    """Write one layer's rows; each group once, in any order. ``DataLoss`` if a checksum disagrees."""
    part = state.recurrent
    if part is not None and group in part.layer_ids:
        _import_states(state, part, seq_id, group, tensors)
        return
    spec = state.spec(group)
    state.table.get(seq_id)
    started = state.imports.get(seq_id)
    if started and group not in started.rows:
        raise InvalidArgument(
            f"import_page_group: tensors {sorted(tensors)} of layer {group} found, none expected: the metadata says that its "
            "encoder rows are not set"
        )
    # Which number of rows is right is known only for an import; elsewhere the given one will do.
    rows = started.rows[group] if started else next((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), 0)
    shapes = group_shapes(spec, rows)
    if set(tensors) != set(shapes):
        raise InvalidArgument(
            f"import_page_group: tensors {sorted(tensors)} of layer {group} found, {sorted(shapes)} expected"
        )
    for name, shape in shapes.items():
        given = tensors[name]
        if tuple(given.shape) != shape or given.dtype != state.dtype:
            raise InvalidArgument(
                f"import_page_group: {name} of layer {group} is {given.dtype} {tuple(given.shape)}, expected {state.dtype} {shape}"
            )
    started = _check_import(state, seq_id, group, tensors)
    if state.encoders is not None and group in state.encoders.specs:
        state.encoders.fill(seq_id, group, tensors["k"], tensors["v"])
        started.done.add(group)
        return
    layer = state.layer(group)
    kept = state.table.held(seq_id, layer.class_index)
    slots = torch.from_numpy(state.table.slots(layer.class_index, seq_id, kept)).to(state.device)
    storage = state.classes[layer.class_index].storage
    if isinstance(spec, LatentAttention):
        storage.write(layer.index, slots, tensors["latent"].to(state.device).unsqueeze(1))
    else:
        storage.write(layer.index, slots, tensors["k"].to(state.device), tensors["v"].to(state.device))
    started.done.add(group)


def _check_import(state: StateParts, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]) -> Import:
    """The import under way, if it waits for this group and the tensors are those that were promised."""
    state.table.require_closed("import_page_group")
    started = state.imports.get(seq_id)
    if started is None:
        raise FailedPrecondition(
            f"import_page_group: sequence {seq_id} is not being imported; call prepare_import first"
        )
    if group in started.done:
        raise FailedPrecondition(f"import_page_group: layer {group} was imported already")
    for name, tensor in tensors.items():
        expected = started.checksums.get((group, name), "")
        if expected and (found := checksum(tensor)) != expected:
            raise DataLoss(f"import_page_group: {name} of layer {group} has checksum {found}, expected {expected}")
    return started


def _import_states(
    state: StateParts, part: RecurrentPart, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]
) -> None:
    """Write one recurrent layer's states."""
    state.table.get(seq_id)
    plan = part.group_tensors(group, part.table.kept(seq_id))
    if set(tensors) != set(plan):
        raise InvalidArgument(
            f"import_page_group: tensors {sorted(tensors)} of layer {group} found, {sorted(plan)} expected"
        )
    for name, one in plan.items():
        given = tensors[name]
        if tuple(given.shape) != one.shape or given.dtype != dtype_of(one):
            raise InvalidArgument(
                f"import_page_group: {name} of layer {group} is {given.dtype} {tuple(given.shape)}, expected {dtype_of(one)} "
                f"{one.shape}"
            )
    started = _check_import(state, seq_id, group, tensors)
    part.import_group(seq_id, group, {name: tensor.to(state.device) for name, tensor in tensors.items()})
    started.done.add(group)


def finish(state: StateParts, seq_id: SeqId) -> None:
    """Publish the sequence; ``FailedPrecondition`` names the layers that are missing."""
    state.table.get(seq_id)
    state.table.require_closed("finish_import")
    started = state.imports.get(seq_id)
    if started is None:
        raise FailedPrecondition(f"finish_import: sequence {seq_id} is not being imported; call prepare_import first")
    layers = [*started.rows, *(state.recurrent.layer_ids if state.recurrent is not None else ())]
    missing = [layer for layer in sorted(layers) if layer not in started.done]
    if missing:
        raise FailedPrecondition(f"finish_import: layers {missing} of sequence {seq_id} are missing")
    state.table.publish_import(seq_id)
    if state.recurrent is not None:
        state.recurrent.finish_import(seq_id)
    del state.imports[seq_id]
