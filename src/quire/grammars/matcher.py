"""The position of one generation's text in its grammar: a timed matcher of llguidance.

A mask or a token of a usual grammar takes well under a millisecond. A grammar that can read one
text in many ways (``s: s s | s s s | "x"``) takes half a second for each mask, while others wait,
and llguidance's limits do not tell it from a wide grammar, whose masks have as many items and take
a millisecond. So the time of each text's grammar is measured, and has a limit.

Letters: M matchers; B words of a mask (``quire.sampling.filters``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.base.errors import QuireError, ResourceExhausted
from quire.grammars.formats import reason_of
from quire.sampling.filters import Words

if TYPE_CHECKING:
    from llguidance import LLMatcher

GRAMMAR_ENDED = "structured_outputs: the grammar cannot go on from here: "
"""How an error begins that ends a generation because of what its grammar is."""

USUAL_SECONDS = 0.02
"""Processor seconds that a token may take, for its mask and for taking it in, without being
counted."""

MAX_SECONDS = 5.0
"""Most counted processor seconds of the grammar of one generation."""


class GrammarMatcher:
    """Where the text of one generation is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.inner = matcher
        """llguidance's."""
        self.over = False
        """Whether, at the last mask, the text could end and nothing could be added to it."""
        self._seconds = 0.0
        """Processor seconds of the grammar since the last token."""
        self._excess = 0.0
        """Processor seconds beyond ``USUAL_SECONDS`` a token, of all tokens so far."""

    def fork(self) -> GrammarMatcher:
        """Return a matcher at the same place."""
        copy = GrammarMatcher(self.inner.deep_copy())
        copy._excess = self._excess
        return copy

    def accept(self, token: int) -> None:
        """Take in a ``token`` that joined the text and did not end it. ``ResourceExhausted`` if the
        grammar has stopped, only beyond limits on a parser's size, or has taken too long."""
        started = time.thread_time()
        going_on = self.inner.consume_token(token)
        seconds, self._seconds = self._seconds + time.thread_time() - started, 0.0
        self._excess += max(0.0, seconds - USUAL_SECONDS)
        if not going_on:
            raise self.problem() or QuireError(f"structured_outputs: token {token} does not continue the text")
        if self._excess > MAX_SECONDS:
            raise ResourceExhausted(
                f"{GRAMMAR_ENDED}its tokens took {self._excess:.1f} s beyond {USUAL_SECONDS:g} s each, and "
                f"{MAX_SECONDS:g} s are allowed; let it read a text in fewer ways"
            )

    def accepts(self, token: int) -> bool:
        """Return whether ``token`` continues the text, in a hundredth of a mask's time."""
        started = time.thread_time()
        accepted = bool(self.inner.validate_tokens([token]) == 1)
        self._seconds += time.thread_time() - started
        return accepted

    def num_accepted(self, tokens: Sequence[int]) -> int:
        """Return the number of ``tokens`` that continue the text, one after the other."""
        started = time.thread_time()
        count = int(self.inner.validate_tokens(list(tokens)))
        self._seconds += time.thread_time() - started
        return count

    def forced_text(self) -> str:
        """Return the text that must come next, as far as whole characters are certain; "" if there
        is a choice."""
        started = time.thread_time()
        text: str = self.inner.compute_ff_bytes().decode("utf-8", errors="ignore")
        self._seconds += time.thread_time() - started
        return text

    def fill(self, masks_MB: Words, row: int) -> None:
        """Make the mask, in a row of ``masks_MB``."""
        from llguidance.numpy import fill_next_token_bitmask

        started = time.thread_time()
        fill_next_token_bitmask(self.inner, masks_MB.view(np.int32), row)
        self._seconds += time.thread_time() - started

    @property
    def accepting(self) -> bool:
        """Return whether the text could end at the last mask."""
        return self.inner.is_accepting()

    @property
    def complete(self) -> bool:
        """Return whether the text is whole and nothing can be added to it."""
        return self.inner.is_stopped() and self.inner.is_accepting()

    def problem(self) -> QuireError | None:
        """Return the error of a stopped grammar; None if it continues."""
        reason = self.reason()
        return None if reason is None else ResourceExhausted(f"{GRAMMAR_ENDED}{reason}")

    def reason(self) -> str | None:
        """Return the words of ``problem``."""
        return reason_of(self.inner)
