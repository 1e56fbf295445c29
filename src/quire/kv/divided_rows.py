"""Rows of K and V that ranks divide: each has some heads of the layers of its stage. Whole rows
from parts, parts of whole rows.

All ranks have the same sequences in the same pages. So rank 0 knows the slots of every row, and
asks the others by slots alone. Its verbs take and return rows of all heads, as one process does.

Letters: N rows; H heads; D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.types import SeqId
from quire.contracts.layers import LayerSpec
from quire.contracts.ranks import Grid, PeerRows, Share


@dataclass(frozen=True, slots=True, eq=False)
class DividedRows:
    """The division of all rows, as one rank sees it."""

    grid: Grid
    rank: int
    specs: Sequence[LayerSpec]
    """The model's layers with all heads; empty if no layer is divided."""
    peers: PeerRows | None
    """The rows of the other ranks; None on these."""
    owners: Mapping[int, int] = field(default_factory=dict)
    """By layer id the stage that holds it; those that are not named: the first one."""

    @property
    def share(self) -> Share:
        return self.grid.share(self.rank)

    @property
    def absent(self) -> frozenset[int]:
        """The layers of other stages."""
        own = self.grid.stage(self.rank)
        return frozenset(layer for layer, stage in self.owners.items() if stage != own)

    def join(
        self,
        layer_id: int,
        place: tuple[int, int],
        slots_N: NDArray[np.int64],
        take: Callable[[], Mapping[str, Tensor]],
        own: Shapes,
        whole: Shapes,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Return planes of all heads. ``take`` returns those of this rank's heads, in these slots;
        ``own``, ``whole``: the shapes of one rank's planes, and with all heads, without N."""
        axes = {name: _axis(shape, whole[name]) for name, shape in own.items()}
        of = {name: self._holders(layer_id, own[name], axis, whole[name]) for name, axis in axes.items()}
        ranks = sorted({rank for holders in of.values() for rank in holders})
        others = [rank for rank in ranks if rank != self.rank]
        found = dict(zip(others, self._peers().take(place, slots_N, others), strict=True)) if others else {}
        if self.rank in ranks:
            found[self.rank] = take()
        joined: dict[str, Tensor] = {}
        for name, axis in axes.items():
            parts = [found[rank][name].to(device) for rank in of[name]]
            joined[name] = torch.cat(parts, axis + 1) if axis is not None else parts[0]
        return joined

    def put(
        self,
        seq: SeqId,
        layer_id: int,
        place: tuple[int, int],
        slots_N: NDArray[np.int64],
        planes: Mapping[str, Tensor],
        own: Shapes,
    ) -> Mapping[str, Tensor]:
        """Write the other ranks' parts of planes of all heads; return this rank's, empty if it has
        none. ``own``: shapes of the planes of one rank's heads, without N."""
        first = self._first(layer_id)
        parts: dict[int, Mapping[str, Tensor]] = {
            first + slice: {name: self._cut(plane, own[name], slice) for name, plane in planes.items()}
            for slice in range(self.grid.slices)
        }
        here = parts.pop(self.rank, {})
        if parts:
            self._peers().put(seq, place, slots_N, parts)
        return here

    def heads_of(self, slice: int, rows_NHD: Tensor, count: int) -> Tensor:
        """Return a slice's heads, ``count`` of them, of rows of all heads."""
        return rows_NHD.narrow(-2, self._piece(rows_NHD.shape[-2] // count, slice) * count, count)

    def _peers(self) -> PeerRows:
        if self.peers is None:
            raise QuireError(f"rank {self.rank} of {self.grid.size} reads its own rows only; rank 0 has those of all")
        return self.peers

    def _first(self, layer_id: int) -> int:
        """Return the first rank of the stage that holds a layer."""
        return self.owners.get(layer_id, 0) * self.grid.slices

    def _piece(self, pieces: int, slice: int) -> int:
        """Return the piece of ``pieces`` that a slice holds, as ``weights.places`` divides."""
        return slice * pieces // self.grid.slices

    def _holders(self, layer_id: int, own: tuple[int, ...], axis: int | None, whole: tuple[int, ...]) -> list[int]:
        """Return the first rank with each piece of a plane."""
        first = self._first(layer_id)
        if axis is None:
            return [first]
        pieces = whole[axis] // own[axis]
        return [first + piece * self.grid.slices // pieces for piece in range(pieces)]

    def _cut(self, plane: Tensor, own: tuple[int, ...], slice: int) -> Tensor:
        axis = _axis(own, plane.shape[1:])
        if axis is None:
            return plane
        size = own[axis]
        return plane.narrow(axis + 1, self._piece(plane.shape[axis + 1] // size, slice) * size, size).contiguous()


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of planes by name, for one row."""


def _axis(own: Sequence[int], whole: Sequence[int]) -> int | None:
    """Return the dimension along which a plane is divided; None: it is not."""
    return next((axis for axis, (one, all_) in enumerate(zip(own, whole, strict=True)) if one != all_), None)
