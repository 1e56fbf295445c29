"""The prefix cache: which sequence of the KV state already holds the beginning of a prompt.

A radix tree over token ids, one for each key (salt and adapters). It knows no pages and no tensors: finished
sequences simply stay in the KV state, a match is a copy-on-write fork of one of them, an eviction removes one. So
it serves every kind of state. (SGLang's RadixAttention, https://arxiv.org/abs/2312.07104, has such a tree over
pages; here it is over sequences.)

A sequence is *live* while a request or a session owns it, and *cached* afterwards. Both can be matched, only cached
ones are evicted. A cached sequence is *redundant*, and is handed back to be removed, once another one holds all of
its tokens. Hence the invariant that keeps the tree small: a cached sequence ends at a leaf, alone.

Letters: T tokens of one sequence.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.branches.history import LAST_PLACEHOLDER
from quire.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, QuireError
from quire.types import SeqId

TokenIds: TypeAlias = NDArray[np.int64]

Reach: TypeAlias = Callable[[SeqId, int], int]
"""At which position, the given one or the nearest below it, a sequence can be forked."""

LOOKED_AT = 8
"""Sequences, of those used longest ago, among which an eviction looks for one that saves next to nothing."""
LITTLE = 32
"""Tokens: whoever saves fewer saves next to nothing."""

_MAX_ID = int(np.iinfo(np.int32).max)


def as_token_ids(tokens: Sequence[int] | NDArray[Any]) -> TokenIds:
    """Token ids ``[T]`` as int64: an int64 array as it is (a view), a list or another integer array converted.

    Raises ``InvalidArgument`` for anything that is not one row of integers in [0, 2^31), or, of an array, below -4: these are
    made from the data of an image or an embedding (``quire.branches.media``). A placeholder does not tell such data apart, so it must
    never match.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidArgument(f"tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}")
        ids = tokens
    else:
        if isinstance(tokens, bytes | bytearray | str):
            raise InvalidArgument(f"tokens must be integer token ids, got {type(tokens).__name__}; tokenize text first")
        try:
            # Unsigned: less than half the time of np.asarray, and floats are refused instead of truncated.
            ids = np.frombuffer(array("I", tokens), dtype=np.uintc)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"tokens must be integers in [0, {_MAX_ID}]: {error}") from None
    if ids.size and (int(ids.max()) > _MAX_ID or (int(ids.min()) < 0 and _has_placeholders(ids))):
        raise InvalidArgument(
            f"token ids must be in [0, {_MAX_ID}], got ids from {ids.min()} to {ids.max()}; "
            "placeholders of other data cannot be cached by their ids"
        )
    return ids.astype(np.int64, copy=False)


