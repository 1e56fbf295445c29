"""``history_of``: branches as trees over their tokens, one for each salt and adapters. No torch.

The trees are built as in the prefix cache (``branches.prefix_cache``), over all tokens of all
branches instead of the computed ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from quire.adapters.keys import NO_SALT, AdapterKey, OwnedSalt, is_private, salt_of
from quire.branches.prefix_cache import PrefixNode
from quire.contracts.views import BranchView, HistoryNode, HistoryView
from quire_inspector.views.state_reading import NO_TOKENS, ReadBranch
from quire_inspector.views.token_texts import TextReader

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
        self.ends.setdefault(id(node.leaf(ids_T, matched)), []).append(name)


def history_of(
    reading: int,
    branches: Iterable[tuple[ReadBranch, BranchView]],
    texts: TextReader,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> HistoryView:
    """Return all of these branches, and the trees that they make. ``adapters``: names by
    fingerprints. Cost O(tokens) in NumPy, and O(nodes)."""
    listed = list(branches)
    trees: dict[Hashable, _Tree] = {}
    for branch, view in listed:
        if branch.key is not None:  # else its tokens are not known
            trees.setdefault(branch.key, _Tree()).add(branch, view.id)
    roots = sorted(
        ((_branch_fields(key, adapters), _name(repr(_plain(key))), tree) for key, tree in trees.items()), key=_place
    )
    nodes = [node for told, name, tree in roots for node in _nodes(told, name, tree, texts)]
    return HistoryView(reading=reading, branches=tuple(view for _, view in listed), nodes=tuple(nodes))


def _place(root: tuple[Mapping[str, str | None], str, _Tree]) -> tuple[str, ...]:
    """Return the sort key of a tree. It never changes while the tree exists."""
    told, name, _ = root
    return (*(value or "" for value in told.values()), name)


def _nodes(told: Mapping[str, str | None], name: str, tree: _Tree, texts: TextReader) -> Iterator[HistoryNode]:
    waiting: list[tuple[PrefixNode, str, str | None]] = [(tree.root, name, None)]
    if tree.root.children and (empty := tree.ends.pop(id(tree.root), None)):
        # A branch without tokens is not where the others come from.
        head, tail = texts.ends(NO_TOKENS)
        own = _name(f"{name} empty")
        yield HistoryNode(id=own, parent=None, start=0, end=0, branches=tuple(empty), head=head, tail=tail, key=told)
    while waiting:
        node, name, parent = waiting.pop()
        head, tail = texts.ends(node.edge)
        yield HistoryNode(
            id=name,
            parent=parent,
            start=node.start,
            end=node.end,
            branches=tuple(tree.ends.get(id(node), ())),
            head=head,
            tail=tail,
            key=told if parent is None else None,
        )
        below = sorted(node.children.items(), reverse=True)
        waiting += [(child, _name(f"{name} {first}"), name) for first, child in below]


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=NODE_BYTES).hexdigest()


def _plain(key: Hashable) -> object:
    """Return a key as a value with the same text in every process."""
    if not isinstance(key, AdapterKey):
        return key
    return (key.salt, key.runs, "exact") if key.exact else (key.salt, key.runs)


def _branch_fields(key: Hashable, adapters: Mapping[str, str]) -> dict[str, str | None]:
    """Return the adapter and the salt that set a tree apart, in words."""
    salt = salt_of(key)
    adapter = key.last if isinstance(key, AdapterKey) else None
    adapter = None if adapter is None else adapters.get(adapter, adapter)
    found: str | None = None
    if is_private(salt):
        found = "private"
    elif salt != NO_SALT and isinstance(salt, tuple) and len(salt) == 2:
        found = salt[1].given if isinstance(salt[1], OwnedSalt) else salt[1]
    return {"adapter": adapter, "salt": found}
