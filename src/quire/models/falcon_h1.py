"""Falcon-H1 (arXiv:2507.22448): attention and a Mamba-2 mixer side by side in every block.

Every projection has a multiplier. Block i has layers 2i (attention) and 2i + 1 (recurrent).

Letters: T tokens, E model width, F inner width of the MLP, Z columns of a mixer's projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from quire.contracts.block_calls import BlockKernel, LayerKernels, MLPParts, Residuals, WholeBlock
from quire.contracts.experts import GateForm
from quire.contracts.model import Pass
from quire.contracts.rows import RowKernels
from quire.models.bamba import NORMS, SPELLINGS, pass_over_generation, read_mamba_shape
from quire.models.blocks import FeedForward, JoinedBlock, Norm, weight_of
from quire.models.config_fields import ConfigFields, config_reader
from quire.models.decoder import DecoderConfig, Parameters, linear
from quire.models.geometry import read_activation, read_geometry
from quire.models.hybrid_decoder import LayerIds, attention_of, norm_of, respelled
from quire.models.mamba2 import MambaConfig, mamba_names, mamba_of
from quire.models.rope_config import read_rope
from quire.models.tensor_names import Names, name_table
from quire.nn.attention import Attention
from quire.nn.mamba import Mamba2Mixer
from quire.nn.mlp import GatedMLP
from quire.nn.packed import kernel_maps
from quire.ops.rows import REFERENCE_ROWS
from quire.weights.places import NameTable


@dataclass(frozen=True, kw_only=True, slots=True)
class FalconH1Config(MambaConfig):
    """A hybrid with multipliers. The scores' scale includes the keys' multiplier; the trunk has the
    multipliers of embedding and logits."""

    attention_in: float
    attention_out: float
    mixer_in: float
    mixer_out: float
    projections: tuple[float, ...]
    """Multipliers of the mixer's gate, x, B, C and time steps, in the order of the projection."""
    mlp_gate: float
    mlp_down: float

    OWN: ClassVar[tuple[str, ...]] = (
        *MambaConfig.OWN,
        *("attention_in", "attention_out", "mixer_in", "mixer_out", "projections", "mlp_gate", "mlp_down"),
    )


@dataclass(slots=True, eq=False, kw_only=True)
class MultipliedMLP(GatedMLP):
    """``down(act(gate(x) * g) * up(x)) * d``."""

    gate_multiplier: float
    down_multiplier: float

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        both_TF = self.gate_up(x_TE)
        both_TF.chunk(2, dim=-1)[0].mul_(self.gate_multiplier)
        return self.down(self.row_kernels.gated(both_TF, self.activation)).mul_(self.down_multiplier)


@dataclass(slots=True, eq=False)
class SideBySideBlock:
    """``h = x + m * mixer(i * n) + a * attention(j * n)``, ``h + mlp(norm(h))``; n: ``norm(x)``."""

    config: FalconH1Config
    norm: Norm
    attention: Attention
    mixer: Mamba2Mixer
    mlp_norm: Norm
    mlp: FeedForward
    row_kernels: RowKernels = REFERENCE_ROWS
    joined: JoinedBlock | None = field(init=False, default=None)
    """See ``models.blocks.Joinable``."""

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        if self.joined is not None and (y_TE := self.joined.run(x_TE, pass_)) is not None:
            return y_TE
        config, rows, n_TE = self.config, self.row_kernels, self.norm(x_TE)
        m_TE = rows.add_scaled(self.mixer(n_TE * config.mixer_in, pass_), x_TE, config.mixer_out)
        h_TE = self.attention(n_TE * config.attention_in, pass_)
        return self.mlp(self.mlp_norm.after_sum(h_TE, m_TE, config.attention_out)).add_(h_TE)

    def join(self, kernels: LayerKernels) -> None:
        """See ``models.blocks.Joinable``."""
        self.joined = None
        whole = None if kernels.blocks is None else self._whole(kernels.blocks)
        if whole is not None:
            mixer, attention, mlp = self.mixer, self.attention, self.mlp
            assert isinstance(mlp, MultipliedMLP)
            maps = (mixer.out, attention.out, mlp.gate_up, mlp.down)
            self.joined = JoinedBlock((mixer, attention), (mixer.project, attention.qkv), maps, None, whole)

    def _whole(self, kernel: BlockKernel) -> WholeBlock | None:
        """Return the block as one call; None for unsupported parts."""
        config, mixer, attention, mlp = self.config, self.mixer, self.attention, self.mlp
        norm, mlp_norm = weight_of(self.norm), weight_of(self.mlp_norm)
        if not isinstance(mlp, MultipliedMLP) or norm is None or mlp_norm is None or mixer.call is None:
            return None
        found = kernel_maps((mixer.project, mixer.out, attention.qkv, attention.out, mlp.gate_up, mlp.down))
        if found is None or not attention.is_whole or attention.head_norms is not None:
            return None
        project, mixed, qkv, out, gate_up, down = found
        parts = MLPParts(gate_up, down, GateForm(mlp.activation), mlp.gate_multiplier, mlp.down_multiplier)
        bare = kernel.bare_tail(mixed, config.mixer_out)
        tail = kernel.tail(out, Residuals(mlp_norm, scale=config.attention_out), parts)
        if bare is None or tail is None:
            return None
        first = kernel.mixed(norm, project, None, mixer.call, bare, factor=config.mixer_in, scale_Z=mixer.scale_Z)
        second = kernel.whole(norm, qkv, tail, factor=config.attention_in)
        return None if first is None or second is None else kernel.beside(first, second)


