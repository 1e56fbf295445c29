"""The examples and lists of the KV state specification that concern full attention, one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.contracts.kv_state import AttentionKVCache, RNNState
from quire.contracts.layers import FullAttention, LatentAttention, RopeSpec, WindowedAttention
from quire.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.kernels.sdpa import SdpaAttention
from quire.kv.paged import PagedKVState
from quire.kv.rules import PAGED_REFUSALS, PAGED_VERBS
from quire.kv.sequences import SlotCopy

from .oracle import attention_bound
from .pair import Pair, attention, num_columns, same_bits, split_columns
from .test_machine import snapshot

PAGE_SIZES = (1, 2, 4, 5, 16)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def refused(pair: Pair, kind: type[QuireError], act: Callable[[], object], *words: str) -> None:
    """The call raises this very class, says these words, and leaves no trace."""
    before = snapshot(pair.state)
    with pytest.raises(kind) as raised:
        act()
    assert type(raised.value) is kind
    for word in words:
        assert word in str(raised.value)
    assert snapshot(pair.state) == before


# -- forward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prompts_in_pieces_mixed_with_decodes(page_size: int) -> None:
    pair = Pair(page_size=page_size, capacity=900)
    rng = random.Random(page_size)
    wanted = dict(enumerate(rng.sample(range(1, 25), 9)))
    pair.add(*wanted)
    while any(pair.oracle.sequences[seq_id].length < length for seq_id, length in wanted.items()):
        ids = rng.sample(sorted(wanted), rng.randint(1, 9))
        counts = []
        for seq_id in ids:
            left = wanted[seq_id] - pair.oracle.sequences[seq_id].length
            counts.append(rng.randint(1, left) if left > 0 else 1)
        pair.forward(ids, counts)
    pair.forward(list(wanted), [1] * 9)
    pair.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [8, 4, 1])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 64), (7, 7), (5, 9)])
def test_types_and_head_sizes(dtype: torch.dtype, kv_heads: int, dim: int, value_dim: int) -> None:
    specs = [
        attention(8, kv_heads, dim, value_dim, rotary_dim=0),
        attention(8, kv_heads, dim, value_dim, rotary_dim=dim // 2 * 2),
    ]
    pair = Pair(specs, dtype=dtype, page_size=5, capacity=200)
    pair.add(0, 1, 2)
    pair.forward([0, 1], [7, 1])
    pair.forward([1, 2, 0], [1, 3, 1])
    pair.fork(0, 3, 6)
    pair.forward([3, 0, 2], [1, 1, 18])
    pair.finish()


def compositions(total: int) -> list[list[int]]:
    """Every way to cut ``total`` tokens into chunks."""
    result = []
    for cuts in itertools.product([False, True], repeat=total - 1):
        chunks = [1]
        for cut in cuts:
            if cut:
                chunks.append(1)
            else:
                chunks[-1] += 1
        result.append(chunks)
    return result


def row_bounds(state: PagedKVState, seq_id: int, layer: int, qkv: Tensor) -> Tensor:
    """How far each row of a sequence's attention may be from the exact result, ``[T, 1, 1]``."""
    k, v = state.debug_get_kv(seq_id, layer=layer)
    keys = list(zip(k, v, strict=True))
    q_THD, _, _ = split_columns(state.specs[layer], qkv)
    bounds = [attention_bound(q, keys[: row + 1], state.specs[layer].scale, state.dtype) for row, q in enumerate(q_THD)]
    return torch.tensor(bounds).view(-1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_chunking_gives_the_same_rows(dtype: torch.dtype) -> None:
    chunkings = compositions(12)
    assert len(chunkings) == 2**11
    spec = attention()
    state = PagedKVState([spec], capacity=15 * (len(chunkings) + 1), page_size=5, dtype=dtype, backend=SdpaAttention())
    qkv = torch.randn(12, num_columns(spec), generator=torch.Generator().manual_seed(3)).to(dtype)
    state.add_sequence(-1)
    state.begin_forward([-1], [12])
    whole = state.attention_with_fused_qkv(0, qkv)
    state.end_forward()
    # Both results are within the bound of the exact one.
    bound = 2 * row_bounds(state, -1, 0, qkv)
    stored = state.debug_get_kv(-1)
    for seq_id in range(len(chunkings)):
        state.add_sequence(seq_id)
    done = [0] * len(chunkings)
    for step in range(12):
        ids = [seq_id for seq_id, chunks in enumerate(chunkings) if len(chunks) > step]
        counts = [chunkings[seq_id][step] for seq_id in ids]
        rows = torch.cat([torch.arange(done[i], done[i] + n) for i, n in zip(ids, counts, strict=True)])
        state.begin_forward(ids, counts)
        out = state.attention_with_fused_qkv(0, qkv[rows])
        state.end_forward()
        assert ((out.double() - whole[rows].double()).abs() <= bound[rows]).all()
        for seq_id, count in zip(ids, counts, strict=True):
            done[seq_id] += count
    assert done == [12] * len(chunkings)
    for seq_id in range(0, len(chunkings), 7):
        for given, expected in zip(state.debug_get_kv(seq_id), stored, strict=True):
            assert same_bits(given, expected)


def test_chunks_of_a_sequence_alone() -> None:
    """Without neighbours other paths of a backend run than in a batch."""
    spec = attention()
    state = PagedKVState([spec], capacity=400, page_size=4, backend=SdpaAttention())
    qkv = torch.randn(80, num_columns(spec), generator=torch.Generator().manual_seed(4))
    reference: Tensor | None = None
    for chunks in ([80], [1] * 80, [40, 40], [17, 17, 17, 17, 12], [3, 60, 17], [64, 16], [79, 1]):
        state.add_sequence(0)
        out, start = [], 0
        for count in chunks:
            state.begin_forward([0], [count])
            out.append(state.attention_with_fused_qkv(0, qkv[start : start + count]))
            state.end_forward()
            start += count
        result = torch.cat(out)
        if reference is None:
            reference, bound = result, 2 * row_bounds(state, 0, 0, qkv)
        assert ((result - reference).abs() <= bound).all()
        state.remove_sequence(0)
    assert state.empty()


def test_padding_rows_and_out() -> None:
    pair = Pair(capacity=80)
    pair.add(0, 1)
    pair.begin([0, 1], [3, 2])
    padded = pair.random(0, 9)
    padded[5:] = float("nan")
    result = pair.layer(0, padded)
    assert result.shape == (9, 4, 8)
    assert not result[5:].any()
    out = torch.full((9, 4, 8), 7.0)
    assert pair.layer(1, padded, out=out) is out
    assert (out[5:] == 7.0).all()
    pair.end()
    # A view of a bigger buffer is as good a place, if no byte of the input is in it.
    buffer = torch.zeros(1000)
    pair.begin([0], [2])
    qkv = buffer[: 2 * num_columns(pair.specs[0])].view(2, -1)
    qkv.copy_(pair.random(0, 2))
    out = buffer[-64:].view(2, 4, 8)
    pair.layer(0, qkv, out=out)
    fresh = pair.layer(1, qkv)
    kept = fresh.clone()
    pair.end()
    pair.append(0)
    assert torch.equal(fresh, kept)
    pair.finish()


def test_out_is_refused_where_it_does_not_fit() -> None:
    pair = Pair()
    pair.add(0)
    pair.begin([0], [2])
    qkv = pair.random(0, 4)
    verb = pair.state.attention_with_fused_qkv
    for out in (
        torch.zeros(2, 4, 8),
        torch.zeros(4, 4, 7),
        torch.zeros(4, 32),
        torch.zeros(4, 4, 8, dtype=torch.float64),
        qkv[:, :32].view(4, 4, 8),
        qkv.view(-1)[5 : 5 + 128].view(4, 4, 8),
    ):
        refused(pair, InvalidArgument, partial(verb, 0, qkv, out=out), "out")
    # A fused tensor that is not contiguous must not hide that out lies in it.
    heads = torch.randn(4, 16, 16)[:, ::2, ::2]
    refused(pair, InvalidArgument, lambda: verb(0, heads, out=heads[:, :4]), "out")
    refused(pair, InvalidArgument, lambda: verb(0, qkv[:1]), "2 rows")
    pair.abort()


def test_layers_in_another_order_repeated_and_skipped() -> None:
    specs = [attention(), attention(kv_heads=1), attention(value_dim=3)]
    pair = Pair(specs)
    pair.add(0, 1)
    pair.forward([0, 1], [5, 3])
    pair.begin([1, 0], [2, 1])
    pair.layer(2, pair.random(2, 3))
    first = pair.random(0, 3)
    pair.layer(0, first)
    other_rows = pair.state.debug_get_kv(0, layer=2), pair.state.debug_get_kv(1, layer=1)
    again = pair.random(0, 3)
    pair.layer(0, again)
    same_rows = pair.state.debug_get_kv(0, layer=2), pair.state.debug_get_kv(1, layer=1)
    for before, after in zip(other_rows, same_rows, strict=True):
        assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))
    refused(pair, FailedPrecondition, pair.state.end_forward, "[1]")
    refused(pair, InvalidArgument, lambda: pair.state.end_forward(skipped=[3]), "layer 3", "0..2")
    pair.end(skipped=[1])
    k, v = pair.state.debug_get_kv(0, 5, 6, layer=1)
    assert not k.any()
    assert not v.any()
    # Naming a layer that was written leaves it as it is.
    pair.begin([0], [1])
    for layer in range(3):
        pair.layer(layer, pair.random(layer, 1))
    pair.end(skipped={0, 2})
    pair.append(0, 4)
    pair.finish()


