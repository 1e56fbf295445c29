"""The two kinds of state files, ``session`` and ``kv_cache``, each in the words of the other.

A session is one sequence whose last tokens may not be computed yet. A KV cache has a sequence of
computed tokens for each row. Only words are changed here: each reader checks what it is given, like
any other file's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import DataLoss, InvalidArgument, Unsupported
from quire.kv.statefile import StateFile

KV_CACHE = "kv_cache"
KV_CACHE_WITH_POSITIONS = "kv_cache_with_positions"
"""Another kind, for whoever does not know of positions would go on at wrong ones."""
NO_POSITIONS = "has tokens at positions that are not their indices, and those of a session stand at their indices"
SESSION = "session"


def row_prefix(row: int) -> str:
    """Return how the names of a row's tensors begin; those of a session have no prefix."""
    return f"row.{row}."


def cache_of_session(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's metadata as those of a KV cache of one row.

    ``tokens`` may be longer than ``lengths``: the rest has no state in the file. A row without a
    sequence is None.
    """
    sequence = found.get("sequence")
    length = sequence.get("length") if isinstance(sequence, Mapping) else 0
    window = window_of(found)
    if isinstance(sequence, Mapping) and (own := _window_of(sequence)) != (window and list(window)):
        raise DataLoss(f"the state's sequence has [window, sink] {own!r}, and its session {found.get('window')!r}")
    return {
        "kind": KV_CACHE,
        "model": found.get("model"),
        # No adapter had a part in a session without tokens, whichever it was to go on under.
        "adapters": [found.get("adapters") if found.get("tokens") else []],
        "batch_size": 1,
        "lengths": [length],
        "next_positions": [length],
        "tokens": [found.get("tokens")],
        "exact": [found.get("exact")],
        "modified": [found.get("modified")],
        "rows": [sequence],
    }


def session_of_cache(file: StateFile, row: int | None) -> tuple[dict[str, Any], str]:
    """Return a cache row's metadata as those of a session, and the prefix of its tensors.

    ``row`` None: the only one. ``InvalidArgument``: there are several, not this one, or its tokens
    are not known. ``Unsupported``: a window that sessions do not have.
    """
    found = file.metadata
    rows = found.get("rows")
    if not isinstance(rows, list) or not rows:
        raise DataLoss("the state of a KV cache does not say which rows it has")
    if row is None and len(rows) > 1:
        raise InvalidArgument(
            f"the state holds a KV cache of {len(rows)} rows, and a session is one; pick it with row="
        )
    picked = 0 if row is None else row
    if not 0 <= picked < len(rows):
        raise InvalidArgument(f"row {row} does not exist; the state holds a KV cache with rows 0..{len(rows) - 1}")
    strangers = [name for name in file.names if not any(name.startswith(row_prefix(one)) for one in range(len(rows)))]
    if strangers:
        raise InvalidArgument(f"the state holds tensors that no row has: {strangers[:3]}")
    sequence = rows[picked]
    if not isinstance(sequence, Mapping):
        raise DataLoss(f"row {picked} of the state has no metadata of its sequence")
    if sequence.get("eviction") != "token":
        raise Unsupported(
            f"row {picked} of the state lets go of tokens by {sequence.get('eviction')!r}; a session does by 'token'"
        )
    if of_row(found, "positions", picked, None) is not None:
        raise Unsupported(f"row {picked} of the state {NO_POSITIONS}")
    tokens = of_row(found, "tokens", picked, None)
    if tokens is None:
        raise InvalidArgument(f"the state does not tell the tokens of row {picked}, and a session goes by its tokens")
    length = sequence.get("length")
    if not isinstance(tokens, list) or len(tokens) != length:
        raise DataLoss(f"row {picked} of the state has {length!r} tokens and does not list as many ids")
    metadata = {
        "kind": SESSION,
        "model": found.get("model"),
        "adapters": of_row(found, "adapters", picked, []),
        "exact": of_row(found, "exact", picked, True),
        "modified": of_row(found, "modified", picked, False),
        "window": _window_of(sequence),
        "tokens": tokens,
        "positions": [0, len(tokens)],
        "sequence": sequence,
    }
    return metadata, row_prefix(picked)


def window_of(found: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return size and sink of a session's window; ``DataLoss`` for what is none."""
    match found.get("window"):
        case None:
            return None
        case [int(size), int(sink)] if type(size) is int and type(sink) is int and 0 <= sink < size:
            return size, sink
        case value:
            raise DataLoss(f"the state file holds window {value!r}; null or [window, sink] is expected")


def of_row(found: Mapping[str, Any], name: str, row: int, otherwise: object) -> Any:
    """Return a row's entry in a list by rows; ``otherwise`` where it is empty or missing."""
    value = found.get(name)
    if value is None or value == []:
        return otherwise
    if not isinstance(value, list) or len(value) <= row:
        raise DataLoss(f"{name} of the state are {value!r:.80}; a list of one entry per row is expected")
    return value[row]


def _window_of(sequence: Mapping[str, Any]) -> list[Any] | None:
    """Return ``[window, sink]`` of a sequence, as sessions have it."""
    window = sequence.get("window")
    return None if window is None else [window, sequence.get("sink")]
