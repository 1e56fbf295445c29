"""Rows of K and V, and recurrent states, that ranks divide: each has some heads of the layers of
its stage. Whole rows from parts, parts of whole rows.

All ranks have the same sequences in the same pages. So rank 0 knows the slots of every row, and
asks the others by slots alone. Its verbs take and return rows of all heads, as one process does.

Letters: N rows; H heads; D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

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
        own: Planes,
        whole: Planes,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Return planes of all heads. ``take`` returns those of this rank's heads, in these slots;
        ``own``, ``whole``: the planes of one rank, and those with all heads."""
        first = self._first(layer_id)
        pieces = {name: self._pieces(plane, whole[name]) for name, plane in own.items()}
        ranks = sorted({first + piece.slice for parts in pieces.values() for piece in parts})
        others = [rank for rank in ranks if rank != self.rank]
        found = dict(zip(others, self._peers().take(place, slots_N, others), strict=True)) if others else {}
        if self.rank in ranks:
            found[self.rank] = take()
        joined: dict[str, Tensor] = {}
        for name, parts in pieces.items():
            rows = [piece.of(found[first + piece.slice][name]).to(device) for piece in parts]
            joined[name] = torch.cat(rows, parts[0].axis) if len(rows) > 1 else rows[0]
        return joined

    def put(
        self,
        seq: SeqId,
        layer_id: int,
        place: tuple[int, int],
        slots_N: NDArray[np.int64],
        planes: Mapping[str, Tensor],
        own: Planes,
        whole: Planes,
    ) -> Mapping[str, Tensor]:
        """Write the other ranks' parts of planes of all heads; return this rank's, empty if it has
        none. ``own``, ``whole``: the planes of one rank, and those with all heads."""
        first = self._first(layer_id)
        parts: dict[int, Mapping[str, Tensor]] = {
            first + slice: {name: self.part_of(slice, plane, own[name], whole[name]) for name, plane in planes.items()}
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

    def part_of(self, slice: int, rows_N: Tensor, own: Plane, whole: Plane) -> Tensor:
        """Return a slice's part of rows of all heads."""
        axis, parts = _division(own, whole)
        if not parts:
            return rows_N
        starts = accumulate((wide for wide, _ in parts), initial=0)
        cut = [
            rows_N.narrow(axis, start + self._piece(wide // size, slice) * size, size)
            for start, (wide, size) in zip(starts, parts, strict=False)
        ]
        return torch.cat(cut, axis) if len(cut) > 1 else cut[0].contiguous()

    def _pieces(self, own: Plane, whole: Plane) -> list[_Piece]:
        """Return the pieces of a plane of all heads, in order, each as the first slice with it
        has it."""
        axis, parts = _division(own, whole)
        if not parts:
            return [_Piece(0, 0, 0, None)]
        starts = accumulate((size for _, size in parts), initial=0)
        return [
            _Piece(piece * self.grid.slices // (wide // size), axis, start, size)
            for start, (wide, size) in zip(starts, parts, strict=False)
            for piece in range(wide // size)
        ]


class Plane(NamedTuple):
    """What a plane keeps of one row, or of one state."""

    shape: tuple[int, ...]
    parts: tuple[int, ...] = ()
    """Sizes of parts of the last dimension that are divided each; empty: it is one part."""


Planes = Mapping[str, Plane]
"""By name."""


class _Piece(NamedTuple):
    """Columns of a slice's rows."""

    slice: int
    axis: int
    """Of rows ``[N, ...]``."""
    start: int
    size: int | None
    """None: all."""

    def of(self, rows_N: Tensor) -> Tensor:
        return rows_N if self.size is None else rows_N.narrow(self.axis, self.start, self.size)


def _division(own: Plane, whole: Plane) -> tuple[int, list[tuple[int, int]]]:
    """Return the dimension of rows ``[N, ...]`` along which a plane is divided, and the sizes of
    its parts with all heads and on one rank; no parts: it is not divided."""
    for axis, (size, wide) in enumerate(zip(own.shape, whole.shape, strict=True)):
        if size != wide:
            return axis + 1, list(zip(whole.parts, own.parts, strict=True)) if whole.parts else [(wide, size)]
    return 0, []
