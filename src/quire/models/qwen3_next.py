"""Qwen3-Next and Qwen3.5 (text): gated delta nets, and gated attention in every fourth block.

Norm weights are stored as their difference to 1, and a quarter of each head rotates. Qwen3-Next and
Qwen3.5-MoE have experts, one of them shared by all tokens; Qwen3.5 has plain MLPs. Sources:
transformers, the models' cards, arXiv:2412.06464 (delta net), arXiv:2505.06708 (attention's gate).

A delta net's parameters in block ``{}``: ``{}.mixer.step_bias``, ``{}.mixer.log_a``, and with
``.weight`` ``{}.mixer.project``, ``.rates``, ``.conv``, ``.norm`` and ``.out``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from quire.contracts.experts import Routing
from quire.contracts.ranks import Share
from quire.models.config_fields import ConfigFields, config_reader, refuse_unsupported
from quire.models.decoder import DecoderConfig, Parameters, linear
from quire.models.geometry import DecoderGeometry, read_geometry, read_layer_types
from quire.models.heads import DraftLayer
from quire.models.hybrid_decoder import HybridConfig, read_taps, split_blocks
from quire.models.mixture import (
    PROJECTIONS,
    MixtureConfig,
    mixture_names,
    pass_over_training,
    read_dense_layers,
    read_num_experts,
)
from quire.models.rope_config import read_rope, without_sections
from quire.models.tensor_names import (
    LLAMA_NAMES,
    IgnorableNames,
    ignorable_names,
    map_names,
    name_table,
    places_of,
)
from quire.models.text_parts import text_fields
from quire.nn.delta import DeltaShape, GatedDeltaNet
from quire.nn.norm import GatedRMSNorm
from quire.ops.rows import ACTIVATIONS
from quire.weights.places import NameTable, Place

KINDS: Mapping[str, bool] = {"full_attention": True, "linear_attention": False}
"""Accepted entries of ``layer_types``; True for a block with attention."""
VISION_PREFIX = "model.language_model."
"""Prefix in a checkpoint that also reads images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaConfig(HybridConfig):
    """A hybrid with gated delta nets."""

    mixer: DeltaShape
    interleaved: bool
    """Whether one projection of the checkpoint holds query, key, values and gates, key head by key
    head (Qwen3-Next). Otherwise there are separate projections: q, k and v together, gates, and two
    for rates."""
    prefix: str = "model."
    """Prefix of the names of all tensors but the head's."""

    def divided(self, share: Share) -> Self:
        """See ``DecoderConfig``. One projection of all parts is divided by key heads alone."""
        if self.interleaved:
            share.part(self.mixer.num_key_heads, "key heads of the mixers")
        return HybridConfig.divided(self, share)


def read_qwen3_next_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DeltaConfig:
    """Read ``Qwen3NextForCausalLM``: experts by ``decoder_sparse_step`` and ``mlp_only_layers``."""
    fields = ConfigFields(values)
    geometry = _geometry(fields, "Qwen3NextForCausalLM", "qwen3_next", max_model_len)
    trunk = MixtureConfig(
        **_trunk(fields, geometry),
        **_experts(fields, renormalise=fields.flag("norm_topk_prob", True)),
        dense_layers=read_dense_layers(fields, geometry.num_layers),
    )
    return _config(fields, trunk, interleaved=True)


def read_qwen3_5_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DeltaConfig:
    return _read_dense(ConfigFields(without_sections(values)), "Qwen3_5ForCausalLM", max_model_len)


def read_qwen3_5_moe_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DeltaConfig:
    """Read ``Qwen3_5MoeForCausalLM``: experts in every block."""
    return _read_mixture(ConfigFields(without_sections(values)), "Qwen3_5MoeForCausalLM", max_model_len)


@config_reader
def read_qwen3_5_with_vision_config(fields: ConfigFields, max_model_len: int | None) -> DeltaConfig:
    """Read ``text_config`` of ``Qwen3_5ForConditionalGeneration``, for text. The image encoder is
    not loaded, and no token has a position in height and width."""
    architecture = "Qwen3_5ForConditionalGeneration"
    text = text_fields(fields, "qwen3_5", architecture, {}, tied=False)
    return replace(_read_dense(text, architecture, max_model_len), prefix=VISION_PREFIX)


@config_reader
def read_qwen3_5_moe_with_vision_config(fields: ConfigFields, max_model_len: int | None) -> DeltaConfig:
    """Read ``text_config`` of ``Qwen3_5MoeForConditionalGeneration``, with experts."""
    architecture = "Qwen3_5MoeForConditionalGeneration"
    text = text_fields(fields, "qwen3_5_moe", architecture, {}, tied=False)
    return replace(_read_mixture(text, architecture, max_model_len), prefix=VISION_PREFIX)


