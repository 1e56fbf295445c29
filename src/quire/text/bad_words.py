"""The tokens of words that a text must not have."""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer


def spelled(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each word as it is given, without white space before it, and behind one
    space: the beginning of a word belongs to its first token in most vocabularies."""
    texts: dict[str, None] = {}
    for word in words:
        bare = word.lstrip()
        texts |= dict.fromkeys((word, bare, f" {bare}") if bare else (word,))
    return [ids for text in texts if (ids := tokenizer.encode_inside(text))]
