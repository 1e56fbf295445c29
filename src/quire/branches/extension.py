"""``Extension``: new tokens of a branch, which run before they count. No torch at run time.

Engine steps and executor calls extend branches alike. ``chunk`` makes a part of a forward,
``extend`` runs it, and ``keep`` decides: the first tokens count, or the path to a node of a tree,
and the state of the others is taken back. Steps ahead and executor calls, with their token trees,
accept and reject tokens by ``keep``. The engine's drafts, chains and trees, do not: ``EngineSteps``
draws their tokens, and ``BranchOwner.rollback`` commits or pops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.base.errors import QuireError
from quire.base.token_history import Ids
from quire.base.types import BASE, AdapterRuns, Chunk, Commit, LogitsWanted, SeqId, Step, TokenTree
from quire.branches.branch import Branch

if TYPE_CHECKING:
    from quire.branches.owner import BranchOwner
    from quire.runner.local import Runner, StepOutput

NOTHING: Final[Ids] = np.empty(0, dtype=np.int64)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes of a tree from a root to ``node``; empty for -1."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


@dataclass(eq=False, slots=True)
class Extension:
    """Tokens behind the first ``start`` tokens of a branch."""

    branch: Branch
    """Its sequence runs them."""
    start: int
    runs: AdapterRuns = BASE
    """The adapter of each token of the branch, and of the new ones."""
    parents: tuple[int, ...] | None = None
    """The parents of its tokens, which run as one tree in one forward; None: a chain."""
    positions: Ids | None = None
    """Positions of its tokens; None: their indices, or as their tree implies."""
    num_run: int = 0
    """Number of its tokens that have run."""
    pieces: tuple[Ids, ...] = ()
    """These tokens, forward by forward."""

    @property
    def seq(self) -> SeqId:
        assert self.branch.seq is not None
        return self.branch.seq

    @property
    def end(self) -> int:
        """The position of its next token, as far as it is a chain."""
        return self.start + self.num_run

    @property
    def ids(self) -> Ids:
        """The tokens that have run."""
        return np.concatenate((NOTHING, *self.pieces))

    def chunk(self, ids: Ids, logits: LogitsWanted = "last", checkpoints: tuple[int, ...] = ()) -> Chunk:
        """Return its next tokens, all under one adapter, as a part of a forward."""
        seq = self.branch.seq
        if seq is None:
            raise QuireError("a branch without a sequence cannot run")
        tree = None if self.parents is None else TokenTree(self.parents)
        adapter = None if self.runs is BASE else self.runs.at(self.start + self.num_run)
        return Chunk(seq, ids, tree, adapter, logits, checkpoints)  # type: ignore[arg-type]

    def kept(self, count: int) -> Ids:
        """Return the indices of the tokens that count: the first ``count``, or the path to node
        ``count`` of a tree (-1: none)."""
        return np.arange(count) if self.parents is None else np.array(path_to(self.parents, count), dtype=np.int64)


def extend(runner: Runner, step: Step, extensions: Sequence[Extension]) -> StepOutput:
    """Run a forward whose chunk i has the next tokens of ``extensions[i]``. They do not count
    before ``keep``."""
    for extension, chunk in zip(extensions, step.chunks, strict=True):
        if chunk.tree is not None:
            extension.branch.nodes = chunk.tokens, chunk.tree  # type: ignore[assignment]
    output = runner.execute(step)
    count_run(step, extensions)
    return output


def count_run(step: Step, extensions: Sequence[Extension]) -> None:
    """Record that chunk i of a forward has run the next tokens of ``extensions[i]``."""
    for extension, chunk in zip(extensions, step.chunks, strict=True):
        ids: Ids = chunk.tokens  # type: ignore[assignment]
        extension.num_run += len(ids)
        extension.pieces += (ids,)


def keep(owner: BranchOwner, extensions: Sequence[Extension], counts: Sequence[int] | None = None) -> None:
    """Let the first ``counts[i]`` tokens of each extension count (None: all), or the path to node
    ``counts[i]`` of its tree, and take the others back. The branch's history has these tokens, or
    gets them.

    A branch without a sequence, whose load failed, keeps nothing. Where no state is left at the end
    of a chain that is cut, the branch has fewer computed tokens.
    """
    for index, one in enumerate(extensions):
        branch, ran = one.branch, one.num_run
        if branch.seq is None or not ran:
            continue
        count = ran if counts is None else counts[index]
        if one.parents is not None:
            owner.apply(Commit((branch.seq,), (count,)))
            branch.computed = one.start + len(one.kept(count))
        elif count < ran:
            branch.truncate_computed(owner.pop(branch.seq, one.end, one.start + count))
        else:
            branch.computed = one.start + ran
