"""``PageMaps``: the pages of all pools, by holder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from quire.contracts.views import OWNER_NAMES, PoolSummary, PoolView
from quire_inspector.drawing.pictures import Picture, axes, titled
from quire_inspector.drawing.shown_text import in_html

COLOURS = ("none", "#4c8dff", "#2fa572", "#e07b00")
"""Of free, evictable, held and pinned pages: readable on dark and on light."""
SIGNS = "·░▓█"
MOST_CELLS = 2048
"""Cells of HTML and of figures."""
MOST_CHARACTERS = 640
"""Cells of a terminal."""
ACROSS, PER_LINE = 64, 80
CELL = 8


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PageMaps(Picture):
    """Each pool's pages."""

    pools: Sequence[PoolView]
    summaries: Sequence[PoolSummary | None]
    """What each pool is; None: that is not known."""

    def _repr_html_(self) -> str:
        found = []
        for pool, summary in zip(self.pools, self.summaries, strict=True):
            owners, references, size = cells_of(pool, MOST_CELLS)
            drawn = []
            for number, (owner, count) in enumerate(zip(owners.tolist(), references.tolist(), strict=True)):
                x, y = number % ACROSS * CELL, number // ACROSS * CELL
                shade = 0.5 + 0.5 * min(1.0, max(0, count - 1) / 4)
                drawn.append(
                    f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{COLOURS[owner]}" '
                    f'fill-opacity="{shade:.2f}" stroke="currentColor" stroke-opacity=".25"/>'
                )
            told = in_html(_pool_line(pool, summary, size))
            height = -(-max(1, len(owners)) // ACROSS) * CELL
            found.append(
                f'<div style="margin:.4em 0">{told}</div><svg role="img" aria-label="{told}" '
                f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {ACROSS * CELL} {height}" '
                f'style="width:100%;max-width:{ACROSS * CELL}px"><title>{told}</title>{"".join(drawn)}</svg>'
            )
        return titled("pages", *found, _legend())

    def __rich__(self) -> RenderableType:
        lines = [Text("pages", style="bold")]
        for pool, summary in zip(self.pools, self.summaries, strict=True):
            owners, _, size = cells_of(pool, MOST_CHARACTERS)
            lines.append(Text(_pool_line(pool, summary, size)))
            drawn = "".join(SIGNS[owner] for owner in owners.tolist())
            lines += [Text(drawn[start : start + PER_LINE]) for start in range(0, len(drawn), PER_LINE)]
        lines.append(
            Text("  ".join(f"{sign} {name}" for sign, name in zip(SIGNS, OWNER_NAMES, strict=True)), style="dim")
        )
        return Group(*lines)

    def plot(self, ax: Any = None) -> Any:
        """See ``Picture``. The pools lie one below the other; numbers are owners of a page."""
        drawn = axes(ax, height=1.5 + len(self.pools))
        from matplotlib.colors import ListedColormap

        rows: list[NDArray[np.uint8]] = []
        names: list[tuple[int, str]] = []
        for pool, summary in zip(self.pools, self.summaries, strict=True):
            owners, _, size = cells_of(pool, MOST_CELLS)
            padded = np.zeros(-(-max(1, len(owners)) // ACROSS) * ACROSS, dtype=np.uint8)
            padded[: len(owners)] = owners
            names.append((sum(len(one) for one in rows), _pool_line(pool, summary, size)))
            rows.append(padded.reshape(-1, ACROSS))
        colours = ListedColormap(["#00000000", *COLOURS[1:]])
        drawn.imshow(np.concatenate(rows), cmap=colours, vmin=0, vmax=3, interpolation="nearest", aspect="auto")
        drawn.set_yticks([start for start, _ in names], [f"pool {number}" for number in range(len(names))])
        drawn.set_xticks([])
        drawn.set_title("\n".join(told for _, told in names), fontsize="small")
        return drawn


def cells_of(pool: PoolView, most: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], int]:
    """Return the owner and the number of holders of each cell, and the number of pages in a cell.
    Of several pages a cell shows the hardest to give up."""
    size = max(1, -(-pool.owner.size // most))
    if size == 1:
        return pool.owner, pool.references.astype(np.int64), 1
    starts = np.arange(0, pool.owner.size, size)
    return np.maximum.reduceat(pool.owner, starts), np.maximum.reduceat(pool.references.astype(np.int64), starts), size


def _pool_line(pool: PoolView, summary: PoolSummary | None, size: int) -> str:
    kind = ""
    if summary is not None:
        layers = summary.layers
        named = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
        kind = f" ({summary.kind}, {named}{'' if summary.window is None else f', window {summary.window}'})"
    counts = ", ".join(f"{count:,} {name}" for name, count in pool.counts.items())
    cell = "" if size == 1 else f"; a cell is {size} pages"
    return f"pool {pool.pool}{kind}: {pool.owner.size:,} pages, {counts}{cell}"


def _legend() -> str:
    found = [
        f'<span style="display:inline-block;width:.8em;height:.8em;border:1px solid currentColor;background:'
        f'{"transparent" if colour == "none" else colour}"></span> {name}'
        for colour, name in zip(COLOURS, OWNER_NAMES, strict=True)
    ]
    return f'<div style="opacity:.8;font-size:.9em">{" &nbsp; ".join(found)}; darker: several hold it</div>'
