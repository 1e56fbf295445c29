"""An import under way: what was promised, and what has not come yet. No torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.kv.forward_need import slots_in
from quire.kv.pages import PageIds

if TYPE_CHECKING:
    from quire.base.host_link import Event, HostLink


@dataclass(slots=True, eq=False)
class Import:
    """The import of one sequence.

    Its rows may be written by another thread while a forward is open. So the pages are a copy, and
    the writer holds the lock; a thread that frees the pages waits for it.
    """

    rows: dict[int, list[range]]
    """Expected positions of each layer with pages; of cross layers that are set, encoder rows."""
    checksums: dict[tuple[int, str], str]
    """By layer and name, of whole groups; none where the writer made none."""
    missing: dict[int, list[range]]
    """The ``rows`` that have not come, by layer; [] for a recurrent layer. A layer that has come is
    not in it."""
    pages: list[PageIds] = field(default_factory=list)
    """The page table of each layer class."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ready: Event | None = None
    """On a device: when the pages are free of what it was computing as they were taken."""
    arrived: dict[int, Event] = field(default_factory=dict)
    """On a device: when what a layer was given is there, by layer."""
    _slots: tuple[object, NDArray[np.int64]] | None = None
    """The last answer of ``slots``."""

    def slots(self, index: int, parts: Sequence[range], page_size: int) -> NDArray[np.int64]:
        """Return the slots of positions in a layer class; the layers of a class ask for the same
        ones, and get the same array."""
        wanted = (index, *parts)
        if self._slots is None or self._slots[0] != wanted:
            self._slots = wanted, slots_in(self.pages[index], parts, page_size)
        return self._slots[1]

    def let_wait(self, link: HostLink | None, layer: int) -> None:
        """Make later work on the device wait until a layer's imported rows have arrived."""
        if link is not None and (arrived := self.arrived.get(layer)) is not None:
            link.compute_waits(arrived)

    def has_come(self, layer: int, part: range) -> None:
        """Note rows that were missing."""
        left: list[range] = []
        for one in self.missing[layer]:
            left += [range(one.start, min(one.stop, part.start)), range(max(one.start, part.stop), one.stop)]
        self.missing[layer] = [piece for piece in left if piece]
        if not self.missing[layer]:
            del self.missing[layer]
