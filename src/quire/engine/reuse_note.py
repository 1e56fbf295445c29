"""What is noted about the reuse of a request's state until its first admission. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.branches.history import Ids
from quire.outputs import Miss


@dataclass(eq=False, slots=True)
class ReuseNote:
    """Tokens that were found, and the longest match that was missed."""

    cached: int = 0
    """Tokens of the prompt whose state was there at the first admission."""
    known: int = 0
    """Tokens whose state the prefix cache, or its session, has or had."""
    replayed: int = 0
    """Those of them that were not there at the first admission, and ran again."""
    by_tier: dict[str, int] = field(default_factory=dict)
    """Reused tokens whose state came from outside of the pool, by the kind of their tier."""
    missed: Miss = Miss.NONE
    missed_at: int | None = None
    """As in ``quire.outputs.Reuse``."""
    there: Ids | None = None
    """For another text: its first tokens from ``missed_at`` on."""

    def count(self, computed: int) -> None:
        """Note how many tokens were found."""
        self.cached = computed
        self.replayed = max(0, self.known - computed)

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Tokens of ``cached`` by tier; only tiers that had some."""
        found = {"pool": self.cached - sum(self.by_tier.values()), **self.by_tier}
        return {tier: count for tier, count in found.items() if count}

    def miss(self, reason: Miss, at: int | None, there: Ids | None = None) -> None:
        """Note a missed match of ``at`` tokens, unless one at least as long is noted. None, a
        length that is not known, counts as the longest."""
        if self.missed is Miss.NONE or at is None or (self.missed_at is not None and at > self.missed_at):
            self.missed, self.missed_at, self.there = reason, at, there
