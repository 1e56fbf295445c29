"""Feed-forward layers: gated, and with a squared activation.

Letters: T tokens, E model width, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.rows import ActivationName, RowKernels
from quire.nn.linear import Linear
from quire.ops.rows import REFERENCE_ROWS


def squared_relu(h: Tensor) -> Tensor:
    """Return a fresh ``max(h, 0) ** 2`` (arXiv:2109.08668)."""
    return F.relu(h).square_()


@dataclass(slots=True, eq=False)
class SquaredMLP:
    """``down(squared_relu(up(x)))``."""

    up: Linear
    """E to F"""
    down: Linear

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        return self.down(squared_relu(self.up(x_TE)))


@dataclass(slots=True, eq=False)
class GatedMLP:
    """``down(act(gate(x)) * up(x))`` (arXiv:2002.05202), with gate and up as one product."""

    gate_up: Linear
    """E to 2F, gate first."""
    down: Linear
    activation: ActivationName = "silu"
    row_kernels: RowKernels = REFERENCE_ROWS

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        return self.down(self.row_kernels.gated(self.gate_up(x_TE), self.activation))
