"""Objects: state as bytes, with the metadata that identifies it, and back.

An object is a state file of kind ``object``: tensors of a run, or of a stop. A reader checks its
name, layout, adapters and tokens, then the checksum of each tensor when that is read. Any
difference raises ``Unfit`` with a reason, which callers count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.base.errors import QuireError
from quire.contracts.kv_state import TensorPlan
from quire.contracts.store import Blob, ObjectKey
from quire.statefile.container import StateFile, read_state, to_bytes
from quire.statefile.header import TensorSpec
from quire.statefile.schema import check_metadata
from quire.store.records import Unfit


@dataclass(frozen=True, slots=True)
class Contents:
    """The expected contents of an object."""

    model: Mapping[str, str]
    """Fields of the model's fingerprint."""
    layout_hash: str
    tokens: Sequence[int]
    """The ids after the key's parent that the object depends on."""
    adapters: Sequence[Sequence[Any]]
    """``[from position, fingerprint]`` among these tokens; [] for the base model alone."""
    lead: Sequence[int] | None = None
    """For a chunk: the ids before its tokens when it was computed. Their rows are not in it."""

    def metadata(self, key: ObjectKey) -> dict[str, Any]:
        """Return the metadata of the object."""
        lead = self.lead
        chunk = {} if lead is None else {"chunk": {"lead": list(lead), "position": len(lead), "exact": True}}
        return {
            **chunk,
            "kind": "object",
            "name": key.name,
            "model": dict(self.model),
            "layout_hash": self.layout_hash,
            "tokens": list(self.tokens),
            "adapters": [list(run) for run in self.adapters],
        }


def tensor_name(layer: int, name: str) -> str:
    """Return the name of a layer's tensor in an object."""
    return f"layer.{layer}.{name}"


def pack(
    key: ObjectKey,
    contents: Contents,
    plan: Mapping[int, Mapping[str, TensorPlan]],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    sequence: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the bytes of an object. ``plan``: its tensors by layer and name; ``tensors``: the same
    by ``tensor_name``, each released before the next is read. ``sequence``: import metadata of a
    sequence with a window."""
    specs = [
        TensorSpec(name=tensor_name(layer, name), dtype=one.dtype, shape=one.shape)
        for layer, group in plan.items()
        for name, one in group.items()
    ]
    own = {} if sequence is None else {"sequence": dict(sequence)}
    return to_bytes(contents.metadata(key) | own, specs, tensors)


def unpack(key: ObjectKey, contents: Contents, blob: Blob) -> StateFile:
    """Open an object without reading its tensors. Raise ``Unfit``."""
    try:
        file = read_state(blob, verify=False)
        check_metadata(file.metadata, ("object",))
    except QuireError as error:
        raise Unfit(f"object {key.name}: {error}", code="header") from None
    if {name: value for name, value in file.metadata.items() if name != "sequence"} != contents.metadata(key):
        raise Unfit(f"object {key.name} holds the state of other tokens, or of another model", code="key")
    return file


def read_tensors(key: ObjectKey, file: StateFile, layer: int, plan: Mapping[str, TensorPlan]) -> dict[str, Tensor]:
    """Return a layer's tensors, verified by their checksums. Raise ``Unfit``."""
    found: dict[str, Tensor] = {}
    for name, one in plan.items():
        full = tensor_name(layer, name)
        spec = file.specs.get(full)
        if spec is None or spec.shape != one.shape or spec.dtype != one.dtype:
            raise Unfit(f"object {key.name} has no {full} of {one.dtype} {list(one.shape)}", code="layout")
        found[name] = file.tensor(full)
    try:
        file.verify(*(tensor_name(layer, name) for name in plan))
    except QuireError as error:
        raise Unfit(f"object {key.name}: {error}", code="checksum") from None
    return found
