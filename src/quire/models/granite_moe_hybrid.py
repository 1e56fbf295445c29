"""Granite 4: Mamba-2 mixers, and attention in a few blocks, mostly without positions.

Each block has an MLP for all tokens, alone or beside experts. Embeddings, scores, residual branches
and logits have multipliers. Source: transformers and the models' cards.

Letters: T tokens, E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.contracts.model import Pass
from quire.models.bamba import pass_over_generation, read_mamba_shape
from quire.models.blocks import FeedForward, Norm
from quire.models.checkpoint import NameTable, Place
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import AttentionSpec, DecoderConfig, Parameters, gated_mlp
from quire.models.geometry import DecoderGeometry, read_activation, read_geometry, rope_of
from quire.models.hybrid_decoder import (
    HybridDecoder,
    LayerIds,
    MixedBlock,
    attention_of,
    norm_of,
    only_attending,
    read_kinds,
    respelled,
)
from quire.models.mamba2 import MambaConfig, mamba_names, mamba_of
from quire.models.mixture import MixtureConfig, mixture_mlp, pass_over_training, read_num_experts
from quire.models.tensor_names import LLAMA_NAMES, name_table, trunk_names
from quire.nn.mixers import Mixer
from quire.ops.experts import Routing

KINDS: Mapping[str, bool] = {"full_attention": True, "attention": True, "linear_attention": False, "mamba": False}
"""Accepted entries of ``layer_types``; True for a block with attention."""
DENSE_NAMES = replace(LLAMA_NAMES, gate_up=("input_linear",), down="output_linear")
MIXTURES: tuple[tuple[str, str, str], ...] = (
    ("router.layer.weight", "input_linear.weight", "output_linear.weight"),
    ("router.weight", "experts.gate_up_proj", "experts.down_proj"),
)
"""Names of router and stacked experts in ``block_sparse_moe``: published ones, transformers 5's."""


class ScaledMixedBlock(MixedBlock):
    """``h = x + s * mixer(norm(x))``, then ``h + s * mlp(norm(h))``."""

    __slots__ = ("scale",)

    def __init__(self, mixer_norm: Norm, mixer: Mixer, mlp_norm: Norm, mlp: FeedForward, scale: float) -> None:
        super().__init__(mixer_norm, mixer, mlp_norm, mlp)
        self.scale = scale

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        h_TE = torch.add(x_TE, self.mixer(self.mixer_norm(x_TE), pass_), alpha=self.scale)
        return torch.add(h_TE, self.mlp(self.mlp_norm(h_TE)), alpha=self.scale)


class GraniteMoeHybrid(HybridDecoder[MambaConfig]):
    """``GraniteMoeHybridForCausalLM``."""

    def __init__(self, config: MambaConfig, parameters: Parameters, values: Mapping[str, Any]) -> None:
        super().__init__(config, parameters, values, _block)


def read_granite_moe_hybrid_config(values: Mapping[str, Any], max_model_len: int | None = None) -> MambaConfig:
    """Read ``GraniteMoeHybridForCausalLM``; a missing multiplier is 1, that of the scores too.

    ``intermediate_size`` is the experts' width; ``shared_intermediate_size`` is that of the MLP.
    """
    if values.get("layer_types") is None:
        values = {**values, "layer_types": values.get("layers_block_type")}
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "GraniteMoeHybridForCausalLM", "granitemoehybrid", max_model_len)
    attending: tuple[int, ...] = ()
    if fields.get("layer_types") is not None:
        attending = read_kinds(fields, geometry.num_layers, KINDS)
    pass_over_generation(fields)
    pass_over_training(fields)
    proj_bias = fields.flag("mamba_proj_bias", False)
    shape = read_mamba_shape(fields, int(fields.number("mamba_expand", 2) * geometry.hidden_size))
    config = MambaConfig(
        trunk=_trunk(fields, geometry),
        num_blocks=geometry.num_layers,
        attending=attending,
        recurrent=tuple(block for block in range(geometry.num_layers) if block not in attending),
        mixer=shape,
        activation=read_activation(fields),
        project_bias=proj_bias,
        out_bias=proj_bias,
        conv_bias=fields.flag("mamba_conv_bias", True),
        norm_groups=shape.num_groups,
    )
    refuse_unsupported(fields)
    return config