def _has_placeholders(ids: NDArray[Any]) -> bool:
    return bool(((ids < 0) & (ids >= LAST_PLACEHOLDER)).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats:
    """What happened since the cache was made. Tokens: asked for in lookups, and found."""

    lookups: int = 0
    hits: int = 0
    queried_tokens: int = 0
    matched_tokens: int = 0
    evictions: int = 0


class _Node:
    """The tokens ``edge`` after the parent's; ``end`` is the number of tokens from the root to the end of the edge.

    Each node owns its edge (no views: a short prefix must not keep a long sequence's array alive), so the tree
    stores each distinct token of its sequences once, in 8 bytes.
    """

    __slots__ = ("children", "edge", "end", "parent", "sequences")

    def __init__(self, edge: TokenIds, end: int, parent: _Node | None) -> None:
        self.edge = edge
        self.end = end
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.sequences: dict[SeqId, _Entry] = {}

    @property
    def start(self) -> int:
        return self.end - self.edge.size


class _Entry:
    """One sequence: it holds exactly the tokens from the root to the end of ``node``."""

    __slots__ = ("key", "live", "node", "seq")

    def __init__(self, seq: SeqId, key: Hashable, node: _Node) -> None:
        self.seq = seq
        self.key = key
        self.node = node
        self.live = True


class RadixCache:
    """Longest-prefix matching over the sequences of a KV state, with least-recently-used eviction.

    Sequences are known by their ``SeqId``. ``key`` is any hashable that separates what may not be shared: adapter
    fingerprint and salt. The state of the matched tokens must depend on nothing but these tokens and the key.

    Recency is an order of uses (insert, match, finish), not a clock, so equal runs evict equally. The caller
    applies decisions in the order in which it got them: the fork of a match goes before the removal of what a later
    ``evict`` returns. Not thread-safe: it belongs to the engine's thread.

    ``reach`` is for states that forget: it says at which position, the one asked for or the nearest below, a sequence can be
    forked. Then a sequence within the path of another is not redundant, for the other may have let go of what it holds:
    whoever wants a position to stay keeps a fork there. Without it every position of every sequence can be forked.

    Cost: a match or an insertion compares T tokens once, vectorised, with Python work for each node on the path only (and
    with ``reach`` for each sequence that holds the matched prefix).
    """

    def __init__(self, reach: Reach | None = None) -> None:
        self._reach = reach
        self._roots: dict[Hashable, _Node] = {}
        self._entries: dict[SeqId, _Entry] = {}
        self._cached: OrderedDict[SeqId, _Entry] = OrderedDict()  # least recently used first
        self._lookups = self._hits = self._queried_tokens = self._matched_tokens = self._evictions = 0

    # ------------------------------------------------------------------ what is there

    def __len__(self) -> int:
        """Number of sequences, live and cached."""
        return len(self._entries)

    def __contains__(self, seq: object) -> bool:
        return seq in self._entries

    @property
    def num_cached(self) -> int:
        """Number of sequences that ``evict`` could give out."""
        return len(self._cached)

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(
            lookups=self._lookups,
            hits=self._hits,
            queried_tokens=self._queried_tokens,
            matched_tokens=self._matched_tokens,
            evictions=self._evictions,
        )

    def key_of(self, seq: SeqId) -> Hashable:
        """The key under which ``seq`` is known. ``NotFound`` if it is not in the cache."""
        return self._entry(seq).key

    def length(self, seq: SeqId) -> int:
        """Number of tokens that ``seq`` is known to hold. ``NotFound`` if it is not in the cache."""
        return self._entry(seq).node.end

    # ------------------------------------------------------------------ verbs

    def match(self, tokens: Sequence[int] | NDArray[Any], key: Hashable) -> tuple[SeqId, int] | None:
        """The longest prefix of ``tokens [T]`` that a sequence of this key holds, as (sequence, length >= 1), or None.

        Whoever needs logits of the last token asks for ``tokens[:-1]``. If several sequences hold the prefix, any one
        of them is returned; it becomes the most recently used.
        """
        tokens_T = as_token_ids(tokens)
        root = self._roots.get(key)
        node, length = (None, 0) if root is None else _walk(root, tokens_T)
        self._lookups += 1
        self._queried_tokens += tokens_T.size
        if node is None or length == 0:
            return None
        seq, length = self._best(node, length)
        if length == 0:
            return None
        self._hits += 1
        self._matched_tokens += length
        if not self._entries[seq].live:
            self._cached.move_to_end(seq)
        return seq, length

    def _best(self, node: _Node, length: int, without: SeqId | None = None) -> tuple[SeqId, int]:
        """Of the sequences that hold a prefix of the ``length`` tokens up to ``node``, one that can be forked latest."""
        if self._reach is None:
            while not node.sequences:  # all below a matched node hold the prefix, and a leaf has a sequence
                node = next(iter(node.children.values()))
            return next(iter(node.sequences)), length
        best, found = -1, 0
        for below in _nodes(node):
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
        """The longest prefix of ``tokens [T]`` that was computed for some sequence of this key, whether or not it can be forked
        there. Counts as no use."""
        root = self._roots.get(key)
        return 0 if root is None else _walk(root, as_token_ids(tokens))[1]

    def ages(self) -> dict[SeqId, int]:
        """The cached sequences, numbered from the least recently used on."""
        return {seq: age for age, seq in enumerate(self._cached)}

    def peek(self, tokens: Sequence[int] | NDArray[Any], key: Hashable) -> int:
        """The length that ``match`` would find. Counts as no lookup and as no use."""
        found = self.find(tokens, key)
        return 0 if found is None else found[1]

    def find(
        self, tokens: Sequence[int] | NDArray[Any], key: Hashable, *, without: SeqId | None = None
    ) -> tuple[SeqId, int] | None:
        """What ``match`` would find, ``without`` aside (of states that forget; others find the same whoever holds it). Counts as
        no lookup and as no use."""
        root = self._roots.get(key)
        if root is None:
            return None
        node, length = _walk(root, as_token_ids(tokens))
        if not length:
            return None
        seq, length = self._best(node, length, without)
        return (seq, length) if length else None

    def insert(
        self, seq: SeqId, tokens: Sequence[int] | NDArray[Any], key: Hashable, *, live: bool = False
    ) -> list[SeqId]:
        """Note that ``seq`` holds the state of exactly ``tokens [T]``; ``live`` says whether somebody owns it still.

        A known sequence is extended: ``tokens`` must begin with those it had (they may be equal, to change ``live``).
        Returns the cached sequences that became redundant, and ``seq`` itself if it is not live and others hold all of
        its tokens already (or it has none): they are forgotten here, and the caller removes them from the KV state.
        ``tokens`` is copied as far as it is new. Raises ``InvalidArgument`` for malformed tokens, ``AlreadyExists`` for
        a known sequence of another key or with other tokens.
        """
        tokens_T = as_token_ids(tokens)
        entry, root = self._entries.get(seq), self._roots.get(key)
        node, matched = (None, 0) if root is None else _walk(root, tokens_T)
        if entry is not None:
            _check_extends(entry, key, node, matched, tokens_T.size)

        if node is None:
            node = self._roots[key] = _Node(np.empty(0, dtype=np.int64), 0, None)
        node = _node_ending_at(node, matched)
        if matched < tokens_T.size:
            leaf = _Node(tokens_T[matched:].copy(), tokens_T.size, node)
            node.children[int(leaf.edge[0])] = leaf
            node = leaf
        if entry is None:
            entry = self._entries[seq] = _Entry(seq, key, node)
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
        """A live sequence was rewound to its first ``length`` tokens.

        Raises ``NotFound``, ``FailedPrecondition`` if it is cached, ``InvalidArgument`` unless 0 <= length <= its length.
        """
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
        self._move(entry, _node_ending_at(entry.node, length))

    def remove(self, seq: SeqId) -> None:
        """``seq``, live or cached, is no longer in the KV state. ``NotFound`` if it is not in the cache."""
        self._forget(self._entry(seq))

    def evict(self) -> SeqId | None:
        """Forget and return the least recently used cached sequence, for the caller to remove; None if there is none.

        With ``reach``: of the few that were used longest ago rather one near the end of which others can be forked, for it
        saves next to nothing.
        """
        if not self._cached:
            return None
        oldest = list(islice(self._cached.items(), 1 if self._reach is None else LOOKED_AT))
        seq, entry = next((one for one in oldest if len(oldest) > 1 and self._loss(one[1]) < LITTLE), oldest[0])
        self._forget(entry)
        self._evictions += 1
        return seq

    def _loss(self, entry: _Entry) -> int:
        """Tokens that must be computed again if this one goes, by whoever comes with all of its tokens."""
        node = entry.node
        return node.end - self._best(node, node.end, without=entry.seq)[1]

    def forget_keys(self, gone: Callable[[Hashable], bool]) -> list[SeqId]:
        """Forget the cached sequences of the keys that ``gone`` says, and return them, for the caller to remove."""
        found = [entry for entry in self._cached.values() if gone(entry.key)]
        for entry in found:
            self._forget(entry)
        return [entry.seq for entry in found]

    def clear(self) -> list[SeqId]:
        """Forget all. Returns the cached ones, for the caller to remove; live ones stay with their owners. Keeps stats."""
        cached = list(self._cached)
        self._roots.clear()
        self._entries.clear()
        self._cached.clear()
        return cached

    # ------------------------------------------------------------------ inside

    def _entry(self, seq: SeqId) -> _Entry:
        entry = self._entries.get(seq)
        if entry is None:
            raise NotFound(f"sequence {seq} is not in the prefix cache; insert it first")
        return entry

    def _covered(self, node: _Node, live: bool) -> list[_Entry]:
        """Sequences that one which ends at ``node`` makes redundant, if they are cached."""
        if self._reach is None:
            return list(_sequences_above(node))
        return [] if live else list(node.sequences.values())

    def _retire(self, entry: _Entry) -> list[SeqId]:
        """Make ``entry`` cached, or forget and return it if it is redundant."""
        node = entry.node
        others = [other for other in node.sequences.values() if other is not entry]
        if self._reach is None:
            redundant = bool(node.children or others)
        else:
            # A live one goes on, and may let go of what this one keeps.
            redundant = any(not other.live for other in others)
        if redundant or node.end == 0:
            self._forget(entry)
            return [entry.seq]
        entry.live = False
        self._cached[entry.seq] = entry
        return []

    def _move(self, entry: _Entry, node: _Node) -> None:
        """Let ``entry`` end at another node of its path."""
        old = entry.node
        if old is node:
            return
        del old.sequences[entry.seq]
        node.sequences[entry.seq] = entry
        entry.node = node
        self._prune(old, entry.key)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.seq]
        self._cached.pop(entry.seq, None)
        del entry.node.sequences[entry.seq]
        self._prune(entry.node, entry.key)

    def _prune(self, node: _Node, key: Hashable) -> None:
        """Restore the shape after a sequence left ``node``: leaves hold sequences, inner nodes do or branch."""
        if node.parent is not None and not node.sequences and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
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

    def check(self) -> None:
        """Verify every invariant; ``QuireError`` names the first broken one. For tests and debugging: visits all nodes."""
        seen: dict[SeqId, _Entry] = {}
        for key, root in self._roots.items():
            _expect(root.end == 0 and root.edge.size == 0 and root.parent is None, "a root has no edge and no parent")
            _expect(bool(root.children or root.sequences), "an empty tree is dropped")
            for node in _nodes(root):
                _check_node(node, forgetful=self._reach is not None)
                for seq, entry in node.sequences.items():
                    _expect(entry.node is node and entry.seq == seq and entry.key == key, "entries point to their node")
                    _expect(seq not in seen, "a sequence ends once")
                    seen[seq] = entry
        _expect(seen == self._entries, "the trees hold exactly the known sequences")
        cached = {seq: entry for seq, entry in seen.items() if not entry.live}
        _expect(cached == dict(self._cached), "the eviction order holds exactly the cached sequences")


