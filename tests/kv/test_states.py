"""Attention in parts: merge, self and past, all at once, the K and V of another layer, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quire.errors import FailedPrecondition, InvalidArgument, Unsupported

from .machine import GEOMETRIES
from .oracle_forward import States
from .oracle_values import Spec
from .pair import Pair, attention, num_columns, refused, same_bits, split_columns, windowed
from .seer import Seer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TREE = [-1, 0, 0, 1, 1]
Scope = Literal["past", "all"]


def random_states(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(count):
        lse = torch.randn(6, 3, generator=generator) * 5
        states.append((torch.randn(6, 3, 4, generator=generator).to(dtype), lse))
    # Rows without a past, and rows with nothing at all.
    for out, lse in states[1:]:
        out[2], lse[2] = 0.0, -math.inf
    for out, lse in states:
        out[4], lse[4] = 0.0, -math.inf
    return states


# -- merge -------------------------------------------------------------------------------------------------------


def test_the_example() -> None:
    state = Pair().state
    one = torch.full((1, 1, 1), 1.0), torch.full((1, 1), 0.5)
    two = torch.full((1, 1, 1), 3.0), torch.full((1, 1), 1.5)
    out, lse = state.merge(*one, *two)
    assert out.item() == pytest.approx(2.4621, abs=5e-5)
    assert lse.item() == pytest.approx(1.8133, abs=5e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_merge_of_random_parts(dtype: torch.dtype) -> None:
    state = Pair().state
    (o1, l1), (o2, l2), (o3, l3) = random_states(3, dtype)
    nothing = torch.zeros_like(o1), torch.full_like(l1, -math.inf)
    kept = [x.clone() for x in (o1, l1, o2, l2)]
    out, lse = state.merge(o1, l1, o2, l2)
    assert all(same_bits(a, b) for a, b in zip((o1, l1, o2, l2), kept, strict=True))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # Against the definition in float64.
    weights = [x.double().exp().unsqueeze(-1) for x in (l1, l2)]
    total = sum(weights, torch.zeros(()))
    exact = torch.where(total > 0, (weights[0] * o1.double() + weights[1] * o2.double()) / total, torch.zeros(()))
    unit, unit32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    # A weight is e to a difference of float32 numbers; the result is rounded to float32 or better, then to its type.
    bound = o1.double().abs().amax() * (unit + 8 * unit32 * (1 + l1[l1.isfinite()].abs().amax()))
    assert ((out.double() - exact).abs() <= bound).all()
    assert (out[4] == 0).all()
    assert lse[4].isneginf().all()
    assert not out.isnan().any()
    # Commutative and with an identity, to the bit; associative up to rounding.
    assert all(same_bits(a, b) for a, b in zip(state.merge(o2, l2, o1, l1), (out, lse), strict=True))
    assert all(same_bits(a, b) for a, b in zip(state.merge(o1, l1, *nothing), (o1, l1), strict=True))
    assert all(same_bits(a, b) for a, b in zip(state.merge(*nothing, o1, l1), (o1, l1), strict=True))
    left = state.merge(out, lse, o3, l3)
    right = state.merge(o1, l1, *state.merge(o2, l2, o3, l3))
    assert (left[0].double() - right[0].double()).abs().max() <= 4 * bound
    finite = left[1].isfinite()
    assert (finite == right[1].isfinite()).all()
    assert ((left[1] - right[1]).abs()[finite] <= 8 * unit32 * (1 + left[1].abs()[finite])).all()
    # In place it is the same, in the first two.
    got = state.merge_attn_output_inplace(o1, l1, o2, l2)
    assert got[0] is o1
    assert got[1] is l1
    assert same_bits(o1, out)
    assert same_bits(l1, lse)
    assert same_bits(o2, kept[2])


def test_merge_of_extremes() -> None:
    state = Pair().state
    ones = torch.ones(1, 1, 2)
    for low, high in ((-300.0, 300.0), (-3e38, 3e38), (88.9, 89.1)):
        out, lse = state.merge(ones, torch.tensor([[low]]), 3 * ones, torch.tensor([[high]]))
        expected = 3.0 - 2.0 / (1 + math.exp(min(700.0, high - low)))
        assert torch.allclose(out, torch.full_like(out, expected))
        assert lse.item() == pytest.approx(high + math.log1p(math.exp(max(-700.0, low - high))))


def test_merges_that_are_refused() -> None:
    pair = Pair()
    (o1, l1), (o2, l2) = random_states(2)
    wrong = [
        (o1[:5], l1, o2, l2),
        (o1, l1[:, :2], o2, l2),
        (o1, l1, o2[..., :2], l2),
        (o1, l1, o2.half(), l2),
        (o1, l1.half(), o2, l2),
        (o1.long(), l1, o2.long(), l2),
        (o1[0], l1[0], o2[0], l2[0]),
    ]
    for args in wrong:
        kept = [x.clone() for x in args]
        for verb in (pair.state.merge, pair.state.merge_attn_output_inplace):
            refused(pair, InvalidArgument, partial(verb, *args), "merge")
        assert all(same_bits(a, b) for a, b in zip(args, kept, strict=True) if a.is_floating_point())


# -- self, past, all ---------------------------------------------------------------------------------------------


def part(pair: Pair, layer: int, q: Tensor, scope: Scope, **more: Any) -> tuple[Tensor, Tensor]:
    tokens = pair.oracle.open_forward().tokens
    got = pair.state.cross_attention(layer, q, scope=scope, **more)
    pair.oracle.cross_attention(layer, q[:tokens], scope, more.get("sm_scale")).check(*got)
    return got


def own(pair: Pair, layer: int, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    tokens = pair.oracle.open_forward().tokens
    got = pair.state.self_attention(layer, q, k, v, **more)
    exact = pair.oracle.self_attention(
        layer, q[:tokens], k[:tokens], v[:tokens], more.get("sm_scale"), more.get("mask")
    )
    exact.check(*got)
    return got


def append(pair: Pair, layer: int, k: Tensor, v: Tensor) -> None:
    tokens = pair.oracle.open_forward().tokens
    pair.state.append_kv(layer, k, v)
    pair.oracle.append_kv(layer, k[:tokens], v[:tokens])


def in_parts(pair: Pair, ids: Sequence[int], counts: Sequence[int], parents: Any = None) -> None:
    """A forward in which each layer is computed in all ways, which must agree with the oracle's single one."""
    pair.begin(ids, counts, parents)
    for layer, spec in enumerate(pair.specs):
        q, k, v = pair.parts(layer, sum(counts))
        past = part(pair, layer, q, "past")
        mine = own(pair, layer, q, k, v)
        append(pair, layer, k, v)
        assert all(same_bits(a, b) for a, b in zip(past, part(pair, layer, q, "past"), strict=True))
        part(pair, layer, q, "all")
        whole: States = pair.oracle.cross_attention(layer, q, "all")
        whole.check(*pair.state.merge(*mine, *past))
        if not spec.sinks:
            fused = pair.layer(layer, torch.cat([x.flatten(1) for x in (q, k, v)], 1))
            whole.check(fused)
    pair.end()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_self_and_past_are_the_whole(geometry: str, page_size: int) -> None:
    """Rows without a past, decodes, long chunks, trees, windows and sinks, in one batch."""
    pair = Pair(GEOMETRIES[geometry], page_size=page_size, capacity=500)
    pair.add(0, 1, 2, 3)
    pair.window(1, 6, 2)
    pair.window(2, 5, 1, "forward")
    pair.forward([1, 2], [9, 11])
    in_parts(pair, [0, 1, 2, 3], [1, 3, 1, 18])
    in_parts(pair, [3, 0, 1, 2], [1, 5, 5, 2], [None, TREE, TREE, [-1, -1]])
    in_parts(pair, [2, 3, 1], [2, 1, 3], [[0, 1], None, [2, 4, 5]])
    pair.commit([1, 2, 0], [7, 3, -1])
    in_parts(pair, [0, 1, 2, 3], [20, 1, 1, 2])
    pair.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype: torch.dtype) -> None:
    specs: list[Spec] = [attention(8, 2, 64, 32, rotary_dim=32), attention(8, 8, 5, 9, rotary_dim=0, softcap=2.5)]
    pair = Pair(specs, dtype=dtype, capacity=200)
    pair.add(0, 1)
    pair.window(1, 6, 1)
    in_parts(pair, [0, 1], [7, 8])
    in_parts(pair, [1, 0], [3, 1])
    pair.finish()


