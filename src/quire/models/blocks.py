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
    MLPParts,
    ModelEnds,
    NormWeight,
    Residuals,
    RowLogits,
    WholeBlock,
)
from quire.contracts.experts import GateForm, MixtureCall
from quire.contracts.model import Block, Model, OpenPass, Pass
from quire.contracts.recurrence import MixerCall, RecurrentParts
from quire.contracts.rows import HeadNormWeights, RowKernels
from quire.nn.attention import Attention, GatedAttention
from quire.nn.embedding import Embedding, ScaledEmbedding, ShapedLogits
from quire.nn.experts import MixtureOfExperts
from quire.nn.linear import Linear
from quire.nn.mlp import GatedMLP, SquaredMLP
from quire.nn.norm import RMSNorm
from quire.nn.packed import KernelLinear
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

    layers: tuple[HeadedMixer, ...]
    """The layers with a state, a mixer before attention; none in a feed-forward block."""
    first: tuple[Linear, ...]
    """The maps of the block's normed input that ``whole`` includes."""
    maps: tuple[Linear, ...]
    """The maps after the heads that an adapter may change."""
    tail: BlockTail | None
    """The part of a block with attention and MLP after the heads: output projection to MLP."""
    whole: WholeBlock | None

    def run(self, x_TE: Tensor, pass_: Pass, norm: Norm | None = None) -> Tensor | None:
        """Return the block's result; None if its parts must run one by one. ``norm``: before the
        heads, for ``tail``."""
        call = self.tail or self.whole
        if call is None or not (call.takes(x_TE) and all(one.is_plain for one in self.maps)):
            return None
        if self.whole is not None and all(one.is_plain for one in self.first):
            parts = self._parts(x_TE, pass_)
            if parts is not None:
                return self.whole(x_TE, *parts)
        if self.tail is None:
            return None
        n_TE = x_TE if norm is None else norm(x_TE)
        return self.tail(self.layers[0].heads(n_TE, pass_), x_TE)

    def _parts(self, x_TE: Tensor, pass_: Pass) -> list[AttentionParts | RecurrentParts] | None:
        """Return the parts of the KV state of all layers; None if one of them must run alone."""
        found: list[AttentionParts | RecurrentParts] = []
        for layer in self.layers:
            one = (
                pass_.attention_parts(layer.layer_id, layer.head_norms, x_TE.dtype)
                if isinstance(layer, Attention)
                else pass_.recurrent_parts(layer.layer_id)
            )
            if one is None:
                return None
            found.append(one)
        return found


@runtime_checkable
class Joinable(Protocol):
    """A block that may be one call of a kernel."""

    joined: JoinedBlock | None
    """The kernel calls for few rows; None: parts run one by one."""

    def join(self, kernels: LayerKernels) -> None:
        """Use kernel calls for few rows from now on, if the kernels support the block's parts."""
        ...


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
        if self.joined is not None and (y_TE := self.joined.run(x_TE, pass_, self.attention_norm)) is not None:
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


@dataclass(slots=True, eq=False)
class BareBlock:
    """``x + mixer(norm(x))``. The norm's result may be narrower than x."""

    norm: Norm
    mixer: Mixer
    joined: JoinedBlock | None = field(init=False, default=None)
    """See ``Joinable``."""

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        if self.joined is not None and (y_TE := self.joined.run(x_TE, pass_)) is not None:
            return y_TE
        return self.mixer(self.norm(x_TE), pass_) + x_TE

    def join(self, kernels: LayerKernels) -> None:
        """See ``Joinable``."""
        kernel, mixer, norm, self.joined = kernels.blocks, self.mixer, self.norm, None
        if kernel is None or not (isinstance(mixer, HeadedMixer) and isinstance(norm, RMSNorm)):
            return
        if isinstance(mixer.out, KernelLinear):
            row_dtype = None if norm.dtype is None else norm.weight.dtype
            tail = kernel.bare_tail(mixer.out.map, row_dtype=row_dtype)
            whole = None if tail is None else _whole(norm, mixer, tail, kernel, ())
            if whole is not None:
                self.joined = JoinedBlock((mixer,), _first_maps(mixer), (mixer.out,), None, whole)


