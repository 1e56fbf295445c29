"""Sessions to state files and back (the format is documented in ``docs/statefile.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quire.branches import saved_kinds
from quire.branches.branch import Origin
from quire.branches.history import TokenHistory
from quire.branches.saved_kinds import KV_CACHE, KV_CACHE_WITH_POSITIONS, SESSION
from quire.engine.engine import Engine
from quire.engine.sequence_request import SessionState
from quire.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported
from quire.kv import sequencefile
from quire.kv.state_schema import check_metadata
from quire.kv.statefile import HeaderLimits, StateFile, TensorSpec, read_state, write_state
from quire.kv.statefile import to_bytes as container_bytes
from quire.kv.windows import Window
from quire.models.fingerprint import ModelIdentity
from quire.runner.adapter_history import as_read, written

LONGEST = 1 << 22
"""Token ids in a file at most, if the context is not longer: windowed sessions go on for ever."""
MOST_RUNS = 10_000
"""Changes of the adapter that a file holds at most."""
MOST_ROWS = 16
"""Rows that a KV cache may have of which one is loaded as a session."""


def save(engine: Engine, state: SessionState, identity: ModelIdentity, path: Path) -> None:
    metadata, plan, tensors = parts(engine, state, identity)
    size = write_state(path, metadata, plan, tensors)
    engine.metrics.state_bytes_saved.inc(size)


def to_bytes(engine: Engine, state: SessionState, identity: ModelIdentity) -> bytes:
    metadata, plan, tensors = parts(engine, state, identity)
    data = container_bytes(metadata, plan, tensors)
    engine.metrics.state_bytes_saved.inc(len(data))
    return data


def parts(
    engine: Engine, state: SessionState, identity: ModelIdentity
) -> tuple[dict[str, Any], list[TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Return metadata, plan and tensors of a session. ``Unsupported`` if it is longer than ``load``
    takes, ``FailedPrecondition`` if more than its last token is not computed."""
    if (0 if state.seq is None else state.computed) < len(state.tokens) - 1:
        raise FailedPrecondition(
            "the session's state was dropped while it was to be saved, for the pool is short; call again"
        )
    runs, tokens = written(state.runs, engine.states.fingerprint_of), state.tokens.ids.tolist()
    for count, most, what in (
        (len(tokens), _longest(engine), "tokens"),
        (len(runs), MOST_RUNS, "changes of its adapter"),
    ):
        if count > most:
            raise Unsupported(f"the session has {count} {what}; a state file holds at most {most}")
    metadata: dict[str, Any] = {
        "kind": SESSION,
        "model": identity.fields(),
        "adapters": runs,
        "exact": state.origin.exact,
        "modified": state.modified,
        "window": None if state.window is None else [state.window.size, state.window.sink],
        "tokens": tokens,
        "positions": [0, len(tokens)],
        "sequence": None,
    }
    if state.seq is None:
        return metadata, [], iter(())
    sequence, plan = sequencefile.describe(engine.runner.state, state.seq)
    metadata["sequence"] = sequence
    return metadata, plan, sequencefile.tensors(engine.runner.state, state.seq)


def opened(engine: Engine, source: str | Path | bytes | bytearray | memoryview) -> StateFile:
    """Open a file of this engine's model, fully checked, without the lock. Close it afterwards."""

    def limits(size: int) -> HeaderLimits:
        return sequencefile.header_limits(engine.runner.state, _longest(engine), MOST_RUNS, MOST_ROWS, size)

    file = read_state(source, limits=limits)
    try:
        check_metadata(file.metadata)
    except BaseException:
        file.close()
        raise
    return file


def _longest(engine: Engine) -> int:
    return max(LONGEST, engine.max_model_len)


def window_of(metadata: Mapping[str, Any]) -> Window | None:
    """Return the session's window; ``DataLoss`` for an invalid one."""
    found = saved_kinds.window_of(metadata)
    return None if found is None else Window(*found)


def load(
    engine: Engine, file: StateFile, identity: ModelIdentity, *, convert_dtype: bool, row: int | None = None
) -> SessionState:
    """Load a saved session, or a row of a saved KV cache, into the pool. Everything is checked
    before the pool is touched."""
    metadata: Mapping[str, Any] = file.metadata
    prefix = ""
    if metadata["kind"] in (KV_CACHE, KV_CACHE_WITH_POSITIONS):
        metadata, prefix = saved_kinds.session_of_cache(file, row)
    elif row is not None:
        raise InvalidArgument(f"row {row}: the state file holds a {metadata['kind']!r}, which has no rows")
    sequencefile.check_model(metadata["model"], identity.fields())
    listed = metadata["tokens"]
    if (positions := metadata["positions"]) != [0, len(listed)]:
        raise DataLoss(f"the state file holds positions {positions!r}; [0, {len(listed)}] is expected")
    tokens = np.array(listed, dtype=np.int64)
    engine.checks.history(tokens)
    adapters = engine.runner.adapters
    runs = as_read(metadata["adapters"], tokens.size, adapters.find, adapters.fingerprints, "the state")
    sequence = metadata["sequence"]
    # A writer computes all tokens but the last one, so that loading runs none.
    if (length := 0 if sequence is None else sequence["length"]) not in (tokens.size, max(0, tokens.size - 1)):
        raise DataLoss(
            f"the state file has the state of {length} tokens and names {tokens.size}; the state of all of them, or of all but the "
            "last, is expected"
        )
    # A key of its own: state from a file, perhaps of another dtype, is no other prompt's prefix.
    state = SessionState(
        tokens=TokenHistory(tokens), key=("loaded", engine.runner.new_seq()), window=window_of(metadata)
    )
    state.runs, state.adapter = runs, runs.runs[-1][1]
    if tokens.size:
        engine.checks_of(state).length(tokens.size, None)
    # The embeddings are not in the file, so that what stands for them cannot be computed again.
    state.pinned = metadata["modified"] or bool((tokens < 0).any())
    state.origin = Origin(exact=metadata["exact"], modified=state.pinned)
    if (tokens[length:] < 0).any():
        raise DataLoss("the state file has no state of tokens that stand for embeddings, which are not in it")
    if sequence is None:
        if file.names:
            raise DataLoss(f"the state file holds tensors {list(file.names)[:3]} and no sequence that they belong to")
        return state
    kv = engine.runner.state
    checked = sequencefile.check(kv, file, sequence, prefix, convert_dtype)
    mine = {name for name in file.names if name.startswith(prefix)}
    if surplus := mine - sequencefile.tensor_names(checked, prefix):
        raise InvalidArgument(f"the state file holds unknown tensors: {sorted(surplus)[:3]}")
    expected = (state.window.size, state.window.sink, "token") if state.window else (None, 0, "token")
    if (found := (checked["window"], checked["sink"], checked["eviction"])) != expected:
        raise DataLoss(f"the state file's sequence has window, sink and eviction {found}, and its session {expected}")
    if length:
        seq = engine.runner.new_seq()
        while True:
            try:
                sequencefile.load(kv, seq, file, checked, prefix)
                break
            except ResourceExhausted:
                if not engine.runner.room.make():
                    raise
        state.seq, state.computed = seq, length
        exact = state.origin.exact and sequencefile.is_exact(kv, sequence)
        state.origin = replace(state.origin, exact=exact)
    engine.metrics.state_bytes_loaded.inc(file.nbytes)
    return state