def test_scope_all_in_a_batch_of_one_and_three() -> None:
    """A neighbour of length 3 does not change what a decode sees."""
    pair = Pair(page_size=4)
    pair.add(0, 1, 2)
    pair.forward([0, 1], [5, 6])
    values = [pair.parts(layer, 4) for layer in range(2)]
    results = []
    for ids, counts in (([0, 1], [1, 3]), ([0], [1]), ([0, 2], [1, 1])):
        pair.begin(ids, counts)
        for layer, (q, k, v) in enumerate(values):
            tokens = sum(counts)
            append(pair, layer, k[:tokens], v[:tokens])
            results.append(part(pair, layer, q[:tokens], "all"))
            part(pair, layer, q[:tokens], "past")
        pair.abort()
    for layer in range(2):
        alone = results[2 + layer]
        for other in (results[layer], results[4 + layer]):
            assert torch.allclose(alone[0][0], other[0][0], atol=1e-6)
            assert torch.allclose(alone[1][0], other[1][0], atol=1e-6)
    pair.finish()


def test_nothing_to_see() -> None:
    pair = Pair([attention(), attention(rotary_dim=4, mode="inline"), windowed(1)])
    pair.add(0, 1)
    pair.append(1, 2)
    pair.begin([0, 1], [2, 1])
    for layer in range(3):
        q, k, v = pair.parts(layer, 3)
        out, lse = part(pair, layer, q, "past")
        assert (out[:2] == 0).all()
        assert lse[:2].isneginf().all()
        assert lse[2].isfinite().all() == (layer < 2)
        append(pair, layer, k, v)
    pair.end()
    pair.begin([0], [1])
    for layer in range(3):
        q, k, v = pair.parts(layer, 1)
        out, lse = own(pair, layer, q, k, v, mask=torch.zeros(1, dtype=torch.bool))
        assert (out == 0).all()
        assert lse.isneginf().all()
        assert (pair.layer(layer, pair.random(layer, 1), mask=torch.zeros(3, dtype=torch.bool)) == 0).all()
    pair.end()


