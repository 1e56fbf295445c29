"""Records: documents as objects. No torch.

A record is a state file of kind ``record`` without tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from quire.base.errors import DataLoss, QuireError
from quire.contracts.store import Blob, ObjectKey, ObjectKind
from quire.statefile.header import HeaderDraft, read_header
from quire.statefile.schema import Fault, check_metadata, fitted

T = TypeVar("T")


class Unfit(QuireError):
    """An object that is damaged, or does not match its key. ``code`` is the reason."""


def pack_record(key: ObjectKey, document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a record."""
    return HeaderDraft({"kind": "record", "name": key.name, "document": dict(document)}, []).encode({})


def unpack_record(key: ObjectKey, blob: Blob, kind: type[T]) -> T:
    """Return the document of a record, of a declared type. Raise ``Unfit``."""
    assert key.kind is ObjectKind.RECORD
    try:
        header = read_header(memoryview(blob).cast("B"), "the record")
        metadata: Mapping[str, Any] = header.metadata
        check_metadata(metadata, ("record",))
        if header.specs:
            raise DataLoss("the record has tensors; none are expected")
    except QuireError as error:
        raise Unfit(f"record {key.name}: {error}", code="damaged") from None
    if metadata["name"] != key.name:
        raise Unfit(f"record {key.name} is another one, {metadata['name']:.100}", code="other")
    try:
        return fitted(metadata["document"], kind, "document")
    except Fault as fault:
        raise Unfit(f"record {key.name} is malformed: {fault}", code="damaged") from None
