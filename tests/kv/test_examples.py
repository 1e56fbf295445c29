"""Examples and lists of the KV state specification about sequences: fork, removal, pop, exhaustion,
debug verbs.
"""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch

from quire.base.errors import InvalidArgument, ResourceExhausted
from quire.contracts.layers import FullAttention, RopeSpec
from quire.kv.forward_need import SlotCopy

from .pair import Pair, attention, refused, same_bits, split_columns, zeros

PAGE_SIZES = (1, 2, 4, 5, 16)


# -- fork ------------------------------------------------------------------------------------------


def test_fork_example_of_the_specification() -> None:
    pair = Pair(capacity=32, page_size=4)
    a, b, c, d, e = range(5)
    pair.add(a)
    pair.append(a, 10)
    assert pair.free == 5
    pair.fork(a, b, 10)
    assert pair.free == 5
    assert pair.copies == []
    pages_of_a = pair.state.state.sequences.get(a).tables[0].pages.tolist()
    pair.append(b)
    assert pair.free == 4
    assert [copy.count for copy in pair.copies] == [2]
    pair.append(a)
    assert pair.free == 4
    assert len(pair.copies) == 1
    assert pair.state.state.sequences.get(a).tables[0].pages.tolist() == pages_of_a
    pair.fork(a, c, 8)
    assert pair.free == 4
    pair.append(c)
    assert pair.free == 3
    assert len(pair.copies) == 1
    pair.fork(a, d, 5)
    pair.append(d)
    assert pair.free == 2
    assert pair.copies[1:] == [SlotCopy(pages_of_a[1] * 4, pair.copies[1].target, 1)]
    pair.fork(a, e, 0)
    assert pair.state.sequence_length(e) == 0
    pair.append(e)
    assert pair.free == 1
    assert len(pair.copies) == 2
    pair.finish()


def test_a_batch_of_all_owners_leaves_one_in_place() -> None:
    """Everybody who holds the tail writes: the last owner needs no copy."""
    pair = Pair(capacity=16, page_size=4)
    pair.add(0)
    pair.append(0, 7)
    pair.fork(0, 1, 6)
    pair.fork(0, 2, 5)
    assert pair.free == 2
    pair.forward([2, 0, 1], [1, 1, 1])
    assert pair.free == 0
    assert sorted(copy.count for copy in pair.copies) == [1, 2]
    pair.finish()


@pytest.mark.turns(8)
@pytest.mark.parametrize("child_first", [False, True])
@pytest.mark.parametrize(
    ("length", "pos"),
    [(60, pos) for pos in (15, 16, 17, 33, 60)] + [(80, pos) for pos in (15, 16, 17, 33, 60, 75, 76, 77, 80, 0, -1)],
)
def test_fork_then_both_go_on(length: int, pos: int, child_first: bool) -> None:
    pair = Pair(capacity=400, page_size=16)
    pair.add(0)
    pair.append(0, length)
    pair.fork(0, 1, pos)
    order = [1, 0] if child_first else [0, 1]
    for seq_id in order:
        pair.append(seq_id)
    pair.forward(order, [17, 2])
    pair.forward(order, [1, 1])
    pair.finish()


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_nested_forks(page_size: int) -> None:
    pair = Pair(capacity=600, page_size=page_size)
    pair.add(0)
    pair.append(0, 9)
    for child in range(1, 13):
        pair.fork(child - 1, child, pair.oracle.sequences[child - 1].length - child % 3)
        pair.append(child, 1 + child % 4)
    pair.forward(list(range(13)), [1] * 13)
    for seq_id in (0, 12, 5, 6, 1):
        pair.remove(seq_id)
    pair.forward([2, 11, 7], [2, 1, 20])
    pair.finish()


@pytest.mark.turns(2)
@pytest.mark.parametrize("children", [20, 40])
def test_many_children_shuffled(children: int) -> None:
    pair = Pair(capacity=64 + children * 24, page_size=16)
    pair.add(-1)
    pair.append(-1, 64)
    rng = random.Random(children)
    for child in range(children):
        pair.fork(-1, child, rng.choice([-1, 64, 63, 50, 48, 1]))
    free = pair.free
    assert free == 64 // 16 + -(-children * 24 // 16) - 4
    batch = [*range(children), -1]
    rng.shuffle(batch)
    pair.forward(batch, [1] * len(batch))
    rng.shuffle(batch)
    pair.forward(batch, [rng.choice([1, 1, 3]) for _ in batch])
    pair.finish()


