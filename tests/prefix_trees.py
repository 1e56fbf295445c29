"""The invariants of the trees of a prefix cache."""

from __future__ import annotations

import numpy as np

from quire.base.types import SeqId
from quire.branches.prefix_cache import HeldPrefix, PrefixNode, RadixCache


def check_trees(cache: RadixCache) -> None:
    """Assert every invariant; visits all nodes."""
    ends: dict[SeqId, HeldPrefix] = {}
    for key, root in cache._roots.items():
        assert (root.end, root.edge.size, root.parent) == (0, 0, None), "a root has no edge and no parent"
        assert root.children or root.sequences, "an empty tree is dropped"
        for node in root.below():
            _check_node(node, forgetful=cache._reach is not None)
            for seq, entry in node.sequences.items():
                assert (entry.node, entry.seq, entry.key) == (node, seq, key), "entries point to their node"
                assert seq not in ends, "a sequence ends once"
                ends[seq] = entry
    edges = [node.edge.size for root in cache._roots.values() for node in root.below()]
    assert sum(edges) == cache.num_tokens, "the tokens on all edges are counted"
    assert ends == cache._entries, "the trees hold exactly the known sequences"
    cached = {seq: entry for seq, entry in ends.items() if not entry.live}
    assert cached == dict(cache._cached), "the eviction order holds exactly the cached sequences"


def _check_node(node: PrefixNode, *, forgetful: bool) -> None:
    """``forgetful``: states drop positions."""
    for first, child in node.children.items():
        assert child.parent is node, "children point to their parent"
        assert child.edge[:1].tolist() == [first], "children are found by their first token"
        assert child.start == node.end, "edges join"
    assert (node.edge.dtype, node.edge.base) == (np.int64, None), "edges are int64 and owned"
    if node.parent is not None:
        assert node.sequences or len(node.children) > 1, "an inner node branches or ends a sequence"
    if cached := sum(not entry.live for entry in node.sequences.values()):
        alone = cached == 1 if forgetful else not node.children and len(node.sequences) == 1
        assert alone, "a cached sequence ends alone at a leaf"
        assert node.end > 0, "a cached sequence has tokens"
