"""The radix tree of a prefix cache: tokens on its edges, sequences at its nodes. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from quire.base.errors import AlreadyExists, QuireError
from quire.base.token_history import Ids, common_prefix
from quire.base.types import SeqId


class PrefixNode:
    """A node: ``edge`` holds the tokens after the parent's, ``end`` counts the tokens from the root
    on.

    Each node owns its edge, because a view of a short prefix would keep a long array alive. So the
    tree stores each distinct token of its sequences once, in 8 bytes.
    """

    __slots__ = ("children", "edge", "end", "parent", "sequences")

    def __init__(self, edge: Ids, end: int, parent: PrefixNode | None) -> None:
        self.edge = edge
        self.end = end
        self.parent = parent
        self.children: dict[int, PrefixNode] = {}
        """The nodes below, by the first token of their edges."""
        self.sequences: dict[SeqId, HeldPrefix] = {}
        """The sequences that end here."""

    @property
    def start(self) -> int:
        """Number of tokens from the root to the beginning of the edge."""
        return self.end - self.edge.size

    def walk(self, tokens_T: Ids) -> tuple[PrefixNode, int]:
        """Descend from this root as far as ``tokens_T`` match; return the last node and the matched
        length. The length may be inside the node's edge."""
        node, length = self, 0
        while length < tokens_T.size:
            child = node.children.get(int(tokens_T[length]))
            if child is None:
                break
            node = child
            length += common_prefix(node.edge, tokens_T[length:])
            if length < node.end:
                break
        return node, length

    def holder(self, length: int) -> PrefixNode:
        """Return the ancestor (or this node) whose edge holds the token before position
        ``length``."""
        node = self
        while node.parent is not None and length <= node.start:
            node = node.parent
        return node

    def ending_at(self, length: int) -> PrefixNode:
        """Return the ancestor that ends at ``length``; an edge is split to make it if there is
        none."""
        lower = self.holder(length)
        if lower.end == length:
            return lower
        parent = lower.parent
        assert parent is not None, "a root has no edge to split"
        cut = length - lower.start
        upper = PrefixNode(lower.edge[:cut].copy(), length, parent)
        parent.children[int(upper.edge[0])] = upper
        lower.edge = lower.edge[cut:].copy()
        lower.parent = upper
        upper.children[int(lower.edge[0])] = lower
        return upper

    def above(self) -> Iterator[HeldPrefix]:
        """Yield the sequences that end here or at an ancestor."""
        node: PrefixNode | None = self
        while node is not None:
            yield from node.sequences.values()
            node = node.parent

    def below(self) -> Iterator[PrefixNode]:
        """Yield this node and all nodes below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, *, forgetful: bool) -> None:
        """Raise ``QuireError`` if an invariant is broken; ``forgetful``: states drop positions."""
        for first, child in self.children.items():
            expect(child.parent is self, "children point to their parent")
            expect(child.edge.size > 0 and int(child.edge[0]) == first, "children are found by their first token")
            expect(child.start == self.end, "edges join")
        expect(self.edge.dtype == np.int64 and self.edge.base is None, "edges are int64 and owned")
        if self.parent is not None:
            expect(bool(self.sequences) or len(self.children) > 1, "an inner node branches or ends a sequence")
        if cached := sum(not entry.live for entry in self.sequences.values()):
            alone = cached == 1 if forgetful else not self.children and len(self.sequences) == 1
            expect(alone and self.end > 0, "a cached sequence ends alone at a leaf")


class HeldPrefix:
    """A sequence that holds exactly the tokens from the root to the end of ``node``."""

    __slots__ = ("key", "live", "node", "seq")

    def __init__(self, seq: SeqId, key: Hashable, node: PrefixNode) -> None:
        self.seq = seq
        self.key = key
        self.node = node
        self.live = True

    @property
    def tokens(self) -> Ids:
        """Return a copy of the tokens."""
        edges: list[Ids] = []
        node: PrefixNode | None = self.node
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1])

    def require_extended(self, key: Hashable, node: PrefixNode | None, matched: int, length: int) -> None:
        """Raise ``AlreadyExists`` unless ``matched`` tokens on the way to ``node`` begin with the
        tokens held here. ``length``: number of all given tokens."""
        if self.key != key:
            raise AlreadyExists(f"sequence {self.seq} is in the prefix cache under key {self.key!r}, not {key!r}")
        held = self.node.end
        if node is None or matched < held or node.holder(held) is not self.node:
            raise AlreadyExists(
                f"sequence {self.seq} is in the prefix cache with {held} other tokens; the {length} given must begin with "
                "these (truncate or remove it first)"
            )


def expect(condition: bool, invariant: str) -> None:
    """Raise ``QuireError`` with the invariant's name unless ``condition`` holds."""
    if not condition:
        raise QuireError(f"prefix cache invariant broken: {invariant}")
