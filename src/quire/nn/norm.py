"""Root mean square normalisation (arXiv:1910.07467).

Letters: any leading dimensions, then E the normalised one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

MANY_ELEMENTS = 1 << 16
"""From here on temporaries cost more than calls."""


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in float32 and rounded once.

    transformers rounds the normalised value to the model's dtype before it multiplies by the weight. In float32 that
    is the same to the bit; in bfloat16 and float16 the single rounding is the closer one to the exact result, and one
    call is about 2 microseconds quicker than their six for a single row.
    """

    __slots__ = ("_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., E]`` to a fresh contiguous ``[..., E]``."""
        if x.dtype == torch.float32 or x.device.type != "cpu" or x.numel() < MANY_ELEMENTS:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        # The same in place: the library's own takes twice the temporaries, which for a long prompt is what it costs.
        y = x.float()
        scale = y.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return y.mul_(scale).mul_(self.weight).to(x.dtype)
