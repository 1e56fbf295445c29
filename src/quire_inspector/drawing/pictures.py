"""``Picture``: what is drawn in a notebook, in a terminal, and by matplotlib.

HTML has no script and loads nothing. Its colours come from the page around it, so that it is
read on dark and on light.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType

from quire.base.errors import Unsupported
from quire_inspector.drawing.shown_text import in_html

WIDTH = 100
"""Columns of a text that is not written to a terminal."""
_CELL = "padding:.15em .8em .15em 0;text-align:left;vertical-align:top;border:0;background:none"


class Picture:
    """Something drawn. All three drawings are made when they are asked for."""

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def plot(self, ax: Any = None) -> Any:
        """Draw with matplotlib, on ``ax`` or on a new figure; return the axes. ``Unsupported``
        without matplotlib, or where there is nothing to plot."""
        raise Unsupported(f"{type(self).__name__} is words, and nothing to plot; print it, or show it in a notebook")

    def __str__(self) -> str:
        """Return it as plain text, ``WIDTH`` columns wide."""
        written = io.StringIO()
        # In a notebook rich would show the text, too, and write nothing.
        plain = Console(
            file=written,
            width=WIDTH,
            color_system=None,
            force_terminal=False,
            force_jupyter=False,
            markup=False,
            emoji=False,
        )
        plain.print(self.__rich__())
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())

    def __repr__(self) -> str:
        return str(self)


def axes(ax: Any, *, width: float = 8.0, height: float = 3.0) -> Any:
    """Return the axes to draw on: ``ax``, or new ones of a figure of some inches. ``Unsupported``
    without matplotlib."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise Unsupported(
            "plot needs matplotlib, which is not installed; pip install '.[notebook]' in Quire's folder brings it"
        ) from None
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def titled(title: str, *parts: str) -> str:
    """Return HTML of parts below a title, which is a user's text."""
    head = f'<div style="font-weight:600;margin-bottom:.3em">{in_html(title)}</div>'
    return f'<div style="font-family:inherit;color:inherit;line-height:1.4">{head}{"".join(parts)}</div>'


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table of cells that are HTML already."""
    lines = [f"<tr>{''.join(f'<td style={chr(34)}{_CELL}{chr(34)}>{one}</td>' for one in row)}</tr>" for row in rows]
    named = "".join(f'<th scope="col" style="{_CELL};opacity:.7">{in_html(one)}</th>' for one in head)
    top = f"<thead><tr>{named}</tr></thead>" if head else ""
    return f'<table style="border-collapse:collapse;color:inherit">{top}<tbody>{"".join(lines)}</tbody></table>'
