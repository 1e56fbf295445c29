"""Gemma 3n (text): several residual streams (AltUp, arXiv:2301.13310), learned augmented residuals
(LAuReL, arXiv:2411.07501), inputs of layers, K and V shared by the last layers.

A block predicts all streams from the active one, runs on its prediction, and corrects all streams
by what came out. Gates of the first MLPs keep what lies far above their mean. Source: transformers
and the models' cards.

Parameters of a block beside those of ``models.gemma_layers``: ``{}.laurel.left``, ``.right``,
``.norm``; ``{}.altup.router``, ``.router_norm``, ``.predict``, ``.correct``, ``.scale``. The
model's: ``spread.{}``, ``gather.{}``.

Letters: T tokens, E model width, N residual streams, W width of a row, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from quire.contracts.model import Pass
from quire.models.blocks import FeedForward, Mixer
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import Parameters, gated_mlp, linear
from quire.models.gemma import scaled_fields
from quire.models.gemma_layers import (
    LayeredConfig,
    LayeredDecoder,
    LayerInput,
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
    ropes_of,
    windows_of,
)
from quire.models.tensor_names import places_of
from quire.nn.linear import Linear
from quire.nn.mlp import GatedMLP
from quire.nn.norm import RMSNorm
from quire.nn.packed import packed
from quire.ops.rows import ACTIVATIONS
from quire.weights.places import NameTable, Place

LEAST_SQUARE = 1e-5
"""Lower bound of the mean square of a stream that is scaled to another's magnitude."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3nConfig(LayeredConfig):
    """Gemma 3n's decoder."""

    streams: int
    """N"""
    active: int
    """The stream that blocks run on."""
    scales_output: bool
    """Whether what comes out of a block is scaled before it meets the layer's input."""
    laurel_rank: int
    sparsity: tuple[float, ...]
    """For each block the share of its MLP's gates that a normal distribution would set to 0."""


def read_gemma3n_config(values: Mapping[str, Any], max_model_len: int | None = None) -> Gemma3nConfig:
    """Read ``Gemma3nForCausalLM``; each fifth layer has no window unless ``layer_types`` says
    otherwise. ``intermediate_size`` may be a list by layer."""
    values = dict(values)
    inner = values.get("intermediate_size")
    if isinstance(inner, list) and inner:
        values["intermediate_size"] = inner[0]
    fields = ConfigFields(values)
    geometry = read_geometry(
        fields, "Gemma3nForCausalLM", "gemma3n_text", max_model_len, kv_heads_required=True, head_dim=256
    )
    windowed = read_layer_types(fields, geometry.num_layers) or geometry.all_but_every(5)
    ropes = ropes_of(fields, geometry, windowed)
    streams, active = fields.count("altup_num_inputs", 4), fields.whole("altup_active_idx", 0)
    if active >= streams:
        raise fields.error("altup_active_idx", f"less than altup_num_inputs ({streams})")
    fields.get("altup_coef_clip")  # Clips coefficients in training alone.
    config = Gemma3nConfig(
        **scaled_fields(fields, geometry),
        layers=geometry.layers(
            ropes,
            windows_of(fields, windowed, read_window(fields, 512)),
            sm_scale=1.0,
        ),
        logit_softcap=fields.optional_number("final_logit_softcapping", 30.0),
        sources=read_sources(fields, windowed, 15),
        inner_sizes=_inner_sizes(fields, geometry, inner),
        input_size=fields.count("hidden_size_per_layer_input", 256),
        input_vocab=fields.count("vocab_size_per_layer_input", 262_144),
        streams=streams,
        active=active,
        scales_output=fields.flag("altup_correct_scale", True),
        laurel_rank=fields.count("laurel_rank", 64),
        sparsity=_sparsity(fields, geometry),
    )
    refuse_unsupported(fields)
    return config


def _inner_sizes(fields: ConfigFields, geometry: DecoderGeometry, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list):
        return (geometry.intermediate_size,) * geometry.num_layers
    if len(given) != geometry.num_layers or any(type(one) is not int or one < 1 for one in given):
        raise fields.error("intermediate_size", f"an integer, or a list of {geometry.num_layers}")
    return tuple(given)


def _sparsity(fields: ConfigFields, geometry: DecoderGeometry) -> tuple[float, ...]:
    """Read ``activation_sparsity_pattern``; by default 0.95 in the first ten of more layers."""
    given, count = fields.get("activation_sparsity_pattern"), geometry.num_layers
    if given is None:
        sparse = 10 if count > 10 else 0
        return (0.95,) * sparse + (0.0,) * (count - sparse)
    numbers = isinstance(given, list) and all(type(one) in (int, float) and 0 <= one < 1 for one in given)
    if not numbers or len(given) != count:
        raise fields.error("activation_sparsity_pattern", f"a list of {count} numbers from 0 to below 1")
    return tuple(float(one) for one in given)


