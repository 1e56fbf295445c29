"""The gated feed-forward layer.

Letters: T tokens, E model width, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.nn.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""By name in ``quire.models.decoder.DecoderConfig``. Each returns a fresh tensor."""


@dataclass(slots=True, eq=False)
class GatedMLP:
    """``down(act(gate(x)) * up(x))`` (arXiv:2002.05202), with gate and up as one product."""

    gate_up: Linear
    """E to 2F, gate first."""
    down: Linear
    activation: Callable[[Tensor], Tensor] = F.silu

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(self.activation(gate_TF).mul_(up_TF))
