"""The decoder of Gemma 3n and Gemma 4: layers that read the K and V of another layer, and an input
of its own for each layer.

A layer that shares has no layer in the KV state: its attention asks the pass for the rows of its
source, the last layer before the sharing ones with the same kind of attention. The sharing layers
are the last ones, so the ids of the others are the numbers of their blocks.

What a token gives to a layer depends on its id, which blocks do not see. So the rows that go
through the blocks are wider than the model: the residual stream (of Gemma 3n several ones), then
the inputs of all layers, P columns each.

Letters: T tokens, E model width, V vocabulary, L layers, P width of a layer's input, W of a row,
D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from quire.contracts.block_calls import LayerKernels
from quire.contracts.model import Block
from quire.contracts.ranks import Share, Stages
from quire.models.blocks import Mixer
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderConfig, Parameters, Trunk, linear, norm_of
from quire.models.gemma import GEMMA_NAMES
from quire.models.tensor_names import IgnorableNames, gated_names, ignorable_names, map_names, places_of
from quire.nn.attention import SharedAttention, ValueNormedAttention
from quire.nn.embedding import ScaledEmbedding
from quire.nn.linear import Linear
from quire.nn.norm import RMSNorm
from quire.nn.packed import pack_maps
from quire.ops.rows import ACTIVATIONS
from quire.weights.lazy_parameters import late
from quire.weights.places import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class LayeredConfig(DecoderConfig):
    """A decoder of such layers. ``layers`` has a spec for each block; that of a block that shares
    is its source's. ``intermediate_size`` is not used."""

    sources: tuple[int | None, ...]
    """For each block the one whose K and V it reads; None: its own."""
    inner_sizes: tuple[int, ...]
    """Inner width of each block's MLP."""
    input_size: int
    """P; 0: there are no inputs of layers."""
    input_vocab: int
    """Tokens with an input of their own; others have that of token 0."""
    keys_as_values: tuple[int, ...] = ()
    """The blocks whose V is K, before its norm and its rotation."""

    def divided(self, share: Share) -> Self:
        inner = tuple(share.part(one, "elements of intermediate_size") for one in self.inner_sizes)
        return replace(DecoderConfig.divided(replace(self, intermediate_size=0), share), inner_sizes=inner)

    def own_layers(self) -> tuple[int, ...]:
        """Return the blocks with K and V of their own."""
        return tuple(block for block, source in enumerate(self.sources) if source is None)


def read_sources(fields: ConfigFields, kinds: Sequence[bool], default: int) -> tuple[int | None, ...]:
    """Read ``num_kv_shared_layers``: for each block its source, by the blocks' kinds."""
    count = fields.whole("num_kv_shared_layers", default)
    first = len(kinds) - count
    if first < 0 or set(kinds) != set(kinds[:first]):
        raise fields.error("num_kv_shared_layers", "a number that leaves a layer of each kind in layer_types before")
    own = {kind: max(block for block in range(first) if kinds[block] == kind) for kind in set(kinds)}
    return tuple(None if block < first else own[kind] for block, kind in enumerate(kinds))


def layered_names(config: LayeredConfig) -> dict[str, Place]:
    """Return the names of embedding, head, norms, attention, MLPs and inputs of layers."""
    width, vocab_size = config.hidden_size, config.vocab_size
    table = {
        "model.embed_tokens.weight": Place(parameter="embed.weight", shape=(vocab_size, width)),
        "model.norm.weight": Place(parameter="norm.weight", shape=(width,)),
    }
    if not config.tie_embeddings:
        table["lm_head.weight"] = Place(parameter="head.weight", shape=(vocab_size, width))
    for ours, theirs in GEMMA_NAMES.norms.items():
        table[f"model.layers.{{}}.{theirs}.weight"] = Place(parameter=f"{{}}.{ours}.weight", shape=(width,))
    for block in range(config.num_layers):
        mlp = gated_names(f"model.layers.{block}.mlp.", f"{block}.", width, config.inner_sizes[block])
        table |= _attention_names(config, block) | mlp
    if config.input_size:
        table |= _input_names(config)
    return table


