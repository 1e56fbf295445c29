"""``Tier``: where the state of branches may be outside of the pool. No torch.

State is found by tokens, so nothing belongs to a branch there: what is gone is run again. The
caller has the runner's lock. ``quire.branches.stored_state`` is the tier over a store.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.branches.branch import Branch
from quire.branches.history import Ids
from quire.outputs import Miss
from quire.runner.adapter_history import FingerprintRuns
from quire.types import SeqId


@dataclass(frozen=True, slots=True)
class Brought:
    """What a tier brings."""

    by_tier: Mapping[str, int] = field(default_factory=dict)
    """Tokens by the kind of tier that they come from."""
    miss: Miss = Miss.NONE
    """Why it brings none of the ``length`` tokens that are kept."""
    length: int = 0


class Tier(Protocol):
    """Keeps copies of states, and brings them back."""

    open: Collection[SeqId]
    """The sequences whose state comes, or has come, and was not settled."""
    ahead: dict[SeqId, int]
    """The sequences that were saved ahead, and their tokens then. Others note them here."""
    forks: set[SeqId]
    """The copies that stay until they are written, or until ``relieve`` gives them back."""

    def save(self, branch: Branch) -> bool:
        """Copy out the state that a branch is about to lose, if that is worth it and fits. Return
        whether it can be had again."""
        ...

    def save_prefix(
        self, seq: SeqId, ids_T: Ids, runs: FingerprintRuns, salt: Hashable, *, ahead: bool = False
    ) -> bool:
        """Do what ``save`` does for a sequence of the prefix cache. ``ahead``: begin to do so in
        the background, for one that may go soon."""
        ...

    def keep(self, branch: Branch, *, again: bool = False) -> None:
        """Write a branch's state to durable tiers, if there are any, in the background. ``again``:
        the same tokens may be asked for, so that the last one runs again."""
        ...

    def ask(self, branch: Branch) -> Any:
        """Ask what is kept of a branch's tokens; return the question, or None if there is none."""
        ...

    def bring(self, branch: Branch, question: Any, limit: int) -> Brought:
        """Begin to bring back at most ``limit`` tokens, if more are kept than are computed and that
        beats running them. Then ``seq`` is another one, of ``computed`` tokens, behind whose last
        one a forward may run if it waits for each layer."""
        ...

    def held(self, question: Any, limit: int) -> int:
        """Return how many of at most ``limit`` tokens are kept, as far as a question is answered.
        It is found once for each question."""
        ...

    def is_near(self, seq: SeqId | None) -> bool:
        """Return whether some of a sequence's state is coming and waits for no other machine, so
        that a forward may follow it."""
        ...

    def is_coming(self, seq: SeqId | None) -> bool:
        """Return whether some of a sequence's state has still to come."""
        ...

    def wait(self, seqs: Collection[SeqId], layer: int) -> None:
        """Wait until a layer of these sequences has come. ``LoadFailed`` if it did not."""
        ...

    def settle(self, branch: Branch) -> Miss:
        """End what came for a branch. Return why it did not come whole, if so: its sequence is then
        gone, and nothing of it is computed."""
        ...

    def drop(self, seq: SeqId) -> None:
        """Let nothing more come for a sequence that is about to be removed."""
        ...

    def reach(self, branch: Branch, length: int) -> int:
        """Return how many of a branch's first ``length`` tokens could be brought back."""
        ...

    def relieve(self) -> bool:
        """Give back pages that wait to be written; return whether there were any."""
        ...

    def ran(self, num_tokens: int, num_chunks: int, seconds: float, *, waited: bool) -> None:
        """Note what a step took, by which ``save`` and ``bring`` decide. ``waited``: its results
        were waited for, so that a device is not still busy with it."""
        ...

    def snapshot(self) -> dict[str, float]:
        """Return its metrics by name."""
        ...