@config_reader
def read_falcon_h1_config(fields: ConfigFields, max_model_len: int | None) -> FalconH1Config:
    """Read ``FalconH1ForCausalLM``; a missing multiplier is 1."""
    geometry = read_geometry(fields, "FalconH1ForCausalLM", "falcon_h1", max_model_len, kv_heads_required=True)
    # Every block has attention and an MLP; the fields may say nothing else.
    fields.expect("attn_layer_indices", list(range(geometry.num_layers)))
    fields.expect("mamba_use_mlp", True)
    pass_over_generation(fields)
    width = fields.count("mamba_d_ssm", int(fields.number("mamba_expand", 2) * geometry.hidden_size))
    if not fields.present("mamba_d_ssm"):
        raise fields.error("mamba_d_ssm", "the mixer's width, or null for mamba_expand * hidden_size")
    shape = read_mamba_shape(fields, width)
    gated_norm = fields.flag("mamba_rms_norm", False)
    gate_first = not fields.flag("mamba_norm_before_gate", True)
    key = fields.number("key_multiplier", 1.0)
    mlp_gate, mlp_down = fields.numbers("mlp_multipliers", 2, (1.0, 1.0))
    blocks = tuple(range(geometry.num_layers))
    return FalconH1Config(
        trunk=DecoderConfig(
            **geometry.usual(fields, 1e-5),
            layers=geometry.layers(read_rope(fields, geometry), sm_scale=key * geometry.head_dim**-0.5),
            mlp_bias=fields.flag("mlp_bias", False),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=fields.number("lm_head_multiplier", 1.0),
        ),
        num_blocks=geometry.num_layers,
        attending=blocks,
        recurrent=blocks,
        mixer=shape,
        activation=read_activation(fields),
        project_bias=fields.flag("mamba_proj_bias", False),
        out_bias=fields.flag("projectors_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
        gated_norm=gated_norm,
        gate_first=gate_first if gated_norm else True,
        norm_groups=shape.num_groups if gated_norm else 1,
        attention_in=fields.number("attention_in_multiplier", 1.0),
        attention_out=fields.number("attention_out_multiplier", 1.0),
        mixer_in=fields.number("ssm_in_multiplier", 1.0),
        mixer_out=fields.number("ssm_out_multiplier", 1.0),
        projections=fields.numbers("ssm_multipliers", 5, (1.0,) * 5),
        mlp_gate=mlp_gate,
        mlp_down=mlp_down,
    )


def falcon_h1_spellings(config: FalconH1Config) -> Sequence[NameTable]:
    table = respelled(name_table(config.trunk, Names(norms=NORMS)), SPELLINGS)
    return ({**table, **mamba_names(config, "model.layers.{}.mamba", "{}")},)


def side_by_side_block(config: FalconH1Config, block: int, ids: LayerIds, parameters: Parameters) -> SideBySideBlock:
    """Build a block of attention, a mixer and an MLP."""
    assert ids.attention is not None
    assert ids.recurrent is not None
    mlp = MultipliedMLP(
        linear(parameters, f"{block}.gate_up"),
        linear(parameters, f"{block}.down"),
        config.trunk.activation,
        gate_multiplier=config.mlp_gate,
        down_multiplier=config.mlp_down,
    )
    return SideBySideBlock(
        config,
        norm_of(config, parameters, f"{block}.attention_norm"),
        attention_of(config, block, ids.attention, parameters),
        mamba_of(config, block, ids.recurrent, parameters, _scales(config, parameters["embed.weight"])),
        norm_of(config, parameters, f"{block}.mlp_norm"),
        mlp,
    )


def _scales(config: FalconH1Config, like: Tensor) -> Tensor | None:
    """Return the multipliers of the mixer's columns ``[Z]``; None if all are 1."""
    shape = config.mixer
    if set(config.projections) == {1.0}:
        return None
    grouped = shape.num_groups * shape.state_size
    counts = torch.tensor([shape.width, shape.width, grouped, grouped, shape.num_heads])
    return torch.tensor(config.projections).repeat_interleave(counts).to(like)
