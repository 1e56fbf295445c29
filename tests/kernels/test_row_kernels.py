"""Work on rows between the products, in PyTorch and in C++ at every level, against float64.

Bounds say how far a right answer may be from the exact one; they are derived from the precision. A
row's result is the same to the bit in any batch and on any number of threads.

Letters: as in ``contracts.rows``.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests import triton_machine
from torch import Tensor

from quire.contracts.kv_format import PlainRows
from quire.contracts.layers import RopeSpec
from quire.contracts.rows import ActivationName, HeadNormWeights, Rotation, RowKernels
from quire.kernels.native_library import native_problem
from quire.kernels.rows import cpu_rows as kernel_rows
from quire.kernels.rows.cpu_rows import NativeRows, native_rows, threads_for
from quire.kernels.rows.triton_rows import TritonRows
from quire.ops.rope import RotaryTable
from quire.ops.rows import REFERENCE_ROWS

EPS = 1e-3
SINGLE = torch.finfo(torch.float32).eps
WIDTHS = (1, 2, 15, 16, 17, 63, 64, 65, 576, 1000)
COUNTS = (0, 1, 5)
TYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
)
"""Of rows and weights. C++ leaves the last to PyTorch."""
LEVELS = (0, 1, 2)
CARRIED_ROWS = triton_machine.CarriedRows()


@pytest.fixture(params=["torch", *LEVELS, pytest.param("triton", marks=triton_machine.needs_triton)])
def kernels(request: pytest.FixtureRequest) -> Iterator[RowKernels]:
    """Each implementation; a level that the processor lacks is skipped."""
    if request.param in ("torch", "triton"):
        yield REFERENCE_ROWS if request.param == "torch" else CARRIED_ROWS
        return
    found = native()
    if found.use_level(request.param) != request.param:
        pytest.skip(f"this processor has no level {request.param}")
    yield found
    found.use_level(max(LEVELS))


def native() -> NativeRows:
    found = native_rows()
    if found is None:
        pytest.skip(native_problem())
    return found


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also for little work."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(kernel_rows, "ONE_THREAD", 1)
    yield
    torch.set_num_threads(before)


def rounds_twice(kernels: RowKernels, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's form runs, which rounds a value in between."""
    if kernels is CARRIED_ROWS:
        return dtype not in triton_machine.DTYPES
    return kernels is REFERENCE_ROWS or dtype == torch.float16


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers of both signs, some of them large and some tiny."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-6, 4, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_near(found: Tensor, exact: Tensor, off: Tensor | float) -> None:
    """``off``: how far float32 sums may be; then comes one rounding to the dtype."""
    assert found.shape == exact.shape
    assert found.stride(-1) == 1 or found.numel() < 2
    unit, least = torch.finfo(found.dtype).eps / 2, torch.finfo(found.dtype).smallest_normal
    bound = exact.abs() * unit * 1.01 + off + least
    assert ((found.double() - exact).abs() <= bound).all()


def exact_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_E.double()


