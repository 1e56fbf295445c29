"""Values that notebooks and terminals can draw, by ``quire.drawing``.

A value does not import drawing, which is in a higher layer: the painter is imported on demand.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PAINTERS = "quire_inspector.drawing.painters"


class Pictured:
    """A value with a picture: HTML in notebooks, text in terminals, and for some values a figure of
    matplotlib."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(picture_of(self)._repr_html_())

    def __rich__(self) -> Any:
        return picture_of(self).__rich__()

    def plot(self, ax: Any = None) -> Any:
        """Draw with matplotlib, on ``ax`` or on a new figure; return the axes. ``Unsupported``
        without matplotlib, or if there is nothing to plot."""
        return picture_of(self).plot(ax)


def picture_of(value: Any) -> Any:
    """Return the picture of a value."""
    return import_module(PAINTERS).picture_of(value)
