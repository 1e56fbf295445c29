"""``Heat``: a matrix of numbers as shades, rows of queries or heads over columns of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from quire_inspector.drawing.pictures import Picture, axes, titled
from quire_inspector.drawing.shown_text import in_figure, in_html, visible

MOST_ROWS, MOST_COLUMNS = 64, 160
"""Cells of HTML; the largest of several numbers is shown where there are more."""
MOST_LINES, MOST_CHARACTERS = 24, 80
"""Cells of a terminal."""
SHADES = " ░▒▓█"
CELL = 6
"""Pixels of a cell."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Heat(Picture):
    """Numbers, all 0 or more, by row and position."""

    title: str
    values: NDArray[np.float32]
    """``[rows, columns]``"""
    rows: Sequence[str]
    """The name of each row."""
    positions: NDArray[np.int64]
    """``[columns]``"""
    row_name: str
    """What a row is, as "query" or "head"."""
    value_name: str
    """What a number is."""

    @property
    def largest(self) -> float:
        """Return the largest finite number, which is drawn the darkest; 1 if none is above 0."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite.max(initial=0.0)) or 1.0

    def _repr_html_(self) -> str:
        cells = pooled(self.values, MOST_ROWS, MOST_COLUMNS) / self.largest
        height, width = cells.shape
        tall = max(CELL, min(4 * CELL, 240 // max(1, height)))
        found = [
            f'<rect x="{column * CELL}" y="{row * tall}" width="{CELL}" height="{tall}" fill-opacity="{shade:.2f}"/>'
            for row, column in zip(*np.nonzero(cells > 0.005), strict=True)
            if (shade := min(1.0, float(cells[row, column])))
        ]
        label = in_html(f"{self.title}: {self._extent()}")
        drawn = (
            f'<svg role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg" fill="currentColor" '
            f'viewBox="0 0 {max(1, width) * CELL} {max(1, height) * tall}" '
            f'style="width:100%;max-width:{max(1, width) * CELL * 2}px;border:1px solid currentColor" '
            f'preserveAspectRatio="none"><title>{label}</title>{"".join(found)}</svg>'
        )
        return titled(self.title, drawn, f'<div style="opacity:.7;font-size:.9em">{in_html(self._extent())}</div>')

    def __rich__(self) -> RenderableType:
        cells = pooled(self.values, MOST_LINES, MOST_CHARACTERS) / self.largest
        scale = len(SHADES) - 1
        lines = []
        for number, row in enumerate(cells):
            first = number * len(self.rows) // max(1, len(cells))
            name = self.rows[first] if first < len(self.rows) else ""
            level = np.ceil(np.nan_to_num(np.clip(row, 0, 1)) * scale).astype(int)
            lines.append(Text(f"{visible(name)[:12]:>12} ") + Text("".join(SHADES[one] for one in level)))
        return Group(Text(visible(self.title), style="bold"), *lines, Text(visible(self._extent()), style="dim"))

    def plot(self, ax: Any = None) -> Any:
        """See ``Picture``. Rows go down, positions to the right."""
        drawn = axes(ax, height=1.5 + min(6.0, 0.12 * len(self.rows)))
        image = drawn.imshow(self.values, aspect="auto", interpolation="nearest", vmin=0.0, vmax=self.largest)
        drawn.figure.colorbar(image, ax=drawn, label=in_figure(self.value_name))
        drawn.set_title(in_figure(self.title))
        drawn.set_xlabel("position")
        drawn.set_ylabel(in_figure(self.row_name))
        _label(drawn.set_xticks, [str(one) for one in self.positions.tolist()])
        _label(drawn.set_yticks, [in_figure(one) for one in self.rows])
        return drawn

    def _extent(self) -> str:
        if not self.values.size:
            return "nothing is held"
        first, last = int(self.positions[0]), int(self.positions[-1])
        rows = self.rows[0] if len(self.rows) == 1 else f"{self.rows[0]} to {self.rows[-1]}"
        return f"{self.row_name} {rows}; positions {first} to {last}; {self.value_name} up to {self.largest:.4g}"


def pooled(values: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """Return at most so many rows and columns, each the largest of those that it stands for."""
    for axis, most in ((0, rows), (1, columns)):
        size = values.shape[axis]
        if size > most:
            starts = (np.arange(most) * size) // most
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def _label(set_ticks: Any, names: Sequence[str]) -> None:
    some = list(range(0, len(names), max(1, -(-len(names) // 12))))
    set_ticks(some, [names[one] for one in some])
