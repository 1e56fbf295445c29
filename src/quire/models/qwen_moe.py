"""Qwen2-MoE (arXiv:2407.10671) and Qwen3-MoE (arXiv:2505.09388): many small experts per layer.

Some or all layers have experts. Qwen2-MoE also has an expert shared by all tokens, which each token
weighs with its own sigmoid. Qwen3-MoE has norms of query and key heads instead. Published
checkpoints have a tensor for each projection of each expert; transformers 5 can also stack them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.contracts.experts import Routing
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.geometry import (
    DecoderGeometry,
    expect_layer_types,
    read_geometry,
    read_layer_types,
    read_window,
    windows_of,
)
from quire.models.mixture import (
    PROJECTIONS,
    MixtureConfig,
    mixture_names,
    pass_over_training,
    read_dense_layers,
    read_num_experts,
)
from quire.models.rope_config import read_rope
from quire.weights.floats import TRANSPOSED
from quire.weights.places import NameTable


@config_reader
def read_qwen2_moe_config(fields: ConfigFields, max_model_len: int | None) -> MixtureConfig:
    """Read ``Qwen2MoeForCausalLM``; q, k and v have biases unless ``qkv_bias`` is false."""
    geometry = read_geometry(fields, "Qwen2MoeForCausalLM", "qwen2_moe", max_model_len, kv_heads_required=True)
    return MixtureConfig(
        **geometry.usual(fields, qkv_bias=fields.flag("qkv_bias", True)),
        **_experts(fields, geometry),
        layers=geometry.layers(read_rope(fields, geometry), _qwen2_windows(fields, geometry)),
        shared_size=fields.count("shared_expert_intermediate_size"),
    )


@config_reader
def read_qwen3_moe_config(fields: ConfigFields, max_model_len: int | None) -> MixtureConfig:
    """Read ``Qwen3MoeForCausalLM``: head norms; biases of q, k, v and o by ``attention_bias``."""
    geometry = read_geometry(fields, "Qwen3MoeForCausalLM", "qwen3_moe", max_model_len, kv_heads_required=True)
    # All layers or none, as in transformers; max_window_layers changes nothing.
    window = _window(fields)
    fields.get("max_window_layers")
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    return MixtureConfig(
        **geometry.usual(fields),
        **_experts(fields, geometry),
        layers=geometry.layers(read_rope(fields, geometry), window),
        head_norms="shared",
    )


def qwen_moe_spellings(config: MixtureConfig) -> tuple[NameTable, ...]:
    """Return name tables for single experts, for stacked ones, and for stacked ones whose inputs
    come before their outputs (Qwen3-VL)."""
    stacked = mixture_names(config)
    swapped = {
        name: replace(place, format=TRANSPOSED) if len(place.shape) == 3 else place for name, place in stacked.items()
    }
    return mixture_names(config, projections=PROJECTIONS), stacked, swapped


def _window(fields: ConfigFields) -> int | None:
    """Read ``sliding_window`` (default 4,096) if ``use_sliding_window``; else skip it."""
    if fields.flag("use_sliding_window", False):
        return read_window(fields, 4096)
    fields.get("sliding_window")
    return None


def _qwen2_windows(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[int | None, ...]:
    """Return windows by ``layer_types``, or of even layers below ``max_window_layers`` (28)."""
    window = _window(fields)
    stop = fields.whole("max_window_layers", 28)
    on = window is not None
    early = tuple(on and layer % 2 == 0 and layer < stop for layer in range(geometry.num_layers))
    return windows_of(fields, read_layer_types(fields, geometry.num_layers) or early, window)


def _experts(fields: ConfigFields, geometry: DecoderGeometry) -> dict[str, Any]:
    """Read the experts; ``norm_topk_prob`` is off and no layer dense by default."""
    num_experts, top_k = read_num_experts(fields, "num_experts", "num_local_experts")
    pass_over_training(fields)
    return {
        "num_experts": num_experts,
        "expert_size": fields.count("moe_intermediate_size"),
        "routing": Routing(top_k=top_k, renormalise=fields.flag("norm_topk_prob", False)),
        "dense_layers": read_dense_layers(fields, geometry.num_layers),
    }
