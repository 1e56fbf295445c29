"""A model's two ends: token embedding, and the factor and soft cap of its logits.

Letters: T tokens, R rows of the head, V vocabulary, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.contracts.linear import LinearMap, TableMap
from quire.contracts.rows import RowKernels
from quire.ops.rows import REFERENCE_ROWS
from quire.weights.packed import EXACT_FORMS, unpack


class EmbeddingTerm(Protocol):
    """The effect of adapters on embeddings."""

    def apply_to(self, x_TE: Tensor, tokens_T: Tensor) -> None:
        """Change or replace the rows of ``x`` under adapters, in place, before any scale."""
        ...


class Embedding:
    """A table ``weight [V, E]``, one row per token id. ``low_rank``: as in ``nn.linear.Linear``."""

    __slots__ = ("low_rank", "rows", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.rows: TableMap | None = None
        """The map whose weights are the table; None: ``weight``."""
        self.low_rank: EmbeddingTerm | None = None

    def share(self, rows: LinearMap) -> bool:
        """Replace the table by packed weights, such as a tied head's, if they hold the same values
        exactly; return whether they do. ``weight`` then has only shape and dtype."""
        if rows.weights.form not in EXACT_FORMS or not isinstance(rows, TableMap):
            return False
        self.rows, self.weight = rows, torch.empty_like(self.weight, device="meta")
        return True

    def plain_weight(self) -> Tensor:
        """Return the table ``[V, E]`` as rows, packed or not."""
        return self.weight if self.rows is None else unpack(self.rows.weights).to(self.weight.dtype)

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Map int64 ``[T]``, each in 0..V-1, to a fresh ``[T, E]``."""
        if self.rows is None:
            x_TE = self.weight.index_select(0, tokens_T)
        else:
            x_TE = self.rows.rows(tokens_T).to(self.weight.dtype)
        if self.low_rank is not None:
            self.low_rank.apply_to(x_TE, tokens_T)
        return x_TE


class ScaledEmbedding(Embedding):
    """Rows times ``scale``. The table stays as it is: a tied head reads it unscaled."""

    __slots__ = ("scale",)

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__(weight)
        self.scale = scale

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Map int64 ``[T]``, each in 0..V-1, to a fresh ``[T, E]``."""
        return super().__call__(tokens_T).mul_(self.scale)


@dataclass(slots=True, eq=False)
class ShapedLogits:
    """``softcap * tanh(scale * logits / softcap)``; without a soft cap ``scale * logits``."""

    scale: float = 1.0
    softcap: float | None = None
    row_kernels: RowKernels = REFERENCE_ROWS

    def __call__(self, logits_RV: Tensor) -> Tensor:
        """Change float32 ``[R, V]`` in place and return it."""
        if self.scale != 1.0:
            logits_RV.mul_(self.scale)
        return logits_RV if self.softcap is None else self.row_kernels.soft_cap(logits_RV, self.softcap)