def test_skipped_rows_are_zero_in_recycled_pages() -> None:
    pair = Pair(capacity=8)
    pair.add(0)
    pair.append(0, 8)
    pair.remove(0)
    pair.add(1)
    pair.begin([1], [6])
    pair.end(skipped=iter([0, 1]))
    pair.append(1, 2)
    pair.finish()


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_abort_after_each_layer_then_the_same_forward(stop: int) -> None:
    pair = Pair([attention()] * 3, capacity=80)
    pair.add(0, 1)
    pair.forward([0, 1], [6, 8])
    pair.fork(0, 2)
    before = snapshot(pair.state)
    free = pair.free
    values = [pair.random(layer, 8) for layer in range(3)]
    pair.begin([0, 1, 2], [1, 2, 5])
    partly = [pair.layer(layer, values[layer]) for layer in range(stop)]
    pair.abort()
    assert pair.free == free
    after = snapshot(pair.state)
    assert {seq: (length, pages) for seq, (length, _, _, pages) in after[0].items()} == {
        seq: (length, pages) for seq, (length, _, _, pages) in before[0].items()
    }
    assert after[1][0][0] == before[1][0][0]
    assert after[2:6] == before[2:6]
    pair.begin([0, 1, 2], [1, 2, 5])
    whole = [pair.layer(layer, values[layer]) for layer in range(3)]
    for first, second in zip(partly, whole, strict=False):
        assert torch.equal(first, second)
    pair.end()
    pair.finish()


