"""Decoder blocks: arrangements of norms and residual additions.

A block maps ``[T, E]`` to a fresh ``[T, E]``. Attention and MLP return fresh tensors. The residual
is added to these in place, never to the caller's x.

Letters: T new tokens, E model width.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
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
    Residuals,
    RowLogits,
    WholeBlock,
)
from quire.contracts.model import Block, Model, OpenPass, Pass
from quire.contracts.recurrence import MixerCall, RecurrentParts
from quire.contracts.rows import HeadNormWeights, RowKernels
from quire.nn.attention import Attention, GatedAttention
from quire.nn.embedding import Embedding, ScaledEmbedding
from quire.nn.experts import MixtureOfExperts
from quire.nn.linear import Linear
from quire.nn.logits import ShapedLogits
from quire.nn.mlp import GatedMLP
from quire.nn.norm import RMSNorm
from quire.nn.packed import KernelLinear, kernel_maps
from quire.ops.rows import REFERENCE_ROWS

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

    def after_sum(self, y_TE: Tensor, x_TE: Tensor, scale: float = 1.0) -> Tensor:
        """Make y ``x + scale * y`` in place; return the norm of the sum."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class JoinedBlock:
    """The kernel calls for a block, valid while no adapter changes its maps."""

    attention: HeadedMixer
    first: tuple[Linear, ...]
    """The maps of the block's normed input that ``whole`` includes."""
    maps: tuple[Linear, ...]
    """The maps after the heads that an adapter may change."""
    tail: BlockTail
    """The part after the attention heads: output projection to MLP."""
    whole: WholeBlock | None

    def run(self, block: SerialBlock, x_TE: Tensor, pass_: Pass) -> Tensor | None:
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
        n_TE = x_TE if block.attention_norm is None else block.attention_norm(x_TE)
        return self.tail(attention.heads(n_TE, pass_), x_TE)


@dataclass(slots=True, eq=False)
class SerialBlock:
    """``h = x + s * out_norm(attention(norm(x)))``, then ``h + s * out_norm(mlp(norm(h)))``.

    None for a norm: there is none. Llama and most others have norms before attention and MLP,
    OLMo 2 behind them, Gemma 2 and 3 and GLM-4 both. Granite has a scale s.
    """

    attention_norm: Norm | None
    attention: Mixer
    mlp_norm: Norm | None
    mlp: FeedForward
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    scale: float = 1.0
    row_kernels: RowKernels = REFERENCE_ROWS
    joined: JoinedBlock | None = field(init=False, default=None)
    """The kernel calls for few rows; None: parts run one by one."""

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        if self.joined is not None and (y_TE := self.joined.run(self, x_TE, pass_)) is not None:
            return y_TE
        h_TE = self.attention(x_TE if self.attention_norm is None else self.attention_norm(x_TE), pass_)
        if self.attention_out_norm is not None:
            h_TE = self.attention_out_norm(h_TE)
        if self.mlp_norm is None:
            n_TE = h_TE = self._sum(h_TE, x_TE)
        else:
            n_TE = self.mlp_norm.after_sum(h_TE, x_TE, self.scale)
        y_TE = self.mlp(n_TE)
        if self.mlp_out_norm is not None:
            y_TE = self.mlp_out_norm(y_TE)
        return self._sum(y_TE, h_TE)

    def _sum(self, y_TE: Tensor, x_TE: Tensor) -> Tensor:
        """Return ``x + scale * y``, which is y from then on."""
        return y_TE.add_(x_TE) if self.scale == 1.0 else self.row_kernels.add_scaled(y_TE, x_TE, self.scale)

    def join(self, kernels: LayerKernels) -> None:
        """Use kernel calls for few rows from now on, if the kernels support the block's parts."""
        self.joined = joined(self, kernels.blocks)


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

    blocks: Sequence[SerialBlock]
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


DecoderBlock: TypeAlias = SerialBlock | ParallelBlock
"""Any block of a decoder; all have ``attention`` and ``mlp``."""


