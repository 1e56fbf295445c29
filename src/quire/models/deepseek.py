"""DeepSeek-V2 and V3, GLM-4-MoE-Lite and Youtu: decoders with multi-head latent attention.

All but Youtu have many small experts beside one or a few shared ones. V2 routes by a softmax, and
with some ``topk_method`` only to the best groups of experts. V3 and GLM-4-MoE-Lite route by
sigmoids plus a correction, which balances the experts' load and affects only the choice. Layers
after the last one draft tokens; only a head reads them (``models.mtp``). Sources:
arXiv:2405.04434, arXiv:2412.19437.

A layer's parameters beyond ``models.tensor_names``: ``{}.qkv.weight`` (rows of queries or their
latent, then the rows to store), ``{}.latent_norm.weight``, ``{}.kv_up.weight``; for a latent of
queries ``{}.query_norm.weight``, ``{}.query_up.weight``; with ``attention_bias``
``{}.query_down.bias`` and ``{}.kv_down.bias``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from quire.contracts.experts import Routing
from quire.contracts.layers import FullAttention, LatentAttention
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.decoder import Decoder, DecoderConfig, MlpBuilder, Parameters, linear
from quire.models.geometry import MAX_LAYERS, DecoderGeometry, read_geometry
from quire.models.heads import DraftLayer
from quire.models.mixture import PROJECTIONS, MixtureConfig, mixture_names, pass_over_training, read_num_experts
from quire.models.rope_config import read_rope, yarn_magnitude
from quire.models.tensor_names import (
    IgnorableNames,
    ignorable_names,
    map_names,
    mlp_names,
    places_of,
    trunk_names,
)
from quire.nn.latent import MultiHeadLatentAttention, QueryUp
from quire.nn.linear import Linear
from quire.nn.norm import RMSNorm
from quire.weights.places import NameTable, Place

LATENT_NORM_EPS = 1e-6
"""Epsilon of the latents' norms; the authors' code and transformers ignore ``rms_norm_eps``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Sizes of latent attention in elements. The layers' specs hold those of expanded heads."""

    query_rank: int
    """Width of the queries' latent; 0 without one."""
    rank: int
    """Width of ``c_kv``."""
    nope_dim: int
    """Columns of query and key heads without position."""
    rope_dim: int
    """Columns of query and key heads with position; all heads share one ``k_pe`` of this width."""

    @property
    def row_dim(self) -> int:
        """Columns of a stored row."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig(DecoderConfig):
    """A decoder with latent attention. ``layers`` describe expanded heads, ``latent_specs`` the
    stored rows. ``qkv_bias``: biases of the maps from the model width into the latents."""

    latent: LatentSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentMixtureConfig(MixtureConfig):
    """A decoder with latent attention and experts."""

    latent: LatentSizes
    draft_layers: int = 0
    """Number of drafting layers that the checkpoint may hold after the last layer. They do not
    affect the logits."""

    def canonical(self) -> str:
        """Return JSON as ``DecoderConfig`` does, without the drafting layers."""
        return MixtureConfig.canonical(replace(self, draft_layers=0))


AnyLatentConfig: TypeAlias = LatentConfig | LatentMixtureConfig
L = TypeVar("L", bound=AnyLatentConfig)


def latent_specs(config: AnyLatentConfig) -> tuple[LatentAttention, ...]:
    """Return each layer's stored state: one row per token, which begins with the value."""
    sizes = config.latent
    return tuple(
        LatentAttention(
            num_heads=spec.num_heads,
            row_dim=sizes.row_dim,
            value_dim=sizes.rank,
            rope=spec.rope,
            sm_scale=spec.scale,
        )
        for spec in config.layers
    )


class LatentDecoder(Decoder[L]):
    """A ``Decoder`` with latent attention in all layers."""

    def __init__(self, config: L, parameters: Parameters, values: Mapping[str, Any], mlp: MlpBuilder[L]) -> None:
        super().__init__(config, parameters, values, mlp)
        for layer, (block, spec) in enumerate(zip(self._decoder_blocks, config.layers, strict=True)):
            assert isinstance(spec, FullAttention)
            block.attention = _attention(config, layer, spec, parameters)
        self.layer_specs = latent_specs(config)


