"""Nemotron-H (NVIDIA): blocks of one layer each, a Mamba-2 mixer, attention without positions, an
MLP, or experts.

An MLP or expert squares what is above 0, without a gate. Experts may work on a projection of the
input to a smaller width. Sources: arXiv:2504.03624, the models' cards and transformers.

Parameters of a block: ``{}.mixer_norm``; those of ``models.mamba2``; ``{}.qkv``, ``{}.out``;
``{}.up``, ``{}.down``; ``{}.router``, ``{}.experts.up``, ``{}.experts.down``, ``{}.shared.up``,
``{}.shared.down``, ``{}.into``, ``{}.out_of``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from quire.base.errors import Unsupported
from quire.contracts.experts import Routing
from quire.contracts.model import Block
from quire.contracts.ranks import Share
from quire.models.blocks import BareBlock, FeedForward, FeedForwardBlock
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig, Parameters, linear
from quire.models.geometry import MAX_LAYERS, DecoderGeometry, read_activation, read_geometry
from quire.models.hybrid_decoder import LayerIds, attention_of, norm_of
from quire.models.mamba2 import MambaConfig, check_heads, mamba_names, mamba_of, read_shape
from quire.models.mixture import (
    MixtureConfig,
    correction_place,
    experts_of,
    pass_over_training,
    read_num_experts,
    router,
)
from quire.models.tensor_names import IgnorableNames, map_names
from quire.nn.experts import LatentMixture, MixtureOfExperts, SharedExpert, SquaredGate
from quire.nn.mlp import SquaredMLP
from quire.weights.places import NameTable, Place

KINDS: Mapping[str, str] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "M": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
"""Kinds of blocks by their names in ``layers_block_type`` and in ``hybrid_override_pattern``."""
OLDER: Mapping[str, str] = {
    "layer_types": "layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}
"""Other names of fields, which win, as in transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NemotronConfig(MambaConfig):
    """A hybrid in which blocks that neither attend nor recur have an MLP or experts."""

    mixtures: tuple[int, ...]
    """The blocks with experts, ascending."""
    latent_size: int | None = None
    """Width in which experts work; None: the model's."""

    OWN: ClassVar[tuple[str, ...]] = (*MambaConfig.OWN, "mixtures", "latent_size")

    def divided(self, share: Share) -> Self:
        """See ``DecoderConfig``. Blocks without experts have an MLP also in a mixture."""
        inner = share.part(self.trunk.intermediate_size, "elements of intermediate_size")
        own = MambaConfig.divided(self, share)
        return replace(own, trunk=replace(own.trunk, intermediate_size=inner))


