"""Tensor parallelism: how the parts of a rank's model add and gather over the ranks.

Ranks divide heads, the channels of recurrent mixers, and the inner width of MLPs and of experts: a
configuration's ``divided`` gives the sizes of one rank, and ``weights.places`` says how a tensor is
divided. Each rank computes its part of a sum behind attention or a mixer, and behind the MLP, and
the ranks add them (arXiv:1909.08053). The embedding, norms over the model width, routers and rows
of latent attention are on all ranks. Norms and cutoffs over what ranks divide add what they need.
The head's rows are divided; rank 0 gathers the logits.

Letters: T rows, R rows for the head, E model width, O output features, Hq, Hkv query and KV heads,
D head size, C channels of a mixer, G groups of its norm, F inner width of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.ranks import Group, Share
from quire.models.blocks import FeedForward, Joinable, Mixer
from quire.models.decoder import DecoderConfig, Trunk
from quire.models.gemma3n import SparseMLP
from quire.models.gemma4 import BesideExperts
from quire.models.mamba2 import MambaConfig
from quire.nn.attention import WidthNormedAttention
from quire.nn.linear import Linear
from quire.nn.mamba import Mamba2Mixer
from quire.nn.norm import RMSNorm


@dataclass(slots=True, eq=False)
class Summed:
    """A mixer, an MLP or experts of which each rank computes a part of the sum."""

    part: Callable[..., Tensor]
    group: Group

    def __call__(self, x_TE: Tensor, *further: Any) -> Tensor:
        """Map ``[T, E]`` and what else the part takes to a fresh ``[T, E]``, equal on all ranks."""
        return self.group.sum(self.part(x_TE, *further))


@dataclass(slots=True, eq=False)
class SummedWidthNorms:
    """A norm over all query heads and one over all key heads, of which some are here. The ranks add
    the squares of both in one sum."""

    q_norm: RMSNorm
    k_norm: RMSNorm
    widths: tuple[int, int]
    """Columns of all query and of all KV heads."""
    copies: int
    """Ranks that hold the same KV heads."""
    group: Group

    def __call__(self, q_TC: Tensor, k_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Map the queries and keys that are here to fresh ones."""
        dtype, q_TC, k_TC = q_TC.dtype, q_TC.float(), k_TC.float()
        squares_T2 = torch.stack((q_TC.square().sum(-1), k_TC.square().sum(-1) / self.copies), -1)
        means_T2 = self.group.sum(squares_T2).div_(squares_T2.new_tensor(self.widths))
        q_TC = q_TC * torch.rsqrt(means_T2[:, :1] + self.q_norm.eps) * self.q_norm.weight
        k_TC = k_TC * torch.rsqrt(means_T2[:, 1:] + self.k_norm.eps) * self.k_norm.weight
        return q_TC.to(dtype), k_TC.to(dtype)


