"""LFM2 (Liquid AI): gated short convolutions, with attention in a few blocks; LFM2-MoE, with
experts in all but the first blocks; LFM3, with windows in some blocks, sandwich norms, and a gate
for each head of attention.

Source: transformers and the models' cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.contracts.experts import Routing
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig, Parameters, linear
from quire.models.geometry import (
    DecoderGeometry,
    read_geometry,
    read_layer_types,
    read_window,
    ropes_of,
    windows_of,
)
from quire.models.hybrid_decoder import (
    HybridConfig,
    only_attending,
    read_taps,
    respelled,
    split_blocks,
)
from quire.models.mixture import MixtureConfig, mixture_names, pass_over_training, read_layer_numbers, read_num_experts
from quire.models.rope_config import read_rope
from quire.models.tensor_names import Names, map_names, name_table
from quire.nn.short_conv import ShortConv, ShortConvShape
from quire.weights.places import NameTable, Place

KINDS: Mapping[str, bool] = {"full_attention": True, "conv": False}
"""Accepted entries of ``layer_types``; True for a block with attention."""
NAMES = Names(
    norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    out="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    gate_up=("w1", "w3"),
    down="w2",
)
LFM3_KINDS: Mapping[str, bool] = {**KINDS, "sliding_attention": True}
LFM3_NAMES = Names(
    norms={**NAMES.norms, "attention_out_norm": "post_operator_norm", "mlp_out_norm": "post_ffn_norm"},
    gate_up=NAMES.gate_up,
    down=NAMES.down,
)
LFM3_ROPE: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
"""``rope_parameters`` of transformers, if there are none."""
SPELLINGS: Mapping[str, str] = {".mlp.": ".feed_forward.", "model.norm.": "model.embedding_norm."}
"""Names of modules in LFM2 for Llama's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lfm2Config(HybridConfig):
    """A hybrid with short convolutions."""

    mixer: ShortConvShape
    conv_bias: bool = False
    """Biases of the convolutions and the projections around them."""

    OWN = ("conv_bias",)


def read_lfm2_config(values: Mapping[str, Any], max_model_len: int | None = None) -> Lfm2Config:
    """Read ``Lfm2ForCausalLM``. ``layer_types`` or ``full_attn_idxs`` (missing: all) list the
    blocks with attention. The older ``block_ff_dim`` and ``tie_embedding`` win over the newer
    names, as in transformers."""
    values = dict(values)
    for old, new in (("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings")):
        if values.get(old) is not None:
            values[new] = values.pop(old)
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Lfm2ForCausalLM", "lfm2", max_model_len, kv_heads_required=True)
    # transformers does not read these fields; it always computes the accepted values.
    fields.expect("block_use_swiglu", True)
    fields.expect("use_pos_enc", True)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        fields.expect(name, geometry.hidden_size)
    trunk = DecoderConfig(**{**_common(fields, geometry), "intermediate_size": _inner_size(fields, geometry)})
    return _with_mixers(fields, trunk, _attends(fields, geometry))


def read_lfm2_moe_config(values: Mapping[str, Any], max_model_len: int | None = None) -> Lfm2Config:
    """Read ``Lfm2MoeForCausalLM``; the first ``num_dense_layers`` blocks (2) have no experts. The
    older ``tie_embedding`` wins, as in transformers."""
    values = dict(values)
    if values.get("tie_embedding") is not None:
        values["tie_word_embeddings"] = values.pop("tie_embedding")
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Lfm2MoeForCausalLM", "lfm2_moe", max_model_len, kv_heads_required=True)
    attends = read_layer_types(fields, geometry.num_layers, KINDS)
    if attends is None:
        raise fields.error("layer_types", f"a list of {geometry.num_layers} strings")
    num_experts, top_k = read_num_experts(fields, "num_experts", "num_local_experts")
    pass_over_training(fields)
    trunk = MixtureConfig(
        **_common(fields, geometry),
        num_experts=num_experts,
        expert_size=fields.count("moe_intermediate_size"),
        routing=Routing(
            top_k=top_k,
            scores="sigmoid",
            renormalise=fields.flag("norm_topk_prob", True),
            summand=1e-6,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        dense_layers=tuple(range(min(fields.whole("num_dense_layers", 2), geometry.num_layers))),
        correction=fields.flag("use_expert_bias", True),
    )
    return _with_mixers(fields, trunk, attends)


def read_lfm3_config(values: Mapping[str, Any], max_model_len: int | None = None) -> Lfm2Config:
    """Read ``Lfm3ForCausalLM``. Of four blocks the third has full attention, and the first of all
    but the first four has a window, unless ``layer_types`` says otherwise."""
    values = dict(values)
    if values.get("rms_norm_eps") is not None:
        values["norm_eps"] = values.pop("rms_norm_eps")
    values["rope_parameters"] = values.get("rope_parameters") or LFM3_ROPE
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Lfm3ForCausalLM", "lfm3", max_model_len, kv_heads_required=True, head_dim=128)
    usual = {0: "sliding_attention", 2: "full_attention"}
    if values.get("layer_types") is None:
        kinds = (usual.get(block % 4, "conv") if block else "conv" for block in range(geometry.num_layers))
        values["layer_types"] = list(kinds)
    attends = read_layer_types(fields, geometry.num_layers, LFM3_KINDS) or ()
    windowed = tuple(kind == "sliding_attention" for kind in values["layer_types"])
    ropes = ropes_of(fields, geometry, windowed)
    bias, gated = fields.flag("attention_bias", False), fields.flag("use_attention_gate", True)
    trunk = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers(ropes, windows_of(fields, windowed, read_window(fields, 256))),
        norm_eps=fields.number("norm_eps", 1e-5),
        placement="sandwich" if fields.flag("use_sandwich_norm", True) else "pre",
        head_norms="shared",
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
    )
    config = _with_mixers(fields, trunk, attends, taps=7)
    return replace(config, gated_heads=gated)


