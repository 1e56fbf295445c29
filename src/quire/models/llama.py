"""Llama 2 and 3, Mistral, Ministral 3, Qwen2, Qwen3: pre-norm blocks, RoPE over grouped heads,
SwiGLU.

They differ in biases, windows, norms of query and key heads (Qwen3), and defaults of missing
fields. Sources: the models' reports (arXiv:2302.13971, 2310.06825, 2407.10671, 2505.09388) and
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.errors import Unsupported
from quire.models.config_fields import ConfigFields, config_reader, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import (
    DecoderGeometry,
    expect_layer_types,
    read_geometry,
    read_layer_types,
    read_window,
    windows_of,
)
from quire.models.rope_config import read_rope
from quire.nn.attention import QueryGrowth

MINISTRAL3_ROPE: Mapping[str, Any] = {
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""``rope_parameters`` of transformers, if there are none."""
MINISTRAL3_OWN = ("llama_4_scaling_beta", "max_position_embeddings")
"""Entries of ``rope_parameters`` that do not rotate."""


@config_reader
def read_llama_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``LlamaForCausalLM``: biases by ``attention_bias`` (q, k, v and o) and ``mlp_bias``."""
    geometry = read_geometry(fields, "LlamaForCausalLM", "llama", max_model_len)
    window = read_window(fields, None)
    if window is not None and window < geometry.max_position:
        raise Unsupported(
            f"{fields.source}: sliding_window is {window}, which this architecture does not have; expected null or "
            f"a window at least as long as max_position_embeddings ({geometry.max_position})"
        )
    expect_layer_types(fields, (False,) * geometry.num_layers)
    return DecoderConfig(
        **geometry.usual(fields),
        layers=geometry.layers(read_rope(fields, geometry)),
        mlp_bias=fields.flag("mlp_bias", False),
    )


@config_reader
def read_mistral_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``MistralForCausalLM``: no biases; ``sliding_window`` 4,096 by default."""
    geometry = read_geometry(fields, "MistralForCausalLM", "mistral", max_model_len, kv_heads_required=True)
    window = read_window(fields, 4096)
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    layers = geometry.layers(read_rope(fields, geometry), window)
    return DecoderConfig(**geometry.usual(fields, qkv_bias=False), layers=layers)


def read_ministral3_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``Ministral3ForCausalLM``: Mistral with YaRN and no window by default. Among its
    ``rope_parameters`` is ``llama_4_scaling_beta``, by which queries grow after each
    ``original_max_position_embeddings`` tokens."""
    name = "rope_scaling" if values.get("rope_scaling") and not values.get("rope_parameters") else "rope_parameters"
    given = ConfigFields(values).mapping(name) or MINISTRAL3_ROPE
    rope, growth = ConfigFields(given, f"config.json, {name}"), None
    if rope.get("llama_4_scaling_beta") not in (None, 0):
        growth = QueryGrowth(
            rate=rope.number("llama_4_scaling_beta"), length=rope.count("original_max_position_embeddings")
        )
    fields = ConfigFields({**values, name: {key: one for key, one in given.items() if key not in MINISTRAL3_OWN}})
    geometry = read_geometry(
        fields, "Ministral3ForCausalLM", "ministral3", max_model_len, kv_heads_required=True, head_dim=128
    )
    window = read_window(fields, None)
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    layers = geometry.layers(read_rope(fields, geometry, theta_default=1_000_000.0), window)
    config = DecoderConfig(**geometry.usual(fields, 1e-5, qkv_bias=False), layers=layers, query_growth=growth)
    refuse_unsupported(fields)
    return config


@config_reader
def read_qwen2_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Qwen2ForCausalLM``: q, k and v have biases, o none, for any ``attention_bias``."""
    fields.get("attention_bias")
    geometry = read_geometry(fields, "Qwen2ForCausalLM", "qwen2", max_model_len, kv_heads_required=True)
    layers = geometry.layers(read_rope(fields, geometry), qwen_windows(fields, geometry))
    return DecoderConfig(**geometry.usual(fields, qkv_bias=True), layers=layers)


@config_reader
def read_qwen3_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Qwen3ForCausalLM``: head norms, ``attention_bias``, a default ``head_dim`` of 128."""
    geometry = read_geometry(fields, "Qwen3ForCausalLM", "qwen3", max_model_len, kv_heads_required=True, head_dim=128)
    layers = geometry.layers(read_rope(fields, geometry), qwen_windows(fields, geometry))
    return DecoderConfig(**geometry.usual(fields), layers=layers, head_norms="shared")


def qwen_windows(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[int | None, ...]:
    """Return the windows of a Qwen family: none unless ``use_sliding_window``. They belong to the
    layers of ``layer_types``, or to all layers from ``max_window_layers`` on (default 28)."""
    window = read_window(fields, 4096)
    first = fields.whole("max_window_layers", 28)
    if not fields.flag("use_sliding_window", False):
        window = None
    later = tuple(window is not None and layer >= first for layer in range(geometry.num_layers))
    windowed = read_layer_types(fields, geometry.num_layers) or later
    return windows_of(fields, windowed, window)
