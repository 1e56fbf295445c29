"""``BranchOwner``: an owner of branches, which forks, cuts and removes their sequences.

A window may have dropped tokens, and a recurrent layer keeps a state at some positions only. So a
branch that goes back returns to the nearest position that is held (``BranchOwner.reach``), and
replays its tokens from there on, if these can be replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from quire.base.errors import FailedPrecondition
from quire.base.token_history import UNKNOWN
from quire.base.types import Add, Commit, Edit, Fork, Pop, Remove, SeqId, SetWindow, Step
from quire.branches.branch import COMPUTED, Branch
from quire.contracts.kv_state import ModelState
from quire.kv.windows import Window
from quire.runner.local import Runner


class BranchOwner(ABC):
    """An owner of branches over one runner: the engine, or the caches of an executor. The caller
    holds the runner's lock."""

    @property
    @abstractmethod
    def runner(self) -> Runner:
        """The runner, which other owners may share."""

    @property
    def state(self) -> ModelState:
        return self.runner.state

    @property
    def adapter_ids(self) -> Collection[int]:
        """The ids of the loaded adapters."""
        return self.runner.adapters.ids

    def apply(self, *edits: Edit) -> None:
        """Execute edits at once, by the runner, which owns the KV state."""
        if edits:
            self.runner.execute(Step(edits=edits))

    def make_room(self) -> bool:
        """Give up one thing that can be had again; return False if there is none."""
        return self.runner.room.make()

    def fits(self, adapters: Collection[int]) -> bool:
        """Return True if one forward can use these adapters together. One alone always fits."""
        return self.runner.adapters.fits(adapters)

    def new_seq(self) -> SeqId:
        """Return an id for a new sequence."""
        return self.runner.new_seq()

    def add_seq(self, window: Window | None = None) -> SeqId:
        """Add an empty sequence, which keeps a window of its tokens; return its id."""
        seq = self.new_seq()
        self.apply(Add(seq), *(() if window is None else (SetWindow(seq, window.size, window.sink),)))
        return seq

    def fork_of(self, seq: SeqId, length: int = -1) -> SeqId:
        """Fork a sequence, or its first ``length`` tokens; return the fork. It shares the pages
        (``kv.sequence_table``), and copies none."""
        fork = self.new_seq()
        self.apply(Fork(seq, fork, length))
        return fork

    def remove(self, *seqs: SeqId) -> None:
        """Remove sequences."""
        self.apply(*(Remove(seq) for seq in seqs))

    def pop(self, seq: SeqId, held: int, length: int) -> int:
        """Cut a sequence of ``held`` tokens to ``length`` tokens, or to the nearest position below
        at which state is left. Return its new number of tokens."""
        if held <= length:
            return held
        kept = self.state.nearest_reachable(seq, length)
        self.apply(Pop(seq, held - kept))
        return kept

    def rollback(self, branch: Branch, length: int) -> None:
        """Cut the state of a branch to its first ``length`` tokens. If its sequence has a tree of
        drafts, commit the path of the branch's own tokens first, and drop the other nodes. The
        branch keeps its tokens; those without state run again."""
        if branch.seq is None:
            return
        held, nodes = self.state.sequence_length(branch.seq), self.state.pending_nodes(branch.seq)
        if nodes:
            # Drafts ran as a tree: the path of the branch's tokens is what counts.
            path: list[int] = []
            if branch.nodes is not None:
                tokens, tree = branch.nodes
                path = tree.path(branch.tokens.ids[held:length].tolist(), tokens.tolist())
            self.apply(Commit((branch.seq,), (path[-1] if path else -1,)))
            held += len(path)
        branch.truncate_computed(self.pop(branch.seq, held, length))

    def reach(self, branch: Branch, length: int, what: str = "") -> int:
        """Return the computed tokens that a branch keeps if it goes back to its first ``length``:
        fewer where no state is left. ``FailedPrecondition`` if the tokens after them cannot be
        replayed. ``what``: name of the branch in errors."""
        if branch.seq is None:
            return 0
        wanted = min(length, branch.computed)
        position = self.state.nearest_reachable(branch.seq, wanted)
        if position < wanted:
            require_replayable(self.state, branch, position, wanted, self.adapter_ids, what)
        return position

    def fork_state(self, parent: Branch, child: Branch, held: int) -> None:
        """Give a branch with the first tokens of another a fork of the state of ``held`` of them.
        The others are left to run."""
        if parent.seq is None or not held:
            child.seq, child.computed, child.origin, child.mark = None, 0, COMPUTED, None
            return
        child.seq = self.fork_of(parent.seq, held)
        child.truncate_computed(held)


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