def _read_dense(fields: ConfigFields, architecture: str, max_model_len: int | None) -> DeltaConfig:
    geometry = _geometry(fields, architecture, "qwen3_5_text", max_model_len)
    return _config(fields, DecoderConfig(**_trunk(fields, geometry)), interleaved=False)


def _read_mixture(fields: ConfigFields, architecture: str, max_model_len: int | None) -> DeltaConfig:
    # No block has a plain MLP, so the value that replaces a missing field is not used.
    fields = ConfigFields({"intermediate_size": 1, **fields.values}, fields.source)
    geometry = _geometry(fields, architecture, "qwen3_5_moe_text", max_model_len)
    # Every block has experts; the fields may say nothing else.
    fields.expect("mlp_only_layers", [])
    fields.expect("decoder_sparse_step", 1)
    trunk = MixtureConfig(**_trunk(fields, geometry), **_experts(fields, renormalise=True))
    return _config(fields, trunk, interleaved=False)


def _geometry(fields: ConfigFields, architecture: str, model_type: str, max_model_len: int | None) -> DecoderGeometry:
    return read_geometry(fields, architecture, model_type, max_model_len, kv_heads_required=True, head_dim=256)


def _trunk(fields: ConfigFields, geometry: DecoderGeometry) -> dict[str, Any]:
    layers = geometry.layers(read_rope(fields, geometry, partial_default=0.25))
    return {**geometry.usual(fields), "layers": layers, "norm": "offset_rms", "head_norms": "shared"}


def _experts(fields: ConfigFields, *, renormalise: bool) -> dict[str, Any]:
    num_experts, top_k = read_num_experts(fields, "num_experts", "num_local_experts")
    pass_over_training(fields)
    return {
        "num_experts": num_experts,
        "expert_size": fields.count("moe_intermediate_size", 512),
        "shared_size": fields.count("shared_expert_intermediate_size", 512),
        "routing": Routing(top_k=top_k, renormalise=renormalise),
    }


