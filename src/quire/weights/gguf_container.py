"""The container of GGUF files, versions 2 and 3: metadata and the headers of tensors.

A file is not trusted: every count, length and offset is checked against a limit and the size of the
file before it is used. Arrays are decoded when they are asked for, so that opening a file takes
memory for its keys only. ``import gguf`` would do the same in 200 times as long.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CheckpointError
from quire.weights.gguf_blocks import TYPE_NAMES, bytes_of_row
from quire.weights.gguf_paths import MAGIC, part_files
from quire.weights.gguf_texts import split_texts, text_bounds

VERSIONS = (2, 3)
ALIGNMENT = 32
"""Of tensors, unless ``general.alignment`` gives another."""

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME = 1 << 12
"""Bytes of a key or of a tensor's name."""
MAX_TEXT = 1 << 24
"""Bytes of a text, such as a chat template."""
MAX_ITEM = 1 << 16
"""Bytes of a text in an array, such as a token."""
MAX_ITEMS = 1 << 24
"""Items of an array."""
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_TEXT, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""Types of metadata values by number, as ``struct`` names them."""
_FLAG, _FLOAT = 7, 6

Scalar: TypeAlias = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The header of a tensor. ``shape`` has the innermost dimension last."""

    shape: tuple[int, ...]
    type: str
    start: int
    """Where the data begin in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of metadata that lies in the file."""

    type: int
    count: int
    start: int
    bounds: NDArray[np.int64] | None = None
    """Of texts: their places, and the end of the last one."""


@dataclass(slots=True)
class _Cursor:
    """Reads a map from the front; never beyond its end."""

    path: Path
    data: mmap.mmap
    position: int = 0

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def skip(self, size: int, what: str) -> int:
        """Return the position of ``size`` bytes, and stand behind them."""
        start, stop = self.position, self.position + size
        if stop > len(self.data):
            raise self.error(
                f"{what} at byte {start} ends at byte {stop}, but the file has {len(self.data)}; it is cut short or damaged"
            )
        self.position = stop
        return start

    def number(self, kind: str, what: str) -> Any:
        return struct.unpack_from(f"<{kind}", self.data, self.skip(struct.calcsize(kind), what))[0]

    def count(self, most: int, what: str) -> int:
        found: int = self.number("Q", what)
        if found > most:
            raise self.error(f"{what} is {found}; expected at most {most}, so the file is damaged or no model")
        return found

    def text(self, most: int, what: str) -> str:
        size = self.count(most, f"the length of {what}")
        start = self.skip(size, what)
        return self.decoded(start, size, what)

    def decoded(self, start: int, size: int, what: str) -> str:
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is not UTF-8: {error.reason}") from error


