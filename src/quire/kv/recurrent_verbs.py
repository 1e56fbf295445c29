"""The recurrent verbs of the contract (``contracts.recurrent_state``) over the open forward of a
state: checks, padding, ``out=``.

Letters: B entries of the batch; T new tokens, N >= T rows of a padded tensor; Hq query heads, H
heads of a state; K, V sizes of keys and values.
"""

from __future__ import annotations

from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.kv.recurrent import dtype_of
from quire.kv.state import State
from quire.kv.storage import check_tensor
from quire.kv.tensor_checks import check_out, padded


def get(state: State, layer_id: int, state_id: int, *, per_token: bool = False, out: Tensor | None = None) -> Tensor:
    one = state.parts.state_tensor(layer_id, state_id, "get")
    opened = state.open_pass().recurrent("get")
    state.open_pass().require_open(layer_id)
    rows = state.open_tokens if per_token else len(opened.plan.starts) - 1
    if out is not None:
        check_tensor("get: out", out, dtype_of(one), (rows, *one.shape), state.device)
    found = opened.get(layer_id, state_id, per_token=per_token)
    return found if out is None else out.copy_(found)


def set(state: State, layer_id: int, state_id: int, data: Tensor, *, per_token: bool = False) -> None:
    state.parts.state_tensor(layer_id, state_id, "set")
    state.open_pass().recurrent("set").set(layer_id, state_id, data, per_token=per_token)


def linear_attention(
    state: State,
    layer_id: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float = 1.0,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    verb = "linear_attention"
    one = state.parts.state_tensor(layer_id, 0, verb)
    if len(one.shape) != 3 or one.dtype != "float32":
        raise Unsupported(
            f"{verb}: state 0 of layer {layer_id} is {one.dtype} {one.shape}; float32 [heads, Dk, Dv] is needed"
        )
    heads, key_dim, value_dim = one.shape
    tokens = state.open_tokens
    if q.dim() != 3 or q.shape[2] != key_dim or q.shape[1] < 1 or q.shape[1] % heads or q.shape[0] < tokens:
        raise InvalidArgument(
            f"{verb}: q has shape {tuple(q.shape)}; at least {tokens} rows of [a multiple of {heads}, {key_dim}] are needed"
        )
    rows = q.shape[0]
    wanted: list[tuple[str, Tensor | None, list[tuple[int, ...]]]] = [
        ("k", k, [(rows, heads, key_dim)]),
        ("v", v, [(rows, heads, value_dim)]),
        ("log_decay", log_decay, [(rows, heads), (rows, heads, key_dim)]),
        ("beta", beta, [(rows, heads)]),
    ]
    given = {"q": q}
    for name, tensor, shapes in wanted:
        if tensor is None:
            continue
        if tuple(tensor.shape) not in shapes:
            raise InvalidArgument(
                f"{verb}: {name} has shape {tuple(tensor.shape)}; {' or '.join(map(str, shapes))} is needed"
            )
        given[name] = tensor
    for name, tensor in given.items():
        if not tensor.is_floating_point() or tensor.device.type != state.device.type:
            raise InvalidArgument(
                f"{verb}: {name} is {tensor.dtype} on {tensor.device}; floats on {state.device} are needed"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidArgument(f"{verb}: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; the same is needed")
    if log_decay is not None and bool((log_decay[:tokens] > 0).any()):
        raise InvalidArgument(f"{verb}: log_decay holds a number above 0; a decay is at most 1")
    if out is not None:
        for tensor in given.values():
            check_out(out, (rows, q.shape[1], value_dim), q.dtype, tensor)
    found = state.open_pass().linear_attention(
        layer_id,
        0,
        q[:tokens],
        k[:tokens],
        v[:tokens],
        scale=sm_scale,
        log_decay=None if log_decay is None else log_decay[:tokens],
        beta_TH=None if beta is None else beta[:tokens],
    )
    return padded(found, rows, 0.0, out)