def joined_stack(
    blocks: Sequence[object],
    kernel: BlockKernel | None,
    embedding: Embedding,
    norm: object,
    head: Linear | None,
    logits: ShapedLogits,
) -> JoinedStack | None:
    """Return all blocks as one kernel call; None unless each block is one call itself. With
    ``embedding``, ``norm``, ``head`` (None: another stage has it) and ``logits`` the call may
    include the model's ends."""
    taken = [one for one in blocks if isinstance(one, SerialBlock)]
    found = [one.joined for one in taken if one.joined is not None]
    whole = [one.whole for one in found if one.whole is not None]
    ends = None
    known = type(embedding) in (Embedding, ScaledEmbedding)
    if known and isinstance(norm, RMSNorm) and isinstance(head, KernelLinear):
        table = embedding.weight if embedding.rows is None else embedding.rows
        factor = embedding.scale if isinstance(embedding, ScaledEmbedding) else 1.0
        ends = ModelEnds(table, NormWeight(norm.weight, norm.eps), head.map, factor, logits.scale, logits.softcap)
    if kernel is None or len(whole) < len(blocks) or (call := kernel.stack(whole, ends)) is None:
        return None
    attentions = [one.attention for one in found if isinstance(one.attention, Attention)]
    layers = tuple((one.layer_id, one.head_norms) for one in attentions)
    recurrent = tuple(one.attention.layer_id for one in found if not isinstance(one.attention, Attention))
    ends_of = {"embedding": embedding, "norm": norm, "lm_head": head, "logits": logits}
    return JoinedStack(taken, call, layers, recurrent, ends_of)


def joined(block: SerialBlock, kernel: BlockKernel | None) -> JoinedBlock | None:
    """Return the kernel calls for a block with packed maps; None if it has unsupported parts."""
    attention, mlp = block.attention, block.mlp
    inner = (block.mlp_norm, block.attention_out_norm, block.mlp_out_norm)
    if kernel is None or not (isinstance(attention, HeadedMixer) and all(map(_is_rms, inner))):
        return None
    found = _end(attention.out, Residuals(*map(_weight_of, inner), block.scale), mlp, kernel)
    if found is None:
        return None
    tail, maps = found
    return JoinedBlock(attention, _first_maps(attention), maps, tail, _whole(block, attention, tail, kernel))


def _end(
    out: Linear, residuals: Residuals, mlp: FeedForward, kernel: BlockKernel
) -> tuple[BlockTail, tuple[Linear, ...]] | None:
    """Return a block's end as one call, and the maps in it that an adapter may change; None for
    unsupported parts."""
    if not isinstance(out, KernelLinear):
        return None
    tail: BlockTail | None = None
    maps: tuple[Linear, ...] = ()
    if isinstance(mlp, GatedMLP):
        maps = (out, mlp.gate_up, mlp.down)
        if (found := kernel_maps(maps)) is not None:
            tail = kernel.tail(found[0], residuals, found[1], found[2], mlp.activation)
    elif type(mlp) is MixtureOfExperts and mlp.call is not None:
        maps = (out, *(() if mlp.shared is None else mlp.shared.maps))
        tail = kernel.experts_tail(out.map, residuals, mlp.call)
    return None if tail is None else (tail, maps)


def _is_rms(norm: Norm | None) -> bool:
    """Return True if kernels know the norm, or there is none."""
    return norm is None or isinstance(norm, RMSNorm)


def _weight_of(norm: Norm | None) -> NormWeight | None:
    return NormWeight(norm.weight, norm.eps) if isinstance(norm, RMSNorm) else None


def _first_maps(attention: HeadedMixer) -> tuple[Linear, ...]:
    """Return the maps of a block's normed input that a call over the whole block includes."""
    if isinstance(attention, Attention):
        return attention.projections if attention.is_whole else ()
    return attention.projections if isinstance(attention, RecurrentMixer) and attention.call is not None else ()


def _whole(block: SerialBlock, attention: HeadedMixer, tail: BlockTail, kernel: BlockKernel) -> WholeBlock | None:
    """Return a block with this end as one call; None if its beginning is not supported."""
    first, norm = block.attention_norm, _weight_of(block.attention_norm)
    maps = [one.map for one in _first_maps(attention) if isinstance(one, KernelLinear)]
    if not _is_rms(first) or not maps or len(maps) < len(_first_maps(attention)):
        return None
    if isinstance(attention, Attention):
        norms = (first, block.mlp_norm, block.attention_out_norm, block.mlp_out_norm)
        kinds = {one.weight.dtype for one in norms if isinstance(one, RMSNorm)}
        heads = attention.head_norms or ()
        if not all({one.dtype} == kinds and one.is_contiguous() for one in heads[:2]):
            return None
        gates = maps[1] if len(maps) > 1 else None
        return kernel.whole(norm, maps[0], tail, gated=isinstance(attention, GatedAttention), gates=gates)
    if norm is None:
        return None
    assert isinstance(attention, RecurrentMixer)
    assert attention.call is not None
    return kernel.mixed(norm, maps[0], maps[1] if len(maps) > 1 else None, attention.call, tail)
