"""Cohere2 (Command R7B, Command A): attention and MLP in parallel after one LayerNorm.

Three layers have a window and RoPE, the fourth neither. Sources: arXiv:2504.00698, transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import read_activation, read_geometry, read_layer_types, read_window, rope_of, windows_of
from quire.models.tensor_names import Names

COHERE2_NAMES = Names(norms={"attention_norm": "input_layernorm"})


def read_cohere2_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``Cohere2ForCausalLM``; each ``sliding_window_pattern``-th layer (4) has no window."""
    fields = ConfigFields(values)
    # Published configurations hold these fields, equal in all models of the family.
    fields.expect("position_embedding_type", "rope_gptj", "rope", "rotary")
    fields.expect("order_of_interleaved_layers", "local_attn_first")
    fields.expect("use_parallel_block", True)
    fields.expect("use_gated_activation", True)
    geometry = read_geometry(fields, "Cohere2ForCausalLM", "cohere2", max_model_len)
    pattern = fields.count("sliding_window_pattern", 4)
    windowed = read_layer_types(fields, geometry.num_layers)
    if windowed is None:
        windowed = tuple((layer + 1) % pattern != 0 for layer in range(geometry.num_layers))
    rope = rope_of(fields, geometry, interleaved=True)
    bias = fields.flag("attention_bias", False)
    config = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers(
            [rope if one else None for one in windowed], windows_of(fields, windowed, read_window(fields, 4096))
        ),
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        placement="parallel",
        activation=read_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        logit_scale=fields.number("logit_scale", 0.0625),
    )
    refuse_unsupported(fields)
    return config
