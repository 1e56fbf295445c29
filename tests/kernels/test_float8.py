"""Maps of 8-bit floats: rounded rows, products against float64, models, what is refused.

On a CPU PyTorch's scaled product runs, which users do not get there, and ``grouped_product`` stands
for that of stacks; ``make gpu-test`` runs the same on a GPU. An 8-bit float has 3 bits of mantissa
and its smallest step is 2^-9: rounding is off by 2^-4 of a number, or by 2^-10 of its row's scale,
whichever is more.

Letters: T tokens and rows, I input, O output features; X experts, P rows of all of them, K experts
of a token.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.captured_work import FrozenWork
from tests.models import test_moe_families
from tests.models.conftest import Case
from tests.triton_machine import DEVICE, DTYPES, HAS_CUDA, INTERPRETED, needs_triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from quire import LLM, SamplingParams, Unsupported
from quire.adapters.targets import linears_of
from quire.base.errors import InvalidArgument
from quire.contracts.block_calls import LayerKernels
from quire.kernels.linear import float8
from quire.kernels.linear.float8 import STACK_CAPABILITY, Float8Linear, Float8Map, Float8Stack, float8_problem
from quire.kernels.rows.triton_rows import round_rows
from quire.models.loading import load_model
from quire.nn.experts import ActivatedGate, ClampedGate, ExpertLinear, Experts
from quire.nn.packed import KernelLinear
from quire.ops.experts import mix
from quire.weights.float8 import rounded_rows
from quire.weights.packed import multiply, multiply_stack, pack, unpack

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


@pytest.mark.turns(4)
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


@pytest.mark.product(2)
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


# Experts.


def grouped_product(
    values_PI: Tensor,
    weight_XIO: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """``torch._scaled_grouped_mm`` for a CPU: what it checks (types, strides, scales on the device
    "meta", and sizes as on a GPU), and the sums of all rows, without waiting for the ends."""
    with _disable_current_modes():
        given = [one.to("meta") for one in (values_PI, weight_XIO, scale_a, scale_b)]
        strides = [one.stride() for one in (values_PI, weight_XIO, scale_a, scale_b)]
        assert [one.stride() for one in given] == strides
        made = real_product(*given, offs=offs.to("meta"), out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    assert not use_fast_accum
    assert len(values_PI) > 0
    assert len(offs) == len(weight_XIO) < 1024
    assert all(size % 16 == 0 for size in weight_XIO.shape[1:])
    group_P = torch.searchsorted(offs, torch.arange(len(values_PI)), right=True)
    sums_PO = torch.einsum("pi,pio->po", values_PI.float(), weight_XIO.float()[group_P])
    y_PO = (sums_PO * scale_a[:, None] * scale_b[group_P]).to(out_dtype)
    assert (y_PO.shape, y_PO.dtype) == (made.shape, made.dtype)
    return y_PO


real_product = torch._scaled_grouped_mm


@pytest.fixture
def stacks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test whose products of stacks run here."""
    if not HAS_CUDA:
        monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_product)
    elif torch.cuda.get_device_capability() != STACK_CAPABILITY:
        pytest.skip("the device has no products of stacks of 8-bit floats")


def turned(weight_XOI: Tensor) -> Tensor:
    """The same numbers with outputs next to each other in memory."""
    return weight_XOI.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.product(2)
