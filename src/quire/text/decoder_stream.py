"""Text that grows token by token, of a decoder of which nothing is known.

The decoder is asked for the text of the last tokens, again after each token. It is right for any
decoder that changes what it gave only at the end, where a character may be incomplete, and whose
text of a token does not depend on tokens far before it. Whether that is so is compared when the
tokens before are dropped; if it is not, they stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[list[int]], str]
"""From ids to their text."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
KEPT = 16
"""Tokens before the last one that the decoder is given, at least, if there are as many."""
MOST_PARTIAL = 3
"""Bytes, and so tokens, of an incomplete character, at most."""


class DecoderStream:
    """The text of tokens after others. What has been given is never taken back."""

    def __init__(self, decode: Decode, context: Sequence[int]) -> None:
        """Begin after ``context``, of which the text is known."""
        self._decode = decode
        self._ids: list[int] = []
        self._given = ""
        """The text of ``_ids`` that is final."""
        self._held = 0
        """The last tokens of ``_ids``, whose text is not."""
        self._limit = 4 * KEPT
        self._damaged = 0
        """Characters that stand for the context's incomplete last one and are not given."""
        for token_id in self._end_of(context):
            self.push(token_id)
        if self._held:
            text = self._decode(self._ids)
            self._damaged = len(text) - len(text.rstrip(REPLACEMENT))

    def fork(self) -> DecoderStream:
        """Return a copy, for another continuation."""
        other = copy.copy(self)
        other._ids = self._ids.copy()
        return other

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is final now."""
        self._ids.append(token_id)
        self._held += 1
        text = self._decode(self._ids)
        doubtful = len(text) - len(text.rstrip(REPLACEMENT))
        if not text.startswith(self._given):
            if doubtful and self._held <= MOST_PARTIAL:
                return ""  # an incomplete character can hide others before it
            self._ids, self._given = self._ids[-self._held :], ""
            text = self._decode(self._ids)
            doubtful = len(text) - len(text.rstrip(REPLACEMENT))
        final = text[: len(text) - min(doubtful, MOST_PARTIAL)]
        new = final[len(self._given) :]
        if len(final) > len(self._given):
            self._given = final
        if not doubtful:
            self._held = 0
            self._forget()
        return self._of_output(new)

    def finish(self) -> str:
        """Return the text that was held back."""
        text = self._decode(self._ids)
        if not text.startswith(self._given):
            text, self._given = self._decode(self._ids[-self._held :]), ""
        new = text[len(self._given) :]
        self._given, self._held = text, 0
        return self._of_output(new)

    @property
    def is_incomplete(self) -> bool:
        """Return whether text is held back."""
        return self._held > 0

    def _of_output(self, new: str) -> str:
        """Return new text without what stands for a character that the context did not end."""
        while new and self._damaged:
            if not new.startswith(REPLACEMENT):
                self._damaged = 0
                break
            new, self._damaged = new[1:], self._damaged - 1
        return new

    def _end_of(self, context: Sequence[int]) -> Sequence[int]:
        """Return the last ids of a context: enough to have a text, and to begin with a whole
        character."""
        count = KEPT
        while count < len(context):
            for start in range(count, count + MOST_PARTIAL + 1):
                text = self._decode(list(context[-start:]))
                if text.strip(REPLACEMENT) and not text.startswith(REPLACEMENT):
                    return context[-start:]
            count *= 2
        return context

    def _forget(self) -> None:
        """Drop the first tokens of many, if the text of the others is the same without them."""
        if len(self._ids) < self._limit:
            return
        for count in range(KEPT, KEPT + MOST_PARTIAL + 1):
            text = self._decode(self._ids[-count:])
            # The first token of a text may lose a space.
            if len(text) > 1 and self._given.endswith(text[len(text) // 2 :]):
                self._ids, self._given, self._limit = self._ids[-count:], text, 4 * KEPT
                return
        self._limit = 2 * len(self._ids)
