"""The naive model by itself: the examples of the specification, and its short formulas against
their definitions.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.contracts.layers import FullAttention, RopeSpec, WindowedAttention

from .oracle import Oracle, Window
from .oracle_forward import parts_of
from .oracle_pages import page_count
from .oracle_refusals import raise_first
from .oracle_values import scores_of, softmax_state, turned
from .oracle_windows import ranges, reachable, seen, wanted

ROPE = RopeSpec(theta=100.0, rotary_dim=4)
SPEC = FullAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=3, rope=ROPE, rope_mode="inline")


class Story:
    """An oracle that is told lengths, and makes up the values."""

    def __init__(self, *specs: FullAttention | WindowedAttention, capacity: int = 400, page_size: int = 4) -> None:
        self.oracle = Oracle(specs or [SPEC], capacity, page_size, torch.float64)
        self.generator = torch.Generator().manual_seed(5)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def append(self, ids: list[int], counts: list[int], parents: Any = None) -> list[list[int]]:
        """One forward; what each new token sees in the first layer."""
        self.oracle.begin_forward(ids, counts, parents)
        forward = self.oracle.open_forward()
        tokens = forward.tokens
        for layer, spec in enumerate(self.oracle.specs):
            k = self.random(tokens, spec.num_kv_heads, spec.head_dim)
            self.oracle.append_kv(layer, k, self.random(tokens, spec.num_kv_heads, spec.value_dim))
            self.oracle.cross_attention(layer, self.random(tokens, spec.num_heads, spec.head_dim), "all")
        seen_by = list(parts_of(forward.views[0, "all"]))
        self.oracle.end_forward()
        return seen_by

    def add(self, *lengths: int) -> None:
        for seq_id, length in enumerate(lengths):
            self.oracle.add_sequence(seq_id)
            if length:
                self.append([seq_id], [length])

    def lengths(self) -> list[int]:
        return [sequence.length for sequence in self.oracle.sequences.values()]


def numbers(text: str) -> list[int]:
    """``"0-1, 4-7"`` as a list."""
    found: list[int] = []
    for part in text.split(", "):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


TABLE = [
    # append, cached after, (token: sees, e, relative), (forward: sees, e, relative)
    (4, "0-3", ("0-3", 0, 3), ("0-3", 0, 3)),
    (3, "0-1, 3-6", ("0-1, 3-6", 1, 5), ("0-6", 0, 6)),
    (1, "0-1, 4-7", ("0-1, 4-7", 2, 5), ("0-1, 3-7", 1, 6)),
    (5, "0-1, 9-12", ("0-1, 9-12", 7, 5), ("0-1, 4-12", 2, 10)),
    (1, "0-1, 10-13", ("0-1, 10-13", 8, 5), ("0-1, 9-13", 7, 6)),
]
"""Five forwards with W = 6, s = 2."""


def cached(oracle: Oracle, seq_id: int) -> list[int]:
    """Positions that count as cached."""
    sequence = oracle.sequences[seq_id]
    sink = sequence.window.sink if sequence.window else 0
    return [i for i in range(sequence.length) if i < sink or i >= sink + sequence.evicted]


@pytest.mark.parametrize("eviction", ["token", "forward"])
@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 16])
def test_window_table(eviction: str, page_size: int) -> None:
    story = Story(page_size=page_size)
    story.add(0)
    story.oracle.enable_sliding_window_for_seq(0, 6, 2, eviction)
    for count, after, *columns in TABLE:
        sees, e, relative = columns[eviction == "forward"]
        story.oracle.begin_forward([0], [count])
        assert story.oracle.positions(relative=True)[-1] == relative
        assert story.oracle.positions()[-1] - e == relative
        story.oracle.abort_forward()
        assert story.append([0], [count])[-1] == numbers(sees)
        assert cached(story.oracle, 0) == numbers(after)
        assert story.oracle.sequences[0].cached == len(numbers(after))


def test_larger_window_and_late_window() -> None:
    story = Story()
    story.add(0, 20)
    story.oracle.enable_sliding_window_for_seq(0, 20, 6)
    story.oracle.enable_sliding_window_for_seq(1, 10, 2)
    after = ["0-3", "0-5, 10-23", "0-5, 16-29", "0-5, 17-30", "0-5, 18-31"]
    for count, expected in zip([4, 20, 6, 1, 1], after, strict=True):
        story.append([0], [count])
        assert cached(story.oracle, 0) == numbers(expected)
    assert story.oracle.sequences[1].cached == 20
    story.append([1], [1])
    assert cached(story.oracle, 1) == numbers("0-1, 13-20")


def test_reachable_example() -> None:
    story = Story(page_size=4)
    story.add(0)
    story.oracle.enable_sliding_window_for_seq(0, 6, 2)
    for count in (8, 5, 1):
        story.append([0], [count])
    assert [page is None for page in story.oracle.sequences[0].tables[0]] == [False, True, False, False]
    assert story.oracle.reachable(0) == [range(3), range(11, 15)]
    with pytest.raises(FailedPrecondition):
        story.oracle.popn(0, 4)
    story.oracle.popn(0, 3)
    assert story.append([0], [1]) == [numbers("0-1, 8-11")]


@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 16])
def test_tree_examples(page_size: int) -> None:
    story = Story(page_size=page_size)
    story.add(10, 20, 30, 40)
    oracle = story.oracle
    seven, binary = [-1, 0, 0, 1, 1, 2, 2], [-1, *((k - 1) // 2 for k in range(1, 15))]
    chain, two_roots = list(range(-1, 9)), [-1, 0, 0, 1, 1, 2, 2, -1, 7, 7, 8, 8, 9, 9]
    trees = [seven, binary, chain, two_roots]
    oracle.begin_forward([0, 1, 2, 3], [7, 15, 10, 14], trees)
    positions = oracle.positions()
    assert positions[:7] == [10, 11, 11, 12, 12, 12, 12]
    assert positions[-7] == 40
    oracle.abort_forward()
    views = story.append([0, 1, 2, 3], [7, 15, 10, 14], trees)
    assert views[6] == [*range(10), 10, 12, 16]
    assert views[22 + 9] == list(range(40))
    rows = [list(sequence.rows[0]) for sequence in oracle.sequences.values()]
    oracle.commit_accepted_token_tree_nodes([3, 1, 0, 2], [13, 11, 6, 6])
    assert story.lengths() == [13, 24, 37, 43]
    for seq_id, (base, path) in enumerate([(10, [0, 2, 6]), (20, [0, 2, 5, 11]), (30, range(7)), (40, [7, 9, 13])]):
        kept = oracle.sequences[seq_id].rows[0][base:]
        assert all(a is b for a, b in zip(kept, [rows[seq_id][base + node] for node in path], strict=True))
    oracle.clear()
    story.add(10, 20, 30, 40)
    counts = [7, 15, 10, 14]
    story.append([0, 1, 2, 3], counts, [parent for count in counts for parent in range(-1, count - 1)])
    oracle.commit_accepted_token_tree_nodes([0, 1, 2, 3], [2, 6, -1, 4])
    assert story.lengths() == [13, 27, 30, 45]


def test_trees_that_grow() -> None:
    story = Story()
    story.add(10, 20, 30, 40)
    for size in (1, 2, 4, 8, 16):
        parents = [(k - 1) // 2 if k else -1 for k in range(size - 1, 2 * size - 1)]
        story.append([0, 1, 2, 3], [size] * 4, [parents] * 4)
    story.oracle.commit_accepted_token_tree_nodes([0, 1, 2, 3], [2, 6, -1, 4])
    assert story.lengths() == [12, 23, 30, 43]


def test_what_a_node_sees_through_a_window() -> None:
    story = Story()
    story.add(0)
    story.oracle.enable_sliding_window_for_seq(0, 6, 2)
    story.append([0], [8])
    assert story.append([0], [2], [[-1, 0]])[1] == numbers("0-1, 6-9")


def test_query_positions_example() -> None:
    story = Story()
    story.add(10, 6)
    story.oracle.begin_forward([0, 1], [3, 1])
    assert story.oracle.positions() == [10, 11, 12, 6]
    story.oracle.abort_forward()
    story.oracle.begin_forward([0], [4], [-1, 0, 0, 1])
    assert story.oracle.positions() == [10, 11, 11, 12]


def test_fork_example() -> None:
    story = Story(capacity=32)
    oracle, free = story.oracle, []
    story.add(10)
    for verb in (
        lambda: oracle.fork_sequence(0, 1, 10),
        lambda: story.append([1], [1]),
        lambda: story.append([0], [1]),
        lambda: oracle.fork_sequence(0, 2, 8),
        lambda: story.append([2], [1]),
        lambda: oracle.fork_sequence(0, 3, 5),
        lambda: story.append([3], [1]),
    ):
        verb()
        free.append(oracle.free)
    assert free == [5, 4, 4, 4, 3, 3, 2]


def test_layer_window_example() -> None:
    """W_l = 3, appends 3, 2, 1; the pages of this class alone are freed."""
    window = WindowedAttention(num_heads=1, num_kv_heads=1, head_dim=4, value_dim=4, window=3)
    full = FullAttention(num_heads=1, num_kv_heads=1, head_dim=4, value_dim=4)
    story = Story(window, full, page_size=1)
    story.add(0)
    views = [view for count in (3, 2, 1) for view in story.append([0], [count])]
    assert views == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    # The last forward began at 5, from where 3 and 4 are seen.
    assert [page is None for page in story.oracle.sequences[0].tables[0]] == [True] * 3 + [False] * 3
    assert None not in story.oracle.sequences[0].tables[1]
    assert story.oracle.reachable(0) == [range(1), range(5, 7)]


def test_two_scores() -> None:
    scores, values = np.array([[0.5, 1.5]]), np.array([1.0, 3.0]).reshape(2, 1, 1)
    out, lse = softmax_state(scores, values)
    assert out.item() == pytest.approx(2.4621, abs=5e-5)  # written with four places
    assert lse.item() == pytest.approx(1.8133, abs=5e-5)  # likewise
    assert lse.item() / math.log(2) == pytest.approx(2.6160, abs=5e-5)  # likewise
    sunk, _ = softmax_state(scores, values, [1.0])
    weights = [math.exp(0.5), math.exp(1.5), math.e]
    assert sunk.item() == pytest.approx((weights[0] + 3 * weights[1]) / sum(weights))


@pytest.mark.parametrize("eviction", ["token", "forward"])
@pytest.mark.parametrize("mode", ["inline", "normal", "none"])
def test_relative_positions_are_those_of_keys_that_are_rotated_anew(mode: str, eviction: str) -> None:
    """Against a cache that numbers its tokens 0, 1, 2, ...

    at each query and rotates raw keys there.
    """
    spec = FullAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=3, rope=ROPE, rope_mode=mode)  # type: ignore[arg-type]
    story = Story(spec)
    oracle = story.oracle
    oracle.add_sequence(0)
    oracle.enable_sliding_window_for_seq(0, 7, 3, eviction)
    raw: list[tuple[Tensor, Tensor]] = []
    for count in (5, 1, 9, 2, 4):
        n = len(raw)
        q, k, v = story.random(count, 2, 4), story.random(count, 1, 4), story.random(count, 1, 3)
        raw += zip(k, v, strict=True)
        oracle.begin_forward([0], [count])
        places = range(n, n + count)
        if mode == "none":
            given_q, given_k = (torch.from_numpy(turned(x.numpy(), places, ROPE)) for x in (q, k))
        else:
            given_q, given_k = q, k
        got = oracle.attention_with_fused_qkv(0, given_q, given_k, v)
        for row, position in enumerate(places):
            e = max(0, (position + 1 if eviction == "token" else n) - 7)
            kept = [i for i in range(position + 1) if i < 3 or i >= 3 + e]
            k_MHD = turned(torch.stack([raw[i][0] for i in kept]).numpy(), range(len(kept)), ROPE)
            query = turned(q[row].numpy()[None], [len(kept) - 1], ROPE)[0]
            out, lse = softmax_state(
                scores_of(query, k_MHD, spec.scale), torch.stack([raw[i][1] for i in kept]).numpy()
            )
            np.testing.assert_allclose(got.out[row].numpy(), out, atol=1e-12)  # float64, numbers about 1
            np.testing.assert_allclose(got.lse[row].numpy(), lse, atol=1e-12)  # likewise
        oracle.end_forward()


@settings(max_examples=examples(100, 300), deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_reachable_formula_against_its_definition(rng: random.Random) -> None:
    """m is reachable if all that a query at m or later may see of the tokens before m is held; rows
    that only share a page with the sink do not count.
    """
    page_size = rng.choice([1, 2, 3, 4, 7])
    sink = rng.choice([0, 0, 1, 2, 5])
    window = Window(sink + rng.randint(1, 7), sink, rng.choice(["token", "forward"])) if rng.random() < 0.7 else None
    layer_window = rng.choice([None, rng.randint(1, 9)])
    sink = window.sink if window else 0
    length = rng.randint(0, 30)
    lost: set[int] = set()
    for n in sorted(rng.sample(range(length + 1), min(length, 3))):
        for page in range(n // page_size):
            tokens = range(page * page_size, (page + 1) * page_size)
            if not any(wanted(i, n, window, layer_window) for i in tokens):
                lost.update(tokens)
    gap = max((i + 1 for i in lost if i >= sink), default=sink)
    counted = [i not in lost and (i < sink or i >= gap) for i in range(length)]
    found = reachable(length, lambda i: i not in lost, window, layer_window)
    for m in range(length + 1):
        later = range(m, length + 12)
        needed = {i for i in range(m) for q in later if seen(q, i, m, window, layer_window)}
        definition = all(counted[i] for i in needed)
        shortest = min(layer_window or 99, window.size - sink + (window.eviction == "forward") if window else 99)
        # (With a window of one token nothing before m is needed, and the formula asks for the last
        # token all the same.)
        assert (m in found) == definition or (shortest == 1 and definition), m
    assert {0, length} <= found
    assert [i for run in ranges(found) for i in run] == sorted(found)


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("eviction", ["token", "forward"])
def test_sliding_never_holds_more_than_the_bound(page_size: int, eviction: str) -> None:
    story = Story(capacity=60, page_size=page_size)
    story.add(0)
    story.oracle.enable_sliding_window_for_seq(0, 9, 3, eviction)
    rng = random.Random(page_size)
    for _ in range(80):
        n = rng.choice([1, 1, 1, 2, 7])
        story.append([0], [n])
        held, _ = story.oracle.pages_of(0)
        assert held <= page_count(3, page_size) + page_count(6 + n, page_size) + 1
    assert story.oracle.sequences[0].length > 80


def test_refusals_in_order() -> None:
    story = Story()
    story.add(4)
    oracle = story.oracle
    cases: list[tuple[type[QuireError], Any]] = [
        (InvalidArgument, lambda: oracle.begin_forward([0, 9], [1, 1], [[0], [-1]])),
        (FailedPrecondition, lambda: oracle.commit_accepted_token_tree_nodes([0], [-1])),
        (InvalidArgument, lambda: oracle.commit_accepted_token_tree_nodes([0], [0])),
    ]
    for kind, act in cases:
        with pytest.raises(kind):
            act()
    raise_first([])
