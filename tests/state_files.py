"""State files with metadata that somebody has changed: every field of real ones, to anything."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import xxhash

from quire.statefile.container import plan_of, read_state, to_bytes

MISSING = object()
"""In place of a value: the field is not there."""
NOT_A_NUMBER = object()
"""In place of a value: NaN, which no writer of ours writes."""
VALUES = (
    MISSING,
    NOT_A_NUMBER,
    None,
    True,
    -1,
    2**31,
    2**63,
    10**300,
    0.5,
    "",
    "x" * 300,
    [],
    [[]],
    [-1],
    {},
    {"a": 1},
)
"""What any field may become. Where one of them is right, the file is as good as before."""

Path = tuple[str | int, ...]


def fields(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all fields; of lists of plain numbers the first item, of other lists the first
    and the last one.
    """
    if path:
        yield path
    if isinstance(value, dict):
        for name in value:
            yield from fields(value[name], (*path, name))
    elif isinstance(value, list) and value:
        for index in {0} if isinstance(value[0], int) else {0, len(value) - 1}:
            yield from fields(value[index], (*path, index))


def changed(data: bytes, path: Path, value: object) -> bytes:
    """The file, undamaged, with another value at ``path`` of its metadata."""
    with read_state(data) as file:
        metadata: Any = copy.deepcopy(dict(file.metadata))
        tensors = {name: file.tensor(name) for name in file.names}
        place = metadata
        for step in path[:-1]:
            place = place[step]
        if value is MISSING:
            del place[path[-1]]
        else:
            place[path[-1]] = "@nan@" if value is NOT_A_NUMBER else value
        found = to_bytes(metadata, plan_of(tensors), tensors.items())
    return resealed(found, b'\\"@nan@\\"', b"NaN") if value is NOT_A_NUMBER else found


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """The file with other bytes in its header, whose length and checksum are right."""
    end = 8 + int.from_bytes(data[:8], "little")
    assert data[8:end].count(old) == 1
    return sealed(data[8:end].replace(old, new), data[end:])


def sealed(text: bytes, rest: bytes = b"") -> bytes:
    """A file of this header, whose digits at bytes 36 to 67 become the checksum, and of these
    tensors.
    """
    head = len(text).to_bytes(8, "little")
    digest = xxhash.xxh3_128_hexdigest(head + text[:36] + b"0" * 32 + text[68:])
    return head + text[:36] + digest.encode() + text[68:] + rest


def of_metadata(metadata: str) -> bytes:
    """A file without tensors, of metadata that are JSON text, which no writer may have made."""
    document = f'{{"checksums":{{}},"format":"quire-state","metadata":{metadata},"version":1}}'
    text = f'{{"__metadata__":{{"header_checksum":"{"0" * 32}","quire":{json.dumps(document)}}}}}'
    return sealed(text.encode())


def metadata_of(data: bytes) -> dict[str, Any]:
    with read_state(data) as file:
        return dict(file.metadata)
