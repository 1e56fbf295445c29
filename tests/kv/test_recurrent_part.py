"""Recurrent layers of a KV state: slots, one forward, and a random run of all verbs against lists
of states by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError, ResourceExhausted
from quire.contracts.layers import Recurrent, StateTensor
from quire.kv.recurrent import RecurrentPart, RecurrentPass, RecurrentStorage, bytes_per_state
from quire.kv.recurrent_states import NULL
from quire.ops.recurrence import ReferenceRecurrence

CPU = torch.device("cpu")
CONV = StateTensor(shape=(2, 1), dtype="float32", initial=0.0)
MATRIX = StateTensor(shape=(1, 2, 2), dtype="float32", initial=1.0)
HASH = StateTensor(shape=(2,), dtype="int64", initial=7.0)
MIXER, HASHED = 2, 5
"""Layer ids."""
SPECS = {MIXER: Recurrent(states=(CONV, MATRIX)), HASHED: Recurrent(states=(HASH,))}
WEIGHT_CW = torch.tensor([[1.0, -2.0, 3.0]])


def part(num_slots: int = 16, *, specs: dict[int, Recurrent] = SPECS, **more: Any) -> RecurrentPart:
    return RecurrentPart(specs, num_slots=num_slots, backend=ReferenceRecurrence(), **more)


def begin(
    state: RecurrentPart, ids: list[int], counts: list[int], trees: list[list[int] | None] | None = None
) -> RecurrentPass:
    state.open(state.table.plan(ids, counts, [None] * len(ids) if trees is None else trees))
    return state.new_pass()


def end(state: RecurrentPart) -> None:
    state.complete()
    state.publish()


# -- storage ---------------------------------------------------------------------------------------


def test_storage_reads_what_was_written_and_initial_values() -> None:
    storage = RecurrentStorage(dict(enumerate(SPECS.values())), 4, CPU)
    rows = torch.tensor([[1, 2], [3, 4]])
    storage.write(1, 0, torch.tensor([3, 0]), rows)
    found = storage.read(1, 0, np.array([0, NULL, 3, 0]))
    assert found.tolist() == [[3, 4], [7, 7], [1, 2], [3, 4]]
    found.zero_()
    assert storage.read(1, 0, np.array([3])).tolist() == [[1, 2]]
    assert storage.read(0, 1, np.array([NULL])).tolist() == torch.ones(1, 1, 2, 2).tolist()


def test_storage_copies_whole_slots_of_all_layers() -> None:
    """Three layers of one geometry are one tensor; one differs in its initial value."""
    wide = StateTensor(shape=(2,), dtype="int64", initial=-3.0)
    specs = [*SPECS.values(), Recurrent(states=(HASH, wide)), Recurrent(states=(HASH,))]
    storage = RecurrentStorage(dict(enumerate(specs)), 5, CPU)
    every = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)]
    assert len(storage._groups) == 4
    for number, (layer, state) in enumerate(every, start=1):
        shape = storage.read(layer, state, np.array([1, 2])).shape
        storage.write(
            layer, state, torch.tensor([1, 2]), torch.full(shape, number).to(storage.rows_S[layer, state].dtype)
        )
    storage.copy(np.array([2, NULL, 1]), np.array([0, 1, 4]))
    for number, (layer, state) in enumerate(every, start=1):
        initial = storage.read(layer, state, np.array([NULL]))
        found = storage.read(layer, state, np.array([0, 1, 2, 4]))
        assert (found[[0, 2, 3]] == number).all()
        assert torch.equal(found[1:2], initial)
    storage.copy(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def test_bytes() -> None:
    assert bytes_per_state(SPECS.values()) == 2 * 4 + 4 * 4 + 2 * 8
    assert part(7).storage.num_bytes == 7 * bytes_per_state(SPECS.values())
    assert bytes_per_state([Recurrent(states=(StateTensor(shape=(3, 5), dtype="bfloat16"),))]) == 30


def test_arguments_of_a_part() -> None:
    for message, make in (
        ("layer 2 has no states", lambda: part(specs={MIXER: Recurrent(states=())})),
        (
            "sizes of at least 1 are needed",
            lambda: part(specs={0: Recurrent(states=(StateTensor(shape=(0,), dtype="float32"),))}),
        ),
        (
            "dtype 'complex64'; one of",
            lambda: part(specs={0: Recurrent(states=(StateTensor(shape=(1,), dtype="complex64"),))}),
        ),
    ):
        with pytest.raises(InvalidArgument, match=message):
            make()


# -- get and set -----------------------------------------------------------------------------------


def test_example_of_get_and_set() -> None:
    """Two states of different shape and dtype, three sequences of which two take part."""
    spec = Recurrent(
        states=(
            StateTensor(shape=(16, 16), dtype="float16", initial=0.0),
            StateTensor(shape=(32, 32), dtype="float32", initial=1.0),
        )
    )
    state = part(8, specs={0: spec})
    for seq_id in range(3):
        state.table.add(seq_id)
    opened = begin(state, [0, 2], [1, 1])

    def fill(first: float, second: float, batch: int) -> list[Tensor]:
        return [torch.full((batch, 16, 16), first, dtype=torch.float16), torch.full((batch, 32, 32), float(second))]

    def now() -> list[Tensor]:
        return [opened.get(0, 0), opened.get(0, 1)]

    before = fill(0, 1, 2)
    assert all(map(torch.equal, now(), before))
    for index, data in enumerate(fill(2, 3, 2)):
        opened.set(0, index, data)
    assert all(map(torch.equal, now(), before))
    end(state)

    def debug(seq_id: int) -> list[Tensor]:
        return [state.debug_get(0, index, seq_id)[None] for index in (0, 1)]

    for seq_id, values in enumerate([(2, 3), (0, 1), (2, 3)]):
        assert all(map(torch.equal, debug(seq_id), fill(*values, 1)))
    state.table.fork(0, 3, 1)
    state.table.pop(3, state.table.nearest(3, 0))
    assert all(map(torch.equal, debug(3), fill(0, 1, 1)))
    assert all(map(torch.equal, debug(0), fill(2, 3, 1)))
    state.table.check()


def test_set_takes_the_last_call_and_unset_keeps_its_state() -> None:
    state = part()
    state.table.add(1)
    opened = begin(state, [1], [2])
    opened.set(HASHED, 0, torch.tensor([[1, 2], [3, 4]]), per_token=True)
    opened.set(HASHED, 0, torch.tensor([[5, 6]]))
    end(state)
    begin(state, [1], [1])
    end(state)
    assert state.debug_get(HASHED, 0, 1).tolist() == [5, 6]
    assert state.debug_get(MIXER, 1, 1).tolist() == [[[1, 1], [1, 1]]]
    assert state.debug_get(HASHED, 0, 1, position=2).tolist() == [5, 6]


def test_get_for_each_token_of_a_tree() -> None:
    state = part()
    for seq_id in (1, 2):
        state.table.add(seq_id)
    opened = begin(state, [1], [2], [[-1, 0]])
    opened.set(HASHED, 0, torch.tensor([[10, 1], [11, 1]]), per_token=True)
    end(state)
    opened = begin(state, [2, 1], [2, 4], [None, [1, 2, -1, 1]])
    assert opened.get(HASHED, 0).tolist() == [[7, 7], [7, 7]]
    assert opened.get(HASHED, 0, per_token=True).tolist() == [[7, 7], [0, 0], [11, 1], [0, 0], [7, 7], [11, 1]]
    assert state.debug_get(HASHED, 0, 1).tolist() == [7, 7]
    with pytest.raises(InvalidArgument, match="has a token tree"):
        opened.set(HASHED, 0, torch.zeros(2, 2, dtype=torch.int64))
    # Nothing is set: each node has the state of the last node before this forward.
    end(state)
    state.table.commit(1, [0, 1, 2, 3])
    assert state.debug_get(HASHED, 0, 1).tolist() == [11, 1]
    assert state.debug_get(HASHED, 0, 1, position=1).tolist() == [10, 1]
    state.table.check()


def test_states_of_every_token_fill_the_ring() -> None:
    state = part(ring=3, interval=2)
    for seq_id in (1, 2):
        state.table.add(seq_id)
    opened = begin(state, [1, 2], [5, 1])
    rows = torch.arange(12).view(6, 2)
    opened.set(HASHED, 0, rows, per_token=True)
    state.complete()
    end(state)
    state.table.check()
    assert list(state.table.get(1).ring) == [2, 3, 4]
    assert state.table.kept(1) == [2, 4]
    assert [state.debug_get(HASHED, 0, 1, position=held).tolist() for held in (2, 3, 4, 5)] == rows[1:5].tolist()
    # 2 and 4 are in the ring and checkpoints; 3, 5 and the other sequence's state besides.
    assert state.table.pool.num_used == 5
    assert state.debug_get(MIXER, 1, 1, position=3).tolist() == [[[1, 1], [1, 1]]]


def test_states_inside_a_chunk_are_kept_only_if_they_are_known() -> None:
    state = part(interval=2)
    state.table.add(1)
    opened = begin(state, [1], [4])
    opened.set(HASHED, 0, torch.tensor([[1, 1]]))
    run_mixer(opened, torch.ones(4))
    end(state)
    assert state.table.kept(1) == [4]
    assert state.debug_get(HASHED, 0, 1).tolist() == [1, 1]
    opened = begin(state, [1], [4])
    run_mixer(opened, torch.ones(4))
    end(state)
    state.table.check()
    assert state.table.kept(1) == [4, 6, 8]


def test_a_completed_forward_may_go_on() -> None:
    """What was set after ``complete`` counts, and the slots that it took for the ring go back if
    they are not known any more.
    """
    state = part(ring=2)
    state.table.add(1)
    opened = begin(state, [1], [3])
    opened.set(HASHED, 0, torch.ones(3, 2, dtype=torch.int64), per_token=True)
    state.complete()
    opened.set(HASHED, 0, torch.tensor([[8, 9]]))
    end(state)
    state.table.check()
    assert (list(state.table.get(1).ring), state.table.pool.num_used) == ([], 1)
    assert state.debug_get(HASHED, 0, 1).tolist() == [8, 9]


def test_refused_arguments_of_a_forward() -> None:
    state = part()
    state.table.add(1)
    opened = begin(state, [1], [2])
    q_THK, x_TC = torch.ones(2, 1, 2), torch.ones(2, 1)
    whole = torch.zeros(1, 2, dtype=torch.int64)
    for message, call in (
        (r"layer 3; the recurrent layers are \[2, 5\]", lambda: opened.get(3, 0)),
        (r"torch.int64 \(1, 2\) on cpu is needed", lambda: opened.set(HASHED, 0, whole.float())),
        (r"torch.int64 \(1, 2\) on cpu is needed", lambda: opened.set(HASHED, 0, whole[0])),
        (r"torch.int64 \(2, 2\) on cpu is needed", lambda: opened.set(HASHED, 0, whole, per_token=True)),
        (r"need float32 \(1, 2, 3\)", lambda: opened.linear_attention(MIXER, 1, q_THK, q_THK, torch.ones(2, 1, 3))),
        ("need float32", lambda: opened.linear_attention(HASHED, 0, q_THK, q_THK, q_THK)),
        (
            "3, 2, 2 rows; 2 tokens are new",
            lambda: opened.linear_attention(MIXER, 1, torch.ones(3, 1, 2), q_THK, q_THK),
        ),
        (r"need \(3, 1\)", lambda: opened.convolve(MIXER, 0, x_TC, torch.ones(1, 4))),
        ("3 rows; 2 tokens are new", lambda: opened.convolve(MIXER, 0, torch.ones(3, 1), WEIGHT_CW)),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call()
    end(state)
    assert state.debug_get(HASHED, 0, 1).tolist() == [7, 7]


# -- recurrences -----------------------------------------------------------------------------------


def test_example_of_linear_attention() -> None:
    spec = Recurrent(states=(StateTensor(shape=(1, 1, 1), dtype="float32"),))
    state = part(specs={0: spec})

    def column(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)

    state.table.add(1)
    opened = begin(state, [1], [3])
    log_decay = torch.tensor([[1.0], [1.0], [0.5]]).log()
    out = opened.linear_attention(0, 0, column(1, 1, 0.5), column(1, 2, 1), column(2, 1, 3), log_decay=log_decay)
    assert out.flatten().tolist() == [2, 4, 2.5]
    end(state)
    assert state.debug_get(0, 0, 1).item() == 5
    state.table.add(2)
    opened = begin(state, [2], [1])
    opened.linear_attention(0, 0, column(1), column(1), column(2), beta_TH=torch.ones(1, 1))
    end(state)
    opened = begin(state, [2], [1])
    assert opened.linear_attention(0, 0, column(1), column(1), column(5), beta_TH=torch.ones(1, 1)).item() == 5
    end(state)


def test_chain_verification_by_pop_and_by_commit() -> None:
    """Eight drafts of which 0..8 are accepted: both ways end in the state of a fresh run."""
    tokens = torch.arange(1, 12).float()
    for accepted in range(9):
        state = part(64, ring=8)
        for seq_id in (1, 2, 3):
            state.table.add(seq_id)
        run(state, 1, tokens[:3])
        run(state, 2, tokens[:3])
        opened = begin(state, [1], [8], [list(range(-1, 7))])
        run_all(opened, tokens[3:], "token")
        end(state)
        state.table.commit(1, list(range(accepted)))
        run(state, 2, tokens[3:], mode="token")
        state.table.pop(2, state.table.nearest(2, 3 + accepted))
        run(state, 3, tokens[: 3 + accepted])
        state.table.check()
        fresh = values_of(state, 3)
        assert state.table.get(1).length == state.table.get(2).length == state.table.get(3).length == 3 + accepted
        assert values_of(state, 1) == fresh
        assert values_of(state, 2) == fresh
        assert list(state.table.get(1).ring) == list(state.table.get(2).ring)


def test_forks_share_and_never_see_each_other() -> None:
    state = part(32, ring=2)
    state.table.add(1)
    run(state, 1, torch.tensor([1.0, 2.0]))
    run(state, 1, torch.tensor([3.0]))
    used = state.table.pool.num_used
    state.table.fork(1, 2, 3)
    assert state.table.pool.num_used == used
    before = {held: values_of(state, 2, held) for held in (2, 3)}
    for token in (4.0, 5.0, 6.0):
        run(state, 1, torch.tensor([token]))
    assert {held: values_of(state, 2, held) for held in (2, 3)} == before
    run(state, 2, torch.tensor([9.0]))
    state.table.add(3)
    run(state, 3, torch.tensor([1.0, 2.0, 3.0, 9.0]))
    assert values_of(state, 2) == values_of(state, 3)


# -- looking in ------------------------------------------------------------------------------------


def test_debug_set_changes_this_sequence_only() -> None:
    state = part()
    state.table.add(1)
    run(state, 1, torch.tensor([1.0, 2.0]))
    state.table.keep(1)
    state.table.fork(1, 2, 2)
    before = values_of(state, 2)
    state.debug_set(HASHED, 0, 1, torch.tensor([5, 5]))
    assert state.debug_get(HASHED, 0, 1).tolist() == [5, 5]
    assert torch.equal(state.debug_get(MIXER, 1, 1), state.debug_get(MIXER, 1, 2))
    assert values_of(state, 2) == values_of(state, 1, 2) == before
    slot = state.table.slot_at(1)
    state.debug_set(HASHED, 0, 1, torch.tensor([6, 6]))
    assert state.table.slot_at(1) == slot
    state.table.check()
    state.table.add(3)
    state.debug_set(HASHED, 0, 3, torch.tensor([1, 1]))
    assert state.debug_get(MIXER, 1, 3).tolist() == [[[1, 1], [1, 1]]]


def test_debug_set_without_room() -> None:
    state = part(1)
    state.table.add(1)
    run(state, 1, torch.tensor([1.0]))
    state.table.fork(1, 2, 1)
    before = values_of(state, 1)
    with pytest.raises(ResourceExhausted):
        state.debug_set(HASHED, 0, 1, torch.tensor([5, 5]))
    assert values_of(state, 1) == before
    state.table.check()


def test_export_and_import() -> None:
    state, other = part(ring=1, interval=2), part(4)
    state.table.add(1)
    run(state, 1, torch.arange(1.0, 6.0), "token")
    state.table.keep(1)
    state.debug_set(HASHED, 0, 1, torch.tensor([5, 5]))
    assert state.table.kept(1) == [2, 4, 5]
    groups = {layer: state.export(1, layer) for layer in (HASHED, MIXER)}
    assert set(groups[HASHED]) == {"state.0", "state.0@2", "state.0@4", "state.0@5"}
    assert groups[HASHED]["state.0"].tolist() == [5, 5]
    with pytest.raises(ResourceExhausted, match="prepare_import: 5 state slots are needed and 4 of 4 are free"):
        other.table.import_states(9, 5, [1, 2, 4, 5])
    other.table.import_states(9, 5, [2, 4, 5])
    for layer, tensors in groups.items():
        other.import_group(9, layer, tensors)
    other.table.finish_import(9)
    other.table.check()
    assert other.table.kept(9) == [2, 4, 5]
    for position in (None, 2, 4, 5):
        assert values_of(other, 9, position) == values_of(state, 1, position)


# -- random runs -----------------------------------------------------------------------------------

Mode = Literal["run", "token", "end", "unset"]
PRIME = 1_000_003


class Values(NamedTuple):
    """One state of the three tensors, as plain numbers.

    Small integers, so that float32 holds them exactly.
    """

    conv: tuple[float, float] = (0.0, 0.0)
    matrix: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    hashed: tuple[int, int] = (7, 7)

    def after(self, token: int, modes: dict[str, Mode]) -> Values:
        """The state one token later."""
        conv, matrix, hashed = self
        if modes["conv"] != "unset":
            conv = (conv[1], float(token))
        if modes["matrix"] != "unset":
            key, value = key_value(token)
            matrix = (
                matrix[0] + key[0] * value[0],
                matrix[1] + key[0] * value[1],
                matrix[2] + key[1] * value[0],
                matrix[3] + key[1] * value[1],
            )
        if modes["hashed"] != "unset":
            hashed = ((hashed[0] * 31 + token) % PRIME, hashed[1] + 1)
        return Values(conv, matrix, hashed)


def key_value(token: int) -> tuple[tuple[float, float], tuple[float, float]]:
    return (float(token % 3), float(token % 2)), (float(token % 5 - 2), 1.0)


def values_of(state: RecurrentPart, seq_id: int, position: int | None = None) -> Values:
    found = [
        state.debug_get(layer, index, seq_id, position).flatten().tolist()
        for layer, index in ((MIXER, 0), (MIXER, 1), (HASHED, 0))
    ]
    return Values(*map(tuple, found))  # type: ignore[arg-type]


def run_mixer(opened: RecurrentPass, tokens_T: Tensor) -> None:
    """Convolution and recurrence of the mixer."""
    x_TC = tokens_T.view(-1, 1)
    parts = [key_value(int(token)) for token in tokens_T.tolist()]
    k_THK, v_THV = (torch.tensor([one[side] for one in parts]).view(-1, 1, 2) for side in (0, 1))
    opened.convolve(MIXER, 0, x_TC, WEIGHT_CW)
    opened.linear_attention(MIXER, 1, k_THK, k_THK, v_THV)


def run_all(opened: RecurrentPass, tokens_T: Tensor, mode: Mode) -> None:
    """All layers over one entry, a chain of tokens or of nodes; ``token``: by the states after
    every token.
    """
    before = (opened.get(layer, index)[0].flatten().tolist() for layer, index in ((MIXER, 0), (MIXER, 1), (HASHED, 0)))
    values = Values(*map(tuple, before))  # type: ignore[arg-type]
    rows: list[Values] = []
    for token in tokens_T.tolist():
        values = values.after(int(token), {"conv": "run", "matrix": "run", "hashed": "run"})
        rows.append(values)
    if mode == "run":
        run_mixer(opened, tokens_T)
        opened.set(HASHED, 0, torch.tensor([rows[-1].hashed]))
        return
    opened.set(MIXER, 0, torch.tensor([row.conv for row in rows]).view(-1, 2, 1), per_token=True)
    opened.set(MIXER, 1, torch.tensor([row.matrix for row in rows]).view(-1, 1, 2, 2), per_token=True)
    opened.set(HASHED, 0, torch.tensor([row.hashed for row in rows]), per_token=True)


def run(state: RecurrentPart, seq_id: int, tokens_T: Tensor, mode: Mode = "run") -> None:
    run_all(begin(state, [seq_id], [len(tokens_T)]), tokens_T, mode)
    end(state)


@dataclass(eq=False)
class Held:
    """One state that is held: a slot, as the oracle counts them.

    ``ringed``: when it entered a ring; 0: it is in none.
    """

    values: Values
    ringed: int = 0


@dataclass
class Kept:
    """A sequence of the oracle. Position 0 has no ``Held``."""

    length: int = 0
    present: Held | None = None
    kept: dict[int, Held] = field(default_factory=dict)
    ring: dict[int, Held] = field(default_factory=dict)
    nodes: list[Held] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def others(self) -> Iterable[Held]:
        """What only this sequence's giving up can free: all but the ring."""
        yield from self.kept.values()
        yield from self.nodes
        if self.present is not None:
            yield self.present

    def now(self) -> Values:
        return Values() if self.present is None else self.present.values

    def stood(self, position: int) -> Held | None:
        if position == self.length:
            return self.present
        return self.ring.get(position) or self.kept.get(position)

    def positions(self) -> list[int]:
        return sorted({0, self.length, *self.kept, *self.ring})


