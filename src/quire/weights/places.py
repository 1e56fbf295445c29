"""Places: which rows of which parameter a tensor of a checkpoint fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from quire.base.errors import QuireError
from quire.contracts.ranks import Share
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
    parts: tuple[int, ...] = ()
    """Numbers of rows of the parts, as query, key and value heads, that ranks divide each on its
    own; empty: all rows are one part. The rows of stacked matrices ``[X, O, I]`` are O, those of a
    convolution ``[C, 1, W]`` are its channels."""
    is_sum: bool = False
    """Whether all ranks add this to one sum, so that only rank 0 may hold its values: the bias of a
    map whose columns are divided."""
    whole: Place | None = None
    """The place in the whole model, if this is a rank's; the files hold that."""
    share: Share | None = None
    """The rank; given with ``whole``."""

    def stored(self, name: str) -> Mapping[str, StoredTensor]:
        """Return the tensors of the checkpoint that fill this place, the tensor ``name`` first."""
        return self.format.stored(name, self.shape if self.whole is None else self.whole.shape)

    def cut(self, weights: Tensor) -> Tensor:
        """Return the rank's part of the whole weights; all of them if there are no ranks.

        A dimension that is shorter than in the whole model is divided. If it has fewer units than
        there are ranks, as few KV heads do, neighbouring ranks hold the same one.
        """
        if self.whole is None or self.share is None:
            return weights
        if self.is_sum:
            return weights if self.share.rank == 0 else torch.zeros_like(weights)
        for axis, (wide, own) in enumerate(zip(self.whole.shape, self.shape, strict=True)):
            if wide != own:
                several = sum(self.parts) == own
                sizes = zip(self.whole.parts, self.parts, strict=True) if several else [(wide, own)]
                weights, start, found = weights, 0, []
                for part, kept in sizes:
                    found.append(
                        weights.narrow(axis, start + self.share.rank * (part // kept) // self.share.size * kept, kept)
                    )
                    start += part
                weights = torch.cat(found, axis) if several else found[0]
        return weights

    def cut_rows(self, rows: Tensor) -> Tensor:
        """Return the rank's part of rows whose columns are not divided."""
        if self.whole is None:
            return rows
        (*own, _), (*wide, _) = self.shape, self.whole.shape
        return replace(self, shape=(*own, 1), whole=replace(self.whole, shape=(*wide, 1))).cut(rows)

    def cut_stored(self, rows: Tensor, unit: int, size: int = 1) -> Tensor | None:
        """Return the rank's part of stored rows, of which ``size`` elements stand for ``unit``
        weights; None if it does not begin and end between units."""
        if self.whole is None:
            return rows
        (*own, inner), (*wide, outer) = self.shape, self.whole.shape
        if inner != outer and inner % unit:
            return None
        inner, outer = (-(-count // unit) * size for count in (inner, outer))
        return replace(self, shape=(*own, inner), whole=replace(self.whole, shape=(*wide, outer))).cut(rows)


NameTable: TypeAlias = Mapping[str, Place]
"""Checkpoint tensor name to place. ``{}`` in names and parameters stands for every layer."""


def expand(table: NameTable, num_layers: int) -> dict[str, Place]:
    """Return the table with each name that holds ``{}`` repeated for every layer."""
    places = {}
    for name, place in table.items():
        for layer in range(num_layers) if "{}" in name else (0,):
            places[name.format(layer)] = replace(place, parameter=place.parameter.format(layer))
    return places


def divided(whole: Mapping[str, Place], own: NameTable, share: Share) -> dict[str, Place]:
    """Return the places of a rank's model, which know what the files hold. ``own``: the name table
    of its sizes, expanded, without the tensors that other ranks alone have."""
    return {
        name: replace(place, format=whole[name].format, dtype=whole[name].dtype, whole=whole[name], share=share)
        for name, place in own.items()
    }


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