def test_query_positions_and_queries() -> None:
    pair = Pair(capacity=100)
    state = pair.state
    assert state.empty()
    assert state.num_available_pages() == 25
    pair.add(0, 1)
    assert not state.empty()
    pair.forward([0, 1], [10, 6])
    assert state.total_sequence_length() == 16
    assert state.num_available_pages() == 25 - 3 - 2
    assert state.reachable(0) == [range(11)]
    assert [state.rewind_cost(0, pos) for pos in (0, 5, 10)] == [0, 0, 0]
    assert state.checkpoints(0) == []
    pair.begin([0, 1], [3, 1])
    for relative in (False, True):
        positions = state.get_query_positions(relative=relative)
        assert positions.dtype == torch.int32
        assert positions.tolist() == [10, 11, 12, 6]
    positions.zero_()
    assert state.get_query_positions().tolist() == [10, 11, 12, 6]
    # Inside a forward everything reads as before it.
    assert state.sequence_length(0) == state.cached_length(0) == 10
    assert state.total_sequence_length() == 16
    assert state.pending_nodes(0) == 0
    assert state.debug_get_kv(0)[0].shape[1] == 10
    pair.abort()
    refused(pair, FailedPrecondition, state.get_query_positions)
    pair.fork(0, 2, 4)
    assert state.total_sequence_length() == 20
    pair.finish()


def test_missing_pages_inside_a_forward_is_that_before_it() -> None:
    pair = Pair(capacity=24)
    pair.add(0, 1)
    pair.append(0, 6)
    pair.fork(0, 2)
    asked = [([0], [1]), ([0, 2], [1, 1]), ([0, 2, 1], [7, 3, 12]), ([1], [24])]
    before = [pair.state.missing_pages(*batch) for batch in asked]
    pair.begin([0, 2, 1], [1, 5, 4])
    assert [pair.state.missing_pages(*batch) for batch in asked] == before == [0, 0, 3, 2]
    pair.abort()


def test_lists_of_numpy_and_tuples() -> None:
    np = pytest.importorskip("numpy")
    pair = Pair()
    pair.state.add_sequence(np.int64(3))
    pair.oracle.add_sequence(3)
    pair.state.begin_forward(np.array([3]), np.array([2], dtype=np.int32))
    pair.oracle.begin_forward([3], [2])
    for layer in range(2):
        pair.layer(layer, pair.random(layer, 2))
    pair.end()
    pair.state.popn(np.int32(3), np.int32(1))
    pair.oracle.popn(3, 1)
    pair.compare()
    assert type(pair.state.sequence_length(3)) is int
    assert type(pair.state.table.ids[0]) is int


# -- fork --------------------------------------------------------------------------------------------------------