@dataclass
class Entry:
    """One entry of an open forward of the oracle."""

    sequence: Kept
    tokens: list[int]
    tree: list[int] | None
    after: list[Held]
    """By row."""


class Machine(RuleBasedStateMachine):
    """Sequence verbs, forwards of chains and trees, aborts and exhaustion, against ``Kept``."""

    done: dict[str, int] = {}  # noqa: RUF012 - counts over all runs

    @initialize(
        data=st.data(),
        slots=st.sampled_from([14, 9, 24, 14, 9, 5, 3, 2]),
        ring=st.sampled_from([2, 3, 4, 1, 0]),
        interval=st.sampled_from([0, 2, 3, 5, 0]),
    )
    def start(self, data: st.DataObject, slots: int, ring: int, interval: int) -> None:
        self.state = part(slots, ring=ring, interval=interval)
        self.slots, self.ring, self.interval = slots, ring, interval
        self.sequences: dict[int, Kept] = {}
        self.next_id, self.clock = 0, 1
        self.add()
        self.add()
        for _ in range(3):
            self.run_forward(data)

    def did(self, name: str) -> None:
        Machine.done[name] = Machine.done.get(name, 0) + 1

    # -- the oracle's slots ------------------------------------------------------------------------

    def used(self) -> set[Held]:
        return {held for one in self.sequences.values() for held in (*one.others(), *one.ring.values())}

    def yielding(self) -> list[Held]:
        """States that only rings name, oldest first."""
        firm = {held for one in self.sequences.values() for held in one.others()}
        return sorted(self.used() - firm, key=lambda held: held.ringed)

    def take(self, count: int) -> bool:
        """Make room by giving up states of rings; False if there is none."""
        free = self.slots - len(self.used())
        yielding = self.yielding()
        if count > free + len(yielding):
            return False
        for held in yielding[: max(0, count - free)]:
            for one in self.sequences.values():
                one.ring = {position: other for position, other in one.ring.items() if other is not held}
        return True

    def advance(self, sequence: Kept, passed: list[tuple[int, Held]]) -> None:
        """Single states, one after the other, become the present one; the ring takes what was."""
        for position, held in passed:
            if sequence.length and sequence.present is not None:
                if not any(sequence.present in one.ring.values() for one in self.sequences.values()):
                    sequence.present.ringed, self.clock = self.clock, self.clock + 1
                sequence.ring[sequence.length] = sequence.present
            sequence.length, sequence.present = position, held
        while len(sequence.ring) > self.ring:
            del sequence.ring[min(sequence.ring)]

    # -- sequences ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < 5)
    @rule()
    def add(self) -> None:
        self.state.table.add(self.next_id)
        self.sequences[self.next_id] = Kept()
        self.next_id += 1
        self.did("add")

    def settled(self) -> list[int]:
        return [seq_id for seq_id, one in self.sequences.items() if not one.nodes]

    def chosen(self, data: st.DataObject) -> tuple[int, Kept]:
        """A sequence without uncommitted nodes."""
        seq_id = data.draw(st.sampled_from(self.settled()), "sequence")
        return seq_id, self.sequences[seq_id]

    @precondition(lambda self: len(self.sequences) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)), "sequence")
        self.state.table.remove(seq_id)
        del self.sequences[seq_id]
        self.did("remove")

    @precondition(lambda self: self.settled() and len(self.sequences) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq_id, parent = self.chosen(data)
        target = data.draw(st.integers(0, parent.length), "position")
        position = self.state.table.nearest(seq_id, target)
        assert position == max(held for held in parent.positions() if held <= target)
        self.state.table.fork(seq_id, self.next_id, position)
        self.sequences[self.next_id] = Kept(
            position,
            parent.stood(position),
            {held: one for held, one in parent.kept.items() if held <= position},
            {held: one for held, one in parent.ring.items() if held < position},
        )
        self.next_id += 1
        self.did("fork")

    @precondition(lambda self: self.settled())
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        seq_id, one = self.chosen(data)
        position = self.state.table.nearest(seq_id, data.draw(st.integers(0, one.length), "position"))
        self.state.table.pop(seq_id, position)
        one.present, one.length = one.stood(position), position
        one.kept = {held: other for held, other in one.kept.items() if held <= position}
        one.ring = {held: other for held, other in one.ring.items() if held < position}
        self.did("pop")

    @precondition(lambda self: self.settled())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        seq_id, one = self.chosen(data)
        self.state.table.keep(seq_id)
        if one.length and one.present is not None:
            one.kept[one.length] = one.present
        self.did("keep")

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ids = [seq_id for seq_id, one in self.sequences.items() if one.kept] or list(self.sequences)
        seq_id = data.draw(st.sampled_from(ids), "sequence")
        one = self.sequences[seq_id]
        position = data.draw(st.integers(0, one.length), "position")
        if one.kept and data.draw(st.booleans()):
            position = data.draw(st.sampled_from(sorted(one.kept)), "checkpoint")
        if position in one.kept:
            self.state.table.drop(seq_id, position)
            del one.kept[position]
            self.did("drop")

    @precondition(lambda self: self.settled())
    @rule(data=st.data(), number=st.integers(0, 1000))
    def debug_set(self, data: st.DataObject, number: int) -> None:
        seq_id, one = self.chosen(data)
        changed = Held(one.now()._replace(hashed=(number, number)))
        names = [held for other in self.sequences.values() for held in (*other.others(), *other.ring.values())]
        alone = one.present is not None and names.count(one.present) == 1
        if not alone and not self.take(1):
            self.refused(
                ResourceExhausted, lambda: self.state.debug_set(HASHED, 0, seq_id, torch.tensor([number, number]))
            )
            return
        self.state.debug_set(HASHED, 0, seq_id, torch.tensor([number, number]))
        one.present = changed
        self.did("debug_set")

    # -- forwards ----------------------------------------------------------------------------------

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        self.run_forward(data)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def forward_again(self, data: st.DataObject) -> None:
        """Forwards come more often than other verbs."""
        self.run_forward(data)

    def run_forward(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), min_size=1, max_size=3, unique=True), "batch")
        modes: dict[str, Mode] = {
            "conv": data.draw(st.sampled_from(["run", "run", "token", "unset"]), "conv"),
            "matrix": data.draw(st.sampled_from(["run", "run", "token", "unset"]), "matrix"),
            "hashed": data.draw(st.sampled_from(["token", "end", "end", "unset"]), "hashed"),
        }
        if data.draw(st.integers(0, 2), "all by token") == 2:
            modes = dict.fromkeys(modes, "token")
        entries: list[Entry] = []
        for seq_id in ids:
            one = self.sequences[seq_id]
            tree = bool(one.nodes) or data.draw(st.integers(0, 3), "tree") == 3
            tokens = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4 if tree else 6), "tokens")
            old = len(one.nodes)
            parents = (
                [data.draw(st.integers(-1, old + row - 1), "parent") for row in range(len(tokens))] if tree else None
            )
            after: list[Held] = []
            for row, token in enumerate(tokens):
                if parents is None:
                    before = one.now() if row == 0 else after[-1].values
                else:
                    parent = parents[row]
                    before = one.now() if parent < 0 else [*one.nodes, *after][parent].values
                after.append(Held(before.after(token, modes)))
            entries.append(Entry(one, tokens, parents, after))
        if modes["hashed"] == "end" and any(entry.tree is not None for entry in entries):
            modes["hashed"] = "token"
        need = self.state.table.plan(ids, [len(entry.tokens) for entry in entries], [entry.tree for entry in entries])
        wanted = sum(
            len(entry.tokens) if entry.tree is not None else len(self.multiples(entry)) + 1 for entry in entries
        )
        room = self.slots - len(self.used()) + len(self.yielding())
        assert self.state.table.shortage(need) == max(0, wanted - room)
        if not self.take(wanted):
            self.refused(ResourceExhausted, lambda: self.state.open(need))
            return
        self.state.open(need)
        opened = self.state.new_pass()
        self.state.table.check()
        assert self.state.table.shortage(need) == max(0, wanted - room)
        self.check_values()
        self.fill(opened, entries, modes, data.draw(st.randoms(use_true_random=False), "order"))
        self.check_values()
        if data.draw(st.integers(0, 4), "abort") == 4:
            if data.draw(st.booleans(), "late"):
                self.state.complete()
                self.state.table.check()
            self.state.abort()
            self.did("abort")
            return
        end(self.state)
        self.publish(entries, modes, wanted)
        self.did("tree" if any(entry.tree is not None for entry in entries) else "chains")

    def multiples(self, entry: Entry) -> list[int]:
        """Rows before the end of a chain after which it stands at a multiple of the interval."""
        rows = range(len(entry.tokens) - 1)
        return [row for row in rows if self.interval and (entry.sequence.length + row + 1) % self.interval == 0]

    def fill(self, opened: RecurrentPass, entries: list[Entry], modes: dict[str, Mode], order: Any) -> None:
        tokens_T = torch.tensor([float(token) for entry in entries for token in entry.tokens])
        rows = [held.values for entry in entries for held in entry.after]
        ends = [entry.after[-1].values for entry in entries]
        before = [entry.sequence.now() for entry in entries]
        assert opened.get(HASHED, 0).tolist() == [list(one.hashed) for one in before]
        found = opened.get(HASHED, 0, per_token=True).tolist()
        start = 0
        for entry in entries:
            old = entry.sequence.nodes
            for row in range(len(entry.tokens)):
                parent = row - 1 if entry.tree is None else entry.tree[row] - len(old)
                expected = (0, 0)
                if parent < 0:
                    node = -1 if entry.tree is None else entry.tree[row]
                    expected = (entry.sequence.now() if node < 0 else old[node].values).hashed
                assert found[start + row] == list(expected)
            start += len(entry.tokens)

        def conv() -> None:
            if modes["conv"] == "run":
                opened.convolve(MIXER, 0, tokens_T.view(-1, 1), WEIGHT_CW)
            elif modes["conv"] == "token":
                opened.set(MIXER, 0, torch.tensor([row.conv for row in rows]).view(-1, 2, 1), per_token=True)

        def matrix() -> None:
            if modes["matrix"] == "run":
                parts = [key_value(int(token)) for token in tokens_T.tolist()]
                k_THK, v_THV = (torch.tensor([one[side] for one in parts]).view(-1, 1, 2) for side in (0, 1))
                out = opened.linear_attention(MIXER, 1, k_THK, k_THK, v_THV)
                for row, values, (key, _) in zip(out.view(-1, 2).tolist(), rows, parts, strict=True):
                    m = values.matrix
                    assert row == [key[0] * m[0] + key[1] * m[2], key[0] * m[1] + key[1] * m[3]]
            elif modes["matrix"] == "token":
                opened.set(MIXER, 1, torch.tensor([row.matrix for row in rows]).view(-1, 1, 2, 2), per_token=True)

        def hashed() -> None:
            if modes["hashed"] == "token":
                opened.set(HASHED, 0, torch.tensor([row.hashed for row in rows]), per_token=True)
            elif modes["hashed"] == "end":
                opened.set(HASHED, 0, torch.tensor([row.hashed for row in ends]))

        calls: list[Callable[[], None]] = [conv, matrix, hashed]
        order.shuffle(calls)
        for call in calls:
            call()

    def publish(self, entries: list[Entry], modes: dict[str, Mode], wanted: int) -> None:
        given = {mode for mode in modes.values() if mode != "unset"}
        extra: set[tuple[int, int]] = set()
        if given == {"token"}:
            free = self.slots - len(self.used()) - wanted
            for back in range(1, self.ring + 1):
                for index, entry in enumerate(entries):
                    row = len(entry.tokens) - 1 - back
                    if entry.tree is None and row >= 0 and (row in self.multiples(entry) or free > 0):
                        free -= row not in self.multiples(entry)
                        extra.add((index, row))
        for index, entry in enumerate(entries):
            one = entry.sequence
            if entry.tree is not None:
                one.nodes += entry.after
                one.parents += entry.tree
                continue
            end = len(entry.tokens) - 1
            for row in range(end + 1):
                position = one.length + row + 1
                multiple = self.interval and position % self.interval == 0
                if multiple and (row == end or "end" not in given):
                    one.kept[position] = entry.after[row]
            begin = one.length
            passed = [row for row in range(end) if (index, row) in extra]
            self.advance(one, [(begin + row + 1, entry.after[row]) for row in (*passed, end)])

    @precondition(lambda self: any(one.nodes for one in self.sequences.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        pending = [seq_id for seq_id, one in self.sequences.items() if one.nodes]
        seq_id = data.draw(st.sampled_from(pending), "sequence")
        one = self.sequences[seq_id]
        leaf = data.draw(st.integers(-1, len(one.nodes) - 1), "leaf")
        path: list[int] = []
        while leaf >= 0:
            path.insert(0, leaf)
            leaf = one.parents[leaf]
        self.state.table.commit(seq_id, path)
        passed = [(one.length + place, one.nodes[node]) for place, node in enumerate(path, start=1)]
        one.nodes, one.parents = [], []
        for position, held in passed:
            if self.interval and position % self.interval == 0:
                one.kept[position] = held
        self.advance(one, passed)
        self.did("commit")

    # -- after every step --------------------------------------------------------------------------

    def refused(self, error: type[QuireError], call: Callable[[], object]) -> None:
        table = self.state.table
        before = (
            table.pool.references.tolist(),
            list(table._ringed),
            [table.slots(seq_id) for seq_id in self.sequences],
        )
        with pytest.raises(error):
            call()
        assert (table.pool.references.tolist(), list(table._ringed), [table.slots(s) for s in self.sequences]) == before
        self.did(error.__name__)

    def check_values(self) -> None:
        """What can be read while a forward is open, too: all is as before it."""
        for seq_id, one in self.sequences.items():
            assert self.state.table.get(seq_id).length == one.length
            assert self.state.table.kept(seq_id) == sorted(one.kept)
            assert list(self.state.table.get(seq_id).ring) == sorted(one.ring)
            assert len(self.state.table.get(seq_id).nodes) == len(one.nodes)
            assert values_of(self.state, seq_id) == one.now()
            for position in one.positions():
                held = one.kept.get(position) or one.ring.get(position) or one.stood(position)
                expected = Values() if position == 0 and position != one.length else held.values if held else Values()
                assert values_of(self.state, seq_id, position) == expected

    def teardown(self) -> None:
        if hasattr(self, "state"):
            for seq_id in list(self.sequences):
                self.state.table.remove(seq_id)
            self.state.table.check()
            assert self.state.table.pool.num_used == 0

    def check_invariants(self, settings: Any, output: Any, runtimes: Any) -> None:
        super().check_invariants(settings, output, runtimes)
        if hasattr(self, "state"):
            self.state.table.check()
            self.check_values()
            table = self.state.table
            assert table.pool.num_used == len(self.used())
            assert table.num_available == self.slots - len(self.used()) + len(self.yielding())


def run_machine(examples: int, steps: int, *, derandomize: bool) -> None:
    Machine.done = {}
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert set(Machine.done) >= {
        *("add", "remove", "fork", "pop", "keep", "drop", "debug_set", "chains", "tree", "commit", "abort"),
        "ResourceExhausted",
    }


def test_random_runs() -> None:
    run_machine(15, 40, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_runs() -> None:
    run_machine(500, 80, derandomize=False)
