"""The header of a state file: its contents, its encoding, and all checks when it is read.

Eight bytes hold the length of the JSON that follows, and then come the tensors' bytes, without
gaps. That is a safetensors file. A state file adds one checksum of the header, at a fixed place,
and one per tensor. The whole format is in ``docs/statefile.md``. No file access here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import xxhash

from quire.base.errors import DataLoss, InvalidArgument
from quire.statefile.schema import Contents, Fault, TensorEntry, fitted

if TYPE_CHECKING:
    import torch

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Span: TypeAlias = tuple[int, int]
"""First byte and the one after the last, counted from the end of the header."""

FORMAT = "quire-state"
VERSION = 1
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors; more than ten million token ids fit."""
MAX_CONTAINERS = 1_000_000
"""Arrays and objects in a header, at most. A tensor has three; JSON readers make objects of all."""
MAX_METADATA_DEPTH = 64
MAX_RANK = 64
REMEMBERED_CHARACTERS = 1 << 16
"""A table of tensors of up to so much text is remembered: runs of equal length have equal ones."""


@cache
def dtypes() -> Mapping[str, torch.dtype]:
    """Return the dtypes by their names in the header, as in safetensors."""
    # Here: records have no tensors, and a reader of records alone need not wait for torch.
    import torch

    return {
        "F64": torch.float64,
        "I64": torch.int64,
        "F32": torch.float32,
        "I32": torch.int32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I8": torch.int8,
        "U8": torch.uint8,
    }


@cache
def _names() -> Mapping[torch.dtype, str]:
    return {dtype: name for name, dtype in dtypes().items()}


# The digits of the header's checksum stand at a fixed place in every version of the format, so that
# a reader can tell damage from a version that it does not know.
_PREFIX = b'{"__metadata__":{"header_checksum":"'
_DIGEST = slice(8 + len(_PREFIX), 8 + len(_PREFIX) + 32)
_ZEROS = "0" * 32
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """The declaration of a tensor, which is needed before the first byte is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements, in row-major order."""
        found = [1]
        for size in self.shape[:0:-1]:
            found.append(found[-1] * max(1, size))
        return tuple(found[::-1]) if self.shape else ()


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """Limits of a header, checked before parsing, because a parser lets no other thread run."""

    bytes: int
    containers: int
    """Arrays and objects."""
    values: int
    """Commas, of which there is one between two values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """A header that was read and found right."""

    metadata: Mapping[str, JSON]
    specs: Mapping[str, TensorSpec]
    spans: Mapping[str, Span]
    checksums: Mapping[str, str]
    data_start: int
    """Offset of the first tensor in the file."""


# Encoding


class HeaderDraft:
    """A header with fixed length and offsets before the checksums of the tensors are known.

    ``InvalidArgument`` if the metadata are not JSON, if names repeat, for dtypes and shapes that
    cannot be stored, and for more than ``MAX_HEADER_BYTES``.
    """

    def __init__(self, metadata: Mapping[str, JSON], plan: Sequence[TensorSpec]) -> None:
        _check_plan(plan)
        self.specs = {spec.name: spec for spec in plan}
        self.spans: dict[str, Span] = {}
        # As text: the caller may change the mapping while tensors are written.
        self._metadata = _metadata_text(metadata)
        end = 0
        # Wide elements first, as safetensors does, so that every tensor is aligned to its element.
        for spec in sorted(plan, key=lambda spec: -spec.dtype.itemsize):
            self.spans[spec.name] = (end, end + spec.nbytes)
            end += spec.nbytes
        encoded = self.encode(dict.fromkeys(self.specs, _ZEROS))
        self.data_start = len(encoded)
        self.file_size = self.data_start + end
        if self.data_start - 8 > MAX_HEADER_BYTES:
            raise InvalidArgument(
                f"metadata and names of {len(plan)} tensors make a header of {self.data_start - 8} bytes; "
                f"a state file holds at most {MAX_HEADER_BYTES}"
            )
        if (found := containers(encoded)) > MAX_CONTAINERS:
            raise InvalidArgument(
                f"metadata and {len(plan)} tensors make a header of {found} arrays and objects; a state file holds at "
                f"most {MAX_CONTAINERS}"
            )

    def encode(self, checksums: Mapping[str, str]) -> bytes:
        """Return length bytes and JSON, ``data_start`` bytes for any checksums."""
        # Spliced, in the order of sorted keys, because the metadata are text already.
        document = (
            f'{{"checksums":{_canonical({name: checksums[name] for name in self.specs})},"format":"{FORMAT}",'
            f'"metadata":{self._metadata},"version":{VERSION}}}'
        )
        table: dict[str, JSON] = {"__metadata__": {"header_checksum": _ZEROS, "quire": document}}
        for name, spec in self.specs.items():
            table[name] = {"dtype": _names()[spec.dtype], "shape": spec.shape, "data_offsets": self.spans[name]}
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = bytearray(len(text).to_bytes(8, "little") + text)
        header[_DIGEST] = _header_checksum(memoryview(header)).encode()
        return bytes(header)


def checksum(data: memoryview) -> str:
    """Return XXH3, 128 bits, seed 0: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def _header_checksum(header: memoryview) -> str:
    """Return the checksum of length bytes and JSON, with zeros in place of its own digits."""
    digest = xxhash.xxh3_128(header[: _DIGEST.start])
    digest.update(_ZEROS.encode())
    digest.update(header[_DIGEST.stop :])
    return digest.hexdigest()


