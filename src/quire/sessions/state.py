"""The state of a session as tensors and as KV caches, and rows of KV caches as sessions.

Both are branches, so a fork is enough to turn one into the other. It takes along what a sequence
does not record: the tokens, the adapter of each, and the state's origin
(``quire.branches.branch.Origin``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from quire.adapters.keys import NO_SALT, private_salt
from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.branches.owner import require_replayable
from quire.branches.saved_rows import NO_POSITIONS, other_eviction
from quire.branches.session_branch import SessionBranch
from quire.contracts.layers import LayerSpec
from quire.engine.engine import Engine
from quire.executor.cache_rows import CacheRows, become_fork
from quire.executor.row import are_indices
from quire.kv import layer_memory
from quire.sessions.live_sequence import LiveSequence

if TYPE_CHECKING:
    from quire.executor.cache import KVCache


def as_cache(live: LiveSequence, capacity: int | None, dynamic: bool) -> KVCache:
    """Return a KV cache of one row that is a fork of the session."""
    with live.engine.lock:
        live.require_idle("as_cache")
        cache = live.executor().create_kv_cache(capacity=capacity, dynamic=dynamic)
        room = cache.pool.facts.max_model_len if cache.dynamic else cache.capacity
        if len(live) > room:
            cache.release()
            raise ResourceExhausted(
                f"as_cache: the session has {len(live)} tokens, and a row of this KV cache holds {room}"
            )
    try:
        if len(live):
            live.catch_up("as_cache", len(live))
        with live.engine.lock:
            branch = live.require_computed("as_cache", len(live))
            become_fork(cache, branch, private=branch.key != NO_SALT)
            live.engine.metrics.forks.inc(branch.seq is not None)
    except BaseException:
        cache.release()
        raise
    return cache


def fork_to_session(engine: Engine, cache: CacheRows, picked: int, length: int) -> SessionBranch:
    """Return a session's state that is a fork of the first ``length`` tokens of a cache's row.

    The session continues under the adapter of its last token, and shares no prefix with others.
    Call it under the lock. ``InvalidArgument``: the tokens are not known. ``NotFound``: an adapter
    was unloaded. ``Unsupported``: a window or positions that sessions do not have.
    """
    source, loaded = cache.rows[picked], cache.pool.adapter_ids
    if not source.tokens.is_known:
        raise InvalidArgument(
            f"the tokens of row {picked} are not known (it was loaded without them), and a session goes by its tokens"
        )
    if source.positions is not None and not are_indices(source.positions.ids[:length], 0):
        raise Unsupported(f"row {picked} {NO_POSITIONS}")
    if gone := sorted(source.runs_before(length).ids.difference(loaded)):
        raise NotFound(
            f"row {picked} ran under adapter {gone[0]}, which was unloaded; its session could not be computed again"
        )
    if source.window is not None and source.window.eviction != "token":
        raise Unsupported(f"row {picked} {other_eviction(source.window)}")
    # A key of its own: a row's past (files, other dtypes, writes) makes it no other prompt's
    # prefix.
    branch = SessionBranch(key=private_salt())
    branch.become(source, length, None)
    branch.adapter = branch.runs.at(max(length - 1, 0))
    engine.checks.history(branch.tokens.ids)
    if length:
        engine.checks_of(branch).length(length, None)
    cache.commit_chains()
    # A cache does not keep the embeddings that stood at placeholders.
    fixed = branch.modified or bool((branch.tokens.ids < 0).any())
    branch.origin, branch.pinned = replace(branch.origin, modified=fixed, private=False), fixed
    kv, position = engine.runner.state, engine.runner.state.nearest_reachable(source.seq, length)
    if position < length:
        require_replayable(kv, source, position, length, loaded, f"row {picked}: ", since=0)
    branch.mark = None
    if position:
        branch.seq = engine.branches.fork_of(source.seq, position)
    branch.truncate_computed(position)
    return branch


def read(live: LiveSequence, layer: int) -> dict[str, Tensor]:
    spec = live.layer_spec(layer)
    found = _kept_states(live, layer, spec)
    if found is not None:
        return found
    live.catch_up("kv", len(live) - (spec.kind == "recurrent"))
    with live.engine.lock:
        branch = live.require_computed("kv", len(live) - (spec.kind == "recurrent"))
        if branch.seq is None:
            return layer_memory.initial(spec)
        partly = branch.window is not None or getattr(spec, "layer_window", None) is not None
        return layer_memory.read(live.engine.runner.state, branch.seq, layer, partly=partly)


def _kept_states(live: LiveSequence, layer: int, spec: LayerSpec) -> dict[str, Tensor] | None:
    """Return a recurrent layer's kept states before the last token, if that has run."""
    with live.engine.lock:
        branch, kv = live.require_idle("kv"), live.engine.runner.state
        last = len(live) - 1
        if spec.kind != "recurrent" or branch.seq is None or branch.computed <= last:
            return None
        if kv.nearest_reachable(branch.seq, last) != last:
            return None
        return layer_memory.read(kv, branch.seq, layer, partly=False, position=last)


def write(live: LiveSequence, layer: int, start: int, tensors: Mapping[str, Tensor | None]) -> None:
    """Overwrite the state of a layer."""
    spec = live.layer_spec(layer)
    start, tensors = layer_memory.placed(spec, tensors, start)
    count, length = layer_memory.check_names(spec, layer, tensors, start, len(live)), len(live)
    try:
        _write(live, spec, layer, tensors, start, count, length)
    except BaseException:
        if not live.branch.modified:
            live.branch.mark = None
        raise


def _write(
    live: LiveSequence,
    spec: LayerSpec,
    layer: int,
    tensors: Mapping[str, Tensor | None],
    start: int,
    count: int,
    length: int,
) -> None:
    engine = live.engine
    recurrent = spec.kind == "recurrent"
    if recurrent or (engine.runner.state.recurrent_ids and not live.branch.modified):
        # Keep the states before the last token: for its logits it runs again, after the write.
        live.catch_up("set_kv", length - 1)
        with engine.lock:
            engine.branches.anchor(live.require_computed("set_kv", length - 1))
    if not recurrent:
        live.catch_up("set_kv", length)
    with engine.lock:
        branch = live.require_computed("set_kv", length - recurrent)
        if branch.seq is None:
            raise FailedPrecondition(
                f"set_kv: before its only token the session has no state of layer {layer} of its own; append a token"
            )
        found = layer_memory.checked(engine.runner.state, branch.seq, layer, start, count, tensors)
        engine.branches.overwrite(branch, layer, start, found)
