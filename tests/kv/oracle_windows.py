"""What windows let a query see, position by position, and what may be forgotten: the rules as they
are written down.

Letters: q position of a query; i position of a key; n committed length when a forward begins; W, s
window and sink of a sequence; W_l window of a layer; e evicted tokens of a query; P page size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Part = Literal["window", "sink"]


@dataclass(frozen=True)
class Window:
    """The window of one sequence."""

    size: int
    sink: int = 0
    eviction: str = "token"

    def evicted(self, q: int, n: int) -> int:
        """e: by the query's own position, or what earlier forwards left behind."""
        return max(0, (q + 1 if self.eviction == "token" else n) - self.size)


def seen(q: int, i: int, n: int, window: Window | None, layer_window: int | None) -> Part | None:
    """Whether windows let a query see a key, and whether it sees it at its relative position (where
    the sink is cut off from the rest).

    Order and trees are somebody else's business.
    """
    if layer_window is not None and not i > q - layer_window:
        return None
    if window is None:
        return "window"
    e = window.evicted(q, n)
    if i < window.sink:
        return "sink" if e else "window"
    return "window" if i >= window.sink + e else None


def wanted(i: int, n: int, window: Window | None, layer_window: int | None) -> bool:
    """Whether some query at n or later may see the committed token i.

    (Later ones see no more of it than the first.)
    """
    return seen(n, i, n, window, layer_window) is not None


def reachable(length: int, held: Callable[[int], bool], window: Window | None, layer_window: int | None) -> set[int]:
    """Positions that one layer class can go back to.

    p is the lowest position >= s from which on all tokens are held: 0..s, and m >= p + (W - s) - 1
    (one more for ``forward``), and everything if p = s. A layer window is the same with s = 0, and
    where there are both, both apply: what is seen is the intersection, so the shorter one counts,
    and a token of the sink is needed only within W_l.
    """
    sink = window.sink if window else 0
    sizes = [] if layer_window is None else [layer_window]
    if window:
        sizes.append(window.size - sink + (window.eviction == "forward"))
    if not sizes:
        return set(range(length + 1))
    p = length
    while p > sink and held(p - 1):
        p -= 1
    found = set()
    for m in range(length + 1):
        sink_held = all(held(i) for i in range(min(sink, m)) if layer_window is None or i > m - layer_window)
        if sink_held and (m <= sink or p <= sink or m >= p + min(sizes) - 1):
            found.add(m)
    return found


def ranges(numbers: set[int]) -> list[range]:
    """Runs of consecutive numbers, ascending."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