def _check_plan(plan: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in plan:
        name = spec.name
        if not isinstance(name, str) or name in ("", "__metadata__") or not _is_encodable(name):
            raise InvalidArgument(f"a tensor's name must be a non-empty text, not '__metadata__', got {name!r}")
        if name in seen:
            raise InvalidArgument(f"tensor {name!r} is planned twice; names must differ")
        seen.add(name)
        if spec.dtype not in _names():
            accepted = ", ".join(str(dtype) for dtype in dtypes().values())
            raise InvalidArgument(f"tensor {name!r} has dtype {spec.dtype}; a state file holds {accepted}")
        if not _is_shape(spec.shape, spec.dtype.itemsize):
            raise InvalidArgument(f"tensor {name!r} has shape {spec.shape!r}; expected up to {MAX_RANK} sizes >= 0")


def _metadata_text(metadata: Mapping[str, JSON]) -> str:
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata must be a mapping, got {type(metadata).__name__}")
    check_json(metadata, "metadata")
    try:
        text = _canonical(metadata)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"metadata must be JSON with finite numbers: {error}") from None
    if not _is_encodable(text):
        raise InvalidArgument("metadata must be valid Unicode text, got a lone surrogate in it")
    return text


def check_json(value: object, what: str, levels: int = MAX_METADATA_DEPTH) -> None:
    """Refuse keys that json.dumps would change silently and depth that a reader might not parse.
    ``what``: the name of all of it."""
    if not isinstance(value, Mapping | list | tuple):
        return
    if levels == 0:
        raise InvalidArgument(f"{what} may be nested {MAX_METADATA_DEPTH} levels deep, this is deeper")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(f"keys in {what} must be str, got {key!r}")
            check_json(item, what, levels - 1)
    elif not set(map(type, value)) <= {int, float, str, bool}:  # long lists of token ids are not walked in Python
        for item in value:
            check_json(item, what, levels - 1)


