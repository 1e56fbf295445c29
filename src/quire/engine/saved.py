"""Sessions to state files and back (the format is documented in ``docs/statefile.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from quire.engine.engine import Engine
from quire.engine.generation import SessionState
from quire.engine.request import SlidingWindow, TokenBuffer
from quire.errors import DataLoss, InvalidArgument, ResourceExhausted
from quire.executor import saved_kinds
from quire.executor.saved_kinds import KV_CACHE, KV_CACHE_WITH_POSITIONS, SESSION
from quire.kv import sequencefile
from quire.kv.statefile import StateFile, TensorSpec, write_state
from quire.kv.statefile import to_bytes as container_bytes
from quire.runner.adapter_history import as_read, written


class ModelIdentity(Protocol):
    """Which model a state belongs to. The weights digest is computed when it is first asked for."""

    def fields(self) -> dict[str, str]:
        """``architecture``, ``config`` and ``weights``."""
        ...


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
    """Metadata, plan and tensors of a session."""
    metadata: dict[str, Any] = {
        "kind": SESSION,
        "model": identity.fields(),
        "adapters": written(state.runs, engine.states.fingerprint_of),
        "exact": state.exact,
        "modified": state.modified,
        "window": None if state.window is None else [state.window.size, state.window.sink],
        "tokens": state.tokens.ids.tolist(),
        "positions": [0, len(state.tokens)],
        "sequence": None,
    }
    if state.seq is None:
        return metadata, [], iter(())
    sequence, plan = sequencefile.describe(engine.runner.state, state.seq)
    metadata["sequence"] = sequence
    return metadata, plan, sequencefile.tensors(engine.runner.state, state.seq)


def window_of(metadata: Mapping[str, Any]) -> SlidingWindow | None:
    """The session's window; ``DataLoss`` for what is none."""
    found = saved_kinds.window_of(metadata)
    return None if found is None else SlidingWindow(*found)


def load(
    engine: Engine, file: StateFile, identity: ModelIdentity, *, convert_dtype: bool, row: int | None = None
) -> SessionState:
    """The tokens of a saved session, or of a row of a saved KV cache, with their state in the pool. Everything is checked before the
    pool is touched."""
    metadata, prefix = file.metadata, ""
    if metadata.get("kind") in (KV_CACHE, KV_CACHE_WITH_POSITIONS):
        metadata, prefix = saved_kinds.session_of_cache(file, row)
    elif row is not None:
        raise InvalidArgument(f"row {row}: the state file holds a {metadata.get('kind')!r}, which has no rows")
    if metadata.get("kind") != SESSION:
        raise InvalidArgument(
            f"the state file holds a {metadata.get('kind')!r}, and a {SESSION!r} or a {KV_CACHE!r} is expected"
        )
    sequencefile.check_model(metadata.get("model"), identity.fields())
    for name in ("exact", "modified"):
        if not isinstance(metadata.get(name), bool):
            raise DataLoss(f"the state file holds {metadata.get(name)!r} as {name}; true or false is expected")
    listed = metadata.get("tokens")
    if not isinstance(listed, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) and abs(token) < 2**63 for token in listed
    ):
        raise DataLoss("the state file has no list of 64-bit tokens")
    if (positions := metadata.get("positions")) != [0, len(listed)]:
        raise DataLoss(f"the state file holds positions {positions!r}; [0, {len(listed)}] is expected")
    tokens = np.array(listed, dtype=np.int64)
    engine.checks.history(tokens)
    adapters = engine.runner.adapters
    runs = as_read(metadata.get("adapters"), tokens.size, adapters.find, adapters.fingerprints, "the state")
    sequence = metadata.get("sequence")
    # A key of its own: what came from a file, perhaps through another dtype, is nobody else's prefix.
    state = SessionState(TokenBuffer(tokens), ("loaded", engine.runner.new_seq()), window=window_of(metadata))
    state.runs, state.adapter = runs, runs.runs[-1][1]
    if tokens.size:
        engine.checks_of(state).length(tokens.size, None)
    # The embeddings are not in the file, so that what stands for them cannot be computed again.
    state.modified = state.pinned = bool(metadata["modified"]) or bool((tokens < 0).any())
    state.exact = bool(metadata["exact"])
    length = sequence.get("length") if isinstance(sequence, Mapping) else 0
    if isinstance(length, int) and (tokens[length:] < 0).any():
        raise DataLoss("the state file has no state of tokens that stand for embeddings, which are not in it")
    if sequence is None:
        if file.names:
            raise DataLoss(f"the state file holds tensors {list(file.names)[:3]} and no sequence that they belong to")
        return state
    if not isinstance(sequence, Mapping):
        raise DataLoss("the state file has no metadata of the sequence")
    kv = engine.runner.state
    checked = sequencefile.check(kv, file, sequence, prefix, convert_dtype)
    mine = {name for name in file.names if name.startswith(prefix)}
    if surplus := mine - sequencefile.tensor_names(checked, prefix):
        raise InvalidArgument(f"the state file holds unknown tensors: {sorted(surplus)[:3]}")
    length = int(checked["length"])
    expected = (state.window.size, state.window.sink, "token") if state.window else (None, 0, "token")
    if (found := (checked["window"], checked["sink"], checked["eviction"])) != expected:
        raise DataLoss(f"the state file's sequence has window, sink and eviction {found}, and its session {expected}")
    if length > tokens.size:
        raise DataLoss(f"the state file has the state of {length} tokens and names {tokens.size}")
    if length:
        seq = engine.runner.new_seq()
        while True:
            try:
                sequencefile.load(kv, seq, file, checked, prefix)
                break
            except ResourceExhausted:
                if not engine.reclaim():
                    raise
        state.seq, state.computed = seq, length
        state.exact &= sequencefile.is_exact(kv, sequence)
    engine.metrics.state_bytes_loaded.inc(file.nbytes)
    return state
