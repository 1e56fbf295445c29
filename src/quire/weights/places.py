"""Places: which rows of which parameter a tensor of a checkpoint fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from quire.base.errors import QuireError
from quire.contracts.weights import StoredTensor, WeightFormat
from quire.weights.floats import FLOATS


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Rows ``row`` to ``row + shape[0]`` of a parameter, filled by weights of this shape."""

    parameter: str
    shape: tuple[int, ...]
    row: int = 0
    format: WeightFormat = FLOATS
    """How the checkpoint stores the weights."""
    dtype: torch.dtype | None = None
    """Element type of a parameter that must not be rounded to the model's; None: the model's."""

    def stored(self, name: str) -> Mapping[str, StoredTensor]:
        """Return the tensors of the checkpoint that fill this place, the tensor ``name`` first."""
        return self.format.stored(name, self.shape)


NameTable: TypeAlias = Mapping[str, Place]
"""Checkpoint tensor name to place. ``{}`` in names and parameters stands for every layer."""


def expand(table: NameTable, num_layers: int) -> dict[str, Place]:
    """Return the table with each name that holds ``{}`` repeated for every layer."""
    places = {}
    for name, place in table.items():
        for layer in range(num_layers) if "{}" in name else (0,):
            places[name.format(layer)] = replace(place, parameter=place.parameter.format(layer))
    return places


def parameter_shapes(places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Return every parameter's shape; raise ``QuireError`` for rows unfilled or filled twice."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, place in sorted(places.items(), key=lambda item: (item[1].parameter, item[1].row)):
        rows, *rest = shapes.get(place.parameter, (0, *place.shape[1:]))
        if place.row != rows or tuple(rest) != place.shape[1:]:
            raise QuireError(f"name table: {name} does not continue {place.parameter} at row {rows}")
        shapes[place.parameter] = (rows + place.shape[0], *rest)
    return shapes


def parameter_dtypes(places: Mapping[str, Place]) -> dict[str, torch.dtype]:
    """Return the dtypes of the parameters that must not be rounded to the model's."""
    return {place.parameter: place.dtype for place in places.values() if place.dtype is not None}
