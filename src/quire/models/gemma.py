"""Gemma 2 and Gemma 3 (text): sandwich norms, and full attention that alternates with windows.

Norm weights are stored as their difference to 1. Embeddings are scaled by the root of the width.
Gemma 2 caps attention scores and logits. Gemma 3 normalises query and key heads instead, and has a
RoPE base for each kind of layer. Sources: arXiv:2408.00118, arXiv:2503.19786 and transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from quire.models.config_fields import ConfigFields, config_reader, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import (
    DecoderGeometry,
    read_activation,
    read_geometry,
    read_layer_types,
    read_window,
    ropes_of,
    windows_of,
)
from quire.models.rope_config import read_rope
from quire.models.tensor_names import Names
from quire.models.text_parts import TEXT_TYPES, text_fields

GEMMA_NAMES = Names(
    norms={
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)

GEMMA3_NAMES = replace(
    GEMMA_NAMES,
    trunk="language_model.model.",
    head="language_model.lm_head",
    others=("vision_tower.", "multi_modal_projector."),
)
"""Names in a checkpoint that also reads images."""


@config_reader
def read_gemma2_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Gemma2ForCausalLM``; every other layer has a window, beginning with the first."""
    geometry = read_geometry(fields, "Gemma2ForCausalLM", "gemma2", max_model_len, kv_heads_required=True, head_dim=256)
    windowed = read_layer_types(fields, geometry.num_layers) or geometry.every_other()
    return DecoderConfig(
        **_common(fields, geometry),
        layers=geometry.layers(
            read_rope(fields, geometry),
            windows_of(fields, windowed, read_window(fields, 4096)),
            sm_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            softcap=fields.optional_number("attn_logit_softcapping", 50.0),
        ),
        logit_softcap=fields.optional_number("final_logit_softcapping", 30.0),
    )


@config_reader
def read_gemma3_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Gemma3ForCausalLM``; each ``sliding_window_pattern``-th layer (6) has no window."""
    return _read_gemma3(fields, "Gemma3ForCausalLM", max_model_len)


@config_reader
def read_gemma3_with_vision_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``text_config`` of ``Gemma3ForConditionalGeneration``. The image encoder is not loaded;
    its outputs can come as embeddings."""
    architecture = "Gemma3ForConditionalGeneration"
    text = text_fields(fields, "gemma3", architecture, TEXT_TYPES["gemma3_text"].defaults, tied=True)
    config = _read_gemma3(text, architecture, max_model_len)
    refuse_unsupported(text)
    return config


def _read_gemma3(fields: ConfigFields, architecture: str, max_model_len: int | None) -> DecoderConfig:
    geometry = read_geometry(fields, architecture, "gemma3_text", max_model_len, kv_heads_required=True, head_dim=256)
    pattern = fields.count("sliding_window_pattern", 6)
    windowed = read_layer_types(fields, geometry.num_layers) or geometry.all_but_every(pattern)
    ropes = ropes_of(fields, geometry, windowed)
    return DecoderConfig(
        **_common(fields, geometry),
        layers=geometry.layers(
            ropes,
            windows_of(fields, windowed, read_window(fields, 4096)),
            sm_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        ),
        head_norms="shared",
        logit_softcap=fields.optional_number("final_logit_softcapping", None),
    )


def scaled_fields(fields: ConfigFields, geometry: DecoderGeometry) -> dict[str, Any]:
    """Read the fields that all of Gemma's decoders share."""
    return {
        **geometry.common(),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
        "embedding_scale": math.sqrt(geometry.hidden_size),
        "round_embedding_scale": True,
    }


def _common(fields: ConfigFields, geometry: DecoderGeometry) -> dict[str, Any]:
    shared = scaled_fields(fields, geometry)
    # transformers reads only the newer of both names; a contradicting one must be a mistake.
    if fields.get("hidden_act") is not None:
        fields.expect("hidden_act", fields.get("hidden_activation") or "gelu_pytorch_tanh")
    bias = fields.flag("attention_bias", False)
    return {**shared, "norm": "offset_rms", "placement": "sandwich", "qkv_bias": bias, "out_bias": bias}
