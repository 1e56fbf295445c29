"""``StateTensor``: initial values that are tensors, and what is refused when one is built; how many
slots states need.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.contracts.layers import FullAttention, Recurrent, StateTensor
from quire.kv.contract import ContractState
from quire.kv.state import State

from .faces import contract

EYE = torch.eye(3, 4)


def tensor(initial: Any, shape: tuple[int, ...] = (2, 3, 4), dtype: str = "float32") -> StateTensor:
    return StateTensor(shape=shape, dtype=dtype, initial=initial)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize("initial", [EYE, EYE[None].expand(2, 3, 4), EYE.bfloat16(), EYE.int(), EYE.numpy()])
def test_a_sequence_begins_with_the_tensor(initial: Any, dtype: str) -> None:
    state = contract([Recurrent(states=(tensor(initial, dtype=dtype), tensor(1)))], num_states=8)
    expected = EYE.expand(2, 3, 4).to(getattr(torch, dtype))
    for seq in (0, 1):
        state.add_sequence(seq)
    assert torch.equal(state.debug_get(0, 0, 0), expected)
    state.begin_forward([0, 1], [1, 1])
    assert torch.equal(state.get(0, 0), expected.expand(2, 2, 3, 4))
    state.set(0, 0, torch.stack([expected + 1, expected]))
    state.end_forward()
    state.begin_forward([0, 1], [1, 1])  # nobody sets, so that slots are copied
    state.end_forward()
    assert torch.equal(state.debug_get(0, 0, 0), expected + 1)
    assert state.popn(0, 2) == 0
    state.begin_forward([1, 0], [1, 1])  # one at the initial values, one behind them
    assert torch.equal(state.get(0, 0), expected.expand(2, 2, 3, 4))
    state.end_forward()
    assert torch.equal(state.debug_get(0, 0, 0), expected), "the initial values were kept by copying"


def test_equal_values_are_equal_specs() -> None:
    assert tensor(EYE) == tensor(EYE.double()) == tensor(EYE.numpy())
    assert hash(tensor(EYE)) == hash(tensor(EYE.clone()))
    assert tensor(EYE) != tensor(EYE * 2)
    assert tensor(torch.full((4,), 0.5)) == tensor(0.5), "the same value everywhere is that number"
    assert tensor(torch.tensor(7), dtype="int64").initial == 7
    hashes = {
        contract([Recurrent(states=(tensor(initial),))], num_states=1).get_layout_hash()
        for initial in (0.0, EYE, EYE * 2, EYE.T.contiguous().T)
    }
    assert len(hashes) == 3, "exporter and importer must agree on the values"


def test_the_values_are_copied() -> None:
    values = EYE.clone()
    spec = tensor(values)
    values.zero_()
    assert spec == tensor(EYE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"initial": torch.ones(4, 3)}, r"initial has shape \(4, 3\), which does not broadcast to \(2, 3, 4\)"),
        ({"initial": torch.ones(1, 2, 3, 4)}, "does not broadcast"),
        ({"initial": torch.empty(0)}, "does not broadcast"),
        ({"initial": torch.tensor(True)}, "initial holds bool"),
        ({"initial": torch.tensor(1j)}, "initial holds complex128"),
        ({"initial": torch.tensor([0, 0, 0, float("nan")])}, "initial holds nan, which is no value of float32"),
        ({"initial": 70000, "dtype": "float16"}, "initial holds 70000, which is no value of float16"),
        ({"initial": 0.5, "dtype": "int64"}, "initial holds 0.5, which is no value of int64"),
        ({"initial": np.array([1, 2, 3, 256]), "dtype": "uint8"}, "initial holds 256, which is no value of uint8"),
        ({"initial": "x"}, "initial must be a number or a Listed; got 'x'"),
        ({"initial": None}, "initial must be"),
        ({"initial": True}, "initial must be"),
        ({"shape": (2, 0)}, "sizes of at least 1"),
        ({"shape": 4}, "shape must be a sequence, each item an integer; got 4"),
        ({"dtype": "float8"}, "dtype 'float8'; one of float64"),
    ],
    ids=str,
)
def test_what_no_state_can_hold_is_refused_when_it_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^StateTensor: .*{message}"):
        StateTensor(**{"shape": (2, 3, 4), "dtype": "float32"} | given)


def test_infinity_is_a_value() -> None:
    assert tensor(torch.tensor([0, 0, 0, -float("inf")])).initial.tolist() == [0, 0, 0, -float("inf")]  # type: ignore[union-attr]


# -- going back exactly, and how many slots that takes ---------------------------------------------


def hybrid(**given: Any) -> ContractState:
    layer = FullAttention(num_heads=1, num_kv_heads=1, head_dim=2, value_dim=2)
    return contract([layer, Recurrent(states=(tensor(0.0),))], capacity=256, page_size=4, **given)


def run(state: ContractState, seqs: list[int], count: int) -> None:
    state.begin_forward(seqs, [count] * len(seqs))
    state.set(1, 0, torch.zeros(count * len(seqs), 2, 3, 4), per_token=True)
    state.end_forward(skipped=[0])


def test_exact_is_exact_or_refused() -> None:
    state = hybrid(num_states=16, ring=0)
    state.add_sequence(0)
    run(state, [0], 5)
    state.checkpoint(0)
    run(state, [0], 5)
    before = state.kept_positions(0), state.num_available_pages(), state.state.sequences.ids
    for call in (lambda: state.popn(0, 3, exact=True), lambda: state.fork_sequence(0, 1, 7, exact=True)):
        with pytest.raises(
            FailedPrecondition, match=r"position 7 .* by running 2 tokens again .* go to 5 .* \[0, 5, 10\]"
        ):
            call()
        assert (state.kept_positions(0), state.num_available_pages(), state.state.sequences.ids) == before
        assert state.sequence_length(0) == 10
    # What is wrong with the arguments comes first.
    with pytest.raises(InvalidArgument, match="exists already"):
        state.fork_sequence(0, 0, 7, exact=True)
    with pytest.raises(InvalidArgument, match=r"0\.\.10"):
        state.popn(0, 11, exact=True)
    assert state.fork_sequence(0, 1, 7) == 2
    assert state.fork_sequence(0, 2, 5, exact=True) == state.fork_sequence(0, 3, exact=True) == 0
    assert [state.sequence_length(seq) for seq in (1, 2, 3)] == [5, 5, 10]
    assert state.popn(0, 5, exact=True) == 0
    assert state.sequence_length(0) == 5
    state.check()


@pytest.mark.parametrize(("interval", "ring", "nodes"), [(0, 0, 0), (0, 3, 0), (8, 0, 0), (8, 2, 3), (4, 1, 0)])
def test_as_many_slots_as_said_and_no_fewer(interval: int, ring: int, nodes: int) -> None:
    """With them nothing kept gives way at any length; with one fewer a forward is refused, or the
    ring is shorter.
    """
    seqs, longest = [0, 1], 32  # of which the last token is only begun

    def story(num_states: int) -> bool:
        state = hybrid(num_states=num_states, ring=ring, checkpoint_interval=interval)
        for seq in seqs:
            state.add_sequence(seq)
        try:
            for count in (9, 1, 7, 4, 1, 1, 7, 1):
                run(state, seqs, count)
                if nodes:
                    state.begin_forward(seqs, [nodes] * len(seqs), list(range(-1, nodes - 1)) * len(seqs))
                    state.set(1, 0, torch.zeros(nodes * len(seqs), 2, 3, 4), per_token=True)
                    state.end_forward(skipped=[0])
                    state.commit_accepted_token_tree_nodes(seqs, [-1] * len(seqs))
        except ResourceExhausted:
            return False
        # A forward that does not come about costs nothing either.
        state.begin_forward(seqs, [1] * len(seqs))
        state.abort_forward()
        state.check()
        table = state.state.parts.recurrent.table
        return all(len(list(table.get(seq).ring)) == ring for seq in seqs) and all(
            table.kept(seq) == list(range(interval, longest, interval)) if interval else not table.kept(seq)
            for seq in seqs
        )

    needed = State.num_states_for(2, max_length=longest, checkpoint_interval=interval, ring=ring, tree_nodes=nodes)
    assert story(needed)
    assert not story(needed - 1)


def test_sizes_that_there_are_not() -> None:
    for given in (
        {"max_length": 0},
        {"ring": -1},
        {"checkpoint_interval": -4},
        {"checkpoints": -1},
        {"tree_nodes": -1},
    ):
        with pytest.raises(InvalidArgument, match="num_states_for: "):
            State.num_states_for(1, **given)
    assert State.num_states_for(3, ring=0, checkpoints=2) == 3 * (2 + 2)


@pytest.mark.parametrize("verb", ["checkpoint", "drop_checkpoint"])
def test_checkpoints_and_uncommitted_nodes(verb: str) -> None:
    """The refusal is the one that the contract names."""
    from quire.contracts.kv_state import KVState

    state = hybrid(num_states=16)
    state.add_sequence(0)
    run(state, [0], 4)
    state.checkpoint(0)
    state.begin_forward([0], [1], [-1])
    state.set(1, 0, torch.zeros(1, 2, 3, 4), per_token=True)
    state.end_forward(skipped=[0])
    with pytest.raises(FailedPrecondition, match=f"{verb}: sequence 0 has 1 uncommitted nodes"):
        state.checkpoint(0) if verb == "checkpoint" else state.drop_checkpoint(0, 4)
    assert state.checkpoints(0) == [4]
    assert "``FailedPrecondition``" in (getattr(KVState, verb).__doc__ or "")
