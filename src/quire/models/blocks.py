"""Decoder blocks: arrangements of norms and residual additions.

Each class is one arrangement, so a model makes no choice per call. A block maps ``[T, E]`` to a
fresh ``[T, E]``. Attention and MLP return fresh tensors. The residual is added to these in place,
never to the caller's x.

Letters: T new tokens, E model width.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.block_calls import (
    AttentionParts,
    BlockKernel,
    BlockStack,
    BlockTail,
    LayerKernels,
    ModelEnds,
    NormWeight,
    RowLogits,
    WholeBlock,
)
from quire.contracts.model import Block, Model, OpenPass, Pass
from quire.contracts.recurrence import MixerCall, RecurrentParts
from quire.contracts.rows import HeadNormWeights
from quire.nn.attention import Attention, GatedAttention
from quire.nn.embedding import Embedding
from quire.nn.linear import Linear
from quire.nn.mlp import GatedMLP
from quire.nn.norm import RMSNorm
from quire.nn.packed import KernelLinear

Mixer: TypeAlias = Callable[[Tensor, Pass], Tensor]
"""Attention, or a recurrent layer: maps ``[T, E]`` to a fresh ``[T, E]``."""
FeedForward: TypeAlias = Callable[[Tensor], Tensor]
"""A gated MLP, or experts: maps ``[T, E]`` to a fresh ``[T, E]``, each row by itself."""


@runtime_checkable
class HeadedMixer(Protocol):
    """A mixer whose output is a projection of heads."""

    layer_id: int
    out: Linear

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to the columns before ``out``."""
        ...


@runtime_checkable
class RecurrentMixer(HeadedMixer, Protocol):
    """A recurrent layer, which may have one call between its projections."""

    call: MixerCall | None

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The maps of the input, if ``call`` takes their results unchanged; else none."""
        ...


class Norm(Protocol):
    """A norm over the model width."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Map ``[..., E]`` to a fresh ``[..., E]``."""
        ...

    def after_sum(self, y_TE: Tensor, x_TE: Tensor) -> Tensor:
        """Add x to y in place; return the norm of the sum."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class JoinedBlock:
    """The kernel calls for a block, valid while no adapter changes its maps."""

    attention: HeadedMixer
    first: tuple[Linear, ...]
    """The maps of the block's normed input that ``whole`` includes."""
    maps: tuple[Linear, Linear, Linear]
    """The maps after the heads."""
    tail: BlockTail
    """The part after the attention heads: output projection to MLP."""
    whole: WholeBlock | None

    def run(self, block: PreNormBlock, x_TE: Tensor, pass_: Pass) -> Tensor | None:
        """Return the block's result; None if its parts must run one by one."""
        if not (self.tail.takes(x_TE) and all(one.is_plain for one in self.maps)):
            return None
        attention = self.attention
        if self.whole is not None and all(one.is_plain for one in self.first):
            parts: AttentionParts | RecurrentParts | None
            if isinstance(attention, Attention):
                parts = pass_.attention_parts(attention.layer_id, attention.head_norms, x_TE.dtype)
            else:
                parts = pass_.recurrent_parts(attention.layer_id)
            if parts is not None:
                return self.whole(x_TE, parts)
        return self.tail(attention.heads(block.attention_norm(x_TE), pass_), x_TE)


@dataclass(slots=True, eq=False)
class PreNormBlock:
    """``h = x + attention(norm(x))``, then ``h + mlp(norm(h))``: Llama and most others."""

    attention_norm: Norm
    attention: Mixer
    mlp_norm: Norm
    mlp: FeedForward
    joined: JoinedBlock | None = field(init=False, default=None)
    """The kernel calls for few rows; None: parts run one by one."""

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        if self.joined is not None and (y_TE := self.joined.run(self, x_TE, pass_)) is not None:
            return y_TE
        h_TE = self.attention(self.attention_norm(x_TE), pass_)
        return self.mlp(self.mlp_norm.after_sum(h_TE, x_TE)).add_(h_TE)

    def join(self, kernels: LayerKernels) -> None:
        """Use kernel calls for few rows from now on, if the kernels support the block's parts."""
        self.joined = joined(self, kernels.blocks) if type(self) is PreNormBlock else None


@dataclass(slots=True, eq=False)
class ScaledBlock(PreNormBlock):
    """``h = x + s * attention(norm(x))``, then ``h + s * mlp(norm(h))`` (Granite)."""

    scale: float

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        h_TE = torch.add(x_TE, self.attention(self.attention_norm(x_TE), pass_), alpha=self.scale)
        return torch.add(h_TE, self.mlp(self.mlp_norm(h_TE)), alpha=self.scale)


@dataclass(slots=True, eq=False)
class PostNormBlock:
    """``h = x + norm(attention(x))``, then ``h + norm(mlp(h))`` (OLMo 2)."""

    attention: Mixer
    attention_out_norm: Norm
    mlp: FeedForward
    mlp_out_norm: Norm

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        h_TE = self.attention_out_norm(self.attention(x_TE, pass_)).add_(x_TE)
        return self.mlp_out_norm(self.mlp(h_TE)).add_(h_TE)


@dataclass(slots=True, eq=False)
class SandwichBlock(PreNormBlock):
    """``h = x + norm(attention(norm(x)))``, ``h + norm(mlp(norm(h)))`` (Gemma 2 and 3, GLM-4)."""

    attention_out_norm: Norm
    mlp_out_norm: Norm

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        h_TE = self.attention_out_norm(self.attention(self.attention_norm(x_TE), pass_))
        return self.mlp_out_norm(self.mlp(self.mlp_norm.after_sum(h_TE, x_TE))).add_(h_TE)


