"""The state of a session as tensors and as KV caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from quire.branches.adapter_keys import NO_SALT
from quire.branches.cache_rows import become_fork
from quire.contracts.layers import LayerSpec
from quire.engine import layer_memory
from quire.engine.live_sequence import LiveSequence
from quire.errors import FailedPrecondition, ResourceExhausted

if TYPE_CHECKING:
    from quire.executor.cache import KVCache


def as_cache(live: LiveSequence, capacity: int | None, dynamic: bool) -> KVCache:
    """Return a KV cache of one row that is a fork of the session."""
    with live.engine.lock:
        live.require_idle("as_cache")
        cache = live.executor().create_kv_cache(capacity=capacity, dynamic=dynamic)
        room = cache.pool.max_model_len if cache.dynamic else cache.capacity
        if len(live) > room:
            cache.release()
            raise ResourceExhausted(
                f"as_cache: the session has {len(live)} tokens, and a row of this KV cache holds {room}"
            )
    try:
        if len(live):
            live.catch_up("as_cache", len(live))
        with live.engine.lock:
            state = live.require_computed("as_cache", len(live))
            become_fork(cache, state, private=state.key != NO_SALT)
            live.engine.metrics.forks.inc(state.seq is not None)
    except BaseException:
        cache.release()
        raise
    return cache


def read(live: LiveSequence, layer: int) -> dict[str, Tensor]:
    """Return the state of a layer."""
    spec = live.layer_spec(layer)
    found = _kept_states(live, layer, spec)
    if found is not None:
        return found
    live.catch_up("kv", len(live) - (spec.kind == "recurrent"))
    with live.engine.lock:
        state = live.require_computed("kv", len(live) - (spec.kind == "recurrent"))
        if state.seq is None:
            return layer_memory.initial(spec)
        partly = state.window is not None or getattr(spec, "layer_window", None) is not None
        return layer_memory.read(live.engine.runner.state, state.seq, layer, partly=partly)


def _kept_states(live: LiveSequence, layer: int, spec: LayerSpec) -> dict[str, Tensor] | None:
    """Return a recurrent layer's kept states before the last token, if that has run."""
    with live.engine.lock:
        state, kv = live.require_idle("kv"), live.engine.runner.state
        last = len(live) - 1
        if spec.kind != "recurrent" or state.seq is None or state.computed <= last:
            return None
        if kv.nearest_reachable(state.seq, last) != last:
            return None
        return layer_memory.read(kv, state.seq, layer, partly=False, position=last)


def write(live: LiveSequence, layer: int, start: int, tensors: Mapping[str, Tensor | None]) -> None:
    """Overwrite the state of a layer."""
    spec = live.layer_spec(layer)
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
        state = live.require_computed("set_kv", length - recurrent)
        if state.seq is None:
            raise FailedPrecondition(
                f"set_kv: before its only token the session has no state of layer {layer} of its own; append a token"
            )
        found = layer_memory.checked(engine.runner.state, state.seq, layer, start, count, tensors)
        engine.branches.overwrite(state, layer, start, found)