def _attention(
    config: AnyLatentConfig, layer: int, spec: FullAttention, parameters: Parameters
) -> MultiHeadLatentAttention:
    query_up = None
    if config.latent.query_rank:
        norm = RMSNorm(parameters[f"{layer}.query_norm.weight"], LATENT_NORM_EPS)
        query_up = QueryUp(norm, linear(parameters, f"{layer}.query_up"))
    return MultiHeadLatentAttention(
        layer,
        spec,
        Linear(parameters[f"{layer}.qkv.weight"], _bias(config, layer, parameters), f"{layer}.qkv"),
        linear(parameters, f"{layer}.out"),
        latent_norm=RMSNorm(parameters[f"{layer}.latent_norm.weight"], LATENT_NORM_EPS),
        kv_up_CR=parameters[f"{layer}.kv_up.weight"],
        nope_dim=config.latent.nope_dim,
        query_up=query_up,
    )


def _bias(config: AnyLatentConfig, layer: int, parameters: Parameters) -> Tensor | None:
    """Join the biases of queries and stored rows; queries without a latent have zeros."""
    if not config.qkv_bias:
        return None
    rows = parameters[f"{layer}.kv_down.bias"]
    query = parameters.get(f"{layer}.query_down.bias")
    if query is None:
        query = rows.new_zeros(len(parameters[f"{layer}.qkv.weight"]) - len(rows))
    return torch.cat((query, rows))


# Names.


def latent_spellings(config: LatentConfig) -> Sequence[NameTable]:
    """Return the name table of a dense decoder."""
    return ({**_trunk(config), **mlp_names(config)},)


def latent_mixture_spellings(config: LatentMixtureConfig) -> Sequence[NameTable]:
    """Return two name tables: for single experts and for stacked experts."""
    trunk = _trunk(config)
    return tuple(
        mixture_names(config, projections=projections, shared="shared_experts", trunk=trunk)
        for projections in (PROJECTIONS, None)
    )


def _trunk(config: AnyLatentConfig) -> dict[str, Place]:
    """Return all names but the MLPs': Llama's, with other queries, keys and values."""
    sizes, spec, width = config.latent, config.layers[0], config.hidden_size
    query_rows, rank = spec.num_heads * spec.head_dim, sizes.query_rank
    up_rows = spec.num_heads * (sizes.nope_dim + spec.value_dim)
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "kv_a_layernorm.weight": ("latent_norm.weight", (sizes.rank,)),
        "kv_b_proj.weight": ("kv_up.weight", (up_rows, sizes.rank)),
    }
    if config.qkv_bias:
        parts["kv_a_proj_with_mqa.bias"] = "kv_down.bias", (sizes.row_dim,)
    if rank:
        parts["q_a_layernorm.weight"] = "query_norm.weight", (rank,)
        parts["q_b_proj.weight"] = "query_up.weight", (query_rows, rank)
    if rank and config.qkv_bias:
        parts["q_a_proj.bias"] = "query_down.bias", (rank,)
    table = {name: place for name, place in trunk_names(config).items() if not place.parameter.startswith("{}.qkv.")}
    prefix, names = "model.layers.{}.self_attn.", ("q_a_proj" if rank else "q_proj", "kv_a_proj_with_mqa")
    table |= map_names(prefix, names, "{}.qkv", (rank or query_rows, sizes.row_dim), width)
    return table | places_of(parts, prefix, "{}.")


def latent_mixture_ignorable_names(config: LatentMixtureConfig) -> IgnorableNames:
    """Add to the usual names those of drafting layers and of transformers' empty shared experts."""
    usual = ignorable_names(config)
    last = config.num_layers
    drafts = tuple(f"model.layers.{layer}." for layer in range(last, last + config.draft_layers))
    empty: set[str] = set()
    if not config.shared_size:
        empty |= {
            f"model.layers.{layer}.mlp.shared_experts.{part}.weight" for layer in range(last) for part in PROJECTIONS
        }
    return IgnorableNames(names=usual.names | empty, prefixes=usual.prefixes + drafts)


