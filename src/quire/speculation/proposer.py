"""``Proposer``: the Protocol of what drafts tokens. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quire.base.errors import QuireError
from quire.base.token_history import Ids


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


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of one request, a chain."""

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    """Of each token: the estimated probability that it is accepted if those before it are."""
    proposer: str = ""
    """Who proposed it, for counters."""


NO_DRAFT = Draft()


class Proposer(Protocol):
    """A source of drafts."""

    @property
    def name(self) -> str:
        """Return the method's name, for counters."""

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> Sequence[Draft]:
        """Return a draft of at most ``most[i]`` tokens for each request; it may be empty."""

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
    bad = [token for token in draft.tokens[:most] if not 0 <= token < vocab_size]
    if bad:
        return f"gave token {bad[0]}, outside of 0..{vocab_size - 1}"
    return "gave no chance per draft" if len(draft.chances) != len(draft.tokens) else ""


@runtime_checkable
class Remembering(Protocol):
    """A proposer that keeps something of requests that have ended."""

    def forget(self) -> None:
        """Forget it."""
