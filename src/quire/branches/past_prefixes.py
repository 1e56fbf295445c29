"""Prefixes whose state was there and was given up: only their tokens, to tell what was missed.

No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from quire.branches.history import Ids
from quire.branches.prefix_cache import RadixCache

LEAST = 32
"""Tokens; a shorter beginning in common is worth no word."""
MOST_TOKENS = 1 << 20
"""Tokens that are remembered, 8 bytes each. Those noted longest ago are forgotten first."""
MOST_PREFIXES = 4096


class PastPrefixes:
    """The prefixes that were given up last, in a radix tree for each key."""

    def __init__(self, most_tokens: int = MOST_TOKENS, most_prefixes: int = MOST_PREFIXES) -> None:
        self._most_tokens, self._most_prefixes = most_tokens, most_prefixes
        # Its sequences are only numbers here.
        self._tree, self._numbers = RadixCache(), itertools.count()

    @property
    def num_tokens(self) -> int:
        """Tokens that are remembered, each distinct one of a key once."""
        return self._tree.num_tokens

    def note(self, tokens_T: Ids, key: Hashable) -> None:
        """Remember that the state of all these tokens was there, if they are not too few or too
        many."""
        if not LEAST <= tokens_T.size <= self._most_tokens:
            return
        self._tree.insert(next(self._numbers), tokens_T, key)
        tree = self._tree
        while tree.num_cached and (tree.num_tokens > self._most_tokens or tree.num_cached > self._most_prefixes):
            tree.evict()

    def ahead(self, tokens_T: Ids, key: Hashable, count: int) -> tuple[int, Ids]:
        """Return how many of these tokens were there, and at most ``count`` that came after."""
        return self._tree.ahead(tokens_T, key, count)

    def clear(self) -> None:
        """Forget all."""
        self._tree.clear()