@dataclass(slots=True, eq=False)
class FeedForwardBlock:
    """``x + mlp(norm(x))``."""

    norm: Norm
    mlp: FeedForward
    joined: JoinedBlock | None = field(init=False, default=None)
    """See ``Joinable``."""

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        if self.joined is not None and (y_TE := self.joined.run(x_TE, pass_)) is not None:
            return y_TE
        return self.mlp(self.norm(x_TE)).add_(x_TE)

    def join(self, kernels: LayerKernels) -> None:
        """See ``Joinable``."""
        kernel, norm, found, self.joined = kernels.blocks, weight_of(self.norm), _mlp_parts(self.mlp), None
        if kernel is not None and norm is not None and found is not None:
            parts, maps = found
            if (whole := kernel.feed_forward(norm, parts)) is not None:
                self.joined = JoinedBlock((), (), maps, None, whole)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedStack:
    """All blocks of a model as one call (``contracts.model.JoinedBlocks``)."""

    blocks: Sequence[object]
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
        parts = pass_.stack_parts(self.layers, self.call.dtype, self.recurrent)
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
    found = [one.joined for one in blocks if isinstance(one, Joinable) and one.joined is not None]
    whole = [one.whole for one in found if one.whole is not None]
    ends = None
    known = type(embedding) in (Embedding, ScaledEmbedding)
    if known and isinstance(norm, RMSNorm) and isinstance(head, KernelLinear):
        table = embedding.weight if embedding.rows is None else embedding.rows
        factor = embedding.scale if isinstance(embedding, ScaledEmbedding) else 1.0
        ends = ModelEnds(table, NormWeight(norm.weight, norm.eps), head.map, factor, logits.scale, logits.softcap)
    if kernel is None or len(whole) < len(blocks) or (call := kernel.stack(whole, ends)) is None:
        return None
    every = [layer for one in found for layer in one.layers]
    layers = tuple((one.layer_id, one.head_norms) for one in every if isinstance(one, Attention))
    recurrent = tuple(one.layer_id for one in every if not isinstance(one, Attention))
    ends_of = {"embedding": embedding, "norm": norm, "lm_head": head, "logits": logits}
    return JoinedStack(list(blocks), call, layers, recurrent, ends_of)


def joined(block: SerialBlock, kernel: BlockKernel | None) -> JoinedBlock | None:
    """Return the kernel calls for a block with packed maps; None if it has unsupported parts."""
    attention = block.attention
    inner = (block.mlp_norm, block.attention_out_norm, block.mlp_out_norm)
    if kernel is None or not (isinstance(attention, HeadedMixer) and all(map(_is_rms, inner))):
        return None
    found = _mlp_parts(block.mlp)
    if found is None or not isinstance(attention.out, KernelLinear):
        return None
    parts, maps = found
    tail = kernel.tail(attention.out.map, Residuals(*map(weight_of, inner), block.scale, block.scale), parts)
    if tail is None:
        return None
    whole = _whole(block.attention_norm, attention, tail, kernel, inner)
    return JoinedBlock((attention,), _first_maps(attention), (attention.out, *maps), tail, whole)


def _mlp_parts(mlp: FeedForward) -> tuple[MLPParts | MixtureCall, tuple[Linear, ...]] | None:
    """Return a feed-forward layer for a kernel, and the maps in it that an adapter may change; None
    for unsupported layers."""
    if type(mlp) is MixtureOfExperts:
        return None if mlp.call is None else (mlp.call, () if mlp.shared is None else mlp.shared.maps)
    if type(mlp) is GatedMLP:
        first, form = mlp.gate_up, GateForm(mlp.activation)
    elif type(mlp) is SquaredMLP:
        first, form = mlp.up, GateForm("squared")
    else:
        return None
    if not (isinstance(first, KernelLinear) and isinstance(mlp.down, KernelLinear)):
        return None
    return MLPParts(first.map, mlp.down.map, form), (first, mlp.down)


def _is_rms(norm: Norm | None) -> bool:
    """Return True if kernels know the norm, or there is none."""
    return norm is None or isinstance(norm, RMSNorm)


def weight_of(norm: Norm | None) -> NormWeight | None:
    """Return the norm's weight for a kernel; None without a norm, or of another kind."""
    return NormWeight(norm.weight, norm.eps) if isinstance(norm, RMSNorm) else None


def _first_maps(attention: HeadedMixer) -> tuple[Linear, ...]:
    """Return the maps of a block's normed input that a call over the whole block includes."""
    if isinstance(attention, Attention):
        return attention.projections if attention.is_whole else ()
    return attention.projections if isinstance(attention, RecurrentMixer) and attention.call is not None else ()


def _whole(
    norm: Norm | None, layer: HeadedMixer, tail: BlockTail, kernel: BlockKernel, others: Sequence[Norm | None]
) -> WholeBlock | None:
    """Return a block with this norm, layer and end as one call; None if its beginning is not
    supported. ``others``: the norms of the end."""
    weight, first = weight_of(norm), _first_maps(layer)
    maps = [one.map for one in first if isinstance(one, KernelLinear)]
    if not _is_rms(norm) or not maps or len(maps) < len(first):
        return None
    if isinstance(layer, Attention):
        kinds = {one.weight.dtype for one in (norm, *others) if isinstance(one, RMSNorm)}
        heads = layer.head_norms or ()
        if not all({one.dtype} == kinds and one.is_contiguous() for one in heads[:2]):
            return None
        gates = maps[1] if len(maps) > 1 else None
        return kernel.whole(weight, maps[0], tail, gated=isinstance(layer, GatedAttention), gates=gates)
    if weight is None:
        return None
    assert isinstance(layer, RecurrentMixer)
    assert layer.call is not None
    return kernel.mixed(weight, maps[0], maps[1] if len(maps) > 1 else None, layer.call, tail)
