"""A linear map.

Letters: T rows, I input features, O output features.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class LowRankTerm(Protocol):
    """The contribution of adapters to the results of one linear map."""

    @property
    def is_idle(self) -> bool:
        """Return True if no row of this forward is under an adapter that changes the map."""

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> None:
        """Add to the rows of ``y`` under adapters, in place; all others stay, to the bit."""
        ...


class Linear:
    """``y = x W^T + b``. ``weight [O, I]``, ``bias [O]`` or None, in one dtype.

    Layers here are plain objects that hold tensors: no hooks, autograd bookkeeping or state dict.
    Every matrix product of a model goes through this class. A packed or quantised weight is a
    subclass with its own ``product``.

    ``name``: the model's parameter without ``.weight``, by which adapters find the map; "":
    adapters cannot change it. ``low_rank``: the adapters' term, set and removed by
    ``quire.adapters.pool``.
    """

    __slots__ = ("bias", "low_rank", "name", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, name: str = "") -> None:
        self.weight = weight
        self.bias = bias
        self.name = name
        self.low_rank: LowRankTerm | None = None

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes

    @property
    def is_plain(self) -> bool:
        """Return True if no adapter changes the map in this forward."""
        return self.low_rank is None or self.low_rank.is_idle

    def plain_weight(self) -> Tensor:
        """Return the weight ``[O, I]`` as rows, in any layout of its storage."""
        return self.weight

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Map ``[T, I]`` to a fresh ``[T, O]``."""
        y_TO = self.product(x_TI)
        if self.low_rank is not None:
            self.low_rank.add_to(y_TO, x_TI)
        return y_TO

    def product(self, x_TI: Tensor) -> Tensor:
        """Map ``[T, I]`` to a fresh ``[T, O]`` without adapters."""
        return F.linear(x_TI, self.weight, self.bias)
