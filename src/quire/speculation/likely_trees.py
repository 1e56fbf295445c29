"""Trees of the tokens that a model finds most likely, level by level; chains if it is asked for one
token at each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.speculation.proposer import Draft

LEAST_CHANCE = 0.3
"""A draft has others behind it if it is accepted, with all before it, with this probability."""


@dataclass(eq=False, slots=True, kw_only=True)
class LikelyTree:
    """The drafts of one request, as far as they are known."""

    most: int
    """Most drafts that the model may run."""
    width: int = 1
    """Most of one level."""
    least: float = 0.0
    """As ``Context.least``: no draft has others behind it that would not be used."""
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    promises: list[float] = field(default_factory=list)
    """Of each draft the probability that it is accepted."""
    next: list[int] = field(default_factory=list)
    """The drafts that the model runs next, the best one first."""
    ran: list[int] = field(default_factory=list)
    """Those that it has run, in their order."""
    rows: list[int] = field(default_factory=list)
    """By draft of ``next``: which of the last rows it is taken from."""

    def add(self, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]) -> None:
        """Take in the likeliest tokens of each row that has run: behind the request's last token,
        then behind each of ``next``. One without a probability, which is not a number, is left."""
        ran, found = self.next or [-1], list[tuple[int, int]]()
        self.ran += self.next
        for row, (parent, behind) in enumerate(zip(ran, zip(tokens, chances, strict=True), strict=True)):
            for token, chance in zip(*behind, strict=True):
                if not (promise := chance * (1.0 if parent < 0 else self.promises[parent])) > 0:
                    continue
                if promise >= max(LEAST_CHANCE, self.least):
                    found.append((len(self.tokens), row))
                self.tokens.append(token)
                self.chances.append(chance)
                self.parents.append(parent)
                self.promises.append(promise)
        found.sort(key=lambda one: -self.promises[one[0]])
        # The last draft needs no row.
        found = found[: max(0, min(self.width, self.most - 1 - len(self.ran)))]
        self.next, self.rows = [node for node, _ in found], [row for _, row in found]

    @property
    def next_tokens(self) -> list[int]:
        return [self.tokens[node] for node in self.next]

    @property
    def next_parents(self) -> tuple[int, ...]:
        """The parents of ``next`` among those that have run."""
        return tuple(self.ran.index(parent) if (parent := self.parents[node]) >= 0 else -1 for node in self.next)

    @property
    def draft(self) -> Draft:
        parents = () if self.parents == list(range(-1, len(self.tokens) - 1)) else self.parents
        return Draft(self.tokens, self.chances, parents=parents)


def most_likely(logits_RV: Tensor, width: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the ``width`` most likely tokens of each row and their probabilities."""
    if width == 1:
        best_RK, tokens_RK = logits_RV.max(dim=-1, keepdim=True)
    else:
        best_RK, tokens_RK = logits_RV.topk(min(width, logits_RV.shape[-1]), dim=-1)
    return tokens_RK.tolist(), (best_RK - logits_RV.logsumexp(dim=-1, keepdim=True)).exp().tolist()