def read_nemotron_h_config(values: Mapping[str, Any], max_model_len: int | None = None) -> NemotronConfig:
    """Read ``NemotronHForCausalLM`` with the defaults of transformers for missing sizes. Time steps
    have the lower bound ``time_step_min``, as there."""
    values = dict(values)
    for old, new in OLDER.items():
        if values.get(old) is not None:
            values[new] = values.pop(old)
    fields = ConfigFields(values)
    kinds = _kinds(fields)
    # transformers counts the listed blocks.
    values["num_hidden_layers"] = len(kinds)
    geometry = read_geometry(
        fields, "NemotronHForCausalLM", "nemotron_h", max_model_len, kv_heads_required=True, head_dim=128
    )
    fields.expect("sliding_window")
    fields.expect("mlp_hidden_act", "relu2")
    fields.expect("tie_word_embeddings", False)
    least = fields.number("time_step_min", 1e-3)
    shape = read_shape(fields, ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"), (least, None))
    check_heads(fields, shape, shape.width, "mamba_num_heads", "n_groups")
    bias = fields.flag("use_bias", False)
    _pass_over(fields)
    config = NemotronConfig(
        trunk=_trunk(fields, geometry, kinds),
        num_blocks=len(kinds),
        attending=_blocks(kinds, "attention"),
        recurrent=_blocks(kinds, "mamba"),
        mixtures=_blocks(kinds, "moe"),
        latent_size=fields.count("moe_latent_size") if fields.get("moe_latent_size") is not None else None,
        mixer=shape,
        activation=read_activation(fields, "mamba_hidden_act"),
        project_bias=bias,
        out_bias=bias,
        conv_bias=fields.flag("use_conv_bias", True),
        norm_groups=shape.num_groups,
    )
    refuse_unsupported(fields)
    return config


def _kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Return the kind of each block, one of the values of ``KINDS``."""
    name = "layers_block_type" if fields.get("layers_block_type") is not None else "hybrid_override_pattern"
    given = fields.get(name)
    if not isinstance(given, list | str) or not 1 <= len(given) <= MAX_LAYERS:
        raise fields.error("layers_block_type", f"a list of kinds of blocks, of {list(KINDS)}")
    for block, kind in enumerate(given):
        if not isinstance(kind, str) or kind not in KINDS:
            raise Unsupported(f"{fields.source}: {name}[{block}] is {kind!r}; expected one of {list(KINDS)}")
    return tuple(KINDS[kind] for kind in given)


def _blocks(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(block for block, one in enumerate(kinds) if one == kind)


def _trunk(fields: ConfigFields, geometry: DecoderGeometry, kinds: Sequence[str]) -> DecoderConfig:
    common: dict[str, Any] = {
        **geometry.common(),
        "intermediate_size": geometry.intermediate_size if "mlp" in kinds else 0,
        "layers": geometry.layers((None,) * len(kinds)),
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "mlp_bias": fields.flag("mlp_bias", False),
    }
    names = ("moe_intermediate_size", "moe_shared_expert_intermediate_size", "norm_topk_prob", "n_group", "topk_group")
    if "moe" not in kinds:
        for name in (*names, "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"):
            fields.get(name)
        return DecoderConfig(**common)
    num_experts, top_k = read_num_experts(fields, "n_routed_experts", "num_experts")
    groups = fields.count("n_group", 1)
    if num_experts % groups or num_experts // groups < 2:
        raise fields.error("n_group", f"a divisor of n_routed_experts ({num_experts}) that leaves two or more in each")
    return MixtureConfig(
        **common,
        num_experts=num_experts,
        expert_size=fields.count("moe_intermediate_size", 7688),
        routing=Routing(
            top_k=top_k,
            scores="sigmoid",
            renormalise=fields.flag("norm_topk_prob", True),
            groups=groups,
            top_groups=fields.count("topk_group", 1),
            group_score="best_two",
            scale=fields.number("routed_scaling_factor", 1.0),
            in_float32=True,
        ),
        shared_size=fields.count("moe_shared_expert_intermediate_size", 7688),
        shared_gate=False,
        correction=True,
    )


def _pass_over(fields: ConfigFields) -> None:
    """Skip fields that transformers does not compute with: how weights are drawn, caches, drafts,
    prompts' chunks."""
    pass_over_training(fields)
    for name in (
        *("chunk_size", "mamba_chunk_size", "expand", "mamba_expand", "time_step_max", "time_step_floor"),
        *("time_step_limit", "time_step_rank", "rescale_prenorm_residual", "residual_in_fp32", "num_logits_to_keep"),
        "mamba_proj_bias",
        *("mamba_ssm_cache_dtype", "use_mamba_kernels", "n_shared_experts", "moe_shared_expert_overlap"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        *("hybrid_override_pattern", "rope_theta", "partial_rotary_factor"),
    ):
        fields.get(name)


def nemotron_h_spellings(config: NemotronConfig) -> Sequence[NameTable]:
    """Return the published names, and those with transformers 5's trunk and stacked experts."""
    return tuple(_table(config, trunk, stacked) for trunk in ("backbone", "model") for stacked in (False, True))


def nemotron_h_ignorable_names(config: NemotronConfig) -> IgnorableNames:
    """Return the names of tensors that draft tokens."""
    return IgnorableNames(names=frozenset(), prefixes=("mtp.",))


def _table(config: NemotronConfig, trunk: str, stacked: bool) -> dict[str, Place]:
    width, vocab_size = config.trunk.hidden_size, config.trunk.vocab_size
    table = {
        f"{trunk}.embeddings.weight": Place(parameter="embed.weight", shape=(vocab_size, width)),
        f"{trunk}.norm_f.weight": Place(parameter="norm.weight", shape=(width,)),
        f"{trunk}.layers.{{}}.norm.weight": Place(parameter="{}.mixer_norm.weight", shape=(width,)),
        "lm_head.weight": Place(parameter="head.weight", shape=(vocab_size, width)),
    }
    for block in range(config.num_blocks):
        prefix = f"{trunk}.layers.{block}.mixer"
        if block in config.recurrent:
            table |= mamba_names(config, prefix, str(block))
        elif block in config.attending:
            table |= _attention_names(config, prefix, block)
        elif block in config.mixtures:
            table |= _mixture_names(config, prefix, block, stacked)
        else:
            inner = config.trunk.intermediate_size
            table |= _mlp_names(prefix, str(block), width, inner, config.trunk.mlp_bias)
    return table


def _attention_names(config: NemotronConfig, prefix: str, block: int) -> dict[str, Place]:
    spec, width = config.trunk.layers[block], config.trunk.hidden_size
    rows = tuple(heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
    table = map_names(f"{prefix}.", ("q_proj", "k_proj", "v_proj"), f"{block}.qkv", rows, width)
    return table | map_names(f"{prefix}.", ("o_proj",), f"{block}.out", (width,), spec.num_heads * spec.value_dim)


def _mlp_names(prefix: str, ours: str, width: int, inner: int, bias: bool) -> dict[str, Place]:
    table = map_names(f"{prefix}.", ("up_proj",), f"{ours}.up", (inner,), width, bias)
    return table | map_names(f"{prefix}.", ("down_proj",), f"{ours}.down", (width,), inner, bias, is_sum=True)


def _mixture_names(config: NemotronConfig, prefix: str, block: int, stacked: bool) -> dict[str, Place]:
    trunk = config.trunk
    assert isinstance(trunk, MixtureConfig)
    count, width, inner = trunk.num_experts, trunk.hidden_size, trunk.expert_size
    latent = config.latent_size or width
    shared = f"{prefix}.shared_experts"
    table = {
        f"{prefix}.gate.weight": Place(parameter=f"{block}.router.weight", shape=(count, width)),
        f"{prefix}.gate.e_score_correction_bias": correction_place(block, count),
        **_mlp_names(shared, f"{block}.shared", width, trunk.shared_size, trunk.mlp_bias),
    }
    for name, rows, columns in (("up", inner, latent), ("down", latent, inner)):
        parameter = f"{block}.experts.{name}.weight"
        if stacked:
            table[f"{prefix}.experts.{name}_proj"] = Place(parameter=parameter, shape=(count, rows, columns))
            continue
        for expert in range(count):
            place = Place(parameter=parameter, shape=(rows, columns), row=rows * expert)
            table[f"{prefix}.experts.{expert}.{name}_proj.weight"] = place
    if config.latent_size is not None:
        into, out_of, bias = f"{block}.into", f"{block}.out_of", trunk.mlp_bias
        table |= map_names(f"{prefix}.", ("fc1_latent_proj",), into, (latent,), width, bias)
        table |= map_names(f"{prefix}.", ("fc2_latent_proj",), out_of, (width,), latent, bias, is_sum=True)
    return table


def nemotron_h_block(config: NemotronConfig, block: int, ids: LayerIds, parameters: Parameters) -> Block:
    norm = norm_of(config, parameters, f"{block}.mixer_norm")
    if ids.recurrent is not None:
        return BareBlock(norm, mamba_of(config, block, ids.recurrent, parameters))
    if ids.attention is not None:
        return BareBlock(norm, attention_of(config, block, ids.attention, parameters))
    return FeedForwardBlock(norm, _feed_forward(config, block, parameters))


def _feed_forward(config: NemotronConfig, block: int, parameters: Parameters) -> FeedForward:
    trunk = config.trunk
    if block not in config.mixtures:
        return SquaredMLP(*(linear(parameters, f"{block}.{name}") for name in ("up", "down")))
    assert isinstance(trunk, MixtureConfig)
    experts = experts_of(trunk, block, parameters, SquaredGate(), up=("up", 1), width=config.latent_size)
    shared = SharedExpert(SquaredMLP(*(linear(parameters, f"{block}.shared.{name}") for name in ("up", "down"))))
    if config.latent_size is None:
        return MixtureOfExperts(router(trunk, block, parameters), experts, shared)
    into, out_of = (linear(parameters, f"{block}.{name}") for name in ("into", "out_of"))
    return LatentMixture(router(trunk, block, parameters), experts, shared, into=into, out_of=out_of)