def _canonical(value: object) -> str:
    """Return JSON with sorted keys, without spaces, text as it is."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_as_dict
    )


def _as_dict(value: object) -> dict[str, JSON]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")


# Decoding


def read_header(view: memoryview, label: str, limits: HeaderLimits | None = None) -> Header:
    """Return the header of the file with the bytes ``view``; ``label`` names the file in messages.

    The order of checks is part of the format: length, checksum, format and version, and only then
    what this version means. So damage is called damage (``DataLoss``), and an undamaged file of
    another version is called that (``InvalidArgument``).
    """
    text = _checked_json(view, label, limits or HeaderLimits(MAX_HEADER_BYTES, MAX_CONTAINERS, MAX_HEADER_BYTES))
    fields, rest = _metadata_and_rest(_decode(text, label), label)
    if not isinstance(fields, dict) or not isinstance(fields.get("quire"), str):
        raise DataLoss(f"{label}: the header's metadata must hold the text 'quire'")
    document = _parse(fields["quire"], label)
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        found = document.get(key)
        if type(found) is not type(expected) or found != expected:
            raise InvalidArgument(
                f"{label} is undamaged but of another {key}: {expected!r} expected, {found!r:.80} found"
            )
    data_start = 8 + len(text)
    table = _remembered_table if len(rest) <= REMEMBERED_CHARACTERS else _table_behind
    specs, spans = table(rest, len(view) - data_start, label)
    try:
        contents = fitted(document, Contents, "quire")
    except Fault as fault:
        raise DataLoss(f"{label}: {fault}") from None
    if contents.checksums.keys() != specs.keys():
        raise DataLoss(f"{label}: checksums of {some(specs)} expected, of {some(contents.checksums)} found")
    return Header(
        metadata=contents.metadata, specs=specs, spans=spans, checksums=contents.checksums, data_start=data_start
    )


def _checked_json(view: memoryview, label: str, limits: HeaderLimits) -> memoryview:
    """Return the bytes of the JSON, their checksum verified and nothing of them parsed."""
    if len(view) < 8:
        raise DataLoss(f"{label} is truncated or no safetensors file: at least 8 bytes expected, {len(view)} found")
    size = int.from_bytes(view[:8], "little")
    limit = min(limits.bytes, len(view) - 8)
    if size > limit:
        if size > len(view) - 8 and bytes(view[8:9]) != b"{":
            raise DataLoss(f"{label} is no state file: it begins with {bytes(view[:16])!r}")
        raise DataLoss(
            f"{label} is truncated, damaged or no safetensors file: a header of at most {limit} bytes expected "
            f"in a file of {len(view)}, {size} found"
        )
    end = 8 + size
    text = bytes(view[8:end])
    for what, most, found in (
        ("arrays and objects", limits.containers, containers(text)),
        ("values", limits.values, text.count(b",")),
    ):
        if found > most:
            raise DataLoss(f"{label} is malformed: a header of at most {most} {what} expected, {found} found")
    if end < _DIGEST.stop or view[8 : _DIGEST.start] != _PREFIX:
        _refuse_foreign(view[8:end], len(view) - end, label)
    stored = str(view[_DIGEST], "ascii", "replace")
    computed = _header_checksum(view[:end])
    if stored != computed:
        raise DataLoss(f"{label}: the header is damaged: checksum {stored!r} expected, {computed!r} found")
    return view[8:end]


def containers(text: bytes) -> int:
    """Return the number of arrays and objects in JSON text, or more if strings have brackets."""
    return text.count(b"[") + text.count(b"{")


def _refuse_foreign(text: memoryview, data_len: int, label: str) -> NoReturn:
    """Tell a damaged state file, another safetensors file and anything else apart."""
    table = _parse(_decode(text, label), label)
    fields = table.pop("__metadata__", {})
    if isinstance(fields, dict) and fields.keys() & {"quire", "header_checksum"}:
        raise DataLoss(
            f"{label}: the header is damaged or was rewritten by another tool: "
            f"{_PREFIX!r} expected at its start, {bytes(text[: len(_PREFIX)])!r} found"
        )
    specs, _ = _tensor_table(table, data_len, label)
    raise InvalidArgument(
        f"{label} is a safetensors file of {len(specs)} tensors, but no state file: 'header_checksum' and 'quire' "
        f"expected in its metadata, {some(fields)} found"
    )


def _metadata_and_rest(text: str, label: str) -> tuple[Any, str]:
    """Return the value of ``__metadata__``, which comes first, and the text behind it."""
    begin = text.index(":") + 1
    try:
        fields, end = _DECODER.raw_decode(text, begin)
    except (RecursionError, ValueError):
        end = len(text)  # All of it says what is wrong.
    if end == len(text) or "\\u" in text[begin:end]:
        return _parse(text, label)["__metadata__"], text[end:]
    return fields, text[end:]


def _table_behind(rest: str, data_len: int, label: str) -> tuple[dict[str, TensorSpec], dict[str, Span]]:
    """Return the result of ``_tensor_table`` for the text behind the value of ``__metadata__``."""
    table = _parse('{"__metadata__":0' + rest, label)
    del table["__metadata__"]
    return _tensor_table(table, data_len, label)


_remembered_table = lru_cache(maxsize=32)(_table_behind)


def _tensor_table(table: Mapping[str, Any], data_len: int, label: str) -> tuple[dict[str, TensorSpec], dict[str, Span]]:
    """Specs and byte ranges by name; the ranges cover the data exactly, without gap or overlap."""
    specs: dict[str, TensorSpec] = {}
    spans: dict[str, Span] = {}
    for name, entry in table.items():
        specs[name], spans[name] = _tensor_entry(name, entry, label)
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1]):
        if span[0] != end:
            fault = "overlaps the one before" if span[0] < end else "leaves a gap"
            raise DataLoss(f"{label}: tensor {name!r} {fault}: byte {end} expected as its first, {span[0]} found")
        end = span[1]
    if end != data_len:
        fault = "is truncated" if data_len < end else "has trailing bytes"
        raise DataLoss(f"{label} {fault}: {end} bytes of tensors expected, {data_len} found")
    return specs, spans


def _tensor_entry(name: str, entry: object, label: str) -> tuple[TensorSpec, Span]:
    try:
        found = fitted(entry, TensorEntry, f"tensor {name!r}")
    except Fault as fault:
        raise DataLoss(f"{label}: {fault}") from None
    if found.dtype not in dtypes():
        raise InvalidArgument(f"{label}: tensor {name!r}: dtype {some(dtypes())} expected, {found.dtype!r:.80} found")
    dtype = dtypes()[found.dtype]
    if not _is_shape(found.shape, dtype.itemsize):
        raise DataLoss(f"{label}: tensor {name!r}: up to {MAX_RANK} sizes >= 0 expected, {found.shape!r:.80} found")
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(found.shape))
    if found.data_offsets[1] - found.data_offsets[0] != spec.nbytes:
        raise DataLoss(
            f"{label}: tensor {name!r}, {found.dtype} {found.shape}: two offsets {spec.nbytes} bytes apart expected, "
            f"{list(found.data_offsets)!r:.80} found"
        )
    return spec, found.data_offsets


def _is_shape(shape: Sequence[object], itemsize: int) -> bool:
    """Return whether strides and bytes of this shape fit an int64, also where a size is 0."""
    extent = itemsize
    for size in shape[: MAX_RANK + 1]:
        if type(size) is not int or not 0 <= size < 1 << 63:
            return False
        extent *= max(size, 1)
    return len(shape) <= MAX_RANK and extent < 1 << 63


# Strict JSON


def _decode(text: memoryview, label: str) -> str:
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise DataLoss(f"{label}: the header is no UTF-8 text ({error}): damaged, or no safetensors file") from None


def _parse(text: str, label: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys, NaN, infinity or lone surrogates."""
    try:
        found = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise DataLoss(f"{label}: the header's JSON is nested too deeply") from None
    except ValueError as error:
        raise DataLoss(f"{label}: the header is no valid JSON ({error}): damaged, or no safetensors file") from None
    if not isinstance(found, dict):
        raise DataLoss(f"{label}: a JSON object expected in the header, {type(found).__name__} found")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r:.80} stands twice in one object")
        found[key] = value
    return found


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text:.80} is no finite JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_number(text)
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_number, parse_float=_finite)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def some(names: Iterable[str]) -> str:
    """Return the first few names, for a message."""
    listed = list(names)
    shown = ", ".join(f"{name!r:.80}" for name in listed[:8]) or "none"
    return shown if len(listed) <= 8 else f"{shown} and {len(listed) - 8} more"
