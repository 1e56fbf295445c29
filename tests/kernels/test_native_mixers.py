"""Whole recurrent layers in C++, at every level, against a definition in float64 by loops, and
against themselves to the bit in other batches, cuts and numbers of threads.

Bounds are derived from the precision. Letters: T rows; C channels; W taps; H heads; J key heads; K,
V sizes of keys and values; S slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.recurrence import (
    GatedNormWeight,
    MixerCall,
    RecurrencePlan,
    RecurrentParts,
    StateSizes,
    StepRates,
)
from quire.kernels.native_library import native_problem
from quire.kernels.recurrence.cpu_recurrence import MOST_KEYS, MOST_TAPS, NativeMixers, native_mixers
from quire.kernels.rows import cpu_rows
from quire.kernels.rows.cpu_rows import native_rows

LEVELS = (0, 1, 2)
NO_STATE = StateSizes(1, 1, 0, 0)
SINGLE = torch.finfo(torch.float32).eps
HALF = 2.0**-8
"""Of bfloat16: a number is rounded by half of it at most."""
EPS = 1e-6


@pytest.fixture(params=LEVELS)
def mixers(request: pytest.FixtureRequest) -> Iterator[NativeMixers]:
    """The kernels at each level; a level that the processor lacks is skipped."""
    found, rows = native_mixers(), native_rows()
    if found is None or rows is None:
        pytest.skip(native_problem())
    if rows.use_level(request.param) != request.param:
        pytest.skip(f"this processor has no level {request.param}")
    yield found
    rows.use_level(max(LEVELS))


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also for little work."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(cpu_rows, "ONE_THREAD", 1)
    yield
    torch.set_num_threads(before)


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer with random weights."""

    kind: str
    sizes: StateSizes = NO_STATE
    taps: int = 4
    conv_channels: int = 0
    """Of a short convolution."""
    bias: bool = False
    norm: str = "after"
    """``after`` or ``before`` the gate is multiplied, or ``none``"""
    norm_parts: int = 1
    bounds: tuple[float, float | None] = (0.0, None)
    dtype: torch.dtype = torch.float32
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        heads, key_heads, keys, values = self.sizes
        return self.conv_channels or 2 * key_heads * keys + heads * values

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.conv_channels or self.sizes.width

    @property
    def columns(self) -> int:
        """Columns of the projection."""
        if self.kind == "conv":
            return 3 * self.channels
        return self.channels + self.width + self.sizes.heads * (self.kind == "ssd")

    def drawn(self, seed: int = 0) -> Layer:
        """Return the layer with its weights."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        heads = self.sizes.heads
        weights = {
            "conv": (normal(self.channels, self.taps) * 0.5).to(self.dtype),
            "rate": -normal(heads).abs() - 0.1,
            "step_bias": normal(heads),
            "skip": normal(heads),
            "norm": normal(self.sizes.values if self.kind == "delta" else self.width) + 1,
        }
        if self.bias:
            weights["bias"] = normal(self.channels).to(self.dtype)
        return replace(self, weights=weights)

    def call(self, mixers: NativeMixers) -> MixerCall:
        """Return the layer as one call."""
        given = self.weights
        found: MixerCall | None
        if self.kind == "conv":
            found = mixers.short_conv(given["conv"], given.get("bias"))
        else:
            rates = StepRates(given["rate"], given["step_bias"], *self.bounds)
            part = self.sizes.values if self.kind == "delta" else self.width // self.norm_parts
            norm = GatedNormWeight(given["norm"], EPS, part, self.norm == "before")
            if self.kind == "delta":
                found = mixers.delta_rule(given["conv"], self.sizes, rates, norm, self.sizes.keys**-0.5)
            else:
                last = None if self.norm == "none" else norm
                found = mixers.ssd(given["conv"], given.get("bias"), self.sizes, rates, given["skip"], last)
        assert found is not None
        return found


LAYERS = {
    "convolution": Layer(kind="conv", conv_channels=64, taps=3),
    "convolution with a bias and odd channels": Layer(kind="conv", conv_channels=37, taps=4, bias=True),
    "convolution of two taps": Layer(kind="conv", conv_channels=8, taps=2),
    "delta rule": Layer(kind="delta", sizes=StateSizes(4, 2, 32, 128)),
    "delta rule of odd sizes": Layer(kind="delta", sizes=StateSizes(3, 1, 17, 24), taps=3),
    "delta rule of small heads": Layer(kind="delta", sizes=StateSizes(2, 2, 8, 8), taps=2),
    # Decodes of several write such states past the caches, if columns are whole lines.
    "delta rule of large states": Layer(kind="delta", sizes=StateSizes(2, 1, 128, 176)),
    "SSD of large states": Layer(kind="ssd", sizes=StateSizes(8, 1, 64, 56)),
    "SSD of large states in lines": Layer(kind="ssd", sizes=StateSizes(8, 1, 64, 48)),
    "SSD": Layer(kind="ssd", sizes=StateSizes(4, 1, 32, 64), bias=True, norm="before"),
    "SSD in groups": Layer(kind="ssd", sizes=StateSizes(6, 3, 16, 20), norm="before", norm_parts=3),
    "SSD without a norm": Layer(kind="ssd", sizes=StateSizes(2, 1, 24, 48), norm="none", bias=True),
    "SSD with bounds": Layer(kind="ssd", sizes=StateSizes(17, 1, 9, 8), norm="after", bounds=(0.5, 1.0)),
}


# -- plans -----------------------------------------------------------------------------------------


def chains(lengths: Sequence[int], wanted: Sequence[int] | None = None) -> RecurrencePlan:
    """Return chains, by default with the state after each one's last row wanted."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(starts[-1])
    first = np.zeros(total, dtype=bool)
    first[starts[:-1][np.diff(starts) > 0]] = True
    entry = np.repeat(np.arange(len(lengths)), lengths)
    ends = starts[1:][np.diff(starts) > 0] - 1
    return RecurrencePlan(
        starts=starts,
        parents=np.where(first, -1, np.arange(total) - 1),
        given=np.where(first, entry, -1),
        wanted=ends if wanted is None else np.array(sorted({*wanted, *ends.tolist()})),
        chains=True,
    )


