"""Moved keys against keys that were rotated at their new positions in float64."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.blend.small_model import KINDS, LONG, YARN, SmallModel, rope
from tests.exact import Float64
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.blend.rotation import KeyMove
from quire.contracts.layers import RopeSpec
from quire.ops.rope import RotaryTable, inverse_frequencies

EPS = torch.finfo(torch.float32).eps
ROUNDINGS = 16
"""Of float32, between a raw key and its moved one: four table entries of half an ulp, three
operations for each of cos and sin, a magnitude that is divided out, three of the rotation, and the
stored key's own."""
SPECS = {
    "default": rope(rotary_dim=8, theta=1e4),
    "interleaved": rope(rotary_dim=8, theta=1e4, interleaved=True),
    "partial": rope(rotary_dim=4),
    "partial_interleaved": rope(rotary_dim=4, interleaved=True),
    "yarn": YARN,
    "longrope": LONG,
    "linear": rope(scaling="linear", factor=4.0),
    "dynamic": rope(scaling="dynamic", factor=2.0, original_max_position=64, length=128),
    "llama3": rope(scaling="llama3", factor=8.0, original_max_position=64),
    "proportional": rope(scaling="proportional", turning_dim=4),
}
CPU = torch.device("cpu")


def rotated(raw: Tensor, spec: RopeSpec, positions: np.ndarray) -> Tensor:
    """Rotate ``[T, H, D]`` pair by pair, in float64."""
    out = raw.double().clone()
    half = spec.rotary_dim // 2
    angles = torch.from_numpy(positions).double()[:, None] * inverse_frequencies(spec)
    for pair in range(half):
        one, two = (2 * pair, 2 * pair + 1) if spec.interleaved else (pair, pair + half)
        cos, sin = angles[:, pair, None].cos(), angles[:, pair, None].sin()
        x, y = raw[..., one].double(), raw[..., two].double()
        out[..., one] = (x * cos - y * sin) * spec.attention_factor
        out[..., two] = (y * cos + x * sin) * spec.attention_factor
    return out


@cache
def table_of(name: str) -> RotaryTable:
    """Return a table that has grown already, which takes a tenth of a second."""
    return RotaryTable(SPECS[name], CPU)


