"""Attention over the views of a lossy format: the reference computes what the definition computes
over the numbers that the format keeps, within the same bounds as over plain rows.
"""

from __future__ import annotations

import pytest
import torch
from tests.int8_rows import Int8Rows, error_of, rounded
from tests.kernels import test_attention_kernel
from tests.kernels.test_attention_kernel import DTYPES, FEATURES, POOLS, Case
from torch import Tensor

from quire.contracts.attention import Scoring
from quire.contracts.kv_format import Geometry, KVView


def view_of(k_SHD: Tensor, v_SHD: Tensor) -> KVView:
    """A pool in 8 bits. Numbers of nobody are kept as zeros."""
    format = Int8Rows(k_SHD.dtype)
    shape = Geometry(k_SHD.shape[1], k_SHD.shape[2], v_SHD.shape[2], latent=False)
    return format.view(shape, format.pack(shape, k_SHD.nan_to_num(0), v_SHD.nan_to_num(0)))


@pytest.mark.turns(3)
@pytest.mark.parametrize(("number", "feature"), list(enumerate(FEATURES)), ids=list(FEATURES))
def test_each_feature(number: int, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_attention_kernel, "PlainRows", view_of)
    entries, softcap, learned = FEATURES[feature]
    for turn in range(2):
        sizes, page_size, fragmented = POOLS[(number + turn) % len(POOLS)]
        case = Case(
            entries,
            page_size=page_size,
            sizes=sizes,
            dtype=DTYPES[(number * turn) % len(DTYPES)],
            scoring=Scoring(0.6, softcap),
            learned=learned,
            fragmented=fragmented,
        )
        for pool in (case.k_SHD, case.v_SHD):
            pool.copy_(torch.where(pool.isnan(), pool, rounded(pool.nan_to_num(0))))
        case.check("reference")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_what_is_kept(dtype: torch.dtype, latent: bool) -> None:
    """Each number is as near as half a unit, packing it again changes no byte, and nothing of other
    tokens, heads or kinds matters."""
    shape, format = Geometry(1 if latent else 3, 8, 6 if latent else 5, latent), Int8Rows(dtype)
    generator = torch.Generator().manual_seed(4)
    k = (torch.randn(40, shape.kv_heads, 8, generator=generator) * torch.logspace(-3, 3, 40)[:, None, None]).to(dtype)
    v = None if latent else torch.randn(40, 3, 5, generator=generator).to(dtype)
    planes = format.pack(shape, k, v)
    assert {name: (one.shape[1:], one.dtype) for name, one in planes.items()} == format.planes(shape)
    rows = format.expand(shape, planes)
    for found, given in ((rows.k, k), (rows.v, k[..., :6] if v is None else v)):
        assert found.dtype == dtype
        for one, other in zip(found.flatten(0, 1), (k if v is None else given).flatten(0, 1), strict=True):
            assert (one.double() - other[: len(one)].double()).abs().max() <= error_of(other)
    again = format.pack(shape, rows.k, None if latent else rows.v)
    assert all(torch.equal(again[name], planes[name]) for name in planes)
    view = format.view(shape, {name: torch.zeros_like(one) for name, one in planes.items()})
    assert not view.keys(torch.arange(40)).any()
    view.write(torch.tensor([5, 2]), k[:2], None if v is None else v[:2])
    assert torch.equal(view.keys(torch.tensor([2, 5])), rows.k[[1, 0]])
    assert torch.equal(view.values(torch.tensor([2, 5])), rows.v[[1, 0]])
