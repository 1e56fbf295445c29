"""Packed linear maps against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.models import decoder
from quire.models.loading import load_model
from quire.nn import packed as module
from quire.nn.linear import Linear
from quire.nn.packed import PackedLinear, can_pack, packed

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, CPU), reason="this PyTorch does not pack bfloat16 weights on this CPU"
)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33, 200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outs", "ins"), [(96, 64), (257, 31), (1, 8), (64, 4096)])
def test_packed_equals_plain_within_one_rounding(rows: int, bias: bool, outs: int, ins: int) -> None:
    """Both round one float32 sum to bfloat16, so against float64 neither may be off by more than
    rounding explains.
    """
    torch.manual_seed(rows)
    plain = Linear(torch.randn(outs, ins).bfloat16(), torch.randn(outs).bfloat16() if bias else None)
    x_TI = torch.randn(rows, ins).bfloat16()
    made = packed(plain)
    assert isinstance(made, PackedLinear)
    assert (made.in_features, made.out_features) == (ins, outs)
    exact = torch.nn.functional.linear(
        x_TI.double(), plain.weight.double(), plain.bias.double() if plain.bias is not None else None
    )
    magnitude = x_TI.double().abs() @ plain.weight.double().abs().T + 1
    bound = exact.abs() * torch.finfo(torch.bfloat16).eps + magnitude * ins * torch.finfo(torch.float32).eps
    assert ((made(x_TI).double() - exact).abs() <= bound).all()


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
    plain = Linear(torch.randn(4, 4))
    assert packed(plain) is plain


def test_every_linear_map_of_every_family_is_packed(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Packed(Linear):
        """Stands in for oneDNN's, so that it runs on any machine."""

        def __init__(self, plain: Linear) -> None:
            super().__init__(plain.weight, plain.bias)

    monkeypatch.setattr(module, "PackedLinear", Packed)
    for one in (module, decoder):
        monkeypatch.setattr(one, "can_pack", lambda dtype, device: True)
    model = load_model(tiny.path, dtype="float32")
    linears = [model.lm_head]
    for block in model.blocks:
        linears += [block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down]
    assert {type(one) for one in linears} == {Packed}
    bytes_twice = model.embedding.weight.nbytes if model.tied else 0
    assert model.parameter_bytes == 4 * model.num_parameters + bytes_twice
