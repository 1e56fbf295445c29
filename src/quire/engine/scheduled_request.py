"""One request, from waiting to finished, as the scheduler sees it. No torch.

A request is a branch: what is left to run of it is ``remaining``, one token left is a decode.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.branches.adapter_keys import salt_of
from quire.branches.branch import Branch
from quire.branches.tiers import Brought
from quire.engine.reuse_note import ReuseNote
from quire.errors import PoolExhausted, ResourceExhausted
from quire.outputs import Miss
from quire.types import BASE, LogitsWanted

if TYPE_CHECKING:
    from quire.engine.prompt_blend import PromptBlend

BACKGROUND = 2**31 - 1
"""The priority of what runs only if nothing else does: lower than any other."""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class ScheduledRequest(Branch):
    """The scheduler's part of a request, to which the engine's adds text and sampling."""

    key: Hashable = None
    """What may share a prefix: salt and adapters (``quire.branches.adapter_keys``)."""
    wants: LogitsWanted = "last"
    """Logits of the last token, once all are computed (``last``), of every token, or of none."""
    cacheable: bool = True
    """Whether it may use and feed the prefix cache."""
    fresh_from: int | None = None
    """Tokens from here on must run, even if cached: their logits are wanted. None: the last one."""
    owner: str = ""
    """The API key among which steps and places are divided; empty: none."""
    priority: int = 0
    """Lower values are admitted earlier among the requests of a key, and preempted later."""
    arrival: int = 0
    """Order of arrival, which decides among equal priorities."""
    stops: tuple[int, ...] = ()
    """Positions, ascending, at which a step ends, so that a state that forgets can be kept
    there."""
    num_cached: int = 0
    """Tokens of the prompt whose state was there at the first admission."""
    known: int = 0
    """Tokens whose state the prefix cache, or its session, has or had."""
    num_replayed: int = 0
    """Those of them that were not there at the first admission, and ran again."""
    reuse_note: ReuseNote = field(default_factory=ReuseNote)
    """Where its state came from, and why no more was found."""
    partings: set[int] = field(default_factory=set)
    """Positions where other prompts part from this one, or where this one parted from others."""
    reusable: bool = False
    """Whether the prefix cache, or a session, may go back into the middle of it."""
    num_preemptions: int = 0
    short_since: int | None = None
    """The step since which it waits for pages; None: it does not, as far as is known."""
    status: Status = Status.WAITING
    pinned: bool = False
    """Its state must not be given up: it was asked to stay, or cannot be computed again
    (written)."""
    admitted: bool = False
    """Whether it was ever admitted."""
    is_ready: Callable[[], bool] | None = None
    """Tells whether it can take part in a step while something is made for it; None: always."""

    blend: PromptBlend | None = None
    """How cached state of its segments is used; None: not at all."""
    question: Any = None
    """The question what tiers have of its tokens; None: it was not asked, or is of no use."""

    @property
    def salt(self) -> Hashable:
        return salt_of(self.key)

    @property
    def dilution(self) -> int:
        """Tokens of it that count as one of a step's: most rows of a blended prompt do not run."""
        return 1 if self.blend is None else self.blend.dilution

    def admit(self) -> None:
        """Run from now on; look for rows to be blended with."""
        self.status, self.admitted = Status.RUNNING, True
        if self.blend is not None:
            self.blend.begin(self)

    def recede(self, length: int) -> None:
        """See ``Branch``. What goes back to its first token is blended anew later."""
        Branch.recede(self, length)
        if self.blend is not None and not length:
            self.blend.end()

    def note_reuse(self) -> None:
        """Count what was found of it, until it is admitted."""
        if not self.admitted:
            self.num_cached = self.computed
            self.num_replayed = max(0, self.known - self.computed)

    def note_found(self, found: Brought) -> None:
        """Note what comes from outside of the pool, until it is admitted."""
        if not self.admitted:
            self.reuse_note.by_tier |= found.by_tier
            if found.miss is not Miss.NONE:
                self.reuse_note.miss(found.miss, found.length)

    def note_lost(self, miss: Miss, length: int) -> None:
        """Note that ``length`` tokens did not come. If that was at its first admission, it does not
        count as that."""
        if self.reuse_note.by_tier:
            self.reuse_note.by_tier.clear()
            self.admitted = False
            self.reuse_note.miss(miss, length)
            self.note_reuse()

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Tokens of ``num_cached`` by tier; only tiers that had some."""
        outside = self.reuse_note.by_tier
        found = {"pool": self.num_cached - sum(outside.values()), **outside}
        return {tier: count for tier, count in found.items() if count}

    @property
    def ready(self) -> bool:
        """Return whether it can take part in a step. It cannot while something is made for it, or
        while tiers have not answered."""
        return (self.is_ready is None or self.is_ready()) and (self.question is None or self.question.is_answered)

    @property
    def order(self) -> tuple[int, int]:
        """Return the key that sorts requests, the next one to run first."""
        return self.priority, self.arrival

    @property
    def next_adapter(self) -> int | None:
        """Under which adapter its next token runs."""
        return None if self.runs is BASE else self.runs.at(self.computed)


def no_room(request: ScheduledRequest, missing: int, *, alone: bool) -> ResourceExhausted:
    """Return the error of a request that cannot run; ``alone``: even in an empty pool."""
    short = (
        f"a sequence of {len(request.tokens)} tokens is short of {missing} pages (of tokens, or of recurrent states)"
    )
    if alone:
        return ResourceExhausted(f"{short} of an empty pool; give fewer tokens, or a larger kv_cache_memory")
    return PoolExhausted(
        f"{short} with nothing left to give up; close or unpin sessions, release KV caches, or give a larger kv_cache_memory"
    )