def latent_draft_layer(config: LatentMixtureConfig) -> DraftLayer | None:
    """Return the first layer behind the last one: a layer with experts."""
    if not config.draft_layers:
        return None
    prefix = f"model.layers.{config.num_layers}."
    return DraftLayer(
        config=replace(config, layers=config.layers[:1], dense_layers=(), draft_layers=0),
        names={
            "model.layers.0.": prefix,
            "model.norm.": f"{prefix}shared_head.norm.",
            "model.embed_tokens.": f"{prefix}embed_tokens.",
            "lm_head.": f"{prefix}shared_head.head.",
        },
        prefix=prefix,
        embedding_norm=f"{prefix}enorm.weight",
        state_norm=f"{prefix}hnorm.weight",
        project=f"{prefix}eh_proj.weight",
    )


# Configurations.


@config_reader
def read_deepseek_v2_config(fields: ConfigFields, max_model_len: int | None) -> LatentMixtureConfig:
    """Read ``DeepseekV2ForCausalLM``; experts keep their softmax weights without renormalising."""
    geometry, sizes = _read_sizes(fields, "DeepseekV2ForCausalLM", "deepseek_v2", max_model_len)
    fields.expect("rope_interleave", True)
    fields.expect("scoring_func", "softmax")
    fields.expect("norm_topk_prob", False)  # the authors' code and transformers disagree about its meaning
    fields.expect("topk_method", "greedy", "group_limited_greedy")
    num_experts, top_k = read_num_experts(fields, "n_routed_experts", "num_experts")
    groups = {}
    if fields.get("topk_method") == "group_limited_greedy":
        groups = _read_groups(fields, num_experts, top_k, least=1)
    routing = Routing(top_k=top_k, scale=fields.number("routed_scaling_factor", 1.0), in_float32=True, **groups)
    return _mixture(fields, geometry, sizes, num_experts, routing, _dense(fields, geometry, 0))


@config_reader
def read_deepseek_v3_config(fields: ConfigFields, max_model_len: int | None) -> LatentMixtureConfig:
    """Read ``DeepseekV3ForCausalLM``: sigmoids, groups by their best two experts, a correction."""
    geometry, sizes = _read_sizes(fields, "DeepseekV3ForCausalLM", "deepseek_v3", max_model_len)
    dense = _dense(fields, geometry, 3)
    return _corrected_mixture(fields, geometry, sizes, dense, scale=2.5)


@config_reader
def read_glm4_moe_lite_config(fields: ConfigFields, max_model_len: int | None) -> LatentMixtureConfig:
    """Read ``Glm4MoeLiteForCausalLM``, DeepSeek-V3 with ``mlp_layer_types`` (first layer dense)."""
    geometry, sizes = _read_sizes(fields, "Glm4MoeLiteForCausalLM", "glm4_moe_lite", max_model_len)
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (geometry.num_layers - 1)
    right = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not right or len(kinds) != geometry.num_layers:
        raise fields.error("mlp_layer_types", f"a list of {geometry.num_layers} strings, each 'dense' or 'sparse'")
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if fields.present("first_k_dense_replace") and _dense(fields, geometry, len(dense)) != dense:
        raise fields.error("first_k_dense_replace", f"the number of the dense layers, which are {list(dense)}")
    return _corrected_mixture(fields, geometry, sizes, dense, scale=1.8, eps=1e-5)


@config_reader
def read_youtu_config(fields: ConfigFields, max_model_len: int | None) -> LatentConfig:
    """Read ``YoutuForCausalLM``: latent attention, plain MLPs, tied embedding by default."""
    geometry, sizes = _read_sizes(fields, "YoutuForCausalLM", "youtu", max_model_len)
    return LatentConfig(**_common(fields, geometry, sizes, tied=True, eps=1e-6))


def _read_sizes(
    fields: ConfigFields, architecture: str, model_type: str, max_model_len: int | None
) -> tuple[DecoderGeometry, LatentSizes]:
    """Read the sizes; the geometry's ``head_dim`` counts the columns that RoPE rotates."""
    if not fields.present("q_lora_rank"):
        raise fields.error("q_lora_rank", "the width of the queries' latent, or null for none")
    sizes = LatentSizes(
        query_rank=0 if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
    )
    if fields.get("qk_head_dim") not in (None, sizes.nope_dim + sizes.rope_dim):
        raise fields.error("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim ({sizes.nope_dim + sizes.rope_dim})")
    geometry = read_geometry(fields, architecture, model_type, max_model_len, exact_head_dim=sizes.rope_dim)
    if geometry.num_kv_heads != geometry.num_heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads ({geometry.num_heads}), or null")
    return geometry, sizes