@dataclass(slots=True, eq=False)
class SummedScale:
    """The scale of a gated norm of which several ranks hold the channels of one group."""

    eps: float
    groups: int
    """Those of all channels."""
    group: Group

    def __call__(self, x_TC: Tensor) -> Tensor:
        """Return ``[T, 1]``, by which the channels that are here are multiplied."""
        sums_TG = x_TC.new_zeros(len(x_TC), self.groups)
        mine_T = sums_TG[:, self.group.rank * self.groups // self.group.size]
        mine_T.copy_(x_TC.square().sum(-1))
        self.group.sum(sums_TG)
        width = x_TC.shape[1] * self.group.size // self.groups
        return torch.rsqrt(mine_T[:, None] / width + self.eps)


def summed_moments(gate_TF: Tensor, *, group: Group) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of the gates of all ranks, ``[T, 1]``. In float64, the
    difference of two large sums is exact enough."""
    wide_TF, count = gate_TF.double(), gate_TF.shape[1] * group.size
    sums_T2 = group.sum(torch.stack((wide_TF.sum(-1), wide_TF.square().sum(-1)), -1)).div_(count)
    mean_T1 = sums_T2[:, :1]
    deviation_T1 = (sums_T2[:, 1:] - mean_T1.square()).clamp(min=0).sqrt()
    return mean_T1.to(gate_TF.dtype), deviation_T1.to(gate_TF.dtype)


class GatheredLinear(Linear):
    """A map whose rows are divided. Rank 0 returns the results of all rows; those of others have
    unspecified values."""

    __slots__ = ("group", "own", "rows")

    def __init__(self, own: Linear, rows: int, group: Group) -> None:
        """``own``: the map of this rank's rows, ``rows``: the number of all."""
        super().__init__(own.weight, own.bias, own.name)
        self.own, self.rows, self.group = own, rows, group

    @property
    def weight_bytes(self) -> int:
        return self.own.weight_bytes

    @property
    def out_features(self) -> int:
        return self.rows

    def plain_weight(self) -> Tensor:
        """Return the rows that are here."""
        return self.own.plain_weight()

    def product(self, x_TI: Tensor) -> Tensor:
        """Map ``[R, E]`` to ``[R, O]``."""
        own_RO = self.own.product(x_TI)
        missing = -(-self.rows // self.group.size) - own_RO.shape[1]
        found = self.group.gather(F.pad(own_RO, (0, missing)) if missing else own_RO)
        return own_RO.new_empty(len(own_RO), self.rows) if found is None else found[:, : self.rows]


def divide_head(model: Trunk, share: Share) -> None:
    """Keep a rank's rows of the head, before the model is packed. The last rank may have fewer."""
    weight_VE = model.lm_head.weight
    each = -(-len(weight_VE) // share.size)
    start = min(each * share.rank, len(weight_VE))
    rows = min(each, len(weight_VE) - start)
    bias_V = model.lm_head.bias
    own = None if bias_V is None else bias_V.narrow(0, start, rows)
    model.lm_head = Linear(weight_VE.narrow(0, start, rows), own, model.lm_head.name)


def join_ranks(model: Trunk, whole: Any, group: Group) -> None:
    """Let the parts of a packed model add and gather their results over the ranks. ``whole``: the
    configuration of the model with all heads."""
    model.stack = None
    for block in model.blocks:
        if isinstance(block, Joinable):
            block.joined = None
        for name in ("attention", "mixer"):
            if hasattr(block, name):
                setattr(block, name, Summed(_mixer(getattr(block, name), whole, group), group))
        if hasattr(block, "mlp"):
            block.mlp = _feed_forward(block.mlp, group)
    if model.stages is None or model.stages.is_last:
        model.lm_head = GatheredLinear(model.lm_head, model.vocab_size, group)


def _mixer(mixer: Mixer, whole: Any, group: Group) -> Mixer:
    """Let the norms of a mixer be over the channels of all ranks; return the mixer."""
    if isinstance(mixer, WidthNormedAttention):
        assert isinstance(whole, DecoderConfig)
        assert isinstance(mixer.q_norm, RMSNorm)
        assert isinstance(mixer.k_norm, RMSNorm)
        spec, own = whole.layers[0], mixer.spec
        widths = spec.num_heads * own.head_dim, spec.num_kv_heads * own.head_dim
        copies = own.num_kv_heads * group.size // spec.num_kv_heads
        mixer.joint_norms = SummedWidthNorms(mixer.q_norm, mixer.k_norm, widths, copies, group)
    if isinstance(mixer, Mamba2Mixer) and mixer.norm is not None:
        assert isinstance(whole, MambaConfig)
        if whole.norm_groups < group.size:
            # A kernel's call would norm the channels that are here.
            mixer.norm.joint_scale, mixer.call = SummedScale(mixer.norm.eps, whole.norm_groups, group), None
    return mixer


def _feed_forward(part: FeedForward, group: Group) -> FeedForward:
    if isinstance(part, BesideExperts):
        # Each of the two is normed by itself.
        part.dense = Summed(part.dense, group)
        part.experts = Summed(part.experts, group)
        return part
    if isinstance(part, SparseMLP):
        part.moments = partial(summed_moments, group=group)
    return Summed(part, group)
