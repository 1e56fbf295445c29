"""The C++ products: against the reference in float64, rows to the bit whatever the batch, and
builds that are missing or old.

Letters: T rows, I input, O output features, R rank, S rank rows.
"""

from __future__ import annotations

import ctypes
import logging
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from quire.build import make_adapters
from quire.contracts.adapters import Adapter, LowRankUpdate, RankedRows, RankPiece
from quire.kernels import native_library
from quire.kernels.linear import low_rank
from quire.kernels.linear.low_rank import MOST_ROWS, NativeLowRank, native_low_rank
from quire.kernels.native_library import VERSION, native_problem
from quire.kernels.rows.cpu_rows import native_rows
from quire.models.catalogue import resolve_model
from quire.models.loading import load_model
from quire.ops.low_rank import add_low_rank

COMPILER = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


@pytest.fixture
def kernel() -> NativeLowRank:
    found = native_low_rank()
    if found is None:
        pytest.skip(native_problem())
    return found


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also for little work."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(low_rank, "ONE_THREAD", 0)
    yield
    torch.set_num_threads(before)


def test_it_is_built_where_there_is_a_compiler() -> None:
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    assert native_problem() == ""


class Case:
    """Random adapters over random rows of one linear map."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.rows = draw.choice([1, 3, 9, 17])
        self.inputs = draw.choice([1, 15, 16, 17, 48, 97])
        outputs = [draw.choice([1, 7, 16, 33, 64]) for _ in range(draw.randint(1, 3))]
        gaps = [draw.choice([0, 0, 5]) for _ in range(len(outputs) + 1)]
        ranks = [draw.choice([1, 2, 4, 5, 16, 19]) for _ in range(draw.randint(1, 4))]
        self.x_TI = self.normal(self.rows, self.inputs).to(dtype)
        self.y_TO = self.normal(self.rows, sum(outputs) + sum(gaps)).to(dtype)
        self.pieces, column = [], gaps[0]
        for width, gap in zip(outputs, gaps[1:], strict=True):
            a_SI, b_SO = self.normal(sum(ranks), self.inputs).to(dtype), self.normal(sum(ranks), width).to(dtype)
            self.pieces.append(RankPiece(a_SI, b_SO, column))
            column += width + gap
        owners = [draw.choice([None, *range(len(ranks))]) for _ in range(self.rows)]
        owners[draw.randrange(self.rows)] = 0
        self.owners = owners
        self.members = [
            RankedRows(sum(ranks[:one]), rank, [row for row, owner in enumerate(owners) if owner == one])
            for one, rank in enumerate(ranks)
            if one in owners
        ]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def updates(self, magnitudes: bool = False) -> list[list[LowRankUpdate]]:
        """Of each row, in float64."""
        found: list[list[LowRankUpdate]] = [[] for _ in range(self.rows)]
        for first, rank, rows in self.members:
            some = slice(first, first + rank)
            for a_SI, b_SO, column in self.pieces:
                a_RI, b_RO = a_SI[some].double(), b_SO[some].double()
                if magnitudes:
                    a_RI, b_RO = a_RI.abs(), b_RO.abs()
                for row in rows:
                    found[row].append(LowRankUpdate(linear="", row=column, a_RI=a_RI, b_RO=b_RO))
        return found

    def run(self, kernel: NativeLowRank, rows: list[int] | None = None, x_TI: Tensor | None = None) -> Tensor:
        """y after the call, for all rows under adapters or for some of them."""
        members = self.members
        if rows is not None:
            members = [member._replace(rows=[row for row in member.rows if row in rows]) for member in members]
        y_TO = self.y_TO.clone()
        members = [member for member in members if member.rows]
        kernel.bind(kernel.plan(members), self.pieces)(y_TO, self.x_TI if x_TI is None else x_TI)
        return y_TO


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=examples(50, 150), deadline=None)
@given(seed=st.integers(0, 2**32), level=st.integers(0, 2))
def test_any_rows_give_what_the_reference_gives(dtype: torch.dtype, seed: int, level: int) -> None:
    kernel, levels = native_low_rank(), native_rows()
    if kernel is None or levels is None:
        pytest.skip(native_problem())
    case = Case(seed, dtype)
    levels.use_level(level)  # the processor's best, if it lacks this one
    try:
        found = case.run(kernel)
    finally:
        levels.use_level(2)
    exact = add_low_rank(case.y_TO.double(), case.x_TI.double(), case.updates())
    sums = add_low_rank(case.y_TO.double().abs(), case.x_TI.double().abs(), case.updates(magnitudes=True))
    # Sums of I and of R terms and one more, in float32, and one rounding to the type.
    u, u32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    terms = case.inputs + max(member.rank for member in case.members) + 2
    assert bool(((found.double() - exact).abs() <= u * exact.abs() * 1.01 + 2 * terms * u32 * sums).all())
    for row, owner in enumerate(case.owners):
        if owner is None:
            assert torch.equal(found[row], case.y_TO[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.usefixtures("three_threads")
def test_a_row_does_not_depend_on_the_batch(kernel: NativeLowRank, dtype: torch.dtype, seed: int) -> None:
    """To the bit: alone, with others in its block, with threads, from a strided x."""
    case = Case(seed, dtype)
    whole = case.run(kernel)
    for row, owner in enumerate(case.owners):
        if owner is not None:
            assert torch.equal(case.run(kernel, rows=[row])[row], whole[row])
    padded = torch.full((case.rows, 3 * case.inputs), float("nan"), dtype=dtype)
    padded[:, case.inputs : 2 * case.inputs] = case.x_TI
    assert torch.equal(case.run(kernel, x_TI=padded[:, case.inputs : 2 * case.inputs]), whole)
    assert torch.equal(case.run(kernel, x_TI=case.x_TI.t().contiguous().t()), whole)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64, "meta"], ids=str)
def test_defaults_of_pytorch_change_nothing(kernel: NativeLowRank, default: torch.dtype | str) -> None:
    case = Case(7, torch.float32)
    wanted = case.run(kernel)
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        found = case.run(kernel)
        room = kernel.plan(case.members).room
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(found, wanted)
    assert (room.dtype, room.device.type) == (torch.float32, "cpu")


def test_rows_of_other_types_are_those_of_its_own(kernel: NativeLowRank) -> None:
    """As autocast makes them: rounded to the type of the result."""
    case = Case(7, torch.float32)
    call = kernel.bind(kernel.plan(case.members), case.pieces)
    y_TO, x_TI = case.y_TO.bfloat16(), case.x_TI.bfloat16()
    wanted = y_TO.float()
    call(wanted, x_TI.float())
    found = y_TO.clone()
    call(found, x_TI)
    assert torch.equal(found, wanted.bfloat16())
    turned = y_TO.float().t().contiguous().t()
    call(turned, x_TI.float())
    assert torch.equal(turned, wanted)


def test_all_maps_share_one_room(kernel: NativeLowRank) -> None:
    plan = kernel.plan([RankedRows(0, 2, [0])])
    pieces = [RankPiece(torch.zeros(2, inputs), torch.zeros(2, 8), 0) for inputs in (8, 64, 16, 64)]
    rooms = []
    for piece in pieces:
        kernel.bind(plan, [piece])
        rooms.append(plan.room.data_ptr())
    assert rooms[1] == rooms[2] == rooms[3]
    assert len(plan.room) == MOST_ROWS * (64 + 2 + 8)


def test_blocks_hold_all_rows_once(kernel: NativeLowRank) -> None:
    plan = kernel.plan([RankedRows(3, 2, [4, 7, 1, 9, 0]), RankedRows(5, 8, [2])])
    assert plan.blocks.tolist() == [[0, MOST_ROWS, 3, 2], [4, 1, 3, 2], [5, 1, 5, 8]]
    assert plan.rows.tolist() == [4, 7, 1, 9, 0, 2]
    assert plan.largest_rank == 8


def test_bfloat16_is_rounded_to_the_nearest_even(kernel: NativeLowRank) -> None:
    """Every kind of number, with terms that reach ties, overflow and infinity, as PyTorch rounds
    it.
    """
    torch.manual_seed(0)
    y_TO = torch.randint(-(1 << 15), 1 << 15, (8, 8192 + 3), dtype=torch.int16).view(torch.bfloat16)
    b_SO = torch.randint(-(1 << 15), 1 << 15, (1, 8192 + 3), dtype=torch.int16).view(torch.bfloat16)
    b_SO[0, ::2] = y_TO[0, ::2] / 512  # half of the last digit of y, or near it
    one = torch.ones(8, 1, dtype=torch.bfloat16)
    expected = (y_TO.float() + b_SO.float()).bfloat16()
    found = y_TO.clone()
    piece = RankPiece(torch.ones(1, 1, dtype=torch.bfloat16), b_SO, 0)
    kernel.bind(kernel.plan([RankedRows(0, 1, list(range(8)))]), [piece])(found, one)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().any()
    assert expected.isinf().any()


def test_what_it_does_not_run_on(kernel: NativeLowRank) -> None:
    cpu = torch.device("cpu")
    assert kernel.refusal(torch.float32, cpu) == kernel.refusal(torch.bfloat16, cpu) == ""
    assert "float16" in kernel.refusal(torch.float16, cpu)
    assert "cuda" in kernel.refusal(torch.float32, torch.device("cuda"))


def test_missing_and_old_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "__file__", str(tmp_path / "native_library.py"))
    load = native_library._load.__wrapped__
    (tmp_path / "_native.cpython-27-any.so").write_bytes(b"that of another Python")
    assert "not built" in load()
    (tmp_path / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"no library")
    assert "cannot be loaded" in load()

    class Old:
        def quire_version(self) -> int:
            return VERSION - 1

    monkeypatch.setattr(ctypes, "CDLL", lambda path: Old())
    assert f"version {VERSION} is needed" in load()


def test_a_model_without_the_kernel_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(resolve_model("tiny-python"), dtype="float32")
    monkeypatch.setattr("quire.build.native_low_rank", lambda: None)
    monkeypatch.setattr("quire.build.native_problem", lambda: "there was no compiler")
    pool = make_adapters(model)
    with caplog.at_level(logging.WARNING, logger="quire.runner"):
        for _ in range(2):
            pool.load(Adapter(fingerprint="a"))
    assert [record.message for record in caplog.records] == [
        "adapters run on PyTorch's products, which take longer: there was no compiler"
    ]
