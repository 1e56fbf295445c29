"""Which decodes may be queued while other steps are in flight. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.base.token_history import Ids
from quire.base.types import Step
from quire.branches.extension import Extension
from quire.engine.checkpoints import Checkpoints
from quire.engine.request import Request
from quire.engine.scheduler import Scheduler
from quire.engine.step_builder import ScheduledStep

if TYPE_CHECKING:
    from quire.contracts.kv_state import ModelState

PATIENCE = 16
"""Steps ahead in a row beside requests that wait for pages. Then the scheduler checks whether there
are any: pages come free in other ways than by the end of a request."""

UNREAD: Final[Ids] = np.zeros(1, dtype=np.int64)
"""The token of a chunk that the host has not read."""


class DecodesAhead:
    """Chooses a step behind one whose tokens are not known yet: one more token of each request that
    continues. It makes no room and admits no request, for a scheduler that knows all tokens does
    that better."""

    def __init__(self, scheduler: Scheduler, state: ModelState, checkpoints: Checkpoints | None) -> None:
        self._scheduler, self._state, self._checkpoints = scheduler, state, checkpoints
        self._steps = 0
        """Steps in a row beside requests that wait for pages."""

    def step(self, requests: Sequence[Request], running: int, *, known: bool = False) -> ScheduledStep | None:
        """Return the step of one more token of each of ``requests``. None: the scheduler is to
        choose once all tokens are known, for others might run beside these, or room must be made.
        ``running``: requests of the steps in flight that have not ended. ``known``: whether the
        last token of each request is known, and is the one to run; else the chunks have token
        0."""
        scheduler, limits = self._scheduler, self._scheduler.limits
        if not requests or len(requests) > min(limits.max_num_batched_tokens, limits.max_num_seqs):
            return None
        if len(scheduler.running) != running or not self._nobody_comes():
            return None
        seqs = [request.branch.seq for request in requests if request.branch.seq is not None]
        counts = [1] * len(seqs)
        if len(seqs) < len(requests) or self._state.missing_pages(seqs, counts):
            return None
        kept = [()] * len(seqs) if self._checkpoints is None else self._checkpoints.wishes(requests, counts)
        extensions = tuple(Extension(one.branch, one.branch.computed, one.branch.runs) for one in requests)
        chunks = tuple(
            one.chunk(one.branch.tokens.ids[-1:].copy() if known else UNREAD, "last", positions)
            for one, positions in zip(extensions, kept, strict=True)
        )
        scheduler.queues.shares.charge(Counter(request.asked.owner for request in requests))
        return ScheduledStep(Step(chunks=chunks), tuple(requests), extensions)

    def _nobody_comes(self) -> bool:
        """Return whether no request waits, or none of the waiting could be admitted now."""
        scheduler = self._scheduler
        self._steps = self._steps + 1 if scheduler.waiting and scheduler.lacks_room else 0
        if not scheduler.waiting:
            return True
        if scheduler.queues.seated >= scheduler.limits.max_num_seqs and not scheduler.queues.owes_places:
            return True
        return scheduler.lacks_room and self._steps % PATIENCE != 0