def test_padding_and_out_of_states() -> None:
    pair = Pair()
    pair.add(0, 1)
    pair.forward([0, 1], [3, 9])
    pair.begin([0, 1], [2, 1])
    q, k, v = pair.parts(0, 7)
    for x in (q, k, v):
        x[3:] = math.nan
    append(pair, 0, k, v)
    verbs: list[Callable[..., tuple[Tensor, Tensor]]] = [
        partial(own, pair, 0, q, k, v),
        partial(part, pair, 0, q, "past"),
        partial(part, pair, 0, q, "all"),
    ]
    for act in verbs:
        out, lse = act()
        assert (out[3:] == 0).all()
        assert lse[3:].isneginf().all()
        assert out.shape == (7, 4, 8)
        assert lse.shape == (7, 4)
        given = torch.full((7, 4, 8), 7.0), torch.full((7, 4), 7.0)
        again = act(out=given)
        assert again[0] is given[0]
        assert again[1] is given[1]
        assert same_bits(given[0][:3], out[:3])
        assert (given[0][3:] == 7).all()
        assert (given[1][3:] == 7).all()
    shared = pair.state.attention_with_shared_kv(0, q)
    assert (shared[3:] == 0).all()
    out = torch.full((7, 4, 8), 7.0)
    assert pair.state.attention_with_shared_kv(0, q, out=out) is out
    assert same_bits(out[:3], shared[:3])
    assert (out[3:] == 7).all()
    append(pair, 1, *pair.parts(1, 5)[1:])
    pair.end()


