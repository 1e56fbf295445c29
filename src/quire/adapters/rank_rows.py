"""Placement of adapters in the rank rows of the device. It moves no tensors.

An adapter of rank r takes r consecutive rank rows, the same in all linear maps. Adapters that a
forward does not use are evicted, the least recently used first. If enough rank rows are free but
not in one run, all adapters are placed anew: the host can write each of them again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """The placement of adapters in the rank rows."""

    first: Mapping[int, int]
    """The first rank row of each adapter, by id, least recently used first."""
    written: tuple[int, ...]
    """Ids of the adapters that must be written to their rank rows."""


def arrange(
    first: Mapping[int, int], ranks: Mapping[int, int], wanted: Collection[int], capacity: int, *, evict: bool
) -> Arrangement | None:
    """Place the adapters ``wanted``. None if they do not fit, or fit only by an eviction that
    ``evict`` does not allow. ``first``: the present placement, as in ``Arrangement``. ``ranks``:
    the ranks of all these ids."""
    if sum(ranks[one] for one in wanted) > capacity:
        return None
    kept, written = dict(first), []
    for adapter in wanted:
        if adapter in kept:
            continue
        while (place := _gap(kept, ranks, ranks[adapter], capacity)) is None:
            idle = next((one for one in kept if one not in wanted and ranks[one]), None)
            if not evict:
                return None
            if idle is None:
                return _anew(first, kept, ranks, wanted)
            del kept[idle]
        kept[adapter] = place
        written.append(adapter)
    return Arrangement(first=kept, written=tuple(written))


def _gap(first: Mapping[int, int], ranks: Mapping[int, int], rank: int, capacity: int) -> int | None:
    """Return the first row of the lowest free run of ``rank`` rank rows; None: there is none."""
    begin = 0
    for start, end in sorted((start, start + ranks[one]) for one, start in first.items() if ranks[one]):
        if start - begin >= rank:
            return begin
        begin = end
    return begin if capacity - begin >= rank else None


def _anew(
    first: Mapping[int, int], kept: Mapping[int, int], ranks: Mapping[int, int], wanted: Collection[int]
) -> Arrangement:
    """Place all ``wanted`` adapters anew. Of the others only those of rank 0 stay."""
    places = {one: start for one, start in kept.items() if one not in wanted}
    begin = 0
    for adapter in sorted(wanted, key=lambda one: (kept.get(one, first.get(one, 1 << 62)), one)):
        places[adapter] = begin
        begin += ranks[adapter]
    return Arrangement(first=places, written=tuple(one for one in places if first.get(one) != places[one]))
