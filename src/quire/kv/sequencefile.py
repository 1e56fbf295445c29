"""Sequences of a KV state in a state file: their tensors and metadata, written and loaded.

A session stores one sequence, a KV cache one per row (``prefix`` tells their tensors apart).
Everything is validated before the state changes, and a failed load leaves nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import DataLoss, InvalidArgument
from quire.base.interrupts import check as check_interrupts
from quire.base.types import SeqId
from quire.contracts.kv_format import PLAIN
from quire.contracts.kv_state import ModelState, TensorPlan
from quire.contracts.layers import Recurrent
from quire.kv import exchange
from quire.kv.metadata_checks import hash_of
from quire.kv.recurrent import bytes_per_state
from quire.statefile.container import StateFile
from quire.statefile.header import MAX_CONTAINERS, MAX_HEADER_BYTES, MAX_RANK, HeaderLimits, TensorSpec

IDENTITY = ("architecture", "config", "weights")
"""What tells models apart in a state's metadata."""


def describe(
    state: ModelState, seq: SeqId, prefix: str = ""
) -> tuple[dict[str, Any], list[TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Return a sequence's metadata, the plan of its tensors (``{prefix}layer.{i}.k`` etc.), and the
    tensors, each layer gathered when it is asked for."""
    metadata = state.get_checkpoint_metadata(seq, checksums=False)
    groups = state.plan_import(metadata)
    plan = [
        TensorSpec(name=f"{prefix}layer.{layer}.{name}", dtype=one.dtype, shape=one.shape)
        for layer, group in groups.items()
        for name, one in group.items()
    ]
    del metadata["groups"]  # the container has names, shapes and checksums
    tensors = (
        (f"{prefix}layer.{layer}.{name}", tensor)
        for layer in groups
        for name, tensor in state.export_page_group(seq, layer).items()
    )
    return metadata, plan, tensors


def header_limits(state: ModelState, tokens: int, runs: int, rows: int, size: int) -> HeaderLimits:
    """Return the limits of the header in a file of ``size`` bytes with up to ``rows`` sequences of
    such a state, with at most ``tokens`` token ids and ``runs`` changes of the adapter in all.

    A writer has one description of each layer for each sequence, and three arrays or objects for
    each tensor. Recurrent states: one for each sequence, and as many as the file's bytes allow.
    """
    found = state.get_layout()
    layout, tensors = json.dumps(found), 2 * len(found["layers"]) * rows
    specs = [spec for spec in map(state.layer_spec, state.recurrent_ids) if isinstance(spec, Recurrent)]
    if specs:
        tensors += sum(len(spec.states) for spec in specs) * (rows + size // bytes_per_state(specs))
    # Each tensor has its name twice, type, shape, offsets and checksum; ``held`` and ``cross`` have
    # fewer parts than there are layers and tensors.
    containers = rows * (256 + 2 * (layout.count("[") + layout.count("{"))) + 8 * tensors + runs
    return HeaderLimits(
        bytes=min(MAX_HEADER_BYTES, rows * (65_536 + 4 * len(layout)) + 512 * tensors + 12 * tokens + 100 * runs),
        containers=min(MAX_CONTAINERS, containers),
        values=rows * (1024 + 2 * layout.count(",")) + (16 + MAX_RANK) * tensors + tokens + 2 * runs,
    )


def is_exact(state: ModelState, metadata: Mapping[str, Any]) -> bool:
    """Return whether attention rows are in this state's dtype; recurrent states keep their own."""
    mine = exchange.dtype_name(state.dtype)
    return all(layer["dtype"] == mine for layer in metadata["layers"])


def check(
    state: ModelState, file: StateFile, metadata: Mapping[str, Any], prefix: str, convert_dtype: bool
) -> dict[str, Any]:
    """Check that this sequence of the file can be loaded; return its metadata, in our dtype.

    ``metadata`` is as ``statefile.schema`` declares it. ``InvalidArgument`` with expected and
    found; ``DataLoss`` if tensors and metadata contradict each other.
    """
    layers = metadata["layers"]
    mine = exchange.dtype_name(state.dtype)
    found = sorted({layer["dtype"] for layer in layers})
    wanted: dict[str, Any] = dict(metadata)
    if found not in ([], [mine]):
        if formats := sorted(
            {layer.get("format", PLAIN) for layer in (*layers, *state.get_layout()["layers"])} - {PLAIN}
        ):
            raise InvalidArgument(
                f"the state is stored in {', '.join(found)} and this one holds {mine}; rows of the format {', '.join(formats)} "
                "are not converted"
            )
        if not convert_dtype:
            raise InvalidArgument(
                f"the state is stored in {', '.join(found)} and this one holds {mine}; pass convert_dtype=True to convert it"
            )
        wanted["layers"] = [{**layer, "dtype": mine} for layer in layers]
        layout = state.get_layout()
        wanted["layout_hash"] = hash_of({**layout, "layers": wanted["layers"]})
        if metadata.get("layout_hash") != hash_of({**layout, "layers": layers}):
            raise DataLoss("the layout hash of the state file does not fit its layers")
    groups = state.plan_import(wanted)
    ids = wanted.get("layer_ids") or range(wanted["first_layer"], wanted["first_layer"] + len(layers))
    said = {layer: one["dtype"] for layer, one in zip(ids, layers, strict=True) if "format" not in one}
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
    return with_groups(wanted, groups)


def with_groups(metadata: Mapping[str, Any], plan: Mapping[int, Mapping[str, TensorPlan]]) -> dict[str, Any]:
    """Return metadata for an import of these tensors, whose checksums others check."""
    groups = [
        {"group": layer, "tensors": {name: {"shape": list(one.shape)} for name, one in group.items()}}
        for layer, group in plan.items()
    ]
    return {**metadata, "groups": groups}


def check_model(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise ``InvalidArgument``, with expected and found, if the state is another model's, or was
    computed for another length."""
    for name in IDENTITY:
        if found.get(name) != expected.get(name):
            if length := other_length(found, expected):
                raise InvalidArgument(f"the state was computed {length}; load the model so, or compute the state again")
            raise InvalidArgument(
                f"the state belongs to another model: {name} {found.get(name)!r:.80} found, {expected.get(name)!r} expected"
            )


def other_length(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Return for which length a state was computed, and for which the model runs, if that is what
    tells it from the model; else ""."""
    theirs, ours = found.get("length"), expected.get("length")
    same = all(found.get(name) == expected.get(name) for name in IDENTITY if name != "config")
    if not same or not theirs or not ours or theirs == ours:
        return ""
    return f"for {theirs}, and the model runs for {ours}, which gives RoPE other frequencies"


def tensor_names(checked: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Return the names that ``check`` asked for; a file with others contradicts its metadata."""
    return {f"{prefix}layer.{group['group']}.{name}" for group in checked["groups"] for name in group["tensors"]}


def load(state: ModelState, seq: SeqId, file: StateFile, checked: Mapping[str, Any], prefix: str = "") -> None:
    """Make ``seq`` from a file that ``check`` accepted. ``ResourceExhausted`` without room."""
    state.prepare_import(seq, dict(checked))
    try:
        fill(state, seq, file, checked, prefix)
        state.finish_import(seq)
    except BaseException:
        state.remove_sequence(seq)
        raise


def fill(state: ModelState, seq: SeqId, file: StateFile, checked: Mapping[str, Any], prefix: str) -> None:
    """Write all layers of a sequence that is being imported from a file that ``check`` accepted."""
    with torch.inference_mode():
        for layer, group in state.plan_import(checked).items():
            found = {name: file.tensor(f"{prefix}layer.{layer}.{name}").to(one.dtype) for name, one in group.items()}
            state.import_page_group(seq, layer, found)
            check_interrupts()