def test_heads_and_sizes_that_are_not_the_layers() -> None:
    """As the expanded form of latent attention has them: all heads, other sizes for K and V."""
    pair = Pair([attention(4, 2, 8, 8, rotary_dim=6), attention(4, 1, 8, 8, mode="inline", softcap=1.5)])
    pair.add(0, 1)
    pair.window(1, 5, 2)
    pair.forward([0, 1], [4, 9])
    pair.begin([0, 1], [6, 7])
    generator = torch.Generator().manual_seed(6)
    for heads, dk, dv in ((4, 12, 5), (1, 6, 9), (2, 8, 3), (4, 7, 7)):
        q, k, v = (torch.randn(13, n, d, generator=generator) for n, d in ((4, dk), (heads, dk), (heads, dv)))
        for layer in range(2):
            out, _ = own(pair, layer, q, k, v, sm_scale=12**-0.5)
            assert out.shape == (13, 4, dv)
    pair.abort()


def test_learned_sinks_belong_to_the_fused_verb() -> None:
    sunk, plain = attention(sinks=(0.5, -1.0, 3.0, 0.0)), attention()
    pair, without = Pair([sunk], seed=1), Pair([plain], seed=1)
    results = []
    for one in (pair, without):
        one.add(0)
        one.append(0, 4)
        one.begin([0], [3])
        q, k, v = one.parts(0, 3)
        append(one, 0, k, v)
        results.append((part(one, 0, q, "all"), one.layer(0, torch.cat([x.flatten(1) for x in (q, k, v)], 1))))
        one.end()
    (parts, fused), (other_parts, other_fused) = results
    assert all(same_bits(a, b) for a, b in zip(parts, other_parts, strict=True))
    # One more state (0, sink), merged exactly once.
    sinks = torch.tensor(sunk.sinks).expand(3, 4).contiguous()
    merged, _ = pair.state.merge(*parts, torch.zeros_like(parts[0]), sinks)
    assert torch.allclose(fused, merged, atol=1e-6)
    assert not torch.allclose(fused, other_fused, atol=1e-3)


# -- the K and V of another layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_shared_kv(window: int | None, mode: Any) -> None:
    """Appends of 3, 2 and 1; the second layer has no rows of its own."""
    source = attention(mode=mode) if window is None else windowed(window, mode=mode)
    pair = Pair([source, attention()], page_size=2)
    pair.add(0, 1)
    pair.window(1, 5, 1)
    for count in (3, 2, 1):
        pair.begin([0, 1], [count, count + 1])
        tokens = 2 * count + 1
        q, k, v = pair.parts(0, tokens)
        refused(pair, FailedPrecondition, partial(pair.state.attention_with_shared_kv, 0, q), "layer 0", "stored")
        given = pair.state.attention_with_shared_kv(0, q, k, v)
        pair.oracle.attention_with_shared_kv(0, q, k, v).check(given)
        # What was given is used also if the source has stored something else, and nothing of it is stored.
        fused = pair.layer(0, pair.random(0, tokens))
        rows = [pair.state.debug_get_kv(seq_id, layer=0)[0] for seq_id in (0, 1)] if count == 3 else []
        pair.oracle.attention_with_shared_kv(0, q, k, v).check(pair.state.attention_with_shared_kv(0, q, k, v))
        pair.oracle.attention_with_shared_kv(0, q).check(pair.state.attention_with_shared_kv(0, q))
        scaled = pair.state.attention_with_shared_kv(0, q, sm_scale=0.7)
        pair.oracle.attention_with_shared_kv(0, q, scale=0.7).check(scaled)
        assert all(not len(kept) for kept in rows)
        assert fused.shape == given.shape
        pair.end(skipped=[1])
    pair.finish()


def test_shared_kv_of_a_layer_with_learned_sinks() -> None:
    pair = Pair([attention(sinks=(0.0,) * 4)])
    pair.add(0)
    pair.begin([0], [1])
    q, k, v = pair.parts(0, 1)
    refused(pair, Unsupported, lambda: pair.state.attention_with_shared_kv(0, q, k, v), "layer 0", "sink")
    pair.abort()
    refused(pair, Unsupported, lambda: pair.state.attention_with_shared_kv(0, q), "sink")


# -- masks -------------------------------------------------------------------------------------------------------


