"""Mixers beside plain softmax attention: the interface of recurrent mixers, and gated attention.

The recurrent mixers are in ``nn.mamba``, ``nn.delta`` and ``nn.short_conv``. A mixer's shape gives
the state of its layer.

Letters: T tokens, E model width, Hq, Hkv query and KV heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire.contracts.layers import Recurrent
from quire.contracts.model import Pass
from quire.nn.attention import NormedAttention


class MixerShape(Protocol):
    """The sizes of a recurrent mixer: a frozen dataclass of numbers."""

    def spec(self, dtype: torch.dtype) -> Recurrent:
        """Return the state of a layer of a model in ``dtype``."""
        ...


class GatedAttention(NormedAttention):
    """Attention with normed query and key heads and a sigmoid gate (arXiv:2505.06708), as in
    Qwen3-Next. In ``qkv`` (E to 2*Hq*D + 2*Hkv*D) the D rows of each query head's gate follow its
    own."""

    __slots__ = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes[0] *= 2

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """See ``Attention``."""
        spec = self.spec
        q_TC, k_TC, v_TC = torch.split(self.qkv(x_TE), self._sizes, dim=-1)
        q_THD, gate_THD = q_TC.view(-1, spec.num_heads, 2 * spec.head_dim).chunk(2, dim=-1)
        k_THD = self.k_norm(k_TC.view(-1, spec.num_kv_heads, spec.head_dim))
        v_THD = v_TC.view(-1, spec.num_kv_heads, spec.value_dim)
        out_THD = pass_.attend(self.layer_id, self.q_norm(q_THD), k_THD, v_THD)
        return out_THD.mul_(torch.sigmoid(gate_THD)).flatten(-2)
