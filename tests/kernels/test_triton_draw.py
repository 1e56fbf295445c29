"""Draws by Triton programs are those of PyTorch's operations, to the token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.triton_machine import DEVICE, needs_triton
from torch import Tensor

from quire import SamplingParams
from quire.kernels.draw import triton_draw
from quire.kernels.draw.triton_draw import TritonDraw, fastest_draw
from quire.sampling.filters import KernelDraws, candidates
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampler import sample_later

pytestmark = [needs_triton, pytest.mark.gpu]
TEMPERATURES = (1.0, 0.05, 7.0, 0.6)
MIN_PS = (0.0, 0.3, 1.0, 1e-6)
ENDS = [0.0, 1 - 2.0**-53] * 10
"""Of [0, 1), in turns."""


def logits(rows: int, vocab_size: int, seed: int) -> Tensor:
    """With equal ones, some of them -inf."""
    generator = torch.Generator().manual_seed(seed)
    z_RV = (torch.randn(rows, vocab_size, generator=generator) * 4).round(decimals=1)
    z_RV[torch.rand(rows, vocab_size, generator=generator) < 0.1] = -torch.inf
    z_RV[:, vocab_size // 2] = 1.0
    return z_RV.to(DEVICE)


def tokens(
    z_RV: Tensor, params: dict[int, SamplingParams], uniforms: list[float], kernel: TritonDraw | None
) -> list[int]:
    max_R = z_RV.amax(-1)
    if kernel is not None:
        return KernelDraws(kernel, z_RV, max_R, params, False).drawn(uniforms).tolist()  # type: ignore[no-any-return]
    (group,) = candidates(z_RV, max_R, params)
    return group.draw(uniforms)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("vocab_size", "block"), [(1, 2048), (97, 2048), (97, 16), (1024, 256), (5000, 2048), (4096, 2048)]
)
def test_draws(vocab_size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some rows, in blocks that end in the vocabulary and at its end, at the ends of [0, 1)."""
    monkeypatch.setattr(triton_draw, "BLOCK", block)
    z_RV = logits(18, vocab_size, seed=vocab_size)
    rows = [row for row in range(18) if row % 5]
    params = {
        row: SamplingParams(temperature=TEMPERATURES[row % 4], min_p=MIN_PS[row // 4 % 4]) for row in rows
    }  # fmt: skip
    drawn = np.random.default_rng(0).random(len(rows)).tolist()
    for uniforms in (drawn, ENDS[: len(rows)]):
        found = tokens(z_RV, params, uniforms, TritonDraw())
        assert found == tokens(z_RV, params, uniforms, None)
        assert all(z_RV[row, token] > -math.inf for row, token in zip(rows, found, strict=True))
    wider = torch.cat((z_RV, z_RV), 1)[:, :vocab_size]
    assert tokens(wider, params, drawn, TritonDraw()) == tokens(z_RV, params, drawn, None)


RANKED = (
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"top_p": 1e-3},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 96, "top_p": 0.8},
    {"top_k": 12, "min_p": 0.3},
    {"top_p": 0.95, "min_p": 1.0},
)


def ranked(
    z_RV: Tensor, params: dict[int, SamplingParams], uniforms: list[float]
) -> tuple[list[int], list[int], list[bool]]:
    """Return the tokens of PyTorch's operations, those of the kernel, and whether they count."""
    expected = dict[int, int]()
    given, max_R = dict(zip(params, uniforms, strict=True)), z_RV.amax(-1)
    for group in candidates(z_RV, max_R, params):
        expected |= dict(zip(group.members, group.draw([given[row] for row in group.members]), strict=True))
    draws = KernelDraws(TritonDraw(), z_RV, max_R, params, True)
    found = draws.drawn(uniforms).tolist()
    assert draws.complete_G is not None
    return [expected[row] for row in params], found, draws.complete_G.tolist()