@pytest.mark.product(2)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_norms(kernels: RowKernels, types: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, weight_dtype = types
    for width, count in itertools.product(WIDTHS, COUNTS):
        x, weight_E = drawn(count, width, dtype=dtype, seed=width), drawn(width, dtype=weight_dtype, seed=1)
        exact = exact_norm(x, weight_E, EPS)
        off = exact.abs() * SINGLE * (4 + width / 16)
        assert_near(kernels.rms_norm(x, weight_E, EPS), exact, off)
        # Rows of a wider tensor, heads of such rows, and every other column.
        wider = drawn(count, 3 * width, dtype=dtype, seed=2)
        wider[:, width : 2 * width] = x
        assert_near(kernels.rms_norm(wider[:, width : 2 * width], weight_E, EPS), exact, off)
        heads_THD = wider.view(count, 3, width)[:, 1:2]
        assert_near(kernels.rms_norm(heads_THD, weight_E, EPS), exact.unsqueeze(1), off.unsqueeze(1))
        assert_near(kernels.rms_norm(x.repeat_interleave(2, 1)[:, ::2], weight_E, EPS), exact, off)


@pytest.mark.product(2)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_norms_of_sums(kernels: RowKernels, types: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, weight_dtype = types
    for width, count in itertools.product(WIDTHS, COUNTS):
        x, y = (drawn(count, width, dtype=dtype, seed=seed) for seed in (width, width + 1))
        weight_E, before = drawn(width, dtype=weight_dtype, seed=1), x.clone()
        # The sum is rounded before its norm: it is what the next block reads.
        total = y + x
        found = kernels.add_rms_norm(y, x, weight_E, EPS)
        assert torch.equal(y, total)
        assert torch.equal(x, before)
        exact = exact_norm(total, weight_E, EPS)
        assert_near(found, exact, exact.abs() * SINGLE * (4 + width / 16))


@pytest.mark.product(2)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_scaled_sums_and_their_norms(kernels: RowKernels, types: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, weight_dtype = types
    for width, count, scale in itertools.product(WIDTHS, COUNTS, (0.22, -3.0)):
        y, x = (drawn(count, width, dtype=dtype, seed=seed) for seed in (width, width + 1))
        weight_E, before = drawn(width, dtype=weight_dtype, seed=1), x.clone()
        product = scale * y.double()
        exact = x.double() + product
        # The factor, the product and the sum are rounded once each in float32.
        off = (2 * product.abs() + exact.abs()) * SINGLE / 2
        total = y.clone()
        assert kernels.add_scaled(total, x, scale) is total
        assert_near(total, exact, off)
        found = kernels.add_rms_norm(y, x, weight_E, EPS, scale)
        assert_near(y, exact, off)
        assert torch.equal(x, before)
        normed = exact_norm(y, weight_E, EPS)
        assert_near(found, normed, normed.abs() * SINGLE * (4 + width / 16))
        # Triton's fused sum may round once where PyTorch's operation rounds twice.
        assert kernels is CARRIED_ROWS or torch.equal(y, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [7, 63, 576])
def test_scaled_sums_do_not_depend_on_the_place(kernels: RowKernels, dtype: torch.dtype, width: int) -> None:
    y, x = (drawn(37, width, dtype=dtype, seed=seed) for seed in (1, 2))
    total = kernels.add_scaled(y.clone(), x, 0.22)
    for row in (slice(0, 1), slice(36, 37), slice(3, 20)):
        assert torch.equal(kernels.add_scaled(y[row].clone(), x[row], 0.22), total[row])


@pytest.mark.parametrize("cap", [3.0, 30.0])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 17), (2, 5000), (1, 4096)], ids=str)
def test_soft_caps(kernels: RowKernels, shape: tuple[int, int], cap: float) -> None:
    x = drawn(*shape) * cap
    given = x.double()
    assert kernels.soft_cap(x, cap) is x
    exact = cap * torch.tanh(given / cap)
    # A quotient and a product are half a unit off each, and e^2x, whose sum with 1 is the divisor,
    # 2 units: with sums, division and difference 5 units where the result is small.
    assert_near(x, exact, exact.abs() * SINGLE * 6)


def test_soft_caps_over_all_magnitudes(kernels: RowKernels) -> None:
    """Relative error, also of small numbers; and the cap itself of large ones."""
    x = torch.cat([sign * torch.logspace(-37, 38, 3001) for sign in (1, -1)] + [torch.linspace(-30, 30, 4001)])
    given = x.double()
    exact = 5.0 * torch.tanh(given / 5.0)
    assert_near(kernels.soft_cap(x, 5.0), exact, exact.abs() * SINGLE * 6)
    bad = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0] * 3)
    expected = torch.tensor([math.nan, math.nan, 5.0, -5.0, 0.0, -0.0] * 3)
    found = kernels.soft_cap(bad, 5.0)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert torch.equal(found.signbit()[4::6], expected.signbit()[4::6])
    assert torch.equal(found.signbit()[5::6], expected.signbit()[5::6])


MOVES = {
    "others": [[0, 5, 7], [2, 9, 8]],
    "a chain": [[1, 2, 3], [2, 3, 4]],
    "two change places": [[4, 6], [6, 4]],
    "one slot to several": [[3, 3, 3, 0], [8, 1, 2, 9]],
    "none": [[], []],
}


