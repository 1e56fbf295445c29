"""Views of one layer of a session: attention weights, and norms of its rows and states.

Letters: H heads; n positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.types import Remove
from quire.branches.session_branch import SessionBranch
from quire.contracts.kv_state import Export
from quire.contracts.layers import LayerSpec, Recurrent
from quire.contracts.token_views import AttentionView, NormsView
from quire.engine.engine import Engine
from quire.kv import layer_memory
from quire.sessions.token_run import require_idle, run_token

if TYPE_CHECKING:
    from quire_inspector.drawing.heat import Heat

ROWS_AT_ONCE = 4096
"""Rows of which norms are taken at a time."""
QUERIES = 64
"""Rows of a heat map, if nothing else is asked for."""
MOST_WEIGHTS = 1 << 26
"""Weights of a heat map that are in memory, at most: 256 MiB."""


def attention_view(engine: Engine, source: SessionBranch, position: int, layer: int, head: int | None) -> AttentionView:
    """Return the attention of the token at a position in a layer, by one query head or all of them.
    Errors: as for ``run_token``; ``Unsupported`` for a layer without attention over tokens."""
    spec = engine.runner.state.layer_spec(layer)
    require_attention(spec, layer)
    run = run_token(engine, source, position, "attention", layer)
    assert run.weights_HTN is not None
    heads = tuple(range(run.weights_HTN.shape[0])) if head is None else (head,)
    weights: NDArray[np.float32] = run.weights_HTN[list(heads), -1].cpu().numpy()
    sinks = np.zeros(len(heads), dtype=np.float32)
    if getattr(spec, "sinks", ()):
        sinks = np.maximum(0.0, 1.0 - weights.sum(-1, dtype=np.float64)).astype(np.float32)
    return AttentionView(
        position=position,
        layer=layer,
        kind=spec.kind,
        num_heads=run.weights_HTN.shape[0],
        heads=heads,
        weights=weights,
        sinks=sinks,
        num_run=run.num_run,
        exact=run.exact,
    )


def attention_heat(engine: Engine, source: SessionBranch, layer: int, head: int | None, queries: int | None) -> Heat:
    """Return the attention of the last ``queries`` tokens (None: ``QUERIES``, if that is not too
    large) in a layer, by one query head or on average over all. Errors: as for ``run_token``."""
    spec, length = engine.runner.state.layer_spec(layer), len(source.tokens)
    heads = getattr(spec, "num_heads", 1)
    count = min(length, min(QUERIES, max(1, MOST_WEIGHTS // (heads * length))) if queries is None else queries)
    if heads * count * length > MOST_WEIGHTS:
        raise InvalidArgument(
            f"{heads} heads of {count} queries over {length} positions are more than {MOST_WEIGHTS} weights; give fewer queries",
            field="queries",
        )
    run = run_token(engine, source, length - count, "heat", layer, count)
    assert run.weights_HTN is not None
    weights_TN = run.weights_HTN.mean(0) if head is None else run.weights_HTN[head]
    title = f"attention at layer {layer} ({spec.kind}), " + ("mean of all heads" if head is None else f"head {head}")
    rows = [str(position) for position in range(length - count, length)]
    from quire_inspector.drawing.heat import Heat

    return Heat(title, weights_TN.cpu().numpy(), rows, np.arange(length, dtype=np.int64), "query", "weight")


def require_attention(spec: LayerSpec, layer: int) -> None:
    """Raise ``Unsupported`` for a layer without attention over the tokens of its sequence."""
    if spec.kind == "recurrent":
        reason = "is recurrent: it reads a state of fixed size and no tokens; norms() tells of its states"
    elif spec.kind == "cross":
        reason = "attends to an encoder's rows, and to no tokens of the session"
    else:
        return
    raise Unsupported(f"attention: layer {layer} {reason}", field="layer", given=layer)


def norms_view(engine: Engine, source: SessionBranch, layer: int) -> NormsView:
    """Return norms of all that a layer holds of a session now; nothing is computed.
    ``FailedPrecondition``: the session is busy. ``Unsupported``: the layer is a cross layer."""
    spec = engine.runner.state.layer_spec(layer)
    if spec.kind == "cross":
        raise Unsupported(
            f"norms: layer {layer} keeps an encoder's rows, and none of the session's tokens",
            field="layer",
            given=layer,
        )
    with engine.lock:
        require_idle(source, "norms")
        num_tokens = len(source.tokens)
        seq = engine.branches.fork_of(source.seq) if source.seq is not None and source.computed else None
        held = None if seq is None else engine.runner.state.open_export(seq)
    try:
        # Without the lock: no call writes into what the fork holds.
        positions, norms = _nothing(spec) if held is None else _norms(held, spec, layer)
    finally:
        if seq is not None:
            with engine.lock:
                engine.branches.apply(Remove(seq))
    return NormsView(layer=layer, kind=spec.kind, num_tokens=num_tokens, positions=positions, norms=norms)


def _nothing(spec: LayerSpec) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]:
    heads = spec.num_kv_heads if not isinstance(spec, Recurrent) else 1
    empty = {name: np.empty((0, heads), dtype=np.float32) for name in layer_memory.names_of(spec)}
    return np.empty(0, dtype=np.int64), empty


def _norms(held: Export, spec: LayerSpec, layer: int) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]:
    if isinstance(spec, Recurrent):
        kept = [position for position in held.positions if position]
        found = [held.states(layer, position) for position in kept]
        states = {
            name: torch.stack([_state_norms(one[f"state.{index}"]) for one in found])
            for index, name in enumerate(layer_memory.names_of(spec))
        }
        return np.array(kept, dtype=np.int64), {name: one.cpu().numpy() for name, one in states.items()}
    places: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    rows: dict[str, list[Tensor]] = {name: [] for name in layer_memory.names_of(spec)}
    for part in held.held(layer):
        for start in range(part.start, part.stop, ROWS_AT_ONCE):
            stop = min(part.stop, start + ROWS_AT_ONCE)
            for name, values in held.plain_rows(layer, start, stop).items():
                norms = torch.linalg.vector_norm(values.float(), dim=-1)
                rows[name].append((norms if norms.dim() == 2 else norms.unsqueeze(1)).cpu())
            places.append(np.arange(start, stop, dtype=np.int64))
    return np.concatenate(places), {name: torch.cat(parts).numpy() for name, parts in rows.items()}


def _state_norms(state: Tensor) -> Tensor:
    """Return float32 ``[H]``."""
    rows = state.float().flatten(1) if state.dim() == 3 else state.float().reshape(1, -1)
    norms_H: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms_H
