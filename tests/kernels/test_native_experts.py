"""Mixtures of experts in one C++ call: every number is that of the parts one by one, and of a row
in any batch; the choice of experts is that of ``ops.experts.route``.

Letters: T tokens, X experts, K of each token, E model width, F inner width, O outputs, I inputs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.native_forms import FORMS, three_threads  # noqa: F401
from torch import Tensor

from quire.contracts.block_calls import LayerKernels
from quire.contracts.experts import Routing
from quire.contracts.linear import WeightForm
from quire.kernels import experts as module
from quire.kernels.experts import NativeExperts, native_experts
from quire.kernels.linear.cpu_linear import EMULATED, NativeLinear, native_linear
from quire.kernels.native_library import NativeLibrary, native_library, native_problem
from quire.kernels.rows.cpu_rows import NativeRows, native_rows
from quire.nn.experts import (
    ActivatedGate,
    ClampedGate,
    ExpertLinear,
    Experts,
    Gate,
    MixtureOfExperts,
    Router,
    SharedExpert,
    SquaredGate,
)
from quire.nn.linear import Linear
from quire.nn.mlp import GatedMLP, SquaredMLP
from quire.nn.packed import KernelLinear
from quire.ops.experts import route

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_problem())

EPS = torch.finfo(torch.float32).eps
GATES = {
    "silu": ActivatedGate,
    "gelu": lambda: ActivatedGate("gelu"),
    "gelu_tanh": lambda: ActivatedGate("gelu_tanh"),
    "clamped": lambda: ClampedGate(1.7, 1.0),
    "squared": SquaredGate,
}
COUNTS = (1, 2, 3, 7, 40, 300)


@dataclass(frozen=True, kw_only=True)
class Shape:
    experts: int = 8
    choices: int = 3
    width: int = 64
    inner: int = 40
    shared: int = 0
    is_weighed: bool = True


SHAPES = (
    Shape(),
    Shape(experts=40, choices=5, width=96, inner=72, shared=48),
    Shape(experts=3, choices=3, width=40, inner=8, shared=16, is_weighed=False),
    Shape(experts=100, choices=1, width=200, inner=24),
)
"""Few of them whole panels of 32 outputs or of 16 experts."""


def library() -> NativeLibrary:
    found = native_library()
    assert found is not None
    return found


def rows() -> NativeRows:
    found = native_rows()
    assert found is not None
    return found


class Layer:
    """A layer twice: its parts, and the call of the same weights."""

    def __init__(
        self,
        shape: Shape,
        form: tuple[torch.dtype, WeightForm] = FORMS[0],
        gate: str = "silu",
        routing: Routing | None = None,
        level: int | None = None,
    ) -> None:
        self.shape, (self.dtype, kind) = shape, form
        self.generator = torch.Generator().manual_seed(shape.experts + shape.width)
        linear = NativeLinear(library(), level)
        quantization = kind if kind in ("int8", "int4") else None
        kernels = LayerKernels(rows(), linear, quantization, experts=NativeExperts(library(), linear))  # type: ignore[arg-type]
        made: Gate = GATES[gate]()
        columns, e = made.form.factor * shape.inner, shape.width
        stacks = [
            (self.weights(kind, shape.experts, outs, ins), self.drawn(shape.experts, outs))
            for outs, ins in ((columns, e), (e, shape.inner))
        ]
        router = self.weights("float32", shape.experts, e), self.drawn(shape.experts)
        shared = [
            self.weights(kind, *size) for size in ((made.form.factor * shape.shared, e), (e, shape.shared), (1, e))
        ]
        routing = routing or Routing(top_k=shape.choices, renormalise=True)

        def layer(kernels: LayerKernels) -> MixtureOfExperts:
            beside = None
            if shape.shared:
                first, last, weight = (Linear(one) for one in shared)
                mlp = SquaredMLP(first, last) if gate == "squared" else GatedMLP(first, last)
                beside = SharedExpert(mlp, weight if shape.is_weighed else None)
            found = MixtureOfExperts(
                Router(*router, routing), Experts(*(ExpertLinear(*one) for one in stacks), GATES[gate]()), beside
            )
            found.pack(kernels)
            return found

        self.call, self.parts = layer(kernels), layer(replace(kernels, experts=None))
        assert self.call.call is not None
        assert self.parts.experts.call is None
        assert all(isinstance(one, KernelLinear) for one in self.parts.experts.down.maps)
        self.parts.router = self.call.router  # which has a call of its own

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def weights(self, kind: WeightForm, *shape: int) -> Tensor:
        found = self.drawn(*shape) * max(1, shape[-1]) ** -0.5
        return found.bfloat16().to(self.dtype) if kind == "bfloat16" else found  # so that no bit is lost

    def rows(self, count: int) -> Tensor:
        return self.drawn(count, self.shape.width)


@pytest.mark.turns(4)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_every_number_is_that_of_the_parts(form: tuple[torch.dtype, WeightForm], gate: str) -> None:
    for shape in SHAPES:
        layer = Layer(shape, form, gate)
        for count in COUNTS:
            x_TE = layer.rows(count)
            before = x_TE.clone()
            found_TE = layer.call(x_TE)
            assert torch.equal(found_TE, layer.parts(x_TE)), (shape, count)
            assert torch.equal(x_TE, before)
            assert found_TE.isfinite().all()
            assert (found_TE.dtype, found_TE.shape) == (x_TE.dtype, x_TE.shape)


@pytest.mark.turns(4)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_a_row_is_the_same_in_any_batch_to_the_bit(form: tuple[torch.dtype, WeightForm]) -> None:
    """Alone, in every order and division, and with the layer's parts."""
    layer = Layer(SHAPES[1], form)
    x_TE = layer.rows(700)  # more pairs than a wave has
    whole_TE = layer.call(x_TE)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        order_T = torch.randperm(700, generator=generator)[: int(torch.randint(1, 700, (), generator=generator))]
        assert torch.equal(layer.call(x_TE[order_T]), whole_TE[order_T])
    for size in (1, 5, 64):
        assert torch.equal(torch.cat([layer.call(part) for part in x_TE[:130].split(size)]), whole_TE[:130])


