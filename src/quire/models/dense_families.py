"""Dense families that vary Llama's decoder by a few fields: Phi-3, OLMo 2, Cohere2, SmolLM3,
StableLM, Granite 3, GLM and GLM-4. Each follows transformers; a reader names its other sources.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from quire.base.errors import Unsupported
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.decoder import DecoderConfig
from quire.models.geometry import (
    DecoderGeometry,
    expect_layer_types,
    read_geometry,
    read_layer_types,
    read_window,
    windows_of,
)
from quire.models.rope_config import read_rope
from quire.models.tensor_names import PRE_NORMS, Names, ignorable_names, name_table
from quire.weights.places import NameTable

PHI3_NAMES = Names(norms=PRE_NORMS, qkv=("qkv_proj",), gate_up=("gate_up_proj",))
PHI3_SCALINGS = ("default", "longrope")
OLMO2_NAMES = Names(
    norms={"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
)
COHERE2_NAMES = Names(norms={"attention_norm": "input_layernorm"})
STABLELM_NAMES = Names(norms=PRE_NORMS, head_norms=("q_layernorm", "k_layernorm"))
GLM_NAMES = Names(norms=PRE_NORMS, gate_up=("gate_up_proj",))
CHATGLM_PARTS = (
    ("model.embed_tokens.", "transformer.embedding.word_embeddings."),
    ("model.layers.", "transformer.encoder.layers."),
    ("model.norm.", "transformer.encoder.final_layernorm."),
    ("lm_head.", "transformer.output_layer."),
    (".self_attn.qkv_proj.", ".self_attention.query_key_value."),
    (".self_attn.o_proj.", ".self_attention.dense."),
    (".mlp.gate_up_proj.", ".mlp.dense_h_to_4h."),
    (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
)
"""Parts of names in files of GLM, and in those of ChatGLM, which stores q, k and v in one."""
GLM4_NAMES = Names(
    norms={
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
    gate_up=("gate_up_proj",),
)


@config_reader
def read_phi3_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Phi3ForCausalLM``, Phi-3 and Phi-4 (mini and the small ones; arXiv:2404.14219): fused
    projections, longrope, no biases; a window, if there is one, in all layers."""
    geometry = read_geometry(fields, "Phi3ForCausalLM", "phi3", max_model_len)
    window = read_window(fields, None)
    expect_layer_types(fields, (window is not None,) * geometry.num_layers)
    rope = read_rope(fields, geometry, partial_default=1.0)
    if rope.scaling not in PHI3_SCALINGS:
        raise Unsupported(
            f"{fields.source}: RoPE scaling {rope.scaling!r}, which this architecture does not have; "
            f"expected one of {list(PHI3_SCALINGS)}"
        )
    return DecoderConfig(**geometry.usual(fields, 1e-5, qkv_bias=False), layers=geometry.layers(rope, window))


@config_reader
def read_olmo2_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Olmo2ForCausalLM`` (arXiv:2501.00656): norms after attention and MLP; one norm over
    all query heads, one over all key heads; biases of q, k, v and o by ``attention_bias``."""
    geometry = read_geometry(fields, "Olmo2ForCausalLM", "olmo2", max_model_len)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    layers = geometry.layers(read_rope(fields, geometry))
    return DecoderConfig(**geometry.usual(fields, 1e-5), layers=layers, placement="post", head_norms="width")


@config_reader
def read_cohere2_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Cohere2ForCausalLM`` (Command R7B, Command A; arXiv:2504.00698): attention and MLP in
    parallel after one LayerNorm. Each ``sliding_window_pattern``-th layer (4) has neither a window
    nor RoPE, the others have both."""
    # Published configurations hold these fields, equal in all models of the family.
    fields.expect("position_embedding_type", "rope_gptj", "rope", "rotary")
    fields.expect("order_of_interleaved_layers", "local_attn_first")
    fields.expect("use_parallel_block", True)
    fields.expect("use_gated_activation", True)
    geometry = read_geometry(fields, "Cohere2ForCausalLM", "cohere2", max_model_len)
    windowed = read_layer_types(fields, geometry.num_layers) or geometry.all_but_every(
        fields.count("sliding_window_pattern", 4)
    )
    rope = read_rope(fields, geometry, interleaved=True)
    return DecoderConfig(
        **geometry.usual(fields, 1e-5, eps_field="layer_norm_eps", tied=True),
        layers=geometry.layers(
            [rope if one else None for one in windowed], windows_of(fields, windowed, read_window(fields, 4096))
        ),
        norm="layer",
        placement="parallel",
        logit_scale=fields.number("logit_scale", 0.0625),
    )