def test_fork_example_of_the_specification() -> None:
    pair = Pair(capacity=32, page_size=4)
    a, b, c, d, e = range(5)
    pair.add(a)
    pair.append(a, 10)
    assert pair.free == 5
    pair.fork(a, b, 10)
    assert pair.free == 5
    assert pair.copies == []
    pages_of_a = pair.state.table.get(a).tables[0].pages.tolist()
    pair.append(b)
    assert pair.free == 4
    assert [copy.count for copy in pair.copies] == [2]
    pair.append(a)
    assert pair.free == 4
    assert len(pair.copies) == 1
    assert pair.state.table.get(a).tables[0].pages.tolist() == pages_of_a
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
    one, two = plain.state.open_pass().plan, forked.state.open_pass().plan
    assert one.num_entries == two.num_entries == 1
    assert one.tables[0].tolist() == two.tables[0].tolist()
    assert one.slots_T.tolist() == two.slots_T.tolist()
    assert plain.state.sequence_pages(0) == forked.state.sequence_pages(0) == (5, 0)
    assert forked.copies == []


# -- removal and pop ---------------------------------------------------------------------------------------------


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


# -- exhaustion --------------------------------------------------------------------------------------------------


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


def zeros(pair: Pair, rows: int) -> tuple[Tensor, Tensor]:
    spec = pair.specs[0]
    lead = (len(pair.specs), rows, spec.num_kv_heads)
    return torch.zeros(*lead, spec.head_dim), torch.zeros(*lead, spec.value_dim)


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


# -- ids and errors ----------------------------------------------------------------------------------------------


def test_ids_are_any_int64() -> None:
    pair = Pair()
    ids = [-(2**63), 2**63 - 1, -1, 0, -2]
    pair.add(*ids)
    pair.forward(ids, [3, 1, 2, 5, 1])
    pair.fork(-(2**63), 17)
    pair.pop(-1, 1)
    pair.forward([-1, 17], [1, 1])
    for bad in (2**63, -(2**63) - 1, 10**30):
        refused(pair, InvalidArgument, partial(pair.state.add_sequence, bad), str(bad))
        refused(pair, InvalidArgument, partial(pair.state.fork_sequence, 0, bad), str(bad))
    odds: list[Any] = ["0", 1.5, None, True]
    for odd in odds:
        refused(pair, InvalidArgument, partial(pair.state.add_sequence, odd))
    pair.finish()


