"""``BranchOwner``: an owner of branches, which forks, cuts and removes their sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from quire.base.types import Add, Commit, Edit, Fork, Pop, Remove, SeqId, SetWindow, Step
from quire.branches.branch import COMPUTED, Branch
from quire.branches.replay_needs import require_replayable
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
