"""The position of one generation's text in its grammar: a timed matcher of llguidance.

Letters: M matchers; B words of a mask (``quire.sampling.filters``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.base.errors import QuireError, ResourceExhausted
from quire.grammars import slow_masks
from quire.grammars.formats import reason_of
from quire.grammars.slow_masks import Coming, SlowMasks
from quire.sampling.filters import Words

if TYPE_CHECKING:
    from llguidance import LLMatcher

GRAMMAR_ENDED = "structured_outputs: the grammar cannot go on from here: "
"""How an error begins that ends a generation because of what its grammar is."""


class GrammarMatcher:
    """Where the text of one generation is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.inner = matcher
        """llguidance's."""
        self.over = False
        """Whether, at the last mask, the text could end and nothing could be added to it."""
        self.slow = False
        """Whether its last token took so long that the next mask is made beside the engine."""
        self._seconds = 0.0
        """Of a core, since the last token."""
        self._coming: Coming[Words] | None = None

    def fork(self) -> GrammarMatcher:
        """Return a matcher at the same place."""
        return GrammarMatcher(self.inner.deep_copy())

    def accept(self, token: int) -> float:
        """Take in a ``token`` that joined the text and did not end it; return seconds of a core.
        ``ResourceExhausted`` if the grammar has stopped: only beyond limits on a parser's size."""
        started = time.thread_time()
        going_on = self.inner.consume_token(token)
        seconds = time.thread_time() - started
        self.slow, self._seconds = self._seconds + seconds > slow_masks.SLOW_SECONDS, 0.0
        if not going_on:
            raise self.problem() or QuireError(f"structured_outputs: token {token} does not continue the text")
        return seconds

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
        is a choice, or if the grammar is slow."""
        if self.slow or not self.ready:
            return ""
        started = time.thread_time()
        text: str = self.inner.compute_ff_bytes().decode("utf-8", errors="ignore")
        self._seconds += time.thread_time() - started
        return text

    @property
    def ready(self) -> bool:
        """Return whether a mask can be had without waiting for its computation."""
        return self._coming is None or self._coming.ready

    def make_ahead(self, masks: SlowMasks, num_words: int) -> None:
        """Have the next mask made beside the engine; ask nothing else before it is ``ready``."""

        def make() -> Words:
            mask_MB: Words = np.zeros((1, num_words), dtype=np.uint32)
            masks.spent(self.fill(mask_MB, 0), beside=True)
            mask_B: Words = mask_MB[0]
            return mask_B

        self._coming = Coming(make)
        masks.start(self._coming)

    def drop(self) -> None:
        """Drop the mask that is being made or waits for its turn."""
        if self._coming is not None:
            self._coming.drop()

    def made_ahead(self) -> Words | None:
        """Return the mask that was made beside the engine, once; None if none was."""
        coming, self._coming = self._coming, None
        return None if coming is None else coming.result()

    def fill(self, masks_MB: Words, row: int) -> float:
        """Make the mask, in a row of ``masks_MB``. Returns the seconds of a core that this took."""
        from llguidance.numpy import fill_next_token_bitmask

        started = time.thread_time()
        fill_next_token_bitmask(self.inner, masks_MB.view(np.int32), row)
        seconds = time.thread_time() - started
        self._seconds += seconds
        return seconds

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