def trees(parents: Sequence[Sequence[int]]) -> RecurrencePlan:
    """Return trees with parents as indices in their entry; all states are wanted."""
    starts = np.concatenate([[0], np.cumsum([len(one) for one in parents])]).astype(np.int64)
    flat = np.concatenate(
        [np.where(np.array(one) < 0, -1, np.array(one) + start) for one, start in zip(parents, starts, strict=False)]
    )
    entry = np.repeat(np.arange(len(parents)), np.diff(starts))
    return RecurrencePlan(
        starts=starts,
        parents=flat.astype(np.int64),
        given=np.where(flat < 0, entry, -1).astype(np.int64),
        wanted=np.arange(len(flat)),
        chains=False,
    )


PLANS = {
    "decodes": chains([1, 1, 1]),
    "a prompt": chains([70]),
    "prompts of several pieces": chains([150, 1, 0, 2, 130]),
    "states in between": chains([5, 9, 1], wanted=[0, 1, 6, 7]),
    "trees": trees([[-1, 0, 0, 1, 1, 3], [-1], [-1, -1, 1, 2, 0, 4]]),
}


@dataclass
class Inputs:
    """The rows of a forward, and pools with random states."""

    x_TC: Tensor
    rates: Tensor | None
    pools: tuple[Tensor, ...]
    sources: Tensor
    targets: Tensor

    def parts(self, plan: RecurrencePlan) -> RecurrentParts:
        return RecurrentParts(plan, self.sources, self.targets, self.pools)


def drawn_inputs(layer: Layer, plan: RecurrencePlan, seed: int = 1) -> Inputs:
    """Return inputs; slots are in any order, none is read and written."""
    generator = torch.Generator().manual_seed(seed)
    entries, rows, wanted = len(plan.starts) - 1, plan.num_rows, len(plan.wanted)
    slots = torch.randperm(entries + wanted + 2, generator=generator)
    heads, _, keys, values = layer.sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    pools = [normal(len(slots), layer.taps - 1, layer.channels).to(layer.dtype)]
    rates = None
    if layer.kind != "conv":
        pools.append(normal(len(slots), heads, keys, values))
        rates = normal(rows, 2 * heads).to(layer.dtype) if layer.kind == "delta" else None
    x_TC = normal(rows, layer.columns).to(layer.dtype)
    return Inputs(
        x_TC, rates, tuple(pools), slots[:entries].contiguous(), slots[entries : entries + wanted].contiguous()
    )


# -- the definition --------------------------------------------------------------------------------


