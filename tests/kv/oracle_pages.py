"""Pages of the naive KV state: who holds which, by number of holders. Their ids are the oracle's
own.

A table names the pages of one sequence in one layer class in order of address; None is a page that
was given up because no query can see it any more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Table = list[int | None]


@dataclass
class Pages:
    """The pool of one layer class.

    It may be overdrawn: then ``free`` is negative, and says how many are missing.
    """

    total: int
    holders: Counter[int] = field(default_factory=Counter)
    next_id: int = 0

    @property
    def free(self) -> int:
        return self.total - len(self.holders)

    def copy(self) -> Pages:
        return Pages(self.total, self.holders.copy(), self.next_id)

    def take(self) -> int:
        self.next_id += 1
        self.holders[self.next_id] = 1
        return self.next_id

    def share(self, page: int | None) -> None:
        if page is not None:
            self.holders[page] += 1

    def drop(self, page: int | None) -> None:
        if page is None:
            return
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]

    def shared(self, page: int | None) -> bool:
        return page is not None and self.holders[page] > 1

    def own(self, table: Table, index: int) -> None:
        """Replace a shared page by one of its own."""
        self.drop(table[index])
        table[index] = self.take()

    def shorten(self, table: Table, size: int) -> None:
        while len(table) > size:
            self.drop(table.pop())


def page_count(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def grow(pages: Pages, table: Table, stored: int, count: int, page_size: int) -> None:
    """Room for ``count`` rows behind ``stored`` ones: whoever writes into a shared page gets its
    own, the last owner writes in place.
    """
    if stored % page_size and pages.shared(table[-1]):
        pages.own(table, len(table) - 1)
    while len(table) < page_count(stored + count, page_size):
        table.append(pages.take())
