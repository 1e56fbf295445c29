"""Windows of sequences with sinks, as the specification tells them: what is seen, what is evicted,
where one can go back.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch

from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.kernels.attention.sdpa import SdpaAttention

from .faces import contract
from .pair import Pair, attention, refused, split_columns
from .seer import Seer
from .test_forward import compositions
from .test_oracle import TABLE, numbers

PAGE_SIZES = (1, 2, 4, 5, 16)
Eviction = Literal["token", "forward"]
EVICTIONS: tuple[Eviction, ...] = ("token", "forward")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WINDOWS = ((20, 6), (25, 4), (30, 8), (35, 3), (40, 7))


# -- the examples ----------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_five_forwards(eviction: Eviction, page_size: int) -> None:
    seer, pair = Seer(page_size=page_size), Pair(page_size=page_size)
    pair.add(0)
    pair.window(0, 6, 2, eviction)
    seer.add(0)
    seer.state.enable_sliding_window_for_seq(0, 6, 2, eviction=eviction)
    for count, after, *columns in TABLE:
        sees, e, relative = columns[eviction == "forward"]
        assert seer.append([0], [count])[-1] == numbers(sees)
        pair.begin([0], [count])
        assert int(pair.state.get_query_positions(relative=True)[-1]) == relative
        assert int(pair.state.get_query_positions()[-1]) == relative + e
        pair.abort()
        pair.append(0, count)
        for state in (seer.state, pair.state):
            assert state.cached_length(0) == state.total_sequence_length() == len(numbers(after))
        # Cached tokens are counted sink first, then window.
        k, _ = pair.state.debug_get_kv(0, layer=0, relative=True)
        for row, position in enumerate(numbers(after)):
            assert torch.equal(k[row], pair.state.debug_get_kv(0, position, position + 1, layer=0)[0][0])
    pair.finish()


def test_a_larger_window_and_one_that_comes_late() -> None:
    seer = Seer()
    seer.add(0, 20)
    seer.state.enable_sliding_window_for_seq(0, 20, 6)
    seer.state.enable_sliding_window_for_seq(1, 10, 2)
    assert seer.state.cached_length(1) == 20
    after = ["0-3", "0-5, 10-23", "0-5, 16-29", "0-5, 17-30", "0-5, 18-31"]
    for count, cached in zip([4, 20, 6, 1, 1], after, strict=True):
        assert seer.append([0], [count])[-1] == numbers(cached)
        assert seer.state.debug_get_kv(0, relative=True)[0].shape[1] == len(numbers(cached))
    assert seer.append([1], [1]) == [numbers("0-1, 13-20")]
    assert seer.state.cached_length(1) == 10


def test_pop_of_a_slid_sequence() -> None:
    pair = Pair(page_size=4)
    pair.add(0)
    pair.window(0, 6, 2)
    for count in (8, 5, 1):
        pair.append(0, count)
    assert pair.state.reachable(0) == [range(3), range(11, 15)]
    words = "position 10 is evicted; reachable: 0..2, 11..14"
    refused(pair, FailedPrecondition, lambda: pair.state.popn(0, 4), words)
    refused(pair, FailedPrecondition, lambda: pair.state.rewind_cost(0, 3), "3", "0..2, 11..14")
    refused(pair, FailedPrecondition, lambda: pair.state.fork_sequence(0, 1, 10), words)
    assert [pair.state.rewind_cost(0, m) for m in (0, 1, 2, 11, 14)] == [0] * 5
    pair.pop(0, 3)
    pair.append(0, 2)
    # From within the sink everything is as it was before it slid.
    pair.pop(0, 11)
    assert pair.state.reachable(0) == [range(3)]
    pair.append(0, 4)
    assert pair.state.reachable(0) == [range(7)]
    pair.window(0, None)
    pair.append(0, 9)
    pair.finish()


def test_what_slides_by_forwards_keeps_one_more() -> None:
    pair = Pair(page_size=4)
    pair.add(0)
    pair.window(0, 6, 2, "forward")
    for count in (8, 5, 1):
        pair.append(0, count)
    # The last forward began at 13 and sees 9 and more: page 4-7 is gone, p = 8.
    assert pair.state.reachable(0) == [range(3), range(12, 15)]
    refused(pair, FailedPrecondition, lambda: pair.state.popn(0, 3), "position 11 is evicted; reachable: 0..2, 12..14")
    pair.pop(0, 2)
    pair.append(0, 1)
    pair.finish()


# -- chunks, lengths, forks ------------------------------------------------------------------------


@pytest.mark.product(6)
@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize(("window", "sink"), WINDOWS)
def test_windows_sinks_and_decodes(window: int, sink: int, eviction: Eviction) -> None:
    pair = Pair(page_size=16, capacity=700)
    pair.add(0, 1, 2)
    for seq_id in (0, 1):
        pair.window(seq_id, window, sink, eviction)
    # 40 into 40, and more than there is room left; in a batch with a sequence that has no window.
    pair.forward([0, 1, 2], [40, 13, 9])
    pair.forward([1, 0], [40, 40])
    pair.forward([2, 0, 1], [17, 3, 1])
    for step in range(20):
        pair.forward([0, 1], [1, 1]) if step % 3 else pair.forward([1, 2, 0], [1, 1, 1])
    pair.finish()


@pytest.mark.product(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 5])
def test_types_head_sizes_and_modes(dtype: torch.dtype, page_size: int) -> None:
    specs = [
        attention(8, 8, 64, 64, rotary_dim=64),
        attention(8, 4, 7, 5, rotary_dim=4, mode="inline"),
        attention(8, 1, 6, 6, rotary_dim=6, mode="none"),
        attention(2, 2, 5, 5, rotary_dim=0, softcap=4.0, sinks=(0.3, -2.0)),
    ]
    pair = Pair(specs, dtype=dtype, page_size=page_size, capacity=300)
    pair.add(0, 1, 2)
    pair.window(0, 7, 2)
    pair.window(1, 9, 0, "forward")
    pair.window(2, 1)
    for counts in ([11, 3, 4], [1, 1, 1], [2, 12, 1], [1, 1, 5]):
        pair.forward([0, 1, 2], counts)
    pair.finish()


@pytest.mark.product(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "sink"), [(6, 2), (4, 0), (5, 4), (1, 0), (12, 3)])
def test_every_chunking_gives_the_same_rows(window: int, sink: int, dtype: torch.dtype) -> None:
    """With ``token``, whatever the chunks were."""
    chunkings = compositions(11)
    spec = attention()
    state = contract([spec], capacity=12 * (len(chunkings) + 1), page_size=2, dtype=dtype, backend=SdpaAttention())
    pair = Pair([spec], dtype=dtype)
    pair.add(0)
    pair.window(0, window, sink)
    pair.begin([0], [11])
    qkv = pair.random(0, 11)
    exact = pair.oracle.attention_with_fused_qkv(0, *split_columns(spec, qkv))
    for seq_id in range(len(chunkings)):
        state.add_sequence(seq_id)
        state.enable_sliding_window_for_seq(seq_id, window, sink)
    done = [0] * len(chunkings)
    for step in range(11):
        ids = [seq_id for seq_id, chunks in enumerate(chunkings) if len(chunks) > step]
        counts = [chunkings[seq_id][step] for seq_id in ids]
        rows = torch.cat([torch.arange(done[i], done[i] + n) for i, n in zip(ids, counts, strict=True)])
        state.begin_forward(ids, counts)
        out = state.attention_with_fused_qkv(0, qkv[rows])
        state.end_forward()
        error = (out.double() - exact.out[rows]).abs().amax((1, 2))
        assert (error <= exact.out_bound[rows]).all()
        for seq_id, count in zip(ids, counts, strict=True):
            done[seq_id] += count
    state.check()
    assert done == [11] * len(chunkings)
    assert {state.cached_length(seq_id) for seq_id in state.state.sequences.ids} == {min(11, window)}


@pytest.mark.turns(3)
@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("pos", [0, 3, 10, 18, -1])
def test_forks_of_windowed_parents(pos: int, eviction: Eviction) -> None:
    """In the sink, at the end, before anything slid; both go on."""
    pair = Pair(page_size=16, capacity=600)
    pair.add(0)
    pair.window(0, 40, 20, eviction)
    pair.append(0, 33)
    pair.fork(0, 1, pos)
    for counts in ([1, 1], [30, 5], [1, 1], [2, 40], [1, 1]):
        pair.forward([0, 1], counts)
    # After it has slid the sink is still a place to fork at, and so is the end.
    for child, at in enumerate((10, 18, 20, pair.oracle.sequences[0].length), start=2):
        pair.fork(0, child, at)
    pair.remove(0)
    pair.forward([2, 3, 4, 5, 1], [1, 3, 50, 1, 1])
    pair.forward([5, 4, 3, 2], [1, 1, 1, 1])
    pair.finish()


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_forks_after_sliding_at_every_reachable_position(page_size: int) -> None:
    pair = Pair(page_size=page_size, capacity=600)
    pair.add(0)
    pair.window(0, 9, 3)
    for count in (7, 6, 1, 1, 4):
        pair.append(0, count)
    for child, at in enumerate(sorted(pair.oracle.reachable_set(0)), start=1):
        pair.fork(0, child, at)
    children = sorted(pair.oracle.sequences)
    random.Random(page_size).shuffle(children)
    pair.forward(children, [1 + child % 3 for child in children])
    pair.forward(children, [1] * len(children))
    pair.finish()


def test_a_fork_keeps_its_positions_for_later() -> None:
    """The child shares the pages and holds them, whatever the parent evicts."""
    pair = Pair(page_size=4, capacity=200)
    pair.add(0)
    pair.window(0, 6, 2)
    pair.append(0, 12)
    pair.fork(0, 1)
    for _ in range(10):
        pair.append(0)
    assert pair.state.reachable(1) == [range(13)]
    assert pair.state.reachable(0) == [range(3), range(19, 23)]
    pair.pop(1, 9)
    pair.append(1)
    pair.finish()


def test_a_child_may_drop_the_window_while_nothing_is_evicted() -> None:
    pair = Pair(page_size=4)
    pair.add(0)
    pair.window(0, 6, 2)
    pair.append(0, 5)
    pair.fork(0, 1)
    pair.window(1, None)
    pair.forward([0, 1], [8, 8])
    assert (pair.state.cached_length(0), pair.state.cached_length(1)) == (6, 13)
    pair.fork(0, 2)
    for seq_id in (0, 2):
        for window in (None, 6, 30):
            refused(
                pair,
                FailedPrecondition,
                lambda seq_id=seq_id, window=window: pair.state.enable_sliding_window_for_seq(seq_id, window),  # type: ignore[misc]
                str(seq_id),
                "evicted",
            )
    pair.fork(0, 3, 2)
    pair.window(3, 30)
    pair.append(3, 20)
    pair.finish()


def test_a_window_may_be_replaced_while_nothing_is_evicted() -> None:
    pair = Pair(page_size=2)
    pair.add(0)
    pair.window(0, 9, 3)
    pair.append(0, 8)
    for window, sink in ((20, 0), (4, 1), (8, 7), (5, 2)):
        pair.window(0, window, sink)
        assert pair.state.cached_length(0) == 8
    pair.append(0)
    assert pair.state.cached_length(0) == 5
    pair.finish()


def test_a_refused_or_aborted_forward_evicts_nothing_that_is_needed() -> None:
    pair = Pair(page_size=4, capacity=40)
    pair.add(0, 1)
    pair.append(0, 20)
    pair.window(0, 10, 2)
    pair.append(1, 4)
    refused(pair, ResourceExhausted, lambda: pair.state.begin_forward([0, 1], [1, 30]))
    assert pair.state.reachable(0) == [range(21)]
    # The cut is made in ``begin_forward``, and what an abort gives back is nothing that had left
    # the window.
    pair.begin([0], [1])
    pair.abort()
    assert pair.state.sequence_length(0) == 20
    assert pair.state.reachable(0) == [range(3), range(19, 21)]
    pair.append(0, 3)
    pair.finish()


def test_what_is_no_window() -> None:
    pair = Pair()
    pair.add(0)
    for window, sink in ((0, 0), (-3, 0), (4, 4), (4, 5), (4, -1), (1, 1)):
        refused(
            pair,
            InvalidArgument,
            lambda window=window, sink=sink: pair.state.enable_sliding_window_for_seq(0, window, sink),  # type: ignore[misc]
            str(window if window < 1 else sink),
        )
    pair.window(0, 1, 0)
    pair.window(0, 4, 3)
