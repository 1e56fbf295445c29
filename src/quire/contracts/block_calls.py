"""Whole decoder blocks as one call, and the kernels that a model is given for its machine.

Letters: as in ``contracts.rows``; C columns of all heads; V vocabulary; N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.attention import Scoring
from quire.contracts.experts import ExpertKernel, GateForm, MixtureCall
from quire.contracts.kv_format import KVView
from quire.contracts.layers import RopeSpec
from quire.contracts.linear import BlockRows, CodeRows, LinearKernel, LinearMap, Quantization
from quire.contracts.recurrence import MixerCall, MixerKernel, RecurrentParts, StackStates
from quire.contracts.rows import HeadNormWeights, Rotation, RowKernels


class AttentionParts(NamedTuple):
    """The attention of a call over a block: two structures of the kernel."""

    layer: int
    """Address of the structure of one layer of a KV state."""
    forward: int
    """Address of the structure that the layers of a class share in one forward."""


class StackParts(NamedTuple):
    """The inputs from a KV state of a call over consecutive blocks."""

    layers: NDArray[np.int64]
    forwards: NDArray[np.int64]
    """``AttentionParts`` of the blocks with attention, int64, in their order."""
    states: StackStates | None = None
    """Those of the blocks with a mixer; None: there are none."""


class DecodeForwards(Protocol):
    """The structure of decode forwards, at a fixed address: one new token of each of a few
    sequences, which sees all tokens up to itself, or those in the layers' window."""

    place: int
    """Its address, valid while this object lives."""

    def plan(self, lengths: Sequence[int], tables: Sequence[NDArray[np.int32]], turns_N2R: Tensor | None) -> bool:
        """Refill it for this forward. ``lengths``: tokens of each sequence before; ``tables``: its
        pages, the new token's last; ``turns_N2R``: float32 cos and sin by position, also of the new
        tokens; None: nothing is rotated. Return False for too many sequences or keys."""


@runtime_checkable
class PartsBackend(Protocol):
    """An attention backend whose attention a call over a block can run."""

    def layer_part(
        self,
        num_heads: int,
        view: KVView,
        scoring: Scoring,
        sinks_H: Tensor | None,
        norms: HeadNormWeights | None,
    ) -> Any:
        """Return a layer's structure, whose address is ``place``; None if the layer cannot be
        called in this way. It keeps its memory alive."""

    def forward_part(
        self, prepared: Any, num_heads: int, view: KVView, rotation: Rotation | None, slots_T: Tensor
    ) -> Any:
        """Return the structure of a forward for layers of such shapes, likewise. ``prepared``: from
        ``AttentionBackend.plan``."""

    def decode_forwards(
        self, num_heads: int, view: KVView, window: int | None, page_size: int, rope: RopeSpec | None
    ) -> DecodeForwards | None:
        """Return the structure of forwards of decodes for layers of such shapes; None without one.
        ``window``: keys that a token sees, None: all."""


class NormWeight(NamedTuple):
    """A root mean square norm over the model width."""

    weight_E: Tensor
    eps: float


class Residuals(NamedTuple):
    """The sums of a block: ``h = x + scale * attention_out(a)``, then ``h + mlp_scale *
    mlp_out(mlp(mlp_in(h)))``, with the result ``a`` of attention. None: no norm."""

    mlp_in: NormWeight | None
    attention_out: NormWeight | None = None
    mlp_out: NormWeight | None = None
    scale: float = 1.0
    mlp_scale: float = 1.0


class MLPParts(NamedTuple):
    """A feed-forward layer of two products. The gates and the result may have a factor, after which
    they are rounded."""

    first: LinearMap
    """E to what ``gate`` takes."""
    down: LinearMap
    """F to E"""
    gate: GateForm
    gate_factor: float = 1.0
    """1 of a form without gates."""
    down_factor: float = 1.0


class ModelEnds(NamedTuple):
    """The parts of a model besides its blocks."""

    table_VE: Tensor | LinearMap | None
    """Rows by token id, or the map that has them as its weights; None: the head."""
    norm: NormWeight
    head: LinearMap
    embedding_scale: float = 1.0
    """Factor of the rows, which are rounded before and after it."""
    logit_scale: float = 1.0
    softcap: float | None = None
    """Logits become ``softcap * tanh(logits / softcap)``, after the scale; None: they stay."""


class RowLogits(NamedTuple):
    """Logits of all rows of a forward."""

    logits_TV: Tensor
    """float32, fresh"""
    maxima: list[int]
    """Position of each row's first maximum; -1 (``logit_edits.FAILED``) if it is not finite."""


class BlockTail(Protocol):
    """The end of a decoder block, from the heads of attention on, as one call."""

    def takes(self, x_TE: Tensor) -> bool:
        """Return True if the call supports such rows. For others run the parts one by one."""

    def __call__(self, heads_TC: Tensor, x_TE: Tensor) -> Tensor:
        """Return fresh ``Residuals`` of ``out(heads)`` and the feed-forward part, or the sum with
        the heads alone. Each number is the same to the bit as from the parts one by one."""


