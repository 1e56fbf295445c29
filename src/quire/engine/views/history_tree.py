"""``history_of``: branches as trees over their tokens, one for each salt and adapters. No torch.

The trees are those of the prefix cache (``branches.prefix_tree``), over all tokens of all branches
instead of those that are computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.branches.adapter_keys import NO_SALT, AdapterKey, OwnedSalt, is_private, salt_of
from quire.branches.prefix_tree import PrefixNode
from quire.contracts.views import BranchView, HistoryNode, HistoryView
from quire.engine.views.state_reading import NO_TOKENS, ReadBranch
from quire.engine.views.token_texts import TextReader

NODE_BYTES = 6
"""Of a node's id, which is this many bytes of a digest, in hexadecimal digits."""


@dataclass(slots=True)
class _Tree:
    """The tree of one key."""

    root: PrefixNode = field(default_factory=lambda: PrefixNode(NO_TOKENS, 0, None))
    ends: dict[int, list[str]] = field(default_factory=dict)
    """Ids of the branches that end at a node, by the node's identity."""

    def add(self, branch: ReadBranch, name: str) -> None:
        ids_T = branch.ids()
        node, matched = self.root.walk(ids_T)
        node = node.ending_at(matched)
        if matched < ids_T.size:
            leaf = PrefixNode(ids_T[matched:].copy(), ids_T.size, node)
            node.children[int(leaf.edge[0])] = leaf
            node = leaf
        self.ends.setdefault(id(node), []).append(name)


def history_of(reading: int, branches: Iterable[tuple[ReadBranch, BranchView]], texts: TextReader) -> HistoryView:
    """Return all of these branches, and the trees that they make. Cost O(tokens) in NumPy, and
    O(nodes)."""
    listed = list(branches)
    trees: dict[Hashable, _Tree] = {}
    for branch, view in listed:
        if branch.key is not None:  # else its tokens are not known
            trees.setdefault(branch.key, _Tree()).add(branch, view.id)
    nodes: list[HistoryNode] = []
    for key, tree in trees.items():
        nodes += _nodes(key, tree, texts)
    return HistoryView(reading=reading, branches=tuple(view for _, view in listed), nodes=tuple(nodes))


def _nodes(key: Hashable, tree: _Tree, texts: TextReader) -> Sequence[HistoryNode]:
    found: list[HistoryNode] = []
    waiting: list[tuple[PrefixNode, str | None]] = [(tree.root, None)]
    while waiting:
        node, parent = waiting.pop()
        name = _name(repr(_plain(key)) if parent is None else f"{parent} {node.edge[0]}")
        head, tail = texts.ends(node.edge)
        found.append(
            HistoryNode(
                id=name,
                parent=parent,
                start=node.start,
                end=node.end,
                branches=tuple(tree.ends.get(id(node), ())),
                head=head,
                tail=tail,
                key=_told(key) if parent is None else None,
            )
        )
        waiting += [(child, name) for child in reversed(node.children.values())]
    return found


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=NODE_BYTES).hexdigest()


def _plain(key: Hashable) -> object:
    """Return a key as what has the same text in every process."""
    return (key.salt, key.runs) if isinstance(key, AdapterKey) else key


def _told(key: Hashable) -> dict[str, str | None]:
    """Return what a tree does not share with others, in words."""
    salt = salt_of(key)
    adapter = key.runs[-1][1] if isinstance(key, AdapterKey) else None
    found: str | None = None
    if is_private(salt):
        found = "private"
    elif salt != NO_SALT and isinstance(salt, tuple) and len(salt) == 2:
        given = salt[1].given if isinstance(salt[1], OwnedSalt) else salt[1]
        found = given
    return {"adapter": adapter, "salt": found}
