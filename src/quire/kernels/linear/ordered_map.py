"""A linear map whose inputs are taken in another order, as activations have ordered its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.contracts.linear import BlockKernel, CodeRows, LinearMap
from quire.weights.code_blocks import blocks_of


class OrderedMap:
    """``contracts.linear.LinearMap`` over a map of ordered inputs."""

    __slots__ = ("_map", "_order_I", "weights")

    def __init__(self, made: LinearMap, order_I: Tensor) -> None:
        """``order_I``: the input of each column of ``made``."""
        self._map, self._order_I = made, order_I.to(made.weights.values.device)
        self.weights = replace(made.weights, order_I=self._order_I)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See the contract."""
        return self._map(x_TI.index_select(1, self._order_I))


def by_blocks(
    kernel: BlockKernel, parts: Sequence[CodeRows], bias_O: Tensor | None, dtype: torch.dtype
) -> LinearMap | None:
    """Return the map of codes as blocks of GGUF files; None if they have no place in them."""
    blocks = blocks_of(parts)
    made = None if blocks is None else kernel.pack_blocks(blocks, parts[0].codes_RI.shape[1], bias_O, dtype)
    return None if made is None else in_order(made, parts)


def in_order(made: LinearMap, parts: Sequence[CodeRows]) -> LinearMap:
    """Return a map of the parts' columns as one of their inputs."""
    return made if parts[0].order_I is None else OrderedMap(made, parts[0].order_I)
