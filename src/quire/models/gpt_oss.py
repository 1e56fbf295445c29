"""gpt-oss (arXiv:2508.10925): experts, attention with learned sinks, windows in every other layer.

The router and every projection have a bias. Gate and up columns of an expert alternate, and both
are clamped. Checkpoints stack the experts: as ``[X, in, out]`` in a float type, or, as published,
as ``[X, out, in]`` in MXFP4. Both are loaded as ``[X, out, in]`` in the model's dtype. bfloat16 and
float32 hold the values of MXFP4 exactly.

Letters: X experts, E model width, F inner width of an expert, Hq query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import Unsupported
from quire.contracts.experts import Routing
from quire.models.blocks import FeedForward
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.decoder import Parameters
from quire.models.geometry import read_geometry, read_layer_types, read_window, windows_of
from quire.models.mixture import MixtureConfig, experts_of, pass_over_training, read_num_experts, router
from quire.models.rope_config import read_rope
from quire.models.tensor_names import trunk_names
from quire.nn.experts import ClampedGate, MixtureOfExperts
from quire.weights.floats import TRANSPOSED
from quire.weights.mxfp4 import BLOCK, MXFP4
from quire.weights.places import NameTable, Place

QUANTISATIONS = (MXFP4.name,)
"""Accepted values of ``quant_method`` in ``quantization_config``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssConfig(MixtureConfig):
    """A mixture with clamped gates."""

    swiglu_alpha: float
    swiglu_limit: float


@config_reader
def read_gpt_oss_config(fields: ConfigFields, max_model_len: int | None) -> GptOssConfig:
    """Read ``GptOssForCausalLM``. Without ``layer_types``, even layers have a window (default 128).
    RoPE's fields are required, because transformers has a YaRN of its own as their default."""
    geometry = read_geometry(fields, "GptOssForCausalLM", "gpt_oss", max_model_len, kv_heads_required=True, head_dim=64)
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        raise fields.error("rope_parameters", "an object, or one in rope_scaling")
    windowed = read_layer_types(fields, geometry.num_layers) or geometry.every_other()
    num_experts, top_k = read_num_experts(fields, "num_local_experts", "num_experts")
    if fields.get("experts_per_token") not in (None, top_k):
        raise fields.error("experts_per_token", f"the same as num_experts_per_tok ({top_k})")
    pass_over_training(fields)
    quantisation = fields.mapping("quantization_config")
    if quantisation and quantisation.get("quant_method") not in QUANTISATIONS:
        raise Unsupported(
            f"{fields.source}: quant_method in quantization_config is {quantisation.get('quant_method')!r}, which is "
            f"not supported; expected one of {list(QUANTISATIONS)}, or no quantization_config"
        )
    bias = fields.flag("attention_bias", True)
    return GptOssConfig(
        **geometry.common(),
        layers=geometry.layers(
            read_rope(fields, geometry, theta_default=150_000.0),
            windows_of(fields, windowed, read_window(fields, 128)),
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        num_experts=num_experts,
        expert_size=geometry.intermediate_size,
        routing=Routing(top_k=top_k, softmax="chosen"),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )


def gpt_oss_spellings(config: GptOssConfig) -> tuple[NameTable, ...]:
    """Return name tables for MXFP4, if the sizes allow it, and for a float type."""
    sizes = (config.hidden_size, config.expert_size)
    quantised = (True,) if all(size % BLOCK == 0 for size in sizes) else ()
    return tuple(_name_table(config, one) for one in (*quantised, False))


def _name_table(config: GptOssConfig, quantised: bool) -> dict[str, Place]:
    count, width, inner = config.num_experts, config.hidden_size, config.expert_size
    layer = "model.layers.{}."
    table = trunk_names(config)
    table[f"{layer}self_attn.sinks"] = Place(parameter="{}.sinks", shape=(config.layers[0].num_heads,))
    table[f"{layer}mlp.router.weight"] = Place(parameter="{}.router.weight", shape=(count, width))
    table[f"{layer}mlp.router.bias"] = Place(parameter="{}.router.bias", shape=(count,))
    for name, parameter, outs, ins in (
        ("gate_up_proj", "gate_up", 2 * inner, width),
        ("down_proj", "down", width, inner),
    ):
        prefix, shape = f"{layer}mlp.experts.{name}", (count, outs, ins)
        weight = f"{{}}.experts.{parameter}.weight"
        if quantised:
            table[f"{prefix}_blocks"] = Place(parameter=weight, shape=shape, format=MXFP4)
        else:
            table[prefix] = Place(parameter=weight, shape=shape, format=TRANSPOSED)
        place = Place(parameter=f"{{}}.experts.{parameter}.bias", shape=(count, outs), is_sum=parameter == "down")
        table[f"{prefix}_bias"] = place
    return table


def gpt_oss_mlp(config: GptOssConfig, layer: int, parameters: Parameters) -> FeedForward:
    """Build the router and experts of a layer."""
    experts = experts_of(config, layer, parameters, ClampedGate(config.swiglu_alpha, config.swiglu_limit))
    return MixtureOfExperts(router(config, layer, parameters), experts)