@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_slots(kernels: RowKernels, dtype: torch.dtype, moves: list[list[int]]) -> None:
    """In all layers of all pools; all slots are read before one is written. A slot may be no
    multiple of 4 bytes, and longer than a program copies."""
    shapes = [[(3, 10, 2, 8), (3, 10, 2, 6)], [(2, 10, 1, 3), (2, 10, 1, 4)], [(1, 10, 3, 700)]]
    for number, group in enumerate(shapes):
        pools = [drawn(*shape, dtype=dtype, seed=number) for shape in group]
        expected = [pool.clone() for pool in pools]
        for before, pool in zip(expected, pools, strict=True):
            values = pool.clone()
            for source, target in zip(*moves, strict=True):
                before[:, target] = values[:, source]
        kernels.copy_slots(pools, np.array(moves, dtype=np.int64))
        assert all(map(torch.equal, pools, expected))


@triton_machine.needs_triton
def test_copies_of_slots_are_one_launch_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no slot is read and written; otherwise PyTorch copies."""
    pools = [torch.zeros(3, 10, 2, 8, device=triton_machine.DEVICE) for _ in range(2)]
    programs, grids = importlib.import_module("quire.kernels.rows.row_programs"), []

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(programs, "copy_words", Seen())
    for moves, launched in (("others", [(3, 3, 1)] * 2), ("a chain", []), ("two change places", [])):
        grids.clear()
        TritonRows().copy_slots(pools, np.array(MOVES[moves], dtype=np.int64))
        assert grids == launched


@pytest.mark.parametrize("x_shape", [(3, 8), (1, 8), (2, 4)])
def test_a_sum_of_other_shapes_is_as_in_torch(kernels: RowKernels, x_shape: tuple[int, ...]) -> None:
    weight_E, y, x = drawn(8), drawn(3, 8, seed=1), drawn(*x_shape, seed=2)
    if x_shape == (2, 4):
        with pytest.raises(RuntimeError):
            kernels.add_rms_norm(y, x, weight_E, EPS)
        return
    expected = exact_norm(y + x, weight_E, EPS)
    assert_near(kernels.add_rms_norm(y, x, weight_E, EPS), expected, expected.abs() * SINGLE * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_what_is_no_number(kernels: RowKernels, dtype: torch.dtype) -> None:
    """A bad row stays alone, and is as bad as in PyTorch."""
    x, weight_E = drawn(6, 33, dtype=dtype), drawn(33, dtype=dtype, seed=1)
    x[1, 3], x[2, 32], x[3, 0], x[4] = math.nan, math.inf, -math.inf, 0.0
    found, expected = kernels.rms_norm(x, weight_E, EPS), REFERENCE_ROWS.rms_norm(x, weight_E, EPS)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0].isfinite().all()
    assert (found[4] == 0).all()


# -- gates -----------------------------------------------------------------------------------------


def exact_gate(gate: Tensor, activation: ActivationName) -> Tensor:
    x = gate.double()
    if activation == "silu":
        return x * torch.sigmoid(x)
    if activation == "gelu_tanh":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


@pytest.mark.product(2)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates(kernels: RowKernels, dtype: torch.dtype, activation: ActivationName) -> None:
    rounded_twice = rounds_twice(kernels, dtype)
    for width, count in itertools.product(WIDTHS, COUNTS):
        gate, up = (drawn(count, width, dtype=dtype, seed=seed) for seed in (width, width + 1))
        found = kernels.gated(torch.cat((gate, up), -1), activation)
        exact = exact_gate(gate, activation) * up.double()
        # PyTorch computes (1 + tanh) / 2 and (1 + erf) / 2, right to the last place of 1.
        off = (gate.double() * up.double()).abs() * 4 * SINGLE
        if rounded_twice:
            off = off + exact.abs() * torch.finfo(dtype).eps + up.double().abs() * torch.finfo(dtype).smallest_normal
        assert_near(found, exact, off)
    wider = drawn(3, 50, dtype=dtype)
    assert torch.equal(kernels.gated(wider[:, 1:49], activation), kernels.gated(wider[:, 1:49].clone(), activation))
    heads = drawn(2, 3, 40, dtype=dtype)
    assert kernels.gated(heads, activation).shape == (2, 3, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clamped_gates(kernels: RowKernels, dtype: torch.dtype) -> None:
    """Beyond the limit on every side: a large gate is cut, a very negative one is not, up is cut on
    both sides."""
    for width, count in itertools.product(WIDTHS, COUNTS):
        h = drawn(count, 2 * width, dtype=dtype, seed=width)
        found = kernels.clamped(h, 1.7, 2.0)
        gate, up = h[:, 0::2].double().clamp(max=2.0), h[:, 1::2].double().clamp(-2.0, 2.0)
        exact = gate * torch.sigmoid(1.7 * gate) * (up + 1)
        # An exponent of magnitude m is off by m half units, and so is the power; four roundings.
        # Where up is near -1, their sum has an error of its own.
        off = exact.abs() * SINGLE * (8 + (1.7 * gate).abs()) + gate.abs() * SINGLE
        assert_near(found, exact, off)
    wider = drawn(3, 50, dtype=dtype)
    assert torch.equal(kernels.clamped(wider[:, 1:49], 1.7, 2.0), kernels.clamped(wider[:, 1:49].clone(), 1.7, 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_gates_of_what_is_no_number(kernels: RowKernels, dtype: torch.dtype) -> None:
    bad = torch.tensor([math.nan, -math.nan, math.inf, 3e38, -3e38, 0.0, -0.0, 100.0, -100.0])
    h = torch.cartesian_prod(bad, bad).flatten()[None].to(dtype)
    gate, up = h[:, 0::2].double().clamp(max=7.0), h[:, 1::2].double().clamp(-7.0, 7.0)
    exact = gate * torch.sigmoid(1.7 * gate) * (up + 1)
    found = kernels.clamped(h, 1.7, 7.0)
    assert torch.equal(found.isnan(), exact.isnan())
    # As above, for exponents of up to 170; of larger ones nothing is left.
    allowed = exact.abs() * (torch.finfo(dtype).eps + SINGLE * 180) + torch.finfo(dtype).tiny
    assert ((found - exact).abs() <= allowed)[~exact.isnan()].all()


@pytest.mark.product(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_weighed_by_a_product(kernels: RowKernels, dtype: torch.dtype) -> None:
    in_float64 = isinstance(kernels, NativeRows) and dtype != torch.float16
    for width, count in itertools.product(WIDTHS, COUNTS):
        x_TE, y_TE = drawn(count, width, dtype=dtype), drawn(count, width, dtype=dtype, seed=1)
        weight_E = drawn(width, dtype=dtype, seed=2) / width
        before, y = x_TE.clone(), y_TE.double()
        logits_T = x_TE.double() @ weight_E.double()
        found = kernels.weigh(y_TE, x_TE, weight_E)
        assert found is y_TE
        assert torch.equal(x_TE, before)
        # The logit is rounded to the dtype, and a float32 sum by its terms before; the logistic
        # function has a slope of 1/4 at most and is rounded, too.
        rounding = torch.finfo(dtype).eps
        wrong_T = logits_T.abs() * rounding + torch.finfo(dtype).tiny
        if not in_float64:
            wrong_T += (x_TE.double().abs() @ weight_E.double().abs()) * width * SINGLE
        share_T1 = torch.sigmoid(logits_T)[:, None]
        assert_near(found, y * share_T1, y.abs() * (wrong_T[:, None] / 4 + share_T1 * (rounding + 4 * SINGLE)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates_over_all_magnitudes(kernels: RowKernels, activation: ActivationName) -> None:
    """Relative error where PyTorch has cancellation: the C++ forms have none."""
    gate = torch.cat([sign * torch.logspace(-40, 38, 3001) for sign in (1, -1)] + [torch.linspace(-12, 12, 4001)])
    found = kernels.gated(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0), activation)[0]
    exact = exact_gate(gate, activation)
    off = gate.double().abs() * 2 * SINGLE
    if kernels is not REFERENCE_ROWS:
        # An exponent of magnitude m is off by m half units, and so is the power.
        power = gate.double().abs().clamp(max=12) ** (2 if activation != "silu" else 1)
        off = exact.abs() * SINGLE * (6 + power)
        # Below the smallest normal number.
        off = off + gate.double().abs() * 1e-37
    assert_near(found, exact, off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates_of_what_is_no_number(kernels: RowKernels, dtype: torch.dtype, activation: ActivationName) -> None:
    if kernels is REFERENCE_ROWS or (kernels is CARRIED_ROWS and rounds_twice(kernels, dtype)):
        pytest.skip("PyTorch's gelu of infinity is NaN")
    bad = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 100.0, -100.0])
    for gate, up in ((bad, torch.ones(10)), (torch.ones(10), bad), (bad.repeat(3), torch.ones(30))):
        row = torch.cat((gate, up)).to(dtype).unsqueeze(0)
        expected = exact_gate(gate.to(dtype), activation) * up.to(dtype).double()
        torch.testing.assert_close(kernels.gated(row, activation)[0], expected.to(dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_of_heads(kernels: RowKernels, dtype: torch.dtype) -> None:
    for (width, count), heads, one in itertools.product(itertools.product(WIDTHS, COUNTS), (1, 3), (False, True)):
        out_THD, gate = drawn(count, heads, width, dtype=dtype, seed=width), drawn(count, heads, 2 * width, dtype=dtype)
        gate = gate[..., :1] if one else gate[..., width:]
        exact = out_THD.double() * torch.sigmoid(gate.double())
        # The power is off by two units in the last place; sum and quotient by half of one each.
        off = exact.abs() * 4 * SINGLE
        if not isinstance(kernels, NativeRows) or dtype == torch.float16:
            # PyTorch rounds the sigmoid.
            off = (
                off + exact.abs() * torch.finfo(dtype).eps + out_THD.double().abs() * torch.finfo(dtype).smallest_normal
            )
        found = kernels.gate_heads(out_THD, gate)
        assert found is out_THD
        assert_near(found, exact, off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_heads_of_what_is_no_number(kernels: RowKernels, dtype: torch.dtype) -> None:
    gate = torch.tensor([math.nan, math.inf, -math.inf, 200.0, -200.0, 0.0], dtype=dtype).repeat(3).view(1, 1, -1)
    expected = torch.tensor([math.nan, 2, 0, 2, 0, 1], dtype=dtype).repeat(3).view(1, 1, -1)
    found = kernels.gate_heads(torch.full_like(gate, 2.0), gate)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype).view(1, 1, 3)
    torch.testing.assert_close(kernels.gate_heads(bad.clone(), torch.zeros(1, 1, 1, dtype=dtype)), bad, equal_nan=True)


# -- rotation --------------------------------------------------------------------------------------


class Case:
    """Random heads of a fused projection, and a pool for K and V."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        count: int = 4,
        heads: int = 3,
        kv_heads: int = 2,
        dk: int = 10,
        dv: int = 7,
        rotary: int = 10,
        interleaved: bool = False,
        norms: torch.dtype | None = None,
        gap: int = 0,
    ) -> None:
        self.count, self.heads, self.kv_heads, self.dk, self.rotary = count, heads, kv_heads, dk, rotary
        columns = (heads + kv_heads) * dk + kv_heads * dv
        self.qkv_TC = drawn(count, columns + gap, dtype=dtype, seed=dk)[:, :columns]
        self.rotation = None
        if rotary:
            spec = RopeSpec(theta=100.0, rotary_dim=rotary, interleaved=interleaved)
            positions_T = torch.randint(0, 5000, (count,), generator=torch.Generator().manual_seed(1))
            rows = RotaryTable(spec, torch.device("cpu")).rows(positions_T, 5000)
            self.rotation = Rotation(*rows, interleaved)
        self.norms = None
        if norms is not None:
            self.norms = HeadNormWeights(drawn(dk, dtype=norms, seed=3), drawn(dk, dtype=norms, seed=4), EPS)
        self.k_SHD, self.v_SHD = drawn(20, kv_heads, dk, dtype=dtype, seed=5), drawn(20, kv_heads, dv, dtype=dtype)
        self.slots_T = torch.randperm(20, generator=torch.Generator().manual_seed(2))[:count]

    def run(self, kernels: RowKernels, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Run some rows; return the result and the pool after it."""
        rotation = self.rotation
        if rotation is not None:
            rotation = Rotation(rotation.cos_T1R[rows], rotation.sin_T1R[rows], rotation.interleaved)
        k, v = self.k_SHD.clone(), self.v_SHD.clone()
        slots = self.slots_T[rows]
        return (
            kernels.rope_and_write_kv(self.qkv_TC[rows], self.heads, rotation, self.norms, PlainRows(k, v), slots),
            k,
            v,
        )

    def exact(self) -> tuple[Tensor, Tensor]:
        """Turned heads of q and k in float64, and the size of the terms of each."""
        every = self.heads + self.kv_heads
        x = self.qkv_TC[:, : every * self.dk].double().view(self.count, every, self.dk)
        if self.norms is not None:
            q, k = x[:, : self.heads], x[:, self.heads :]
            x = torch.cat((exact_norm(q, self.norms.q_weight_D, EPS), exact_norm(k, self.norms.k_weight_D, EPS)), 1)
        turned, terms = x.clone(), x.abs()
        if self.rotation is not None:
            cos, sin = (part.double().squeeze(1) for part in self.rotation[:2])
            for column in range(self.rotary):
                half = self.rotary // 2
                other = column ^ 1 if self.rotation.interleaved else (column + half) % self.rotary
                one, two = x[..., column] * cos[:, None, column], x[..., other] * sin[:, None, column]
                turned[..., column], terms[..., column] = one + two, one.abs() + two.abs()
        return turned, terms


SHAPES = (
    {},
    {"count": 0},
    {"count": 1, "heads": 1, "kv_heads": 1, "dk": 1, "dv": 1, "rotary": 0},
    {"dk": 64, "dv": 64, "rotary": 64, "gap": 5},
    {"dk": 80, "dv": 80, "rotary": 34, "count": 17},
    {"dk": 64, "rotary": 2},
    {"dk": 33, "rotary": 32, "heads": 4, "kv_heads": 1},
    {"dk": 128, "dv": 128, "rotary": 0},
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("types", [*TYPES, (torch.float32, None), (torch.bfloat16, None)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.product(3)
def test_heads_are_placed(
    kernels: RowKernels, types: tuple[torch.dtype, torch.dtype | None], shape: dict[str, Any], interleaved: bool
) -> None:
    dtype, norms = types
    case = Case(dtype, interleaved=interleaved, norms=norms, **shape)
    turned, k_SHD, v_SHD = case.run(kernels)
    exact, terms = case.exact()
    # PyTorch's form rounds normed heads before they turn.
    twice = norms is not None and rounds_twice(kernels, dtype)
    assert_near(turned, exact, terms * (SINGLE * (8 + case.dk / 16) + twice * torch.finfo(dtype).eps))
    k_expected, v_expected = case.k_SHD.clone(), case.v_SHD.clone()
    k_expected[case.slots_T] = turned[:, case.heads :]
    v_expected[case.slots_T] = case.qkv_TC[:, -v_SHD[0].numel() :].reshape(case.count, *v_SHD.shape[1:])
    assert torch.equal(k_SHD, k_expected)
    assert torch.equal(v_SHD, v_expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_head_stays_alone(kernels: RowKernels, dtype: torch.dtype) -> None:
    case = Case(dtype, dk=32, dv=32, rotary=32, norms=dtype)
    clean, *_ = case.run(kernels)
    case.qkv_TC[1, 40] = math.nan
    case.qkv_TC[2, 0] = math.inf
    found, *_ = case.run(kernels)
    expected = torch.zeros(4, 5, dtype=torch.bool)
    expected[1, 1] = expected[2, 0] = True
    assert torch.equal(found.isnan().any(-1), expected)
    assert torch.equal(found[~expected], clean[~expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_last_columns_turn(kernels: RowKernels, dtype: torch.dtype, interleaved: bool) -> None:
    """Of heads that lie beside others, in rows that are apart."""
    for count, heads, width, rotary in (
        (4, 3, 10, 10),
        (0, 2, 8, 4),
        (1, 1, 576, 64),
        (17, 4, 192, 64),
        (3, 2, 70, 34),
    ):
        x_THD = drawn(count, heads + 1, width + 2, dtype=dtype, seed=width)[:, 1:, 1:-1]
        case = Case(dtype, count=count, rotary=rotary, dk=rotary, interleaved=interleaved)
        assert case.rotation is not None
        found = kernels.turn_last(x_THD, case.rotation)
        assert found.is_contiguous()
        assert torch.equal(found[..., :-rotary], x_THD[..., :-rotary])
        x, (cos, sin) = x_THD[..., -rotary:].double(), (part.double() for part in case.rotation[:2])
        other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(rotary // 2, -1)
        # Two products and their sum round once each.
        assert_near(found[..., -rotary:], x * cos + other * sin, 2 * SINGLE * ((x * cos).abs() + (other * sin).abs()))


# -- rows do not know their batch ------------------------------------------------------------------


@pytest.mark.product(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [63, 576, 5000])
@pytest.mark.usefixtures("three_threads")
def test_rows_are_the_same_in_any_batch_to_the_bit(dtype: torch.dtype, level: int, width: int) -> None:
    kernels = native()
    kernels.use_level(level)
    try:
        x, y, h = (drawn(37, size, dtype=dtype, seed=size) for size in (width, width, 2 * width))
        weight_E = drawn(width, dtype=dtype)
        total = y.clone()
        normed, summed = kernels.rms_norm(x, weight_E, EPS), kernels.add_rms_norm(total, x, weight_E, EPS)
        scaled = y.clone()
        scaled_norms = kernels.add_rms_norm(scaled, x, weight_E, EPS, 0.22)
        capped = kernels.soft_cap(h.clone().float(), 2.0)
        gates = [kernels.gated(h, name) for name in ("silu", "gelu", "gelu_tanh")]
        heads_THD, head_gates = y.view(37, 1, width), h.view(37, 1, 2 * width)[..., width:]
        opened_THD = kernels.gate_heads(heads_THD.clone(), head_gates)
        clamped, weighed = kernels.clamped(h, 1.7, 2.0), kernels.weigh(y.clone(), x, weight_E)
        for row in (slice(0, 1), slice(36, 37), slice(3, 20)):
            assert torch.equal(kernels.rms_norm(x[row], weight_E, EPS), normed[row])
            one = y[row].clone()
            assert torch.equal(kernels.add_rms_norm(one, x[row], weight_E, EPS), summed[row])
            assert torch.equal(one, total[row])
            one = y[row].clone()
            assert torch.equal(kernels.add_rms_norm(one, x[row], weight_E, EPS, 0.22), scaled_norms[row])
            assert torch.equal(one, scaled[row])
            assert torch.equal(kernels.add_scaled(y[row].clone(), x[row], 0.22), scaled[row])
            assert torch.equal(kernels.soft_cap(h[row].clone().float(), 2.0), capped[row])
            assert torch.equal(kernels.gate_heads(heads_THD[row].clone(), head_gates[row]), opened_THD[row])
            assert torch.equal(kernels.clamped(h[row], 1.7, 2.0), clamped[row])
            assert torch.equal(kernels.weigh(y[row].clone(), x[row], weight_E), weighed[row])
            for name, gate in zip(("silu", "gelu", "gelu_tanh"), gates, strict=True):
                assert torch.equal(kernels.gated(h[row], name), gate[row])
        case = Case(dtype, count=17, dk=width % 100 * 2, rotary=width % 100, dv=3, norms=dtype)
        placed, k_SHD, v_SHD = case.run(kernels)
        if case.rotation is not None:
            cos, sin, interleaved = case.rotation
            heads_THD = drawn(17, 3, case.dk, dtype=dtype)
            turned = kernels.turn_last(heads_THD, case.rotation)
            for row in (slice(0, 1), slice(16, 17), slice(3, 9)):
                one = kernels.turn_last(heads_THD[row], Rotation(cos[row], sin[row], interleaved))
                assert torch.equal(one, turned[row])
        for row in (slice(0, 1), slice(16, 17), slice(3, 9)):
            some, k, v = case.run(kernels, row)
            assert torch.equal(some, placed[row])
            assert torch.equal(k[case.slots_T[row]], k_SHD[case.slots_T[row]])
            assert torch.equal(v[case.slots_T[row]], v_SHD[case.slots_T[row]])
    finally:
        kernels.use_level(max(LEVELS))


def test_little_work_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert threads_for(16 * 3072) == 1
    assert threads_for(kernel_rows.ONE_THREAD + 1) == 2
    assert threads_for(2048 * 3072) == 64


def test_a_level_beyond_the_processors_is_its_best() -> None:
    kernels = native()
    assert kernels.use_level(9) == kernels.use_level(max(LEVELS))
    assert kernels.use_level(0) == 0
    kernels.use_level(max(LEVELS))


def test_other_dtypes_take_pytorchs_form() -> None:
    x, weight_E, h = (drawn(*shape, dtype=torch.float64) for shape in ((3, 8), (8,), (3, 8)))
    found = native().rms_norm(x, weight_E, EPS)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact_norm(x, weight_E, EPS))
    torch.testing.assert_close(native().gated(h, "silu"), REFERENCE_ROWS.gated(h, "silu"))
    assert torch.equal(native().clamped(h, 1.7, 2.0), REFERENCE_ROWS.clamped(h, 1.7, 2.0))
    expected = REFERENCE_ROWS.weigh(x.clone(), x, weight_E)
    assert torch.equal(native().weigh(x.clone(), x, weight_E), expected)
