"""Phi-3 and Phi-4 (mini and the small ones): Llama with fused projections and longrope.

Sources: arXiv:2404.14219 and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import Unsupported
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import expect_layer_types, read_activation, read_geometry, read_window, rope_of
from quire.models.tensor_names import PRE_NORMS, Names

PHI3_NAMES = Names(norms=PRE_NORMS, qkv=("qkv_proj",), gate_up=("gate_up_proj",))

PHI3_SCALINGS = ("default", "longrope")


def read_phi3_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``Phi3ForCausalLM``: no biases; a window, if there is one, in all layers."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Phi3ForCausalLM", "phi3", max_model_len)
    window = read_window(fields, None)
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    rope = rope_of(fields, geometry, partial_default=1.0)
    if rope.scaling not in PHI3_SCALINGS:
        raise Unsupported(
            f"{fields.source}: RoPE scaling {rope.scaling!r}, which this architecture does not have; "
            f"expected one of {list(PHI3_SCALINGS)}"
        )
    config = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers(rope, window),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        activation=read_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )
    refuse_unsupported(fields)
    return config