@dataclass(slots=True, eq=False)
class ParallelBlock:
    """``x + attention(n) + mlp(n)``, ``n = norm(x)`` (Cohere, StableLM with parallel residual)."""

    norm: Norm
    attention: Mixer
    mlp: FeedForward

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        n_TE = self.norm(x_TE)
        return self.attention(n_TE, pass_).add_(x_TE).add_(self.mlp(n_TE))


@dataclass(frozen=True, slots=True, eq=False)
class JoinedStack:
    """All blocks of a model as one call (``contracts.model.JoinedBlocks``)."""

    blocks: Sequence[PreNormBlock]
    call: BlockStack
    layers: tuple[tuple[int, HeadNormWeights | None], ...]
    """Layer id and norms of the heads of each block with attention."""
    recurrent: tuple[int, ...]
    """Layer id of each of the others."""
    ends: Mapping[str, object]
    """The model's attributes that ``ModelEnds`` was made from."""

    def outputs(
        self, blocks: Sequence[Block], x_TE: Tensor, pass_: OpenPass, wanted: Sequence[int]
    ) -> list[Tensor] | None:
        """See the contract."""
        if not (self._are(blocks) and self.call.takes(x_TE)):
            return None
        parts = pass_.stack_parts(self.layers, x_TE.dtype, self.recurrent)
        return None if parts is None else self.call.outputs(x_TE, parts, wanted)

    def run_model(self, model: Model, tokens: NDArray[np.int64], pass_: OpenPass) -> RowLogits | None:
        """See the contract."""
        if len(tokens) > self.call.most_tokens or not self._are(model.blocks):
            return None
        if any(getattr(model, name) is not end for name, end in self.ends.items()):
            return None
        parts = pass_.stack_parts(self.layers, self.call.dtype, self.recurrent)
        return None if parts is None else self.call.model(tokens, parts)

    def _are(self, blocks: Sequence[Block]) -> bool:
        return len(blocks) == len(self.blocks) and not any(map(operator.is_not, blocks, self.blocks))


DecoderBlock: TypeAlias = PreNormBlock | PostNormBlock | ParallelBlock
"""Any block of a decoder; all have ``attention`` and ``mlp``."""


def joined_stack(
    blocks: Sequence[object], kernel: BlockKernel | None, embedding: Embedding, norm: object, head: Linear | None
) -> JoinedStack | None:
    """Return all blocks as one kernel call; None unless each block is one call itself. With
    ``embedding``, ``norm`` and ``head`` (None: the head does more than a product) the call may
    include the model's ends."""
    taken = [one for one in blocks if isinstance(one, PreNormBlock)]
    found = [one.joined for one in taken if one.joined is not None]
    whole = [one.whole for one in found if one.whole is not None]
    ends = None
    if type(embedding) is Embedding and isinstance(norm, RMSNorm) and isinstance(head, KernelLinear):
        table = embedding.weight if embedding.rows is None else embedding.rows
        ends = ModelEnds(table, NormWeight(norm.weight, norm.eps), head.map)
    if kernel is None or len(whole) < len(blocks) or (call := kernel.stack(whole, ends)) is None:
        return None
    attentions = [one.attention for one in found if isinstance(one.attention, Attention)]
    layers = tuple((one.layer_id, one.head_norms) for one in attentions)
    recurrent = tuple(one.attention.layer_id for one in found if not isinstance(one.attention, Attention))
    return JoinedStack(taken, call, layers, recurrent, {"embedding": embedding, "norm": norm, "lm_head": head})


def joined(block: PreNormBlock, kernel: BlockKernel | None) -> JoinedBlock | None:
    """Return the kernel calls for a block with packed maps; None if it has unsupported parts."""
    attention, norm, mlp = block.attention, block.mlp_norm, block.mlp
    if kernel is None or not (isinstance(attention, HeadedMixer) and isinstance(norm, RMSNorm)):
        return None
    if not isinstance(mlp, GatedMLP):
        return None
    maps = (attention.out, mlp.gate_up, mlp.down)
    out, gate_up, down = (one.map if isinstance(one, KernelLinear) else None for one in maps)
    if out is None or gate_up is None or down is None:
        return None
    tail = kernel.tail(out, NormWeight(norm.weight, norm.eps), gate_up, down, mlp.activation)
    if tail is None:
        return None
    return JoinedBlock(
        attention, _first_maps(attention), maps, tail, _whole(block.attention_norm, attention, tail, kernel)
    )


def _first_maps(attention: HeadedMixer) -> tuple[Linear, ...]:
    """Return the maps of a block's normed input that a call over the whole block includes."""
    if isinstance(attention, Attention):
        return (attention.qkv,) if attention.is_whole else ()
    return attention.projections if isinstance(attention, RecurrentMixer) and attention.call is not None else ()


def _whole(first: Norm, attention: HeadedMixer, tail: BlockTail, kernel: BlockKernel) -> WholeBlock | None:
    """Return a block with this end as one call; None if its beginning is not supported."""
    maps = [one.map for one in _first_maps(attention) if isinstance(one, KernelLinear)]
    if not isinstance(first, RMSNorm) or not maps or len(maps) < len(_first_maps(attention)):
        return None
    norm = NormWeight(first.weight, first.eps)
    if isinstance(attention, Attention):
        heads = attention.head_norms or ()
        if not all(one.dtype == first.weight.dtype and one.is_contiguous() for one in heads[:2]):
            return None
        return kernel.whole(norm, maps[0], tail, gated=isinstance(attention, GatedAttention))
    assert isinstance(attention, RecurrentMixer)
    assert attention.call is not None
    return kernel.mixed(norm, maps[0], maps[1] if len(maps) > 1 else None, attention.call, tail)
