"""Decoder blocks with recurrent layers or gated attention as one call, by themselves and in stacks:
every number, of results and of states, is that of the parts one by one.

Letters: T rows, E model width, F inner width, Z columns of the projection, S slots.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.native_forms import FORMS, three_threads  # noqa: F401
from tests.kernels.test_native_experts import Layer as Experts
from tests.kernels.test_native_experts import Shape
from tests.kernels.test_native_mixers import LAYERS as EVERY_LAYER
from tests.kernels.test_native_mixers import PLANS, Inputs, Layer, chains, drawn_inputs, trees
from torch import Tensor

from quire.contracts.block_calls import MLPParts, ModelEnds, NormWeight, Residuals, StackParts
from quire.contracts.experts import GateForm
from quire.contracts.layers import FullAttention, RopeSpec
from quire.contracts.linear import WeightForm
from quire.contracts.recurrence import RecurrencePlan, StackPools, StackStates
from quire.contracts.rows import HeadNormWeights
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.block import MOST_ROWS, NativeBlock, NativeBlocks, NativeStack, NativeTail
from quire.kernels.experts import NativeMixture
from quire.kernels.linear.cpu_linear import EMULATED, NativeLinear, NativeMap
from quire.kernels.native_library import native_library, native_problem
from quire.kernels.recurrence.cpu_recurrence import NativeMixers, native_mixers
from quire.kernels.rows.cpu_rows import NativeRows, native_rows
from quire.kv.state import State

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_problem())

WIDTH, INNER, EPS = 48, 88, 1e-5
LAYERS = {
    # Maps in any form have a multiple of 8 inputs.
    name: replace(layer, conv_channels=layer.conv_channels // 8 * 8)
    for name, layer in EVERY_LAYER.items()
}
SHAPES = (
    Shape(width=WIDTH),
    Shape(experts=40, choices=5, width=WIDTH, inner=72, shared=48),
    Shape(experts=3, choices=3, width=WIDTH, inner=8, shared=16, is_weighed=False),
)
"""Of experts."""


def row_kernels() -> NativeRows:
    found = native_rows()
    assert found is not None
    return found


def mixers() -> NativeMixers:
    found = native_mixers()
    assert found is not None
    return found


class Parts:
    """Random maps and norms of one form."""

    def __init__(self, form: tuple[torch.dtype, WeightForm], seed: int, level: int | None = None) -> None:
        library = native_library()
        assert library is not None
        self.dtype, self.form = form
        self.generator = torch.Generator().manual_seed(seed)
        self.kernel, self.blocks, self.rows = NativeLinear(library, level), NativeBlocks(library), row_kernels()

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def map(self, outputs: int, inputs: int, *, bias: bool = False) -> NativeMap:
        weight_OI = self.drawn(outputs, inputs) * inputs**-0.5
        if (self.dtype, self.form) == (torch.float32, "bfloat16"):
            weight_OI = weight_OI.bfloat16().float()  # so that no bit is lost
        return self.kernel.pack(weight_OI, self.drawn(outputs) if bias else None, self.form)

    def norm(self) -> NormWeight:
        return NormWeight(self.drawn(WIDTH), EPS)


def mixture_of(layer: Experts) -> NativeMixture:
    found = layer.call.call
    assert isinstance(found, NativeMixture)
    return found


class Ended:
    """A block from its heads on, with a gated MLP or with experts."""

    def __init__(self, parts: Parts, columns: int, shape: Shape | None = None) -> None:
        """``shape``: of the experts; None: there are none."""
        self.parts, self.begin, self.norm = parts, parts.norm(), parts.norm()
        self.experts = None if shape is None else Experts(shape, (parts.dtype, parts.form))
        self.out, self.gate_up, self.down = (
            parts.map(WIDTH, columns, bias=True),
            parts.map(2 * INNER, WIDTH),
            parts.map(WIDTH, INNER, bias=True),
        )

    def tail(self) -> NativeTail:
        blocks, sums = self.parts.blocks, Residuals(self.norm)
        if self.experts is None:
            found = blocks.tail(self.out, sums, MLPParts(self.gate_up, self.down, GateForm("silu")))
        else:
            found = blocks.tail(self.out, sums, mixture_of(self.experts))
        assert found is not None
        return found

    def normed(self, x_TE: Tensor) -> Tensor:
        return self.parts.rows.rms_norm(x_TE, self.begin.weight_E, EPS)

    def end(self, heads_TC: Tensor, x_TE: Tensor) -> Tensor:
        h_TE, rows = self.out(heads_TC), self.parts.rows
        n_TE = rows.add_rms_norm(h_TE, x_TE, self.norm.weight_E, EPS)
        if self.experts is not None:
            return self.experts.call(n_TE).add_(h_TE)
        return self.down(rows.gated(self.gate_up(n_TE), "silu")).add_(h_TE)


class Mixed(Ended):
    """A block with a recurrent layer."""

    def __init__(self, parts: Parts, layer: Layer, shape: Shape | None = None) -> None:
        super().__init__(parts, layer.width, shape)
        self.layer = replace(layer, dtype=parts.dtype).drawn()
        self.mixer = self.layer.call(mixers())
        self.project = parts.map(layer.columns, WIDTH, bias=True)
        self.rates = parts.map(2 * layer.sizes.heads, WIDTH) if layer.kind == "delta" else None

    def call(self) -> NativeBlock:
        found = self.parts.blocks.mixed(self.begin, self.project, self.rates, self.mixer, self.tail())
        assert found is not None
        return found

    def states(self, plan: RecurrencePlan) -> Inputs:
        return drawn_inputs(self.layer, plan)

    def one_by_one(self, x_TE: Tensor, inputs: Inputs, plan: RecurrencePlan) -> Tensor:
        n_TE = self.normed(x_TE)
        rates = None if self.rates is None else self.rates(n_TE)
        return self.end(self.mixer(self.project(n_TE), inputs.parts(plan), rates), x_TE)


def copied(inputs: Inputs) -> Inputs:
    return replace(inputs, pools=tuple(pool.clone() for pool in inputs.pools))


def few(plan: RecurrencePlan) -> bool:
    return plan.num_rows <= MOST_ROWS


PLANS_OF_FEW = {
    **{name: plan for name, plan in PLANS.items() if few(plan)},
    "one": chains([1]),
    "decodes beside short prompts": chains([1, 30, 0, 1, 17]),
    "most rows": chains([1] * MOST_ROWS),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_every_number_is_that_of_the_parts(layer: Layer, form: tuple[torch.dtype, WeightForm]) -> None:
    block = Mixed(Parts(form, seed=layer.columns), layer)
    call = block.call()
    for plan in PLANS_OF_FEW.values():
        x_TE, inputs = block.parts.drawn(plan.num_rows, WIDTH), block.states(plan)
        ours, before = copied(inputs), x_TE.clone()
        assert call.takes(x_TE)
        expected = block.one_by_one(x_TE, inputs, plan)
        assert torch.equal(call(x_TE, ours.parts(plan)), expected)
        assert expected.isfinite().all()
        assert torch.equal(x_TE, before)
        for one, other in zip(ours.pools, inputs.pools, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["convolution with a bias and odd channels", "delta rule", "SSD in groups"])
def test_every_level_and_any_number_of_threads(name: str, rounds: int) -> None:
    library = native_library()
    assert library is not None
    rows = row_kernels()
    try:
        for level, rows_level, count in itertools.product(
            (*range(NativeLinear(library).level + 1), EMULATED), (0, 1, 2), (1, 5)
        ):
            rows.use_level(rows_level)
            block = Mixed(Parts((torch.bfloat16, "bfloat16"), seed=count, level=level), LAYERS[name])
            plan, call, x_TE = chains([1] * count), block.call(), block.parts.drawn(count, WIDTH)
            given = block.states(plan)
            states = copied(given)
            expected = block.one_by_one(x_TE, states, plan)
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                for _ in range(rounds):  # threads that come early and late
                    ours = copied(given)
                    assert torch.equal(call(x_TE, ours.parts(plan)), expected)
                    assert all(map(torch.equal, ours.pools, states.pools))
    finally:
        rows.use_level(2)


def test_parts_that_do_not_fit_are_not_joined() -> None:
    parts, other = Parts((torch.float32, "float32"), 1), Parts((torch.bfloat16, "bfloat16"), 1)
    block, narrow, wide = (Mixed(parts, LAYERS[name]) for name in ("delta rule", "delta rule of small heads", "SSD"))
    half, mixed, tail = Mixed(other, LAYERS["delta rule"]), parts.blocks.mixed, block.tail()
    assert mixed(block.begin, block.project, block.rates, block.mixer, tail) is not None
    assert mixed(block.begin, block.project, None, block.mixer, tail) is None
    assert mixed(block.begin, block.project, narrow.rates, block.mixer, tail) is None
    assert mixed(block.begin, narrow.project, block.rates, block.mixer, tail) is None
    assert mixed(block.begin, block.project, block.rates, block.mixer, narrow.tail()) is None
    assert mixed(block.begin, block.project, block.rates, half.mixer, tail) is None
    assert mixed(block.begin, half.project, half.rates, half.mixer, tail) is None
    assert mixed(block.begin, block.project, half.rates, block.mixer, tail) is None
    assert mixed(half.begin, block.project, block.rates, block.mixer, tail) is None
    assert mixed(wide.begin, wide.project, block.rates, wide.mixer, wide.tail()) is None
    assert mixed(wide.begin, wide.project, None, wide.mixer, wide.tail()) is not None
    gated = Gated(parts, gated=True, by_head=True)
    whole, end = parts.blocks.whole, gated.tail()
    assert whole(gated.begin, gated.qkv, end, gates=gated.gates) is not None
    assert whole(gated.begin, gated.qkv, end, gates=gated.gates, gated=True) is None
    assert whole(gated.begin, gated.qkv, end, gates=parts.map(HEADS + 2, WIDTH)) is None
    assert whole(gated.begin, gated.qkv, end, gates=parts.map(HEADS, WIDTH + 8)) is None
    assert whole(gated.begin, gated.qkv, end, gates=Gated(other, gated=False, by_head=True).gates) is None
    square = parts.map(block.layer.columns, 2 * WIDTH)
    assert mixed(block.begin, square, block.rates, block.mixer, tail) is None


# -- stacks ----------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD = 3, 1, 24
ROPE = RopeSpec(theta=1e4, rotary_dim=12)
SPEC = FullAttention(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD, value_dim=HEAD, rope=ROPE, rope_mode="normal"
)


class Gated(Ended):
    """A block with attention, over a state of its own; perhaps each query head has a gate."""

    def __init__(self, parts: Parts, gated: bool, shape: Shape | None = None, *, by_head: bool = False) -> None:
        """``gated``: gates of the size of a head. ``by_head``: one number for each head."""
        super().__init__(parts, HEADS * HEAD, shape)
        self.gated, self.gates = gated, parts.map(HEADS, WIDTH) if by_head else None
        self.qkv = parts.map((HEADS * (1 + gated) + 2 * KV_HEADS) * HEAD, WIDTH)
        self.norms = HeadNormWeights(parts.drawn(HEAD), parts.drawn(HEAD), EPS)

    def call(self) -> NativeBlock:
        found = self.parts.blocks.whole(self.begin, self.qkv, self.tail(), gated=self.gated, gates=self.gates)
        assert found is not None
        return found

    def one_by_one(self, x_TE: Tensor, state: State) -> Tensor:
        qkv_TC = self.qkv(self.normed(x_TE))
        gate_THD = None if self.gates is None else self.gates(self.normed(x_TE))[:, :, None]
        if self.gated:
            q_TC, kv_TC = qkv_TC.split([2 * HEADS * HEAD, 2 * KV_HEADS * HEAD], 1)
            q_THD, gate_THD = q_TC.view(-1, HEADS, 2 * HEAD).chunk(2, -1)
            qkv_TC = torch.cat((q_THD.flatten(1), kv_TC), 1)
        out_THD = state.open_pass().attend_qkv(0, qkv_TC, self.norms)
        if gate_THD is not None:
            self.parts.rows.gate_heads(out_THD, gate_THD)
        return self.end(out_THD.flatten(1), x_TE)


def state_of(dtype: torch.dtype) -> State:
    rows = row_kernels()
    state = State([SPEC], capacity=512, page_size=4, dtype=dtype, backend=NativeAttention(), rows=rows)
    for seq in range(3):
        state.add_sequence(seq)
    return state


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("gates", ["plain", "gated", "by head"])
def test_attention_with_gates(gates: str, form: tuple[torch.dtype, WeightForm]) -> None:
    block = Gated(Parts(form, seed=3), gates == "gated", by_head=gates == "by head")
    call, states = block.call(), [state_of(block.parts.dtype) for _ in range(2)]
    for counts in ((5, 1, 30), (1, 1, 1), (1, 7, 1), (1, 1, 1)):
        x_TE = block.parts.drawn(sum(counts), WIDTH)
        for state in states:
            state.begin_forward([0, 1, 2], list(counts))
        parts = states[0].open_pass().attention_parts(0, block.norms, block.parts.dtype)
        assert parts is not None
        expected = block.one_by_one(x_TE, states[1])
        assert torch.equal(call(x_TE, parts), expected)
        assert expected.isfinite().all()
        for state in states:
            state.end_forward()
        views = [state.parts.layer(0).view for state in states]
        assert torch.equal(views[0].k, views[1].k)
        assert torch.equal(views[0].v, views[1].v)


class Mixture:
    """Blocks of all kinds one behind the other, with a table of tokens and a head."""

    def __init__(self, form: tuple[torch.dtype, WeightForm], *, experts: bool = False) -> None:
        """``experts``: some blocks have them in place of an MLP."""
        self.parts = Parts(form, seed=7)
        names = {"delta rule": SHAPES[1], "SSD in groups": None, "convolution": SHAPES[0]}
        self.mixed = [Mixed(self.parts, LAYERS[name], shape if experts else None) for name, shape in names.items()]
        self.attention = Gated(self.parts, gated=True, shape=SHAPES[2] if experts else None)
        self.blocks: list[Mixed | Gated] = [self.mixed[0], self.mixed[1], self.attention, self.mixed[2]]
        self.norm, self.head = self.parts.norm(), self.parts.map(70, WIDTH)
        self.table_VE = self.parts.drawn(70, WIDTH)
        self.state = state_of(self.parts.dtype)

    def stack(self) -> NativeStack:
        calls = [block.call() for block in self.blocks]
        found = self.parts.blocks.stack(calls, ModelEnds(self.table_VE, self.norm, self.head))
        assert found is not None
        assert found.most_tokens == MOST_ROWS
        return found

    def parts_of(self, plan: RecurrencePlan, inputs: list[Inputs], pools: StackPools | None = None) -> StackParts:
        places = self.state.open_pass().attention_parts(0, self.attention.norms, self.parts.dtype)
        assert places is not None
        first = inputs[0]
        made = StackPools(tuple(one.pools for one in inputs)) if pools is None else pools
        states = StackStates(plan, first.sources, first.targets, made)
        return StackParts(np.array([places.layer]), np.array([places.forward]), states)

    def one_by_one(self, x_TE: Tensor, plan: RecurrencePlan, inputs: list[Inputs]) -> Tensor:
        states = iter(inputs)
        for block in self.blocks:
            if isinstance(block, Mixed):
                x_TE = block.one_by_one(x_TE, next(states), plan)
            else:
                x_TE = block.one_by_one(x_TE, self.state)
        return x_TE


@pytest.mark.parametrize("experts", [False, True], ids=["gated MLPs", "experts"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_stacks_and_models(form: tuple[torch.dtype, WeightForm], experts: bool) -> None:
    """Each forward over pools of its own, as different states have them; with equal slots."""
    model = Mixture(form, experts=experts)
    stack = model.stack()
    for counts in ((1, 1, 1), (4, 9, 1), (1, 1, 1)):
        plan = chains(list(counts))
        inputs = [block.states(plan) for block in model.mixed]
        tokens = np.arange(plan.num_rows) * 11 % 70
        x_TE = model.table_VE[torch.from_numpy(tokens)]
        model.state.begin_forward([0, 1, 2], list(counts))
        given = [copied(one) for one in inputs]
        parts = model.parts_of(plan, given)
        found = stack.model(tokens, parts)
        expected = model.one_by_one(x_TE, plan, inputs)
        logits_TV = model.head(model.parts.rows.rms_norm(expected, model.norm.weight_E, EPS)).float()
        assert torch.equal(found.logits_TV, logits_TV)
        for one, other in zip(given, inputs, strict=True):
            assert all(map(torch.equal, one.pools, other.pools))
        first, last = stack.outputs(x_TE, parts, (1, 3))
        assert torch.equal(last, expected)
        assert not torch.equal(first, expected)
        model.state.end_forward()


def test_a_stack_holds_no_pools_and_knows_each_state() -> None:
    """Two states in turns; the pools of one that is gone are free."""
    model = Mixture((torch.float32, "float32"))
    stack, plan = model.stack(), chains([1, 1, 1])
    model.state.begin_forward([0, 1, 2], [1, 1, 1])
    x_TE, each = model.parts.drawn(3, WIDTH), []
    for seed in range(2):
        inputs = [drawn_inputs(block.layer, plan, seed) for block in model.mixed]
        pools = StackPools(tuple(one.pools for one in inputs))
        each.append((model.parts_of(plan, inputs, pools), model.one_by_one(x_TE, plan, inputs)))
    assert not torch.equal(each[0][1], each[1][1])
    for parts, expected in (*each, *each):
        assert torch.equal(stack(x_TE, parts), expected)
    states = each[0][0].states
    assert states is not None
    gone = weakref.ref(states.pools)
    del each, parts, pools, inputs, states
    gc.collect()
    assert gone() is None


def test_trees_in_a_stack() -> None:
    model = Mixture((torch.float32, "float32"))
    model.blocks = [*model.mixed]
    stack = model.parts.blocks.stack([block.call() for block in model.mixed], None)
    assert stack is not None
    plan = trees([[-1, 0, 0, 1], [-1, -1, 1]])
    inputs = [block.states(plan) for block in model.mixed]
    given, x_TE = [copied(one) for one in inputs], model.parts.drawn(plan.num_rows, WIDTH)
    none = np.empty(0, np.int64)
    states = StackStates(plan, inputs[0].sources, inputs[0].targets, StackPools(tuple(one.pools for one in given)))
    assert torch.equal(stack(x_TE, StackParts(none, none, states)), model.one_by_one(x_TE, plan, inputs))
    for one, other in zip(given, inputs, strict=True):
        assert all(map(torch.equal, one.pools, other.pools))
