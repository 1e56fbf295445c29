"""Values that notebooks and terminals draw: they say so, and ``quire.drawing`` does it.

A value knows nothing of drawing, which is above it: the painter is found when it is wanted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PAINTERS = "quire.drawing.painters"


class Pictured:
    """A value with a picture: HTML in notebooks, text in terminals, and for some of them a figure
    of matplotlib."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(picture_of(self)._repr_html_())

    def __rich__(self) -> Any:
        return picture_of(self).__rich__()

    def plot(self, ax: Any = None) -> Any:
        """Draw with matplotlib, on ``ax`` or on a new figure; return the axes. ``Unsupported``
        without matplotlib, or where there is nothing to plot."""
        return picture_of(self).plot(ax)


def picture_of(value: Any) -> Any:
    """Return the picture of a value."""
    return import_module(PAINTERS).picture_of(value)
