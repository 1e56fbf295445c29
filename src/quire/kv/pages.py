"""Pages and their references, without their contents. No torch.

A page is P consecutive slots in every layer of one layer class. Its reference count is the number
of page-table entries that name it, plus one for each hand-over that is being received into it. At
zero the page is free. Requests, sessions, the prefix cache, KV caches, hand-overs and pending
writes to a store own sequences, among others.

All references are taken and dropped in ``sequence_table``. Taken: by a forward, a fork, an import,
a hand-over. Dropped: when the sequence is removed, when it goes back (``_trim``), when its window
has passed a page (``_leave``), when it gets a copy of a shared page that it writes, when a forward
is aborted. Pages of encoder rows (``encoders``) and slots of recurrent states (``recurrent_table``)
are counted in the same way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import QuireError

PageIds = NDArray[np.int32]

NULL_PAGE = -1
"""Table entry of a page that no query can see any more: never read, never written, in no pool."""


class PagePool:
    """A fixed number of pages with reference counts. Callers check ``num_free`` before taking."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = np.zeros(num_pages, dtype=np.int32)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, count: int) -> PageIds:
        """Take ``count`` free pages, with one reference each, ascending if unfragmented."""
        if count > self.num_free:
            raise QuireError(f"{count} pages taken with {self.num_free} free; the caller must check first")
        low = self.num_free - count
        pages = self._free[low : self.num_free][::-1].copy()
        self.num_free = low
        self.references[pages] = 1
        return pages

    def share(self, pages: PageIds) -> None:
        """Add a reference to each page. ``pages`` holds no page twice; null pages are skipped."""
        self.references[pages if pages.size == 0 or pages.min() >= 0 else pages[pages >= 0]] += 1

    def release(self, pages: PageIds) -> None:
        """Drop a reference to each page. ``pages`` holds no page twice; null pages are skipped."""
        if pages.size == 0:
            return
        held = pages if pages.min() >= 0 else pages[pages >= 0]
        left = self.references[held] - 1
        self.references[held] = left
        freed = held[left == 0]
        # Reversed, so that a run that was contiguous is handed out contiguous again.
        self._free[self.num_free : self.num_free + freed.size] = freed[::-1]
        self.num_free += freed.size

    def clear(self) -> None:
        """Free all pages, in ascending order again."""
        self.references[:] = 0
        self._free[:] = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = self.num_pages

    def check(self, expected_references: NDArray[np.int32]) -> None:
        """Compare with a recount; ``QuireError`` names the first page that differs."""
        wrong = np.flatnonzero(self.references != expected_references)
        if wrong.size:
            page = int(wrong[0])
            raise QuireError(
                f"page {page} has reference count {self.references[page]}, but {expected_references[page]} entries name it"
            )
        free = self._free[: self.num_free]
        if np.unique(free).size != free.size:
            raise QuireError("a page is in the free list twice")
        if self.references[free].any() or int((self.references == 0).sum()) != free.size:
            raise QuireError("the free list is not the set of pages without references")


class PageTable:
    """The pages of one sequence in one layer class, by position: a growable int32 array."""

    __slots__ = ("_pages", "size")

    def __init__(self, pages: PageIds | None = None) -> None:
        self._pages: PageIds = np.empty(4, dtype=np.int32) if pages is None else pages
        self.size = 0 if pages is None else pages.size

    @property
    def pages(self) -> PageIds:
        """Return a view of the entries, which is valid until the table changes."""
        return self._pages[: self.size]

    def page(self, index: int) -> int:
        """Return the page at an index."""
        return self._pages.item(index)

    @property
    def held(self) -> PageIds:
        """Return the entries that are not null pages."""
        pages = self.pages
        return pages if pages.size == 0 or pages.min() >= 0 else pages[pages >= 0]

    def append(self, pages: PageIds) -> None:
        size = self.size + pages.size
        if size > self._pages.size:
            grown = np.empty(max(size, 2 * self._pages.size), dtype=np.int32)
            grown[: self.size] = self.pages
            self._pages = grown
        self._pages[self.size : size] = pages
        self.size = size

    def replace(self, index: int, page: int) -> None:
        self._pages[index] = page

    def evict(self, part: range) -> PageIds:
        """Make these entries null pages; return the old entries."""
        old = self._pages[part.start : part.stop].copy()
        self._pages[part.start : part.stop] = NULL_PAGE
        return old

    def truncate(self, size: int) -> PageIds:
        """Forget the entries from ``size`` on and return them."""
        tail = self._pages[size : self.size].copy()
        self.size = size
        return tail

    def fork(self, size: int) -> PageTable:
        """Return a table with a copy of the first ``size`` entries."""
        return PageTable(self._pages[:size].copy())
