"""Decoders with experts in some or all layers: configuration, names of weights, and MLPs.

Such a layer has the parameters ``{}.router``, ``{}.experts.gate_up`` and ``{}.experts.down``, with
the rows of one expert after the other (in ``gate_up`` its gate, then its up). A shared expert adds
``{}.shared.gate_up``, ``{}.shared.down`` and, for a gate, ``{}.shared_gate``. All have ``.weight``.
A routing with a correction has ``{}.router.correction``.

Letters: X experts, E model width, F inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from quire.contracts.experts import Routing
from quire.contracts.ranks import Share
from quire.models.blocks import FeedForward
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderConfig, Parameters, gated_mlp, linear
from quire.models.tensor_names import LLAMA_NAMES, Names, gated_names, mlp_names, trunk_names
from quire.nn.experts import ActivatedGate, ExpertLinear, Experts, Gate, MixtureOfExperts, Router, SharedExpert
from quire.weights.lazy_parameters import late
from quire.weights.places import Place

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Usual names of an expert's gate, up and down projections."""
MAX_EXPERTS = 4096
"""A bound above any layer's, so that a damaged config.json does not cost memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig(DecoderConfig):
    """A decoder with experts. Layers without them use ``mlp_bias`` and ``intermediate_size``."""

    num_experts: int
    expert_size: int
    """F, in elements."""
    routing: Routing
    dense_layers: tuple[int, ...] = ()
    """Layers with one plain MLP instead."""
    shared_size: int = 0
    """Inner width of the expert that all tokens share; 0 without one."""
    shared_gate: bool = True
    """Whether each token weighs the shared expert by a sigmoid of its own."""
    correction: bool = False
    """Whether the router corrects its scores for the choice (``quire.ops.experts.route``)."""

    def divided(self, share: Share) -> Self:
        """See ``DecoderConfig``. Without dense layers ``intermediate_size`` is not used."""
        dense = self.intermediate_size if self.dense_layers else 0
        return replace(
            DecoderConfig.divided(replace(self, intermediate_size=dense), share),
            expert_size=share.part(self.expert_size, "elements of expert_size"),
            shared_size=share.part(self.shared_size, "elements of shared_size"),
        )

    @property
    def mixed_layers(self) -> tuple[str, ...]:
        """The layer parts of names: ``{}`` if all layers have experts, else those layers'
        numbers."""
        if not self.dense_layers:
            return ("{}",)
        return tuple(str(layer) for layer in range(self.num_layers) if layer not in self.dense_layers)


def read_num_experts(fields: ConfigFields, name: str, other_name: str) -> tuple[int, int]:
    """Read the numbers of experts per layer and token; ``other_name`` also names the first."""
    if fields.get(name) is None and fields.get(other_name) is not None:
        name, other_name = other_name, name
    num_experts = fields.count(name, most=MAX_EXPERTS)
    if fields.get(other_name) not in (None, num_experts):
        raise fields.error(other_name, f"the same as {name} ({num_experts})")
    top_k = fields.count("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", f"at most {name} ({num_experts})")
    return num_experts, top_k


def pass_over_training(fields: ConfigFields) -> None:
    """Skip fields of training alone: losses of the router, noise on its input."""
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        fields.get(name)


def mixture_mlp(config: MixtureConfig, layer: int, parameters: Parameters) -> FeedForward:
    """Build the feed-forward part of a layer: experts, or a dense layer's plain MLP."""
    if layer in config.dense_layers:
        return gated_mlp(config, layer, parameters)
    experts = experts_of(config, layer, parameters, ActivatedGate(config.activation))
    shared = None
    if config.shared_size:
        mlp = gated_mlp(config, layer, parameters, f"{layer}.shared")
        shared = SharedExpert(mlp, linear(parameters, f"{layer}.shared_gate") if config.shared_gate else None)
    return MixtureOfExperts(router(config, layer, parameters), experts, shared)


def router(config: MixtureConfig, layer: int, parameters: Parameters) -> Router:
    """Build a layer's router from ``{layer}.router.weight [X, E]`` and, if there are any,
    ``.bias [X]`` and ``.correction [X]``."""
    name = f"{layer}.router"
    return Router(
        parameters[f"{name}.weight"],
        parameters.get(f"{name}.bias"),
        config.routing,
        parameters.get(f"{name}.correction"),
    )


