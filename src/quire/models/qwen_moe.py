"""Qwen2-MoE (arXiv:2407.10671) and Qwen3-MoE (arXiv:2505.09388): many small experts per layer.

Some or all layers have experts. Qwen2-MoE also has an expert shared by all tokens, which each token
weighs with its own sigmoid. Qwen3-MoE has norms of query and key heads instead. Published
checkpoints have a tensor for each projection of each expert; transformers 5 can also stack them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.checkpoint import NameTable
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.geometry import (
    DecoderGeometry,
    expect_layer_types,
    read_activation,
    read_geometry,
    read_layer_types,
    read_window,
    rope_of,
    windows_of,
)
from quire.models.mixture import (
    MixtureConfig,
    mixture_names,
    pass_over_training,
    read_layer_numbers,
    read_num_experts,
)
from quire.ops.experts import Routing


def read_qwen2_moe_config(values: Mapping[str, Any], max_model_len: int | None = None) -> MixtureConfig:
    """Read ``Qwen2MoeForCausalLM``; q, k and v have biases unless ``qkv_bias`` is false."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Qwen2MoeForCausalLM", "qwen2_moe", max_model_len, kv_heads_required=True)
    config = MixtureConfig(
        **_common(fields, geometry),
        layers=geometry.layers(rope_of(fields, geometry), _qwen2_windows(fields, geometry)),
        qkv_bias=fields.flag("qkv_bias", True),
        shared_size=fields.count("shared_expert_intermediate_size"),
    )
    refuse_unsupported(fields)
    return config


def read_qwen3_moe_config(values: Mapping[str, Any], max_model_len: int | None = None) -> MixtureConfig:
    """Read ``Qwen3MoeForCausalLM``: head norms; biases of q, k, v and o by ``attention_bias``."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Qwen3MoeForCausalLM", "qwen3_moe", max_model_len, kv_heads_required=True)
    # All layers or none, as in transformers; max_window_layers changes nothing.
    window = _window(fields)
    fields.get("max_window_layers")
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    bias = fields.flag("attention_bias", False)
    config = MixtureConfig(
        **_common(fields, geometry),
        layers=geometry.layers(rope_of(fields, geometry), window),
        qkv_bias=bias,
        out_bias=bias,
        head_norms="shared",
    )
    refuse_unsupported(fields)
    return config


def qwen_moe_spellings(config: MixtureConfig) -> tuple[NameTable, ...]:
    """Return one name table for single experts and one for stacked experts."""
    return mixture_names(config, projections=("gate_proj", "up_proj", "down_proj")), mixture_names(config)


def _window(fields: ConfigFields) -> int | None:
    """Read ``sliding_window`` (default 4,096) if ``use_sliding_window``; else pass over it."""
    if fields.flag("use_sliding_window", False):
        return read_window(fields, 4096)
    fields.get("sliding_window")
    return None


def _qwen2_windows(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[int | None, ...]:
    """Return windows by ``layer_types``, or of even layers below ``max_window_layers`` (28)."""
    window = _window(fields)
    stop = fields.whole("max_window_layers", 28)
    windowed = read_layer_types(fields, geometry.num_layers)
    if windowed is None:
        on = window is not None
        windowed = tuple(on and layer % 2 == 0 and layer < stop for layer in range(geometry.num_layers))
    return windows_of(fields, windowed, window)


def _common(fields: ConfigFields, geometry: DecoderGeometry) -> dict[str, Any]:
    """Return the common fields; ``norm_topk_prob`` is off and no layer dense by default."""
    num_experts, top_k = read_num_experts(fields, "num_experts", "num_local_experts")
    pass_over_training(fields)
    step = fields.count("decoder_sparse_step", 1)
    dense = read_layer_numbers(fields, "mlp_only_layers", geometry.num_layers)
    layers = range(geometry.num_layers)
    return {
        **geometry.common(),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": read_activation(fields),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "num_experts": num_experts,
        "expert_size": fields.count("moe_intermediate_size"),
        "routing": Routing(top_k=top_k, renormalise=fields.flag("norm_topk_prob", False)),
        "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    }