def test_error_classes_and_their_order() -> None:
    """If several apply, the first in the order of the contract is raised."""
    pair = Pair(capacity=16)
    state = pair.state
    pair.add(0, 1)
    pair.append(0, 5)
    qkv = pair.random(0, 3)
    k, v = zeros(pair, 1)
    metadata = state.get_checkpoint_metadata(0)
    old = metadata | {"format_version": 0}
    tree = [[-1], [-1]]
    groups = state.export_page_group(0, 0)

    def calls() -> list[tuple[type[QuireError] | None, type[QuireError] | None, Callable[[], object]]]:
        """(refusal while no forward is open, refusal while one is open, the call)"""
        return [
            (InvalidArgument, InvalidArgument, lambda: state.add_sequence(0)),
            (NotFound, NotFound, lambda: state.remove_sequence(8)),
            (None, FailedPrecondition, lambda: state.popn(0, 0)),
            (InvalidArgument, InvalidArgument, lambda: state.fork_sequence(8, 0)),
            (InvalidArgument, InvalidArgument, lambda: state.fork_sequence(8, 9, -2)),
            (NotFound, NotFound, lambda: state.fork_sequence(8, 9, 2)),
            (InvalidArgument, InvalidArgument, lambda: state.fork_sequence(0, 9, 6)),
            (InvalidArgument, InvalidArgument, lambda: state.popn(8, -1)),
            (NotFound, NotFound, lambda: state.popn(8, 1)),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([8], [0])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([], [])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([8, 8], [1, 1])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0], [1.0])),  # type: ignore[list-item]
            (NotFound, NotFound, lambda: state.begin_forward([8], [99])),
            (ResourceExhausted, FailedPrecondition, lambda: state.begin_forward([0], [99])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 0], [1, 1], tree)),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1, 1], [[-1], [0]])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1, 1], [[-1]])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1, 1], [-1, -1, -1])),
            (NotFound, NotFound, lambda: state.begin_forward([0, 8], [1, 1], tree)),
            (Unsupported, Unsupported, lambda: state.begin_forward([0, 1], [1, 99], [None, [-1, *range(98)]])),
            (Unsupported, Unsupported, lambda: state.begin_forward([0, 1], [1, 1], [-1, -1])),
            (NotFound, NotFound, lambda: state.missing_pages([8], [1])),
            (InvalidArgument, InvalidArgument, lambda: state.missing_pages([8], [0])),
            (Unsupported, Unsupported, lambda: state.missing_pages([0, 1], [1, 1], tree)),
            (InvalidArgument, InvalidArgument, lambda: state.end_forward(skipped=[2])),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_fused_qkv(2, qkv)),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_fused_qkv(0, qkv[:, :-1])),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_fused_qkv(0, qkv.double(), mask=qkv)),
            (Unsupported, InvalidArgument, lambda: state.attention_with_fused_qkv(0, qkv[:1], mask=qkv)),
            (Unsupported, Unsupported, lambda: state.attention_with_fused_qkv(0, qkv, mask=qkv)),
            (FailedPrecondition, None, lambda: state.attention_with_fused_qkv(0, qkv)),
            (NotFound, NotFound, lambda: state.debug_get_kv(8)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(8, layer=2)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(8, -1)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(8, 3, 2)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(0, 0, 6)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(0, out=(k,))),  # type: ignore[arg-type]
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(0, out=(k, v))),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, 0, k)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, 0, k, v[:, :, :1])),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, 0, k.double(), v.double())),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, -1, k, v)),
            (NotFound, NotFound, lambda: state.debug_set_kv(8, 0, k, v)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(0, 5, k, v)),
            (None, FailedPrecondition, lambda: state.debug_set_kv(0, 4, k, v)),
            (InvalidArgument, InvalidArgument, lambda: state.rewind_cost(8, -1)),
            (InvalidArgument, InvalidArgument, lambda: state.rewind_cost(0, 6)),
            (NotFound, NotFound, lambda: state.rewind_cost(8, 1)),
            (NotFound, NotFound, lambda: state.reachable(8)),
            (NotFound, NotFound, lambda: state.sequence_length(8)),
            (NotFound, NotFound, lambda: state.cached_length(8)),
            (NotFound, NotFound, lambda: state.pending_nodes(8)),
            (NotFound, NotFound, lambda: state.checkpoints(8)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 0)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 4, 4)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 4, -1)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 4, eviction="never")),
            (NotFound, NotFound, lambda: state.enable_sliding_window_for_seq(8, 4)),
            (Unsupported, Unsupported, lambda: state.enable_sliding_window_for_seq(0, 4)),
            (None, FailedPrecondition, lambda: state.enable_sliding_window_for_seq(0, None)),
            (NotFound, NotFound, lambda: state.get_checkpoint_metadata(8)),
            (InvalidArgument, InvalidArgument, lambda: state.export_page_group(8, 2)),
            (NotFound, NotFound, lambda: state.export_page_group(8, 1)),
            (InvalidArgument, InvalidArgument, lambda: state.prepare_import(0, metadata)),
            (InvalidArgument, InvalidArgument, lambda: state.prepare_import(9, old)),
            (InvalidArgument, InvalidArgument, lambda: state.import_page_group(8, 2, groups)),
            (NotFound, NotFound, lambda: state.import_page_group(8, 1, groups)),
            (FailedPrecondition, FailedPrecondition, lambda: state.import_page_group(0, 1, groups)),
            (NotFound, NotFound, lambda: state.finish_import(8)),
            (FailedPrecondition, FailedPrecondition, lambda: state.finish_import(0)),
            (FailedPrecondition, FailedPrecondition, state.end_forward),
        ]

    for kind, _, call in calls():
        if kind is not None:
            refused(pair, kind, call)
        else:
            call()
    refused(pair, FailedPrecondition, state.abort_forward)
    pair.oracle.debug_set_kv(0, 4, k[0], v[0], 0)
    pair.oracle.debug_set_kv(0, 4, k[1], v[1], 1)
    pair.compare()
    pair.begin([1], [3])
    for _, kind, call in calls():
        if kind is not None:
            refused(pair, kind, call)
        else:
            call()
    pair.abort()
    pair.finish()


def test_verbs_that_edit_are_refused_inside_a_forward() -> None:
    pair = Pair()
    state = pair.state
    pair.add(0, 1)
    pair.append(0, 3)
    metadata, group = state.get_checkpoint_metadata(0), state.export_page_group(0, 0)
    state.prepare_import(5, metadata)
    pair.oracle.prepare_import(5, 3)
    pair.begin([0], [2])
    for call in (
        lambda: state.add_sequence(9),
        lambda: state.remove_sequence(1),
        lambda: state.remove_sequence(5),
        lambda: state.fork_sequence(0, 9),
        lambda: state.popn(0, 1),
        lambda: state.begin_forward([1], [1]),
        lambda: state.debug_set_kv(0, 0, *zeros(pair, 1)),
        lambda: state.prepare_import(9, metadata),
        lambda: state.import_page_group(5, 0, group),
        lambda: state.finish_import(5),
    ):
        refused(pair, FailedPrecondition, call)
    # Reading works, and so does clear.
    assert state.get_checkpoint_metadata(0) == metadata
    assert same_bits(state.export_page_group(0, 0)["k"], group["k"])
    state.check()
    state.clear()
    assert state.empty()
    state.check()
    assert state.num_available_pages() == state.num_pages
    refused(pair, FailedPrecondition, state.end_forward)
    refused(pair, NotFound, lambda: state.finish_import(5))


