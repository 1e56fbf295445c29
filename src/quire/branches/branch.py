"""``Branch``: a history of tokens of which the first ``computed`` are in the KV state. No torch.

Requests, sessions and rows of KV caches are branches. They differ in who owns them and in what may
be given up. What is left to run is ``len(tokens) - computed``; preempting is ``computed = 0``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from quire.branches.history import TokenHistory
from quire.kv.windows import Window
from quire.types import BASE, AdapterRuns, SeqId


@dataclass(frozen=True, slots=True)
class Origin:
    """How a branch's state came to be, where its tokens alone do not say it."""

    inexact_from: int | None = None
    """The first token whose state is not what the tokens give, and neither is that of later ones; 0
    after another dtype. None: all state is what they give."""
    modified: bool = False
    """Whether the state was written into: running its tokens again would give another one."""
    private: bool = False
    """Whether the tokens have a salt of their own, so that no other branch may share them."""

    @property
    def exact(self) -> bool:
        """Return whether all state is what the tokens give, apart from what was written into it."""
        return self.inexact_from is None

    def exact_part(self, length: int) -> int:
        """Return how many of the first ``length`` tokens come before ``inexact_from``."""
        return length if self.inexact_from is None else min(length, self.inexact_from)

    def shareable(self, length: int) -> int:
        """Return with how many of the first ``length`` tokens other prompts may begin."""
        return 0 if self.modified or self.private else self.exact_part(length)

    def cut(self, length: int) -> Origin:
        """Return the origin of the state of the first ``length`` tokens."""
        if self.inexact_from is None or self.inexact_from < length:
            return self
        return replace(self, inexact_from=None)


COMPUTED = Origin()
"""The state is what the tokens give."""


@dataclass(eq=False, slots=True, kw_only=True)
class Branch:
    """A history, and the sequence of the KV state that holds its first tokens."""

    tokens: TokenHistory = field(default_factory=TokenHistory)
    runs: AdapterRuns = BASE
    """Under which adapter each token runs, also those to come."""
    window: Window | None = None
    """What its sequence keeps of its tokens; None: all of them."""
    seq: SeqId | None = None
    """The sequence; None while nothing of the branch is in the pool."""
    computed: int = 0
    """Tokens whose state ``seq`` holds."""
    origin: Origin = COMPUTED
    mark: int | None = None
    """Where a recurrent state is kept to come back to, instead of earlier ones; None: nowhere."""

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet."""
        return self.tokens.size - self.computed  # of each sequence in each step, often

    @property
    def salt(self) -> Hashable:
        """Return the salt. Two branches may share state only if they have the same one, and run
        under the same adapters."""
        return None

    @property
    def modified(self) -> bool:
        """Return whether its state cannot be had again by running its tokens."""
        return self.origin.modified

    def runs_before(self, length: int) -> AdapterRuns:
        """Return the adapters of the first ``length`` tokens; of none the base model."""
        return self.runs.cut(length) if length else BASE

    def recede(self, length: int) -> None:
        """Note that the state of the first ``length`` tokens is left, and no other."""
        self.computed, self.origin = length, self.origin.cut(length)

    def become(self, other: Branch, length: int, seq: SeqId | None) -> None:
        """Become the first ``length`` tokens of another branch, copying none of them. ``seq`` holds
        the state of all of these; None: nothing does yet."""
        self.tokens, self.window = other.tokens.fork(length), other.window
        self.runs = other.runs_before(length)
        self.origin = other.origin.cut(length) if length else COMPUTED
        self.mark = None if other.mark is None or other.mark > length else other.mark
        self.seq, self.computed = seq, 0 if seq is None else length
