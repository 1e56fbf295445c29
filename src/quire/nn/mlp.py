"""The gated feed-forward layer.

Letters: T tokens, E model width, F inner width.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.nn.linear import Linear


class SwiGLU:
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202), with gate and up as one product."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        """``gate_up``: E to 2F, the rows of gate first. ``down``: F to E."""
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x_TE: Tensor) -> Tensor:
        """``[T, E]`` to a fresh ``[T, E]``."""
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(F.silu(gate_TF).mul_(up_TF))
