"""Weights in a floating type, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.weights import StoredTensor

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Element types of weights, by their safetensors names."""


@dataclass(frozen=True, slots=True)
class Floats:
    """One tensor. ``transposed``: the checkpoint swaps its last two dimensions."""

    transposed: bool = False
    name: str = "floats"

    @property
    def is_plain(self) -> bool:
        """See ``WeightFormat``."""
        return not self.transposed

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        found = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        return {name: StoredTensor(shape=found, dtypes=tuple(DTYPES))}

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """See ``WeightFormat``. Values are rounded to the dtype of ``out``."""
        (values,) = stored.values()
        out.copy_(values.transpose(-1, -2) if self.transposed else values)


FLOATS = Floats()
TRANSPOSED = Floats(transposed=True)