def test_a_pass_that_is_over_writes_nothing() -> None:
    pair = Pair()
    pair.add(0)
    pair.begin([0], [2])
    old = pair.state.open_pass()
    pair.abort()
    pair.begin([0], [1])
    refused(pair, FailedPrecondition, lambda: old.attend_qkv(0, pair.random(0, 2)))
    q, k, v = split_columns(pair.specs[0], pair.random(0, 2))
    refused(pair, FailedPrecondition, lambda: old.attend(0, q, k, v))


def test_pass_takes_q_k_v_or_one_tensor() -> None:
    pair = Pair()
    pair.add(0)
    pair.begin([0], [3])
    opened = pair.state.open_pass()
    assert opened.positions_T.tolist() == [0, 1, 2]
    qkv = pair.random(0, 3)
    fused = pair.layer(0, qkv)
    stored = pair.state.storage.read(0, pair.state.table.slots(0, 0, 0, 3))
    assert torch.equal(opened.attend_qkv(0, qkv), fused)
    apart = opened.attend(0, *split_columns(pair.specs[0], qkv))
    assert apart.is_contiguous()
    assert torch.equal(apart, fused)
    again = pair.state.storage.read(0, pair.state.table.slots(0, 0, 0, 3))
    assert same_bits(stored.k, again.k)


