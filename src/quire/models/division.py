"""Tensor parallelism: the part of a model that one rank holds.

Ranks divide heads, and the inner width of MLPs and of experts; ``weights.places`` says how a tensor
is divided. Each rank computes its part of two sums in a block, behind the attention and behind the
MLP, and the ranks add them (arXiv:1909.08053). The embedding, norms and routers are on all ranks.
The head's rows are divided; rank 0 gathers the logits.

Letters: T rows, R rows for the head, E model width, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.base.errors import Unsupported
from quire.contracts.layers import FullAttention, WindowedAttention
from quire.contracts.model import Pass
from quire.contracts.ranks import Group, Share
from quire.models.blocks import FeedForward, Mixer, ParallelBlock, PostNormBlock, PreNormBlock
from quire.models.decoder import Decoder, DecoderConfig
from quire.models.mixture import MixtureConfig
from quire.nn.linear import Linear


def divided_config(config: Any, share: Share) -> DecoderConfig:
    """Return the sizes of one rank's model. ``Unsupported`` for a model that is not divided, or
    whose heads or widths do not divide by the number of ranks."""
    size = share.size
    if not (isinstance(config, DecoderConfig) and config.DIVISIBLE) or any(
        not isinstance(spec, (FullAttention, WindowedAttention)) for spec in config.layers
    ):
        name = getattr(config, "architecture", None) or getattr(getattr(config, "trunk", None), "architecture", "it")
        raise _refused(size, f"{name} has layers that this release does not divide; decoders of softmax attention are")
    if config.head_norms in ("each", "width"):
        raise _refused(size, f"{config.architecture} has head norms that this release does not divide")
    spec = config.layers[0]
    _check(size, "query heads", spec.num_heads)
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise _refused(size, f"{spec.num_kv_heads} KV heads neither divide by {size} nor divide it")
    layers = tuple(
        replace(one, num_heads=one.num_heads // size, num_kv_heads=max(1, one.num_kv_heads // size))
        for one in config.layers
    )
    inner: dict[str, Any] = {"intermediate_size": config.intermediate_size}
    if isinstance(config, MixtureConfig):
        inner |= {"expert_size": config.expert_size, "shared_size": config.shared_size}
        if len(config.dense_layers) == 0:
            del inner["intermediate_size"]
    for name, width in inner.items():
        _check(size, f"elements of {name}", width)
    return replace(config, layers=layers, **{name: width // size for name, width in inner.items()})


def _check(size: int, what: str, count: int) -> None:
    if count % size:
        raise _refused(size, f"{count} {what} do not divide by {size}")


def _refused(size: int, reason: str) -> Unsupported:
    return Unsupported(f"tensor_parallel_size {size}: {reason}", field="tensor_parallel_size", given=size)


@dataclass(slots=True, eq=False)
class SummedMixer:
    """A mixer of which each rank computes a part of the sum."""

    mixer: Mixer
    group: Group

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``, equal on all ranks."""
        return self.group.sum(self.mixer(x_TE, pass_))


@dataclass(slots=True, eq=False)
class SummedFeedForward:
    """A feed-forward part of which each rank computes a part of the sum."""

    part: FeedForward
    group: Group

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``, equal on all ranks."""
        return self.group.sum(self.part(x_TE))


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


def divide_head(model: Decoder[Any], share: Share) -> None:
    """Keep a rank's rows of the head, before the model is packed. The last rank may have fewer."""
    weight_VE = model.lm_head.weight
    each = -(-len(weight_VE) // share.size)
    start = min(each * share.rank, len(weight_VE))
    rows = min(each, len(weight_VE) - start)
    model.lm_head = Linear(weight_VE.narrow(0, start, rows), name=model.lm_head.name)


def join_ranks(model: Decoder[Any], group: Group) -> None:
    """Let the parts of a packed model add and gather their results over the ranks."""
    model.stack = None
    for block in model.blocks:
        assert isinstance(block, (PreNormBlock, PostNormBlock, ParallelBlock))
        if isinstance(block, PreNormBlock):
            block.joined = None
        block.attention = SummedMixer(block.attention, group)
        block.mlp = SummedFeedForward(block.mlp, group)
    if model.stages is None or model.stages.is_last:
        model.lm_head = GatheredLinear(model.lm_head, model.vocab_size, group)
