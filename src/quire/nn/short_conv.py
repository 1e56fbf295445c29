"""The gated short convolution of LFM2: a mixer with a state of a few tokens.

Letters: T tokens, E model width, W taps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from quire.contracts.layers import Recurrent, StateTensor
from quire.contracts.model import Pass
from quire.contracts.ranks import Share
from quire.contracts.recurrence import MixerCall, MixerKernel
from quire.nn.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvShape:
    """Sizes of a mixer. Counts of elements."""

    channels: int
    """E: the model's width, or of a rank its part."""
    taps: int
    """W, 2 or more"""

    def divided(self, share: Share) -> Self:
        """Return the sizes of one rank's mixer. ``Unsupported`` if the channels do not divide."""
        return replace(self, channels=share.part(self.channels, "channels of the convolutions"))

    def spec(self, dtype: torch.dtype) -> Recurrent:
        """Return a layer's state: the last W - 1 convolution inputs, oldest first, in the model's
        dtype."""
        return Recurrent(states=(conv_state(self.taps, (self.channels,), dtype),))


def conv_state(taps: int, parts: tuple[int, ...], dtype: torch.dtype) -> StateTensor:
    """Return the state of a convolution over channels in ``parts`` that ranks divide each on its
    own: its last inputs, oldest first, in the model's dtype."""
    own = parts if len(parts) > 1 else ()
    return StateTensor(shape=(taps - 1, sum(parts)), dtype=str(dtype).removeprefix("torch."), parts=own)


@dataclass(slots=True, eq=False)
class ShortConv:
    """``out(c * convolve(b * x))``, with b, c and x as projections of the input."""

    layer_id: int
    project: Linear
    """E to 3E: rows of b, c, x."""
    conv_EW: Tensor
    conv_bias_E: Tensor | None
    out: Linear
    call: MixerCall | None = field(init=False, default=None)
    """The layer between its projections as one call; None: PyTorch's operations."""

    def use_kernel(self, kernel: MixerKernel) -> None:
        """Use a kernel's call from now on, if the kernel supports the layer."""
        self.call = kernel.short_conv(self.conv_EW, self.conv_bias_E)

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The maps of the input, whose results ``call`` takes."""
        return (self.project,)

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; the pass keeps the state."""
        return self.out(self.heads(x_TE, pass_))

    def heads(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to the rows before ``out``, ``[T, E]``."""
        projected = self.project(x_TE)
        if self.call is not None and (parts := pass_.recurrent_parts(self.layer_id)) is not None:
            return self.call(projected, parts)
        b_TE, c_TE, x_TE = projected.chunk(3, dim=-1)
        return pass_.convolve(self.layer_id, 0, b_TE * x_TE, self.conv_EW, self.conv_bias_E).mul_(c_TE)
