"""Text that grows token by token, of a decoder of which nothing is known.

The decoder is asked for the text of the last tokens, again after each token. It is right for any
decoder that changes what it gave only at the end, where a character may be incomplete, and whose
text of a token does not depend on tokens far before it.
"""

from __future__ import annotations

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
        self._given = self._end_of(context)
        """Tokens of which the text is final."""
        self._held: list[int] = []
        """Tokens behind them of which it is not."""
        # What completes the last character of the context gives all of it.
        while len(self._held) < MOST_PARTIAL and self._given and decode(self._given).endswith(REPLACEMENT):
            self._held.insert(0, self._given.pop())

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is final now."""
        self._held.append(token_id)
        text = self._new()
        if text.endswith(REPLACEMENT) and len(self._held) <= MOST_PARTIAL:
            return ""
        self._given, self._held = self._end_of([*self._given, *self._held]), []
        return text

    def finish(self) -> str:
        """Return the text that was held back."""
        text, self._held = self._new(), []
        return text

    @property
    def is_incomplete(self) -> bool:
        """Return whether text is held back."""
        return bool(self._held)

    def _new(self) -> str:
        """Return the text of the tokens that are held."""
        if not self._held:
            return ""
        before = self._decode(self._given).rstrip(REPLACEMENT) if self._given else ""
        text = self._decode([*self._given, *self._held])
        return text[len(before) :] if text.startswith(before) else self._decode(self._held)

    def _end_of(self, ids: Sequence[int]) -> list[int]:
        """Return the last ids of many, which begin with a whole character."""
        for count in range(KEPT, KEPT + MOST_PARTIAL + 1) if len(ids) > 2 * KEPT else ():
            text = self._decode(list(ids[-count:]))
            if text and not text.startswith(REPLACEMENT):
                return list(ids[-count:])
        return list(ids)
