"""Forwards of the KV state specification, one by one: pieces, chunkings, padding, order of layers,
abort, queries.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.contract import ContractState

from .faces import contract
from .oracle import attention_bound
from .pair import Pair, attention, num_columns, refused, same_bits, split_columns

PAGE_SIZES = (1, 2, 4, 5, 16)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.turns(4)
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


@pytest.mark.turns(6)
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


def row_bounds(state: ContractState, seq_id: int, layer: int, qkv: Tensor) -> Tensor:
    """How far each row of a sequence's attention may be from the exact result, ``[T, 1, 1]``."""
    k, v = state.debug_get_kv(seq_id, layer=layer)
    keys = list(zip(k, v, strict=True))
    q_THD, _, _ = split_columns(state.state.parts.paged.specs[layer], qkv)
    bounds = [
        attention_bound(q, keys[: row + 1], state.state.parts.paged.specs[layer].scale, state.dtype)
        for row, q in enumerate(q_THD)
    ]
    return torch.tensor(bounds).view(-1, 1, 1)


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_chunking_gives_the_same_rows(dtype: torch.dtype) -> None:
    chunkings = compositions(12)
    assert len(chunkings) == 2**11
    spec = attention()
    state = contract([spec], capacity=15 * (len(chunkings) + 1), page_size=5, dtype=dtype, backend=SdpaAttention())
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
    state = contract([spec], capacity=400, page_size=4, backend=SdpaAttention())
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


def test_scale_of_the_call_or_of_the_spec() -> None:
    """``sm_scale`` of the call, else of the spec, else Dk ** -0.5: scaling the queries does the
    same.
    """
    plain = attention(rotary_dim=0)
    results: list[Tensor] = []
    for spec, scale, factor in (
        (plain, None, 1.0),
        (plain, 4 * plain.scale, 0.25),
        (replace(plain, sm_scale=4 * plain.scale), None, 0.25),
        (replace(plain, sm_scale=9.0), plain.scale, 1.0),
    ):
        state = contract([spec], capacity=64, backend=SdpaAttention())
        state.add_sequence(0)
        for count in (9, 1, 20):
            state.begin_forward([0], [count])
            qkv = torch.randn(count, num_columns(spec), generator=torch.Generator().manual_seed(count))
            qkv[:, : spec.num_heads * spec.head_dim] *= factor
            result = state.attention_with_fused_qkv(0, qkv, sm_scale=scale)
            state.end_forward()
        if not results:
            bound = 2 * row_bounds(state, 0, 0, torch.cat([torch.zeros(10, num_columns(plain)), qkv]))[10:]
        results.append(result)
    for result in results[1:]:
        assert ((result - results[0]).abs() <= bound).all()


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


def books(state: ContractState) -> list[Any]:
    """Who holds which page."""
    tables = [
        (
            seq_id,
            state.sequence_length(seq_id),
            [table.pages.tolist() for table in state.state.sequences.get(seq_id).tables],
        )
        for seq_id in state.state.sequences.ids
    ]
    return [tables, [pool.references.tolist() for pool in state.state.sequences.pools], state.num_splits]


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_abort_after_each_layer_then_the_same_forward(stop: int) -> None:
    pair = Pair([attention()] * 3, capacity=80)
    pair.add(0, 1)
    pair.forward([0, 1], [6, 8])
    pair.fork(0, 2)
    before = books(pair.state)
    free = pair.free
    values = [pair.random(layer, 8) for layer in range(3)]
    pair.begin([0, 1, 2], [1, 2, 5])
    partly = [pair.layer(layer, values[layer]) for layer in range(stop)]
    pair.abort()
    assert pair.free == free
    assert books(pair.state) == before
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
    assert type(pair.state.state.sequences.ids[0]) is int
