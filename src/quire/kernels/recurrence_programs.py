"""Triton programs of recurrences. ``triton_recurrence`` launches them.

Letters: K, V sizes of keys and values, padded to powers of two; W columns of values of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update_states(
    out, after, before, q, k, v, decay, beta, scale,
    before_n, before_h, before_k, q_n, q_h, q_r, k_n, k_h, v_n, v_h, decay_n, decay_h, beta_n,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    K: tl.constexpr, W: tl.constexpr, DECAYS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Run one row of a sequence for W columns of one head: the state fades, learns the key's value
    (with ``DELTA`` what is new in it), and is read by ``QUERIES`` queries. ``DECAYS``: factors of a
    head, 0, 1 or ``KEYS``."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = tl.program_id(2) * W + tl.arange(0, W)
    c = tl.arange(0, K)
    is_key, is_value = c < KEYS, w < VALUES
    held_KW = is_key[:, None] & is_value[None, :]
    place_KW = before + n * before_n + h * before_h + (c * before_k)[:, None] + w[None, :]
    state_KW = tl.load(place_KW, mask=held_KW, other=0.0)
    if DECAYS == 1:
        state_KW = state_KW * tl.load(decay + n * decay_n + h * decay_h)
    if DECAYS > 1:
        state_KW = state_KW * tl.load(decay + n * decay_n + h * decay_h + c, mask=is_key, other=0.0)[:, None]
    k_K = tl.load(k + n * k_n + h * k_h + c, mask=is_key, other=0.0)
    u_W = tl.load(v + n * v_n + h * v_h + w, mask=is_value, other=0.0)
    if DELTA:
        u_W = (u_W - tl.sum(k_K[:, None] * state_KW, 0)) * tl.load(beta + n * beta_n + h)
    state_KW = state_KW + k_K[:, None] * u_W[None, :]
    whole = n * HEADS + h
    tl.store(after + (whole * KEYS + c[:, None]) * VALUES + w[None, :], state_KW, mask=held_KW)
    for r in tl.static_range(QUERIES):
        q_K = tl.load(q + n * q_n + h * q_h + r * q_r + c, mask=is_key, other=0.0)
        found_W = tl.sum(q_K[:, None] * state_KW, 0) * scale
        tl.store(out + (whole * QUERIES + r) * VALUES + w, found_W, mask=is_value)
