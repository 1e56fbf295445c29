"""The prefix cache: finds a sequence of the KV state that holds the beginning of a prompt.

It keeps a radix tree over token ids for each key (salt and adapters). It knows no pages and no
tensors: a finished sequence stays in the KV state, a match is a copy-on-write fork of a sequence,
an eviction removes a sequence. So it serves every kind of state. (SGLang's RadixAttention,
https://arxiv.org/abs/2312.07104, has such a tree over pages; this one is over sequences.)

A sequence is *live* while a request or a session owns it, and *cached* afterwards. Both can be
matched, only cached ones are evicted. A cached sequence is *redundant* once another one holds all
of its tokens; then it is returned, to be removed. So a cached sequence ends alone, at a leaf.

Letters: T tokens of one sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from quire.base.token_history import Ids, checked_ids, common_prefix
from quire.base.types import SeqId

Reach: TypeAlias = Callable[[SeqId, int], int]
"""From a sequence and a position to the last position, at most the given one, where it can be
forked."""
Lost: TypeAlias = Callable[[Ids, Hashable], None]
"""Called with the tokens of a prefix that no sequence holds completely any more, and their key."""

LOOKED_AT = 8
"""Number of least recently used sequences from which an eviction picks one that saves little."""
LITTLE = 32
"""Tokens; a sequence that saves fewer saves little."""
_NO_TOKENS = np.empty(0, dtype=np.int64)


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

    def leaf(self, tokens_T: Ids, matched: int) -> PrefixNode:
        """Return the node that ends after ``tokens_T``, of which ``matched`` lead to this node's
        edge. It is made if there is none."""
        node = self.ending_at(matched)
        if matched == tokens_T.size:
            return node
        leaf = PrefixNode(tokens_T[matched:].copy(), tokens_T.size, node)
        node.children[int(leaf.edge[0])] = leaf
        return leaf

    def above(self) -> Iterator[HeldPrefix]:
        """Yield the sequences that end here or at an ancestor."""
        node: PrefixNode | None = self
        while node is not None:
            yield from node.sequences.values()
            node = node.parent

    def edges(self) -> list[Ids]:
        """Return the tokens from the root to the end of this node in pieces, which never change."""
        found: list[Ids] = []
        node = self
        while node.parent is not None:
            found.append(node.edge)
            node = node.parent
        return found[::-1]

    def below(self) -> Iterator[PrefixNode]:
        """Yield this node and all nodes below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class HeldPrefix:
    """A sequence that holds exactly the tokens from the root to the end of ``node``."""

    __slots__ = ("key", "live", "node", "seq")

    def __init__(self, seq: SeqId, key: Hashable, node: PrefixNode) -> None:
        self.seq = seq
        self.key = key
        self.node = node
        self.live = True

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