def defined(layer: Layer, plan: RecurrencePlan, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Return outputs and the states after the wanted rows, in float64."""
    x_TC = inputs.x_TC.double()
    before: dict[int, list[Tensor]] = {}
    out, after = [], []
    for row in range(plan.num_rows):
        if plan.parents[row] < 0:
            slot = int(inputs.sources[plan.given[row]])
            states = [pool[slot].double() for pool in inputs.pools]
        else:
            states = before[int(plan.parents[row])]
        rates = None if inputs.rates is None else inputs.rates[row].double()
        y, before[row] = defined_row(layer, x_TC[row], rates, states)
        out.append(y)
    for state in range(len(inputs.pools)):
        after.append(torch.stack([before[row][state] for row in plan.wanted.tolist()]))
    return torch.stack(out), after


def defined_row(layer: Layer, x: Tensor, rates: Tensor | None, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    given = {name: weight.double() for name, weight in layer.weights.items()}
    channels, width, (heads, key_heads, keys, values) = layer.channels, layer.width, layer.sizes
    if layer.kind == "conv":
        b, c, x = x.split(channels)
        # The state holds b * x in the dtype of the model.
        inner = (b * x).to(layer.dtype).double()
    elif layer.kind == "delta":
        inner, gate = x.split([channels, width])
    else:
        gate, inner, steps = x.split([width, channels, heads])
    window = torch.cat([states[0], inner[None]])
    mixed = (window.T * given["conv"]).sum(1) + given.get("bias", 0.0)
    if layer.kind == "conv":
        return mixed * c, [window[1:]]
    mixed = F.silu(mixed)
    if layer.kind == "delta":
        q, k, v = mixed.split([key_heads * keys, key_heads * keys, width])
        q, k = (
            one.view(key_heads, keys) / (one.view(key_heads, keys).square().sum(1, keepdim=True) + 1e-6).sqrt()
            for one in (q, k)
        )
        assert rates is not None
        beta, steps = rates.sigmoid().split(heads)[0], rates.split(heads)[1]
        scale = keys**-0.5
    else:
        v, k, q = mixed.split([width, key_heads * keys, key_heads * keys])
        q, k, scale = q.view(key_heads, keys), k.view(key_heads, keys), 1.0
    q, k = (one.repeat_interleave(heads // key_heads, 0) for one in (q, k))
    v = v.view(heads, values)
    steps = F.softplus(steps + given["step_bias"])
    if layer.kind == "ssd":
        steps = steps.clamp(layer.bounds[0], layer.bounds[1])
    state = states[1] * (steps * given["rate"]).exp()[:, None, None]
    u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k)) if layer.kind == "delta" else v * steps[:, None]
    state = state + k[:, :, None] * u[:, None]
    y = scale * torch.einsum("hkv,hk->hv", state, q)
    if layer.kind == "ssd":
        y = y + given["skip"][:, None] * v
    y, gate = y.flatten(), F.silu(gate)
    if layer.norm == "before":
        y = y * gate
    if layer.norm != "none":
        parts = heads if layer.kind == "delta" else layer.norm_parts
        y = y.view(parts, -1)
        y = (y / (y.square().mean(1, keepdim=True) + EPS).sqrt()).flatten()
        y = y * given["norm"].repeat(heads if layer.kind == "delta" else 1)
    if layer.norm != "before":
        y = y * gate
    return y, [window[1:], state]


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.product(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_equal_to_the_definition(mixers: NativeMixers, layer: Layer, plan: RecurrencePlan, dtype: torch.dtype) -> None:
    layer = replace(layer, dtype=dtype).drawn()
    inputs = drawn_inputs(layer, plan)
    expected, states = defined(layer, plan, inputs)
    pools = [pool.clone() for pool in inputs.pools]
    out = layer.call(mixers)(inputs.x_TC, inputs.parts(plan), inputs.rates)
    assert out.dtype == dtype
    assert out.is_contiguous()
    # A sum of n products in float32 is off by n units of its absolute sum at most. Here n is K and
    # W, errors of a few units come from exp, and those of the rows before decay with the state.
    # Eight of them one behind the other are below this bound.
    least = 8 * (layer.sizes.keys + layer.taps + 8) * SINGLE
    scale = float(expected.abs().max())
    half = HALF if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(out.double(), expected, rtol=half, atol=least * scale)
    for pool, before, state in zip(inputs.pools, pools, states, strict=True):
        # Kept inputs are copies; of a short convolution they are rounded products.
        exact = pool.dtype == dtype and pool.dim() == 3 and layer.kind != "conv"
        rounding = HALF if pool.dtype == torch.bfloat16 else 2 * SINGLE
        bound = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": rounding, "atol": least * float(state.abs().max())}
        torch.testing.assert_close(pool[inputs.targets].double(), state, **bound)
        others = [slot for slot in range(len(pool)) if slot not in inputs.targets.tolist()]
        assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("three_threads")
def test_a_row_does_not_depend_on_its_batch(mixers: NativeMixers, name: str) -> None:
    layer = LAYERS[name].drawn()
    call, plan = layer.call(mixers), chains([150, 7, 1, 40])
    inputs = drawn_inputs(layer, plan)
    first = [pool.clone() for pool in inputs.pools]
    together = call(inputs.x_TC, inputs.parts(plan), inputs.rates)
    for entry, (start, stop) in enumerate(zip(plan.starts[:-1].tolist(), plan.starts[1:].tolist(), strict=True)):
        # In pieces of any length, single rows among them, each from the state of the one before.
        pools = tuple(pool[[int(inputs.sources[entry]), 0, 0]].clone() for pool in first)
        slot, at = 0, start
        for length in (1, 1, 17, 30, 1000):
            end = min(stop, at + length)
            if end == at:
                break
            rates = None if inputs.rates is None else inputs.rates[at:end]
            target = 1 + slot % 2
            parts = RecurrentParts(chains([end - at]), torch.tensor([slot]), torch.tensor([target]), pools)
            assert torch.equal(call(inputs.x_TC[at:end], parts, rates), together[at:end])
            slot, at = target, end
        assert at == stop
        for pool, alone in zip(inputs.pools, pools, strict=True):
            assert torch.equal(pool[inputs.targets[entry]], alone[slot])


@pytest.mark.parametrize("name", LAYERS)
def test_a_path_of_a_tree_is_a_chain(mixers: NativeMixers, name: str) -> None:
    layer = LAYERS[name].drawn()
    call, plan = layer.call(mixers), trees([[-1, 0, 0, 2, 1, 3]])
    inputs = drawn_inputs(layer, plan)
    pools = tuple(pool.clone() for pool in inputs.pools)
    out = call(inputs.x_TC, inputs.parts(plan), inputs.rates)
    path = [0, 2, 3, 5]
    rates = None if inputs.rates is None else inputs.rates[path]
    parts = RecurrentParts(chains([4]), inputs.sources, inputs.targets[-1:].contiguous(), pools)
    assert torch.equal(call(inputs.x_TC[path], parts, rates), out[path])
    assert all(
        torch.equal(one[inputs.targets[-1]], other[inputs.targets[-1]])
        for one, other in zip(inputs.pools, pools, strict=True)
    )


def test_extreme_gates(mixers: NativeMixers) -> None:
    """Steps of any size neither overflow nor become no numbers: the greatest forget all."""
    layer = LAYERS["SSD"].drawn()
    plan = chains([3])
    inputs = drawn_inputs(layer, plan)
    inputs.x_TC[1, -layer.sizes.heads :] = torch.tensor([-1e30, -200.0, 200.0, 1e6])
    expected, _ = defined(layer, plan, inputs)
    out = layer.call(mixers)(inputs.x_TC, inputs.parts(plan), inputs.rates)
    # As above; a step of 1e6 also makes an output of that size, whose norm is 1.
    least = 8 * (layer.sizes.keys + layer.taps + 8) * SINGLE
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=least * float(expected.abs().max()))


def test_what_is_not_a_number_stays_in_its_entry(mixers: NativeMixers) -> None:
    layer = LAYERS["delta rule"].drawn()
    plan = chains([3, 3])
    inputs = drawn_inputs(layer, plan)
    whole = layer.call(mixers)(inputs.x_TC, inputs.parts(plan), inputs.rates)
    broken = drawn_inputs(layer, plan)
    broken.x_TC[1] = math.nan
    out = layer.call(mixers)(broken.x_TC, broken.parts(plan), broken.rates)
    assert torch.equal(out[3:], whole[3:])
    assert torch.equal(out[0], whole[0])
    assert out[1].isnan().all()


def test_unsupported_layers_have_no_call(mixers: NativeMixers) -> None:
    assert mixers.short_conv(torch.zeros(8, 3, dtype=torch.float16), None) is None
    assert mixers.short_conv(torch.zeros(8, 3, dtype=torch.float64), None) is None
    assert mixers.short_conv(torch.zeros(8, MOST_TAPS + 1), None) is None
    layer = Layer(kind="ssd", sizes=StateSizes(1, 1, MOST_KEYS + 1, 8), norm="none").drawn()
    rates = StepRates(layer.weights["rate"], layer.weights["step_bias"])
    assert mixers.ssd(layer.weights["conv"], None, layer.sizes, rates, layer.weights["skip"], None) is None


@pytest.mark.parametrize(
    ("plan", "passes_on"),
    [
        (chains([3, 0, 2]), True),
        (replace(chains([3, 2]), wanted=np.array([2])), False),
        (trees([[-1, 0, 0]]), True),
        (replace(trees([[-1, 0, 0]]), wanted=np.array([2])), False),
        (replace(chains([2]), wanted=np.array([], dtype=np.int64)), False),
    ],
)
def test_plans_that_pass_states_on(plan: RecurrencePlan, passes_on: bool) -> None:
    assert plan.passes_on is passes_on