def gemma3n_spellings(config: Gemma3nConfig) -> Sequence[NameTable]:
    width, streams, rank = config.hidden_size, config.streams, config.laurel_rank
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {
        "laurel.linear_left.weight": ("laurel.left.weight", (rank, width)),
        "laurel.linear_right.weight": ("laurel.right.weight", (width, rank)),
        "laurel.post_laurel_norm.weight": ("laurel.norm.weight", (width,)),
        "altup.modality_router.weight": ("altup.router.weight", (streams, width)),
        "altup.router_norm.weight": ("altup.router_norm.weight", (width,)),
        "altup.prediction_coefs.weight": ("altup.predict.weight", (streams * streams, streams)),
        "altup.correction_coefs.weight": ("altup.correct.weight", (streams, streams)),
        "altup.correct_output_scale": ("altup.scale", (width,)),
    }
    table = layered_names(config) | places_of(sizes, "model.layers.{}.", "{}.")
    for stream in range(streams - 1):
        for theirs, ours in (("altup_projections", "spread"), ("altup_unembed_projections", "gather")):
            place = Place(parameter=f"{ours}.{stream}.weight", shape=(width, width))
            table[f"model.{theirs}.{stream}.weight"] = place
    return (table,)


def gemma3n(config: Gemma3nConfig, parameters: Parameters, values: Mapping[str, Any]) -> LayeredDecoder:
    """Build the model."""
    spread, gather = (
        [linear(parameters, f"{name}.{stream}") for stream in range(config.streams - 1)]
        for name in ("spread", "gather")
    )
    norm = GatheredStreams(Maps(gather), rms_norm(config, parameters, "norm"), config.streams)
    blocks = [_block(config, block, parameters) for block in range(config.num_layers)]
    return LayeredDecoder(config, parameters, values, norm, blocks, SpreadStreams(Maps(spread)), config.active)


def _block(config: Gemma3nConfig, block: int, parameters: Parameters) -> AltUpBlock:
    def norm(name: str) -> RMSNorm:
        return rms_norm(config, parameters, f"{block}.{name}")

    mlp = gated_mlp(config, block, parameters)
    name = f"{block}.altup"
    altup = AltUp(
        router=linear(parameters, f"{name}.router"),
        router_norm=norm("altup.router_norm"),
        predict=linear(parameters, f"{name}.predict"),
        correct=linear(parameters, f"{name}.correct"),
        active=config.active,
    )
    laurel = Laurel(
        linear(parameters, f"{block}.laurel.left"), linear(parameters, f"{block}.laurel.right"), norm("laurel.norm")
    )
    return AltUpBlock(
        altup=altup,
        laurel=laurel,
        attention_norm=norm("attention_norm"),
        attention=layered_attention(config, block, parameters),
        attention_out_norm=norm("attention_out_norm"),
        mlp_norm=norm("mlp_norm"),
        mlp=SparseMLP(mlp.gate_up, mlp.down, config.activation, sparsity=config.sparsity[block])
        if config.sparsity[block]
        else mlp,
        mlp_out_norm=norm("mlp_out_norm"),
        scale_E=parameters[f"{name}.scale"] if config.scales_output else None,
        input=layer_input(config, block, parameters),
        start=config.streams * config.hidden_size + block * config.input_size,
        size=config.input_size,
    )


def moments(gate_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of each row, ``[T, 1]``."""
    return gate_TF.mean(dim=-1, keepdim=True), torch.std(gate_TF, dim=-1, keepdim=True, unbiased=False)


@dataclass(slots=True, eq=False)
class SparseMLP(GatedMLP):
    """A gated MLP that subtracts a cutoff from its gates and sets those below to 0: their mean, and
    the multiple of their deviation above which a normal distribution has ``1 - sparsity``."""

    sparsity: float = field(kw_only=True)
    moments: Callable[[Tensor], tuple[Tensor, Tensor]] = moments
    """Mean and deviation of the gates; ranks add what they need for it."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=-1)
        mean_T1, deviation_T1 = self.moments(gate_TF)
        cutoff_T1 = mean_T1 + deviation_T1 * NormalDist().inv_cdf(self.sparsity)
        return self.down(ACTIVATIONS[self.activation](torch.relu(gate_TF - cutoff_T1)).mul_(up_TF))


@dataclass(slots=True, eq=False)
class Maps:
    """Linear maps by number, which are packed like those of layers."""

    maps: list[Linear]

    def pack(self, kernels: Any) -> int:
        """Pack the maps; return the growth of the weights in bytes."""
        made = [packed(one, kernels) for one in self.maps]
        grown = sum(new.weight_bytes - old.weight_bytes for new, old in zip(made, self.maps, strict=True))
        self.maps = made
        return grown


def scaled_to(x_TE: Tensor, magnitude_T1: Tensor) -> Tensor:
    """Scale each row to a root mean square."""
    square_T1 = x_TE.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE)
    return x_TE * magnitude_T1 / square_T1.sqrt()


