"""Chains of the tokens that a model finds most likely, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

LEAST_CHANCE = 0.3
"""A chain of drafts ends once it is accepted as a whole with a smaller probability."""


@dataclass(eq=False, slots=True, kw_only=True)
class LikelyChain:
    """The drafts of one request, as far as they are known."""

    most: int
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    through: float = 1.0
    """The probability that all of them are accepted."""

    def add(self, token: int, chance: float) -> None:
        """Take in a draft. One without a probability, which is not a number, ends the chain."""
        self.through *= chance
        if self.through > 0:
            self.tokens.append(token)
            self.chances.append(chance)

    @property
    def is_open(self) -> bool:
        """Whether another draft is worth a forward."""
        return len(self.tokens) < self.most and self.through >= LEAST_CHANCE


def most_likely(logits_RV: Tensor) -> tuple[list[int], list[float]]:
    """Return the most likely token of each row and its probability."""
    best_R, tokens_R = logits_RV.max(dim=-1)
    return tokens_R.tolist(), (best_R - logits_RV.logsumexp(dim=-1)).exp().tolist()
