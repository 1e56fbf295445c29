"""Norms against float64, and that each rounds once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.nn.norm import LayerNorm, LayerNormPerHead, RMSNorm
from quire.ops.rows import MANY_ELEMENTS

EPS, WIDTH = 0.25, 64
"""An eps that shows in every row: 1e-5 beside a mean square of 10 is less than a rounding of
bfloat16.
"""
ROWS = [1, 7, MANY_ELEMENTS // WIDTH + 1]


def rms(x: Tensor) -> Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()


def centred(x: Tensor) -> Tensor:
    x = x.double()
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, unbiased=False) + EPS).rsqrt()


def assert_rounded_once(found: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """Half a unit in the last place, and what float32 sums are off, of the largest term."""
    unit = torch.finfo(found.dtype).eps
    terms = exact.abs() if terms is None else terms
    steps = exact.abs().clamp_min(torch.finfo(found.dtype).smallest_normal) * unit
    bound = steps / 2 + terms * WIDTH**0.5 * torch.finfo(torch.float32).eps
    assert found.is_contiguous()
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_each_norm_rounds_once(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x = (3 * torch.randn(rows, WIDTH) + 1).to(dtype)
    before = x.clone()
    weight, bias = (torch.randn(WIDTH).to(dtype) for _ in range(2))
    assert_rounded_once(RMSNorm(weight, EPS)(x), rms(x) * weight.double())
    wide = weight.float() + 1.0
    assert_rounded_once(RMSNorm(wide, EPS)(x), rms(x) * wide.double())
    terms = (centred(x) * weight.double()).abs() + bias.double().abs() + x.double().abs().amax(-1, keepdim=True)
    assert_rounded_once(LayerNorm(weight, bias, EPS)(x), centred(x) * weight.double() + bias.double(), terms)
    assert_rounded_once(LayerNorm(weight, None, EPS)(x), centred(x) * weight.double(), terms)
    heads_THD, each_HD = x.view(rows, 4, 16), torch.randn(4, 16).to(dtype)
    exact = centred(heads_THD) * each_HD.double()
    terms = exact.abs() + x.double().abs().amax() * each_HD.double().abs()
    assert_rounded_once(LayerNormPerHead(each_HD, EPS)(heads_THD), exact, terms)
    assert torch.equal(x, before)


def test_a_weight_near_one_keeps_its_bits_in_float32() -> None:
    """In bfloat16 1 + 0.01 is 1.0078: the difference would be seen."""
    torch.manual_seed(0)
    x, weight = torch.randn(50, WIDTH).bfloat16(), torch.full((WIDTH,), 0.01).bfloat16()
    exact = rms(x) * (1 + weight.double())
    errors = [
        float((norm(x).double() - exact).square().mean().sqrt())
        for norm in (RMSNorm(weight.float() + 1, EPS), RMSNorm(weight + 1, EPS))
    ]
    assert errors[0] < 0.8 * errors[1]
