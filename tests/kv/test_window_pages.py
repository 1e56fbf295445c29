"""Pages of windowed sequences: how many are held, when they are free, whose they are."""

from __future__ import annotations

from typing import Literal

import pytest

from quire.base.errors import ResourceExhausted
from quire.kv.windows import Window, window_pages

from .oracle_pages import page_count
from .pair import Pair, attention, refused

PAGE_SIZES = (1, 2, 4, 5, 16)
Eviction = Literal["token", "forward"]
EVICTIONS: tuple[Eviction, ...] = ("token", "forward")


@pytest.mark.product(8)
@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_pool_of_exactly_the_bound_slides_for_ever(page_size: int, n: int, eviction: Eviction) -> None:
    window, sink = 11, 3
    bound = page_count(sink, page_size) + page_count(window - sink + n, page_size) + 1
    pair = Pair([attention()], page_size=page_size, capacity=bound * page_size)
    pair.add(0)
    pair.window(0, window, sink, eviction)
    for step in range(40):
        pair.append(0, n if step % 4 else 1)
        assert pair.free >= 0
    pair.finish()


@pytest.mark.turns(6)
@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_bound_counts_pending_and_new_nodes(page_size: int, eviction: Eviction) -> None:
    """Sliding by trees of two forwards, of which little is kept."""
    window, sink, n = 9, 2, 7
    bound = page_count(sink, page_size) + page_count(window - sink + n, page_size) + 1
    pair = Pair([attention()], page_size=page_size, capacity=bound * page_size)
    pair.add(0)
    pair.window(0, window, sink, eviction)
    pair.append(0, n)
    for step in range(12):
        pair.forward([0], [4], [[-1, 0, 0, 1]])
        pair.forward([0], [3], [[3, 3, 2]])
        pair.commit([0], [(5, 4, 6, -1)[step % 4]])
    pair.finish()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("size", "sink", "layer"), [(11, 3, None), (9, 0, 7), (None, 0, 6), (8, 4, 30), (5, 4, None)])
def test_the_bound_of_a_window_is_what_is_held_at_most(
    page_size: int, size: int | None, sink: int, layer: int | None
) -> None:
    """Wherever a forward begins: no more than the bound, and for some lengths no less, but for
    pages so small that a window begins and ends with one."""
    window = None if size is None else Window(size, sink, "forward")
    reached = 0
    for new in range(1, 12):
        bound = window_pages(window, layer, new, page_size)
        assert bound is not None
        held = []
        for base in range(80):
            seen = (
                [range(sink), range(max(0, base - (size or base) + sink), base + new)] if size else [range(base + new)]
            )
            kept = {p // page_size for part in seen for p in part if layer is None or p > base - layer}
            held.append(len(kept))
        assert max(held) <= bound
        reached += max(held) == bound
    assert reached or page_size < 4


def test_released_pages_count_for_the_same_call() -> None:
    pair = Pair([attention()], page_size=4, capacity=32)
    pair.add(0, 1)
    pair.window(0, 6, 2)
    pair.append(0, 27)
    assert pair.free == 1
    # The window of the next token begins at 24: pages 4-23 leave, all of which the neighbour gets.
    assert pair.state.missing_pages([0], [1]) == 0
    assert pair.state.missing_pages([1], [24]) == 5
    assert pair.both("missing_pages", [0, 1], [1, 24]) == 0
    assert pair.both("missing_pages", [0, 1], [1, 25]) == 1
    refused(pair, ResourceExhausted, lambda: pair.state.begin_forward([0, 1], [1, 25]), "7 pages", "6 of 8")
    pair.forward([1, 0], [24, 1])
    assert pair.free == 0
    pair.finish()


def test_released_pages_of_a_fork_are_not_free() -> None:
    pair = Pair([attention()], page_size=4, capacity=40)
    pair.add(0, 2)
    pair.window(0, 6, 2)
    pair.append(0, 20)
    pair.fork(0, 1)
    assert pair.free == 5
    # Both hold all pages; what one of them gives up is the other's, and only what both give up is
    # free.
    assert pair.both("missing_pages", [0, 2], [1, 17]) == 1
    assert pair.both("missing_pages", [0, 1, 2], [1, 1, 17]) == 0
    refused(pair, ResourceExhausted, lambda: pair.state.begin_forward([0, 2], [1, 17]))
    pair.forward([0, 1, 2], [1, 1, 17])
    pair.finish()


def test_a_page_that_one_owner_releases_is_written_in_place_by_the_other() -> None:
    """What leaves the one's window is the other's tail: by then it has a single owner."""
    pair = Pair([attention()], page_size=4, capacity=16)
    pair.add(0)
    pair.window(0, 6, 2)
    pair.append(0, 12)
    pair.fork(0, 1, 6)
    pair.fork(0, 2, 5)
    # At 12 sequence 0 sees 9 and more: page 4-7 belongs to 1 and 2 alone, and of those the longer
    # one stays on it.
    assert pair.free == 1
    assert pair.both("missing_pages", [1], [1]) == 0
    assert pair.both("missing_pages", [2, 1, 0], [1, 1, 1]) == 1
    pair.remove(2)
    assert pair.both("missing_pages", [1, 0], [1, 1]) == 0
    pair.forward([1, 0], [1, 1])
    assert pair.copies == []
    assert pair.free == 0
    pair.finish()