@pytest.mark.parametrize("name", sorted(SPECS))
@given(
    st.sampled_from([1, 777, -777, 30_000, -130_000, 400_000]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([3, 80]),
    st.booleans(),
)
def test_moved_keys_are_those_of_their_new_place(name: str, shift: int, seed: int, count: int, one_shift: bool) -> None:
    """Behind the rows of the table, too; and where all rows share one row of cos and sin."""
    spec, draw = SPECS[name], np.random.default_rng(seed)
    raw = torch.from_numpy(draw.standard_normal((count, 2, 8)).astype(np.float32))
    targets = draw.integers(1000, 2000, count) + abs(shift)
    origins = targets - shift - (0 if one_shift else draw.integers(-1, 2, count))
    stored = rotated(raw, spec, origins).float()
    kept = stored.clone()
    found = KeyMove(table_of(name), origins, targets)(stored)
    error = (found - rotated(raw, spec, targets)).abs().amax((1, 2))
    assert found.dtype == torch.float32
    # A rotation mixes two columns, so their length bounds both.
    assert (error <= ROUNDINGS * EPS * spec.attention_factor * raw.abs().amax((1, 2)) * math.sqrt(2)).all()
    assert torch.equal(stored, kept)


@given(st.integers(-1_000_000, 1_000_000))
def test_one_row_of_cos_and_sin_serves_a_chunk(shift: int) -> None:
    """An entry of a table is half an ulp off, and so are two operations: 2 * (2 * 2 ** 0.5 + 2) of
    half an epsilon for two rows of one angle."""
    origins = np.arange(50) + max(0, -shift)
    unit = torch.zeros(50, 1, 8)
    unit[..., 0] = 1
    table = table_of("default")
    shared = KeyMove(table, origins, origins + shift)(unit)
    apart = [KeyMove(table, origins[[row]], origins[[row]] + shift)(unit[[row]]) for row in range(50)]
    assert (shared - torch.cat(apart)).abs().max() <= 5 * EPS


def test_an_error_of_a_table_would_be_seen() -> None:
    """Of one position."""
    spec = SPECS["default"]
    raw = torch.ones(3, 2, 8)
    at = np.full(3, 1000)
    found = KeyMove(RotaryTable(spec, CPU), at, at + 1)(rotated(raw, spec, at).float())
    assert (found - rotated(raw, spec, at)).abs().amax() > 100 * ROUNDINGS * EPS


@pytest.mark.parametrize("name", ["default", "yarn", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_stay_are_copied_to_the_bit(name: str, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(1)
    stored = torch.from_numpy(draw.standard_normal((6, 2, 8))).to(dtype)
    stored[1, 0], stored[4, 1, 3] = -0.0, torch.inf
    origins = np.array([3, 9, 9, 500, 7, 0])
    targets = np.array([3, 9, 10, 400, 7, 1])
    table = RotaryTable(SPECS[name], CPU)
    for places, rows in ((targets, [0, 1, 4]), (origins, range(6))):
        moved = KeyMove(table, origins, places)(stored)
        for row in rows:
            assert moved[row].view(torch.uint8).equal(stored[row].view(torch.uint8))
        assert moved.data_ptr() != stored.data_ptr()
    moved = KeyMove(table, origins, targets)(stored)
    assert all(not torch.equal(moved[row], stored[row]) for row in (2, 3, 5))


@pytest.mark.parametrize("interleaved", [False, True])
def test_of_latent_rows_the_last_columns_turn(interleaved: bool) -> None:
    spec, draw = rope(rotary_dim=4, interleaved=interleaved), np.random.default_rng(0)
    rows = torch.from_numpy(draw.standard_normal((70, 1, 12)).astype(np.float32))
    origins, targets = draw.integers(0, 50, 70), draw.integers(0, 50, 70)
    move = KeyMove(RotaryTable(spec, CPU), origins, targets)
    moved = move(rows, last=True)
    assert torch.equal(moved[..., :8], rows[..., :8])
    assert torch.equal(moved[..., 8:], move(rows[..., 8:].contiguous()))


def test_moves_in_bfloat16_do_not_add_up() -> None:
    """There and back twenty times."""
    draw = np.random.default_rng(2)
    start = torch.from_numpy(draw.standard_normal((200, 2, 64))).bfloat16()
    table = RotaryTable(rope(rotary_dim=64, theta=1e4), CPU)
    origins, targets = np.arange(200), np.arange(200) + 1234
    there, back = KeyMove(table, origins, targets), KeyMove(table, targets, origins)
    rows = start
    for _ in range(20):
        rows = back(there(rows))
    drift = (rows.double() - start.double()).norm() / start.double().norm()
    assert drift <= 3e-3


def test_one_rounding_of_bfloat16() -> None:
    """Moving is as exact as float32 of what is stored; going by way of raw keys is not."""
    draw = np.random.default_rng(4)
    stored = torch.from_numpy(draw.standard_normal((300, 2, 64))).bfloat16()
    spec = rope(rotary_dim=64, theta=1e4)
    origins, targets = draw.integers(0, 5000, 300), draw.integers(0, 5000, 300)
    with Float64():
        exact = KeyMove(RotaryTable(spec, CPU), origins, targets)(stored.double())
    found = KeyMove(RotaryTable(spec, CPU), origins, targets)(stored)
    ulp = 2.0 ** (exact.abs().clamp_min(1e-30).log2().floor() - 7)
    assert ((found.double() - exact).abs() <= ulp / 2 + ROUNDINGS * EPS * stored.abs().max()).all()


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("shift", [1, 5000])
def test_keys_of_the_first_layer_are_exact(kind: str, shift: int) -> None:
    """A chunk that was captured alone has the K and V of the prompt there."""
    with Float64():
        model = SmallModel(kind)
        tokens = list(range(12))
        alone, full = model.full(tokens[4:], shift), model.full(tokens)
        spec = model.specs[0].rope  # type: ignore[union-attr]
        assert spec is not None
        move = KeyMove(RotaryTable(spec, CPU), shift + np.arange(8), 4 + np.arange(8))
        # Positions below 2 ** 13: angles have errors below 1e-12.
        assert torch.allclose(move(alone.k[0]), full.k[0][4:], rtol=0, atol=1e-11)
        # Sums of other shapes.
        assert torch.allclose(alone.v[0], full.v[0][4:], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("field", "origins", "targets"), [("origins_T", [-1], [0]), ("targets_T", [0], [-1]), ("origins_T", [0, 1], [0])]
)
def test_positions_are_checked(field: str, origins: list[int], targets: list[int]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        KeyMove(RotaryTable(rope(), CPU), np.array(origins), np.array(targets))
    assert refused.value.field == field


def test_keys_have_a_row_for_each_position() -> None:
    for targets in ([5, 6], [5, 7], [0, 1]):
        move = KeyMove(RotaryTable(rope(), CPU), np.array([0, 1]), np.array(targets))
        with pytest.raises(InvalidArgument) as refused:
            move(torch.zeros(3, 1, 8))
        assert refused.value.field == "k_THD"
