"""Checks that an adapter fits a model: names, shapes and dtypes. They run before it is stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.adapters import Adapter, LowRankUpdate
from quire.nn.embedding import Embedding
from quire.nn.linear import Linear


def validate_adapter(
    adapter: Adapter, linears: Mapping[str, Linear], embedding: Embedding | None, dtype: torch.dtype
) -> None:
    """Raise an error if an adapter does not fit the model.

    ``Unsupported``: it changes a map that the model lacks or that takes no adapters.
    ``InvalidArgument``: wrong shapes or dtypes, or overlapping updates. ``linears``, ``embedding``:
    the parts that adapters may change. ``dtype``: the model's.
    """
    taken: dict[str, list[tuple[int, int]]] = {}
    for update in adapter.updates:
        _validate_update(update, *_sizes(update.linear, linears, embedding), dtype)
        begin, end = update.row, update.row + int(update.b_RO.shape[1])
        if any(begin < other_end and other < end for other, other_end in taken.get(update.linear, [])):
            raise InvalidArgument(
                f"two updates of {update.linear!r} overlap in its outputs {begin} to {end - 1}; expected one for each output"
            )
        taken.setdefault(update.linear, []).append((begin, end))
    for name, table in adapter.tables.items():
        if name not in ("embed", "head"):
            raise Unsupported(f"a whole table for {name!r}; only 'embed' and 'head' can have one")
        inputs, outputs = _sizes(name, linears, embedding)
        shape = (inputs, outputs) if name == "embed" else (outputs, inputs)
        if tuple(table.shape) != shape:
            raise InvalidArgument(f"the table for {name!r} is {list(table.shape)}; expected {list(shape)}")
        _validate_tensor(f"the table for {name!r}", table, dtype)
        if name in taken:
            raise InvalidArgument(f"both a table for {name!r} and a low-rank update of it; expected one of them")


def _sizes(name: str, linears: Mapping[str, Linear], embedding: Embedding | None) -> tuple[int, int]:
    """Return the numbers of input and output features of a map; V and E for the embedding."""
    if name == "embed" and embedding is not None:
        vocabulary, width = embedding.weight.shape
        return int(vocabulary), int(width)
    if name not in linears:
        raise Unsupported(
            f"an adapter cannot change {name!r} of this model: it is none of its plain linear maps; leave it out of the adapter"
        )
    return linears[name].in_features, linears[name].out_features


def _validate_update(update: LowRankUpdate, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    name, a_RI, b_RO = update.linear, update.a_RI, update.b_RO
    found = f"A {list(a_RI.shape)}, B transposed {list(b_RO.shape)} for {name!r} from output {update.row} on"
    if a_RI.dim() != 2 or b_RO.dim() != 2 or a_RI.shape[0] != b_RO.shape[0]:
        raise InvalidArgument(f"{found}; expected [rank, inputs] and [rank, outputs]")
    if not update.rank or not b_RO.shape[1]:
        raise InvalidArgument(f"{found}; expected a rank and outputs of at least 1")
    if a_RI.shape[1] != inputs or update.row < 0 or update.row + b_RO.shape[1] > outputs:
        raise InvalidArgument(f"{found}; the map has {inputs} inputs and {outputs} outputs")
    _validate_tensor(f"A for {name!r}", a_RI, dtype)
    _validate_tensor(f"B for {name!r}", b_RO, dtype)


def _validate_tensor(what: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise InvalidArgument(
            f"{what} is {tensor.dtype} on {tensor.device}; expected {dtype}, the model's, on the host"
        )
