"""What is no tree, what is refused while nodes are uncommitted, and commits that cannot be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted

from .pair import Pair, attention, num_columns, refused, same_bits
from .test_trees import SEVEN, chain


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([[0], [-1]], ("node 0", "parent 0", "-1 <= parent < 0")),
        ([[-2], [-1]], ("parent -2",)),
        ([[-1]], ("1 items", "2")),
        ([[-1], [-1], None], ("3 items", "2")),
        ([[-1, 0], [-1]], ("2 parents", "1")),
        ([[], [-1]], ("0 parents", "1")),
        ([-1, -1, -1], ("3 parents", "2")),
        ([-1, 0], ("parent 0",)),
        ([-1, None], ()),
        ([], ()),
        ([[1.0], [-1]], ()),
        ([["-1"], [-1]], ()),
        ([[True], [-1]], ()),
        ([[False], [-1]], ()),
        ([-1, True], ()),
        (7, ()),
    ],
)
def test_parents_that_are_no_tree(parents: Any, words: tuple[str, ...]) -> None:
    pair = Pair()
    pair.add(0, 1)
    pair.append(0, 3)
    for verb in (pair.state.begin_forward, pair.state.missing_pages):
        refused(pair, InvalidArgument, lambda verb=verb: verb([0, 1], [1, 1], parents), *words)  # type: ignore[misc]


def test_parents_count_all_nodes_of_the_sequence() -> None:
    pair = Pair()
    pair.add(0, 1)
    pair.forward([0], [3], [[-1, 0, 0]])
    begin = pair.state.begin_forward
    refused(pair, InvalidArgument, lambda: begin([0], [2], [[2, 4]]), "node 4", "parent 4")
    refused(pair, InvalidArgument, lambda: begin([1], [1], [[0]]), "node 0")
    pair.forward([0], [2], [[2, 3]])
    pair.commit([0], [4])
    assert pair.state.sequence_length(0) == 4


def test_while_nodes_are_uncommitted() -> None:
    pair = Pair()
    state = pair.state
    pair.add(0, 1)
    pair.append(0, 3)
    pair.forward([0], [2], [[-1, 0]])
    k, v = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    for act in (
        lambda: state.popn(0, 1),
        lambda: state.popn(0, 0),
        lambda: state.rewind_cost(0, 3),
        lambda: state.fork_sequence(0, 2),
        lambda: state.fork_sequence(0, 2, 0),
        lambda: state.enable_sliding_window_for_seq(0, 8),
        lambda: state.enable_sliding_window_for_seq(0, None),
        lambda: state.get_checkpoint_metadata(0),
        lambda: state.export_page_group(0, 0),
        lambda: state.begin_forward([0], [1]),
        lambda: state.begin_forward([1, 0], [1, 1], [[-1], None]),
        lambda: state.missing_pages([0], [1]),
    ):
        refused(pair, FailedPrecondition, act, "sequence 0", "uncommitted")
    # Nodes are read behind the tokens; only tokens are written.
    assert state.debug_get_kv(0)[0].shape[1] == 5
    refused(pair, InvalidArgument, lambda: state.debug_get_kv(0, 0, 6), "5")
    refused(pair, InvalidArgument, lambda: state.debug_set_kv(0, 3, k, v, layer=0), "3")
    state.debug_set_kv(0, 2, k, v, layer=0)
    pair.oracle.debug_set_kv(0, 2, k, v, 0)
    pair.compare()
    pair.fork(1, 3)
    pair.remove(0)
    pair.finish()


def test_commits_that_are_refused() -> None:
    pair = Pair()
    commit = pair.state.commit_accepted_token_tree_nodes
    pair.add(0, 1, 2)
    pair.forward([0, 1, 2], [4, 3, 2], [None, [-1, 0, 1], [-1, -1]])
    cases: list[tuple[Any, Any, Any, tuple[str, ...]]] = [
        (InvalidArgument, [1, 2], [0], ("2", "1")),
        (InvalidArgument, [1, 1], [0, 0], ("1", "twice")),
        (InvalidArgument, [1, 2], [0, 2], ("leaf 2", "sequence 2", "-1..1")),
        (InvalidArgument, [1], [-2], ("-2",)),
        (InvalidArgument, [1], [0.0], ("0.0",)),
        (InvalidArgument, [0], [0], ("leaf 0", "sequence 0")),
        (InvalidArgument, [9, 1], [0, 7], ("leaf 7",)),
        (NotFound, [1, 9], [0, 0], ("9",)),
        (FailedPrecondition, [1, 0], [0, -1], ("sequence 0", "no uncommitted nodes")),
    ]
    for kind, ids, leaves, words in cases:
        refused(pair, kind, lambda ids=ids, leaves=leaves: commit(ids, leaves), *words)  # type: ignore[misc]
    pair.begin([0], [1])
    refused(pair, FailedPrecondition, lambda: commit([1], [0]), "forward")
    refused(pair, InvalidArgument, lambda: commit([1], [3]), "leaf 3")
    pair.abort()
    pair.commit([], [])
    pair.commit([1, 2], [2, -1])
    refused(pair, FailedPrecondition, lambda: commit([2], [-1]), "sequence 2")
    refused(pair, InvalidArgument, lambda: commit([2], [0]), "sequence 2")
    pair.finish()


def test_nodes_need_pages_like_tokens() -> None:
    pair = Pair([attention()], page_size=4, capacity=24)
    pair.add(0, 1)
    pair.append(0, 6)
    pair.fork(0, 1 + 1)
    assert pair.both("missing_pages", [0], [19], [chain(19)]) == 2
    refused(pair, ResourceExhausted, lambda: pair.state.begin_forward([0], [19], [chain(19)]), "6", "4")
    pair.forward([0], [7], [SEVEN])
    assert pair.free == 1
    # (By now the child alone holds the page that both had.)
    assert pair.both("missing_pages", [0, 2], [4, 3], [[0, 1, 2, 3], None]) == 1
    pair.forward([0], [4], [[0, 1, 2, 3]])
    pair.commit([0], [-1])
    assert pair.free == 4 - 1
    pair.forward([2, 0], [1, 1])
    pair.finish()


def test_all_orders_of_commit() -> None:
    """Whatever the order, each sequence gets its own path."""
    results: list[list[Tensor]] = []
    for order in itertools.permutations(range(3)):
        pair = Pair(seed=5, page_size=2)
        pair.add(0, 1, 2)
        pair.forward([0, 1, 2], [3, 4, 5])
        pair.forward([2, 0, 1], [7, 7, 7], [SEVEN, SEVEN, chain(7)])
        for seq_id in order:
            pair.commit([seq_id], [(6, 3, -1)[seq_id]])
        results.append([pair.state.debug_get_kv(seq_id)[0] for seq_id in range(3)])
        assert all(same_bits(one, first) for one, first in zip(results[-1], results[0], strict=True))
    assert num_columns(pair.specs[0]) == 8 * 8