class RadixCache:
    """Longest-prefix matching over the sequences of a KV state, with least-recently-used eviction.

    ``key`` is any hashable that separates prefixes that must not be shared: adapter fingerprint and
    salt. The state of matched tokens must depend on these tokens and the key alone.

    Recency is an order of uses (insert, match, finish), not a clock, so equal runs evict equally.
    The caller applies decisions in their order: the fork of a match precedes the removal of the
    result of a later ``evict``. Not thread-safe: it belongs to the engine's thread.

    ``reach`` is for states that drop positions. Then a sequence on the path of another is not
    redundant, because the other may have dropped a position that it holds: to keep a position, keep
    a fork there. Without ``reach`` every position of every sequence can be forked.

    ``lost`` is called for each prefix that is forgotten, except by ``clear``.

    A match or an insertion compares T tokens once, vectorised, with Python work only for each node
    on the path (and with ``reach`` for each sequence that holds the matched prefix).
    """

    def __init__(self, reach: Reach | None = None, lost: Lost | None = None) -> None:
        self._reach = reach
        self._lost = lost
        self._roots: dict[Hashable, PrefixNode] = {}
        self._entries: dict[SeqId, HeldPrefix] = {}
        self._cached: OrderedDict[SeqId, HeldPrefix] = OrderedDict()  # least recently used first
        self.num_evictions = 0
        self.num_tokens = 0
        """Tokens on all edges: each distinct one of a key once."""

    def __len__(self) -> int:
        """Return the number of sequences, live and cached."""
        return len(self._entries)

    def __contains__(self, seq: object) -> bool:
        return seq in self._entries

    @property
    def num_cached(self) -> int:
        """Number of sequences that ``evict`` could return."""
        return len(self._cached)

    def key_of(self, seq: SeqId) -> Hashable:
        """Return the key of ``seq``. ``NotFound`` if it is not in the cache."""
        return self._entry(seq).key

    def length(self, seq: SeqId) -> int:
        """Return the number of tokens of ``seq``. ``NotFound`` if it is not in the cache."""
        return self._entry(seq).node.end

    def match(self, tokens: Sequence[int] | NDArray[Any], key: Hashable) -> tuple[SeqId, int] | None:
        """Return a sequence with the longest prefix of ``tokens [T]``, and the prefix's length.

        None: no sequence of this key holds the first token. For logits of the last token, ask for
        ``tokens[:-1]``. The sequence becomes the most recently used.
        """
        found = self.find(tokens, key)
        if found is not None and not self._entries[found[0]].live:
            self._cached.move_to_end(found[0])
        return found

    def _best(self, node: PrefixNode, length: int, without: SeqId | None = None) -> tuple[SeqId, int]:
        """Return the sequence with the latest possible fork on the way to ``node``, and that
        position, at most ``length``."""
        if self._reach is None:
            while not node.sequences:  # all nodes below share the prefix, and each leaf has a sequence
                node = next(iter(node.children.values()))
            return next(iter(node.sequences)), length
        best, found = -1, 0
        for below in node.below():
            for seq in below.sequences:
                if seq == without:
                    continue
                if found < length and (position := self._reach(seq, min(length, below.end))) > found:
                    best, found = seq, position
        above = node.parent
        while above is not None and above.end > found:
            for seq in above.sequences:
                if seq != without and (position := self._reach(seq, above.end)) > found:
                    best, found = seq, position
            above = above.parent
        return best, found

    def held(self, tokens: Sequence[int] | NDArray[Any], key: Hashable) -> int:
        """Return the length of the longest prefix of ``tokens [T]`` that sequences of this key
        hold. Perhaps none of them can be forked there. Counts as no use."""
        root = self._roots.get(key)
        return 0 if root is None else root.walk(checked_ids(tokens))[1]

    def ahead(self, tokens_T: Ids, key: Hashable, count: int) -> tuple[int, Ids]:
        """Return the result of ``held``, and at most ``count`` next tokens of a sequence that holds
        that prefix: none if all end there. Counts as no use."""
        root = self._roots.get(key)
        if root is None:
            return 0, tokens_T[:0]
        node, length = root.walk(tokens_T)
        inside = length - node.start
        if length == node.end and node.children:
            node, inside = next(reversed(node.children.values())), 0
        return length, node.edge[inside : inside + count].copy()

    def ages(self) -> dict[SeqId, int]:
        """Return the cached sequences, numbered from the least recently used on."""
        return {seq: age for age, seq in enumerate(self._cached)}

    def peek(self, tokens: Sequence[int] | NDArray[Any], key: Hashable) -> int:
        """Return the length of the prefix that ``match`` would find. Counts as no use."""
        found = self.find(tokens, key)
        return 0 if found is None else found[1]

    def find(
        self, tokens: Sequence[int] | NDArray[Any], key: Hashable, *, without: SeqId | None = None
    ) -> tuple[SeqId, int] | None:
        """Return the result of ``match``, counting no use. ``without``: a sequence to ignore, which
        matters only with ``reach``."""
        tokens_T, root = checked_ids(tokens), self._roots.get(key)
        node, length = (None, 0) if root is None else root.walk(tokens_T)
        if node is None or length == 0:
            return None
        seq, length = self._best(node, length, without)
        return (seq, length) if length else None

    def cached_on(self, tokens: Sequence[int] | NDArray[Any], key: Hashable, beyond: int) -> list[tuple[SeqId, int]]:
        """Return the cached sequences whose tokens are a prefix of ``tokens [T]`` longer than
        ``beyond``, with their lengths."""
        root = self._roots.get(key)
        node, length = (None, 0) if root is None else root.walk(checked_ids(tokens))
        found = []
        while node is not None and node.end > beyond:
            if node.end <= length:
                found += [(seq, node.end) for seq, entry in node.sequences.items() if not entry.live]
            node = node.parent
        return found

    def insert(
        self, seq: SeqId, tokens: Sequence[int] | NDArray[Any], key: Hashable, *, live: bool = False
    ) -> list[SeqId]:
        """Record that ``seq`` holds the state of exactly ``tokens [T]``; ``live``: it has an owner.

        A known sequence is extended: ``tokens`` must begin with its tokens (they may be equal, to
        change ``live``). New tokens are copied. Return the sequences that are forgotten now, for
        the caller to remove from the KV state: the cached ones that became redundant, and ``seq``
        itself if it is not live and others hold all of its tokens, or it has none.
        ``InvalidArgument``: malformed tokens. ``AlreadyExists``: a known sequence of another key or
        with other tokens.
        """
        tokens_T = checked_ids(tokens)
        entry, root = self._entries.get(seq), self._roots.get(key)
        node, matched = (None, 0) if root is None else root.walk(tokens_T)
        if entry is not None:
            entry.require_extended(key, node, matched, tokens_T.size)

        if node is None:
            node = self._roots[key] = PrefixNode(_NO_TOKENS, 0, None)
        node = node.leaf(tokens_T, matched)
        self.num_tokens += tokens_T.size - matched
        if entry is None:
            entry = self._entries[seq] = HeldPrefix(seq, key, node)
            node.sequences[seq] = entry
        else:
            self._move(entry, node)
        entry.live = live
        redundant = [other for other in self._covered(node, live) if not other.live and other is not entry]
        for other in redundant:
            self._forget(other)
        self._cached.pop(seq, None)
        return [other.seq for other in redundant] + ([] if live else self._retire(entry))

    def truncate(self, seq: SeqId, length: int) -> None:
        """Rewind a live sequence to its first ``length`` tokens. ``NotFound``: unknown.
        ``FailedPrecondition``: cached. ``InvalidArgument``: no such length."""
        entry = self._entry(seq)
        if not entry.live:
            raise FailedPrecondition(
                f"sequence {seq} is cached; only a live one can be truncated (insert it with live=True)"
            )
        if not 0 <= length <= entry.node.end:
            raise InvalidArgument(
                f"sequence {seq} holds {entry.node.end} tokens and cannot be truncated to {length}; "
                f"give a length in [0, {entry.node.end}]"
            )
        self._move(entry, entry.node.ending_at(length))

    def remove(self, seq: SeqId) -> None:
        """Forget ``seq``, which was removed from the KV state. ``NotFound`` if it is not in the
        cache."""
        self._lose(self._entry(seq))

    def evict(self) -> SeqId | None:
        """Forget and return the ``oldest`` cached sequence, to be removed; None: there is none."""
        if (seq := self.oldest()) is not None:
            self._lose(self._entries[seq])
            self.num_evictions += 1
        return seq

    def oldest(self) -> SeqId | None:
        """Return the least recently used cached sequence; None: there is none.

        With ``reach``, prefer one of the oldest few whose loss costs little, because another can be
        forked near its end.
        """
        if not self._cached:
            return None
        found = list(islice(self._cached.items(), 1 if self._reach is None else LOOKED_AT))
        return next((seq for seq, entry in found if len(found) > 1 and self._loss(entry) < LITTLE), found[0][0])

    def next_to_go(self, count: int) -> list[SeqId]:
        """Return the ``count`` least recently used cached sequences, or all if there are fewer."""
        return list(islice(self._cached, count))

    def tokens_of(self, seq: SeqId) -> NDArray[np.int64]:
        """Return the tokens of a sequence, ``[T]``."""
        return np.concatenate([_NO_TOKENS, *self.edges_of(seq)])

    def edges_of(self, seq: SeqId) -> list[Ids]:
        """Return the tokens of a sequence in pieces, which never change."""
        return self._entry(seq).node.edges()

    def _loss(self, entry: HeldPrefix) -> int:
        """Return the number of tokens that a request for all of them would compute again without
        it."""
        node = entry.node
        return node.end - self._best(node, node.end, without=entry.seq)[1]

    def forget_keys(self, gone: Callable[[Hashable], bool]) -> list[SeqId]:
        """Forget the cached sequences of keys for which ``gone`` returns True; return them, to be
        removed."""
        found = [entry for entry in self._cached.values() if gone(entry.key)]
        for entry in found:
            self._lose(entry)
        return [entry.seq for entry in found]

    def clear(self) -> list[SeqId]:
        """Forget all sequences; return the cached ones, to be removed."""
        cached = list(self._cached)
        self._roots.clear()
        self._entries.clear()
        self._cached.clear()
        self.num_tokens = 0
        return cached

    def _entry(self, seq: SeqId) -> HeldPrefix:
        entry = self._entries.get(seq)
        if entry is None:
            raise NotFound(f"sequence {seq} is not in the prefix cache; insert it first")
        return entry

    def _covered(self, node: PrefixNode, live: bool) -> list[HeldPrefix]:
        """Return the cached sequences that a sequence ending at ``node`` makes redundant."""
        if self._reach is None:
            return list(node.above())
        return [] if live else list(node.sequences.values())

    def _retire(self, entry: HeldPrefix) -> list[SeqId]:
        """Make ``entry`` cached; forget and return it instead if it is redundant."""
        node = entry.node
        others = [other for other in node.sequences.values() if other is not entry]
        if self._reach is None:
            redundant = bool(node.children or others)
        else:
            # A live sequence may grow and lose rows of the window that this one still has.
            redundant = any(not other.live for other in others)
        if redundant or node.end == 0:
            self._forget(entry)
            return [entry.seq]
        entry.live = False
        self._cached[entry.seq] = entry
        return []

    def _move(self, entry: HeldPrefix, node: PrefixNode) -> None:
        """Let ``entry`` end at another node of its path."""
        old = entry.node
        if old is node:
            return
        del old.sequences[entry.seq]
        node.sequences[entry.seq] = entry
        entry.node = node
        self._prune(old, entry.key)

    def _lose(self, entry: HeldPrefix) -> None:
        """Forget ``entry``, and report its tokens to ``lost`` unless another sequence holds them
        all."""
        node = entry.node
        if self._lost is not None and node.end and not node.children and len(node.sequences) == 1:
            self._lost(np.concatenate(node.edges()), entry.key)
        self._forget(entry)

    def _forget(self, entry: HeldPrefix) -> None:
        del self._entries[entry.seq]
        self._cached.pop(entry.seq, None)
        del entry.node.sequences[entry.seq]
        self._prune(entry.node, entry.key)

    def _prune(self, node: PrefixNode, key: Hashable) -> None:
        """Restore the invariant after a sequence left ``node``: remove nodes without sequences
        below them."""
        if node.parent is not None and not node.sequences and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            self.num_tokens -= node.edge.size
            node = parent
        if node.sequences:
            return
        if node.parent is None:
            if not node.children:
                del self._roots[key]
        elif len(node.children) == 1:
            (child,) = node.children.values()
            child.edge = np.concatenate((node.edge, child.edge))
            child.parent = node.parent
            node.parent.children[int(child.edge[0])] = child
