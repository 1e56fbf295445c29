"""StableLM 2 and StableLM 3B: LayerNorm; a quarter of each head rotates.

Some have norms of heads and parallel residuals. Sources: arXiv:2402.17834 and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import expect_layer_types, read_activation, read_geometry, rope_of
from quire.models.tensor_names import PRE_NORMS, Names

STABLELM_NAMES = Names(norms=PRE_NORMS, head_norms=("q_layernorm", "k_layernorm"))


def read_stablelm_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``StableLmForCausalLM``: biases of q, k and v by ``use_qkv_bias``."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "StableLmForCausalLM", "stablelm", max_model_len, kv_heads_required=True)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    config = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers(rope_of(fields, geometry, partial_default=0.25)),
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        placement="parallel" if fields.flag("use_parallel_residual", False) else "pre",
        head_norms="each" if fields.flag("qk_layernorm", False) else "none",
        activation=read_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=fields.flag("use_qkv_bias", False),
    )
    refuse_unsupported(fields)
    return config
