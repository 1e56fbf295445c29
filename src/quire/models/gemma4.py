"""Gemma 4 (text): layers with full attention have heads of their own size, perhaps K as V; inputs
of layers, shared K and V, and experts beside the MLP, each in some models.

Source: transformers and the models' cards.

Parameters of a block beside those of ``models.gemma_layers``: ``{}.scalar``; with experts
``{}.router``, ``{}.router.scale``, ``{}.router.expert_scale``, ``{}.experts.gate_up``,
``{}.experts.down``, and the norms ``{}.dense_out_norm``, ``{}.experts_norm``,
``{}.experts_out_norm``.

Letters: T tokens, E model width, W width of a row, X experts, K experts of a token, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from quire.contracts.experts import Routing
from quire.contracts.model import Pass
from quire.contracts.ranks import Share
from quire.models.blocks import FeedForward, Mixer
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import AttentionSpec, Parameters, gated_mlp
from quire.models.gemma import scaled_fields
from quire.models.gemma_layers import (
    LayeredConfig,
    LayeredDecoder,
    LayerInput,
    StreamNorm,
    layer_input,
    layered_attention,
    layered_names,
    read_sources,
    rms_norm,
)
from quire.models.geometry import (
    DecoderGeometry,
    read_geometry,
    read_layer_types,
    read_window,
    windows_of,
)
from quire.models.mixture import read_num_experts
from quire.models.rope_config import read_rope
from quire.nn.experts import ActivatedGate, ExpertLinear, Experts, Router
from quire.nn.norm import RMSNorm
from quire.weights.lazy_parameters import late
from quire.weights.places import NameTable, Place

ROPE: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""``rope_parameters`` of transformers, if there are none."""
MIXTURE_NORMS: Mapping[str, str] = {
    "post_feedforward_layernorm_1": "dense_out_norm",
    "pre_feedforward_layernorm_2": "experts_norm",
    "post_feedforward_layernorm_2": "experts_out_norm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma4Config(LayeredConfig):
    """Gemma 4's decoder."""

    num_experts: int = 0
    """0: there are none."""
    expert_size: int = 0
    """F"""
    top_k: int = 0
    """K"""

    def divided(self, share: Share) -> Self:
        """See ``DecoderConfig``."""
        inner = share.part(self.expert_size, "elements of moe_intermediate_size")
        return replace(LayeredConfig.divided(self, share), expert_size=inner)


def read_gemma4_config(values: Mapping[str, Any], max_model_len: int | None = None) -> Gemma4Config:
    """Read ``Gemma4ForCausalLM``; each sixth layer, and always the last one, has no window. The
    sizes of full attention are ``global_head_dim`` (512) and, with ``attention_k_eq_v``,
    ``num_global_key_value_heads``, or those that ``per_layer_config`` gives."""
    values = dict(values)
    values["rope_parameters"] = values.get("rope_parameters") or ROPE
    fields = ConfigFields(values)
    geometry = read_geometry(
        fields, "Gemma4ForCausalLM", "gemma4_text", max_model_len, kv_heads_required=True, head_dim=256
    )
    windowed = read_layer_types(fields, geometry.num_layers) or geometry.all_but_every(6)
    windowed = (*windowed[:-1], False)
    fields.expect("use_bidirectional_attention", "vision")
    shared_kv = fields.flag("attention_k_eq_v", False)
    sources = read_sources(fields, windowed, 0)
    wide = fields.flag("use_double_wide_mlp", False)
    config = Gemma4Config(
        **scaled_fields(fields, geometry),
        layers=_layers(fields, geometry, windowed, shared_kv),
        logit_softcap=fields.optional_number("final_logit_softcapping", None),
        sources=sources,
        inner_sizes=tuple(geometry.intermediate_size * (2 if wide and one is not None else 1) for one in sources),
        input_size=fields.whole("hidden_size_per_layer_input", 256),
        input_vocab=fields.count("vocab_size_per_layer_input", 262_144),
        keys_as_values=tuple(block for block, one in enumerate(windowed) if shared_kv and not one),
        **_mixture(fields),
    )
    refuse_unsupported(fields)
    return config


def _layers(
    fields: ConfigFields, geometry: DecoderGeometry, windowed: Sequence[bool], shared_kv: bool
) -> tuple[AttentionSpec, ...]:
    own = fields.get("per_layer_config")
    if own is None:
        heads = geometry.num_kv_heads
        if shared_kv and fields.get("num_global_key_value_heads") is not None:
            heads = fields.count("num_global_key_value_heads")
        full: Any = {"head_dim": fields.count("global_head_dim", 512), "num_key_value_heads": heads}
        own = {str(layer): full for layer, one in enumerate(windowed) if not one}
    elif not isinstance(own, dict) or not all(isinstance(one, dict) for one in own.values()):
        raise fields.error("per_layer_config", "an object with one for each of some layers")
    windows = windows_of(fields, windowed, read_window(fields, 512))
    found: list[AttentionSpec] = []
    for layer, (one, window) in enumerate(zip(windowed, windows, strict=True)):
        changes = ConfigFields(own.get(str(layer), {}), f"{fields.source}, per_layer_config.{layer}")
        sizes = replace(
            geometry,
            num_layers=1,
            head_dim=changes.count("head_dim", geometry.head_dim),
            num_kv_heads=changes.count("num_key_value_heads", geometry.num_kv_heads),
        )
        if sizes.num_heads % sizes.num_kv_heads:
            raise changes.error("num_key_value_heads", f"a divisor of num_attention_heads ({sizes.num_heads})")
        for name in changes.unread():
            changes.expect(name)
        kind = "sliding_attention" if one else "full_attention"
        found += sizes.layers(read_rope(fields, sizes, layer_type=kind), window, sm_scale=1.0)
    return tuple(found)


def _mixture(fields: ConfigFields) -> dict[str, Any]:
    if not fields.flag("enable_moe_block", False):
        return {}
    top_k = fields.count("top_k_experts")
    counted = ConfigFields({**fields.values, "num_experts_per_tok": top_k}, fields.source)
    num_experts, _ = read_num_experts(counted, "num_experts", "num_local_experts")
    fields.get("num_experts")
    return {"num_experts": num_experts, "expert_size": fields.count("moe_intermediate_size"), "top_k": top_k}


def gemma4_spellings(config: Gemma4Config) -> Sequence[NameTable]:
    table, width, count, inner = layered_names(config), config.hidden_size, config.num_experts, config.expert_size
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {"layer_scalar": ("scalar", (1,))}
    if count:
        sizes |= {
            "router.proj.weight": ("router.weight", (count, width)),
            "router.scale": ("router.scale", (width,)),
            "router.per_expert_scale": ("router.expert_scale", (count,)),
            "experts.gate_up_proj": ("experts.gate_up.weight", (count, 2 * inner, width)),
            "experts.down_proj": ("experts.down.weight", (count, width, inner)),
            **{f"{theirs}.weight": (f"{ours}.weight", (width,)) for theirs, ours in MIXTURE_NORMS.items()},
        }
    for theirs, (ours, shape) in sizes.items():
        parts = (inner, inner) if ours == "experts.gate_up.weight" else ()
        table[f"model.layers.{{}}.{theirs}"] = Place(parameter=f"{{}}.{ours}", shape=shape, parts=parts)
    return (table,)


def gemma4(config: Gemma4Config, parameters: Parameters, values: Mapping[str, Any]) -> LayeredDecoder:
    """Build the model."""
    norm = StreamNorm(rms_norm(config, parameters, "norm"), config.hidden_size)
    blocks = [_block(config, block, parameters) for block in range(config.num_layers)]
    return LayeredDecoder(config, parameters, values, norm, blocks)


def _block(config: Gemma4Config, block: int, parameters: Parameters) -> Gemma4Block:
    def norm(name: str) -> RMSNorm:
        return rms_norm(config, parameters, f"{block}.{name}")

    mlp: FeedForward = gated_mlp(config, block, parameters)
    if config.num_experts:
        mixture = _experts(config, block, parameters)
        mlp = BesideExperts(
            norm("mlp_norm"), mlp, norm("dense_out_norm"), norm("experts_norm"), mixture, norm("experts_out_norm")
        )
    return Gemma4Block(
        norm("attention_norm"),
        layered_attention(config, block, parameters),
        norm("attention_out_norm"),
        None if config.num_experts else norm("mlp_norm"),
        mlp,
        norm("mlp_out_norm"),
        parameters[f"{block}.scalar"],
        layer_input(config, block, parameters) if config.input_size else None,
        config.hidden_size + block * config.input_size,
        config.input_size,
    )


def _experts(config: Gemma4Config, block: int, parameters: Parameters) -> ScaledMixture:
    count, width, inner, name = config.num_experts, config.hidden_size, config.expert_size, f"{block}.experts"
    gate_up, down = (
        ExpertLinear(late(parameters, f"{name}.{part}.weight").view(count, *shape), None, f"{name}.{part}")
        for part, shape in (("gate_up", (2 * inner, width)), ("down", (width, inner)))
    )
    scale_E = parameters[f"{block}.router.scale"]
    return ScaledMixture(
        RMSNorm(torch.ones_like(scale_E), config.norm_eps),
        scale_E,
        Router(parameters[f"{block}.router.weight"], None, Routing(top_k=config.top_k, renormalise=True)),
        parameters[f"{block}.router.expert_scale"].float(),
        Experts(gate_up, down, ActivatedGate(config.activation)),
    )


@dataclass(slots=True, eq=False)
class ScaledMixture:
    """Experts whose router sees a normed and scaled input of its own, and scales their outputs."""

    norm: RMSNorm
    scale_E: Tensor
    router: Router
    expert_scale_X: Tensor
    """float32"""
    experts: Experts

    def __call__(self, x_TE: Tensor, normed_TE: Tensor) -> Tensor:
        """Map the router's and the experts' inputs ``[T, E]`` to a fresh ``[T, E]``."""
        weights_TK, experts_TK = self.router(self.norm(x_TE).mul_(self.scale_E).mul_(x_TE.shape[1] ** -0.5))
        return self.experts(normed_TE, weights_TK * self.expert_scale_X[experts_TK], experts_TK)


@dataclass(slots=True, eq=False)
class BesideExperts:
    """The sum of an MLP and of experts, each between norms of its own."""

    dense_norm: RMSNorm
    dense: FeedForward
    dense_out_norm: RMSNorm
    experts_norm: RMSNorm
    experts: Callable[[Tensor, Tensor], Tensor]
    """A ``ScaledMixture``, or what adds those of ranks."""
    experts_out_norm: RMSNorm

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        dense_TE = self.dense_out_norm(self.dense(self.dense_norm(x_TE)))
        return dense_TE.add_(self.experts_out_norm(self.experts(x_TE, self.experts_norm(x_TE))))


@dataclass(slots=True, eq=False)
class Gemma4Block:
    """``h = x + norm(attention(norm(x)))``, ``h + norm(mlp(norm(h)))``, and what the layer makes of
    its input, over rows of the residual stream and the inputs of all layers."""

    attention_norm: RMSNorm
    attention: Mixer
    attention_out_norm: RMSNorm
    mlp_norm: RMSNorm | None
    """None: the MLP norms by itself."""
    mlp: FeedForward
    mlp_out_norm: RMSNorm
    scalar: Tensor
    """Factor of the residual stream, of one element."""
    input: LayerInput | None
    start: int
    """Column at which the layer's input begins."""
    size: int

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map rows ``[T, W]`` to fresh ones."""
        x_TW, width = x_TE, len(self.attention_norm.weight)
        x_TE = x_TW[:, :width].contiguous()
        h_TE = self.attention_out_norm(self.attention(self.attention_norm(x_TE), pass_)).add_(x_TE)
        h_TE = self.mlp_out_norm(self.mlp(h_TE if self.mlp_norm is None else self.mlp_norm(h_TE))).add_(h_TE)
        if self.input is None:
            return h_TE.mul_(self.scalar)
        h_TE = self.input(h_TE, x_TW.narrow(1, self.start, self.size)).add_(h_TE).mul_(self.scalar)
        return torch.cat((h_TE, x_TW[:, width:]), 1)
