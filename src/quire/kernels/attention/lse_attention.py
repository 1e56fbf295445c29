"""Attention states of padded groups, from a kernel that returns the log-sum-exp, else from explicit
scores.

Explicit scores are in float32 and in bounded memory. Letters: b entries of a group; n rows of an
entry; m keys; Hq, Hkv query and KV heads; G = Hq / Hkv; Dk, Dv head sizes.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.contracts.attention import AttentionState, Scoring
from quire.ops.attention import merge

FOLDED_ROWS = 16
"""Most rows for which a head group is folded into the rows: one read of K and V per KV head."""
MAX_SCORES = 1 << 26
"""Most scores at a time (float32, so 256 MiB) without a kernel that returns the log-sum-exp, and
most elements of K and V at a time if they must be converted."""


def lse_attention(
    q_BNHD: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    scoring: Scoring,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> AttentionState:
    """Return a group's state: ``out [b * n, Hq, Dv]`` in q's dtype or float32, ``lse [b * n, Hq]``.

    q ``[b, n, Hq, Dk]``, k ``[b, Hkv, m, Dk]``, v ``[b, Hkv, m, Dv]``, m >= 1. ``mask``: ``[b, 1,
    n, m]``, bool (true: visible) or 0 and -inf. ``causal``: row i sees the keys up to i. Rows
    without visible keys are undefined; the maker of the mask must know them.

    With 16-bit k and v and wider q all is computed in the dtype of q. With 16-bit q the lse is
    accurate to 2^-13 only, which is less than a rounding of ``out``.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q_BNHD.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        mask = mask.to(q_BNHD.dtype)
    if not has_lse_kernel(q_BNHD.device) or scoring.softcap is not None:
        return bounded(q_BNHD, k_BHMD, v_BHMD, scoring, mask, causal)
    value_dim = v_BHMD.shape[-1]
    if k_BHMD.shape[-1] != value_dim:
        q_BNHD, k_BHMD, v_BHMD = same_size(q_BNHD, k_BHMD, v_BHMD)
    call = flash if k_BHMD.dtype == q_BNHD.dtype else widened
    state = call(q_BNHD, k_BHMD, v_BHMD, scoring.scale, mask, causal)
    return AttentionState(state.out[..., :value_dim], state.lse)


def has_lse_kernel(device: torch.device) -> bool:
    """Return True if a PyTorch kernel returns the log-sum-exp; K and V need one size
    (``same_size``)."""
    return device.type == "cpu"


