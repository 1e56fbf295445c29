"""Rows of which each rank has some heads, read and written as one state's: to the bit, in any form.

The ranks are states of one process. The oracle is a state with all heads.

Letters: n tokens; H heads; D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.int8_rows import Int8Rows
from torch import Tensor

from quire.base.errors import QuireError
from quire.contracts.kv_format import KVFormat
from quire.contracts.layers import FullAttention, KeyValueAttention, WindowedAttention
from quire.contracts.ranks import Grid
from quire.kv.divided_rows import DividedRows
from quire.kv.formats.plain import PlainFormat
from quire.kv.sequencefile import with_groups
from quire.kv.state import State

SEQ, DIM, VALUE_DIM, WINDOW = 7, 6, 4, 9
FORMATS = [PlainFormat(torch.float32), PlainFormat(torch.bfloat16), Int8Rows(torch.float32)]
SIZES = [(2, 4, 2), (2, 4, 4), (4, 4, 2), (4, 8, 1), (3, 6, 3)]
"""Ranks, query heads and KV heads; in the third and the fourth, ranks share a head."""


def specs_of(queries: int, heads: int) -> list[KeyValueAttention]:
    sizes: dict[str, Any] = {"num_heads": queries, "num_kv_heads": heads, "head_dim": DIM, "value_dim": VALUE_DIM}
    return [FullAttention(**sizes), WindowedAttention(**sizes, window=WINDOW)]


class States:
    """``PeerRows``: the states of the other ranks."""

    def __init__(self, size: int, queries: int, heads: int, format: KVFormat, page_size: int = 4) -> None:
        self.heads, self.own = heads, max(1, heads // size)
        whole, part = specs_of(queries, heads), specs_of(queries // size, self.own)
        options: dict[str, Any] = {"capacity": 64, "page_size": page_size, "format": format}
        self.whole = State(whole, **options)
        self.ranks = [
            State(part, division=DividedRows(Grid(size), rank, whole, None if rank else self), **options)
            for rank in range(size)
        ]

    def take(
        self, place: tuple[int, int], slots_N: NDArray[np.int64], ranks: Sequence[int]
    ) -> list[Mapping[str, Tensor]]:
        assert 0 not in ranks
        return [self.ranks[rank].parts.storage(place).take(place[1], slots_N) for rank in ranks]

    def put(
        self,
        seq: int,
        place: tuple[int, int],
        slots_N: NDArray[np.int64],
        parts: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        assert 0 not in parts
        for rank, part in parts.items():
            assert seq in self.ranks[rank].parts.imports
            self.ranks[rank].parts.storage(place).put(place[1], slots_N, part)

    def own_heads(self, rank: int, x_nHD: Tensor) -> Tensor:
        first = rank * self.own if self.heads >= len(self.ranks) else rank * self.heads // len(self.ranks)
        return x_nHD[:, first : first + self.own]

    def run(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for state in (self.whole, *self.ranks):
            if not state.has_sequence(SEQ):
                state.add_sequence(SEQ)
            state.begin_forward([SEQ], [count])
        for layer in range(2):
            k, v = (torch.randn(count, self.heads, dim, generator=generator) for dim in (DIM, VALUE_DIM))
            k, v = k.to(self.whole.dtype), v.to(self.whole.dtype)
            self.whole.open_pass().append(layer, k, v)
            for rank, state in enumerate(self.ranks):
                state.open_pass().append(layer, self.own_heads(rank, k), self.own_heads(rank, v))
        for state in (self.whole, *self.ranks):
            state.end_forward()


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def exported(state: State) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    return state.get_checkpoint_metadata(SEQ), [state.export_page_group(SEQ, layer) for layer in range(2)]


def check_equal(found: State, expected: State) -> None:
    """All that the two say of the sequence: metadata with checksums, groups, pieces, rows."""
    (metadata, groups), (known, rows) = exported(found), exported(expected)
    assert metadata == known
    assert all(same(one, other) for one, other in zip(groups, rows, strict=True))
    mine, theirs = found.open_export(SEQ), expected.open_export(SEQ)
    for layer in range(2):
        assert same(mine.held_rows(layer), theirs.held_rows(layer))
        (held,) = theirs.held(layer)
        assert same(mine.rows(layer, held.stop - 3, held.stop), theirs.rows(layer, held.stop - 3, held.stop))
        assert same(
            mine.plain_rows(layer, held.stop - 3, held.stop), theirs.plain_rows(layer, held.stop - 3, held.stop)
        )
        reads = [state.debug_get_kv(SEQ, held.start, held.stop, layer=layer) for state in (found, expected)]
        assert all(torch.equal(one, other) for one, other in zip(*reads, strict=True))


def imported(states: States, metadata: Mapping[str, Any], groups: Sequence[Mapping[str, Tensor]]) -> None:
    """As rank 0 and the others do it: the others know the rows only from rank 0."""
    given = with_groups(metadata, states.ranks[0].plan_import(metadata))
    for state in states.ranks:
        state.prepare_import(SEQ, given)
        state.publish_import(SEQ)
    states.ranks[0].import_page_group(SEQ, 0, groups[0])
    (held,) = (range(*part) for part in metadata["held"][1]["ranges"])
    for start in range(held.start, held.stop, 5):  # pieces that do not end with pages
        stop = min(held.stop, start + 5)
        part = slice(start - held.start, stop - held.start)
        states.ranks[0].import_rows(SEQ, 1, start, {name: rows[part] for name, rows in groups[1].items()})
    for state in states.ranks:
        state.finish_import(SEQ)


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: f"{one.name}-{one.dtype}")
@pytest.mark.parametrize(("size", "queries", "heads"), SIZES)
def test_ranks_export_and_import_what_one_state_does(size: int, queries: int, heads: int, format: KVFormat) -> None:
    states = States(size, queries, heads, format)
    for count in (11, 1, 5):
        states.run(count, count)
    assert states.ranks[0].get_layout() == states.whole.get_layout()
    assert states.ranks[0].geometry.specs == states.whole.geometry.specs
    check_equal(states.ranks[0], states.whole)
    others = States(size, queries, heads, format, page_size=16)
    metadata, groups = exported(states.whole)
    imported(others, metadata, groups)
    check_equal(others.ranks[0], states.whole)
    for state, other in zip(states.ranks, others.ranks, strict=True):
        assert same(own_rows(other), own_rows(state))
        other.check()


def own_rows(state: State) -> dict[str, Tensor]:
    """Of the first layer, as one rank keeps them."""
    return state.parts.storage((0, 0)).take(0, state.sequences.slots(0, SEQ, [range(17)]))


@pytest.mark.parametrize(("size", "queries", "heads"), SIZES)
def test_overwritten_rows(size: int, queries: int, heads: int) -> None:
    states = States(size, queries, heads, PlainFormat(torch.float32))
    states.run(11, 0)
    k, v = torch.randn(3, heads, DIM), torch.randn(3, heads, VALUE_DIM)
    for state in (states.whole, *states.ranks):
        state.debug_set_kv(SEQ, 5, k, v, layer=0)
    check_equal(states.ranks[0], states.whole)
    assert torch.equal(states.ranks[0].debug_get_kv(SEQ, 5, 8, layer=0)[1], v)


def test_other_ranks_read_their_own_heads_only() -> None:
    states = States(2, 4, 2, PlainFormat(torch.float32))
    states.run(3, 0)
    with pytest.raises(QuireError, match="rank 1 of 2 reads its own rows only"):
        states.ranks[1].export_page_group(SEQ, 0)
