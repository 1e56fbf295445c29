"""GLM-4 (0414): sandwich norms; half of each head rotates, in neighbouring pairs.

Sources: arXiv:2406.12793 and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import expect_layer_types, read_activation, read_geometry, rope_of
from quire.models.tensor_names import Names

GLM4_NAMES = Names(
    norms={
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
    gate_up=("gate_up_proj",),
)


def read_glm4_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``Glm4ForCausalLM``. q, k and v have biases unless ``attention_bias`` is false; o has
    none. A missing ``head_dim`` is 128."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Glm4ForCausalLM", "glm4", max_model_len, kv_heads_required=True, head_dim=128)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    config = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers(rope_of(fields, geometry, partial_default=0.5, interleaved=True)),
        norm_eps=fields.number("rms_norm_eps", 1.5625e-7),
        placement="sandwich",
        activation=read_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=fields.flag("attention_bias", True),
    )
    refuse_unsupported(fields)
    return config