def test_a_mask_takes_the_place_of_the_order() -> None:
    """An image of four tokens sees itself in both directions; the other entry is a chain as ever."""
    seer = Seer()
    seer.add(3, 2)
    image = torch.ones(4, 7, dtype=torch.bool)
    causal = torch.ones(2, 4, dtype=torch.bool).tril(2)
    views = seer.append([0, 1], [4, 2], mask=torch.cat((image.flatten(), causal.flatten())))
    assert views == [[*range(7)]] * 4 + [[0, 1, 2], [0, 1, 2, 3]]
    # Next time order rules again.
    assert seer.append([0], [2]) == [[*range(8)], [*range(9)]]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_windows_still_apply_under_a_mask(page_size: int) -> None:
    seer = Seer(page_size=page_size)
    seer.add(9, 9)
    seer.state.enable_sliding_window_for_seq(0, 6, 2)
    seer.state.enable_sliding_window_for_seq(1, 6, 2, eviction="forward")
    mask = torch.ones(2 * 3 * 12, dtype=torch.bool)
    views = seer.append([0, 1], [3, 3], mask=mask)
    later = [9, 10, 11]
    assert views == [
        [0, 1, *range(6, 12)],
        [0, 1, *range(7, 12)],
        [0, 1, *range(8, 12)],
        *[[0, 1, 5, 6, 7, 8, *later]] * 3,
    ]
    local = Seer(4, page_size=page_size)
    local.add(9)
    assert local.append([0], [3], mask=mask[:36]) == [[*range(6, 12)], [*range(7, 12)], [*range(8, 12)]]


def test_a_mask_over_a_tree() -> None:
    """Columns are positions, then nodes in order of appending; a node may be made to see its sibling."""
    seer = Seer()
    seer.add(2)
    seer.append([0], [3], [[-1, 0, 0]])
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, [1, 4, 5]] = True
    assert seer.append([0], [2], [[1, 2]], mask=mask.flatten()) == [[1, 4, 5], []]
    assert seer.append([0], [1], [[4]]) == [[0, 1, 2, 4, 6, 7]]


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_random_masks(geometry: str) -> None:
    pair = Pair(GEOMETRIES[geometry], page_size=2, capacity=300)
    pair.add(0, 1, 2)
    pair.window(1, 6, 2)
    pair.window(2, 5, 1, "forward")
    pair.forward([0, 1, 2], [7, 9, 10])
    generator = torch.Generator().manual_seed(3)
    for ids, counts, parents in (
        ([2, 0, 1], [3, 1, 5], None),
        ([0, 1], [5, 5], [TREE, TREE]),
        ([1, 2], [2, 20], [[0, 4], None]),
    ):
        pair.begin(ids, counts, parents)
        for density in (0.2, 0.8):
            mask = torch.rand(pair.oracle.mask_size(), generator=generator) < density
            mine = torch.rand(pair.oracle.mask_size("new"), generator=generator) < density
            for layer in range(len(pair.specs)):
                own(pair, layer, *pair.parts(layer, sum(counts)), mask=mine)
                pair.layer(layer, pair.random(layer, sum(counts)), mask=mask)
        pair.end()


def test_masks_that_are_refused() -> None:
    pair = Pair()
    pair.add(0, 1)
    pair.forward([0, 1], [3, 2])
    pair.begin([0, 1], [2, 1])
    qkv, (q, k, v) = pair.random(0, 3), pair.parts(0, 3)
    fused, mine = pair.state.attention_with_fused_qkv, pair.state.self_attention
    good, small = torch.ones(2 * 5 + 3, dtype=torch.bool), torch.ones(5, dtype=torch.bool)
    for mask, words in (
        (good[:-1], ("12", "13")),
        (torch.cat((good, good[:1])), ("14", "13")),
        (good.float(), ("float32", "bool")),
        (good.view(1, -1), ("(1, 13)",)),
        (small, ("5", "13")),
        (good.to("meta"), ("meta", "cpu")),
    ):
        refused(pair, InvalidArgument, partial(fused, 0, qkv, mask=mask), "mask", *words)
    for mask, words in ((small[:-1], ("4", "5")), (good, ("13", "5")), (small.long(), ("int64", "bool"))):
        refused(pair, InvalidArgument, partial(mine, 0, q, k, v, mask=mask), "mask", *words)
    pair.layer(0, qkv, mask=good)
    own(pair, 0, q, k, v, mask=small)
    pair.abort()
    refused(pair, FailedPrecondition, lambda: fused(0, qkv, mask=good))
    refused(pair, InvalidArgument, lambda: fused(0, qkv, mask=good.float()), "mask")


