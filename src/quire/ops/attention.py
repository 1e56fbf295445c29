"""Attention over explicit keys, and the merge of attention states: the definitions.

Letters: N queries; M keys; T new tokens of all entries; S slots; Hq, Hkv query and KV heads (head h
reads KV head ``h // (Hq / Hkv)``); Dk, Dv head sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.attention import AttentionState, ForwardPlan, Scoring
from quire.contracts.kv_format import PLAIN, KVView
from quire.contracts.layers import LayerSpec


def attend(
    q_NHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, visible_NM: Tensor, scale: float, softcap: float | None = None
) -> AttentionState:
    """Return softmax attention of every query over its keys in ``visible_NM`` (bool).

    Scores are ``scale * q k``, with ``softcap`` c ``c * tanh(scale * q k / c)``. Computed in
    float32 (float64 for float64 input), output in the dtype of q. ``out [N, Hq, Dv]``,
    ``lse [N, Hq]``; 0 and -inf for a query without keys."""
    scores_HNM = masked_scores(q_NHD, k_MHD, visible_NM, Scoring(scale, softcap))
    return weigh(scores_HNM, v_MHD, q_NHD.dtype)


def masked_scores(q_NHD: Tensor, k_MHD: Tensor, visible_NM: Tensor, scoring: Scoring) -> Tensor:
    """Return ``[Hq, N, M]`` in float32 or float64, -inf for invisible keys."""
    compute = torch.promote_types(q_NHD.dtype, torch.float32)
    k = k_MHD.to(compute).repeat_interleave(q_NHD.shape[1] // k_MHD.shape[1], 1)
    scores_HNM = torch.einsum("nhd,mhd->hnm", q_NHD.to(compute), k) * scoring.scale
    if scoring.softcap is not None:
        scores_HNM = scoring.softcap * torch.tanh(scores_HNM / scoring.softcap)
    return scores_HNM.masked_fill(~visible_NM, -torch.inf)


def weights_of(scores_HNM: Tensor, lse_HN: Tensor) -> Tensor:
    """Return the weights of the keys; all are exp(-inf) = 0, not NaN, for a query without keys."""
    shift = torch.where(lse_HN.isneginf(), torch.zeros_like(lse_HN), lse_HN)
    return torch.exp(scores_HNM - shift.unsqueeze(-1))


def weigh(scores_HNM: Tensor, v_MHD: Tensor, dtype: torch.dtype, sinks_H: Tensor | None = None) -> AttentionState:
    """Return the attention state of these scores. ``sinks_H``: one more score per head, without a
    value."""
    lse_HN = torch.logsumexp(scores_HNM, -1)
    if sinks_H is not None:
        lse_HN = torch.logaddexp(lse_HN, sinks_H.to(lse_HN.dtype).unsqueeze(-1))
    v = v_MHD.to(scores_HNM.dtype).repeat_interleave(scores_HNM.shape[0] // v_MHD.shape[1], 1)
    out = torch.einsum("hnm,mhd->nhd", weights_of(scores_HNM, lse_HN), v)
    return AttentionState(out.to(dtype), lse_HN.T.contiguous())


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Return the state over the union of two disjoint sets of keys, computed in float32.
    (FlashInfer, arXiv:2501.01005, section 2.2.) ``(0, -inf)`` is the identity, to the bit.
    Commutative to the bit, associative up to rounding."""
    m = torch.maximum(a.lse, b.lse)
    safe = torch.where(m.isneginf(), torch.zeros_like(m), m)
    wa, wb = torch.exp(a.lse - safe), torch.exp(b.lse - safe)
    total = wa + wb
    norm = torch.where(total == 0, torch.ones_like(total), total)
    compute = torch.promote_types(a.out.dtype, torch.float32)
    out = (wa.unsqueeze(-1) * a.out.to(compute) + wb.unsqueeze(-1) * b.out.to(compute)) / norm.unsqueeze(-1)
    return AttentionState(out.to(a.out.dtype), safe + torch.log(total))


