"""Softmax attention: project, ask the pass, project.

Letters: T tokens, E model width, Hq, Hkv query and KV heads, Dk, Dv head sizes, C = Hq*Dk + Hkv*Dk
+ Hkv*Dv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.contracts.layers import FullAttention, WindowedAttention
from quire.contracts.model import Pass
from quire.contracts.rows import HeadNormWeights, RowKernels
from quire.nn.linear import Linear
from quire.nn.norm import RMSNorm
from quire.ops.rows import REFERENCE_ROWS


@dataclass(slots=True, eq=False)
class Attention:
    """Multi-head, grouped-query and multi-query attention.

    Rotation, windows, storage and the attention itself belong to the pass; ``spec`` tells it how.
    """

    layer_id: int
    spec: FullAttention | WindowedAttention
    qkv: Linear
    """E to C"""
    out: Linear
    """Hq*Dv to E"""

    @property
    def is_whole(self) -> bool:
        """Return True if the pass may run the heads as one ``attend_qkv`` call on the projection,
        with ``head_norms``."""
        return type(self) is Attention

    @property
    def head_norms(self) -> HeadNormWeights | None:
        """Weights of the head norms that the pass applies; None: no norms."""
        return None

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The maps of the input."""
        return (self.qkv,)

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; the pass stores K and V of these tokens."""
        return self.out(self.heads(x_TE, pass_))

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to the heads before ``out``, ``[T, Hq*Dv]``."""
        return pass_.attend_qkv(self.layer_id, self.qkv(x_TE)).flatten(-2)


