"""OLMo 2: norms after attention and MLP; one norm over all query heads, one over all key heads.

Sources: arXiv:2501.00656 and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig
from quire.models.geometry import expect_layer_types, read_activation, read_geometry, rope_of
from quire.models.tensor_names import Names

OLMO2_NAMES = Names(
    norms={"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
)


def read_olmo2_config(values: Mapping[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Read ``Olmo2ForCausalLM``: biases of q, k, v and o by ``attention_bias``."""
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "Olmo2ForCausalLM", "olmo2", max_model_len)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    bias = fields.flag("attention_bias", False)
    config = DecoderConfig(
        **geometry.common(),
        layers=geometry.layers(rope_of(fields, geometry)),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        placement="post",
        head_norms="width",
        activation=read_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
    )
    refuse_unsupported(fields)
    return config
