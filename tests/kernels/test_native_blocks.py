"""Products with the blocks of GGUF files, and of 8-bit floats, against their values."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.base.errors import CheckpointError
from quire.contracts.linear import BlockRows
from quire.kernels.linear.cpu_linear import EMULATED, NativeLinear, NativeMap, native_linear
from quire.kernels.native_library import native_library
from quire.weights.block_panels import KINDS, block_rows_of
from quire.weights.gguf_blocks import FLOAT8, NVFP4, SIZES, headed, heads, values_of_rows
from quire.weights.packed import unpack

best = native_linear()
pytestmark = pytest.mark.skipif(best is None, reason="the C++ library was not built")
PAIRS = 3
"""Lowest level with products of bfloat16 pairs."""
AVX2 = 1
WHOLE = tuple(kind for kind in KINDS if kind not in ("Q2_K", "Q3_K", FLOAT8))
"""Kinds that AVX2 multiplies by whole numbers, if rows are in bfloat16."""
LEVELS = (*range(0 if best is None else best.level + 1), EMULATED)


SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    FLOAT8: (),
    NVFP4: (),
}
"""Where the float16 numbers of a block stand, if not at 0 only."""


def rows_of_blocks(kind: str, rows: int, inputs: int, seed: int = 0) -> BlockRows:
    """Rows of random codes and scales, with scales of all sizes, and a zero among them."""
    numbers, size = SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows * inputs // numbers, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = generator.integers(100, 130, len(raw))
        raw[:8, 0] = range(8)
        raw[8, 0] = 200
    if kind == FLOAT8:
        raw[:, 4:][raw[:, 4:] & 0x7F == 0x7F] ^= 1  # which are no numbers
        scales = (generator.standard_normal(len(raw)) * 10.0 ** generator.uniform(-6, -2, len(raw))).astype(np.float32)
        scales[:3] = 0, 1e-30, 2.0**20
        raw[:, :4] = scales.view(np.uint8).reshape(-1, 4)
    if kind == NVFP4:
        raw[:, :4][raw[:, :4] & 0x7F == 0x7F] ^= 1
        raw[:3, :4] = [[0, 1, 7, 8], [0x80, 0x81, 0xFE, 0x7E], [2, 3, 4, 5]]
        units = generator.uniform(0.1, 10, (rows, 1)) * 10.0 ** generator.uniform(-6, -2, (rows, 1))
        return BlockRows("x", kind, headed(torch.from_numpy(raw).view(rows, -1), heads(torch.from_numpy(units))))
    for place in SCALES.get(kind, (0,)):
        scales = (generator.standard_normal(len(raw)) * 10.0 ** generator.uniform(-6, -2, len(raw))).astype(np.float16)
        scales[0] = 0
        raw[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return BlockRows("x", kind, torch.from_numpy(raw).view(rows, -1))


def values_of(parts: Sequence[BlockRows], inputs: int) -> Tensor:
    values = torch.cat([values_of_rows(part.kind, part.rows_RB) for part in parts])
    assert values.shape[1] == inputs
    return values


def kernel(level: int | None = None) -> NativeLinear:
    library = native_library()
    assert library is not None
    return NativeLinear(library, level)


def made(
    parts: Sequence[BlockRows], inputs: int, dtype: torch.dtype, bias: Tensor | None = None, level: int | None = None
) -> NativeMap:
    found = kernel(level).pack_blocks(parts, inputs, bias, dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [32, 70])
def test_panels_hold_the_values(kind: str, rows: int) -> None:
    parts = [rows_of_blocks(kind, rows, 768)]
    wanted = values_of(parts, 768)
    packed = made(parts, 768, torch.float32).weights
    assert torch.equal(unpack(packed), wanted)
    some = torch.tensor([0, rows - 1, 5, 5, 31])
    assert torch.equal(block_rows_of(packed, some), wanted[some])
    assert packed.nbytes <= -(-rows // 32) * 32 * 768 * 1.04 * SIZES[kind][1] / SIZES[kind][0]


@pytest.mark.product(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 256), (70, 1792)])
def test_products_are_those_of_the_expanded_weights(kind: str, level: int, outputs: int, inputs: int) -> None:
    """To the bit: the same weights, summed in the same order, also with a short last block."""
    parts = [rows_of_blocks(kind, outputs, inputs)]
    wide = values_of(parts, inputs)
    bias = torch.randn(outputs)
    multiply = made(parts, inputs, torch.float32, bias, level)
    expanded = kernel(level).pack(wide, bias, "float32")
    for rows in (1, 2, 3, 5, 7, 8, 9, 16, 17, 40, 300):
        x = torch.randn(rows, inputs)
        found = multiply(x)
        assert torch.equal(found, expanded(x)), rows
    exact = x.double() @ wide.double().T + bias.double()
    bound = x.double().abs() @ wide.double().abs().T * inputs**0.5 * 2e-7 + 1e-6 * bias.abs() + 1e-30
    assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_know_their_batch(kind: str) -> None:
    """Also where a block of inputs is rounded up to whole groups, and the last one is short."""
    parts = [rows_of_blocks(kind, 64, 1792)]
    multiply, wide = made(parts, 1792, torch.float32), values_of(parts, 1792)
    x = torch.randn(100, 1792)
    found = multiply(x)
    for rows in (1, 2, 6, 7, 13, 50):
        assert torch.equal(multiply(x[:rows]), found[:rows])
    assert ((found - x @ wide.T).abs() <= x.abs() @ wide.abs().T * 1e-5).all()


@pytest.mark.parametrize("level", [level for level in LEVELS if level < PAIRS])
def test_bfloat16_rows_meet_the_same_weights(level: int) -> None:
    """Without products of bfloat16 or whole numbers, those of float32 rows."""
    inputs = 1024
    parts = [rows_of_blocks("Q3_K" if level == AVX2 else "Q5_0", 64, inputs)]
    x = torch.randn(9, inputs).bfloat16()
    wanted = made(parts, inputs, torch.float32, level=level)(x.float()).bfloat16()
    multiply = made(parts, inputs, torch.bfloat16, level=level)
    assert torch.equal(multiply(x), wanted)
    assert torch.equal(multiply(x[:1]), wanted[:1])


def in_whole_numbers(x_TI: Tensor) -> Tensor:
    """Rows as the products of whole numbers see them: 16 bits by the largest of each 32 inputs."""
    groups = x_TI.float().unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True).contiguous().view(torch.int32)
    exponent = ((largest + 66048) >> 23).clamp(min=15)  # 127 * 256 + 127 is the largest number
    unit = torch.tensor(2.0).double() ** (exponent - 141)
    numbers = (groups.double() / unit).round()
    assert numbers.abs().max() <= 127 * 256 + 127
    return (numbers * unit).flatten(1)


@pytest.mark.skipif(AVX2 not in LEVELS, reason="the processor has no AVX2")
@pytest.mark.product(2)
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 256), (96, 1792)])
def test_whole_numbers_multiply_codes(kind: str, outputs: int, inputs: int) -> None:
    """Numbers of all sizes; one row, and rows in blocks of any size, have the same bits."""
    torch.manual_seed(3)
    parts = [rows_of_blocks(kind, outputs, inputs)]
    weight, bias = values_of(parts, inputs).double(), torch.randn(outputs)
    multiply = made(parts, inputs, torch.bfloat16, bias, AVX2)
    x = (torch.randn(70, inputs) * torch.randn(70, 1).exp()).bfloat16()
    x[:, 5::97] *= 300
    x[3, :64] = 0
    x[4] = x[4] * 1e-38
    x[5, 40] = 1.9921875
    found = multiply(x)
    rows = in_whole_numbers(x)
    # Half of what 1 stands for; a number shortly below a power of two goes by the next one.
    error, size = ((rows - x.double()).abs(), x.double().abs())
    most = size.unflatten(1, (-1, 32)).amax(2, keepdim=True) * (2.0**-15 + 2.0**-22)
    assert (error.unflatten(1, (-1, 32)) <= most + 2.0**-126).all()
    exact = rows @ weight.T + bias.double()
    bound = rows.abs() @ weight.abs().T * 32 * inputs**0.5 * 2.0**-24
    assert ((found.double() - exact).abs() <= bound + exact.abs() * 2.0**-8 + 1e-6 * bias.abs() + 1e-30).all()
    for first, count in ((0, 1), (69, 1), (0, 2), (3, 3), (10, 4), (0, 5), (1, 6), (0, 7), (0, 63)):
        assert torch.equal(multiply(x[first : first + count]), found[first : first + count]), (first, count)


@pytest.mark.skipif(AVX2 not in LEVELS, reason="the processor has no AVX2")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row(number: float) -> None:
    parts = [rows_of_blocks("Q4_K", 64, 512)]
    multiply = made(parts, 512, torch.bfloat16, level=AVX2)
    x = torch.randn(6, 512).bfloat16()
    wanted = multiply(x)
    x[2, 77] = number
    found = multiply(x)
    assert found[2].isnan().all()
    assert multiply(x[2:3]).isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("level", [level for level in LEVELS if level >= PAIRS])
@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K"])
def test_a_new_thread_has_memory_for_blocks_of_rows(kind: str, level: int) -> None:
    """A thread's memory is as large as its largest call needs, so sanitizers see reads behind its
    end. The product is so small that the thread computes it alone."""
    multiply = made([rows_of_blocks(kind, 32, 256)], 256, torch.bfloat16, level=level)
    x = torch.randn(5, 256).bfloat16()
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(multiply, x).result(), multiply(x))


@pytest.mark.product(2)
@pytest.mark.parametrize("level", [level for level in LEVELS if level >= PAIRS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 256), (96, 1792)])
def test_pairs_and_tiles_multiply_codes(kind: str, level: int, outputs: int, inputs: int) -> None:
    """No weight is rounded; one row, and rows in blocks of any size, have the same bits."""
    torch.manual_seed(3)
    parts = [rows_of_blocks(kind, outputs, inputs)]
    weight, bias = values_of(parts, inputs).double(), torch.randn(outputs)
    multiply = made(parts, inputs, torch.bfloat16, bias, level)
    x = (torch.randn(70, inputs) * torch.randn(70, 1).exp()).bfloat16()
    found = multiply(x)
    exact = x.double() @ weight.T + bias.double()
    # A code or a minimum times its scale is at most 32 times a weight in these formats' random
    # blocks; sums are float32 (2^-24 each), the result is rounded once to bfloat16 (2^-9).
    bound = x.double().abs() @ weight.abs().T * 32 * inputs**0.5 * 2.0**-24
    assert ((found.double() - exact).abs() <= bound + exact.abs() * 2.0**-8 + 1e-6 * bias.abs() + 1e-30).all()
    for first, rows in (
        (0, 1),
        (5, 1),
        (0, 2),
        (3, 4),
        (7, 5),
        (0, 6),
        (0, 9),
        (0, 16),
        (10, 17),
        (9, 24),
        (0, 33),
        (20, 50),
    ):
        assert torch.equal(multiply(x[first : first + rows]), found[first : first + rows]), (first, rows)


def test_tiles_of_parts_in_several_formats() -> None:
    """Tiles of another shape follow each other: formats with a scale for 32 inputs and for 16."""
    torch.manual_seed(4)
    kinds = (("Q4_K", 96), ("Q6_K", 64), ("Q5_0", 320), ("Q2_K", 41))
    parts = [rows_of_blocks(kind, rows, 512, rows) for kind, rows in kinds]
    multiply = made(parts, 512, torch.bfloat16, level=EMULATED)
    x = torch.randn(40, 512).bfloat16()
    first = 0
    for part, (_, rows) in zip(parts, kinds, strict=True):
        alone = made([part], 512, torch.bfloat16, level=EMULATED)
        for count in (1, 6, 40):
            assert torch.equal(multiply(x[:count])[:, first : first + rows], alone(x[:count]))
        first += rows


def test_parts_of_several_formats_are_one_map() -> None:
    """Also panels side by side that have different ones, and a last panel that is not full."""
    parts = [
        rows_of_blocks(kind, rows, 512, rows) for kind, rows in (("Q5_0", 96), ("Q8_0", 32), ("Q6_K", 32), ("Q4_K", 41))
    ]
    multiply = made(parts, 512, torch.float32)
    assert torch.equal(unpack(multiply.weights), values_of(parts, 512))
    some = torch.tensor([0, 95, 96, 127, 128, 160, 200])
    assert torch.equal(block_rows_of(multiply.weights, some), values_of(parts, 512)[some])
    expanded = kernel().pack(values_of(parts, 512), None, "float32")
    for rows in (1, 4, 100):
        x = torch.randn(rows, 512)
        assert torch.equal(multiply(x), expanded(x))


def test_what_is_not_kept() -> None:
    """A format without products; panels of two formats; float16."""
    four, eight = rows_of_blocks("Q4_0", 40, 64), rows_of_blocks("Q8_0", 32, 64)
    assert kernel().pack_blocks([four, eight], 64, None, torch.float32) is None
    assert kernel().pack_blocks([eight], 64, None, torch.float16) is None
    other = BlockRows("x", "Q8_1", torch.zeros(32, 40, dtype=torch.uint8))
    assert kernel().pack_blocks([other], 64, None, torch.float32) is None


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("Q8_0", 0),
        ("Q5_1", 2),
        ("Q3_K", 108),
        ("Q4_K", 2),
        ("Q6_K", 208),
        ("MXFP4", 0),
        (FLOAT8, 2),
        (NVFP4, 2),
        (NVFP4, 6),
    ],
)
def test_scales_that_are_no_numbers_are_refused(kind: str, place: int) -> None:
    part = rows_of_blocks(kind, 32, 256)
    bad = {"MXFP4": [253, 0x77], FLOAT8: [0, 0x7F], NVFP4: [0, 0x7F]}.get(kind, [0, 0x7C])
    part.rows_RB[3, place : place + 2] = torch.tensor(bad, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"x has a scale in .* that is not finite"):
        kernel().pack_blocks([part], 256, None, torch.float32)