# -- refusals ----------------------------------------------------------------------------------------------------


def test_parts_that_are_refused() -> None:
    pair = Pair([attention(value_dim=5), attention(value_dim=5)])
    state = pair.state
    pair.add(0)
    pair.append(0, 4)
    q, k, v = pair.parts(0, 2)
    shapes: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        ("append_kv", (2, k, v), {}, "layer 2; this state has layers 0..1"),
        ("append_kv", (0, k[:, :1], v), {}, "(2, 1, 8)"),
        ("append_kv", (0, k, v[..., :4]), {}, "(2, 2, 4)"),
        ("append_kv", (0, k.double(), v), {}, "float64"),
        ("append_kv", (0, k.flatten(1), v), {}, "(2, 16)"),
        ("self_attention", (-1, q, k, v), {}, "layer -1"),
        ("self_attention", (0, q[:, :3], k, v), {}, "(2, 3, 8)"),
        ("self_attention", (0, q, k[..., :6], v), {}, "(2, 2, 6)"),
        ("self_attention", (0, q, k[:, [0, 1, 1]], v[:, [0, 1, 1]]), {}, "3"),
        ("self_attention", (0, q, k, v[:, :1]), {}, "(2, 1, 5)"),
        ("self_attention", (0, q, k, v.half()), {}, "float16"),
        ("self_attention", (0, q[..., :2], k[..., :2], v), {}, "4 columns"),
        ("self_attention", (0, q, k, v), {"out": (q, q)}, "out"),
        ("cross_attention", (0, q), {"scope": "future"}, "'future'; 'past' or 'all'"),
        ("cross_attention", (0, q[..., :4]), {}, "(2, 4, 4)"),
        ("cross_attention", (0, q.half()), {}, "float16"),
        ("cross_attention", (0, q), {"out": (torch.zeros(2, 4, 5), torch.zeros(2, 3))}, "out"),
        ("cross_attention", (0, q), {"out": (torch.zeros(2, 4, 5), torch.zeros(2, 4).half())}, "out"),
        ("cross_attention", (0, q), {"out": torch.zeros(2, 4, 5)}, "out"),
        ("cross_attention", (0, q), {"out": (q[..., :5], torch.zeros(2, 4))}, "out"),
        ("attention_with_shared_kv", (0, q, k), {}, "one of k and v"),
        ("attention_with_shared_kv", (0, q, None, v), {}, "one of k and v"),
        ("attention_with_shared_kv", (0, q, k[..., :4], v), {}, "(2, 2, 4)"),
        ("attention_with_shared_kv", (5, q), {}, "layer 5"),
        ("attention_with_shared_kv", (0, q, k, v), {"out": q[..., :5]}, "out"),
    ]
    closed: list[tuple[str, tuple[Any, ...]]] = [
        ("append_kv", (0, k, v)),
        ("self_attention", (0, q, k, v)),
        ("cross_attention", (0, q)),
        ("attention_with_shared_kv", (0, q)),
        ("attention_with_shared_kv", (0, q, k, v)),
    ]
    for opened in (False, True):
        for verb, args, more, word in shapes:
            refused(pair, InvalidArgument, partial(getattr(state, verb), *args, **more), word)
        if not opened:
            for verb, args in closed:
                refused(pair, FailedPrecondition, partial(getattr(state, verb), *args), "forward")
            pair.begin([0], [2])
    for verb, args in closed:
        short = [x[:1] if isinstance(x, Tensor) else x for x in args]
        refused(pair, InvalidArgument, partial(getattr(state, verb), *short), "2 rows")
    refused(pair, FailedPrecondition, lambda: state.cross_attention(0, q, scope="all"), "layer 0", "append")
    append(pair, 0, k, v)
    part(pair, 0, q, "all")
    refused(pair, FailedPrecondition, lambda: state.cross_attention(1, q, scope="all"), "layer 1")
    refused(pair, FailedPrecondition, lambda: state.end_forward(), "[1]")
    append(pair, 1, k, v)
    pair.end()
    assert num_columns(pair.specs[0]) == split_columns(pair.specs[0], pair.random(0, 1))[0].numel() + 16 + 10
