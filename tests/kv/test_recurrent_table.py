"""Books of recurrent state slots: the examples of going back, sharing, exhaustion, what a ring
gives up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.base.errors import FailedPrecondition, QuireError, ResourceExhausted
from quire.kv.recurrent_states import NULL, rounds
from quire.kv.recurrent_table import RecurrentTable


def table(num_slots: int = 32, *, ring: int = 4, interval: int = 0, ids: tuple[int, ...] = (1,)) -> RecurrentTable:
    made = RecurrentTable(num_slots, ring=ring, interval=interval)
    for seq_id in ids:
        made.add(seq_id)
    return made


def run(books: RecurrentTable, *chunks: int, seq_id: int = 1) -> None:
    """Ordinary tokens, a forward for each count."""
    for count in chunks:
        books.open(books.plan([seq_id], [count], [None]))
        books.check()
        books.publish()
        books.check()


def grow(books: RecurrentTable, parents: list[int], seq_id: int = 1) -> None:
    books.open(books.plan([seq_id], [len(parents)], [parents]))
    books.publish()
    books.check()


def view(books: RecurrentTable) -> Any:
    """All that can be told about it."""
    ids = list(books._sequences)
    return (
        books.pool.references.tolist(),
        books.pool.num_free,
        [(seq_id, books.get(seq_id).length, books.slots(seq_id), len(books.get(seq_id).nodes)) for seq_id in ids],
        [(books.kept(seq_id), list(books.get(seq_id).ring), books.get(seq_id).importing) for seq_id in ids],
        list(books._ringed),
    )


def refused(books: RecurrentTable, error: type[QuireError], match: str, call: Any, *args: Any) -> None:
    before = view(books)
    with pytest.raises(error, match=match):
        call(*args)
    assert view(books) == before
    books.check()


def example() -> RecurrentTable:
    """Interval 16, ring 4: chunks of 16, 16, 5 and three decodes."""
    books = table(interval=16)
    run(books, 16, 16, 5, 1, 1, 1)
    return books


# -- going back ------------------------------------------------------------------------------------


def test_checkpoints_and_ring_of_the_example() -> None:
    books = example()
    assert books.get(1).length == 40
    assert books.kept(1) == [16, 32]
    assert list(books.get(1).ring) == [32, 37, 38, 39]
    # 32 is in both and takes one slot: 16, 32, 37, 38, 39, 40.
    assert books.pool.num_used == 6


def test_pops_of_the_example() -> None:
    books = example()
    assert books.nearest(1, 38) == 38
    at_38, at_16 = books.slot_at(1, 38), books.slot_at(1, 16)
    books.pop(1, 38)
    books.check()
    assert (books.get(1).length, books.slot_at(1)) == (38, at_38)
    assert (books.kept(1), list(books.get(1).ring)) == ([16, 32], [32, 37])
    assert books.nearest(1, 28) == 16
    books.pop(1, 16)
    books.check()
    assert (books.get(1).length, books.slot_at(1)) == (16, at_16)
    assert (books.kept(1), list(books.get(1).ring), books.pool.num_used) == ([16], [], 1)


def test_fork_of_the_example() -> None:
    books = example()
    before = view(books)[2]
    assert books.nearest(1, 20) == 16
    books.fork(1, 2, 16)
    books.check()
    assert (books.get(2).length, books.kept(2), list(books.get(2).ring)) == (16, [16], [])
    assert view(books)[2][:1] == before
    assert books.pool.num_used == 6
    books.remove(1)
    books.check()
    assert books.slots(2)[16] == before[0][2][16]
    assert books.pool.num_used == 1
    books.remove(2)
    assert books.pool.num_used == 0


@pytest.mark.parametrize("position", range(41))
def test_nearest_at_every_position(position: int) -> None:
    books = example()
    expected = max(held for held in (0, 16, 32, 37, 38, 39, 40) if held <= position)
    assert books.nearest(1, position) == expected
    books.fork(1, 2, expected)
    assert books.slot_at(2) == books.slot_at(1, expected)
    assert list(books.get(2).ring) == [held for held in (32, 37, 38, 39) if held < expected]
    books.pop(1, expected)
    books.check()
    assert books.slots(1) == books.slots(2)


def test_where_there_is_a_state() -> None:
    books = example()
    assert list(books.slots(1)) == [0, 16, 32, 37, 38, 39, 40]
    assert books.slot_at(1, 20) is None


def test_at_the_beginning() -> None:
    books = table()
    assert (books.slot_at(1), books.slot_at(1, 0), books.nearest(1, 0)) == (NULL, NULL, 0)
    books.keep(1)
    assert books.kept(1) == []
    run(books, 3, 1)
    assert list(books.get(1).ring) == [3]
    books.pop(1, 0)
    assert (books.slot_at(1), books.pool.num_used, list(books.get(1).ring)) == (NULL, 0, [])


def test_a_fork_shares_the_ring_and_the_parent_goes_on() -> None:
    books = table(ring=2)
    run(books, 1, 1, 1)
    books.fork(1, 2, 3)
    used = books.pool.num_used
    run(books, 1, 1, seq_id=1)
    assert list(books.get(1).ring) == [3, 4]
    assert list(books.get(2).ring) == [1, 2]
    assert books.pool.num_used == used + 2
    books.pop(2, 1)
    books.check()
    assert (books.get(1).length, list(books.get(1).ring)) == (5, [3, 4])


def test_without_a_ring() -> None:
    books = table(ring=0)
    run(books, 2, 1)
    assert (books.pool.num_used, list(books.get(1).ring)) == (1, [])
    assert books.nearest(1, 2) == 0


# -- checkpoints -----------------------------------------------------------------------------------


def test_keep_and_drop() -> None:
    books = table(ring=1)
    run(books, 5)
    books.keep(1)
    books.keep(1)
    books.check()
    assert (books.kept(1), books.pool.num_used) == ([5], 1)
    books.fork(1, 2, 5)
    run(books, 1, 1)
    assert books.pool.num_used == 3
    books.drop(1, 5)
    books.check()
    assert (books.kept(1), books.kept(2)) == ([], [5])


def test_dropping_a_checkpoint_leaves_the_ring() -> None:
    books = example()
    books.drop(1, 32)
    books.check()
    assert (books.kept(1), books.nearest(1, 33)) == ([16], 32)


def test_multiples_inside_a_chunk() -> None:
    books = table(interval=4)
    run(books, 3)
    need = books.plan([1], [10], [None])
    assert need.wanted.tolist() == [0, 4, 8, 9]
    assert need.slots == 4
    books.open(need)
    books.publish()
    books.check()
    assert (books.get(1).length, books.kept(1), list(books.get(1).ring)) == (13, [4, 8, 12], [3])


def test_multiples_that_were_not_computed() -> None:
    books = table(interval=4)
    books.open(books.plan([1], [8], [None]))
    books.publish(inside=False)
    books.check()
    assert (books.kept(1), books.pool.num_used) == ([8], 1)


# -- trees -----------------------------------------------------------------------------------------


def test_a_tree_over_two_forwards() -> None:
    books = table(ring=2)
    run(books, 2)
    present = books.slot_at(1)
    grow(books, [-1, 0, 0])
    slots = list(books._sequences[1].nodes)
    need = books.plan([1], [4], [[1, 3, -1, 2]])
    assert need.parents.tolist() == [-1, 0, -1, -1]
    assert need.given.tolist() == [0, -1, 1, 2]
    assert need.sources.tolist() == [slots[1], present, slots[2]]
    assert need.wanted.tolist() == [0, 1, 2, 3]
    assert need.origins().tolist() == [slots[1], slots[1], present, slots[2]]
    assert not need.chains
    books.open(need)
    books.publish()
    books.check()
    assert (books.get(1).length, len(books.get(1).nodes), books.slot_at(1)) == (2, 7, present)
    nodes = list(books._sequences[1].nodes)
    books.commit(1, [0, 1, 3, 4])
    books.check()
    assert (books.get(1).length, len(books.get(1).nodes), books.slot_at(1)) == (6, 0, nodes[4])
    assert books._sequences[1].ring == {4: nodes[1], 5: nodes[3]}
    assert books.pool.num_used == 3


def test_committing_nothing() -> None:
    books = table()
    run(books, 3)
    before = books.slots(1)
    grow(books, [-1, 0])
    books.commit(1, [])
    books.check()
    assert (books.slots(1), len(books.get(1).nodes), books.pool.num_used) == (before, 0, 1)


def test_a_committed_path_is_as_a_chain() -> None:
    """A path passes multiples of the interval as single tokens do."""
    tree, chain = table(interval=2, ring=3), table(interval=2, ring=3)
    run(tree, 3)
    run(chain, 3, 1, 1, 1)
    grow(tree, [-1, 0, 0, 2])
    tree.commit(1, [0, 2, 3])
    tree.check()
    assert (tree.get(1).length, tree.kept(1), list(tree.get(1).ring)) == (6, [2, 4, 6], [3, 4, 5])
    assert (chain.kept(1), list(chain.get(1).ring)) == ([2, 4, 6], [3, 4, 5])


def test_a_mixed_batch() -> None:
    books = table(ids=(1, 2, 3))
    run(books, 4, seq_id=2)
    need = books.plan([2, 1, 3], [3, 2, 1], [None, [-1, 0], None])
    assert need.parents.tolist() == [-1, 0, 1, -1, 3, -1]
    assert need.given.tolist() == [0, -1, -1, 1, -1, 2]
    assert need.sources.tolist() == [books.slot_at(2), NULL, NULL]
    assert need.wanted.tolist() == [2, 3, 4, 5]
    assert need.offsets.tolist() == [0, 1, 3, 4]
    assert need.origins().tolist() == [books.slot_at(2), NULL, NULL, NULL]


# -- room ------------------------------------------------------------------------------------------


def test_the_ring_gives_way_oldest_first() -> None:
    books = table(5, ids=(1, 2))
    run(books, 1, 1, seq_id=1)
    run(books, 1, 1, seq_id=2)
    run(books, 1, seq_id=1)
    assert (books.pool.num_free, books.num_available) == (0, 3)
    need = books.plan([2], [1], [None])
    assert books.shortage(need) == 0
    books.open(need)
    assert list(books.get(1).ring) == [2]
    assert list(books.get(2).ring) == [1]
    assert books.shortage(books.plan([1, 2], [1, 1], [[-1], [-1]])) == 0
    books.abort()
    books.check()
    need = books.plan([2], [4], [[-1, 0, 0, 0]])
    assert books.shortage(need) == 1
    refused(books, ResourceExhausted, "4 state slots are needed and 3 of 5 are free", books.open, need)


def test_a_state_in_the_rings_of_forks_only_gives_way() -> None:
    books = table(3, ring=2)
    run(books, 1, 1)
    books.fork(1, 2, 2)
    run(books, 1)
    assert books.pool.num_free == 0
    run(books, 1, seq_id=2)
    assert (list(books.get(1).ring), list(books.get(2).ring)) == ([2], [2])


def test_checkpoints_never_give_way() -> None:
    books = table(2)
    run(books, 1)
    books.keep(1)
    run(books, 1)
    need = books.plan([1], [1], [None])
    assert books.shortage(need) == 1
    refused(
        books, ResourceExhausted, "1 state slots are needed and 0 of 2 are free; drop checkpoints", books.open, need
    )
    books.drop(1, 1)
    run(books, 1)
    assert books.get(1).length == 3


def test_two_slots_go_on_for_ever() -> None:
    books = table(2)
    run(books, *[1] * 20)
    assert (books.get(1).length, list(books.get(1).ring)) == (20, [19])


def test_an_open_forward_counts_as_before_it() -> None:
    books = table(4, ids=(1, 2))
    need = books.plan([1], [3], [[-1, -1, -1]])
    books.open(need)
    assert books.shortage(need) == 0
    assert books.shortage(books.plan([2], [5], [[-1] * 5])) == 1
    books.abort()
    assert books.pool.num_free == 4


def test_states_in_the_ring_beyond_the_forward() -> None:
    books = table(8, ring=3, interval=4)
    run(books, 2)
    books.open(books.plan([1], [4], [None]))
    # Row 1 passes 4 and has its slot already; rows 0 and 2 take one.
    found = books.reserve_recent()
    assert [(entry, row) for entry, row, _ in found] == [(0, 0), (0, 1), (0, 2)]
    books.release_recent()
    books.check()
    assert books.pool.num_used == 3
    found = books.reserve_recent()
    assert [(entry, row) for entry, row, _ in found] == [(0, 0), (0, 1), (0, 2)]
    books.check()
    assert books.pool.num_used == 5
    need = books.plan([1], [9], [[-1] * 9])
    assert books.shortage(need) == 2
    books.publish()
    books.check()
    assert (books.kept(1), list(books.get(1).ring), books.pool.num_used) == ([4], [3, 4, 5], 4)
    assert books.slot_at(1, 4) == found[1][2]


def test_recent_states_take_free_slots_only() -> None:
    books = table(4, ring=3, ids=(1, 2))
    books.open(books.plan([1, 2], [4, 3], [None, None]))
    assert [(entry, row) for entry, row, _ in books.reserve_recent()] == [(0, 2), (1, 5)]
    books.abort()
    books.check()
    assert books.pool.num_used == 0


# -- from outside ----------------------------------------------------------------------------------


def test_own() -> None:
    books = table(3)
    assert books.own(1) == (NULL, 0)
    assert books.own(1) is None
    books.check()
    run(books, 1)
    assert list(books.get(1).ring) == []
    books.keep(1)
    old = books.slot_at(1)
    moved = books.own(1)
    assert moved is not None
    assert moved[0] == old
    assert moved[1] == books.slot_at(1) != old
    # What is kept at this position is what was kept; going back to it later gives what the sequence
    # had.
    assert books.slot_at(1, 1) == old
    run(books, 1)
    assert books.slot_at(1, 1) == old
    books.pop(1, 1)
    books.check()
    assert books.slot_at(1) == moved[1]
    books.fork(1, 2, 1)
    run(books, 1, seq_id=2)
    refused(books, ResourceExhausted, "debug_set: 1 state slots are needed and 0 of 3 are free", books.own, 1)


def test_import() -> None:
    books = table(5)
    refused(books, ResourceExhausted, "prepare_import: 6 state slots", books.import_states, 2, 9, [1, 2, 3, 4, 5])
    books.import_states(2, 9, [4, 9])
    books.check()
    assert (books.get(2).length, books.kept(2), books.pool.num_used) == (9, [4, 9], 3)
    assert books.get(2).importing
    # A checkpoint at the end may differ from the present state.
    assert len({books.slot_at(2), books.slot_at(2, 4), books.slot_at(2, 9)}) == 3
    books.finish_import(2)
    books.check()
    assert not books.get(2).importing
    books.remove(2)
    books.import_states(2, 9, [4])
    books.remove(2)
    books.check()
    assert books.pool.num_used == 0


def test_clear() -> None:
    books = table(3)
    run(books, 1, 1)
    books.open(books.plan([1], [1], [None]))
    books.clear()
    books.check()
    assert (len(books._sequences), books.pool.num_free, books.forward) == (0, 3, None)


def test_forward_verbs_without_a_forward() -> None:
    books = table()
    for call in (books.publish, books.abort, books.reserve_recent):
        refused(books, FailedPrecondition, "no forward is open", call)


# -- the recount -----------------------------------------------------------------------------------


def lose_reference(books: RecurrentTable) -> None:
    books.pool.references[books.slots(1)[40]] = 2


def forget_ring(books: RecurrentTable) -> None:
    next(iter(books._ringed.values())).clear()


def move_back(books: RecurrentTable) -> None:
    books._sequences[1].length = 37


def lengthen_ring(books: RecurrentTable) -> None:
    books.ring = 3


def unwritten(books: RecurrentTable) -> None:
    books.pop(1, 0)
    books._sequences[1].length = 3


@pytest.mark.parametrize("damage", [lose_reference, forget_ring, move_back, lengthen_ring, unwritten])
def test_the_recount_finds_damage(damage: Any) -> None:
    books = example()
    books.check()
    damage(books)
    with pytest.raises(QuireError):
        books.check()


def test_rounds() -> None:
    parts = [sorted(part.tolist()) for part in rounds([3, NULL, 1, 3, 3, 1, NULL])]
    assert parts == [[1, 3], [1, 3], [3]]
    assert all(part.dtype == np.int32 for part in rounds([1, 1]))
    assert list(rounds([NULL])) == []
