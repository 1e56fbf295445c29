"""Attention states and their merge."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.base.errors import InvalidArgument

from .pair import Pair, refused, same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


def test_the_example() -> None:
    state = Pair().state
    one = torch.full((1, 1, 1), 1.0), torch.full((1, 1), 0.5)
    two = torch.full((1, 1, 1), 3.0), torch.full((1, 1), 1.5)
    out, lse = state.merge(*one, *two)
    # Written with four places.
    assert out.item() == pytest.approx(2.4621, abs=5e-5)
    assert lse.item() == pytest.approx(1.8133, abs=5e-5)  # likewise


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
    # A weight is e to a difference of float32 numbers; the result is rounded to float32 or better,
    # then to its type.
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
