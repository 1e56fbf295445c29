"""Schemas of Quire's JSON documents: ``docs/statefile.md`` describes those of state files.

A schema is a ``Document``, a struct whose annotations are the only declaration of its fields and of
the values that they accept. ``fitted`` makes a document of parsed JSON, or raises ``Fault``, which
names the path, the value and what is expected. ``check_metadata`` does that for the metadata of a
whole file; then ``kv.metadata_checks`` checks that a state fits them.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, inspect

from quire.base.errors import DataLoss, InvalidArgument

FORMAT_VERSION = 2
"""Of a sequence's metadata."""
MOST = 2**53
"""The largest count or position in a document. JSON readers take it exactly; sums fit an int64."""

T = TypeVar("T")
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=MOST)]
Token: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An id, or a negative number that stands for another input in KV caches."""
Position: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A position at which a token of a row was rotated."""
Run: TypeAlias = tuple[Count, str | None]
"""Adapters: ``[from position, fingerprint]``."""


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object with these fields and no others. Those with a default may be missing."""


class TensorEntry(Document, frozen=True):
    """A tensor in the table of a safetensors file."""

    dtype: str
    shape: list[Annotated[int, Meta(ge=0, le=2**63 - 1)]]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], int]


class Contents(Document, frozen=True):
    """The fields that a state file adds to a safetensors file."""

    format: str
    version: int
    checksums: dict[str, str]
    """By the names of the tensors."""
    metadata: dict[str, Any]


class ModelFields(Document, frozen=True):
    architecture: str
    config: str
    weights: str
    length: str | UnsetType = UNSET


class StoredLayer(Document, frozen=True):
    kind: Literal["full", "window", "latent", "cross"]
    window: Size | None
    dtype: str
    value_dim: Size
    rope_mode: str
    rope: Any
    """Only compared with the reader's own."""
    rope_fingerprint: str
    format: str | UnsetType = UNSET
    num_kv_heads: Size | UnsetType = UNSET
    head_dim: Size | UnsetType = UNSET
    row_dim: Size | UnsetType = UNSET


class RecurrentState(Document, frozen=True):
    shape: list[Size]
    dtype: str
    initial: Any


class RecurrentLayer(Document, frozen=True):
    layer: Count
    states: list[RecurrentState]


class HeldRanges(Document, frozen=True):
    layers: list[Count]
    ranges: list[tuple[Count, Count]]


class CrossRows(Document, frozen=True):
    layer: Count
    rows: Size | None


class Extent(Document, frozen=True, kw_only=True):
    """The parts of a sequence that are there."""

    length: Count
    held: list[HeldRanges]
    window: Size | None
    sink: Count
    eviction: Literal["token", "forward"]
    evicted: Count
    kept_recurrent_positions: list[Size]
    cross: list[CrossRows] | UnsetType = UNSET


class ExportedTensor(Document, frozen=True):
    shape: list[Count] = []
    bytes: Count | UnsetType = UNSET
    checksum: str = ""


class GroupOfTensors(Document, frozen=True):
    """The tensors of one layer in an export."""

    group: Count
    tensors: dict[str, ExportedTensor]


class StoredSequence(Extent, frozen=True, kw_only=True):
    format_version: Count
    layout_hash: str
    first_layer: Count
    layers: list[StoredLayer]
    layer_ids: list[Count] | UnsetType = UNSET
    recurrent: list[RecurrentLayer] | UnsetType = UNSET


class StoredSession(Document, frozen=True):
    kind: str
    model: ModelFields
    adapters: list[Run]
    exact: bool
    modified: bool
    window: tuple[Size, Count] | None
    tokens: list[Token]
    positions: tuple[Count, Count]
    sequence: StoredSequence | None
    exact_tokens: Count | None = None
    chat: Count | UnsetType = UNSET
    """The messages of its chat, which is in the tensor ``chat``."""


class StoredCall(msgspec.Struct, frozen=True):
    """The checked fields of a message's tool call, which may have others."""

    function: dict[str, Any] | UnsetType = UNSET


