"""Softmax attention: project, ask the pass, project.

Letters: T tokens, E model width, Hq, Hkv query and KV heads, Dk, Dv head sizes, C = Hq*Dk + Hkv*Dk + Hkv*Dv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.layers import FullAttention
from quire.contracts.model import Pass
from quire.nn.linear import Linear
from quire.nn.norm import RMSNorm


class Attention:
    """Multi-head, grouped-query and multi-query attention with an optional norm of each query and key head (Qwen3).

    Rotation, storage and the attention itself belong to the pass; ``spec`` tells it how.
    """

    __slots__ = ("_sizes", "k_norm", "layer_id", "out", "q_norm", "qkv", "spec")

    def __init__(
        self,
        layer_id: int,
        spec: FullAttention,
        qkv: Linear,
        out: Linear,
        head_norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        """``qkv``: E to C. ``out``: Hq*Dv to E. ``head_norms``: of queries and of keys, over Dk."""
        self.layer_id = layer_id
        self.spec = spec
        self.qkv = qkv
        self.out = out
        self.q_norm: RMSNorm | None = head_norms[0] if head_norms else None
        self.k_norm: RMSNorm | None = head_norms[1] if head_norms else None
        self._sizes = [
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.value_dim,
        ]

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """``[T, E]`` to a fresh ``[T, E]``; the pass stores K and V of these tokens."""
        qkv_TC = self.qkv(x_TE)
        if self.q_norm is None or self.k_norm is None:
            out_THD = pass_.attend_qkv(self.layer_id, qkv_TC)
        else:
            spec = self.spec
            q_TC, k_TC, v_TC = torch.split(qkv_TC, self._sizes, dim=-1)
            q_THD = self.q_norm(q_TC.view(-1, spec.num_heads, spec.head_dim))
            k_THD = self.k_norm(k_TC.view(-1, spec.num_kv_heads, spec.head_dim))
            v_THD = v_TC.view(-1, spec.num_kv_heads, spec.value_dim)
            out_THD = pass_.attend(self.layer_id, q_THD, k_THD, v_THD)
        return self.out(out_THD.flatten(-2))
