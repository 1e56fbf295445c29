"""Pinned state: prefixes that stay in the pool for a time, and limits on what all pins hold.

A pinned prefix is a pinned session without a user (``PrefixPins``). It holds a fork of the state,
which shares pages with it, counts for an account like other pinned sessions, and is found by the
prefix cache like any sequence. When its time is over it becomes a cached sequence.

Pinned state is never given up for others, so a server gives each of its users an account
(``Pins``). Nothing is booked: the pages that sessions hold, and will hold at the ends of their
requests, are counted anew whenever one wants more. No torch.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.errors import FailedPrecondition, PoolExhausted, QuireError, QuotaExceeded
from quire.base.hints import PinAccount, PrefixName, RequestHints
from quire.base.types import BASE, SeqId
from quire.branches.prefix_cache import RadixCache
from quire.branches.session_branch import SessionBranch
from quire.engine.request import RequestBranch
from quire.kv.windows import Window

if TYPE_CHECKING:
    from quire.branches.session_branches import SessionBranches
    from quire.contracts.kv_state import ModelState


class Pins:
    """Counts the pages held by the pinned ones of ``sessions``. The caller holds the engine's
    lock."""

    def __init__(self, state: ModelState, sessions: Mapping[int, SessionBranch], step: int) -> None:
        """Watch ``sessions``; a forward has ``step`` tokens at most."""
        self._state = state
        self._sessions = sessions
        self._step = step

    def check(self, session: SessionBranch, length: int, account: PinAccount | None) -> None:
        """Refuse ``length`` tokens for a session pinned for ``account``: ``QuotaExceeded`` beyond
        its account's share, ``PoolExhausted`` beyond that of all. None allows anything."""
        if account is None:
            return
        pinned = [one for one in self._sessions.values() if (one.pinned or one.modified) and one is not session]
        self._require([one for one in pinned if one.account is account], session, length, account.share, own=True)
        self._require(pinned, session, length, account.total, own=False)

    def _require(
        self, others: Sequence[SessionBranch], session: SessionBranch, length: int, share: float, *, own: bool
    ) -> None:
        wanted = self._held([*others, session])
        for one, goal in [*((one, _goal(one)) for one in others), (session, length)]:
            wanted = [have + more for have, more in zip(wanted, self._growth(one, goal), strict=True)]
        for pages, size in zip(wanted, self._state.pool_sizes(), strict=True):
            allowed = int(size * share)
            if pages <= allowed:
                continue
            if own:
                raise QuotaExceeded(
                    f"your pinned sessions and prompts would hold {pages} of {size} pages, and may hold {allowed}; delete one, generate fewer "
                    "tokens (max_tokens), or do without pin"
                )
            raise PoolExhausted(
                f"all pinned sessions and prompts would hold {pages} of {size} pages, and may hold {allowed}; try again later, or do without pin"
            )

    def _held(self, sessions: Sequence[SessionBranch]) -> list[int]:
        kept = [seq for one in sessions if one.modified for seq in _sequences(one)]
        return self._state.pages_held([seq for one in sessions for seq in _sequences(one)], kept)

    def _growth(self, session: SessionBranch, length: int) -> list[int]:
        """Return the pages of each pool that a session takes at most up to ``length`` tokens."""
        if length <= session.computed and session.seq is not None:
            return [0] * len(self._state.pool_sizes())
        most = self._state.pages_at_most(length, _sizes(session.window), self._step)
        if session.modified and (self._state.forgets or session.window is not None):
            return most  # all that it holds now may stay beside, as the way back
        # Of the pages that it shares, the last one is copied when it writes.
        copied = any(self._state.sequence_pages(seq)[1] for seq in _sequences(session))
        return [max(0, end - have) + copied for end, have in zip(most, self._held([session]), strict=True)]


def _sequences(session: SessionBranch) -> list[SeqId]:
    return [seq for seq in (session.present.seq, session.undo_fork) if seq is not None]


def _goal(session: SessionBranch) -> int:
    """Return the tokens of whose state a session has when its request ends."""
    return session.computed if session.request is None else session.request.final_length


def _sizes(window: Window | None) -> tuple[int, int] | None:
    return None if window is None else (window.size, window.sink)


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

    def pin_due(self, hints: RequestHints, prompt: RequestBranch) -> None:
        """Pin the prefixes named by hints, as far as they are computed by now."""
        for position, pin in hints.due(prompt.computed):
            try:
                tokens, made = self.pin(prompt, position, pin.ttl, hints.account)
            except QuireError as error:
                hints.refused(pin, error)
            else:
                hints.pinned(pin, position, tokens, made)

    def pin(self, prompt: RequestBranch, length: int, ttl: float, account: PinAccount) -> tuple[int, PrefixName | None]:
        """Keep the state of the first ``length`` tokens of a request for ``ttl`` seconds. Return
        the number of tokens kept, fewer where states forget, and the name of a new pin; None: such
        a pin was there, and lasts as long as the longer one.

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
        self._branches.note_use(branch)
        self._branches.remove(*cache.insert(branch.seq, ids, prompt.key, live=True))
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
            branches.remove(*branches.cache.insert(branch.seq, branch.tokens.ids, branch.key))

    def drop(self, name: PrefixName) -> None:
        """Give up one whose state is broken."""
        if (held := self._held.pop(name, None)) is not None:
            self._branches.forget(held.branch)

    def clear(self, gone: Callable[[Hashable], bool] = lambda key: True) -> None:
        """Give up the pins of keys that are ``gone``."""
        for name in [name for name, held in self._held.items() if gone(held.branch.key)]:
            self.drop(name)
