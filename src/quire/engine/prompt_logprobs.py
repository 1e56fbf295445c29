"""The log-probabilities of a prompt's tokens, as its chunks are computed.

Letters: R rows of logits; V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import QuireError
from quire.sampling.sampled_tokens import TokenLogprobs
from quire.sampling.token_logprobs import logprobs_of


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, from the logits of its chunks (not kept)."""

    def __init__(self, tokens: NDArray[Any], count: int) -> None:
        """Collect the log-probabilities of each prompt token and of the ``count`` most probable
        ones."""
        self._tokens = tokens
        self._count = count
        self.entries: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on, as far as they are known."""

    @property
    def complete(self) -> bool:
        return len(self.entries) == len(self._tokens) - 1

    def take(self, position: int, rows_RV: Tensor) -> None:
        """Read the logits of the tokens from ``position`` on, each of its successor; skip known
        ones. ``QuireError`` if they are not finite."""
        known = len(self.entries)
        targets = self._tokens[known + 1 : position + rows_RV.shape[0] + 1].tolist()
        if not targets:
            return
        start = known - position
        found = logprobs_of(rows_RV[start : start + len(targets)].float(), targets, [self._count] * len(targets))
        for offset, entry in enumerate(found):
            if entry is None or math.isnan(entry.chosen.logprob):
                raise QuireError(f"the logits after token {known + offset} of the prompt hold NaN or +inf")
            self.entries.append(entry)