def _common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Number of equal leading elements of two non-empty arrays."""
    n = min(a.size, b.size)
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _walk(root: _Node, tokens_T: TokenIds) -> tuple[_Node, int]:
    """Descend as far as ``tokens_T`` leads: the last node reached, perhaps in the middle of its edge, and the length."""
    node, length = root, 0
    while length < tokens_T.size:
        child = node.children.get(int(tokens_T[length]))
        if child is None:
            break
        node = child
        length += _common_prefix(node.edge, tokens_T[length:])
        if length < node.end:
            break
    return node, length


def _holder(node: _Node, length: int) -> _Node:
    """The node on the path from the root to ``node`` whose edge holds the token before position ``length``."""
    while node.parent is not None and length <= node.start:
        node = node.parent
    return node


def _node_ending_at(node: _Node, length: int) -> _Node:
    """The node on the path to ``node`` that ends at ``length``, made by a split where there is none."""
    lower = _holder(node, length)
    if lower.end == length:
        return lower
    parent = lower.parent
    assert parent is not None, "a root has no edge to split"
    cut = length - lower.start
    upper = _Node(lower.edge[:cut].copy(), length, parent)
    parent.children[int(upper.edge[0])] = upper
    lower.edge = lower.edge[cut:].copy()
    lower.parent = upper
    upper.children[int(lower.edge[0])] = lower
    return upper


def _sequences_above(node: _Node | None) -> Iterator[_Entry]:
    """Sequences that end at ``node`` or on the way to it: ``node`` holds all of their tokens."""
    while node is not None:
        yield from node.sequences.values()
        node = node.parent


def _check_extends(entry: _Entry, key: Hashable, node: _Node | None, matched: int, length: int) -> None:
    """``AlreadyExists`` unless the path to ``node`` (``matched`` tokens) passes the end of ``entry``."""
    if entry.key != key:
        raise AlreadyExists(f"sequence {entry.seq} is in the prefix cache under key {entry.key!r}, not {key!r}")
    held = entry.node.end
    if node is None or matched < held or _holder(node, held) is not entry.node:
        raise AlreadyExists(
            f"sequence {entry.seq} is in the prefix cache with {held} other tokens; the {length} given must begin with "
            "these (truncate or remove it first)"
        )


def _nodes(root: _Node) -> Iterator[_Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _check_node(node: _Node, *, forgetful: bool) -> None:
    for first, child in node.children.items():
        _expect(child.parent is node, "children point to their parent")
        _expect(child.edge.size > 0 and int(child.edge[0]) == first, "children are found by their first token")
        _expect(child.start == node.end, "edges join")
    _expect(node.edge.dtype == np.int64 and node.edge.base is None, "edges are int64 and owned")
    if node.parent is not None:
        _expect(bool(node.sequences) or len(node.children) > 1, "an inner node branches or ends a sequence")
    if any(not entry.live for entry in node.sequences.values()):
        cached = sum(not entry.live for entry in node.sequences.values())
        alone = cached == 1 if forgetful else not node.children and len(node.sequences) == 1
        _expect(alone and node.end > 0, "a cached sequence ends alone at a leaf")


def _expect(condition: bool, invariant: str) -> None:
    if not condition:
        raise QuireError(f"prefix cache invariant broken: {invariant}")