def same_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with columns of 0 to one size with equal attention; the caller cuts the result.

    If the values are the first columns of their keys (latent rows), the keys serve as values
    without a copy.
    """
    missing = k.shape[-1] - v.shape[-1]
    if missing < 0:
        return pad(q, (0, -missing)), pad(k, (0, -missing)), v
    if missing and is_head_of(v, k):
        return q, k, k
    return (q, k, pad(v, (0, missing))) if missing else (q, k, v)


def is_head_of(v: Tensor, k: Tensor) -> bool:
    """Return True if ``v`` is a view of the first columns of ``k``."""
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[:-1] == k.shape[:-1]


def flash(
    q_BNHD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> AttentionState:
    """Use PyTorch's flash attention for CPUs. Unchecked: the mask has q's dtype, m > 0."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    b, n, heads, dim = q_BNHD.shape
    kv_heads, m = k_BHMD.shape[1:3]
    groups = heads // kv_heads
    # The kernel assumes a last stride of 1 without a check.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BNHD, k_BHMD, v_BHMD))
    q = q.view(b, n, kv_heads, groups, dim)
    if n <= FOLDED_ROWS and not causal:
        q = q.permute(0, 2, 3, 1, 4).reshape(b, kv_heads, groups * n, dim)
        if mask is not None and groups > 1:
            mask = mask.expand(b, 1, groups, m) if n == 1 else mask.repeat(1, 1, groups, 1)
        out, lse = kernel(q, k, v, attn_mask=mask, scale=scale)
        out, lse = out.view(b, kv_heads, groups, n, dim), lse.reshape(b, kv_heads, groups, n)
        return AttentionState(
            out.permute(0, 3, 1, 2, 4).reshape(b * n, heads, dim), lse.permute(0, 3, 1, 2).reshape(b * n, heads)
        )
    if b == 1:
        # The head group is a dimension of stride 0 of K and V; the kernel reads it in place.
        q = q[0].permute(1, 2, 0, 3)
        k, v = (x[0].unsqueeze(1).expand(kv_heads, groups, m, dim) for x in (k, v))
        out, lse = kernel(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
        return AttentionState(out.permute(2, 0, 1, 3).reshape(n, heads, dim), lse.reshape(heads, n).T)
    q = q.flatten(2, 3).transpose(1, 2)
    k, v = (x.unsqueeze(2).expand(b, kv_heads, groups, m, dim).reshape(b, heads, m, dim) for x in (k, v))
    out, lse = kernel(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
    return AttentionState(out.transpose(1, 2).reshape(b * n, heads, dim), lse.transpose(1, 2).reshape(b * n, heads))


def widened(
    q_BNHD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> AttentionState:
    """Run ``flash`` in q's dtype over smaller K and V, ``MAX_SCORES`` elements at a time."""
    b, kv_heads, m, dim = k_BHMD.shape
    keys = m if causal else max(1, MAX_SCORES // (2 * b * kv_heads * dim))
    states = []
    for start in range(0, m, keys):
        some = slice(start, start + keys)
        k = k_BHMD[:, :, some].to(q_BNHD.dtype)
        v = k if v_BHMD is k_BHMD else v_BHMD[:, :, some].to(q_BNHD.dtype)
        seen = None if mask is None else mask[..., some]
        state = flash(q_BNHD, k, v, scale, seen, causal)
        if seen is not None and keys < m:
            # Rows that see keys of other pieces, but none of this one.
            blind = seen.isneginf().all(-1).expand(b, 1, -1).reshape(-1, 1)
            state = AttentionState(
                state.out.masked_fill(blind.unsqueeze(-1), 0.0), state.lse.masked_fill(blind, -torch.inf)
            )
        states.append(state)
    return reduce(merge, states)


def bounded(
    q_BNHD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scoring: Scoring, mask: Tensor | None, causal: bool
) -> AttentionState:
    """Use explicit scores, ``MAX_SCORES`` at a time: some entries, some rows, some keys."""
    b, n, heads, _ = q_BNHD.shape
    kv_heads, m = k_BHMD.shape[1:3]
    key_elements = kv_heads * (k_BHMD.shape[3] + v_BHMD.shape[3])
    entries = max(1, min(b, MAX_SCORES // (m * max(n * heads, key_elements))))
    keys = m if entries > 1 else max(1, min(m, MAX_SCORES // max(heads, key_elements)))
    rows = max(1, MAX_SCORES // (entries * heads * keys))
    states = []
    for entry in range(0, b, entries):
        some = slice(entry, entry + entries)
        own = mask if mask is None or mask.shape[0] < b else mask[some]
        for first in range(0, n, rows):
            q = q_BNHD[some, first : first + rows]
            seen = min(m, first + rows) if causal else m
            parts = (
                explicit(
                    q,
                    k_BHMD[some, :, start : min(seen, start + keys)],
                    v_BHMD[some, :, start : min(seen, start + keys)],
                    scoring,
                    bias=None if own is None else own[:, :, first : first + rows, start : min(seen, start + keys)],
                    diagonal=first - start if causal else None,
                )
                for start in range(0, seen, keys)
            )
            states.append(reduce(merge, parts))
    if len(states) == 1:
        return states[0]
    return AttentionState(torch.cat([state.out for state in states]), torch.cat([state.lse for state in states]))


def explicit(
    q_BNHD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scoring: Scoring, *, bias: Tensor | None, diagonal: int | None
) -> AttentionState:
    """Return a state, all scores in memory. Row i sees the keys up to ``diagonal + i`` or all."""
    b, n, heads, dim = q_BNHD.shape
    kv_heads, m = k_BHMD.shape[1:3]
    groups = heads // kv_heads
    compute = torch.promote_types(q_BNHD.dtype, torch.float32)
    q = q_BNHD.to(compute).view(b, n, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(b, kv_heads, groups * n, dim)
    scores = (q @ k_BHMD.to(compute).transpose(2, 3)).view(b, kv_heads, groups, n, m).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if bias is not None:
        scores += bias.unsqueeze(2)
    if diagonal is not None:
        hidden = torch.ones(n, m, dtype=torch.bool, device=scores.device).triu(diagonal + 1)
        scores.masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    # A row without keys: every weight is exp(-inf) = 0 and not NaN.
    shift = torch.where(lse.isneginf(), torch.zeros_like(lse), lse)
    weights = scores.sub_(shift.unsqueeze(-1)).exp_().view(b, kv_heads, groups * n, m)
    out = (weights @ v_BHMD.to(compute)).view(b, kv_heads, groups, n, -1).permute(0, 3, 1, 2, 4)
    return AttentionState(out.reshape(b * n, heads, -1), lse.permute(0, 3, 1, 2).reshape(b * n, heads))
