"""Token trees as the specification tells them: what a node sees, what a commit keeps, and that it
equals chains.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from .machine import GEOMETRIES
from .oracle_pages import page_count
from .oracle_values import Spec
from .pair import Pair, attention, same_bits, split_columns, windowed
from .seer import Seer

PAGE_SIZES = (1, 2, 4, 5, 16)
SEVEN = [-1, 0, 0, 1, 1, 2, 2]
BINARY = [-1, *((k - 1) // 2 for k in range(1, 15))]
TWO_ROOTS = [-1, 0, 0, 1, 1, 2, 2, -1, 7, 7, 8, 8, 9, 9]


def chain(length: int) -> list[int]:
    return list(range(-1, length - 1))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    found: list[int] = []
    while node != -1:
        found.insert(0, node)
        node = parents[node]
    return found


def decodes(pair: Pair, ids: Sequence[int], count: int = 5) -> None:
    for _ in range(count):
        pair.forward(ids, [1] * len(ids))


def four(page_size: int, specs: Any = None) -> Pair:
    """Sequences 0..3 of 10, 20, 30, 40 tokens."""
    pair = Pair(specs, page_size=page_size, capacity=600)
    pair.add(0, 1, 2, 3)
    pair.forward([0, 1, 2, 3], [10, 20, 30, 40])
    return pair


# -- the examples ----------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_four_trees(page_size: int) -> None:
    pair = four(page_size)
    trees = [SEVEN, BINARY, chain(10), TWO_ROOTS]
    pair.begin([0, 1, 2, 3], [7, 15, 10, 14], trees)
    positions = pair.state.get_query_positions().tolist()
    assert positions[:7] == [10, 11, 11, 12, 12, 12, 12]
    assert positions[32 + 7] == 40
    pair.abort()
    pair.forward([0, 1, 2, 3], [7, 15, 10, 14], trees)
    assert [pair.state.pending_nodes(seq_id) for seq_id in range(4)] == [7, 15, 10, 14]
    assert [pair.state.sequence_length(seq_id) for seq_id in range(4)] == [10, 20, 30, 40]
    assert pair.state.total_sequence_length() == 100 + 46
    pair.commit([0, 1, 2, 3], [6, 11, 6, 13])
    assert [pair.state.sequence_length(seq_id) for seq_id in range(4)] == [13, 24, 37, 43]
    decodes(pair, [0, 1, 2, 3])
    pair.finish()


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_four_chains(page_size: int) -> None:
    pair = four(page_size)
    counts = [7, 15, 10, 14]
    flat = [parent for count in counts for parent in chain(count)]
    pair.forward([0, 1, 2, 3], counts, flat)
    pair.commit([0, 1, 2, 3], [2, 6, -1, 4])
    assert [pair.state.sequence_length(seq_id) for seq_id in range(4)] == [13, 27, 30, 45]
    decodes(pair, [3, 1, 0, 2])
    pair.finish()


@pytest.mark.turns(6)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_tree_of_five_forwards(page_size: int) -> None:
    pair = four(page_size)
    for size in (1, 2, 4, 8, 16):
        parents = [(k - 1) // 2 if k else -1 for k in range(size - 1, 2 * size - 1)]
        pair.forward([0, 1, 2, 3], [size] * 4, [parents] * 4)
    pair.commit([0, 1, 2, 3], [2, 6, -1, 4])
    assert [pair.state.sequence_length(seq_id) for seq_id in range(4)] == [12, 23, 30, 43]
    decodes(pair, [0, 1, 2, 3])
    pair.finish()


def test_what_nodes_see() -> None:
    seer = Seer()
    seer.add(8, 10)
    seer.state.enable_sliding_window_for_seq(0, 6, 2)
    views = seer.append([0, 1], [2, 7], [[-1, 0], SEVEN])
    # (Node 1 of sequence 0 is at position 9.)
    assert views[1] == [0, 1, 6, 7, 8, 9]
    assert views[2:] == [[*range(10), *(10 + k for k in path_to(SEVEN, node))] for node in range(7)]
    positions = [[-1, 0, 0, 1], [10, 11, 11, 12]]
    seer.state.commit_accepted_token_tree_nodes([1], [-1])
    seer.state.begin_forward([1], [4], positions[0])
    assert seer.state.get_query_positions().tolist() == positions[1]


def test_rounds_of_one_two_and_four() -> None:
    """Node 2 is the second of the second round: what stays is 101, 202."""
    seer = Seer(columns=512)
    seer.state.add_sequence(0)
    seer.name([0], [1], [101], [[-1]])
    seer.name([0], [2], [201, 202], [[0, 0]])
    seer.name([0], [4], [301, 302, 303, 304], [[1, 1, 2, 2]])
    assert seer.stored(0) == [101, 201, 202, 301, 302, 303, 304]
    seer.state.commit_accepted_token_tree_nodes([0], [2])
    assert seer.stored(0) == [101, 202]
    assert seer.name([0], [1], [400]) == [[101, 202, 400]]


@pytest.mark.parametrize("tree_first", [True, False])
def test_a_tree_beside_a_chain(tree_first: bool) -> None:
    """Of the tree -1, 0, 0, 1, 1, 2, 2 the path to node 4 is kept, of the chain of drafts the first
    three.
    """
    seer = Seer(columns=512)
    seer.add(0, 0, 0)
    ids = [0, 1] if tree_first else [1, 0]
    for seq_id in ids:
        seer.name([seq_id], [1], [100 * (seq_id + 1)])
    names = {0: [101 + k for k in range(7)], 1: [201 + k for k in range(7)]}
    trees = {0: SEVEN, 1: chain(7)}
    seer.name(ids, [7, 7], names[ids[0]] + names[ids[1]], [trees[seq_id] for seq_id in ids])
    seer.state.commit_accepted_token_tree_nodes([0, 1], [4, 2])
    assert seer.stored(0) == [100, 101, 102, 105]
    assert seer.stored(1) == [200, 201, 202, 203]
    assert seer.name([1, 0], [1, 1], [300, 301]) == [[200, 201, 202, 203, 300], [100, 101, 102, 105, 301]]


def test_second_rounds_of_chains_are_causal() -> None:
    seer = Seer()
    seer.add(3)
    seer.append([0], [2], [[-1, 0]])
    assert seer.append([0], [3], [[1, 2, 3]]) == [[*range(end)] for end in (6, 7, 8)]
    assert seer.append([0], [2], [[0, 5]]) == [[0, 1, 2, 3, 8], [0, 1, 2, 3, 8, 9]]
    seer.state.commit_accepted_token_tree_nodes([0], [6])
    assert seer.stored(0) == [0, 1, 2, 3, 8, 9]


# -- commit ----------------------------------------------------------------------------------------


def test_commit_goes_by_ids() -> None:
    """Another order than that of the batch, and a subset, and the rest later."""
    pair = four(4)
    pair.forward([3, 1, 0, 2], [3, 5, 7, 1], [chain(3), [-1, 0, 0, -1, 3], SEVEN, None])
    pair.commit([0, 3], [5, 0])
    assert [pair.state.sequence_length(seq_id) for seq_id in range(4)] == [13, 20, 31, 41]
    assert [pair.state.pending_nodes(seq_id) for seq_id in range(4)] == [0, 5, 0, 0]
    # Others go on meanwhile, and the tree may still grow.
    pair.forward([0, 3, 2], [2, 1, 1])
    pair.forward([1, 2], [2, 1], [[4, 4], [-1]])
    pair.commit([2, 1], [-1, 6])
    assert [pair.state.sequence_length(seq_id) for seq_id in range(4)] == [15, 23, 32, 42]
    decodes(pair, [2, 0, 3, 1])
    pair.finish()


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_node_of_a_tree(page_size: int) -> None:
    """Leaves and inner nodes, over a prefix that is shared; the rows of the path move and are not
    turned again.
    """
    pair = Pair(page_size=page_size, capacity=900)
    pair.add(0)
    pair.append(0, 7)
    for node in range(-1, 14):
        child = node + 2
        pair.fork(0, child, 7 - child % 3)
    children = list(range(1, 16))
    pair.forward(children, [14] * 15, [TWO_ROOTS] * 15)
    for child in children:
        base = pair.state.sequence_length(child)
        before = pair.state.debug_get_kv(child, base)
        copies = len(pair.copies)
        path = path_to(TWO_ROOTS, child - 2)
        pair.commit([child], [child - 2])
        kept = pair.state.debug_get_kv(child, base)
        assert all(same_bits(new, old[:, path]) for new, old in zip(kept, before, strict=True))
        moved = sum(copy.count for copy in pair.copies[copies:])
        assert moved <= len(path)
        if path == list(range(len(path))):
            assert moved == 0
        assert pair.state.sequence_pages(child)[0] == page_count(base + len(path), page_size)
    decodes(pair, children, 2)
    pair.finish()


@pytest.mark.product(6)
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
@pytest.mark.parametrize("window", [None, (6, 2, "token"), (5, 0, "forward"), (3, 2, "token")])
def test_a_tree_is_all_its_paths(geometry: str, window: tuple[int, int, Any] | None) -> None:
    """Each path from a root to a leaf gives what it gives alone, as ordinary tokens of a fork; and
    so does what follows.
    """
    specs = GEOMETRIES[geometry]
    pair = Pair(specs, page_size=2, capacity=600)
    rng = random.Random(geometry)
    pair.add(0)
    if window:
        pair.window(0, window[0], window[1], window[2])
    pair.append(0, 5)
    pair.append(0, 4)
    parents = [max(-1, rng.randint(node - 4, node - 1)) for node in range(10)]
    leaves = sorted(set(range(10)) - set(parents))
    values = [pair.random(layer, 10) for layer in range(len(specs))]
    for child in range(1, 1 + len(leaves)):
        pair.fork(0, child)
    pair.begin([0], [10], [parents])
    exact = [
        pair.oracle.attention_with_fused_qkv(layer, *split_columns(spec, values[layer]))
        for layer, spec in enumerate(specs)
    ]
    tree = [pair.layer(layer, values[layer]) for layer in range(len(specs))]
    pair.end()
    for child, leaf in enumerate(leaves, start=1):
        path = path_to(parents, leaf)
        pair.begin([child], [len(path)])
        for layer in range(len(specs)):
            alone = pair.layer(layer, values[layer][path])
            error = (alone - tree[layer][path]).abs().amax((1, 2))
            # (Both are within the bound of the exact result.)
            assert (error <= 2 * exact[layer].out_bound[path]).all()
        pair.end()
    chosen = rng.randrange(len(leaves))
    pair.commit([0], [leaves[chosen]])
    assert pair.state.cached_length(0) == pair.state.cached_length(chosen + 1)
    for layer in range(len(specs)):
        end = pair.oracle.sequences[0].length
        keys = (pair.state.debug_get_kv(seq_id, 9, end, layer=layer) for seq_id in (0, chosen + 1))
        assert all(same_bits(*both) for both in zip(*keys, strict=True))
    decodes(pair, [0, chosen + 1], 3)
    pair.finish()


def test_trees_over_windows_that_slide() -> None:
    specs: list[Spec] = [attention(), windowed(5), windowed(3, mode="inline")]
    pair = Pair(specs, page_size=2, capacity=200, window_capacity=100)
    pair.add(0, 1, 2)
    pair.window(0, 6, 2)
    pair.window(1, 7, 3, "forward")
    for _ in range(4):
        pair.forward([2, 0, 1], [7, 7, 7], [SEVEN] * 3)
        pair.forward([0, 1], [2, 2], [[6, 7], [3, -1]])
        pair.commit([1, 0, 2], [7, 8, 4])
        pair.forward([1, 2, 0], [1, 5, 1])
    # A path of a commit can always be taken back.
    for seq_id in range(3):
        pair.forward([seq_id], [4], [chain(4)])
        pair.commit([seq_id], [3])
        pair.pop(seq_id, 4)
    pair.finish()


def test_prompt_decode_chain_and_tree_in_one_batch() -> None:
    pair = Pair(page_size=5, capacity=500)
    pair.add(0, 1, 2, 3, 4)
    pair.forward([1, 2, 3], [12, 9, 4])
    pair.forward([0, 1, 2, 3, 4], [17, 1, 5, 7, 3], [None, None, chain(5), SEVEN, [-1, -1, -1]])
    pair.commit([4, 3, 2], [1, 6, -1])
    pair.forward([4, 3, 2, 1, 0], [1, 6, 1, 18, 1], [None, [-1, 0, 1, 1, -1, 4], None, None, None])
    pair.commit([3], [5])
    pair.finish()


def test_a_tree_of_more_than_256_nodes() -> None:
    pair = Pair([attention(rotary_dim=0)], capacity=400)
    pair.add(0)
    pair.append(0, 3)
    pair.forward([0], [300], [[max(-1, node - 3) for node in range(300)]])
    pair.commit([0], [299])
    assert pair.state.sequence_length(0) == 103
    pair.append(0)
    pair.finish()


def test_skipped_layers_and_aborts() -> None:
    pair = Pair(page_size=2)
    pair.add(0)
    pair.append(0, 3)
    pair.forward([0], [3], [[-1, 0, 0]])
    pair.begin([0], [2], [[1, 2]])
    pair.layer(0, pair.random(0, 2))
    pair.abort()
    assert pair.state.pending_nodes(0) == 3
    pair.begin([0], [2], [[0, 3]])
    pair.layer(1, pair.random(1, 2))
    pair.end(skipped=[0])
    pair.commit([0], [4])
    assert not pair.state.debug_get_kv(0, 4, 6, layer=0)[0].any()
    pair.append(0)
    pair.finish()
