"""``Tier``: storage of branches' state outside of the pool. No torch.

State is found by tokens, so no branch owns it there; missing state is computed again. The caller
holds the runner's lock. ``quire.branches.stored_state`` is the tier over a store.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.adapters.history import FingerprintRuns
from quire.base.outputs import Miss
from quire.base.token_history import Ids
from quire.base.types import SeqId
from quire.branches.branch import Branch


@dataclass(frozen=True, slots=True)
class Brought:
    """The result of ``Tier.bring``."""

    by_tier: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens by the kind of their tier."""
    miss: Miss = Miss.NONE
    """The reason why none of the ``length`` stored tokens is loaded."""
    length: int = 0


class Tier(Protocol):
    """Keeps copies of states, and loads them again."""

    open: Collection[SeqId]
    """The sequences with a load that is running, or ended and not yet passed to ``finish_load``."""
    ahead: dict[SeqId, int]
    """The sequences that were saved ahead of an eviction, with their lengths then. Callers write
    it."""
    forks: set[SeqId]
    """The forks that are kept until they are written, or until ``drop_pending_writes`` gives them
    up."""

    def save(self, branch: Branch) -> bool:
        """Copy out the state that a branch is about to lose, if that is worth it and fits. Return
        True if it can be loaded again."""
        ...

    def save_prefix(
        self, seq: SeqId, ids_T: Ids, runs: FingerprintRuns, salt: Hashable, *, ahead: bool = False
    ) -> bool:
        """As ``save``, for a sequence of the prefix cache. ``ahead``: copy in the background,
        because it may be evicted soon."""
        ...

    def keep(self, branch: Branch, *, again: bool = False) -> None:
        """Write a branch's state to durable tiers, if there are any, in the background. ``again``:
        prompts may consist of the same tokens, so that the last one runs again."""
        ...

    def ask(self, branch: Branch) -> Any:
        """Query the tiers for a branch's tokens; return the query, or None if nothing can be
        stored."""
        ...

    def bring(self, branch: Branch, question: Any, limit: int) -> Brought:
        """Begin to load at most ``limit`` tokens, if the tiers have more than are computed and
        loading beats computing. Then the branch has another ``seq``, of ``computed`` tokens; a
        forward may run after it if its step awaits the sequence."""
        ...

    def held(self, question: Any, limit: int) -> int:
        """Return the number of stored tokens, at most ``limit``; 0 until the query is answered. It
        is computed once for each query."""
        ...

    def is_near(self, seq: SeqId | None) -> bool:
        """Return True if a load of the sequence is running and all its objects are local, so that a
        forward may follow it."""
        ...

    def is_coming(self, seq: SeqId | None) -> bool:
        """Return True if a load of the sequence is still running."""
        ...

    def finish_load(self, branch: Branch) -> Miss:
        """End the load of a branch. On a failure return its reason; then the branch has no
        sequence, and ``computed`` is 0."""
        ...

    def drop(self, seq: SeqId) -> None:
        """End the load of a sequence that is about to be removed."""
        ...

    def reach(self, branch: Branch, length: int) -> int:
        """Return the number of a branch's first ``length`` tokens that could be loaded."""
        ...

    def drop_pending_writes(self) -> bool:
        """Give up forks that wait to be written; return False if there were none."""
        ...

    def ran(self, num_tokens: int, num_chunks: int, seconds: float, *, waited: bool) -> None:
        """Record the time of a step, by which ``save`` and ``bring`` decide. ``waited``: its
        results were waited for, so that the device is not still busy with it."""
        ...

    def snapshot(self) -> dict[str, float]:
        """Return its metrics by name."""
        ...
