"""What queries see through windows, and what may be forgotten. Arithmetic only; no torch.

A *sequence window* (W, s) keeps the first s tokens (the sink) and the last W - s (StreamingLLM,
arXiv:2309.17453). A *layer window* W_l is the model's: queries at q see positions above q - W_l.
Both can apply at once.

Letters: q position of a query; b committed length at ``begin_forward``; e its evicted tokens; P
page size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pool_verbs import SequenceWindow

Positions: TypeAlias = NDArray[np.int64]


class Window(SequenceWindow):
    """The window of one sequence, and what its queries see.

    ``token``: each query sees the sink and the last size - sink positions, whatever the chunks
    were. ``forward``: a query sees what was left of the cache when its forward began, and its own
    chunk (the rule of TVM).
    """

    __slots__ = ()

    def evicted(self, q_T: Positions, base: int) -> Positions:
        """Return e of each query in a forward that began at ``base`` committed tokens."""
        if self.eviction == "token":
            return np.maximum(q_T + 1 - self.size, 0)
        return np.full_like(q_T, max(0, base - self.size))


@dataclass(frozen=True, slots=True)
class Visibility:
    """What windows leave to the queries of one entry."""

    lows_T: Positions
    """Lowest position of the window part."""
    sinks_T2: NDArray[np.int64] | None
    """``[T, 2]``: first position of the sink part and one past its last; None: no query has one."""


def visibility(q_T: Positions, base: int, window: Window | None, layer_window: int | None) -> Visibility:
    """Return the positions visible through both windows to queries at ``q_T`` of a forward that
    began at ``base``."""
    layer_lows_T = np.zeros_like(q_T) if layer_window is None else np.maximum(q_T + 1 - layer_window, 0)
    if window is None:
        return Visibility(layer_lows_T, None)
    evicted_T = window.evicted(q_T, base)
    cut_T = evicted_T > 0
    lows_T = np.maximum(layer_lows_T, np.where(cut_T, evicted_T + window.sink, 0))
    first_T = np.minimum(layer_lows_T, window.sink)
    stop_T = np.where(cut_T, window.sink, first_T)
    sinks_T2 = np.stack((first_T, stop_T), 1) if bool((stop_T > first_T).any()) else None
    return Visibility(lows_T, sinks_T2)


@dataclass(frozen=True, slots=True)
class Floors:
    """What no query at or behind a committed length can see any more."""

    sink: int
    """Positions below this one are out of sight, in the sink too: only a layer window does that."""
    window: int
    """Positions from the sink's end up to this one are out of sight."""
    layer: int
    """Positions below this one are out of the layer's own window."""


def floors(base: int, window: Window | None, layer_window: int | None) -> Floors:
    """See ``Floors``; ``base`` is the committed length."""
    layer = 0 if layer_window is None else max(0, base + 1 - layer_window)
    if window is None:
        return Floors(0, layer, layer)
    evicted = max(0, (base + 1 if window.eviction == "token" else base) - window.size)
    low = max(layer, evicted + window.sink if evicted else 0)
    return Floors(low if layer >= window.sink else layer, low, layer)


@dataclass(frozen=True, slots=True)
class Hole:
    """Positions of one sequence that a layer class holds no longer: those below ``sink``, and those
    from the end of the sink up to ``window``, also in a page shared with the sink."""

    sink: int = 0
    window: int = 0

    def clipped(self, length: int, sink: int) -> Hole:
        """Return the hole of the first ``length`` tokens of a sequence with such a ``sink``."""
        window = min(self.window, length)
        return Hole(min(self.sink, length), window if window > sink else 0)


NO_HOLE = Hole()


def held(length: int, sink: int, hole: Hole) -> list[range]:
    """Return the held positions below ``length``, ascending. ``sink``: of the sequence's window."""
    if hole.window <= sink:
        parts = [range(hole.sink, length)]
    else:
        parts = [range(hole.sink, min(sink, length)), range(hole.window, length)]
    return [part for part in parts if part]


def holds(parts: Iterable[range], wanted: range) -> bool:
    """Return whether one of these ranges contains ``wanted``."""
    return any(part.start <= wanted.start and wanted.stop <= part.stop for part in parts)


def sink_pages(window: Window | None, page_size: int) -> int:
    """Return the number of pages with rows of the sink."""
    return -(-window.sink // page_size) if window else 0


def leaving(hole: Hole, floor: Floors, first_page: int, page_size: int) -> tuple[range, range]:
    """Return the pages in the table that no query can see from now on: of the sink, and behind it.

    ``first_page``: number of pages that hold some of the sink. A page leaves when no token is in
    sight.
    """
    sink = range(hole.sink // page_size, min(floor.sink // page_size, first_page))
    return sink, range(max(hole.window // page_size, first_page), floor.window // page_size)


def reachable(length: int, window: Window | None, layer_window: int | None, hole: Hole) -> list[range]:
    """Return the positions a layer class can go back to: all that queries may see is held."""
    sink = window.sink if window else 0
    if hole.window <= sink and not hole.sink:
        return [range(length + 1)]
    # The lowest position whose window part is held. Its low bound grows with the position, so that
    # of every later position is held too.
    lowest = 0
    if hole.window > sink:
        spans = [] if layer_window is None else [layer_window - 1]
        if window is not None:
            spans.append(window.size - sink - (window.eviction == "token"))
        lowest = hole.window + min(spans)
    if hole.sink and layer_window is not None:
        lowest = max(lowest, min(hole.sink, sink) + layer_window - 1)
    last_in_sink = 0 if hole.sink else min(sink, length)
    if lowest <= last_in_sink + 1:
        return [range(length + 1)]
    return [range(last_in_sink + 1), range(lowest, length + 1)]


def intersection(a: list[range], b: list[range]) -> list[range]:
    """Return the intersection of ascending, disjoint ranges."""
    found = [range(max(x.start, y.start), min(x.stop, y.stop)) for x in a for y in b]
    return [part for part in found if part]


def window_pages(window: Window | None, layer_window: int | None, new_tokens: int, page_size: int) -> int | None:
    """Return the most pages of a sequence in a forward of ``new_tokens``; None: no window."""
    spans = [] if layer_window is None else [layer_window]
    sink = 0
    if window is not None:
        spans.append(window.size - window.sink)
        sink = sink_pages(window, page_size)
    if not spans:
        return None
    return sink + -(-(min(spans) + new_tokens) // page_size) + 1


def describe_ranges(ranges: Iterable[range]) -> str:
    """Return text such as ``0..2, 11..14``."""
    return ", ".join(f"{part.start}..{part.stop - 1}" for part in ranges) or "nothing"
