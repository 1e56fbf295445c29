"""Limits on what pinned state holds of the pools: each account's, and all together.

Pinned state is never given up for others, so a server gives each of its users an account. Nothing
is booked: what sessions hold, and what running ones will hold at their end, is counted anew
whenever one wants more. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quire.engine.session_branch import SessionBranch
from quire.errors import PoolExhausted, QuotaExceeded
from quire.hints import PinAccount
from quire.kv.windows import Window
from quire.types import SeqId

if TYPE_CHECKING:
    from quire.contracts.kv_state import ModelState


class Pins:
    """Counts what the pinned ones of ``sessions`` hold. The caller holds the engine's lock."""

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
    request = session.request
    found = [session.seq] if request is None else [request.branch.seq, request.branch.way_back]
    return [seq for seq in found if seq is not None]


def _goal(session: SessionBranch) -> int:
    """Return the tokens of whose state a session has when its request ends."""
    request = session.request
    if request is None:
        return session.computed
    if request.params is None:
        return len(request.branch.tokens)
    return final_length(request.asked.num_prompt, request.params.max_tokens, request.asked.limit)


def final_length(prompt: int, max_tokens: int | None, limit: int) -> int:
    """Return the computed tokens at a generation's end: all but the last. ``limit`` bounds them."""
    return limit if max_tokens is None else min(limit, prompt + max_tokens - 1)


def _sizes(window: Window | None) -> tuple[int, int] | None:
    return None if window is None else (window.size, window.sink)
