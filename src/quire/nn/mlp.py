"""The gated feed-forward layer.

Letters: T tokens, E model width, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.contracts.rows import ActivationName, RowKernels
from quire.nn.linear import Linear
from quire.ops.rows import REFERENCE_ROWS


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