def _attention_names(config: LayeredConfig, block: int) -> dict[str, Place]:
    spec, width, prefix = config.layers[block], config.hidden_size, f"model.layers.{block}.self_attn."
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows, norms = {"q_proj": queries}, ["q_norm"]
    if config.sources[block] is None:
        norms.append("k_norm")
        rows |= {"k_proj": keys} if block in config.keys_as_values else {"k_proj": keys, "v_proj": keys}
    table = map_names(prefix, tuple(rows), f"{block}.qkv", tuple(rows.values()), width)
    table |= map_names(prefix, ("o_proj",), f"{block}.out", (width,), queries)
    heads = {f"{name}.weight": (f"{name}.weight", (spec.head_dim,)) for name in norms}
    return table | places_of(heads, prefix, f"{block}.")


def _input_names(config: LayeredConfig) -> dict[str, Place]:
    width, size = config.hidden_size, config.input_size
    every = config.num_layers * size
    outside: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed_tokens_per_layer.weight": ("embed.weight", (config.input_vocab, every)),
        "per_layer_model_projection.weight": ("project.weight", (every, width)),
        "per_layer_projection_norm.weight": ("norm.weight", (size,)),
    }
    inside: dict[str, tuple[str, tuple[int, ...]]] = {
        "per_layer_input_gate.weight": ("input_gate.weight", (size, width)),
        "per_layer_projection.weight": ("input_out.weight", (width, size)),
        "post_per_layer_input_norm.weight": ("input_norm.weight", (width,)),
    }
    return places_of(outside, "model.", "inputs.") | places_of(inside, "model.layers.{}.", "{}.")


def layered_ignorable_names(config: LayeredConfig) -> IgnorableNames:
    """Return the names of the usual ignored tensors, and of K and V in layers that share: published
    files have them."""
    usual = ignorable_names(config)
    shared = {
        f"model.layers.{block}.self_attn.{name}.weight"
        for block, source in enumerate(config.sources)
        if source is not None
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    return IgnorableNames(names=usual.names | shared, prefixes=usual.prefixes)


def layered_attention(config: LayeredConfig, block: int, parameters: Parameters) -> Mixer:
    """Build a block's attention."""
    spec, source = config.layers[block], config.sources[block]
    qkv, out = linear(parameters, f"{block}.qkv"), linear(parameters, f"{block}.out")
    q_norm = rms_norm(config, parameters, f"{block}.q_norm")
    if source is not None:
        return SharedAttention(source, spec, qkv, out, q_norm)
    k_norm = rms_norm(config, parameters, f"{block}.k_norm")
    v_norm = RMSNorm(torch.ones_like(k_norm.weight), config.norm_eps)
    return ValueNormedAttention(block, spec, qkv, out, q_norm, k_norm, v_norm, block in config.keys_as_values)


def rms_norm(config: DecoderConfig, parameters: Parameters, name: str) -> RMSNorm:
    """Build the norm of ``{name}.weight``."""
    norm = norm_of(config, parameters[f"{name}.weight"])
    assert isinstance(norm, RMSNorm)
    return norm


@dataclass(slots=True, eq=False)
class LayerInputs:
    """The inputs of all layers: a projection of the embedding, normed, and the token's own."""

    table: ScaledEmbedding
    """``[V, L * P]``"""
    project: Linear
    """E to L * P"""
    norm: RMSNorm
    size: int
    """P"""

    def __call__(self, x_TE: Tensor, tokens_T: Tensor) -> Tensor:
        """Map ``[T, E]`` and int64 ``[T]`` to a fresh ``[T, L * P]``."""
        known_T = tokens_T.where((tokens_T >= 0) & (tokens_T < len(self.table.weight)), 0)
        projected = self.project(x_TE).mul_(x_TE.shape[1] ** -0.5).view(len(x_TE), -1, self.size)
        return self.norm(projected).flatten(1).add_(self.table(known_T)).mul_(0.5**0.5)


@dataclass(slots=True, eq=False)
class LayerInput:
    """What a layer makes of its input: ``norm(out(act(gate(x)) * input))``."""

    gate: Linear
    """E to P"""
    out: Linear
    norm: RMSNorm
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x_TE: Tensor, input_TP: Tensor) -> Tensor:
        """Map ``[T, E]`` and ``[T, P]`` to a fresh ``[T, E]``."""
        return self.norm(self.out(self.activation(self.gate(x_TE)).mul_(input_TP)))


