"""Two states of every kind of layers, which hand sequences over, and one that computes all itself.

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire.contracts.layers import (
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    Recurrent,
    StateTensor,
    WindowedAttention,
)
from quire.kv.contract import ContractState
from quire.kv.state import State

LONGEST = 64
_FULL = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=6)
_NARROW = WindowedAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4, window=7)
_LATENT = LatentAttention(num_heads=3, row_dim=12, value_dim=8)
_CROSS = CrossAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4)
_MEMORY = Recurrent(states=(StateTensor(shape=(2, 4, 6), dtype="float32"),))
KINDS: dict[str, list[LayerSpec]] = {
    "full": [_FULL, _FULL],
    "window": [_NARROW, _NARROW],
    "full and window": [_NARROW, _FULL, _NARROW],
    "latent": [_LATENT, _LATENT],
    "recurrent": [_MEMORY, _MEMORY],
    "hybrid": [_MEMORY, _FULL, _MEMORY, _NARROW],
    "cross": [_FULL, _CROSS],
}


def made(kind: str, page_size: int = 4, capacity: int = 160, **options: Any) -> ContractState:
    """Return a state of these layers."""
    specs = KINDS[kind]
    rows = any(not isinstance(spec, Recurrent) for spec in specs)
    if any(isinstance(spec, Recurrent) for spec in specs):
        options |= {"num_states": 12, "ring": 2}
    if any(isinstance(spec, CrossAttention) for spec in specs):
        options |= {"cross_capacity": 48}
    return ContractState(State(specs, capacity=capacity if rows else None, page_size=page_size, **options))


@cache
def inputs(kind: str) -> list[dict[str, Tensor]]:
    """Return what each layer is given, ``[LONGEST, ...]``."""
    chance = torch.Generator().manual_seed(sorted(KINDS).index(kind))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    found: list[dict[str, Tensor]] = []
    for spec in KINDS[kind]:
        if isinstance(spec, Recurrent):
            q, k, v = drawn(LONGEST, 2, 4), drawn(LONGEST, 2, 4), drawn(LONGEST, 2, 6)
            found.append({"q": q, "k": k / 2, "v": v, "log_decay": -torch.rand(LONGEST, 2, generator=chance)})
        elif isinstance(spec, LatentAttention):
            found.append({"q": drawn(LONGEST, 3, 12), "rows": drawn(LONGEST, 12)})
        elif isinstance(spec, CrossAttention):
            found.append({"q": drawn(LONGEST, 2, 4), "k": drawn(11, 1, 4), "v": drawn(11, 1, 4)})
        else:
            heads = spec.num_heads, spec.num_kv_heads
            found.append({
                "q": drawn(LONGEST, heads[0], spec.head_dim),
                "k": drawn(LONGEST, heads[1], spec.head_dim),
                "v": drawn(LONGEST, heads[1], spec.value_dim),
            })  # fmt: skip
    return found


def layer(state: ContractState, kind: str, index: int, part: slice) -> Tensor:
    """Run one layer of the open forward over these tokens."""
    spec, given = KINDS[kind][index], inputs(kind)[index]
    if isinstance(spec, Recurrent):
        cut = {name: x_T[part] for name, x_T in given.items()}
        return state.linear_attention(index, cut.pop("q"), cut.pop("k"), cut.pop("v"), **cut)
    if isinstance(spec, LatentAttention):
        state.append_mla_kv(index, given["rows"][part])
        return state.cross_attention(index, given["q"][part], scope="all")[0]
    if isinstance(spec, CrossAttention):
        return state.cross_attention(index, given["q"][part], scope="all")[0]
    state.append_kv(index, given["k"][part], given["v"][part])
    return state.cross_attention(index, given["q"][part], scope="all")[0]


def run(
    state: ContractState, kind: str, seq: int, count: int, between: Callable[[int], None] = lambda index: None
) -> list[Tensor]:
    """Run the next ``count`` tokens of a sequence; call ``between`` after each layer."""
    length, found = state.sequence_length(seq), []
    state.begin_forward([seq], [count])
    for index in range(len(KINDS[kind])):
        found.append(layer(state, kind, index, slice(length, length + count)))
        between(index)
    state.end_forward()
    return found


def begun(state: ContractState, kind: str, seq: int, count: int = 0, encoders: bool = True) -> None:
    """Make a sequence of the first ``count`` tokens, with the rows of encoders."""
    state.add_sequence(seq)
    for index, spec in enumerate(KINDS[kind]):
        if encoders and isinstance(spec, CrossAttention):
            state.set_cross_kv(index, seq, inputs(kind)[index]["k"], inputs(kind)[index]["v"])
    if count:
        run(state, kind, seq, count)


def content(state: ContractState, seq: int) -> dict[str, Any]:
    """Return all that a sequence holds."""
    metadata = state.get_checkpoint_metadata(seq, checksums=False)
    return {
        f"{one['group']}.{name}": tensor
        for one in metadata["groups"]
        for name, tensor in state.export_page_group(seq, one["group"]).items()
    }