def magnitude(x_TE: Tensor) -> Tensor:
    """Return the root mean square of each row, ``[T, 1]``."""
    return x_TE.square().mean(-1, keepdim=True).sqrt()


@dataclass(slots=True, eq=False)
class SpreadStreams:
    """The residual streams of an embedding: itself, and a projection for each other stream."""

    maps: Maps

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, N * E]``."""
        size_T1 = magnitude(x_TE)
        return torch.cat([x_TE, *(scaled_to(one(x_TE), size_T1) for one in self.maps.maps)], 1)


@dataclass(slots=True, eq=False)
class GatheredStreams:
    """The mean of all streams, each projected back, and the final norm."""

    maps: Maps
    norm: RMSNorm
    streams: int

    def __call__(self, x_RW: Tensor) -> Tensor:
        """Map ``[R, W]`` to a fresh ``[R, E]``."""
        width = len(self.norm.weight)
        first_RE, *others = torch.split(x_RW[:, : self.streams * width], width, 1)
        size_R1 = magnitude(first_RE)
        parts = [scaled_to(one(x_RE.contiguous()), size_R1) for one, x_RE in zip(self.maps.maps, others, strict=True)]
        return self.norm(torch.stack([first_RE, *parts]).mean(0))


@dataclass(kw_only=True, slots=True, eq=False)
class AltUp:
    """The prediction of all streams before a block, and their correction after it."""

    router: Linear
    """E to N"""
    router_norm: RMSNorm
    predict: Linear
    """N to N * N"""
    correct: Linear
    """N to N"""
    active: int

    def _modes(self, x_TE: Tensor) -> Tensor:
        x_TN = self.router(self.router_norm(x_TE).mul_(1 / x_TE.shape[1]))
        return torch.tanh(x_TN.float()).to(x_TE.dtype)

    def predicted(self, x_TNE: Tensor) -> Tensor:
        """Map ``[T, N, E]`` to a fresh ``[T, N, E]``."""
        count = x_TNE.shape[1]
        factors_TNN = self.predict(self._modes(x_TNE[:, self.active].contiguous())).view(-1, count, count)
        return torch.bmm(factors_TNN, x_TNE).add_(x_TNE)

    def corrected(self, x_TNE: Tensor, out_TE: Tensor) -> Tensor:
        """Add to each predicted stream its share of what the active one has become."""
        factors_TN = self.correct(self._modes(out_TE)) + 1.0
        return torch.addcmul(x_TNE, (out_TE - x_TNE[:, self.active])[:, None], factors_TN[:, :, None])


@dataclass(slots=True, eq=False)
class Laurel:
    """``x + norm(right(left(x)))``, of low rank."""

    left: Linear
    right: Linear
    norm: RMSNorm

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        return self.norm(self.right(self.left(x_TE))).add_(x_TE)


@dataclass(kw_only=True, slots=True, eq=False)
class AltUpBlock:
    """A block of Gemma 3n over rows of N streams and the inputs of all layers."""

    altup: AltUp
    laurel: Laurel
    attention_norm: RMSNorm
    attention: Mixer
    attention_out_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: FeedForward
    mlp_out_norm: RMSNorm
    scale_E: Tensor | None
    input: LayerInput
    start: int
    """Column at which the layer's input begins."""
    size: int

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map rows ``[T, W]`` to fresh ones."""
        x_TW, width, streams = x_TE, len(self.attention_norm.weight), self.altup.correct.out_features
        predicted_TNE = self.altup.predicted(x_TW[:, : streams * width].view(-1, streams, width))
        x_TE = predicted_TNE[:, self.altup.active].contiguous()
        n_TE = self.attention_norm(x_TE)
        h_TE = self.attention_out_norm(self.attention(n_TE, pass_)).add_(x_TE)
        h_TE = h_TE.add_(self.laurel(n_TE)).mul_(0.5**0.5)
        h_TE = self.mlp_out_norm(self.mlp(self.mlp_norm(h_TE))).add_(h_TE)
        out_TNE = self.altup.corrected(predicted_TNE, h_TE)
        first_TE = out_TNE[:, self.altup.active]
        first_TE = first_TE.contiguous() if self.scale_E is None else first_TE * self.scale_E
        out_TNE[:, 1:].add_(self.input(first_TE, x_TW.narrow(1, self.start, self.size))[:, None])
        return torch.cat((out_TNE.flatten(1), x_TW[:, streams * width :]), 1)