def layer_input(config: LayeredConfig, block: int, parameters: Parameters) -> LayerInput:
    """Build a block's part that takes its input."""
    gate, out = (linear(parameters, f"{block}.{name}") for name in ("input_gate", "input_out"))
    return LayerInput(gate, out, rms_norm(config, parameters, f"{block}.input_norm"), ACTIVATIONS[config.activation])


@dataclass(slots=True, eq=False)
class StreamNorm:
    """The final norm over the residual stream of wide rows."""

    norm: RMSNorm
    width: int

    def __call__(self, x_RW: Tensor) -> Tensor:
        """Map ``[R, W]`` to a fresh ``[R, E]``."""
        return self.norm(x_RW[:, : self.width].contiguous())


class LayeredDecoder(Trunk):
    """The weights of a decoder whose rows may be wide (``contracts.model.WideRows``)."""

    def __init__(
        self,
        config: LayeredConfig,
        parameters: Parameters,
        values: Mapping[str, Any],
        norm: Callable[[Tensor], Tensor],
        blocks: Sequence[Block],
        spread: Callable[[Tensor], Tensor] | None = None,
        seen: int = 0,
    ) -> None:
        """``norm`` maps wide rows to ``[R, E]``. ``spread`` maps an embedding to the residual
        streams side by side; None: there is one. ``seen``: the stream that callers see."""
        super().__init__(config, config.canonical(), parameters, values, norm)
        self.layer_specs = [config.layers[block] for block in config.own_layers()]
        self.blocks = blocks
        self._spread, self._seen = spread, seen
        self._inputs: LayerInputs | None = None
        if config.input_size:
            table = ScaledEmbedding(late(parameters, "inputs.embed.weight"), math.sqrt(config.input_size))
            norm_P = rms_norm(config, parameters, "inputs.norm")
            self._inputs = LayerInputs(table, linear(parameters, "inputs.project"), norm_P, config.input_size)
        self.wide = self if config.input_size or spread is not None else None

    def keep(self, stages: Stages) -> None:
        super().keep(stages)
        if not stages.is_first:
            self._inputs = self._spread = None

    def pack(self, kernels: LayerKernels) -> bool:
        for part in (self._inputs, self._spread):
            self.parameter_bytes += pack_maps(part, kernels) if part is not None else 0
        return super().pack(kernels)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Map int64 ``[T]`` to a fresh ``[T, W]``."""
        return self._rows(self.embedding(tokens_T), tokens_T)

    def entering(self, given_RE: Tensor) -> Tensor:
        """Map given embeddings to rows; their inputs of layers are those of token 0, as images have
        in transformers."""
        return self._rows(given_RE, torch.zeros(len(given_RE), dtype=torch.int64, device=given_RE.device))

    def visible(self, x_TW: Tensor) -> Tensor:
        """Map rows to the residual stream ``[T, E]``."""
        return x_TW.narrow(1, self._seen * self.hidden_size, self.hidden_size)

    def _rows(self, x_TE: Tensor, tokens_T: Tensor) -> Tensor:
        streams = x_TE if self._spread is None else self._spread(x_TE)
        return streams if self._inputs is None else torch.cat((streams, self._inputs(x_TE, tokens_T)), 1)
