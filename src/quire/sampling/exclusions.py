"""Tokens that a request's own parameters exclude: all but the allowed ones, and bad words.

Letters: B words of a bit mask of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.sampling_params import SamplingParams
from quire.sampling.filters import Words, num_words


@dataclass(frozen=True, slots=True, eq=False)
class Exclusions:
    """The tokens that one request may not draw."""

    allowed_B: Words | None = None
    """The tokens that it may draw at any place; None: all."""
    sequences: tuple[tuple[list[int], int], ...] = ()
    """Bad words of several tokens: all but the last one, behind which the last one is excluded."""

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int, bad: Iterable[Sequence[int]] = ()) -> Exclusions:
        """Return the exclusions of these parameters. ``bad``: the token ids of each bad word. One
        with an id outside the vocabulary is left out, since it cannot be drawn."""
        bad = [ids for ids in bad if ids and max(ids) < vocab_size]
        single = [ids[0] for ids in bad if len(ids) == 1]
        if params.allowed_token_ids is None and not bad:
            return NO_EXCLUSIONS
        allowed_B: Words | None = None
        if params.allowed_token_ids is not None or single:
            bits = np.zeros(32 * num_words(vocab_size), dtype=np.uint8)
            bits[: vocab_size if params.allowed_token_ids is None else 0] = 1
            bits[list(params.allowed_token_ids or ())] = 1
            bits[single] = 0
            allowed_B = np.packbits(bits, bitorder="little").view(np.uint32)
        return cls(allowed_B, tuple(([*ids[:-1]], ids[-1]) for ids in bad if len(ids) > 1))

    def after(self, output: list[int]) -> list[int]:
        """Return the tokens that would complete a bad word behind these."""
        return [last for prefix, last in self.sequences if output[-len(prefix) :] == prefix]


NO_EXCLUSIONS = Exclusions()
