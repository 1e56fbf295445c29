"""Ids, lengths and positions of a KV state may be any integers; what is none is refused by name
before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import InvalidArgument, NotFound
from quire.contracts.layers import FullAttention, Recurrent, StateTensor
from quire.kv.contract import ContractState

from .faces import contract

LAYER = FullAttention(num_heads=1, num_kv_heads=1, head_dim=2, value_dim=2)
MEMORY = Recurrent(states=(StateTensor(shape=(1, 2, 2), dtype="float32"),))


@pytest.fixture
def state() -> ContractState:
    made = contract([LAYER, MEMORY], num_states=16, capacity=64, page_size=4)
    made.add_sequence(3)
    made.begin_forward([3], [6])
    made.end_forward(skipped=[0])
    return made


@pytest.mark.parametrize(
    "kind",
    [torch.tensor, np.int32, lambda n: torch.tensor([n], dtype=torch.uint8)],
    ids=["tensor", "numpy", "one of 1-D"],
)
def test_any_integer_is_an_id_a_length_and_a_position(state: ContractState, kind: Callable[[int], Any]) -> None:
    assert state.sequence_length(kind(3)) == 6
    assert state.fork_sequence(kind(3), kind(4), kind(-1) if kind(1).dtype != torch.uint8 else -1) == 0
    assert state.state.sequences.ids == [3, 4]
    assert all(type(seq) is int for seq in state.state.sequences.ids)
    state.checkpoint(kind(4))
    assert state.popn(kind(4), kind(0)) == 0
    state.drop_checkpoint(kind(4), kind(6))
    assert state.checkpoints(kind(4)) == []
    assert state.debug_get_kv(kind(3), kind(1), kind(3), layer=kind(0))[0].shape == (2, 1, 2)
    state.remove_sequence(kind(3))
    with pytest.raises(NotFound, match=r"sequence 3 does not exist; existing ids: 4"):
        state.sequence_length(kind(3))
    state.check()


def test_lists_of_integers_may_be_tensors(state: ContractState) -> None:
    state.add_sequence(0)
    ids, counts = torch.tensor([0, 3]), np.array([2, 1])
    assert state.missing_pages(ids, counts) == 0
    state.begin_forward(ids, counts, torch.tensor([-1, 0, -1]))
    assert state.get_query_positions().tolist() == [0, 1, 6]
    state.end_forward(skipped=torch.tensor([0]))
    state.commit_accepted_token_tree_nodes(torch.tensor([3, 0]), torch.tensor([0, 1]))
    assert (state.sequence_length(0), state.sequence_length(3)) == (2, 7)


@pytest.mark.parametrize(
    "given",
    [True, 1.0, "3", None, [3], torch.tensor(3.0), torch.tensor(True), torch.tensor([3, 4]), np.bool_(True)],
    ids=repr,
)
def test_what_is_no_integer_is_refused_by_name(state: ContractState, given: Any) -> None:
    before = state.state.sequences.ids, state.num_available_pages()
    for verb, name, arguments in (
        ("add_sequence", "seq_id", (given,)),
        ("sequence_length", "seq_id", (given,)),
        ("fork_sequence", "child_id", (3, given)),
        ("fork_sequence", "fork_pos", (3, 4, given)),
        ("popn", "n", (3, given)),
        ("begin_forward", "seq_ids", ([given], [1])),
        ("begin_forward", "append_lengths", ([3], [given])),
        ("rewind_cost", "pos", (3, given)),
        *([("debug_get_kv", "start", (3, given))] if given is not None else []),  # None: the first row
        ("cross_attention", "layer_id", (given, torch.zeros(1, 1, 2))),
    ):
        with pytest.raises(InvalidArgument, match=rf"^{verb}: {name} must be .*integer.*; got "):
            getattr(state, verb)(*arguments)
    assert (state.state.sequences.ids, state.num_available_pages()) == before
