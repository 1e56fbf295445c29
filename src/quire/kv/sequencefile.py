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
        TensorSpec(name=f"{prefix}layer.{layer + state.first_layer}.{name}", dtype=state.dtype, shape=shape)
        for layer, spec in enumerate(state.specs)
        for name, shape in exchange.group_shapes(spec, rows[layer + state.first_layer]).items()
    ]
    return metadata, plan


def tensors(state: PagedKVState, seq: SeqId, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of the plan, gathered layer by layer."""
    for layer in range(state.first_layer, state.first_layer + len(state.specs)):
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
    if found != [mine]:
        if not convert_dtype:
            raise InvalidArgument(
                f"the state is stored in {', '.join(found)} and this one holds {mine}; pass convert_dtype=True to convert it"
            )
        wanted["layers"] = [{**layer, "dtype": mine} for layer in layers]
        wanted["layout_hash"] = exchange.hash_of(wanted["layers"], state.first_layer)
        if metadata.get("layout_hash") != exchange.hash_of(layers, state.first_layer):
            raise DataLoss("the layout hash of the state file does not fit its layers")
    exchange.validate(state, wanted)
    rows = exchange.rows_by_layer(wanted)
    for layer, spec in enumerate(state.specs):
        for name, shape in exchange.group_shapes(spec, rows[layer + state.first_layer]).items():
            full = f"{prefix}layer.{layer + state.first_layer}.{name}"
            stored = file.specs.get(full)
            if stored is None:
                raise InvalidArgument(f"the state file lacks tensor {full!r}")
            if stored.shape != shape:
                raise InvalidArgument(f"tensor {full!r} has shape {stored.shape}, expected {shape}")
            if exchange.dtype_name(stored.dtype) != layers[layer].get("dtype"):
                raise InvalidArgument(
                    f"tensor {full!r} is {stored.dtype}, and the metadata says {layers[layer].get('dtype')}"
                )
    # The container has verified its own checksums.
    wanted["groups"] = [
        {
            "group": layer + state.first_layer,
            "tensors": {
                name: {"shape": list(shape)}
                for name, shape in exchange.group_shapes(spec, rows[layer + state.first_layer]).items()
            },
        }
        for layer, spec in enumerate(state.specs)
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


def tensor_names(state: PagedKVState, prefix: str = "") -> set[str]:
    """Names that ``check`` asks for; a file that holds others is not what it says."""
    return {
        f"{prefix}layer.{layer + state.first_layer}.{name}"
        for layer, spec in enumerate(state.specs)
        for name in exchange.group_shapes(spec, 0)
    }


def load(state: PagedKVState, seq: SeqId, file: StateFile, checked: Mapping[str, Any], prefix: str = "") -> None:
    """Make ``seq`` from the file; ``checked`` is what ``check`` returned. ``ResourceExhausted`` without room."""
    state.prepare_import(seq, dict(checked))
    try:
        with torch.inference_mode():
            for layer, spec in enumerate(state.specs):
                group = layer + state.first_layer
                rows = {
                    name: file.tensor(f"{prefix}layer.{group}.{name}").to(state.dtype)
                    for name in exchange.group_shapes(spec, 0)
                }
                state.import_page_group(seq, group, rows)
        state.finish_import(seq)
    except BaseException:
        state.remove_sequence(seq)
        raise
