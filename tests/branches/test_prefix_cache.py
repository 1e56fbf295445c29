"""The prefix cache against a naive oracle that keeps every sequence's tokens in a list."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.prefix_trees import check_trees

from quire.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from quire.base.token_history import checked_ids
from quire.branches.prefix_cache import RadixCache


@dataclass
class Held:
    tokens: list[int]
    key: Hashable
    live: bool
    used: int


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Oracle:
    """Lists and loops: what the cache should say."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.counter = 0

    def tick(self) -> int:
        self.counter += 1
        return self.counter

    def longest(self, tokens: Sequence[int], key: Hashable) -> int:
        return max((common_prefix(h.tokens, tokens) for h in self.held.values() if h.key == key), default=0)

    def covered(self, seq: int) -> bool:
        """Some other sequence of the key holds all tokens of ``seq``, or there are none."""
        mine = self.held[seq]
        return not mine.tokens or any(
            other != seq and h.key == mine.key and h.tokens[: len(mine.tokens)] == mine.tokens
            for other, h in self.held.items()
        )

    def insert(self, seq: int, tokens: list[int], key: Hashable, live: bool) -> set[int]:
        self.held[seq] = Held(tokens, key, True, self.tick())
        redundant = {
            other
            for other, h in self.held.items()
            if other != seq and not h.live and h.key == key and tokens[: len(h.tokens)] == h.tokens
        }
        for other in redundant:
            del self.held[other]
        return redundant if live else redundant | self.finish(seq)

    def finish(self, seq: int) -> set[int]:
        if self.covered(seq):
            del self.held[seq]
            return {seq}
        self.held[seq].live = False
        self.held[seq].used = self.tick()
        return set()

    def oldest(self) -> int | None:
        cached = {seq: h.used for seq, h in self.held.items() if not h.live}
        return min(cached, key=cached.__getitem__) if cached else None

    def evict(self) -> int | None:
        seq = self.oldest()
        if seq is not None:
            del self.held[seq]
        return seq


class Pair:
    """The cache and its oracle, driven together; every answer is compared."""

    def __init__(self) -> None:
        self.lost: list[tuple[list[int], Hashable]] = []
        self.cache = RadixCache(lost=lambda tokens_T, key: self.lost.append((tokens_T.tolist(), key)))
        self.oracle = Oracle()

    @contextmanager
    def losing(self, seq: int | None) -> Iterator[None]:
        """What is forgotten meanwhile is told, unless others hold all of it."""
        held = None if seq is None or self.oracle.covered(seq) else self.oracle.held[seq]
        yield
        assert self.lost == ([] if held is None else [(held.tokens, held.key)])
        self.lost.clear()

    def seqs(self, live: bool | None = None) -> list[int]:
        return [seq for seq, h in self.oracle.held.items() if live is None or h.live == live]

    def insert(self, seq: int, tokens: list[int], key: Hashable, live: bool) -> None:
        given_ = np.array(tokens, dtype=np.int64)
        redundant = self.cache.insert(seq, given_, key, live=live)
        given_[:] = 99  # the cache must not depend on the caller's array
        assert len(redundant) == len(set(redundant))
        assert set(redundant) == self.oracle.insert(seq, tokens, key, live)

    def match(self, tokens: list[int], key: Hashable) -> None:
        longest = self.oracle.longest(tokens, key)
        ahead, following = self.cache.ahead(np.array(tokens, dtype=np.int64), key, 2)
        assert ahead == longest
        assert following.size <= 2
        begun = tokens[:longest] + following.tolist()
        like = [h.tokens for h in self.oracle.held.values() if h.key == key and h.tokens[:longest] == tokens[:longest]]
        assert not like or any(one[: len(begun)] == begun for one in like)
        assert bool(following.size) == any(len(one) > longest for one in like)
        found = self.cache.match(tokens, key)
        if longest == 0:
            assert found is None
            return
        assert found is not None
        seq, length = found
        assert length == longest
        assert self.oracle.held[seq].key == key
        assert self.oracle.held[seq].tokens[:length] == tokens[:length]
        self.oracle.held[seq].used = self.oracle.tick()

    def finish(self, seq: int) -> None:
        """Nobody owns it any more: it is inserted once more, as cached."""
        held = self.oracle.held[seq]
        self.insert(seq, list(held.tokens), held.key, live=False)

    def truncate(self, seq: int, length: int) -> None:
        self.cache.truncate(seq, length)
        del self.oracle.held[seq].tokens[length:]

    def remove(self, seq: int) -> None:
        with self.losing(seq):
            self.cache.remove(seq)
        del self.oracle.held[seq]

    def evict(self) -> None:
        with self.losing(self.oracle.oldest()):
            seq = self.cache.evict()
        assert seq == self.oracle.evict()

    def clear(self) -> None:
        in_order = sorted(self.seqs(live=False), key=lambda seq: self.oracle.held[seq].used)
        assert self.cache.clear() == in_order
        self.oracle.held.clear()

    def check(self) -> None:
        check_trees(self.cache)
        held = self.oracle.held
        assert len(self.cache) == len(held)
        assert self.cache.num_cached == len(self.seqs(live=False))
        prefixes = {(h.key, *h.tokens[:end]) for h in held.values() for end in range(1, len(h.tokens) + 1)}
        assert self.cache.num_tokens == len(prefixes)
        assert self.lost == []
        for seq, h in held.items():
            assert seq in self.cache
            assert self.cache.length(seq) == len(h.tokens)