def _trunk(fields: ConfigFields, geometry: DecoderGeometry) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    shared = fields.count("shared_intermediate_size", 1024)
    common: dict[str, Any] = {
        **geometry.common(),
        "intermediate_size": shared,
        "layers": _layers(fields, geometry),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": read_activation(fields),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "qkv_bias": bias,
        "out_bias": bias,
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
    }
    if fields.whole("num_local_experts", 8) == 0:
        return DecoderConfig(**common)
    num_experts, top_k = read_num_experts(fields, "num_local_experts", "num_experts")
    return MixtureConfig(
        **common,
        num_experts=num_experts,
        expert_size=geometry.intermediate_size,
        routing=Routing(top_k=top_k, softmax="chosen"),
        shared_size=shared,
        shared_gate=False,
    )


def _layers(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[AttentionSpec, ...]:
    """Return the layers, with RoPE only if ``position_embedding_type`` asks for it."""
    scale = fields.number("attention_multiplier", 1.0)
    fields.expect("position_embedding_type", "rope", "nope")
    if fields.get("position_embedding_type") == "rope":
        return geometry.layers(rope_of(fields, geometry), sm_scale=scale)
    return geometry.layers((None,) * geometry.num_layers, sm_scale=scale)


def granite_moe_hybrid_spellings(config: MambaConfig) -> Sequence[NameTable]:
    """Return the published names and transformers 5's; one table if there are no experts."""
    trunk = config.trunk
    mixers: dict[str, Place] = {}
    for block in config.recurrent:
        mixers |= mamba_names(config, f"model.layers.{block}.mamba", str(block))
    if not isinstance(trunk, MixtureConfig):
        table = respelled(name_table(trunk, DENSE_NAMES), {".mlp.": ".shared_mlp."})
        return ({**only_attending(config, table), **mixers},)
    table = only_attending(config, trunk_names(trunk))
    return tuple({**table, **_mixture_names(trunk, names), **mixers} for names in MIXTURES)


def _mixture_names(trunk: MixtureConfig, names: tuple[str, str, str]) -> dict[str, Place]:
    count, width, inner, shared = trunk.num_experts, trunk.hidden_size, trunk.expert_size, trunk.shared_size
    router, gate_up, down = (f"block_sparse_moe.{name}" for name in names)
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {
        router: ("router", (count, width)),
        gate_up: ("experts.gate_up", (count, 2 * inner, width)),
        down: ("experts.down", (count, width, inner)),
        "shared_mlp.input_linear.weight": ("shared.gate_up", (2 * shared, width)),
        "shared_mlp.output_linear.weight": ("shared.down", (width, shared)),
    }
    return {
        f"model.layers.{{}}.{theirs}": Place(parameter=f"{{}}.{ours}.weight", shape=shape)
        for theirs, (ours, shape) in sizes.items()
    }


def _block(config: MambaConfig, block: int, ids: LayerIds, parameters: Parameters) -> ScaledMixedBlock:
    trunk = config.trunk
    mixer: Mixer
    if ids.attention is not None:
        mixer = attention_of(config, block, ids.attention, parameters)
    else:
        assert ids.recurrent is not None
        mixer = mamba_of(config, block, ids.recurrent, parameters)
    norm, mlp_norm = (norm_of(config, parameters, f"{block}.{name}") for name in ("attention_norm", "mlp_norm"))
    mlp: FeedForward
    if isinstance(trunk, MixtureConfig):
        mlp = mixture_mlp(trunk, block, parameters)
    else:
        mlp = gated_mlp(trunk, block, parameters)
    return ScaledMixedBlock(norm, mixer, mlp_norm, mlp, trunk.residual_scale)
