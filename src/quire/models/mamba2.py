"""Mamba-2 (arXiv:2405.21060): blocks of one mixer each; and code for all Mamba-2 mixers.

A mixer's parameters in block ``{}``: ``{}.mixer.project``, ``{}.mixer.conv``, ``{}.mixer.out``
(``.weight``, perhaps ``.bias``), ``{}.mixer.norm.weight``, ``{}.mixer.step_bias``,
``{}.mixer.log_a``, ``{}.mixer.skip``.

Letters: T tokens, E model width, Z columns of a mixer's projection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from quire.contracts.ranks import Share
from quire.contracts.rows import ActivationName
from quire.models.blocks import BareBlock
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.decoder import DecoderConfig, Parameters, linear
from quire.models.geometry import MAX_LAYERS, read_activation
from quire.models.hybrid_decoder import HybridConfig, LayerIds, norm_of, read_taps
from quire.models.tensor_names import IgnorableNames, map_names, places_of
from quire.nn.mamba import Mamba2Mixer, Mamba2Shape
from quire.nn.norm import GatedRMSNorm
from quire.ops.rows import ACTIVATIONS
from quire.weights.places import NameTable, Place

UNBOUNDED = 1 << 20
"""Longest sequence in tokens of a model without positions and without a configured length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig(HybridConfig):
    mixer: Mamba2Shape
    activation: ActivationName
    """The activation after the convolution."""
    project_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    gated_norm: bool = True
    """Whether a mixer's output is normed together with its gate; otherwise it is only gated."""
    gate_first: bool = True
    """Whether the gate comes before that norm."""
    norm_groups: int = 1
    """Groups of channels, each normed by itself."""

    def divided(self, share: Share) -> Self:
        """See ``DecoderConfig``."""
        own = HybridConfig.divided(self, share)
        return replace(own, norm_groups=share.part_or_one(self.norm_groups, "groups of the mixers' norms"))

    OWN: ClassVar[tuple[str, ...]] = (
        "activation",
        "project_bias",
        "out_bias",
        "conv_bias",
        "gated_norm",
        "gate_first",
        "norm_groups",
    )


@config_reader
def read_mamba2_config(fields: ConfigFields, max_model_len: int | None) -> MambaConfig:
    """Read ``Mamba2ForCausalLM`` with the defaults of transformers for missing sizes."""
    fields.expect_model_type("mamba2", "Mamba2ForCausalLM")
    hidden_size, num_blocks = fields.count("hidden_size"), fields.count("num_hidden_layers", most=MAX_LAYERS)
    shape = read_shape(fields, ("num_heads", "head_dim", "state_size"), read_step_limit(fields))
    check_heads(fields, shape, int(fields.number("expand", 2) * hidden_size), "num_heads", "n_groups")
    # These decide how weights are drawn before training, and how a long prompt is cut.
    for name in ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"):
        fields.get(name)
    fields.get("chunk_size")
    bias = fields.flag("use_bias", False)
    activation = read_activation(fields)
    return MambaConfig(
        trunk=DecoderConfig(
            architecture="Mamba2ForCausalLM",
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=0,
            layers=(),
            max_position=fields.count("max_position_embeddings", UNBOUNDED),
            max_model_len=max_model_len,
            norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
        ),
        num_blocks=num_blocks,
        attending=(),
        recurrent=tuple(range(num_blocks)),
        mixer=shape,
        wide_residual=fields.flag("residual_in_fp32", True),
        activation=activation,
        project_bias=bias,
        out_bias=bias,
        conv_bias=fields.flag("use_conv_bias", True),
        norm_groups=shape.num_groups,
    )


def mamba2_spellings(config: MambaConfig) -> Sequence[NameTable]:
    """Return transformers' names, and the same with the embedding's older name."""
    width, vocab_size = config.trunk.hidden_size, config.trunk.vocab_size
    table = {
        "backbone.norm_f.weight": Place(parameter="norm.weight", shape=(width,)),
        "backbone.layers.{}.norm.weight": Place(parameter="{}.mixer_norm.weight", shape=(width,)),
        **mamba_names(config, "backbone.layers.{}.mixer", "{}"),
    }
    if not config.trunk.tie_embeddings:
        table["lm_head.weight"] = Place(parameter="head.weight", shape=(vocab_size, width))
    place = Place(parameter="embed.weight", shape=(vocab_size, width))
    return tuple({**table, f"backbone.{name}.weight": place} for name in ("embeddings", "embedding"))


def mamba2_ignorable_names(config: MambaConfig) -> IgnorableNames:
    """Return the head's name if the head is tied: a file may hold it a second time."""
    return IgnorableNames(names=frozenset({"lm_head.weight"} if config.trunk.tie_embeddings else ()))


