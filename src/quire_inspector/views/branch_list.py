"""Branches of a reading as they are shown: their pages counted, what they hold. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pool_verbs import SequencePages
from quire.contracts.views import BranchView, HeldRows
from quire_inspector.views.state_reading import ReadBranch, StateReading
from quire_inspector.views.viewer import Viewer


class BranchList:
    """All branches of one reading. Cost O(branches, and entries of page tables), once."""

    def __init__(self, reading: StateReading) -> None:
        self.reading = reading
        self._pages, self._shared = _counted(reading)
        self._views = [self._view(one) for one in reading.branches]

    def shown(self, viewer: Viewer) -> list[tuple[ReadBranch, BranchView]]:
        """Return the branches that a viewer sees, as it calls them."""
        found = []
        for branch, view in zip(self.reading.branches, self._views, strict=True):
            if viewer.sees(branch):
                found.append((branch, replace(view, id=viewer.id_of(branch))))
        return found

    def kinds(self) -> dict[str, int]:
        """Return numbers of branches by kind."""
        return dict(Counter(one.kind for one in self.reading.branches))

    def _view(self, branch: ReadBranch) -> BranchView:
        pages = self.reading.pages_of(branch)
        if pages is None or branch.seq is None:
            return shown_unread(branch)
        place = self.reading.places[branch.seq]
        return replace(
            shown_unread(branch),
            pages=int(self._pages[place]),
            shared_pages=int(self._shared[place]),
            reachable=pages.reachable,
            checkpoints=_standing(pages),
            held=_held(pages),
        )


def _held(pages: SequencePages) -> tuple[HeldRows, ...]:
    return tuple(HeldRows(pool=pool, ranges=ranges) for pool, ranges in enumerate(pages.held))


SAME = ("id", "kind", "name", "computed", "busy", "pinned", "modified", "exact", "adapter", "window", "last_commit")
"""Fields of a view that the branch has under the same names."""


def shown_unread(branch: ReadBranch) -> BranchView:
    """Return a branch without what it holds in the pool."""
    return BranchView(num_tokens=branch.length, **{name: getattr(branch, name) for name in SAME})


def _standing(pages: SequencePages) -> tuple[int, ...]:
    """Return the positions of recurrent states, each once."""
    return tuple(sorted(set(pages.state_positions.tolist())))


def _counted(reading: StateReading) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two counts by sequence: its pages of rows, and the shared ones among them."""
    held = np.zeros(len(reading.seqs), dtype=np.int64)
    shared = held.copy()
    for pool, facts in enumerate(reading.facts):
        tables = [one.tables[pool] for one in reading.pages]
        if facts.kind == "states" or not tables:
            continue
        pages = np.concatenate(tables)
        seqs = np.repeat(np.arange(len(tables)), [table.size for table in tables])[pages >= 0]
        pages = pages[pages >= 0]
        holders = np.bincount(pages, minlength=facts.num_pages)
        held += np.bincount(seqs, minlength=held.size)
        shared += np.bincount(seqs[holders[pages] > 1], minlength=held.size)
    return held, shared
