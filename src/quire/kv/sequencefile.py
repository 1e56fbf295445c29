"""Sequences of a KV state in a state file: which tensors and metadata they become, and back.

A session stores one sequence, a KV cache one per row (``prefix`` tells their tensors apart). Everything is
validated before the state is touched, and a failed load leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.errors import DataLoss, InvalidArgument
from quire.interrupts import check as check_interrupts
from quire.kv import exchange
from quire.kv.paged import PagedKVState
from quire.kv.statefile import StateFile, TensorSpec
from quire.types import SeqId


def describe(state: PagedKVState, seq: SeqId, prefix: str = "") -> tuple[dict[str, Any], list[TensorSpec]]:
    """The metadata of a sequence and the plan of its tensors, ``{prefix}layer.{i}.k`` and the like."""
    metadata = exchange.metadata(state, seq, checksums=False)
    del metadata["groups"]  # the container has names, shapes and checksums
    rows = exchange.rows_by_layer(metadata)
    plan = [
        TensorSpec(name=f"{prefix}layer.{layer}.{name}", dtype=one.dtype, shape=one.shape)
        for layer, group in exchange.groups_of(state, rows, metadata["kept_recurrent_positions"]).items()
        for name, one in group.items()
    ]
    return metadata, plan


def is_exact(state: PagedKVState, metadata: Mapping[str, Any]) -> bool:
    """Whether the rows of attention layers were stored in this state's dtype. Recurrent states are taken in their own only."""
    mine = exchange.dtype_name(state.dtype)
    return all(layer["dtype"] == mine for layer in metadata["layers"])


def tensors(state: PagedKVState, seq: SeqId, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of the plan, gathered layer by layer."""
    recurrent = state.recurrent.layer_ids if state.recurrent is not None else ()
    for layer in sorted((*exchange.all_rows(state, seq), *recurrent)):
        for name, tensor in exchange.export_group(state, seq, layer).items():
            yield f"{prefix}layer.{layer}.{name}", tensor


def check(
    state: PagedKVState, file: StateFile, metadata: Mapping[str, Any], prefix: str, convert_dtype: bool
) -> dict[str, Any]:
    """Whether this sequence of the file can be loaded; returns its metadata, in this state's dtype.

    ``InvalidArgument`` with expected and found; ``DataLoss`` if tensors and metadata contradict each other.
    """
    if not isinstance(metadata, Mapping):
        raise DataLoss("the state file has no metadata of the sequence")
    layers = metadata.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise DataLoss("the state file does not say which layers it holds")
    mine = exchange.dtype_name(state.dtype)
    found = sorted({str(layer.get("dtype")) for layer in layers})
    wanted: dict[str, Any] = dict(metadata)
    if found not in ([], [mine]):
        if not convert_dtype:
            raise InvalidArgument(
                f"the state is stored in {', '.join(found)} and this one holds {mine}; pass convert_dtype=True to convert it"
            )
        wanted["layers"] = [{**layer, "dtype": mine} for layer in layers]
        wanted["layout_hash"] = exchange.hash_of(wanted["layers"], exchange.ids_metadata(state))
        if metadata.get("layout_hash") != exchange.hash_of(layers, exchange.ids_metadata(state)):
            raise DataLoss("the layout hash of the state file does not fit its layers")
    exchange.validate(state, wanted)
    rows = exchange.rows_by_layer(wanted)
    groups = exchange.groups_of(state, rows, wanted["kept_recurrent_positions"])
    said = {layer: one.get("dtype") for layer, one in zip(state.stored_specs, layers, strict=True)}
    for layer, group in groups.items():
        for name, one in group.items():
            full = f"{prefix}layer.{layer}.{name}"
            stored = file.specs.get(full)
            if stored is None:
                raise InvalidArgument(f"the state file lacks tensor {full!r}")
            if stored.shape != one.shape:
                raise InvalidArgument(f"tensor {full!r} has shape {stored.shape}, expected {one.shape}")
            expected = said.get(layer, exchange.dtype_name(one.dtype))
            if exchange.dtype_name(stored.dtype) != expected:
                raise InvalidArgument(f"tensor {full!r} is {stored.dtype}, and the metadata says {expected}")
    # The container has verified its own checksums.
    wanted["groups"] = [
        {
            "group": layer,
            "tensors": {name: {"shape": list(one.shape)} for name, one in group.items()},
        }
        for layer, group in groups.items()
    ]
    return wanted


def check_model(found: object, expected: Mapping[str, str]) -> None:
    """``InvalidArgument`` with expected and found if the state is another model's."""
    if not isinstance(found, Mapping):
        raise DataLoss("the state file does not say which model it belongs to")
    for name, mine in expected.items():
        if found.get(name) != mine:
            raise InvalidArgument(
                f"the state belongs to another model: {name} {found.get(name)!r} found, {mine!r} expected"
            )


def tensor_names(checked: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Names that ``check`` asked for, of which these are the metadata; a file that holds others is not what it says."""
    return {f"{prefix}layer.{group['group']}.{name}" for group in checked["groups"] for name in group["tensors"]}


def load(state: PagedKVState, seq: SeqId, file: StateFile, checked: Mapping[str, Any], prefix: str = "") -> None:
    """Make ``seq`` from the file; ``checked`` is what ``check`` returned. ``ResourceExhausted`` without room."""
    state.prepare_import(seq, dict(checked))
    try:
        with torch.inference_mode():
            rows = exchange.rows_by_layer(checked)
            for layer, group in exchange.groups_of(state, rows, checked["kept_recurrent_positions"]).items():
                found = {
                    name: file.tensor(f"{prefix}layer.{layer}.{name}").to(one.dtype) for name, one in group.items()
                }
                state.import_page_group(seq, layer, found)
                check_interrupts()
        state.finish_import(seq)
    except BaseException:
        state.remove_sequence(seq)
        raise
