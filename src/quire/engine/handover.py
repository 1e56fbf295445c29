"""Prompts that one engine computes for another: the receiving half and the sending one.

What has come whole is a finished prompt of the prefix cache, so the request that follows finds it
there. What has not leaves no trace, and the request computes its prompt as any other does. The
caller holds the engine's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import FailedPrecondition, NotFound, ResourceExhausted
from quire.base.token_history import TokenHistory
from quire.base.types import BASE, SeqId
from quire.contracts.channel import Channel
from quire.engine.engine import Engine
from quire.engine.request import AskedFor, Output, Request, RequestBranch, Seat
from quire.engine.requests import owner_of
from quire.runner.reclaim import ReclaimKind


@dataclass(frozen=True, slots=True, eq=False)
class IncomingPrompt:
    seq: SeqId
    tokens: NDArray[np.int64]
    key: Hashable
    """Of the prefix cache."""
    begin: int
    """The number of first tokens that were here."""
    map: tuple[int, ...]


class IncomingPrompts:
    """The prompts that an engine receives. They hold pages, and give them up after cached prefixes
    and before a running request is preempted."""

    def __init__(self, engine: Engine) -> None:
        """Receive for an engine, whose prefix cache gets what comes."""
        if engine.cache is None:
            raise FailedPrecondition("the prefix cache is off, which would get what comes; set enable_prefix_caching")
        self._engine, self._cache = engine, engine.cache
        self._coming: dict[SeqId, IncomingPrompt] = {}
        engine.runner.room.join(self)

    def begin(
        self, tokens: NDArray[np.int64], *, key: Hashable, adapter: int | None, channel: Channel, least: int
    ) -> IncomingPrompt | None:
        """Take pages for what the cache lacks of a prompt; None if that is less than ``least``
        tokens. ``ResourceExhausted``, ``NotFound`` (adapter), ``DataLoss`` (channel)."""
        branches, state = self._engine.branches, self._engine.runner.state
        prefix = branches.prefix_key(key, BASE.then(0, adapter))
        parent, begin = self._cache.match(tokens, prefix) or (None, 0)
        if tokens.size - begin < least:
            return None
        seq = branches.add_seq() if parent is None else branches.fork_of(parent, begin)
        try:
            while True:
                try:
                    found = state.disagg_prepare_recv(seq, tokens.size - begin, channel=channel)
                    break
                except ResourceExhausted:
                    if not branches.make_room():
                        raise
        except BaseException:
            branches.remove(seq)
            raise
        incoming = self._coming[seq] = IncomingPrompt(seq, tokens, prefix, begin, found)
        return incoming

    def finish(self, incoming: IncomingPrompt) -> None:
        """Let prompts find what has come; ``DataLoss`` or ``Cancelled`` if it has not, and nothing
        is left of it."""
        if self._coming.pop(incoming.seq, None) is None:
            raise NotFound("its pages were needed for other requests")
        try:
            self._engine.runner.state.disagg_wait(incoming.seq, 0)
        except BaseException:
            self._engine.branches.remove(incoming.seq)
            raise
        self._engine.branches.remove(*self._cache.insert(incoming.seq, incoming.tokens, incoming.key))

    def drop(self, incoming: IncomingPrompt) -> None:
        """Give up what was to come."""
        if self._coming.pop(incoming.seq, None) is not None:
            self._engine.branches.remove(incoming.seq)

    # -- runner.reclaim.SequenceOwner --------------------------------------------------------------

    def reclaim_one(self, kind: ReclaimKind) -> bool:
        """Give up the last prompt that has begun to come."""
        if kind is not ReclaimKind.IDLE or not self._coming:
            return False
        self.drop(self._coming[next(reversed(self._coming))])
        return True

    def reclaimable(self) -> Collection[SeqId]:
        """See ``SequenceOwner``."""
        return list(self._coming)


def send_prompt(
    engine: Engine,
    tokens: NDArray[np.int64],
    *,
    key: Hashable,
    adapter: str | None,
    begin: int,
    position_map: Sequence[int],
    channel: Channel,
) -> Request:
    """Queue the computation of a prompt, whose state from token ``begin`` on goes to the slots of
    a map. ``adapter``: a fingerprint. ``InvalidArgument``, ``NotFound``, ``ResourceExhausted``."""
    engine.checks.tokens(tokens)
    engine.checks.length(tokens.size, None)
    branches, state, cache = engine.branches, engine.runner.state, engine.cache
    runs = BASE.then(0, adapter_of(engine, adapter))
    prefix = branches.prefix_key(key, runs)
    parent, held = (None if cache is None else cache.match(tokens, prefix)) or (None, 0)
    if begin > held:
        raise FailedPrecondition(
            f"the receiver has the first {begin} tokens of the prompt, and {held} of them are here"
        )
    branch = RequestBranch(tokens=TokenHistory(tokens), key=prefix, runs=runs, reusable=cache is not None)
    branch.seq = branches.add_seq() if parent is None else branches.fork_of(parent, held)
    branch.computed = held
    asked = AskedFor(request_id=engine.requests.name(), num_prompt=tokens.size, owner=owner_of(key))
    request = Request(asked, branch, Seat(), Output(wants="none"))
    try:
        state.disagg_mark_send(branch.seq, begin, position_map, channel)
        if branch.remaining:
            engine.requests.queue([request])
            return request
    except BaseException:
        branches.remove(branch.seq)
        raise
    branches.share(branch, prefix, live=False)
    request.output.finish_reason = "length"
    return request


def adapter_of(engine: Engine, fingerprint: str | None) -> int | None:
    """Return the id of the adapter with a fingerprint; ``NotFound``."""
    pool = engine.runner.adapters
    if fingerprint is None:
        return None
    for number in pool.ids:
        if pool.get(number).fingerprint == fingerprint:
            return number
    raise NotFound(f"no adapter of fingerprint {fingerprint} is loaded here; load the same one on both servers")