@config_reader
def read_smollm3_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``SmolLM3ForCausalLM`` (the model's card; arXiv:2501.18795). Layers with a 1 in
    ``no_rope_layers`` rotate; by default all but every ``no_rope_layer_interval``-th (4) do. With
    ``use_sliding_window`` the layers of ``layer_types``, or those without RoPE, have a window."""
    geometry = read_geometry(fields, "SmolLM3ForCausalLM", "smollm3", max_model_len, kv_heads_required=True)
    rotates = _read_rotates(fields, geometry)
    window = read_window(fields, None)
    if not fields.flag("use_sliding_window", False):
        window = None
    windowed = read_layer_types(fields, geometry.num_layers) or [window is not None and not one for one in rotates]
    rope = read_rope(fields, geometry, theta_default=2_000_000.0)
    return DecoderConfig(
        **geometry.usual(fields, tied=True),
        layers=geometry.layers([rope if one else None for one in rotates], windows_of(fields, windowed, window)),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _read_rotates(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[bool, ...]:
    interval = fields.count("no_rope_layer_interval", 4)
    given = fields.get("no_rope_layers")
    if given is None:
        return geometry.all_but_every(interval)
    if not isinstance(given, list) or len(given) < geometry.num_layers or any(one not in (0, 1) for one in given):
        raise fields.error("no_rope_layers", f"a list of at least {geometry.num_layers} numbers 0 or 1")
    return tuple(bool(one) for one in given[: geometry.num_layers])


@config_reader
def read_stablelm_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``StableLmForCausalLM``, StableLM 2 and 3B (arXiv:2402.17834): LayerNorm; a quarter of
    each head rotates; biases of q, k and v by ``use_qkv_bias``. Some have norms of heads and
    parallel residuals."""
    geometry = read_geometry(fields, "StableLmForCausalLM", "stablelm", max_model_len, kv_heads_required=True)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    bias = fields.flag("use_qkv_bias", False)
    return DecoderConfig(
        **geometry.usual(fields, 1e-5, eps_field="layer_norm_eps", qkv_bias=bias),
        layers=geometry.layers(read_rope(fields, geometry, partial_default=0.25)),
        norm="layer",
        norm_bias=True,
        placement="parallel" if fields.flag("use_parallel_residual", False) else "pre",
        head_norms="each" if fields.flag("qk_layernorm", False) else "none",
    )


@config_reader
def read_granite_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``GraniteForCausalLM``, Granite 3 (the model's card; arXiv:2408.13359): multipliers on
    embeddings, scores, residual branches and logits. A missing one is 1, also for the scores."""
    geometry = read_geometry(fields, "GraniteForCausalLM", "granite", max_model_len)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    return DecoderConfig(
        **geometry.usual(fields),
        layers=geometry.layers(read_rope(fields, geometry), sm_scale=fields.number("attention_multiplier", 1.0)),
        mlp_bias=fields.flag("mlp_bias", False),
        **granite_multipliers(fields),
    )


def granite_multipliers(fields: ConfigFields) -> dict[str, Any]:
    """Read Granite's multipliers, except the multiplier of the scores."""
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
    }


@config_reader
def read_glm4_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``Glm4ForCausalLM``, GLM-4 0414 (arXiv:2406.12793): sandwich norms; half of each head
    rotates, in neighbouring pairs. q, k and v have biases unless ``attention_bias`` is false; o has
    none. A missing ``head_dim`` is 128."""
    geometry = read_geometry(fields, "Glm4ForCausalLM", "glm4", max_model_len, kv_heads_required=True, head_dim=128)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    return DecoderConfig(
        **geometry.usual(fields, 1.5625e-7, qkv_bias=fields.flag("attention_bias", True)),
        layers=geometry.layers(read_rope(fields, geometry, partial_default=0.5, interleaved=True)),
        placement="sandwich",
    )


@config_reader
def read_glm_config(fields: ConfigFields, max_model_len: int | None) -> DecoderConfig:
    """Read ``GlmForCausalLM``, ChatGLM 2 and 3 and GLM-4 9B (arXiv:2406.12793): as GLM-4 0414, but
    with norms before attention and MLP only."""
    geometry = read_geometry(fields, "GlmForCausalLM", "glm", max_model_len, kv_heads_required=True, head_dim=128)
    expect_layer_types(fields, (False,) * geometry.num_layers)
    return DecoderConfig(
        **geometry.usual(fields, 1.5625e-7, qkv_bias=fields.flag("attention_bias", True)),
        layers=geometry.layers(read_rope(fields, geometry, partial_default=0.5, interleaved=True)),
    )


def glm_spellings(config: DecoderConfig) -> tuple[NameTable, ...]:
    """Return the name tables of GLM's files, of those with q, k and v in one tensor (GGUF), and of
    ChatGLM's, which have them so, too."""
    joined = name_table(config, replace(GLM_NAMES, qkv=("qkv_proj",)))
    chatglm = {_chatglm_name(name): place for name, place in joined.items()}
    return name_table(config, GLM_NAMES), joined, chatglm


def _chatglm_name(name: str) -> str:
    for old, new in CHATGLM_PARTS:
        name = name.replace(old, new)
    return name


@dataclass(frozen=True, slots=True)
class GlmIgnorable:
    """Names that files of GLM or ChatGLM may hold unread."""

    names: Container[str]

    def __contains__(self, name: object) -> bool:
        return name in self.names or name == "transformer.rotary_pos_emb.inv_freq"


def glm_ignorable_names(config: DecoderConfig) -> GlmIgnorable:
    """Return the frequencies of RoPE, and the head of a tied model."""
    return GlmIgnorable(ignorable_names(config, GLM_NAMES))
