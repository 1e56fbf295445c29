"""Layers with a window of their own: what is seen, which pages are freed and in which class only,
where one can go back.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.contracts.layers import FullAttention, RopeSpec, WindowedAttention
from quire.kernels.attention.sdpa import SdpaAttention

from .faces import contract
from .oracle_pages import page_count
from .oracle_values import Spec
from .pair import Pair, attention, num_columns, refused, split_columns, windowed
from .seer import Seer
from .test_forward import compositions
from .test_trees import SEVEN

PAGE_SIZES = (1, 2, 4, 5, 16)


def held(pair: Pair, seq_id: int, index: int) -> list[int]:
    """Which pages of a class are held: 1, or 0 for a null page."""
    pages = pair.state.state.sequences.get(seq_id).tables[index].pages
    expected = [page is not None for page in pair.oracle.sequences[seq_id].tables[index]]
    assert [page >= 0 for page in pages.tolist()] == expected
    return [int(one) for one in expected]


# -- what is seen ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_three_two_one(page_size: int) -> None:
    seer = Seer(3, page_size=page_size)
    seer.add(0)
    views = [view for count in (3, 2, 1) for view in seer.append([0], [count])]
    assert views == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


@pytest.mark.turns(6)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", [1, 3, 5])
def test_chunks_of_up_to_four_windows(window: int, page_size: int) -> None:
    pair = Pair([windowed(window), windowed(window, mode="inline", softcap=3.0)], page_size=page_size, capacity=900)
    pair.add(0, 1)
    for chunk in range(1, 4 * window + 1):
        pair.forward([0, 1], [chunk, 1])
    pair.forward([1, 0], [4 * window, 1])
    pair.finish()


@pytest.mark.product(4)
@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_every_chunking_gives_the_same_rows(window: int) -> None:
    chunkings = compositions(9)
    spec = windowed(window)
    whole = Pair([spec], page_size=2)
    whole.add(0)
    whole.begin([0], [9])
    qkv = whole.random(0, 9)
    exact = whole.oracle.attention_with_fused_qkv(0, *split_columns(spec, qkv))
    state = contract([spec], capacity=10 * len(chunkings), page_size=2, backend=SdpaAttention())
    for seq_id, chunks in enumerate(chunkings):
        state.add_sequence(seq_id)
        done = 0
        for count in chunks:
            state.begin_forward([seq_id], [count])
            out = state.attention_with_fused_qkv(0, qkv[done : done + count])
            state.end_forward()
            error = (out.double() - exact.out[done : done + count]).abs().amax((1, 2))
            assert (error <= exact.out_bound[done : done + count]).all()
            done += count
    state.check()


def test_forked_prefixes() -> None:
    """A window that reaches into a prefix that others share, at every position that is
    reachable."""
    for page_size in PAGE_SIZES:
        pair = Pair([windowed(5), attention()], page_size=page_size, capacity=900)
        pair.add(0)
        for count in (6, 5, 1):
            pair.append(0, count)
        for child, at in enumerate(sorted(pair.oracle.reachable_set(0)), start=1):
            pair.fork(0, child, at)
        children = sorted(pair.oracle.sequences)
        random.Random(page_size).shuffle(children)
        pair.forward(children, [1 + child % 4 for child in children])
        pair.remove(0)
        children.remove(0)
        pair.forward(children, [1] * len(children))
        pair.finish()


def test_trees() -> None:
    seer = Seer(3)
    seer.add(5)
    views = seer.append([0], [7], [SEVEN])
    assert views == [[3, 4, 5], [4, 5, 6], [4, 5, 7], [5, 6, 8], [5, 6, 9], [5, 7, 10], [5, 7, 11]]
    assert seer.append([0], [1], [[3]]) == [[6, 8, 12]]
    seer.state.commit_accepted_token_tree_nodes([0], [7])
    assert seer.stored(0, 5) == [5, 6, 8, 12]
    # (The next token's name is its position.)
    assert seer.append([0], [1]) == [[8, 9, 12]]


@pytest.mark.turns(3)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_with_a_window_of_the_sequence_both_apply(page_size: int) -> None:
    seer = Seer(4, page_size=page_size)
    seer.add(0, 0)
    seer.state.enable_sliding_window_for_seq(0, 5, 2)
    seer.state.enable_sliding_window_for_seq(1, 9, 2)
    first, second = seer.append([0], [8]), seer.append([1], [8])
    # W - s = 3 < W_l = 4: the sink is seen as long as the layer's window reaches it.
    assert first == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7]]
    assert second == [[*range(max(0, q - 3), q + 1)] for q in range(8)]
    specs: list[Spec] = [windowed(4), windowed(12), attention(), windowed(4, mode="inline")]
    pair = Pair(specs, page_size=page_size, capacity=300)
    pair.add(0, 1, 2)
    pair.window(0, 6, 2)
    pair.window(1, 9, 5, "forward")
    for counts in ([3, 9, 2], [5, 1, 1], [1, 1, 14], [1, 20, 1], [9, 1, 1]):
        pair.forward([0, 1, 2], counts)
    pair.forward([0, 1], [7, 7], [SEVEN, SEVEN])
    pair.commit([1, 0], [6, 3])
    pair.forward([0, 1, 2], [1, 2, 3])
    pair.finish()


# -- pages -----------------------------------------------------------------------------------------


def test_pages_are_freed_in_their_class_only() -> None:
    specs: list[Spec] = [windowed(3), attention(), windowed(7), windowed(3)]
    pair = Pair(specs, page_size=2, capacity=40)
    assert [one.window for one in pair.state.state.parts.paged.classes] == [3, None, 7]
    assert [one.layers for one in pair.state.state.parts.paged.classes] == [(0, 3), (1,), (2,)]
    pair.add(0)
    pair.append(0, 10)
    assert pair.state.sequence_pages(0) == (15, 0)
    pair.append(0, 1)
    # From 10 on layers with window 3 see 8 and more, those with window 7 see 4 and more.
    assert held(pair, 0, 0) == [0, 0, 0, 0, 1, 1]
    assert held(pair, 0, 1) == [1] * 6
    assert held(pair, 0, 2) == [0, 0, 1, 1, 1, 1]
    assert [pool.num_free for pool in pair.state.state.sequences.pools] == [18, 14, 16]
    assert pair.free == 14
    assert pair.state.cached_length(0) == 11
    assert pair.state.reachable(0) == [range(1), range(10, 12)]
    words = "position 9 is evicted; reachable: 0..0, 10..11"
    refused(pair, FailedPrecondition, partial(pair.state.popn, 0, 2), words)
    for layer, first in ((0, 8), (1, 0), (2, 4), (3, 8)):
        k, _ = pair.state.debug_get_kv(0, first, 11, layer=layer)
        assert len(k) == 11 - first
        if first:
            words = f"{first}..10"
            refused(pair, FailedPrecondition, partial(pair.state.debug_get_kv, 0, first - 1, layer=layer), words)
            rows = torch.zeros(1, 2, 8)
            refused(pair, FailedPrecondition, partial(pair.state.debug_set_kv, 0, 0, rows, rows, layer=layer), words)
    refused(pair, FailedPrecondition, partial(pair.state.debug_get_kv, 0, 7), "8..10")
    assert pair.state.debug_get_kv(0, 8)[0].shape == (4, 3, 2, 8)
    pair.pop(0, 1)
    pair.append(0, 5)
    pair.pop(0, 15)
    pair.append(0, 4)
    pair.finish()


def test_all_layers_windowed() -> None:
    """The pool of a model without full attention stays flat for ever."""
    window, n = 6, 3
    bound = page_count(window + n, 4) + 1
    pair = Pair([windowed(window), windowed(window, mode="inline")], page_size=4, capacity=bound * 4)
    assert pair.free == bound
    pair.add(0)
    for step in range(50):
        pair.append(0, 1 + step % n)
    assert pair.state.cached_length(0) == pair.state.sequence_length(0) == 99
    pair.finish()


def test_available_pages_are_those_of_the_classes_that_keep_everything() -> None:
    for specs, expected in (
        ([attention(), windowed(3)], 10),
        ([windowed(3), attention()], 10),
        ([windowed(3), windowed(5)], 5),
        ([attention()], 10),
    ):
        pair = Pair(specs, page_size=4, capacity=40, window_capacity=20)  # type: ignore[arg-type]
        assert pair.free == expected
        pair.state.add_sequence(0)
        pair.oracle.add_sequence(0)
        pair.append(0, 5)
        assert pair.free == expected - 2
    assert (
        contract(
            [windowed(3)], capacity=999, window_capacity=7, page_size=2, backend=SdpaAttention()
        ).num_available_pages()
        == 4
    )
    with pytest.raises(InvalidArgument, match="window_capacity 0"):
        contract([windowed(3)], capacity=9, window_capacity=0, backend=SdpaAttention())


def test_missing_pages_are_counted_over_all_classes() -> None:
    pair = Pair([attention(), windowed(3), windowed(5)], page_size=2, capacity=20, window_capacity=10)
    pair.add(0, 1)
    # 10 pages for the full layers, 5 for each of the windowed ones, which hold a whole chunk while
    # it runs.
    assert pair.both("missing_pages", [0], [10]) == 0
    assert pair.both("missing_pages", [0], [12]) == 2
    assert pair.both("missing_pages", [0], [22]) == 1 + 6 + 6
    refused(pair, ResourceExhausted, partial(pair.state.begin_forward, [0], [12]), "6 pages", "5 of 5", "window 3")
    pair.append(0, 10)
    # The next token lets pages 0-7 (window 3) and 0-5 (window 5) go.
    assert pair.both("missing_pages", [0], [1]) == 0
    assert pair.both("missing_pages", [0, 1], [1, 7]) == 1 + 2
    assert pair.both("missing_pages", [1], [1]) == 2
    refused(pair, ResourceExhausted, partial(pair.state.begin_forward, [1], [1]), "1 pages", "0 of 5")
    pair.forward([0, 1], [1, 3])
    pair.finish()


def test_a_fork_of_a_windowed_class_shares_what_is_left() -> None:
    pair = Pair([attention(), windowed(4)], page_size=4, capacity=80)
    pair.add(0)
    pair.append(0, 13)
    pair.append(0, 1)
    assert held(pair, 0, 1) == [0, 0, 1, 1]
    pair.fork(0, 1)
    assert held(pair, 1, 1) == [0, 0, 1, 1]
    assert pair.state.sequence_pages(1) == (6, 6)
    pair.forward([0, 1], [6, 1])
    # The parent has gone on alone; the child keeps what it needs.
    pair.append(0)
    assert held(pair, 0, 1) == [0, 0, 0, 0, 1, 1]
    pair.remove(0)
    assert held(pair, 1, 1) == [0, 0, 1, 1]
    pair.pop(1, 1)
    pair.append(1, 3)
    pair.finish()


def test_set_splits_the_class_of_its_layer_only() -> None:
    pair = Pair([attention(), windowed(4)], page_size=4, capacity=40)
    pair.add(0)
    pair.append(0, 6)
    pair.fork(0, 1)
    free = [pool.num_free for pool in pair.state.state.sequences.pools]
    rows = torch.ones(1, 2, 8)
    pair.state.debug_set_kv(1, 5, rows, rows, layer=1)
    pair.oracle.debug_set_kv(1, 5, rows, rows, 1)
    pair.compare()
    assert [pool.num_free for pool in pair.state.state.sequences.pools] == [free[0], free[1] - 1]
    pair.finish()


def test_abort_gives_back_the_pages_of_every_class() -> None:
    pair = Pair([attention(), windowed(4), windowed(9)], page_size=2, capacity=60)
    pair.add(0, 1)
    pair.forward([0, 1], [11, 3])
    pair.fork(0, 2)
    free = [pool.num_free for pool in pair.state.state.sequences.pools]
    pair.begin([0, 2, 1], [5, 1, 2])
    pair.layer(1, pair.random(1, 8))
    pair.abort()
    # What had left every window stays gone: sequences 0 and 2 shared it.
    assert [pool.num_free for pool in pair.state.state.sequences.pools] == [free[0], free[1] + 4, free[2] + 1]
    pair.forward([0, 2, 1], [5, 1, 2])
    pair.finish()


# -- specifications --------------------------------------------------------------------------------


def test_layers_differ_in_everything() -> None:
    """Head counts, sizes, RoPE and scale are each layer's own; layers of one window share a table
    all the same.
    """
    rope = RopeSpec(theta=50.0, rotary_dim=2, interleaved=True)
    specs: list[Spec] = [
        attention(4, 4, 6, 5),
        WindowedAttention(
            num_heads=2, num_kv_heads=1, head_dim=5, value_dim=7, window=4, rope=rope, rope_mode="normal"
        ),
        WindowedAttention(num_heads=6, num_kv_heads=3, head_dim=2, value_dim=2, window=4, sm_scale=0.9),
        FullAttention(num_heads=1, num_kv_heads=1, head_dim=3, value_dim=1, softcap=0.7, sinks=(1.0,)),
        windowed(2, mode="inline", sinks=(0.1, 0.2, 0.3, 0.4)),
    ]
    pair = Pair(specs, page_size=3, capacity=120)
    assert [one.layers for one in pair.state.state.parts.paged.classes] == [(0, 3), (1, 2), (4,)]
    pair.add(0, 1)
    pair.window(1, 6, 1)
    for counts in ([8, 2], [1, 9], [1, 1], [4, 5]):
        pair.forward([0, 1], counts)
    refused(pair, InvalidArgument, partial(pair.state.debug_get_kv, 0, 16), "layer=")
    pair.finish()


def test_layers_with_windows_that_cannot_be() -> None:
    def make(spec: Any) -> None:
        contract([spec], capacity=8, backend=SdpaAttention())

    fine = windowed(3)
    for wrong, words in (
        (replace(fine, window=0), "window 0"),
        (replace(fine, window=-1), "window -1"),
        (replace(fine, softcap=0.0), "softcap 0.0"),
        (replace(fine, softcap=-2.0), "softcap -2.0"),
        (replace(fine, sinks=(1.0,)), "1 learned sinks for 4"),
        (replace(fine, num_kv_heads=3), "3 KV heads"),
        (replace(fine, rope=None), "normal"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            make(wrong)
    make(fine)


def test_the_layout_says_windows() -> None:
    def layout(*specs: Spec) -> str:
        return contract(specs, capacity=8, backend=SdpaAttention()).get_layout_hash()

    hashes = [layout(windowed(3)), layout(windowed(4)), layout(attention()), layout(windowed(3), attention())]
    assert len(set(hashes)) == 4
    assert layout(replace(windowed(3), softcap=2.0)) == hashes[0]


def test_rows_behind_a_null_page_are_never_read() -> None:
    """NaN that has left the window of a layer, in a page that somebody else gets,
    reaches nobody."""
    spec = windowed(3, rotary_dim=0)
    state = contract([spec], capacity=16, page_size=2, backend=SdpaAttention())
    generator = torch.Generator().manual_seed(1)
    state.add_sequence(0)
    state.add_sequence(1)
    results: list[Tensor] = []
    for ids, counts, bad in (([0], [6], True), ([0], [4], False), ([0], [1], False), ([0, 1], [1, 5], False)):
        qkv = torch.randn(sum(counts), num_columns(spec), generator=generator)
        if bad:
            qkv[:, -16:] = torch.nan
        state.begin_forward(ids, counts)
        results.append(state.attention_with_fused_qkv(0, qkv))
        state.end_forward()
    assert results[2].isfinite().all()
    assert results[3].isfinite().all()


@pytest.mark.parametrize("how", ["pop", "fork"])
def test_back_to_where_only_a_narrower_window_of_the_sequence_has_all_it_needs(how: str) -> None:
    """A sequence whose window was enabled late goes back within it, behind what the layer's own
    window has let go of; without its window it would lack rows there, so it cannot be given up.
    """
    pair = Pair([attention(), windowed(7)], page_size=1)
    pair.add(0)
    for count in (10, 5, 5, 1):
        pair.append(0, count)
    pair.window(0, 5)
    seq_id = 0
    if how == "pop":
        pair.pop(0, 2)
    else:
        seq_id = 1
        pair.fork(0, 1, 19)
    with pytest.raises(FailedPrecondition):
        pair.both("enable_sliding_window_for_seq", seq_id, None)
    with pytest.raises(FailedPrecondition):
        pair.both("enable_sliding_window_for_seq", seq_id, 9)
    pair.append(seq_id, 3)
    pair.finish()


@pytest.mark.parametrize("page_size", [1, 4])
def test_slack_lets_one_more_forward_be_taken_back(page_size: int) -> None:
    """Behind each token one can go back two; without slack, one. What is seen is the same."""
    spec = WindowedAttention(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8, window=5)
    states = [contract([spec], capacity=64, page_size=page_size, slack=slack) for slack in (0, 1)]
    generator, reached = torch.Generator().manual_seed(1), []
    for state in states:
        state.add_sequence(0)
    for length in range(1, 24):
        qkv = torch.randn(1, 4, 8, generator=generator)
        outs = []
        for state in states:
            state.begin_forward([0], [1])
            outs.append(state.attention_with_fused_qkv(0, qkv))
            state.end_forward()
            state.check()
        assert torch.equal(*outs)
        reached.append([length - state.nearest_reachable(0, max(0, length - 2)) for state in states])
    assert all(back <= 2 for _, back in reached)
    assert any(back > 2 for back, _ in reached)
    for state in states:
        # What a pool of these windows holds is enough, whatever the slack.
        assert state.state.sequences.pages_at_most(24, None, 1)[0] >= len(state.state.sequences.get(0).tables[0].held)
    state = states[1]
    state.popn(0, 2)
    state.begin_forward([0], [1])
    state.abort_forward()
    with pytest.raises(InvalidArgument, match="slack"):
        contract([spec], capacity=64, slack=-1)
