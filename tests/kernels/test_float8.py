"""Maps of 8-bit floats: rounded rows, products against float64, models, what is refused.

On a CPU PyTorch's scaled product runs, which users do not get there; ``make gpu-test`` runs the
same on a GPU. An 8-bit float has 3 bits of mantissa and its smallest step is 2^-9: rounding is off
by 2^-4 of a number, or by 2^-10 of its row's scale, whichever is more.

Letters: T rows, I input, O output features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.captured_work import FrozenWork
from tests.models import test_moe_families
from tests.triton_machine import DEVICE, DTYPES, HAS_CUDA, INTERPRETED, needs_triton
from torch import Tensor

from quire import LLM, SamplingParams, Unsupported
from quire.contracts.block_calls import LayerKernels
from quire.errors import InvalidArgument
from quire.kernels import float8
from quire.kernels.float8 import Float8Linear, Float8Map, float8_problem
from quire.kernels.triton_rows import round_rows
from quire.models.adapter_targets import linears_of
from quire.models.loading import load_model
from quire.nn.packed import KernelLinear
from quire.ops.packed_weights import multiply, pack, rounded_rows, unpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HAS_CUDA and bool(float8_problem(DEVICE)), reason="the device has no products of 8-bit floats"),
]
KERNELS = LayerKernels(linear=Float8Linear(), quantization="fp8")
TINY: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory": "16MiB"}


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, with small and large numbers in each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-8, 8, (rows, columns), generator=generator).float())
    rows_T1 = torch.exp2(torch.randint(-30, 30, (rows, 1), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * sizes * rows_T1).bfloat16()


def off_by(x: Tensor, scales: Tensor) -> Tensor:
    """How far rounded rows may be from the given ones; the quotient is rounded to float32 first."""
    return torch.maximum(x.double().abs() * 2.0**-4, scales.double() * 2.0**-10) + x.double().abs() * 2.0**-24


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 300), (2, 4096)])
def test_rows_are_rounded(shape: tuple[int, int]) -> None:
    x = drawn(*shape)
    values, scales = rounded_rows(x)
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (
        torch.float8_e4m3fn, shape, torch.float32, (shape[0], 1),
    )  # fmt: skip
    assert ((values.double() * scales.double() - x.double()).abs() <= off_by(x, scales)).all()
    assert (values.float().abs().amax(-1) == 448).all()


def test_rows_of_zeros_and_of_what_is_no_number() -> None:
    x = torch.ones(4, 32)
    x[0], x[1], x[2, 3] = 0, 1e-42, torch.nan
    values, scales = rounded_rows(x)
    found = values.float() * scales
    assert (found[0] == 0).all()
    assert (found[1].abs() <= 1e-41).all()
    assert found[2, 3].isnan()
    assert torch.equal(found[3], x[3])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 48), (3, 300), (2, 5000)])
def test_the_program_rounds_as_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """To the bit; also rows with gaps, and every other column."""
    x = (drawn(shape[0], 2 * shape[1]).float() * 2.0**-20).to(dtype).to(DEVICE)
    for given in (x[:, : shape[1]], x[:, ::2], x[:, : shape[1]] * 0):
        (values, scales), (expected, by) = round_rows(given), rounded_rows(given)
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scales, by)


def made(outs: int, ins: int, *, bias: bool = False) -> tuple[Tensor, Tensor | None, Float8Map]:
    weight = drawn(outs, ins, seed=1).to(DEVICE)
    bias_O = drawn(1, outs, seed=2)[0].to(DEVICE) if bias else None
    return weight, bias_O, Float8Linear().pack(weight, bias_O, "fp8")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outs", "ins"), [(16, 16), (48, 64), (320, 1040)])
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 64])
def test_products(rows: int, outs: int, ins: int, bias: bool) -> None:
    """Against float64: of the rounded numbers, whose sums are float32, rounded once; and of those
    that were given."""
    weight, bias_O, found = made(outs, ins, bias=bias)
    x = drawn(rows, ins, seed=3).to(DEVICE)
    (q, by), (w, scales) = rounded_rows(x), rounded_rows(weight)
    exact = (q.double() * by.double()) @ (w.double() * scales.double()).T
    added = x.new_zeros(outs).double() if bias_O is None else bias_O.double()
    # Each addition rounds by 2^-24 of what was summed, and so do products with scales and the bias.
    summed = (q.double() * by.double()).abs() @ (w.double() * scales.double()).abs().T + added.abs()
    sums = summed * (ins + 4) * 2.0**-24
    y, reference = found(x), multiply(x, pack(weight, "fp8"), bias_O)
    assert y.dtype == reference.dtype == torch.bfloat16
    half = torch.finfo(torch.bfloat16).eps / 2
    whole = exact + added
    for one in (y, reference):
        assert one.shape == (rows, outs)
        assert ((one.double() - whole).abs() <= whole.abs() * half + sums * 1.01).all()
    given = x.double() @ weight.double().T
    off_x, off_w = off_by(x, by), off_by(weight, scales)
    rounding = off_x @ (weight.double().abs() + off_w).T + x.double().abs() @ off_w.T
    assert ((exact - given).abs() <= rounding).all()


def test_a_map() -> None:
    weight, _, found = made(48, 64)
    assert found.weights.nbytes == 48 * 64 + 48 * 4
    assert ((unpack(found.weights).double() - weight.double()).abs() <= off_by(weight, found.weights.scales)).all()  # type: ignore[arg-type]
    wide = drawn(3, 192).to(DEVICE)
    assert torch.equal(found(wide[:, 64:128]), found(wide[:, 64:128].contiguous()))
    with pytest.raises(InvalidArgument, match=r"torch\.bfloat16 activations; x is torch\.float32"):
        found(torch.zeros(1, 64, device=DEVICE))


def test_what_a_map_refuses() -> None:
    kernel = Float8Linear()
    for weight, form, reason in (
        (torch.ones(16, 16), "fp8", "bfloat16 activations; the weight is torch.float32"),
        (torch.ones(16, 24).bfloat16(), "fp8", r"multiples of 16 outputs and inputs; there are \[16, 24\]"),
        (torch.ones(8, 16).bfloat16(), "fp8", r"there are \[8, 16\]"),
        (torch.ones(16, 16).bfloat16(), "int8", "not int8"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            kernel.pack(weight, None, form)  # type: ignore[arg-type]
    assert not kernel.refusal(torch.ones(16, 16).bfloat16(), "fp8")


@pytest.mark.skipif(not INTERPRETED, reason="captured work is real on a GPU")
def test_a_captured_product_is_of_the_new_rows() -> None:
    """Nothing on the way waits for a value or keeps one."""
    _, _, found = made(32, 48, bias=True)
    x = drawn(3, 48)
    launch, y = FrozenWork()(lambda: found(x))
    for seed in (4, 5):
        x.copy_(drawn(3, 48, seed))
        launch()
        assert torch.equal(y, found(x))


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All maps but the head have the form. Logits are those of the reference's products: sums in
    another order are rounded to bfloat16 otherwise, about 8 times in each of 8 layers."""
    options = {**TINY, "device": DEVICE.type}
    monkeypatch.setattr("quire.build.quantization_problem", lambda form, device: "")
    with LLM("tiny-python", **options) as plain:
        size = plain.model.parameter_bytes
    if not HAS_CUDA:
        monkeypatch.setattr("quire.build.layer_kernels", lambda device, form=None: KERNELS)
    with LLM("tiny-python", quantization="fp8", **options) as llm:
        model = llm.model
        maps = linears_of(model)
        assert {name for name, one in maps.items() if getattr(one, "map", None) is None} == {"head"}
        assert "fp8 weights" in llm.capabilities()["notes"][0]
        packed = [one.map.weights for name, one in maps.items() if name != "head"]
        assert sum(one.nbytes for one in packed) == sum(one.outputs * (one.inputs + 4) for one in packed)
        assert model.parameter_bytes < size
        ids, params = list(range(5, 60)), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

        def chances() -> Tensor:
            llm.reset_prefix_cache()
            found = llm.generate([ids], params)[0].prompt_logprobs
            assert found is not None
            return torch.tensor([one[token].logprob for token, one in zip(ids, found, strict=True) if one is not None])

        found = chances()
        for one in maps.values():
            if isinstance(one, KernelLinear):
                monkeypatch.setattr(
                    type(one), "product", lambda self, x: multiply(x, self.map.weights, self.bias), raising=True
                )
        expected = chances()
    assert float((found - expected).abs().max()) <= 64 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
    assert expected.isfinite().all()


def test_experts_are_refused(tmp_path: Path) -> None:
    test_moe_families.make_checkpoint(test_moe_families.CASES[0], tmp_path)
    with pytest.raises(Unsupported, match="experts") as caught:
        load_model(tmp_path, dtype="bfloat16", kernels=KERNELS)
    assert caught.value.field == "quantization"


def test_devices_without_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"quantization 'fp8': the device is cpu, and only GPUs have it") as caught:
        LLM("tiny-python", quantization="fp8", device="cpu", **TINY)
    assert caught.value.field == "quantization"
    cuda = torch.device("cuda")
    for capability, problem in (((8, 0), "need compute capability 8.9; cuda has 8.0"), ((8, 9), ""), ((9, 0), "")):
        monkeypatch.setattr(float8.torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert problem in float8_problem(cuda)
        assert bool(float8_problem(cuda)) == bool(problem)


def test_other_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.build.layer_kernels", lambda device, form=None: KERNELS)
    with pytest.raises(Unsupported, match=r"'fp8': LlamaForCausalLM has no weights .* its dtype is torch\.float32"):
        LLM("tiny-python", quantization="fp8", device="cpu", **{**TINY, "dtype": "float32"})
