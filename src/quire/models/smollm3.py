"""SmolLM3: Llama with some layers without RoPE (NoPE).

Sources: the model's card, arXiv:2501.18795 (alternating RoPE and NoPE) and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import (
    DecoderGeometry,
    read_activation,
    read_geometry,
    read_layer_types,
    read_window,
    rope_of,
    windows_of,
)


def read_smollm3_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``SmolLM3ForCausalLM``. Layers with a 1 in ``no_rope_layers`` rotate; by default all but
    every ``no_rope_layer_interval``-th (4) do. With ``use_sliding_window`` the layers of
    ``layer_types``, or those without RoPE, have a window."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "SmolLM3ForCausalLM", "smollm3", max_model_len, kv_heads_required=True)
    rotates = _read_rotates(fields, geometry)
    window = read_window(fields, None)
    if not fields.flag("use_sliding_window", False):
        window = None
    windowed = read_layer_types(fields, geometry.num_layers)
    if windowed is None:
        windowed = tuple(window is not None and not one for one in rotates)
    rope = rope_of(fields, geometry, theta_default=2_000_000.0)
    bias = fields.flag("attention_bias", False)
    config = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers([rope if one else None for one in rotates], windows_of(fields, windowed, window)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=read_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    refuse_unsupported(fields)
    return config


def _read_rotates(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[bool, ...]:
    interval = fields.count("no_rope_layer_interval", 4)
    given = fields.get("no_rope_layers")
    if given is None:
        return tuple((layer + 1) % interval != 0 for layer in range(geometry.num_layers))
    if not isinstance(given, list) or len(given) < geometry.num_layers or any(one not in (0, 1) for one in given):
        raise fields.error("no_rope_layers", f"a list of at least {geometry.num_layers} numbers 0 or 1")
    return tuple(bool(one) for one in given[: geometry.num_layers])