class GgufFile:
    """One GGUF file: its keys and the headers of its tensors, all checked.

    ``text``, ``whole``, ``number``, ``flag`` and the arrays ``texts`` and ``numbers`` are typed
    access to a key; without a default the key is required. They raise ``CheckpointError`` with the
    file, the key, its value and the expected one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # An empty file cannot be mapped.
            raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
        self._bytes = np.frombuffer(self.data, np.uint8)
        cursor = _Cursor(path, self.data)
        self._check_magic(cursor)
        tensors = cursor.count(MAX_TENSORS, "the number of tensors")
        keys = cursor.count(MAX_KEYS, "the number of keys")
        self._values: dict[str, Scalar | _Array] = {}
        for _ in range(keys):
            self._read_key(cursor)
        self.tensors = self._read_tensors(cursor, tensors)

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, key: str, expected: str) -> CheckpointError:
        value = self._values.get(key)
        found = (
            "missing" if value is None else f"an array of {value.count}" if isinstance(value, _Array) else repr(value)
        )
        return CheckpointError(f"{self.path}: {key} is {found:.200}; expected {expected}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"an integer of {least} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number. A float32 is given as the shortest decimal that means it."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def value(self, key: str) -> Any:
        return self._values.get(key)

    def is_array(self, key: str) -> bool:
        return isinstance(self._values.get(key), _Array)

    def texts(self, key: str) -> list[str]:
        """Return an array of texts; empty without the key."""
        array = self._array(key)
        if array is None or array.count == 0:
            return []
        if array.type != _TEXT:
            raise self.error(key, "an array of texts")
        assert array.bounds is not None
        texts = split_texts(self._bytes, array.bounds)
        if texts is None:
            cursor, bounds = _Cursor(self.path, self.data), array.bounds.tolist()
            texts = [
                cursor.decoded(start + 8, stop - start - 8, f"{key}[{item}]")
                for item, (start, stop) in enumerate(pairwise(bounds))
            ]
        return texts

    def numbers(self, key: str) -> list[Any]:
        """Return an array of numbers or flags; empty without the key."""
        array = self._array(key)
        if array is None or array.count == 0:
            return []
        if array.type == _TEXT:
            raise self.error(key, "an array of numbers")
        kind = np.dtype(_SCALARS[array.type]).newbyteorder("<")
        found = np.frombuffer(self.data, kind, array.count, array.start)
        listed: list[Any] = (found.astype(bool) if array.type == _FLAG else found).tolist()
        return listed

    def _array(self, key: str) -> _Array | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, _Array):
            raise self.error(key, "an array")
        return value

    def _check_magic(self, cursor: _Cursor) -> None:
        if self.data[:4] != MAGIC:
            raise cursor.error(f"the file begins with {self.data[:4]!r}; a GGUF file begins with {MAGIC!r}")
        cursor.position = 4
        version = cursor.number("I", "the version")
        if version not in VERSIONS:
            order = ", which is a file for big-endian machines" if version >> 16 and not version & 0xFFFF else ""
            raise cursor.error(f"GGUF version {version}{order}; versions {VERSIONS[0]} and {VERSIONS[1]} are read")

    def _read_key(self, cursor: _Cursor) -> None:
        key = cursor.text(MAX_NAME, f"key {len(self._values)}")
        if key in self._values:
            raise cursor.error(f"key {key!r} is there twice")
        kind = cursor.number("I", f"the type of {key}")
        self._values[key] = self._read_array(cursor, key) if kind == _ARRAY else self._read_scalar(cursor, kind, key)

    def _read_scalar(self, cursor: _Cursor, kind: int, key: str) -> Scalar:
        if kind == _TEXT:
            return cursor.text(MAX_TEXT, key)
        if kind not in _SCALARS:
            raise cursor.error(f"{key} has type {kind}; types 0 to 12 are known")
        value = cursor.number(_SCALARS[kind], key)
        if kind == _FLOAT:
            return float(str(np.float32(value)))
        return bool(value) if kind == _FLAG else value

    def _read_array(self, cursor: _Cursor, key: str) -> _Array:
        kind = cursor.number("I", f"the type of the items of {key}")
        count = cursor.count(MAX_ITEMS, f"the number of items of {key}")
        start = cursor.position
        if kind == _TEXT:
            return _Array(kind, count, start, self._skip_texts(cursor, key, count))
        if kind not in _SCALARS:
            raise cursor.error(f"{key} is an array of type {kind}; arrays of numbers, flags and texts are read")
        cursor.skip(count * struct.calcsize(_SCALARS[kind]), key)
        return _Array(kind, count, start)

    def _skip_texts(self, cursor: _Cursor, key: str, count: int) -> NDArray[np.int64]:
        """Return the bounds of texts, and stand behind them."""
        bounds = text_bounds(self._bytes, cursor.position, count, MAX_ITEM)
        cursor.position, item = int(bounds[-1]), len(bounds) - 1
        if item < count:
            what = f"{key}[{item}]"
            cursor.skip(cursor.count(MAX_ITEM, f"the length of {what}"), what)
        return bounds

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        alignment = self.whole("general.alignment", ALIGNMENT, least=1)
        if alignment > MAX_ALIGNMENT or alignment < 8 or alignment & (alignment - 1):
            raise self.error("general.alignment", f"a power of two from 8 to {MAX_ALIGNMENT}")
        headers: dict[str, tuple[tuple[int, ...], str, int]] = {}
        for _ in range(count):
            name = cursor.text(MAX_NAME, f"the name of tensor {len(headers)}")
            if name in headers:
                raise cursor.error(f"tensor {name!r} is there twice")
            dimensions = cursor.number("I", f"the dimensions of {name}")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise cursor.error(f"{name} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
            shape = tuple(cursor.number("Q", f"the shape of {name}") for _ in range(dimensions))[::-1]
            kind = cursor.number("I", f"the type of {name}")
            if kind not in TYPE_NAMES:
                raise cursor.error(
                    f"{name} has type {kind}, which is not known; known ones: {', '.join(TYPE_NAMES.values())}"
                )
            headers[name] = shape, TYPE_NAMES[kind], cursor.number("Q", f"the offset of {name}")
        data = -(-cursor.position // alignment) * alignment
        return {name: self._placed(cursor, name, data, alignment, *header) for name, header in headers.items()}

    def _placed(
        self, cursor: _Cursor, name: str, data: int, alignment: int, shape: tuple[int, ...], kind: str, offset: int
    ) -> GgufTensor:
        row = bytes_of_row(kind, shape[-1])
        if row is None or not math.prod(shape):
            raise cursor.error(f"{name} has shape {list(shape)} in {kind}, which has no such rows; the file is damaged")
        start, nbytes = data + offset, row * math.prod(shape[:-1])
        if offset % alignment:
            raise cursor.error(f"{name} begins at byte {offset} of the data; expected a multiple of {alignment}")
        if start + nbytes > len(self.data):
            raise cursor.error(
                f"{name} in {kind} with shape {list(shape)} ends at byte {start + nbytes}, but the file has "
                f"{len(self.data)}; it is cut short or damaged"
            )
        return GgufTensor(shape, kind, start, nbytes)


@dataclass(frozen=True)
class GgufParts:
    """The files of one model: usually one. ``first`` has the metadata."""

    files: Sequence[GgufFile]
    places: Mapping[str, GgufFile] = field(init=False)
    """The file of each tensor."""

    def __post_init__(self) -> None:
        places: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in places:
                    raise CheckpointError(f"tensor {name} is in {places[name].path} and in {file.path}; expected one")
                places[name] = file
        object.__setattr__(self, "places", places)

    @property
    def first(self) -> GgufFile:
        return self.files[0]

    def header(self, name: str) -> GgufTensor:
        return self.places[name].tensors[name]

    def numbers(self, name: str) -> list[float]:
        """Return the values of a small tensor in F32, as the shortest decimals that mean them."""
        file, header = self.places[name], self.header(name)
        if header.type != "F32" or header.nbytes > MAX_TEXT:
            raise CheckpointError(
                f"{file.path}: {name} is in {header.type} with {header.nbytes} bytes; expected a few in F32"
            )
        found = np.frombuffer(file.data, "<f4", header.nbytes // 4, header.start)
        return [float(str(one)) for one in found]


_OPEN: WeakValueDictionary[tuple[int, ...], GgufFile] = WeakValueDictionary()


def opened(path: Path) -> GgufFile:
    """Return the file, checked; the one that is open already, if it has not changed. Its metadata
    are not writable. To pass over 300,000 tokens and merges takes a tenth of a second."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    file = _OPEN.get(key)
    if file is None or file.path != path:
        file = _OPEN[key] = GgufFile(path)
    return file


def open_gguf(path: Path) -> GgufParts:
    """Open a GGUF file, or all parts of a split one. ``CheckpointError`` for what is damaged, or
    does not belong together."""
    files = tuple(opened(one) for one in part_files(path))
    for number, file in enumerate(files):
        count, place = file.whole("split.count", len(files) if len(files) == 1 else 0), file.whole("split.no", number)
        if (count or 1, place) != (len(files), number):
            raise CheckpointError(
                f"{file.path} says that it is part {place + 1} of {count}, but its name makes it part {number + 1} of "
                f"{len(files)}; give all parts the names that they were written with"
            )
    parts = GgufParts(files)
    total = files[0].whole("split.tensors.count", len(parts.places))
    if total != len(parts.places):
        raise CheckpointError(f"{path}: the parts hold {len(parts.places)} tensors; expected {total}")
    return parts
