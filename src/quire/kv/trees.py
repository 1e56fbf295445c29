"""Token trees: the uncommitted nodes of one sequence. Indices only; no torch.

Nodes are counted in order of appending, over all forwards since the last commit. The parent of node
j is an index below j, or -1: a root, behind the last committed token. A node sees its ancestors and
itself.

Letters: n nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument
from quire.contracts.pool_verbs import TokenTreeParents


@dataclass(frozen=True, slots=True)
class Tree:
    """All uncommitted nodes of a sequence."""

    parents: tuple[int, ...]
    depths: NDArray[np.int64]
    """``[n]``: position of a node is the committed length plus its depth."""
    ancestry: NDArray[np.bool_]
    """``[n, n]``: whether node i sees node j (its ancestors and itself)."""

    @property
    def size(self) -> int:
        return len(self.parents)

    def grown(self, parents: Sequence[int]) -> Tree:
        """Return the tree with more nodes. Parents are indices over all of it, checked before."""
        old, size = self.size, self.size + len(parents)
        depths = np.empty(size, dtype=np.int64)
        depths[:old] = self.depths
        ancestry = np.zeros((size, size), dtype=np.bool_)
        ancestry[:old, :old] = self.ancestry
        for node, parent in enumerate(parents, start=old):
            depths[node] = 0 if parent < 0 else depths[parent] + 1
            if parent >= 0:
                ancestry[node] = ancestry[parent]
            ancestry[node, node] = True
        return Tree((*self.parents, *parents), depths, ancestry)

    def path(self, leaf: int) -> list[int]:
        """Return the nodes from a root to ``leaf``, in order."""
        return np.flatnonzero(self.ancestry[leaf]).tolist()

    def check(self) -> str:
        """Return the fault in the tree; empty if there is none."""
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                return f"node {node} has parent {parent}"
            if self.depths[node] != (0 if parent < 0 else self.depths[parent] + 1):
                return f"node {node} has depth {self.depths[node]}"
            expected = np.zeros(self.size, dtype=np.bool_) if parent < 0 else self.ancestry[parent].copy()
            expected[node] = True
            if (self.ancestry[node] != expected).any():
                return f"node {node} sees the wrong nodes"
        return ""


NO_TREE = Tree((), np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.bool_))


def parents_of_entries(
    parents: TokenTreeParents, counts: Sequence[int], pending: Sequence[int]
) -> list[list[int] | None]:
    """Return the parents of each entry's new nodes, None for an entry of ordinary tokens.

    ``pending``: the uncommitted nodes of each entry, after which new ones are counted.
    ``InvalidArgument`` for what is neither one flat list of all parents, nor a list with one item
    per entry; and for a list that is no tree.
    """
    flat = [item for item in parents if isinstance(item, int)]
    entries: list[list[int] | None]
    if flat:
        if len(flat) != sum(counts):
            raise InvalidArgument(f"token_tree_parents: {len(flat)} parents for {sum(counts)} new tokens")
        ends = np.cumsum(counts).tolist()
        entries = [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]
    else:
        entries = [None if item is None else list(item) for item in parents if not isinstance(item, int)]
        if len(entries) != len(counts):
            raise InvalidArgument(f"token_tree_parents: {len(entries)} items for {len(counts)} entries; give one each")
    for entry, count, old in zip(entries, counts, pending, strict=True):
        if entry is None:
            continue
        if len(entry) != count:
            raise InvalidArgument(f"token_tree_parents: {len(entry)} parents for an append length of {count}")
        for node, parent in enumerate(entry, start=old):
            if not -1 <= parent < node:
                raise InvalidArgument(
                    f"token_tree_parents: node {node} has parent {parent}; -1 <= parent < {node} is needed"
                )
    return entries
