"""Rows of K and V of which each rank holds some heads: whole rows from parts, parts of whole rows.

All ranks have the same sequences in the same pages. So rank 0 knows the slots of every row, and
asks the others by slots alone. Its verbs take and return rows of all heads, as one process does.

Letters: N rows; H heads; D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.types import SeqId
from quire.contracts.layers import LayerSpec
from quire.contracts.ranks import PeerRows, Share


@dataclass(frozen=True, slots=True, eq=False)
class DividedRows:
    """The division of all rows, as one rank sees it."""

    share: Share
    specs: Sequence[LayerSpec]
    """The model's layers with all heads."""
    peers: PeerRows | None
    """The rows of the other ranks; None on these."""

    def join(
        self,
        place: tuple[int, int],
        slots_N: NDArray[np.int64],
        own: Mapping[str, Tensor],
        whole: Mapping[str, tuple[int, ...]],
    ) -> dict[str, Tensor]:
        """Return planes of all heads. ``own``: those of this rank's heads, in these slots;
        ``whole``: their shapes with all heads, without N."""
        axes = {name: _axis(plane.shape[1:], whole[name]) for name, plane in own.items()}
        ranks = sorted({rank for name, axis in axes.items() for rank in self._owners(own[name], axis, whole[name])})
        others = [rank for rank in ranks if rank != self.share.rank]
        found = dict(zip(others, self._peers().take(place, slots_N, others), strict=True)) if others else {}
        found[self.share.rank] = dict(own)
        joined: dict[str, Tensor] = {}
        for name, axis in axes.items():
            parts = [found[rank][name].to(own[name].device) for rank in self._owners(own[name], axis, whole[name])]
            joined[name] = torch.cat(parts, axis + 1) if axis is not None else parts[0]
        return joined

    def put(
        self, seq: SeqId, place: tuple[int, int], slots_N: NDArray[np.int64], planes: Mapping[str, Tensor], own: Shapes
    ) -> dict[str, Tensor]:
        """Write the other ranks' parts of planes of all heads; return this rank's. ``own``: shapes
        of the planes of one rank's heads, without N."""
        parts = [
            {name: self._cut(plane, own[name], rank) for name, plane in planes.items()}
            for rank in range(self.share.size)
        ]
        self._peers().put(seq, place, slots_N, parts)
        return parts[self.share.rank]

    def heads_of(self, rank: int, rows_NHD: Tensor, count: int) -> Tensor:
        """Return a rank's heads, ``count`` of them, of rows of all heads."""
        return rows_NHD.narrow(-2, self._piece(rows_NHD.shape[-2] // count, rank) * count, count)

    def _peers(self) -> PeerRows:
        if self.peers is None:
            raise QuireError(f"{self.share} reads and writes rows of its own heads only; rank 0 has those of all")
        return self.peers

    def _piece(self, pieces: int, rank: int) -> int:
        """Return the piece of ``pieces`` that a rank holds, as ``weights.places`` divides."""
        return rank * pieces // self.share.size

    def _owners(self, own: Tensor, axis: int | None, whole: tuple[int, ...]) -> list[int]:
        """Return the first rank with each piece of a plane."""
        if axis is None:
            return [self.share.rank]
        pieces = whole[axis] // own.shape[axis + 1]
        return [piece * self.share.size // pieces for piece in range(pieces)]

    def _cut(self, plane: Tensor, own: tuple[int, ...], rank: int) -> Tensor:
        axis = _axis(own, plane.shape[1:])
        if axis is None:
            return plane
        size = own[axis]
        return plane.narrow(axis + 1, self._piece(plane.shape[axis + 1] // size, rank) * size, size).contiguous()


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of planes by name, for one row."""


def _axis(own: Sequence[int], whole: Sequence[int]) -> int | None:
    """Return the dimension along which a plane is divided; None: it is not."""
    return next((axis for axis, (one, all_) in enumerate(zip(own, whole, strict=True)) if one != all_), None)
