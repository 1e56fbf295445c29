"""Packed linear maps against plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.contracts.block_calls import LayerKernels
from quire.contracts.linear import Quantization, WeightForm
from quire.kernels.linear.cpu_linear import native_linear
from quire.kernels.native_library import native_library, native_problem
from quire.models.loading import load_model
from quire.nn import packed as module
from quire.nn.embedding import ScaledEmbedding
from quire.nn.linear import Linear
from quire.nn.packed import KernelLinear, PackedLinear, can_pack, packed
from quire.weights.checkpoint import Checkpoint
from quire.weights.places import Place

needs_library = pytest.mark.skipif(native_library() is None, reason=native_problem())
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
    monkeypatch.setattr(module, "can_pack", lambda dtype, device: True)
    model = load_model(tiny.path, dtype="float32")
    linears = [model.lm_head]
    for block in model.blocks:
        linears += [block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down]
    assert {type(one) for one in linears} == {Packed}
    bytes_twice = model.embedding.weight.nbytes if model.tied else 0
    assert model.parameter_bytes == 4 * model.num_parameters + bytes_twice


def form_of(made: Linear) -> WeightForm:
    assert isinstance(made, KernelLinear)
    return made.map.weights.form


@needs_library
def test_a_kernel_keeps_what_the_weights_are() -> None:
    """Float32 weights that bfloat16 has exactly are kept in half of the bytes."""
    kernels, rounded = LayerKernels(linear=native_linear()), torch.randn(40, 64).bfloat16()
    for weight, form in (
        (rounded.float(), "bfloat16"),
        (torch.randn(40, 64), "float32"),
        (torch.ones(2, 3), "float32"),
    ):
        plain = Linear(weight, torch.randn(len(weight)))
        made = packed(plain, kernels)
        assert form_of(made) == form
        assert torch.equal(made.plain_weight(), weight)
        assert (made.in_features, made.out_features) == tuple(reversed(weight.shape))
        torch.testing.assert_close(made(torch.ones(2, weight.shape[1])), plain(torch.ones(2, weight.shape[1])))
    assert form_of(packed(Linear(rounded), kernels)) == "bfloat16"
    half = Linear(torch.ones(4, 8, dtype=torch.float16))
    assert packed(half, kernels) is half


@pytest.mark.turns(4)
@needs_library
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_every_linear_map_has_the_form(tiny: Any, quantization: Quantization | None) -> None:
    plain = load_model(tiny.path, dtype="float32")
    model = load_model(tiny.path, dtype="float32", kernels=LayerKernels(None, native_linear(), quantization))
    assert model.quantization == quantization
    assert form_of(model.lm_head) == ("float32" if quantization is None else "int8")
    saved = 0
    for block, before in zip(model.blocks, plain.blocks, strict=True):
        for part, name in (("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down")):
            made, old = getattr(getattr(block, part), name), getattr(getattr(before, part), name)
            assert form_of(made) == (quantization or "float32")
            off = (made.plain_weight() - old.weight).abs().max() / old.weight.abs().max()
            # Half a step: of 127, or of 8 at a scale that may be three quarters of the largest's.
            assert off <= {None: 0, "int8": 0.6 / 127, "int4": 0.26}[quantization]
            saved += old.weight.nbytes - made.weight_bytes
    # A head of the same values is the embedding, too.
    is_shared = model.tied and quantization is None
    head = model.lm_head.weight_bytes - (plain.lm_head.weight.nbytes if is_shared or not model.tied else 0)
    assert model.parameter_bytes == plain.parameter_bytes - saved + head
    assert (model.embedding.weight.device.type == "meta") == is_shared
    assert torch.equal(model.embedding.plain_weight(), plain.embedding.weight)
    tokens_T = torch.tensor([3, 0, model.vocab_size - 1, 3])
    assert torch.equal(model.embed(tokens_T), plain.embed(tokens_T))


@needs_library
@pytest.mark.parametrize(
    ("dtype", "form"), [(torch.float32, "float32"), (torch.float32, "bfloat16"), (torch.bfloat16, "bfloat16")]
)
def test_a_packed_head_serves_the_embedding(dtype: torch.dtype, form: WeightForm) -> None:
    kernel = native_linear()
    assert kernel is not None
    weight_VE = torch.randn(77, 24).bfloat16().to(dtype)
    plain, shared = ScaledEmbedding(weight_VE, 3.0), ScaledEmbedding(weight_VE, 3.0)
    shared.share(kernel.pack(weight_VE, None, form))
    for tokens_T in (
        torch.arange(77),
        torch.tensor([5]),
        torch.tensor([76, 0, 31, 32, 31]),
        torch.tensor([], dtype=torch.int64),
    ):
        found = shared(tokens_T)
        assert found.dtype == dtype
        assert torch.equal(found, plain(tokens_T))
    assert torch.equal(shared.plain_weight(), weight_VE)
    assert shared.weight.shape == weight_VE.shape
    assert shared.weight.dtype == dtype


@needs_library
def test_matrices_are_packed_from_the_file(single_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices that are packed no plain copy is made but in one scratch; others are read where
    the model has them."""
    plain = load_model(single_file, dtype="float32")
    filled: dict[str, int] = {}
    fill = Checkpoint.fill

    def counted(self: Checkpoint, name: str, place: Place, parameter: Tensor) -> None:
        filled[name] = parameter.untyped_storage().data_ptr()
        fill(self, name, place, parameter)

    monkeypatch.setattr(Checkpoint, "fill", counted)
    model = load_model(single_file, dtype="float32", kernels=LayerKernels(linear=native_linear()))
    assert not any(part in name for part in ("o_proj", "down_proj", "lm_head") for name in filled)
    fused = {at for name, at in filled.items() if "q_proj" in name or "up_proj" in name}
    assert 1 <= len(fused) <= 2, "the scratch grows once at most: from the first map to the largest"
    assert filled["model.embed_tokens.weight"] == model.embedding.weight.untyped_storage().data_ptr()
    assert torch.equal(model.embedding.weight, plain.embedding.weight)
    for one, other in zip(model.blocks, plain.blocks, strict=True):
        for linear, expected in (
            (one.attention.qkv, other.attention.qkv),
            (one.attention.out, other.attention.out),
            (one.mlp.gate_up, other.mlp.gate_up),
            (one.mlp.down, other.mlp.down),
        ):
            assert isinstance(linear, KernelLinear)
            assert torch.equal(linear.plain_weight(), expected.weight)
