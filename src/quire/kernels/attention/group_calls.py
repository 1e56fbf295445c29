"""One call for each piece of a batch: ``run_...`` returns attention, ``state_of_...`` its state.

Letters: T new tokens; b entries of a group; n rows, padded; R = b * n; Hq, Hkv heads; Dk, Dv sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.contracts.attention import AttentionState, Scoring
from quire.contracts.kv_format import PlainRows
from quire.kernels.attention.groups import CausalGroup, Keys, LongChunk, PagedGroup
from quire.kernels.attention.lse_attention import has_lse_kernel, lse_attention, same_size
from quire.kernels.attention.row_blocks import KeySpan, RowBlock
from quire.ops.attention import merge


def sdpa(
    q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return ``[b, Hq, n, Dv]``, strided.

    PyTorch's flash kernel for CPUs needs K and V of one size; for others it makes all scores: 128
    heads x 2,048 rows of Dk = 192, Dv = 128 take 4.8 GB."""
    value_dim = v_BHMD.shape[-1]
    if q_BHND.device.type == "cpu":
        q_BHND, k_BHMD, v_BHMD = same_size(q_BHND, k_BHMD, v_BHMD)
    grouped = q_BHND.shape[1] != k_BHMD.shape[1]
    out = scaled_dot_product_attention(
        q_BHND, k_BHMD, v_BHMD, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out[..., :value_dim]


def run_causal(group: CausalGroup, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float) -> Tensor:
    """Return ``[R, Hq, Dv]``."""
    q, k, v = (
        group.rows.take(x).view(group.b, group.n, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q_THD, k_THD, v_THD)
    )
    out_BHND = sdpa(q, k, v, scale, causal=True)
    return out_BHND.transpose(1, 2).contiguous().view(group.b * group.n, q.shape[1], v.shape[-1])


def state_of_causal(
    group: CausalGroup, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scoring: Scoring
) -> AttentionState:
    q, k, v = (group.rows.take(x).view(group.b, group.n, *x.shape[1:]) for x in (q_THD, k_THD, v_THD))
    return lse_attention(q, k.transpose(1, 2), v.transpose(1, 2), scoring, causal=True)


def run_paged(group: PagedGroup, q_THD: Tensor, pool: PlainRows, scale: float) -> Tensor:
    """Return ``[R, Hq, Dv]``."""
    heads, dim = q_THD.shape[1:]
    kv_heads = pool.k.shape[1]
    k, v = group.keys.gather(pool)
    q = group.rows.take(q_THD)
    if group.n == 1:
        q = q.view(group.b, kv_heads, heads // kv_heads, dim)
        out = sdpa(q, k, v, scale, mask=group.mask)
        return out.contiguous().view(group.b, heads, -1)
    q = q.view(group.b, group.n, heads, dim).transpose(1, 2)
    out = sdpa(q, k, v, scale, mask=group.mask)
    return out.transpose(1, 2).contiguous().view(group.b * group.n, heads, -1)


def state_of_paged(group: PagedGroup, q_THD: Tensor, pool: PlainRows, scoring: Scoring) -> AttentionState:
    q = group.rows.take(q_THD)
    k, v = group.keys.gather(pool)
    return lse_attention(q.view(group.b, group.n, *q.shape[1:]), k, v, scoring, mask=group.mask)


def state_of_long(
    chunk: LongChunk, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, pool: PlainRows, scoring: Scoring
) -> AttentionState:
    """Merge self attention with attention over the past; ``out`` in float32 or better."""
    q = q_NHD.unsqueeze(0)
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k_NHD, v_NHD))
    past_k, past_v = chunk.keys.gather(pool)
    own = lse_attention(q, k, v, scoring, causal=True)
    return merge(exact(own), lse_attention(q, past_k, past_v, scoring))


def with_keys(blocks: Iterable[RowBlock], pool: PlainRows) -> Iterator[tuple[RowBlock, Tensor, Tensor]]:
    """Yield each block with the K and V of its entry, ``[1, Hkv, m, D]``, gathered once for
    neighbouring blocks with the same keys."""
    keys: Keys | None = None
    for block in blocks:
        if block.keys is not keys:
            keys, (k, v) = block.keys, block.keys.gather(pool)
        yield block, k, v


def run_block(block: RowBlock, q_NHD: Tensor, k_1HMD: Tensor, v_1HMD: Tensor, scale: float) -> Tensor:
    """Return ``[n, Hq, Dv]``; rows without keys are undefined."""
    if len(block.segments) > 1 or has_lse_kernel(q_NHD.device):
        return state_of_block(block, q_NHD, k_1HMD, v_1HMD, Scoring(scale)).out
    segment = block.segments[0]
    k, v = (x[:, :, segment.start : segment.stop] for x in (k_1HMD, v_1HMD))
    q = q_NHD.transpose(0, 1).unsqueeze(0)
    out = sdpa(q, k, v, scale, mask=segment.mask)
    return out[0].transpose(0, 1)


def state_of_block(block: RowBlock, q_NHD: Tensor, k_1HMD: Tensor, v_1HMD: Tensor, scoring: Scoring) -> AttentionState:
    states = [state_of_segment(segment, q_NHD, k_1HMD, v_1HMD, scoring) for segment in block.segments]
    return states[0] if len(states) == 1 else reduce(merge, states[1:], exact(states[0]))


def state_of_segment(
    segment: KeySpan, q_NHD: Tensor, k_1HMD: Tensor, v_1HMD: Tensor, scoring: Scoring
) -> AttentionState:
    some = slice(segment.start, segment.stop)
    state = lse_attention(q_NHD.unsqueeze(0), k_1HMD[:, :, some], v_1HMD[:, :, some], scoring, mask=segment.mask)
    return state if segment.blind is None else blinded(state, segment.blind)


def blinded(state: AttentionState, rows: Tensor) -> AttentionState:
    """Set these rows of the state to the state without keys, (0, -inf), in place."""
    return AttentionState(state.out.index_fill_(0, rows, 0.0), state.lse.index_fill_(0, rows, -torch.inf))


def exact(state: AttentionState) -> AttentionState:
    """Widen ``out`` to float32 or better, so that a merge does not round it."""
    return AttentionState(state.out.to(torch.promote_types(state.out.dtype, torch.float32)), state.lse)