class StoredMessage(msgspec.Struct, frozen=True):
    """The checked fields of a chat's message, which may have others."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[StoredCall] | None = None


class StoredInputs(Document, frozen=True):
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class StoredChat(Document, frozen=True):
    """The chat of a session, also in journals and commits."""

    turns: list[tuple[Count, StoredMessage, bool]]
    """Of each message its end, itself, and whether the model wrote it."""
    cut: bool
    start: Count | None
    inputs: StoredInputs | UnsetType = UNSET


class StoredCache(Document, frozen=True, kw_only=True):
    kind: str
    model: ModelFields
    adapters: list[list[Run]]
    dtype: str
    batch_size: Size
    capacity: Count
    dynamic: bool
    lengths: list[Count]
    next_positions: list[Count]
    tokens: list[list[Token] | None]
    rows: list[StoredSequence]
    # Of each row; files from before sessions could be caches do not have them.
    exact: list[bool] | UnsetType = UNSET
    exact_tokens: list[Count | None] | UnsetType = UNSET
    modified: list[bool] | UnsetType = UNSET


class StoredCacheWithPositions(StoredCache, frozen=True, kw_only=True):
    positions: list[list[Position] | None]


class Chunk(Document, frozen=True):
    lead: list[Token]
    position: Count
    exact: bool


class StoredObject(Document, frozen=True):
    kind: str
    name: str
    model: ModelFields
    layout_hash: str
    tokens: list[Token]
    adapters: list[Run]
    sequence: StoredSequence | UnsetType = UNSET
    chunk: Chunk | UnsetType = UNSET


class StoredRecord(Document, frozen=True):
    kind: str
    name: str
    document: dict[str, Any]


KINDS: Mapping[str, type[Document]] = {
    "session": StoredSession,
    "kv_cache": StoredCache,
    "kv_cache_with_positions": StoredCacheWithPositions,
    "object": StoredObject,
    "record": StoredRecord,
}
"""By the ``kind`` of the file."""
OF_SEQUENCES = ("session", "kv_cache", "kv_cache_with_positions")
"""Kinds of files that hold whole sequences."""


def check_metadata(metadata: Mapping[str, Any], expected: Collection[str] = OF_SEQUENCES) -> None:
    """Refuse metadata that do not fit the schema of their kind, one of ``expected``.

    ``InvalidArgument`` for another kind, or another version of a sequence; ``DataLoss`` with the
    field for everything else.
    """
    kind = metadata.get("kind")
    if not isinstance(kind, str) or kind not in expected:
        raise InvalidArgument(f"the state file holds kind {kind!r:.60}; {' or '.join(map(repr, expected))} is expected")
    rows = metadata.get("rows")
    sequences = [("sequence", metadata.get("sequence"))]
    sequences += [(f"rows[{index}]", one) for index, one in enumerate(rows if isinstance(rows, list) else ())]
    for name, one in sequences:
        version = one.get("format_version") if isinstance(one, Mapping) else None
        if type(version) is int and version != FORMAT_VERSION:
            raise InvalidArgument(
                f"the state file is of another version: metadata.{name}.format_version is {version!s:.20}; {FORMAT_VERSION} is "
                "expected"
            )
    try:
        fitted(metadata, KINDS[kind], "metadata")
    except Fault as fault:
        raise DataLoss(f"the state file is malformed: {fault}") from None


class Fault(ValueError):
    """A part of a document that is not as declared."""


_PLACE = re.compile(r"(.*?)(?: - at `\$([^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_NAMES = {"int": "an integer", "str": "text", "bool": "true or false", "array": "a list", "object": "an object"}


def fitted(value: object, kind: type[T], path: str) -> T:
    """Return parsed JSON as a document of a schema. ``Fault``, with ``path`` before the place."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Fault(_explained(str(error), value, inspect.type_info(kind), path)) from None


def _explained(error: str, value: Any, kind: inspect.Type, path: str) -> str:
    """Return an error of msgspec with the value that was found and the values that are expected."""
    message, place = _PLACE.fullmatch(error).groups()  # type: ignore[union-attr]
    for name, index in _STEP.findall(place or ""):
        try:
            value, kind, path = _step(value, kind, name or int(index), path)
        except (LookupError, TypeError):
            break  # What stands behind is part of a name in the file.
    if (missing := re.fullmatch(r"Object missing required field `(.*)`", message)) is not None:
        return f"{path}.{missing[1]} is missing; a value is expected".lstrip(".")
    if message.startswith("Object contains unknown field") and isinstance(kind := _of(kind, dict), inspect.StructType):
        known = [field.encode_name for field in kind.fields]
        name = next((name for name in value if name not in known), "") if isinstance(value, Mapping) else ""
        return f"{path}.{name:.40} is not known; one of {', '.join(known)} is expected".lstrip(".")
    if isinstance(kind, inspect.LiteralType):
        expected = " or ".join(map(repr, kind.values))
    else:
        expected = message.removeprefix("Expected ").partition(", got")[0].replace("of length", "of")
        expected = re.sub(
            r"`([^`]*)`", lambda one: " or ".join(_NAMES.get(name, name) for name in one[1].split(" | ")), expected
        )
    # repr would make the text of the whole value first; reprlib reads its beginning only.
    return f"{path.lstrip('.')} is {reprlib.repr(value)}; {expected} is expected"


def _step(value: Any, kind: inspect.Type, step: str | int, path: str) -> tuple[Any, inspect.Type, str]:
    """Return the value, the declared type and the path of a field or of an item of a list."""
    kind = _of(kind, dict if isinstance(step, str) else list)
    if isinstance(kind, inspect.StructType):
        kind = {field.encode_name: field.type for field in kind.fields}[str(step)]
    elif isinstance(kind, inspect.TupleType):
        kind = kind.item_types[int(step)]
    elif isinstance(kind, inspect.ListType):
        kind = kind.item_type
    return value[step], kind, f"{path}.{step}" if isinstance(step, str) else f"{path}[{step}]"


def _of(kind: inspect.Type, found: type) -> inspect.Type:
    """Return the alternative of a declared type that describes an object, or a list."""
    wanted = inspect.StructType if found is dict else (inspect.ListType, inspect.TupleType)
    options: Sequence[inspect.Type] = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((one for one in options if isinstance(one, wanted)), kind)
