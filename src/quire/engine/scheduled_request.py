"""One request, from waiting to finished, as the scheduler sees it. No torch.

A request is a branch: what is left to run of it is ``remaining``, one token left is a decode.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from quire.branches.branch import Branch
from quire.types import BASE, LogitsWanted

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
    priority: int = 0
    """Lower values are admitted earlier, and preempted later."""
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
    partings: set[int] = field(default_factory=set)
    """Positions where other prompts part from this one, or where this one parted from others."""
    reusable: bool = False
    """Whether the prefix cache, or a session, may go back into the middle of it."""
    num_preemptions: int = 0
    status: Status = Status.WAITING
    pinned: bool = False
    """Its state must not be given up: it was asked to stay, or cannot be computed again
    (written)."""
    admitted: bool = False
    """Whether it was ever admitted."""
    is_ready: Callable[[], bool] | None = None
    """Tells whether it can take part in a step while something is made for it; None: always."""

    @property
    def ready(self) -> bool:
        """Whether it can take part in a step."""
        return self.is_ready is None or self.is_ready()

    @property
    def order(self) -> tuple[int, int]:
        """What requests are sorted by, the next one to run first."""
        return self.priority, self.arrival

    @property
    def next_adapter(self) -> int | None:
        """Under which adapter its next token runs."""
        return None if self.runs is BASE else self.runs.at(self.computed)
