"""Arrays of texts in GGUF files, many texts at a time.

Each text is the number of its bytes, in 64 bits, and its bytes. A vocabulary has hundreds of
thousands of texts, and a loop over them takes a tenth of a second. Most numbers are below 256: a
byte that is not zero, and seven zeros. NumPy finds all such places at once, and proves them: each
text ends where the next one begins.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 20
"""Bytes that are searched at a time."""
FEW = 1 << 10
"""Texts that are passed one by one where a search proves fewer."""
_LENGTH = 8
_SEPARATOR = "\0"


def text_bounds(data: NDArray[np.uint8], start: int, count: int, most: int) -> NDArray[np.int64]:
    """Return the places of ``count`` texts from ``start`` on, and the end of the last one. It stops
    early before a text of more than ``most`` bytes, or one that ends beyond the data. ``most`` is
    at least 255."""
    found, left = [np.array([start], np.int64)], count
    while left:
        position = int(found[-1][-1])
        ends = _short_ends(data, position)[:left]
        if len(ends) < FEW:
            if len(ends):
                position = int(ends[-1])
            others = _ends_one_by_one(data, position, min(FEW, left - len(ends)), most)
            ends = np.concatenate((ends, others))
        if not len(ends):
            break
        found.append(ends)
        left -= len(ends)
    return np.concatenate(found)


def _short_ends(data: NDArray[np.uint8], position: int) -> NDArray[np.int64]:
    """Return the ends of texts of 1 to 255 bytes from ``position`` on, up to one that has another
    length or holds seven zeros."""
    window = data[position : position + WINDOW]
    filled = np.flatnonzero(window)
    begins = filled[:-1][np.diff(filled) >= _LENGTH]
    if not len(begins) or begins[0]:
        return np.empty(0, np.int64)
    ends = begins + _LENGTH + window[begins]
    ends = ends[: int(np.append(ends[:-1] != begins[1:], True).argmax()) + 1]
    return position + ends[ends <= len(data) - position]


def _ends_one_by_one(data: NDArray[np.uint8], position: int, count: int, most: int) -> NDArray[np.int64]:
    """Return the ends of up to ``count`` texts; the definition of ``text_bounds``."""
    unpack, view, end, ends = struct.Struct("<Q").unpack_from, data.data, len(data), list[int]()
    while len(ends) < count and position + _LENGTH <= end:
        size = unpack(view, position)[0]
        if size > most or position + _LENGTH + size > end:
            break
        position += _LENGTH + size
        ends.append(position)
    return np.array(ends, np.int64)


def split_texts(data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> list[str] | None:
    """Return the texts with these bounds. None: one is not UTF-8, or holds the character that
    separates them here."""
    start = int(bounds[0])
    places = bounds[:-1] - start
    marked = data[start : bounds[-1]].copy()
    kept = np.ones(len(marked), np.bool_)
    for byte in range(1, _LENGTH):
        kept[places + byte] = False
    marked[places] = ord(_SEPARATOR)
    try:
        first, *texts = marked[kept].tobytes().decode().split(_SEPARATOR)
    except UnicodeDecodeError:
        return None
    return None if first or len(texts) != len(places) else texts