@dataclass(slots=True, eq=False)
class NormedAttention(Attention):
    """Attention with normed query and key heads before rotation (Qwen3, Gemma 3, StableLM)."""

    q_norm: Callable[[Tensor], Tensor]
    """Maps ``[T, Hq, Dk]`` to a contiguous result."""
    k_norm: Callable[[Tensor], Tensor]
    """Maps ``[T, Hkv, Dk]`` to a contiguous result."""
    _sizes: list[int] = field(init=False)
    _norms: HeadNormWeights | None = field(init=False, default=None)
    """Weights of the two norms, given to the pass that has q, k and v as one tensor."""

    def __post_init__(self) -> None:
        spec, q_norm, k_norm = self.spec, self.q_norm, self.k_norm
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm) and q_norm.eps == k_norm.eps:
            self._norms = HeadNormWeights(q_norm.weight, k_norm.weight, q_norm.eps)
        kv_heads = spec.num_kv_heads
        self._sizes = [spec.num_heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.value_dim]

    @property
    def is_whole(self) -> bool:
        """See ``Attention``."""
        return type(self) is NormedAttention and self._norms is not None

    @property
    def head_norms(self) -> HeadNormWeights | None:
        """See ``Attention``."""
        return self._norms

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``."""
        spec = self.spec
        if self._norms is not None:
            return pass_.attend_qkv(self.layer_id, self.qkv(x_TE), self._norms).flatten(-2)
        q_TC, k_TC, v_TC = torch.split(self.qkv(x_TE), self._sizes, dim=-1)
        q_THD = self.q_norm(q_TC.view(-1, spec.num_heads, spec.head_dim))
        k_THD = self.k_norm(k_TC.view(-1, spec.num_kv_heads, spec.head_dim))
        v_THD = v_TC.view(-1, spec.num_kv_heads, spec.value_dim)
        return pass_.attend(self.layer_id, q_THD, k_THD, v_THD).flatten(-2)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryGrowth:
    """Factor of queries that grows with their position p: ``1 + rate * log(1 + p // length)``
    (Llama 4, Ministral 3)."""

    rate: float
    length: int
    """In tokens, those of the training."""


@dataclass(slots=True, eq=False)
class GrowingAttention(Attention):
    """Attention whose queries grow with their position."""

    growth: QueryGrowth

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``."""
        qkv_TC = self.qkv(x_TE)
        periods_T = torch.div(pass_.places_T, self.growth.length, rounding_mode="floor")
        factor_T = (1 + self.growth.rate * torch.log1p(periods_T.float())).to(qkv_TC.dtype)
        qkv_TC[:, : self.spec.num_heads * self.spec.head_dim].mul_(factor_T[:, None])
        return pass_.attend_qkv(self.layer_id, qkv_TC).flatten(-2)


@dataclass(slots=True, eq=False)
class WidthNormedAttention(NormedAttention):
    """Attention with norms over all heads at once (OLMo 2): ``[T, Hq*Dk]``, ``[T, Hkv*Dk]``."""

    joint_norms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = field(init=False, default=None)
    """Norms queries and keys together, in place of ``q_norm`` and ``k_norm``, which know only the
    heads that are here; None: all are."""

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``."""
        spec = self.spec
        q_TC, k_TC, v_TC = torch.split(self.qkv(x_TE), self._sizes, dim=-1)
        if self.joint_norms is None:
            q_TC, k_TC = self.q_norm(q_TC), self.k_norm(k_TC)
        else:
            q_TC, k_TC = self.joint_norms(q_TC, k_TC)
        q_THD = q_TC.view(-1, spec.num_heads, spec.head_dim)
        k_THD = k_TC.view(-1, spec.num_kv_heads, spec.head_dim)
        v_THD = v_TC.view(-1, spec.num_kv_heads, spec.value_dim)
        return pass_.attend(self.layer_id, q_THD, k_THD, v_THD).flatten(-2)


@dataclass(slots=True, eq=False)
class HeadGatedAttention(NormedAttention):
    """Attention with normed query and key heads, of which each head's output is multiplied by a
    sigmoid of the input (LFM3)."""

    gate: Linear = field(kw_only=True)
    """E to Hq"""
    row_kernels: RowKernels = field(init=False, default=REFERENCE_ROWS)

    @property
    def is_whole(self) -> bool:
        """See ``Attention``. The gates are a projection beside that."""
        return self._norms is not None

    @property
    def projections(self) -> tuple[Linear, ...]:
        """See ``Attention``."""
        return self.qkv, self.gate

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``."""
        out_THD = NormedAttention.heads(self, x_TE, pass_).view(-1, self.spec.num_heads, self.spec.value_dim)
        return self.row_kernels.gate_heads(out_THD, self.gate(x_TE)[:, :, None]).flatten(-2)


@dataclass(slots=True, eq=False)
class GatedAttention(NormedAttention):
    """Attention with normed query and key heads and a sigmoid gate (arXiv:2505.06708), as in
    Qwen3-Next. In ``qkv`` (E to 2*Hq*D + 2*Hkv*D) the D rows of each query head's gate follow its
    own. Both norms are root mean square."""

    row_kernels: RowKernels = field(init=False, default=REFERENCE_ROWS)

    @property
    def is_whole(self) -> bool:
        """See ``Attention``. The gates are further columns of the projection."""
        return self._norms is not None

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``."""
        spec, (queries, *others) = self.spec, self._sizes
        q_TC, kv_TC = torch.split(self.qkv(x_TE), [2 * queries, sum(others)], dim=-1)
        q_THD, gate_THD = q_TC.view(-1, spec.num_heads, 2 * spec.head_dim).chunk(2, dim=-1)
        assert self._norms is not None
        out_THD = pass_.attend_qkv(self.layer_id, torch.cat((q_THD.flatten(-2), kv_TC), -1), self._norms)
        return self.row_kernels.gate_heads(out_THD, gate_THD).flatten(-2)


@dataclass(slots=True, eq=False)
class ValueNormedAttention(NormedAttention):
    """Attention with normed query, key and value heads (Gemma 3n, Gemma 4)."""

    v_norm: RMSNorm
    keys_as_values: bool = False
    """Whether V is K before its norm and its rotation; ``qkv`` then has no rows of V."""

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``."""
        spec = self.spec
        parts = torch.split(self.qkv(x_TE), self._sizes[: 3 - self.keys_as_values], dim=-1)
        q_THD = self.q_norm(parts[0].view(-1, spec.num_heads, spec.head_dim))
        k_THD, v_THD = (one.view(-1, spec.num_kv_heads, spec.head_dim) for one in (parts[1], parts[-1]))
        return pass_.attend(self.layer_id, q_THD, self.k_norm(k_THD), self.v_norm(v_THD)).flatten(-2)


@dataclass(slots=True, eq=False)
class SharedAttention:
    """Attention over the K and V of another layer."""

    source: int
    """Id of that layer."""
    spec: FullAttention | WindowedAttention
    qkv: Linear
    """E to Hq*Dk"""
    out: Linear
    q_norm: RMSNorm

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; nothing is stored."""
        q_THD = self.q_norm(self.qkv(x_TE).view(-1, self.spec.num_heads, self.spec.head_dim))
        return self.out(pass_.attend_shared(self.source, q_THD).flatten(-2))
