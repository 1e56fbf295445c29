"""Mamba-2: a selective state space as gated linear attention (SSD, arXiv:2405.21060).

Letters: T tokens, E model width, H heads, P head size, G groups (each serves H / G consecutive
heads), N size of the state, W taps of the convolution, C = H*P + 2*G*N convolved channels, Z = H*P
+ C + H projected columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.layers import Recurrent, StateTensor
from quire.contracts.model import Pass
from quire.contracts.ranks import Share
from quire.contracts.recurrence import MixerCall, MixerKernel, StateSizes, StepRates
from quire.nn.linear import Linear
from quire.nn.norm import GatedRMSNorm
from quire.nn.short_conv import conv_state
from quire.ops.rows import ACTIVATIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Shape:
    """Sizes of a mixer (counts of elements), and the range of its time steps."""

    num_heads: int
    head_dim: int
    """P"""
    num_groups: int
    state_size: int
    """N"""
    taps: int
    """W, 2 or more"""
    least_step: float = 0.0
    """Lower bound of time steps."""
    greatest_step: float | None = None
    """Upper bound of time steps; None: no bound."""

    @property
    def width(self) -> int:
        """H * P"""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """The channels of x, B and C."""
        return self.width, self.num_groups * self.state_size, self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """C"""
        return sum(self.convolved)

    def divided(self, share: Share) -> Self:
        """Return the sizes of one rank's mixer: its heads, and the groups that serve them.
        ``Unsupported`` if they do not divide."""
        heads = share.part(self.num_heads, "heads of the mixers")
        return replace(self, num_heads=heads, num_groups=share.part_or_one(self.num_groups, "groups of the mixers"))

    def spec(self, dtype: torch.dtype) -> Recurrent:
        """Return the state of a layer: state 0 is the last W - 1 inputs of the convolution, oldest
        first, in the model's dtype; state 1 is ``[H, N, P]`` in float32."""
        state = StateTensor(shape=(self.num_heads, self.state_size, self.head_dim), dtype="float32")
        return Recurrent(states=(conv_state(self.taps, self.convolved, dtype), state))


@dataclass(kw_only=True, slots=True, eq=False)
class Mamba2Mixer:
    """``out(norm(y, gate))``, with y the state space's reading of the convolved input.

    Per head and token: the state decays by ``exp(dt * A)``, ``dt * x`` is written at key B, C
    reads, and ``D * x`` is added. Time steps, states and readings are in float32."""

    layer_id: int
    shape: Mamba2Shape
    project: Linear
    """E to Z: the rows of gate, x, B, C, time steps."""
    scale_Z: Tensor | None = None
    """Factors of these columns; None: 1."""
    conv_CW: Tensor
    conv_bias_C: Tensor | None
    activation: Callable[[Tensor], Tensor]
    """Follows the convolution; returns a fresh tensor."""
    step_bias_H: Tensor
    log_a_H: InitVar[Tensor]
    """``A = -exp(log_a)``"""
    skip_H: InitVar[Tensor]
    """D: factor of x that bypasses the state."""
    norm: GatedRMSNorm | None
    """Of ``[T, H*P]``; None: plain ``y * silu(gate)``."""
    out: Linear
    """H*P to E"""
    _a_H: Tensor = field(init=False)
    _skip_H1: Tensor = field(init=False)
    _clamped: bool = field(init=False)
    call: MixerCall | None = field(init=False, default=None)
    """The layer between its projections as one call; None: PyTorch's operations."""

    def __post_init__(self, log_a_H: Tensor, skip_H: Tensor) -> None:
        self._a_H, self.step_bias_H = -log_a_H.float().exp(), self.step_bias_H.float()
        self._skip_H1 = skip_H.float()[:, None]
        self._clamped = self.shape.least_step > 0 or self.shape.greatest_step is not None

    def use_kernel(self, kernel: MixerKernel) -> None:
        """Use a kernel's call from now on, if the kernel supports the layer."""
        shape = self.shape
        sizes = StateSizes(shape.num_heads, shape.num_groups, shape.state_size, shape.head_dim)
        if self.activation is ACTIVATIONS["silu"]:
            rates = StepRates(self._a_H, self.step_bias_H, shape.least_step, shape.greatest_step)
            norm = None if self.norm is None else self.norm.parts(shape.width)
            self.call = kernel.ssd(self.conv_CW, self.conv_bias_C, sizes, rates, self._skip_H1.flatten(), norm)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The maps of the input, if ``call`` takes their results unchanged; else none."""
        return (self.project,) if self.scale_Z is None else ()

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; the pass keeps the states."""
        return self.out(self.heads(x_TE, pass_))

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to the heads before ``out``, ``[T, H*P]``."""
        shape = self.shape
        z_TZ = self.project(x_TE)
        if self.scale_Z is not None:
            z_TZ.mul_(self.scale_Z)
        if self.call is not None and (parts := pass_.recurrent_parts(self.layer_id)) is not None:
            return self.call(z_TZ, parts)
        gate_TD, mixed_TC, step_TH = torch.split(z_TZ, [shape.width, shape.channels, shape.num_heads], dim=-1)
        mixed_TC = self.activation(pass_.convolve(self.layer_id, 0, mixed_TC, self.conv_CW, self.conv_bias_C)).float()
        grouped = shape.num_groups * shape.state_size
        x_TD, b_TGN, c_TGN = torch.split(mixed_TC, [shape.width, grouped, grouped], dim=-1)
        x_THP = x_TD.view(-1, shape.num_heads, shape.head_dim)
        dt_TH = F.softplus(step_TH.float() + self.step_bias_H)
        if self._clamped:
            dt_TH = dt_TH.clamp(min=shape.least_step, max=shape.greatest_step)
        y_THP = pass_.linear_attention(
            self.layer_id,
            1,
            self._per_head(c_TGN),
            self._per_head(b_TGN),
            x_THP * dt_TH[..., None],
            log_decay=dt_TH * self._a_H,
        )
        y_TD = torch.addcmul(y_THP, x_THP, self._skip_H1).flatten(-2)
        if self.norm is None:
            return y_TD.mul_(F.silu(gate_TD.float())).to(x_TE.dtype)
        return self.norm(y_TD, gate_TD)

    def _per_head(self, x_TGN: Tensor) -> Tensor:
        """Return ``[T, G*N]`` as ``[T, H, N]``, for one group a view."""
        groups, heads = self.shape.num_groups, self.shape.num_heads
        x_TGN = x_TGN.view(-1, groups, self.shape.state_size)
        return x_TGN.expand(-1, heads, -1) if groups == 1 else x_TGN.repeat_interleave(heads // groups, dim=1)