# Few ids and a few common beginnings, so that sequences meet, branch and cover each other.
TOKENS = st.lists(st.integers(0, 2), max_size=8)
KEYS = st.sampled_from([("base", ""), ("base", "salt"), ("adapter", "")])


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.next_seq = 0

    @rule(tokens=TOKENS, key=KEYS, live=st.booleans())
    def insert_new(self, tokens: list[int], key: Hashable, live: bool) -> None:
        self.pair.insert(self.next_seq, tokens, key, live)
        self.next_seq += 1

    @precondition(lambda self: self.pair.seqs())
    @rule(data=st.data(), more=TOKENS, live=st.booleans())
    def extend(self, data: st.DataObject, more: list[int], live: bool) -> None:
        seq = data.draw(st.sampled_from(self.pair.seqs()))
        held = self.pair.oracle.held[seq]
        self.pair.insert(seq, held.tokens + more, held.key, live)

    @rule(tokens=TOKENS, key=KEYS)
    def match(self, tokens: list[int], key: Hashable) -> None:
        self.pair.match(tokens, key)

    @precondition(lambda self: self.pair.seqs(live=True))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pair.finish(data.draw(st.sampled_from(self.pair.seqs(live=True))))

    @precondition(lambda self: self.pair.seqs(live=True))
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.pair.seqs(live=True)))
        self.pair.truncate(seq, data.draw(st.integers(0, len(self.pair.oracle.held[seq].tokens))))

    @precondition(lambda self: self.pair.seqs())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.pair.remove(data.draw(st.sampled_from(self.pair.seqs())))

    @rule()
    def evict(self) -> None:
        self.pair.evict()

    @precondition(lambda self: len(self.pair.seqs()) > 6)
    @rule()
    def clear(self) -> None:
        self.pair.clear()

    @precondition(lambda self: self.pair.seqs())
    @rule(data=st.data(), other=TOKENS, key=KEYS)
    def refused_insert_changes_nothing(self, data: st.DataObject, other: list[int], key: Hashable) -> None:
        seq = data.draw(st.sampled_from(self.pair.seqs()))
        held = self.pair.oracle.held[seq]
        if held.key == key and other[: len(held.tokens)] == held.tokens:
            return
        with pytest.raises(AlreadyExists):
            self.pair.cache.insert(seq, other, key)

    @invariant()
    def same_as_oracle(self) -> None:
        self.pair.check()


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_on_longer_sequences(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair()
    for step in range(1500):
        verb = rng.choice(["insert", "insert", "extend", "match", "match", "finish", "truncate", "remove", "evict"])
        known, live = pair.seqs(), pair.seqs(live=True)
        key = rng.choice(["a", "b"])
        if known and rng.random() < 0.8:  # mostly from the beginning of another sequence
            base = pair.oracle.held[rng.choice(known)].tokens
            start = base[: rng.randint(0, len(base))]
        else:
            start = []
        tokens = start + [rng.randint(0, 3) for _ in range(rng.randint(0, 12))]
        if verb == "insert":
            pair.insert(step, tokens, key, rng.random() < 0.4)
        elif verb == "match":
            pair.match(tokens, key)
        elif verb == "extend" and known:
            seq = rng.choice(known)
            held = pair.oracle.held[seq]
            pair.insert(seq, held.tokens + tokens[:5], held.key, rng.random() < 0.5)
        elif verb == "finish" and live:
            pair.finish(rng.choice(live))
        elif verb == "truncate" and live:
            seq = rng.choice(live)
            pair.truncate(seq, rng.randint(0, len(pair.oracle.held[seq].tokens)))
        elif verb == "remove" and known and len(known) > 20:
            pair.remove(rng.choice(known))
        elif verb == "evict":
            pair.evict()
        if step % 10 == 0:
            pair.check()
    pair.check()
    while pair.cache.num_cached:
        pair.evict()
    for seq in pair.seqs():
        pair.remove(seq)
    pair.check()
    assert not pair.cache._roots


# ---------------------------------------------------------------------- what the engine relies on


def test_a_turn_covers_the_turn_before() -> None:
    cache = RadixCache()
    assert cache.insert(1, [5, 6, 7], "k") == []
    assert cache.insert(2, [5, 6, 7, 8], "k") == [1]
    assert 1 not in cache
    assert cache.match([5, 6, 9], "k") == (2, 2)


def test_a_shorter_finished_sequence_is_redundant_itself() -> None:
    cache = RadixCache()
    cache.insert(1, [5, 6, 7], "k")
    assert cache.insert(2, [5, 6], "k") == [2]
    cache.insert(3, [5], "k", live=True)
    assert cache.insert(3, [5], "k") == [3]
    assert len(cache) == 1


def test_of_two_equal_sequences_the_newer_stays() -> None:
    cache = RadixCache()
    cache.insert(1, [5, 6], "k")
    assert cache.insert(2, [5, 6], "k") == [1]
    assert cache.match([5, 6], "k") == (2, 2)


def test_a_live_sequence_is_never_redundant_nor_evicted() -> None:
    cache = RadixCache()
    cache.insert(1, [5, 6], "k", live=True)
    assert cache.insert(2, [5, 6, 7], "k") == []
    assert cache.evict() == 2
    assert cache.evict() is None
    assert cache.match([5, 6], "k") == (1, 2)


def test_keys_do_not_share() -> None:
    cache = RadixCache()
    cache.insert(1, [5, 6], ("adapter", ""))
    assert cache.match([5, 6], ("adapter", "salt")) is None
    assert cache.insert(2, [5, 6, 7], ("other", "")) == []


def test_eviction_is_least_recently_used() -> None:
    cache = RadixCache()
    for seq in (1, 2, 3):
        cache.insert(seq, [seq], "k")
    cache.match([1], "k")
    cache.insert(2, [2], "k")  # said again: used again
    assert [cache.evict(), cache.evict(), cache.evict(), cache.evict()] == [3, 1, 2, None]


def test_a_rewound_sequence_no_longer_matches_what_it_lost() -> None:
    cache = RadixCache()
    cache.insert(1, [1, 2, 3, 4], "k", live=True)
    cache.truncate(1, 2)
    assert cache.match([1, 2, 3, 4], "k") == (1, 2)
    cache.truncate(1, 0)
    assert cache.match([1, 2, 3, 4], "k") is None
    assert cache.length(1) == 0
    assert cache.insert(1, [], "k") == [1]


def test_evictions_are_counted() -> None:
    cache = RadixCache()
    cache.insert(1, [1, 2, 3], "k")
    assert [cache.evict(), cache.evict()] == [1, None]
    assert cache.num_evictions == 1


def test_refusals_name_the_sequence_and_change_nothing() -> None:
    cache = RadixCache()
    cache.insert(1, [1, 2, 3], "k")
    cache.insert(2, [4, 5, 6], "k", live=True)
    for verb in (cache.remove, cache.length, lambda seq: cache.truncate(seq, 0)):
        with pytest.raises(NotFound, match="sequence 9 is not"):
            verb(9)
    with pytest.raises(FailedPrecondition, match="sequence 1 is cached"):
        cache.truncate(1, 1)
    for length in (-1, 4):
        with pytest.raises(InvalidArgument, match=rf"holds 3 tokens and cannot be truncated to {length}"):
            cache.truncate(2, length)
    with pytest.raises(AlreadyExists, match="under key 'k', not 'other'"):
        cache.insert(1, [1, 2, 3], "other")
    for tokens in ([1, 2], [], [1, 2, 4, 4], [9], [4, 5, 6]):
        with pytest.raises(AlreadyExists, match="3 other tokens"):
            cache.insert(1, tokens, "k")
    check_trees(cache)
    assert (cache.length(1), cache.length(2), len(cache)) == (3, 3, 2)
    assert cache.num_evictions == 0


@pytest.mark.parametrize(
    "tokens",
    [
        [1, -1],
        [2**31],
        [2**70],
        [1.0],
        ["a"],
        "ab",
        b"12345678",
        5,
        np.array([1.0]),
        np.array([[1]]),
        np.array([True]),
        np.array([-4], dtype=np.int64),
        np.array([-(2**60), -1]),
        np.array([2**40]),
    ],
    ids=repr,
)
def test_malformed_tokens_are_refused(tokens: Sequence[int]) -> None:
    cache = RadixCache()
    with pytest.raises(InvalidArgument, match="token"):
        cache.insert(1, tokens, "k")
    with pytest.raises(InvalidArgument, match="token"):
        cache.match(tokens, "k")
    assert len(cache) == 0
    check_trees(cache)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_every_integer_form_is_the_same_tokens(tokens: list[int]) -> None:
    forms = [
        tokens,
        tuple(tokens),
        [np.int64(t) for t in tokens],
        *(np.array(tokens, dtype=d) for d in ("int32", "int64", "uint32", "uint64")),
    ]
    for form in forms:
        ids = checked_ids(form)
        assert ids.dtype == np.int64
        assert ids.tolist() == tokens


def test_ids_made_from_data_match_themselves() -> None:
    image, other = -(2**61) - 7, -(2**61) - 7 - 2**32
    cache = RadixCache()
    cache.insert(1, np.array([1, image, -5, 2]), "k")
    assert cache.match(np.array([1, image, -5, 3]), "k") == (1, 3)
    assert cache.match(np.array([1, other, -5, 2]), "k") == (1, 1), "all 64 bits count"
    check_trees(cache)


def test_check_finds_damage() -> None:
    cache = RadixCache()
    cache.insert(1, [1, 2, 3], "k")
    cache.insert(2, [1, 2, 4], "k")
    check_trees(cache)
    cache._cached.popitem()
    with pytest.raises(AssertionError, match="the eviction order"):
        check_trees(cache)


# ---------------------------------------------------------------------- size and speed


def stored_tokens(cache: RadixCache) -> int:
    """Tokens that the trees keep alive, counting whole buffers."""
    nodes = list(cache._roots.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return sum((node.edge if node.edge.base is None else node.edge.base).size for node in nodes)


def test_each_distinct_token_is_stored_once() -> None:
    cache = RadixCache()
    shared = np.arange(1000, dtype=np.int64)
    for seq in range(10):
        cache.insert(seq, np.concatenate((shared, [seq + 5000, 1, 2])), "k")
    assert stored_tokens(cache) == 1000 + 10 * 3
    long = np.concatenate((shared[:7], np.full(100_000, 9000))).astype(np.int64)
    cache.insert(99, long, "k")
    assert stored_tokens(cache) == 1030 + 100_000
    cache.remove(99)  # the 7 tokens that it shared must not keep its buffer
    assert stored_tokens(cache) == 1030


def best_seconds(call, repeats: int = 30) -> float:  # type: ignore[no-untyped-def]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def test_a_match_of_32k_tokens_takes_well_under_a_millisecond() -> None:
    cache = RadixCache()
    tokens = np.random.default_rng(0).integers(0, 100_000, 32_768).astype(np.int64)
    for seq in range(16):  # 16 branches along the way: the path has 17 nodes
        branch = tokens.copy()
        branch[2000 * (seq + 1)] += 1
        cache.insert(seq, branch, "k")
    cache.insert(99, tokens, "k")
    assert cache.match(tokens, "k") == (99, tokens.size)
    assert best_seconds(lambda: cache.match(tokens, "k")) < 1e-3


def test_peek_says_what_match_would_and_changes_nothing() -> None:
    cache = RadixCache()
    cache.insert(1, [1, 2, 3], None)
    cache.insert(2, [5, 6], None)
    assert [cache.peek(tokens, None) for tokens in ([1, 2, 9], [1, 2, 3, 4], [7], [], [5])] == [2, 3, 0, 0, 1]
    assert cache.peek([1, 2], "salt") == 0
    assert cache.evict() == 1, "a peek is no use"


def test_what_saves_next_to_nothing_is_evicted_first() -> None:
    """With states that forget: an end near which another sequence can be forked goes before older
    ones that save much.
    """
    kept = {1: [100], 2: [300], 3: [310], 4: [280, 400]}

    def reach(seq: int, position: int) -> int:
        return max((one for one in kept[seq] if one <= position), default=0)

    cache = RadixCache(reach)
    tokens = np.arange(1000)
    cache.insert(1, tokens[:100], "k")
    cache.insert(2, tokens[:300], "k")
    cache.insert(3, tokens[500:810], "k")
    cache.insert(4, tokens[:400], "k", live=True)
    # Without 2 whoever has its tokens goes on from 280; without 1 or 3 everything runs again.
    assert cache.evict() == 2
    assert cache.evict() == 1
    assert cache.evict() == 3
    assert cache.evict() is None


def test_a_lonely_cached_sequence_can_be_evicted() -> None:
    cache = RadixCache(lambda seq, position: position)
    cache.insert(1, [1, 2], "k")
    assert cache.evict() == 1