def experts_of(
    config: MixtureConfig,
    layer: int,
    parameters: Parameters,
    gate: Gate,
    *,
    up: tuple[str, int] = ("gate_up", 2),
    width: int | None = None,
) -> Experts:
    """Build a layer's experts from ``{layer}.experts.gate_up.weight``, viewed as ``[X, 2F, E]``,
    ``down.weight``, as ``[X, E, F]``, and their ``.bias [X, rows]``, if there are any. ``up``:
    another name and factor of F than ``gate_up`` and 2. ``width``: E; None: the model's."""
    width, (first, factor), maps = width or config.hidden_size, up, []
    for part, outs, ins in (
        (first, factor * config.expert_size, width),
        ("down", width, config.expert_size),
    ):
        name = f"{layer}.experts.{part}"
        weight = late(parameters, f"{name}.weight").view(config.num_experts, outs, ins)
        maps.append(ExpertLinear(weight, parameters.get(f"{name}.bias"), name))
    return Experts(maps[0], maps[1], gate)


def mixture_names(
    config: MixtureConfig,
    *,
    block: str = "mlp",
    projections: tuple[str, str, str] | None = None,
    shared: str = "shared_expert",
    trunk: Mapping[str, Place] | None = None,
    names: Names = LLAMA_NAMES,
    correction: str = "gate.e_score_correction_bias",
) -> dict[str, Place]:
    """Map every tensor of a checkpoint to its place; ``{}`` is the layer.

    ``block`` and ``shared`` are the names of a layer's mixture and of the shared expert.
    ``projections`` are the names of an expert's gate, up and down; None: the checkpoint stacks all
    experts, with gate and up in one tensor. ``trunk`` has all names but the MLPs'; None: those of
    ``names``, which also spells dense layers. ``correction``: the router's, in the mixture.
    """
    trunk = trunk_names(config, names) if trunk is None else trunk
    table = {**trunk, **mlp_names(config, names, layers=config.dense_layers)}
    for layer in config.mixed_layers:
        prefix = f"model.layers.{layer}.{block}"
        gate = Place(parameter=f"{layer}.router.weight", shape=(config.num_experts, config.hidden_size))
        table[f"{prefix}.gate.weight"] = gate
        if config.correction:
            table[f"{prefix}.{correction}"] = correction_place(layer, config.num_experts)
        if projections is None:
            table |= _stacked_experts(config, layer, f"{prefix}.experts")
        else:
            table |= _single_experts(config, layer, f"{prefix}.experts", projections)
        if config.shared_size:
            table |= _shared_expert(config, layer, f"{prefix}.{shared}")
    return table


def correction_place(layer: int | str, num_experts: int) -> Place:
    """Return the place of a router's correction: in half precision its rounding would change
    choices."""
    return Place(parameter=f"{layer}.router.correction", shape=(num_experts,), dtype=torch.float32)


def _single_experts(
    config: MixtureConfig, layer: str, prefix: str, projections: tuple[str, str, str]
) -> dict[str, Place]:
    table = {}
    width, inner = config.hidden_size, config.expert_size
    gate, up, down = projections
    for expert in range(config.num_experts):
        for name, parameter, row, rows, columns in (
            (gate, "gate_up", 2 * inner * expert, inner, width),
            (up, "gate_up", 2 * inner * expert + inner, inner, width),
            (down, "down", width * expert, width, inner),
        ):
            place = Place(parameter=f"{layer}.experts.{parameter}.weight", shape=(rows, columns), row=row)
            table[f"{prefix}.{expert}.{name}.weight"] = place
    return table


def _stacked_experts(config: MixtureConfig, layer: str, prefix: str) -> dict[str, Place]:
    count, width, inner = config.num_experts, config.hidden_size, config.expert_size
    return {
        f"{prefix}.gate_up_proj": Place(
            parameter=f"{layer}.experts.gate_up.weight", shape=(count, 2 * inner, width), parts=(inner, inner)
        ),
        f"{prefix}.down_proj": Place(parameter=f"{layer}.experts.down.weight", shape=(count, width, inner)),
    }


def _shared_expert(config: MixtureConfig, layer: str, prefix: str) -> dict[str, Place]:
    width = config.hidden_size
    table = gated_names(f"{prefix}.", f"{layer}.shared.", width, config.shared_size)
    if config.shared_gate:
        table[f"{prefix}_gate.weight"] = Place(parameter=f"{layer}.shared_gate.weight", shape=(1, width))
    return table


def read_dense_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the layers without experts: those of ``mlp_only_layers``, and all but the last of each
    ``decoder_sparse_step`` layers."""
    step = fields.count("decoder_sparse_step", 1)
    listed = read_layer_numbers(fields, "mlp_only_layers", num_layers)
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def read_layer_numbers(fields: ConfigFields, name: str, num_layers: int) -> Collection[int]:
    """Read a list of layers; empty if the field is missing or null."""
    value = fields.get(name)
    if value is None:
        return ()
    whole = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    if not whole or not all(0 <= one < num_layers for one in value):
        raise fields.error(name, f"a list of layers, each from 0 to {num_layers - 1}")
    return frozenset(value)