def _common(
    fields: ConfigFields, geometry: DecoderGeometry, sizes: LatentSizes, *, tied: bool, eps: float
) -> dict[str, Any]:
    """Return the fields of any decoder with latent attention; ``tied`` and ``eps`` are defaults."""
    rope = read_rope(fields, geometry, interleaved=fields.flag("rope_interleave", True))
    head_dim = sizes.nope_dim + sizes.rope_dim
    spec = FullAttention(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_heads,
        head_dim=head_dim,
        value_dim=fields.count("v_head_dim"),
        rope=rope,
        sm_scale=head_dim**-0.5 * _magnitude(fields, rope.factor) ** 2,
    )
    layers = (spec,) * geometry.num_layers
    return {**geometry.usual(fields, eps, tied=tied), "layers": layers, "latent": sizes}


def _magnitude(fields: ConfigFields, factor: float) -> float:
    """Return YaRN's factor of queries and of keys in all columns (``mscale_all_dim``)."""
    for name in ("rope_parameters", "rope_scaling"):
        weight = fields.mapping(name).get("mscale_all_dim")
        if weight:
            return yarn_magnitude(factor, weight)
    return 1.0


def _dense(fields: ConfigFields, geometry: DecoderGeometry, default: int) -> tuple[int, ...]:
    """Return the numbers of the first ``first_k_dense_replace`` layers."""
    fields.expect("moe_layer_freq", 1)
    return tuple(range(min(fields.whole("first_k_dense_replace", default), geometry.num_layers)))


def _read_groups(fields: ConfigFields, num_experts: int, top_k: int, *, least: int) -> dict[str, Any]:
    """Read the groups of experts; each must have ``least`` experts or more."""
    groups, top_groups = fields.count("n_group"), fields.count("topk_group")
    if num_experts % groups or num_experts // groups < least:
        raise fields.error("n_group", f"a divisor of n_routed_experts ({num_experts}), groups of {least} or more")
    if top_groups > groups:
        raise fields.error("topk_group", f"at most n_group ({groups})")
    if top_k > top_groups * (num_experts // groups):
        raise fields.error("topk_group", f"groups with num_experts_per_tok ({top_k}) experts or more in all")
    return {"groups": groups, "top_groups": top_groups}


def _corrected_mixture(
    fields: ConfigFields,
    geometry: DecoderGeometry,
    sizes: LatentSizes,
    dense: tuple[int, ...],
    *,
    scale: float,
    eps: float = 1e-6,
) -> LatentMixtureConfig:
    """Return a mixture with DeepSeek-V3's routing."""
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    num_experts, top_k = read_num_experts(fields, "n_routed_experts", "num_local_experts")
    routing = Routing(
        top_k=top_k,
        scores="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
        group_score="best_two",
        scale=fields.number("routed_scaling_factor", scale),
        in_float32=True,
        **_read_groups(fields, num_experts, top_k, least=2),
    )
    return _mixture(fields, geometry, sizes, num_experts, routing, dense, correction=True, eps=eps)


def _mixture(
    fields: ConfigFields,
    geometry: DecoderGeometry,
    sizes: LatentSizes,
    num_experts: int,
    routing: Routing,
    dense: tuple[int, ...],
    *,
    correction: bool = False,
    eps: float = 1e-6,
) -> LatentMixtureConfig:
    pass_over_training(fields)
    drafts = fields.whole("num_nextn_predict_layers", 0, most=MAX_LAYERS)
    expert_size = fields.count("moe_intermediate_size")
    return LatentMixtureConfig(
        **_common(fields, geometry, sizes, tied=False, eps=eps),
        num_experts=num_experts,
        expert_size=expert_size,
        routing=routing,
        dense_layers=dense,
        shared_size=expert_size * fields.whole("n_shared_experts", 0),
        shared_gate=False,
        correction=correction,
        draft_layers=drafts,
    )
