"""Mixtral (arXiv:2401.04088) and Phi-3.5-MoE (arXiv:2404.14219): eight or sixteen experts in each
layer, of which a token takes two.

Mixtral is Mistral with experts. Phi-3.5-MoE chooses by SparseMixer. It has LayerNorm; maps of
attention and the head have biases by two switches. Its RoPE is ``longrope`` with magnitudes of its
own for short and for long contexts. Beyond the short one the authors' code takes the long factors,
as here; transformers 5 takes the short ones there.

Published checkpoints have a tensor for each projection of each expert (``w1``, ``w3``, ``w2``), as
transformers writes them. transformers 5 can also stack them.
"""

from __future__ import annotations

from quire.contracts.experts import Routing
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.geometry import DecoderGeometry, expect_layer_types, read_geometry, read_window
from quire.models.mixture import MixtureConfig, mixture_names, pass_over_training, read_num_experts
from quire.models.rope_config import read_rope
from quire.weights.places import NameTable


@config_reader
def read_mixtral_config(fields: ConfigFields, max_model_len: int | None) -> MixtureConfig:
    """Read ``MixtralForCausalLM``: no biases; one window for all layers, off by default."""
    geometry = read_geometry(fields, "MixtralForCausalLM", "mixtral", max_model_len, kv_heads_required=True)
    window, num_experts, top_k = _window_and_experts(fields, geometry)
    pass_over_training(fields)
    return MixtureConfig(
        **geometry.usual(fields, 1e-5, qkv_bias=False),
        layers=geometry.layers(read_rope(fields, geometry, theta_default=1_000_000.0), window),
        num_experts=num_experts,
        expert_size=geometry.intermediate_size,
        routing=Routing(top_k=top_k, renormalise=True),
    )


@config_reader
def read_phimoe_config(fields: ConfigFields, max_model_len: int | None) -> MixtureConfig:
    """Read ``PhimoeForCausalLM``: one window for all layers, off by default."""
    geometry = read_geometry(fields, "PhimoeForCausalLM", "phimoe", max_model_len, kv_heads_required=True)
    window, num_experts, top_k = _window_and_experts(fields, geometry)
    if top_k != 2:
        raise fields.error("num_experts_per_tok", "2, which SparseMixer chooses")
    noise = 0.0 if fields.get("router_jitter_noise") == 0 else fields.number("router_jitter_noise", 0.01)
    pass_over_training(fields)
    fields.get("input_jitter_noise")
    rope = read_rope(fields, geometry, theta_default=1_000_000.0, magnitudes=True)
    return MixtureConfig(
        **geometry.usual(fields, 1e-5),
        layers=geometry.layers(rope, window),
        norm="layer",
        norm_bias=True,
        head_bias=fields.flag("lm_head_bias", False),
        num_experts=num_experts,
        expert_size=geometry.intermediate_size,
        routing=Routing(top_k=2, reach=2 * noise),
    )


def _window_and_experts(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[int | None, int, int]:
    """Read the window of all layers, and the numbers of experts per layer and token."""
    window = read_window(fields, None)
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    return window, *read_num_experts(fields, "num_local_experts", "num_experts")


def mixtral_spellings(config: MixtureConfig) -> tuple[NameTable, ...]:
    """Return two name tables: for single experts and for stacked experts."""
    return mixture_names(config, block="block_sparse_moe", projections=("w1", "w3", "w2")), mixture_names(config)


def phimoe_spellings(config: MixtureConfig) -> tuple[NameTable, ...]:
    """Return the name tables of Mixtral, with another name of the router beside stacked experts."""
    single, stacked = mixtral_spellings(config)
    return single, {name.replace(".mlp.gate.", ".mlp.router."): place for name, place in stacked.items()}