def test_compute_that_fails_leaves_the_forward_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.add(0)
    pair.append(0, 3)
    pair.begin([0], [1])
    qkv = pair.random(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(SdpaAttention, "run", lambda *args: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            pair.state.attention_with_fused_qkv(0, qkv)
    refused(pair, FailedPrecondition, pair.state.end_forward, "[1]")
    pair.abort()
    # A plan that fails takes the whole call back.
    with monkeypatch.context() as patch:
        patch.setattr(SdpaAttention, "plan", lambda *args: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            pair.state.begin_forward([0], [9])
    pair.compare()
    pair.append(0, 4)
    pair.finish()


@pytest.mark.parametrize("verb", sorted(set(PAGED_REFUSALS) - {"mask", "token_tree_parents"}))
def test_verbs_that_are_not_there_say_so(verb: str) -> None:
    state = Pair().state
    if verb == "enable_sliding_window_for_seq":
        state.add_sequence(0)
        with pytest.raises(Unsupported, match=verb):
            state.enable_sliding_window_for_seq(0, 8)
        return
    with pytest.raises(Unsupported, match=f"^{verb}: "):
        getattr(state, verb)(0, 0, layer=0)


def test_every_verb_of_the_contract_is_there() -> None:
    names = {
        name
        for contract in (AttentionKVCache, RNNState)
        for base in contract.__mro__
        for name in vars(base)
        if not name.startswith("_") and base.__module__.startswith("quire.")
    }
    assert len(names) > 40
    assert {name for name in names if not callable(getattr(PagedKVState, name, None))} == set()
    assert set(PAGED_VERBS) <= names
    assert not set(PAGED_VERBS) & set(PAGED_REFUSALS)


def test_what_a_state_cannot_be_made_of() -> None:
    def make(*specs: object, **more: object) -> PagedKVState:
        return PagedKVState(list(specs), **{"capacity": 8, "backend": SdpaAttention(), **more})  # type: ignore[arg-type]

    rope = RopeSpec(theta=1e4, rotary_dim=8)
    fine = attention()
    for specs, more, kind in (
        ([], {}, InvalidArgument),
        ([fine], {"page_size": 0}, InvalidArgument),
        ([fine], {"capacity": 0}, InvalidArgument),
        ([fine], {"dtype": torch.int8}, InvalidArgument),
        ([attention(4, 3)], {}, InvalidArgument),
        ([attention(dim=4, rotary_dim=6)], {}, InvalidArgument),
        ([attention(rotary_dim=3)], {}, InvalidArgument),
        (
            [FullAttention(num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8, rope=rope, rope_mode="inline")],
            {},
            Unsupported,
        ),
        ([WindowedAttention(num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8, window=4)], {}, Unsupported),
        ([fine, LatentAttention(num_heads=1, row_dim=8, value_dim=4)], {}, Unsupported),
    ):
        with pytest.raises(kind):
            make(*specs, **more)
    assert make(fine, capacity=9, page_size=4).num_available_pages() == 3


def test_layer_ids_are_global() -> None:
    state = PagedKVState([attention()] * 2, capacity=16, backend=SdpaAttention(), first_layer=5)
    state.add_sequence(0)
    state.begin_forward([0], [2])
    qkv = torch.randn(2, num_columns(state.specs[0]))
    with pytest.raises(InvalidArgument, match=r"layer 0; this state has layers 5\.\.6"):
        state.attention_with_fused_qkv(0, qkv)
    state.attention_with_fused_qkv(6, qkv)
    with pytest.raises(FailedPrecondition, match=r"\[5\]"):
        state.end_forward()
    state.end_forward(skipped=[5])
    assert not state.debug_get_kv(0, layer=5)[0].any()
    assert state.debug_get_kv(0, layer=6)[0].any()


# -- debug verbs -------------------------------------------------------------------------------------------------


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
    for mode, rope in (("none", None), ("none", RopeSpec(theta=1e4, rotary_dim=8)), ("normal", None)):
        spec = FullAttention(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8, rope=rope, rope_mode=mode)  # type: ignore[arg-type]
        pair = Pair([spec])
        pair.add(0)
        pair.begin([0], [3])
        qkv = pair.random(0, 3)
        pair.layer(0, qkv)
        pair.end()
        assert same_bits(pair.state.debug_get_kv(0, layer=0)[0], split_columns(spec, qkv)[1])


# -- values that are not numbers ---------------------------------------------------------------------------------


class Twins:
    """Two states with the same history, but that one of them stores NaN or infinity in a sequence. All results but those
    of this sequence (0, or ``excluded``) are equal to the bit, and finite."""

    def __init__(self, bad: float, page_size: int, backend: Callable[[], SdpaAttention] = SdpaAttention) -> None:
        spec = attention(rotary_dim=0)
        self.spec, self.bad = spec, bad
        self.excluded: int | None = 0
        self.states = [PagedKVState([spec], capacity=160, page_size=page_size, backend=backend()) for _ in range(2)]
        self.generator = torch.Generator().manual_seed(1)

    def each(self, act: Callable[[PagedKVState], object]) -> None:
        for state in self.states:
            act(state)

    def add(self, *seq_ids: int) -> None:
        for state in self.states:
            for seq_id in seq_ids:
                state.add_sequence(seq_id)

    def forward(self, ids: list[int], counts: list[int], bad_row: int | None = None) -> None:
        qkv = torch.randn(sum(counts), num_columns(self.spec), generator=self.generator)
        poisoned = qkv.clone()
        if bad_row is not None:
            poisoned[bad_row] = self.bad
        results = []
        for state, values in zip(self.states, (qkv, poisoned), strict=True):
            state.begin_forward(ids, counts)
            results.append(state.attention_with_fused_qkv(0, values))
            state.end_forward()
            state.check()
        start = 0
        for seq_id, count in zip(ids, counts, strict=True):
            if seq_id != self.excluded:
                clean, other = (result[start : start + count] for result in results)
                assert clean.isfinite().all()
                assert same_bits(clean, other), f"sequence {seq_id}"
            start += count


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("page_size", [4, 5, 16])
class TestIsolation:
    def test_neighbours_in_a_batch(self, bad: float, page_size: int) -> None:
        twins = Twins(bad, page_size)
        twins.add(0, 1, 2, 3, 4)
        twins.forward([1, 0, 2, 3], [7, 9, 3, 8], bad_row=12)
        twins.forward([3, 0, 4, 1], [1, 1, 5, 1], bad_row=1)
        twins.forward([2, 0, 1], [20, 30, 1], bad_row=25)
        twins.forward([4, 3, 2, 1, 0], [1, 1, 1, 1, 1])

    def test_first_page_of_the_pool(self, bad: float, page_size: int) -> None:
        """Where padding would look if it did not keep to its own sequence."""
        twins = Twins(bad, page_size)
        twins.add(0, 1, 2, 3)
        twins.forward([0, 1, 2, 3], [2, 3, 20, 9], bad_row=1)
        twins.forward([2, 3, 1], [1, 1, 1])
        twins.forward([1, 3, 2], [1, 4, 2])
        # All four in a pool whose pages lie scattered.
        twins.forward([3, 1], [17, 17])
        twins.forward([1, 2, 0, 3], [1, 1, 1, 1])

    @pytest.mark.parametrize("how", ["remove", "pop", "clear", "abort"])
    def test_recycled_pages(self, bad: float, page_size: int, how: str) -> None:
        twins = Twins(bad, page_size)
        twins.each(lambda state: state.add_sequence(0))
        # Every slot of the pool has held it.
        for start in range(0, 160 // page_size * page_size, page_size):
            counts = [page_size]
            if how == "abort" and start:
                break
            if how == "abort":
                counts = [160 // page_size * page_size]
                values = torch.full((counts[0], num_columns(twins.spec)), bad)
                twins.states[1].begin_forward([0], counts)
                twins.states[1].attention_with_fused_qkv(0, values)
                twins.states[1].abort_forward()
                continue
            qkv = torch.full((page_size, num_columns(twins.spec)), bad)
            for state, values in zip(twins.states, (torch.zeros_like(qkv), qkv), strict=True):
                state.begin_forward([0], counts)
                state.attention_with_fused_qkv(0, values)
                state.end_forward()
        if how == "remove":
            twins.each(lambda state: state.remove_sequence(0))
        elif how == "pop":
            twins.each(lambda state: state.popn(0, state.sequence_length(0)))
        elif how == "clear":
            twins.each(lambda state: state.clear())
        twins.add(1, 2, 3, 4)
        twins.forward([1, 2, 3, 4], [1, 3, 18, 7])
        twins.forward([4, 2, 1, 3], [1, 1, 1, 1])
        twins.forward([4, 2, 3], [2, 6, 1])

    @pytest.mark.parametrize("child_first", [False, True])
    def test_forks_below_the_row(self, bad: float, page_size: int, child_first: bool) -> None:
        twins = Twins(bad, page_size)
        twins.add(0, 5)
        twins.forward([0, 5], [11, 2], bad_row=10)
        twins.each(lambda state: state.fork_sequence(0, 1, 10))
        twins.each(lambda state: state.fork_sequence(0, 2, 9))
        twins.each(lambda state: state.fork_sequence(1, 3, 6))
        if not child_first:
            twins.forward([0, 5], [1, 1])
        twins.forward([2, 5], [1, 1])
        twins.each(lambda state: state.remove_sequence(0))
        # The last owner writes into the page that holds the bad row.
        twins.forward([1, 5], [1, 1])
        twins.forward([3, 1, 2, 5], [2, 1, 1, 17])
        twins.forward([5, 3, 2, 1], [1, 1, 1, 1])

    @pytest.mark.parametrize("target", [6, 7, 8, 9])
    @pytest.mark.parametrize("how", ["pop", "abort", "fork and pop"])
    def test_back_to_before_the_row(self, bad: float, page_size: int, target: int, how: str) -> None:
        """The sequence that stored it itself takes it back, and is as good as any other."""
        twins = Twins(bad, page_size)
        twins.add(0, 1)
        twins.forward([0, 1], [target, 40])
        qkv = torch.zeros(5, num_columns(twins.spec))
        for state, values in zip(twins.states, (qkv, qkv + bad), strict=True):
            state.begin_forward([0], [5])
            state.attention_with_fused_qkv(0, values)
            if how == "abort":
                state.abort_forward()
                continue
            state.end_forward()
            if how == "pop":
                state.popn(0, 5)
                continue
            state.fork_sequence(0, 2)
            state.remove_sequence(0)
            state.popn(2, 5)
        twins.excluded = None
        seq_id = 2 if how == "fork and pop" else 0
        twins.forward([1, seq_id], [1, 1])
        twins.forward([seq_id, 1], [1, 1])

    def test_pages_split_by_set(self, bad: float, page_size: int) -> None:
        twins = Twins(bad, page_size)
        twins.each(lambda state: state.add_sequence(0))
        tokens = 160 // page_size * page_size
        for state, value in zip(twins.states, (0.0, bad), strict=True):
            state.begin_forward([0], [tokens])
            state.attention_with_fused_qkv(0, torch.full((tokens, num_columns(twins.spec)), value))
            state.end_forward()
        twins.each(lambda state: state.remove_sequence(0))
        twins.add(1, 2)
        twins.forward([1, 2], [6, 30])
        twins.each(lambda state: state.fork_sequence(1, 3))
        rows = torch.ones(1, 1, 2, 8)
        twins.each(lambda state: state.debug_set_kv(1, 5, rows, rows))
        twins.forward([2, 1], [1, 1])
        twins.forward([1, 3, 2], [1, 1, 1])

    def test_pages_of_an_import(self, bad: float, page_size: int) -> None:
        twins = Twins(bad, page_size)
        twins.each(lambda state: state.add_sequence(7))
        twins.forward([7], [6])
        exports = [(state.get_checkpoint_metadata(7), state.export_page_group(7, 0)) for state in twins.states]
        twins.each(lambda state: state.add_sequence(0))
        tokens = twins.states[0].num_available_pages() * page_size
        for state, value in zip(twins.states, (0.0, bad), strict=True):
            state.begin_forward([0], [tokens])
            state.attention_with_fused_qkv(0, torch.full((tokens, num_columns(twins.spec)), value))
            state.end_forward()
        twins.each(lambda state: state.remove_sequence(0))
        for state, (metadata, group) in zip(twins.states, exports, strict=True):
            state.prepare_import(1, metadata)
            state.import_page_group(1, 0, group)
            state.finish_import(1)
        twins.each(lambda state: state.add_sequence(2))
        twins.forward([1, 2, 7], [1, 12, 1])
        twins.forward([2, 7, 1], [1, 1, 1])
