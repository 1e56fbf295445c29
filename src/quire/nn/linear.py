"""A linear map.

Letters: T rows, I input features, O output features.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class Linear:
    """``y = x W^T + b``. ``weight [O, I]``, ``bias [O]`` or None, in one dtype.

    Layers here are plain objects that hold tensors: no hooks, no autograd bookkeeping, no state dict. Every matrix
    product of a model goes through this class, so a packed or quantised form of ``weight`` has one place to go: a
    subclass with its own ``__call__``, put where the plain one was.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x_TI: Tensor) -> Tensor:
        """``[T, I]`` to a fresh ``[T, O]``."""
        return F.linear(x_TI, self.weight, self.bias)