def _common(fields: ConfigFields, geometry: DecoderGeometry) -> dict[str, Any]:
    return {
        **geometry.common(),
        "layers": geometry.layers(read_rope(fields, geometry, theta_default=1_000_000.0)),
        "norm_eps": fields.number("norm_eps", 1e-5),
        "head_norms": "shared",
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }


def _with_mixers(fields: ConfigFields, trunk: DecoderConfig, attends: Sequence[bool], taps: int = 3) -> Lfm2Config:
    config = Lfm2Config(
        trunk=trunk,
        **split_blocks(attends),
        mixer=ShortConvShape(channels=trunk.hidden_size, taps=read_taps(fields, "conv_L_cache", taps)),
        conv_bias=fields.flag("conv_bias", False),
    )
    refuse_unsupported(fields)
    return config


def _attends(fields: ConfigFields, geometry: DecoderGeometry) -> Sequence[bool]:
    listed = read_layer_numbers(fields, "full_attn_idxs", geometry.num_layers)
    all_do = fields.get("full_attn_idxs") is None
    by_number = [all_do or block in listed for block in range(geometry.num_layers)]
    return read_layer_types(fields, geometry.num_layers, KINDS) or by_number


def _inner_size(fields: ConfigFields, geometry: DecoderGeometry) -> int:
    """Return the MLP's width: ``intermediate_size``, or 2/3 of it, scaled and rounded up."""
    adjust = fields.flag("block_auto_adjust_ff_dim", True)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    multiple = fields.count("block_multiple_of", 256)
    if not adjust:
        return geometry.intermediate_size
    inner = int(2 * geometry.intermediate_size / 3)
    if "block_ffn_dim_multiplier" in fields.values and fields.values["block_ffn_dim_multiplier"] is None:
        return inner
    inner = int(factor * inner)
    return multiple * ((inner + multiple - 1) // multiple)


def lfm2_spellings(config: Lfm2Config) -> Sequence[NameTable]:
    """Return the name table of LFM2; of a mixture that with single experts and that with stacked
    ones."""
    trunk = config.trunk
    if not isinstance(trunk, MixtureConfig):
        return (_with_mixer_names(config, name_table(trunk, NAMES)),)
    kinds = (("w1", "w3", "w2"), None)
    tables = (mixture_names(trunk, projections=one, names=NAMES, correction="expert_bias") for one in kinds)
    return tuple(_with_mixer_names(config, table) for table in tables)


def lfm3_spellings(config: Lfm2Config) -> Sequence[NameTable]:
    """Return the published names, and those with transformers 5's name of the gates of heads."""
    table = _with_mixer_names(config, name_table(config.trunk, LFM3_NAMES))
    shape = config.trunk.layers[0].num_heads, config.trunk.hidden_size
    gates = {
        block: Place(parameter=f"{block}.gate.weight", shape=shape) for block in config.attending if config.gated_heads
    }
    return tuple(
        {**table, **{f"model.layers.{block}.self_attn.{name}.weight": place for block, place in gates.items()}}
        for name in ("gate_proj", "g_proj")
    )


def _with_mixer_names(config: Lfm2Config, decoder: Mapping[str, Place]) -> NameTable:
    table = only_attending(config, respelled(decoder, SPELLINGS))
    width, channels, taps = config.trunk.hidden_size, config.mixer.channels, config.mixer.taps
    for block in config.recurrent:
        prefix, mixer, bias = f"model.layers.{block}.conv.", f"{block}.mixer", config.conv_bias
        table |= map_names(prefix, ("in_proj",), f"{mixer}.project", (channels,) * 3, width, bias)
        table |= map_names(prefix, ("out_proj",), f"{mixer}.out", (width,), channels, bias, is_sum=True)
        table[f"{prefix}conv.weight"] = Place(parameter=f"{mixer}.conv.weight", shape=(channels, 1, taps))
        if bias:
            table[f"{prefix}conv.bias"] = Place(parameter=f"{mixer}.conv.bias", shape=(channels,))
    return table


def short_conv(config: Lfm2Config, block: int, layer_id: int, parameters: Parameters) -> ShortConv:
    """Build a block's mixer."""
    name = f"{block}.mixer"
    conv_EW = parameters[f"{name}.conv.weight"].view(config.mixer.channels, config.mixer.taps)
    project, out = linear(parameters, f"{name}.project"), linear(parameters, f"{name}.out")
    return ShortConv(layer_id, project, conv_EW, parameters.get(f"{name}.conv.bias"), out)
