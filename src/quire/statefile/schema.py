"""Schemas of the metadata of state files, which ``docs/statefile.md`` describes.

They check metadata as a whole; then ``metadata_checks.validate`` checks that a state fits them. A
check is a function of a value and its path; it returns nothing, or raises ``Fault``, which names
the path, the value and what is expected. Checks are made of checks, one for a whole document.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from quire.base.errors import DataLoss, InvalidArgument

FORMAT_VERSION = 2
"""Of a sequence's metadata."""
MOST = 2**53
"""The largest count or position in a document. JSON readers take it exactly; sums fit an int64."""

Check: TypeAlias = Callable[[object, str], None]


class Fault(ValueError):
    """A part of a document that is not as declared."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        super().__init__(f"{path} is {found}; {expected} is expected")


def _shown(value: object) -> str:
    # repr would make the text of the whole value first; reprlib reads its beginning only.
    return reprlib.repr(value)


def integer(least: int = 0, most: int = MOST) -> Check:
    """Check for an integer in [least, most]; no bool and no float."""

    def check(value: object, path: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise Fault(path, _shown(value), f"an integer in [{least}, {most}]")

    return check


def integers(least: int = 0, most: int = MOST) -> Check:
    """Check for a list of such integers, of any length, without a call for each."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise Fault(path, _shown(value), "a list of integers")
        if not set(map(type, value)) <= {int} or (value and not least <= min(value) <= max(value) <= most):
            one = integer(least, most)
            for index, item in enumerate(value):
                one(item, f"{path}[{index}]")

    return check


def text(value: object, path: str) -> None:
    """Check for text."""
    if not isinstance(value, str):
        raise Fault(path, _shown(value), "text")


def flag(value: object, path: str) -> None:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise Fault(path, _shown(value), "true or false")


def anything(value: object, path: str) -> None:
    """Accept everything, for what is only ever compared with something known."""


def mapping(value: object, path: str) -> None:
    """Check for an object, whatever is in it."""
    if not isinstance(value, Mapping):
        raise Fault(path, _shown(value), "an object")


def one_of(*accepted: str) -> Check:
    """Check for one of these texts."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, str) or value not in accepted:
            raise Fault(path, _shown(value), " or ".join(map(repr, accepted)))

    return check


def nullable(check: Check) -> Check:
    """Check for what ``check`` accepts, or null."""
    return lambda value, path: None if value is None else check(value, path)


def list_of(check: Check) -> Check:
    """Check for a list of what ``check`` accepts."""

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise Fault(path, _shown(value), "a list")
        for index, item in enumerate(value):
            check(item, f"{path}[{index}]")

    return check_all


def row(*checks: Check) -> Check:
    """Check for a list of exactly these items."""

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) != len(checks):
            raise Fault(path, _shown(value), f"a list of {len(checks)}")
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            check(item, f"{path}[{index}]")

    return check_all


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Check for an object with exactly these keys; the ``optional`` ones may be missing."""
    known = {**required, **(optional or {})}

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            raise Fault(path, _shown(value), "an object")
        for name in required:
            if name not in value:
                raise Fault(f"{path}.{name}", "missing", "a value")
        for name, item in value.items():
            if name not in known:
                raise Fault(f"{path}.{name!s:.40}", "not known", f"one of {', '.join(known)}")
            known[name](item, f"{path}.{name}")

    return check_all


TOKENS = integers(-(2**63), 2**63 - 1)
"""Ids, and the negative numbers that stand for other inputs in KV caches."""

RUNS = list_of(row(integer(), nullable(text)))
"""Adapters: ``[from position, fingerprint]``."""

MODEL = record({"architecture": text, "config": text, "weights": text}, {"length": text})

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
    {"format": text, "num_kv_heads": integer(1), "head_dim": integer(1), "row_dim": integer(1)},
)

RECURRENT = record(
    {"layer": integer(), "states": list_of(record({"shape": integers(1), "dtype": text, "initial": anything}))}
)

EXTENT: Mapping[str, Check] = {
    "length": integer(),
    "held": list_of(record({"layers": integers(), "ranges": list_of(row(integer(), integer()))})),
    "window": nullable(integer(1)),
    "sink": integer(),
    "eviction": one_of("token", "forward"),
    "evicted": integer(),
    "kept_recurrent_positions": integers(1),
}
"""What of a sequence is there. Cross layers may be missing."""
CROSS = list_of(record({"layer": integer(), "rows": nullable(integer(1))}))

SEQUENCE = record(
    {
        "format_version": integer(),
        "layout_hash": text,
        "first_layer": integer(),
        "layers": list_of(LAYER),
        **EXTENT,
    },
    {"layer_ids": integers(), "recurrent": list_of(RECURRENT), "cross": CROSS},
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
    },
    {"exact_tokens": nullable(integer())},
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

ORIGINS: Mapping[str, Check] = {
    "exact": list_of(flag),
    "exact_tokens": list_of(nullable(integer())),
    "modified": list_of(flag),
}
"""Of each row; files from before sessions could be caches do not have them."""

POSITIONS = integers(0, 2**31 - 1)
"""Positions at which the tokens of a row were rotated."""

OBJECT = record(
    {"kind": text, "name": text, "model": MODEL, "layout_hash": text, "tokens": TOKENS, "adapters": RUNS},
    {"sequence": _sequence, "chunk": record({"lead": TOKENS, "position": integer(), "exact": flag})},
)
RECORD = record({"kind": text, "name": text, "document": mapping})

KINDS: Mapping[str, Check] = {
    "session": SESSION,
    "kv_cache": record(CACHE, ORIGINS),
    "kv_cache_with_positions": record({**CACHE, "positions": list_of(nullable(POSITIONS))}, ORIGINS),
    "object": OBJECT,
    "record": RECORD,
}
"""By the ``kind`` of the file."""
OF_SEQUENCES = ("session", "kv_cache", "kv_cache_with_positions")
"""Kinds of files that hold whole sequences."""


def check_metadata(metadata: Mapping[str, Any], expected: Collection[str] = OF_SEQUENCES) -> None:
    """Refuse metadata that do not fit the schema of their kind, one of ``expected``.

    ``InvalidArgument`` for another kind, ``DataLoss`` with the field for everything else.
    """
    kind = metadata.get("kind")
    if not isinstance(kind, str) or kind not in expected:
        raise InvalidArgument(f"the state file holds kind {kind!r:.60}; {' or '.join(map(repr, expected))} is expected")
    try:
        KINDS[kind](metadata, "metadata")
    except Fault as fault:
        raise DataLoss(f"the state file is malformed: {fault}") from None
