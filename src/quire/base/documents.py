"""Frozen values as JSON: dictionaries, lists, strings, finite numbers (``docs/inspector.md``)."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
"""The format of all documents. It is raised when a field changes its meaning or is removed."""


class Document:
    """A dataclass with a JSON form."""

    __slots__ = ()

    def document(self) -> dict[str, Any]:
        """Return the fields in JSON types: arrays as base64 of little-endian values, ranges as
        pairs, null for a number that is not finite."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}  # type: ignore[arg-type]


class View(Document):
    """A document that is a whole answer."""

    __slots__ = ()

    def document(self) -> dict[str, Any]:
        """Return the fields in JSON types, and the format."""
        return {"format": FORMAT, **super().document()}


def plain(value: Any) -> Any:
    """Return a field's value in JSON types."""
    if isinstance(value, Document):
        return value.document()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, np.ndarray):
        return packed(value, {"u": "u1", "i": "i4", "f": "f4"}[value.dtype.kind])
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


def packed(array: NDArray[Any], kind: str) -> str:
    """Return an array as base64 of little-endian values; ``kind``: "u1", "u2", "i4" or "f4". Values
    outside of an integer kind are clipped."""
    if kind[0] in "ui":
        bounds = np.iinfo(kind)
        array = np.clip(array, bounds.min, bounds.max)
    return base64.b64encode(np.ascontiguousarray(array, dtype=f"<{kind}").tobytes()).decode("ascii")
