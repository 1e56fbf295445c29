"""Norm layers: root mean square (arXiv:1910.07467), mean with variance (arXiv:1607.06450).

Letters: any leading dimensions, then E the normalised one; H heads, D head size; C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.recurrence import GatedNormWeight
from quire.contracts.rows import RowKernels
from quire.ops.rows import REFERENCE_ROWS


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in float32 and rounded once.

    A float32 weight goes with activations of any dtype. So it is for weights stored as their
    difference to 1 (Gemma): ``1 + w`` loses up to seven significant bits of ``w``, too many for
    bfloat16."""

    __slots__ = ("dtype", "eps", "row_kernels", "weight")

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        """``dtype``: that of results; None: that of the input."""
        self.weight = weight
        self.eps = eps
        self.dtype = dtype
        self.row_kernels: RowKernels = REFERENCE_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[..., E]`` to a fresh contiguous ``[..., E]``."""
        return self._narrowed(self.row_kernels.rms_norm(x, self.weight, self.eps))

    def after_sum(self, y_TE: Tensor, x_TE: Tensor, scale: float = 1.0) -> Tensor:
        """Make y ``x + scale * y`` in place; return the norm of the sum."""
        return self._narrowed(self.row_kernels.add_rms_norm(y_TE, x_TE, self.weight, self.eps, scale))

    def _narrowed(self, y: Tensor) -> Tensor:
        return y if self.dtype is None else y.to(self.dtype)


class LayerNorm:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, in float32 and rounded once."""

    __slots__ = ("_shape", "bias", "eps", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[..., E]`` to a fresh contiguous ``[..., E]``."""
        return F.layer_norm(x, self._shape, self.weight, self.bias, self.eps)

    def after_sum(self, y_TE: Tensor, x_TE: Tensor, scale: float = 1.0) -> Tensor:
        """Make y ``x + scale * y`` in place; return the norm of the sum."""
        return self(y_TE.add_(x_TE) if scale == 1.0 else REFERENCE_ROWS.add_scaled(y_TE, x_TE, scale))


class LayerNormPerHead:
    """A ``LayerNorm`` without bias over each head, with one weight per head (StableLM 2)."""

    __slots__ = ("_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Take ``weight [H, D]``."""
        self.weight = weight
        self.eps = eps
        self._shape = (int(weight.shape[-1]),)

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[..., H, D]`` to a fresh contiguous ``[..., H, D]``."""
        return F.layer_norm(x.float(), self._shape, None, None, self.eps).mul_(self.weight).to(x.dtype)


class GatedRMSNorm:
    """A root mean square norm of a mixer's output times ``silu`` of a gate, in float32, rounded
    once.

    ``gate_first``: ``norm(x * silu(gate))`` (Mamba-2, arXiv:2405.21060); else ``norm(x) *
    silu(gate)`` (Qwen3-Next). ``groups``: number of equal parts of the channels, each with its own
    mean; they share one weight.
    """

    __slots__ = ("_shape", "eps", "gate_first", "joint_scale", "weight")

    def __init__(self, weight: Tensor, eps: float, *, groups: int = 1, gate_first: bool) -> None:
        """Take ``weight [C]`` of any float type; ``groups`` divides C."""
        self.weight = weight.float()
        self.eps = eps
        self.gate_first = gate_first
        self._shape = (groups, len(weight) // groups)
        self.joint_scale: Callable[[Tensor], Tensor] | None = None
        """Returns ``[T, 1]``, by which x is multiplied so that its mean square is 1, where only a
        part of a group's channels ``[T, C]`` is here; None: all are."""

    def parts(self, channels: int) -> GatedNormWeight:
        """Return the norm of an input of so many channels as values for a kernel."""
        return GatedNormWeight(self.weight, self.eps, channels // self._shape[0], self.gate_first)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map any float ``[..., C]`` and a gate ``[..., C]`` to a fresh ``[..., C]`` in the gate's
        dtype."""
        open_ = F.silu(gate.float())
        x = x.float() * open_ if self.gate_first else x.float()
        if self.joint_scale is None:
            parts = x.view(*x.shape[:-1], *self._shape)
            y = F.rms_norm(parts, self._shape[1:], None, self.eps).flatten(-2).mul_(self.weight)
        else:
            y = x * self.joint_scale(x) * self.weight
        return (y if self.gate_first else y.mul_(open_)).to(gate.dtype)
