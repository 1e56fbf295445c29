"""The measure itself: sums in other orders are other float32 runs of the same function, and equal
rows have equal sums.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.exact import EqualSums, ReorderedSums
from torch import Tensor
from torch.overrides import TorchFunctionMode

T, I, O = 7, 64, 9  # noqa: E741
PRODUCTS: dict[str, Any] = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with a bias": lambda x, w: F.linear(x, w, x[0, :1].expand(O)),
    "linear of a batch": lambda x, w: F.linear(x.expand(2, T, I), w),
    "@": lambda x, w: x @ w.T,
    "matmul": lambda x, w: torch.matmul(x, w.T),
    "matmul of heads": lambda x, w: x.expand(2, 3, T, I).matmul(w.T.expand(2, 3, I, O)),
    "matmul, broadcast": lambda x, w: torch.matmul(x, w.T.expand(2, 3, I, O)),
    "bmm": lambda x, w: torch.bmm(x.expand(2, T, I), w.T.expand(2, I, O)),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x, w.T),
}


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(T, I, generator=generator).to(dtype), torch.randn(O, I, generator=generator).to(dtype)


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_another_order_is_the_same_function_rounded_otherwise(name: str) -> None:
    product = PRODUCTS[name]
    exact = product(*factors(torch.float64))
    with ReorderedSums(0):
        again = product(*factors(torch.float64))
        runs = [product(*factors(torch.float32)) for _ in range(2)]
    assert (again - exact).abs().max() < 1e-13
    exact = product(*(one.double() for one in factors(torch.float32)))
    assert all((one - exact).abs().max() < 1e-4 for one in runs)
    assert not torch.equal(*runs)


def test_the_orders_of_a_seed_are_always_the_same() -> None:
    runs = []
    for seed in (1, 1, 2):
        with ReorderedSums(seed):
            runs.append(F.linear(*factors(torch.float32)))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


class UnequalSums(TorchFunctionMode):
    """Equal rows get other sums, on every CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + torch.arange(O) * 1e-5 if func is F.linear else out


@pytest.mark.parametrize("bias", [None, [0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 2.0]])
def test_equal_rows_get_the_sum_of_the_first(bias: list[float] | None) -> None:
    """Rows of another bias are other rows."""
    x_TI, weight_OI = factors(torch.float32)
    weight_OI[[3, 5, 8]] = weight_OI[1].clone()
    bias_O = None if bias is None else torch.tensor(bias)
    with UnequalSums():
        plain_TO = F.linear(x_TI, weight_OI, bias_O)
    first = [0, 1, 2, 1, 4, 1, 6, 7, 1] if bias is None else [0, 1, 2, 1, 4, 5, 6, 7, 8]
    with UnequalSums(), EqualSums():
        assert torch.equal(F.linear(x_TI, weight_OI, bias_O), plain_TO[:, first])
        assert torch.equal(F.linear(x_TI, weight_OI, bias=bias_O), plain_TO[:, first])
    assert not torch.equal(plain_TO, plain_TO[:, first])
