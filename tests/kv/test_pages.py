"""Pages and page tables against plain counts and lists, and what ``check()`` finds."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from quire.base.errors import QuireError, ResourceExhausted
from quire.kv.formats.plain import PlainFormat
from quire.kv.forward_need import SlotRange, pages_for, slot_index, slots_of
from quire.kv.pages import NULL_PAGE, PagePool, PageTable
from quire.kv.sequence_table import SequenceTable
from quire.kv.storage import MAPPED, PagedStorage, lazy_zeros
from quire.kv.trees import Tree
from quire.kv.windows import NO_HOLE, Window

from .pair import Pair, attention, windowed


@settings(max_examples=examples(25, 150), deadline=None)
@given(data=st.data(), size=st.integers(1, 12))
def test_pool_against_a_count(data: st.DataObject, size: int) -> None:
    pool, holders = PagePool(size), Counter[int]()
    for _ in range(data.draw(st.integers(1, 25))):
        held = sorted(holders)
        verb = data.draw(st.sampled_from(["take", "share", "release", "clear"] if held else ["take"]))
        if verb == "take":
            count = data.draw(st.integers(0, pool.num_free + 1))
            if count > pool.num_free:
                with pytest.raises(QuireError, match="free"):
                    pool.take(count)
                continue
            pages = pool.take(count).tolist()
            assert len(set(pages)) == count
            assert not set(pages) & set(holders)
            holders.update(pages)
        elif verb == "clear":
            pool.clear()
            holders.clear()
        else:
            some = data.draw(st.lists(st.sampled_from(held), unique=True))
            nulls = [NULL_PAGE] * data.draw(st.integers(0, 2))
            pages_array = np.array(data.draw(st.permutations(some + nulls)), dtype=np.int32)
            if verb == "share":
                pool.share(pages_array)
                holders.update(some)
            else:
                pool.release(pages_array)
                holders.subtract(some)
                holders = +holders
        assert pool.num_free == size - len(holders)
        assert pool.num_used == len(holders)
        expected = np.array([holders[page] for page in range(size)], dtype=np.int32)
        pool.check(expected)
        wrong = expected.copy()
        wrong[0] += 1
        with pytest.raises(QuireError, match="page 0 has reference count"):
            pool.check(wrong)


def test_runs_stay_runs() -> None:
    """What was taken together and given back together is handed out in ascending order again."""
    pool = PagePool(10)
    assert pool.take(4).tolist() == [0, 1, 2, 3]
    second = pool.take(3)
    assert second.tolist() == [4, 5, 6]
    pool.release(second)
    assert pool.take(3).tolist() == [4, 5, 6]


def test_check_finds_a_broken_free_list() -> None:
    pool = PagePool(4)
    pool.take(2)
    held = np.array([1, 1, 0, 0], dtype=np.int32)
    pool.check(held)
    pool._free[0] = pool._free[1]
    with pytest.raises(QuireError, match="twice"):
        pool.check(held)
    pool._free[0] = 0
    with pytest.raises(QuireError, match="free list"):
        pool.check(held)
    other = PagePool(4)
    other.num_free = 3
    with pytest.raises(QuireError, match="free list"):
        other.check(np.zeros(4, dtype=np.int32))


@settings(max_examples=examples(40, 100), deadline=None)
@given(data=st.data())
def test_table_against_a_list(data: st.DataObject) -> None:
    table, model, next_page = PageTable(), list[int](), 0
    forks: list[tuple[PageTable, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        verb = data.draw(st.sampled_from(["append", "truncate", "fork", "replace"]))
        if verb == "append":
            count = data.draw(st.integers(0, 9))
            pages = list(range(next_page, next_page + count))
            next_page += count
            table.append(np.array(pages, dtype=np.int32))
            model += pages
        elif verb == "truncate":
            size = data.draw(st.integers(0, len(model)))
            assert table.truncate(size).tolist() == model[size:]
            del model[size:]
        elif verb == "fork":
            size = data.draw(st.integers(0, len(model)))
            forks.append((table.fork(size), model[:size]))
        elif model:
            index = data.draw(st.integers(0, len(model) - 1))
            next_page += 1
            table.replace(index, 1000 + next_page)
            model[index] = 1000 + next_page
        assert table.pages.tolist() == model
        assert table.size == len(model)
        for fork, expected in forks:
            assert fork.pages.tolist() == expected
    if forks:
        fork, expected = forks[0]
        fork.append(np.array([7, 8], dtype=np.int32))
        assert fork.pages.tolist() == [*expected, 7, 8]
        assert table.pages.tolist() == model


@given(pages=st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True), size=st.integers(1, 5), data=st.data())
def test_slots(pages: list[int], size: int, data: st.DataObject) -> None:
    tokens = len(pages) * size
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    expected = [pages[position // size] * size + position % size for position in range(start, stop)]
    assert slots_of(np.array(pages, dtype=np.int32), start, stop, size).tolist() == expected
    assert pages_for(tokens, size) == len(pages)
    assert pages_for(tokens + 1, size) == len(pages) + 1
    assert slot_index([SlotRange(3, 2), SlotRange(9, 0), SlotRange(1, 1)]).tolist() == [3, 4, 1]
    assert slot_index([]).size == 0


def forked() -> Pair:
    """Sequence 0 of 10 tokens and a child that shares two pages, a third sequence."""
    pair = Pair(capacity=40, page_size=4)
    pair.add(0, 2)
    pair.forward([0, 2], [10, 3])
    pair.fork(0, 1)
    pair.append(1)
    pair.state.check()
    return pair


def _shorten(table: SequenceTable) -> None:
    table.get(2).length += 4


def _steal(table: SequenceTable) -> None:
    """Sequence 2 names a page of sequence 0."""
    table.get(2).tables[0].replace(0, int(table.get(0).tables[0].pages[0]))


def _twice(table: SequenceTable) -> None:
    pages = table.get(0).tables[0]
    pages.replace(1, int(pages.pages[0]))


def _leak(table: SequenceTable) -> None:
    table.pools[0].take(1)


def _give_back_too_early(table: SequenceTable) -> None:
    table.pools[0].release(table.get(0).tables[0].pages[:1].copy())


def _forget(table: SequenceTable) -> None:
    table._sequences.pop(1)


@pytest.mark.parametrize("breakage", [_shorten, _steal, _twice, _leak, _give_back_too_early, _forget])
def test_check_finds_broken_books(breakage: Callable[[SequenceTable], None]) -> None:
    pair = forked()
    breakage(pair.state.state.sequences)
    with pytest.raises(QuireError):
        pair.state.check()


def slid_with_a_tree() -> Pair:
    """Sequence 0 has slid and sequence 1 has nodes; two classes."""
    pair = Pair([attention(), windowed(5)], capacity=60, page_size=2)
    pair.add(0, 1)
    pair.window(0, 6, 2)
    pair.forward([0, 1], [11, 3])
    pair.forward([0, 1], [2, 4], [None, [-1, 0, 0, 1]])
    return pair


def _lose_a_page_of_the_window(table: SequenceTable) -> None:
    pages = table.get(0).tables[0]
    last = pages.size - 2
    table.pools[0].release(pages.pages[last : last + 1].copy())
    pages.replace(last, NULL_PAGE)


def _lose_the_sink(table: SequenceTable) -> None:
    pages = table.get(0).tables[0]
    table.pools[0].release(pages.pages[:1].copy())
    pages.replace(0, NULL_PAGE)


def _keep_what_is_lost(table: SequenceTable) -> None:
    pages = table.get(0).tables[0]
    assert pages.pages[2] == NULL_PAGE
    pages.replace(2, int(table.pools[0].take(1)[0]))


def _forget_what_is_lost(table: SequenceTable) -> None:
    table.get(0).holes[0] = NO_HOLE


def _lose_more(table: SequenceTable) -> None:
    hole = table.get(0).holes[1]
    table.get(0).holes[1] = type(hole)(hole.sink, hole.window + 2)


def _no_window(table: SequenceTable) -> None:
    table.get(0).window = None


def _sink_as_large_as_the_window(table: SequenceTable) -> None:
    table.get(0).window = Window(6, 6)


def _tree(table: SequenceTable) -> Tree:
    tree = table.get(1).tree
    assert tree is not None
    return tree


def _wrong_depth(table: SequenceTable) -> None:
    _tree(table).depths[3] += 1


def _wrong_ancestor(table: SequenceTable) -> None:
    _tree(table).ancestry[3, 2] = True


def _no_parent(table: SequenceTable) -> None:
    table.get(1).tree = replace(_tree(table), parents=(-1, 0, 4, 1))


def _no_tree(table: SequenceTable) -> None:
    table.get(1).tree = None


@pytest.mark.parametrize(
    "breakage",
    [
        _lose_a_page_of_the_window,
        _lose_the_sink,
        _keep_what_is_lost,
        _forget_what_is_lost,
        _lose_more,
        _no_window,
        _sink_as_large_as_the_window,
        _wrong_depth,
        _wrong_ancestor,
        _no_parent,
        _no_tree,
    ],
)
def test_check_finds_broken_windows_and_trees(breakage: Callable[[SequenceTable], None]) -> None:
    pair = slid_with_a_tree()
    pair.state.check()
    breakage(pair.state.state.sequences)
    with pytest.raises(QuireError):
        pair.state.check()


def test_check_finds_a_shared_page_that_is_written() -> None:
    pair = forked()
    pair.begin([0, 1], [1, 1])
    pair.state.check()
    table = pair.state.state.sequences
    one, other = (table.get(seq_id).tables[0] for seq_id in (0, 1))
    page = int(one.pages[-1])
    table.pools[0].release(other.pages[-1:].copy())
    other.replace(other.size - 1, page)
    table.pools[0].share(np.array([page], dtype=np.int32))
    with pytest.raises(QuireError, match="more than one holder"):
        pair.state.check()


def test_check_finds_an_import_that_shares() -> None:
    pair = forked()
    metadata = pair.state.get_checkpoint_metadata(2)
    pair.state.prepare_import(7, metadata)
    pair.state.check()
    table = pair.state.state.sequences
    mine = table.get(7).tables[0]
    table.pools[0].release(mine.pages.copy())
    page = table.get(0).tables[0].pages[:1].copy()
    mine.replace(0, int(page[0]))
    table.pools[0].share(page)
    with pytest.raises(QuireError, match="imported"):
        pair.state.check()


# -- storage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lazy_zeros(dtype: torch.dtype) -> None:
    zeros = lazy_zeros((3, 5, 7), dtype)
    assert zeros.shape == (3, 5, 7)
    assert zeros.dtype == dtype
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % 64 == 0
    assert not zeros.any()
    zeros.fill_(1)
    assert zeros.double().sum() == 105


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="other systems")
def test_large_zeros_have_a_mapping_of_their_own() -> None:
    """Memory that the process has kept would be zeroed at once."""
    zeros = lazy_zeros((3, MAPPED), torch.int8)
    assert zeros.data_ptr() % mmap.PAGESIZE == 0
    assert not zeros[:, ::4096].any()
    with pytest.raises(MemoryError):
        lazy_zeros((1 << 60,), torch.int8)


def test_storage_writes_reads_copies() -> None:
    specs = [attention(), attention(value_dim=3), attention()]
    storage = PagedStorage(specs, 10, PlainFormat(torch.float32), torch.device("cpu"))
    assert storage.num_bytes == 10 * 4 * 2 * (16 + 11 + 16)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 3)
    storage.write(1, torch.tensor([7, 2]), k, v)
    got = storage.read(1, np.array([2, 7]))
    assert torch.equal(got.k, k.flip(0))
    assert torch.equal(got.v, v.flip(0))
    got.k.zero_()
    assert torch.equal(storage.layers[1].k[7], k[0])
    for layer in (0, 2):
        assert not storage.layers[layer].k.any()


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ResourceExhausted, match=r"the KV pool needs 134,217,728.00 GiB on cpu"):
        PagedStorage([attention()], 1 << 50, PlainFormat(torch.float32), torch.device("cpu"))