def test_every_level_and_any_number_of_threads() -> None:
    try:
        for level, rows_level in itertools.product((*range(NativeLinear(library()).level + 1), EMULATED), (0, 1, 2)):
            rows().use_level(rows_level)
            layer = Layer(SHAPES[1], (torch.bfloat16, "bfloat16"), level=level)
            x_TE = layer.rows(20)
            expected_TE = layer.call(x_TE)
            if rows().use_level(rows_level) > 0:  # without fused sums of products PyTorch rounds otherwise
                assert torch.equal(expected_TE, layer.parts(x_TE))
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                for _ in range(6):  # threads that come early and late
                    assert torch.equal(layer.call(x_TE), expected_TE)
                assert torch.equal(layer.call(x_TE[3:4]), expected_TE[3:4])
    finally:
        rows().use_level(2)


CHOICES = {
    "all rows one expert": lambda t, x, k: (torch.arange(k) + 2) % x * torch.ones(t, 1, dtype=torch.int64),
    "one row an expert of its own": lambda t, x, k: (torch.arange(t)[:, None] * k + torch.arange(k)) % x,
    "one expert thrice": lambda t, x, k: torch.full((t, k), x - 1),
}


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("count", [1, 4, 33, 700])
def test_experts_with_all_rows_or_none(kind: str, count: int) -> None:
    """Unchosen experts are not read."""
    layer = Layer(Shape(experts=200), (torch.float32, "float32"))
    experts_TK = CHOICES[kind](count, 200, 3)
    weights_TK, x_TE = layer.drawn(count, 3), layer.rows(count)
    for expert in set(range(200)) - set(experts_TK.flatten().tolist()):
        for stack in (layer.call.experts.gate_up, layer.call.experts.down):
            one = stack.maps[expert]
            assert isinstance(one, KernelLinear)
            one.map.weights.values.fill_(math.nan)
    found_TE = layer.call.experts(x_TE, weights_TK, experts_TK)
    assert torch.equal(found_TE, layer.parts.experts(x_TE, weights_TK, experts_TK))
    assert found_TE.isfinite().all()


def test_the_sum_of_a_row_is_exact_but_for_its_roundings() -> None:
    """Against float64: products round like the root of their lengths; the constant counts products,
    gate and sum."""
    layer = Layer(Shape(), (torch.float32, "float32"))
    x_TE, experts = layer.rows(50), layer.call.experts
    weights_TK, experts_TK = layer.call.router(x_TE)
    for row, weights, chosen in zip(x_TE, weights_TK, experts_TK.tolist(), strict=True):
        exact_E = torch.zeros(64, dtype=torch.float64)
        for weight, one in zip(weights, chosen, strict=True):
            first, last = experts.gate_up.maps[one], experts.down.maps[one]
            assert first.bias is not None
            assert last.bias is not None
            gate_F, up_F = (first.plain_weight().double() @ row.double() + first.bias).chunk(2)
            inner_F = gate_F * torch.sigmoid(gate_F) * up_F
            exact_E += weight.double() * (last.plain_weight().double() @ inner_F + last.bias)
        found_E = layer.call.experts(row[None], weights[None], torch.tensor([chosen]))[0]
        assert (found_E - exact_E).abs().max() < 4 * EPS * math.sqrt(64) * max(1.0, float(exact_E.abs().max()))