class WholeBlock(Protocol):
    """A decoder block as one call."""

    def takes(self, x_TE: Tensor) -> bool:
        """Return True if the call supports such rows. For others run the parts one by one."""

    def __call__(self, x_TE: Tensor, *parts: AttentionParts | RecurrentParts) -> Tensor:
        """Return a fresh result of the block's end over the heads ``attention(qkv(norm(x)))`` or
        ``mixer(projection(norm(x)))``, and write K and V, or states, to the layer's pools.
        ``parts``: of each layer that the block has, the mixer first. Each number is the same to the
        bit as from the parts one by one."""


class BlockStack(Protocol):
    """Whole blocks that run one after the other as one call."""

    dtype: torch.dtype
    """Dtype of K, V and what the maps take; the rows may be wider."""
    most_tokens: int
    """Most tokens of a call of ``model``; 0: there is no such call."""

    def takes(self, x_TE: Tensor) -> bool:
        """Return True if the call supports such rows."""

    def __call__(self, x_TE: Tensor, parts: StackParts) -> Tensor:
        """Return a fresh result of the last block; ``parts`` is for all blocks."""

    def outputs(self, x_TE: Tensor, parts: StackParts, blocks: Sequence[int]) -> list[Tensor]:
        """Return fresh results of these blocks, ascending; those behind the last one do not run."""

    def model(self, tokens: NDArray[np.int64], parts: StackParts) -> RowLogits:
        """Return the logits of a whole model of the blocks and their ``ModelEnds``. Each number is
        the same to the bit as from the parts one by one. ``IndexError``: a token outside of the
        vocabulary."""


class BlockKernel(Protocol):
    """Joins the parts of a block. Methods return None for unsupported parts."""

    def tail(self, out: LinearMap, residuals: Residuals, mlp: MLPParts | MixtureCall) -> BlockTail | None:
        """Return the end of a block as one call."""

    def bare_tail(self, out: LinearMap, scale: float = 1.0, row_dtype: torch.dtype | None = None) -> BlockTail | None:
        """Return the end ``x + scale * out(heads)`` of a block without an MLP. ``row_dtype``: that
        of x and the sum; None: that of the heads."""

    def feed_forward(self, norm: NormWeight, mlp: MLPParts | MixtureCall) -> WholeBlock | None:
        """Return the block ``x + mlp(norm(x))``."""

    def whole(
        self,
        norm: NormWeight | None,
        qkv: LinearMap,
        tail: BlockTail,
        *,
        gated: bool = False,
        gates: LinearMap | None = None,
        factor: float = 1.0,
    ) -> WholeBlock | None:
        """Return a block with attention and this end as one call. ``norm``: before attention, None:
        none. ``gated``: each query head of ``qkv`` is followed by a gate of its size, for
        ``RowKernels.gate_heads``. ``gates``: the map to one gate for each query head; not with
        ``gated``. ``factor``: of the norm's result; 1 without a norm."""

    def mixed(
        self,
        norm: NormWeight,
        project: LinearMap,
        rates: LinearMap | None,
        mixer: MixerCall,
        tail: BlockTail,
        *,
        factor: float = 1.0,
        scale_Z: Tensor | None = None,
    ) -> WholeBlock | None:
        """Return a block with a recurrent layer and this end as one call. ``project``, ``rates``:
        the maps to what ``mixer`` takes. ``factor``: of the norm's result. ``scale_Z``: factors of
        the projection's columns, of its dtype; None: 1."""

    def beside(self, mixer: WholeBlock, block: WholeBlock) -> WholeBlock | None:
        """Return ``block`` with its first sum over the result of ``mixer`` instead of the input
        that both have. ``mixer``: of a bare tail."""

    def stack(self, blocks: Sequence[WholeBlock], ends: ModelEnds | None) -> BlockStack | None:
        """Return consecutive blocks as one call, if possible including a model's ``ends``."""


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The kernels that the layers of a model use on their machine."""

    rows: RowKernels | None = None
    """None: PyTorch's operations."""
    linear: LinearKernel | None = None
    """None: PyTorch's products, with oneDNN's packed weights where these are faster."""
    quantization: Quantization | None = None
    """Form of the weights of linear maps, for which ``linear`` has the products; None: a lossless
    form. With "int4" the head has 8 bits, with "fp8" it stays unquantised."""

    blocks: BlockKernel | None = None
    """None: the parts of a block run one by one."""
    mixers: MixerKernel | None = None
    """None: the parts of a recurrent layer run one by one."""
    experts: ExpertKernel | None = None
    """None: the parts of a mixture of experts run one by one."""
    read: Callable[[Tensor], Tensor] | None = None
    """Returns the values of a weight, which may still be in a file. None: the weight has them
    itself."""
    stored: Callable[[Tensor], Sequence[BlockRows] | Sequence[CodeRows] | Sequence[Tensor]] | None = None
    """Returns the rows of a weight as its file has them: in blocks, as codes, or numbers of the
    weight's type in several tensors. Empty if it has other formats, or the weight is a part of
    them."""

    def of_head(self) -> LayerKernels:
        """Return the kernels for the map to logits, whose error no later layer evens out."""
        found: Quantization | None = "int8" if self.quantization in ("int8", "int4") else None
        return replace(self, quantization=found)
