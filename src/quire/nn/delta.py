"""The gated delta net: linear attention that corrects its memory (arXiv:2412.06464; Qwen3-Next).

Letters: T tokens, E model width, J key heads, H value heads (key head j serves H / J consecutive
ones), K, V head sizes, W taps of the convolution, C = 2*J*K + H*V convolved channels.
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

UNIT_EPS = 1e-6
"""Added to the sum of squares before queries and keys are scaled to length 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Sizes of a mixer. Counts of elements."""

    num_key_heads: int
    """J"""
    num_value_heads: int
    """H"""
    key_dim: int
    """K"""
    value_dim: int
    """V"""
    taps: int
    """W, 2 or more"""

    @property
    def keys(self) -> int:
        """J * K"""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """H * V"""
        return self.num_value_heads * self.value_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """The channels of queries, keys and values."""
        return self.keys, self.keys, self.values

    @property
    def channels(self) -> int:
        """C"""
        return sum(self.convolved)

    def divided(self, share: Share) -> Self:
        """Return the sizes of one rank's mixer: its value heads, and the key heads that serve them.
        ``Unsupported`` if they do not divide."""
        heads = share.part(self.num_value_heads, "value heads of the mixers")
        keys = share.part_or_one(self.num_key_heads, "key heads of the mixers")
        return replace(self, num_value_heads=heads, num_key_heads=keys)

    def spec(self, dtype: torch.dtype) -> Recurrent:
        """Return the state of a layer: state 0 is the last W - 1 inputs of the convolution, oldest
        first, in the model's dtype; state 1 is ``[H, K, V]`` in float32."""
        state = StateTensor(shape=(self.num_value_heads, self.key_dim, self.value_dim), dtype="float32")
        return Recurrent(states=(conv_state(self.taps, self.convolved, dtype), state))


@dataclass(kw_only=True, slots=True, eq=False)
class GatedDeltaNet:
    """``out(norm(o) * silu(gate))``, with o read from a state that the delta rule writes.

    Queries and keys have length 1. The state decays by ``exp(A * softplus(a + bias))``, and the
    share ``sigmoid(b)`` of a key's error is corrected. All of it is in float32."""

    layer_id: int
    shape: DeltaShape
    project: Linear
    """E to C + H*V: rows of all queries, all keys, all values, all gates."""
    rates: Linear
    """E to 2H: rows of all beta, then of all steps."""
    conv_CW: Tensor
    activation: Callable[[Tensor], Tensor]
    """Follows the convolution; returns a fresh tensor."""
    step_bias_H: Tensor
    log_a_H: InitVar[Tensor]
    """``A = -exp(log_a)``"""
    norm: GatedRMSNorm
    """Of ``[T, H, V]``, by head."""
    out: Linear
    """H*V to E"""
    _a_H: Tensor = field(init=False)
    call: MixerCall | None = field(init=False, default=None)
    """The layer between its projections as one call; None: PyTorch's operations."""

    def __post_init__(self, log_a_H: Tensor) -> None:
        self._a_H, self.step_bias_H = -log_a_H.float().exp(), self.step_bias_H.float()

    def use_kernel(self, kernel: MixerKernel) -> None:
        """Use a kernel's call from now on, if the kernel supports the layer."""
        shape = self.shape
        sizes = StateSizes(shape.num_value_heads, shape.num_key_heads, shape.key_dim, shape.value_dim)
        if self.activation is ACTIVATIONS["silu"]:
            rates, norm = StepRates(self._a_H, self.step_bias_H), self.norm.parts(shape.value_dim)
            self.call = kernel.delta_rule(self.conv_CW, sizes, rates, norm, shape.key_dim**-0.5)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The maps of the input, whose results ``call`` takes."""
        return self.project, self.rates

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; the pass keeps the states."""
        return self.out(self.heads(x_TE, pass_))

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to the heads before ``out``, ``[T, H*V]``."""
        shape, projected = self.shape, self.project(x_TE)
        if self.call is not None and (parts := pass_.recurrent_parts(self.layer_id)) is not None:
            return self.call(projected, parts, self.rates(x_TE))
        mixed_TC, gate_TD = torch.split(projected, [shape.channels, shape.values], dim=-1)
        mixed_TC = self.activation(pass_.convolve(self.layer_id, 0, mixed_TC, self.conv_CW)).float()
        q_TD, k_TD, v_TD = torch.split(mixed_TC, [shape.keys, shape.keys, shape.values], dim=-1)
        b_TH, a_TH = self.rates(x_TE).float().chunk(2, dim=-1)
        o_THV = pass_.linear_attention(
            self.layer_id,
            1,
            self._units(q_TD),
            self._units(k_TD),
            self._values(v_TD),
            scale=shape.key_dim**-0.5,
            log_decay=F.softplus(a_TH + self.step_bias_H).mul_(self._a_H),
            beta_TH=torch.sigmoid(b_TH),
        )
        return self.norm(o_THV, self._values(gate_TD)).flatten(-2)

    def _units(self, x_TD: Tensor) -> Tensor:
        """Return ``[T, J*K]`` as ``[T, H, K]`` with heads of length 1 (0 stays 0)."""
        x_TJK = x_TD.view(-1, self.shape.num_key_heads, self.shape.key_dim)
        x_TJK = x_TJK * torch.rsqrt(x_TJK.square().sum(-1, keepdim=True).add_(UNIT_EPS))
        ratio = self.shape.num_value_heads // self.shape.num_key_heads
        return x_TJK if ratio == 1 else x_TJK.repeat_interleave(ratio, dim=1)

    def _values(self, x_TD: Tensor) -> Tensor:
        return x_TD.view(-1, self.shape.num_value_heads, self.shape.value_dim)
