"""The gated short convolution of LFM2: a mixer with a state of a few tokens.

Letters: T tokens, E model width, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.layers import Recurrent, StateTensor
from quire.contracts.model import Pass
from quire.nn.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvShape:
    """Sizes of a mixer. Counts of elements."""

    channels: int
    """The model's width."""
    taps: int
    """W, 2 or more"""

    def spec(self, dtype: torch.dtype) -> Recurrent:
        """Return a layer's state: the last W - 1 convolution inputs, oldest first, in the model's
        dtype."""
        shape = (self.taps - 1, self.channels)
        return Recurrent(states=(StateTensor(shape=shape, dtype=str(dtype).removeprefix("torch.")),))


@dataclass(slots=True, eq=False)
class ShortConv:
    """``out(c * convolve(b * x))``, with b, c and x as projections of the input."""

    layer_id: int
    project: Linear
    """E to 3E: rows of b, c, x."""
    conv_EW: Tensor
    conv_bias_E: Tensor | None
    out: Linear

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; the pass keeps the state."""
        b_TE, c_TE, x_TE = self.project(x_TE).chunk(3, dim=-1)
        y_TE = pass_.convolve(self.layer_id, 0, b_TE * x_TE, self.conv_EW, self.conv_bias_E)
        return self.out(y_TE.mul_(c_TE))
