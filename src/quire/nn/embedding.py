"""Token embedding.

Letters: T tokens, V vocabulary, E model width.
"""

from __future__ import annotations

from torch import Tensor


class Embedding:
    """A table ``weight [V, E]``, one row per token id."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """int64 ``[T]``, each in 0..V-1, to a fresh ``[T, E]``."""
        return self.weight.index_select(0, tokens_T)


class ScaledEmbedding(Embedding):
    """Rows times ``scale``. The table stays as it is: a tied head reads it unscaled."""

    __slots__ = ("scale",)

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__(weight)
        self.scale = scale

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """int64 ``[T]``, each in 0..V-1, to a fresh ``[T, E]``."""
        return super().__call__(tokens_T).mul_(self.scale)
