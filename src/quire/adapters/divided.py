"""Adapters of a model that ranks divide: the part of each rank, as its part of the weights.

Of a map whose rows are divided, a rank has all of A, and the columns of B for its outputs. Of a map
whose columns are divided, it has the columns of A for its inputs, and all of B: the ranks add their
products. The embedding is on all ranks. The logits are rank 0's, and so is a change of the head.
"""

from __future__ import annotations

from dataclasses import replace

from quire.adapters.targets import EMBED, HEAD
from quire.contracts.adapters import Adapter, LowRankUpdate
from quire.contracts.ranks import PeerAdapters, Share
from quire.weights.places import NameTable


class DividedAdapters:
    """Divides the adapters of one model among its ranks."""

    def __init__(self, places: NameTable, size: int, peers: PeerAdapters) -> None:
        """``places``: those of one rank's model; ``size``: number of ranks; ``peers``: the others,
        which keep their parts."""
        self.peers = peers
        self._size = size
        self._places = {
            (place.parameter.removesuffix(".weight"), place.whole.row): place
            for place in places.values()
            if place.whole is not None
        }

    def parts(self, adapter: Adapter) -> list[Adapter]:
        """Return the part of each rank of a whole adapter. All have its fingerprint and ranks."""
        return [self._part(adapter, rank) for rank in range(self._size)]

    def _part(self, adapter: Adapter, rank: int) -> Adapter:
        updates = tuple(self._update(update, rank) for update in adapter.updates)
        tables = {name: table for name, table in adapter.tables.items() if not (rank and name == HEAD)}
        return replace(adapter, updates=updates, tables=tables)

    def _update(self, update: LowRankUpdate, rank: int) -> LowRankUpdate:
        if update.linear == HEAD:
            # One column of it, so that steps that are too much for rank 0 are too much for all.
            return replace(update, b_RO=update.b_RO[:, :1].contiguous()) if rank else update
        place = self._places.get((update.linear, update.row))
        if update.linear == EMBED or place is None or place.whole is None:
            return update
        own = replace(place, share=Share(rank, self._size))
        rows, columns = (one != whole for one, whole in zip(place.shape, place.whole.shape, strict=True))
        return replace(
            update,
            row=place.row,
            a_RI=own.cut(update.a_RI).contiguous() if columns else update.a_RI,
            b_RO=own.cut(update.b_RO.T).T.contiguous() if rows else update.b_RO,
        )
