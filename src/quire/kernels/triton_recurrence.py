"""One row of each recurrent sequence in Triton, for CUDA devices: each state is read and written
once. The reference is ``quire.ops.recurrence``; ``recurrence`` is the same in PyTorch.

Letters: N sequences; H heads of the state, R query heads of each; K, V sizes of keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton_support import on_device_of, triton_problem

MOST_KEYS = 256
"""Rows of a state that a program holds."""
NUMBERS = 8192
"""Numbers of a state that a program holds."""


def updates(states_NHKV: Tensor) -> bool:
    """Return whether the program runs states of this type and size where they are."""
    return (
        states_NHKV.is_cuda
        and states_NHKV.dtype == torch.float32
        and states_NHKV.shape[2] <= MOST_KEYS
        and not triton_problem(states_NHKV.device)
    )


def updated(
    states_NHKV: Tensor,
    q_NHRK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    decay: Tensor | None,
    beta_NH: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run one row of each sequence; return outputs ``[N, H, R, V]`` and the states after, fresh.

    All are float32. q and k may have one head for all. ``decay``: factors ``[N, H, 1 or K]``;
    ``beta``: the delta rule's."""
    from quire.kernels.recurrence_programs import update_states

    number, heads, keys, values = states_NHKV.shape
    queries = q_NHRK.shape[2]
    out_NHRV = states_NHKV.new_empty(number, heads, queries, values)
    states = torch.empty_like(states_NHKV, memory_format=torch.contiguous_format)
    before, q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (states_NHKV, q_NHRK, k_NHK, v_NHV))
    decays = 0 if decay is None else decay.shape[2]
    decay = out_NHRV if decay is None else decay.contiguous()
    beta = out_NHRV if beta_NH is None else beta_NH.contiguous()
    shared_q, shared_k = q.shape[1] == 1, k.shape[1] == 1
    padded = 1 << (keys - 1).bit_length()
    width = max(1, min(1 << (values - 1).bit_length(), NUMBERS // padded, 64))
    if out_NHRV.numel():
        with on_device_of(states):
            update_states[(number, heads, -(-values // width))](
                out_NHRV, states, before, q, k, v, decay, beta, float(scale),
                *before.stride()[:3], q.stride(0), 0 if shared_q else q.stride(1), q.stride(2),
                k.stride(0), 0 if shared_k else k.stride(1), v.stride(0), v.stride(1),
                heads * decays, decays, heads,
                HEADS=heads, QUERIES=queries, KEYS=keys, VALUES=values, K=padded, W=width,
                DECAYS=decays, DELTA=beta_NH is not None,
            )  # fmt: skip
    return out_NHRV, states