def _config(fields: ConfigFields, trunk: DecoderConfig, *, interleaved: bool) -> DeltaConfig:
    """Complete the values; by default each ``full_attention_interval``-th block (4) attends."""
    # transformers does not read these fields; it always computes the accepted values.
    fields.expect("attn_output_gate", True)
    fields.expect("mamba_ssm_dtype", "float32")
    interval = fields.count("full_attention_interval", 4)
    by_number = [(block + 1) % interval == 0 for block in range(trunk.num_layers)]
    attends = read_layer_types(fields, trunk.num_layers, KINDS) or by_number
    shape = DeltaShape(
        num_key_heads=fields.count("linear_num_key_heads", 16),
        num_value_heads=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
        taps=read_taps(fields, "linear_conv_kernel_dim", 4),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({shape.num_key_heads})")
    config = DeltaConfig(
        trunk=trunk,
        **split_blocks(attends),
        mixer=shape,
        gated_attention=True,
        interleaved=interleaved,
    )
    refuse_unsupported(fields)
    return config


def delta_spellings(config: DeltaConfig) -> Sequence[NameTable]:
    """Return tables for single and for stacked experts; one table if there are no experts."""
    trunk = config.trunk
    if isinstance(trunk, MixtureConfig):
        single = mixture_names(trunk, projections=PROJECTIONS)
        tables = [single, mixture_names(trunk)]
    else:
        tables = [name_table(trunk)]
    tables = [{**_without_attention(table), **_mixers(config)} for table in tables]
    return tuple({_prefixed(config, name): place for name, place in table.items()} for table in tables)


def _prefixed(config: DeltaConfig, name: str) -> str:
    return config.prefix + name.removeprefix("model.") if name.startswith("model.") else name


def delta_ignorable_names(config: DeltaConfig) -> IgnorableNames:
    """Return the ignorable names, also of the multi-token predictor and the image encoder."""
    found = ignorable_names(config.trunk, replace(LLAMA_NAMES, trunk=config.prefix))
    return IgnorableNames(names=found.names, prefixes=(*found.prefixes, "mtp.", "model.visual."))


def delta_draft_layer(config: DeltaConfig) -> DraftLayer:
    """Return the first layer of the multi-token predictor: a block with attention, and experts if
    the model has some."""
    trunk = replace(config.trunk, layers=config.trunk.layers[:1])
    if isinstance(trunk, MixtureConfig):
        trunk = replace(trunk, dense_layers=())
    return DraftLayer(
        config=replace(config, trunk=trunk, num_blocks=1, attending=(0,), recurrent=(), prefix="model."),
        names={
            "model.layers.0.": "mtp.layers.0.",
            "model.norm.": "mtp.norm.",
            "model.embed_tokens.": "mtp.embed_tokens.",
            "lm_head.": "mtp.lm_head.",
        },
        prefix="mtp.",
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        state_norm="mtp.pre_fc_norm_hidden.weight",
        project="mtp.fc.weight",
    )


def _without_attention(table: Mapping[str, Place]) -> dict[str, Place]:
    return {name: place for name, place in table.items() if ".self_attn." not in name}


def _mixers(config: DeltaConfig) -> dict[str, Place]:
    table: dict[str, Place] = {}
    for block in config.attending:
        table |= _attention_names(config, block)
    for block in config.recurrent:
        table |= _delta_names(config, block)
    return table


def _attention_names(config: DeltaConfig, block: int) -> dict[str, Place]:
    """Return an attention's names; half of the rows of ``q_proj`` are gates."""
    trunk, spec, prefix = config.trunk, config.trunk.layers[block], f"model.layers.{block}.self_attn."
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows, width = (2 * queries, keys, keys), trunk.hidden_size
    table = map_names(prefix, LLAMA_NAMES.qkv, f"{block}.qkv", rows, width, trunk.qkv_bias)
    table |= map_names(prefix, ("o_proj",), f"{block}.out", (width,), queries, trunk.out_bias, is_sum=True)
    norms = {f"{name}.weight": (f"{name}.weight", (spec.head_dim,)) for name in ("q_norm", "k_norm")}
    return table | places_of(norms, prefix, f"{block}.")


def _delta_names(config: DeltaConfig, block: int) -> dict[str, Place]:
    shape, width = config.mixer, config.trunk.hidden_size
    heads, channels, values = shape.num_value_heads, shape.channels, shape.values
    prefix, project, rates = f"model.layers.{block}.linear_attn.", f"{block}.mixer.project", f"{block}.mixer.rates"
    if config.interleaved:
        table = map_names(prefix, ("in_proj_qkvz",), project, (channels + values,), width)
        table |= map_names(prefix, ("in_proj_ba",), rates, (2 * heads,), width)
    else:
        table = map_names(prefix, ("in_proj_qkv", "in_proj_z"), project, (channels, values), width)
        name = f"{prefix}in_proj_qkv.weight"
        table[name] = replace(table[name], parts=shape.convolved)
        table |= map_names(prefix, ("in_proj_b", "in_proj_a"), rates, (heads, heads), width)
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {
        "out_proj.weight": ("out.weight", (width, values)),
        "norm.weight": ("norm.weight", (shape.value_dim,)),
        "dt_bias": ("step_bias", (heads,)),
        "A_log": ("log_a", (heads,)),
    }
    table |= places_of(sizes, prefix, f"{block}.mixer.")
    conv = Place(parameter=f"{block}.mixer.conv.weight", shape=(channels, 1, shape.taps), parts=shape.convolved)
    return {**table, f"{prefix}conv1d.weight": conv}


def delta_net(config: DeltaConfig, block: int, layer_id: int, parameters: Parameters) -> GatedDeltaNet:
    """Build a block's mixer."""
    name, shape = f"{block}.mixer", config.mixer
    project, rates = linear(parameters, f"{name}.project"), linear(parameters, f"{name}.rates")
    if config.interleaved:
        # Adapters know the rows only in the checkpoint's order.
        project.name = rates.name = ""
        served = shape.num_value_heads // shape.num_key_heads
        values = served * shape.value_dim
        gather_parts_(
            parameters[f"{name}.project.weight"], shape.num_key_heads, (shape.key_dim, shape.key_dim, values, values)
        )
        gather_parts_(parameters[f"{name}.rates.weight"], shape.num_key_heads, (served, served))
    return GatedDeltaNet(
        layer_id=layer_id,
        shape=shape,
        project=project,
        rates=rates,
        conv_CW=parameters[f"{name}.conv.weight"].view(shape.channels, shape.taps),
        activation=ACTIVATIONS[config.trunk.activation],
        step_bias_H=parameters[f"{name}.step_bias"],
        log_a_H=parameters[f"{name}.log_a"],
        norm=GatedRMSNorm(parameters[f"{name}.norm.weight"], config.trunk.norm_eps, gate_first=False),
        out=linear(parameters, f"{name}.out"),
    )


def gather_parts_(weight_RE: Tensor, heads: int, parts: Sequence[int]) -> None:
    """Reorder rows in place from head-major to part-major; it costs a copy of one weight. Weights
    without memory, of another stage, stay."""
    if not weight_RE.stride(0):
        return
    rows = torch.arange(len(weight_RE), device=weight_RE.device).view(heads, sum(parts))
    order = torch.cat([part.flatten() for part in torch.split(rows, list(parts), dim=1)])
    weight_RE.copy_(weight_RE.index_select(0, order))
