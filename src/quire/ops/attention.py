"""Attention over explicit keys, and the merge of attention states: the definitions.

Letters: N queries; M keys; Hq, Hkv query and KV heads (head h reads KV head ``h // (Hq / Hkv)``); Dk, Dv head sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.contracts.attention import AttentionState, ForwardPlan
from quire.contracts.layers import LayerSpec


def attend(q_NHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, visible_NM: Tensor, scale: float) -> AttentionState:
    """Softmax attention of every query over the keys that ``visible_NM`` (bool) names.

    Computed in float32 (float64 for float64 input), output in the dtype of q.
    """
    compute = torch.float64 if q_NHD.dtype == torch.float64 else torch.float32
    groups = q_NHD.shape[1] // k_MHD.shape[1]
    k = k_MHD.to(compute).repeat_interleave(groups, 1)
    v = v_MHD.to(compute).repeat_interleave(groups, 1)
    scores_HNM = torch.einsum("nhd,mhd->hnm", q_NHD.to(compute), k) * scale
    scores_HNM = scores_HNM.masked_fill(~visible_NM, -torch.inf)
    lse_HN = torch.logsumexp(scores_HNM, -1)
    # A query without keys: every weight is exp(-inf) = 0 and not NaN.
    shift = torch.where(lse_HN.isneginf(), torch.zeros_like(lse_HN), lse_HN)
    weights_HNM = torch.exp(scores_HNM - shift.unsqueeze(-1))
    out = torch.einsum("hnm,mhd->nhd", weights_HNM, v)
    return AttentionState(out.to(q_NHD.dtype), lse_HN.T.contiguous())


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the union of two disjoint sets of keys, in float32 (FlashInfer, arXiv:2501.01005, section 2.2).

    ``(0, -inf)`` is the identity, to the bit. Commutative to the bit, associative up to rounding.
    """
    m = torch.maximum(a.lse, b.lse)
    safe = torch.where(m.isneginf(), torch.zeros_like(m), m)
    wa, wb = torch.exp(a.lse - safe), torch.exp(b.lse - safe)
    total = wa + wb
    norm = torch.where(total == 0, torch.ones_like(total), total)
    compute = torch.promote_types(a.out.dtype, torch.float32)
    out = (wa.unsqueeze(-1) * a.out.to(compute) + wb.unsqueeze(-1) * b.out.to(compute)) / norm.unsqueeze(-1)
    return AttentionState(out.to(a.out.dtype), safe + torch.log(total))


class ReferenceAttention:
    """The attention backend that defines the others: entry by entry, with explicit masks, in float32 or better."""

    name = "reference"

    def refusal(self, spec: LayerSpec, device: torch.device) -> str:
        del device
        return (
            "" if spec.kind == "full" else f"the reference attention has no layers of kind {spec.kind!r}, only 'full'"
        )

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> ForwardPlan:
        del dtype
        return plan

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        scale: float,
    ) -> Tensor:
        plan: ForwardPlan = prepared
        del k_THD
        out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], v_THD.shape[-1])
        for entry, table in enumerate(plan.tables):
            start, stop, past = int(plan.starts[entry]), int(plan.starts[entry + 1]), int(plan.pasts[entry])
            length = past + stop - start
            keys = torch.arange(length, device=q_THD.device)
            pages = torch.from_numpy(table).to(q_THD.device, torch.int64)
            slots = pages[keys // plan.page_size] * plan.page_size + keys % plan.page_size
            visible = keys <= torch.arange(past, length, device=q_THD.device).unsqueeze(1)
            out[start:stop] = attend(q_THD[start:stop], k_SHD[slots], v_SHD[slots], visible, scale).out
        return out