@pytest.mark.usefixtures("stacks_run")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("outs", "ins"), [(16, 16), (48, 64), (320, 1040)])
@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 0], [0, 3, 1], [17, 0, 6], [5, 2, 0]])
def test_stacks(counts: list[int], outs: int, ins: int, transposed: bool) -> None:
    """Against float64 of the rounded numbers, whose sums are float32, rounded once."""
    weight_XOI = torch.stack([drawn(outs, ins, seed=4 + expert) for expert in range(len(counts))]).to(DEVICE)
    stack = Float8Linear().pack_stack(turned(weight_XOI) if transposed else weight_XOI, "fp8")
    expected = [pack(weight_OI, "fp8") for weight_OI in weight_XOI]
    for found, one in zip(stack.weights, expected, strict=True):
        assert torch.equal(unpack(found), unpack(one))
        assert (found.form, found.outputs, found.inputs, found.nbytes) == ("fp8", outs, ins, one.nbytes)
    x_PI = drawn(sum(counts), ins, seed=3).to(DEVICE)
    ends_X = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    expert_P = torch.arange(len(counts), device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
    q_PI, by_P1 = rounded_rows(x_PI)
    rows_PI = q_PI.double() * by_P1.double()
    maps_POI = torch.stack([unpack(one).double() for one in expected])[expert_P]
    exact_PO, summed_PO = (
        torch.einsum("pi,poi->po", *pair) for pair in ((rows_PI, maps_POI), (rows_PI.abs(), maps_POI.abs()))
    )
    y_PO, reference_PO = stack(x_PI, ends_X), multiply_stack(x_PI, stack.weights, ends_X)
    for one in (y_PO, reference_PO):
        assert (one.dtype, one.shape) == (torch.bfloat16, (sum(counts), outs))
        # As of one map; ``unpack`` rounds, too.
        off = exact_PO.abs() * torch.finfo(torch.bfloat16).eps / 2 + summed_PO * (ins + 5) * 2.0**-24 * 1.01
        assert ((one.double() - exact_PO).abs() <= off).all()


def exactly(*shape: int, seed: int) -> Tensor:
    """Rows that 8-bit floats hold as they are: multiples of 1/8 up to 14/8, which the largest is,
    times a power of two of each row. Float32 sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-14, 15, shape, generator=generator) / 8
    rows[..., 0] = 1.75
    return (rows * torch.exp2(torch.randint(-5, -1, (*shape[:-1], 1), generator=generator).float())).bfloat16()


def make_experts(form: str) -> Experts:
    """Of 6, from 64 inputs through 32."""
    plain = form == "plain"

    def stack(outs: int, ins: int, seed: int) -> ExpertLinear:
        weight_XOI = exactly(6, outs, ins, seed=seed).to(DEVICE)
        bias_XO = None if plain else exactly(6, outs, seed=seed + 1).to(DEVICE)
        return ExpertLinear(weight_XOI if plain else turned(weight_XOI), bias_XO)

    return Experts(stack(64, 64, 10), stack(64, 32, 20), ActivatedGate() if plain else ClampedGate(1.702, 2.0))


def chosen(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, and 3 of the experts but the fourth for each, with weights."""
    generator = torch.Generator().manual_seed(seed)
    experts_TK = torch.rand(tokens, 5, generator=generator).argsort(-1)[:, :3]
    weights_TK = torch.rand(tokens, 3, generator=generator)
    rows_TI = exactly(tokens, 64, seed=seed) if tokens else torch.empty(0, 64, dtype=torch.bfloat16)
    return rows_TI.to(DEVICE), weights_TK.to(DEVICE), (experts_TK + (experts_TK > 2)).to(DEVICE)


@pytest.mark.usefixtures("stacks_run")
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("form", ["plain", "biases, transposed, clamped"])
@torch.inference_mode()
def test_experts_against_the_reference(tokens: int, form: str) -> None:
    """Token by token with products of the reference. The first ones are exact, so both round the
    same rows for the second. These may differ by a rounding of the product, one of what a bias
    makes of it, and one of the sum of 3."""
    experts = make_experts(form)
    sizes = [(stack.weight.shape, stack.weight.nbytes) for stack in (experts.gate_up, experts.down)]  # type: ignore[union-attr]
    packed = [[pack(weight_OI, "fp8") for weight_OI in stack.weight] for stack in (experts.gate_up, experts.down)]  # type: ignore[union-attr]

    def expert(index: int, size: bool = False) -> Any:
        def run(x_1I: Tensor) -> Tensor:
            for stack, maps, gate in zip((experts.gate_up, experts.down), packed, (experts.gate, None), strict=True):
                x_1I = multiply(x_1I, maps[index], None)
                x_1I = x_1I if stack.bias is None else x_1I + stack.bias[index]
                x_1I = x_1I if gate is None else gate(x_1I)
            return x_1I.abs() if size else x_1I

        return run

    memory = [weakref.ref(stack.weight) for stack in (experts.gate_up, experts.down)]
    grown = experts.pack(KERNELS)
    assert [one() for one in memory] == [None, None], "the plain weights are still there"
    assert grown == sum(count * outs * (ins + 4) - nbytes for (count, outs, ins), nbytes in sizes)
    for stack in (experts.gate_up, experts.down):
        assert isinstance(stack.stack, Float8Stack)
        assert not stack.maps, "they are in the memory of the plain weights"
    assert experts.pack(KERNELS) == 0
    x_TI, weights_TK, experts_TK = chosen(tokens, seed=6)
    found_TE = experts(x_TI, weights_TK, experts_TK)
    exact_TE = mix(x_TI, weights_TK, experts_TK, [expert(index) for index in range(6)])
    terms_TE = mix(x_TI, weights_TK, experts_TK, [expert(index, size=True) for index in range(6)])
    assert found_TE.shape == exact_TE.shape == (tokens, 64)
    assert ((found_TE - exact_TE).abs() <= 3 * torch.finfo(torch.bfloat16).eps * (terms_TE + 1)).all()


@pytest.mark.skipif(not INTERPRETED, reason="captured work is real on a GPU")
@pytest.mark.usefixtures("stacks_run")
@torch.inference_mode()
def test_captured_experts_are_of_the_new_rows() -> None:
    """Whatever experts they choose, and nothing waits to know them."""
    experts = make_experts("biases, transposed, clamped")
    experts.pack(KERNELS)
    given = chosen(5, seed=1)
    launch, y = FrozenWork()(lambda: experts(*given))
    for seed in (2, 3):
        for place, new in zip(given, chosen(5, seed), strict=True):
            place.copy_(new)
        launch()
        assert torch.equal(y, experts(*given))


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


@pytest.mark.turns(2)
@pytest.mark.usefixtures("stacks_run")
@pytest.mark.parametrize("family", ["Qwen2Moe", "GptOss"])
@torch.inference_mode()
def test_a_model_of_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``test_a_model``, with all experts chosen, so that no rounding changes a choice."""
    changes = test_moe_families.QWEN2 if family == "Qwen2Moe" else test_moe_families.GPT_OSS
    wide = {"num_experts_per_tok": 6, "moe_intermediate_size": 48, "intermediate_size": 48}
    case = Case("eight-bits", family, {**changes, **wide, "shared_expert_intermediate_size": 48})
    test_moe_families.make_checkpoint(case, tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", device=DEVICE.type, kernels=KERNELS)
    assert model.quantization == "fp8"
    packed = [one.map.weights for one in linears_of(model).values() if isinstance(one, KernelLinear)]
    assert len(packed) == 3 * (4 if family == "Qwen2Moe" else 2)
    for mixture in test_moe_families.mixtures(model):
        assert mixture.router.weight.dtype == torch.bfloat16
        for stack in (mixture.experts.gate_up.stack, mixture.experts.down.stack):
            assert isinstance(stack, Float8Stack)
            packed += stack.weights
    # A number has a byte less, and an output a scale.
    saved = sum(one.outputs * (one.inputs - 4) for one in packed)
    assert model.parameter_bytes == 2 * model.num_parameters - saved
    ids = torch.arange(5, 45, device=DEVICE)
    found = test_moe_families.run(model, ids, [40])
    monkeypatch.setattr(KernelLinear, "product", lambda self, x: multiply(x, self.map.weights, self.bias))
    monkeypatch.setattr(Float8Stack, "__call__", lambda self, x, ends: multiply_stack(x, self.weights, ends))
    expected = test_moe_families.run(model, ids, [40])
    assert expected.isfinite().all()
    assert float((found - expected).abs().max()) <= 24 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())


@pytest.mark.parametrize(
    ("dtype", "changes", "reason"),
    [
        ("bfloat16", {}, r"multiples of 16 outputs and inputs; there are \[32, 56\]; leave it out"),
        ("float32", {"intermediate_size": 64}, r"bfloat16 activations; the weight is torch\.float32"),
    ],
)
def test_experts_are_refused(dtype: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    case = Case("refused", "Mixtral", {**test_moe_families.MIXTRAL, **changes})
    test_moe_families.make_checkpoint(case, tmp_path)
    with pytest.raises(Unsupported, match=rf"'fp8': not for this model's experts: .*{reason}") as caught:
        load_model(tmp_path, dtype=dtype, kernels=KERNELS)
    assert caught.value.field == "quantization"


def test_experts_of_which_one_stack_is_refused_stay() -> None:
    wide, narrow = (ExpertLinear(torch.ones(2, 16, ins, dtype=torch.bfloat16)) for ins in (16, 8))
    experts = Experts(wide, narrow, ActivatedGate())
    with pytest.raises(Unsupported, match=r"there are \[16, 8\]"):
        experts.pack(KERNELS)
    assert wide.weight is not None
    assert wide.stack is None


def test_what_a_stack_refuses() -> None:
    kernel = Float8Linear()
    assert not kernel.stack_refusal(torch.ones(1023, 16, 16, dtype=torch.bfloat16, device="meta"), "fp8")
    many = torch.ones(1024, 16, 16, dtype=torch.bfloat16, device="meta")
    with pytest.raises(InvalidArgument, match="at most 1023 experts; there are 1024"):
        kernel.pack_stack(many, "fp8")
    ends_X = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    with pytest.raises(InvalidArgument, match=r"torch\.bfloat16 activations; x is torch\.float32"):
        Float8Stack(torch.ones(1, 16, 16, device=DEVICE).bfloat16())(torch.ones(1, 16, device=DEVICE), ends_X)


def test_devices_without_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"quantization 'fp8': the device is cpu, and only GPUs have it") as caught:
        LLM("tiny-python", quantization="fp8", device="cpu", **TINY)
    assert caught.value.field == "quantization"
    cuda = torch.device("cuda")
    stack = SimpleNamespace(device=cuda, dtype=torch.bfloat16, shape=(16, 16))
    stack_XOI: Any = type("Stack", (list,), {"device": cuda})([stack])
    for capability, problem, of_stacks in (
        ((8, 0), "need compute capability 8.9; cuda has 8.0", "need compute capability 9.0; cuda has 8.0"),
        ((8, 9), "", "need compute capability 9.0; cuda has 8.9"),
        ((9, 0), "", ""),
        ((10, 0), "", "need compute capability 9.0; cuda has 10.0"),
    ):
        monkeypatch.setattr(float8.torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for found, expected in (
            (float8_problem(cuda), problem),
            (Float8Linear().stack_refusal(stack_XOI, "fp8"), of_stacks),
        ):
            assert expected in found
            assert bool(found) == bool(expected)


def test_other_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.build.layer_kernels", lambda device, form=None: KERNELS)
    with pytest.raises(Unsupported, match=r"'fp8': LlamaForCausalLM has no weights .* its dtype is torch\.float32"):
        LLM("tiny-python", quantization="fp8", device="cpu", **{**TINY, "dtype": "float32"})
