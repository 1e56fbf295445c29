"""The decoder of all dense and mixture-of-experts families.

A family reads config.json into a ``DecoderConfig``, spells its checkpoints' tensors
(``models.tensor_names``) and builds a ``Decoder``. Building a model chooses its objects, so absent
features cost nothing at run time. The spec of a layer holds its window, RoPE, scale and soft cap.

Letters: T new tokens, R rows for the head, E model width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.block_calls import LayerKernels
from quire.contracts.layers import FullAttention, LayerSpec, RopeSpec, WindowedAttention
from quire.contracts.model import Block, WideRows
from quire.contracts.ranks import Share, Stages
from quire.contracts.rows import ActivationName
from quire.models.blocks import (
    DecoderBlock,
    FeedForward,
    Joinable,
    JoinedStack,
    Mixer,
    Norm,
    ParallelBlock,
    SerialBlock,
    joined_stack,
)
from quire.models.rope_config import stretched_length
from quire.nn.attention import Attention, GrowingAttention, NormedAttention, QueryGrowth, WidthNormedAttention
from quire.nn.embedding import Embedding, ScaledEmbedding, ShapedLogits
from quire.nn.linear import Linear
from quire.nn.mlp import GatedMLP
from quire.nn.norm import LayerNorm, LayerNormPerHead, RMSNorm
from quire.nn.packed import KernelLinear, kept, pack_maps, packed
from quire.weights.lazy_parameters import late
from quire.weights.places import NameTable

AttentionSpec: TypeAlias = FullAttention | WindowedAttention
NormKind: TypeAlias = Literal["rms", "offset_rms", "layer"]
"""``offset_rms``: the stored weight is the difference to 1 (Gemma)."""
Placement: TypeAlias = Literal["pre", "post", "sandwich", "parallel"]
"""Arrangement of the norms: before attention and MLP, behind them, both, or one before both at
once."""
HeadNorms: TypeAlias = Literal["none", "shared", "each", "width"]
"""Norms of queries and keys before RoPE: one for all heads, one per head, one over all heads."""
Parameters: TypeAlias = Mapping[str, Tensor]
"""Tensors by the names of ``models.tensor_names``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The computation of a decoder. Sizes count elements.

    A family with experts adds fields in a subclass and gives ``Decoder`` a builder of its MLPs.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the dense MLP."""
    layers: tuple[AttentionSpec, ...]
    """Attention of each layer, without learned sinks: these are weights, which ``Decoder`` adds."""
    max_position: int
    max_model_len: int | None = None
    """The length for which a length-dependent RoPE was computed; None: ``max_position``."""
    norm: NormKind = "rms"
    norm_eps: float
    norm_bias: bool = False
    """Biases of the norms over the model width."""
    placement: Placement = "pre"
    head_norms: HeadNorms = "none"
    activation: ActivationName = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False
    """Round the scale to the model's dtype first, as Gemma's training did."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they join the residual stream."""
    logit_scale: float = 1.0
    query_growth: QueryGrowth | None = None
    """Growth of queries with their position; not with norms of heads."""
    logit_softcap: float | None = None
    """Logits become ``cap * tanh(logits / cap)``, after the scale."""
    first_heads: tuple[int, int] = (0, 0)
    """Numbers of the first query head and of the first KV head of a rank's model."""

    def __post_init__(self) -> None:
        if self.residual_scale != 1.0 and self.placement == "parallel":
            raise InvalidArgument(
                f"residual_scale is {self.residual_scale} with norms in placement {self.placement!r}; expected 1.0"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def context(self) -> int:
        """Longest sequence in tokens: ``max_position``, or the longer length of a RoPE that
        stretches it."""
        return max([self.max_position, *(stretched_length(spec.rope) for spec in self.layers)])

    def divided(self, share: Share) -> Self:
        """Return the sizes of one rank's model; ``Unsupported`` if they do not divide."""
        counts = next(((one.num_heads, one.num_kv_heads) for one in self.layers), (0, 0))
        return replace(
            self,
            layers=tuple(heads_of(one, share) for one in self.layers),
            first_heads=(share.rank * counts[0] // share.size, share.rank * counts[1] // share.size),
            intermediate_size=share.part(self.intermediate_size, "elements of intermediate_size"),
        )

    @property
    def given_scale(self) -> float:
        """Return the factor of embeddings of a caller. Granite multiplies what enters its blocks,
        as transformers does; other families multiply rows of their table alone."""
        return self.embedding_scale if self.architecture.startswith("Granite") else 1.0

    def canonical(self) -> str:
        """Return JSON of the fields that decide the logits, without defaults, keys sorted.

        A field added by a later version leaves it unchanged. The context length is only a limit and
        is left out; its effect on RoPE is in the layers.
        """
        plain = _plain(self)
        plain.pop("max_position"), plain.pop("max_model_len", None)
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def heads_of(spec: AttentionSpec, share: Share) -> AttentionSpec:
    """Return a layer with the heads of one rank; ``Unsupported`` if they do not divide."""
    heads = share.part(spec.num_heads, "query heads")
    return replace(spec, num_heads=heads, num_kv_heads=share.part_or_one(spec.num_kv_heads, "KV heads"))


def _plain(value: Any) -> Any:
    """Convert a dataclass of numbers, names, tuples and dataclasses to JSON types."""
    if isinstance(value, RopeSpec):
        return value.as_json()
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if not is_dataclass(value):
        return value
    found = {one.name: (getattr(value, one.name), one.default) for one in fields(value)}
    return {name: _plain(given) for name, (given, default) in found.items() if given != default or name == "kind"}


C = TypeVar("C", bound=DecoderConfig)
MlpBuilder: TypeAlias = Callable[[C, int, Parameters], FeedForward]
"""Builder of a layer's feed-forward part from configuration, layer and parameters."""


def linear(parameters: Parameters, name: str) -> Linear:
    """Return the linear map of ``name.weight`` and, if there is one, ``name.bias``."""
    return Linear(late(parameters, f"{name}.weight"), parameters.get(f"{name}.bias"), name)


def gated_mlp(config: DecoderConfig, layer: int, parameters: Parameters, prefix: str = "") -> GatedMLP:
    """Build an MLP from ``{prefix}.gate_up`` and ``{prefix}.down``; by default the layer's own."""
    gate_up, down = (linear(parameters, f"{prefix or layer}.{name}") for name in ("gate_up", "down"))
    return GatedMLP(gate_up, down, config.activation)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """``WideRows`` without further columns: embeddings of a caller times ``scale``."""

    scale: float

    def entering(self, given_RE: Tensor) -> Tensor:
        return given_RE * self.scale

    def visible(self, x_TW: Tensor) -> Tensor:
        return x_TW


class Trunk:
    """The parts of a model around its blocks; with blocks a ``models.families.LoadedModel``."""

    blocks: Sequence[Block]
    layer_specs: Sequence[LayerSpec]
    wide: WideRows | None

    def __init__(
        self,
        config: DecoderConfig,
        canonical: str,
        parameters: Parameters,
        values: Mapping[str, Any],
        norm: Callable[[Tensor], Tensor],
    ) -> None:
        """Take ``parameters`` of the family's name table, the parsed config.json and the final
        norm."""
        self.architecture = config.architecture
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_position = config.context
        self.max_model_len = config.max_model_len
        self.config: dict[str, Any] = dict(values)
        self.canonical_config = canonical
        self.whole_specs: Sequence[LayerSpec] = ()
        self.stages: Stages | None = None
        self.absent_blocks: Sequence[Block] = ()
        """Those of other stages, whose weights have only shape and dtype."""
        self.embedding = _embedding(config, late(parameters, "embed.weight"))
        self.wide = None if config.given_scale == 1.0 else ScaledRows(config.given_scale)
        self.norm = norm
        table = late(parameters, "embed.weight" if config.tie_embeddings else "head.weight")
        self.lm_head = Linear(table, parameters.get("head.bias"), "head")
        self.logits = ShapedLogits(config.logit_scale, config.logit_softcap)
        self.tied = config.tie_embeddings
        self.places: NameTable = {}
        self.formats: Mapping[str, int] = {}
        self.expanded: Mapping[str, int] = {}
        self.dtype = self.embedding.weight.dtype
        every = [late(parameters, name) for name in parameters]
        self.device = next((one.device for one in every if not one.is_meta), torch.device("cpu"))
        self.num_parameters = sum(one.numel() for one in every)
        """A tensor shared by embedding and head counts once."""
        self.parameter_bytes = sum(one.nbytes for one in every)
        self.quantization: str | None = None
        self.stack: JoinedStack | None = None

    def keep(self, stages: Stages) -> None:
        """Keep the blocks and the ends of one stage, before the model is packed. Of an end that
        another stage has, the weights have only shape and dtype."""
        every = list(self.blocks)
        self.stages, self.blocks = stages, every[stages.own.start : stages.own.stop]
        self.absent_blocks = [*every[: stages.own.start], *every[stages.own.stop :]]
        if not stages.is_last:
            self.lm_head, self.norm = Linear(self.lm_head.weight.to("meta"), name="head"), _absent
        if not stages.is_first:
            self.embedding.weight = self.embedding.weight.to("meta")

    def pack(self, kernels: LayerKernels) -> bool:
        """Give the layers their kernels, and pack the weights for this machine if that helps.
        Return True if it packed them.

        The packed head of a tied model replaces the embedding's table if it holds all values
        exactly; else it is a second copy.
        """
        parts: list[object] = [*self.blocks, self.norm, self.logits]
        grown = sum(pack_maps(part, kernels) for part in parts)
        for block in self.blocks:
            if isinstance(block, Joinable):
                block.join(kernels)
        self.parameter_bytes += grown
        is_here = not self.lm_head.weight.is_meta
        head = packed(self.lm_head, kernels.of_head()) if is_here else self.lm_head
        if head is not self.lm_head:
            replaces = self.lm_head.weight is not self.embedding.weight
            if isinstance(head, KernelLinear) and not replaces and self.embedding.share(head.map):
                replaces = True
            self.parameter_bytes += head.weight_bytes - (self.lm_head.weight_bytes if replaces else 0)
        elif not grown and (is_here or kernels.linear is None):
            return False
        table = self.embedding.weight
        rows = kept(Linear(table), kernels) if self.embedding.rows is None else None
        if rows is not None and self.embedding.share(rows):
            self.parameter_bytes += rows.weights.nbytes - table.nbytes
        self.lm_head, self.quantization = head, kernels.quantization
        own_head = head if self.stages is None else None
        self.stack = joined_stack(self.blocks, kernels.blocks, self.embedding, self.norm, own_head, self.logits)
        return True

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Map int64 ``[T]`` to a fresh ``[T, E]``."""
        return self.embedding(tokens_T)

    def head(self, x_RE: Tensor) -> Tensor:
        """Map ``[R, E]`` to float32 logits ``[R, V]``; only the product is in the model's dtype."""
        return self.logits(self.lm_head(self.norm(x_RE)).float())


class Decoder(Trunk, Generic[C]):
    """The weights of a decoder-only transformer."""

    def __init__(
        self, config: C, parameters: Parameters, values: Mapping[str, Any], mlp: MlpBuilder[C] = gated_mlp
    ) -> None:
        """Build the layers; see ``Trunk``. ``mlp`` builds the feed-forward part of each."""
        super().__init__(config, config.canonical(), parameters, values, _norm(config, parameters, "norm"))
        specs = tuple(_with_sinks(spec, parameters.get(f"{i}.sinks")) for i, spec in enumerate(config.layers))
        self.layer_specs = specs
        self._decoder_blocks = [
            _block(config, layer, spec, mlp(config, layer, parameters), parameters) for layer, spec in enumerate(specs)
        ]
        self.blocks = self._decoder_blocks


def _absent(x: Tensor) -> Tensor:
    """Stand for the final norm of another stage."""
    return x


def _with_sinks(spec: AttentionSpec, sinks_H: Tensor | None) -> AttentionSpec:
    return spec if sinks_H is None else replace(spec, sinks=tuple(sinks_H.tolist()))


def _embedding(config: DecoderConfig, weight_VE: Tensor) -> Embedding:
    scale = config.embedding_scale
    if config.round_embedding_scale:
        scale = float(torch.tensor(scale, dtype=weight_VE.dtype))
    return Embedding(weight_VE) if scale == 1.0 else ScaledEmbedding(weight_VE, scale)


def norm_of(config: DecoderConfig, weight: Tensor, bias: Tensor | None = None) -> Norm:
    """Build a norm over the model width or over each head."""
    if config.norm == "layer":
        return LayerNorm(weight, bias, config.norm_eps)
    if config.norm == "rms":
        return RMSNorm(weight, config.norm_eps)
    one_more = weight.float() + 1.0
    return RMSNorm(one_more, config.norm_eps)


def _norm(config: DecoderConfig, parameters: Parameters, name: str) -> Norm:
    return norm_of(config, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def attention_of(
    config: DecoderConfig,
    layer: int,
    spec: AttentionSpec,
    parameters: Parameters,
    *,
    layer_id: int | None = None,
    normed: Callable[..., NormedAttention] = NormedAttention,
) -> Attention:
    """Build attention from ``{layer}.qkv`` and ``.out``, for normed heads ``.q_norm``, ``.k_norm``.

    ``layer_id``: id of the layer; None: ``layer``. ``normed``: the class for norms by head.
    """
    number = layer if layer_id is None else layer_id
    qkv, out = linear(parameters, f"{layer}.qkv"), linear(parameters, f"{layer}.out")
    if config.query_growth is not None:
        return GrowingAttention(number, spec, qkv, out, config.query_growth)
    if config.head_norms == "none":
        return Attention(number, spec, qkv, out)
    names = [f"{layer}.q_norm", f"{layer}.k_norm"]
    if config.head_norms == "each":
        weights = [parameters[f"{name}.weight"].view(-1, spec.head_dim) for name in names]
        q_norm, k_norm = (LayerNormPerHead(weight_HD, config.norm_eps) for weight_HD in weights)
        return NormedAttention(number, spec, qkv, out, q_norm, k_norm)
    kind = normed if config.head_norms == "shared" else WidthNormedAttention
    return kind(number, spec, qkv, out, *(_norm(config, parameters, name) for name in names))


def _block(
    config: DecoderConfig, layer: int, spec: AttentionSpec, mlp: FeedForward, parameters: Parameters
) -> DecoderBlock:
    def norm(name: str) -> Norm:
        return _norm(config, parameters, f"{layer}.{name}")

    attention = attention_of(config, layer, spec, parameters)
    if config.placement == "parallel":
        return ParallelBlock(norm("attention_norm"), attention, mlp)
    return serial_block(config, attention, mlp, norm)


def serial_block(config: DecoderConfig, attention: Mixer, mlp: FeedForward, norm: Callable[[str], Norm]) -> SerialBlock:
    """Build a block with the norms of ``config.placement``; ``norm`` builds one from its name."""
    before, behind = config.placement != "post", config.placement != "pre"
    return SerialBlock(
        norm("attention_norm") if before else None,
        attention,
        norm("mlp_norm") if before else None,
        mlp,
        norm("attention_out_norm") if behind else None,
        norm("mlp_out_norm") if behind else None,
        config.residual_scale,
    )
