"""The search for what a prompt missed: prefixes whose state was evicted, and longer matches under
its own key and its owner's others.

What is found is only said, in ``RequestOutput.reuse``. No torch.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable

from quire.adapters.keys import owner_of, salt_of
from quire.base.outputs import Miss
from quire.base.token_history import Ids
from quire.branches.prefix_cache import RadixCache
from quire.engine.request import Request

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
        self._tree.clear()


KEYS = 16
"""Keys of an owner in which a longer match is searched: the last used ones."""
OWNERS = 4096
"""Owners whose keys are remembered."""
QUOTED = 4
"""Tokens of another text that are quoted."""


class MissSearch:
    """What was there (``past``) beside what is (``cache``). ``forgets``: why a match ends early
    where all of the tokens are held: windows, or recurrent states that were not kept."""

    def __init__(self, cache: RadixCache, past: PastPrefixes, forgets: Miss) -> None:
        self._cache = cache
        self._past = past
        self.forgets = forgets
        self._keys: OrderedDict[Hashable, OrderedDict[Hashable, None]] = OrderedDict()
        """The last keys by owner; both in the order of use."""

    def explain(self, request: Request, limit: int) -> None:
        """Note at the first admission of a request which longer match it missed in its first
        ``limit`` tokens, of which ``computed`` were found."""
        branch, note = request.branch, request.seat.reuse
        if not branch.cacheable:
            return
        keys = self._used(branch.key)
        if request.seat.admitted or limit < LEAST or branch.computed >= limit:
            return
        ids_T, key, computed = branch.tokens.ids[:limit], branch.key, branch.computed
        if note.known > computed:
            note.miss(self.forgets, note.known)
        held, next_held = self._cache.ahead(ids_T, key, QUOTED)
        past, next_past = self._past.ahead(ids_T, key, QUOTED)
        own = max(held, past, note.known)
        if past >= max(LEAST, computed + 1):
            note.miss(Miss.EVICTED, past)
        salt = salt_of(key)
        # Of equals another adapter comes before another salt: that is what its client may mean.
        for other in sorted(keys, key=lambda one: salt_of(one) != salt):
            if other == key:
                continue
            found = max(self._cache.ahead(ids_T, other, 0)[0], self._past.ahead(ids_T, other, 0)[0])
            if found > own and found >= LEAST:
                note.miss(Miss.OTHER_ADAPTER if salt_of(other) == salt else Miss.OTHER_SALT, found)
        for length, there in ((held, next_held), (past, next_past)):
            # That a prompt parts early is worth a word, too, where all before was reused.
            worth = length >= LEAST or (length == computed > 0)
            if length == own and worth and length < limit and there.size:
                note.miss(Miss.OTHER_TEXT, length, there)

    def _used(self, key: Hashable) -> OrderedDict[Hashable, None]:
        """Note the use of a key; return those that its owner used last."""
        owner = owner_of(key)
        keys = self._keys.setdefault(owner, OrderedDict())
        keys[key] = None
        keys.move_to_end(key)
        self._keys.move_to_end(owner)
        if len(keys) > KEYS:
            keys.popitem(last=False)
        if len(self._keys) > OWNERS:
            self._keys.popitem(last=False)
        return keys
