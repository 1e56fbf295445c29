"""Schemas of the metadata of state files, which ``docs/statefile.md`` describes.

They check metadata as a whole; then ``metadata_checks.validate`` checks that a state fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import DataLoss, InvalidArgument
from quire.kv.metadata_checks import FORMAT_VERSION
from quire.kv.schema import (
    Check,
    Fault,
    anything,
    flag,
    integer,
    integers,
    list_of,
    nullable,
    one_of,
    record,
    row,
    text,
)

TOKENS = integers(-(2**63), 2**63 - 1)
"""Ids, and the negative numbers that stand for other inputs in KV caches."""

RUNS = list_of(row(integer(), nullable(text)))
"""Adapters: ``[from position, fingerprint]``."""

MODEL = record({"architecture": text, "config": text, "weights": text})

LAYER = record(
    {
        "kind": one_of("full", "window", "latent", "cross"),
        "window": nullable(integer(1)),
        "dtype": text,
        "value_dim": integer(1),
        "rope_mode": text,
        "rope": anything,
        "rope_fingerprint": text,
    },
    {"num_kv_heads": integer(1), "head_dim": integer(1), "row_dim": integer(1)},
)

RECURRENT = record(
    {"layer": integer(), "states": list_of(record({"shape": integers(1), "dtype": text, "initial": anything}))}
)

SEQUENCE = record(
    {
        "format_version": integer(),
        "layout_hash": text,
        "first_layer": integer(),
        "layers": list_of(LAYER),
        "length": integer(),
        "held": list_of(record({"layers": integers(), "ranges": list_of(row(integer(), integer()))})),
        "window": nullable(integer(1)),
        "sink": integer(),
        "eviction": one_of("token", "forward"),
        "evicted": integer(),
        "kept_recurrent_positions": integers(1),
    },
    {
        "layer_ids": integers(),
        "recurrent": list_of(RECURRENT),
        "cross": list_of(record({"layer": integer(), "rows": nullable(integer(1))})),
    },
)


def _sequence(value: object, path: str) -> None:
    """Check for what ``SEQUENCE`` declares; ``InvalidArgument`` for another version of it."""
    version = value.get("format_version") if isinstance(value, Mapping) else None
    if type(version) is int and version != FORMAT_VERSION:
        raise InvalidArgument(
            f"the state file is of another version: {path}.format_version is {version!s:.20}; {FORMAT_VERSION} is expected"
        )
    SEQUENCE(value, path)


SESSION = record(
    {
        "kind": text,
        "model": MODEL,
        "adapters": RUNS,
        "exact": flag,
        "modified": flag,
        "window": nullable(row(integer(1), integer())),
        "tokens": TOKENS,
        "positions": row(integer(), integer()),
        "sequence": nullable(_sequence),
    }
)

CACHE: Mapping[str, Check] = {
    "kind": text,
    "model": MODEL,
    "adapters": list_of(RUNS),
    "dtype": text,
    "batch_size": integer(1),
    "capacity": integer(),
    "dynamic": flag,
    "lengths": integers(),
    "next_positions": integers(),
    "tokens": list_of(nullable(TOKENS)),
    "rows": list_of(_sequence),
}

ORIGINS: Mapping[str, Check] = {"exact": list_of(flag), "modified": list_of(flag)}
"""Of each row; files from before sessions could be caches do not have them."""

POSITIONS = integers(0, 2**31 - 1)
"""Positions at which the tokens of a row were rotated."""

KINDS: Mapping[str, Check] = {
    "session": SESSION,
    "kv_cache": record(CACHE, ORIGINS),
    "kv_cache_with_positions": record({**CACHE, "positions": list_of(nullable(POSITIONS))}, ORIGINS),
}
"""By the ``kind`` of the file."""


def check_metadata(metadata: Mapping[str, Any], *expected: str) -> None:
    """Refuse metadata that do not fit the schema of their kind, one of ``expected`` (default: any).

    ``InvalidArgument`` for another kind, ``DataLoss`` with the field for everything else.
    """
    kind, accepted = metadata.get("kind"), expected or tuple(KINDS)
    if not isinstance(kind, str) or kind not in accepted:
        raise InvalidArgument(f"the state file holds kind {kind!r:.60}; {' or '.join(map(repr, accepted))} is expected")
    try:
        KINDS[kind](metadata, "metadata")
    except Fault as fault:
        raise DataLoss(f"the state file is malformed: {fault}") from None
