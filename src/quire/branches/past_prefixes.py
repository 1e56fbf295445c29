"""Tokens of prefixes whose state was evicted, to report what a prompt missed. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from quire.base.token_history import Ids
from quire.branches.prefix_cache import RadixCache

LEAST = 32
"""Least number of common tokens to report."""
MOST_TOKENS = 1 << 20
"""Most tokens that are remembered, 8 bytes each. The oldest notes are forgotten first."""
MOST_PREFIXES = 4096


class PastPrefixes:
    """The prefixes that were evicted last, in a radix tree for each key."""

    def __init__(self, most_tokens: int = MOST_TOKENS, most_prefixes: int = MOST_PREFIXES) -> None:
        self._most_tokens, self._most_prefixes = most_tokens, most_prefixes
        # Its sequences are only numbers here.
        self._tree, self._numbers = RadixCache(), itertools.count()

    @property
    def num_tokens(self) -> int:
        """Number of remembered tokens, each distinct one of a key once."""
        return self._tree.num_tokens

    def note(self, tokens_T: Ids, key: Hashable) -> None:
        """Remember that the state of these tokens existed, unless they are too few or too many."""
        if not LEAST <= tokens_T.size <= self._most_tokens:
            return
        self._tree.insert(next(self._numbers), tokens_T, key)
        tree = self._tree
        while tree.num_cached and (tree.num_tokens > self._most_tokens or tree.num_cached > self._most_prefixes):
            tree.evict()

    def ahead(self, tokens_T: Ids, key: Hashable, count: int) -> tuple[int, Ids]:
        """Return the number of leading tokens that existed, and at most ``count`` tokens that
        followed."""
        return self._tree.ahead(tokens_T, key, count)

    def clear(self) -> None:
        """Forget all."""
        self._tree.clear()
