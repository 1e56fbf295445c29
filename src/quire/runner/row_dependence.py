"""Whether a row of a model depends on the rows beside it, by what computes its blocks.

The C++ products, norms, attention, experts and recurrent layers of CPUs compute each row by itself,
in one order, whatever else a forward runs (``contracts.linear``, ``tests/kernels``). PyTorch's
products choose that order by the number of rows, and its operations of two roundings by the place
of a value in its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.rows.cpu_rows import NativeRows
from quire.kv.state import State
from quire.models.blocks import BareBlock, ParallelBlock, SerialBlock
from quire.models.decoder import Decoder
from quire.models.falcon_h1 import SideBySideBlock
from quire.models.hybrid_decoder import HybridDecoder
from quire.nn.attention import Attention, GatedAttention, GrowingAttention, HeadGatedAttention
from quire.nn.delta import GatedDeltaNet
from quire.nn.experts import Experts, MixtureOfExperts
from quire.nn.latent import MultiHeadLatentAttention
from quire.nn.mamba import Mamba2Mixer
from quire.nn.mlp import GatedMLP
from quire.nn.norm import RMSNorm
from quire.nn.packed import LAYERS, KernelLinear, parts_of
from quire.nn.short_conv import ShortConv

BLOCKS = (SerialBlock, ParallelBlock, SideBySideBlock, BareBlock)
"""Blocks whose own operations are products with a factor, and sums by ``RowKernels`` or of two
values."""


def row_dependence(model: object, state: State) -> str:
    """Return the reason why rows depend on others; empty: they do not, so that a row is the same to
    the bit in any batch and any division of its tokens."""
    if state.device.type != "cpu":
        return f"kernels of {state.device.type} choose the order of sums by the batch"
    if not isinstance(model, Decoder | HybridDecoder):
        return f"{getattr(model, 'architecture', type(model).__name__)} has layers that PyTorch computes"
    if not isinstance(state.parts.paged.backend, NativeAttention) or state.dtype != model.dtype:
        return "attention is not that of the C++ kernels, or K and V have another dtype than the weights"
    if model.logits.softcap is not None and not isinstance(model.logits.row_kernels, NativeRows):
        return "PyTorch caps the logits"
    if not isinstance(model.lm_head, KernelLinear) and (model.stages is None or model.stages.is_last):
        return "PyTorch multiplies with the weights of the head"
    return next(filter(None, map(_of_block, model.blocks)), "")


def content_dependence(model: object) -> str:
    """Return the reason why a row depends on the tokens of other rows, also where their number is
    fixed; empty: it does not. An expert has as many rows as the tokens choose it."""
    if getattr(model, "fallback", False):
        return "transformers computes its layers"
    for experts in _experts(getattr(model, "blocks", ())):
        if experts.call is not None:
            continue
        maps = (*experts.gate_up.maps, *experts.down.maps)
        if not maps or not all(isinstance(one, KernelLinear) for one in maps):
            return "the products of its experts depend on how many rows chose each"
        if not isinstance(getattr(experts.gate, "row_kernels", None), NativeRows):
            return "PyTorch computes the activations of its experts' rows"
    return ""


def _experts(part: object) -> Iterator[Experts]:
    if isinstance(part, Experts):
        yield part
    elif isinstance(part, list | tuple):
        for one in part:
            yield from _experts(one)
    elif type(part).__module__.startswith(LAYERS):
        for _, one in parts_of(part):
            yield from _experts(one)


def _of_block(block: object) -> str:
    if type(block) not in BLOCKS:
        return f"PyTorch computes parts of a {type(block).__name__}"
    for part in _parts(block):
        maps = _maps_of(part)
        if not (maps and all(isinstance(one, KernelLinear) for one in maps)) and not isinstance(part, RMSNorm):
            return f"PyTorch computes a {type(part).__name__}"
    return ""


def _maps_of(part: object) -> tuple[object, ...]:
    """Return the products of a layer; none of a layer with other operations of PyTorch's."""
    if isinstance(part, GatedMLP):
        return part.gate_up, part.down
    if type(part) is MixtureOfExperts:
        return () if part.call is None else (*part.experts.gate_up.maps, *part.experts.down.maps)
    if isinstance(part, GrowingAttention):
        return ()
    if isinstance(part, GatedAttention | HeadGatedAttention) and not isinstance(part.row_kernels, NativeRows):
        return ()
    if isinstance(part, MultiHeadLatentAttention):
        return ()  # The form of its attention depends on the rows beside it.
    if isinstance(part, HeadGatedAttention):
        return part.qkv, part.gate, part.out
    if isinstance(part, Attention):
        return part.qkv, part.out
    if not isinstance(part, GatedDeltaNet | Mamba2Mixer | ShortConv) or part.call is None:
        return ()
    return (part.project, part.rates, part.out) if isinstance(part, GatedDeltaNet) else (part.project, part.out)


def _parts(block: object) -> Iterator[object]:
    """Yield the layers and norms of a block, norms of heads included."""
    names = ("attention_norm", "attention", "attention_out_norm", "mlp_norm", "mlp", "mlp_out_norm", "norm", "mixer")
    for part in (getattr(block, name, None) for name in names):
        if part is not None:
            yield part
    for norm in (getattr(getattr(block, "attention", None), name, None) for name in ("q_norm", "k_norm")):
        if norm is not None:
            yield norm
