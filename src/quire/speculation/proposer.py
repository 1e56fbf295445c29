"""``Proposer``: the Protocol of what drafts tokens. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quire.base.errors import QuireError
from quire.base.token_history import Ids
from quire.base.types import TokenTree


@dataclass(frozen=True, slots=True)
class Context:
    """A request as proposers see it."""

    name: Hashable
    """What tells it from all requests under way."""
    ids: Ids
    """All of its tokens, ``[T]``, those of the prompt included. The last one has not run."""
    num_prompt: int
    salt: Hashable
    """Only requests of one salt may learn from each other."""
    least: float = 0.0
    """Drafts that are accepted with a lower probability are not used."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of one request: a chain, or a tree."""

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    """Of each token: the estimated probability that it is accepted if those before it are."""
    proposer: str = ""
    """Who proposed it, for counters."""
    parents: Sequence[int] = ()
    """Of each token: the index of the token before it, -1: the request's last one. Empty: a
    chain."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tree(self) -> TokenTree:
        """Its tokens as nodes."""
        return TokenTree(tuple(self.parents or range(-1, len(self) - 1)))

    def promises(self, factor: float = 1.0) -> list[float]:
        """Return the probability that each token is accepted, if each chance is ``factor`` times as
        large. One that is not a number is 0."""
        found: list[float] = []
        for parent, chance in zip(self.tree.parents, self.chances, strict=True):
            found.append(max(0.0, min(chance * factor, 1.0)) * (1.0 if parent < 0 else found[parent]))
        return found

    def best(self, most: int, factor: float = 1.0) -> Draft:
        """Return the ``most`` tokens that promise most, the best one first: each beginning of the
        result is the best tree of so many tokens. ``factor``: as for ``promises``."""
        if not self.parents:
            return self.first(most)
        promises = self.promises(factor)
        # Equal ones stay in order, so that parents come first.
        return self.of(sorted(range(len(self)), key=lambda index: -promises[index])[:most])

    def first(self, most: int) -> Draft:
        """Return the draft of its first tokens."""
        return self if len(self) <= most else self.of(range(most))

    def of(self, indices: Sequence[int]) -> Draft:
        """Return the draft of some of its tokens in a new order, each behind its parent."""
        places, parents = {-1: -1} | {index: place for place, index in enumerate(indices)}, self.tree.parents
        found = [places[parents[index]] for index in indices]
        return Draft(
            [self.tokens[index] for index in indices],
            [self.chances[index] for index in indices],
            self.proposer,
            () if found == list(range(-1, len(found) - 1)) else found,
        )

    def chain(self) -> Draft:
        """Return the chain of the likeliest token behind each one."""
        path = [-1]
        while found := [index for index, parent in enumerate(self.parents) if parent == path[-1]]:
            path.append(max(found, key=lambda index: self.chances[index]))
        return self.of(path[1:]) if self.parents else self

    def compared(self, path: Sequence[int]) -> float:
        """Return the sum of the chances of the tokens that a token was compared with, if those of
        ``path`` were accepted."""
        found = {-1, *path}
        return sum(chance for parent, chance in zip(self.tree.parents, self.chances, strict=True) if parent in found)


NO_DRAFT = Draft()


class Proposer(Protocol):
    """A source of drafts."""

    @property
    def name(self) -> str:
        """Return the method's name, for counters."""

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> Sequence[Draft]:
        """Return a draft for each request, of which at most ``most[i]`` tokens are used; it may be
        empty."""

    def ended(self, context: Context) -> None:
        """Forget a request that has ended."""


def proposed(proposer: Proposer, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
    """Return the drafts of a proposer. ``QuireError`` if there is not one for each request."""
    drafts = list(proposer.propose(contexts, most))
    if len(drafts) != len(contexts):
        raise QuireError(f"{len(drafts)} drafts for {len(contexts)} requests")
    return drafts


def problem_of(draft: Draft, vocab_size: int, most: int) -> str:
    """Return the reason why the first ``most`` tokens of a draft cannot be verified; empty: they
    can."""
    bad = [token for token in draft.tokens[: None if draft.parents else most] if not 0 <= token < vocab_size]
    if bad:
        return f"gave token {bad[0]}, outside of 0..{vocab_size - 1}"
    if draft.parents and len(draft.parents) != len(draft):
        return "gave no parent per draft"
    if any(not -1 <= parent < index for index, parent in enumerate(draft.parents)):
        return "gave a parent that does not come before its draft"
    return "gave no chance per draft" if len(draft.chances) != len(draft.tokens) else ""


@runtime_checkable
class Remembering(Protocol):
    """A proposer that keeps something of requests that have ended."""

    def forget(self) -> None:
        """Forget it."""