def test_plan_after_forks_that_are_gone_is_that_of_a_sequence_never_forked() -> None:
    plain, forked = Pair(capacity=64), Pair(capacity=64)
    for pair in (plain, forked):
        pair.add(0)
        pair.append(0, 14)
    for child, pos in enumerate((4, 8, 12), start=1):
        forked.fork(0, child, pos)
    forked.remove(2, 1, 3)
    for pair in (plain, forked):
        pair.begin([0], [3])
    one, two = (pair.state.open_pass().prepared("fused", 0).plan for pair in (plain, forked))
    assert one.num_entries == two.num_entries == 1
    assert one.tables[0].tolist() == two.tables[0].tolist()
    assert plain.state.sequence_pages(0) == forked.state.sequence_pages(0) == (5, 0)
    assert forked.copies == []


# -- removal and pop -------------------------------------------------------------------------------


@pytest.mark.turns(6)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_removal_in_every_order(order: tuple[int, ...]) -> None:
    pair = Pair(capacity=64, page_size=4)
    pair.add(0)
    pair.append(0, 11)
    pair.fork(0, 1, 10)
    pair.fork(1, 2, 6)
    pair.fork(0, 3)
    pair.forward([3, 1], [2, 1])
    for index, seq_id in enumerate(order):
        pair.remove(seq_id)
        # Recycled pages go to somebody else, and the rest stays as it was.
        pair.add(10 + index)
        pair.append(10 + index, 3 + index)
    pair.finish()


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("length", "count"), [(35, 17), (88, 57), (17, 16), (4, 0), (9, 9)])
def test_pop(page_size: int, length: int, count: int) -> None:
    pair = Pair(capacity=200, page_size=page_size)
    pair.add(0, 1)
    pair.forward([0, 1], [length, 3])
    pair.pop(0, count)
    assert pair.free == -(-200 // page_size) - -(-(length - count) // page_size) - -(-3 // page_size)
    pair.forward([1, 0], [1, 5])
    pair.append(0)
    pair.finish()


def test_pop_on_a_child() -> None:
    pair = Pair(capacity=200, page_size=16)
    pair.add(0)
    pair.append(0, 33)
    pair.fork(0, 1, 20)
    pair.append(1, 19)
    pair.pop(1, 37)
    pair.append(1)
    pair.append(0)
    assert pair.state.sequence_length(1) == 3
    pair.finish()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("together", [False, True])
def test_pop_into_a_shared_page_then_both_append(order: list[int], together: bool) -> None:
    pair = Pair(capacity=64, page_size=4)
    pair.add(0)
    pair.append(0, 11)
    pair.fork(0, 1)
    pair.pop(0, 1)
    if together:
        pair.forward(order, [1, 1])
    else:
        for seq_id in order:
            pair.append(seq_id)
    pair.forward(order, [4, 1])
    pair.finish()


def test_pop_of_more_than_there_is() -> None:
    pair = Pair()
    pair.add(0)
    pair.append(0, 5)
    for count in (6, -1, 2**40):
        refused(pair, InvalidArgument, partial(pair.state.popn, 0, count), str(count))
    refused(pair, InvalidArgument, lambda: pair.state.popn(0, 1.0))  # type: ignore[arg-type]
    pair.pop(0, 5)
    refused(pair, InvalidArgument, lambda: pair.state.popn(0, 1), "0..0")
    pair.pop(0, 0)


# -- exhaustion ------------------------------------------------------------------------------------


def exhausted(pair: Pair, ids: list[int], counts: list[int], short: int) -> None:
    assert pair.state.missing_pages(ids, counts) == pair.oracle.missing_pages(ids, counts) == short
    needed, free = str(pair.free + short), str(pair.free)
    refused(pair, ResourceExhausted, lambda: pair.state.begin_forward(ids, counts), needed, free)


def test_exhaustion_of_eight_pages() -> None:
    pair = Pair(capacity=32, page_size=4)
    pair.add(0, 1, 2)
    exhausted(pair, [0], [33], 1)
    pair.append(0, 22)
    assert pair.free == 2
    exhausted(pair, [0], [11], 1)
    exhausted(pair, [0, 1], [3, 5], 1)
    exhausted(pair, [1, 2, 0], [5, 5, 3], 3)
    pair.forward([0, 1], [2, 4])
    assert pair.free == 1
    pair.fork(1, 3, 3)
    pair.fork(0, 4)
    # A page boundary needs no copy, a shared tail does.
    pair.append(3)
    assert pair.free == 0
    pair.fork(3, 5, 2)
    exhausted(pair, [5], [1], 1)
    exhausted(pair, [4, 5], [1, 1], 2)
    refused(pair, ResourceExhausted, lambda: pair.state.debug_set_kv(0, 0, *zeros(pair, 1)), "1", "0")
    metadata = pair.state.get_checkpoint_metadata(1)
    refused(pair, ResourceExhausted, lambda: pair.state.prepare_import(9, metadata), "needs 1 pages, 0 free")
    # Room in tails is still there, and what is given back is there again.
    pair.remove(5)
    pair.pop(3, 1)
    pair.append(3)
    pair.remove(4)
    pair.pop(0, 4)
    assert pair.free == 1
    pair.append(2, 4)
    exhausted(pair, [2], [1], 1)
    pair.finish()


def test_a_fork_needs_no_page() -> None:
    pair = Pair(capacity=8, page_size=4)
    pair.add(0)
    pair.append(0, 7)
    assert pair.free == 0
    for child in range(1, 30):
        pair.fork(child - 1, child, -1 if child % 2 else 7)
    exhausted(pair, list(range(30)), [1] * 30, 29)
    pair.remove(*range(1, 30))
    pair.append(0)
    pair.finish()


# -- debug verbs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_set_on_a_shared_page_leaves_the_fork_alone(page_size: int) -> None:
    pair = Pair(page_size=page_size)
    pair.add(0)
    pair.append(0, 13)
    pair.fork(0, 1, 11)
    pair.fork(1, 2)
    for layer in (0, 1):
        k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
        pair.state.debug_set_kv(1, 4, k, v, layer=layer)
        pair.oracle.debug_set_kv(1, 4, k, v, layer)
        pair.compare()
    k, v = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    pair.state.debug_set_kv(0, 10, k, v)
    for layer in (0, 1):
        pair.oracle.debug_set_kv(0, 10, k[layer], v[layer], layer)
    pair.compare()
    pair.forward([2, 0, 1], [1, 2, 3])
    pair.finish()


def test_ranges() -> None:
    pair = Pair([attention(value_dim=3), attention(value_dim=3)])
    pair.add(0)
    pair.append(0, 10)
    k, v = pair.state.debug_get_kv(0, 3, 7)
    assert k.shape == (2, 4, 2, 8)
    assert v.shape == (2, 4, 2, 3)
    for layer in (0, 1):
        expected = pair.oracle.stored(0, layer)
        assert same_bits(k[layer], expected[0][3:7])
        assert same_bits(v[layer], expected[1][3:7])
    for start, end in ((0, 0), (10, 10), (10, None), (4, 4)):
        assert pair.state.debug_get_kv(0, start, end)[0].shape == (2, 0, 2, 8)
        assert pair.state.debug_get_kv(0, start, end, layer=1)[1].shape == (0, 2, 3)
        out = torch.zeros(2, 0, 2, 8), torch.zeros(2, 0, 2, 3)
        assert pair.state.debug_get_kv(0, start, end, out=out) is out
        pair.state.debug_set_kv(0, start, *out)
    out = torch.zeros(4, 2, 8), torch.zeros(4, 2, 3)
    assert pair.state.debug_get_kv(0, 3, 7, layer=1, out=out, relative=True) is out
    assert same_bits(out[0], k[1])
    assert same_bits(out[1], v[1])
    with pytest.raises(InvalidArgument, match="layer="):
        Pair([attention(), attention(value_dim=3)]).state.debug_get_kv(0)


def test_k_is_stored_rotated_or_raw_as_the_mode_says() -> None:
    eight = RopeSpec(theta=1e4, rotary_dim=8)
    for mode, rope in (("none", None), ("none", eight), ("inline", eight)):
        spec = FullAttention(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8, rope=rope, rope_mode=mode)  # type: ignore[arg-type]
        pair = Pair([spec])
        pair.add(0)
        pair.begin([0], [3])
        qkv = pair.random(0, 3)
        pair.layer(0, qkv)
        pair.end()
        assert same_bits(pair.state.debug_get_kv(0, layer=0)[0], split_columns(spec, qkv)[1])