def visible_keys(plan: ForwardPlan, entry: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two bool masks ``[n, keys]``, by key address: visible keys of the window part and of
    the sink part."""
    rows = slice(int(plan.starts[entry]), int(plan.starts[entry + 1]))
    positions = int(plan.origins[entry]) + np.arange(int(plan.keys[entry]))
    rule = plan.rules[entry]
    if rule is not None:
        positions[rule.first :] = rule.positions
    visible = positions <= plan.positions[rows, None]
    if rule is not None:
        visible[:, rule.first :] = rule.allowed
    window = visible if plan.lows is None else visible & (positions >= plan.lows[rows, None])
    if plan.sinks is None:
        return window, np.zeros_like(visible)
    return window, visible & (positions >= plan.sinks[rows, :1]) & (positions < plan.sinks[rows, 1:])


def kind_refusal(backend: str, spec: LayerSpec) -> str:
    """Return the reason for a backend of full and windowed layers to refuse a layer; "" if it can
    run it."""
    if spec.kind in ("full", "window"):
        return ""
    return f"the {backend} attention has no layers of kind {spec.kind!r}, only 'full' and 'window'"


def check_sink_query(plan: ForwardPlan, q_sink_THD: Tensor | None) -> None:
    """Raise ``InvalidArgument`` unless sink query and sink parts are both there or both missing."""
    if (plan.sinks is None) != (q_sink_THD is None):
        has, given = "no" if plan.sinks is None else "a", "no" if q_sink_THD is None else "a"
        raise InvalidArgument(f"the plan has {has} sink part and {given} q_sink_THD is given; both or none are needed")


def entry_scores(
    plan: ForwardPlan, entry: int, q_THD: Tensor, view: KVView, scoring: Scoring, q_sink_THD: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an entry's scores ``[Hq, n, M]`` over M visible keys, their addresses and slots."""
    rows = slice(int(plan.starts[entry]), int(plan.starts[entry + 1]))
    window, sink = visible_keys(plan, entry)
    seen = np.flatnonzero((window | sink).any(0))
    slots = plan.tables[entry][seen // plan.page_size].astype(np.int64) * plan.page_size + seen % plan.page_size
    addresses, index = (torch.from_numpy(x).to(q_THD.device) for x in (seen, slots))
    # Not by brackets: these would read a slot of page -1 from the end of the pool.
    k_MHD = view.keys(index)
    scores_HNM = masked_scores(q_THD[rows], k_MHD, torch.from_numpy(window[:, seen]).to(q_THD.device), scoring)
    if q_sink_THD is not None:
        sink_NM = torch.from_numpy(sink[:, seen]).to(q_THD.device)
        sink_HNM = masked_scores(q_sink_THD[rows], k_MHD, sink_NM, scoring)
        scores_HNM = torch.where(sink_NM, sink_HNM, scores_HNM)
    return scores_HNM, addresses, index


def attention_weights(
    plan: ForwardPlan,
    q_THD: Tensor,
    view: KVView,
    scoring: Scoring,
    *,
    q_sink_THD: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> list[Tensor]:
    """Return the weights of keys for new tokens: float32 ``[Hq, n, keys]`` per entry, by address.

    0 for keys that a row does not see. The weights of a row sum to 1; with learned logits
    ``sinks_H`` to less, and to 0 for a row without keys. Arguments as in ``AttentionBackend.run``.
    All weights are in memory. ``InvalidArgument``: ``q_sink_THD`` is missing or surplus."""
    check_sink_query(plan, q_sink_THD)
    result = []
    for entry in range(plan.num_entries):
        scores_HNM, addresses, _ = entry_scores(plan, entry, q_THD, view, scoring, q_sink_THD)
        lse_HN = torch.logsumexp(scores_HNM, -1)
        if sinks_H is not None:
            lse_HN = torch.logaddexp(lse_HN, sinks_H.to(lse_HN.dtype).unsqueeze(-1))
        weights = torch.zeros(*scores_HNM.shape[:2], int(plan.keys[entry]), device=q_THD.device)
        result.append(weights.index_copy_(2, addresses, weights_of(scores_HNM, lse_HN).to(torch.float32)))
    return result


WEIGHTS_AT_ONCE = 2**24
"""Largest number of attention weights that ``weight_sums`` holds, unless one query has more."""


def weight_sums(
    q_NHD: Tensor, k_MHD: Tensor, visible_NM: Tensor, scoring: Scoring, sinks_H: Tensor | None = None
) -> Tensor:
    """Return the attention weights of keys, summed over queries and heads: float32 ``[M]``. Every
    query sees at least one key. Weights and ``sinks_H`` are as in ``attention_weights``; queries
    are processed in groups."""
    heads, group = k_MHD.shape[1], q_NHD.shape[1] // k_MHD.shape[1]
    keys_HDM = k_MHD.float().permute(1, 2, 0)
    sums_M = keys_HDM.new_zeros(keys_HDM.shape[-1])
    some = max(1, WEIGHTS_AT_ONCE // max(1, heads * group * len(sums_M)))
    for first in range(0, len(q_NHD), some):
        q_nHD = q_NHD[first : first + some].float()
        q_nHGD = q_nHD.reshape(len(q_nHD), heads, group, -1)
        q_HXD = q_nHGD.permute(1, 2, 0, 3).flatten(1, 2) * scoring.scale
        scores_HGnM = (q_HXD @ keys_HDM).view(heads, group, len(q_nHD), -1)
        if scoring.softcap is not None:
            scores_HGnM = scoring.softcap * torch.tanh(scores_HGnM / scoring.softcap)
        scores_HGnM.masked_fill_(~visible_NM[first : first + some], -torch.inf)
        if sinks_H is not None:
            sinks_HGn1 = sinks_H.float().view(heads, group, 1, 1).expand(*scores_HGnM.shape[:3], 1)
            scores_HGnM = torch.cat((scores_HGnM, sinks_HGn1), -1)
        sums_M += scores_HGnM.softmax(-1).sum((0, 1, 2))[: len(sums_M)]
    return sums_M


class ReferenceAttention:
    """The backend that defines the others: entry by entry, explicit masks, float32 or better."""

    name = "reference"

    def refusal(self, spec: LayerSpec, device: torch.device, format: str = PLAIN) -> str:
        """See the contract. Rows of every format are read."""
        del device, format
        return kind_refusal(self.name, spec)

    def fuses(self, spec: LayerSpec, device: torch.device) -> bool:
        """Return False: the weights are formed."""
        del spec, device
        return False

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> ForwardPlan:
        del dtype
        return plan

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See the contract. ``InvalidArgument`` if ``q_sink_THD`` is missing or surplus."""
        del new  # the pool has these rows too
        return self._state(prepared, q_THD, view, scoring, q_sink_THD, sinks_H).out

    def run_state(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        coarse: bool = False,
    ) -> AttentionState:
        """See the contract; float64 ``lse`` for float64 input, never coarse. Raise as ``run``."""
        del new, coarse
        return self._state(prepared, q_THD, view, scoring, q_sink_THD, None)

    @staticmethod
    def _state(
        plan: ForwardPlan,
        q_THD: Tensor,
        view: KVView,
        scoring: Scoring,
        q_sink_THD: Tensor | None,
        sinks_H: Tensor | None,
    ) -> AttentionState:
        check_sink_query(plan, q_sink_THD)
        out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], view.sizes[2])
        lse = q_THD.new_empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
        for entry in range(plan.num_entries):
            rows = slice(int(plan.starts[entry]), int(plan.starts[entry + 1]))
            scores_HNM, _, slots = entry_scores(plan, entry, q_THD, view, scoring, q_sink_THD)
            out[rows], lse[rows] = weigh(scores_HNM, view.values(slots), q_THD.dtype, sinks_H)
        return AttentionState(out, lse)
