"""Granite 3: Llama with multipliers on embeddings, attention scores, residual branches and logits.

Sources: the model's card, arXiv:2408.13359 (the parametrisation) and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import expect_layer_types, read_activation, read_geometry, rope_of


def read_granite_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``GraniteForCausalLM``; a missing multiplier is 1, that of the scores too."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "GraniteForCausalLM", "granite", max_model_len)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    bias = fields.flag("attention_bias", False)
    config = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers(rope_of(fields, geometry), sm_scale=fields.number("attention_multiplier", 1.0)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=read_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
    refuse_unsupported(fields)
    return config
