"""``Branch``: a history of tokens of which the first ``computed`` are in the KV state. No torch.

Requests, sessions and rows of KV caches are branches. They differ in their owners and in the state
that may be given up. The number of tokens to run is ``len(tokens) - computed``; a preemption sets
``computed`` to 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from quire.base.token_history import Ids, TokenHistory
from quire.base.types import BASE, AdapterRuns, SeqId, TokenTree
from quire.kv.windows import Window


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a branch's state, for states that are not a function of the tokens."""

    inexact_from: int | None = None
    """Index of the first token whose state differs from the one its tokens give, as do all later
    ones; 0 after another dtype. None: all state is exact."""
    modified: bool = False
    """Whether the state was written into. Running its tokens again would not restore it."""
    private: bool = False
    """Whether the tokens have a salt of their own, so that no other branch may share them."""

    @property
    def exact(self) -> bool:
        """Return True if all state is the one that the tokens give, apart from writes into it."""
        return self.inexact_from is None

    def exact_part(self, length: int) -> int:
        """Return the number of the first ``length`` tokens that precede ``inexact_from``."""
        return length if self.inexact_from is None else min(length, self.inexact_from)

    def shareable(self, length: int) -> int:
        """Return the number of the first ``length`` tokens that other prompts may share."""
        return 0 if self.modified or self.private else self.exact_part(length)

    def cut(self, length: int) -> Origin:
        """Return the origin of the state of the first ``length`` tokens."""
        if self.inexact_from is None or self.inexact_from < length:
            return self
        return replace(self, inexact_from=None)


COMPUTED = Origin()
"""The origin of a state that the tokens give."""


@dataclass(eq=False, slots=True, kw_only=True)
class Branch:
    """A history, and the sequence of the KV state that holds its first tokens."""

    tokens: TokenHistory = field(default_factory=TokenHistory)
    runs: AdapterRuns = BASE
    """The adapter of each token, also of future ones."""
    window: Window | None = None
    """The window of tokens that its sequence keeps; None: all of them."""
    seq: SeqId | None = None
    """The sequence; None while nothing of the branch is in the pool."""
    computed: int = 0
    """Tokens whose state ``seq`` holds."""
    origin: Origin = COMPUTED
    nodes: tuple[Ids, TokenTree] | None = None
    """The tokens of the last tree that its sequence has run, of which a path may be committed."""
    mark: int | None = None
    """Position of a kept recurrent state to return to, in place of earlier ones; None: nowhere."""

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet."""
        return self.tokens.size - self.computed  # called often: for each sequence in each step

    @property
    def salt(self) -> Hashable:
        """The salt. Two branches may share state only if their salts and their adapters are
        equal."""
        return None

    @property
    def modified(self) -> bool:
        """Return True if running its tokens again would not restore its state."""
        return self.origin.modified

    def runs_before(self, length: int) -> AdapterRuns:
        """Return the adapters of the first ``length`` tokens; the base model for length 0."""
        return self.runs.cut(length) if length else BASE

    def truncate_computed(self, length: int) -> None:
        """Record that only the state of the first ``length`` tokens is left."""
        self.computed, self.origin = length, self.origin.cut(length)

    def become(self, other: Branch, length: int, seq: SeqId | None) -> None:
        """Become the first ``length`` tokens of another branch, without a copy. ``seq`` holds the
        state of all these tokens; None: no sequence does yet."""
        self.tokens, self.window = other.tokens.fork(length), other.window
        self.runs = other.runs_before(length)
        self.origin = other.origin.cut(length) if length else COMPUTED
        self.mark = None if other.mark is None or other.mark > length else other.mark
        self.seq, self.computed = seq, 0 if seq is None else length
