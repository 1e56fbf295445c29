"""The hidden states of a request for a head are those of the right tokens, whatever was drafted,
rejected, missed and given again.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.speculation.feature_reader import Rows
from quire.speculation.heads import Reader
from quire.speculation.proposer import Context


def state_of(ids: list[int]) -> float:
    """What stands for the hidden state of the last of these tokens."""
    return float(hash(tuple(ids)) % 999_983)


def states_of(ids: list[int], start: int) -> Tensor:
    return torch.tensor([[state_of(ids[: stop + 1])] for stop in range(start, len(ids))])


def rows_of(ids: list[int], start: int, tokens: list[int], salt: str = "") -> Rows:
    return Rows(Context("one", np.array(ids, dtype=np.int64), len(ids), salt), start, tokens, ())


class Request:
    """A request, its reader, and the rows in the head's sequence."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.reader = Reader("one", 0, "", torch.empty(0, 1))
        self.ids = self.tokens(3)
        self.computed = 0
        self.rows: list[tuple[float, int]] = []

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(4) for _ in range(count)]

    def add(self, start: int, tokens: list[int]) -> None:
        self.reader.add(rows_of(self.ids, start, tokens), states_of(self.ids[:start] + tokens, start))
        self.check()

    def check(self) -> None:
        reader = self.reader
        self.rows = self.rows[: reader.num_run]
        ids = reader.tokens.ids.tolist()
        assert reader.first <= reader.next
        assert reader.known <= len(ids)
        for index, state in enumerate(reader.states_NE[:, 0].tolist()):
            assert state == state_of(ids[: reader.first + index + 1])
        for index, row in enumerate(self.rows):
            position = reader.begin + index
            assert row == (state_of(ids[: position + 1]), ids[position + 1])

    def run(self, count: int) -> None:
        """Run the next rows of the head."""
        reader = self.reader
        for position in range(reader.next, reader.next + count):
            state = float(reader.states_NE[position - reader.first, 0])
            self.rows.append((state, int(reader.tokens.ids[position + 1])))
        reader.ran(count)
        self.check()

    def step(self) -> None:
        """A step of the target, with drafts or without, which is read or not."""
        count = self.rng.randint(1, len(self.ids) - self.computed)
        chunk, drafts = self.ids[self.computed : self.computed + count], list[int]()
        if self.computed + count == len(self.ids):
            drafts = self.tokens(self.rng.choice([0, 0, 2, 4]))
        if self.rng.random() < 0.9:
            self.add(self.computed, chunk + drafts)
        self.computed += count
        if self.computed == len(self.ids):
            accepted = self.rng.randint(0, len(drafts))
            self.ids += drafts[:accepted] + self.tokens(1)
            self.computed += accepted

    def other_turn(self) -> None:
        """A rewind, or tokens that are run again."""
        self.computed = self.rng.randrange(self.computed + 1)
        if self.rng.random() < 0.5:
            self.ids = self.ids[: max(1, self.computed)] + self.tokens(2)
            self.computed = min(self.computed, len(self.ids) - 1)

    def draft(self) -> None:
        """Prepare the reader as for a draft: its rows run, the last one also if it has run."""
        reader, ids = self.reader, np.array(self.ids, dtype=np.int64)
        if not reader.follow(ids):
            return
        self.check()
        assert reader.known >= len(ids) - 1
        self.run(len(ids) - 1 - reader.next)
        assert reader.next == len(ids) - 1


@pytest.mark.parametrize("seed", range(60))
def test_states_and_rows_are_those_of_the_tokens(seed: int) -> None:
    request, drafted = Request(seed), 0
    for _ in range(60):
        act = request.rng.random()
        if act < 0.6:
            request.step()
        elif act < 0.7:
            request.other_turn()
        elif act < 0.8:
            reader = request.reader
            if (ready := min(reader.known, len(reader.tokens)) - 1 - reader.next) > 0:
                request.run(request.rng.randint(1, ready))
        else:
            before = request.reader.num_run
            request.draft()
            drafted += request.reader.num_run > before
    assert drafted > 0


def test_a_reader_goes_on_from_another_of_its_salt() -> None:
    ids = [1, 2, 3, 1, 2, 0]
    other = Reader("other", 0, "a", torch.empty(0, 1))
    other.add(rows_of(ids, 0, ids[:5], "a"), states_of(ids[:5], 0))
    other.ran(3)
    behind = rows_of(ids, 4, ids[4:], "a")
    assert other.has(behind)
    assert not other.has(rows_of(ids, 4, ids[4:], "b"))
    assert not other.has(rows_of([1, 2, 3, 0, 2], 4, [2], "a"))
    assert not other.has(rows_of(ids, 2, ids[2:], "a")), "its hidden state before is gone"
    assert not other.has(rows_of([*ids, 1], 6, [1], "a")), "it has not come"
    reader = Reader("one", 1, "a", torch.empty(0, 1))
    reader.go_on_from(other, 4)
    assert (reader.begin, reader.num_run, reader.known) == (0, 3, 4)
    reader.add(behind, states_of(ids, 4))
    assert reader.states_NE.equal(states_of(ids, 0)[reader.first :])
    assert other.states_NE.equal(states_of(ids[:5], 0)[other.first :])


def test_embeddings_are_left_out() -> None:
    """A row has the token behind its position, which must be one that the head knows."""
    ids = [1, 2, -7, -7, 3, 4]
    reader = Reader("one", 0, "", torch.empty(0, 1))
    reader.add(rows_of(ids, 0, ids), torch.arange(6.0)[:, None])
    assert (reader.begin, reader.first, reader.known) == (3, 3, 6)
    assert reader.states_NE[:, 0].tolist() == [3, 4, 5]
