"""Ends of decoder blocks with a mixture of experts as one call: every number is that of the parts
one by one. ``test_mixed_blocks`` has whole blocks and stacks.

Letters: T rows, E model width, F inner width, C columns of the heads, X experts.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.kernels.native_forms import FORMS, three_threads  # noqa: F401
from tests.kernels.test_mixed_blocks import EPS, WIDTH, Ended, Parts, mixture_of, row_kernels
from tests.kernels.test_native_experts import Layer, Shape
from torch import Tensor

from quire.contracts.block_calls import NormWeight, Residuals
from quire.contracts.experts import Routing
from quire.contracts.linear import WeightForm
from quire.kernels.block import MOST_ROWS, NativeTail
from quire.kernels.experts import NativeMixture
from quire.kernels.linear.cpu_linear import EMULATED, NativeLinear
from quire.kernels.native_library import native_library, native_problem

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_problem())

COLUMNS = 72
SHAPES = {
    "few experts": Shape(width=WIDTH),
    "an expert of all tokens": Shape(experts=40, choices=5, width=WIDTH, inner=72, shared=48),
    "one of all tokens without a weight": Shape(
        experts=3, choices=3, width=WIDTH, inner=8, shared=16, is_weighed=False
    ),
    "more pairs than a wave": Shape(experts=12, choices=12, width=WIDTH, inner=24, shared=24),
}
ARRANGEMENTS = ("pre", "post", "sandwich", "pre scaled", "none")


class ExpertsEnd(Ended):
    """The end of a block with a mixture of experts."""

    def __init__(
        self,
        parts: Parts,
        shape: Shape = SHAPES["few experts"],
        gate: str = "silu",
        arrangement: str = "pre",
        *,
        level: int | None = None,
        routing: Routing | None = None,
        norms: torch.dtype | None = None,
    ) -> None:
        """``norms``: dtype of their weights; None: that of the rows."""
        super().__init__(parts, COLUMNS)
        self.experts = Layer(shape, (parts.dtype, parts.form), gate, routing, level)
        place, scale = arrangement.split()[0], 0.22 if "scaled" in arrangement else 1.0
        before, *behind = (NormWeight(parts.drawn(WIDTH).to(norms or parts.dtype), 10.0**-power) for power in (5, 2, 4))
        self.residuals = Residuals(before if place in ("pre", "sandwich") else None, scale=scale, mlp_scale=scale)
        if place in ("post", "sandwich"):
            self.residuals = self.residuals._replace(attention_out=behind[0], mlp_out=behind[1])

    @property
    def mixture(self) -> NativeMixture:
        assert self.experts is not None
        return mixture_of(self.experts)

    def tail(self) -> NativeTail:
        found = self.parts.blocks.tail(self.out, self.residuals, self.mixture)
        assert found is not None
        return found

    def end(self, heads_TC: Tensor, x_TE: Tensor) -> Tensor:
        rows = self.parts.rows

        def norm(given: NormWeight | None, y_TE: Tensor) -> Tensor:
            return y_TE if given is None else rows.rms_norm(y_TE, *given)

        mlp_in, attention_out, mlp_out, scale, _ = self.residuals
        assert self.experts is not None
        h_TE = norm(attention_out, self.out(heads_TC))
        if mlp_in is not None:
            n_TE = rows.add_rms_norm(h_TE, x_TE, *mlp_in, scale)
        else:
            n_TE = h_TE = rows.add_scaled(h_TE, x_TE, scale)
        return rows.add_scaled(norm(mlp_out, self.experts.call(n_TE)), h_TE, scale)


def assert_same(end: ExpertsEnd, count: int) -> None:
    heads_TC, x_TE = end.parts.drawn(count, COLUMNS), end.parts.drawn(count, WIDTH)
    before, expected_TE, call = x_TE.clone(), end.end(heads_TC, x_TE), end.tail()
    assert call.takes(x_TE)
    assert torch.equal(call(heads_TC, x_TE), expected_TE)
    assert torch.equal(x_TE, before)
    assert expected_TE.isfinite().all()


@pytest.mark.turns(4)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_is_that_of_the_parts(shape: str, form: tuple[torch.dtype, WeightForm]) -> None:
    end = ExpertsEnd(Parts(form, seed=1), SHAPES[shape])
    for count in (1, 2, 5, 17, MOST_ROWS):
        assert_same(end, count)


@pytest.mark.turns(4)
@pytest.mark.parametrize("gate", ["gelu", "gelu_tanh", "clamped", "squared"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_arrangement_and_gate(arrangement: str, gate: str) -> None:
    """Also a router in bfloat16 with a bias, and norms in float32 of rows in bfloat16."""
    shape = SHAPES["an expert of all tokens"]
    for form, norms, wide in (
        (FORMS[0], None, False),
        (FORMS[2], None, False),
        (FORMS[2], torch.float32, True),
    ):
        routing = Routing(top_k=shape.choices, scores="sigmoid", renormalise=True, in_float32=wide)
        end = ExpertsEnd(Parts(form, seed=2), shape, gate, arrangement, routing=routing, norms=norms)
        for count in (1, 9):
            assert_same(end, count)


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_every_level_and_any_number_of_threads(rounds: int) -> None:
    library, rows = native_library(), row_kernels()
    assert library is not None
    try:
        for level, rows_level, count in itertools.product(
            (*range(NativeLinear(library).level + 1), EMULATED), (0, 1, 2), (1, 5)
        ):
            rows.use_level(rows_level)
            parts = Parts((torch.bfloat16, "bfloat16"), seed=count, level=level)
            end = ExpertsEnd(parts, SHAPES["an expert of all tokens"], level=level)
            heads_TC, x_TE, call = parts.drawn(count, COLUMNS), parts.drawn(count, WIDTH), end.tail()
            expected_TE = end.end(heads_TC, x_TE)
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                for _ in range(rounds):  # threads that come early and late
                    assert torch.equal(call(heads_TC, x_TE), expected_TE)
    finally:
        rows.use_level(2)


def test_parts_that_do_not_fit_are_not_joined() -> None:
    parts, other = Parts((torch.float32, "float32"), 1), Parts((torch.bfloat16, "bfloat16"), 1)
    end, half = ExpertsEnd(parts), ExpertsEnd(other)
    tail = parts.blocks.tail
    assert tail(end.out, end.residuals, end.mixture) is not None
    assert tail(end.out, end.residuals, half.mixture) is None
    assert tail(half.out, end.residuals, end.mixture) is None
    assert tail(end.out, half.residuals, end.mixture) is None
    assert tail(parts.map(WIDTH + 8, COLUMNS), end.residuals, end.mixture) is None
    narrow = NormWeight(parts.drawn(WIDTH - 8), EPS)
    assert tail(end.out, end.residuals._replace(mlp_out=narrow), end.mixture) is None
    call = end.tail()
    assert not call.takes(torch.zeros(MOST_ROWS + 1, WIDTH))
    assert not call.takes(torch.zeros(1, WIDTH, dtype=torch.bfloat16))
