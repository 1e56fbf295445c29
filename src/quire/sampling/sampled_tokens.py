"""Results of sampling: tokens and log-probabilities. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import QuireError


@dataclass(frozen=True, slots=True)
class RankedLogprob:
    """Log-probability (natural, float32) of one token under the raw distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most probable; ties go by lower id."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token, and the most probable tokens by rank (the chosen one included if
    ranked)."""

    chosen: RankedLogprob
    top: tuple[RankedLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """One token per row. A failed row holds ``FAILED``, and its error is in ``failures``."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """None for failed rows and for rows that asked for none."""
    failures: dict[int, QuireError]

    def raise_failures(self) -> None:
        """Raise the first failed row's error, for callers with one row per request."""
        for error in self.failures.values():
            raise error