def test_not_a_number_stays_in_its_token() -> None:
    layer = Layer(SHAPES[1], (torch.float32, "float32"))
    x_TE = layer.rows(30)
    expected_TE = layer.call(x_TE)
    x_TE[7, 3] = math.nan
    found_TE = layer.call(x_TE)
    assert found_TE[7].isnan().all()
    others = [token for token in range(30) if token != 7]
    assert torch.equal(found_TE[others], expected_TE[others])


def test_rows_may_be_columns_of_something_wider() -> None:
    layer = Layer(SHAPES[1], (torch.bfloat16, "bfloat16"))
    wide_TC = layer.drawn(9, 150)
    expected_TE = layer.call(wide_TC[:, 20:116].contiguous())
    assert torch.equal(layer.call(wide_TC[:, 20:116]), expected_TE)
    assert torch.equal(layer.call(wide_TC[:, 20:116].t().contiguous().t()), expected_TE)


def test_long_batches_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(SHAPES[1], (torch.float32, "float32"))
    x_TE = layer.rows(50)
    expected_TE = layer.call(x_TE)
    chosen = layer.call.router(x_TE)
    beside_TE = layer.call.experts(x_TE, *chosen)
    for pairs in (1, 30, 249):
        monkeypatch.setattr(module, "MAX_PAIRS", pairs)
        assert torch.equal(layer.call(x_TE), expected_TE)
        assert torch.equal(layer.call.experts(x_TE, *chosen), beside_TE)


def test_no_rows() -> None:
    layer = Layer(SHAPES[1], (torch.float32, "float32"))
    assert layer.call(layer.rows(0)).shape == (0, 96)
    assert [one.shape for one in layer.call.router(layer.rows(0))] == [(0, 5), (0, 5)]


# The choice.

ROUTINGS = {
    "all": Routing(top_k=5),
    "renormalised": Routing(top_k=5, renormalise=True, scale=2.5, summand=0.5),
    "chosen": Routing(top_k=5, softmax="chosen"),
    "sigmoid": Routing(top_k=5, scores="sigmoid", renormalise=True),
    "groups": Routing(top_k=5, groups=8, top_groups=3),
    "groups by two": Routing(top_k=5, groups=8, top_groups=4, group_score="best_two", scores="sigmoid", scale=1.5),
    "in float32": Routing(top_k=5, in_float32=True),
    "one": Routing(top_k=1, renormalise=True),
    "reach": Routing(top_k=2, reach=0.5),
    "no reach": Routing(top_k=2, reach=0.0),
}


