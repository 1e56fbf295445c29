"""Granite 4: Mamba-2 mixers, and attention in a few blocks, mostly without positions.

Each block has an MLP for all tokens, alone or beside experts. Embeddings, scores, residual branches
and logits have multipliers. Source: transformers and the models' cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.contracts.experts import Routing
from quire.models.bamba import read_mamba_mixers
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import AttentionSpec, DecoderConfig
from quire.models.dense_families import granite_multipliers
from quire.models.geometry import DecoderGeometry, read_geometry, read_layer_types
from quire.models.hybrid_decoder import only_attending, respelled
from quire.models.mamba2 import MambaConfig, mamba_names
from quire.models.mixture import MixtureConfig, pass_over_training, read_num_experts
from quire.models.rope_config import read_rope
from quire.models.tensor_names import LLAMA_NAMES, name_table, trunk_names
from quire.weights.places import NameTable, Place

KINDS: Mapping[str, bool] = {"full_attention": True, "attention": True, "linear_attention": False, "mamba": False}
"""Accepted entries of ``layer_types``; True for a block with attention."""
DENSE_NAMES = replace(LLAMA_NAMES, gate_up=("input_linear",), down="output_linear")
MIXTURES: tuple[tuple[str, str, str], ...] = (
    ("router.layer.weight", "input_linear.weight", "output_linear.weight"),
    ("router.weight", "experts.gate_up_proj", "experts.down_proj"),
)
"""Names of router and stacked experts in ``block_sparse_moe``: published ones, transformers 5's."""


def read_granite_moe_hybrid_config(values: Mapping[str, Any], max_model_len: int | None = None) -> MambaConfig:
    """Read ``GraniteMoeHybridForCausalLM``; a missing multiplier is 1, also for the scores.

    ``intermediate_size`` is the experts' width, ``shared_intermediate_size`` the MLP's.
    """
    if values.get("layer_types") is None:
        values = {**values, "layer_types": values.get("layers_block_type")}
    fields = ConfigFields(values)
    geometry = read_geometry(fields, "GraniteMoeHybridForCausalLM", "granitemoehybrid", max_model_len)
    attends = read_layer_types(fields, geometry.num_layers, KINDS) or (False,) * geometry.num_layers
    pass_over_training(fields)
    config = read_mamba_mixers(fields, _trunk(fields, geometry), attends)
    refuse_unsupported(fields)
    return config


def _trunk(fields: ConfigFields, geometry: DecoderGeometry) -> DecoderConfig:
    shared = fields.count("shared_intermediate_size", 1024)
    common: dict[str, Any] = {
        **geometry.usual(fields),
        **granite_multipliers(fields),
        "intermediate_size": shared,
        "layers": _layers(fields, geometry),
    }
    if fields.whole("num_local_experts", 8) == 0:
        return DecoderConfig(**common)
    num_experts, top_k = read_num_experts(fields, "num_local_experts", "num_experts")
    return MixtureConfig(
        **common,
        num_experts=num_experts,
        expert_size=geometry.intermediate_size,
        routing=Routing(top_k=top_k, softmax="chosen"),
        shared_size=shared,
        shared_gate=False,
    )


def _layers(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[AttentionSpec, ...]:
    """Return the layers, with RoPE only if ``position_embedding_type`` asks for it."""
    scale = fields.number("attention_multiplier", 1.0)
    fields.expect("position_embedding_type", "rope", "nope")
    if fields.get("position_embedding_type") == "rope":
        return geometry.layers(read_rope(fields, geometry), sm_scale=scale)
    return geometry.layers((None,) * geometry.num_layers, sm_scale=scale)


def granite_moe_hybrid_spellings(config: MambaConfig) -> Sequence[NameTable]:
    """Return the published names and transformers 5's; one table if there are no experts."""
    trunk = config.trunk
    mixers: dict[str, Place] = {}
    for block in config.recurrent:
        mixers |= mamba_names(config, f"model.layers.{block}.mamba", str(block))
    if not isinstance(trunk, MixtureConfig):
        table = respelled(name_table(trunk, DENSE_NAMES), {".mlp.": ".shared_mlp."})
        return ({**only_attending(config, table), **mixers},)
    table = only_attending(config, trunk_names(trunk))
    return tuple({**table, **_mixture_names(trunk, names), **mixers} for names in MIXTURES)


def _mixture_names(trunk: MixtureConfig, names: tuple[str, str, str]) -> dict[str, Place]:
    count, width, inner, shared = trunk.num_experts, trunk.hidden_size, trunk.expert_size, trunk.shared_size
    router, gate_up, down = (f"block_sparse_moe.{name}" for name in names)
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {
        router: ("router", (count, width)),
        gate_up: ("experts.gate_up", (count, 2 * inner, width)),
        down: ("experts.down", (count, width, inner)),
        "shared_mlp.input_linear.weight": ("shared.gate_up", (2 * shared, width)),
        "shared_mlp.output_linear.weight": ("shared.down", (width, shared)),
    }
    parts = {"experts.gate_up": (inner, inner), "shared.gate_up": (shared, shared)}
    return {
        f"model.layers.{{}}.{theirs}": Place(parameter=f"{{}}.{ours}.weight", shape=shape, parts=parts.get(ours, ()))
        for theirs, (ours, shape) in sizes.items()
    }
