"""Where adapters lie in the rank rows of the device. It moves no tensors.

An adapter of rank r takes r consecutive rank rows, the same in all linear maps. Those that a
forward does not use give way, the least recently used one first. If there are enough rank rows but
no long enough run of them, all are laid out anew: the host can write each again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """What is to be on the device."""

    first: Mapping[int, int]
    """The first rank row of each adapter, by id, the least recently used one first."""
    written: tuple[int, ...]
    """Adapters that are to be written there."""


def arrange(
    first: Mapping[int, int], ranks: Mapping[int, int], wanted: Collection[int], capacity: int, *, evict: bool
) -> Arrangement | None:
    """Place ``wanted``; None if that takes an eviction that ``evict`` does not allow, or cannot be.
    ``first``: as of ``Arrangement``, what is there now. ``ranks``: of all of these ids."""
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
    """Return the lowest free run of ``rank`` rank rows."""
    begin = 0
    for start, end in sorted((start, start + ranks[one]) for one, start in first.items() if ranks[one]):
        if start - begin >= rank:
            return begin
        begin = end
    return begin if capacity - begin >= rank else None


def _anew(
    first: Mapping[int, int], kept: Mapping[int, int], ranks: Mapping[int, int], wanted: Collection[int]
) -> Arrangement:
    """Place all of ``wanted`` anew; of the others only those without rank rows stay."""
    places = {one: start for one, start in kept.items() if one not in wanted}
    begin = 0
    for adapter in sorted(wanted, key=lambda one: (kept.get(one, first.get(one, 1 << 62)), one)):
        places[adapter] = begin
        begin += ranks[adapter]
    return Arrangement(first=places, written=tuple(one for one in places if first.get(one) != places[one]))
