"""Checks whether tokens of a branch can be replayed. No torch at run time.

A window may have dropped tokens, and a recurrent layer keeps a state at some positions only. So a
branch that goes back returns to the nearest position that is held (``BranchOwner.reach``), and
replays its tokens from there on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from quire.base.errors import FailedPrecondition
from quire.base.token_history import UNKNOWN
from quire.branches.branch import Branch

if TYPE_CHECKING:
    from quire.contracts.kv_state import ModelState


def require_replayable(
    state: ModelState, branch: Branch, start: int, length: int, loaded: Collection[int], what: str, since: int = -1
) -> None:
    """Raise ``FailedPrecondition`` unless tokens ``start..length - 1`` can be replayed. ``since``:
    the first token that must be replayable; -1: ``start``."""
    if reason := replay_refusal(branch, start if since < 0 else since, length, loaded):
        raise FailedPrecondition(
            f"{what}position {length} is reachable only by running tokens {start}..{length - 1} again, and {reason}; state is "
            f"kept at {_kept(state, branch)}"
        )


def replay_refusal(branch: Branch, start: int, stop: int, loaded: Collection[int]) -> str:
    """Return the reason why tokens ``start..stop - 1`` of a branch cannot be replayed; empty if
    they can."""
    if branch.modified:
        return "its state was written into and cannot be computed again"
    ids = branch.tokens.ids[start:stop]
    if ids.size and ids.min() < 0:
        if (ids == UNKNOWN).any():
            return "its tokens are not recorded"
        if any(token not in branch.tokens.media.rows for token in ids[ids < 0].tolist()):
            return "embeddings that stood at placeholders among them are gone"
    gone = branch.runs.between(start, stop).difference(loaded)
    return f"they ran under adapter {min(gone)}, which was unloaded" if gone else ""


def _kept(state: ModelState, branch: Branch) -> str:
    """Return, in words, the positions that a branch can return to without a replay."""
    seq = branch.seq
    assert seq is not None
    if state.recurrent_ids:
        found = [
            position for position in state.kept_positions(seq) if state.nearest_reachable(seq, position) == position
        ]
        return ", ".join(map(str, found))
    return ", ".join(
        f"{part.start}..{part.stop - 1}" if len(part) > 1 else str(part.start) for part in state.reachable(seq)
    )
