"""Attention in parts: self and past, all at once, the K and V of another layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported

from .machine import GEOMETRIES
from .oracle_forward import States
from .oracle_values import Spec
from .pair import Pair, attention, num_columns, refused, same_bits, split_columns, windowed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TREE = [-1, 0, 0, 1, 1]
Scope = Literal["past", "all"]


# -- self, past, all -------------------------------------------------------------------------------


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
    """A forward in which each layer is computed in all ways, which must agree with the oracle's
    single one.
    """
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


@pytest.mark.product(6)
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
            assert torch.allclose(alone[0][0], other[0][0], atol=1e-6)  # float32 in two orders, numbers about 1
            assert torch.allclose(alone[1][0], other[1][0], atol=1e-6)  # likewise
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
    assert torch.allclose(fused, merged, atol=1e-6)  # float32 in two orders, numbers about 1
    assert not torch.allclose(fused, other_fused, atol=1e-3)  # a thousand times as much


# -- the K and V of another layer ------------------------------------------------------------------


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
        # What was given is used also if the source has stored something else, and nothing of it is
        # stored.
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


# -- refusals --------------------------------------------------------------------------------------


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
        ("cross_attention", (0, q), {"scope": "future"}, "'past' or 'all'; got 'future'"),
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
