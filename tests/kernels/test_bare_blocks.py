"""Blocks of one thing as one call, a recurrent layer, attention or a feed-forward layer, over rows
that may be wider; and blocks of a recurrent layer beside attention, with factors of all products.
Every number, of results and of states, is that of the parts one by one.

Letters: T rows, E model width, F inner width, Z columns of the projection.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.native_forms import FORMS, three_threads  # noqa: F401
from tests.kernels.test_mixed_blocks import (
    EPS,
    HEAD,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    PLANS_OF_FEW,
    SHAPES,
    WIDTH,
    Parts,
    copied,
    mixers,
    mixture_of,
    row_kernels,
    state_of,
)
from tests.kernels.test_native_experts import Layer as Experts
from tests.kernels.test_native_mixers import Inputs, Layer, chains, drawn_inputs
from torch import Tensor

from quire.contracts.block_calls import MLPParts, ModelEnds, NormWeight, Residuals, StackParts
from quire.contracts.experts import GateForm, MixtureCall
from quire.contracts.linear import WeightForm
from quire.contracts.recurrence import RecurrencePlan, StackPools, StackStates
from quire.kernels.block import MOST_ROWS, NativeBlock, NativeStack, NativeTail
from quire.kernels.linear.cpu_linear import EMULATED, NativeLinear
from quire.kernels.native_library import native_library, native_problem
from quire.weights.packed import unpack

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_problem())

HALF = (torch.bfloat16, "bfloat16")
VOCABULARY = 70


class Bare:
    """``x + scale * out(mixer(scale_Z * project(factor * norm(x))))``."""

    def __init__(
        self, parts: Parts, layer: Layer, *, wide: bool = False, factors: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """``wide``: x is in float32. ``factors``: of the norm's result and the sum; with others
        than 1 columns have factors, too."""
        self.parts, (self.factor, self.scale) = parts, factors
        self.row_dtype = torch.float32 if wide else parts.dtype
        self.norm_E = parts.drawn(WIDTH).to(self.row_dtype)
        self.layer = replace(layer, dtype=parts.dtype).drawn()
        self.mixer = self.layer.call(mixers())
        self.project, self.out = parts.map(layer.columns, WIDTH, bias=True), parts.map(WIDTH, layer.width)
        self.rates = parts.map(2 * layer.sizes.heads, WIDTH) if layer.kind == "delta" else None
        self.scale_Z = None if factors == (1.0, 1.0) else parts.drawn(layer.columns)

    @property
    def norm(self) -> NormWeight:
        return NormWeight(self.norm_E, EPS)

    def drawn(self, count: int) -> Tensor:
        return self.parts.drawn(count, WIDTH).to(self.row_dtype) * 1.01

    def tail(self) -> NativeTail:
        found = self.parts.blocks.bare_tail(self.out, self.scale, self.row_dtype)
        assert found is not None
        return found

    def call(self) -> NativeBlock:
        found = self.parts.blocks.mixed(
            self.norm, self.project, self.rates, self.mixer, self.tail(), factor=self.factor, scale_Z=self.scale_Z
        )
        assert found is not None
        return found

    def one_by_one(self, x_TE: Tensor, inputs: Inputs, plan: RecurrencePlan) -> Tensor:
        n_TE = self.parts.rows.rms_norm(x_TE, self.norm_E, EPS).to(self.parts.dtype) * self.factor
        z_TZ = self.project(n_TE)
        if self.scale_Z is not None:
            z_TZ.mul_(self.scale_Z)
        rates = None if self.rates is None else self.rates(n_TE)
        y_TE = self.out(self.mixer(z_TZ, inputs.parts(plan), rates))
        return y_TE + x_TE if self.scale == 1.0 else self.parts.rows.add_scaled(y_TE, x_TE, self.scale)


class Fed:
    """``x + mlp(norm(x))``: squared, gated, or with experts."""

    def __init__(self, parts: Parts, kind: str, level: int | None = None) -> None:
        self.parts, self.kind, self.norm = parts, kind, parts.norm()
        self.first = parts.map((1 if kind == "squared" else 2) * INNER, WIDTH, bias=True)
        self.down = parts.map(WIDTH, INNER, bias=True)
        self.experts = (
            Experts(SHAPES[1], (parts.dtype, parts.form), "squared", level=level) if kind == "experts" else None
        )

    @property
    def mlp(self) -> MLPParts | MixtureCall:
        if self.experts is not None:
            return mixture_of(self.experts)
        return MLPParts(self.first, self.down, GateForm("squared" if self.kind == "squared" else "gelu"))

    def call(self) -> NativeBlock:
        found = self.parts.blocks.feed_forward(self.norm, self.mlp)
        assert found is not None
        return found

    def one_by_one(self, x_TE: Tensor) -> Tensor:
        rows = self.parts.rows
        n_TE = rows.rms_norm(x_TE, self.norm.weight_E, EPS)
        if self.experts is not None:
            return self.experts.call(n_TE).add_(x_TE)
        h_TF = self.first(n_TE)
        h_TF = torch.relu(h_TF).square_() if self.kind == "squared" else rows.gated(h_TF, "gelu")
        return self.down(h_TF).add_(x_TE)


class Beside:
    """``h = x + m * mixer + a * attention``, ``h + d * mlp(norm(h))``, over a state of its own."""

    def __init__(self, parts: Parts, layer: Layer, factors: tuple[float, ...] = (1.3, 0.8, 0.6, 0.9, 0.55, 0.45)):
        """``factors``: of the norm's result for mixer and attention, of the two sums, of the MLP's
        gates and result."""
        self.parts = parts
        mixer_in, self.attention_in, mixer_out, self.attention_out, self.gate, self.down_factor = factors
        self.mixer = Bare(parts, layer, factors=(mixer_in, mixer_out))
        self.mlp_norm = parts.norm()
        self.qkv, self.out = parts.map((HEADS + 2 * KV_HEADS) * HEAD, WIDTH), parts.map(WIDTH, HEADS * HEAD)
        self.gate_up, self.down = parts.map(2 * INNER, WIDTH), parts.map(WIDTH, INNER)
        self.state = state_of(parts.dtype)

    def call(self) -> NativeBlock:
        blocks = self.parts.blocks
        mlp = MLPParts(self.gate_up, self.down, GateForm("silu"), self.gate, self.down_factor)
        tail = blocks.tail(self.out, Residuals(self.mlp_norm, scale=self.attention_out), mlp)
        assert tail is not None
        whole = blocks.whole(self.mixer.norm, self.qkv, tail, factor=self.attention_in)
        assert whole is not None
        found = blocks.beside(self.mixer.call(), whole)
        assert found is not None
        return found

    def one_by_one(self, x_TE: Tensor, inputs: Inputs, plan: RecurrencePlan) -> Tensor:
        rows, mixer = self.parts.rows, self.mixer
        m_TE = mixer.one_by_one(x_TE, inputs, plan)
        n_TE = rows.rms_norm(x_TE, mixer.norm_E, EPS) * self.attention_in
        h_TE = self.out(self.state.open_pass().attend_qkv(0, self.qkv(n_TE)).flatten(1))
        n_TE = rows.add_rms_norm(h_TE, m_TE, self.mlp_norm.weight_E, EPS, self.attention_out)
        both_TF = self.gate_up(n_TE)
        both_TF.chunk(2, -1)[0].mul_(self.gate)
        return self.down(rows.gated(both_TF, "silu")).mul_(self.down_factor).add_(h_TE)


def assert_same(block: Bare, plan: RecurrencePlan) -> None:
    call, x_TE, inputs = block.call(), block.drawn(plan.num_rows), drawn_inputs(block.layer, plan)
    ours, before = copied(inputs), x_TE.clone()
    assert call.takes(x_TE)
    expected = block.one_by_one(x_TE, inputs, plan)
    assert torch.equal(call(x_TE, ours.parts(plan)), expected)
    assert expected.isfinite().all()
    assert expected.dtype == block.row_dtype
    assert torch.equal(x_TE, before)
    assert all(map(torch.equal, ours.pools, inputs.pools))


@pytest.mark.turns(2)
@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.3, 0.7)], ids=["plain", "factors"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("name", ["SSD", "SSD in groups", "SSD without a norm", "delta rule", "convolution"])
def test_a_mixer_alone(name: str, form: tuple[torch.dtype, WeightForm], factors: tuple[float, float]) -> None:
    """Also over rows in float32, which have no factors."""
    for wide in (False, True) if factors == (1.0, 1.0) else (False,):
        block = Bare(Parts(form, seed=5), LAYERS[name], wide=wide, factors=factors)
        for plan in PLANS_OF_FEW.values():
            assert_same(block, plan)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_attention_alone(form: tuple[torch.dtype, WeightForm]) -> None:
    parts = Parts(form, seed=8)
    norm, qkv, out = parts.norm(), parts.map((HEADS + 2 * KV_HEADS) * HEAD, WIDTH), parts.map(WIDTH, HEADS * HEAD)
    tail = parts.blocks.bare_tail(out)
    assert tail is not None
    call = parts.blocks.whole(norm, qkv, tail)
    assert call is not None
    states = [state_of(parts.dtype) for _ in range(2)]
    for counts in ((5, 1, 30), (1, 1, 1)):
        x_TE = parts.drawn(sum(counts), WIDTH)
        for state in states:
            state.begin_forward([0, 1, 2], list(counts))
        places = states[0].open_pass().attention_parts(0, None, parts.dtype)
        assert places is not None
        heads_TC = states[1].open_pass().attend_qkv(0, qkv(parts.rows.rms_norm(x_TE, *norm))).flatten(1)
        expected = out(heads_TC) + x_TE
        assert torch.equal(call(x_TE, places), expected)
        assert torch.equal(tail(heads_TC, x_TE), expected)
        for state in states:
            state.end_forward()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("kind", ["squared", "gated", "experts"])
def test_a_feed_forward_layer_alone(kind: str, form: tuple[torch.dtype, WeightForm]) -> None:
    block = Fed(Parts(form, seed=6), kind)
    call = block.call()
    for count in (1, 2, 5, 17, MOST_ROWS):
        x_TE = block.parts.drawn(count, WIDTH)
        before, expected = x_TE.clone(), block.one_by_one(x_TE)
        assert torch.equal(call(x_TE), expected)
        assert expected.isfinite().all()
        assert torch.equal(x_TE, before)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("name", ["SSD", "SSD without a norm"])
def test_a_mixer_beside_attention(name: str, form: tuple[torch.dtype, WeightForm]) -> None:
    block = Beside(Parts(form, seed=9), LAYERS[name])
    call, other = block.call(), state_of(block.parts.dtype)
    for counts in ((5, 1, 30), (1, 1, 1), (1, 1, 1)):
        plan = chains(list(counts))
        x_TE, inputs = block.parts.drawn(plan.num_rows, WIDTH), drawn_inputs(block.mixer.layer, plan)
        ours, before = copied(inputs), x_TE.clone()
        for state in (block.state, other):
            state.begin_forward([0, 1, 2], list(counts))
        places = other.open_pass().attention_parts(0, None, block.parts.dtype)
        assert places is not None
        expected = block.one_by_one(x_TE, inputs, plan)
        assert torch.equal(call(x_TE, ours.parts(plan), places), expected)
        assert expected.isfinite().all()
        assert torch.equal(x_TE, before)
        assert all(map(torch.equal, ours.pools, inputs.pools))
        for state in (block.state, other):
            state.end_forward()


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["mixer", "wide mixer", "squared", "experts", "beside"])
def test_every_level_and_any_number_of_threads(kind: str, rounds: int) -> None:
    library, rows = native_library(), row_kernels()
    assert library is not None
    try:
        for level, rows_level, count in itertools.product(
            (*range(NativeLinear(library).level + 1), EMULATED), (0, 1, 2), (1, 5)
        ):
            rows.use_level(rows_level)
            parts, plan = Parts(HALF, seed=count, level=level), chains([1] * count)  # type: ignore[arg-type]
            x_TE = parts.drawn(count, WIDTH)
            if kind in ("squared", "experts"):
                fed = Fed(parts, kind, level)
                call, expected = fed.call(), fed.one_by_one(x_TE)
                for number in (1, 2, 5):
                    torch.set_num_threads(number)
                    for _ in range(rounds):  # threads that come early and late
                        assert torch.equal(call(x_TE), expected)
                continue
            block = Beside(parts, LAYERS["SSD"]) if kind == "beside" else None
            bare = block.mixer if block is not None else Bare(parts, LAYERS["SSD"], wide=kind == "wide mixer")
            given, x_TE = drawn_inputs(bare.layer, plan), x_TE.to(bare.row_dtype)
            states, places = copied(given), []
            if block is not None:
                block.state = state_of(parts.dtype)
                block.state.add_sequence(3)
                block.state.add_sequence(4)
                block.state.begin_forward(list(range(count)), [1] * count)
                found = block.state.open_pass().attention_parts(0, None, parts.dtype)
                assert found is not None
                places.append(found)
                expected, call = block.one_by_one(x_TE, states, plan), block.call()
            else:
                expected, call = bare.one_by_one(x_TE, states, plan), bare.call()
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                for _ in range(rounds):
                    ours = copied(given)
                    assert torch.equal(call(x_TE, ours.parts(plan), *places), expected)
                    assert all(map(torch.equal, ours.pools, states.pools))
    finally:
        rows.use_level(2)


# -- stacks ----------------------------------------------------------------------------------------


def states_of(plan: RecurrencePlan, inputs: list[Inputs]) -> StackStates:
    return StackStates(plan, inputs[0].sources, inputs[0].targets, StackPools(tuple(one.pools for one in inputs)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", [HALF, (torch.bfloat16, "int8")], ids=lambda form: form[1])
def test_models_with_rows_in_float32(form: tuple[torch.dtype, WeightForm], tied: bool) -> None:
    parts = Parts(form, seed=4)
    blocks = [Bare(parts, LAYERS[name], wide=True) for name in ("SSD in groups", "SSD", "delta rule")]
    norm = NormWeight(parts.drawn(WIDTH).float(), EPS)
    head, table_VE = parts.map(VOCABULARY, WIDTH), parts.drawn(VOCABULARY, WIDTH)
    rows = parts.kernel.pack(table_VE, None, "bfloat16")
    stack = parts.blocks.stack(
        [block.call() for block in blocks], ModelEnds(rows if tied else table_VE, norm, head, 1.7)
    )
    assert stack is not None
    assert (stack.most_tokens, stack.dtype) == (MOST_ROWS, torch.bfloat16)
    assert not stack.takes(parts.drawn(1, WIDTH))
    assert torch.equal(unpack(rows.weights).to(torch.bfloat16), table_VE)
    for counts in ((1, 1, 1), (4, 9, 1)):
        plan, none = chains(list(counts)), np.empty(0, np.int64)
        inputs = [drawn_inputs(block.layer, plan) for block in blocks]
        tokens = np.arange(plan.num_rows) * 11 % VOCABULARY
        x_TE = table_VE[torch.from_numpy(tokens)].mul_(1.7).float()
        given, second = [copied(one) for one in inputs], [copied(one) for one in inputs]
        found = stack.model(tokens, StackParts(none, none, states_of(plan, given)))
        outputs = stack.outputs(x_TE, StackParts(none, none, states_of(plan, second)), (0, 2))
        expected = []
        for block, one in zip(blocks, inputs, strict=True):
            x_TE = block.one_by_one(x_TE, one, plan)
            expected.append(x_TE)
        n_TE = parts.rows.rms_norm(x_TE, norm.weight_E, EPS).to(parts.dtype)
        assert torch.equal(found.logits_TV, head(n_TE).float())
        assert torch.equal(outputs[0], expected[0])
        assert torch.equal(outputs[1], expected[2])
        for one, other in zip(given, inputs, strict=True):
            assert all(map(torch.equal, one.pools, other.pools))


class Various:
    """All kinds of blocks, with a table of tokens and a head."""

    def __init__(self, form: tuple[torch.dtype, WeightForm]) -> None:
        self.parts = parts = Parts(form, seed=7)
        self.beside, self.bare = Beside(parts, LAYERS["SSD"]), Bare(parts, LAYERS["SSD in groups"])
        self.blocks = (Fed(parts, "experts"), self.beside, self.bare, Fed(parts, "squared"), Fed(parts, "gated"))
        self.norm, self.head = parts.norm(), parts.map(VOCABULARY, WIDTH)
        self.table_VE = parts.drawn(VOCABULARY, WIDTH)

    def stack(self) -> NativeStack:
        calls = [block.call() for block in self.blocks]
        found = self.parts.blocks.stack(calls, ModelEnds(self.table_VE, self.norm, self.head))
        assert found is not None
        return found

    def one_by_one(self, x_TE: Tensor, plan: RecurrencePlan, inputs: list[Inputs]) -> list[Tensor]:
        found, states = [], iter(inputs)
        for block in self.blocks:
            x_TE = block.one_by_one(x_TE) if isinstance(block, Fed) else block.one_by_one(x_TE, next(states), plan)
            found.append(x_TE)
        return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_stacks_of_all_kinds(form: tuple[torch.dtype, WeightForm]) -> None:
    model, other = Various(form), state_of(form[0])
    stack = model.stack()
    for counts in ((1, 1, 1), (4, 9, 1), (1, 1, 1)):
        plan = chains(list(counts))
        inputs = [drawn_inputs(layer, plan) for layer in (model.beside.mixer.layer, model.bare.layer)]
        for state in (model.beside.state, other):
            state.begin_forward([0, 1, 2], list(counts))
        places = other.open_pass().attention_parts(0, None, form[0])
        assert places is not None
        given = [copied(one) for one in inputs]
        attention = (np.array([places.layer]), np.array([places.forward]))
        tokens = np.arange(plan.num_rows) * 11 % VOCABULARY
        x_TE = model.table_VE[torch.from_numpy(tokens)]
        expected = model.one_by_one(x_TE, plan, inputs)
        found = stack.model(tokens, StackParts(*attention, states_of(plan, given)))
        n_TE = model.parts.rows.rms_norm(expected[-1], model.norm.weight_E, EPS)
        assert torch.equal(found.logits_TV, model.head(n_TE).float())
        for one, two in zip(given, inputs, strict=True):
            assert all(map(torch.equal, one.pools, two.pools))
        before = [drawn_inputs(layer, plan) for layer in (model.beside.mixer.layer, model.bare.layer)]
        outputs = stack.outputs(x_TE, StackParts(*attention, states_of(plan, before)), (0, 1, 3))
        assert all(map(torch.equal, outputs, (expected[0], expected[1], expected[3])))
        for state in (model.beside.state, other):
            state.end_forward()


def test_parts_that_do_not_fit_are_not_joined() -> None:
    parts, half = Parts((torch.float32, "float32"), 1), Parts(HALF, 1)  # type: ignore[arg-type]
    block, other = Bare(parts, LAYERS["SSD"]), Bare(half, LAYERS["SSD"])
    blocks, tail, scale_Z = parts.blocks, block.tail(), parts.drawn(block.layer.columns)
    given = (block.norm, block.project, None, block.mixer, tail)
    assert blocks.mixed(*given, scale_Z=scale_Z) is not None
    assert blocks.mixed(*given, scale_Z=scale_Z[1:]) is None
    assert blocks.mixed(*given, scale_Z=scale_Z.bfloat16()) is None
    assert blocks.mixed(*given, scale_Z=scale_Z.repeat_interleave(2)[::2]) is None
    assert blocks.bare_tail(block.out, 1.0, torch.bfloat16) is None
    wide, narrow = blocks.bare_tail(other.out, 1.0, torch.float32), blocks.bare_tail(other.out)
    assert wide is not None
    assert narrow is not None
    of_half = (other.project, None, other.mixer)
    for weight, end, fits in (
        (other.norm_E, wide, False),
        (other.norm_E.float(), wide, True),
        (other.norm_E, narrow, True),
        (other.norm_E.float(), narrow, True),
    ):
        assert (blocks.mixed(NormWeight(weight, EPS), *of_half, end) is not None) is fits
    fed = Fed(parts, "squared")
    mlp = fed.mlp
    assert isinstance(mlp, MLPParts)
    assert blocks.feed_forward(fed.norm, mlp._replace(gate=GateForm("silu"))) is None
    assert blocks.feed_forward(NormWeight(fed.norm.weight_E[1:], EPS), mlp) is None
    assert blocks.feed_forward(NormWeight(fed.norm.weight_E.bfloat16(), EPS), mlp) is None
    assert blocks.feed_forward(fed.norm, mlp._replace(down=Fed(half, "squared").down)) is None
    assert blocks.feed_forward(Fed(half, "experts").norm, Fed(parts, "experts").mlp) is None
    assert blocks.feed_forward(fed.norm, Fed(half, "experts").mlp) is not None  # a norm in float32
    beside, gated = Beside(parts, LAYERS["SSD"]), Fed(parts, "gated").call()
    whole = beside.call()
    assert blocks.beside(block.call(), gated) is None
    assert blocks.beside(gated, whole) is None
    assert blocks.beside(other.call(), whole) is None
    assert blocks.beside(whole, whole) is None
    assert not other.call().takes(half.drawn(1, WIDTH).float())
    ends = ModelEnds(half.drawn(VOCABULARY, WIDTH), NormWeight(half.drawn(WIDTH), EPS), half.map(VOCABULARY, WIDTH))
    call = blocks.mixed(NormWeight(other.norm_E.float(), EPS), *of_half, wide)
    assert call is not None
    stack = blocks.stack([call], ends)
    assert stack is not None
    assert stack.most_tokens == 0  # the last norm is of another type
    assert blocks.stack([call, other.call()], None) is None
    assert blocks.whole(None, parts.map(8, WIDTH), tail, factor=0.5) is None