def bare_block(config: MambaConfig, block: int, ids: LayerIds, parameters: Parameters) -> BareBlock:
    """Build a block of a mixer alone."""
    assert ids.recurrent is not None
    mixer = mamba_of(config, block, ids.recurrent, parameters)
    return BareBlock(norm_of(config, parameters, f"{block}.mixer_norm"), mixer)


def read_shape(fields: ConfigFields, names: tuple[str, str, str], steps: tuple[float, float | None]) -> Mamba2Shape:
    """Read a mixer of Mamba-2 or Nemotron-H, which have their own ``names`` of the heads, their
    size and that of the state. ``steps``: the bounds of time steps."""
    heads, head_dim, state_size = names
    return Mamba2Shape(
        num_heads=fields.count(heads, 128),
        head_dim=fields.count(head_dim, 64),
        num_groups=fields.count("n_groups", 8),
        state_size=fields.count(state_size, 128),
        taps=read_taps(fields, "conv_kernel", 4),
        least_step=steps[0],
        greatest_step=steps[1],
    )


def read_step_limit(fields: ConfigFields) -> tuple[float, float | None]:
    """Read the bounds of ``time_step_limit``; missing or null: none. transformers 5 writes infinity
    as an object, ``{"__float__": "Infinity"}``."""
    value = fields.get("time_step_limit")
    if value is None:
        return 0.0, None
    error = fields.error("time_step_limit", "two numbers of 0 or more in a list, the smaller one first")
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise error
    found = [math.inf if one == {"__float__": "Infinity"} else one for one in value]
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in found):
        raise error
    least, greatest = (float(one) for one in found)
    if not 0 <= least <= greatest or math.isinf(least):
        raise error
    return least, None if math.isinf(greatest) else greatest


def check_heads(fields: ConfigFields, shape: Mamba2Shape, width: int, heads: str, groups: str) -> None:
    """Raise ``CheckpointError`` unless heads fill the mixer's width and groups divide the heads.

    ``heads`` and ``groups`` are the family's names of both fields.
    """
    if shape.width != width:
        raise fields.error(heads, f"{width} (the mixer's width) divided by the size of a head ({shape.head_dim})")
    if shape.num_heads % shape.num_groups:
        raise fields.error(groups, f"a divisor of {heads} ({shape.num_heads})")


def mamba_names(config: MambaConfig, prefix: str, block: str) -> dict[str, Place]:
    """Return the names of a mixer below ``prefix``; ``block`` is its number, or ``{}`` for all."""
    shape, width, mixer = config.mixer, config.trunk.hidden_size, f"{block}.mixer"
    projected = (shape.width, *shape.convolved, shape.num_heads)
    table = map_names(f"{prefix}.", ("in_proj",), f"{mixer}.project", projected, width, config.project_bias)
    table |= map_names(f"{prefix}.", ("out_proj",), f"{mixer}.out", (width,), shape.width, config.out_bias, is_sum=True)
    convs: dict[str, tuple[int, ...]] = {"weight": (shape.channels, 1, shape.taps)}
    if config.conv_bias:
        convs["bias"] = (shape.channels,)
    for part, sizes in convs.items():
        place = Place(parameter=f"{mixer}.conv.{part}", shape=sizes, parts=shape.convolved)
        table[f"{prefix}.conv1d.{part}"] = place
    others = {"dt_bias": ("step_bias", (shape.num_heads,)), "A_log": ("log_a", (shape.num_heads,))}
    others["D"] = "skip", (shape.num_heads,)
    if config.gated_norm:
        others["norm.weight"] = "norm.weight", (shape.width,)
    return table | places_of(others, f"{prefix}.", f"{mixer}.")


def mamba_of(
    config: MambaConfig, block: int, layer_id: int, parameters: Parameters, scale_Z: Tensor | None = None
) -> Mamba2Mixer:
    """Build a block's mixer; ``scale_Z`` holds factors of its projection's columns."""
    name, shape = f"{block}.mixer", config.mixer
    norm = None
    if config.gated_norm:
        weight = parameters[f"{name}.norm.weight"]
        norm = GatedRMSNorm(weight, config.trunk.norm_eps, groups=config.norm_groups, gate_first=config.gate_first)
    return Mamba2Mixer(
        layer_id=layer_id,
        shape=shape,
        project=linear(parameters, f"{name}.project"),
        scale_Z=scale_Z,
        conv_CW=parameters[f"{name}.conv.weight"].view(shape.channels, shape.taps),
        conv_bias_C=parameters.get(f"{name}.conv.bias"),
        activation=ACTIVATIONS[config.activation],
        step_bias_H=parameters[f"{name}.step_bias"],
        log_a_H=parameters[f"{name}.log_a"],
        skip_H=parameters[f"{name}.skip"],
        norm=norm,
        out=linear(parameters, f"{name}.out"),
    )
