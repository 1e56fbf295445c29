"""Export and import of one sequence: metadata, and tensors by layer, independent of pages.

A *group* is one layer. The layout hash covers what writer and reader must have in common: kinds,
geometry, dtype, RoPE and windows of the layers. Page size, capacity and device may differ.
Positions that a window has evicted are not exported; the metadata list those that are. A state file
consists of these groups and the tokens.

Letters: n rows (tokens); Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

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
from quire.kv.forward_need import SlotRange
from quire.kv.metadata_checks import hash_of, holes_of, promised_checksums, validate, window_of
from quire.kv.parts import Import, StateParts
from quire.kv.recurrent import RecurrentPart, dtype_of
from quire.kv.sequences import check_id
from quire.kv.state_schema import FORMAT_VERSION
from quire.kv.statefile import bytes_of
from quire.kv.storage import LayerRows, StoredSpec, check_tensor
from quire.signatures import checks_arguments
from quire.types import SeqId


@checks_arguments()
class StateExchange(StateParts):
    """Export and import of sequences. ``contracts.kv_state`` documents the verbs."""

    def get_layout_hash(self) -> str:
        return hash_of(self.get_layout())

    def get_layout(self) -> dict[str, Any]:
        ids = list(self.stored_specs)
        found: dict[str, Any] = {"first_layer": self.first_layer}
        if ids != list(range(self.first_layer, self.first_layer + len(ids))):
            found["layer_ids"] = ids
        if self.recurrent is not None:
            found["recurrent"] = [
                {
                    "layer": layer,
                    "states": [
                        {"shape": list(one.shape), "dtype": one.dtype, "initial": one.initial_as_json()}
                        for one in spec.states
                    ],
                }
                for layer, spec in zip(self.recurrent.layer_ids, self.recurrent.specs, strict=True)
            ]
        found["layers"] = [layer_metadata(spec, self.dtype) for spec in self.stored_specs.values()]
        return found

    def get_checkpoint_metadata(self, seq_id: SeqId, *, checksums: bool = True) -> dict[str, Any]:
        sequence = self.table.get(seq_id)
        self.table.require_ready(seq_id, sequence, "get_checkpoint_metadata")
        self.table.require_committed(seq_id, sequence, "get_checkpoint_metadata")
        window, layout, kept = sequence.window, self.get_layout(), self.checkpoints(seq_id)
        groups: list[dict[str, Any]] = []
        for group, plan in groups_of(self, rows_of(self, seq_id), kept).items():
            tensors = self.export_page_group(seq_id, group) if checksums else {}
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
        encoders: dict[str, Any] = {}
        if self.encoders is not None:
            table = self.encoders.table
            encoders["cross"] = [
                {"layer": layer, "rows": table.rows(seq_id, layer) or None} for layer in self.encoders.specs
            ]
        return {
            "format_version": FORMAT_VERSION,
            "layout_hash": hash_of(layout),
            **layout,
            "length": sequence.length,
            "held": [
                {
                    "layers": [self.layer_ids[layer] for layer in one.layers],
                    "ranges": [[part.start, part.stop] for part in self.table.held(seq_id, index)],
                }
                for index, one in enumerate(self.classes)
            ],
            "window": window.size if window else None,
            "sink": window.sink if window else 0,
            "eviction": window.eviction if window else "token",
            "evicted": sequence.evicted,
            "kept_recurrent_positions": kept,
            **encoders,
            "groups": groups,
        }

    def export_page_group(self, seq_id: SeqId, group: int, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the held rows of one layer, by position, or the states of a recurrent layer. Rows
        are ``k [n, Hkv, Dk]`` and ``v [n, Hkv, Dv]``, or ``latent [n, row]``, as stored.
        ``FailedPrecondition`` for a cross layer that is not set."""
        part = self.recurrent
        recurrent = part is not None and group in part.layer_ids
        if not recurrent:
            self.spec(group)
        sequence = self.table.get(seq_id)
        rows = rows_of(self, seq_id)
        if out is not None and (recurrent or group in rows):
            plan = groups_of(self, rows, self.checkpoints(seq_id))[group]
            if set(out) != set(plan):
                raise InvalidArgument(f"export_page_group: out has tensors {sorted(out)}; {sorted(plan)} are needed")
            for name, one in plan.items():
                check_tensor(f"export_page_group: out[{name!r}]", out[name], one.dtype, one.shape, self.device)
        self.table.require_ready(seq_id, sequence, "export_page_group")
        self.table.require_committed(seq_id, sequence, "export_page_group")
        if part is not None and recurrent:
            tensors = part.export(seq_id, group)
        elif self.encoders is not None and group in self.encoders.specs:
            if group not in rows:
                raise FailedPrecondition(
                    f"export_page_group: layer {group} has no encoder rows of sequence {seq_id}; set_cross_kv was not called, so there "
                    "is no such group"
                )
            tensors = group_tensors(self.encoders.specs[group], self.encoders.read(seq_id, group, range(rows[group])))
        else:
            layer = self.layer(group)
            slots = self.table.slots(layer.class_index, seq_id, self.table.held(seq_id, layer.class_index))
            tensors = group_tensors(layer.spec, self.classes[layer.class_index].storage.read(layer.index, slots))
        if out is None:
            return tensors
        for name, tensor in tensors.items():
            out[name].copy_(tensor)
        return out

    def plan_import(self, metadata: Mapping[str, Any]) -> dict[int, dict[str, TensorPlan]]:
        validate(self, self.get_layout(), metadata)
        return groups_of(self, rows_by_layer(metadata), metadata["kept_recurrent_positions"])

    def prepare_import(self, seq_id: SeqId, metadata: Mapping[str, Any]) -> None:
        check_id(seq_id)
        if seq_id in self.table:
            raise InvalidArgument(f"prepare_import: sequence {seq_id} exists already; a new id is needed")
        validate(self, self.get_layout(), metadata)
        rows, kept = rows_by_layer(metadata), list(metadata["kept_recurrent_positions"])
        started = Import(rows, promised_checksums(groups_of(self, rows, kept), metadata.get("groups")))
        length, window, holes = int(metadata["length"]), window_of(metadata), holes_of(metadata)
        encoders = (
            {} if self.encoders is None else {layer: rows[layer] for layer in self.encoders.specs if layer in rows}
        )
        self.table.require_closed("prepare_import")
        if self.encoders is not None:
            self.encoders.table.require_room(seq_id, max(encoders.values(), default=0), "prepare_import")
        if self.recurrent is not None and (needed := 1 + len(kept)) > (free := self.recurrent.table.num_available):
            raise ResourceExhausted(f"prepare_import: needs {needed} states, {free} free")
        self.table.reserve_import(seq_id, length, holes, window, slid=bool(metadata["evicted"]))
        if self.recurrent is not None:
            self.recurrent.table.import_states(seq_id, length, kept)
        if self.encoders is not None and encoders:
            self.encoders.table.own(seq_id, max(encoders.values()))
            for layer, count in encoders.items():
                self.encoders.table.note(seq_id, layer, count)
        for index, one in enumerate(self.classes):
            # The rest of a page held in part is never written, and a kernel reads whole pages.
            one.storage.blank(_rows_between(self, seq_id, index, length))
        self.imports[seq_id] = started

    def import_page_group(self, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]) -> None:
        part = self.recurrent
        if part is not None and group in part.layer_ids:
            self.table.get(seq_id)
            plan = recurrent_plan(part, group, part.table.kept(seq_id))
            done = _check_group(self, seq_id, group, tensors, plan).done
            part.import_group(seq_id, group, {name: tensor.to(self.device) for name, tensor in tensors.items()})
            done.add(group)
            return
        spec = self.spec(group)
        self.table.get(seq_id)
        started = self.imports.get(seq_id)
        if started and group not in started.rows:
            raise InvalidArgument(
                f"import_page_group: tensors {sorted(tensors)} of layer {group} found, none expected: the metadata says that its "
                "encoder rows are not set"
            )
        # Only an import says how many rows there must be; without one the given number is taken.
        given = next((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), 0)
        plan = group_plan(spec, started.rows[group] if started else given, self.dtype)
        done = _check_group(self, seq_id, group, tensors, plan).done
        if self.encoders is not None and group in self.encoders.specs:
            self.encoders.fill(seq_id, group, tensors["k"], tensors["v"])
        else:
            layer = self.layer(group)
            kept = self.table.held(seq_id, layer.class_index)
            slots = torch.from_numpy(self.table.slots(layer.class_index, seq_id, kept)).to(self.device)
            storage = self.classes[layer.class_index].storage
            if isinstance(spec, LatentAttention):
                storage.write(layer.index, slots, tensors["latent"].to(self.device).unsqueeze(1))
            else:
                storage.write(layer.index, slots, tensors["k"].to(self.device), tensors["v"].to(self.device))
        done.add(group)

    def finish_import(self, seq_id: SeqId) -> None:
        self.table.get(seq_id)
        self.table.require_closed("finish_import")
        started = _started(self, seq_id, "finish_import")
        layers = [*started.rows, *(self.recurrent.layer_ids if self.recurrent is not None else ())]
        missing = [layer for layer in sorted(layers) if layer not in started.done]
        if missing:
            raise FailedPrecondition(f"finish_import: layers {missing} of sequence {seq_id} are missing")
        self.table.publish_import(seq_id)
        if self.recurrent is not None:
            self.recurrent.table.finish_import(seq_id)
        del self.imports[seq_id]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_metadata(spec: StoredSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Return what must agree about one layer, in JSON types."""
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


def group_plan(spec: StoredSpec, rows: int, dtype: torch.dtype) -> dict[str, TensorPlan]:
    """Return the tensors of a layer for ``rows`` tokens, or rows of an encoder."""
    if isinstance(spec, LatentAttention):
        return {"latent": TensorPlan((rows, spec.row_dim), dtype)}
    sizes = {"k": spec.head_dim, "v": spec.value_dim}
    return {name: TensorPlan((rows, spec.num_kv_heads, size), dtype) for name, size in sizes.items()}


def recurrent_plan(part: RecurrentPart, layer_id: int, kept: Iterable[int]) -> dict[str, TensorPlan]:
    """Return the tensors of a recurrent layer: the present state and the ``kept`` ones."""
    found = part.group_tensors(layer_id, kept)
    return {name: TensorPlan(one.shape, dtype_of(one)) for name, one in found.items()}


def groups_of(state: StateParts, rows: Mapping[int, int], kept: Iterable[int]) -> dict[int, dict[str, TensorPlan]]:
    """Return the tensors of every group, by layer: ``rows`` of each attention layer named there,
    the present state and the ``kept`` ones of each recurrent layer."""
    found: dict[int, dict[str, TensorPlan]] = {}
    for layer, spec in state.stored_specs.items():
        if layer in rows:
            found[layer] = group_plan(spec, rows[layer], state.dtype)
    if state.recurrent is not None:
        kept = list(kept)
        for layer in state.recurrent.layer_ids:
            found[layer] = recurrent_plan(state.recurrent, layer, kept)
    return dict(sorted(found.items()))


def group_tensors(spec: StoredSpec, rows: LayerRows) -> dict[str, Tensor]:
    """Return the rows that were read of a layer, by the names of ``group_plan``."""
    if isinstance(spec, LatentAttention):
        return {"latent": rows.k.squeeze(1)}
    return {"k": rows.k, "v": rows.v}


def checksum(tensor: Tensor) -> str:
    """Return the xxh3-64 of a tensor's bytes in row-major order."""
    return str(xxhash.xxh3_64_hexdigest(bytes_of(tensor)))


def rows_of(state: StateParts, seq_id: SeqId) -> dict[int, int]:
    """Return the number of rows by layer with pages; cross layers that are not set are left out."""
    found: dict[int, int] = {}
    for index, one in enumerate(state.classes):
        held_rows = sum(map(len, state.table.held(seq_id, index)))
        found |= dict.fromkeys((state.layer_ids[layer] for layer in one.layers), held_rows)
    if state.encoders is not None and (encoding := state.encoders.table.get(seq_id)) is not None:
        found |= encoding.rows
    return found


def rows_by_layer(given: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of rows by layer according to metadata that were validated."""
    tokens = {
        layer: sum(stop - start for start, stop in one["ranges"]) for one in given["held"] for layer in one["layers"]
    }
    return tokens | {one["layer"]: one["rows"] for one in given.get("cross", []) if one["rows"] is not None}


def _rows_between(state: StateParts, seq_id: SeqId, index: int, length: int) -> list[SlotRange]:
    """Return the pages, in one class, in which an import leaves rows below the length unwritten."""
    size, pages = state.page_size, state.table.get(seq_id).tables[index].pages
    lacking = np.zeros(pages.size * size, dtype=np.bool_)
    lacking[:length] = True
    for part in state.table.held(seq_id, index):
        lacking[part.start : part.stop] = False
    partly = np.flatnonzero(lacking.reshape(-1, size).any(1) & (pages >= 0))
    return [SlotRange(int(pages[page]) * size, size) for page in partly]


def _started(state: StateParts, seq_id: SeqId, verb: str) -> Import:
    """Return the import that is under way; ``FailedPrecondition`` if none is."""
    if (started := state.imports.get(seq_id)) is None:
        raise FailedPrecondition(f"{verb}: sequence {seq_id} is not being imported; call prepare_import first")
    return started


def _check_group(
    state: StateParts, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor], plan: Mapping[str, TensorPlan]
) -> Import:
    """Return the import that waits for this group; refuse tensors not as planned and promised."""
    if set(tensors) != set(plan):
        raise InvalidArgument(
            f"import_page_group: tensors {sorted(tensors)} of layer {group} found, {sorted(plan)} expected"
        )
    for name, one in plan.items():
        given = tensors[name]
        if tuple(given.shape) != one.shape or given.dtype != one.dtype:
            raise InvalidArgument(
                f"import_page_group: {name} of layer {group} is {given.dtype} {tuple(given.shape)}, expected {one.dtype} {one.shape}"
            )
    state.table.require_closed("import_page_group")
    started = _started(state, seq_id, "import_page_group")
    if group in started.done:
        raise FailedPrecondition(f"import_page_group: layer {group} was imported already")
    for name, tensor in tensors.items():
        expected = started.checksums.get((group, name), "")
        if expected and (found := checksum(tensor)) != expected:
            raise DataLoss(f"import_page_group: {name} of layer {group} has checksum {found}, expected {expected}")
    return started
