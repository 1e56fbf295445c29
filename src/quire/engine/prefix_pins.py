"""Beginnings of prompts that stay in the pool for a time, even if it is short.

A pinned prefix is a pinned session without a user: it holds a fork of the state, which shares pages
with it, counts for an account like other pinned sessions (``quire.engine.pins``), and is found by
the prefix cache like any sequence. When its time is over it becomes a cached sequence. No torch.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.branches.prefix_cache import RadixCache
from quire.engine.request import RequestBranch
from quire.engine.request_hints import PrefixName
from quire.engine.session_branch import SessionBranch
from quire.errors import FailedPrecondition
from quire.hints import PinAccount
from quire.types import BASE, SeqId

if TYPE_CHECKING:
    from quire.engine.pins import Pins
    from quire.engine.session_branches import SessionBranches


@dataclass(slots=True)
class PinnedPrefix:
    """A branch, and the time until which it stays."""

    branch: SessionBranch
    until: float


class PrefixPins:
    """All pinned prefixes of one engine. The caller holds the engine's lock."""

    def __init__(self, branches: SessionBranches, pins: Pins, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: monotonic seconds."""
        self._branches = branches
        self._pins = pins
        self.clock = clock
        self._held: dict[PrefixName, PinnedPrefix] = {}
        self._soonest = math.inf
        """When the next one's time may be over."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def branches(self) -> list[SessionBranch]:
        """Return the branches that hold the pinned prefixes."""
        return [held.branch for held in self._held.values()]

    def pin(self, prompt: RequestBranch, length: int, ttl: float, account: PinAccount) -> tuple[int, PrefixName | None]:
        """Keep the state of the first ``length`` tokens of a request for ``ttl`` seconds. Return
        how many tokens that are, fewer where states forget, and the name of a new pin; None: such a
        pin was there, and lasts as long as the longer one.

        ``QuotaExceeded`` and ``PoolExhausted`` beyond what the account may hold;
        ``FailedPrecondition`` if there is no prefix cache, or no state to keep.
        """
        cache = self._branches.cache
        if cache is None:
            raise FailedPrecondition("the prefix cache is off (enable_prefix_caching), so no prompt would find it")
        if not prompt.cacheable:
            raise FailedPrecondition("this state is no prefix for others; pin the session")
        self.expire()
        seq, length = self._source(cache, prompt, length)
        if seq is None:
            raise FailedPrecondition(f"no state is kept in the first {length} tokens")
        ids = prompt.tokens.ids[:length]
        digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        name, until = (account, prompt.key, digest), self.clock() + ttl
        self._soonest = min(self._soonest, until)
        if (held := self._held.get(name)) is not None:
            held.until = max(held.until, until)
            return length, None
        branch = SessionBranch(key=prompt.key, pinned=True, account=account)
        branch.become(prompt, length, self._branches.fork_of(seq, length))
        branch.runs = BASE  # the key says what it ran under, and its adapter may be unloaded
        assert branch.seq is not None
        try:
            self._pins.check(branch, length, account)
        except BaseException:
            self._branches.remove(branch.seq)
            raise
        self._branches.hold(branch)
        self._branches.remove_all(cache.insert(branch.seq, ids, prompt.key, live=True))
        self._held[name] = PinnedPrefix(branch, until)
        return length, name

    def _source(self, cache: RadixCache, prompt: RequestBranch, length: int) -> tuple[SeqId | None, int]:
        """Return the sequence that can be forked nearest to ``length``, and where; None and the
        length if there is none."""
        seq, kept = prompt.seq, 0
        if seq is not None:
            kept = self._branches.runner.state.nearest_reachable(
                seq, prompt.origin.exact_part(min(length, prompt.computed))
            )
        found = cache.find(prompt.tokens.ids[:length], prompt.key)
        if found is not None and found[1] > kept:
            seq, kept = found
        return (seq, kept) if kept else (None, length)

    def expire(self) -> bool:
        """Let those whose time is over become cached sequences; return whether there were any."""
        now = self.clock()
        if now < self._soonest:
            return False
        over = [name for name, held in self._held.items() if held.until <= now]
        for name in over:
            self._release(name)
        self._soonest = min((held.until for held in self._held.values()), default=math.inf)
        return bool(over)

    def _release(self, name: PrefixName) -> None:
        branch, branches = self._held.pop(name).branch, self._branches
        branches.sessions.pop(id(branch), None)
        if branch.seq is not None and branches.cache is not None:
            branches.remove_all(branches.cache.insert(branch.seq, branch.tokens.ids, branch.key))

    def drop(self, name: PrefixName) -> None:
        """Give up one whose state is broken."""
        if (held := self._held.pop(name, None)) is not None:
            self._branches.forget(held.branch)

    def clear(self, gone: Callable[[Hashable], bool] = lambda key: True) -> None:
        """Give up those of keys that are ``gone``."""
        for name in [name for name, held in self._held.items() if gone(held.branch.key)]:
            self.drop(name)
