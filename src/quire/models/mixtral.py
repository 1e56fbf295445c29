"""Mixtral (arXiv:2401.04088): Mistral with eight experts in each layer; a token takes two.

Published checkpoints have a tensor for each projection of each expert (``w1``, ``w3``, ``w2``), as
transformers writes them. transformers 5 can also stack them.
"""

from __future__ import annotations

from quire.contracts.experts import Routing
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.geometry import expect_layer_types, read_geometry, read_window, rope_of
from quire.models.mixture import MixtureConfig, mixture_names, pass_over_training, read_num_experts
from quire.weights.places import NameTable


@config_reader
def read_mixtral_config(fields: ConfigFields, max_model_len: int | None) -> MixtureConfig:
    """Read ``MixtralForCausalLM``: no biases; one window for all layers, off by default."""
    geometry = read_geometry(fields, "MixtralForCausalLM", "mixtral", max_model_len, kv_heads_required=True)
    window = read_window(fields, None)
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    num_experts, top_k = read_num_experts(fields, "num_local_experts", "num_experts")
    pass_over_training(fields)
    return MixtureConfig(
        **geometry.usual(fields, 1e-5, qkv_bias=False),
        layers=geometry.layers(rope_of(fields, geometry, theta_default=1_000_000.0), window),
        num_experts=num_experts,
        expert_size=geometry.intermediate_size,
        routing=Routing(top_k=top_k, renormalise=True),
    )


def mixtral_spellings(config: MixtureConfig) -> tuple[NameTable, ...]:
    """Return two name tables: for single experts and for stacked experts."""
    return mixture_names(config, block="block_sparse_moe", projections=("w1", "w3", "w2")), mixture_names(config)
