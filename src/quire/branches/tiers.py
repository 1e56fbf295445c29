"""``Tier``: where the state of a branch may wait outside of the pool. No torch."""

from __future__ import annotations

from typing import Protocol

from quire.branches.branch import Branch


class Tier(Protocol):
    """A keeper of copies of states, by their branches. Tokens suffice: a lost copy is run again.
    The caller has the runner's lock. ``quire.branches.host_store`` is the tier in host memory."""

    def save(self, branch: Branch, *, waiting: bool) -> bool:
        """Keep a copy of the state that a branch is about to lose, if that is worth it and fits.
        ``waiting``: a request waits for it, so it stays until the request runs again."""
        ...

    def restore(self, branch: Branch, limit: int) -> None:
        """Put a copy, at most its first ``limit`` tokens, in place of a branch's empty sequence.

        Import it under a new id, set ``seq`` and ``computed`` of the branch, and remove the empty
        sequence through the runner. The copy is kept no longer. If it does not come back, the
        branch stays as it is.
        """
        ...

    def holds(self, branch: Branch) -> int:
        """Return the number of tokens whose state is kept for a branch."""
        ...

    def reach(self, branch: Branch, length: int) -> int:
        """Return what ``holds`` would after ``truncate`` to ``length``."""
        ...

    def beats(self, branch: Branch, cached: int, limit: int) -> bool:
        """Return whether restoring ``limit`` tokens beats running those behind ``cached``."""
        ...

    def truncate(self, branch: Branch, length: int) -> None:
        """Let only the first ``length`` tokens still be the branch's. Fewer are kept where windows
        and recurrent states do not let the copy be cut there."""
        ...

    def move(self, source: Branch, target: Branch, *, waiting: bool) -> None:
        """Let what was kept for one branch be kept for another."""
        ...

    def share(self, source: Branch, target: Branch, length: int) -> None:
        """Keep the first ``length`` tokens for a fork, too."""
        ...

    def discard(self, branch: Branch) -> None:
        """Keep nothing for a branch any more."""
        ...

    def ran(self, num_tokens: int, num_chunks: int, seconds: float, *, waited: bool) -> None:
        """Note what a step took, by which ``save`` and ``beats`` decide.

        ``waited``: its results were waited for, so that a device is not still busy with it.
        """
        ...

    def snapshot(self) -> dict[str, float]:
        """Return its metrics by name."""
        ...
