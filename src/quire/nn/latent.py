"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434): one short row per token.

The row is ``[c_kv | k_pe]``: a latent, with each head's keys and values as linear maps of it, and
the positional part of the key, the same for all heads. Queries may come through a narrow layer.

Letters: T tokens, E model width, Hq heads, R rank of the latent, Q rank of the queries, Dn columns
of a head without position, Dr with position, Dk = Dn + Dr, Dv head size of the values, C = (Q, or
Hq*Dk without such a layer) + R + Dr.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.block_calls import LayerKernels
from quire.contracts.layers import FullAttention
from quire.contracts.linear import HeadKernel
from quire.contracts.model import AbsorbingMaps, LatentExpansion, Pass
from quire.nn.attention import Attention
from quire.nn.linear import Linear
from quire.nn.norm import RMSNorm
from quire.nn.packed import pack_maps


@dataclass(slots=True, eq=False)
class QueryUp:
    """Maps the latent of queries to queries: ``up(norm(x))``, ``[T, Q]`` to ``[T, Hq*Dk]``."""

    norm: RMSNorm
    up: Linear

    def __call__(self, x_TQ: Tensor) -> Tensor:
        return self.up(self.norm(x_TQ))


class MultiHeadLatentAttention(Attention):
    """Attention over latent rows; rotation, storage and the attention itself belong to the pass."""

    __slots__ = ("_sizes", "expansion", "latent_norm", "query_up")

    def __init__(
        self,
        layer_id: int,
        spec: FullAttention,
        qkv: Linear,
        out: Linear,
        *,
        latent_norm: RMSNorm,
        kv_up_CR: Tensor,
        nope_dim: int,
        query_up: QueryUp | None = None,
    ) -> None:
        """Take the heads in expanded form (``spec``), ``[Hq, Dk]`` and ``[Hq, Dv]``.

        ``qkv``: E to C, rows of the queries, then ``c_kv``, then ``k_pe``. ``out``: Hq*Dv to E.
        ``latent_norm``: of ``c_kv``. ``kv_up_CR``: ``[Hq * (Dn + Dv), R]``, for each head the rows
        of its keys, then of its values; copied. ``nope_dim``: Dn. ``query_up``: None if ``qkv``
        gives queries."""
        super().__init__(layer_id, spec, qkv, out)
        self.latent_norm = latent_norm
        self.query_up = query_up
        kv_up_HCR = kv_up_CR.view(spec.num_heads, nope_dim + spec.value_dim, -1)
        # Each part contiguous by rows: all heads of an expanded prompt are one product without a
        # copy.
        key_HDR, value_HVR = (part.contiguous() for part in torch.split(kv_up_HCR, [nope_dim, spec.value_dim], dim=1))
        self.expansion = LatentExpansion(key_HDR=key_HDR, value_HRV=value_HVR.transpose(1, 2))
        rank, position_dim = kv_up_HCR.shape[-1], spec.head_dim - nope_dim
        self._sizes = [qkv.out_features - rank - position_dim, rank, position_dim]

    def pack(self, kernels: LayerKernels) -> int:
        """Pack the linear maps, and the maps of the latent for attention in absorbed form. Return
        the growth of the weights in bytes."""
        grown, before = pack_maps(self, kernels), self.expansion.nbytes
        if isinstance(kernels.linear, HeadKernel):
            self.expansion = absorbing(self.expansion, kernels.linear)
        return grown + self.expansion.nbytes - before

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``; the pass stores the latent rows of these tokens."""
        spec = self.spec
        q_TC, latent_TR, position_TD = torch.split(self.qkv(x_TE), self._sizes, dim=-1)
        if self.query_up is not None:
            q_TC = self.query_up(q_TC)
        rows_TR = torch.cat((self.latent_norm(latent_TR), position_TD), -1)
        q_THD = q_TC.view(-1, spec.num_heads, spec.head_dim)
        return pass_.attend_latent(self.layer_id, q_THD, rows_TR, self.expansion).flatten(-2)


def absorbing(expansion: LatentExpansion, kernel: HeadKernel) -> LatentExpansion:
    """Return the maps packed for attention in absorbed form, or unchanged if they cannot be
    packed."""
    key_HDR, value_HRV = expansion.key_HDR, expansion.value_HRV
    queries, values = (kernel.pack_heads(one.transpose(1, 2)) for one in (key_HDR, value_HRV))
    if queries is None or values is None:
        return expansion
    return LatentExpansion(key_HDR, value_HRV, AbsorbingMaps(queries, values))
