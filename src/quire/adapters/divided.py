"""Adapters of a model that ranks divide: the part of each rank, as its part of the weights.

Of a map whose rows are divided, a rank has all of A, and the columns of B for its outputs. Of a map
whose columns are divided, it has the columns of A for its inputs, and all of B: the ranks add their
products. The embedding is on all ranks. The logits are the first slice's, and so is a change of the
head. A stage keeps the changes of all maps, and applies those of its own (``AdapterPool``).
"""

from __future__ import annotations

from dataclasses import replace

from quire.adapters.targets import EMBED, HEAD
from quire.contracts.adapters import Adapter, LowRankUpdate
from quire.contracts.ranks import Grid, PeerAdapters
from quire.weights.places import NameTable


class DividedAdapters:
    """Divides the adapters of one model among its ranks."""

    def __init__(self, places: NameTable, grid: Grid, peers: PeerAdapters) -> None:
        """``places``: those of one rank's model; ``grid``: the ranks; ``peers``: the others, which
        keep their parts."""
        self.peers = peers
        self._grid = grid
        self._places = {
            (place.parameter.removesuffix(".weight"), place.whole.row): place
            for place in places.values()
            if place.whole is not None
        }

    def parts(self, adapter: Adapter) -> list[Adapter]:
        """Return the part of each rank of a whole adapter. All have its fingerprint and ranks."""
        parts = [self._part(adapter, slice) for slice in range(self._grid.slices)]
        return parts * self._grid.stages

    def _part(self, adapter: Adapter, slice: int) -> Adapter:
        updates = tuple(self._update(update, slice) for update in adapter.updates)
        tables = {name: table for name, table in adapter.tables.items() if not (slice and name == HEAD)}
        return replace(adapter, updates=updates, tables=tables)

    def _update(self, update: LowRankUpdate, slice: int) -> LowRankUpdate:
        if update.linear == HEAD:
            # One column of it, so that steps that are too much for rank 0 are too much for all.
            return replace(update, b_RO=update.b_RO[:, :1].contiguous()) if slice else update
        place = self._places.get((update.linear, update.row))
        if update.linear == EMBED or place is None or place.whole is None:
            return update
        own = replace(place, share=self._grid.share(slice))
        rows, columns = (one != whole for one, whole in zip(place.shape, place.whole.shape, strict=True))
        return replace(
            update,
            row=place.row,
            a_RI=own.cut(update.a_RI).contiguous() if columns else update.a_RI,
            b_RO=own.cut(update.b_RO.T).T.contiguous() if rows else update.b_RO,
        )