@pytest.mark.parametrize(
    ("vocab_size", "block"),
    [(97, 64), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((97, 4096), (97, 16), (4500, 1024)))],
)
def test_draws_in_order_of_probability(vocab_size: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with many equal logits, zeros of both signs among them, at the ends of [0, 1)."""
    monkeypatch.setattr(triton_draw, "BINNED", block)
    count = len(RANKED) + 3
    z_RV = logits(count, vocab_size, seed=vocab_size)
    z_RV[1, :40:2], z_RV[1, 1:40:2], z_RV[1, 40:] = -0.0, 0.0, -3.0
    z_RV[2] = 1.5
    rows = [row for row in range(count) if row % 7 != 3]
    params = {
        row: SamplingParams(temperature=TEMPERATURES[row % 4], **RANKED[number % len(RANKED)])  # type: ignore[arg-type]
        for number, row in enumerate(rows)
    }
    drawn = np.random.default_rng(0).random(len(rows)).tolist()
    for uniforms in (drawn, ENDS[: len(rows)]):
        expected, found, complete = ranked(z_RV, params, uniforms)
        # Of 4,500 equal tokens there is room for none.
        missed = [row for row, known in zip(rows, complete, strict=True) if not known]
        assert missed == [2] * (vocab_size > triton_draw.ROOM)
        pairs = zip(expected, found, complete, strict=True)
        assert all(one == other for one, other, known in pairs if known)


def test_what_has_no_room_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 tokens that are collected at most: complete where these decide, and only there."""
    monkeypatch.setattr(triton_draw, "ROOM", 16)
    z_RV = torch.arange(60, 0, -1, device=DEVICE).float().log().repeat(6, 1)
    weights = torch.arange(60, 0, -1)
    inside = float(weights[:15].sum() / weights.sum())
    fields = [{"top_k": 5}, {"top_k": 40}, {"top_p": inside - 0.01}, {"top_p": inside + 0.05}]
    fields += [{"top_k": 40, "top_p": 0.1}, {"top_k": 10, "top_p": 0.5}]
    params = {row: SamplingParams(temperature=1.0, **one) for row, one in enumerate(fields)}  # type: ignore[arg-type]
    for u in (0.0, 0.999):
        expected, found, complete = ranked(z_RV, params, [u] * len(fields))
        assert complete == [True, False, True, False, False, True]
        assert all(one == other for one, other, known in zip(expected, found, complete, strict=True) if known)


def test_requests_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that are greedy, or in order, and rows of which none can be drawn."""
    fields = [
        {"temperature": 0.8},
        {"temperature": 0},
        {"temperature": 1.2, "min_p": 0.05, "logit_bias": {5: 4.0}},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 0.9, "logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 1.0},
    ]
    z_RV = logits(len(fields), 97, seed=3)
    z_RV[-2, 4], z_RV[-1] = torch.nan, -torch.inf
    counted: list[int] = []

    class Counted(TritonDraw):
        def draw(self, z_WV: Tensor, max_W: Tensor, table_G6: Tensor, one: float) -> Tensor:
            counted.append(len(table_G6))
            return super().draw(z_WV, max_W, table_G6, one)

        def draw_ranked(self, z_WV: Tensor, max_W: Tensor, table_G6: Tensor, one: float) -> tuple[Tensor, Tensor]:
            counted.append(-len(table_G6))
            return super().draw_ranked(z_WV, max_W, table_G6, one)

    # There is no room for the rows of top-p, which are drawn again.
    monkeypatch.setattr(triton_draw, "ROOM", 8)
    found = []
    for kernel in (None, Counted(), Counted(ranked=False)):
        samplers = [
            RequestSampler(SamplingParams(seed=row, **one), vocab_size=97)  # type: ignore[arg-type]
            for row, one in enumerate(fields)
        ]
        drawn = [sample_later(z_RV, samplers, kernel=kernel).read() for _ in range(3)]
        found.append(([one.token_ids for one in drawn], [one.logprobs for one in drawn]))
        assert set(drawn[0].failures) == {6, 7}
    assert found[0] == found[1] == found[2]
    # Rows 0, 2, 5 and those that fail; rows 3 and 4.
    assert counted == [5, -2] * 3 + [5] * 3


def test_only_gpus_draw_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest_draw(torch.device("cpu")) is None
    monkeypatch.setattr(triton_draw, "triton_problem", lambda device: "")
    assert isinstance(fastest_draw(torch.device("cuda")), TritonDraw)
    monkeypatch.setattr(triton_draw, "triton_problem", lambda device: "no Triton")
    assert fastest_draw(torch.device("cuda")) is None