def routers(name: str, dtype: torch.dtype, experts: int, width: int, *, correction: bool) -> tuple[Router, Router]:
    """One router by the kernel's call, and by PyTorch. Eighths, whose sums are exact in float32 in
    any order; every two rows are equal, of which an odd number of choices parts one pair."""
    generator = torch.Generator().manual_seed(experts)

    def eighths(*shape: int) -> Tensor:
        return torch.randint(-15, 16, shape, generator=generator).to(dtype) / 8

    weight_XE, bias_X = eighths(experts, width) / 64, eighths(experts)
    weight_XE[1::2] = weight_XE[::2][: experts // 2]
    bias_X[1::2] = bias_X[::2][: experts // 2]
    correction_X = None
    if correction:
        correction_X = torch.randint(-2, 3, (experts,), generator=generator) / 8
        correction_X[1::2] = correction_X[::2]
    made = [Router(weight_XE, bias_X, ROUTINGS[name], correction_X) for _ in range(2)]
    kernel = native_experts()
    assert kernel is not None
    made[0].pack(LayerKernels(experts=kernel))
    assert made[0].call is not None
    assert made[0].weight.dtype == dtype
    return made[0], made[1]


@pytest.mark.turns(4)
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_choice_is_that_of_the_reference_ties_included(name: str, dtype: torch.dtype, correction: bool) -> None:
    if correction and name == "chosen":
        pytest.skip("softmax over the chosen logits has no scores before the choice")
    for experts, width in ((16, 64), (64, 130), (256, 64)):
        native, plain = routers(name, dtype, experts, width, correction=correction)
        generator = torch.Generator().manual_seed(0)
        x_TE = torch.randint(-15, 16, (60, width), generator=generator).to(dtype) / 8
        weights_TK, experts_TK = native(x_TE)
        wanted_TK, chosen_TK = plain(x_TE)
        assert (weights_TK.dtype, experts_TK.dtype) == (torch.float32, torch.int64)
        assert torch.equal(experts_TK, chosen_TK)
        ties = sum(len({one // 2 for one in row}) < len(row) for row in experts_TK.tolist())
        assert ties > 10 or name == "one", "nothing ties"
        # A score is rounded once here; there a float32 exponential and a sum of X terms are.
        assert ((weights_TK - wanted_TK).abs() <= 16 * EPS * wanted_TK.abs()).all()
        for size in (1, 2, 3, 25):
            parts = [native(part) for part in x_TE.split(size)]
            assert torch.equal(torch.cat([one[0] for one in parts]), weights_TK)
            assert torch.equal(torch.cat([one[1] for one in parts]), experts_TK)


@pytest.mark.parametrize("name", ["all", "chosen", "sigmoid", "groups", "reach"])
def test_logits_that_are_no_numbers_lead_to_experts(name: str) -> None:
    native, plain = routers(name, torch.float32, 16, 64, correction=False)
    x_TE = torch.ones(3, 64)
    x_TE[0, 5], x_TE[1, 7] = math.nan, math.inf
    weights_TK, experts_TK = native(x_TE)
    wanted_TK, chosen_TK = plain(x_TE)
    assert torch.equal(experts_TK[[0, 2]], chosen_TK[[0, 2]])
    assert experts_TK.min() >= 0
    assert experts_TK.max() < 16
    assert torch.equal(weights_TK.isnan()[[0, 2]], wanted_TK.isnan()[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_a_router_are_those_of_float64(dtype: torch.dtype) -> None:
    """Random numbers, whose float32 sums round differently in every order."""
    generator = torch.Generator().manual_seed(3)
    weight_XE, x_TE = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((19, 334), (50, 334)))
    kernel = native_experts()
    assert kernel is not None
    routing = Routing(top_k=19, softmax="chosen", in_float32=True)
    call = kernel.router(weight_XE, None, None, routing)
    assert call is not None
    for some_TE in (x_TE, x_TE[1:]):  # tokens are summed in twos
        weights_TK, experts_TK = call(some_TE)
        logits_TX = (some_TE.double() @ weight_XE.double().T).float()
        wanted_TK, chosen_TK = route(logits_TX, routing)
        assert torch.equal(experts_TK, chosen_TK)
        # As above.
        assert ((weights_TK - wanted_TK).abs() <= 16 * EPS * wanted_TK.abs()).all()


# What a call is not made of.


def test_other_parts_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, linear = native_experts(), native_linear()
    assert kernel is not None
    assert linear is not None
    gate = ActivatedGate().form

    def maps(outs: int, ins: int, dtype: torch.dtype = torch.float32) -> list[object]:
        form = linear.lossless(torch.ones(outs, ins, dtype=dtype))
        assert form is not None
        return [linear.pack(torch.ones(outs, ins, dtype=dtype), None, form) for _ in range(2)]

    good, down = maps(64, 32), maps(32, 32)
    assert kernel.experts(good, down, gate) is not None  # type: ignore[arg-type]
    assert kernel.experts(good, down[:1], gate) is None  # type: ignore[arg-type]
    assert kernel.experts(good, maps(32, 32, torch.bfloat16), gate) is None  # type: ignore[arg-type]
    assert kernel.experts(maps(32, 32), down, gate) is None  # type: ignore[arg-type]
    assert kernel.experts([*good[:1], *maps(64, 16)[:1]], down, gate) is None  # type: ignore[list-item,arg-type]
    assert kernel.experts([*good[:1], object()], down, gate) is None  # type: ignore[list-item,arg-type]
    assert kernel.router(torch.ones(4, 32, dtype=torch.float16), None, None, Routing(top_k=2)) is None
    assert kernel.router(torch.ones(5000, 8), None, None, Routing(top_k=2)) is None
    assert kernel.router(torch.ones(4, 33, dtype=torch.bfloat16), None, None, Routing(top_k=2)) is None
    narrow = Routing(top_k=2, groups=4, top_groups=2, group_score="best_two")
    assert kernel.router(torch.ones(4, 32), None, None, narrow) is None
    monkeypatch.setattr(kernel, "decides_ties", False)
    assert kernel.router(torch.ones(4, 32), None, None, Routing(top_k=2)) is None


class Busy:
    """An adapter's term that changes a map."""

    is_idle = False

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> None:
        y_TO.add_(x_TI[:, :1])


@pytest.mark.parametrize("name", ["gate_up", "down", "gate"])
def test_an_adapter_of_the_shared_expert_counts(name: str) -> None:
    layer = Layer(SHAPES[1], (torch.float32, "float32"))
    x_TE = layer.rows(5)
    plain_TE = layer.call(x_TE)
    for one in (layer.call, layer.parts):
        assert one.shared is not None
        changed = one.shared.gate if name == "gate" else getattr(one.shared.mlp, name)
        changed.low_rank = Busy()
    found_TE = layer.call(x_TE)
    assert not torch.equal(found_TE, plain_TE)
    assert torch.equal(found_TE, layer.parts(x_TE))
